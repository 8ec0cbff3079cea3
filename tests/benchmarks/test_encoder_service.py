"""The benchmark of an encoder as a service: its loads, its rival and its command."""

import itertools
import re
import threading

import numpy as np
import pytest

from benchmarks import encoder_service as service
from benchmarks.measure import command
from benchmarks.rivals.torch_encoder_service import Bucket, buckets, partition
from jaxscale.inference.encoder.texts import as_encoded


class Sums:
    """Vectors are the sums of the tokens; passes are noted."""

    def __init__(self, hold=None):
        self.passes, self.hold = [], hold

    def launch(self, method, texts, token_budget, *, stand_in):
        self.passes.append([text.ids for text in texts])
        assert method == "encode" and stand_in
        assert sum(len(text.ids) for text in texts) <= token_budget
        return [texts]

    def read(self, launched):
        if self.hold is not None:
            self.hold.wait(120)
        for place, text in enumerate(launched):
            yield place, np.full(32, sum(text.ids), np.float32)


def test_loads_are_the_same_for_all():
    params = service.case("light", "bert_tiny", 32, 200, 400).params
    lengths = service.lengths_of(params)
    texts, due = service.texts_of(params), service.arrivals_of(params)
    assert texts == service.texts_of(params) and due == service.arrivals_of(params)
    assert [len(text.ids) for text in texts] == lengths
    assert sum(lengths) == params["tokens"]
    assert {*map(bool, lengths)} == {True} and 6 <= min(lengths) < max(lengths) <= 32
    assert due[0] == 0 and np.mean(np.diff(due)) == pytest.approx(1 / 200, rel=0.3)
    assert {*service.arrivals_of({**params, "rate": 0})} == {0.0}


def test_latency_counts_from_the_arrival():
    texts = [as_encoded([i + 1] * 4) for i in range(40)]
    due = [0.0] * 39 + [0.3]
    passes = Sums()
    run = service.served(passes, texts, due, budget=16)
    assert sorted(itertools.chain(*passes.passes)) == [text.ids for text in texts]
    assert run.passes == len(passes.passes) > 10  # four texts in each at most
    assert run.seconds >= 0.3 and run.latencies.min() > 0
    np.testing.assert_array_equal(run.vectors[:, 0], 4 * np.arange(1, 17))
    found = run.figures()
    assert found["texts_per_second"] == 40 / run.seconds
    assert found["p50_ms"] == 1e3 * np.median(run.latencies)
    assert found["p50_ms"] <= found["p99_ms"] <= 1e3 * run.latencies.max()


def test_a_run_that_hangs_ends(monkeypatch):
    monkeypatch.setattr(service, "PATIENCE", 0.05)
    go_on = threading.Event()
    with pytest.raises(TimeoutError, match="1 of 1 texts were not answered"):
        service.served(Sums(go_on), [as_encoded([1])], [0.0])
    go_on.set()


def test_the_rival_takes_the_fastest_batches():
    """Against all ways to cut the texts."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        shapes = [Bucket(b, n) for b in (1, 2, 4) for n in (8, 16)]
        seconds = {shape: rng.uniform(1, 3) * shape.batch**0.5 for shape in shapes}
        lengths = sorted(rng.integers(1, 17, 6).tolist(), reverse=True)

        def least(first, lengths=lengths, seconds=seconds):
            if first >= len(lengths):
                return 0
            padded = 8 if lengths[first] <= 8 else 16
            return min(seconds[b, padded] + least(first + b) for b in (1, 2, 4))

        found = partition(lengths, seconds)
        assert sum(seconds[shape] for _, shape in found) == pytest.approx(least(0))
        firsts = [first for first, _ in found]
        assert firsts == [0, *np.cumsum([shape.batch for _, shape in found])[:-1]]
        assert all(lengths[first] <= shape.length for first, shape in found)
    assert Bucket(64, 512) in buckets(512) and Bucket(1, 32) in buckets(256)


def test_the_command(monkeypatch, tmp_path, capsys):
    """Ours, a rival that computes something else, and one that is not there."""
    passes_of = service.passes_of

    def made(name, params):
        return Sums() if name == "torch_cuda_graph" else passes_of(name, params)

    monkeypatch.setattr(service, "passes_of", made)
    arguments = ["--quick", "--samples", "2", "--out", str(tmp_path)]
    assert command.main(service.BENCHMARK, arguments) == 1
    out, wrong = capsys.readouterr()
    assert "torch_compile_graphs: not supported: torch with a GPU" in out
    assert wrong.count("torch_cuda_graph: error") == 2
    for case in ("saturated_l32", "light_l32"):
        (line,) = (x for x in out.splitlines() if x.startswith(case) and " us " in x)
        assert "jaxscale" in line and ("p99_ms" in line) == (case == "light_l32")
        assert "texts_per_second" in line and "error" in line
        ready, whole = (
            float(re.search(rf"{name}_seconds ([\d.]+)", line)[1])
            for name in ("ready", "compile")
        )
        assert 0 < ready < whole
    assert not [*tmp_path.rglob("*")]
