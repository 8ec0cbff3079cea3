"""Prefix sums, segment ids, positions and ranges against plain loops."""

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

from pallas_kernels.varlen_attention import segments


TOKENS, SEQS = 30, 5
ids_of = jax.jit(segments.segment_ids_from_cu_seqlens, static_argnums=1)
positions_of = jax.jit(segments.positions_from_cu_seqlens, static_argnums=1)
sums_of = jax.jit(segments.cu_seqlens_from_segment_ids, static_argnums=1)

several_lengths = st.lists(st.integers(0, 12), min_size=SEQS, max_size=SEQS).filter(
    lambda lengths: sum(lengths) <= TOKENS
)


@hypothesis.settings(deadline=None, max_examples=60, derandomize=True)
@hypothesis.given(lengths=several_lengths)
@hypothesis.example(lengths=[0] * 5)
@hypothesis.example(lengths=[12, 0, 12, 0, 6])
def test_ids_and_positions(lengths):
    cu_seqlens = np.cumsum([0, *lengths])
    rest = TOKENS - sum(lengths)
    ids = np.concatenate([np.repeat(np.arange(SEQS), lengths), np.full(rest, -1)])
    places = np.concatenate([np.arange(n) for n in lengths] + [np.zeros(rest)])
    np.testing.assert_array_equal(ids_of(cu_seqlens, TOKENS), ids)
    np.testing.assert_array_equal(positions_of(cu_seqlens, TOKENS), places)
    np.testing.assert_array_equal(sums_of(ids, SEQS), cu_seqlens)
    # Nothing is known about traced sums; those that pass the buffer are cut there.
    short = max(TOKENS - rest - 2, 1)
    np.testing.assert_array_equal(ids_of(cu_seqlens, short), ids[:short])


@hypothesis.settings(deadline=None, max_examples=30, derandomize=True)
@hypothesis.given(
    rows=several_lengths,
    columns=several_lengths,
    window=st.sampled_from([(None, None), (None, 0), (2, 0), (3, 1), (0, None)]),
)
def test_visible_ranges(rows, columns, window):
    cu_rows, cu_columns = np.cumsum([0, *rows]), np.cumsum([0, *columns])
    start, stop, _ = map(
        np.asarray,
        ranges_of(cu_rows.astype(np.int32), cu_columns.astype(np.int32), window),
    )
    # The transposed ranges describe the same pairs.
    start_t, stop_t, _ = map(
        np.asarray,
        ranges_of(cu_columns.astype(np.int32), cu_rows.astype(np.int32), window[::-1]),
    )
    left, right = window
    for t in range(TOKENS):
        for s in range(TOKENS):
            b, c = (
                np.searchsorted(cu, x, "right")
                for cu, x in ((cu_rows, t), (cu_columns, s))
            )
            seen = b == c <= SEQS
            if seen:
                from_end_of_rows = cu_rows[b] - t
                from_end_of_columns = cu_columns[b] - s
                distance = from_end_of_rows - from_end_of_columns
                seen &= left is None or distance >= -left
                seen &= right is None or distance <= right
            assert (start[t] <= s < stop[t]) == seen
            assert (start_t[s] <= t < stop_t[s]) == seen


def ranges_of(cu_rows, cu_columns, window):
    return _ranges(cu_rows, cu_columns, TOKENS, window)


_ranges = jax.jit(segments.visible_ranges, static_argnums=(2, 3))


@pytest.mark.parametrize(
    ("ids", "max_seqs", "message"),
    [
        ([0, 1, 2], 2, r"below max_seqs=2, got 2; raise max_seqs"),
        ([0, 2, 1], 3, r"must not decrease, .* got 2 before 1 at row 1"),
        ([0, -1, 1], 3, r"negative ids only at the end, got -1 before 1"),
        ([0, 0, 0], 0, r"max_seqs must be at least 1, got 0"),
    ],
)
def test_segment_id_errors(ids, max_seqs, message):
    with pytest.raises(ValueError, match=message):
        segments.cu_seqlens_from_segment_ids(np.array(ids), max_seqs)
