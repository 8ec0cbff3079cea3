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
