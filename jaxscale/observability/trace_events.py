"""Events of a trace for ``chrome://tracing``, which https://ui.perfetto.dev opens."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any


type Event = dict[str, Any]
"""An entry of ``traceEvents``."""


def process(pid: int, name: str, *threads: str) -> Iterator[Event]:
    """The names of a process and of its threads, which are numbered from 0."""
    yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}
    order = {"sort_index": pid}
    yield {"ph": "M", "pid": pid, "name": "process_sort_index", "args": order}
    for tid, thread in enumerate(threads):
        about = {"name": thread}
        yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": about}


def span(
    pid: int, tid: int, name: str, t0: float, t1: float, about: dict[str, Any]
) -> Event:
    """What a thread does from `t0` to `t1`, in seconds from the start of the trace."""
    at = {"ts": round(t0 * 1e6, 1), "dur": round((t1 - t0) * 1e6, 1)}
    return {"ph": "X", "pid": pid, "tid": tid, "name": name, **at, "args": about}


def write_events(events: Iterable[Event], path: str | Path) -> int:
    """Write a trace, an event a line; the number of events."""
    count, path = 0, Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        for event in events:
            file.write((",\n" if count else "") + json.dumps(event))
            count += 1
        file.write("\n]}\n")
    return count
