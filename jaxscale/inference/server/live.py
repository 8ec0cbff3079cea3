"""The live page: which requests share the batch, from moment to moment."""

import asyncio
import collections
import contextlib
import heapq
import json
import threading
import time
import zlib
from collections import abc
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

from jaxscale.inference.engine.scheduling.scheduler_output import SchedulerEvent
from jaxscale.inference.engine.scheduling.sequence import Sequence, SequenceStatus
from jaxscale.inference.request import Overloaded
from jaxscale.inference.server.backend import Load
from jaxscale.inference.server.metrics import Metrics


PAGE = Path(__file__).with_name("live.html")
"""The page."""

_FRAMES_PER_SECOND = 10
_SECONDS = 60
_WINDOW = 10.0
_MOST_SEGMENTS = 4096  # of a frame
_MOST_TIMES = 512  # of a window: they are sorted ten times a second
_MOST_WATCHERS = 32
_BACKLOG = 50  # frames that wait for a watcher
_PREFILL, _DECODE = 0, 1


class _Lane:
    """A slot of the batch, while a sequence has it."""

    __slots__ = ("color", "kind", "number", "since")

    def __init__(self, number: int, color: int, kind: int, since: float) -> None:
        self.number, self.color, self.kind, self.since = number, color, kind, since


class Recorder:
    """Draws up, ten times a second, what has happened in the batch.

    A sequence has the lowest free slot from its admission until it ends or is
    preempted. Its time there is cut into segments: the prompt, then the tokens. Frames
    of the last minute are kept for pages that are opened late.

    Example:
        >>> recorder = Recorder(Load, num_slots=4)
        >>> frame = recorder.frame()
        >>> frame["waiting"], frame["slots"], frame["open"]
        (0, 4, [])
    """

    def __init__(
        self,
        load: Callable[[], Load],
        *,
        num_slots: int,
        model: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Nothing has happened yet.

        Args:
            load: Says how busy the engine is.
            num_slots: Slots of the batch; 0 for an encoder, of which only requests and
                tokens are shown.
            model: Name of the model.
            clock: Seconds.
        """
        self._load, self._num_slots, self._clock = load, num_slots, clock
        self._model, self._start = model, clock()
        self._lock = threading.Lock()
        self._lanes: dict[Sequence, _Lane] = {}
        self._prompts: set[Sequence] = set()
        self._free = list(range(num_slots))
        self._most = num_slots
        self._segments: collections.deque[list[float]] = collections.deque(
            maxlen=_MOST_SEGMENTS
        )
        self._marks: collections.deque[list[float]] = collections.deque(
            maxlen=_MOST_SEGMENTS
        )
        self._times: dict[str, collections.deque[tuple[float, float]]] = {}
        self._drawn: collections.deque[tuple[float, int]] = collections.deque()
        self._ring: collections.deque[bytes] = collections.deque(
            maxlen=_FRAMES_PER_SECOND * _SECONDS
        )
        self._watchers: set[asyncio.Queue[bytes | None]] = set()
        self._last_tick: float | None = None
        self.on_step: Callable[[float], None] | None = None
        """Told how long the engine took to go round its loop."""

    # On the engine's thread.

    def observe(self, event: SchedulerEvent) -> None:
        """Record an event of a sequence."""
        c, now = event.sequence, self._now()
        with self._lock:
            if event.kind == "admitted":
                self._enter(c, now)
            elif event.kind in ("preempted", "ended") and c in self._lanes:
                lane = self._leave(c, now)
                if event.kind == "preempted":
                    self._marks.append([lane.number, now])

    def tick(self) -> None:
        """Record the end of an engine step."""
        now = self._now()
        with self._lock:
            done = [c for c in self._prompts if c.state is not SequenceStatus.PREFILL]
            for c in done:
                lane = self._lanes[c]
                self._close(lane, now)
                lane.kind, lane.since = _DECODE, now
                self._prompts.discard(c)
            before, self._last_tick = self._last_tick, now if self._lanes else None
        if before is not None and self.on_step is not None:
            self.on_step(now - before)

    def _enter(self, c: Sequence, now: float) -> None:
        number = heapq.heappop(self._free) if self._free else self._most
        self._most = max(self._most, number + 1)
        kind = _PREFILL if c.state is SequenceStatus.PREFILL else _DECODE
        color = zlib.crc32(c.request.id.encode())
        self._lanes[c] = _Lane(number, color, kind, now)
        if kind == _PREFILL:
            self._prompts.add(c)

    def _leave(self, c: Sequence, now: float) -> _Lane:
        lane = self._lanes.pop(c)
        self._prompts.discard(c)
        self._close(lane, now)
        heapq.heappush(self._free, lane.number)
        return lane

    def _close(self, lane: _Lane, now: float) -> None:
        segment = [lane.number, lane.color, lane.kind, lane.since, now]
        self._segments.append(segment)

    # On any thread.

    def measure(self, name: str, seconds: float) -> None:
        """Record a time, of those that `Metrics` measures."""
        now = self._now()
        with self._lock:
            times = self._times.setdefault(name, collections.deque(maxlen=_MOST_TIMES))
            times.append((now, seconds))

    # On the event loop.

    def frame(self) -> dict[str, Any]:
        """What is new since the last frame."""
        load, now = self._load(), self._now()
        counts = load.counts
        tokens = counts.drawn_tokens if self._num_slots else counts.prompt_tokens
        with self._lock:
            segments, marks = list(self._segments), list(self._marks)
            self._segments.clear()
            self._marks.clear()
            still = [
                [lane.number, lane.color, lane.kind, lane.since]
                for lane in self._lanes.values()
            ]
            times = {
                name: self._recent(values, now) for name, values in self._times.items()
            }
            slots = self._most
        return {
            "time": now,
            "model": self._model,
            "slots": slots,
            "segments": segments,
            "marks": marks,
            "open": still,
            "waiting": load.waiting,
            "running": load.running,
            "kv": load.kv_usage,
            "preempted": counts.preempted,
            "finished": counts.finished,
            "tokens": tokens,
            "rate": self._rate(tokens, now),
            **{name: _percentiles(times.get(name, ())) for name in _NAMES},
        }

    async def run(self) -> None:
        """Make frames until it is canceled."""
        while True:
            await asyncio.sleep(1 / _FRAMES_PER_SECOND)
            frame = self.frame()
            # Who comes later gets what is open from the next frame.
            self._ring.append(_encode({**frame, "open": []}))
            if not self._watchers:
                continue
            data = _encode(frame)
            for watcher in list(self._watchers):
                try:
                    watcher.put_nowait(data)
                except asyncio.QueueFull:
                    # The page calls again, and gets what it has missed.
                    self._watchers.discard(watcher)
                    watcher.get_nowait()
                    watcher.put_nowait(None)

    def watch(self) -> AsyncGenerator[bytes]:
        """The frames of the last minute, then those to come, as events.

        Raises:
            Overloaded: too many watch.
        """
        if len(self._watchers) >= _MOST_WATCHERS:
            raise Overloaded(f"{len(self._watchers)} pages are open already", 10)
        return self._frames()

    async def _frames(self) -> AsyncGenerator[bytes]:
        frames: asyncio.Queue[bytes | None] = asyncio.Queue(_BACKLOG)
        past = list(self._ring)
        self._watchers.add(frames)
        try:
            for data in past:
                yield data
            while (data := await frames.get()) is not None:
                yield data
        finally:
            self._watchers.discard(frames)

    def close(self) -> None:
        """End the streams of all pages."""
        for watcher in self._watchers:
            with contextlib.suppress(asyncio.QueueFull):
                watcher.put_nowait(None)
        self._watchers.clear()

    def _now(self) -> float:
        return round(self._clock() - self._start, 4)

    def _recent(
        self, values: collections.deque[tuple[float, float]], now: float
    ) -> list[float]:
        while values and values[0][0] < now - _WINDOW:
            values.popleft()
        return [value for _, value in values]

    def _rate(self, tokens: int, now: float) -> float:
        """Tokens per second, over the window."""
        self._drawn.append((now, tokens))
        while self._drawn[0][0] < now - _WINDOW:
            self._drawn.popleft()
        start, before = self._drawn[0]
        return round((tokens - before) / (now - start), 1) if now > start else 0.0


_NAMES = ("step", "ttft", "gap")


def _percentiles(values: abc.Sequence[float]) -> list[float] | None:
    """Median and 95th percentile, in milliseconds; None where there are no values."""
    if not values:
        return None
    ordered = sorted(values)
    places = (round(share * (len(ordered) - 1)) for share in (0.5, 0.95))
    return [round(1000 * ordered[place], 2) for place in places]


def _encode(frame: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(frame, separators=(",", ":")).encode() + b"\n\n"


def attach(recorder: Recorder, metrics: Metrics) -> None:
    """Let times reach the page, and the engine's steps the metrics."""
    metrics.listeners.append(recorder.measure)
    recorder.on_step = metrics.step
