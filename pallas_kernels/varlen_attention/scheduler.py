"""Tile schedules of the kernels: tables that XLA builds from the sequence lengths.

A kernel has one block for each tile of queries (or of keys, in the backward pass) and
head. How many tiles there are depends on the lengths, which the host never sees, so the
grid has room for the most that a budget of tokens can need: a sequence of ``n`` tokens
needs ``ceil(n / block)`` tiles, all together ``(T + B * (block - 1)) / block`` at most,
and blocks past the last tile leave at once. Tiles are listed from the longest sequence
to the shortest, because the hardware hands out blocks in order: the expensive ones
start first and the cheap ones fill the gaps at the end.

What lies past the last sequence is listed as one more sequence that sees nothing, so
the kernels write its zeros too.

Everything is int32 and written so that XLA makes two kernels of it, the order of the
sequences and the table: a short sequence takes little longer than a launch. A model
that attends with one ``cu_seqlens`` in every layer computes them once.

Axes: R rows of the batch, B sequences of a row, E sequences and rests of all
rows, empty sequences included, T packed queries of a row.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from pallas_kernels.varlen_attention.segments import Window, cut_cu_seqlens


__all__ = ["Sequences", "Tiles", "interval_of_keys", "most_tiles", "tile_sequences"]

_PAIRWISE = 2048
"""Most sequences for which an order by pairwise comparison beats a sort."""
_LEAST_SEQUENCES = 32
"""Empty ones are added up to this many: sums over fewer are not done by warps, and XLA
makes more kernels of them."""
_ALL_PAIRS = 2**16
"""Most pairs of a slot and a sequence for which a table of all of them beats a kernel
that finds each slot's sequence."""


