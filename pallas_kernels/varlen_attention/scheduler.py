"""Tile schedules of the kernels: tables that are built from the sequence lengths.

A kernel has one block for each tile of queries (or of keys, in the backward pass) and
head. How many tiles there are depends on the lengths, which the host need not see, so
the grid has room for the most that a budget of tokens can need: a sequence of ``n``
tokens needs ``ceil(n / block)`` tiles, all together ``(T + B * (block - 1)) / block``
at most, and blocks past the last tile leave at once. Tiles are listed from the longest
sequence to the shortest, because the hardware hands out blocks in order: the expensive
ones start first and the cheap ones fill the gaps at the end.

What lies past the last sequence is listed as one more sequence that sees nothing, so
the kernels write its zeros too.

Everything is int32. Where prefix sums are arrays of numpy, known while a program is
traced, so is all that is made of them: a table is a constant of the program, and no
kernel makes it. Else XLA makes two kernels of it, the order of the sequences and the
table: a short sequence takes little longer than a launch. A model that attends with one
``cu_seqlens`` in every layer computes them once.

Axes: R rows of the batch, B sequences of a row, E sequences and rests of all
rows, empty sequences included, T packed queries of a row.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from pallas_kernels.varlen_attention.segments import Window


type AnyArray = Array | np.ndarray
"""Of jax, or of numpy and known while a program is traced."""

_PAIRWISE = 2048
"""Most sequences for which an order by pairwise comparison beats a sort."""
_LEAST_SEQUENCES = 32
"""Empty ones are added up to this many: sums over fewer are not done by warps, and XLA
makes more kernels of them."""
_ALL_PAIRS = 2**16
"""Most pairs of a slot and a sequence for which a table of all of them beats a kernel
that finds each slot's sequence."""


def namespace(x: AnyArray) -> Any:
    """The module to compute with: numpy for what is known while a program is traced."""
    return np if isinstance(x, np.ndarray) else jnp


