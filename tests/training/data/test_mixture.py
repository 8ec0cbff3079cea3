"""Mixtures: exact shares at any row, epochs of each corpus, resumed anywhere."""

import dataclasses
import itertools
import json
import threading
from fractions import Fraction

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from jaxscale.cli.options import parse
from jaxscale.sharding import make_mesh
from jaxscale.training import (
    DataConfig,
    Mixture,
    PackedBatches,
    PackedRows,
    TokenCorpus,
    load_text,
)
from jaxscale.training.data.mixture import Turns
from jaxscale.training.data.packed import _LocalBatches


CONFIG = DataConfig(
    vocab_size=1000, seq_len=8, batch_size=8, max_sequences=4, prefetch=0
)


def numbered(first, lengths):
    """A corpus in which every token has an id of its own, from `first` on."""
    ends = np.cumsum([first, *lengths])
    return TokenCorpus.from_ids([range(a, b) for a, b in itertools.pairwise(ends)])


MIXTURE = Mixture(
    corpora=(numbered(1, [17, 5, 30]), numbered(100, [40, 9]), numbered(300, [23])),
    weights=(0.5, 0.3, 0.2),
    names=("web", "code", "mail"),
)


@settings(max_examples=60, deadline=None)
@given(
    weights=st.lists(
        st.one_of(st.integers(1, 50), st.floats(1e-6, 1e6)), min_size=1, max_size=8
    ),
    start=st.integers(0, 10**15),
)
def test_every_source_keeps_its_share_from_any_row_on(weights, start):
    exact = [Fraction(str(weight)) for weight in weights]
    shares = [weight / sum(exact) for weight in exact]
    turns = Turns(shares)
    counts = turns.before(start)
    for row in range(start, start + 60):
        source, place = turns.at(row)
        assert place == counts[source]  # the rows of a source have no gaps
        counts[source] += 1
        assert sum(counts) == row + 1
        for count, share in zip(counts, shares, strict=True):
            assert abs(count - (row + 1) * share) < 2
    assert turns.before(start + 60) == counts


def test_shares_are_exact_as_written_and_need_no_sum():
    # 0.1 + 0.2 + 0.7 in floats is not 1, and none of them is what it says.
    by_weights = [
        Turns(dataclasses.replace(MIXTURE, weights=w).shares)
        for w in [(0.7, 0.2, 0.1), (7, 2, 1), (1.4, 0.4, 0.2)]
    ]
    for turns in by_weights:
        for period in (0, 1, 10**12):
            assert turns.before(10 * period) == [7 * period, 2 * period, period]
        pattern = [turns.at(row)[0] for row in range(20)]
        assert pattern[:10] == pattern[10:]
        assert pattern == [by_weights[0].at(row)[0] for row in range(20)]


def test_each_corpus_is_read_by_its_own_epochs():
    batches = PackedBatches(MIXTURE, CONFIG)
    owners = np.searchsorted([100, 300], np.arange(1000), side="right")
    alone = [
        PackedRows(corpus, seq_len=8, max_sequences=4, seed=CONFIG.seed)
        for corpus in MIXTURE.corpora
    ]
    seen = [0, 0, 0]
    for row in range(100):
        made = batches.rows[row]
        (source,) = set(owners[made["tokens"][made["tokens"] > 0]])
        expected = alone[source][seen[source]]
        for name, values in expected.items():
            np.testing.assert_array_equal(made[name], values)
        seen[source] += 1
    assert seen == [50, 30, 20]
    # Seven, seven and three rows an epoch: the smallest was read most often.
    assert batches.rows.progress(100) == {
        "share/web": 0.5,
        "epochs/web": 50 / 7,
        "share/code": 0.3,
        "epochs/code": 30 / 7,
        "share/mail": 0.2,
        "epochs/mail": 20 / 3,
    }


