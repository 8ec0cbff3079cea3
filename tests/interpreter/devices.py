"""The memory of all simulated devices, and what they wait for."""

import collections
import dataclasses
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from jax._src import source_info_util
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks as callbacks
from jax._src.pallas.mosaic_gpu.interpret import shared_memory as memory

from tests.interpreter.run import current_run


_stock_device_barrier = callbacks._update_clocks_for_device_barrier.__wrapped__


class _BoundedCondition(threading.Condition):
    """A condition whose unbounded waits end with a ``TimeoutError``."""

    def wait(self, timeout: float | None = None) -> bool:
        if timeout is not None:
            return super().wait(timeout)
        if not super().wait(current_run().timeout):
            raise TimeoutError
        return True


class Barrier(memory.Barrier):
    """A barrier whose waits are bounded."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.cv = _BoundedCondition()

    def wait(self, thread, logging_info=None):
        try:
            super().wait(thread, logging_info)
        except TimeoutError:
            where = summary(logging_info.source_info) if logging_info else "unknown"
            raise TimeoutError(
                f"barrier_wait at {where} on {thread} waited {current_run().timeout} s"
                f" for phase {self.phase}: {self.arrivals_count} of "
                f"{self.num_arrivals} arrivals came"
            ) from None


@dataclasses.dataclass
class Semaphore:
    """A counter, and the join of the clocks of those who raised it."""

    count: int = 0
    clock: Any = None


class SharedMemory(memory.GPUSharedMemory):
    """The memory of all devices, with semaphores and pending wgmma reads."""

    def __init__(self, *, barrier, clean_up_barrier, **kwargs):
        run = current_run()
        self.semaphores = collections.defaultdict(Semaphore)
        self.semaphore_changed = threading.Condition()
        self.atomic = threading.Lock()
        self.unfinished: list[str] = []
        # Devices wait here for others that may themselves wait inside the kernel; a
        # failure there breaks these barriers at once.
        self.meeting_timeout = max(3 * run.timeout, 300.0)
        super().__init__(
            barrier=threading.Barrier(barrier.parties, timeout=self.meeting_timeout),
            clean_up_barrier=threading.Barrier(
                clean_up_barrier.parties,
                action=callbacks._clear_shared_memory,
                timeout=self.meeting_timeout,
            ),
            **kwargs,
        )
        run.race_states.append(callbacks.get_races())

    def set_failed(self, exception, failed_thread=None, top_level=True):
        run = current_run()
        if run.failure is None:
            run.failure = exception
        super().set_failed(exception, failed_thread, top_level)

    def reset_per_cluster_state(self):
        super().reset_per_cluster_state()
        self.pending_wgmma = collections.defaultdict(collections.deque)
        for semaphore in self.semaphores.values():
            semaphore.clock = None

    def meet(self, what: str) -> int:
        """Wait for all devices; the return value is 0 on exactly one of them."""
        try:
            return self.barrier.wait()
        except threading.BrokenBarrierError:
            self.check_failed()
            raise TimeoutError(
                f"{what}: a device did not arrive within {self.meeting_timeout} s"
            ) from None

    def end_grid_point(self) -> None:
        """Forget the clocks, and with them the accesses that they order.

        Accesses of different points of the grid are therefore never compared: the
        points run one after another here, but side by side on a GPU.
        """
        if self.detect_races:
            self.unfinished = list(self._unfinished_remote_accesses())
            races = callbacks.get_races()
            with races.lock:
                for accesses in (races.reads, races.writes, races.union_accesses):
                    accesses.clear()
        self.reset_per_cluster_state()

    def _unfinished_remote_accesses(self) -> Iterator[str]:
        """Accesses by peers that the device whose memory they touch never awaited."""
        races = callbacks.get_races()
        for kind, accesses in (("writes", races.writes), ("reads", races.reads)):
            for key, entries in accesses.items():
                left = self.VectorClock(self.vector_clock_size)
                for thread in self.concurrent_threads(memory.Device(key.device_id)):
                    left.update(self.clocks[thread])
                for thread, clock, _, frame in entries:
                    if thread.device_id != key.device_id and not clock.ordered(
                        left.generic_clock
                    ):
                        yield (
                            f"{thread} {kind} memory of device {key.device_id} at "
                            f"{frame}, but that device may have left the kernel"
                        )

    def get_buffer_content(self, key, access, *args, **kwargs):
        """Rows before the first read as zero, as those past the last do in a copy."""
        shape = tuple(self.buffer_shape_and_dtype(key).shape)
        starts = [s.start for s in access.range if isinstance(s, slice)]
        if access.permutation is not None or min(starts, default=0) >= 0:
            return super().get_buffer_content(key, access, *args, **kwargs)
        inside, cut = inner_part(access.range, shape)
        if inside is None:
            kind = self.buffer_shape_and_dtype(key)
            return np.zeros(access.shape, kind.dtype), kind, None
        inner = dataclasses.replace(access, range=inside)
        value, kind, clock = super().get_buffer_content(key, inner, *args, **kwargs)
        whole = np.zeros(access.shape, kind.dtype)
        whole[cut] = value
        return whole, kind, clock

    def signal(self, thread, key: tuple, increment: int) -> None:
        clock = self.incr_clock(thread) if self.detect_races else None
        with self.semaphore_changed:
            semaphore = self.semaphores[key]
            semaphore.count += increment
            if clock is not None:
                if semaphore.clock is not None:
                    clock.update(semaphore.clock)
                semaphore.clock = clock
            self.semaphore_changed.notify_all()

    def wait(self, thread, key: tuple, value: int, decrement: bool, where: str) -> None:
        timeout = current_run().timeout
        deadline = time.monotonic() + timeout
        while True:
            self.check_failed()
            with self.semaphore_changed:
                semaphore = self.semaphores[key]
                if semaphore.count >= value:
                    semaphore.count -= value if decrement else 0
                    clock = semaphore.clock
                    break
                count = semaphore.count
                # Short, to notice the failure of another thread.
                self.semaphore_changed.wait(0.05)
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"semaphore_wait at {where} on {thread} waited {timeout} s for "
                    f"{value}, the semaphore stands at {count}"
                )
        if self.detect_races:
            with self.lock:
                self.incr_clock(thread, take_lock=False)
                if clock is not None:
                    self.clocks[thread].update(clock)

    def wait_wgmma(self, thread, n: int) -> None:
        """End the reads of shared memory of all but the last ``n`` wgmmas."""
        pending = self.pending_wgmma[thread]
        with self.lock:
            while len(pending) > n:
                self.clocks[thread].update(pending.popleft())


def inner_part(window: tuple, shape: tuple[int, ...]) -> tuple:
    """The part of a window that lies in a buffer: there, and within the window."""
    inside, cut = [], []
    for index, size in zip(window, shape, strict=True):
        if isinstance(index, slice):
            start, stop = max(index.start, 0), min(index.stop, size)
            if start >= stop:
                return None, None
            inside.append(slice(start, stop, index.step))
            cut.append(slice(start - index.start, stop - index.start))
        else:
            inside.append(index)
    return tuple(inside), tuple(cut)


def summary(source_info) -> str:
    return source_info_util.summarize(source_info) if source_info else "unknown"


def shared_memory_of_run() -> SharedMemory:
    shared_memory = callbacks._get_shared_memory()
    assert isinstance(shared_memory, SharedMemory)
    return shared_memory


@callbacks.fail_on_exception
def _device_barrier(token, device):
    shared_memory = shared_memory_of_run()
    shared_memory.meet("barrier over all devices around the kernel")
    for line in shared_memory.unfinished:  # empty before the kernel
        print(f"RACE DETECTED\n  {line}")
        callbacks.get_races().races_found = True
    return _stock_device_barrier(token, device)


def call_device_barrier(token, device):
    """Before and after a kernel, as XLA's own barrier does before one."""
    return _device_barrier(token, device)


@callbacks.fail_on_exception
def cluster_finished(*, token):
    """All devices leave a point of the grid together, then the clocks restart."""
    shared_memory = shared_memory_of_run()
    if shared_memory.meet("end of a point of the grid") == 0:
        shared_memory.end_grid_point()
    shared_memory.meet("end of a point of the grid")
    return token
