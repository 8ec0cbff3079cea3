"""Packed rows against plain slicing."""

import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.nn import packing


BUDGET, MAX_LEN, BATCH = 24, 9, 4
lengths_strategy = st.lists(
    st.integers(0, MAX_LEN), min_size=BATCH, max_size=BATCH
).filter(lambda lengths: sum(lengths) <= BUDGET)

pack = jax.jit(packing.pack, static_argnums=2)
unpack = jax.jit(packing.unpack, static_argnums=2)
positions = jax.jit(packing.positions, static_argnums=1)


def padded_batch(seed, lengths, features=()):
    """Random rows; NaN in the padding."""
    x = np.random.default_rng(seed).normal(size=(len(lengths), MAX_LEN, *features))
    for row, length in zip(x, lengths, strict=True):
        row[length:] = np.nan
    return x.astype(np.float32)


@hypothesis.settings(deadline=None, max_examples=60, derandomize=True)
@hypothesis.given(lengths=lengths_strategy, seed=st.integers(0, 99))
@hypothesis.example(lengths=[0, 0, 0, 0], seed=0)
@hypothesis.example(lengths=[9, 9, 6, 0], seed=0)  # the full budget
@hypothesis.example(lengths=[0, 9, 0, 9], seed=0)
def test_round_trip(lengths, seed):
    padded = padded_batch(seed, lengths, (2,))
    packed, cu_seqlens = pack(padded, np.array(lengths), BUDGET)
    packed = np.array(packed)  # XLA would compile a slice for each length
    expected = np.concatenate(
        [row[:length] for row, length in zip(padded, lengths, strict=True)]
    )
    np.testing.assert_array_equal(packed[: len(expected)], expected)
    np.testing.assert_array_equal(packed[len(expected) :], 0)
    np.testing.assert_array_equal(cu_seqlens, np.cumsum([0, *lengths]))

    packed[len(expected) :] = np.nan
    back = unpack(packed, cu_seqlens, MAX_LEN)
    np.testing.assert_array_equal(back, np.nan_to_num(padded, nan=0.0))

    places = np.asarray(positions(cu_seqlens, BUDGET))
    counted = np.concatenate([np.arange(length) for length in lengths])
    np.testing.assert_array_equal(places[: len(expected)], counted)
    np.testing.assert_array_equal(places[len(expected) :], 0)


def test_gradients_move_like_the_values_and_skip_the_padding():
    lengths = np.array([3, 0, 9, 1])
    padded = padded_batch(0, lengths)
    weights = np.random.default_rng(1).normal(size=BUDGET).astype(np.float32)
    weights[13:] = np.nan  # a careless loss on the padding must not leak either

    def loss(x):
        return jnp.sum(pack(x, lengths, BUDGET)[0] * weights)

    cu_seqlens = np.cumsum([0, *lengths])
    expected = unpack(jnp.asarray(weights), cu_seqlens, MAX_LEN)
    np.testing.assert_array_equal(jax.grad(loss)(padded), expected)

    spread = np.random.default_rng(2).normal(size=(4, MAX_LEN)).astype(np.float32)
    grad = jax.grad(lambda x: jnp.sum(unpack(x, cu_seqlens, MAX_LEN) * spread))(
        jnp.asarray(weights)
    )
    expected, _ = pack(spread, lengths, BUDGET)
    np.testing.assert_array_equal(grad, expected)


def test_vmap_over_rows():
    lengths = np.array([[3, 0, 9, 1], [9, 9, 0, 2]])
    padded = np.stack([padded_batch(seed, row) for seed, row in enumerate(lengths)])
    packed, cu_seqlens = jax.vmap(lambda x, n: packing.pack(x, n, BUDGET))(
        padded, lengths
    )
    for row in range(2):
        one, cu = pack(padded[row], lengths[row], BUDGET)
        np.testing.assert_array_equal(packed[row], one)
        np.testing.assert_array_equal(cu_seqlens[row], cu)
    back = jax.vmap(lambda x, cu: packing.unpack(x, cu, MAX_LEN))(packed, cu_seqlens)
    np.testing.assert_array_equal(back, np.nan_to_num(padded, nan=0.0))


def test_traced_lengths_past_the_budget_are_left_out():
    padded = padded_batch(0, [9, 9, 9, 9])
    packed, cu_seqlens = pack(padded, np.array([9, 9, 9, 9]), BUDGET)
    np.testing.assert_array_equal(packed, padded.reshape(-1)[:BUDGET])
    np.testing.assert_array_equal(cu_seqlens, [0, 9, 18, 24, 24])


@pytest.mark.parametrize(
    ("lengths", "budget", "message"),
    [
        ([9, 9, 7, 0], 24, r"token_budget=24 is too small for 25 tokens"),
        ([9, 10, 0, 0], 24, r"padded length 9, got lengths\[1\]=10"),
        ([-1, 0, 0, 0], 24, r"lengths\[0\]=-1"),
    ],
)
def test_pack_errors(lengths, budget, message):
    with pytest.raises(ValueError, match=message):
        packing.pack(np.zeros((4, MAX_LEN), np.float32), np.array(lengths), budget)


