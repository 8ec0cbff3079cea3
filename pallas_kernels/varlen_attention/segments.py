"""Boundaries of packed sequences, as prefix sums, segment ids and ranges.

Sequences of different length lie one after another in a buffer of static length, the
token budget. ``cu_seqlens`` holds the prefix sums of their lengths: sequence ``b`` is
rows ``cu_seqlens[b]:cu_seqlens[b + 1]``. The number of sequences is static too; unused
entries repeat the last value, which makes sequences of length zero. Everything here is
a few vector operations on the device: nothing is copied to the host.

Axes: B sequences, T packed tokens.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from pallas_kernels.arrays import concrete


type Window = tuple[int | None, int | None]
"""Keys that a query attends to on its left and its right; None is no limit."""


def check_cu_seqlens(
    name: str,
    cu_seqlens: Int[Array | np.ndarray, "*rows bounds"],
    num_tokens: int,
    rows: tuple[int, ...] = (),
) -> Int[Array, "*rows bounds"]:
    """Check prefix sums as far as they are known; return them as an int32 array.

    Those that are not known may pass `num_tokens`, see `cut_cu_seqlens`.

    Args:
        name: what to call the argument in messages.
        cu_seqlens: [*rows, B+1], prefix sums of the lengths of the sequences.
        num_tokens: tokens of a packed row.
        rows: (R,) for a batch of packed rows, () for one.

    Raises:
        TypeError: `cu_seqlens` does not hold integers.
        ValueError: it does not hold two or more entries for each row; or its values,
            when they are not traced, do not start at 0, decrease, or pass `num_tokens`.
    """
    if not isinstance(cu_seqlens, jax.Array):
        cu_seqlens = np.asarray(cu_seqlens)
    if not jnp.issubdtype(cu_seqlens.dtype, jnp.integer):
        raise TypeError(f"{name} must hold integers, got {cu_seqlens.dtype}")
    if cu_seqlens.shape[:-1] != rows or not cu_seqlens.ndim or cu_seqlens.shape[-1] < 2:
        of_rows = f" for each of {rows[0]} rows, [{rows[0]}, B + 1]" if rows else ""
        raise ValueError(
            f"{name} must hold B + 1 >= 2 prefix sums{of_rows}, got shape "
            f"{cu_seqlens.shape}; batches of rows have q, k, v and {name} with a "
            "leading axis"
        )
    values = concrete(cu_seqlens)
    if values is None:
        return jnp.asarray(cu_seqlens, jnp.int32)
    for row in np.ndindex(rows):
        _check_values(name, "".join(f"{i}, " for i in row), values[row], num_tokens)
    return jnp.asarray(cu_seqlens, jnp.int32)


def _check_values(name: str, row: str, values: np.ndarray, num_tokens: int) -> None:
    """Check the prefix sums of one row, ``name[row ...]`` in messages."""
    if values[0] != 0:
        raise ValueError(f"{name} must start at 0, got {name}[{row}0]={values[0]}")
    falls = np.flatnonzero(np.diff(values) < 0)
    if falls.size:
        at = int(falls[0])
        raise ValueError(
            f"{name} must not decrease, got {name}[{row}{at}]={values[at]} before "
            f"{name}[{row}{at + 1}]={values[at + 1]}; pass the prefix sums of the "
            "lengths, not the lengths, and repeat the last value to pad"
        )
    if values[-1] > num_tokens:
        raise ValueError(
            f"{name} must end at most at num_tokens={num_tokens}, got "
            f"{name}[{row}-1]={values[-1]}; raise token_budget or drop sequences"
        )


def cut_cu_seqlens(
    cu_seqlens: Int[Array | np.ndarray, "..."], num_tokens: int
) -> Int[Array, "..."]:
    """Prefix sums that end with the buffer, so that nothing reads past it."""
    return jnp.minimum(cu_seqlens, num_tokens)


def segment_ids_from_cu_seqlens(
    cu_seqlens: Int[Array | np.ndarray, " bounds"], num_tokens: int
) -> Int[Array, " T"]:
    """Number the rows of a packed buffer by the sequence that they belong to.

    ``ids[t] = b`` where ``cu_seqlens[b] <= t < cu_seqlens[b + 1]``, else ``-1``.

    Args:
        cu_seqlens: [B+1], prefix sums of the lengths of the sequences.
        num_tokens: T, rows of the packed buffer.

    Returns:
        int32 [T]; -1 past the last sequence.

    Example:
        >>> import numpy as np
        >>> segment_ids_from_cu_seqlens(np.array([0, 2, 2, 5]), 7)
        Array([ 0,  0,  2,  2,  2, -1, -1], dtype=int32)
    """
    cu_seqlens = jnp.asarray(cu_seqlens, jnp.int32)
    rows = jnp.arange(num_tokens, dtype=jnp.int32)
    # Unrolled, the search is a handful of fused gathers and no loop.
    ids = jnp.searchsorted(cu_seqlens, rows, side="right", method="scan_unrolled") - 1
    return jnp.where(rows < cu_seqlens[-1], ids.astype(jnp.int32), -1)


def cu_seqlens_from_segment_ids(
    segment_ids: Int[Array | np.ndarray, " T"], max_seqs: int
) -> Int[Array, " bounds"]:
    """Prefix sums of the lengths of sequences that are given by segment ids.

    ``cu_seqlens[b] = #{t : 0 <= segment_ids[t] < b}``. An id that does not occur makes
    a sequence of length zero, so ids keep their meaning as indices.

    Args:
        segment_ids: [T], ids that do not decrease, then negative ids to the end for
            rows of no sequence. Where 0 marks padding, pass ``segment_ids - 1``.
        max_seqs: B, static; rows with a larger id count as padding when the ids are
            traced.

    Returns:
        int32 [max_seqs + 1].

    Raises:
        TypeError: `segment_ids` does not hold integers, or `max_seqs` is none.
        ValueError: ids that are not traced are out of order, or reach `max_seqs`; or
            `segment_ids` is not a vector.

    Example:
        >>> import numpy as np
        >>> cu_seqlens_from_segment_ids(np.array([0, 0, 2, 2, 2, -1]), max_seqs=4)
        Array([0, 2, 2, 5, 5], dtype=int32)
    """
    if not isinstance(max_seqs, int | np.integer):  # it is a shape
        raise TypeError(
            f"max_seqs must be an integer, got {max_seqs!r}; under jax.jit it is static"
        )
    if max_seqs < 1:
        raise ValueError(f"max_seqs must be at least 1, got {max_seqs}")
    if not isinstance(segment_ids, jax.Array):
        segment_ids = np.asarray(segment_ids)
    if not jnp.issubdtype(segment_ids.dtype, jnp.integer):
        raise TypeError(f"segment ids must be integers, got {segment_ids.dtype}")
    if segment_ids.ndim != 1:
        raise ValueError(
            f"segment ids must be a vector, got shape {segment_ids.shape}; for batched "
            "rows use jax.vmap"
        )
    values = concrete(segment_ids)
    if values is not None and values.size:
        if values.max() >= max_seqs:
            raise ValueError(
                f"segment ids must be below max_seqs={max_seqs}, got "
                f"{values.max()}; raise max_seqs or renumber the sequences from 0"
            )
        order = np.where(values < 0, max_seqs, values)
        falls = np.flatnonzero(np.diff(order) < 0)
        if falls.size:
            at = int(falls[0])
            raise ValueError(
                "segment ids must not decrease, with negative ids only at the end, "
                f"got {values[at]} before {values[at + 1]} at row {at}; pack the "
                "sequences one after another"
            )
    ids = jnp.asarray(segment_ids, jnp.int32)
    ids = jnp.where((ids < 0) | (ids >= max_seqs), max_seqs, ids)
    bounds = jnp.arange(max_seqs + 1, dtype=jnp.int32)
    return jnp.sum(ids[None, :] < bounds[:, None], axis=1, dtype=jnp.int32)


def positions_from_cu_seqlens(
    cu_seqlens: Int[Array | np.ndarray, " bounds"], num_tokens: int
) -> Int[Array, " T"]:
    """Position of each row of a packed buffer within its sequence.

    ``positions[t] = t - cu_seqlens[b]`` for the sequence ``b`` that holds row ``t``.

    Args:
        cu_seqlens: [B+1], prefix sums of the lengths of the sequences.
        num_tokens: T, rows of the packed buffer.

    Returns:
        int32 [T]; 0 past the last sequence.

    Example:
        >>> import numpy as np
        >>> positions_from_cu_seqlens(np.array([0, 2, 2, 5]), 7)
        Array([0, 1, 0, 1, 2, 0, 0], dtype=int32)
    """
    cu_seqlens = jnp.asarray(cu_seqlens, jnp.int32)
    ids = segment_ids_from_cu_seqlens(cu_seqlens, num_tokens)
    rows = jnp.arange(num_tokens, dtype=jnp.int32)
    return jnp.where(ids >= 0, rows - cu_seqlens[ids], 0)


def visible_ranges(
    cu_rows: Int[Array, " bounds"],
    cu_columns: Int[Array, " bounds"],
    num_rows: int,
    window: Window,
) -> tuple[Int[Array, " T"], Int[Array, " T"], Int[Array, " T"]]:
    """The columns that each row sees: one interval, whatever the mask.

    Row ``i`` of a sequence sees column ``j`` of the same sequence where
    ``-left <= j - i - (num_columns - num_rows) <= right``, all counted within the
    sequence: the window is laid around the diagonal that ends in the bottom right
    corner. Sequence, window and causal triangle together leave one interval a row.

    Args:
        cu_rows: [B+1], prefix sums of the sequences over rows.
        cu_columns: [B+1], the same over columns.
        num_rows: T, rows of the packed buffer.
        window: (left, right).

    Returns:
        ``(start, stop, diagonal)``, int32 [T] each, as rows of the packed buffer of
        the columns: row ``t`` attends to ``start[t] <= j < stop[t]``, nothing where
        ``start[t] == stop[t]``; ``diagonal[t]`` is the column on its diagonal, which
        may lie outside the sequence. All are 0 past the last sequence.
    """
    ids = segment_ids_from_cu_seqlens(cu_rows, num_rows)
    row_end = cu_rows[ids + 1]
    begin, end = cu_columns[ids], cu_columns[ids + 1]
    rows = jnp.arange(num_rows, dtype=jnp.int32)
    diagonal = end - row_end + rows
    left, right = window
    start = begin if left is None else jnp.maximum(begin, diagonal - left)
    stop = end if right is None else jnp.minimum(end, diagonal + right + 1)
    # A window may miss the sequence on either side.
    start = jnp.minimum(start, end)
    stop = jnp.maximum(stop, start)
    inside = ids >= 0
    return (
        jnp.where(inside, start, 0),
        jnp.where(inside, stop, 0),
        jnp.where(inside, diagonal, 0),
    )