def in_processes(processes, state, steps):
    """The batches after `state`, put together from the rows of each of the processes.

    Each has its part of eight devices, and makes only the rows that those hold.
    """
    mesh = make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    sharding = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
    held = sharding.devices_indices_map((CONFIG.batch_size, 1))
    rows = [{} for _ in range(steps)]
    for devices in np.split(mesh.devices.ravel(), processes):
        batches = PackedBatches(MIXTURE, CONFIG, sharding=sharding)
        places = {tuple(range(8)[held[device][0]]) for device in devices}
        batches.placement.local_rows = sorted(sum(places, ()))
        assert len(batches.placement.local_rows) == 8 // processes
        iterator = iter(batches)
        iterator.set_state(state)
        local = _LocalBatches(batches, iterator.get_state()["row"])
        for step in range(steps):
            made = local.on_host(step)
            for i, place in enumerate(batches.placement.local_rows):
                row = {name: values[i] for name, values in made.items()}
                for name, values in rows[step].setdefault(place, row).items():
                    np.testing.assert_array_equal(values, row[name])
    return rows


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_the_global_batch_is_that_of_one_process(processes):
    unbroken = iter(PackedBatches(MIXTURE, CONFIG))
    for _ in range(3):
        next(unbroken)
    state = json.loads(json.dumps(unbroken.get_state()))
    for rows in in_processes(processes, state, steps=4):
        expected = next(unbroken)
        assert sorted(rows) == list(range(8))
        for place, row in rows.items():
            for name, values in row.items():
                np.testing.assert_array_equal(values, getattr(expected, name)[place])


def test_a_position_of_other_weights_is_refused():
    state = iter(PackedBatches(MIXTURE, CONFIG)).get_state()
    scaled = dataclasses.replace(MIXTURE, weights=(5, 3, 2))
    iter(PackedBatches(scaled, CONFIG)).set_state(state)
    other = dataclasses.replace(MIXTURE, weights=(5, 2, 3))
    with pytest.raises(ValueError, match=r"made with weights \['1/2', '3/10', '1/5'\]"):
        iter(PackedBatches(other, CONFIG)).set_state(state)
    swapped = dataclasses.replace(MIXTURE, corpora=MIXTURE.corpora[::-1])
    with pytest.raises(ValueError, match="made with corpus"):
        iter(PackedBatches(swapped, CONFIG)).set_state(state)


def test_the_next_batches_are_on_the_devices_while_a_step_is_held():
    made, placed = [], threading.Semaphore(0)
    corpus = MIXTURE.corpora[0]
    mesh = make_mesh({"data": 8})
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    batches = PackedBatches(
        corpus, dataclasses.replace(CONFIG, prefetch=2), sharding=sharding
    )

    class Watched(PackedRows):
        def __getitem__(self, row):
            made.append((row, threading.current_thread()))
            return super().__getitem__(row)

    batches.rows = Watched(corpus, seq_len=8, max_sequences=4, seed=CONFIG.seed)
    place = jax.make_array_from_callback

    def watched(*arguments):
        array = jax.block_until_ready(place(*arguments))
        placed.release()
        return array

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "make_array_from_callback", watched)
        iterator = iter(batches)
        next(iterator)
        # The step of this batch runs; nobody asks for another one.
        for _ in range(3 * 4):  # three batches of four arrays
            assert placed.acquire(timeout=120)
        assert [row for row, _ in made] == list(range(24))  # and no more than asked
        assert threading.main_thread() not in {thread for _, thread in made}
        assert iterator.get_state()["row"] == 8  # what was taken, not what was made
        iterator.close()


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ((1,), r"weights has 1 entries for 2 paths; give one for each"),
        ((1, 0), r"weights\[1\] 0, that of 'b', expected a positive and finite number"),
        ((-1, 2), r"weights\[0\] -1, that of 'a'"),
        ((1, float("nan")), r"weights\[1\] nan"),
        ((1, float("inf")), r"weights\[1\] inf"),
        ((1, "2"), r"weights\[1\] '2'"),
        ((1, True), r"weights\[1\] True"),
    ],
)
def test_bad_weights_are_named(weights, message, no_shape_hook):
    with pytest.raises(ValueError, match=message):
        DataConfig(paths=("a", "b"), weights=weights)
    with pytest.raises(ValueError, match=message.replace("paths", "corpora")):
        Mixture(corpora=MIXTURE.corpora[:2], weights=weights, names=("a", "b"))


