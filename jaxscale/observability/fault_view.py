"""The faults of a run: reasons, suspects, durations, and where the ranks were."""

import collections
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxscale.observability.layout import MeshLayout
from jaxscale.observability.mesh_view import mesh_view, standings, step_seconds
from jaxscale.observability.run import Event, Run
from jaxscale.supervision import phases
from jaxscale.supervision.watch import main_thread


_MOST_FAULTS = 200
_MOST_MOMENTS = 10
_MOST_POINTS = 20_000
_MOST_STACKS = 4096
_STACK_BYTES = 2**15
_FRAMES = 3


def fault_rows(run: Run) -> list[dict[str, Any]]:
    """A row per fault that the supervisor has seen; without a supervisor, per error.

    Returns:
        ``kind``, ``reason``, ``suspects``, ``time`` from the begin of the run,
        ``silent`` seconds since the last message of the suspects, ``restart`` seconds
        until a step was done again, ``lost`` steps, and ``stacks``: calls and the ranks
        that were there. None is unknown.
    """
    faults = [event for event in run.driver if event.kind == "fault"]
    if not faults:
        return [_error_row(run, *found) for found in _errors(run)][-_MOST_FAULTS:]
    rows = []
    for event, following in zip(faults, [*faults[1:], None], strict=True):
        end = float("inf") if following is None else following.t0
        again = [
            other.t1
            for other in run.driver
            if other.name == "running" and event.t0 <= other.t1 <= end
        ]
        rows.append(
            {
                "kind": event.name,
                "cycle": event.cycle,
                "step": event.step,
                "time": event.t0 - run.begin,
                "reason": str(event.args.get("reason", "")),
                "suspects": _strings(event.args.get("suspects")),
                "silent": _silence(run, event),
                "restart": again[0] - event.t0 if again else None,
                "lost": _lost(run, event),
                "stacks": _stacks(run.directory, event.cycle),
            }
        )
    return rows[-_MOST_FAULTS:]


def moments(run: Run, layout: MeshLayout, now: float) -> list[dict[str, Any]]:
    """The mesh at each of the last faults, and first `now`."""
    ranks = sorted({*layout.ranks})
    usual = step_seconds(run)
    cycles = [event.cycle for rank in run.ranks for event in rank.events[-1:]]
    cycles += [int(rank.steps.cycle[-1]) for rank in run.ranks if len(rank.steps)]
    stand = standings(run, ranks, cycle=max(cycles, default=0))
    views = [{"label": "now", **mesh_view(stand, layout, now=now, usual=usual)}]
    faults = [event for event in run.driver if event.kind == "fault"]
    room = min(_MOST_MOMENTS, _MOST_POINTS // max(len(layout.ranks), 1))
    for event in faults[::-1][:room]:
        stand = standings(run, ranks, cycle=event.cycle, until=event.t0)
        view = mesh_view(
            stand, layout, now=event.t0, hangs=True, suspects=suspected(event)
        )
        label = f"fault of cycle {event.cycle}: {event.name} at step {event.step}"
        views.append({"label": label, **view})
    return views


def suspected(event: Event) -> list[int]:
    """The ranks that a fault names, if they stand out."""
    named = [
        re.match(r"rank (\d+): (?!nobody stands out)", text)
        for text in _strings(event.args.get("suspects"))
    ]
    return [int(match[1]) for match in named if match]


def _errors(run: Run) -> Iterator[tuple[int, Event]]:
    """Faults that ranks have reported themselves, once per step."""
    known = set()
    faults = [(r.number, e) for r in run.ranks for e in r.events if e.kind == "fault"]
    for number, event in sorted(faults, key=lambda found: found[1].t1):
        key = event.name, event.cycle, event.step, round(event.t1)
        if key not in known:
            known.add(key)
            yield number, event


def _error_row(run: Run, rank: int, event: Event) -> dict[str, Any]:
    reason = str(event.args.get("error", "")) or event.name.replace("_", " ")
    later = [
        done
        for r in run.ranks
        if r.number == rank
        for done in r.steps.done[r.steps.begin > event.t1][:1].tolist()
    ]
    restart = later[0] - event.t1 if later and event.name == phases.ERROR else None
    return {
        "kind": event.name,
        "cycle": event.cycle,
        "step": event.step,
        "time": event.t1 - run.begin,
        "reason": reason,
        "suspects": [f"rank {rank}: it said so"],
        "silent": None,
        "restart": restart if restart == restart else None,  # NaN: not done yet
        "lost": None,
        "stacks": [],
    }


def _strings(value: Any) -> list[str]:
    return [str(text) for text in value] if isinstance(value, list) else []


def _silence(run: Run, event: Event) -> float | None:
    """Seconds between the last message of a suspect and the fault."""
    named = suspected(event)
    stand = standings(run, named, cycle=event.cycle, until=event.t0)
    times = [s.time for s in stand.values() if s.time]
    return event.t0 - max(times) if times else None


def _lost(run: Run, event: Event) -> int | None:
    """Steps that were done and had to be recomputed."""
    steps = run.ranks[0].steps
    later = steps.step[steps.cycle > event.cycle]
    if not len(later):
        return None
    return max(event.step - (int(later[0]) - 1), 0)


def _stacks(directory: Path, cycle: int) -> list[list[Any]]:
    """Where the main threads were at the end of a cycle, with the ranks there."""
    groups: dict[str, list[int]] = collections.defaultdict(list)
    files = sorted((directory / "supervisor").glob(f"stacks-{cycle}-*.txt"))
    for file in files[:_MOST_STACKS]:
        match = re.fullmatch(r"stacks-\d+-(\d+)\.txt", file.name)
        if match is None or not file.is_file():
            continue
        with file.open("rb") as stream:
            text = stream.read(_STACK_BYTES).decode(errors="replace")
        frames = main_thread(text).split(" < ")[:_FRAMES]
        groups[" < ".join(frames) or "no stack"].append(int(match[1]))
    # The odd ones first.
    return sorted(([g, sorted(n)] for g, n in groups.items()), key=lambda x: len(x[1]))
