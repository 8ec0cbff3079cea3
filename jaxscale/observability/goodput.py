"""Goodput: where the time of a run has gone."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from jaxscale.observability.run import Event, Rank, Run, Steps
from jaxscale.supervision import phases


PARTS = (
    "productive",
    "lost",
    "data_wait",
    "checkpoint",
    "evaluation",
    "compile",
    "start",
    "restart",
    "idle",
)
"""Parts of the time of a run, see `Goodput`."""

_PAUSES = {end: phases.PAUSES[begin] for begin, end in phases.SPANS.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Goodput:
    """The time of a run, split into parts.

    In each part, the job:

    - productive: computes steps that count
    - lost: computes steps that a later start has recomputed
    - data_wait: has an idle device, since a rank waits for its batch
    - checkpoint: saves, or at the end waits until a checkpoint is on disk
    - evaluation: evaluates
    - compile: compiles and runs the first step of its first start
    - start: starts for the first time, or after a regular end, and restores
    - restart: has failed: from the last step before until a step is done again
    - idle: does something else, such as hooks between steps
    """

    edges: np.ndarray
    """[N + 1] Times in seconds since 1970, ascending."""
    labels: np.ndarray
    """[N] The part between two edges: an index of `PARTS`."""

    @property
    def wall(self) -> float:
        """Seconds from the first to the last moment."""
        return float(self.edges[-1] - self.edges[0])

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds of each part; their sum is `wall`."""
        sums = np.bincount(self.labels, np.diff(self.edges), len(PARTS))
        return dict(zip(PARTS, sums.tolist(), strict=True))

    @property
    def shares(self) -> Mapping[str, float]:
        """Fraction of wall time of each part; all 0 if no time has passed."""
        wall = self.wall or 1.0
        return {part: seconds / wall for part, seconds in self.seconds.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Launch:
    """One start of the processes, as seen by a rank."""

    events: Sequence[Event]
    steps: Steps
    waits: np.ndarray  # [2, N] see `_waits`
    ended: bool  # regularly

    @property
    def end(self) -> float:
        """Time of the last event of its host."""
        times = [*self.steps.begin, *(event.t1 for event in self.events)]
        return float(max(times))


def goodput(run: Run, *, until: float | None = None) -> Goodput:
    r"""Split the time of a run into parts.

    A job in lock step has a single timeline: that of its lowest rank, except for what
    all wait for, which is taken from the rank that dispatches a step last.

    Args:
        run: The result of `read_run`.
        until: End of the time, in seconds since 1970; None is the newest event. For a
            running run, now.

    Returns:
        The parts. A step counts when it is done: until then the time is idle.

    Example:
        >>> import json, tempfile
        >>> from jaxscale.observability import read_run
        >>> folder = tempfile.mkdtemp()
        >>> def line(name, step, at):
        ...     event = {"t0": at, "t1": at, "cycle": 1, "step": step, "kind": "host"}
        ...     return json.dumps(event | {"name": name, "args": {}})
        >>> lines = [line("restore", 0, 0.0), line("compile", 0, 1.0)]
        >>> for n, at in [(1, 2.0), (2, 6.0), (3, 6.5)]:
        ...     lines += [line("begin", n, at), line("data", n, at + 0.5)]
        >>> lines += [line("done", n, at) for n, at in [(1, 6.0), (2, 7.0), (3, 8.0)]]
        >>> with open(folder + "/events-0.jsonl", "w") as file:
        ...     _ = file.write("\n".join(lines) + "\n")
        >>> parts = goodput(read_run(folder)).seconds
        >>> {part: seconds for part, seconds in parts.items() if seconds}
        {'productive': 1.5, 'data_wait': 0.5, 'compile': 5.0, 'start': 1.0}
    """
    rank = run.ranks[0]
    launches = _launches(rank, _waits(run))
    died = {event.cycle for event in run.driver if event.kind == "fault"}
    firsts = [
        float(launch.steps.step[0]) if len(launch.steps) else np.inf
        for launch in launches
    ]
    times, labels = [np.array([rank.first])], [np.array([PARTS.index("start")])]
    restarts = False
    for i, launch in enumerate(launches):
        again = min(firsts[i + 1 :], default=np.inf)
        t, label = _points(launch, restarts, again)
        last = i == len(launches) - 1
        cycle = launch.events[-1].cycle if launch.events else -1
        failed = any(event.name == phases.ERROR for event in launch.events)
        restarts = not launch.ended and (not last or failed or cycle in died)
        if restarts:
            cut = _last_progress(launch)
            t, label = t[t <= cut], label[t <= cut]
            t = np.append(t, cut)
            label = np.append(label, PARTS.index("restart"))
        times.append(t)
        labels.append(label)
    end = max(run.end if until is None else until, rank.first)
    edges = np.maximum.accumulate(np.concatenate(times))
    edges = np.append(np.clip(edges, rank.first, end), end)
    return Goodput(edges=edges, labels=np.concatenate(labels))


def _launches(rank: Rank, waits: np.ndarray) -> list[_Launch]:
    """The starts of a rank."""
    groups: list[list[Event]] = []
    for event in rank.events:
        before = groups[-1][-1] if groups else None
        starts = event.name in phases.STARTING and (
            before is None
            or before.name not in phases.STARTING
            or phases.STARTING.index(event.name) <= phases.STARTING.index(before.name)
        )
        if before is None or starts or event.cycle != before.cycle:
            groups.append([])
        groups[-1].append(event)
    groups = groups or [[]]
    edges = np.searchsorted(
        rank.steps.begin, [group[0].t0 for group in groups[1:]], side="left"
    )
    bounds = [0, *edges, len(rank.steps)]
    launches = []
    for group, low, high in zip(groups, bounds, bounds[1:], strict=False):
        columns = dataclasses.fields(Steps)
        steps = {f.name: getattr(rank.steps, f.name)[low:high] for f in columns}
        ended = any(event.name == phases.BYE for event in group)
        launches.append(
            _Launch(
                events=group,
                steps=Steps(**steps),
                waits=waits[:, low:high],
                ended=ended,
            )
        )
    return launches


def _waits(run: Run) -> np.ndarray:
    """Seconds that the devices were idle before each step of the lowest rank.

    Returns:
        [2, N], for the rank that had its batch last: until it began, and then until it
        had the batch.
    """
    keys = [rank.steps.cycle << 32 | rank.steps.step for rank in run.ranks]
    waits = np.zeros((2, len(keys[0])))
    if not len(keys[0]):
        return waits
    order = np.argsort(keys[0], kind="stable")
    for rank, mine in zip(run.ranks, keys, strict=True):
        steps = rank.steps
        # Before the first step, and after a gap, nothing is known.
        before = np.append(np.nan, steps.done[:-1])
        idle = np.maximum(steps.begin - before, 0.0)
        data = np.maximum(steps.fetched - np.maximum(steps.begin, before), 0.0)
        both = np.nan_to_num(np.stack([idle, data]))  # [2, its steps]
        at = np.searchsorted(keys[0], mine, sorter=order, side="right") - 1
        found = order[np.maximum(at, 0)]
        later = (keys[0][found] == mine) & (both.sum(0) > waits.sum(0)[found])
        waits[:, found[later]] = both[:, later]
    return waits


def _points(
    launch: _Launch, restarts: bool, again: float
) -> tuple[np.ndarray, np.ndarray]:
    """The start of each part, in order: two arrays [P].

    Args:
        launch: The start.
        restarts: Whether a previous one has failed.
        again: The first step that a later start has recomputed.
    """
    code = {part: i for i, part in enumerate(PARTS)}
    steps, points = launch.steps, list[tuple[float, int]]()
    is_done = ~np.isnan(steps.done)
    done = np.maximum.accumulate(steps.done[is_done])  # [D]
    runs = done[0] if len(done) else np.inf
    part = "restart" if restarts else "start"
    for event in launch.events:
        if not points and not restarts:
            points.append((event.t0, code["start"]))
        if event.name == phases.COMPILE and not restarts:
            part = "compile"
            points.append((event.t1, code[part]))
        elif event.name in _PAUSES:
            points.append((event.t0, code[_PAUSES[event.name]]))
            points.append((event.t1, code[part if event.t1 < runs else "idle"]))
        elif event.name == phases.FINISH:
            points.append((event.t1, code[phases.PAUSES[phases.FINISH]]))
        elif event.name == phases.BYE:
            points.append((event.t1, code["idle"]))
    # After the first step: idle, waiting for data, computing, for each following one.
    waits = launch.waits[:, is_done][:, 1:]
    floor = done[:-1]  # [D - 1]
    begin = np.minimum(floor + waits[0], done[1:])
    fetched = np.minimum(begin + waits[1], done[1:])
    lost = steps.step[is_done] >= again
    computes = np.where(lost[1:], code["lost"], code["productive"])
    same = np.ones_like(computes)
    times = np.stack([begin, fetched, done[1:]], axis=1).ravel()  # [3 (D - 1)]
    kinds = np.stack([same * code["data_wait"], computes, same * code["idle"]], axis=1)
    first = [done[0]] if len(done) else []
    # Of points at the same time the last counts: what begins as a step ends.
    t = np.concatenate([first, times, [t for t, _ in points]])
    labels = np.concatenate(
        [[code["idle"]] * len(first), kinds.ravel(), [p for _, p in points]]
    )
    order = np.argsort(t, kind="stable")
    return t[order], labels[order].astype(int)


def _last_progress(launch: _Launch) -> float:
    """Time of the last known progress of a failed start."""
    done = launch.steps.done
    if np.isnan(done).all():
        return launch.end
    pauses = [event.t1 for event in launch.events if event.name in _PAUSES]
    return max([float(np.nanmax(done)), *pauses])
