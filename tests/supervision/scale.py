"""A job of many hosts on one machine: the real driver against executors without ranks.

    python -m tests.supervision.scale [--hosts 1536] [--seconds 20] [--step 1.0]

starts a driver as a process of its own, and in this one so many light executors, of
eight ranks each, which connect over loopback and say what those of a job in step say. A
rank dies, one hangs, the driver is killed and started again; what each takes is
printed, beside the share of a core that the driver needs.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from jaxscale.supervision import (
    Deadlines,
    SuperviseConfig,
    protocol,
    read_events,
    supervise,
)
from jaxscale.supervision.driver import Driver
from jaxscale.supervision.executor import report_seconds
from jaxscale.supervision.limits import allow_connections
from tests.supervision.clock import goes_while


RANKS = 8
"""Of each host."""
DEADLINE = 5.0
"""Seconds of a step, unless stated."""


class Job:
    """What the ranks of all hosts do: steps together, until one does not."""

    def __init__(self, hosts, seconds):
        self.hosts, self.step_seconds = hosts, seconds
        self.hung = self.hung_step = None
        self.hung_at = 0.0
        """When the rank that hangs said its last word."""
        self.meetings = {}

    async def meet(self, place):
        """Wait for all hosts, as the collectives of a step do."""
        met = self.meetings.setdefault(place, [0, asyncio.Event()])
        met[0] += 1
        if met[0] == self.hosts:
            self.meetings.pop(place)[1].set()
        await met[1].wait()

    def hang(self, rank, step):
        self.hung, self.hung_step = rank, step

    def hangs(self, step):
        """Whether one is not heard of again after this step."""
        return self.hung is not None and step == self.hung_step


class Executor:
    """Says what an executor and its ranks would, and starts none."""

    def __init__(self, number, job, address):
        self.job, self.address, self.name = job, address, f"host-{number:05}"
        self.ranks, self.cycle, self.step = [], 0, 0
        self.channel = self.work = None
        self.connected = asyncio.Event()
        self.newest = []

    async def run(self):
        """Serve one driver after the other, until one says that the job is over."""
        while True:
            with contextlib.suppress(OSError):
                channel = await protocol.connect(self.address, "of the simulation")
                self.channel = channel
                with contextlib.closing(channel):
                    self.greet()
                    self.connected.set()
                    if await self.serve():
                        self.end()
                        return
            self.connected.clear()
            self.channel = None
            await asyncio.sleep(0.25)

    def greet(self):
        self.say(
            protocol.Host(
                name=self.name,
                address="127.0.0.1",
                cycle=self.cycle,
                ranks=self.ranks,
            ),
            *([] if self.ranks else [protocol.Idle(port=1)]),
            *self.newest,
        )

    def say(self, *messages):
        if self.channel is not None:
            self.channel.send(*messages)

    async def serve(self):
        alive = asyncio.create_task(self.live())
        try:
            while True:
                match await self.channel.receive():
                    case protocol.Start() as start:
                        self.end()
                        self.cycle, self.ranks, self.step = start.cycle, start.ranks, 0
                        self.work = asyncio.create_task(self.steps())
                    case protocol.Kill():
                        self.end()
                        self.say(protocol.Idle(port=1))
                    case protocol.Stacks():
                        self.say(*(self.stack(rank) for rank in self.ranks))
                    case protocol.Diagnose():
                        self.say(protocol.Diagnosed(code=0, text=""))
                    case protocol.Terminate():
                        self.move("stopped")
                        ranks = self.ranks
                        self.say(*(self.exited(rank, 1) for rank in ranks))
                        self.work.cancel()
                    case protocol.Quit():
                        return True
        finally:
            alive.cancel()

    def end(self):
        self.ranks, self.newest = [], []
        if self.work is not None:
            self.work.cancel()

    async def live(self):
        await asyncio.sleep(random.random())
        while True:
            self.say(protocol.Alive())
            await asyncio.sleep(1)

    def move(self, phase, ranks=None, **more):
        """Each rank says it for itself, as to a real executor."""
        ranks = self.ranks if ranks is None else ranks
        if self.job.hung in ranks:
            self.job.hung_at = time.time()
        said = [
            protocol.Moved(
                ranks=[rank],
                cycle=self.cycle,
                step=self.step,
                phase=phase,
                kind="device" if phase == "done" else "host",
                **more,
            )
            for rank in ranks
        ]
        told = protocol.merged(said)
        self.newest = [*self.newest[-1:], *told][-4:]
        self.say(*told)

    async def steps(self):
        late = report_seconds(self.job.hosts)
        self.move("joined")
        self.move("compile")
        while True:
            now = time.monotonic()
            seconds = self.job.step_seconds
            await asyncio.sleep(seconds - now % seconds)
            await self.job.meet((self.cycle, self.step))
            await asyncio.sleep(late * random.random())
            if self.job.hangs(self.step):
                # The others have handed over the next step, and wait in it.
                others = [rank for rank in self.ranks if rank != self.job.hung]
                self.step += 1
                self.move("dispatched", others)
                return
            if self.step:
                self.move("done", loss=2.5)
                self.measure()
            self.step += 1
            self.move("dispatched")

    def measure(self):
        if self.step % 4 == 0:
            pace = [random.lognormvariate(0, 0.05) for _ in self.ranks]
            said = {"cycle": self.cycle, "step": self.step, "name": "host"}
            self.say(protocol.Measured(ranks=self.ranks, seconds=pace, **said))

    def exited(self, rank, code):
        return protocol.Exited(rank=rank, cycle=self.cycle, code=code, tail="")

    def stack(self, rank):
        last = "data.py" if rank == self.job.hung else "monitor.py"
        thread = "".join(
            f'  File "/usr/lib/python3.12/threading.py", line {n} in wait\n'
            for n in range(40)
        )
        main = f'  File "/x/{last}", line 30 in wait\n  File "/x/main.py", line 1 in m'
        text = f"Thread 0x01 (most recent call first):\n{thread}"
        return protocol.Stack(
            rank=rank,
            text=f"{text}Current thread 0x02 (most recent call first):\n{main}",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figures:
    """What the driver has needed, in seconds; shares are those of a core."""

    connect: float
    """From the first attempt of the executors until all are let in."""
    share: float
    """Of a core, while the job is well."""
    death: float
    """From the death of a rank until it was noticed."""
    hang: float
    """From the end of a rank's last step until its hang was noticed."""
    named: float
    """The same until the rank was named, and all ranks were ended."""
    suspects: list
    """Who was named."""
    back: float
    """From the death of the driver until all executors are back at the next one."""


