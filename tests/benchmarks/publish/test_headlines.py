"""The table of the README adds up what was measured, and shows the fastest baseline."""

import copy
import dataclasses

import pytest

from benchmarks.measure import records
from benchmarks.publish import headlines
from tests.benchmarks.publish.test_tables import RECORD, row


def headline(**changes):
    values = {"cases": ("a", "b"), "file": "matmul", "baselines": "*"} | changes
    return headlines.Headline(task="X", what="two matmuls", page="x.md", **values)


@pytest.fixture
def results(tmp_path):
    folder = tmp_path / "nvidia_h200"
    records.dump(copy.deepcopy(RECORD), folder / "matmul.json")
    return folder


def test_a_baseline_must_have_all_cases(results, monkeypatch):
    """`torch` is the fastest of all at b, and was not run at a."""
    monkeypatch.setattr(headlines, "HEADLINES", (headline(),))
    monkeypatch.setattr(headlines, "NAMES", {"dense": "cuBLAS"})
    (*_, line) = headlines.markdown(results, "docs/").splitlines()
    assert line == (
        "| X | two matmuls | 1 x H200 | 150 us | 150 us (cuBLAS) | 1.00 "
        "| [all rows](docs/x.md) |"
    )


def test_a_row_may_come_from_another_device(results, monkeypatch):
    other = copy.deepcopy(RECORD) | {"device": "NVIDIA H100 80GB HBM3"}
    for line in other["rows"]:
        line["time_us"] *= 1e4
    folder = results.parent / headlines.H100
    records.dump(other | {"num_devices": 4}, folder / "matmul.json")
    shown = headline(cases=("a",), device=headlines.H100, baselines="dense")
    monkeypatch.setattr(headlines, "HEADLINES", (shown,))
    assert "| 4 x H100 | 1 s | 1.1 s (dense, cuBLAS) | 1.10 |" in headlines.markdown(
        results, ""
    )


def test_what_has_no_rows_says_so(results, monkeypatch):
    shown = headline(file="other"), headline(cases=("c",))
    monkeypatch.setattr(headlines, "HEADLINES", shown)
    _, _, *lines = headlines.markdown(results, "").splitlines()
    assert [line.count("not yet measured") for line in lines] == [3, 3]


def test_params_choose_and_two_rows_of_a_case_are_noticed(results):
    found = headlines.rows(headline(cases=("b",), params={"N": 32}), results)
    assert sorted(found) == ["dense", "mosaic_gpu", "torch"]
    assert headlines.rows(headline(cases=("b",), params={"N": 64}), results) == {}
    more = copy.deepcopy(RECORD)
    more["rows"].append(row("a", "dense", 90.0, 800.0) | {"params": {"M": 8, "N": 8}})
    records.dump(more, results / "matmul.json")
    with pytest.raises(ValueError, match="two matmuls: a has two dense rows"):
        headlines.rows(headline(), results)


def test_metrics_stand_beside_the_times(results, monkeypatch):
    shown = headline(cases=("a",), metric="gain", baselines="dense")
    monkeypatch.setattr(headlines, "HEADLINES", (shown,))
    text = headlines.markdown(results, "")
    assert "| 100 us, -0.250 | 110 us (dense, cuBLAS), -0.250 | 1.10 |" in text


def test_the_fastest_point_that_loses_little_is_chosen(results, monkeypatch):
    def rows(mask, sparsity, time, bits):
        params = {"M": 8, "mask": mask, "sparsity": sparsity}
        for name, own in (("auto", (time, bits)), ("dense", (100.0, 1.0))):
            metrics = {"bits": own[1]}
            yield row("a", name, own[0], 1.0) | {"params": params, "metrics": metrics}

    points = ("tw", 0.5, 60.0, 1.02), ("tw24", 0.75, 45.0, 1.04), ("tw", 0.75, 30.0, 2)
    record = copy.deepcopy(RECORD)
    record["rows"] = [one for point in points for one in rows(*point)]
    records.dump(record, results / "matmul.json")
    shown = dataclasses.replace(
        headline(cases=("a",), ours="auto", baselines="dense", metric="bits"),
        what="{kept} by {mask}",
        most_lost=0.05,
    )
    monkeypatch.setattr(headlines, "HEADLINES", (shown,))
    text = headlines.markdown(results, "")
    assert "| 25% by tw24 | 1 x H200 | 45 us, 1.040 | 100 us" in text
    monkeypatch.setattr(
        headlines, "HEADLINES", (dataclasses.replace(shown, most_lost=0.01),)
    )
    assert "less by any mask | - | not yet measured" in headlines.markdown(results, "")
