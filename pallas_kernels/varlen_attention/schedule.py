"""Which block computes what: tables that XLA builds from the sequence lengths.

A kernel has one block for each tile of queries (or of keys, in the backward pass) and
head. How many tiles there are depends on the lengths, which the host never sees, so the
grid has room for the most that a budget of tokens can need: a sequence of ``n`` tokens
needs ``ceil(n / block)`` tiles, all together ``(T + B * (block - 1)) / block`` at most,
and blocks past the last tile leave at once. Tiles are listed from the longest sequence
to the shortest, because the hardware hands out blocks in order: the expensive ones
start first and the cheap ones fill the gaps at the end.

What lies past the last sequence is listed as one more sequence that sees nothing, so
the kernels write its zeros too.

Everything is a few small XLA operations on int32; a model that attends with one
``cu_seqlens`` in every layer computes them once.

Axes: R rows of the batch, B sequences of a row, E = R * (B + 1) sequences and rests,
T packed queries of a row.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels.varlen_attention.segments import Window


__all__ = ["Sequences", "Tiles", "interval_of_keys", "most_tiles", "tile_sequences"]

_PAIRWISE = 2048
"""Up to this many sequences, an order by pairwise comparison beats a sort."""


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
        """The sequences that prefix sums describe."""
        rows, bounds = cu_q.shape

        def with_rest(cu: Array, total: int) -> tuple[Array, Array]:
            end = jnp.full((rows, 1), total, jnp.int32)
            return cu.reshape(-1), jnp.concatenate([cu[:, 1:], end], 1).reshape(-1)

        def each(x: Array) -> Array:
            return jnp.broadcast_to(x, (rows, bounds)).reshape(-1)

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
            real=each(
                (jnp.arange(bounds, dtype=jnp.int32) < bounds - 1).astype(jnp.int32)[
                    None
                ]
            ),
        )


class Tiles(NamedTuple):
    """Tiles of all sequences, one entry a slot of the grid."""

    sequence: Int[Array, " slots"]
    """Index into `Sequences`."""
    index: Int[Array, " slots"]
    """Which tile of the sequence."""
    used: Int[Array, " slots"]
    """1, or 0 for a slot past the last tile."""
    count: Int[Array, ""]
    """How many slots are used: the first ones."""


def most_tiles(rows: int, tokens: int, max_seqs: int, block: int) -> int:
    """How many tiles any lengths can need: the slots of the grid."""
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
) -> tuple[Tiles, Int[Array, " E"]]:
    """Cuts sequences into tiles.

    Args:
        start: first row of each sequence.
        end: the row after its last.
        cost: what a tile of it costs; sequences are listed by falling cost. None keeps
            their order.
        block: rows of a tile.
        slots: `most_tiles`.

    Returns:
        The tiles, and the slot of each sequence's first tile.
    """
    counts = -(-(end - start) // block)
    first = _first_tiles(counts, jnp.zeros_like(counts) if cost is None else cost)
    slot = jnp.arange(slots, dtype=jnp.int32)
    mine = (first[None] <= slot[:, None]) & (slot[:, None] < (first + counts)[None])
    names = jnp.arange(counts.shape[0], dtype=jnp.int32)
    sequence = jnp.sum(jnp.where(mine, names[None] + 1, 0), axis=1, dtype=jnp.int32) - 1
    used = sequence >= 0
    sequence = jnp.maximum(sequence, 0)
    index = jnp.where(used, slot - first[sequence], 0)
    count = jnp.sum(counts, dtype=jnp.int32)
    return Tiles(sequence, index, used.astype(jnp.int32), count), first


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
