"""Packed rows: every token once, in an order of the seed, resumed anywhere."""

import dataclasses
import itertools
import json
import os
import subprocess
import sys
import textwrap

import jax
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from jaxscale.models import Decoder, Tokenizer, preset
from jaxscale.sharding import make_mesh
from jaxscale.training.data.corpus import TokenCorpus
from jaxscale.training.data.mixture import Mixture
from jaxscale.training.data.packed import (
    DataConfig,
    PackedBatches,
    PackedRows,
    load_text,
)
from jaxscale.training.step import next_token_loss
from tests.ports import free_port


def numbered_corpus(lengths):
    """Every token of the corpus has an id of its own, from 1 on."""
    ends = np.cumsum([1, *lengths])
    return TokenCorpus.from_ids(
        [range(low, high) for low, high in itertools.pairwise(ends)]
    )


def pieces(row):
    """The pieces of documents in a row, each with its targets and mask."""
    ends = row["cu_seqlens"]
    for low, high in itertools.pairwise(ends):
        if high > low:
            yield tuple(row[k][low:high] for k in ("tokens", "targets", "loss_mask"))


corpora = st.lists(st.integers(1, 40), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(
    lengths=corpora,
    seq_len=st.integers(2, 24),
    max_sequences=st.integers(1, 6),
    seed=st.integers(0, 2**32),
    shuffle=st.booleans(),
    epoch=st.integers(0, 3),
)
def test_an_epoch_holds_every_token_once_with_its_successor(
    lengths, seq_len, max_sequences, seed, shuffle, epoch
):
    corpus = numbered_corpus(lengths)
    rows = PackedRows(
        corpus,
        seq_len=seq_len,
        max_sequences=max_sequences,
        seed=seed,
        shuffle=shuffle,
    )
    document_of = np.repeat(np.arange(len(lengths)), lengths)
    last = set(corpus.offsets[1:].tolist())
    seen = []
    for i in range(rows.rows_per_epoch):
        row = rows[epoch * rows.rows_per_epoch + i]
        used = int(row["cu_seqlens"][-1])
        assert row["cu_seqlens"].shape == (min(max_sequences, seq_len + 1) + 1,)
        assert row["cu_seqlens"][0] == 0 and used <= seq_len
        for name in ("tokens", "targets", "loss_mask"):
            assert row[name].shape == (seq_len,)
            assert not row[name][used:].any()
        for tokens, targets, mask in pieces(row):
            assert len(set(document_of[tokens - 1])) == 1
            np.testing.assert_array_equal(np.diff(tokens), 1)
            ends_document = np.isin(tokens, list(last))
            np.testing.assert_array_equal(mask, ~ends_document)
            np.testing.assert_array_equal(targets, np.where(mask, tokens + 1, 0))
            seen.extend(tokens.tolist())
    assert sorted(seen) == list(range(1, sum(lengths) + 1))


def test_rows_are_full_unless_documents_are_short():
    corpus = numbered_corpus([50, 70, 33, 90, 41])
    rows = PackedRows(corpus, seq_len=16, max_sequences=4, seed=1)
    assert rows.rows_per_epoch == -(-284 // 16)
    used = [rows[i]["cu_seqlens"][-1] for i in range(rows.rows_per_epoch)]
    assert sorted(used)[1:] == [16] * (rows.rows_per_epoch - 1)


def test_one_sequence_a_row_never_mixes_documents():
    rows = PackedRows(numbered_corpus([3, 9, 4]), seq_len=4, max_sequences=1, seed=0)
    assert rows.rows_per_epoch == 1 + 3 + 1


def order(config, count, **kwargs):
    corpus = numbered_corpus([17, 5, 30, 8, 21, 2, 40])
    iterator = iter(PackedBatches(corpus, config, **kwargs))
    return np.concatenate([np.asarray(next(iterator).tokens) for _ in range(count)])


def assert_equal(one, other):
    for name in ("tokens", "targets", "loss_mask", "cu_seqlens"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


SMALL = DataConfig(seq_len=8, batch_size=2, max_sequences=4, prefetch=0)


def test_order_depends_on_the_seed_and_the_epoch_alone():
    rows_per_epoch = -(-123 // 8)
    first = order(SMALL, 20)
    np.testing.assert_array_equal(first, order(SMALL, 20))
    np.testing.assert_array_equal(
        first, order(dataclasses.replace(SMALL, prefetch=3), 20)
    )
    other = order(dataclasses.replace(SMALL, seed=1), 20)
    assert (first != other).any()
    one, two = first[:rows_per_epoch], first[rows_per_epoch : 2 * rows_per_epoch]
    assert (one != two).any()
    assert sorted(one[one > 0]) == sorted(two[two > 0]) == list(range(1, 124))


def first_epoch(lengths, **kwargs):
    rows = PackedRows(numbered_corpus(lengths), seq_len=8, max_sequences=8, **kwargs)
    return np.stack([rows[i]["tokens"] for i in range(rows.rows_per_epoch)])


def test_rows_are_shuffled():
    starts = first_epoch([160], seed=3)[:, 0]
    assert sorted(starts) == list(range(1, 161, 8))
    assert (np.diff(starts) < 0).any()
    in_order = first_epoch([160], seed=3, shuffle=False)
    np.testing.assert_array_equal(in_order.ravel(), np.arange(1, 161))


def test_documents_are_shuffled():
    # Two documents of four tokens in each row: neighbors differ from the given order.
    rows = first_epoch([4] * 40, seed=3)
    in_order = first_epoch([4] * 40, seed=3, shuffle=False)
    np.testing.assert_array_equal(in_order.ravel(), np.arange(1, 161))
    assert sum(row[4] == row[0] + 4 for row in rows) < 5


@settings(max_examples=25, deadline=None)
@given(
    steps=st.integers(0, 25),
    prefetch=st.integers(0, 3),
    batch_size=st.sampled_from([1, 2, 3, 4]),
    seed=st.integers(0, 100),
)
def test_a_saved_position_resumes_bit_for_bit(steps, prefetch, batch_size, seed):
    config = dataclasses.replace(
        SMALL, prefetch=prefetch, batch_size=batch_size, seed=seed
    )
    batches = PackedBatches(numbered_corpus([17, 5, 30, 8, 1, 21]), config)
    unbroken = iter(batches)
    for _ in range(steps):
        next(unbroken)
    state = json.loads(json.dumps(unbroken.get_state()))
    resumed = iter(batches)
    next(resumed)
    resumed.set_state(state)
    assert resumed.get_state() == state
    for _ in range(5):
        assert_equal(next(resumed), next(unbroken))


def test_the_batch_size_may_change_on_resume():
    corpus = numbered_corpus([17, 5, 30, 8])
    two = iter(PackedBatches(corpus, SMALL))
    next(two)
    three = iter(PackedBatches(corpus, dataclasses.replace(SMALL, batch_size=3)))
    three.set_state(two.get_state())
    expected = np.concatenate([next(two).tokens, next(two).tokens])[:3]
    np.testing.assert_array_equal(next(three).tokens, expected)


def test_a_position_of_other_data_is_refused():
    state = iter(PackedBatches(numbered_corpus([17, 5]), SMALL)).get_state()
    other = iter(PackedBatches(numbered_corpus([17, 6]), SMALL))
    with pytest.raises(ValueError, match=r"position was made with corpus '\w+', this"):
        other.set_state(state)
    longer = dataclasses.replace(SMALL, seq_len=16)
    other = iter(PackedBatches(numbered_corpus([17, 5]), longer))
    with pytest.raises(ValueError, match="with seq_len 8, this data has 16"):
        other.set_state(state)
    same = iter(PackedBatches(numbered_corpus([17, 5]), SMALL))
    for row in (None, "1", -1, [1], {"a": 1}, 1.5):
        with pytest.raises(ValueError, match=r"position has row .* a number from"):
            same.set_state({**state, "row": row})


def test_an_evaluation_ends_with_padding():
    corpus = numbered_corpus([17, 5])
    config = dataclasses.replace(SMALL, batch_size=2)
    batches = PackedBatches(corpus, config, epochs=1, shuffle=False)
    for _ in range(2):
        made = list(batches)
        assert len(made) == len(batches) == 2
        tokens = np.concatenate([np.asarray(batch.tokens) for batch in made])
        assert sorted(tokens[tokens > 0].tolist()) == list(range(1, 23))
        padding = jax.tree.map(lambda x: np.asarray(x[1]), made[-1])
        assert not padding.loss_mask.any() and not padding.cu_seqlens.any()
        assert sum(int(batch.loss_mask.sum()) for batch in made) == 22 - 2


def test_a_sharded_batch_is_the_batch():
    config = dataclasses.replace(SMALL, batch_size=8)
    mesh = make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    sharding = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
    corpus = numbered_corpus([17, 5, 30, 8])
    sharded = next(iter(PackedBatches(corpus, config, sharding=sharding)))
    whole = next(iter(PackedBatches(corpus, config)))
    assert_equal(sharded, whole)
    for array in jax.tree.leaves(sharded):
        assert array.sharding.is_equivalent_to(sharding, 2)
        assert array.addressable_shards[0].data.shape[0] == 2


def test_rows_that_cannot_be_spread_evenly_are_refused():
    mesh = make_mesh({"data": 2, "fsdp": 4})
    rows = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
    corpus = numbered_corpus([17])
    with pytest.raises(ValueError, match=r"batch_size 2 .* 8 shards .*data=2 x fsdp=4"):
        PackedBatches(corpus, SMALL, sharding=rows)
    with pytest.raises(ValueError, match="splits more than the rows"):
        PackedBatches(
            corpus, SMALL, sharding=NamedSharding(mesh, PartitionSpec("data", "fsdp"))
        )
    with pytest.raises(ValueError, match="epochs 0, expected at least 1"):
        PackedBatches(corpus, SMALL, epochs=0)


PROCESS = """
    import json, sys
    import jax
    from jax.sharding import NamedSharding, PartitionSpec
    from jaxscale.sharding import make_mesh
    from tests.training.data.test_packed import TWO, mixed_corpora
    from jaxscale.training.data.packed import PackedBatches

    jax.config.update("jax_num_cpu_devices", 4)
    jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
    # tensor=2 stays inside a process, tensor=8 spans both: they need the same rows.
    for sizes in ({"data": 2, "fsdp": 2, "tensor": 2}, {"tensor": 8}):
        sharding = NamedSharding(make_mesh(sizes), PartitionSpec(("data", "fsdp")))
        iterator = iter(PackedBatches(mixed_corpora(), TWO, sharding=sharding))
        iterator.set_state(json.loads(sys.argv[3]))
        batches = []
        for _ in range(5):
            shards = next(iterator).tokens.addressable_shards
            batches.append({
                i: row
                for shard in shards
                for i, row in enumerate(shard.data.tolist(), shard.index[0].start or 0)
            })
        print(json.dumps([batches, iterator.get_state()]))
"""
TWO = DataConfig(seq_len=8, batch_size=4, max_sequences=4, prefetch=1)


def mixed_corpora():
    corpora = (numbered_corpus([59, 15, 54]), numbered_corpus([30, 21]))
    return Mixture(corpora=corpora, weights=(0.6, 0.4))


@pytest.mark.slow
def test_two_processes_go_on_where_one_stopped_each_with_its_rows():
    alone = iter(PackedBatches(mixed_corpora(), TWO))
    for _ in range(3):
        next(alone)
    address = f"127.0.0.1:{free_port()}"
    arguments = [sys.executable, "-c", textwrap.dedent(PROCESS), address]
    processes = [
        subprocess.Popen(
            [*arguments, str(rank), json.dumps(alone.get_state())],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=600)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    split, whole = zip(
        *(map(json.loads, out.splitlines()) for out in outputs), strict=True
    )
    expected = [next(alone).tokens.tolist() for _ in range(5)]
    for rank, (batches, state) in enumerate(split):
        assert [set(batch) for batch in batches] == [
            {f"{2 * rank}", f"{2 * rank + 1}"}
        ] * 5
        assert state == alone.get_state()
    for parts in (split, whole):
        (first, _), (second, _) = parts
        for one, other, rows in zip(first, second, expected, strict=True):
            together = one | other
            assert [together[str(i)] for i in range(4)] == rows


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seq_len": 1}, "seq_len 1, expected at least 2"),
        ({"batch_size": 0}, "batch_size 0, expected at least 1"),
        ({"prefetch": -1}, "prefetch -1, expected at least 0"),
        ({"prefetch": 10**8}, "prefetch 100000000, expected at most 1000"),
        ({"seed": 2**64}, "seed 18446744073709551616, expected at most"),
        ({"held_out_fraction": 1.0}, r"held_out_fraction 1\.0, expected at least 0"),
    ],
)
def test_impossible_settings_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        DataConfig(**changes)


def test_a_row_has_room_for_no_more_pieces_than_tokens():
    corpus = TokenCorpus.from_ids([[1], [2, 3], [4], [5], [6, 7, 8]] * 3)
    many = PackedRows(corpus, seq_len=4, max_sequences=10**9)
    every = PackedRows(corpus, seq_len=4, max_sequences=5)
    assert many.rows_per_epoch == every.rows_per_epoch == 6
    for row in range(6):
        for name, values in every[row].items():
            np.testing.assert_array_equal(many[row][name], values)


def test_text_is_found_split_and_tokenized(tmp_path):
    for i in range(40):
        (tmp_path / f"{i}.txt").write_text(f"document {i} " * (i + 1))
    config = DataConfig(
        paths=(str(tmp_path),), vocab_size=280, held_out_fraction=0.2, seq_len=16
    )
    text = load_text(config)
    assert text.tokenizer.vocab_size <= 280
    assert text.held_out is not None
    assert len(text.train) + len(text.held_out) == 40
    assert not set(text.train.names) & set(text.held_out.names)
    everything = dataclasses.replace(config, held_out_fraction=0.0)
    assert load_text(everything).held_out is None


def test_a_tokenizer_larger_than_the_vocabulary_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("to be or not to be")
    tokenizer = Tokenizer.train(["to be or not to be"] * 3, 262)
    tokenizer.save(tmp_path / "tokenizer")
    config = DataConfig(
        paths=(str(tmp_path / "a.txt"),),
        tokenizer=str(tmp_path / "tokenizer"),
        held_out_fraction=0.0,
        vocab_size=262,
    )
    assert load_text(config).tokenizer.vocab_size == 262
    with pytest.raises(ValueError, match=r"vocab_size 261 .* has 262 tokens; set the"):
        load_text(dataclasses.replace(config, vocab_size=261))


def test_rows_of_one_document_need_no_boundaries():
    corpus = numbered_corpus([3, 9, 4, 30, 17])
    config = DataConfig(vocab_size=256, seq_len=16, batch_size=4, max_sequences=1)
    batches = PackedBatches(corpus, config, epochs=1)
    batch = next(iter(batches))
    assert batch.cu_seqlens is None
    rows = [batches.rows[i] for i in range(4)]
    np.testing.assert_array_equal(batch.tokens, [row["tokens"] for row in rows])
    bounds = np.stack([row["cu_seqlens"] for row in rows])
    assert (bounds[:, -1] < 16).any()  # with padding, so that it could matter

    model = Decoder(preset("llama_tiny"), rngs=nnx.Rngs(0))
    loss = jax.jit(next_token_loss())
    expected, _ = loss(model, dataclasses.replace(batch, cu_seqlens=bounds))
    np.testing.assert_allclose(loss(model, batch)[0], expected, rtol=1e-5)