def test_bad_mixtures_are_refused():
    with pytest.raises(ValueError, match="weights has 2 entries for 0 paths"):
        DataConfig(weights=(1, 2))
    with pytest.raises(ValueError, match="corpora is empty"):
        Mixture(corpora=(), weights=())
    with pytest.raises(ValueError, match="names has 1 entries for 3 corpora"):
        dataclasses.replace(MIXTURE, names=("one",))
    with pytest.raises(ValueError, match=r"names \('a', 'a', 'b'\) must differ"):
        dataclasses.replace(MIXTURE, names=("a", "a", "b"))
    with pytest.raises(ValueError, match="epochs 1 of a mixture"):
        PackedBatches(MIXTURE, CONFIG, epochs=1)
    small = dataclasses.replace(CONFIG, vocab_size=300)
    with pytest.raises(ValueError, match="token id 322, outside"):
        PackedBatches(MIXTURE, small)


@pytest.fixture
def texts(tmp_path):
    for kind, count in (("web", 12), ("code", 6)):
        (tmp_path / kind).mkdir()
        for i in range(count):
            (tmp_path / kind / f"{kind}{i}.txt").write_text(f"{kind} {i} " * (i + 3))
    return tmp_path


def test_weights_on_the_command_line_make_sources_of_paths(texts, monkeypatch):
    monkeypatch.chdir(texts)
    options = "--paths web code --weights 0.9 0.1 --vocab-size 270 --batch-size 10"
    options += " --held-out-fraction 0.3 --seq-len 16 --cache-dir cache"
    config = parse(DataConfig, options.split(), prog="", description="")
    text = load_text(config)
    assert isinstance(text.train, Mixture)
    assert text.train.names == ("web", "code")
    web, code = (corpus.names for corpus in text.train.corpora)
    assert text.held_out is not None
    held_out = set(text.held_out.names)
    assert {name[:3] for name in web} == {"web"} and {n[:3] for n in code} == {"cod"}
    assert len(held_out) + len(web) + len(code) == 18 and len(held_out) > 1
    assert not held_out & {*web, *code}
    # The same documents as in one source, each on the same side.
    whole = load_text(dataclasses.replace(config, weights=()))
    assert whole.held_out is not None and set(whole.held_out.names) == held_out
    assert load_text(config).train.fingerprint == text.train.fingerprint  # cached
    iterator = iter(PackedBatches(text.train, config))
    next(iterator)
    assert iterator.progress()["share/web"] == 0.9


def test_a_file_belongs_to_one_source(texts):
    web = str(texts / "web")
    config = DataConfig(paths=(f"{web}/web1*.txt", web), weights=(1, 1), vocab_size=270)
    config = dataclasses.replace(config, held_out_fraction=0.0)
    train = load_text(config).train
    assert isinstance(train, Mixture)
    assert [len(corpus) for corpus in train.corpora] == [3, 9]
    with pytest.raises(ValueError, match=r"paths\[1\] .* has no file that the paths"):
        load_text(dataclasses.replace(config, paths=(web, f"{web}/web1*.txt")))


def test_a_source_that_would_be_held_out_whole_is_named(texts):
    held_out = load_text(
        DataConfig(paths=(str(texts / "web"),), held_out_fraction=0.3, vocab_size=270)
    ).held_out
    assert held_out is not None
    config = DataConfig(
        paths=(str(texts / "code"), str(texts / "web" / held_out.names[0])),
        weights=(1, 1),
        held_out_fraction=0.3,
    )
    with pytest.raises(ValueError, match=r"paths\[1\] '.*': held_out_fraction 0.3"):
        load_text(config)
