"""Hopper kernel of linear layers: several weights of one input, bias and activation.

Behind a short matmul the activation costs as much as the matmul, and it needs other
units of a multiprocessor. So a consumer keeps the sums of a tile, with their bias and
rounded, in registers, starts the matmuls of its next tile, and while the tensor cores
have those it computes the activation of the kept tile, one chunk of columns every other
stage, and stores it.

Weights of all layers of a model may be one array, in which the layer is a coordinate of
the copies: nothing is cut out of it.

Axis letters: L layers, M rows, K contraction, N columns.
"""

import functools
import math
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
from pallas_kernels.matmul.mosaic_gpu import (
    CONSUMERS,
    TILE_ROWS,
    Columns,
    Tiles,
    check_problem,
    grid,
    multiply_tile,
    run_tiles,
    snake_tiles,
)
from pallas_kernels.mosaic import DeviceSpec, check_smem
from pallas_kernels.mosaic.aliases import Scalar


CHUNK = 64
"""Columns of a chunk, 128 bytes."""

MOST_COLUMNS = 256 * CHUNK
"""Columns of a weight: the copy engine moves a bias in at most 256 lines of a chunk."""


def dense_config(m: int, widths: Sequence[int], device: DeviceSpec) -> MatmulConfig:
    """Choose the tiling of a matmul of `m` rows with weights of these widths.

    Tiles are wide, since a wide one reads each operand less often. Few of them, which
    would leave multiprocessors idle, are cut for as long as all still run at once.

    Raises:
        Unsupported: a width is no multiple of 64.
    """
    common = math.gcd(*widths)
    stages = {n: s for n, s in {192: 4, 128: 5, 64: 7}.items() if common % n == 0}
    if not stages:
        raise Unsupported(
            f"dense: weights of {list(widths)} columns, the kernel needs multiples of"
            f" {CHUNK}; pad them or use implementation='xla'"
        )
    rows, columns = pl.cdiv(m, 128), sum(widths)
    at_once = [n for n in stages if rows * columns // n <= device.num_sms]
    tile_n = min(at_once, default=max(stages))
    return MatmulConfig(
        tile_n=tile_n,
        stages=stages[tile_n],
        store_slots=tile_n // CHUNK,
        cluster="none" if rows % 2 else "m",
    )


def dense(
    x: jax.Array,
    ws: Sequence[jax.Array],
    biases: Sequence[jax.Array],
    layer: jax.Array | None = None,
    *,
    activation: str | None,
    config: MatmulConfig,
    device: DeviceSpec,
) -> tuple[jax.Array, ...]:
    """Computes ``activation(x @ w + bias)`` for each weight on a Hopper GPU.

    Args:
        x: [M,K]; bfloat16 or float16, M a multiple of 8.
        ws: weights [K,N] each, or [L,K,N] with a `layer`, of the type of x; N multiples
            of `config.tile_n`, at most `MOST_COLUMNS`.
        biases: [N] each, or [L,N], of the type of x.
        layer: int32, which of the layers.
        activation: a name in `ACTIVATIONS`, or None.
        config: how to cut it.
        device: the Hopper GPU that the kernel is built for.

    Returns:
        [M,N] each, of the type of x.

    Raises:
        Unsupported: types, alignment or shared memory do not fit.
    """
    shapes = [jax.ShapeDtypeStruct(w.shape[-2:], w.dtype) for w in ws]
    problems = [Problem.of(x, shape, x.dtype) for shape in shapes]
    for problem in problems:
        check_problem(problem)
        if problem.m % TILE_ROWS or problem.n % config.tile_n:
            raise Unsupported(
                f"dense: m={problem.m} n={problem.n}, the kernel needs multiples of"
                f" {TILE_ROWS} and {config.tile_n}; use implementation='xla'"
            )
        if problem.n > MOST_COLUMNS:
            raise Unsupported(
                f"dense: n={problem.n}, the kernel takes at most {MOST_COLUMNS} columns"
                " of a weight; cut it or use implementation='xla'"
            )
    tiles = [Tiles(problem=problem, config=config) for problem in problems]
    cut, columns = tiles[0], Columns(tiles=tiles)
    counts = cut.counts[0], columns.count
    if config.split != "m" or config.cluster == "n":
        raise Unsupported(
            f"dense: {config}, expected split='m' and clusters along m or none"
        )
    chunks = config.tile_n // CHUNK
    lines = sum(problem.n for problem in problems) // CHUNK
    size = cut.smem_bytes + lines * CHUNK * x.dtype.itemsize
    check_smem(size, device, f"dense with {config}")
    act = (lambda y: y) if activation is None else KERNEL_ACTIVATIONS[activation]

    def body(x_ref, *refs, bias_smem, bias_full, **scratch):
        w_refs, bias_refs = refs[: len(ws)], refs[len(ws) : 2 * len(ws)]
        out_refs = refs[-len(ws) :]
        if layer is not None:
            number = refs[2 * len(ws)][0]
            w_refs, bias_refs = (
                [ref.at[number] for ref in stacks] for stacks in (w_refs, bias_refs)
            )

        def load(m: Scalar, n: Scalar, slot: Scalar) -> Scalar:
            return columns.load_tile(x_ref, w_refs, scratch, m, n, slot)

        def finish(kept: Any, consumer: Scalar, chunk: int) -> None:
            """Activates and stores a chunk of the tile that was kept, if there is."""
            values, m, n = kept
            y = act(values[chunk].astype(jnp.float32)).astype(x.dtype)
            buffer = scratch["out_smem"].at[consumer, chunk]

            @pl.when(m >= 0)
            def _store():
                # The copy that used this buffer before has read it.
                plgpu.wait_smem_to_gmem(chunks - 1, wait_read_only=True)
                buffer[...] = y
                plgpu.commit_smem()

                def copy(i: int, start: int) -> None:
                    out, column = out_refs[i], n - start
                    view = tiles[i].out_view(out, m, column, consumer, chunk)
                    plgpu.copy_smem_to_gmem(buffer, view)

                columns.for_weight(n, copy)

        def consume(m: Scalar, n: Scalar, carry: Any, consumer: Scalar) -> Any:
            slot, kept = carry
            pieces = [
                functools.partial(finish, kept, consumer, chunk)
                for chunk in range(chunks)
            ]
            sums, slot = multiply_tile(cut, scratch, consumer, slot, pieces=pieces)
            values = []
            for chunk in range(chunks):
                bias = plgpu.load(
                    bias_smem.at[n * chunks + chunk],
                    layout=plgpu.Layout.WGMMA.reduce(0),
                    optimized=False,
                )
                part = sums[:, chunk * CHUNK : (chunk + 1) * CHUNK]
                wide = lax.broadcast_in_dim(bias.astype(jnp.float32), part.shape, (1,))
                values.append((part + wide).astype(x.dtype))
            return slot, (tuple(values), m, n)

        def last(carry: Any) -> None:
            _, kept = carry
            for chunk in range(chunks):
                finish(kept, lax.axis_index("warpgroup"), chunk)

        @pl.when(lax.axis_index("warpgroup") == CONSUMERS)
        def _biases():
            for i, bias_ref in enumerate(bias_refs):
                first = columns.starts[i] * chunks
                rows = pl.ds(first, problems[i].n // CHUNK)
                plgpu.copy_gmem_to_smem(bias_ref, bias_smem.at[rows], bias_full)

        @pl.when(lax.axis_index("warpgroup") < CONSUMERS)
        def _wait():
            plgpu.barrier_wait(bias_full)

        nothing = plgpu.layout_cast(
            jnp.zeros((config.block[0], CHUNK), x.dtype), plgpu.Layout.WGMMA
        )
        kept = (nothing,) * chunks, jnp.int32(-1), jnp.int32(0)
        run_tiles(
            cut,
            scratch,
            snake_tiles(config, counts),
            load,
            consume,
            finish=last,
            consumer_carry=kept,
        )

    ys = plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct((p.m, p.n), x.dtype) for p in problems],
        scratch_types=cut.scratch_types()
        | {
            "bias_smem": plgpu.SMEM((lines, CHUNK), x.dtype),
            "bias_full": plgpu.Barrier(num_arrivals=len(ws)),
        },
        kernel_name="dense",
        **grid(config, counts, device, "dense"),
    )(
        x,
        *ws,
        *(b.reshape(*b.shape[:-1], -1, CHUNK) for b in biases),  # [..,N/CHUNK,CHUNK]
        *([] if layer is None else [layer.reshape(1)]),
    )
    return tuple(ys)
