"""What a driver does for a message does not grow with the job; all of it, in small."""

import asyncio
import random
import resource
import time

import pytest

from jaxscale.supervision import hosts, limits
from jaxscale.supervision.config import Deadlines
from jaxscale.supervision.protocol import Exited, Measured, Moved
from jaxscale.supervision.telemetry import Telemetry
from jaxscale.supervision.watch import Watch
from tests.calls import own_instructions
from tests.supervision.scale import Simulation


def test_a_driver_and_many_executors(tmp_path):
    """A death, a hang, and the end of the driver; python -m tests.supervision.scale
    does it with 1,536 executors, and prints what each takes."""
    simulation = Simulation(tmp_path, 16, step=0.25, deadline=1.0, patient=True)
    figures, hung = asyncio.run(simulation.run(seconds=0.0))
    assert figures.suspects == [hung]
    deaths = [fault["args"]["reason"] for fault in simulation.faults()]
    assert len(deaths) == 2 and "rank 67 died in" in deaths[0]
    assert f"rank {hung} said nothing for" in deaths[1]
    assert "has gone" not in simulation.log.read_text()


def test_no_message_is_lost_on_the_way_to_the_driver(tmp_path, monkeypatch):
    """Also where the driver is busy for longer than a moment of listening."""
    monkeypatch.setattr(hosts, "_TICK_SECONDS", 0.004)
    monkeypatch.setattr(hosts, "_SHORT_SECONDS", 0.003)
    heard = []

    async def listen():
        made = hosts.Hosts("", tmp_path, report=print)

        async def say():
            for number in range(300):
                made._inbox.put_nowait((None, number))
                await asyncio.sleep(0.001 * rng.random())
                time.sleep(0.005)

        rng, said = random.Random(2), asyncio.create_task(say())
        while not said.done() or not made._inbox.empty():
            await made.take(lambda host, message: heard.append(message))

    asyncio.run(listen())
    assert heard == list(range(300))


def work_of_messages(ranks, out):
    """Instructions of a driver for 200 messages and looks at a job of so many ranks."""
    watch = Watch(range(ranks), Deadlines(), now=0.0)
    telemetry = Telemetry(out, ranks)
    place = {"cycle": 1, "kind": "host"}
    for phase in ("compile", "dispatched"):
        said = Moved(ranks=list(range(ranks)), step=1, phase=phase, **place)
        watch.moved(said, 0.0)
        telemetry.heard(said)

    def look():
        for number in range(200):
            said = Moved(ranks=[number % 16], step=2, phase="dispatched", **place)
            telemetry.heard(said)
            watch.moved(said, 1.0)
            assert watch.fault(1.0) is None
            assert watch.has_state and watch.step == -1 and not watch.finished
            assert watch.is_settled and not watch.gone

    return own_instructions(look)


def test_work_for_a_message_does_not_grow_with_the_ranks(tmp_path):
    few, many = (work_of_messages(ranks, tmp_path) for ranks in (16, 4096))
    assert 20_000 < many < 1.2 * few  # 256 times as many ranks


def test_the_part_of_the_time_is_that_of_the_lowest_rank_that_is_left(tmp_path):
    """Against what all that were heard of say, for random words."""
    rng, told = random.Random(1), Telemetry(tmp_path, 20)
    phases = {}
    for _ in range(500):
        rank, phase = rng.randrange(20), rng.choice(["begin", "save", "eval"])
        if rng.random() < 0.4:
            told.heard(Exited(rank=rank, cycle=1, code=0, tail=""))
            phases.pop(rank, None)
        else:
            place = {"cycle": 1, "step": 1, "kind": "host"}
            told.heard(Moved(ranks=[rank], phase=phase, **place))
            phases[rank] = phase
        told._tick()
        lowest = told._lowest[0] if told._lowest else None
        assert lowest == min(phases, default=None)


def test_slow_ranks_of_many_are_looked_for_less_often(tmp_path, monkeypatch):
    told, looks, clock = Telemetry(tmp_path, 8), [], [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    def look():
        looks.append(clock[0])
        clock[0] += 0.5
        return []

    monkeypatch.setattr(told._measured, "slow", look)
    said = {"cycle": 1, "step": 4, "name": "host"}
    told.heard(Measured(ranks=[0, 1], seconds=[1.0, 1.0], **said))
    for _ in range(300):
        clock[0] += 0.1
        told.slow_news([])
    assert len(looks) == 4  # one in ten seconds


def test_too_few_open_files_are_raised_or_said(monkeypatch):
    allowed = [[1024, 4096]]
    monkeypatch.setattr(resource, "getrlimit", lambda which: allowed[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda which, new: allowed.append(new))
    limits.allow_connections(512)
    assert len(allowed) == 1
    limits.allow_connections(3000)
    assert allowed[-1] == (3256, 4096)
    with pytest.raises(ValueError, match=r"allows 4096 a process; raise the hard lim"):
        limits.allow_connections(5000)
