"""Every fault of a supervised run of two processes, and what it costs.

    python -m tests.training.faults [NAME ...]
    python -m tests.training.faults --random 200 [--seed 0] [--without-jax]
    JAX_PLATFORMS=cuda python -m tests.training.faults [NAME ...]   # on two GPUs

For each fault: seconds until it was noticed and until a step was done again, steps that
were computed twice, and whether the losses are those of an unbroken run, bit for bit.
"""

import argparse
import atexit
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from jaxscale.supervision import read_events
from tests.supervision import fake_rank


STEPS = 40
STALL = 3.0  # deadline of a step, s
OPTIONS = [
    *("--processes", "2", "--backoff", "0.5"),
    *("--deadlines.start", "60", "--deadlines.compile", "60"),
    *("--deadlines.step", str(STALL), "--deadlines.save", "20"),
    *("--deadlines.host", "5", "--spike", "2", "--skip-batches", "1"),
]
FAULTS = {
    "SIGKILL of process 1": "kill:1:25",
    "SIGKILL of process 0": "kill:0:25",
    "SIGSTOP of process 1": "stop:1:25",
    "SIGSTOP of process 0": "stop:0:25",
    "a loop that never ends": "loop:1:25",
    "a hang with the interpreter lock": "gil:1:25",
    "an exception": "raise:1:25",
    "a segmentation fault": "segfault:0:25",
    "SIGTERM to one process": "term:1:5",
    "SIGKILL during a save": "save:0:20",
    "NaN in gradients, once": "nan:0:25",
    "NaN in data, always": "nan!:0:25",
    "a loss spike, once": "spike:0:25",
    "a loss spike, always": "spike!:0:25",
    "executor killed": "executor:1:25",
    "executor stopped": "executor-stop:1:25",
    "memory exhausted": "memory:1:25",
    "disk full at a save": "full:1:19",
    "coordinator dead at the meeting": "kill:0:0",
    "coordinator stuck at the meeting": "loop:0:0",
    "failure at every start": "raise!:1:25",
    "disk full at every start": "full!:1:19",
    "checkpoints cannot be written": "unwritable:0:19",
    "wrong values on one of four devices": "wrong:1:29",
    "wrong values on one of two devices": "tied:1:25",
    "wrong values, always": "wrong!:1:25",
}


class Job:
    """A supervised run in a directory of its own."""

    def __init__(
        self, *faults, steps=STEPS, options=(), out=None, module="training.faulty_rank"
    ):
        self.out = Path(out or tempfile.mkdtemp(prefix="faults-"))
        self.out.mkdir(exist_ok=True)
        self._command = [
            *(sys.executable, "-m", "jaxscale", "supervise"),
            *("--output-dir", str(self.out), *OPTIONS, *options, "--"),
            *(sys.executable, "-m", f"tests.{module}"),
            *(str(self.out), str(steps), *faults),
        ]
        atexit.register(self.end)
        self.start()

    def start(self):
        with (self.out / "driver.txt").open("a") as log:
            self.driver = subprocess.Popen(
                self._command, stdout=log, stderr=log, cwd=Path(__file__).parents[2]
            )

    def wait(self, seconds=240.0):
        try:
            return self.driver.wait(seconds)
        finally:
            self.end()

    def end(self):
        """Stop the driver with its executor and ranks, if they still run."""
        for _ in range(2):  # the second time it does not wait for the ranks
            if self.driver.poll() is None:
                self.driver.terminate()
                time.sleep(0.5)
        self.driver.wait(120)

    @property
    def said(self):
        """What the driver printed, without its first line, that it is loading."""
        lines = (self.out / "driver.txt").read_text().strip().splitlines()
        return [line for line in lines if not line.startswith("jaxscale: ")]

    @property
    def losses(self):
        """By step, as they were written."""
        lines = (self.out / "metrics.jsonl").read_text().splitlines()
        return {record["step"]: record["loss"] for record in map(json.loads, lines)}

    def events(self, name):
        file = self.out / name
        return read_events(file) if file.exists() else []

    def newest_events(self, name, count=200):
        """The last lines of a file that may be long."""
        file = self.out / name
        if not file.exists():
            return []
        with file.open("rb") as stream:
            stream.seek(max(stream.seek(0, os.SEEK_END) - 200 * count, 0))
            lines = stream.read().splitlines()
        events = []
        for line in lines:
            with contextlib.suppress(ValueError):  # cut off
                events.append(json.loads(line))
        return [event for event in events if isinstance(event, dict)]

    def figures(self):
        """Seconds to notice and to run again, and steps lost, of the first fault."""
        driver = self.events("supervisor/events-driver.jsonl")
        faults = [e for e in driver if e["kind"] == "fault"]
        again = [e for e in driver if e["name"] == "running"]
        if not faults:
            return "never noticed"
        struck = float((self.out / "struck").read_text())
        first = [
            e["step"]
            for e in self.events("events-0.jsonl")
            if e["name"] == "compile" and e["cycle"] == faults[0]["cycle"] + 1
        ]
        text = f"noticed after {faults[0]['t0'] - struck:5.2f} s"
        if again:
            text += f", running after {again[0]['t1'] - again[0]['t0']:4.1f} s"
        if first:
            text += f", steps lost {max(faults[0]['step'] - first[0], 0):2d}"
        return text


