"""A recording against a clock that the test sets, and of an engine that runs."""

import numpy as np
import pytest

from jaxscale.inference.engine.timeline import PHASES, Timeline


class Clock:
    now = 10.0

    def __call__(self):
        return self.now


class Result:
    """What a program gives; it takes until the clock says so."""

    def __init__(self, clock, at):
        self.clock, self.at = clock, at

    def block_until_ready(self):
        self.clock.now = self.at
        return self


def test_gaps_have_names():
    """Two programs, of which the second is launched while the device waits for it."""
    clock = Clock()
    timeline = Timeline(clock)
    done = []

    def at(moment, phase):
        clock.now = moment
        timeline.phase(phase)

    def launch(begin, end, ready, *key):
        clock.now = begin
        results = []
        with timeline.launch(key, results):
            clock.now = end
            results.append(Result(clock, ready))
        # The thread that waits sets the clock: here it is never beside this one.
        while len(timeline._programs) < len(done) + 1:
            pass
        done.append(key)

    at(10, "schedule")
    launch(11, 12, 14, "decode", 8, 4, False)
    at(14, "collect")
    at(15, "answer")
    at(16, "schedule")
    launch(18, 19, 22, "prefill", 16)
    at(22, "wait")
    with timeline.launch(("update",), []):  # has no results
        pass
    at(24, "commands")
    clock.now = 30
    timeline.stop()
    shares = timeline.shares()
    assert (shares.seconds, shares.steps) == (20, 2)
    seconds = {name: 20 * share for name, share in shares.host.items()}
    expected = {"schedule": 3, "dispatch": 2, "collect": 1, "answer": 1}
    for name, value in expected.items():
        assert seconds[name] == pytest.approx(value)
    assert sum(seconds.values()) == pytest.approx(20) and {*seconds} <= {*PHASES}
    device = {name: 20 * share for name, share in shares.device.items()}
    # Launching the first took a second, and the device did nothing else.
    assert device == pytest.approx({"decode 8 4": 2, "prefill 16": 3, "launch": 2})
    idle = {name: 20 * share for name, share in shares.idle.items()}
    assert idle == pytest.approx({"schedule": 2, "collect": 1, "answer": 1})
    spans = {}
    for event in timeline.events():
        if event["ph"] == "X" and event["tid"] == 1:
            spans[event["name"]] = event["ts"], event["dur"]
    assert spans["decode 8 4"] == (2e6, 2e6)
    assert spans["idle: schedule"] == (4e6, 4e6)
    assert "device idle: schedule   10.0%" in str(shares)


def test_an_engine_is_recorded_while_it_is_asked_to(llama):
    run = llama.run()
    run.add("before", [1, 2, 3], max_tokens=4)
    run.finish()
    with run.engine.recorded() as timeline:
        run.add("a", [1, 2, 3], max_tokens=9)
        run.add("b", [4] * 20, max_tokens=9, top_k=3, temperature=1.0)
        run.finish()
    run.add("after", [1, 2, 3], max_tokens=4)
    run.finish()
    assert run.engine.runner.timeline is None
    shares = timeline.shares()
    needed = {"commands", "schedule", "prepare", "dispatch", "wait", "collect"}
    assert needed <= {*shares.host} <= {*PHASES}
    # Phases do not overlap; between two a busy host may do something else.
    assert 0.02 < sum(shares.host.values()) < 1.001
    names = {name.split()[0] for name in shares.device}
    assert {"prefill", "sample"} <= names <= {"prefill", "sample", "decode", "launch"}
    times = [
        (event["ts"], event["ts"] + event["dur"])
        for event in timeline.events()
        if event["ph"] == "X" and event["tid"] == 1
    ]
    begins, ends = np.array(sorted(times)).T
    assert (begins[1:] >= ends[:-1] - 0.2).all()  # us; the device does one at a time
