"""Events of runs that never ran, with known answers."""

import json
from pathlib import Path
from typing import Any

import numpy as np


AXES = {"pipe": 2, "data": 2, "fsdp": 1, "context": 1, "tensor": 2}
CUBE = np.arange(8).reshape(2, 2, 2)  # [pipe, data, tensor] rank


def event(name: str, step: int, t1: float, **more: Any) -> dict[str, Any]:
    """An event as a process writes it."""
    known = {"t0": t1, "t1": t1, "cycle": 1, "step": step, "kind": "host"}
    return {**known, "name": name, "args": {}, **more}


def layout(rank: int, cycle: int = 1, **more: Any) -> dict[str, Any]:
    """The layout event of a rank of the cube, with a device each."""
    args = {"axes": AXES, "places": [rank], "host": f"node-{rank // 4}"}
    args |= {"microbatches": 4, "chunks": 1, **more}
    return event("layout", 0, 100.0, args=args, cycle=cycle)


def steps(first: int, last: int, begin: float, cycle: int = 1) -> list[dict[str, Any]]:
    """Events of steps of a second each, of which a tenth is waiting for data."""
    found = []
    for step in range(first, last + 1):
        t = begin + step - first
        loss = {"args": {"loss": 4.0 / step}, "kind": "device"}
        found += [
            event("begin", step, t, cycle=cycle),
            event("data", step, t + 0.1, t0=t, cycle=cycle),
            event("dispatched", step, t + 0.2, t0=t + 0.1, cycle=cycle),
            event("done", step, t + 1, t0=t, cycle=cycle, **loss),
        ]
    return found


def hanging_cube(silent: int = 5) -> dict[int, list[dict[str, Any]]]:
    """Eight ranks in step 4, where one waits for its data and the others for it."""
    ranks = {}
    for rank in range(8):
        known = [layout(rank), event("restore", 0, 101.0), *steps(1, 3, 102.0)]
        known.append(event("begin", 4, 105.0))
        if rank != silent:
            known.append(event("data", 4, 105.1, t0=105.0))
            known.append(event("dispatched", 4, 105.2, t0=105.1))
        ranks[rank] = known
    return ranks


def write(directory: Path, ranks: dict[int, list[dict[str, Any]]]) -> Path:
    """Write the events of ranks as their files."""
    directory.mkdir(parents=True, exist_ok=True)
    for rank, known in ranks.items():
        text = "".join(json.dumps(e) + "\n" for e in known)
        (directory / f"events-{rank}.jsonl").write_text(text)
    return directory


EVIL = "<img src=x onerror=document.body.dataset.evil=1></script><b>&amp;"


def survived_hang(directory: Path) -> Path:
    """Rank 5 hangs in step 13; the job starts again after step 10, and goes on."""
    ranks = {}
    for rank in range(8):
        known = [event("start", 0, 90.0), layout(rank, host=f"node-{rank // 4}{EVIL}")]
        known += [event("restore", 0, 101.0), event("compile", 0, 102.0)]
        known[-1]["kind"] = "compile"
        known += steps(1, 12, 103.0)
        known += [event("save", 10, 113.5), event("saved", 10, 113.9, t0=113.5)]
        known.append(event("begin", 13, 115.0))
        if rank != 5:
            known.append(event("data", 13, 115.1, t0=115.0))
            known.append(event("dispatched", 13, 115.2, t0=115.1))
        known.append(event("start", 0, 150.0, cycle=2))
        known.append(layout(rank, 2, host=f"node-{rank // 4}{EVIL}"))
        known[-1].update(t0=151.0, t1=151.0)
        known.append(event("restore", 0, 152.0, cycle=2))
        known.append(event("compile", 10, 153.0, cycle=2, kind="compile"))
        known += steps(11, 14, 154.0, cycle=2)
        ranks[rank] = known
    ranks[0].insert(9, event("not_finite", 2, 105.9, kind="fault"))
    write(directory, ranks)
    records = [{"step": n, "loss": 4.0 / n, "eval_loss": 5.0} for n in range(1, 15)]
    text = "".join(json.dumps(record) + "\n" for record in records)
    (directory / "metrics.jsonl").write_text(text)
    _supervisor(directory / "supervisor")
    return directory


def _supervisor(directory: Path) -> None:
    directory.mkdir()
    args = {"reason": f"all said nothing for 25 s {EVIL}"}
    args["suspects"] = ["rank 5: it is behind, in begin of step 13"]
    found = [
        event("stall", 12, 141.0, t0=140.0, kind="fault", args=args),
        event("running", 11, 155.0, t0=140.0, cycle=2),
    ]
    text = "".join(json.dumps(e) + "\n" for e in found)
    (directory / "events-driver.jsonl").write_text(text)
    for rank in range(8):
        file = "data" if rank == 5 else "wait"
        (directory / f"stacks-1-{rank}.txt").write_text(
            "Thread 0x01 (most recent call first):\n"
            f'  File "/a/{file}.py", line 9 in get\n'
            '  File "/a/loop.py", line 3 in fit\n'
        )