class Sequences(NamedTuple):
    """All sequences of all rows, and the rest of each row. Counted within the row."""

    row: Int[Array, " E"]
    """The row of the batch."""
    q_start: Int[Array, " E"]
    q_end: Int[Array, " E"]
    k_start: Int[Array, " E"]
    k_end: Int[Array, " E"]
    q_total: Int[Array, " E"]
    """Queries of all sequences of the row; what follows may hold anything."""
    k_total: Int[Array, " E"]
    """The same of keys."""
    real: Int[Array, " E"]
    """1 for a sequence, 0 for the rest of a row."""

    @classmethod
    def of(
        cls,
        cu_q: Int[Array, "R bounds"],
        cu_k: Int[Array, "R bounds"],
        num_queries: int,
        num_keys: int,
    ) -> "Sequences":
        """The sequences that prefix sums describe, and perhaps some empty ones."""
        cu_q = cut_cu_seqlens(cu_q, num_queries)
        cu_k = cut_cu_seqlens(cu_k, num_keys)
        rows, bounds = cu_q.shape
        padded = max(bounds, -(-_LEAST_SEQUENCES // rows))
        index = jnp.arange(padded, dtype=jnp.int32)

        def with_rest(cu: Array, total: int) -> tuple[Array, Array]:
            # A pad fuses, where a concatenation would be a kernel of its own.
            end = jnp.pad(cu[:, 1:], ((0, 0), (0, 1)), constant_values=total)
            start, end = (
                jnp.pad(x, ((0, 0), (0, padded - bounds))).reshape(-1)
                for x in (cu, end)
            )
            return start, end

        def each(x: Array) -> Array:
            return jnp.broadcast_to(x, (rows, padded)).reshape(-1)

        (q_start, q_end), (k_start, k_end) = (
            with_rest(cu_q, num_queries),
            with_rest(cu_k, num_keys),
        )
        return cls(
            row=each(jnp.arange(rows, dtype=jnp.int32)[:, None]),
            q_start=q_start,
            q_end=q_end,
            k_start=k_start,
            k_end=k_end,
            q_total=each(cu_q[:, -1:]),
            k_total=each(cu_k[:, -1:]),
            real=each((index < bounds - 1).astype(jnp.int32)),
        )


class Tiles(NamedTuple):
    """Tiles of all sequences, one a slot of the grid.

    Where they are few, slots stand against sequences, of which `mine` picks one; what
    is said of a tile is computed for all pairs. Else each slot has looked up its own.
    """

    index: Int[Array, "slots E"] | Int[Array, " slots"]
    """Number of the tile in the sequence."""
    mine: Bool[Array, "slots E"] | Bool[Array, " slots"]
    """True where the slot holds that tile; none, past the last tile."""
    sequence: Int[Array, " slots"] | None
    """Index into `Sequences`; None where all pairs are computed."""
    first: Int[Array, " E"]
    """The slot of each sequence's first tile."""
    counts: Int[Array, " E"]
    """Tiles of each sequence; as many slots as their sum are used, the first ones."""

    def of(self, x: Int[Array, " E"]) -> Array:
        """Spread values of sequences over their tiles.

        In the shape of `index`, or one that broadcasts to it.
        """
        return x[None] if self.sequence is None else x[self.sequence]

    def sequences(self, seqs: Sequences) -> Sequences:
        """The sequence of each tile."""
        return Sequences(*(self.of(x) for x in seqs))

    def table(
        self, fields: Sequence[Array], total: bool = False
    ) -> Int[Array, "slots fields"]:
        """One line a slot, zeros for a slot past the last tile.

        Args:
            fields: columns, in the shape of `index` or what broadcasts to it.
            total: whether one more column says how many slots are used, in all lines.
        """
        columns = [jnp.where(self.mine, x, 0) for x in fields]
        if total:
            pairs = self.sequence is None
            numbers = self.counts if pairs else jnp.sum(self.counts, dtype=jnp.int32)
            columns.append(jnp.broadcast_to(numbers, self.index.shape))
        table = jnp.stack(columns, axis=1)
        return table if table.ndim == 2 else jnp.sum(table, axis=2, dtype=jnp.int32)


def most_tiles(rows: int, tokens: int, max_seqs: int, block: int) -> int:
    """Most tiles that any lengths can need: the slots of the grid."""
    return rows * ((tokens + (max_seqs + 1) * (block - 1)) // block)


def _first_tiles(counts: Array, cost: Array) -> Array:
    """The slot of each sequence's first tile, sequences in order of falling cost."""
    index = jnp.arange(cost.shape[0], dtype=jnp.int32)
    if cost.shape[0] <= _PAIRWISE:
        ahead = (cost[None] > cost[:, None]) | (
            (cost[None] == cost[:, None]) & (index[None] < index[:, None])
        )
        return jnp.sum(jnp.where(ahead, counts[None], 0), axis=1, dtype=jnp.int32)
    order = jnp.argsort(-cost, stable=True)
    sums = jnp.cumsum(counts[order], dtype=jnp.int32)
    return jnp.zeros_like(sums).at[order].set(sums - counts[order])


def tile_sequences(
    start: Int[Array, " E"],
    end: Int[Array, " E"],
    cost: Int[Array, " E"] | None,
    block: int,
    slots: int,
) -> Tiles:
    """Cuts sequences into tiles.

    Args:
        start: first row of each sequence.
        end: the row after its last.
        cost: what a tile of it costs; sequences are listed by falling cost. None keeps
            their order.
        block: rows of a tile.
        slots: how many to list, at least `most_tiles`.
    """
    counts = (end - start + block - 1) // block
    first = _first_tiles(counts, jnp.zeros_like(counts) if cost is None else cost)
    slot = jnp.arange(slots, dtype=jnp.int32)
    index = slot[:, None] - first[None]
    mine = (index >= 0) & (index < counts[None])
    if slots * counts.shape[0] <= _ALL_PAIRS:
        return Tiles(index, mine, None, first, counts)
    names = jnp.arange(counts.shape[0], dtype=jnp.int32)
    sequence = jnp.sum(jnp.where(mine, names[None] + 1, 0), axis=1, dtype=jnp.int32) - 1
    used = sequence >= 0
    sequence = jnp.maximum(sequence, 0)
    return Tiles(slot - first[sequence], used, sequence, first, counts)


def interval_of_keys(
    first_row: Array, last_row: Array, seq: Sequences, window: Window
) -> tuple[Array, Array]:
    """The keys that any of some consecutive queries of a sequence sees.

    Args:
        first_row: the first query.
        last_row: the last query.
        seq: its sequence, of the same shape.
        window: (left, right).

    Returns:
        ``(start, stop)``; ``start >= stop`` if there is none.
    """
    left, right = window
    offset = seq.k_end - seq.q_end
    start, stop = seq.k_start, seq.k_end
    if left is not None:
        start = jnp.clip(first_row + offset - left, start, stop)
    if right is not None:
        stop = jnp.minimum(stop, last_row + offset + right + 1)
    return start, jnp.where(seq.real == 1, stop, start)
