"""Event files: what is in them, and what an event costs."""

import json
import os
import subprocess
import sys
import threading
import time

import pytest

from jaxscale.supervision import EventLog, read_events
from tests.calls import own_calls


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


def test_an_event_costs_its_caller_one_call(tmp_path, monkeypatch):
    """Text and file are the thread's: no time is measured, which hosts decide."""
    threads = {"dumps": [], "write": []}

    def noting(module, name):
        function = getattr(module, name)

        def call(*args):
            threads[name].append(threading.current_thread().name)
            return function(*args)

        monkeypatch.setattr(module, name, call)

    log = EventLog()
    with log.written_to(tmp_path / "events-0.jsonl"):
        noting(json, "dumps")
        noting(os, "write")

        def step():
            at = log.emit("begin", 7)
            log.emit("done", 7, kind="device", since=at, loss=2.5)

        assert own_calls(step) == 2
        log.flush()
    assert threads["dumps"] == ["jaxscale-events"] * 3  # with bye
    assert set(threads["write"]) == {"jaxscale-events"}
