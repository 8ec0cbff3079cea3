"""Sequence packing: sequences of different lengths in buffers of one static length.

A packed row is a token budget that sequences fill one after another; ``cu_seqlens``,
the prefix sums of their lengths, says where each begins. The budget and the number of
sequences per row are static, so one compilation serves every batch; the lengths are
data and never leave the device. `pack` and `unpack` convert between padded batches and
packed rows on the device; `pack_sequences` fills rows on the host.

Axes: B batch (packed rows), L padded length, T packed tokens, S sequences per row.
"""

import bisect
import dataclasses
import typing
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Shaped

from pallas_kernels.arrays import concrete
from pallas_kernels.varlen_attention import (
    positions_from_cu_seqlens,
    segment_ids_from_cu_seqlens,
)
from pallas_kernels.varlen_attention.segments import (
    check_cu_seqlens,
    cut_cu_seqlens,
)


# As a pytree it also carries shardings, shapes or None in the place of arrays, so its
# fields are not checked at run time.
@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """Packed rows for training: inputs, targets, loss mask and sequence boundaries.

    Sequence ``s`` of row ``b`` is ``tokens[b, cu_seqlens[b, s]:cu_seqlens[b, s + 1]]``;
    everything past ``cu_seqlens[b, -1]`` is padding. Fields hold JAX arrays on the
    device and numpy arrays on the host.

    Example:
        Sequences of 2 and 1 tokens in a row of 4:

        >>> batch = PackedBatch(
        ...     tokens=np.array([[5, 6, 7, 0]]),
        ...     targets=np.array([[6, 0, 0, 0]]),
        ...     loss_mask=np.array([[True, False, False, False]]),
        ...     cu_seqlens=np.array([[0, 2, 3]]),
        ... )
        >>> batch.tokens[0, batch.cu_seqlens[0, 1] : batch.cu_seqlens[0, 2]]
        array([7])
    """

    tokens: Int[Array | np.ndarray, "B T"]
    """int32, token ids; 0 in the padding."""
    targets: Int[Array | np.ndarray, "B T"]
    """int32, the token that each position should predict; 0 if there is none."""
    loss_mask: Bool[Array | np.ndarray, "B T"]
    """True for targets that count in the loss."""
    cu_seqlens: Int[Array | np.ndarray, "B bounds"] | None
    """int32 [B, S+1], prefix sums of the lengths; the last value is repeated. None:
    each row is one sequence, for which attention has faster kernels."""


def positions(
    cu_seqlens: Int[Array | np.ndarray, "*B bounds"], num_tokens: int
) -> Int[Array, "*B T"]:
    """Position of each packed token within its sequence.

    ``positions[t] = t - cu_seqlens[s]`` for the sequence ``s`` that holds token ``t``.
    Rotary and learned position embeddings use these, never the index in the row.

    Args:
        cu_seqlens: [..., S+1], prefix sums of the lengths, for each row.
        num_tokens: T, tokens of a row.

    Returns:
        int32 [..., T]; 0 past the last sequence.

    Example:
        >>> import numpy as np
        >>> positions(np.array([[0, 2, 5], [0, 3, 3]]), 6)
        Array([[0, 1, 0, 1, 2, 0],
               [0, 1, 2, 0, 0, 0]], dtype=int32)
    """
    cu_seqlens = jnp.asarray(cu_seqlens, jnp.int32)
    if cu_seqlens.ndim == 1:
        return positions_from_cu_seqlens(cu_seqlens, num_tokens)
    return jax.vmap(lambda row: positions(row, num_tokens))(cu_seqlens)


def cu_seqlens_of_lengths(
    lengths: Sequence[int] | Int[np.ndarray, " _"], max_seqs: int
) -> Int[np.ndarray, " bounds"]:
    """Boundaries of a row's sequences, on the host, the last one repeated.

    Example:
        >>> cu_seqlens_of_lengths([2, 3], max_seqs=4)
        array([0, 2, 5, 5, 5], dtype=int32)
    """
    cu_seqlens = np.zeros(max_seqs + 1, np.int32)
    cu_seqlens[1 : len(lengths) + 1] = np.cumsum(lengths)
    cu_seqlens[len(lengths) + 1 :] = cu_seqlens[len(lengths)]
    return cu_seqlens


def cu_seqlens_of_rows(batch: int, num_tokens: int) -> Int[Array, "batch 2"]:
    """Boundaries for rows of one sequence each."""
    row = jnp.array([0, num_tokens], jnp.int32)
    return jnp.broadcast_to(row, (batch, 2))  # [B, 2]


