"""Metrics of a run: throughput, utilization, and the writers of the records."""

import contextlib
import json
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxscale.checks import pip_install
from jaxscale.observability.bar import Bar
from jaxscale.supervision import EventLog, phases
from jaxscale.training.hardware import mfu
from jaxscale.training.monitoring.device_events import DeviceEvents


type Record = dict[str, int | float | None]
"""One record of metrics; None if a quantity is unknown or not finite."""


class Writer:
    """Receives the records of a run; the base class discards them."""

    def start(self, first_step: int, total_steps: int) -> None:
        """Called once, before the step after `first_step`."""

    def note(self, text: str) -> None:
        """Called with a status line: start, compile, save, end."""

    def write(self, record: Record) -> None:
        """Called with the metrics of a step, or of an evaluation after a step."""

    def close(self) -> None:
        """Called at the end, also after an error."""


class JsonlWriter(Writer):
    """A JSON lines file with a record per step and per evaluation.

    A resumed run continues the file after the step of its checkpoint: lines of later
    steps, which will be recomputed, are removed.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Name the file; it is opened by `start`."""
        self._path = Path(path)
        self._file: Any = None

    def start(self, first_step: int, total_steps: int) -> None:
        """Keep the lines up to `first_step`."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        lines = []
        if self._path.exists():
            lines = self._path.read_text(errors="replace").splitlines()
        kept = [line for line in lines if _step_of(line) <= first_step]
        draft = self._path.with_name(f".{self._path.name}")
        draft.write_text("".join(line + "\n" for line in kept))
        draft.replace(self._path)  # a kill in between loses no line
        self._file = self._path.open("a")

    def write(self, record: Record) -> None:
        """Append and flush one line."""
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    # The last line of a killed run may be cut off, any may be damaged.
    except (ValueError, KeyError, TypeError):
        return math.inf


class TensorBoardWriter(Writer):
    """Scalars for TensorBoard.

    Each record is on disk when `write` returns: the writer thread of tensorboardX ends
    silently if a disk is full, and its caller then waits forever.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        """Name the directory; it is opened by `start`.

        Raises:
            ImportError: tensorboardX is not installed.
        """
        try:
            import tensorboardX  # noqa: F401
        except ImportError as error:
            raise ImportError(
                f"TensorBoardWriter needs tensorboardX: {pip_install('train')}"
            ) from error
        self._directory = Path(directory)
        self._file: Any = None
        self._proto: Any = None

    def start(self, first_step: int, total_steps: int) -> None:
        """Open the event file; points of later steps are hidden."""
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto import event_pb2

        self._proto = event_pb2  # whose names are made when it is imported
        self._directory.mkdir(parents=True, exist_ok=True)
        self._file = EventsWriter(str(self._directory / "events"))
        began = self._proto.SessionLog(status=self._proto.SessionLog.START)
        self._add(first_step + 1, session_log=began)

    def write(self, record: Record) -> None:
        """Add each finite number under its own name."""
        from tensorboardX.summary import scalar

        step = int(record["step"] or 0)
        for name, value in record.items():
            if name != "step" and value is not None:
                self._add(step, summary=scalar(name, value))
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _add(self, step: int, **content: Any) -> None:
        event = self._proto.Event(step=step, wall_time=time.time(), **content)
        self._file.write_event(event)


class ProgressBar(Writer):
    """A progress bar at the bottom of the terminal, or below the notebook cell."""

    def __init__(self, description: str = "train") -> None:
        """Prepare the bar; it appears with `start`.

        Raises:
            ImportError: rich is not installed.
        """
        try:
            import rich  # noqa: F401
        except ImportError as error:
            raise ImportError(
                f"ProgressBar needs rich: {pip_install('train')}"
            ) from error
        self._description = description
        self._bar: Bar | None = None
        self._first = 0
        self._shown: dict[str, str] = {}

    def start(self, first_step: int, total_steps: int) -> None:
        """Show the bar."""
        self._first = first_step
        self._bar = Bar(self._description, total_steps, done=first_step)

    def note(self, text: str) -> None:
        """Show what goes on behind the bar, until the first numbers take its place."""
        if self._bar is not None and not self._shown:
            self._bar.update(self._first, text)

    def write(self, record: Record) -> None:
        """Advance to the step and show its main numbers."""
        formats = {
            "loss": "loss {:.3f}",
            "eval_loss": "held out {:.3f}",
            "tokens_per_second_per_device": "{:,.0f} tok/s/device",
            "mfu_causal": "MFU {:.1%}",
        }
        for name, text in formats.items():
            value = record.get(name)
            if value is not None:
                self._shown[name] = text.format(value)
        shown = "  ".join(self._shown[name] for name in formats if name in self._shown)
        assert self._bar is not None  # started
        self._bar.update(int(record["step"] or 0), shown)

    def close(self) -> None:
        """Leave the bar on the screen."""
        if self._bar is not None:
            self._bar.close()