def one(name, unbroken):
    """Run a fault and print what it cost; whether all is well."""
    fault = FAULTS[name]
    job = Job(fault)
    code = job.wait()
    wanted = unbroken
    if name == "a loss spike, always":  # its batch is left out, as if it were not there
        plain = Job("leave-out:0:25")
        plain.wait()
        wanted = plain.losses
    if name.startswith("NaN in data"):
        plain = Job(fault, options=["--no-replay"])
        plain.wait()
        wanted = plain.losses
    if name.startswith("wrong values"):  # on a mesh of replicas
        plain = Job(f"{fault.partition(':')[0]}:0:{STEPS + 1}")
        plain.wait()
        wanted = plain.losses
    if name == "wrong values, always":
        good = code == 4 and "it computed wrong values again" in job.said[-1]
        verdict = "host left out" if good else "HOST NOT LEFT OUT"
    elif "every start" in name or "cannot" in name:
        good = code == 4 and "gave up after cycle" in job.said[-1]
        verdict = "gave up" if good else "DID NOT GIVE UP"
        if "cannot" in name:  # somebody mends it, and gives the same command again
            (job.out / "checkpoints").unlink()
            (job.out / "checkpoints.away").rename(job.out / "checkpoints")
            job.start()
            equal = job.wait() == 0 and job.losses == wanted
            good, verdict = good and equal, f"{verdict}; then losses equal: {equal}"
    else:
        good = code == 0 and job.losses == wanted
        verdict = "losses equal" if good else f"LOSSES DIFFER, code {code}"
    print(f"{name:34} {job.figures()}; {verdict}", flush=True)
    for line in job.said if code or not good else job.said[1:2]:
        print(f"    {line}", flush=True)
    return good


def driver_killed(unbroken):
    """Kill the driver; started again it finds the ranks, which have gone on."""
    job = Job()
    wait_for(job, 15)
    job.driver.kill()
    job.driver.wait()
    wait_for(job, 20)
    job.start()
    code = job.wait()
    cycles = {event["cycle"] for event in job.events("events-0.jsonl")}
    good = code == 0 and job.losses == unbroken and cycles == {1}
    print(f"{'driver killed and started again':34} ranks went on: {good}", flush=True)
    return good


def port_in_use(unbroken):
    """The port of the meeting is taken, then free; that of the driver is taken."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refused = Job(options=["--address", f"127.0.0.1:{port}"])
        good = refused.wait() == 2 and "cannot be listened at" in refused.said[-1]
        print(f"{'port of the driver in use':34} {refused.said[-1]}", flush=True)
        job = Job(options=["--coordinator-port", str(port)])
        while not any("ended" in line for line in job.said):
            time.sleep(0.1)
    code = job.wait()
    good = good and code == 0 and job.losses == unbroken
    print(f"{'port of the meeting in use':34} {job.said[1]}", flush=True)
    print(f"    then {job.said[-1]}; losses equal: {good}", flush=True)
    return good


def damaged_files():
    """In a process of its own, which imports jax."""
    module = "tests.training.checkpoint.damaged_files"
    return subprocess.run([sys.executable, "-m", module], check=False).returncode == 0


def wait_for(job, step, seconds=120.0):
    """Wait until a step is done, that was not when this was called."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        done = [e["step"] for e in job.events("events-0.jsonl") if e["name"] == "done"]
        if max(done, default=0) >= step or job.driver.poll() is not None:
            return
        time.sleep(0.05)
    raise TimeoutError(f"step {step} was not reached: {job.said}")