def check_cu_seqlens_of_rows(
    cu_seqlens: Int[Array | np.ndarray, "_ _"], shape: tuple[int, ...]
) -> None:
    """Raise if sequence boundaries do not fit packed rows, as far as they are known.

    Args:
        cu_seqlens: [B, S+1], boundaries of packed sequences.
        shape: (B, T), rows and tokens per row.

    Raises:
        ValueError: the numbers of rows differ; or values that are not traced do not
            start at 0, decrease, or exceed T.
    """
    batch, num_tokens = shape
    if cu_seqlens.ndim != 2 or cu_seqlens.shape[0] != batch:
        raise ValueError(
            f"cu_seqlens has shape {cu_seqlens.shape}, expected the boundaries of "
            f"{batch} rows, ({batch}, sequences + 1)"
        )
    values = concrete(cu_seqlens)
    if values is None:
        return
    wrong = (values[:, 0] != 0) | (values[:, -1] > num_tokens)
    wrong |= (np.diff(values) < 0).any(axis=1)
    for row in np.flatnonzero(wrong)[:1]:
        check_cu_seqlens(f"cu_seqlens[{row}]", values[row], num_tokens)


def pack(
    padded: Shaped[Array | np.ndarray, "B L *D"],
    lengths: Int[Array | np.ndarray, " B"],
    token_budget: int,
) -> tuple[Shaped[Array, "T *D"], Int[Array, " bounds"]]:
    """Pack the sequences of a padded batch into one buffer, without their padding.

    ``packed[cu_seqlens[b] + l] = padded[b, l]`` for ``l < lengths[b]``.

    Args:
        padded: [B, L, ...]; the padding may hold anything, NaN too.
        lengths: [B], length of each sequence, at most L.
        token_budget: T, static size of the packed buffer, in tokens.

    Returns:
        ``(packed, cu_seqlens)``: [T, ...], zero past the last sequence, and int32
        [B+1]. The gradient of the padding is zero.

    Raises:
        TypeError: lengths are not integers.
        ValueError: lengths that are not traced are negative, exceed L, or sum to more
            than `token_budget`. Traced ones cannot be checked: lengths are clipped to
            L, and tokens beyond the budget are dropped from both results.

    Example:
        >>> import jax.numpy as jnp
        >>> padded = jnp.array([[1, 2, 9], [9, 9, 9], [3, 4, 5]])
        >>> pack(padded, jnp.array([2, 0, 3]), token_budget=6)
        (Array([1, 2, 3, 4, 5, 0], dtype=int32), Array([0, 2, 2, 5], dtype=int32))

    References:
        ByteTransformer (arXiv 2210.03052), section III.D. There the number of valid
        tokens is copied to the host at every call; here the budget is static.
    """
    padded = jnp.asarray(padded)
    max_len = padded.shape[1]
    if not isinstance(lengths, jax.Array):
        lengths = np.asarray(lengths)
    if lengths.shape != padded.shape[:1]:
        raise ValueError(
            f"lengths must hold one number for each of the {padded.shape[0]} rows of "
            f"padded, got shape {lengths.shape}"
        )
    if not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise TypeError(f"lengths must be integers, got {lengths.dtype}")
    _check_lengths(lengths, max_len, token_budget)
    lengths = jnp.clip(jnp.asarray(lengths, jnp.int32), 0, max_len)
    cu_seqlens = jnp.pad(jnp.cumsum(lengths, dtype=jnp.int32), (1, 0))
    cu_seqlens = jnp.minimum(cu_seqlens, token_budget)
    ids = segment_ids_from_cu_seqlens(cu_seqlens, token_budget)
    within = positions_from_cu_seqlens(cu_seqlens, token_budget)
    inside = (ids >= 0).reshape(-1, *[1] * (padded.ndim - 2))  # [T, 1, ...]
    packed = jnp.where(inside, padded[ids, within], jnp.zeros((), padded.dtype))
    return packed, cu_seqlens


def unpack(
    packed: Shaped[Array | np.ndarray, "T *D"],
    cu_seqlens: Int[Array | np.ndarray, " bounds"],
    max_len: int,
) -> Shaped[Array, "B L *D"]:
    """Unpack sequences into a padded batch: the inverse of `pack`.

    ``padded[b, l] = packed[cu_seqlens[b] + l]`` for ``l < lengths[b]``, else zero.

    Args:
        packed: [T, ...]; rows past the last sequence may hold anything, NaN too.
        cu_seqlens: [B+1], prefix sums of the lengths.
        max_len: L, static padded length.

    Returns:
        [B, L, ...], zero after the end of each sequence.

    Raises:
        ValueError: prefix sums that are not traced do not start at 0, decrease, exceed
            T, or hold a sequence longer than `max_len`. Traced ones cannot be checked:
            longer sequences are truncated.

    Example:
        >>> import jax.numpy as jnp
        >>> unpack(jnp.array([1, 2, 3, 4, 5, 0]), jnp.array([0, 2, 2, 5]), max_len=3)
        Array([[1, 2, 0],
               [0, 0, 0],
               [3, 4, 5]], dtype=int32)
    """
    packed = jnp.asarray(packed)
    cu = check_cu_seqlens("cu_seqlens", cu_seqlens, packed.shape[0])
    cu = cut_cu_seqlens(cu, packed.shape[0])
    values = concrete(cu_seqlens)
    if values is not None and (longest := np.diff(values).max()) > max_len:
        raise ValueError(
            f"max_len={max_len} is too small for a sequence of {longest} tokens; "
            "raise max_len"
        )
    offsets = jnp.arange(max_len, dtype=jnp.int32)
    rows = cu[:-1, None] + offsets  # [B, L]
    inside = (rows < cu[1:, None]).reshape(*rows.shape, *[1] * (packed.ndim - 1))
    return jnp.where(inside, packed[rows], jnp.zeros((), packed.dtype))


