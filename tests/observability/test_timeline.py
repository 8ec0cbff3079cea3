"""The trace for Perfetto and the rows of the page, against events with known times."""

import itertools
import json

import pytest

from jaxscale.observability import timeline as module
from jaxscale.observability.layout import find_layout
from jaxscale.observability.run import read_run
from jaxscale.observability.timeline import chrome_trace, timeline
from jaxscale.sharding import pipeline_schedule
from tests.observability.runs import layout, steps, survived_hang, write


@pytest.fixture
def trace(tmp_path):
    run = read_run(survived_hang(tmp_path / "run"))
    file = tmp_path / "new" / "trace.json"
    first, count = chrome_trace(run, find_layout(run), file)
    events = json.loads(file.read_text())["traceEvents"]
    assert (first, count) == (1, len(events))
    return events


def slices(trace, pid, name, tid=0):
    return [
        (e["ts"] / 1e6, e["dur"] / 1e6, e["args"].get("step"))
        for e in trace
        if (e["pid"], e.get("tid"), e["name"], e["ph"]) == (pid, tid, name, "X")
    ]


def test_slices_have_the_times_of_the_events(trace):
    # The run begins at 90, step n of cycle 1 at 102 + n.
    waits = slices(trace, 5, "wait for data")
    assert waits[:12] == [(12.0 + n, pytest.approx(0.1), n) for n in range(1, 13)]
    assert [n for _, _, n in waits[12:]] == [11, 12, 13, 14]  # step 13 had none
    assert [n for _, _, n in slices(trace, 0, "wait for data")[10:14]] == [
        11,
        12,
        13,
        11,
    ]
    device = slices(trace, 5, "step", tid=1)
    # It begins when the step is handed over: the one before is done earlier.
    assert device[1] == (pytest.approx(14.2), pytest.approx(0.8), 2)
    assert slices(trace, 5, "save") == [(23.5, pytest.approx(0.4), 10)]
    (stall,) = slices(trace, 8, "stall")
    assert stall == (50.0, 1.0, 12)
    names = {e["pid"]: e["args"]["name"] for e in trace if e["name"] == "process_name"}
    assert names[5].startswith("rank 5 (pipe 1, data 0, tensor 1, on node-1")
    marks = [e["name"] for e in trace if e["ph"] == "i" and e["pid"] == 0]
    assert "not_finite" in marks and marks.count("restore") == 2


def test_the_schedule_lies_under_the_last_step(trace):
    known = [e for e in trace if e["pid"] == 9 and e["ph"] == "X"]
    schedule = pipeline_schedule(2, 4)
    assert len(known) == (schedule.f_mb >= 0).sum() + (schedule.b_mb >= 0).sum()
    # Step 14 is handed over at 157.2 and done at 158, 90 seconds after the begin.
    assert min(e["ts"] for e in known) >= 67.2e6 - 1
    assert max(e["ts"] + e["dur"] for e in known) == pytest.approx(68e6, abs=2)
    for stage in range(2):
        mine = sorted((e["ts"], e["dur"]) for e in known if e["tid"] == stage)
        for (t0, long), (t1, _) in itertools.pairwise(mine):
            assert t0 + long <= t1 + 1
    names = [e["name"] for e in known if e["tid"] == 0]
    assert sorted(names)[:2] == ["backward 0.0", "backward 1.0"]
    (title,) = [e for e in trace if e["pid"] == 9 and e["name"] == "process_name"]
    assert title["args"]["name"] == "schedule of step 14, as planned"


def test_a_long_run_shows_its_last_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_MOST_EVENTS", 60)
    run = read_run(write(tmp_path, {n: steps(1, 50, 9.0) for n in range(2)}))
    first, count = chrome_trace(run, find_layout(run), tmp_path / "trace.json")
    assert first == 41 and count == 2 * (4 + 3 * 10)


def test_rows_of_the_page(tmp_path):
    ranks = {n: [layout(n), *steps(1, 400, 100.0)] for n in range(60)}
    run = read_run(write(tmp_path, ranks))
    found = timeline(run, find_layout(run), chosen=[33, 999])
    assert len(found["rows"]) == 24 and found["total"] == 60
    assert any(name.startswith("rank 33") for name in found["rows"])
    row = [name.split()[1] for name in found["rows"]].index("33")
    mine = [s for s in found["segments"]["step"] if s[0] == row]
    assert mine[-1] == [row, 1, 399.2, 400.0, 400]
    assert len(mine) == found["steps"]
    assert found["window"] == [388.0, 400.0] and found["end"] == 400.0
    assert found["schedule"].startswith("<svg")
