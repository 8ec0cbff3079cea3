"""Events of a process of a job, one JSON line each: to a file, and to its executor.

`fit` reports its progress. An event costs its caller microseconds: a thread writes.
Each line is an object with the fields

    t0, t1   seconds since 1970; t0 is earlier for what took time
    cycle    starts of the job until this one; 0 without a supervisor
    step     the step that it belongs to
    kind     host, device, memory, compile or fault
    name     one of `jaxscale.supervision.phases`
    args     more of it, for example the loss of a step that is done

The args of ``layout`` are the mesh and the place of the process: ``axes``, the sizes by
name; ``places`` of its devices, the last axis fastest; its ``host``; ``microbatches``
and ``chunks`` of a pipeline.

In a supervised process the events are its heartbeat: the executor of its host reads
them from a socket. Such a process writes the stacks of its threads for the executor
when it gets a SIGUSR1, also while it hangs with the GIL held. An uncaught exception
ends it at once, since JAX would wait at the exit for dead processes.
"""

import collections
import contextlib
import faulthandler
import json
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from jaxscale.supervision import phases, protocol
from jaxscale.supervision.pauses import Pauses


VARIABLE = "JAXSCALE_SUPERVISED"
"""Environment variable with which an executor tells a process its rank, as JSON."""

_log = logging.getLogger(__name__)
_FLUSH_SECONDS = 30.0  # unless a disk hangs, or the host is busy, it takes milliseconds
MEASURES = {
    phases.PROFILE: ("computing", ["computing"]),
    phases.PACE: ("host", ["seconds", "starved"]),
}
"""Measurements of a step, and those that are summed and compared between ranks."""


class EventLog:
    """Receives events and writes them on a thread.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "events-0.jsonl"
        >>> log = EventLog()
        >>> with log.written_to(path):
        ...     begun = log.emit("begin", 7)
        ...     _ = log.emit("done", 7, kind="device", since=begun, loss=2.5)
        >>> [(e["name"], e["step"], e["args"]) for e in read_events(path)]
        [('begin', 7, {}), ('done', 7, {'loss': 2.5}), ('bye', 7, {})]
    """

    def __init__(
        self,
        *,
        rank: int = 0,
        cycle: int = 0,
        resume_before: int = 0,
        is_first: bool = True,
        skips: Mapping[int, int] | None = None,
        connection: socket.socket | None = None,
    ) -> None:
        """Start without a file.

        Args:
            rank: Number of this process.
            cycle: Starts of the job under its supervisor, this one included.
            resume_before: The attribute.
            is_first: Whether no earlier start has reached a state to resume from.
            skips: The attribute.
            connection: From `protocol.connect_blocking`, to the executor.
        """
        self.resume_before = resume_before
        """The supervisor excludes checkpoints of this step or later; 0 for none."""
        self.skips = dict(skips or {})
        """Batches that the supervisor skips, by the step before which."""
        self._is_first = is_first
        self._rank, self._cycle, self._connection = rank, cycle, connection
        self._step = 0
        self._pauses = Pauses()
        self._file: int | None = None
        # Events before there is a file, for example when the processes connect.
        self._early: collections.deque[str] = collections.deque(maxlen=256)
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        if connection is not None:
            self._start()
            joined = protocol.Joined(rank=rank, cycle=cycle, pid=os.getpid())
            connection.sendall(protocol.encode(joined))

    @property
    def supervised(self) -> bool:
        """Whether an executor listens."""
        return self._connection is not None

    def at_first[T](self, wish: T) -> T | None:
        """`wish` at the first start of a command under a supervisor, otherwise None.

        It is for what the user wants once, and not again after each fault.
        """
        return wish if self._is_first else None

    def emit(
        self,
        name: str,
        step: int | None = None,
        *,
        kind: str = "host",
        since: float | None = None,
        **args: Any,
    ) -> float:
        """Report an event; returns the time, for `since`.

        Args:
            name: The event.
            step: The step that it belongs to; None is that of the previous event.
            kind: The kind of the event, see the module.
            since: When it began, if it took time.
            args: JSON-serializable arguments.
        """
        now = time.time()
        self._step = self._step if step is None else step
        event = {
            "t0": now if since is None else since,
            "t1": now,
            "cycle": self._cycle,
            "step": self._step,
            "kind": kind,
            "name": name,
            "args": args,
        }
        if self._thread is None:  # nobody reads yet: keep the last ones
            self._early.append(json.dumps(event) + "\n")
        else:
            self._queue.put(event)
        return now

    @contextlib.contextmanager
    def span(self, name: str, step: int) -> Iterator[None]:
        """Report ``save`` or ``eval`` when it begins, and when it has succeeded."""
        begun = self.emit(name, step)
        yield
        self.emit(phases.SPANS[name], step, since=begun)

    @contextlib.contextmanager
    def written_to(self, path: str | os.PathLike[str]) -> Iterator[None]:
        """Append to a file, until ``bye`` or ``error``, after which it is closed."""
        self._start()
        self.flush()
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        file = self._file = os.open(path, flags, 0o644)
        try:
            yield
        except BaseException as error:
            self.fail(error)
            raise
        else:
            self.emit(phases.BYE)
        finally:
            self.flush()
            self._file = None
            os.close(file)

    @contextlib.contextmanager
    def reported(self) -> Iterator[None]:
        """Report an error where it occurs, or that only the end remains."""
        try:
            yield
        except BaseException as error:
            self.fail(error)
            raise
        self.emit(phases.FINISH)

    def fail(self, error: BaseException) -> None:
        """Report an error, once, and wait until it is written."""
        if not getattr(error, "_jaxscale_reported", False):
            text = f"{type(error).__name__}: {error}"[:500]
            self.emit(phases.ERROR, kind="fault", error=text)
            error._jaxscale_reported = True  # pyright: ignore[reportAttributeAccessIssue]
        self.flush()

    def flush(self) -> None:
        """Wait until everything is written, for a while."""
        if self._thread is not None:
            written = threading.Event()
            self._queue.put(written)
            written.wait(_FLUSH_SECONDS)

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._work, name="jaxscale-events", daemon=True
            )
            self._thread.start()

    def _work(self) -> None:
        while True:
            items = [self._queue.get()]
            while not self._queue.empty():
                items.append(self._queue.get())
            events = [x for x in items if not isinstance(x, threading.Event)]
            self._write(events)
            self._send(events)
            for item in items:
                if isinstance(item, threading.Event):
                    item.set()

    def _write(self, events: list[dict[str, Any]]) -> None:
        self._early.extend(json.dumps(event) + "\n" for event in events)
        if self._file is None or not self._early:
            return
        try:
            os.write(self._file, "".join(self._early).encode())
            self._early.clear()
        except OSError as error:  # a full disk must not end the run
            _log.warning("events are lost: %s", error)
            self._file = None

    def _send(self, events: list[dict[str, Any]]) -> None:
        if self._connection is None or not events:
            return
        messages = [m for x in events for m in self._messages(x)]
        lines = b"".join(protocol.encode(message) for message in messages)
        try:
            self._connection.sendall(lines)
        except OSError as error:
            _log.warning("the executor of this host does not listen: %s", error)
            self._connection.close()
            self._connection = None

    def _messages(
        self, event: Mapping[str, Any]
    ) -> Iterator[protocol.Moved | protocol.Measured]:
        """The message to the executor about an event."""
        name = event["name"]
        if name in MEASURES:
            measure, parts = MEASURES[name]
            yield self._measured(event, measure, sum(event["args"][p] for p in parts))
            if name == phases.PACE and (factor := self._pauses.factor()):
                yield self._measured(event, "paused", factor)
        elif name not in phases.MEASUREMENTS:
            yield self._moved(event)
        if name == phases.BEGIN:
            self._pauses.start()

    def _measured(
        self, event: Mapping[str, Any], name: str, seconds: float
    ) -> protocol.Measured:
        return protocol.Measured(
            ranks=[self._rank],
            cycle=self._cycle,
            step=event["step"],
            name=name,
            seconds=[seconds],
            group=event["args"].get("group", ""),
        )

    def _moved(self, event: Mapping[str, Any]) -> protocol.Moved:
        text = str(event["args"].get("error", "")) if event["kind"] == "fault" else ""
        return protocol.Moved(
            ranks=[self._rank],
            cycle=self._cycle,
            step=event["step"],
            phase=event["name"],
            kind=event["kind"],
            text=text,
            loss=event["args"].get("loss") or 0.0,
            suspects=event["args"].get("suspects", []),
            sure=event["args"].get("sure", True),
        )


