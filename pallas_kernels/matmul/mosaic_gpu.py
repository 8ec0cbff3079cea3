"""Hopper matmul, and the pieces of it that other kernels are made of.

One block (a streaming multiprocessor) holds three warpgroups. The producer streams
tiles of both operands into a ring of shared-memory stages with the bulk copy engine;
two consumers multiply them with wgmma into registers and store their half of the output
tile. The grid is persistent: a block walks over output tiles, and while the consumers
store one tile the producer has already filled the ring for the next.

A kernel that communicates (all-gather matmul, matmul reduce-scatter) reuses

* `Tiles`: shapes, shared memory, and the views of operands and stages;
* `load_tile` and `multiply_tile`: one output tile of the producer and of a consumer;
  both carry the stage of the ring, so tiles follow each other without a bubble;
* `Columns`: which of several weights a column tile belongs to;
* `store_tile`: registers to any destination, through a small ring of its own;
* `run_tiles`: the flat loop over tiles with an order of the caller's choosing, where
  the caller may wait before the loads of a tile and signal after its store.

`matmul` at the end of this file is the shortest use of them; the kernels of
`pallas_kernels.collective_matmul` are the others. Three things are the caller's:
`store_tile` returns before its copies have arrived, so a wait for them goes before a
signal to whoever reads them; both blocks of a cluster must walk over the same number of
tiles and stages; and `for_each_tile` must give the producer and both consumers the same
tiles in the same order, or the ring deadlocks.

The division of labor is that of CUTLASS 3's "warp-specialized persistent cooperative"
kernel; unlike it the output goes through a ring of narrow buffers, which leaves the
shared memory to the operands, and the tiles go in `snake_order`.

Axis letters: M rows, K contraction, N columns.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxlib.mlir.dialects import nvvm

from pallas_kernels.dispatch import Unsupported
from pallas_kernels.matmul.config import CONSUMERS, MatmulConfig, Problem
from pallas_kernels.mosaic import (
    DeviceSpec,
    check_smem,
    smem_bytes,
    smem_transforms,
    snake_order,
)
from pallas_kernels.mosaic.aliases import Ref, Scalar
from pallas_kernels.mosaic.pipeline import (
    drain,
    hand_over,
    launch,
    next_slot,
    run_roles,
)


# A block of 384 threads is launched with 168 registers each, 504 for three warpgroups'
# threads together: with more asked for, a consumer would wait for them forever.
REGISTERS = 40, 232
# The layout in shared memory has tiles of 8 rows of 64 elements, and the copy engine
# moves whole ones.
TILE_ROWS, TILE_COLUMNS = 8, 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
    """A problem cut by a config: shapes, scratch memory and views for kernel bodies."""

    problem: Problem
    config: MatmulConfig

    @property
    def counts(self) -> tuple[int, int]:
        """Output tiles along m and n, rounded up to whole clusters."""
        cm, cn = self.config.cluster_tiles
        return (
            pl.cdiv(self.problem.m, self.config.tile_m * cm) * cm,
            pl.cdiv(self.problem.n, self.config.tile_n * cn) * cn,
        )

    @property
    def k_tiles(self) -> int:
        """Pipeline stages that one output tile consumes."""
        return pl.cdiv(self.problem.k, self.config.tile_k)

    @property
    def store_columns(self) -> int:
        """Columns of one store buffer: 128 bytes."""
        return 128 // self.problem.out_dtype.itemsize

    @property
    def _x_shape(self) -> tuple[int, int]:
        m, k = self.config.tile_m, self.config.tile_k
        return (k, m) if self.problem.lhs_transposed else (m, k)

    @property
    def _w_shape(self) -> tuple[int, int]:
        k, n = self.config.tile_k, self.config.tile_n
        return (n, k) if self.problem.rhs_transposed else (k, n)

    @property
    def _ring(self) -> dict[str, tuple[tuple[int, int], jnp.dtype]]:
        """Shapes and types of the operands of one stage."""
        p = self.problem
        return {
            "x_smem": (self._x_shape, p.dtype),
            "w_smem": (self._w_shape, p.rhs_dtype or p.dtype),
        }

    @property
    def _store_shape(self) -> tuple[int, int, int, int]:
        return (
            CONSUMERS,
            self.config.store_slots,
            self.config.block[0],
            self.store_columns,
        )

    @property
    def smem_bytes(self) -> int:
        """Shared memory of one block, barriers included."""
        c, p = self.config, self.problem
        ring = sum(smem_bytes(shape, dtype) for shape, dtype in self._ring.values())
        stores = smem_bytes(self._store_shape, p.out_dtype)
        return c.stages * ring + stores + 1024

    def scratch_types(self) -> dict[str, Any]:
        """Scratch of one block: the ring, its barriers and the store buffers."""
        c, p = self.config, self.problem
        if c.cluster == "none":
            empty = plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=c.stages)
        else:
            # A stage is written by both blocks, so both must have consumed it.
            empty = plgpu.ClusterBarrier(
                collective_axes=("cluster",),
                num_arrivals=CONSUMERS,
                num_barriers=c.stages,
            )
        ring = {
            name: plgpu.SMEM(
                (c.stages, *shape), dtype, transforms=smem_transforms(shape[1], dtype)
            )
            for name, (shape, dtype) in self._ring.items()
        }
        return ring | {
            "out_smem": plgpu.SMEM(
                self._store_shape,
                p.out_dtype,
                transforms=smem_transforms(self.store_columns, p.out_dtype),
            ),
            "full": plgpu.Barrier(num_arrivals=2, num_barriers=c.stages),
            "empty": empty,
        }

    def x_view(self, x: Ref, m: Scalar, k: Scalar) -> Ref:
        """Tile (m, k) of the left operand in global memory."""
        rows = pl.ds(m * self.config.tile_m, self.config.tile_m)
        depth = pl.ds(k * self.config.tile_k, self.config.tile_k)
        return x.at[depth, rows] if self.problem.lhs_transposed else x.at[rows, depth]

    def w_view(self, w: Ref, k: Scalar, n: Scalar) -> Ref:
        """Tile (k, n) of the right operand in global memory."""
        depth = pl.ds(k * self.config.tile_k, self.config.tile_k)
        columns = pl.ds(n * self.config.tile_n, self.config.tile_n)
        if self.problem.rhs_transposed:
            return w.at[columns, depth]
        return w.at[depth, columns]

    def operands(
        self, scratch: Mapping[str, Ref], slot: Scalar, consumer: Scalar
    ) -> tuple[Ref, Ref]:
        """The parts of a stage that one consumer multiplies, as [m,k] and [k,n]."""
        block_m, block_n = self.config.block
        x, w = scratch["x_smem"].at[slot], scratch["w_smem"].at[slot]
        if self.config.split == "m":
            rows = pl.ds(consumer * block_m, block_m)
            x = x.at[:, rows] if self.problem.lhs_transposed else x.at[rows]
        else:
            columns = pl.ds(consumer * block_n, block_n)
            w = w.at[columns] if self.problem.rhs_transposed else w.at[:, columns]
        if self.problem.lhs_transposed:
            x = x.transpose((1, 0))  # [m,k]
        if self.problem.rhs_transposed:
            w = w.transpose((1, 0))  # [k,n]
        return x, w

    def out_view(
        self,
        out: Ref,
        m: Scalar,
        n: Scalar,
        consumer: Scalar,
        chunk: int,
        *,
        turned: bool = False,
    ) -> Ref:
        """Chunk of 128-byte columns of one consumer's part of output tile (m, n); of a
        `turned` output it is the transpose.
        """
        block_m, block_n = self.config.block
        row, column = m * self.config.tile_m, n * self.config.tile_n
        if self.config.split == "m":
            row = row + consumer * block_m
        else:
            column = column + consumer * block_n
        column = column + chunk * self.store_columns
        part = pl.ds(row, block_m), pl.ds(column, self.store_columns)
        return out.at[part[::-1] if turned else part]


EARLY_STAGES = 8
"""Stages of a tile that take as long as its predecessor needs to reach memory."""


@plgpu.inline_mgpu()
def wgmma_fence(_: Any) -> None:
    """Lets the tensor cores read and write the registers of the sums."""
    nvvm.wgmma_fence_aligned()


def load_tile(
    tiles: Tiles,
    x: Ref,
    w: Ref,
    scratch: Mapping[str, Ref],
    m: Scalar,
    n: Scalar,
    slot: Scalar,
    depth: tuple[Scalar, Scalar] | None = None,
) -> Scalar:
    """Producer: streams the operands of output tile (m, n) into the ring.

    Args:
        tiles: the cut.
        x: left operand in global memory.
        w: right operand in global memory.
        scratch: what `Tiles.scratch_types` allocated.
        m: tile index along the rows of x.
        n: tile index along the columns of w.
        slot: int32, the next stage of the ring.
        depth: the first of the tile's stages to stream, and the one after the last; all
            of them by default.

    Returns:
        The stage after the last one that was filled.
    """
    config = tiles.config
    shared = {"none": (None, None), "m": (None, "cluster"), "n": ("cluster", None)}
    x_axes, w_axes = shared[config.cluster]

    def step(k: jax.Array, slot: jax.Array) -> jax.Array:
        plgpu.barrier_wait(scratch["empty"].at[slot])
        full = scratch["full"].at[slot]
        plgpu.copy_gmem_to_smem(
            tiles.x_view(x, m, k),
            scratch["x_smem"].at[slot],
            full,
            collective_axes=x_axes,
        )
        plgpu.copy_gmem_to_smem(
            tiles.w_view(w, k, n),
            scratch["w_smem"].at[slot],
            full,
            collective_axes=w_axes,
        )
        return next_slot(slot, config.stages)

    return lax.fori_loop(*(depth or (0, tiles.k_tiles)), step, slot)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Columns:
    """Column tiles of several weights of one left operand, one weight after another.

    All weights have one config, so that a tile of any of them passes through one ring.
    """

    tiles: Sequence[Tiles]
    """The tiles of each weight."""

    @property
    def starts(self) -> list[int]:
        """The first column tile of each weight, then their number."""
        return [0, *itertools.accumulate(cut.counts[1] for cut in self.tiles)]

    @property
    def count(self) -> int:
        """Column tiles of all weights."""
        return self.starts[-1]

    def load_tile(
        self,
        x: Ref,
        ws: Sequence[Ref],
        scratch: Mapping[str, Ref],
        m: Scalar,
        n: Scalar,
        slot: Scalar,
        depth: tuple[Scalar, Scalar] | None = None,
    ) -> Scalar:
        """`load_tile` from the weight that column tile `n` belongs to."""
        starts = self.starts

        def load(i: int, slot: Scalar) -> Scalar:
            """Load the tile from weight i or an earlier one."""

            def from_this(slot: Scalar) -> Scalar:
                return load_tile(
                    self.tiles[i], x, ws[i], scratch, m, n - starts[i], slot, depth
                )

            if i == 0:
                return from_this(slot)
            earlier = functools.partial(load, i - 1)
            return lax.cond(n >= starts[i], from_this, earlier, slot)

        return load(len(self.tiles) - 1, slot)

    def for_weight(self, n: Scalar, work: Callable[[int, int], None]) -> None:
        """Calls ``work(i, start)`` for weight i, to which column tile `n` belongs."""
        for i, (start, end) in enumerate(itertools.pairwise(self.starts)):

            @pl.when((n >= start) & (n < end))
            def _(i: int = i, start: int = start) -> None:
                work(i, start)


def multiply_tile(
    tiles: Tiles,
    scratch: Mapping[str, Ref],
    consumer: Scalar,
    slot: Scalar,
    *,
    k_tiles: int | None = None,
    meanwhile: Callable[[], None] | None = None,
    pieces: Sequence[Callable[[], None]] = (),
    then: tuple[Any, Callable[[Any, Any, Any], tuple[Any, Any]]] | None = None,
):
    """Consumer: accumulates the matmuls of one output tile.

    Args:
        tiles: the cut.
        scratch: what `Tiles.scratch_types` allocated.
        consumer: int32, which of the consumers this warpgroup is.
        slot: int32, the next stage of the ring.
        k_tiles: stages that the tile consumes, where several matmuls share the sums;
            by default those of `tiles`.
        meanwhile: called once while the tensor cores have work, for what would stall
            them between two tiles: some microseconds after the last tile was stored.
        pieces: work on registers that fills the time of the first matmuls: each is
            called once, every other stage, while two matmuls are in flight.
        then: int32, how many stages follow, and where the operands lie in one of them:
            a function as `Tiles.operands`, which serves the others.

    Returns:
        The sums, fp32 [block_m, block_n], and the stage after the last one consumed.
    """
    stages = tiles.config.stages
    k_tiles = tiles.k_tiles if k_tiles is None else k_tiles
    parts = tiles.config.product_columns

    def multiply(slot: jax.Array, acc: Ref, operands: Any) -> None:
        x, w = operands(scratch, slot, consumer)
        wgmma_fence()  # pyright: ignore[reportCallIssue]  (the context is passed)
        for part in parts:
            plgpu.wgmma(acc.at[:, part], x, w.at[:, part])

    # Before there are sums: with a wait between their zeros and the first matmul ptxas
    # may give up on keeping matmuls in flight.
    plgpu.barrier_wait(scratch["full"].at[slot])

    def scoped(acc: Ref):
        multiply(slot, acc, tiles.operands)

        def step(
            operands: Any,
            _: Any,
            last: jax.Array,
            piece: Callable[[], None] | None = None,
        ) -> jax.Array:
            now = next_slot(last, stages)
            plgpu.barrier_wait(scratch["full"].at[now])
            multiply(now, acc, operands)
            if piece is not None:
                piece()
            # One stage stays in flight, the one before it has been multiplied.
            plgpu.wgmma_wait(len(parts))
            plgpu.barrier_arrive(scratch["empty"].at[last])
            return now

        step_here = functools.partial(step, tiles.operands)
        last, done = slot, 1
        for number in range(1, min(k_tiles, 2 * len(pieces))):
            piece = pieces[number // 2] if number % 2 else None
            last = step_here(number, last, piece)
            done = number + 1
        for piece in pieces[done // 2 :]:
            piece()
        early = min(k_tiles, EARLY_STAGES) if meanwhile is not None else done
        last = lax.fori_loop(done, early, step_here, last)
        if meanwhile is not None:
            meanwhile()
        last = lax.fori_loop(early, k_tiles, step_here, last)
        if then is not None:
            count, operands = then
            last = lax.fori_loop(0, count, functools.partial(step, operands), last)
        sums = acc[...]
        plgpu.barrier_arrive(scratch["empty"].at[last])
        return sums, next_slot(last, stages)

    return pl.run_scoped(
        scoped, plgpu.WGMMAAccumulatorRef(tiles.config.block, jnp.float32)
    )


def store_tile(
    tiles: Tiles,
    sums: jax.Array | Sequence[jax.Array],
    scratch: Mapping[str, Ref],
    consumer: Scalar,
    destination: Callable[[int], Ref | None],
    *,
    turned: bool = False,
) -> None:
    """Consumer: stores its part of a tile; returns before the copies have arrived.

    Args:
        tiles: the cut.
        sums: fp32 [block_m, block_n], or its columns in parts of equal width.
        scratch: what `Tiles.scratch_types` allocated.
        consumer: int32, which of the consumers this warpgroup is.
        destination: chunk number to a [block_m, 128 bytes] view of global memory, here
            or on a peer; None leaves the chunk out. Rows and columns past its array are
            dropped, but not where that is one chunk wide: jax 0.11.2 then ignores the
            column, and what lies past the end must be left out.
        turned: store the transpose of each chunk, of 64 rows of 16 bits.
    """
    slots, width = tiles.config.store_slots, tiles.store_columns
    parts = sums if isinstance(sums, Sequence) else (sums,)
    chunks_of_part = parts[0].shape[1] // width
    for chunk in range(tiles.config.block[1] // width):
        if (view := destination(chunk)) is None:
            continue
        part, column = divmod(chunk, chunks_of_part)
        values = parts[part][:, column * width : (column + 1) * width]
        buffer = scratch["out_smem"].at[consumer, chunk % slots]
        # The copy that used this buffer before has read it. Those of the last tile had
        # the time of this one's matmuls.
        plgpu.wait_smem_to_gmem(min(chunk, slots - 1), wait_read_only=True)
        values = values.astype(tiles.problem.out_dtype)
        if turned:
            buffer.transpose((1, 0))[...] = plgpu.layout_cast(
                values, plgpu.Layout.WGMMA_TRANSPOSED
            )
        else:
            buffer[...] = values
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(buffer, view)


def run_tiles(
    tiles: Tiles,
    scratch: Mapping[str, Ref],
    for_each_tile: Callable[[Callable[[Scalar, Scalar, Any], Any], Any], Any],
    load: Callable[[Scalar, Scalar, Scalar], Scalar],
    consume: Callable[[Scalar, Scalar, Any, Scalar], Any],
    *,
    spare_warps: Sequence[Callable[[], None]] = (),
    finish: Callable[[Any], None] | None = None,
    consumer_carry: Any = None,
) -> None:
    """The body of a persistent kernel: producer and consumers over the same tiles.

    Args:
        tiles: the cut.
        scratch: what `Tiles.scratch_types` allocated.
        for_each_tile: ``(body, carry) -> carry`` that calls ``body(m, n, carry)`` for
            every tile of this block, in the same order in all warpgroups.
        load: producer, ``(m, n, slot) -> slot``; usually `load_tile`, after a wait
            where the operand comes from a peer.
        consume: consumer, ``(m, n, carry, consumer) -> carry``; `multiply_tile` and
            `store_tile`. The carry is the stage of the ring, or a pair of it and
            `consumer_carry`.
        spare_warps: work for up to 3 warps beside the producer's: copies, barriers and
            semaphores only.
        finish: consumer, called with the carry after its last tile.
        consumer_carry: what else the consumers carry from tile to tile, at first.
    """
    stages, first = tiles.config.stages, jnp.int32(0)

    def produce() -> None:
        drain(scratch, for_each_tile(load, first), stages)

    def share_warps(warp: jax.Array) -> None:
        for number, work in enumerate((produce, *spare_warps)):
            pl.when(warp == number)(work)

    def producer() -> None:
        if spare_warps:
            plgpu.warp_map(share_warps)
        else:
            produce()

    def consumer(number: Scalar) -> None:
        hand_over(scratch, stages)

        def tile(m: Scalar, n: Scalar, carry: Any) -> Any:
            return consume(m, n, carry, number)

        carry = first if consumer_carry is None else (first, consumer_carry)
        carry = for_each_tile(tile, carry)
        if finish is not None:
            finish(carry)
        plgpu.wait_smem_to_gmem(0)

    run_roles(producer, consumer, consumers=CONSUMERS, registers=REGISTERS)


def tile_at(
    config: MatmulConfig, counts: tuple[int, int], index: Scalar, rank: Scalar
) -> tuple[Scalar, Scalar]:
    """An output tile by its place in `snake_order`.

    Args:
        config: clusters and the order.
        counts: output tiles along m and n, in whole clusters.
        index: int32, number of the cluster.
        rank: int32, number of the block within its cluster.

    Returns:
        Tile indices ``(m, n)``.
    """
    cm, cn = config.cluster_tiles
    clusters = (counts[0] // cm, counts[1] // cn)
    m, n = snake_order(index, clusters, config.minor, config.group)
    return (
        m * cm + (rank if config.cluster == "m" else 0),
        n * cn + (rank if config.cluster == "n" else 0),
    )


def snake_tiles(config: MatmulConfig, counts: tuple[int, int]) -> Callable[..., Any]:
    """Loop over a block's share of output tiles in `snake_order`, for `run_tiles`.

    Args:
        config: clusters and the order.
        counts: output tiles along m and n, in whole clusters.

    Returns:
        ``(body, carry) -> carry`` that calls ``body(m, n, carry)`` for each tile.
    """
    total = math.prod(counts) // math.prod(config.cluster_tiles)

    def for_each_tile(body: Callable[[Scalar, Scalar, Any], Any], carry: Any) -> Any:
        worker, workers = lax.axis_index("worker"), lax.axis_size("worker")
        rank = lax.axis_index("cluster") if config.cluster != "none" else 0
        # ceil((total - worker) / workers) tiles for this worker.
        mine = lax.div(total - 1 - worker + workers, jnp.int32(workers))

        def step(i: jax.Array, carry: Any) -> Any:
            m, n = tile_at(config, counts, i * workers + worker, rank)
            return body(m, n, carry)

        return lax.fori_loop(0, mine, step, carry)

    return for_each_tile


def grid(
    config: MatmulConfig, counts: tuple[int, int], device: DeviceSpec, op_name: str
) -> dict[str, Any]:
    """Options of `plgpu.kernel`, as `launch`, for the tiles of `snake_tiles`."""
    size = math.prod(config.cluster_tiles)
    return launch(
        math.prod(counts) // size,
        device,
        f"{op_name} with {config}",
        warpgroups=CONSUMERS + 1,
        cluster=size,
    )


def check_problem(problem: Problem) -> None:
    """Checks that the kernel can serve a problem.

    Raises:
        Unsupported: it cannot; the message says what to do.
    """
    p = problem
    if p.dtype not in (jnp.bfloat16, jnp.float16) or p.rhs_dtype is not None:
        raise Unsupported(
            f"matmul: operands of type {p.dtype.name}, the kernel takes bfloat16 or"
            " float16; cast them or use implementation='xla'"
        )
    if p.out_dtype not in (p.dtype, jnp.float32):
        raise Unsupported(
            f"matmul: out_dtype {p.out_dtype.name}, the kernel writes {p.dtype.name}"
            " or float32; use implementation='xla'"
        )
    check_sizes(problem, "matmul")


def check_sizes(problem: Problem, op_name: str) -> None:
    """Checks that whole tiles of the layout in shared memory hold the operands.

    Raises:
        Unsupported: they do not; the message says what to do.
    """
    p = problem
    if 0 in (p.m, p.n, p.k):
        raise Unsupported(
            f"{op_name}: empty product of m={p.m} n={p.n} k={p.k}; use"
            " implementation='xla'"
        )
    # Stored columns must fill whole tiles of the layout; stored rows are padded.
    line = 128 // p.dtype.itemsize
    columns = {"n": (p.n, TILE_COLUMNS)}
    columns |= {"m": (p.m, line)} if p.lhs_transposed else {"k": (p.k, line)}
    if p.rhs_transposed:
        columns["k"] = p.k, line
    for name, (size, multiple) in columns.items():
        if size % multiple:
            raise Unsupported(
                f"{op_name}: {name}={size}, the kernel needs a multiple of {multiple}"
                " there; pad it or use implementation='xla'"
            )


def check_columns(problem: Problem, config: MatmulConfig, op_name: str) -> None:
    """Checks that no part of a tile lies past the end of an array one line wide.

    jax 0.11.2 drops the column index there, and that part lands on the beginning.

    Raises:
        Unsupported: one does.
    """
    if problem.n <= TILE_COLUMNS < config.tile_n * config.cluster_tiles[1]:
        raise Unsupported(
            f"{op_name}: {problem.n} columns with tile_n={config.tile_n} and"
            f" cluster={config.cluster!r}; use tile_n=64, not cluster='n'"
        )


def pad_rows(x: jax.Array) -> jax.Array:
    """[rows,columns], filled with zeros to whole tiles of the copy engine."""
    return jnp.pad(x, ((0, -x.shape[0] % TILE_ROWS), (0, 0)))


def matmul(
    x: jax.Array,
    w: jax.Array,
    layer: jax.Array | None = None,
    *,
    config: MatmulConfig,
    device: DeviceSpec,
    out_dtype: DTypeLike,
    lhs_transposed: bool = False,
    rhs_transposed: bool = False,
) -> jax.Array:
    """Computes ``x @ w`` on a Hopper GPU with fp32 sums.

    Any number of rows is served; where a stored operand's is no multiple of 8, the
    operand is copied first.

    Args:
        x: [M,K], or [K,M] with `lhs_transposed`; bfloat16 or float16.
        w: [K,N], or [N,K] with `rhs_transposed`; the type of x. With a `layer` an axis
            of layers is before these.
        layer: int32, which of the layers, read in place.
        config: how to cut it.
        device: the Hopper GPU that the kernel is built for.
        out_dtype: type of the output: that of x, or float32.
        lhs_transposed: x is stored with K as rows.
        rhs_transposed: w is stored with N as rows.

    Returns:
        [M,N] of `out_dtype`.

    Raises:
        Unsupported: types, alignment or shared memory do not fit.
    """

    def problem_of(x: jax.Array, w: jax.Array) -> Problem:
        shape = jax.ShapeDtypeStruct(w.shape[-2:], w.dtype)
        return Problem.of(x, shape, out_dtype, lhs_transposed, rhs_transposed)

    wanted = problem_of(x, w)
    check_problem(wanted)
    x, w = pad_rows(x), pad_rows(w) if layer is None else w
    problem = problem_of(x, w)
    tiles = Tiles(problem=problem, config=config)
    check_smem(tiles.smem_bytes, device, f"matmul with {config}")
    for_each_tile = snake_tiles(config, tiles.counts)

    def body(x_ref, w_ref, *refs, **scratch):
        *numbers, out_ref = refs
        if numbers:
            w_ref = w_ref.at[numbers[0][0]]

        def consume(m, n, slot, consumer):
            sums, slot = multiply_tile(tiles, scratch, consumer, slot)
            view = functools.partial(tiles.out_view, out_ref, m, n, consumer)
            store_tile(tiles, sums, scratch, consumer, view)
            return slot

        load = functools.partial(load_tile, tiles, x_ref, w_ref, scratch)
        run_tiles(tiles, scratch, for_each_tile, load, consume)

    out = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((problem.m, problem.n), problem.out_dtype),
        scratch_types=tiles.scratch_types(),
        kernel_name="matmul",
        **grid(config, tiles.counts, device, "matmul"),
    )(x, w, *([] if layer is None else [layer.reshape(1)]))
    return out[: wanted.m, : wanted.n]
