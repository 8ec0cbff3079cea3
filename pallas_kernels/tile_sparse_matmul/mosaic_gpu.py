"""Hopper tile-sparse matmul: gathered rows of x, packed weights, wgmma.

Weights with 2:4 sparsity in their kept rows (`TileSparse24`) are the left operand of
sparse tensor cores, see `mosaic_gpu_24`; all else is alike.

The roles and the ring are those of `pallas_kernels.matmul.mosaic_gpu`, whose building
blocks this kernel uses. An output block is one tile of features by `block_tokens`
tokens; its sums run over the rows that the tile keeps, 64 at a time::

    producer    weights: packed, a plain copy by the copy engine, shared by a cluster
                x: rows from anywhere. Feature-major x makes a kept row one run of
                memory, which cp.async gathers 16 bytes a lane (granularity 1 and 8);
                aligned groups of 64 rows are plain copies too (granularity 64)
    consumers   wgmma from shared memory; bias, activation, store

A feature-major output is ``values^T x[rows]``, a token-major one ``x[rows]^T values``:
the operands change places and nothing is transposed in memory. With 2:4 the sums are
always those of a feature-major output; a token-major one is turned in the shared memory
that stores pass through.

cp.async completes without a barrier. The producer therefore issues the gathers of `lag`
further steps before it waits for one, shows it to the tensor cores and arrives at its
barrier; consumers give a stage back one step late. Both together want ``lag + 2``
stages. The indices of a step are read while the step before is gathered. Of uneven
tiles, what a block needs before its first step (its place in the order, its count, its
first indices) is read while the blocks before it run.

Blocks are cut from a persistent grid. Blocks of one tile run side by side and share its
weights in the L2 cache; bands of `group` clusters of tokens bound what of x must stay
there. Uneven tiles come by falling count, and `order` says how bands and rounds turn
so that all multiprocessors get equally much.

Axes: M tokens, K input features, N packed output features, T tiles, P row capacity of a
tile, G columns of a tile.
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

from pallas_kernels.dispatch import Unsupported
from pallas_kernels.matmul.activations import KERNEL_ACTIVATIONS
from pallas_kernels.matmul.config import CONSUMERS
from pallas_kernels.matmul.mosaic_gpu import Tiles, store_tile
from pallas_kernels.mosaic import DeviceSpec
from pallas_kernels.mosaic.aliases import Ref, Scalar
from pallas_kernels.mosaic.pipeline import drain, hand_over, launch, next_slot
from pallas_kernels.tile_sparse_matmul import epilogue, mosaic_gpu_24
from pallas_kernels.tile_sparse_matmul.config import TILES, Problem, TileSparseConfig
from pallas_kernels.tile_sparse_matmul.format import STEP, TileSparse
from pallas_kernels.tile_sparse_matmul.format_24 import TileSparse24
from pallas_kernels.tile_sparse_matmul.gather import gather_rows, load_rows
from pallas_kernels.tile_sparse_matmul.order import RESIDENT, Turns, balanced_turns
from pallas_kernels.tile_sparse_matmul.ring import (
    GatherRing,
    check_tiles,
    multiply_steps,
    run_warpgroups,
    two_producers,
)


def check_problem(problem: Problem) -> None:
    """Checks that the kernel can serve a problem.

    Raises:
        Unsupported: it cannot; the message says what to do.
    """
    p = problem
    if p.dtype not in (jnp.bfloat16, jnp.float16):
        raise Unsupported(
            f"tile_sparse_matmul: operands of type {p.dtype.name}, the kernel takes"
            " bfloat16 or float16; cast them or use implementation='xla'"
        )
    if p.tile not in TILES:
        raise Unsupported(
            f"tile_sparse_matmul: tile {p.tile}, the kernel takes {TILES}; prune with"
            " one of these or use implementation='xla'"
        )
    if 0 in (p.m, p.n, p.k):
        raise Unsupported(
            f"tile_sparse_matmul: empty product of m={p.m} n={p.n} k={p.k}; use"
            " implementation='xla'"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Cut:
    """A problem cut by a config."""

    problem: Problem
    config: TileSparseConfig
    tokens_stored: int
    """Rows of a token-major output: those past its end are not stored."""
    has_bias: bool
    activation: str | None
    equal_steps: int | None
    """Steps of each tile, where all have as many. Rooms are as small as they can be,
    and past the counts values are zero: nothing need be read to know it."""
    turned: bool = False
    """The sums are feature-major, and are stored token by token."""

    @property
    def dtype_stored(self) -> Any:
        return jnp.float32 if self.config.splits > 1 else self.problem.dtype

    @functools.cached_property
    def tiles(self) -> Tiles:
        problem, config = self.problem.matmul(self.config, self.dtype_stored)
        kind = mosaic_gpu_24.Tiles24 if self.problem.two_of_four else Tiles
        return kind(problem=problem, config=config)

    @property
    def token_clusters(self) -> int:
        return pl.cdiv(self.problem.m, self.config.block_tokens * self.config.cluster)

    @property
    def blocks(self) -> int:
        """Output blocks, or clusters of them."""
        return self.token_clusters * self.problem.tiles * self.config.splits

    @property
    def out_shape(self) -> tuple[int, int]:
        """Whole tiles of the layout, 8 rows of 128 bytes; one alone may be smaller."""
        p, splits, line = self.problem, self.config.splits, self.tiles.store_columns
        by_feature = p.y_major and not self.turned
        whole = p.n % (8 if by_feature else line) == 0
        features = p.n if splits == 1 and whole else splits * p.tiles * p.tile
        if not by_feature:
            return self.tokens_stored, features
        return features, p.m if p.m <= line else pl.cdiv(p.m, line) * line

    @property
    def can_turn(self) -> bool:
        """True where the tokens of a feature-major sum can be stored one by one.

        Chunks are squares of 64 features by 64 tokens, and no line is a chunk alone.
        """
        if not self.problem.two_of_four or self.config.splits > 1:
            return False
        return self.tiles.config.block[0] == 64 and self.problem.n > 64

    @property
    def one_line(self) -> bool:
        """True where the output is no wider than one chunk of a store."""
        return self.out_shape[1] <= self.tiles.store_columns

    def operands(self, scratch: Mapping[str, Ref]) -> tuple[Ref, Ref]:
        """The rings of x and of the weights."""
        pair = scratch["w_smem"], scratch["x_smem"]
        return pair if self.problem.y_major else pair[::-1]

    @property
    def steps_of_block(self) -> int | None:
        """Steps of each block, where all have as many."""
        steps, splits = self.equal_steps, self.config.splits
        return None if steps is None or steps % splits else steps // splits

    @property
    def steps_together(self) -> int:
        """Steps whose indices are read at a time."""
        steps, most = self.steps_of_block, self.config.ahead
        if steps is None:
            return min(most, pl.cdiv(self.problem.room // STEP, self.config.splits))
        return max(n for n in range(1, most + 1) if steps % n == 0)

    @property
    def producers(self) -> tuple[str, ...]:
        """The producers of a block; each is a warpgroup."""
        if not self.problem.gathers:
            return ("load",)
        return ("load", "gather") if two_producers(self.tiles) else ("gather",)

    def steps(self, block: "_Block") -> tuple[Scalar, Scalar]:
        """First and last (excluded) step of a block.

        Parts are those of the room: where they begin is known before the count is.
        """
        steps = self.equal_steps
        if steps is None:
            steps = lax.div(block.count + (STEP - 1), jnp.int32(STEP))
        splits = self.config.splits
        if splits == 1:
            return jnp.int32(0), jnp.int32(steps)
        room = self.problem.room // STEP
        first, last = (
            lax.div(room * part, jnp.int32(splits))
            for part in (block.split, block.split + 1)
        )
        if self.equal_steps is None:
            last = jnp.maximum(jnp.minimum(last, steps), first)
        return first, last


@dataclasses.dataclass(frozen=True)
class _Block:
    """An output block: which tile, which part of its rows, which tokens."""

    tile: Scalar
    count: Scalar
    """Rows of the tile; not used where all have as many."""
    split: Scalar
    tokens: Scalar


class _Schedule:
    """The output blocks of one multiprocessor (one cluster), in order."""

    def __init__(self, cut: _Cut, refs: Mapping[str, Ref]) -> None:
        self.cut, self.order = cut, refs.get("order")
        self.counts = refs["counts"] if cut.equal_steps is None else None
        self.clusters = cut.token_clusters
        self.lines = cut.problem.tiles * cut.config.splits
        self.worker, self.workers = lax.axis_index("worker"), lax.axis_size("worker")
        total = self.clusters * self.lines
        self.rounds = lax.div(total, jnp.int32(self.workers))
        self.turns = Turns(group=min(cut.config.group, self.clusters))
        if self.order is not None:
            p = cut.problem
            self.turns = balanced_turns(
                self.lines,
                self.clusters,
                self.workers,
                self.turns.group,
                2 * p.m * p.k <= RESIDENT,
            )
        back = self.turns.rounds
        self.place = self.workers - 1 - self.worker if back else self.worker
        last = jnp.where(lax.rem(self.rounds, 2) == 1, self.place, self.worker)
        left = total - self.rounds * self.workers
        self.mine = self.rounds + jnp.where(last < left, 1, 0)

    def locate(self, i: Scalar) -> tuple[Scalar, Scalar, Scalar]:
        """Return place in the order, split and tokens of block `i`, or of the last."""
        config, lines = self.cut.config, self.lines
        i = jnp.minimum(i, self.mine - 1)
        within = jnp.where(lax.rem(i, 2) == 1, self.place, self.worker)
        index = i * self.workers + within
        group = self.turns.group
        band = lax.div(index, jnp.int32(group * lines))
        within = index - band * (group * lines)
        width = jnp.minimum(jnp.int32(group), self.clusters - band * group)
        line = lax.div(within, width)
        tokens = band * group + lax.rem(within, width)
        rank = lax.axis_index("cluster") if config.cluster > 1 else 0
        tokens = tokens * config.cluster + rank
        if self.turns.bands:
            line = jnp.where(lax.rem(band, 2) == 1, lines - 1 - line, line)
        splits = jnp.int32(config.splits)
        return lax.div(line, splits), lax.rem(line, splits), tokens

    def tile(self, i: Scalar) -> Scalar:
        """The tile of the `i`-th block here, or of the last."""
        place = self.locate(i)[0]
        return place if self.order is None else self.order[place]

    def count(self, tile: Scalar) -> Scalar:
        """The rows of a tile, where they differ."""
        return jnp.int32(0) if self.counts is None else self.counts[tile]

    def block(self, i: Scalar, tile: Scalar, count: Scalar) -> _Block:
        """The `i`-th block here, or the last, whose tile and count are at hand."""
        return _Block(tile, count, *self.locate(i)[1:])

    def first(self) -> _Block:
        """The first of this multiprocessor; there is one."""
        tile = self.tile(jnp.int32(0))
        return self.block(jnp.int32(0), tile, self.count(tile))

    def for_each(self, body: Callable[..., Any], carry: Any) -> Any:
        """Loops over them: ``body(block, the one after, carry) -> carry``.

        A count is read one block ahead and its tile two: memory answers meanwhile.
        """

        def block(i: jax.Array, state: Any) -> Any:
            tile, count, tile_after, carry = state
            count_after = self.count(tile_after)
            tile_then = self.tile(i + 2)
            here = self.block(i, tile, count)
            after = self.block(i + 1, tile_after, count_after)
            return tile_after, count_after, tile_then, body(here, after, carry)

        start = self.first()
        state = start.tile, start.count, self.tile(jnp.int32(1)), carry
        return lax.fori_loop(0, self.mine, block, state)[-1]


def _load_weights(
    cut: _Cut,
    refs: Mapping[str, Ref],
    scratch: Mapping[str, Ref],
    block: _Block,
    k: Scalar,
    slot: Scalar,
) -> None:
    """Starts the copy of one step of a tile."""
    if cut.problem.two_of_four:
        values, metadata = refs["values"], refs["metadata"]
        axes = ("cluster",) if cut.config.cluster > 1 else None
        mosaic_gpu_24.load_weights(values, metadata, scratch, block.tile, k, slot, axes)
        return
    _, w_smem = cut.operands(scratch)
    plgpu.copy_gmem_to_smem(
        refs["values"].at[block.tile, pl.ds(pl.multiple_of(k * STEP, STEP), STEP)],
        w_smem.at[slot],
        scratch["full"].at[slot],
        collective_axes=("cluster",) if cut.config.cluster > 1 else None,
    )


def _load(
    cut: _Cut, refs: Mapping[str, Ref], scratch: Mapping[str, Ref], schedule: _Schedule
) -> None:
    """Starts the plain copies: weights, and x where whole groups of rows are kept."""
    config, problem = cut.config, cut.problem
    x_smem, _ = cut.operands(scratch)

    def group_of(block: _Block, k: Scalar) -> Any:
        if problem.gathers:
            return jnp.int32(0)
        if problem.room == problem.k and cut.equal_steps is not None:
            return k * STEP  # all rows, in order
        # One step past the last is read ahead; it must lie within the room.
        return refs["rows"][block.tile, jnp.minimum(k * STEP, problem.room - 1)]

    def load_block(block: _Block, after: _Block, carry: Any) -> Any:
        group_after = group_of(after, cut.steps(after)[0])

        def step(k: jax.Array, carry: Any) -> Any:
            slot, group = carry
            following = group_of(block, k + 1)
            plgpu.barrier_wait(scratch["empty"].at[slot])
            _load_weights(cut, refs, scratch, block, k, slot)
            if not problem.gathers:
                token = pl.ds(block.tokens * config.block_tokens, config.block_tokens)
                rows = pl.ds(pl.multiple_of(group, STEP), STEP)
                x = refs["x"]
                view = x.at[rows, token] if problem.x_major else x.at[token, rows]
                full = scratch["full"].at[slot]
                plgpu.copy_gmem_to_smem(view, x_smem.at[slot], full)
            return next_slot(slot, config.stages), following

        slot, _ = lax.fori_loop(*cut.steps(block), step, carry)
        return slot, group_after

    start = schedule.first()
    carry = (jnp.int32(0), group_of(start, cut.steps(start)[0]))
    drain(scratch, schedule.for_each(load_block, carry)[0], config.stages)


def _gather(
    cut: _Cut,
    refs: Mapping[str, Ref],
    scratch: Mapping[str, Ref],
    schedule: _Schedule,
    alone: bool,
) -> None:
    """Gathers rows of x, and loads the weights if it is alone.

    The indices of the next few steps are read before these are gathered.
    """
    config, problem = cut.config, cut.problem
    ring = GatherRing(scratch, config.stages, config.lag)
    x_smem, _ = cut.operands(scratch)
    together = cut.steps_together
    # Where all blocks have as many steps, indices are read across the end of a block,
    # elsewhere those of the first steps of a block while the one before it runs, and
    # the last steps that are read together may be fewer.
    chained = cut.steps_of_block is not None
    may_end = together > 1 and not chained
    # A few tokens are less than a block; what else it holds is not stored.
    width = min(config.block_tokens, max(8, pl.next_power_of_2(problem.m)))
    covered = cut.token_clusters * config.cluster * width

    def indices_of(tile: Scalar, step: Scalar) -> tuple[jax.Array, ...]:
        # Steps past the last are read ahead; they must lie within the room.
        last = problem.room // STEP - 1
        if not may_end:
            step = jnp.minimum(step, last - (together - 1))
        found = []
        for i in range(together):
            at = jnp.minimum(step + i, last) if may_end else step + i
            rows = pl.ds(pl.multiple_of(at * STEP, STEP), STEP)
            found.append(load_rows(refs["rows"].at[tile, rows], STEP))
        return tuple(found)

    def gather_block(block: _Block, after: _Block, carry: Any) -> Any:
        first, last = cut.steps(block)
        first_after, _ = cut.steps(after)
        indices_after = None if chained else indices_of(after.tile, first_after)

        def some_steps(i: jax.Array, carry: Any) -> Any:
            slot, flying, indices = carry
            k = first + i * together
            tile, then = block.tile, k + together
            if chained:
                tile = jnp.where(then < last, tile, after.tile)
                then = jnp.where(then < last, then, first_after)
            read = functools.partial(indices_of, tile, then)
            following = (
                lax.cond(then < last, read, lambda: indices) if may_end else read()
            )
            for j in range(together):

                def one_step(slot: Scalar, flying: Scalar, j: int = j) -> Any:
                    ring.acquire(slot)
                    if alone:
                        _load_weights(cut, refs, scratch, block, k + j, slot)
                    gather_rows(
                        refs["x"],
                        indices[j],
                        block.tokens * config.block_tokens,
                        x_smem.at[slot],
                        count=STEP,
                        width=width,
                        masked=covered > problem.m,
                    )
                    return ring.commit(slot, flying)

                if may_end and j:
                    state = slot, flying
                    slot, flying = lax.cond(
                        k + j < last, one_step, lambda *state: state, *state
                    )
                else:
                    slot, flying = one_step(slot, flying)
            return slot, flying, following

        steps = last - first
        if may_end:
            steps = steps + (together - 1)  # rounded up to whole rounds
        rounds = lax.div(steps, jnp.int32(together))
        slot, flying, indices = lax.fori_loop(0, rounds, some_steps, carry)
        return slot, flying, indices if indices_after is None else indices_after

    start = schedule.first()
    first, _ = cut.steps(start)
    carry = (jnp.int32(0), jnp.int32(0), indices_of(start.tile, first))
    ring.finish(*schedule.for_each(gather_block, carry)[:2])


def _consume(
    cut: _Cut,
    refs: Mapping[str, Ref],
    scratch: Mapping[str, Ref],
    schedule: _Schedule,
    consumer: Scalar,
) -> None:
    """A consumer: multiplies its part of each block and stores it."""
    hand_over(scratch, cut.config.stages)

    def consume_block(block: _Block, _: _Block, slot: Scalar) -> Scalar:
        tile, tokens = block.tile, block.tokens
        first, last = cut.steps(block)
        part = scratch, consumer, first, last, slot
        if isinstance(cut.tiles, mosaic_gpu_24.Tiles24):
            sums, slot = mosaic_gpu_24.multiply_steps(cut.tiles, *part)
        else:
            sums, slot = multiply_steps(cut.tiles, *part)
        line = block.split * cut.problem.tiles + tile
        m, n = (line, tokens) if cut.problem.y_major else (tokens, line)
        sums = _epilogue(cut, refs, sums, tile, consumer)

        def view(chunk: int) -> Ref:
            if cut.one_line and chunk:
                return None
            where = m, n, consumer, chunk
            return cut.tiles.out_view(refs["out"], *where, turned=cut.turned)

        def store() -> None:
            store_tile(cut.tiles, sums, scratch, consumer, view, turned=cut.turned)

        if cut.one_line:  # see `store_tile`
            beyond = consumer if cut.tiles.config.split == "n" else 0
            pl.when(n + beyond == 0)(store)
        else:
            store()
        return slot

    schedule.for_each(consume_block, jnp.int32(0))
    # Only shared memory must outlive the copies; the end of the kernel awaits the rest.
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _epilogue(
    cut: _Cut, refs: Mapping[str, Ref], sums: jax.Array, tile: Scalar, consumer: Scalar
) -> jax.Array:
    config, y_major = cut.tiles.config, cut.problem.y_major
    if cut.has_bias:
        size = config.block[0 if y_major else 1]
        start = tile * cut.problem.tile
        if config.split == ("m" if y_major else "n"):
            start = start + consumer * size
        along = 1 if y_major else 0  # the axis of the sums that bias lacks
        bias = plgpu.load(
            refs["bias"].at[pl.ds(start, size)],
            layout=plgpu.Layout.WGMMA.reduce(along),
            optimized=False,
        )
        bias = bias.astype(jnp.float32)  # here: outside it would be one more kernel
        sums = sums + lax.broadcast_in_dim(bias, sums.shape, (1 - along,))
    if cut.activation is not None:
        sums = KERNEL_ACTIVATIONS[cut.activation](sums)
    return sums


def tile_sparse_matmul(
    x: jax.Array,
    w: TileSparse | TileSparse24,
    bias: jax.Array | None = None,
    activation: str | None = None,
    *,
    feature_major: tuple[bool, bool],
    config: TileSparseConfig,
    device: DeviceSpec,
) -> jax.Array:
    """Computes the packed matmul on a Hopper GPU with fp32 sums.

    Args:
        x: [M,K] activations, or [K,M]; bfloat16 or float16.
        w: weight; its `columns` are left to the caller.
        bias: [N] or None.
        activation: a name in `ACTIVATIONS`, or None.
        feature_major: how the input and the output are stored; with a `TileSparse24`
            a token-major input is transposed, and so is the output of tiles of 256
            columns or of parts.
        config: how to cut it.
        device: the GPU that the kernel is built for.

    Returns:
        [M,N] of the type of x, or [N,M].

    Raises:
        Unsupported: types, tile or shared memory do not fit.
    """
    wanted = Problem.of(x, w, feature_major)
    check_problem(wanted)
    compressed = {}
    if isinstance(w, TileSparse24):
        compressed = {"values": w.values, "metadata": w.metadata}
        w = w.abstract
    x, (x_major, y_major), config = _stored(
        x, w, feature_major, config, two_of_four=wanted.two_of_four
    )
    problem = dataclasses.replace(
        Problem.of(x, w, (x_major, y_major)), two_of_four=wanted.two_of_four
    )
    fused = config.splits == 1
    cut = _Cut(
        problem=problem,
        config=config,
        tokens_stored=wanted.m if wanted.m < 8 else problem.m,
        has_bias=bias is not None and fused,
        activation=activation if fused else None,
        equal_steps=w.room // STEP if w.equal_counts else None,
    )
    if cut.can_turn and not wanted.y_major:
        cut = dataclasses.replace(cut, turned=True)
    check_tiles(cut.tiles, device, config)
    inputs = {"x": x, "values": w.values, "rows": w.rows, "counts": w.counts}
    inputs |= compressed
    if cut.has_bias and bias is not None:
        padded = w.tiles * w.tile - w.packed_columns
        inputs["bias"] = jnp.pad(bias, (0, padded)) if padded else bias
    # Where each multiprocessor has one block at most, no order is better than another.
    several = cut.blocks > device.num_sms // config.cluster
    if w.order is not None and fused and several:
        inputs["order"] = w.order
    # How full the tiles are was a matter of the config alone.
    traced = dataclasses.replace(cut, problem=dataclasses.replace(problem, steps=None))
    y = _call(traced, tuple(inputs), device, *inputs.values())
    if not fused:
        y = _add_parts(y, cut, bias, activation)
    if cut.turned:
        return y[: wanted.m, : wanted.n]
    y = y[: wanted.n, : wanted.m] if y_major else y[: wanted.m, : wanted.n]
    if wanted.two_of_four and not wanted.y_major:
        return y.T
    # [1,N] to [N,1], the same memory.
    return y.reshape((wanted.n, wanted.m)) if wanted.y_major != y_major else y


def _stored(
    x: jax.Array,
    w: TileSparse,
    feature_major: tuple[bool, bool],
    config: TileSparseConfig,
    *,
    two_of_four: bool,
) -> tuple[jax.Array, tuple[bool, bool], TileSparseConfig]:
    """The input as the kernel wants it, how it and the output are stored, the config.

    One token is the same memory in either layout: the copy engine, which wants lines of
    16 bytes, then reads and writes a row. Only a left operand may be 2:4: the sums are
    those of a feature-major output.
    """
    x_major, y_major = feature_major
    if two_of_four:
        x, x_major, y_major = x if x_major else x.T, True, True
    single = x.shape[1 if x_major else 0] == 1 and not two_of_four
    if single and y_major:
        y_major, config = False, dataclasses.replace(config, store_slots=1)
    by_engine = w.granularity == STEP
    if x_major and single and by_engine:
        x, x_major = x.reshape(1, -1), False  # [K,1] to [1,K]
    if not x_major and not by_engine:
        x, x_major = x.T, True  # [K,M]: a kept row must be one run of memory
    along = 1 if x_major else 0
    tokens = x.shape[along]
    if x_major or tokens > 8:  # runs of 16 bytes, whole tiles of the layout
        extra = -tokens % 8
        if extra:
            x = jnp.pad(x, ((0, extra), (0, 0)) if along == 0 else ((0, 0), (0, extra)))
    return x, (x_major, y_major), config


def _add_parts(
    parts: jax.Array, cut: _Cut, bias: jax.Array | None, activation: str | None
) -> jax.Array:
    """Sums the parts of a split matmul; one fused kernel of XLA with the epilogue."""
    p, splits = cut.problem, cut.config.splits
    if p.y_major:
        parts = parts.reshape(splits, -1, parts.shape[1])  # [splits,N,M]
        sums = jnp.sum(parts, axis=0)[: p.n, : p.m]
    else:
        parts = parts.reshape(len(parts), splits, -1)  # [M,splits,N]
        sums = jnp.sum(parts, axis=1)[:, : p.n]
    return epilogue.apply(
        sums, bias, activation, feature_major=p.y_major, dtype=p.dtype
    )


@functools.partial(jax.jit, static_argnums=(0, 1, 2), inline=True)
def _call(
    cut: _Cut, inputs: tuple[str, ...], device: DeviceSpec, *arrays: jax.Array
) -> jax.Array:
    """The kernel, which blocks and programs with equal shapes trace once.

    Args:
        cut: how it is cut.
        inputs: names of the arrays.
        device: the GPU.
        *arrays: what the kernel reads, by these names.
    """
    names = [*inputs, "out"]

    def body(*args: Ref, **scratch: Ref) -> None:
        refs = dict(zip(names, args, strict=True))
        schedule = _Schedule(cut, refs)

        roles = {
            "load": lambda: _load(cut, refs, scratch, schedule),
            "gather": lambda: _gather(
                cut, refs, scratch, schedule, alone="load" not in cut.producers
            ),
        }
        run_warpgroups(
            lambda consumer: _consume(cut, refs, scratch, schedule, consumer),
            {role: roles[role] for role in cut.producers},
        )

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(cut.out_shape, cut.dtype_stored),
        scratch_types=cut.tiles.scratch_types(),
        kernel_name="tile_sparse_matmul",
        **launch(
            cut.blocks,
            device,
            "tile_sparse_matmul",
            warpgroups=CONSUMERS + len(cut.producers),
            cluster=cut.config.cluster,
        ),
    )(*arrays)