class Sequences(NamedTuple):
    """All sequences of all rows, and the rest of each row. Counted within the row."""

    row: Int[AnyArray, " E"]
    """The row of the batch."""
    q_start: Int[AnyArray, " E"]
    q_end: Int[AnyArray, " E"]
    k_start: Int[AnyArray, " E"]
    k_end: Int[AnyArray, " E"]
    q_total: Int[AnyArray, " E"]
    """Queries of all sequences of the row; what follows may hold anything."""
    k_total: Int[AnyArray, " E"]
    """The same of keys."""
    real: Int[AnyArray, " E"]
    """1 for a sequence, 0 for the rest of a row."""

    @classmethod
    def of(
        cls,
        cu_q: Int[AnyArray, "R bounds"],
        cu_k: Int[AnyArray, "R bounds"],
        num_queries: int,
        num_keys: int,
    ) -> "Sequences":
        """The sequences that prefix sums describe, and perhaps some empty ones."""
        xp = namespace(cu_q)
        cu_q, cu_k = xp.minimum(cu_q, num_queries), xp.minimum(cu_k, num_keys)
        rows, bounds = cu_q.shape
        padded = max(bounds, -(-_LEAST_SEQUENCES // rows))
        index = xp.arange(padded, dtype=np.int32)

        def with_rest(cu: AnyArray, total: int) -> tuple[AnyArray, AnyArray]:
            # A pad fuses, where a concatenation would be a kernel of its own.
            end = xp.pad(cu[:, 1:], ((0, 0), (0, 1)), constant_values=total)
            start, end = (
                xp.pad(x, ((0, 0), (0, padded - bounds))).reshape(-1) for x in (cu, end)
            )
            return start, end

        def each(x: AnyArray) -> AnyArray:
            return xp.broadcast_to(x, (rows, padded)).reshape(-1)

        (q_start, q_end), (k_start, k_end) = (
            with_rest(cu_q, num_queries),
            with_rest(cu_k, num_keys),
        )
        return cls(
            row=each(xp.arange(rows, dtype=np.int32)[:, None]),
            q_start=q_start,
            q_end=q_end,
            k_start=k_start,
            k_end=k_end,
            q_total=each(cu_q[:, -1:]),
            k_total=each(cu_k[:, -1:]),
            real=each((index < bounds - 1).astype(np.int32)),
        )


class Tiles(NamedTuple):
    """Tiles of all sequences, one a slot of the grid.

    Where they are few, slots stand against sequences, of which `mine` picks one; what
    is said of a tile is computed for all pairs. Else each slot has looked up its own.
    """

    index: Int[AnyArray, "slots E"] | Int[AnyArray, " slots"]
    """Number of the tile in the sequence."""
    mine: Bool[AnyArray, "slots E"] | Bool[AnyArray, " slots"]
    """True where the slot holds that tile; none, past the last tile."""
    sequence: Int[AnyArray, " slots"] | None
    """Index into `Sequences`; None where all pairs are computed."""
    first: Int[AnyArray, " E"]
    """The slot of each sequence's first tile."""
    counts: Int[AnyArray, " E"]
    """Tiles of each sequence; as many slots as their sum are used, the first ones."""

    def of(self, x: Int[AnyArray, " E"]) -> AnyArray:
        """Spread values of sequences over their tiles.

        In the shape of `index`, or one that broadcasts to it.
        """
        return x[None] if self.sequence is None else x[self.sequence]

    def sequences(self, seqs: Sequences) -> Sequences:
        """The sequence of each tile."""
        return Sequences(*(self.of(x) for x in seqs))

    def table(
        self, fields: Sequence[AnyArray], total: bool = False
    ) -> Int[AnyArray, "slots fields"]:
        """One line a slot, zeros for a slot past the last tile.

        Args:
            fields: columns, in the shape of `index` or what broadcasts to it.
            total: whether one more column says how many slots are used, in all lines.
        """
        xp = namespace(self.index)
        columns = [xp.where(self.mine, x, 0) for x in fields]
        if total:
            pairs = self.sequence is None
            numbers = self.counts if pairs else xp.sum(self.counts, dtype=np.int32)
            columns.append(xp.broadcast_to(numbers, self.index.shape))
        table = xp.stack(columns, axis=1)
        return table if table.ndim == 2 else xp.sum(table, axis=2, dtype=np.int32)


def most_tiles(rows: int, tokens: int, max_seqs: int, block: int) -> int:
    """Most tiles that any lengths can need: the slots of the grid."""
    return rows * ((tokens + (max_seqs + 1) * (block - 1)) // block)


def _first_tiles(counts: AnyArray, cost: AnyArray) -> AnyArray:
    """The slot of each sequence's first tile, sequences in order of falling cost."""
    xp = namespace(counts)
    index = xp.arange(cost.shape[0], dtype=np.int32)
    if cost.shape[0] <= _PAIRWISE:
        ahead = (cost[None] > cost[:, None]) | (
            (cost[None] == cost[:, None]) & (index[None] < index[:, None])
        )
        return xp.sum(xp.where(ahead, counts[None], 0), axis=1, dtype=np.int32)
    order = xp.argsort(-cost, stable=True)
    before = xp.cumsum(counts[order], dtype=np.int32) - counts[order]
    if xp is np:
        return before[np.argsort(order)]
    return jnp.zeros_like(before).at[order].set(before)


def tile_sequences(
    start: Int[AnyArray, " E"],
    end: Int[AnyArray, " E"],
    cost: Int[AnyArray, " E"] | None,
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
    xp = namespace(start)
    counts = (end - start + block - 1) // block
    first = _first_tiles(counts, xp.zeros_like(counts) if cost is None else cost)
    slot = xp.arange(slots, dtype=np.int32)
    index = slot[:, None] - first[None]
    mine = (index >= 0) & (index < counts[None])
    if slots * counts.shape[0] <= _ALL_PAIRS:
        return Tiles(index, mine, None, first, counts)
    names = xp.arange(counts.shape[0], dtype=np.int32)
    sequence = xp.sum(xp.where(mine, names[None] + 1, 0), axis=1, dtype=np.int32) - 1
    used = sequence >= 0
    sequence = xp.maximum(sequence, 0)
    return Tiles(slot - first[sequence], used, sequence, first, counts)


def interval_of_keys(
    first_row: AnyArray, last_row: AnyArray, seq: Sequences, window: Window
) -> tuple[AnyArray, AnyArray]:
    """The keys that any of some consecutive queries of a sequence attends to.

    Args:
        first_row: the first query.
        last_row: the last query.
        seq: its sequence, of the same shape.
        window: (left, right).

    Returns:
        ``(start, stop)``; ``start >= stop`` if there is none.
    """
    xp = namespace(seq.k_start)
    left, right = window
    offset = seq.k_end - seq.q_end
    start, stop = seq.k_start, seq.k_end
    if left is not None:
        start = xp.clip(first_row + offset - left, start, stop)
    if right is not None:
        stop = xp.minimum(stop, last_row + offset + right + 1)
    return start, xp.where(seq.real == 1, stop, start)
