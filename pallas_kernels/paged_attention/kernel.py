"""The Hopper kernel of paged attention.

A decoding step reads every key and value once and does little with them: the kernel has
to keep memory busy. A block is one or two *teams*, each a warpgroup that copies pages
into a ring in shared memory and one that computes. A team takes one *split* after the
other, by ticket: a fixed number of tokens of one row, for one key/value head, whose
queries (those of the group, of all new tokens) are the rows of one tile of 64.

**Append.** The team that has the split in which a new token lies stores the token into
its page, ahead of the copy of that page, and then reads it as any other.

**Splits** are added by who is the last of a row and head to end, in their order: each
team leaves its sums and their logarithm in global memory and counts itself.

**What is not the row's.** Pages hold anything past the end of a row and before its
window. Scores of such tokens become ``-inf``, and since zero times NaN is NaN, their
values are overwritten by zeros in shared memory.

Axis letters: B rows, R new tokens, K key/value heads, H head dim, L layers, P pages, G
tokens of a page, W pages of a row.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic.aliases import Ref, Scalar
from pallas_kernels.mosaic.copies import CHUNK, chunked, smem_transforms
from pallas_kernels.mosaic.device import DeviceSpec
from pallas_kernels.mosaic.lanes import keep_band, store_rows
from pallas_kernels.mosaic.tile_scheduler import take_ticket
from pallas_kernels.paged_attention.config import BLOCK
from pallas_kernels.paged_attention.inputs import Scores
from pallas_kernels.paged_attention.lanes import (
    Cut,
    copy_page_ids,
    count_arrival,
    find_split,
    proxy_fence,
    store_first_rows,
)


__all__ = ["WARPS", "Problem", "run"]

ROWS = 64
"""Rows of a tile: queries of a group and of all new tokens."""

WARPS = 4
"""Of a warpgroup; each adds rows of its own."""

_REGISTERS = {1: (56, 240), 2: (40, 216)}
"""Of a thread that copies and of one that computes, by teams: what one gives up of the
registers that a block starts with, others may take."""

_MORE_TO_COPY = 56, 200
"""The same of two teams where who copies has more to remember: the many slots of head
dim 64, the scales of fp8."""

_LOADED = 64
"""Registers of a thread for splits that are loaded ahead of their sum, about."""


_FIELDS = 5
"""Numbers that say what to do: those of `find_split`, and the head."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """The shapes of a call, and how it is cut."""

    rows: int
    """B."""
    queries: int
    """R."""
    group: int
    """Query heads of a key/value head."""
    kv_heads: int
    """K."""
    head_dim: int
    """H."""
    page: int
    """G."""
    width: int
    """W."""
    num_pages: int
    """P."""
    dtype: jnp.dtype
    """Of queries, outputs and products."""
    page_dtype: jnp.dtype
    """Of pages: the same, or fp8, which is widened for the products."""
    split: int
    teams: int
    slots: int

    @property
    def narrow(self) -> bool:
        """Whether pages are fp8, with scales."""
        return self.page_dtype != self.dtype

    @property
    def tile_rows(self) -> int:
        """Rows of a tile that are queries."""
        return self.group * self.queries

    @property
    def padded_rows(self) -> int:
        """The same, for `WARPS`."""
        return -(-self.tile_rows // WARPS) * WARPS

    @property
    def query_rows(self) -> int:
        """Rows of a tile that are copied."""
        return -(-self.tile_rows // 8) * 8

    @property
    def chunks(self) -> int:
        """Chunks of 64 columns."""
        return self.head_dim // CHUNK

    @property
    def pieces(self) -> int:
        """Copies that fill a slot."""
        return BLOCK // min(self.page, BLOCK)

    @property
    def split_pages(self) -> int:
        """Pages that a split touches, at most."""
        return max(1, self.split // self.page)

    @property
    def most_splits(self) -> int:
        """Splits of a row, at most."""
        return -(-self.width * self.page // self.split)

    def cut(self, scores: Scores) -> Cut:
        """How rows are cut into splits."""
        capacity = self.width * self.page
        return Cut(self.split, self.queries, capacity, scores.window)


def run(
    problem: Problem,
    scores: Scores,
    device: DeviceSpec,
    q: jax.Array,
    kv: jax.Array,
    table: jax.Array,
    lengths: jax.Array,
    num_new: jax.Array,
    layer: jax.Array,
    scales: jax.Array | None,
    pages: Ref,
) -> jax.Array:
    """Runs the kernel.

    Args:
        problem: shapes.
        scores: how they follow from the products.
        device: the GPU.
        q: [B K, rows, H], rows of tiles.
        kv: [B, R, 2, K, H].
        table: [B W].
        lengths: [B].
        num_new: [B].
        layer: [1].
        scales: [L P 2 K], of fp8 pages.
        pages: a mutable reference, [L P 2 K, G, H].

    Returns:
        [B K, rows, H].
    """
    p, tiles, teams = problem, problem.rows * problem.kv_heads, problem.teams
    parts = tiles, p.most_splits, p.padded_rows
    ring = plgpu.SMEM(
        (teams, p.slots, BLOCK, p.head_dim),
        p.page_dtype,
        transforms=smem_transforms(p.head_dim, p.page_dtype),
    )
    of_fp8, given = {}, ()
    if p.narrow:
        of_fp8, given = _scratch_of_fp8(p), (scales,)
    out, *_ = plgpu.kernel(
        functools.partial(_body, problem, scores),
        out_type=[
            jax.ShapeDtypeStruct((tiles, p.tile_rows, p.head_dim), p.dtype),
            jax.ShapeDtypeStruct((*parts, p.head_dim), jnp.float32),
            jax.ShapeDtypeStruct(parts, jnp.float32),
        ],
        scratch_types={
            "q_smem": chunked((teams, 2), ROWS, p.chunks, p.dtype),
            "ring": ring,
            "new_smem": plgpu.SMEM((teams, p.queries, 2, p.head_dim), p.dtype),
            "ids_smem": plgpu.SMEM((teams, 2, p.split_pages), jnp.int32),
            "work_smem": plgpu.SMEM((teams, 2, _FIELDS), jnp.int32),
            "ticket": plgpu.SMEM((teams, 1), jnp.int32),
            "arrived": plgpu.SMEM((teams, 1), jnp.int32),
            "q_full": plgpu.Barrier(num_arrivals=p.chunks, num_barriers=teams * 2),
            "q_empty": plgpu.Barrier(num_barriers=teams * 2),
            "full": plgpu.Barrier(num_arrivals=p.pieces, num_barriers=teams * p.slots),
            "empty": plgpu.Barrier(num_barriers=teams * p.slots),
            "new_full": plgpu.Barrier(num_barriers=teams),
            "work_full": plgpu.Barrier(num_barriers=teams * 2),
            "work_empty": plgpu.Barrier(num_barriers=teams * 2),
            **of_fp8,
        },
        grid=(min(device.num_sms, tiles * p.most_splits),),
        grid_names=("worker",),
        num_threads=2 * teams,
        thread_name="warpgroup",
        kernel_name="paged_attention",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(q, kv, table, lengths, num_new, layer, *given, pages)
    return out


def _scratch_of_fp8(p: Problem) -> dict[str, Any]:
    """Tiles that are widened, and new tokens that are made narrow.

    The latter by the scales of keys and by those of values: half of it is stored.
    """
    shape = p.teams, 2, BLOCK, p.head_dim
    transforms = smem_transforms(p.head_dim, p.dtype)
    new = p.teams, p.queries, 2, 2, p.head_dim
    return {
        "wide": plgpu.SMEM(shape, p.dtype, transforms=transforms),
        "narrow": plgpu.SMEM(new, p.page_dtype),
    }


def _body(problem: Problem, scores: Scores, *refs: Ref, **scratch: Ref) -> None:
    """The kernel: warpgroups that copy, and as many that compute."""
    warpgroup = lax.axis_index("warpgroup")
    copies, computes = _REGISTERS[problem.teams]
    if problem.teams == 2 and (problem.narrow or problem.head_dim == CHUNK):
        copies, computes = _MORE_TO_COPY
    # Tickets, and how many splits of each row and head are done.
    tiles = problem.rows * problem.kv_heads
    counters = pl.get_global(plgpu.SemaphoreType.REGULAR((1 + tiles,)))
    for number in range(problem.teams):
        team = _Team(problem, scores, number, counters, refs, scratch)

        @pl.when(warpgroup == number)
        def _(team: _Team = team) -> None:
            plgpu.set_max_registers(copies, action="decrease")
            team.copy_splits()

        @pl.when(warpgroup == number + problem.teams)
        def _(team: _Team = team) -> None:
            plgpu.set_max_registers(computes, action="increase")
            team.compute_splits()


class _Work(NamedTuple):
    """A split of one row and key/value head."""

    there: Scalar
    """Whether it is one; there is no work past the last split."""
    row: Scalar
    head: Scalar
    length: Scalar
    """Tokens of the row before the step."""
    rows: Scalar
    """Rows of the tile that are real."""
    index: Scalar
    """Which split of the row, from its first token on."""
    first: Scalar
    """The first split that the row sees."""
    splits: Scalar
    """How many it has."""
    begin: Scalar
    """The first token to read, a multiple of `BLOCK`."""
    end: Scalar
    """The token after the last."""
    steps: Scalar

    def appended(self, split: int) -> Scalar:
        """The first new token of the split, if it comes before the end."""
        return jnp.maximum(self.length, self.index * split)


class _Team:
    """A warpgroup that copies and one that computes."""

    def __init__(
        self,
        problem: Problem,
        scores: Scores,
        number: int,
        counters: Ref,
        refs: tuple[Ref, ...],
        scratch: dict[str, Ref],
    ) -> None:
        self.problem, self.scores, self.number = problem, scores, number
        (self.q, self.kv, self.table, self.lengths, self.num_new, self.layer,
         *self.scales, self.pages, self.out, self.parts, self.logs) = refs  # fmt: skip
        self.smem = {
            name: scratch[name].at[number]
            for name in (
                "ring",
                "new_smem",
                "ids_smem",
                "work_smem",
                "ticket",
                "arrived",
                *("wide", "narrow") * problem.narrow,
            )
        }
        self.q_write, self.q_read = (
            scratch["q_smem"][view].at[number] for view in (1, 0)
        )
        self.barriers = scratch
        self.counters = counters
        self.worker = lax.axis_index("worker") * problem.teams + number
        self.workers = lax.axis_size("worker") * problem.teams
        self.cut = problem.cut(scores)
        self.first_page = self.layer[0] * problem.num_pages

    def barrier(self, name: str, count: int = 1, index: Scalar = 0) -> Ref:
        """One of `count` barriers of this team."""
        return self.barriers[name].at[self.number * count + index]

    def slot(self, number: Scalar) -> Scalar:
        """The slot of the ring for the nth tile of this team."""
        return lax.rem(number, jnp.int32(self.problem.slots))

    def work(self, number: Scalar) -> _Work:
        """The nth piece of work, which has been published."""
        p = self.problem
        place = lax.rem(number, jnp.int32(2))
        row, within, length, new, head = (
            self.smem["work_smem"][place, i] for i in range(_FIELDS)
        )
        there = row >= 0
        length = jnp.maximum(length, 0)
        new = jnp.clip(new, 0, p.queries)
        total = jnp.minimum(length + new, self.cut.capacity)
        total = jnp.where(new > 0, total, 0)
        least, first = jnp.int32(0), jnp.int32(0)
        if self.scores.window is not None:
            least = jnp.maximum(length - (self.scores.window - 1), 0)
            first = lax.div(least, jnp.int32(p.split))
        last = lax.div(total + (p.split - 1), jnp.int32(p.split))
        index = first + within
        begin = jnp.maximum(index * p.split, least)
        begin = lax.div(begin, jnp.int32(BLOCK)) * BLOCK
        end = jnp.minimum((index + 1) * p.split, total)
        steps = lax.div(end - begin + (BLOCK - 1), jnp.int32(BLOCK))
        return _Work(
            there=there,
            row=row,
            head=head,
            length=length,
            rows=new * p.group,
            index=index,
            first=first,
            splits=jnp.maximum(last - first, 1),
            begin=begin,
            end=end,
            steps=jnp.where(there, jnp.maximum(steps, 0), 0),
        )

    # --- The warpgroup that copies ----------------------------------------------------

    def copy_splits(self) -> None:
        """Copies queries, keys and values of one split after the other."""
        p = self.problem

        def next_split(carry: Any) -> Any:
            work, number, tiles = carry
            self.copy_queries(work, number)
            self.copy_ids(work, number)
            self.prefetch_new(work)
            # Some pages are on their way while the next split is looked up.
            begun = jnp.minimum(work.steps, p.slots // 2)
            self.copy_steps(work, number, tiles, 0, begun)
            ticket = take_ticket(self.counters.at[pl.ds(0, 1)], self.smem["ticket"])
            following = self.publish(number + 1, ticket + self.workers)
            self.copy_steps(work, number, tiles, begun, work.steps)
            return following, number + 1, tiles + 2 * work.steps

        zero = jnp.int32(0)
        first = self.publish(zero, self.worker)
        _, number, tiles = lax.while_loop(
            lambda carry: carry[0].there, next_split, (first, zero, zero)
        )
        # Waiters must see each phase of a barrier.
        for i in range(p.slots):
            slot = self.slot(tiles + i)
            plgpu.barrier_wait(self.barrier("empty", p.slots, slot))
        for i in range(2):
            place = lax.rem(number + 1 + i, jnp.int32(2))
            plgpu.barrier_wait(self.barrier("work_empty", 2, place))
            plgpu.barrier_wait(self.barrier("q_empty", 2, place))

    def publish(self, number: Scalar, ticket: Scalar) -> _Work:
        """The work for a ticket, told to the warpgroup that computes."""
        heads = jnp.int32(self.problem.kv_heads)
        place = lax.rem(number, jnp.int32(2))
        plgpu.barrier_wait(self.barrier("work_empty", 2, place))
        find_split(
            self.lengths,
            self.num_new,
            lax.div(ticket, heads),
            lax.rem(ticket, heads),
            self.cut,
            self.smem["work_smem"].at[place],
        )
        plgpu.barrier_arrive(self.barrier("work_full", 2, place))
        return self.work(number)

    def copy_queries(self, work: _Work, number: Scalar) -> None:
        """Queries of a tile, rows of which come from the next ones or are not real."""
        p = self.problem
        place = lax.rem(number, jnp.int32(2))
        plgpu.barrier_wait(self.barrier("q_empty", 2, place))
        full = self.barrier("q_full", 2, place)
        tile = work.row * p.kv_heads + work.head
        for chunk in range(p.chunks):
            columns = pl.ds(chunk * CHUNK, CHUNK)
            source = self.q.at[pl.ds(tile * p.tile_rows, p.query_rows), columns]
            target = self.q_write.at[place, chunk, pl.ds(0, p.query_rows)]
            plgpu.copy_gmem_to_smem(source, target, full)

    def copy_ids(self, work: _Work, number: Scalar) -> None:
        """Page ids of a split."""
        p = self.problem
        first = lax.div(work.index * p.split, jnp.int32(p.page))
        pages = lax.div(work.end + (p.page - 1), jnp.int32(p.page))
        start = work.row * p.width
        target = self.smem["ids_smem"].at[lax.rem(number, jnp.int32(2))]
        copy_page_ids(self.table, start + first, start + pages, target, p.num_pages)

    def page(self, work: _Work, number: Scalar, position: Scalar) -> Scalar:
        """The page of a token; -1 is none."""
        p = self.problem
        place = lax.rem(number, jnp.int32(2))
        index = lax.div(position - work.index * p.split, jnp.int32(p.page))
        return self.smem["ids_smem"][place, jnp.minimum(index, p.split_pages - 1)]

    def line(self, work: _Work, number: Scalar, position: Scalar, part: int) -> Scalar:
        """Where keys (0) or values (1) of a token's page lie among those of all."""
        p = self.problem
        page = self.first_page + jnp.maximum(self.page(work, number, position), 0)
        return (page * 2 + part) * p.kv_heads + work.head

    def copy_steps(
        self,
        work: _Work,
        number: Scalar,
        tiles: Scalar,
        begin: Scalar,
        end: Scalar,
    ) -> None:
        """Pages of some steps of a split, new tokens put into them before."""
        p = self.problem
        size = min(p.page, BLOCK)
        appended = work.appended(p.split)

        def step(i: Scalar, _: None) -> None:
            start = work.begin + i * BLOCK
            here = (start <= appended) & (appended < start + BLOCK)
            pl.when(here & (appended < work.end))(
                functools.partial(self.append, work, number, appended)
            )
            for part in range(2):
                slot = self.slot(tiles + 2 * i + part)
                plgpu.barrier_wait(self.barrier("empty", p.slots, slot))
                full = self.barrier("full", p.slots, slot)
                for piece in range(p.pieces):
                    position = start + piece * size
                    line = self.line(work, number, position, part)
                    offset = lax.rem(position, jnp.int32(p.page))
                    offset = pl.multiple_of(offset, size)
                    plgpu.copy_gmem_to_smem(
                        self.pages.at[line, pl.ds(offset, size)],
                        self.smem["ring"].at[slot, pl.ds(piece * size, size)],
                        full,
                    )

        lax.fori_loop(begin, end, step, None)

    def prefetch_new(self, work: _Work) -> None:
        """New tokens of a row, where some lie in the split."""

        @pl.when(work.appended(self.problem.split) < work.end)
        def _() -> None:
            source = self.kv.at[work.row, :, :, work.head]
            plgpu.copy_gmem_to_smem(
                source, self.smem["new_smem"], self.barrier("new_full")
            )

    def append(self, work: _Work, number: Scalar, first: Scalar) -> None:
        """Stores the new tokens of a split, from the first on, into their pages."""
        p, smem = self.problem, self.smem["new_smem"]
        plgpu.barrier_wait(self.barrier("new_full"))
        for r in range(p.queries):
            position = work.length + r

            inside = (first <= position) & (position < work.end)

            @pl.when(inside & (self.page(work, number, position) >= 0))
            def _(r: int = r, position: Scalar = position) -> None:
                offset = lax.rem(position, jnp.int32(p.page))
                for part in range(2):
                    line = self.line(work, number, position, part)
                    row = smem.at[r, part]
                    if p.narrow:
                        row = self.made_narrow(r, part, line)
                    plgpu.copy_smem_to_gmem(row, self.pages.at[line, offset])

        plgpu.wait_smem_to_gmem(0)
        proxy_fence()  # pyright: ignore[reportCallIssue]

    def made_narrow(self, r: int, part: int, line: Scalar) -> Ref:
        """Keys (0) or values (1) of a new token as they are stored in fp8."""
        p, narrow = self.problem, self.smem["narrow"]
        limit = float(jnp.finfo(p.page_dtype).max)
        # Both are made, since a layout needs as many numbers: one of them is stored.
        layout = plgpu.Layout.WG_STRIDED(
            (2, p.head_dim), vec_size=2 * p.head_dim // 128
        )
        new = plgpu.load(self.smem["new_smem"].at[r], layout=layout, optimized=False)
        values = new.astype(jnp.float32) / self.scales[0][line]
        values = jnp.minimum(jnp.maximum(values, -limit), limit)
        narrow[r, part] = values.astype(p.page_dtype)
        plgpu.commit_smem()
        return narrow.at[r, part, part]

    # --- The warpgroup that computes --------------------------------------------------

    def compute_splits(self) -> None:
        """Attends to one split after the other."""
        p = self.problem
        for slot in range(p.slots):
            plgpu.barrier_arrive(self.barrier("empty", p.slots, slot))
        for place in range(2):
            plgpu.barrier_arrive(self.barrier("work_empty", 2, place))
            plgpu.barrier_arrive(self.barrier("q_empty", 2, place))

        def next_split(carry: Any) -> Any:
            _, number, tiles = carry
            place = lax.rem(number, jnp.int32(2))
            plgpu.barrier_wait(self.barrier("work_full", 2, place))
            work = self.work(number)
            plgpu.barrier_arrive(self.barrier("work_empty", 2, place))
            pl.when(work.there)(
                functools.partial(self.compute, work, number, place, tiles)
            )
            return work.there, number + 1, tiles + 2 * work.steps

        start = jnp.bool_(True), jnp.int32(0), jnp.int32(0)
        lax.while_loop(lambda carry: carry[0], next_split, start)

    def compute(
        self, work: _Work, number: Scalar, place: Scalar, tiles: Scalar
    ) -> None:
        """One split: its results, or what they are added from."""
        p = self.problem
        plgpu.barrier_wait(self.barrier("q_full", 2, place))
        queries = self.q_read.at[place]
        column = plgpu.Layout.WGMMA.reduce(1)
        highest = plgpu.layout_cast(jnp.full((ROWS,), -jnp.inf, jnp.float32), column)
        total = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), column)

        def loop(acc: Ref) -> Any:
            step = functools.partial(self.step, work, number, tiles, queries, acc)
            state = lax.fori_loop(0, work.steps, step, (highest, total))
            return acc[...], *state

        sums, highest, total = pl.run_scoped(
            loop, plgpu.WGMMAAccumulatorRef((ROWS, p.head_dim), jnp.float32)
        )
        plgpu.barrier_arrive(self.barrier("q_empty", 2, place))
        row = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=column)
        seen = (row < work.rows) & (total > 0)
        zero = jnp.zeros_like(total)
        inverse = jnp.where(seen, 1.0 / jnp.where(seen, total, zero + 1.0), zero)
        log = jnp.where(seen, highest + jnp.log2(total), zero - jnp.inf)
        shape = ROWS, p.head_dim
        values = sums * lax.broadcast_in_dim(inverse, shape, [0])
        # Queries that are not real may hold NaN.
        values = jnp.where(
            lax.broadcast_in_dim(row, shape, [0]) < work.rows,
            values,
            jnp.zeros_like(values),
        )
        tile = work.row * p.kv_heads + work.head

        @pl.when(work.splits == 1)
        def _() -> None:
            store_rows(self.out.at[tile], values.astype(p.dtype), 0, p.tile_rows)

        @pl.when(work.splits > 1)
        def _() -> None:
            part = self.parts.at[tile, work.index]
            store_first_rows(part, values, plgpu.Layout.WGMMA, p.tile_rows)
            store_rows(self.logs.at[tile, work.index], log, 0, p.tile_rows)
            counter = self.counters.at[pl.ds(1 + tile, 1)]
            before = count_arrival(counter, self.smem["arrived"])
            pl.when(before == work.splits - 1)(
                functools.partial(self.add_splits, work, tile)
            )

    def step(
        self,
        work: _Work,
        number: Scalar,
        tiles: Scalar,
        queries: Ref,
        acc: Ref,
        i: Scalar,
        state: Any,
    ) -> tuple[Any, Any]:
        """A block of keys, and its values."""
        p, ring = self.problem, self.smem["ring"]
        highest, total = state
        start = work.begin + i * BLOCK
        edge = start + BLOCK > work.length
        if self.scores.window is not None:
            edge |= start <= work.length + (p.queries - 1) - self.scores.window
        slot = self.wait(tiles + 2 * i)
        tiles_of_keys, at = self.widened(slot, 0) if p.narrow else (ring, slot)

        def multiply(products: Ref) -> Any:
            for chunk in range(p.chunks):
                keys = tiles_of_keys.at[at, :, pl.ds(chunk * CHUNK, CHUNK)]
                plgpu.wgmma(products, queries.at[chunk], keys.transpose((1, 0)))
            return products[...]

        s = pl.run_scoped(
            multiply, plgpu.WGMMAAccumulatorRef((ROWS, BLOCK), jnp.float32)
        )
        if p.narrow:
            s = s * self.scales[0][self.line(work, number, start, 0)]
        else:
            self.release(slot)
        factor = self.scores.scale * math.log2(math.e)
        if (cap := self.scores.softcap) is not None:
            s = jnp.tanh(s * (self.scores.scale / cap))
            factor = cap * math.log2(math.e)
        mask = functools.partial(self.mask, work, start)
        s = lax.cond(edge, mask, lambda s: s, s)
        s = s * factor
        grown = jnp.maximum(highest, jnp.max(s, axis=1))
        safe = jnp.where(grown == -jnp.inf, jnp.zeros_like(grown), grown)
        weights = jnp.exp2(s - lax.broadcast_in_dim(safe, s.shape, [0]))
        alpha = jnp.exp2(highest - safe)
        total = total * alpha + jnp.sum(weights, axis=1)
        sums = plgpu.wgmma_accumulator_load(acc, wait_n=None)
        acc[...] = sums * lax.broadcast_in_dim(alpha, sums.shape, [0])
        if p.narrow:
            weights = weights * self.scales[0][self.line(work, number, start, 1)]
        weights = weights.astype(p.dtype)
        slot = self.wait(tiles + 2 * i + 1)
        tile = self.widened(slot, 1) if p.narrow else (ring, slot)
        pl.when(edge)(functools.partial(self.clear, work, start, *tile))
        plgpu.wgmma(acc, weights, tile[0].at[tile[1]])
        plgpu.wgmma_wait(0)
        if not p.narrow:
            self.release(slot)
        return grown, total

    def wait(self, number: Scalar) -> Scalar:
        """The slot of the nth tile, once the tile is there."""
        slot = self.slot(number)
        plgpu.barrier_wait(self.barrier("full", self.problem.slots, slot))
        return slot

    def release(self, slot: Scalar) -> None:
        """Hands a slot back."""
        plgpu.barrier_arrive(self.barrier("empty", self.problem.slots, slot))

    def mask(self, work: _Work, start: Scalar, s: Any) -> Any:
        """``-inf`` for keys that a query does not see."""
        p, window = self.problem, self.scores.window
        if p.queries == 1:
            least = None if window is None else work.length - (window - 1) - start
            return keep_band(s, columns=(least, work.end - 1 - start))
        row, column = (
            plgpu.broadcasted_iota(jnp.int32, s.shape, d, layout=plgpu.Layout.WGMMA)
            for d in range(2)
        )
        # The queries of a group follow one another, new token by new token.
        at = lax.div(row, jnp.full_like(row, p.group)) + (work.length - start)
        seen = (column <= at) & (column < work.end - start)
        if window is not None:
            seen &= column > at - window
        return jnp.where(seen, s, jnp.full_like(s, -jnp.inf))

    def widened(self, slot: Scalar, part: int) -> tuple[Ref, Scalar]:
        """A tile of fp8 pages as products take it; its slot is handed back."""
        p, wide = self.problem, self.smem["wide"]
        layout = plgpu.Layout.WGMMA
        values = plgpu.load(self.smem["ring"].at[slot], layout=layout, optimized=False)
        wide[part] = values.astype(jnp.float32).astype(p.dtype)
        plgpu.commit_smem()
        self.release(slot)
        return wide, part

    def clear(self, work: _Work, start: Scalar, tiles: Ref, at: Scalar) -> None:
        """Zeros for values that no query sees."""
        p = self.problem
        least = jnp.int32(0)
        if self.scores.window is not None:
            least = work.length - (self.scores.window - 1) - start
        for chunk in range(p.chunks):
            ref = tiles.at[at, :, pl.ds(chunk * CHUNK, CHUNK)]
            layout = plgpu.Layout.WGMMA
            values = plgpu.load(ref, layout=layout, optimized=False)
            row = plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=layout)
            held = (least <= row) & (row < work.end - start)
            ref[...] = jnp.where(held, values, jnp.zeros_like(values))
        plgpu.commit_smem()

    def add_splits(self, work: _Work, tile: Scalar) -> None:
        """Adds the splits of a row and head, in their order."""
        p = self.problem
        shape = p.padded_rows, p.head_dim
        width = min(p.head_dim, 128)
        tiling = plgpu.Tiling(((WARPS, width), (width // 32,)))
        layout = plgpu.Layout.TILED(
            tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1
        )
        ahead = max(1, min(16, _LOADED * 128 // math.prod(shape)))

        def add(i: Scalar, state: Any) -> Any:
            sums, highest, total = state
            logs, parts = [], []
            for j in range(ahead):
                number = i * ahead + j
                at = work.first + jnp.minimum(number, work.splits - 1)
                log = plgpu.load(
                    self.logs.at[tile, at], layout=layout.reduce(1), optimized=False
                )
                past = number >= work.splits
                logs.append(log + jnp.where(past, -jnp.inf, 0.0))
                parts.append(
                    plgpu.load(self.parts.at[tile, at], layout=layout, optimized=False)
                )
            grown = functools.reduce(jnp.maximum, logs, highest)
            safe = jnp.where(grown == -jnp.inf, jnp.zeros_like(grown), grown)
            alpha = jnp.exp2(highest - safe)
            sums = sums * lax.broadcast_in_dim(alpha, shape, [0])
            total = total * alpha
            for log, part in zip(logs, parts, strict=True):
                weight = jnp.exp2(log - safe)
                sums = sums + part * lax.broadcast_in_dim(weight, shape, [0])
                total = total + weight
            return sums, grown, total

        column = plgpu.layout_cast(jnp.zeros(shape[:1], jnp.float32), layout.reduce(1))
        sums = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)
        turns = lax.div(work.splits + (ahead - 1), jnp.int32(ahead))
        sums, _, total = lax.fori_loop(0, turns, add, (sums, column - jnp.inf, column))
        seen = total > 0
        inverse = jnp.where(seen, 1.0 / jnp.where(seen, total, column + 1.0), column)
        values = sums * lax.broadcast_in_dim(inverse, shape, [0])
        store_first_rows(self.out.at[tile], values.astype(p.dtype), layout, p.tile_rows)
