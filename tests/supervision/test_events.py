"""Event files: what is in them, and what an event costs."""

import subprocess
import sys
import time

import pytest

from jaxscale.supervision import EventLog, read_events


def test_the_library_needs_no_jax():
    modules = ("jaxscale.supervision", "jaxscale.supervision.executor")
    modules += ("jaxscale.supervision.self_check", "jaxscale.cli.supervise")
    code = (
        f"import sys, {', '.join(modules)}\n"
        "print({'jax', 'flax', 'numpy', 'jaxlib'} & set(sys.modules))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "set()"


def test_what_came_before_the_file_is_in_it(tmp_path):
    log, path = EventLog(rank=3, cycle=2), tmp_path / "new" / "events-3.jsonl"
    begun = log.emit("meet", 0)
    with log.written_to(path):
        log.emit("joined", since=begun)
        with log.span("save", 8):
            time.sleep(0.02)
    events = read_events(path)
    assert [e["name"] for e in events] == ["meet", "joined", "save", "saved", "bye"]
    assert [e["step"] for e in events] == [0, 0, 8, 8, 8]
    assert {e["cycle"] for e in events} == {2}
    fields = {"t0", "t1", "cycle", "step", "kind", "name", "args"}
    assert all(set(event) == fields for event in events)
    save, saved = events[2:4]
    assert save["t0"] == save["t1"] == saved["t0"] and saved["t1"] - saved["t0"] > 0.015


def test_an_error_is_in_the_file_once(tmp_path):
    log, path = EventLog(), tmp_path / "events-0.jsonl"
    with (
        pytest.raises(KeyError),
        log.written_to(path),
        log.reported(),
    ):
        raise KeyError("absent")
    (error,) = read_events(path)
    assert (error["kind"], error["name"]) == ("fault", "error")
    assert error["args"] == {"error": "KeyError: 'absent'"}


def test_a_second_run_goes_on_in_the_file(tmp_path):
    log, path = EventLog(), tmp_path / "events-0.jsonl"
    for step in (1, 2):
        with log.written_to(path), log.reported():
            log.emit("begin", step)
    path.write_text(path.read_text() + '{"t0": 1.0, "na')  # a killed process
    found = [(e["name"], e["step"]) for e in read_events(path)]
    names = ("begin", "finish", "bye")
    assert found == [(name, step) for step in (1, 2) for name in names]


def test_a_full_disk_does_not_end_the_run(caplog):
    log = EventLog()
    with log.written_to("/dev/full"):
        log.emit("begin", 1)
        log.flush()
        log.emit("begin", 2)
    assert caplog.text.count("events are lost: [Errno 28] No space left") == 1


def test_events_cost_less_than_half_a_per_cent_of_a_short_step(tmp_path):
    """Four a step of 100 ms: their own time, and that of the thread that writes."""
    log, steps = EventLog(), 500
    with log.written_to(tmp_path / "events-0.jsonl"):
        begun = time.process_time()
        for step in range(steps):
            at = log.emit("begin", step)
            at = log.emit("data", step, since=at)
            log.emit("dispatched", step, since=at)
            log.emit("done", step, kind="device", since=at, loss=2.5)
        log.flush()
        seconds = (time.process_time() - begun) / steps
    assert seconds < 0.005 * 0.1, f"{seconds:.2e} s a step"
