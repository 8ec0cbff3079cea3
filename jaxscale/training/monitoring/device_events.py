"""Events on what a process's devices do, recorded without blocking the loop.

`profile` splits a step into compute and waiting in collectives, `pace` says how long
the device was idle, `memory` how full it is, and `compiled` what was compiled.
"""

import contextlib
import dataclasses
import logging
import re
import shutil
import tempfile
import threading
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxscale.supervision import EventLog, phases
from jaxscale.training.config import TrainConfig


_log = logging.getLogger(__name__)
_PACE_STEPS = 4
_MEMORY_SECONDS = 30.0
_LONG_COMPILATION = 0.1
_COMPILED = "/jax/core/compile/backend_compile_duration"
# Kernels of NCCL, of AMD's RCCL, and XLA's own for small arrays in one host.
_COLLECTIVE_KERNEL = re.compile("nccl|rccl|AllReduceKernel", re.IGNORECASE)
# A thunk of XLA on a CPU has the name of an operation or, for explicit collectives, of
# the primitive of JAX. The names left out contain others.
_CPU_OPERATION = re.compile(r"(?!while|conditional|call|async-)[a-z][\w.-]*")
_COLLECTIVE_OPERATION = re.compile(
    r"(?!.*fusion)(?:ragged[-_])?"
    r"(?:all[-_](?:reduce|gather|to[-_]all)|reduce[-_]scatter|collective-|"
    r"p(?:sum|max|min|permute|broadcast)|(?:send|recv)(?:-done)?(?:\.|$))"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Share:
    """How a process's devices spent an interval, in seconds per device."""

    computing: float
    """Seconds in kernels other than collectives."""
    waiting: float
    """Seconds in collectives alone, both transfer and waiting."""


def share(profile: Any, begin: float, end: float, devices: int) -> Share:
    """Split an interval of a profile; in the remainder the devices were idle.

    On a GPU a collective is a kernel of NCCL (``ncclDevKernel_AllReduce_Sum_bf16_RING``
    and others), on a CPU an operation ``all-reduce.5``. Our own kernels that wait for
    other GPUs themselves, as in `pallas_kernels.collective_matmul`, count as compute.

    Args:
        profile: A `jax.profiler.ProfileData`.
        begin: Seconds after the start of the profile.
        end: Seconds after the start of the profile.
        devices: Devices of this process.
    """
    computing = waiting = 0.0
    for lane in _lanes(profile):
        work = [(t0, t1) for t0, t1, is_collective in lane if not is_collective]
        busy = _covered([(t0, t1) for t0, t1, _ in lane], begin, end)
        working = _covered(work, begin, end)
        computing, waiting = computing + working, waiting + busy - working
    return Share(computing=computing / devices, waiting=waiting / devices)


def _lanes(profile: Any) -> list[list[tuple[float, float, bool]]]:
    """Begin and end of all operations of each device, or of each thread on a CPU.

    Each comes with whether it is a collective.
    """
    lanes = []
    for plane in profile.planes:
        if plane.name.startswith("/device:"):
            streams = [x for x in plane.lines if x.name.startswith("Stream")]
            events = [x for line in streams for x in line.events]
            lanes.append([_span(x, _COLLECTIVE_KERNEL.search(x.name)) for x in events])
        elif plane.name == "/host:CPU":
            lanes += [
                [
                    _span(x, _COLLECTIVE_OPERATION.match(x.name))
                    for x in line.events
                    if _CPU_OPERATION.fullmatch(x.name)
                ]
                for line in plane.lines
            ]
    return lanes


def _span(event: Any, collective: Any) -> tuple[float, float, bool]:
    begin = 1e-9 * event.start_ns
    return begin, begin + 1e-9 * event.duration_ns, collective is not None


def _covered(spans: Iterable[tuple[float, float]], begin: float, end: float) -> float:
    """Seconds from `begin` to `end` that are in at least one span."""
    edges = np.array(sorted(spans)).reshape(-1, 2).clip(begin, end)  # [spans, 2]
    if not len(edges):
        return 0.0
    until = np.maximum.accumulate(edges[:, 1])
    since = np.maximum(edges[:, 0], np.append(begin, until[:-1]))
    return float(np.maximum(edges[:, 1] - since, 0.0).sum())


class DeviceEvents:
    """Reports what the devices do, driven by the `Monitor` of a run.

    Nothing waits for a device. A profile lasts from the end of one step to the end of
    the next, and is read on a separate thread.
    """

    def __init__(
        self, events: EventLog, *, profile_every: int | None = None, group: str = ""
    ) -> None:
        """Choose where events go.

        Args:
            events: Receiver of the events.
            profile_every: Steps between profiles; None is never.
            group: The role of this process, if roles differ: its pipeline stages.
        """
        self._events, self._every, self._group = events, profile_every, group
        self._dispatched: dict[int, float] = {}
        self._paces: list[tuple[float, float]] = []
        self._memory_at = float("-inf")
        self._lock = threading.Lock()
        self._session: _Session | None = None
        self._reader: threading.Thread | None = None

    def __enter__(self) -> "DeviceEvents":
        jax.monitoring.register_event_duration_secs_listener(self._compiled)
        return self

    def __exit__(self, *error: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._compiled)
        with self._lock:
            session, self._session = self._session, None
        if session is not None:
            session.close()
        if self._reader is not None:
            self._reader.join()

    def begin(self, step: int | None) -> None:
        """The loop begins a step."""
        if not self._every or step is None or step % self._every:
            return
        with self._lock:
            busy = self._reader is not None and self._reader.is_alive()
            if self._session is None and not busy:
                self._session = _Session.start(step)

    def dispatched(self, step: int, at: float) -> None:
        """The loop has dispatched a step, at seconds since 1970."""
        self._dispatched[step] = at

    def done(self, step: int, before: float | None, at: float) -> None:
        """The device has finished a step, and the previous one if nothing was in
        between.

        It is called on another thread than the loop's.
        """
        dispatched = self._dispatched.pop(step, at)
        if before is not None:
            self._paces.append((at - before, max(dispatched - before, 0.0)))
        if step % _PACE_STEPS == 0 and self._paces:
            seconds, starved = np.mean(self._paces, axis=0).tolist()
            self._paces = []
            self._report(phases.PACE, step, seconds=seconds, starved=starved)
        if time.monotonic() - self._memory_at > _MEMORY_SECONDS:
            self._memory_at = time.monotonic()
            self._memory(step)
        with self._lock:
            session = self._session
            if session is None or step < session.step:
                # Earlier steps were begun while the profiler starts, which halts a GPU
                # host for a quarter of a second, so that their ends are noticed late.
                return
            if session.begin is None:
                session.begin = at
                return
            self._session = None
        self._reader = threading.Thread(
            target=self._read, args=(session, step, at), name="jaxscale-profile"
        )
        self._reader.start()

    def _read(self, session: "_Session", step: int, at: float) -> None:
        found = session.read(at)
        if found is not None:
            seconds = at - (session.begin or at)
            self._report(
                phases.PROFILE, step, seconds=seconds, **dataclasses.asdict(found)
            )

    def _report(self, name: str, step: int, **args: Any) -> None:
        if self._group:
            args["group"] = self._group
        self._events.emit(name, step, kind="device", **args)

    def _memory(self, step: int) -> None:
        stats = [device.memory_stats() for device in jax.local_devices()]
        stats = [found for found in stats if found]
        if stats:  # a CPU has none
            names = ("bytes_in_use", "peak_bytes_in_use", "bytes_limit")
            most = {name: max(found.get(name, 0) for found in stats) for name in names}
            self._events.emit(phases.MEMORY, step, kind="memory", **most)

    def _compiled(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == _COMPILED and duration_secs >= _LONG_COMPILATION:
            since = time.time() - duration_secs
            program = kwargs.get("fun_name", "")
            self._events.emit(
                phases.COMPILED, kind="compile", since=since, program=program
            )


def device_events(
    config: TrainConfig, mesh: jax.sharding.Mesh, events: EventLog
) -> DeviceEvents:
    """The device events of a run; pipeline stages are different groups."""
    mine = np.vectorize(lambda device: device.process_index)(mesh.devices)
    held = np.argwhere(mine == jax.process_index())  # [devices, axes]
    stages = sorted({*held[:, mesh.axis_names.index("pipe")].tolist()})
    group = f"stages {stages}" if config.is_pipelined(mesh.shape) else ""
    return DeviceEvents(events, profile_every=config.profile_every, group=group)


class _Session:
    """A profile that is being taken."""

    def __init__(self, folder: str, step: int) -> None:
        self._folder = folder
        self.step = step
        """The first step that begins in it."""
        self.begin: float | None = None
        """End of that step, in seconds since 1970."""

    @classmethod
    def start(cls, step: int) -> "_Session | None":
        """Start, unless another profile is being taken."""
        options = jax.profiler.ProfileOptions()
        options.host_tracer_level = 1  # operations, of a CPU
        options.python_tracer_level = 0
        folder = tempfile.mkdtemp(prefix="jaxscale-profile-")
        try:
            jax.profiler.start_trace(folder, profiler_options=options)
        except (RuntimeError, ValueError) as error:
            _log.warning("no profile of this step is taken: %s", error)
            _remove(folder)
            return None
        return cls(folder, step)

    def close(self) -> None:
        """Stop, and discard the profile."""
        with contextlib.suppress(RuntimeError, OSError):
            jax.profiler.stop_trace()
        _remove(self._folder)

    def read(self, end: float) -> Share | None:
        """Stop, and split the time until `end`; None if the profile cannot be read."""
        try:
            jax.profiler.stop_trace()
            (path,) = Path(self._folder).rglob("*.xplane.pb")
            profile = jax.profiler.ProfileData.from_file(str(path))
            zero, devices = _started(profile), jax.local_device_count()
            return share(profile, (self.begin or end) - zero, end - zero, devices)
        except (RuntimeError, OSError, ValueError) as error:  # a full disk
            _log.warning("a profile cannot be read: %s", error)
            return None
        finally:
            _remove(self._folder)


def _started(profile: Any) -> float:
    """The origin of a profile's times, in seconds since 1970.

    It is before `start_trace` returns, by as long as the profiler needs to start.
    """
    with warnings.catch_warnings():  # about a type of `ProfileData` without a module
        warnings.simplefilter("ignore", DeprecationWarning)
        stats = [stat for plane in profile.planes for stat in plane.stats]
    times = [value for name, value in stats if name == "profile_start_time"]
    if not times:
        raise ValueError("it does not say when it was started")
    return 1e-9 * times[0]


def _remove(folder: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)
