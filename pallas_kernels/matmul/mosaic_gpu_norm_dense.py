"""Hopper kernel of linear layers behind a layer norm, for few rows.

A launch takes longer than the norm of few rows, and each block of a matmul reads whole
rows if their columns are contracted. So a block normalizes the rows that it multiplies,
while the columns of the weight that it needs are on their way. All of both lie in
shared memory: there is no ring, and no warp that feeds one.

Axis letters: M rows, K contraction, N columns.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch import Unsupported
from pallas_kernels.matmul.activations import KERNEL_ACTIVATIONS
from pallas_kernels.matmul.config import MatmulConfig, Problem
from pallas_kernels.matmul.mosaic_gpu import Columns, Tiles, check_problem
from pallas_kernels.mosaic import DeviceSpec, check_smem, smem_bytes, smem_transforms


TILE = 64
"""Rows and columns of the tile of a block, and columns of a chunk of its operands."""

MOST_TILES = 2
"""Tiles for each multiprocessor. With more the norm would be repeated more often than
it is worth."""


def check(x: Any, ws: Sequence[Any], device: DeviceSpec) -> None:
    """Raise where the kernel does not serve.

    Raises:
        Unsupported: types, alignment, shared memory or the number of tiles do not fit.
    """
    for w in ws:
        check_problem(problem := Problem.of(x, w, x.dtype))
        if problem.m % 8 or problem.k % TILE or problem.n % TILE:
            raise Unsupported(
                f"norm_dense: m={problem.m} k={problem.k} n={problem.n}, the kernel"
                f" needs multiples of 8, {TILE} and {TILE}; use implementation='xla'"
            )
    m, k = x.shape
    tiles = pl.cdiv(m, TILE) * sum(w.shape[1] for w in ws) // TILE
    if tiles > MOST_TILES * device.num_sms:
        raise Unsupported(
            f"norm_dense: {tiles} tiles on {device.num_sms} multiprocessors, the kernel"
            f" takes {MOST_TILES} each, since all repeat the norm; use layer_norm and"
            " dense"
        )
    # Rows, columns, the result; vectors and barriers.
    size = smem_bytes((2 * k + TILE, TILE), x.dtype) + smem_bytes((3, k), x.dtype)
    check_smem(size + 1024, device, f"norm_dense of k={k}")


def norm_dense(
    x: jax.Array,
    scale: jax.Array,
    shift: jax.Array,
    ws: Sequence[jax.Array],
    biases: Sequence[jax.Array],
    *,
    eps: float,
    activation: str | None,
    device: DeviceSpec,
) -> tuple[jax.Array, ...]:
    """Computes ``y = norm(x)`` and ``activation(y @ w + bias)`` on a Hopper GPU.

    Args:
        x: [M,K]; bfloat16 or float16.
        scale: [K], of the type of x.
        shift: [K], of the type of x.
        ws: weights [K,N] each, of the type of x.
        biases: [N] each, of the type of x.
        eps: added to the variance.
        activation: a name in `ACTIVATIONS`, or None.
        device: the Hopper GPU that the kernel is built for.

    Returns:
        y [M,K], then [M,N] each; all of the type of x.

    Raises:
        Unsupported: as `check`.
    """
    check(x, ws, device)
    m, k = x.shape
    chunks = k // TILE
    cut = MatmulConfig(tile_n=TILE)  # of columns; its rows do not matter here
    columns = Columns(
        tiles=[Tiles(problem=Problem.of(x, w, x.dtype), config=cut) for w in ws]
    )
    act = (lambda y: y) if activation is None else KERNEL_ACTIVATIONS[activation]

    def body(
        x_ref, *refs, x_smem, w_smem, out_smem, vectors, bias_smem, x_full, w_full
    ):
        vector_refs, refs = refs[:2], refs[2:]
        w_refs, bias_refs = refs[: len(ws)], refs[len(ws) : 2 * len(ws)]
        y_ref, *out_refs = refs[2 * len(ws) :]
        n = lax.axis_index("n")
        rows = pl.ds(lax.axis_index("m") * TILE, TILE)

        def lines(chunk: Any) -> Any:
            return pl.ds(chunk * TILE, TILE)

        for chunk in range(chunks):
            source = x_ref.at[rows, lines(chunk)]
            plgpu.copy_gmem_to_smem(source, x_smem.at[chunk], x_full)
        for i, ref in enumerate(vector_refs):
            plgpu.copy_gmem_to_smem(ref, vectors.at[i], x_full)

        def load(i: int, start: int) -> None:
            for chunk in range(chunks):
                source = w_refs[i].at[lines(chunk), lines(n - start)]
                plgpu.copy_gmem_to_smem(source, w_smem.at[chunk], w_full)
            source = bias_refs[i].at[pl.ds(n - start, 1)]
            plgpu.copy_gmem_to_smem(source, bias_smem, w_full)

        columns.for_weight(n, load)
        plgpu.barrier_wait(x_full)
        _normalize(x_smem, vectors, chunks, eps)
        plgpu.commit_smem()

        @pl.when(n == 0)
        def _store_rows():
            for chunk in range(chunks):
                target = y_ref.at[rows, lines(chunk)]
                plgpu.copy_smem_to_gmem(x_smem.at[chunk], target)

        plgpu.barrier_wait(w_full)

        def product(acc: Any) -> Any:
            for chunk in range(chunks):
                plgpu.wgmma(acc, x_smem.at[chunk], w_smem.at[chunk])
            plgpu.wgmma_wait(0)
            return acc[...]

        sums = pl.run_scoped(
            product, plgpu.WGMMAAccumulatorRef((TILE, TILE), jnp.float32)
        )
        bias = _wide(_vector(bias_smem.at[0]), 1)
        # Rounded first, as by a matmul whose activation follows.
        sums = (sums + bias).astype(x.dtype).astype(jnp.float32)
        out_smem[...] = act(sums).astype(x.dtype)
        plgpu.commit_smem()

        def store(i: int, start: int) -> None:
            plgpu.copy_smem_to_gmem(out_smem, out_refs[i].at[rows, lines(n - start)])

        columns.for_weight(n, store)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def tiled(*shape: int) -> Any:
        return plgpu.SMEM(shape, x.dtype, transforms=smem_transforms(TILE, x.dtype))

    shape_of = functools.partial(jax.ShapeDtypeStruct, dtype=x.dtype)
    found = plgpu.kernel(
        body,
        out_type=[shape_of((m, k)), *(shape_of((m, w.shape[1])) for w in ws)],
        grid=(pl.cdiv(m, TILE), columns.count),
        grid_names=("m", "n"),
        scratch_types={
            "x_smem": tiled(chunks, TILE, TILE),
            "w_smem": tiled(chunks, TILE, TILE),
            "out_smem": tiled(TILE, TILE),
            "vectors": plgpu.SMEM((2, chunks, TILE), x.dtype),
            "bias_smem": plgpu.SMEM((1, TILE), x.dtype),
            "x_full": plgpu.Barrier(num_arrivals=chunks + 2),
            "w_full": plgpu.Barrier(num_arrivals=chunks + 1),
        },
        kernel_name="norm_dense",
    )(
        x,
        scale.reshape(chunks, TILE),
        shift.reshape(chunks, TILE),
        *ws,
        *(bias.reshape(-1, TILE) for bias in biases),
    )
    return tuple(found)


def _normalize(x_smem: Any, vectors: Any, chunks: int, eps: float) -> None:
    """Normalizes rows [chunks,TILE,TILE] in their place."""

    def rows_of(chunk: Any) -> Any:
        ref = x_smem.at[chunk]
        found = plgpu.load(ref, layout=plgpu.Layout.WGMMA, optimized=False)
        return found.astype(jnp.float32)

    def mean(term: Any) -> Any:
        zeros = jnp.zeros((TILE, TILE), jnp.float32)
        zeros = plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)
        add = lambda chunk, sums: sums + term(chunk)  # noqa: E731
        return jnp.sum(lax.fori_loop(0, chunks, add, zeros), 1) * (1 / (chunks * TILE))

    middle = _wide(mean(rows_of), 0)
    spread = mean(lambda chunk: (rows_of(chunk) - middle) * (rows_of(chunk) - middle))
    factor = _wide(lax.rsqrt(spread + eps), 0)

    def write(chunk: Any, _: None) -> None:
        scale, shift = (_wide(_vector(vectors.at[i, chunk]), 1) for i in range(2))
        y = (rows_of(chunk) - middle) * factor * scale + shift
        x_smem[chunk] = y.astype(x_smem.dtype)

    lax.fori_loop(0, chunks, write, None)


def _vector(ref: Any) -> Any:
    """Of columns [TILE], in fp32."""
    layout = plgpu.Layout.WGMMA.reduce(0)
    return plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)


def _wide(vector: Any, axis: int) -> Any:
    """A vector along an axis of a tile."""
    return lax.broadcast_in_dim(vector, (TILE, TILE), (axis,))