class Simulation:
    """A driver, its executors, and what happens to them."""

    def __init__(self, out, hosts, step, deadline=DEADLINE, patient=False):
        """A patient driver waits for what comes late, and times the hang alone."""
        self.out, self.hosts, self.job = Path(out), hosts, Job(hosts, step)
        self.options = [str(out), str(hosts), str(deadline), *["patient"] * patient]
        self.log, self.hangs = self.out / "driver.txt", self.out / "hangs"

    def driver(self):
        environment = os.environ | {protocol.SECRET: "of the simulation"}
        with self.log.open("a") as log:
            words = [sys.executable, "-m", "tests.supervision.scale", "driver"]
            return subprocess.Popen(
                [*words, *self.options],
                stdout=log,
                stderr=log,
                env=environment,
            )

    async def until(self, done, seconds=120.0):
        end = time.monotonic() + seconds
        while not (found := done()):
            if time.monotonic() > end:
                raise TimeoutError(self.log.read_text()[-2000:])
            await asyncio.sleep(0.02)
        return found

    def faults(self):
        file = self.out / "supervisor" / "events-driver.jsonl"
        events = read_events(file) if file.exists() else []
        return [event for event in events if event["kind"] == "fault"]

    def port(self):
        with contextlib.suppress(OSError, ValueError):
            state = json.loads((self.out / "supervisor" / "state.json").read_text())
            return state["port"]
        return 0

    def working(self, executors, cycle, step=2):
        return all(e.cycle == cycle and e.step >= step for e in executors)

    async def run(self, seconds):
        """All of it, and its figures."""
        allow_connections(self.hosts)
        driver = self.driver()
        try:
            await self.until(self.port)
            address = f"127.0.0.2:{self.port()}"
            executors = [Executor(n, self.job, address) for n in range(self.hosts)]
            begun = time.time()
            tasks = [asyncio.create_task(e.run()) for e in executors]
            await asyncio.gather(*(e.connected.wait() for e in executors))
            connect = time.time() - begun

            await self.until(lambda: self.working(executors, 1))
            used, at = cpu_seconds(driver.pid), time.monotonic()
            await asyncio.sleep(seconds)
            assert not self.faults(), self.faults()
            share = (cpu_seconds(driver.pid) - used) / (time.monotonic() - at)

            dead, died = executors[self.hosts // 2], time.time()
            dead.say(dead.exited(dead.ranks[3], -signal.SIGKILL))
            (fault,) = await self.until(self.faults)
            death = fault["t0"] - died
            if fault["name"] != "exit":
                raise RuntimeError(f"the executors did not keep up: {fault['args']}")

            await self.until(lambda: self.working(executors, 2))
            hung = executors[self.hosts // 3].ranks[5]
            self.job.hang(hung, last := executors[0].step + 2)
            await self.until(lambda: all(e.step > last for e in executors))
            self.hangs.touch()  # and all others have said that they wait
            _, fault = await self.until(lambda: self.faults()[1:] and self.faults())
            hang, named = (fault[t] - self.job.hung_at for t in ("t0", "t1"))
            self.hangs.unlink()
            self.job.hung = None

            await self.until(lambda: self.working(executors, 3))
            driver.kill()
            died = time.time()
            driver.wait()
            await self.until(lambda: not any(e.connected.is_set() for e in executors))
            driver = self.driver()
            await asyncio.gather(*(e.connected.wait() for e in executors))
            back = time.time() - died
            step = executors[0].step
            await self.until(lambda: self.working(executors, 3, step + 3))

            driver.terminate()
            await asyncio.wait_for(asyncio.gather(*tasks), 120)
            await self.until(lambda: driver.poll() is not None)
            return Figures(
                connect=connect,
                share=share,
                death=death,
                hang=hang,
                named=named,
                suspects=[int(x.split(":")[0][5:]) for x in fault["args"]["suspects"]],
                back=back,
            ), hung
        finally:
            driver.kill()
            driver.wait()


def cpu_seconds(process):
    """What a process has used."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def drive(out, hosts, deadline, patient=None):
    """The driver of the simulation, in a process of its own."""
    deadlines = Deadlines(step=float(deadline), step_factor=1.0, compile=60.0)
    if patient:
        deadlines = dataclasses.replace(deadlines, host=120.0, reconnect=120.0)
        hangs = Path(out) / "hangs"
        Driver._take = goes_while(lambda driver: hangs.exists())
    config = SuperviseConfig(
        processes=RANKS * int(hosts),
        hosts=int(hosts),
        address="127.0.0.2:0",
        backoff=0.1,
        deadlines=deadlines,
    )
    return supervise(["true"], out, config)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, default=1536)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--step", type=float, default=1.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as out:
        simulation = Simulation(out, options.hosts, options.step)
        try:
            figures, hung = asyncio.run(simulation.run(options.seconds))
        finally:
            print(simulation.log.read_text(), end="", flush=True)
    load = os.getloadavg()[0]
    print(f"{options.hosts} executors, {RANKS * options.hosts} ranks, load {load:.1f}")
    print(f"  all connected after      {figures.connect:6.2f} s")
    print(f"  driver, a step each {options.step:g} s  {figures.share:6.1%} of a core")
    print(f"  a death noticed after    {figures.death:6.2f} s")
    print(f"  a hang noticed after     {figures.hang:6.2f} s (deadline {DEADLINE:g} s)")
    print(f"  and named after          {figures.named:6.2f} s")
    print(f"  named {figures.suspects}, which was rank {hung}")
    print(f"  back after its death     {figures.back:6.2f} s")


if __name__ == "__main__":
    if sys.argv[1:2] == ["driver"]:
        sys.exit(drive(*sys.argv[2:]))
    main()
