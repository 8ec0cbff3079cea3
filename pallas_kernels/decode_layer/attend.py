"""Attention over pages as the first stage of a layer's launch.

Queries are those that the launch before made, and it has put their keys and values into
the pages, so that all which is read is there: tiles of 64 keys and their values go
through the ring of weights, ahead of the first weight, and queries through the ring of
activations. While a row's attention waits for memory, and blocks for each other, the
rest of the ring is filled with weights.

A piece of work is a *split*: some tokens of one row, for one key/value head; how many
follows from the sizes of a call, so that a row's bits do not depend on the others.
Blocks take them in turn. As in `pallas_kernels.paged_attention` keys, and then columns
of values, are the 64 rows of a matmul, and queries its columns. Warpgroups take the
tiles of a split in turn, and then share their sums: each goes on with 64 features. Sums
of a row that is more than one split go through memory and are added in their order.

Axis letters: M requests, N query heads, K key/value heads, H head dim, G tokens of a
page, W pages of a row, S splits of a row.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.decode_layer.config import (
    COLUMNS,
    GROUP,
    WARPGROUPS,
    Cached,
    quotient,
    remainder,
)
from pallas_kernels.mosaic import smem_transforms
from pallas_kernels.mosaic.aliases import Ref, Scalar
from pallas_kernels.mosaic.counters import await_counter, raise_counter
from pallas_kernels.mosaic.pipeline import next_slot
from pallas_kernels.paged_attention.lanes import find_split
from pallas_kernels.paged_attention.operands import (
    PER_QUERY,
    add_keys,
    largest_of_keys,
    store_queries,
    store_transposed,
)


_ROLES = WARPGROUPS + 2
_FIELDS = 5
_WARPS = 4
_LEAST_COPY = 16
"""Rows of a page that are copied, at least."""
_AHEAD = 4
"""Splits that are loaded before their sums are added."""


def scratch_types() -> dict[str, Any]:
    """Shared memory of the stage."""
    return {
        "found": plgpu.SMEM((_ROLES, 2, _FIELDS), jnp.int32),
        "of_warps": plgpu.SMEM((WARPGROUPS, 2, _WARPS, COLUMNS), jnp.float32),
        "shares": plgpu.SMEM(
            (WARPGROUPS, COLUMNS, GROUP),
            jnp.bfloat16,
            transforms=smem_transforms(GROUP, jnp.bfloat16),
        ),
        "of_sums": plgpu.SMEM((WARPGROUPS, GROUP, COLUMNS), jnp.float32),
        "of_both": plgpu.SMEM((WARPGROUPS, 2, COLUMNS), jnp.float32),
        "met": plgpu.Barrier(num_arrivals=WARPGROUPS),
    }


def keys_type(slots: int) -> Any:
    """Keys and values of 64 tokens in each slot of the ring of weights."""
    return plgpu.SMEM(
        (slots, 2 * WARPGROUPS, GROUP, GROUP),
        jnp.bfloat16,
        transforms=smem_transforms(GROUP, jnp.bfloat16),
    )


def outputs(cached: Cached, m: int) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Shapes and types of what the stage leaves in memory."""
    tiles, splits = m * cached.kv_heads, cached.cut.most_splits
    return {
        "attended": ((m, cached.heads, cached.head_dim), jnp.bfloat16),
        "split_sums": ((tiles, splits, WARPGROUPS, GROUP, COLUMNS), jnp.float32),
        "split_logs": ((tiles, splits, WARPGROUPS, COLUMNS), jnp.float32),
    }


class _Split(NamedTuple):
    """Some tokens of a row, for a key/value head."""

    there: Scalar
    """Whether it is one; there is none past the last."""
    row: Scalar
    head: Scalar
    index: Scalar
    """Which one of the row, from its first token on."""
    splits: Scalar
    """How many the row attends to."""
    length: Scalar
    """Tokens of the row before the newest."""
    begin: Scalar
    """The first token that is read, a multiple of 64."""
    end: Scalar
    """The token after the last."""
    pairs: Scalar
    """Pairs of tiles of 64 tokens; the last one may be empty."""


