"""Hopper matmul of 8-bit floating-point operands, with sums that are promoted.

It is the kernel of `pallas_kernels.matmul` with another consumer. The tensor cores of
Hopper align the products of 8-bit numbers to the largest before they add them, and keep
some 14 bits: over thousands of products an error of 2% builds up. So they add only 128
(one stage of the ring), and the consumer adds what they give to its own fp32 sums. Of
a wide tile it promotes one half of the columns after the other, since both do not fit
in registers; meanwhile the tensor cores have the matmuls of the other consumer, and
those of the second half as soon as half of the first has left its registers.

Scales of the columns reach shared memory while the tile is multiplied.

Axis letters: M rows, K contraction, N columns.

References:
    DeepSeek-V3 Technical Report (arXiv 2412.19437), section 3.3.2: promotion in
    intervals of 128. It scales there, too, by blocks of 128; here scales are those of
    rows, applied once to a tile, or of blocks (`BlockScales`).
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_kernels.dispatch import Unsupported
from pallas_kernels.matmul.config import CONSUMERS, MatmulConfig, Problem
from pallas_kernels.matmul.mosaic_gpu import (
    Tiles,
    check_columns,
    check_sizes,
    grid,
    load_tile,
    pad_rows,
    run_tiles,
    snake_tiles,
    store_tile,
    wgmma_fence,
)
from pallas_kernels.mosaic import DeviceSpec, check_smem, smem_bytes
from pallas_kernels.mosaic.aliases import Ref, Scalar
from pallas_kernels.mosaic.pipeline import next_slot
from pallas_kernels.scaled_matmul.config import (
    DEPTH,
    ScaledMatmulConfig,
    ScaledProblem,
    promoted_columns,
)
from pallas_kernels.scaled_matmul.quantize import FP8_DTYPES


type Sums = tuple[jax.Array, ...]
"""fp32 [block_m, block_n] in parts of some columns."""


def check_problem(problem: Problem, op_name: str = "scaled_matmul") -> None:
    """Checks that the kernel can serve a problem.

    Raises:
        Unsupported: it cannot; the message says what to do.
    """
    p = problem
    for dtype in (p.dtype, p.rhs_dtype or p.dtype):
        if dtype.name not in FP8_DTYPES:
            raise Unsupported(
                f"{op_name}: an operand of type {dtype.name}, the kernel takes"
                f" {FP8_DTYPES}; use implementation='xla'"
            )
    if p.out_dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        raise Unsupported(
            f"{op_name}: out_dtype {p.out_dtype.name}, the kernel writes bfloat16,"
            " float16 or float32; use implementation='xla'"
        )
    if not p.rhs_transposed or p.lhs_transposed:
        raise Unsupported(
            f"{op_name}: the tensor cores take 8-bit operands that are stored with K"
            " last, [M,K] and [N,K]; transpose them before they are rounded"
        )
    check_sizes(p, op_name)


def check_config(config: MatmulConfig, op_name: str) -> None:
    """Checks that a config of another op cuts a matmul of 8-bit operands.

    Raises:
        Unsupported: it does not; the message says what to do.
    """
    if config.tile_k != DEPTH or promoted_columns(config.block) is None:
        raise Unsupported(
            f"{op_name}: {config} for 8-bit operands, expected tile_k={DEPTH} and at"
            " most 128 x 256 columns of a tile"
        )


def promote_tile(
    tiles: Tiles,
    scratch: Mapping[str, Ref],
    consumer: Scalar,
    slot: Scalar,
    *,
    scale: Callable[[Sums], Sums] = lambda sums: sums,
    k_tiles: int | None = None,
    meanwhile: Callable[[], None] | None = None,
    then: tuple[Any, Callable[[Any, Any, Any], tuple[Any, Any]]] | None = None,
    in_place: bool = False,
) -> tuple[Sums, Scalar]:
    """Consumer: accumulates the matmuls of one output tile, as `multiply_tile` does.

    Args:
        tiles: the cut; a stage is as deep as the tensor cores may sum.
        scratch: what `Tiles.scratch_types` allocated.
        consumer: int32, which of the consumers this warpgroup is.
        slot: int32, the next stage of the ring.
        scale: what makes sums of products of what the operands stand for.
        k_tiles: stages that the tile consumes; by default those of `tiles`.
        meanwhile: called once between two stages, some time after the last tile.
        then: int32, how many stages follow that are added after `scale`, and where the
            operands lie in one of them: a function as `Tiles.operands`.
        in_place: the tensor cores write the sums of the second half of the columns over
            those of the first, after these were promoted, instead of beside most of
            them, meanwhile. For kernels that hold more in registers.

    Returns:
        The scaled sums, and the stage after the last one consumed.
    """
    stages = tiles.config.stages
    k_tiles = tiles.k_tiles if k_tiles is None else k_tiles
    rows = tiles.config.block[0]
    parts = promoted_columns(tiles.config.block)
    assert parts is not None  # the config was checked

    def product(x: Ref, w: Ref, start: jax.Array) -> jax.Array:
        def scoped(acc: Ref) -> None:
            wgmma_fence()  # pyright: ignore[reportCallIssue]  (the context is passed)
            plgpu.wgmma(acc, x, w)

        sums: Any = plgpu.WGMMAAccumulatorRef.init(start)
        return pl.run_state(scoped)(sums)

    def step(operands: Any, _: Any, carry: Any) -> Any:
        slot, sums = carry
        plgpu.barrier_wait(scratch["full"].at[slot])
        x, w = operands(scratch, slot, consumer)
        found, start = [], nothing
        for number, (part, total) in enumerate(zip(parts, sums, strict=True), 1):
            more = product(x, w.at[:, part], start)
            if number == len(parts):
                plgpu.barrier_arrive(scratch["empty"].at[slot])
            elif in_place:
                # Zeros that come from these sums, in whose registers they then lie.
                never = lax.broadcast(slot < 0, more.shape)
                start = jnp.where(never, more, nothing)
            found.append(total + more)
        return next_slot(slot, stages), tuple(found)

    width = parts[0].stop
    nothing = plgpu.layout_cast(
        jnp.zeros((rows, width), jnp.float32), plgpu.Layout.WGMMA
    )
    carry = slot, (nothing,) * len(parts)
    step_here = functools.partial(step, tiles.operands)
    early = min(k_tiles, 1) if meanwhile is not None else 0
    carry = lax.fori_loop(0, early, step_here, carry)
    if meanwhile is not None:
        meanwhile()
    slot, sums = lax.fori_loop(early, k_tiles, step_here, carry)
    carry = slot, scale(sums)
    if then is not None:
        count, operands = then
        carry = lax.fori_loop(0, count, functools.partial(step, operands), carry)
    slot, sums = carry
    return sums, slot


def promote_blocks(
    tiles: Tiles,
    scratch: Mapping[str, Ref],
    consumer: Scalar,
    slot: Scalar,
    scales: "StageScales",
) -> tuple[Sums, Scalar]:
    """Consumer: accumulates the matmuls of one output tile, each stage's sums scaled.

    With `StageScales.overlap` the tensor cores write the sums of a stage while those of
    the stage before, in registers of their own, are promoted.

    Args:
        tiles: the cut, whose columns are promoted together.
        scratch: what `Tiles.scratch_types` allocated.
        consumer: int32, which of the consumers this warpgroup is.
        slot: int32, the next stage of the ring.
        scales: what sums of a stage are multiplied by.

    Returns:
        The sums, and the stage after the last one consumed.
    """
    shape, overlap = tiles.config.block, scales.overlap

    def step(k: Any, carry: Any) -> Any:
        slot, sums, before, factors = carry
        plgpu.barrier_wait(scratch["full"].at[slot])
        x, w = tiles.operands(scratch, slot, consumer)

        def multiply(acc: Ref) -> Any:
            wgmma_fence()  # pyright: ignore[reportCallIssue]  (the context is passed)
            plgpu.wgmma(acc, x, w)
            # Earlier, ptxas would have the tensor cores wait for what is loaded.
            following = scales.load(k if overlap else k + 1)
            total = sums + scales.scaled(factors, before) if overlap else sums
            return acc[...], total, following

        found, sums, following = pl.run_scoped(
            multiply, plgpu.WGMMAAccumulatorRef(shape, jnp.float32)
        )
        plgpu.barrier_arrive(scratch["empty"].at[slot])
        if not overlap:
            sums, found = sums + scales.scaled(factors, found), ()
        return next_slot(slot, tiles.config.stages), sums, found, following

    sums = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
    before, factors = (), scales.load(0)
    if overlap:
        before, factors = sums, jax.tree.map(jnp.zeros_like, factors)
    carry, odd = (slot, sums, before, factors), tiles.k_tiles % 2
    carry = lax.fori_loop(0, odd, step, carry)
    # By two: otherwise what passes from a stage to the next is copied, as soon as it is
    # there, and the tensor cores wait for that as well.
    carry = lax.fori_loop(odd, tiles.k_tiles, step, carry, unroll=2)
    slot, sums, before, factors = carry
    if overlap:
        sums = sums + scales.scaled(factors, before)
    return (sums,), slot


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scales:
    """Scales of both operands as a kernel reads them: one, or one for each row."""

    tiles: Tiles
    """The cut."""
    by_row: bool
    """Each row of the left operand has a scale."""
    by_column: bool
    """Each column of the matmul has a scale."""

    def operands(self, a_scale: jax.Array, b_scale: jax.Array) -> Sums:
        """What the kernel takes: [1], or [M] in whole tiles and [N].

        Args:
            a_scale: [] or [.., m].
            b_scale: [] or [N].
        """
        if not self.by_row:
            a_scale = a_scale.reshape(1)
        else:
            missing = -a_scale.shape[-1] % self.tiles.config.tile_m
            widths = [(0, 0)] * (a_scale.ndim - 1) + [(0, missing)]
            a_scale = jnp.pad(a_scale, widths)
        return a_scale, b_scale if self.by_column else b_scale.reshape(1)

    @property
    def smem_bytes(self) -> int:
        """Shared memory of one block."""
        shape = CONSUMERS, self.tiles.config.block[1]
        return smem_bytes(shape, jnp.float32) if self.by_column else 0

    def scratch_types(self) -> dict[str, Any]:
        """Scratch of one block: the scales of each consumer's columns."""
        if not self.by_column:
            return {}
        shape = CONSUMERS, self.tiles.config.block[1]
        return {
            "scale_smem": plgpu.SMEM(shape, jnp.float32),
            "scale_full": plgpu.Barrier(num_barriers=CONSUMERS),
        }

    def load(
        self,
        a_scale: Ref,
        b_scale: Ref,
        scratch: Mapping[str, Ref],
        m: Scalar,
        n: Scalar,
        consumer: Scalar,
    ) -> Callable[[Sums], Sums]:
        """Consumer: starts to load the scales of output tile (m, n).

        Args:
            a_scale: [1] or [m] in whole tiles, in global memory.
            b_scale: [1] or [N], in global memory.
            scratch: what `scratch_types` allocated.
            m: tile index along the rows.
            n: tile index along the columns.
            consumer: int32, which of the consumers this warpgroup is.

        Returns:
            A function, to be called once, that scales the sums of the tile.
        """
        config = self.tiles.config
        (block_m, block_n), split = config.block, config.split
        row = m * config.tile_m + (consumer * block_m if split == "m" else 0)
        column = n * config.tile_n + (consumer * block_n if split == "n" else 0)
        if self.by_row:
            rows = plgpu.load(
                a_scale.at[pl.ds(row, block_m)],
                layout=plgpu.Layout.WGMMA.reduce(1),
                optimized=False,
            )
        else:
            rows = a_scale[0]
        if self.by_column:
            smem = scratch["scale_smem"].at[consumer]
            full = scratch["scale_full"].at[consumer]
            plgpu.copy_gmem_to_smem(b_scale.at[pl.ds(column, block_n)], smem, full)
        else:
            rows = rows * b_scale[0]

        def scale(sums: Sums) -> Sums:
            if self.by_column:
                plgpu.barrier_wait(full)
            found = []
            for i, part in enumerate(sums):
                factor = rows
                if self.by_row:
                    factor = lax.broadcast_in_dim(rows, part.shape, (0,))
                scaled = part * factor
                if self.by_column:
                    columns = plgpu.load(
                        smem.at[pl.ds(i * part.shape[1], part.shape[1])],
                        layout=plgpu.Layout.WGMMA.reduce(0),
                        optimized=False,
                    )
                    scaled *= lax.broadcast_in_dim(columns, part.shape, (1,))
                found.append(scaled)
            if self.by_column:
                plgpu.commit_smem()  # the copy engine may write what was read
            return tuple(found)

        return scale


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageScales:
    """Scales of the sums of one stage, in a consumer's registers."""

    load: Callable[[Scalar], Any]
    """Starts to load the scales of a stage, of the last one's successor too."""
    scaled: Callable[[Any, jax.Array], jax.Array]
    """Multiplies sums by such scales."""
    overlap: bool
    """They leave registers for sums of two stages."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockScales:
    """Scales of blocks of `DEPTH` numbers of a row, for the sums of a stage.

    They pass from global memory to registers while the tensor cores have the stage: a
    lane needs those of its rows, two of 64, and of its columns, a quarter of them, or
    one of a square.
    """

    tiles: Tiles
    """The cut."""
    square: bool
    """Blocks of the right operand have `DEPTH` rows, and one scale."""

    def operands(self, a_scale: jax.Array, b_scale: jax.Array) -> Sums:
        """What the kernel takes: [K/128+1,M] and [K/128+1,N], in whole tiles.

        The last row is loaded, and never used.

        Args:
            a_scale: [m, K/128].
            b_scale: [N, K/128].
        """
        config = self.tiles.config
        sizes = (config.tile_m, config.tile_n)
        found = []
        for scale, count, size in zip(
            (a_scale, b_scale), self.tiles.counts, sizes, strict=True
        ):
            missing = count * size - scale.shape[0]
            found.append(jnp.pad(scale, ((0, missing), (0, 1))).T)
        return tuple(found)

    def of_stages(
        self, a_scale: Ref, b_scale: Ref, m: Scalar, n: Scalar, consumer: Scalar
    ) -> StageScales:
        """Consumer: scales of the stages of output tile (m, n), for `promote_blocks`.

        Args:
            a_scale: [K/128+1,M], in global memory.
            b_scale: [K/128+1,N], in global memory.
            m: tile index along the rows.
            n: tile index along the columns.
            consumer: int32, which of the consumers this warpgroup is.
        """
        config = self.tiles.config
        (block_m, block_n), split = config.block, config.split
        row = m * config.tile_m + (consumer * block_m if split == "m" else 0)
        column = n * config.tile_n + (consumer * block_n if split == "n" else 0)

        def load(k: Scalar) -> Any:
            rows = plgpu.load(
                a_scale.at[k, pl.ds(row, block_m)],
                layout=plgpu.Layout.WGMMA.reduce(1),
                optimized=False,
            )
            if self.square:
                return rows * lax.broadcast(b_scale[k, column], rows.shape)
            columns = plgpu.load(
                b_scale.at[k, pl.ds(column, block_n)],
                layout=plgpu.Layout.WGMMA.reduce(0),
                optimized=False,
            )
            return rows, columns

        def scaled(scales: Any, sums: jax.Array) -> jax.Array:
            rows, columns = (scales, None) if self.square else scales
            if columns is not None:
                sums = sums * lax.broadcast_in_dim(columns, sums.shape, (1,))
            return sums * lax.broadcast_in_dim(rows, sums.shape, (0,))

        return StageScales(load=load, scaled=scaled, overlap=self.square)


def scaled_matmul(
    a: jax.Array,
    b: jax.Array,
    a_scale: jax.Array,
    b_scale: jax.Array,
    *,
    config: ScaledMatmulConfig,
    device: DeviceSpec,
    out_dtype: DTypeLike,
    square: bool = False,
) -> jax.Array:
    """Computes ``(a @ b.T) * scales`` on a Hopper GPU with promoted fp32 sums.

    Any number of rows is served; where it is no multiple of 8, they are copied first.

    Args:
        a: [M,K], float8_e4m3fn or float8_e5m2.
        b: [N,K], one of the two.
        a_scale: [M] or [], fp32; or [M,K/128] for each block of a row.
        b_scale: [N] or [], fp32; [N,K/128] if `a_scale` is by blocks.
        config: how to cut it.
        device: the Hopper GPU that the kernel is built for.
        out_dtype: bfloat16, float16 or float32.
        square: scales of b are the same for each 128 rows.

    Returns:
        [M,N] of `out_dtype`.

    Raises:
        Unsupported: types, alignment or shared memory do not fit.
    """
    rows = a.shape[0]
    check_problem(ScaledProblem.of(a, b, out_dtype, rhs_transposed=True))
    a = pad_rows(a)
    problem = ScaledProblem.of(a, b, out_dtype, rhs_transposed=True)
    tiles = Tiles(problem=problem, config=config)
    check_columns(problem, config, "scaled_matmul")
    scales: Any
    if a_scale.ndim == 2:
        if not config.scales_blocks:
            raise Unsupported(
                f"scaled_matmul: scales of blocks with {config}, expected at most 64 x"
                f" {DEPTH} of the tile for each of {CONSUMERS} consumers; leave out"
                " config"
            )
        scales, need = BlockScales(tiles=tiles, square=square), tiles.smem_bytes
        more = {}
    else:
        by_row, by_column = a_scale.ndim > 0, b_scale.ndim > 0
        scales = Scales(tiles=tiles, by_row=by_row, by_column=by_column)
        need = tiles.smem_bytes + scales.smem_bytes
        more = scales.scratch_types()
    check_smem(need, device, f"scaled_matmul with {config}")

    def body(a_ref, b_ref, a_scale_ref, b_scale_ref, out_ref, **scratch):
        refs = a_scale_ref, b_scale_ref

        def consume(m, n, slot, consumer):
            if isinstance(scales, BlockScales):
                factors = scales.of_stages(*refs, m, n, consumer)
                sums, slot = promote_blocks(tiles, scratch, consumer, slot, factors)
            else:
                scale = scales.load(*refs, scratch, m, n, consumer)
                sums, slot = promote_tile(tiles, scratch, consumer, slot, scale=scale)
            view = functools.partial(tiles.out_view, out_ref, m, n, consumer)
            store_tile(tiles, sums, scratch, consumer, view)
            return slot

        load = functools.partial(load_tile, tiles, a_ref, b_ref, scratch)
        run_tiles(tiles, scratch, snake_tiles(config, tiles.counts), load, consume)

    out = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((problem.m, problem.n), problem.out_dtype),
        scratch_types=tiles.scratch_types() | more,
        kernel_name="scaled_matmul",
        **grid(config, tiles.counts, device, "scaled_matmul"),
    )(a, b, *scales.operands(a_scale, b_scale))
    return out[:rows]