def test_pack_refuses_lengths_of_another_form(no_shape_hook):
    padded = np.zeros((4, MAX_LEN), np.float32)
    with pytest.raises(TypeError, match="lengths must be integers, got float"):
        packing.pack(padded, np.ones(4), 24)
    with pytest.raises(ValueError, match=r"each of the 4 rows of padded, got .*\(3,\)"):
        packing.pack(padded, np.ones(3, np.int32), 24)


@pytest.mark.parametrize(
    ("cu_seqlens", "message"),
    [
        ([0, 3, 9], r"max_len=5 is too small for a sequence of 6 tokens"),
        ([0, 3, 13], r"at most at num_tokens=12, got cu_seqlens\[-1\]=13"),
        ([0, 4, 3], r"must not decrease"),
        ([1, 4, 5], r"must start at 0"),
    ],
)
def test_unpack_errors(cu_seqlens, message):
    with pytest.raises(ValueError, match=message):
        packing.unpack(np.zeros(12, np.float32), np.array(cu_seqlens), 5)


@hypothesis.settings(deadline=None, max_examples=100, derandomize=True)
@hypothesis.given(
    lengths=st.lists(st.integers(0, 16), max_size=40), max_seqs=st.integers(1, 6)
)
def test_pack_sequences_keeps_every_document(lengths, max_seqs):
    ends = np.cumsum(lengths, dtype=int)
    documents = [
        np.arange(end - n, end) + 1 for n, end in zip(lengths, ends, strict=True)
    ]
    rows = packing.assign_rows(lengths, 16, max_seqs)
    assert sorted(itertools.chain(*rows)) == list(range(len(lengths)))
    batch = packing.pack_sequences(documents, 16, max_seqs)
    assert batch.tokens.shape == (len(rows), 16)
    cu_seqlens = batch.cu_seqlens
    assert cu_seqlens is not None
    assert cu_seqlens.shape == (len(rows), max_seqs + 1)
    used = np.zeros_like(batch.loss_mask)
    for row, indices in enumerate(rows):
        assert len(indices) <= max_seqs
        for slot, index in enumerate(indices):
            begin, end = cu_seqlens[row, slot : slot + 2]
            document = documents[index]
            np.testing.assert_array_equal(batch.tokens[row, begin:end], document)
            if len(document):
                used[row, begin : end - 1] = True
                np.testing.assert_array_equal(
                    batch.targets[row, begin : end - 1], document[1:]
                )
        assert (cu_seqlens[row, len(indices) :] == end).all()
        assert (batch.tokens[row, end:] == 0).all()
    np.testing.assert_array_equal(batch.loss_mask, used)
    np.testing.assert_array_equal(batch.targets[~used], 0)


def test_assign_rows_is_best_fit():
    # 3 fits rows 0 (room 4) and 1 (room 3): the tighter one takes it.
    assert packing.assign_rows([4, 5, 3, 4], 8, 8) == [[0, 3], [1, 2]]
    # A row with its number of sequences used up is closed.
    assert packing.assign_rows([1, 1, 1], 8, 2) == [[0, 1], [2]]
    # Random lengths fill nearly all of the rows.
    lengths = np.random.default_rng(0).integers(1, 512, 500)
    rows = packing.assign_rows(lengths, 2048, 64)
    assert lengths.sum() / (2048 * len(rows)) > 0.97


@pytest.mark.parametrize(
    ("lengths", "budget", "max_seqs", "message"),
    [
        ([3, 9], 8, 4, r"sequence 1 has 9 tokens, expected at most token_budget=8"),
        ([3], 0, 4, r"at least 1, got token_budget=0"),
        ([3], 8, 0, r"max_seqs=0"),
    ],
)
def test_assign_rows_errors(lengths, budget, max_seqs, message):
    with pytest.raises(ValueError, match=message):
        packing.assign_rows(lengths, budget, max_seqs)


def test_pack_sequences_refuses_what_is_no_vector_of_ids(no_shape_hook):
    for bad in (np.zeros((2, 2), np.int32), np.zeros(3, np.float32)):
        with pytest.raises(ValueError, match="sequence 1 must be a vector of token"):
            packing.pack_sequences([np.arange(2), bad], 8, 2)
    with pytest.raises(ValueError, match="token id 8589934592, expected int32"):
        packing.pack_sequences([np.array([2**33])], 8, 2)


def test_packed_batch_is_a_pytree_of_its_rows():
    documents = [np.arange(1, n) for n in (5, 8, 3, 7)]
    batch = packing.pack_sequences(documents, 8, 3)
    moved = jax.jit(lambda b: b)(batch)
    assert isinstance(moved, packing.PackedBatch)
    jax.tree.map(np.testing.assert_array_equal, moved, batch)
    bounds = batch.cu_seqlens
    assert bounds is not None
    np.testing.assert_array_equal(
        packing.positions(bounds, 8), [packing.positions(row, 8) for row in bounds]
    )
