"""The output directory of a run as data: steps as columns, other events as objects.

The run may still be running, or may have been killed in the middle of a line: damaged
lines are counted and skipped. R ranks, N steps.
"""

import dataclasses
import functools
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from jaxscale.supervision import phases


_COLUMNS = {name.encode(): i for i, name in enumerate((*phases.STEP, phases.DONE))}
# Nearly all lines are steps: 20 million for 512 ranks and 10,000 steps. A regular
# expression parses them five times faster than a JSON parser.
_STEP_LINE = re.compile(
    rb'\{"t0": (\d+(?:\.\d+)?), "t1": (\d+(?:\.\d+)?), '
    rb'"cycle": (\d{1,9}), "step": (\d{1,9}), '
    rb'"kind": "(?:host|device)", "name": "(' + b"|".join(_COLUMNS) + rb')", '
    rb'"args": \{(?:"loss": (-?\d+(?:\.\d+)?(?:e[+-]?\d+)?|null))?\}\}\r?\n'
)
_GROUPS = 6
_REMEMBERED = 256  # bytes, by which a file is recognized
_COLUMN_NAMES = ("begin", "fetched", "dispatched", "done")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Event:
    """An event other than the parts of a step, as `jaxscale.supervision` writes it."""

    t0: float
    """When it began, in seconds since 1970."""
    t1: float
    """When it ended."""
    cycle: int
    """Starts of the job until then; 0 without a supervisor."""
    step: int
    """The step that it belongs to."""
    kind: str
    """host, device, compile, memory or fault."""
    name: str
    """Name of the event."""
    args: dict[str, Any]
    """Arguments of the event."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Steps:
    """The steps that a rank has begun, in order; NaN for what did not happen.

    A step that was recomputed after a restart appears twice.
    """

    cycle: np.ndarray
    """[N] Starts of the job until then."""
    step: np.ndarray
    """[N] Number of the step."""
    begin: np.ndarray
    """[N] When the host began, in seconds since 1970."""
    fetched: np.ndarray
    """[N] When it had the batch."""
    dispatched: np.ndarray
    """[N] When it had dispatched the step."""
    done: np.ndarray
    """[N] When the device had finished it."""
    loss: np.ndarray
    """[N] The loss; also NaN if it was not finite."""

    def __len__(self) -> int:
        return len(self.step)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rank:
    """The records of one process."""

    number: int
    """Number of the process."""
    steps: Steps
    """The steps that it has begun."""
    events: tuple[Event, ...]
    """All other events, in their order."""
    place: tuple[int, str]
    """Step and name of its newest event, except `done` and measurements; 0 and ""
    before there is one."""
    first: float
    """Time of the first event."""
    last: float
    """Time of the newest event."""
    damaged: int
    """Lines that could not be read."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepGrid:
    """Times of all ranks, step by step; for a recomputed step the last ones.

    Clocks of hosts differ: compare times of one rank, or differences of them.
    """

    cycle: np.ndarray
    """[N] Starts of the job until then."""
    step: np.ndarray
    """[N] Number of the step, ascending within a cycle."""
    begin: np.ndarray
    """[R, N] See `Steps`."""
    fetched: np.ndarray
    """[R, N] See `Steps`."""
    dispatched: np.ndarray
    """[R, N] See `Steps`."""
    done: np.ndarray
    """[R, N] See `Steps`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """The data of a run."""

    directory: Path
    """Its output directory."""
    ranks: tuple[Rank, ...]
    """Processes that have written events, by number."""
    driver: tuple[Event, ...]
    """Events of the supervisor; none without one."""
    metrics: tuple[dict[str, Any], ...]
    """Records of ``metrics.jsonl``; None for values that were not finite."""
    damaged: int
    """Lines of all files that could not be read."""

    @property
    def begin(self) -> float:
        """Time of the first event."""
        return min(rank.first for rank in self.ranks)

    @property
    def end(self) -> float:
        """Time of the newest event."""
        times = [rank.last for rank in self.ranks]
        return max(times + [event.t1 for event in self.driver])

    @functools.cached_property
    def grid(self) -> StepGrid:
        """The steps of all ranks, aligned."""
        return _grid([rank.steps for rank in self.ranks])


def read_run(directory: str | Path) -> Run:
    """Read the files in the output directory of a run.

    Args:
        directory: Contains ``events-<rank>.jsonl``, and optionally ``metrics.jsonl``
            and ``supervisor/events-driver.jsonl``.

    Raises:
        FileNotFoundError: there are no events.

    Example:
        >>> import tempfile
        >>> from jaxscale.supervision import EventLog
        >>> folder, log = tempfile.mkdtemp(), EventLog()
        >>> with log.written_to(folder + "/events-0.jsonl"):
        ...     _ = log.emit("begin", 1), log.emit("done", 1, kind="device", loss=2.5)
        >>> rank = read_run(folder).ranks[0]
        >>> rank.steps.loss, rank.place
        (array([2.5]), (1, 'bye'))
    """
    return RunReader(directory).read()


class RunReader:
    """Reads a run repeatedly: of each file only what was added to it.

    Example:
        >>> import tempfile
        >>> RunReader(tempfile.mkdtemp()).read()
        Traceback (most recent call last):
        ...
        FileNotFoundError: ... holds no events of a run (events-0.jsonl, ...); give ...
    """

    def __init__(self, directory: str | Path) -> None:
        """Name the output directory, which may be empty yet."""
        self._directory = Path(directory)
        self._ranks: dict[int, _Growing[_Part]] = {}
        self._driver = _Growing(_read_events, _joined)
        self._metrics = _Growing(_read_metrics, _joined)

    def read(self) -> Run:
        """The current state of the run.

        Raises:
            FileNotFoundError: there are no events.
        """
        directory = self._directory
        files = {
            int(match[1]): path
            for path in directory.glob("events-*.jsonl")
            if (match := re.fullmatch(r"events-(\d+)\.jsonl", path.name))
        }
        ranks = []
        for number in sorted(files):
            file = self._ranks.setdefault(number, _Growing(_part, _join))
            if (rank := _rank(number, file.read(files[number]))) is not None:
                ranks.append(rank)
        if not ranks:
            raise FileNotFoundError(
                f"{directory} holds no events of a run (events-0.jsonl, ...); give the "
                "output directory of one"
            )
        supervisor = directory / "supervisor" / "events-driver.jsonl"
        driver, damaged = self._driver.read(supervisor)
        metrics, lost = self._metrics.read(directory / "metrics.jsonl")
        return Run(
            directory=directory,
            ranks=tuple(ranks),
            driver=tuple(driver),
            metrics=tuple(metrics),
            damaged=damaged + lost + sum(rank.damaged for rank in ranks),
        )


class _Growing[T]:
    """The contents of a file that lines are appended to."""

    def __init__(self, parse: Callable[[bytes], T], join: Callable[[T, T], T]) -> None:
        self._parse, self._join = parse, join
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._offset, self._first, self._before = 0, b"", b""
        self._whole = self._parse(b"")

    def read(self, path: Path) -> T:
        """All of it; a missing file is empty."""
        try:
            with path.open("rb") as file:
                new = self._added(file)
        except FileNotFoundError:
            self._begin_anew()
            return self._whole
        end = new.rfind(b"\n") + 1
        if end:
            self._offset += end
            self._first = self._first or new[:end][:_REMEMBERED]
            self._before = (self._before + new[:end])[-_REMEMBERED:]
            self._whole = self._join(self._whole, self._parse(new[:end]))
        # An incomplete line is read again.
        rest = new[end:]
        return self._join(self._whole, self._parse(rest)) if rest else self._whole

    def _added(self, file: BinaryIO) -> bytes:
        """The unread part; all of it if the file was replaced."""
        same = file.read(len(self._first)) == self._first
        file.seek(self._offset - len(self._before))
        if not same or file.read(len(self._before)) != self._before:
            self._begin_anew()
            file.seek(0)
        return file.read()


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Part:
    """Lines of the file of a rank: [M] of steps, and other events."""

    t0: np.ndarray
    t1: np.ndarray
    cycle: np.ndarray
    step: np.ndarray
    column: np.ndarray
    loss: np.ndarray
    events: list[Event]
    damaged: int
    newest: int
    """Lines of steps before the newest event that is a phase; -1 without one."""


def _part(text: bytes) -> _Part:
    parts = _STEP_LINE.split(text)
    width = _GROUPS + 1
    columns = [parts[1 + i :: width] for i in range(_GROUPS)]
    t0, t1 = (np.array([*map(float, c)], np.float64) for c in columns[:2])
    cycle, step = (np.array([*map(int, c)], np.int64) for c in columns[2:4])
    events, damaged, newest = _other_events(parts[::width])
    losses = [float(x) if x and x != b"null" else np.nan for x in columns[5]]
    return _Part(
        t0=t0,
        t1=t1,
        cycle=cycle,
        step=step,
        column=np.array([_COLUMNS[name] for name in columns[4]], np.int64),
        loss=np.array(losses, np.float64),
        events=events,
        damaged=damaged,
        newest=newest,
    )


def _join(a: _Part, b: _Part) -> _Part:
    names = ("t0", "t1", "cycle", "step", "column", "loss")
    columns = {n: np.concatenate([getattr(a, n), getattr(b, n)]) for n in names}
    newest = a.newest if b.newest < 0 else len(a.t1) + b.newest
    return _Part(
        **columns,
        events=a.events + b.events,
        damaged=a.damaged + b.damaged,
        newest=newest,
    )


def _joined[T](a: tuple[list[T], int], b: tuple[list[T], int]) -> tuple[list[T], int]:
    return a[0] + b[0], a[1] + b[1]


def _rank(number: int, part: _Part) -> Rank | None:
    """The data of a rank; None if there is none."""
    events = part.events
    if not len(part.t1) and not events:
        return None
    places = [(event.step, event.name) for event in events if _is_place(event)][-1:]
    host = np.flatnonzero(part.column != _COLUMNS[phases.DONE.encode()])
    if len(host) and host[-1] >= part.newest:
        names = {column: name.decode() for name, column in _COLUMNS.items()}
        places.append((int(part.step[host[-1]]), names[int(part.column[host[-1]])]))
    return Rank(
        number=number,
        steps=_steps(part.t1, part.cycle, part.step, part.column, part.loss),
        events=tuple(events),
        place=places[-1] if places else (0, ""),
        first=min([*part.t0[:1], *(event.t0 for event in events[:1])]),
        last=max([*part.t1[-1:], *(event.t1 for event in events[-1:])]),
        damaged=part.damaged,
    )


def _other_events(texts: Sequence[bytes]) -> tuple[list[Event], int, int]:
    """The lines between those of steps.

    Returns:
        The events, the number of damaged lines, and the number of lines of steps before
        the newest event; -1 if there is none.
    """
    events, damaged, newest = list[Event](), 0, -1
    for before, text in enumerate(texts):
        for line in text.splitlines():
            event = _event(line)
            damaged += event is None and bool(line.strip())
            if event is not None:
                events.append(event)
                newest = before if _is_place(event) else newest
    return events, damaged, newest


def _is_place(event: Event) -> bool:
    """Whether this event is a phase of the process; others are measurements."""
    return event.kind not in ("device", "memory") and event.name != phases.COMPILED


def _steps(
    time: np.ndarray,
    cycle: np.ndarray,
    step: np.ndarray,
    column: np.ndarray,
    loss: np.ndarray,
) -> Steps:
    """Rows of steps from their events, all [M] in the order of the file."""
    rows = np.flatnonzero(column == 0)  # [N] each begins one
    again = np.diff(step[rows], prepend=0) <= 0
    again |= np.diff(cycle[rows], prepend=-1) != 0
    start = np.cumsum(again)  # [N] steps ascend from one start to the next
    row_keys = start << 32 | step[rows]
    times = np.full((4, len(rows)), np.nan)
    losses = np.full(len(rows), np.nan)
    if len(rows):
        begun = np.searchsorted(rows, np.arange(len(time)), side="right") - 1  # [M]
        keys = start[np.maximum(begun, 0)] << 32 | step
        found = np.minimum(np.searchsorted(row_keys, keys), len(rows) - 1)
        known = (begun >= 0) & (row_keys[found] == keys)
        times[column[known], found[known]] = time[known]
        is_loss = known & ~np.isnan(loss)
        losses[found[is_loss]] = loss[is_loss]
    columns = dict(zip(_COLUMN_NAMES, times, strict=True))
    return Steps(cycle=cycle[rows], step=step[rows], loss=losses, **columns)


def _grid(ranks: Sequence[Steps]) -> StepGrid:
    keys = [steps.cycle << 32 | steps.step for steps in ranks]
    union = np.unique(np.concatenate(keys))  # [N]
    times = {n: np.full((len(ranks), len(union)), np.nan) for n in _COLUMN_NAMES}
    for i, (steps, mine) in enumerate(zip(ranks, keys, strict=True)):
        at = np.searchsorted(union, mine)
        for name, values in times.items():
            values[i, at] = getattr(steps, name)  # of equal ones the last
    return StepGrid(cycle=union >> 32, step=union & (2**32 - 1), **times)


def _read_events(text: bytes) -> tuple[list[Event], int]:
    """The events of lines, and the number of damaged ones."""
    events = [_event(line) for line in text.splitlines()]
    return [e for e in events if e is not None], events.count(None)


def _event(line: bytes) -> Event | None:
    """The event of a line; if it was truncated, of the line that follows it."""
    fields = _object(line) or _object(line[line.rfind(b'{"t0"') :])
    if fields is None or set(fields) != _FIELDS:
        return None
    good = all(
        isinstance(fields[name], types) and not isinstance(fields[name], bool)
        for name, types in _TYPES.items()
    )
    good = good and 0 <= fields["t0"] <= fields["t1"] < _LATEST
    good = good and 0 <= fields["step"] < 2**32 and 0 <= fields["cycle"] < 2**31
    return Event(**fields) if good else None


_LATEST = 1e12  # seconds since 1970; infinity is later
_TYPES: dict[str, Any] = {
    **dict.fromkeys(["t0", "t1"], (int, float)),
    **dict.fromkeys(["cycle", "step"], int),
    **dict.fromkeys(["kind", "name"], str),
    "args": dict,
}
_FIELDS = set(_TYPES)


def _read_metrics(text: bytes) -> tuple[list[dict[str, Any]], int]:
    records = [_object(line) for line in text.splitlines()]
    good = [r for r in records if r is not None and isinstance(r.get("step"), int)]
    return good, len(records) - len(good)


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return fields if isinstance(fields, dict) else None
