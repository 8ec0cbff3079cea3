"""What host and device of an engine do in each step, while it is recorded.

The engine's thread says which phase begins. The device's times come from another
thread, which waits for the results of each program: a program begins when it is
launched, or when the one before it has ended, and ends when its results are ready.
"""

import bisect
import collections
import contextlib
import dataclasses
import itertools
import queue
import threading
import time
from collections.abc import (
    Callable,
    Iterable,
    Iterator,
    Mapping,
    MutableSequence,
    Sequence,
)
from typing import Any, NamedTuple

import jax

from jaxscale.observability.trace_events import Event, process, span


PHASES = {
    "idle": "there is nothing to do",
    "commands": "requests join and leave",
    "schedule": "the plan of the step",
    "prepare": "the inputs of its programs",
    "dispatch": "the programs are launched",
    "wait": "for the results of the plan before",
    "collect": "tokens and their text",
    "answer": "outputs go to the clients",
    "linger": "who comes now is in the next plan: the device is busy",
}
"""What the host does in a step, in order."""

_MOST = 400_000  # phases that are kept, the last ones


class _Program(NamedTuple):
    """A launch."""

    name: str
    called: float
    """When its launch began,"""
    launched: float
    """and ended."""
    ready: float
    """When its results were there."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shares:
    """Shares of the time of a `Timeline`, each 0 to 1."""

    seconds: float
    """The time."""
    steps: int
    """Steps of the engine, those that found nothing to do among them."""
    host: Mapping[str, float]
    """Of each of `PHASES`."""
    device: Mapping[str, float]
    """Of each program, and of ``launch``: the device had nothing to do but a program
    that was being launched."""
    idle: Mapping[str, float]
    """When the device had nothing at all, by what the host did."""

    def __str__(self) -> str:
        each = self.seconds / max(self.steps, 1)
        lines = [f"{self.steps:,} steps in {self.seconds:.2f} s, {1e3 * each:.2f} ms"]
        rows = [(f"host {n}", s, 1e6 * s * each) for n, s in self.host.items()]
        rows += [(f"device {n}", s, 1e6 * s * each) for n, s in self.device.items()]
        rows += [(f"device idle: {n}", s, 1e6 * s * each) for n, s in self.idle.items()]
        width = max((len(name) for name, _, _ in rows), default=0)
        lines += [f"{n:{width}} {s:7.1%} {us:10,.0f} us a step" for n, s, us in rows]
        return "\n".join(lines)


class Timeline:
    """A recording, from now until `stop`.

    Example:
        >>> timeline = Timeline()
        >>> timeline.phase("schedule")
        >>> timeline.stop()
        >>> timeline.shares().steps
        1
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """Begin.

        Args:
            clock: Seconds.
        """
        self._clock, self._start, self._end = clock, clock(), 0.0
        self._marks: MutableSequence[tuple[float, str]]
        self._marks = collections.deque(maxlen=_MOST)
        self._programs: MutableSequence[_Program] = collections.deque(maxlen=_MOST)
        self._launches: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._watcher = threading.Thread(
            target=self._watch, name="timeline", daemon=True
        )
        self._watcher.start()

    # On the engine's thread.

    def phase(self, name: str) -> None:
        """The host begins with one of `PHASES`."""
        self._marks.append((self._clock(), name))

    @contextlib.contextmanager
    def launch(self, key: Sequence[Any], results: list[jax.Array]) -> Iterator[None]:
        """A program is launched in this block.

        Args:
            key: Its key in the runner.
            results: Where the block puts its results; without any, it is not known when
                the program ends, and it is left out.
        """
        called = self._clock()
        self._marks.append((called, "dispatch"))
        yield
        now = self._clock()
        self._marks.append((now, "prepare"))
        if results:
            name = " ".join(str(part) for part in key if part is not False)
            self._launches.put((name, called, now, results))

    # On any thread.

    def stop(self) -> None:
        """End, once the programs that were launched are done."""
        self._launches.put(None)
        self._watcher.join()
        self._end = self._clock()
        self._marks, self._programs = list(self._marks), list(self._programs)

    def shares(self) -> Shares:
        """Who took how much of the time; after `stop`."""
        seconds = max(self._end - self._begin, 1e-9)

        def shares(parts: Iterable[tuple[str, float]]) -> dict[str, float]:
            total: dict[str, float] = {}
            for name, duration in parts:
                total[name] = total.get(name, 0.0) + duration / seconds
            return dict(sorted(total.items(), key=lambda item: -item[1]))

        idle = (self._during(*gap).items() for gap in self._gaps())
        return Shares(
            seconds=seconds,
            steps=sum(name == "schedule" for _, name in self._marks),
            host=shares((name, t1 - t0) for name, t0, t1 in self._host()),
            device=shares((name, t1 - t0) for name, t0, t1 in self._device()),
            idle=shares(itertools.chain.from_iterable(idle)),
        )

    def events(self) -> Iterator[Event]:
        """The events of a trace, for `jaxscale.observability.trace_events`."""
        begin = self._begin
        yield from process(0, "engine", "host", "device")
        for name, t0, t1 in self._host():
            yield span(0, 0, name, t0 - begin, t1 - begin, {})
        for name, t0, t1 in self._device():
            yield span(0, 1, name, t0 - begin, t1 - begin, {})
        for t0, t1 in self._gaps():
            causes = self._during(t0, t1)
            name = max(causes, key=lambda cause: causes[cause], default="")
            about = {f"{cause}_us": round(1e6 * s, 1) for cause, s in causes.items()}
            yield span(0, 1, f"idle: {name}", t0 - begin, t1 - begin, about)

    # How.

    def _watch(self) -> None:
        while (launch := self._launches.get()) is not None:
            name, called, launched, results = launch
            with contextlib.suppress(Exception):  # the engine's thread gets it, too
                jax.block_until_ready(results)
            self._programs.append(_Program(name, called, launched, self._clock()))

    @property
    def _begin(self) -> float:
        """Later than the start where the first phases were not kept."""
        full = len(self._marks) == _MOST
        return self._marks[0][0] if full else self._start

    def _host(self) -> Iterator[tuple[str, float, float]]:
        """Phases: name, begin, end."""
        ends = [*(at for at, _ in self._marks[1:]), self._end]
        for (at, name), end in zip(self._marks, ends, strict=False):
            yield name, at, end

    def _device(self) -> Iterator[tuple[str, float, float]]:
        """What the device does: name, begin, end."""
        free = 0.0
        for program in self._programs:
            begin = max(program.called, free)
            if program.called > free:
                begin = min(program.launched, program.ready)
                yield "launch", program.called, begin
            yield program.name, begin, program.ready
            free = program.ready

    def _gaps(self) -> Iterator[tuple[float, float]]:
        """When the device has nothing to do, between two programs."""
        for before, after in itertools.pairwise(self._programs):
            if after.called > before.ready:
                yield before.ready, after.called

    def _during(self, begin: float, end: float) -> dict[str, float]:
        """Seconds of each phase from `begin` to `end`."""
        marks, found = self._marks, dict[str, float]()
        first = max(bisect.bisect_right(marks, begin, key=lambda mark: mark[0]) - 1, 0)
        for i in range(first, len(marks)):
            at, name = marks[i]
            if at >= end:
                break
            until = marks[i + 1][0] if i + 1 < len(marks) else end
            seconds = max(min(until, end) - max(at, begin), 0.0)
            found[name] = found.get(name, 0.0) + seconds
        return found
