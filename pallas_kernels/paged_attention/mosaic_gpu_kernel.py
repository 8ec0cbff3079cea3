"""The Hopper kernel of paged attention.

A decode step reads every key and value once and does little with them: the kernel has
to keep memory busy. A block is one or two *teams*, each a warpgroup that copies pages
into a ring in shared memory and one that computes. A team takes one *split* after the
other, by ticket: a fixed number of tokens of one row, for one key/value head.

**Matmuls** are transposed. Queries of a head (those of its group, of all new tokens)
are few: they are columns, of which the tensor cores take any eight, and keys, and then
columns of values, are the 64 rows. Operands in fp8 are widened on their way to
registers.

**Append.** The team that has the split in which a new token lies stores the token into
its page, ahead of the copy of that page, and then reads it as any other.

**Splits** are added by who is the last of a row and head to end, in their order: each
team leaves its sums and their logarithm in global memory, and counts itself while it
copies the next split.

**What is not the row's.** Pages hold anything past the end of a row and before its
window. Scores of such tokens become ``-inf``, and since zero times NaN is NaN, their
values are overwritten by zeros.

Axis letters: B rows, R new tokens, K key/value heads, H head dim, L layers, P pages, G
tokens of a page, W pages of a row.
"""

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
from pallas_kernels.mosaic.pipeline import launch, proxy_fence
from pallas_kernels.paged_attention.config import BLOCK
from pallas_kernels.paged_attention.inputs import Scores
from pallas_kernels.paged_attention.lanes import (
    copy_page_ids,
    find_split,
    store_first_rows,
    take_ticket_and_count,
)
from pallas_kernels.paged_attention.operands import (
    PER_QUERY,
    add_keys,
    largest_of_keys,
    load_keys,
    load_values,
    store_queries,
    store_transposed,
)
from pallas_kernels.paged_attention.problem import WARPS, Problem


_REGISTERS = {1: (56, 240), 2: (64, 192), 3: (40, 120)}
"""Of a thread that copies and of one that computes, by teams: what one gives up of the
registers that a block starts with, others may take."""

_LOADED = {1: 96, 2: 96, 3: 32}
"""Registers of a thread for splits that are loaded ahead of their sum, about, by teams.
"""

_LEAST_COPY = 16
"""Rows of a page that are copied, at least; the last block of a row is seldom full."""

