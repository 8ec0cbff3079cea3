"""What changed from step to step: the loss, slow ranks, memory and compilation."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxscale.observability.layout import MeshLayout
from jaxscale.observability.run import Rank, Run, StepGrid
from jaxscale.supervision import phases
from jaxscale.supervision.events import MEASURES
from jaxscale.supervision.protocol import Measured
from jaxscale.supervision.slow import Measurements


_MOST_POINTS = 2000
_MOST_CELLS = 40_000
_MOST_ROWS = 256
_MOST_LINES = 8
_MOST_PROGRAMS = 50
_LARGEST = 1e300


def thinned(
    x: Sequence[float] | np.ndarray, y: Sequence[float] | np.ndarray
) -> tuple[list[float], list[float | None]]:
    """A line downsampled to 2,000 points, with the lowest and highest of each part.

    Example:
        >>> thinned([1, 2, 3], [0.5, float("nan"), 0.25])
        ([1, 2, 3], [0.5, None, 0.25])
    """
    x, y = np.asarray(x), np.asarray(y, np.float64)
    if len(x) > _MOST_POINTS:
        kept = [0, len(x) - 1]
        for part in np.array_split(np.arange(len(x)), _MOST_POINTS // 2 - 1):
            values = y[part]
            if np.isfinite(values).any():
                kept += [part[np.nanargmin(values)], part[np.nanargmax(values)]]
        at = np.unique(kept)
        x, y = x[at], y[at]
    return x.tolist(), [float(f"{v:.6g}") if np.isfinite(v) else None for v in y]


def loss_view(run: Run) -> dict[str, Any]:
    """The loss of the steps that count, recomputed steps, and events."""
    steps = run.ranks[0].steps
    # The last time that each step was computed counts.
    _, last = np.unique(steps.step[::-1], return_index=True)
    counts = np.zeros(len(steps), bool)
    counts[len(steps) - 1 - last] = True
    records = [r for r in run.metrics if 0 <= r["step"] < 2**32]
    known = {r["step"]: r["loss"] for r in records if _number(r.get("loss"))}
    x = np.array([*known], np.int64)
    y = np.array([*known.values()], np.float64)
    if not len(x):
        x, y = steps.step[counts], steps.loss[counts]
    again = ~counts & np.isfinite(steps.loss)
    held = {r["step"]: r for r in records if _number(r.get("eval_loss"))}
    back = np.flatnonzero(np.diff(steps.step) <= 0) + 1
    marks = [
        {"step": int(steps.step[i]) - 1, "kind": "restart", "text": _restart(steps, i)}
        for i in back.tolist()
    ]
    return {
        "loss": thinned(x, y),
        "again": thinned(steps.step[again], steps.loss[again]),
        "evaluation": thinned([*held], [r["eval_loss"] for r in held.values()]),
        "marks": (marks + _bad_steps(run))[-_MOST_POINTS:],
    }


def _restart(steps: Any, i: int) -> str:
    lost = int(steps.step[i - 1] - steps.step[i]) + 1
    return f"restart after step {steps.step[i] - 1}: {lost} steps computed again"


def _bad_steps(run: Run) -> list[dict[str, Any]]:
    bad = {
        (event.step, "not finite: the update was skipped")
        for rank in run.ranks
        for event in rank.events
        if event.name == phases.NOT_FINITE
    }
    bad |= {
        (event.step, f"{event.name}: {event.args.get('reason', '')}")
        for event in run.driver
        if event.kind == "fault"
    }
    return [
        {"step": step, "kind": text.partition(":")[0], "text": text}
        for step, text in sorted(bad)
    ]


def heat_view(run: Run) -> dict[str, Any]:
    """Seconds of each rank by step, the maximum of each cell, and slow ranks.

    Clocks of hosts differ, so each number is a difference of times of one rank.
    """
    grid = run.grid
    counts = _last_of_each_step(grid)
    step = grid.step[counts]
    numbers = [rank.number for rank in run.ranks]
    rows = _parts(len(numbers), _MOST_ROWS)
    layers = {
        "host: batch and dispatch, s": (
            step,
            (grid.dispatched - grid.begin)[:, counts],
        ),
        "host: wait for data, s": (step, (grid.fetched - grid.begin)[:, counts]),
        "device: dispatched until done, s": (
            step,
            (grid.done - grid.dispatched)[:, counts],
        ),
    }
    return {
        "rows": [span([numbers[i] for i in part]) for part in rows],
        "layers": {
            name: _layer(at, values, rows)
            for name, (at, values) in {**_profiles(run), **layers}.items()
        },
    }


def _layer(
    step: np.ndarray, values: np.ndarray, rows: list[np.ndarray]
) -> dict[str, Any]:
    columns = _parts(len(step), max(_MOST_CELLS // max(len(rows), 1), 1))
    return {
        "columns": [int(step[part[0]]) for part in columns],
        "each": max((len(part) for part in columns), default=1),
        "cells": _cells(values, rows, columns),
    }


def _profiles(run: Run) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Compute and waiting of the devices in profiled steps."""
    found = {}
    for name in ("computing", "waiting"):
        of_rank = [_measured(rank, phases.PROFILE, name) for rank in run.ranks]
        steps = sorted({step for known in of_rank for step in known})
        if steps:
            values = [[known.get(s, np.nan) for s in steps] for known in of_rank]
            found[name] = np.array(steps), np.array(values, np.float64)
    if not found:
        return {}
    steps, waiting = found["waiting"]
    # The rank that waits least in collectives has arrived last.
    order = np.argsort(np.argsort(np.nan_to_num(waiting, nan=np.inf), 0), 0) + 1.0
    order[np.isnan(waiting)] = np.nan
    return {
        "device: computing, s": found["computing"],
        "device: waiting in collectives, s": found["waiting"],
        "arrival at collectives, from the last (1)": (steps, order),
    }