@dataclasses.dataclass(frozen=True)
class Attend:
    """What the roles of a block do in this stage."""

    cached: Cached
    m: int
    workers: int
    worker: Scalar
    refs: Mapping[str, Ref]
    scratch: Mapping[str, Ref]
    counters: Ref
    """One for each half of each row and head; see `Schedule.of_splits`."""
    ready: Ref
    """What is raised for each half of each row and head when its result is there."""

    @property
    def tiles(self) -> int:
        """Rows times key/value heads."""
        return self.m * self.cached.kv_heads

    @property
    def finished(self) -> int:
        """How often `ready` is raised."""
        return self.tiles * WARPGROUPS

    def for_each_split(
        self, role: Scalar, body: Callable[[_Split, Any], Any], carry: Any
    ) -> Any:
        """``body(split, carry)`` for this block's splits, one after the other."""
        heads = self.cached.kv_heads

        def find(number: Scalar) -> _Split:
            item = number * self.workers + self.worker
            place = lax.rem(number, jnp.int32(2))
            found = self.scratch["found"].at[role, place]
            find_split(
                self.refs["lengths"],
                self.refs["num_new"],
                quotient(item, heads),
                (remainder(item, heads),),
                self.cached.cut,
                found,
            )
            return self.split(*(found[i] for i in range(_FIELDS)))

        def one(carry: Any) -> Any:
            split, number, inner = carry
            inner = body(split, inner)  # which waits for more than the next one
            return find(number + 1), number + 1, inner

        zero = jnp.int32(0)
        start = find(zero), zero, carry
        return lax.while_loop(lambda carry: carry[0].there, one, start)[2]

    def split(
        self, row: Scalar, within: Scalar, length: Scalar, new: Scalar, head: Scalar
    ) -> _Split:
        """What a split of a row is."""
        cut = self.cached.cut
        length, new = jnp.maximum(length, 0), jnp.clip(new, 0, 1)
        first, splits, total = cut.splits(length, new)
        index = first + within
        begin = index * cut.split
        if cut.window is not None:
            begin = jnp.maximum(begin, length - (cut.window - 1))
        begin = quotient(begin, GROUP) * GROUP
        end = jnp.where(within == splits - 1, total, (index + 1) * cut.split)
        pair = WARPGROUPS * GROUP
        pairs = quotient(jnp.maximum(end - begin, 0) + (pair - 1), pair)
        return _Split(row >= 0, row, head, index, splits, length, begin, end, pairs)

    # --- Copies -----------------------------------------------------------------------

    def copy_keys(
        self,
        role: int,
        fill: Callable[[Callable[[Scalar], None], Any], Any],
        full: Ref,
        carry: Any,
    ) -> Any:
        """Keys and values of all splits, into the ring of weights.

        Args:
            role: number of the warpgroup.
            fill: ``fill(copy, carry)`` calls ``copy(slot)`` for the next slot.
            full: barriers of the ring's slots.
            carry: where it begins.
        """
        c = self.cached
        first = self.refs["layer"][0] * c.num_pages

        def page(split: _Split, step: Scalar) -> Scalar:
            """The first line of the page of a step; past the last token, of that."""
            token = jnp.minimum(split.begin + step * GROUP, split.end - 1)
            index = quotient(jnp.maximum(token, 0), c.page)
            number = self.refs["table"][split.row * c.width + index]
            number = jnp.clip(number, 0, c.num_pages - 1)
            return (first + number) * (2 * c.kv_heads) + split.head

        def of_split(split: _Split, carry: Any) -> Any:
            def of_step(i: Scalar, carry: Any) -> Any:
                line, *carry = carry
                # It comes while the slot is waited for.
                following = page(split, i + 1)
                start = split.begin + i * GROUP
                rows = split.end - start
                offset = pl.multiple_of(remainder(start, c.page), GROUP)

                def copy(slot: Scalar) -> None:
                    self.copy_tile(slot, full.at[slot], line, offset, rows)

                return following, *fill(copy, tuple(carry))

            start = page(split, jnp.int32(0)), *carry
            return lax.fori_loop(0, WARPGROUPS * split.pairs, of_step, start)[1:]

        return self.for_each_split(role, of_split, carry)

    def copy_tile(
        self,
        slot: Scalar,
        full: Ref,
        line: Scalar,
        offset: Scalar,
        rows: Scalar,
    ) -> None:
        """Keys and values of a page's 64 tokens, of which some rows are a row's."""
        c = self.cached
        copies = quotient(jnp.clip(rows, 0, GROUP) + (_LEAST_COPY - 1), _LEAST_COPY)
        for count in range(GROUP // _LEAST_COPY + 1):
            some = count * _LEAST_COPY

            @pl.when(copies == count)
            def _(some: int = some) -> None:
                if not some:  # past the last token
                    for _ in range(2 * WARPGROUPS):
                        plgpu.barrier_arrive(full)
                    return
                for part in range(2):
                    for half in range(WARPGROUPS):
                        there = self.scratch["keys"].at[slot, part * WARPGROUPS + half]
                        columns = pl.ds(half * GROUP, GROUP)
                        plgpu.copy_gmem_to_smem(
                            self.refs["pages"].at[
                                line + part * c.kv_heads, pl.ds(offset, some), columns
                            ],
                            there.at[pl.ds(0, some)],
                            full,
                        )

    def copy_queries(self, role: int, ring: Mapping[str, Ref], carry: Any) -> Any:
        """Queries of all splits, into the ring of activations."""
        c = self.cached
        slots, _, tile_k = ring["smem"].shape

        def of_split(split: _Split, carry: Any) -> Any:
            slot, number = carry
            tile = split.row * c.kv_heads + split.head
            for first in range(0, c.head_dim, tile_k):
                plgpu.barrier_wait(ring["empty"].at[slot])
                # Columns of more queries than a head has may be anything.
                plgpu.copy_gmem_to_smem(
                    self.refs["queries"].at[tile, :, pl.ds(first, tile_k)],
                    ring["smem"].at[slot, pl.ds(0, COLUMNS)],
                    ring["full"].at[slot],
                )
                slot, number = next_slot(slot, slots), number + 1
            return slot, number

        return self.for_each_split(role, of_split, carry)

    # --- Sums -------------------------------------------------------------------------

    def compute(
        self,
        number: Scalar,
        weights: Mapping[str, Ref],
        activations: Mapping[str, Ref],
        slots: tuple[Scalar, Scalar],
    ) -> tuple[Scalar, Scalar]:
        """All that the warpgroup has to do in this stage.

        Args:
            number: which warpgroup of those that multiply.
            weights: the ring with keys and values.
            activations: the ring with queries.
            slots: where in both it begins.

        Returns:
            Where it ends.
        """
        c = self.cached
        smem, tile_k = activations["smem"], activations["smem"].shape[-1]
        count = smem.shape[0]

        def of_split(split: _Split, slots: Any) -> Any:
            w, x = slots
            held, queries = [], []
            for _ in range(0, c.head_dim, tile_k):
                plgpu.barrier_wait(activations["full"].at[x])
                held.append(x)
                queries += [
                    smem.at[x, pl.ds(0, COLUMNS), pl.ds(first, GROUP)]
                    for first in range(0, tile_k, GROUP)
                ]
                x = next_slot(x, count)
            found, w = self.attend(split, number, weights, queries, w)
            for slot in held:
                plgpu.barrier_arrive(activations["empty"].at[slot])
            self.leave(split, number, *found)
            return w, x

        slots = self.for_each_split(number, of_split, slots)
        self.add_splits(number)
        return slots

    def attend(
        self,
        split: _Split,
        number: Scalar,
        weights: Mapping[str, Ref],
        queries: list[Ref],
        slot: Scalar,
    ) -> tuple[tuple[jax.Array, ...], Scalar]:
        """``(sums, highest, total), slot``: what a split gives, not yet divided.

        Warpgroups take its tiles in turn, and then each has the sums of its half of the
        features from both.
        """
        tiles = self.scratch["keys"]
        count = tiles.shape[0]
        of_warps = self.scratch["of_warps"].at[number]
        shares = self.scratch["shares"].at[number]
        highest = plgpu.layout_cast(
            jnp.full((COLUMNS,), -jnp.inf, jnp.float32), PER_QUERY
        )
        total = plgpu.layout_cast(
            jnp.zeros((GROUP, COLUMNS), jnp.float32), plgpu.Layout.WGMMA
        )
        factor = self.cached.scale * math.log2(math.e)

        def scoped(*accs: Ref) -> Any:
            def two_steps(i: Scalar, state: Any) -> Any:
                highest, total, slot = state
                following = next_slot(slot, count)
                mine = jnp.where(number == 0, slot, following)
                other = jnp.where(number == 0, following, slot)
                start = split.begin + (2 * i + number) * GROUP
                edge = start + GROUP > jnp.minimum(split.length, split.end)
                if (window := self.cached.cut.window) is not None:
                    edge |= start <= split.length - window
                plgpu.barrier_wait(weights["full"].at[mine])

                def multiply(products: Ref) -> Any:
                    for half, query in enumerate(queries):
                        keys = tiles.at[mine, half]
                        plgpu.wgmma(products, keys, query.transpose((1, 0)))
                    return products[...]

                accumulator = plgpu.WGMMAAccumulatorRef((GROUP, COLUMNS), jnp.float32)
                s = pl.run_scoped(multiply, accumulator)
                scaled = factor
                if (cap := self.cached.softcap) is not None:
                    s = jnp.tanh(s * (self.cached.scale / cap))
                    scaled = cap * math.log2(math.e)
                mask = functools.partial(self.mask, split, start)
                s = lax.cond(edge, mask, lambda s: s, s) * scaled
                grown = jnp.maximum(highest, largest_of_keys(s, of_warps))
                safe = jnp.where(grown == -jnp.inf, jnp.zeros_like(grown), grown)
                p = jnp.exp2(s - lax.broadcast_in_dim(safe, s.shape, [1]))
                alpha = jnp.exp2(highest - safe)
                total = total * lax.broadcast_in_dim(alpha, s.shape, [1]) + p
                for acc in accs:
                    sums = plgpu.wgmma_accumulator_load(acc, wait_n=None)
                    acc[...] = sums * lax.broadcast_in_dim(alpha, sums.shape, [1])
                store_transposed(shares, p.astype(jnp.bfloat16))
                values = [tiles.at[mine, WARPGROUPS + n] for n in range(WARPGROUPS)]
                pl.when(edge)(functools.partial(self.clear, split, start, values))
                plgpu.commit_smem()
                for acc, half in zip(accs, values, strict=True):
                    plgpu.wgmma(acc, half.transpose((1, 0)), shares.transpose((1, 0)))
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(weights["empty"].at[mine])
                # Who waits for a barrier must see each of its phases.
                plgpu.barrier_wait(weights["full"].at[other])
                plgpu.barrier_arrive(weights["empty"].at[other])
                return grown, total, next_slot(following, count)

            start = highest, total, slot
            state = lax.fori_loop(0, split.pairs, two_steps, start)
            return *(acc[...] for acc in accs), *state

        accumulator = plgpu.WGMMAAccumulatorRef((GROUP, COLUMNS), jnp.float32)
        *sums, highest, total, slot = pl.run_scoped(scoped, *[accumulator] * WARPGROUPS)
        total = add_keys(total, of_warps)
        return self.exchange(number, sums, highest, total), slot

    def exchange(
        self,
        number: Scalar,
        sums: list[jax.Array],
        highest: jax.Array,
        total: jax.Array,
    ) -> tuple[jax.Array, ...]:
        """What both warpgroups have of a split, of half of the features.

        Args:
            number: which warpgroup, and which half it gets.
            sums: of its own tiles, of each half.
            highest: the largest score of each query.
            total: the sum of what is weighted with.
        """
        is_first = lax.broadcast_in_dim(number == 0, (GROUP, COLUMNS), ())
        own, of_other = (
            jnp.where(is_first, a, b) for a, b in (tuple(sums), tuple(sums)[::-1])
        )
        shared, both = self.scratch["of_sums"], self.scratch["of_both"]
        shared.at[number][...] = of_other
        for i, values in enumerate((highest, total)):
            both.at[number, i][...] = values
        self.meet()
        theirs = plgpu.load(
            shared.at[1 - number], layout=plgpu.Layout.WGMMA, optimized=False
        )
        tops, totals = (
            [
                plgpu.load(both.at[one, i], layout=PER_QUERY, optimized=False)
                for one in range(WARPGROUPS)
            ]
            for i in range(2)
        )
        self.meet()
        top = jnp.maximum(*tops)
        safe = jnp.where(top == -jnp.inf, jnp.zeros_like(top), top)
        parts = [jnp.exp2(one - safe) for one in tops]
        # In the same order, whoever adds.
        halves = jnp.where(is_first, own, theirs), jnp.where(is_first, theirs, own)
        added = [
            half * lax.broadcast_in_dim(part, half.shape, [1])
            for half, part in zip(halves, parts, strict=True)
        ]
        weighted = [a * b for a, b in zip(totals, parts, strict=True)]
        return added[0] + added[1], top, weighted[0] + weighted[1]

    def meet(self) -> None:
        """Waits for the other warpgroup."""
        plgpu.barrier_arrive(self.scratch["met"])
        plgpu.barrier_wait(self.scratch["met"])

    def mask(self, split: _Split, start: Scalar, s: Any) -> Any:
        """``-inf`` for keys that the newest token does not see."""
        key = plgpu.broadcasted_iota(jnp.int32, s.shape, 0, layout=plgpu.Layout.WGMMA)
        seen = key < jnp.minimum(split.length + 1, split.end) - start
        if (window := self.cached.cut.window) is not None:
            seen &= key > split.length - start - window
        return jnp.where(seen, s, jnp.full_like(s, -jnp.inf))

    def clear(self, split: _Split, start: Scalar, values: list[Ref]) -> None:
        """Zeros for values that no query attends to: they may be NaN."""
        layout = plgpu.Layout.WGMMA
        for half in values:
            found = plgpu.load(half, layout=layout, optimized=False)
            row = plgpu.broadcasted_iota(jnp.int32, found.shape, 0, layout=layout)
            held = row < split.end - start
            if (window := self.cached.cut.window) is not None:
                held &= row > split.length - start - window
            half[...] = jnp.where(held, found, jnp.zeros_like(found))

    def leave(
        self,
        split: _Split,
        number: Scalar,
        sums: jax.Array,
        highest: jax.Array,
        total: jax.Array,
    ) -> None:
        """Stores the result of a row that is one split, or what it is added from."""
        c = self.cached
        query = plgpu.broadcasted_iota(jnp.int32, (COLUMNS,), 0, layout=PER_QUERY)
        zero = jnp.zeros_like(total)
        seen = (query < c.group) & (total > 0)
        inverse = jnp.where(seen, 1.0 / jnp.where(seen, total, zero + 1.0), zero)
        log = jnp.where(seen, highest + jnp.log2(total), zero - jnp.inf)
        values = sums * lax.broadcast_in_dim(inverse, sums.shape, [1])
        # Columns past the queries of the head are those of another, or NaN.
        values = jnp.where(
            lax.broadcast_in_dim(query, sums.shape, [1]) < c.group,
            values,
            jnp.zeros_like(values),
        )
        tile = split.row * c.kv_heads + split.head

        @pl.when(split.splits == 1)
        def _() -> None:
            self.store(tile, number, values)

        @pl.when(split.splits > 1)
        def _() -> None:
            place = tile, split.index, number
            self.refs["split_sums"].at[place][...] = values
            store_queries(self.refs["split_logs"].at[place], log, COLUMNS)
            raise_counter(self.counter(tile, number))  # pyright: ignore[reportCallIssue]

    def counter(self, tile: Scalar, number: Scalar) -> Ref:
        """How many splits of a row and head have left their half."""
        return self.counters.at[pl.ds(tile * WARPGROUPS + number, 1)]

    def store(self, tile: Scalar, number: Scalar, values: jax.Array) -> None:
        """Stores half of the features of a head's queries, and says so."""
        c = self.cached
        row, head = quotient(tile, c.kv_heads), remainder(tile, c.kv_heads)
        target = self.refs["attended"].at[
            row, pl.ds(head * c.group, c.group), pl.ds(number * GROUP, GROUP)
        ]
        store_queries(target, values.astype(jnp.bfloat16), c.group)
        raise_counter(self.ready)  # pyright: ignore[reportCallIssue]

    def add_splits(self, number: Scalar) -> None:
        """Adds the splits of rows that are more than one, in their order."""
        c = self.cached

        def of_tile(index: Scalar, _: None) -> None:
            tile = index * self.workers + self.worker
            row = quotient(tile, c.kv_heads)
            length, new = (self.refs[name][row] for name in ("lengths", "num_new"))
            first, splits, _ = c.cut.splits(length, new)

            @pl.when(splits > 1)
            def _() -> None:
                await_counter(self.counter(tile, number), splits)
                self.add_tile(tile, number, first, splits)

        tiles = quotient(self.tiles - 1 - self.worker + self.workers, self.workers)
        lax.fori_loop(0, tiles, of_tile, None)

    def add_tile(
        self, tile: Scalar, number: Scalar, first: Scalar, splits: Scalar
    ) -> None:
        """The sum of the splits of a row and head."""
        shape, layout = (GROUP, COLUMNS), plgpu.Layout.WGMMA

        def of_columns(values: jax.Array) -> jax.Array:
            return lax.broadcast_in_dim(values, shape, [1])

        def add(i: Scalar, state: Any) -> Any:
            sums, highest, total = state
            logs, parts = [], []
            for j in range(_AHEAD):
                index = i * _AHEAD + j
                place = tile, first + jnp.minimum(index, splits - 1), number
                log = plgpu.load(
                    self.refs["split_logs"].at[place], layout=PER_QUERY, optimized=False
                )
                logs.append(log + jnp.where(index >= splits, -jnp.inf, 0.0))
                part = plgpu.load(
                    self.refs["split_sums"].at[place], layout=layout, optimized=False
                )
                parts.append(part)
            grown = functools.reduce(jnp.maximum, logs, highest)
            safe = jnp.where(grown == -jnp.inf, jnp.zeros_like(grown), grown)
            alpha = jnp.exp2(highest - safe)
            sums, total = sums * of_columns(alpha), total * alpha
            for log, part in zip(logs, parts, strict=True):
                share = jnp.exp2(log - safe)
                sums, total = sums + part * of_columns(share), total + share
            return sums, grown, total

        column = plgpu.layout_cast(jnp.zeros((COLUMNS,), jnp.float32), PER_QUERY)
        sums = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)
        turns = quotient(splits + (_AHEAD - 1), _AHEAD)
        start = sums, column - jnp.inf, column
        sums, _, total = lax.fori_loop(0, turns, add, start)
        seen = total > 0
        inverse = jnp.where(seen, 1.0 / jnp.where(seen, total, column + 1.0), column)
        self.store(tile, number, sums * of_columns(inverse))


