"""The account of time: known by construction, and complete whatever was written."""

import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxscale.observability import PARTS, goodput, read_run
from tests.observability.histories import history


ACTIONS = st.sampled_from(["compute"] * 4 + ["save", "evaluate", "die", "leave"])


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.lists(ACTIONS, max_size=25), st.integers(1, 3))
def test_every_part_is_what_the_run_has_spent_on_it(seed, actions, ranks):
    with tempfile.TemporaryDirectory() as folder:
        made = history(Path(folder) / "run", seed, actions, ranks)
        found = goodput(read_run(made.out))
        expected = {part: made.seconds.get(part, 0.0) for part in PARTS}
        assert found.seconds == pytest.approx(expected, abs=1e-6)
        assert sum(found.seconds.values()) == pytest.approx(found.wall, abs=1e-9)
        assert found.wall == pytest.approx(made.now - 1000.0, abs=1e-6)


NAMES = ["start", "restore", "compile", "begin", "data", "dispatched", "done", "save"]
NAMES += ["saved", "evaluated", "error", "finish", "bye", "other"]
EVENT = st.fixed_dictionaries(
    {
        "t0": st.floats(0, 100),
        "t1": st.floats(100, 200),
        "cycle": st.integers(0, 2),
        "step": st.integers(0, 5),
        "kind": st.sampled_from(["host", "device", "fault"]),
        "name": st.sampled_from(NAMES),
        "args": st.just({}),
    }
)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.lists(EVENT, min_size=1, max_size=30), min_size=1, max_size=3))
def test_the_parts_are_the_whole_whatever_was_written(ranks):
    with tempfile.TemporaryDirectory() as folder:
        for number, events in enumerate(ranks):
            lines = "".join(json.dumps(event) + "\n" for event in events)
            (Path(folder) / f"events-{number}.jsonl").write_text(lines)
        run = read_run(folder)
        found = goodput(run)
        assert run.damaged == 0
        assert (np.diff(found.edges) >= 0).all()
        assert len(found.edges) == len(found.labels) + 1
        assert sum(found.seconds.values()) == pytest.approx(found.wall, abs=1e-9)
        if found.wall:
            assert sum(found.shares.values()) == pytest.approx(1.0)


def test_a_run_that_goes_on_is_idle_until_its_step_is_done(tmp_path):
    made = history(tmp_path / "run", 1, ["compute", "compute"])
    made.write("begin")
    run = read_run(made.out)
    before, now = goodput(run), goodput(run, until=made.now + 60)
    assert now.seconds["idle"] - before.seconds["idle"] == pytest.approx(60)
    assert now.seconds["productive"] == before.seconds["productive"]


def test_a_run_that_is_down_restarts_until_now(tmp_path):
    made = history(tmp_path / "run", 1, ["compute", "compute"])
    made.write("error", kind="fault", error="a test")
    assert goodput(read_run(made.out), until=made.now + 60).seconds[
        "restart"
    ] == pytest.approx(60)
