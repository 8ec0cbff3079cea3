"""The accuracy benchmark at a tiny size: all of it but the numbers of a GPU."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from flax import nnx

from benchmarks import pruning_accuracy
from benchmarks.measure.harness import Case, Measurement, NoMeasurement
from benchmarks.workloads import byte_text, scored
from jaxscale import models, pruning
from tests.tiers import first


NAMES = [
    *("dense", "element_wise", "block_wise", "two_four", "tile_wise", "tew"),
    "tew_bounded",
]


@pytest.fixture(scope="module", params=first((0.5, 0.75), 0.75))
def sparsity(request):
    return request.param


@pytest.fixture(scope="module")
def results(sparsity):
    case = Case("tiny", {"sparsity": sparsity, "seed": 0})
    ((_, found),) = pruning_accuracy.measure([case], NAMES, 1)
    return found


def test_every_pattern_has_the_sparsity_asked_for(results, sparsity):
    for name, result in results.items():
        if name == "two_four" and sparsity == 0.75:
            assert isinstance(result, NoMeasurement) and not result.failed
            continue
        assert isinstance(result, Measurement)
        wanted = 0.0 if name == "dense" else sparsity
        assert result.metrics["sparsity"] == wanted
        assert 0 < result.metrics["bits_per_byte"] < 8
        share = result.metrics["sparsity_all"]
        assert share == 0 if name == "dense" else 0 < share < sparsity


def test_pruning_costs_and_training_recovers(results):
    found = {n: r.metrics for n, r in results.items() if isinstance(r, Measurement)}
    for name, metrics in found.items():
        assert name == "dense" or metrics["bits_per_byte"] < metrics["pruned_bits"]
    share = {name: metrics["kept_score"] for name, metrics in found.items()}
    # The freer the pattern, the more of the score it keeps.
    assert 1 == share["dense"] > share["element_wise"] > share["tew"]
    assert share["tew"] > share["tile_wise"] > share["block_wise"]


def test_recovered_is_the_part_of_the_gap(results):
    found = {n: r.metrics for n, r in results.items() if n != "two_four"}
    worst = found["block_wise"]["bits_per_byte"]
    gap = worst - found["element_wise"]["bits_per_byte"]
    for metrics in found.values():
        expected = (worst - metrics["bits_per_byte"]) / gap
        np.testing.assert_allclose(metrics["recovered"], expected)


def test_the_corpus_is_split_by_file():
    train, held_out = byte_text.corpus()
    assert len(train) > 10 * len(held_out) > 10**6
    piece = held_out[1000:1400].tobytes()
    assert piece not in train.tobytes()


def test_sizes_of_the_real_experiment():
    """What the tables claim of it: width, hidden size, tiles."""
    setup = pruning_accuracy.SETUPS["bytes_34m"]
    assert setup.model.d_model >= 512 and setup.model.d_ff >= 2048
    assert setup.model.d_model // setup.tile >= 4
    assert 33e6 < setup.model.num_parameters() < 35e6
    cases = pruning_accuracy.BENCHMARK.cases
    assert {case.params["seed"] for case in cases} == {0, 1, 2}


def test_names_that_differ_in_training_share_what_the_host_makes(monkeypatch):
    """Threads that want the same wait for one; what failed is said to each."""
    model = models.Decoder(byte_text.decoder(32, 1, 8, 16), rngs=nnx.Rngs(0))
    updates = []

    def update(model, masks, products):
        updates.append(masks)
        return model

    monkeypatch.setattr(
        pruning, "taylor_scores", lambda model, *_: pruning.magnitude_scores(model)
    )
    monkeypatch.setattr(pruning, "input_products", lambda *_: {})
    monkeypatch.setattr(pruning, "update_weights", update)
    made = scored.Scored(model, lambda *_: 0.0, [], tile=8, block=8)
    names = ["tile_wise_permuted", "tile_wise_permuted_updated"]
    with ThreadPoolExecutor(4) as pool:
        masks = list(pool.map(lambda name: made.masks(name, 0.5), names * 4))
        assert len({id(each) for each in masks}) == 1
        list(pool.map(lambda name: made.pruned(name, masks[0]), names * 4))
    assert len(updates) == 1 and updates[0] is masks[0]
    other = made.masks(names[1], 0.75)
    made.pruned(names[1], other)
    assert updates[1:] == [other] and other is not masks[0]
    monkeypatch.setattr(pruning, "make_model_masks", lambda *_: 1 / 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            made.masks("block_wise", 0.5)
