"""An engine under load: on a clock that the test sets, and in calls of its thread."""

import random

import numpy as np
import pytest

from benchmarks.workloads.serving_host import IdleDevice
from jaxscale.inference import Request, SamplingParams
from jaxscale.inference.engine.engine import Engine
from jaxscale.inference.engine.scheduling.scheduler import Scheduler
from jaxscale.inference.engine.scheduling.scheduler_config import SchedulerConfig
from jaxscale.models import Tokenizer
from tests.calls import own_calls
from tests.inference.engine.test_pace import Arrivals, Pending


class Timed(IdleDevice):
    """A device that takes the time of 8B on an H200, by stored rows and its rate."""

    STEP, LAUNCH, TOKEN, HOST = 0.0097, 0.001, 0.0245e-3, 0.0008

    def __init__(self, config):
        super().__init__(config)
        self.now = self.free = 0.0
        self.prefilled = []

    def clock(self):
        return self.now

    def update(self, source, changes):
        self.now += self.HOST
        super().update(source, changes)

    def prefill(self, chunks, targets):
        out, _ = super().prefill(chunks, targets)
        self.prefilled.append([len(chunk.tokens) for chunk in chunks])
        seconds = self.LAUNCH + self.TOKEN * sum(self.prefilled[-1])
        return self._result(out, seconds), None

    def decode(self, **sizes):
        return self._result(super().decode(**sizes), self.STEP * sizes["steps"])

    def _result(self, values, seconds):
        self.free = max(self.free, self.now) + seconds
        return Pending(self, self.free, np.asarray(values))


def config(slots, **more):
    return SchedulerConfig(
        num_pages=slots * 160, vocab_size=9, max_len=9000, num_slots=slots, **more
    )


def served(lengths, gap, seed=0):
    """Seconds from its arrival to each token of each request, and the arrivals.

    Args:
        lengths: Tokens of each prompt; answers have 50 to 400.
        gap: Mean seconds between two arrivals.
    """
    rng, sizes = random.Random(seed), config(128, prefix_cache=False)
    device, scheduler = Timed(sizes), Scheduler(sizes, seed=0)
    engine = Engine(device, scheduler, clock=device.clock)
    engine._commands = commands = Arrivals(device)
    times, arrivals, at = [[] for _ in lengths], [], 0.0

    def submit(mine, at, prompt):
        params = SamplingParams(temperature=0.0, max_tokens=rng.randint(50, 400))
        request = Request(prompt=[1] * prompt, params=params)

        def sink(outputs):
            mine.extend(device.now - at for output in outputs for _ in output.tokens)

        commands.put(lambda: engine._admit(request, sink, None), at)

    for mine, prompt in zip(times, lengths, strict=True):
        at += rng.expovariate(1 / gap)
        arrivals.append(at)
        submit(mine, at, prompt)
    while commands.due or not engine.idle:
        engine.step(wait=engine.idle)
        engine._linger()
    return [np.array(mine) for mine in times], np.array(arrivals), device


def test_first_tokens_at_half_load():
    """A prompt of 200 tokens waits for a step besides its own prefill."""
    times, _, device = served([200] * 200, 0.06)
    alone = device.LAUNCH + 200 * device.TOKEN
    waited = np.array([mine[0] - alone for mine in times]) / device.STEP
    assert waited.mean() < 1.1 and np.quantile(waited, 0.99) < 3


def test_long_prompts_among_short_ones():
    """Nobody who decodes waits for more than a split of them, nor do short prompts."""
    lengths = [8000 if i % 10 == 5 else 200 for i in range(150)]
    times, arrivals, device = served(lengths, 0.08)
    last = arrivals[-1]  # after which several steps are launched together
    gaps = [
        np.diff(mine[mine + at < last])
        for mine, at, prompt in zip(times, arrivals, lengths, strict=True)
        if prompt == 200
    ]
    assert np.quantile(np.concatenate(gaps), 0.99) < 3 * device.STEP
    alone = device.LAUNCH + 200 * device.TOKEN
    first = [
        mine[0] for mine, prompt in zip(times, lengths, strict=True) if prompt < 999
    ]
    assert np.median(first) < alone + 4 * device.STEP
    assert all(chunks in ([512], [320]) for chunks in device.prefilled if 512 in chunks)


@pytest.mark.parametrize(
    ("logprobs", "text", "most"), [(None, False, 4), (0, False, 5), (None, True, 6)]
)
def test_calls_of_a_step(logprobs, text, most):
    """What a row costs the engine's thread, from its token to its client."""
    rows = 256
    sizes = config(rows)
    device = IdleDevice(sizes)
    tokenizer = Tokenizer.train(["to be"], vocab_size=260) if text else None
    engine, heard = Engine(device, Scheduler(sizes, seed=0), tokenizer=tokenizer), []
    for _ in range(rows):
        params = SamplingParams(temperature=0.0, max_tokens=4000, logprobs=logprobs)
        engine.admit(Request(prompt=[1] * 40, params=params), heard.append)
    while engine.scheduler.num_running < rows or not engine.scheduler._slots.num_used:
        engine.step()
    for _ in range(20):
        engine.step()
    heard.clear()
    calls = own_calls(engine.step)
    assert len(heard) == rows
    assert calls < most * rows