_FIELDS = 9
"""Numbers that say what to do: those of `find_split`, the head, and what to add."""


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
    counters: Ref,
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
        counters: a mutable reference, [1 + B K], zeros: tickets, and how many splits
            of each row and head are done.

    Returns:
        [B K, rows, H].
    """
    p, tiles, teams = problem, problem.rows * problem.kv_heads, problem.teams
    most_splits = p.cut(scores).most_splits
    parts = tiles, most_splits, p.padded_rows
    ring = plgpu.SMEM(
        (teams, p.slots, BLOCK, p.head_dim),
        p.page_dtype,
        transforms=smem_transforms(p.head_dim, p.page_dtype),
    )
    of_fp8, given = {}, ()
    if p.narrow:
        # New tokens by the scales of keys and by those of values: half is stored.
        new = teams, p.queries, 2, 2, p.head_dim
        of_fp8, given = {"narrow": plgpu.SMEM(new, p.page_dtype)}, (scales,)
    out, *_ = plgpu.kernel(
        functools.partial(_body, problem, scores),
        out_type=[
            jax.ShapeDtypeStruct((tiles, p.tile_rows, p.head_dim), p.dtype),
            jax.ShapeDtypeStruct((*parts, p.head_dim), jnp.float32),
            jax.ShapeDtypeStruct(parts, jnp.float32),
        ],
        scratch_types={
            "q_smem": chunked((teams, 2), p.query_rows, p.chunks, p.product_dtype),
            "ring": ring,
            "weights": plgpu.SMEM(
                (teams, p.query_rows, BLOCK),
                p.product_dtype,
                transforms=smem_transforms(BLOCK, p.product_dtype),
            ),
            "of_warps": plgpu.SMEM((teams, 2, WARPS, p.query_rows), jnp.float32),
            "new_smem": plgpu.SMEM((teams, p.queries, 2, p.head_dim), p.dtype),
            "ids_smem": plgpu.SMEM((teams, 2, p.split_pages), jnp.int32),
            "work_smem": plgpu.SMEM((teams, 2, _FIELDS), jnp.int32),
            "mailbox": plgpu.SMEM((teams, 2), jnp.int32),
            "q_full": plgpu.Barrier(num_arrivals=p.chunks, num_barriers=teams * 2),
            "q_empty": plgpu.Barrier(num_barriers=teams * 2),
            "full": plgpu.Barrier(num_arrivals=p.pieces, num_barriers=teams * p.slots),
            "empty": plgpu.Barrier(num_barriers=teams * p.slots),
            "new_full": plgpu.Barrier(num_barriers=teams),
            "stored": plgpu.Barrier(num_barriers=teams * 2),
            "work_full": plgpu.Barrier(num_barriers=teams * 2),
            "work_empty": plgpu.Barrier(num_barriers=teams * 2),
            **of_fp8,
        },
        **launch(tiles * most_splits, device, "paged_attention", warpgroups=2 * teams),
        kernel_name="paged_attention",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(q, kv, table, lengths, num_new, layer, *given, pages, counters)
    return out


def _body(problem: Problem, scores: Scores, *refs: Ref, **scratch: Ref) -> None:
    """The kernel: warpgroups that copy, and as many that compute."""
    warpgroup = lax.axis_index("warpgroup")
    copies, computes = _REGISTERS[problem.teams]
    # One code for all teams: the more code, the longer it takes to find its layouts.
    number = lax.rem(warpgroup, jnp.int32(problem.teams))
    team = _Team(problem, scores, number, refs, scratch)

    def copier() -> None:
        plgpu.set_max_registers(copies, action="decrease")
        team.copy_splits()

    def computer() -> None:
        plgpu.set_max_registers(computes, action="increase")
        team.compute_splits()

    lax.cond(warpgroup < problem.teams, copier, computer)


class _Splits(NamedTuple):
    """Splits of one row and key/value head, whose results lie in global memory."""

    tile: Scalar
    """Row and head."""
    first: Scalar
    """The first split that the row attends to."""
    number: Scalar
    """How many it has."""


class _Work(NamedTuple):
    """A split of one row and key/value head."""

    there: Scalar
    """Whether it is one; there is no work past the last split."""
    last: Scalar
    """Whether nothing follows."""
    complete: _Splits
    """What is to be added before; none of them is nothing."""
    row: Scalar
    head: Scalar
    length: Scalar
    """Tokens of the row before the step."""
    rows: Scalar
    """Rows of the tile that are real."""
    index: Scalar
    """Which split of the row, from its first token on."""
    first: Scalar
    """The first split that the row attends to."""
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
        number: Scalar,
        refs: tuple[Ref, ...],
        scratch: dict[str, Ref],
    ) -> None:
        self.problem, self.scores, self.number = problem, scores, number
        (self.q, self.kv, self.table, self.lengths, self.num_new, self.layer,
         *self.scales, self.pages, self.counters, self.out, self.parts, self.logs
        ) = refs  # fmt: skip
        self.smem = {
            name: scratch[name].at[number]
            for name in (
                "ring",
                "weights",
                "of_warps",
                "new_smem",
                "ids_smem",
                "work_smem",
                "mailbox",
                *("narrow",) * problem.narrow,
            )
        }
        self.q_write, self.q_read = (
            scratch["q_smem"][view].at[number] for view in (1, 0)
        )
        self.barriers = scratch
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
        row, within, length, new, head, *complete, last = (
            self.smem["work_smem"][place, i] for i in range(_FIELDS)
        )
        there = row >= 0
        length = jnp.maximum(length, 0)
        new = jnp.clip(new, 0, p.queries)
        first, splits, total = self.cut.splits(length, new)
        index = first + within
        begin = index * p.split
        if self.scores.window is not None:
            begin = jnp.maximum(begin, length - (self.scores.window - 1))
        begin = lax.div(begin, jnp.int32(BLOCK)) * BLOCK
        end = jnp.where(within == splits - 1, total, (index + 1) * p.split)
        steps = lax.div(end - begin + (BLOCK - 1), jnp.int32(BLOCK))
        return _Work(
            there=there,
            last=last > 0,
            complete=_Splits(*complete),
            row=row,
            head=head,
            length=length,
            rows=new * p.group,
            index=index,
            first=first,
            splits=splits,
            begin=begin,
            end=end,
            steps=jnp.where(there, jnp.maximum(steps, 0), 0),
        )

    # --- The warpgroup that copies ----------------------------------------------------

    def copy_splits(self) -> None:
        """Copies queries, keys and values of one split after the other."""
        p = self.problem

        def next_split(carry: Any) -> Any:
            work, number, tiles, stored = carry
            # First, since what is asked for waits for what was asked for before.
            self.copy_queries(work, number)
            self.copy_ids(work, number)
            self.prefetch_new(work)
            # Some pages are on their way while the next split is looked up.
            begun = jnp.minimum(work.steps, p.slots // 2)
            self.copy_steps(work, number, tiles, 0, begun)
            ticket, complete = self.count(number, stored)
            following = self.publish(number + 1, ticket, complete)
            self.copy_steps(work, number, tiles, begun, work.steps)
            tile = work.row * p.kv_heads + work.head
            stored = _Splits(tile, work.first, work.splits)
            return following, number + 1, tiles + 2 * work.steps, stored

        zero = jnp.int32(0)
        nothing = _Splits(zero, zero, zero)
        first = self.publish(zero, self.worker, nothing)
        _, number, tiles, stored = lax.while_loop(
            lambda carry: carry[0].there, next_split, (first, zero, zero, nothing)
        )
        # The last split is followed by no work, and that by its sum.
        ticket, complete = self.count(number, stored)
        self.publish(number + 1, ticket, complete, last=True)
        # Waiters must see each phase of a barrier.
        for i in range(p.slots):
            slot = self.slot(tiles + i)
            plgpu.barrier_wait(self.barrier("empty", p.slots, slot))
        for i in range(2):
            place = lax.rem(number + i, jnp.int32(2))
            plgpu.barrier_wait(self.barrier("work_empty", 2, place))
            plgpu.barrier_wait(self.barrier("q_empty", 2, place))

    def count(self, number: Scalar, stored: _Splits) -> tuple[Scalar, _Splits]:
        """A ticket; and counts the split before the nth, whose results are stored.

        Counting waits for memory, which keeps nobody waiting here.

        Returns:
            ``(ticket, complete)``: the splits to be added, none if some are missing.
        """
        before = lax.rem(number + 1, jnp.int32(2))

        @pl.when(number > 0)
        def _() -> None:
            plgpu.barrier_wait(self.barrier("stored", 2, before))

        counts = stored.number > 1
        ticket, others = take_ticket_and_count(
            self.counters, 1 + stored.tile, counts, self.smem["mailbox"]
        )
        complete = counts & (others == stored.number - 1)
        missing = stored._replace(number=jnp.where(complete, stored.number, 0))
        return ticket + self.workers, missing

    def publish(
        self, number: Scalar, ticket: Scalar, complete: _Splits, last: bool = False
    ) -> _Work:
        """The work for a ticket, told to the warpgroup that computes."""
        heads = jnp.int32(self.problem.kv_heads)
        place = lax.rem(number, jnp.int32(2))
        plgpu.barrier_wait(self.barrier("work_empty", 2, place))
        find_split(
            self.lengths,
            self.num_new,
            lax.div(ticket, heads),
            (lax.rem(ticket, heads), *complete, jnp.int32(last)),
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
            target = self.q_write.at[place, chunk]
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
        index = lax.div(position, jnp.int32(p.page))
        index -= lax.div(work.index * p.split, jnp.int32(p.page))
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
                for piece in range(p.pieces):
                    self.copy_piece(work, number, start, part, slot, piece)

        lax.fori_loop(begin, end, step, None)

    def copy_piece(
        self,
        work: _Work,
        number: Scalar,
        start: Scalar,
        part: int,
        slot: Scalar,
        piece: int,
    ) -> None:
        """Those rows of a page in a block that come before the end of the split."""
        p = self.problem
        size = min(p.page, BLOCK)
        least = min(size, _LEAST_COPY)
        position = start + piece * size
        line = self.line(work, number, position, part)
        offset = pl.multiple_of(lax.rem(position, jnp.int32(p.page)), size)
        full = self.barrier("full", p.slots, slot)
        copies = lax.div(work.end - position + (least - 1), jnp.int32(least))
        copies = jnp.clip(copies, 0, size // least)
        for count in range(size // least + 1):
            rows = count * least

            @pl.when(copies == count)
            def _(rows: int = rows) -> None:
                if not rows:
                    plgpu.barrier_arrive(full)
                    return
                plgpu.copy_gmem_to_smem(
                    self.pages.at[line, pl.ds(offset, rows)],
                    self.smem["ring"].at[slot, pl.ds(piece * size, rows)],
                    full,
                )

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
            pl.when(work.complete.number > 0)(
                functools.partial(self.add_splits, work.complete)
            )
            pl.when(work.there)(
                functools.partial(self.compute, work, number, place, tiles)
            )
            return ~work.last, number + 1, tiles + 2 * work.steps

        start = jnp.bool_(True), jnp.int32(0), jnp.int32(0)
        lax.while_loop(lambda carry: carry[0], next_split, start)

    def compute(
        self, work: _Work, number: Scalar, place: Scalar, tiles: Scalar
    ) -> None:
        """One split: its results, or what they are added from."""
        p = self.problem
        plgpu.barrier_wait(self.barrier("q_full", 2, place))
        queries = self.q_read.at[place]
        # A number for each query, and one for each query of what a lane holds.
        highest = jnp.full((p.query_rows,), -jnp.inf, jnp.float32)
        highest = plgpu.layout_cast(highest, PER_QUERY)
        total = jnp.zeros((BLOCK, p.query_rows), jnp.float32)
        total = plgpu.layout_cast(total, plgpu.Layout.WGMMA)
        shape = p.head_dim, p.query_rows
        scales = (jnp.float32(1),) * (2 * p.narrow)

        def loop(acc: Ref) -> Any:
            step = functools.partial(self.step, work, number, tiles, queries, acc)
            state = lax.fori_loop(0, work.steps, step, (highest, total, scales))
            return acc[...], *state[:2]

        sums, highest, total = pl.run_scoped(
            loop, plgpu.WGMMAAccumulatorRef(shape, jnp.float32)
        )
        if p.narrow:

            @pl.when(work.steps > 0)
            def _() -> None:
                plgpu.commit_smem()
                self.release(self.slot(tiles + 2 * work.steps - 1))

        plgpu.barrier_arrive(self.barrier("q_empty", 2, place))
        total = add_keys(total, self.smem["of_warps"])
        query = plgpu.broadcasted_iota(jnp.int32, (p.query_rows,), 0, layout=PER_QUERY)
        seen = (query < work.rows) & (total > 0)
        zero = jnp.zeros_like(total)
        inverse = jnp.where(seen, 1.0 / jnp.where(seen, total, zero + 1.0), zero)
        log = jnp.where(seen, highest + jnp.log2(total), zero - jnp.inf)
        values = sums * lax.broadcast_in_dim(inverse, shape, [1])
        # Queries that are not real may hold NaN.
        values = jnp.where(
            lax.broadcast_in_dim(query, shape, [1]) < work.rows,
            values,
            jnp.zeros_like(values),
        )
        tile = work.row * p.kv_heads + work.head
        store = functools.partial(store_queries, interleaved=p.narrow)

        @pl.when(work.splits == 1)
        def _() -> None:
            store(self.out.at[tile], values.astype(p.dtype), p.tile_rows)

        @pl.when(work.splits > 1)
        def _() -> None:
            store(self.parts.at[tile, work.index], values, p.tile_rows)
            store_queries(self.logs.at[tile, work.index], log, p.tile_rows)

        plgpu.barrier_arrive(self.barrier("stored", 2, place))

    def step(
        self,
        work: _Work,
        number: Scalar,
        tiles: Scalar,
        queries: Ref,
        acc: Ref,
        i: Scalar,
        state: Any,
    ) -> tuple[Any, Any, tuple[Any, ...]]:
        """A block of keys, and its values."""
        p, ring = self.problem, self.smem["ring"]
        highest, total, scales = state
        start = work.begin + i * BLOCK
        edge = start + BLOCK > work.length
        if self.scores.window is not None:
            edge |= start <= work.length + (p.queries - 1) - self.scores.window
        slot = self.wait(tiles + 2 * i)
        if p.narrow:  # page ids are there once the first tile is
            scales = lax.cond(
                i > 0, lambda: scales, lambda: self.scales_of(work, number, i)
            )

        def multiply(products: Ref) -> Any:
            chunks = (pl.ds(chunk * CHUNK, CHUNK) for chunk in range(p.chunks))
            keys = [ring.at[slot, :, columns] for columns in chunks]
            if p.narrow:
                keys = load_keys(ring.at[slot])
            for chunk in range(p.chunks):
                other = queries.at[chunk].transpose((1, 0))
                plgpu.wgmma(products, keys[chunk], other)
            return products[...]

        s = pl.run_scoped(
            multiply, plgpu.WGMMAAccumulatorRef((BLOCK, p.query_rows), jnp.float32)
        )
        if p.narrow:
            s = s * scales[0]
        else:
            self.release(slot)
        factor = self.scores.scale * math.log2(math.e)
        if (cap := self.scores.softcap) is not None:
            s = jnp.tanh(s * (self.scores.scale / cap))
            factor = cap * math.log2(math.e)
        mask = functools.partial(self.mask, work, start)
        s = lax.cond(edge, mask, lambda s: s, s)
        s = s * factor
        grown = jnp.maximum(highest, largest_of_keys(s, self.smem["of_warps"]))
        safe = jnp.where(grown == -jnp.inf, jnp.zeros_like(grown), grown)
        weights = jnp.exp2(s - lax.broadcast_in_dim(safe, s.shape, [1]))
        alpha = jnp.exp2(highest - safe)
        total = total * lax.broadcast_in_dim(alpha, s.shape, [1]) + weights
        sums = plgpu.wgmma_accumulator_load(acc, wait_n=None)
        sums = sums * lax.broadcast_in_dim(alpha, sums.shape, [1])
        if not p.narrow:
            acc[...] = sums
        store_transposed(self.smem["weights"], weights.astype(p.product_dtype))
        plgpu.commit_smem()
        following = ()
        if p.narrow:
            # Ordinary loads have read them, ahead of the fence and of the barrier that
            # the weights need: no others are necessary.
            self.release(slot)
            pl.when(i > 0)(lambda: self.release(self.slot(tiles + 2 * i - 1)))
            # They may come from the memory of the device, and a fence waits for loads.
            following = self.scales_of(work, number, i + 1)
        other = self.smem["weights"].transpose((1, 0))
        slot = self.wait(tiles + 2 * i + 1)
        if p.narrow:
            load = functools.partial(load_values, ring.at[slot])
            values = lax.cond(edge, lambda: load(self.held(work, start)), load)

            def add(products: Ref) -> Any:
                plgpu.wgmma(products, values, other)
                return products[...]

            # The scale of values may leave the range of fp16: it comes afterwards.
            products = pl.run_scoped(
                add, plgpu.WGMMAAccumulatorRef(sums.shape, jnp.float32)
            )
            acc[...] = sums + products * scales[1]
        else:
            pl.when(edge)(functools.partial(self.clear, work, start, slot))
            plgpu.wgmma(acc, ring.at[slot].transpose((1, 0)), other)
            plgpu.wgmma_wait(0)
            self.release(slot)
        return grown, total, following

    def scales_of(
        self, work: _Work, number: Scalar, i: Scalar
    ) -> tuple[Scalar, Scalar]:
        """The scales of keys and values of a step; past the last, those of the last."""
        start = work.begin + jnp.minimum(i, work.steps - 1) * BLOCK
        keys, values = (self.line(work, number, start, part) for part in range(2))
        return self.scales[0][keys], self.scales[0][values]

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
        key, query = (
            plgpu.broadcasted_iota(jnp.int32, s.shape, d, layout=plgpu.Layout.WGMMA)
            for d in range(2)
        )
        # The queries of a group follow one another, new token by new token.
        at = lax.div(query, jnp.full_like(query, p.group)) + (work.length - start)
        seen = (key <= at) & (key < work.end - start)
        if window is not None:
            seen &= key > at - window
        return jnp.where(seen, s, jnp.full_like(s, -jnp.inf))

    def held(self, work: _Work, start: Scalar) -> tuple[Scalar, Scalar]:
        """The first value of a block that a query may see, and the one after the last.

        What no query attends to may be NaN.
        """
        least = jnp.int32(0)
        if self.scores.window is not None:
            least = work.length - (self.scores.window - 1) - start
        return least, work.end - start

    def clear(self, work: _Work, start: Scalar, slot: Scalar) -> None:
        """Zeros for values that no query attends to."""
        least, stop = self.held(work, start)
        for chunk in range(self.problem.chunks):
            ref = self.smem["ring"].at[slot, :, pl.ds(chunk * CHUNK, CHUNK)]
            layout = plgpu.Layout.WGMMA
            values = plgpu.load(ref, layout=layout, optimized=False)
            row = plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=layout)
            held = (least <= row) & (row < stop)
            ref[...] = jnp.where(held, values, jnp.zeros_like(values))
        plgpu.commit_smem()

    def add_splits(self, splits: _Splits) -> None:
        """Adds the splits of a row and head, in their order."""
        p, tile = self.problem, splits.tile
        shape = p.padded_rows, p.head_dim
        width = min(p.head_dim, 128)
        tiling = plgpu.Tiling(((WARPS, width), (width // 32,)))
        layout = plgpu.Layout.TILED(
            tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1
        )
        ahead = max(1, min(32, _LOADED[p.teams] * 128 // math.prod(shape)))

        def add(i: Scalar, state: Any) -> Any:
            sums, highest, total = state
            logs, parts = [], []
            for j in range(ahead):
                number = i * ahead + j
                at = splits.first + jnp.minimum(number, splits.number - 1)
                log = plgpu.load(
                    self.logs.at[tile, at], layout=layout.reduce(1), optimized=False
                )
                past = number >= splits.number
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
        turns = lax.div(splits.number + (ahead - 1), jnp.int32(ahead))
        sums, _, total = lax.fori_loop(0, turns, add, (sums, column - jnp.inf, column))
        seen = total > 0
        inverse = jnp.where(seen, 1.0 / jnp.where(seen, total, column + 1.0), column)
        values = sums * lax.broadcast_in_dim(inverse, shape, [0])
        store_first_rows(self.out.at[tile], values.astype(p.dtype), layout, p.tile_rows)