def _measured(rank: Rank, event: str, name: str) -> dict[int, float]:
    """A measurement of a rank by step; for a repeated step the last."""
    return {
        e.step: float(e.args[name])
        for e in rank.events
        if e.name == event and _number(e.args.get(name))
    }


def slow_text(run: Run, layout: MeshLayout) -> str:
    """The slow ranks, by the ranks' own measurements."""
    measured, samples = Measurements(), 0
    cycle = max((e.cycle for r in run.ranks for e in r.events[-1:]), default=0)
    for rank in run.ranks:
        for event in rank.events:
            name, args = MEASURES.get(event.name, ("", []))
            values: list[Any] = [event.args.get(arg) for arg in args]
            if name and event.cycle == cycle and all(map(_number, values)):
                group = str(event.args.get("group", ""))
                measured.add(
                    Measured(
                        ranks=[rank.number],
                        seconds=[sum(values)],
                        cycle=cycle,
                        step=event.step,
                        name=name,
                        group=group,
                    )
                )
                samples += 1
    found = measured.slow()
    if found:
        names = [
            f"{layout.name(s.rank)}, {name} {s.factor:.2f} times as long as others"
            for name, s in found
        ]
        return f"Slow now: {'; '.join(names[:_MOST_LINES])}."
    if len(run.ranks) == 1:
        return "There is one rank, so nothing to compare it with."
    if not samples:
        return (
            "The ranks have measured nothing of themselves, by which slow ones are "
            "named; with profile_every they do."
        )
    return "No rank stands out by what it has measured of itself."


def _last_of_each_step(grid: StepGrid) -> np.ndarray:
    """Columns of the grid by step; for a recomputed step the last."""
    order = np.lexsort((grid.cycle, grid.step))
    last = np.append(np.diff(grid.step[order]) > 0, True)[: len(order)]
    return order[last]


def _parts(count: int, most: int) -> list[np.ndarray]:
    return np.array_split(np.arange(count), min(count, most)) if count else []


def _cells(
    values: np.ndarray, rows: list[np.ndarray], columns: list[np.ndarray]
) -> list[list[float | None]]:
    filled = np.where(np.isfinite(values), values, -np.inf)
    if not rows or not columns:
        return []
    by_row = np.stack([filled[part].max(0) for part in rows])
    starts = [part[0] for part in columns]
    cells = np.maximum.reduceat(by_row, starts, axis=1)
    return [
        [float(f"{v:.3g}") if np.isfinite(v) else None for v in row]
        for row in cells.tolist()
    ]


def span(numbers: Sequence[int]) -> str:
    """The first and the last of numbers."""
    first, last = numbers[0], numbers[-1]
    return f"{first}" if first == last else f"{first}-{last}"


def memory_view(run: Run) -> dict[str, Any]:
    """Bytes over steps, the minimum and maximum over all ranks."""
    found: dict[str, dict[int, dict[int, float]]] = {}
    for rank in run.ranks:
        for event in rank.events:
            if event.kind == "memory":
                for name, value in event.args.items():
                    if _number(value):
                        shown = name.removeprefix("bytes_").replace("_", " ")
                        shown = shown.replace(" bytes", "")
                        by_rank = found.setdefault(shown, {})
                        by_rank.setdefault(rank.number, {})[event.step] = value
    lines = {}
    for name, by_rank in found.items():
        for line, values in _least_and_most(name, by_rank).items():
            lines[line] = thinned([*values], [*values.values()])
    return {"lines": lines}


def _least_and_most(
    name: str, by_rank: dict[int, dict[int, float]]
) -> dict[str, dict[int, float]]:
    """Two lines over all ranks, or one where they are equal."""
    at: dict[int, list[float]] = {}
    for values in by_rank.values():
        for step, value in values.items():
            at.setdefault(step, []).append(value)
    most = {step: max(values) for step, values in sorted(at.items())}
    least = {step: min(values) for step, values in sorted(at.items())}
    if most == least:
        return {name: most}
    last = max(most)
    who = max(by_rank, key=lambda rank: by_rank[rank].get(last, 0))
    return {f"{name}, most: rank {who} at the end": most, f"{name}, least": least}


def compile_rows(run: Run) -> list[dict[str, Any]]:
    """Programs that the lowest rank has compiled: step, name and seconds."""
    rank, rows = run.ranks[0], list[dict[str, Any]]()
    for event in rank.events:
        if event.kind != "compile":
            continue
        seconds = event.t1 - event.t0
        if event.name == phases.COMPILE and not seconds:  # it says that it begins
            done = rank.steps.done[rank.steps.begin >= event.t1][:1]
            seconds = float(done[0]) - event.t1 if len(done) else np.nan
        rows.append(
            {
                "step": event.step,
                "cycle": event.cycle,
                "name": str(event.args.get("program") or _FIRST),
                "seconds": seconds if np.isfinite(seconds) else None,
            }
        )
    return rows[-_MOST_PROGRAMS:]


_FIRST = "the first step: compiled, or read from the cache, and run"


def _number(value: Any) -> bool:
    known = isinstance(value, int | float) and not isinstance(value, bool)
    return known and abs(value) < _LARGEST