class Monitor:
    """Measures steps without blocking the device, and feeds the writers.

    `log` is called right after a step is dispatched and returns at once. A thread waits
    for the metrics, records when they are ready, and writes; the time between two
    finished steps is the step time, whether or not the dispatching call waited for the
    device. `log` waits only if two older steps are not recorded yet, so the host runs
    at most that far ahead. Throughput counts the tokens that have a target; the first
    step of a process, which compiles, has none. ``data_seconds`` is the time per step
    that the loop spent in `data_wait`: while it is far below ``step_seconds``, the
    device never waits for data.
    """

    def __init__(
        self,
        writers: Sequence[Writer],
        *,
        num_devices: int,
        total_steps: int,
        log_every: int = 1,
        flops_per_token: Mapping[str, float] | None = None,
        peak_flops: float | None = None,
        events: EventLog | None = None,
        devices: DeviceEvents | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Describe the run.

        Args:
            writers: Writers of the records; `write` is called on the thread.
            num_devices: Devices that the tokens of a step are split over.
            total_steps: Steps of the entire run.
            log_every: Steps between two records; rates are means over them.
            flops_per_token: FLOPs by convention, for example ``{"causal": 4.5e10}``.
            peak_flops: Peak of one device; None leaves the utilization unknown.
            events: Receiver of events on steps and the loop.
            devices: Reporter of device events; None makes one without profiles.
            clock: Function that returns seconds.
        """
        self._writers = list(writers)
        self._num_devices = num_devices
        self._total_steps = total_steps
        self._log_every = log_every
        self._flops_per_token = dict(flops_per_token or {})
        self._peak = peak_flops
        self._events = EventLog() if events is None else events
        self._devices = DeviceEvents(self._events) if devices is None else devices
        self._fetched: float | None = None
        self._done: float | None = None
        self._clock = clock
        self._compiled = False
        self._since = 0.0
        self._steps = 0
        self._tokens = 0
        self._data_seconds = 0.0
        self._waited = 0.0  # since the last `log`, by the thread of the loop
        self._error: BaseException | None = None
        self._queue: queue.Queue[tuple[int, Any, float, Any] | None] = queue.Queue(
            maxsize=1
        )
        self._thread = threading.Thread(
            target=self._work, name="jaxscale-monitor", daemon=True
        )

    def __enter__(self) -> "Monitor":
        self._devices.__enter__()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.ExitStack() as stack:  # closes all, whatever fails
            for writer in self._writers:
                # A full disk must not hide an earlier error.
                also = (OSError,) if error[0] is not None else ()
                stack.enter_context(contextlib.suppress(*also))
                stack.callback(writer.close)
            stack.callback(self._devices.__exit__)
            stack.callback(self._thread.join)
            stack.callback(self._queue.put, None)
            if error[0] is None:
                self.flush()
            else:
                self.note(f"ended by {type(error[1]).__name__}: {error[1]}")

    def note(self, text: str) -> None:
        """Pass a status line to the writers."""
        for writer in self._writers:
            writer.note(text)

    def start(self, first_step: int) -> None:
        """Begin after `first_step`, 0 in a new run."""
        for writer in self._writers:
            writer.start(first_step, self._total_steps)
        self._restart_clock()

    @contextlib.contextmanager
    def data_wait(self, step: int | None = None) -> Iterator[None]:
        """Context in which the loop waits for the batch of `step`."""
        self._devices.begin(step)
        begun, before = self._events.emit(phases.BEGIN, step), self._clock()
        yield
        self._waited += self._clock() - before
        self._fetched = self._events.emit(phases.DATA, step, since=begun)

    def log(
        self,
        step: int,
        metrics: Mapping[str, Any],
        progress: Mapping[str, float] | None = None,
    ) -> None:
        """Record the metrics of `step`, just dispatched, when they are ready.

        Args:
            step: Number of the step.
            metrics: Arrays, some of which may not be computed yet.
            progress: Further numbers for the record.

        Raises:
            Exception: an error that occurred earlier, on the device or in a writer.
        """
        at = self._events.emit(phases.DISPATCHED, step, since=self._fetched)
        self._devices.dispatched(step, at)
        self._raise()
        for value in metrics.values():
            # Now, since a copy requested later may wait behind the next step.
            value.copy_to_host_async()
        waited, self._waited = self._waited, 0.0
        self._queue.put((step, metrics, waited, progress or {}))

    def flush(self) -> None:
        """Wait until every step that was logged is recorded.

        Raises:
            Exception: an error that occurred on the device or in a writer.
        """
        self._queue.join()
        self._raise()

    @contextlib.contextmanager
    def pause(self, name: str, step: int) -> Iterator[None]:
        """Context whose time counts for no step: ``save`` or ``eval`` after `step`."""
        self.flush()
        before = self._clock()
        with self._events.span(name, step):
            yield
        self._since += self._clock() - before
        self._done = None

    def log_evaluation(self, step: int, **values: float | None) -> None:
        """Record an evaluation after `step`; names get the prefix ``eval_``."""
        self.flush()
        record = {f"eval_{name}": _number(value) for name, value in values.items()}
        self._write({"step": step, **record})

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                if self._error is None:
                    self._record(*item)
            except Exception as error:  # raised to the caller of `log` or `flush`
                self._error = error
            finally:
                self._queue.task_done()

    def _raise(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _record(
        self,
        step: int,
        metrics: Mapping[str, Any],
        waited: float,
        progress: Mapping[str, float],
    ) -> None:
        values = {name: _number(x) for name, x in jax.device_get(metrics).items()}
        self._report(step, values)
        self._steps += 1
        self._tokens += int(values.get("tokens") or 0)
        self._data_seconds += waited
        if step % self._log_every == 0 or step == self._total_steps:
            record = {"step": step, **values, **self._rates(), **progress}
            self._restart_clock()
            self._write(record)
        elif not self._compiled:
            self._restart_clock()
        self._compiled = True

    def _report(self, step: int, values: Record) -> None:
        before, self._done = (
            self._done,
            self._events.emit(
                phases.DONE,
                step,
                kind="device",
                since=self._done,
                loss=values.get("loss"),
            ),
        )
        self._devices.done(step, before, self._done)
        # What makes a step skip its update, see `make_train_step`.
        if None in [values.get(n, 0.0) for n in ("loss", "z_loss", "grad_norm")]:
            self._events.emit(phases.NOT_FINITE, step, kind="fault")

    def _rates(self) -> Record:
        seconds = (self._clock() - self._since) / self._steps
        rate = None
        if self._compiled and seconds > 0:
            rate = self._tokens / self._steps / seconds / self._num_devices
        record: Record = {
            "step_seconds": seconds,
            "data_seconds": self._data_seconds / self._steps,
            "tokens_per_second_per_device": rate,
        }
        for convention, flops in self._flops_per_token.items():
            name = f"mfu_{convention}"
            if rate is None or self._peak is None:
                record[name] = None
            else:
                record[name] = mfu(rate, flops, self._peak)
        return record

    def _restart_clock(self) -> None:
        self._since, self._steps, self._tokens = self._clock(), 0, 0
        self._data_seconds = 0.0

    def _write(self, record: Record) -> None:
        for writer in self._writers:
            writer.write(record)


def _number(x: Any) -> int | float | None:
    """A Python number; None if it is not finite, which JSON cannot express."""
    if x is None:
        return None
    value = x.item() if hasattr(x, "item") else x
    return value if math.isfinite(value) else None
