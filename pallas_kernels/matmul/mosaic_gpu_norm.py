"""Hopper kernel of a linear layer, the residual behind it, and the norm of the sum.

``y = layer_norm(x @ w + bias + residual) * scale + shift``, in one launch. Few rows
give few output tiles, so the contraction is split as well: each block multiplies one
part of it for one tile, and leaves fp32 sums in global memory, which the L2 holds. The
blocks of a tile's rows wait for each other, on a counter, and share these rows: a warp
reads a whole row of all parts, adds them in their order, and normalizes it in
registers, as the kernel of `layer_norm` does. So the bits of a row depend on neither
time nor other rows.

A cluster that held a row in shared memory would read the whole weight, 590 KB a block
of 8 for 3,072 x 768, and 32 of its blocks would be all that 256 rows give. Split over
the contraction 96 blocks read 200 KB each, and 64 KB more are written and read.

Every block must run from the start: there are at most as many as multiprocessors.

Axis letters: M rows, K contraction, N columns, P parts of the contraction.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.cost_model import L2_BANDWIDTH, step_cycles
from pallas_kernels.dispatch import Unsupported
from pallas_kernels.layer_norm.mosaic_gpu import WARPS, normalize, row_layout
from pallas_kernels.matmul.config import CONSUMERS, MatmulConfig, Problem
from pallas_kernels.matmul.mosaic_gpu import (
    TILE_ROWS,
    Tiles,
    check_problem,
    load_tile,
    multiply_tile,
    run_tiles,
)
from pallas_kernels.mosaic import DeviceSpec, check_smem
from pallas_kernels.mosaic.aliases import Ref, Scalar
from pallas_kernels.mosaic.counters import (
    await_counter,
    raise_counter,
    zeros_like_no_others,
)
from pallas_kernels.mosaic.pipeline import launch


CHUNK = 64
"""Columns that are stored at a time."""

LINE = 128
"""Columns must be a multiple: a warp reads so many at a time."""

MOST_COLUMNS = 1024
"""Columns of a row: with more a warp's registers would spill."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class NormConfig(MatmulConfig):
    """Tiling of a matmul whose rows are normalized."""

    parts: int = 1
    """Parts of the contraction, each of another block."""


_TILES = (
    NormConfig(tile_n=256, stages=4, store_slots=1),
    NormConfig(tile_n=192, stages=5, store_slots=1),
    NormConfig(tile_n=128, stages=6, store_slots=1),
    NormConfig(tile_n=64, stages=8, store_slots=1),
)


