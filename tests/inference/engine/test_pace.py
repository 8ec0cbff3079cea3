"""Plans that reach the device just in time, on a clock that the test sets."""

import queue

import numpy as np
import pytest

from jaxscale.inference import Request, SamplingParams
from jaxscale.inference.engine.engine import Engine
from jaxscale.inference.engine.pace import Pace
from jaxscale.inference.engine.program_table import ProgramTable
from jaxscale.inference.engine.runner import Runner
from jaxscale.inference.engine.scheduling.scheduler import Scheduler
from tests.inference.engine.fake_device import FakeDevice
from tests.inference.engine.scheduling.test_scheduler import config


def test_estimates_follow_what_is_measured():
    pace = Pace()
    assert pace.spare("a") < 0 and not pace.device_bound and not pace.expects(0.0)
    pace.planned(0.001)
    for _ in range(50):
        pace.ended("a", 1, 0.020, waited=True)
    assert pace.spare("a") == pytest.approx(0.020 - 0.002 - 0.0005)
    assert pace.spare("b") < 0 and pace.device_bound
    # Results that were there before say only that it takes no longer.
    pace.ended("a", 1, 0.5, waited=False)
    assert pace.spare("a") == pytest.approx(0.018 - 0.0025)
    pace.ended("a", 1, 0.004, waited=False)
    assert pace.spare("a") == pytest.approx(0.004 - 0.0025)
    for _ in range(50):
        pace.ended("b", 4, 0.004, waited=True)
    assert not pace.device_bound  # a step takes as long as the host
    pace.arrived(5.0)
    assert pace.expects(5.9) and not pace.expects(6.1)


class Simulated(Runner):
    """A device whose programs take the time of a clock; the host takes 1 ms."""

    PREFILL, STEP, HOST = 0.007, 0.010, 0.001

    def __init__(self, config):
        self.config, self.now, self.free = config, 0.0, 0.0
        self.table = ProgramTable([config.num_slots], [(1, 1)], adapted=False)
        self.timeline = None
        self.steps = []

    def bind(self, scheduler):
        self.device = FakeDevice(scheduler)

    def clock(self):
        return self.now

    def update(self, source, changes):
        self.now += self.HOST
        self.plan = {"source": source, "changes": changes}

    def remember(self, row, tokens):
        pass

    def _result(self, drawn, seconds):
        self.free = max(self.free, self.now) + seconds
        logprobs = np.zeros_like(np.array(drawn.tokens))
        values = np.stack([drawn.tokens, drawn.flags, logprobs], axis=-1)
        return Pending(self, self.free, values.astype(np.int32))

    def prefill(self, chunks, targets):
        self._change()
        return self._result(self.device._prefill(chunks), self.PREFILL), None

    def decode(self, *, bucket, steps, drafts, adapted):
        self._change()
        self.steps.append(steps)
        drawn = self.device._decode(self.decoded)
        return self._result(drawn, self.STEP * steps)

    def _change(self):
        source, changes = self.plan["source"], self.plan["changes"]
        rows = self.device.rows
        if source is not None:
            self.device.rows = rows = [list(rows[old]) for old in source]
        for row, column, value in changes:
            rows[row][column] = value
        self.plan = {"source": None, "changes": ()}


class Pending:
    """Results that are there at a moment of the clock."""

    def __init__(self, device, ready, values):
        self.device, self.ready, self.values = device, ready, values

    def is_ready(self):
        return self.device.now >= self.ready

    def __array__(self, dtype=None, copy=None):
        self.device.now = max(self.device.now, self.ready)
        return self.values


class Arrivals:
    """Commands of clients, each at its moment of the clock."""

    def __init__(self, device):
        self.device, self.due = device, []

    def put(self, command, at=0.0):
        self.due.append((at, command))
        self.due.sort(key=lambda item: item[0])

    def get_nowait(self):
        if not self.due or self.due[0][0] > self.device.now:
            raise queue.Empty
        return self.due.pop(0)[1]

    def get(self, timeout=None):
        until = self.device.now + (1e9 if timeout is None else timeout)
        if not self.due or self.due[0][0] > until:
            self.device.now = until
            raise queue.Empty
        self.device.now = max(self.device.now, self.due[0][0])
        return self.due.pop(0)[1]


def test_a_newcomer_has_its_token_within_a_step_of_its_prompt():
    """At any moment of the steps of others, and nobody loses a step by it."""
    sizes = config(num_pages=400, max_len=400, steps=4, eos_ids=(), num_slots=8)
    device, scheduler = Simulated(sizes), Scheduler(sizes, seed=0)
    device.bind(scheduler)
    engine = Engine(device, scheduler, clock=device.clock)
    engine._commands = commands = Arrivals(device)
    dispatch = engine._dispatch

    def with_plan(plan):
        device.decoded = plan.decode
        return dispatch(plan)

    engine._dispatch = with_plan
    first, last = {}, {}

    def submit(name, at, tokens):
        params = SamplingParams(temperature=0.0, max_tokens=tokens)
        request = Request(prompt=[1, 2, 3], id=name, params=params)

        def sink(outputs):
            first.setdefault(name, device.now - at)
            last[name] = device.now

        commands.put(lambda: engine._admit(request, sink, None), at)

    submit("long", 0.0, 300)
    moments = [1.0 + 0.0413 * i for i in range(40)]
    for i, at in enumerate(moments):
        submit(str(i), at, 3)
    while commands.due or not engine.idle:
        engine.step(wait=engine.idle)
        engine._linger()
    times = np.array([first[str(i)] for i in range(5, 40)])
    alone = device.PREFILL + 2 * device.HOST
    assert times.max() < alone + 1.1 * device.STEP
    assert times.mean() < alone + 0.7 * device.STEP
    # All of its steps, all prompts, and a gap of the device for few of them.
    busy = 300 * device.STEP + 40 * device.PREFILL
    assert last["long"] < 1.05 * busy
    assert {*device.steps} == {1, 4}
