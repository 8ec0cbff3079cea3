"""The accuracy benchmark at a tiny size: all of it but the numbers of a GPU."""

import numpy as np
import pytest

from benchmarks import pruning_accuracy
from benchmarks.measure.harness import Case, Measurement, NoMeasurement
from benchmarks.workloads import byte_text


NAMES = ["dense", "element_wise", "block_wise", "two_four", "tile_wise", "tew"]


@pytest.fixture(scope="module")
def results():
    cases = [Case("tiny", {"sparsity": s, "seed": 0}) for s in (0.5, 0.75)]
    measured = pruning_accuracy.measure(cases, NAMES, 1)
    return {case.params["sparsity"]: found for case, found in measured}


def test_every_pattern_has_the_sparsity_asked_for(results):
    for sparsity, found in results.items():
        for name, result in found.items():
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
    for found in results.values():
        for name, result in found.items():
            if isinstance(result, Measurement) and name != "dense":
                assert result.metrics["bits_per_byte"] < result.metrics["pruned_bits"]
    keeps = [
        {n: r.metrics["kept_score"] for n, r in f.items() if isinstance(r, Measurement)}
        for f in results.values()
    ]
    for share in keeps:
        # The freer the pattern, the more of the score it keeps.
        assert 1 == share["dense"] > share["element_wise"] > share["tew"]
        assert share["tew"] > share["tile_wise"] > share["block_wise"]


def test_recovered_is_the_part_of_the_gap(results):
    found = {n: r.metrics for n, r in results[0.75].items() if n != "two_four"}
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