def assign_rows(
    lengths: Sequence[int] | np.ndarray, token_budget: int, max_seqs: int
) -> list[list[int]]:
    """Assign sequences to packed rows by best fit, in the given order.

    Each sequence goes into the fullest row that still has room for it, the first such
    row on a tie, or opens a new row. The result is deterministic.

    Args:
        lengths: tokens of each sequence.
        token_budget: T, tokens per row.
        max_seqs: S, maximum number of sequences per row.

    Returns:
        The indices of the sequences of each row, in their order.

    Raises:
        ValueError: a sequence is longer than `token_budget`, or an argument is out of
            range.

    Example:
        >>> assign_rows([5, 6, 3, 2], token_budget=8, max_seqs=4)
        [[0, 2], [1, 3]]
    """
    if token_budget < 1 or max_seqs < 1:
        raise ValueError(
            "token_budget and max_seqs must be at least 1, got "
            f"token_budget={token_budget}, max_seqs={max_seqs}"
        )
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (room, row) of rows that may grow, sorted
    for index, length in enumerate(int(length) for length in lengths):
        if not 0 <= length <= token_budget:
            raise ValueError(
                f"sequence {index} has {length} tokens, expected at most "
                f"token_budget={token_budget}; raise token_budget or split the sequence"
            )
        at = bisect.bisect_left(free, (length, 0))
        if at < len(free):
            room, row = free.pop(at)
        else:
            room, row = token_budget, len(rows)
            rows.append([])
        rows[row].append(index)
        if len(rows[row]) < max_seqs:
            bisect.insort(free, (room - length, row))
    return rows


def pack_sequences(
    sequences: Sequence[Int[np.ndarray, " _"]], token_budget: int, max_seqs: int
) -> PackedBatch:
    """Pack token sequences into rows on the host, for next-token prediction.

    The target of a token is the next token of its sequence; the last token of each
    sequence predicts nothing. No sequence is split, dropped or reordered within a row.

    Args:
        sequences: arrays of token ids, one per document.
        token_budget: T, tokens per row.
        max_seqs: S, maximum number of sequences per row.

    Returns:
        A `PackedBatch` of numpy arrays with as many rows as `assign_rows` needs.

    Raises:
        ValueError: a sequence is longer than `token_budget` or no vector of integers,
            or an argument is out of range.

    Example:
        >>> import numpy as np
        >>> documents = [np.array([5, 6, 7]), np.array([8, 9])]
        >>> batch = pack_sequences(documents, token_budget=6, max_seqs=3)
        >>> batch.tokens
        array([[5, 6, 7, 8, 9, 0]], dtype=int32)
        >>> batch.targets
        array([[6, 7, 0, 9, 0, 0]], dtype=int32)
        >>> batch.cu_seqlens
        array([[0, 3, 5, 5]], dtype=int32)
    """
    for index, sequence in enumerate(sequences):
        if sequence.ndim != 1 or not np.issubdtype(sequence.dtype, np.integer):
            raise ValueError(
                f"sequence {index} must be a vector of token ids, got "
                f"{sequence.dtype}{list(sequence.shape)}"
            )
        if sequence.size and sequence.max() > np.iinfo(np.int32).max:
            raise ValueError(
                f"sequence {index} holds the token id {sequence.max()}, expected int32"
            )
    lengths = [len(sequence) for sequence in sequences]
    rows = assign_rows(lengths, token_budget, max_seqs)
    shape = (len(rows), token_budget)
    tokens, targets = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    loss_mask = np.zeros(shape, np.bool_)
    cu_seqlens = np.zeros((len(rows), max_seqs + 1), np.int32)
    for row, indices in enumerate(rows):
        bounds = cu_seqlens_of_lengths([lengths[i] for i in indices], max_seqs)
        cu_seqlens[row] = bounds
        for index, begin, end in zip(indices, bounds, bounds[1:], strict=False):
            if begin < end:
                tokens[row, begin:end] = sequences[index]
                targets[row, begin : end - 1] = sequences[index][1:]
                loss_mask[row, begin : end - 1] = True
    return PackedBatch(
        tokens=tokens, targets=targets, loss_mask=loss_mask, cu_seqlens=cu_seqlens
    )


def _check_lengths(
    lengths: Int[Array | np.ndarray, " B"], max_len: int, token_budget: int
) -> None:
    values = concrete(lengths)
    if values is None or not values.size:
        return
    if values.min() < 0 or values.max() > max_len:
        bad = int(np.flatnonzero((values < 0) | (values > max_len))[0])
        raise ValueError(
            f"lengths must lie between 0 and the padded length {max_len}, got "
            f"lengths[{bad}]={values[bad]}"
        )
    if values.sum() > token_budget:
        raise ValueError(
            f"token_budget={token_budget} is too small for {values.sum()} tokens in "
            f"{values.size} sequences; raise token_budget or drop sequences"
        )