_current: EventLog | None = None


def current() -> EventLog:
    """The events of this process.

    The first call in a process that an executor has started connects to it.

    Raises:
        OSError: the executor does not answer.
    """
    global _current
    if _current is None:
        # Removed, so that children of this process do not report for it.
        place = os.environ.pop(VARIABLE, None)
        _current = EventLog() if place is None else _supervised(json.loads(place))
    return _current


def leave(code: int, error: BaseException) -> None:
    """In a supervised process report the error and exit at once; elsewhere do nothing.

    Args:
        code: Exit status of the process.
        error: The error; its message goes to the supervisor.
    """
    if _current is not None and _current.supervised:
        _current.fail(error)
        _end(code)


def read_events(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The events of a file, without lines truncated by a killed process."""
    events = []
    for line in Path(path).read_text(errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            events.append(json.loads(line))
    return [e for e in events if isinstance(e, dict) and "name" in e]


def _supervised(place: Mapping[str, Any]) -> EventLog:
    # To stderr on a signal such as a segmentation fault, and on request.
    faulthandler.enable()
    stacks = os.open(place["stacks"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    connection = protocol.connect_blocking(place["address"], place["secret"])
    log = EventLog(
        rank=place["rank"],
        cycle=place["cycle"],
        resume_before=place["resume_before"],
        is_first=place["is_first"],
        skips=dict(place["skips"]),
        connection=connection,
    )
    sys.excepthook = _leave_at_once
    log.emit(phases.START, 0, pid=os.getpid())
    return log


def _leave_at_once(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    traceback.print_exception(kind, error, trace)
    leave(130 if kind is KeyboardInterrupt else 1, error)


def _end(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
