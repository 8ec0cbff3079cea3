"""A rank without jax: it counts, saves, waits for the others, and breaks when told.

    python -m tests.supervision.fake_rank DIRECTORY STEPS [FAULT ...]

Each fault, ``kind:rank:step``, happens once, or with ``kind!`` at every start.
At step -2 it happens in the second start, before that restores.
``slow:rank:0`` or ``slow:host:0`` is slow all the time. With another step than 0 it
waits in that step until it is asked to stop. ``hold`` waits until there is a file
called go, or it is asked to stop.
"""

import contextlib
import ctypes
import hashlib
import itertools
import json
import os
import resource
import signal
import sys
import time
from pathlib import Path

from jaxscale.supervision import current
from jaxscale.supervision.events import VARIABLE


EVERY = 4  # steps between checkpoints
SECONDS = 0.01  # a step


def main(directory, steps, *faults):
    cycle = json.loads(os.environ[VARIABLE])["cycle"]
    events = current()
    rank, count = (int(os.environ[f"JAX_{n}"]) for n in ("PROCESS_ID", "NUM_PROCESSES"))
    out, meeting = Path(directory), Path(directory) / f"meeting-{cycle}"
    meeting.mkdir(exist_ok=True)
    stopped, agreed = [], meeting / "stop"
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))
    with events.written_to(out / f"events-{rank}.jsonl"):
        events.emit("restore", 0)
        with (out / f"wishes-{rank}").open("a") as file:
            print(events.at_first("granted"), file=file)
        strike(faults, out, rank, 0, 0, events)
        strike(faults, out, rank, -cycle, 0, events)
        step, value, batch = restore(out, events.resume_before)
        metrics = Metrics(out / "metrics.jsonl", step) if rank == 0 else None
        events.emit("compile", step)
        while step < int(steps):
            step += 1
            begun = events.emit("begin", step)
            events.emit("data", step, since=begun)
            (meeting / f"{rank}").write_text(f"{step}")
            batch += 1 + events.skips.get(step, 0)
            value = hashlib.sha256(f"{value} {batch}".encode()).hexdigest()
            events.emit("dispatched", step, since=begun)
            loss = strike(faults, out, rank, step, batch, events)
            while not (at := places(meeting, count)) or min(at) < step - 1:
                time.sleep(0.002)
            if f"hold:{rank}:{step}" in faults:
                while not (stopped or (out / "go").exists()):
                    time.sleep(0.002)
            seconds = work(faults, rank, step, stopped)
            if "slow" in "".join(faults):  # a step this short says nothing otherwise
                measure = {"computing": seconds, "waiting": 0.0}
                events.emit("profile", step, kind="device", **measure)
            events.emit("done", step, kind="device", since=begun, loss=loss)
            if metrics is not None:
                metrics.write(step, value)
            # All stop after the same step, which none has begun: they are that close.
            if stopped and not agreed.exists():
                agreed.write_text(str(step + EVERY + 2 - (step + 2) % EVERY))
            stop = agreed.exists() and agreed.read_text() == str(step)
            if rank == 0 and step % EVERY == 0:
                with events.span("save", step):
                    save(out, step, value, batch)
            if stop:
                events.emit("stopped", step)
                break
    print(f"rank {rank} left after step {step}")
    sys.exit(step < int(steps))


def unbroken(steps, left_out=()):
    """The losses of a run without faults, and without some of its batches."""
    losses, value = {}, ""
    batches = (b for b in itertools.count(1) if b not in left_out)
    for step, batch in zip(range(1, steps + 1), batches, strict=False):
        value = hashlib.sha256(f"{value} {batch}".encode()).hexdigest()
        losses[step] = value
    return losses


def places(meeting, count):
    """The steps of all ranks; nothing while one has not come."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        return [int((meeting / f"{i}").read_text()) for i in range(count)]
    return None


def work(faults, rank, step, stopped):
    """A step of work, which takes ten times as long where it is slow.

    Returns the seconds that it asked for: a busy host may take others.
    """
    words = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().decode().split("\0")
    places = [str(rank), words[-2]]  # the name of this host
    slow = [f for f in faults for at in places if f.split(":")[:2] == ["slow", at]]
    seconds = 10 * SECONDS if slow else SECONDS
    time.sleep(seconds)
    while slow and slow[0].endswith(f":{step}") and not stopped:
        time.sleep(SECONDS)
    return seconds


def strike(faults, out, rank, step, batch, events):
    """Break, if it is this rank's turn; otherwise the loss."""
    for fault in faults:
        kind, who, when = fault.split(":")
        if kind in ("slow", "hold"):
            continue
        mark = out / f"struck-{fault}"
        at = batch if kind.startswith("spike") else step
        if (int(who), int(when)) != (rank, at) or mark.exists():
            continue
        if not kind.endswith("!"):
            mark.touch()
        (out / "struck").write_text(str(time.time()))
        events.flush()
        if kind.startswith("nan"):
            events.emit("not_finite", step, kind="fault")
            time.sleep(0.3)
        if kind.startswith("spike"):
            return 3.1
        if kind.startswith(("wrong", "tied")):  # as all ranks find, of rank 1
            accused = [1] if kind.startswith("wrong") else [0, 1]
            options = {"suspects": accused, "sure": len(accused) == 1}
            events.emit("wrong_values", step, kind="fault", error="differ", **options)
            kind = "raise"
        break_(kind.strip("!"))
    return 1.0


def break_(kind):
    match kind:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "term":
            os.kill(os.getpid(), signal.SIGTERM)
        case "segfault":
            ctypes.string_at(0)
        case "raise":
            raise RuntimeError("injected")
        case "memory":
            size = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
            resource.setrlimit(resource.RLIMIT_AS, (size + 2**28, -1))
            bytearray(2**40)
        case "full":  # no file may be longer
            resource.setrlimit(resource.RLIMIT_FSIZE, (200, -1))
        case "unsaved":
            time.sleep(0.2)  # the steps before are heard of
            raise CheckpointNotWritten("no space left")
        case "usage":
            sys.exit(2)
        case "loop":
            while True:
                time.sleep(0.1)
        case "gil":
            while True:  # a signal ends the call
                ctypes.PyDLL(None).sleep(1000)
        case "executor-stop":
            os.kill(os.getppid(), signal.SIGSTOP)
        case "executor":
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(1000)


class CheckpointNotWritten(OSError):
    """Of the name by which a supervisor knows it."""


def save(out, step, value, batch):
    draft = out / ".checkpoint"
    draft.write_text(json.dumps([step, value, batch]))
    draft.replace(out / f"checkpoint-{step}")


def restore(out, before):
    saved = [json.loads(file.read_text()) for file in out.glob("checkpoint-*")]
    return max([s for s in saved if not before or s[0] < before], default=(0, "", 0))


class Metrics:
    def __init__(self, path, step):
        lines = path.read_text().splitlines() if path.exists() else []
        kept = [line for line in lines if json.loads(line)["step"] <= step]
        path.write_text("".join(line + "\n" for line in kept))
        self._path = path

    def write(self, step, value):
        with self._path.open("a") as file:
            file.write(json.dumps({"step": step, "loss": value}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