def many(count, seed, steps, without_jax):
    """Random faults in a row over one run."""
    rng, kinds = random.Random(seed), {}
    # The toy learns all there is, and a loss near 0 may double.
    options = ["--idle-cycles", "1000", "--spike", "0"]
    if without_jax:
        wanted, pause = fake_rank.unbroken(steps), 0.3
        options += ["--backoff", "0.01"]
        job = Job(steps=steps, options=options, module="supervision.fake_rank")
    else:
        unbroken, pause = Job(steps=steps, options=options), 1.5
        job = Job(steps=steps, options=options)
    begun = time.monotonic()
    for number in range(count):
        alive = next_cycle(job)
        if alive is None:
            break
        time.sleep(rng.random() * pause)
        kind = rng.choice(["SIGKILL", "SIGSTOP", "SIGSEGV", "SIGTERM", "SIGABRT"])
        kind = rng.choice([kind] * 5 + ["executor", "driver"])
        kinds[kind] = kinds.get(kind, 0) + 1
        with contextlib.suppress(ProcessLookupError):
            if kind == "driver":
                job.driver.kill()
                job.driver.wait()
                time.sleep(rng.random())
                job.start()
            elif kind == "executor":
                state = json.loads((job.out / "supervisor/state.json").read_text())
                os.kill(state["executor"], signal.SIGKILL)
            else:
                os.kill(rng.choice(alive), getattr(signal, kind))
        if number % 10 == 9:
            print(
                f"{number + 1} faults in {time.monotonic() - begun:.0f} s, "
                f"step {max(job.losses, default=0)}",
                flush=True,
            )
    code = job.wait(1200.0 + 0.5 * steps)
    if not without_jax:
        unbroken.wait()
        wanted = unbroken.losses
    equal = code == 0 and job.losses == wanted
    print(f"{sum(kinds.values())} faults {kinds}, code {code}, losses equal: {equal}")
    return equal and sum(kinds.values()) == count


def next_cycle(job, seconds=300.0):
    """The processes of the ranks, once they have done a step since they started."""
    until, seen = time.monotonic() + seconds, getattr(job, "seen", 0)
    while time.monotonic() < until and job.driver.poll() is None:
        events = job.newest_events("events-0.jsonl")
        done = [e["t1"] for e in events if e["name"] == "done"]
        if max(done, default=0) > seen + 0.2:
            ranks = [job.newest_events(f"events-{n}.jsonl", 2000) for n in range(2)]
            pids = [[e for e in es if e["name"] == "start"][-1] for es in ranks]
            job.seen = time.time() + 0.5
            return [event["args"]["pid"] for event in pids]
        time.sleep(0.05)
    return None


def main():
    """Run what was asked for; the exit code counts what was not well."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of the names; all by default")
    parser.add_argument("--random", type=int, default=0, help="so many faults in a row")
    parser.add_argument("--steps", type=int, help="of the random run; 40 a fault")
    parser.add_argument(
        "--without-jax", action="store_true", help="ranks that only count"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--diagnose", default="", help="instead of the self-check, which measures GPUs"
    )
    arguments = parser.parse_args()
    OPTIONS.extend(["--diagnose", arguments.diagnose] if arguments.diagnose else [])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    if count := arguments.random:
        steps = arguments.steps or 40 * count
        return not many(count, arguments.seed, steps, arguments.without_jax)
    plain = Job()
    if plain.wait() != 0:
        print("\n".join(plain.said))
        return 1
    chosen = {
        **{name: lambda name=name: one(name, plain.losses) for name in FAULTS},
        "driver killed": lambda: driver_killed(plain.losses),
        "port in use": lambda: port_in_use(plain.losses),
        "every file of a checkpoint damaged": damaged_files,
    }
    return sum(
        not run()
        for name, run in chosen.items()
        if not arguments.names or any(part in name for part in arguments.names)
    )


if __name__ == "__main__":
    sys.exit(main())
