"""The timeline of the ranks: rows for the page, and a trace for Perfetto.

`chrome_trace` writes the format of ``chrome://tracing``, which https://ui.perfetto.dev
opens: a process per rank with a thread for its host and one for its devices, and below
them the pipeline schedule, aligned with the last step.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxscale.observability.layout import MeshLayout
from jaxscale.observability.run import Rank, Run, Steps
from jaxscale.observability.trace_events import process, span, write_events
from jaxscale.supervision import phases


SPANS = {phases.SAVED: "save", phases.EVALUATED: "evaluate"}
"""Events with a duration, and their labels."""
_INSTANT = {*phases.STARTING, phases.COMPILE, phases.STOPPED, *phases.ENDING}
_INSTANT -= {phases.LAYOUT}
_STARTS = (phases.START, phases.LAYOUT, phases.RESTORE, phases.COMPILE)
_MOST_EVENTS = 400_000
_MOST_CELLS = 20_000
_BACKWARD = 2  # of forward passes


def host_and_device(
    steps: Steps, keep: slice
) -> Iterator[tuple[str, str, np.ndarray, np.ndarray]]:
    """Parts of steps: thread, name, and when they begin and end, [N] each.

    The device is assumed to begin when a step is dispatched, or when it has finished
    the previous one.
    """
    before = np.append(np.nan, steps.done[:-1])
    begin = np.fmax(steps.dispatched, before)
    yield "host", "wait for data", steps.begin[keep], steps.fetched[keep]
    yield "host", "dispatch", steps.fetched[keep], steps.dispatched[keep]
    yield "device", "step", begin[keep], steps.done[keep]


def chrome_trace(run: Run, layout: MeshLayout, path: str | Path) -> tuple[int, int]:
    """Write the trace; for a long run only the last steps.

    Args:
        run: The result of `read_run`.
        layout: Has the names of the ranks, and the pipeline.
        path: The JSON file.

    Returns:
        The first complete step, and the number of events written.
    """
    steps = max(_MOST_EVENTS // (3 * len(run.ranks)), 1)
    kept = [rank.steps.step[-steps:] for rank in run.ranks]
    first = max((int(k[0]) for k in kept if len(k)), default=0)
    return first, write_events(_trace(run, layout, steps), path)


def _trace(run: Run, layout: MeshLayout, steps: int) -> Iterator[dict[str, Any]]:
    start = run.begin
    driver = max(rank.number for rank in run.ranks) + 1
    for rank in run.ranks:
        yield from process(rank.number, layout.name(rank.number), "host", "device")
        yield from _rank_trace(rank, start, steps)
    if run.driver:
        yield from process(driver, "supervisor", "faults")
    for event in run.driver:
        about = {"cycle": event.cycle, "step": event.step, **event.args}
        yield span(driver, 0, event.name, event.t0 - start, event.t1 - start, about)
    if layout.stages > 1:
        yield from _schedule_trace(run, layout, driver + 1, start)


def _rank_trace(rank: Rank, start: float, steps: int) -> Iterator[dict[str, Any]]:
    keep = slice(max(len(rank.steps) - steps, 0), None)
    numbers = rank.steps.step[keep].tolist()
    cycles = rank.steps.cycle[keep].tolist()
    for thread, name, begin, end in host_and_device(rank.steps, keep):
        known = zip(numbers, cycles, begin - start, end - start, strict=True)
        for step, cycle, t0, t1 in known:
            if t0 <= t1:  # neither is NaN
                about = {"step": step, "cycle": cycle}
                yield span(rank.number, int(thread == "device"), name, t0, t1, about)
    for event in rank.events:
        about = {"step": event.step, "cycle": event.cycle, **event.args}
        t0, t1 = event.t0 - start, event.t1 - start
        if event.name in SPANS or (event.t0 < event.t1 and event.kind != "device"):
            name = SPANS.get(event.name, event.name)
            yield span(rank.number, 0, name, t0, t1, about)
        elif event.name in _INSTANT or event.kind == "fault":
            found = span(rank.number, 0, event.name, t1, t1, about)
            del found["dur"]
            yield found | {"ph": "i", "s": "p"}


def _schedule_trace(
    run: Run, layout: MeshLayout, pid: int, start: float
) -> Iterator[dict[str, Any]]:
    """The planned schedule, scaled to the duration of the last step."""
    grid = run.grid
    known = np.flatnonzero(np.isfinite(grid.done).any(0))
    schedule = _schedule(layout)
    if not len(known) or schedule is None:
        return
    column = known[-1]
    end = float(np.nanmax(grid.done[:, column])) - start
    begin = float(np.nanmax(grid.dispatched[:, column])) - start
    if len(known) > 1:
        begin = max(begin, float(np.nanmax(grid.done[:, known[-2]])) - start)
    if not begin < end:
        return
    title = f"schedule of step {grid.step[column]}, as planned"
    yield from process(pid, title, *(f"stage {s}" for s in range(layout.stages)))
    now, boxes = 0, list[tuple[int, str, int, int]]()
    for tick in range(schedule.num_ticks):
        for kind, long in (("b", _BACKWARD), ("f", 1)):
            row = getattr(schedule, f"{kind}_mb")[tick].tolist()
            chunks = getattr(schedule, f"{kind}_chunk")[tick].tolist()
            if max(row) < 0:
                continue
            for stage, (mb, chunk) in enumerate(zip(row, chunks, strict=True)):
                name = f"{'forward' if kind == 'f' else 'backward'} {mb}.{chunk}"
                boxes += [(stage, name, now, long)] if mb >= 0 else []
            now += long
    scale = (end - begin) / max(now, 1)
    for stage, name, at, long in boxes:
        t0 = begin + at * scale
        yield span(pid, stage, name, t0, t0 + long * scale, {})


def schedule_drawing(layout: MeshLayout) -> str:
    """The pipeline schedule as SVG; empty if there is none, or it is too long."""
    schedule = _schedule(layout)
    if schedule is None:
        return ""
    from jaxscale.sharding.schedule_drawing import svg

    return svg(schedule)


def _schedule(layout: MeshLayout) -> Any:
    cells = layout.stages * layout.microbatches * layout.chunks
    if layout.stages < 2 or cells > _MOST_CELLS:
        return None
    from jaxscale.sharding.schedule import pipeline_schedule

    try:
        return pipeline_schedule(layout.stages, layout.microbatches, layout.chunks)
    except ValueError:  # of no run that could have been
        return None


_MOST_ROWS = 24
_MOST_SEGMENTS = 6000
_FEWEST_STEPS = 4
_MOST_MARKS = 60  # of a rank


def timeline(
    run: Run, layout: MeshLayout, chosen: Sequence[int] = ()
) -> dict[str, Any]:
    """The last steps of some ranks, and the pauses of the whole run, for the page.

    Args:
        run: The result of `read_run`.
        layout: Has the names of the ranks.
        chosen: Ranks to show in any case, as long as there is room.

    Returns:
        ``rows`` names; ``segments`` by kind, each a list of row, thread (0 the host, 1
        the device), begin, end and step; times in seconds from the start of the run.
    """
    rows = _rows(run, chosen)
    steps = max(_MOST_SEGMENTS // (3 * len(rows)), _FEWEST_STEPS)
    segments: dict[str, list[list[float]]] = {}
    start, window = run.begin, [np.inf, -np.inf]
    for row, rank in enumerate(rows):
        keep = slice(max(len(rank.steps) - steps, 0), None)
        for thread, name, begin, end in host_and_device(rank.steps, keep):
            known = begin <= end  # neither is NaN
            columns = (begin[known] - start, end[known] - start)
            for t0, t1, step in zip(
                *columns, rank.steps.step[keep][known], strict=True
            ):
                at = [row, int(thread == "device"), round(t0, 4), round(t1, 4)]
                segments.setdefault(name, []).append([*at, int(step)])
        for name, t0, t1, step in _pauses(rank):
            at = [row, 0, round(t0 - start, 4), round(t1 - start, 4), step]
            segments.setdefault(name, []).append(at)
        begun = _recent(rank.steps, min(steps, _WINDOW))
        if len(begun):
            window = [min(window[0], begun[0]), max(window[1], rank.last)]
    if window[1] < window[0]:
        window = [start, max(run.end, start + 1e-3)]
    return {
        "rows": [layout.name(rank.number) for rank in rows],
        "segments": segments,
        "window": [float(w) - start for w in window],
        "end": run.end - start,
        "total": len(run.ranks),
        "steps": steps,
        "schedule": schedule_drawing(layout),
    }


_WINDOW = 12  # steps in the initial view


def _recent(steps: Steps, count: int) -> np.ndarray:
    """The start of the last consecutive steps."""
    breaks = np.flatnonzero((np.diff(steps.step) != 1) | (np.diff(steps.cycle) != 0))
    first = max(len(steps) - count, int(breaks[-1]) + 1 if len(breaks) else 0)
    return steps.begin[first:]


def _rows(run: Run, chosen: Sequence[int]) -> list[Rank]:
    ranks = {rank.number: rank for rank in run.ranks}
    wanted = [n for n in dict.fromkeys(chosen) if n in ranks][:_MOST_ROWS]
    spread = np.linspace(0, len(run.ranks) - 1, min(_MOST_ROWS, len(run.ranks)))
    for i in spread.round().astype(int).tolist():
        number = run.ranks[i].number
        if len(wanted) < _MOST_ROWS and number not in wanted:
            wanted.append(number)
    return [ranks[n] for n in sorted(wanted)]


def _pauses(rank: Rank) -> Iterator[tuple[str, float, float, int]]:
    """Saves, evaluations, starts and faults: name, begin, end and step."""
    began, found = None, list[tuple[str, float, float, int]]()
    for event in rank.events:
        if event.name in SPANS:
            found.append((SPANS[event.name], event.t0, event.t1, event.step))
        elif event.kind == "fault":
            found.append(("fault", event.t1, event.t1, event.step))
        elif event.name in _STARTS:
            if event.name != phases.COMPILE:
                began = event.t1 if began is None else began
                continue
            if began is not None:
                found.append(("start", began, event.t1, event.step))
            began = None
            done = rank.steps.done[rank.steps.begin >= event.t1][:1]
            if len(done) and done[0] > event.t1:
                found.append(("compile", event.t1, float(done[0]), event.step + 1))
    yield from found[-_MOST_MARKS:]