def store_in_pages(
    pages: Ref, places: jax.Array, first: Scalar, feature: Scalar, values: jax.Array
) -> None:
    """Stores features of keys or values of new tokens, of 16 bits, in their pages.

    Args:
        pages: [lines,G,H] of global memory.
        places: int32 [M], of each token a row of the first head's pages, in the layout
            of a row of `values`; negative of those that belong nowhere.
        first: int32, how many rows the head's lie behind those.
        feature: int32, which feature is the first.
        values: [64,M], in the layout of sums.
    """
    scalar = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), PER_QUERY, scalar, scalar, plgpu.Layout.WGMMA)
    )
    def store_new_tokens(
        _: Any, pages: Any, places: Any, first: Any, feature: Any, values: Any
    ) -> None:
        i16, i32, i64 = (ir.IntegerType.get_signless(n) for n in (16, 32, 64))
        base = llvm.ptrtoint(i64, mgpu.utils.memref_ptr(pages))
        head_dim = mgpu.utils.c(ir.MemRefType(pages.type).shape[-1], i64)
        before, begin = (x.registers.item() for x in (first, feature))
        at_places = values.layout.thread_idxs(values.shape)
        for at, (feature_of, _) in zip(
            np.ndindex(values.registers.shape), at_places, strict=True
        ):
            eight = places.registers.flat[at[1]]
            column = arith.addi(arith.index_cast(i32, feature_of), begin)
            for i in range(2):
                place = vector.extract(eight, [], [i])
                there = arith.cmpi(arith.CmpIPredicate.sge, place, mgpu.utils.c(0, i32))
                row = arith.extui(i64, arith.addi(place, before))
                offset = arith.addi(arith.muli(row, head_dim), arith.extui(i64, column))
                address = arith.addi(base, arith.muli(offset, mgpu.utils.c(2, i64)))
                number = vector.extract(values.registers[at], [], [i])
                llvm.inline_asm(
                    ir.Type.parse("!llvm.void"),
                    [there, address, arith.bitcast(i16, number)],
                    "@$0 st.global.b16 [$1], $2;",
                    "b,l,h",
                    has_side_effects=True,
                )

    store: Any = store_new_tokens  # the decorator supplies the context
    store(pages, places, jnp.int32(first), jnp.int32(feature), values)