def norm_config(m: int, n: int, k: int, device: DeviceSpec) -> NormConfig | None:
    """Choose the tiling of a matmul of `m` rows; None where the kernel does not fit.

    Of tiles and parts those whose slowest block takes least: it streams operands,
    writes sums, and reads those of its rows.

    Example:
        >>> from pallas_kernels.mosaic import H200
        >>> config = norm_config(256, 768, 3072, H200)
        >>> config.tile_n, config.parts
        (128, 8)
        >>> norm_config(9984, 768, 3072, H200) is None
        True
    """
    if not m or m % TILE_ROWS or n % LINE or not LINE < n <= MOST_COLUMNS:
        return None
    best: tuple[float, NormConfig] | None = None
    for tile in _TILES:
        steps = pl.cdiv(k, tile.tile_k)
        for parts in range(1, steps + 1):
            tiles = pl.cdiv(m, tile.tile_m) * (n // tile.tile_n)
            blocks = tiles * parts
            if n % tile.tile_n or steps % parts or blocks > device.num_sms:
                continue
            edges = 2 * (tile.tile_m + tile.tile_n)
            per_k = step_cycles(tile.tile_m, tile.tile_n, edges)
            rows = WARPS * pl.cdiv(pl.cdiv(m, WARPS), blocks)
            sums = 4 * (tile.tile_m * tile.tile_n + rows * parts * n)
            cost = k / parts * per_k + sums / L2_BANDWIDTH
            if best is None or cost < best[0]:
                best = cost, dataclasses.replace(tile, parts=parts)
    return best and best[1]


def dense_norm(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array,
    layer: jax.Array | None = None,
    *,
    residual: jax.Array,
    scale: jax.Array,
    shift: jax.Array | None,
    eps: float,
    config: NormConfig,
    device: DeviceSpec,
) -> jax.Array:
    """Computes ``layer_norm(x @ w + bias + residual)`` on a Hopper GPU.

    Args:
        x: [M,K]; bfloat16 or float16, M a multiple of 8.
        w: [K,N], or [L,K,N] with a `layer`, of the type of x; N a multiple of
            `config.tile_n` and of `LINE`, at most `MOST_COLUMNS`.
        bias: [N], or [L,N], of the type of x.
        layer: int32, which of the layers.
        residual: [M,N] of the type of x.
        scale: [N], of any floating type.
        shift: [N], of any floating type; None adds nothing.
        eps: added to the variance.
        config: how to cut it; `norm_config` chooses.
        device: the Hopper GPU that the kernel is built for.

    Returns:
        [M,N] of the type of x.

    Raises:
        Unsupported: types, alignment or shared memory do not fit, or not all blocks run
            at once.
    """
    shape = jax.ShapeDtypeStruct(w.shape[-2:], w.dtype)
    problem = Problem.of(x, shape, x.dtype)
    check_problem(problem)
    m, n = problem.m, problem.n
    tiles = Tiles(problem=problem, config=config)
    cm, cn = tiles.counts
    group = cn * config.parts  # blocks that share a tile's rows
    blocks = cm * group
    if m % TILE_ROWS or n % LINE or n % config.tile_n or not LINE < n <= MOST_COLUMNS:
        raise Unsupported(
            f"dense with a norm: m={m} n={n}, the kernel needs multiples of {TILE_ROWS}"
            f" and {math.lcm(LINE, config.tile_n)}, n at most {MOST_COLUMNS}; use"
            " implementation='xla'"
        )
    if config.split != "m" or config.cluster != "none" or tiles.k_tiles % config.parts:
        raise Unsupported(
            f"dense with a norm: {config}, expected split='m', no cluster, and parts"
            f" that divide the {tiles.k_tiles} stages of k={problem.k}"
        )
    if blocks > device.num_sms:
        raise Unsupported(
            f"dense with a norm: {blocks} blocks of {config} wait for each other, and"
            f" {device.name} runs {device.num_sms} at a time; use wider tiles or fewer"
            " parts"
        )
    check_smem(tiles.smem_bytes, device, f"dense with a norm, with {config}")
    steps = tiles.k_tiles // config.parts
    width, layout = row_layout(n, jnp.dtype(jnp.float32))
    chunks = config.tile_n // CHUNK
    vectors = [v for v in (scale, shift) if v is not None]

    def body(x_ref, w_ref, bias_ref, residual_ref, *refs, **scratch):
        *refs, counters, out_ref, parts_ref = refs
        if layer is not None:
            number = refs.pop()[0]
            w_ref, bias_ref = w_ref.at[number], bias_ref.at[number]
        worker = lax.axis_index("worker")
        column, part = lax.rem(worker, cn), lax.rem(lax.div(worker, cn), config.parts)
        tile, place = lax.div(worker, group), lax.rem(worker, group)
        counter = counters.at[pl.ds(tile, 1)]

        def only(body: Any, carry: Any) -> Any:
            return body(tile, column, carry)

        def load(m: Scalar, n: Scalar, slot: Scalar) -> Scalar:
            depth = part * steps, (part + 1) * steps
            return load_tile(tiles, x_ref, w_ref, scratch, m, n, slot, depth)

        def consume(_: Scalar, n: Scalar, slot: Scalar, consumer: Scalar) -> Scalar:
            sums, slot = multiply_tile(tiles, scratch, consumer, slot, k_tiles=steps)
            first = tile * config.tile_m + consumer * config.block[0]
            there = parts_ref.at[part, pl.ds(first, config.block[0])]
            for chunk in range(chunks):
                at = n * config.tile_n + chunk * CHUNK
                line, at = lax.div(at, width), lax.rem(at, width)
                there.at[:, line, pl.ds(at, CHUNK)][...] = sums[
                    :, chunk * CHUNK : (chunk + 1) * CHUNK
                ]
            raise_counter(counter)  # pyright: ignore[reportCallIssue]
            share = consumer * group + place
            rows = jnp.minimum(m - tile * config.tile_m, config.tile_m)
            dealt = lax.div(lax.div(rows, WARPS) - 1 - share + others, others)
            pl.when(dealt > 0)(lambda: finish(share, dealt))
            return slot

        others = CONSUMERS * group

        def finish(share: Scalar, dealt: Scalar) -> None:
            """Normalizes this warpgroup's share of the rows of the tile."""

            def vector(ref: Ref) -> jax.Array:
                return plgpu.load(ref, layout=layout.reduce(0), optimized=False)

            added, *affine = (vector(ref) for ref in (bias_ref, *refs))
            await_counter(counter, others)

            def four_rows(i: Scalar, _: None) -> None:
                first = tile * config.tile_m + (share + i * others) * WARPS
                span = pl.ds(first, WARPS)

                def rows(ref: Ref) -> jax.Array:
                    return plgpu.load(ref.at[span], layout=layout, optimized=False)

                before = rows(residual_ref)
                total = rows(parts_ref.at[0])
                for p in range(1, config.parts):
                    total = total + rows(parts_ref.at[p])
                y = normalize([total, before, added], affine, eps, layout)
                out_ref[span] = y.astype(x.dtype)

            lax.fori_loop(0, dealt, four_rows, None)

        run_tiles(tiles, scratch, only, load, consume)

    def lines(a: jax.Array) -> jax.Array:
        return a.reshape(*a.shape[:-1], n // width, width)

    counters = zeros_like_no_others(cm, scale[0], scale)
    padded = config.parts, cm * config.tile_m, n // width, width
    scratch = tiles.scratch_types()
    del scratch["out_smem"]
    y, _ = plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct((m, n // width, width), x.dtype),
            jax.ShapeDtypeStruct(padded, jnp.float32),
        ],
        scratch_types=scratch,
        kernel_name="dense_norm",
        # Blocks wait for each other where they read what others have written.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        **launch(
            blocks, device, f"dense with {config}", warpgroups=CONSUMERS + 1, cluster=1
        ),
    )(
        x,
        w,
        *(lines(a) for a in (bias, residual, *vectors)),
        *([] if layer is None else [layer.reshape(1)]),
        jax.new_ref(counters),
    )
    return y.reshape(m, n)
