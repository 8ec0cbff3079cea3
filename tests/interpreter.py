"""Runs Mosaic GPU kernels on a CPU, semaphores and peers included (the second ring).

``interpret_mosaic_gpu`` puts jax's own Mosaic GPU interpreter in place of the compiler
and teaches it what the kernels of this project use beyond it::

    with interpret_mosaic_gpu(detect_races=True) as run:
        y = np.asarray(jax.jit(kernel)(x))
    assert not run.races_found  # also checked on leaving

Added to the interpreter of jax 0.11.2:

- semaphores, as scratch and through ``pl.get_global``: ``semaphore_signal`` and
  ``semaphore_wait`` with ``device_id``, ``inc`` and ``decrement``;
- ``plgpu.remote_ref`` for loads, stores and TMA copies on meshes of any rank;
- the barrier over devices before a kernel, and after each point of the grid;
- ``copy_smem_to_gmem`` with ``reduction_op="add"`` and with a predicate;
- ``wgmma`` with its left operand in registers; for race detection, wgmma reads shared
  memory until ``wgmma_wait`` or a read of the accumulator;
- ``inline_mgpu`` through numpy stand-ins (:func:`register_inline`);
- a bound on every wait: a deadlock is a ``TimeoutError`` that names the line;
- two races that only hardware would show: a peer still writes or reads a device's
  arrays when the device leaves the kernel, and those between blocks
  (``concurrent_blocks=True``).

What it cannot do, and therefore needs a test on a GPU:

- NVLink multicast (``multicast_ref``, ``multimem_*``), which this project never uses;
- ``RefUnion`` aliasing: each member has a buffer of its own;
- stores to a wgmma accumulator, ``pl.run_state(plgpu.ACC.init(...))``, ``mma``;
- atomics (``plgpu.atomic_*``), ``semaphore_read``, ``copy_gmem_to_smem`` without a
  barrier, TMA gather, dynamic grids;
- swizzles and tilings: buffers have their logical shape, so an access that reads wrong
  rows on hardware reads right ones here;
- without ``concurrent_blocks`` the blocks of a grid run one after another (all devices
  in step), so a block may only wait for itself and for blocks before it.

It patches private names of jax, so it refuses any other version (:func:`check_jax`).
"""

import collections
import contextlib
import contextvars
import dataclasses
import functools
import inspect
import itertools
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import callback, dispatch, source_info_util
from jax._src.pallas import core as pallas_core
from jax._src.pallas import primitives as pallas_primitives
from jax._src.pallas.mosaic.interpret import race_detection_state
from jax._src.pallas.mosaic.interpret import utils as interpret_utils
from jax._src.pallas.mosaic_gpu import core as gpu_core
from jax._src.pallas.mosaic_gpu import primitives as gpu_primitives
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks as callbacks
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as pallas_call
from jax._src.pallas.mosaic_gpu.interpret import jaxpr_interpret as stock
from jax._src.pallas.mosaic_gpu.interpret import shared_memory as memory
from jax._src.state import indexing
from jax._src.state import types as state_types
from jax.experimental.pallas import mosaic_gpu as plgpu


JAX_VERSION = "0.11.2"

# What is patched or relied on, with the parameters that each must still have.
EXPECTED = {
    (stock, "resolve_ref"): "aval allocation_key_as_array transforms",
    (stock, "get_uninitialized_array"): "shape dtype memory_space uninitialized_memory",
    (stock.JaxprInterpreter, "interpret"): "self jaxpr token args",
    (
        stock.JaxprInterpreter,
        "_interpret_inline_mgpu_p",
    ): "self eqn token get_invals",
    (stock.JaxprInterpreter, "_interpret_wgmma_ref_p"): "self eqn token get_invals",
    (
        stock.JaxprInterpreter,
        "_interpret_wgmma_accumulator_deref_p",
    ): "self eqn token get_invals",
    (callbacks, "copy_smem_to_gmem"): (
        "token mesh_location thread src_allocation_key_as_array src_transforms "
        "dst_allocation_key_as_array dst_transforms predicate source_info "
        "commit_group reduction_op"
    ),
    (callbacks, "cluster_finished"): "token",
    (callbacks, "call_update_clocks_for_device_barrier"): "token device",
    (callbacks, "_clear_shared_memory"): "",
    (memory.GPUSharedMemory, "reset_per_cluster_state"): "self",
    (memory.GPUSharedMemory, "set_failed"): "self exception failed_thread top_level",
    (memory.Barrier, "wait"): "self thread logging_info",
}

_KEY_FIELDS = [f.name for f in dataclasses.fields(memory.HostAllocationKey)]
_DEVICE = _KEY_FIELDS.index("device_id")
_STANDS_FOR = "stands_for"


def check_jax() -> None:
    """Raise unless jax is the version whose private names this module patches."""
    advice = (
        "; tests/interpreter.py patches private names of jax "
        f"{JAX_VERSION}: compare jax/_src/pallas/mosaic_gpu/interpret of both versions,"
        " adapt EXPECTED and the patches, then JAX_VERSION"
    )
    if jax.__version__ != JAX_VERSION:
        raise RuntimeError(f"jax {jax.__version__}, expected {JAX_VERSION}" + advice)
    for (owner, name), parameters in EXPECTED.items():
        where = f"{owner.__name__}.{name}"
        if not hasattr(owner, name):
            raise RuntimeError(f"{where} is gone" + advice)
        found = " ".join(inspect.signature(getattr(owner, name)).parameters)
        if found != parameters:
            raise RuntimeError(
                f"{where} takes ({found}), expected ({parameters})" + advice
            )


# --- The context manager --------------------------------------------------------------


class RaceError(AssertionError):
    """The race detector found unordered accesses; it printed them."""


@dataclasses.dataclass
class Run:
    """What happened while :func:`interpret_mosaic_gpu` was active."""

    detect_races: bool
    timeout: float
    concurrent_blocks: bool
    failure: Exception | None = None
    """The first exception inside a kernel; jax itself reports only its text."""
    race_states: list[Any] = dataclasses.field(default_factory=list)
    global_buffers: dict[Any, int] = dataclasses.field(default_factory=dict)

    @property
    def kernels(self) -> int:
        """How many kernels have been interpreted."""
        return len(self.race_states)

    @property
    def races_found(self) -> bool:
        """Whether any kernel so far had a race (they are printed as found)."""
        jax.effects_barrier()
        return any(state.races_found for state in self.race_states)


_run: Run | None = None


def _current_run() -> Run:
    if _run is None:
        raise RuntimeError(
            "a kernel is interpreted outside interpret_mosaic_gpu; wait for its "
            "results (np.asarray) inside the with block"
        )
    return _run


@contextlib.contextmanager
def interpret_mosaic_gpu(
    *,
    detect_races: bool = False,
    allow_races: bool = False,
    concurrent_blocks: bool = False,
    timeout: float = 60.0,
) -> Iterator[Run]:
    """Interpret every Mosaic GPU kernel traced in the block, on CPU devices.

    Args:
        detect_races: Follow happens-before with vector clocks, print unordered accesses
            and raise on leaving if there were any. Slower by about a third.
        allow_races: Do not raise; look at ``races_found`` instead.
        concurrent_blocks: Run all blocks of the grid at once, as a GPU with enough
            multiprocessors does. One host thread per warpgroup of the whole grid.
        timeout: Seconds that any single wait in a kernel may last.

    Yields:
        The :class:`Run`.

    Raises:
        RaceError: On leaving, if races were found and are not allowed.
        TimeoutError: If a barrier, a semaphore or another device kept a wait waiting.
        Exception: Whatever first failed in a kernel, with its own type.
    """
    global _run
    check_jax()
    if _run is not None:
        raise RuntimeError("interpret_mosaic_gpu is already active")
    if int(os.environ.get("NPROC", 0)) < 32:
        raise RuntimeError(
            "NPROC must be at least 32, got "
            f"{os.environ.get('NPROC')!r}; set it to 64 before jax starts, or blocked "
            "callbacks use up the threads of XLA and the kernel hangs"
        )
    params = plgpu.InterpretGPUParams(
        detect_races=detect_races,
        # More than the default, because two copies that share one look ordered. The
        # parameters are part of jit's key, so the modes must differ in them.
        num_tma_threads_per_device=33 if concurrent_blocks else 32,
    )
    _run = run = Run(detect_races, timeout, concurrent_blocks)
    try:
        with _patches(), plgpu.force_gpu_interpret_mode(params):
            try:
                yield run
                jax.effects_barrier()
            except Exception as error:
                if run.failure is not None:
                    raise run.failure from error
                raise
        if run.races_found and not allow_races:
            raise RaceError("races found (printed above); see allow_races")
    finally:
        with contextlib.suppress(Exception):
            jax.effects_barrier()
        # A failed kernel leaves its error in the tokens of ordered effects.
        dispatch.runtime_tokens.clear()
        callbacks.reset_gpu_interpret_mode_state()
        _run = None


@contextlib.contextmanager
def _patches() -> Iterator[None]:
    replaced = {
        (stock, "JaxprInterpreter"): Interpreter,
        (stock, "resolve_ref"): resolve_ref,
        (stock, "get_uninitialized_array"): get_uninitialized_array,
        (memory, "GPUSharedMemory"): SharedMemory,
        (memory, "Barrier"): Barrier,
        (callbacks, "copy_smem_to_gmem"): copy_smem_to_gmem,
        (callbacks, "cluster_finished"): cluster_finished,
        (callbacks, "call_update_clocks_for_device_barrier"): call_device_barrier,
        (pallas_call, "interpret_pallas_call"): interpret_pallas_call,
    }
    originals = {(owner, name): getattr(owner, name) for owner, name in replaced}
    for (owner, name), value in replaced.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for (owner, name), value in originals.items():
            setattr(owner, name, value)


_stock_resolve_ref = stock.resolve_ref
_stock_get_uninitialized_array = stock.get_uninitialized_array
_stock_copy_smem_to_gmem = callbacks.copy_smem_to_gmem.__wrapped__
_stock_device_barrier = callbacks._update_clocks_for_device_barrier.__wrapped__
_stock_interpret_pallas_call = pallas_call.interpret_pallas_call


def interpret_pallas_call(*args, mesh=None, **kwargs):
    """With ``concurrent_blocks``, let the whole grid be one cluster."""
    if _current_run().concurrent_blocks and mesh is not None and mesh.grid:
        mesh = dataclasses.replace(
            mesh,
            grid=(),
            grid_names=(),
            cluster=(*mesh.grid, *mesh.cluster),
            cluster_names=(*mesh.grid_names, *mesh.cluster_names),
        )
        threads = math.prod(mesh.cluster) * (mesh.num_threads or 1)
        if threads > int(os.environ["NPROC"]):
            raise ValueError(
                f"concurrent_blocks would need {threads} threads on each device, NPROC "
                f"is {os.environ['NPROC']}; use a smaller grid"
            )
    return _stock_interpret_pallas_call(*args, mesh=mesh, **kwargs)


# --- The memory of all devices --------------------------------------------------------


class _BoundedCondition(threading.Condition):
    """A condition whose unbounded waits end with a ``TimeoutError``."""

    def wait(self, timeout: float | None = None) -> bool:
        if timeout is not None:
            return super().wait(timeout)
        if not super().wait(_current_run().timeout):
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
            where = _summary(logging_info.source_info) if logging_info else "unknown"
            raise TimeoutError(
                f"barrier_wait at {where} on {thread} waited {_current_run().timeout} s"
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
        run = _current_run()
        self.semaphores = collections.defaultdict(Semaphore)
        self.semaphore_changed = threading.Condition()
        self.atomic = threading.Lock()
        self.unfinished: list[str] = []
        # Devices wait here for others that may themselves wait inside the kernel; a
        # failure there breaks these barriers at once.
        self.meeting_timeout = 3 * run.timeout
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
        run = _current_run()
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
        timeout = _current_run().timeout
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


def _summary(source_info) -> str:
    return source_info_util.summarize(source_info) if source_info else "unknown"


def _memory() -> SharedMemory:
    shared_memory = callbacks._get_shared_memory()
    assert isinstance(shared_memory, SharedMemory)
    return shared_memory


# --- Barriers over devices ------------------------------------------------------------


@callbacks.fail_on_exception
def _device_barrier(token, device):
    shared_memory = _memory()
    shared_memory.meet("barrier over all devices around the kernel")
    for line in shared_memory.unfinished:  # empty before the kernel
        print(f"RACE DETECTED\n  {line}")
        callbacks.get_races().races_found = True
    return _stock_device_barrier(token, device)


def call_device_barrier(token, device):
    """Before and after a kernel, as XLA's own barrier does before one."""
    return callback.io_callback(
        _device_barrier, callbacks.TOKEN_SHAPE_DTYPE, token, device
    )


@callbacks.fail_on_exception
def cluster_finished(*, token):
    """All devices leave a point of the grid together, then the clocks restart."""
    shared_memory = _memory()
    if shared_memory.meet("end of a point of the grid") == 0:
        shared_memory.end_grid_point()
    shared_memory.meet("end of a point of the grid")
    return token


# --- Peers and semaphores -------------------------------------------------------------

_interpreter: contextvars.ContextVar["Interpreter"] = contextvars.ContextVar(
    "interpreter"
)


def _on_device(key, device_id, device_id_type):
    """The allocation that ``key`` names, on another device."""
    devices = _interpreter.get().device_info
    logical = interpret_utils._device_id_to_logical(
        device_id, device_id_type, devices.axis_sizes, devices.axis_indices
    )
    return jnp.asarray(key).at[..., _DEVICE].set(jnp.asarray(logical, jnp.int32))


def resolve_ref(aval, allocation_key_as_array, transforms):
    """Let the key of a remote ref name the peer's buffer."""
    key, transforms = _stock_resolve_ref(
        aval, allocation_key_as_array, tuple(transforms or ())
    )
    local = []
    for transform in transforms:
        if isinstance(transform, gpu_core.MulticastRef):
            raise NotImplementedError("multicast refs are not interpreted")
        if isinstance(transform, gpu_core.PeerMemRef):
            key = _on_device(key, transform.device_id, transform.device_id_type)
        else:
            local.append(transform)
    return key, tuple(local)


def get_uninitialized_array(shape, dtype, memory_space, uninitialized_memory):
    """Semaphores start at zero (their count lives in :class:`SharedMemory`)."""
    if jnp.issubdtype(dtype, pallas_core.semaphore_dtype):
        return jnp.zeros(shape, jnp.int32)
    return _stock_get_uninitialized_array(
        shape, dtype, memory_space, uninitialized_memory
    )


def _semaphore_key(key, index) -> tuple:
    fields = dict(zip(_KEY_FIELDS, np.asarray(key).tolist(), strict=True))
    del fields["initial_ref_count"], fields["memory_space_id"]
    return (*fields.values(), *(int(i) for i in index))


def _semaphore_index(transforms):
    index = []
    for transform in transforms:
        if not isinstance(transform, indexing.NDIndexer):
            raise NotImplementedError(f"semaphore indexed by {transform}")
        for i in transform.indices:
            index.append(i.start if isinstance(i, indexing.Slice) else i)
    return tuple(jnp.asarray(i, jnp.int32) for i in index)


@callbacks.fail_on_exception
def _semaphore_signal(*, token, thread, key, index, increment):
    _memory().signal(thread, _semaphore_key(key, index), int(increment))
    return token


@callbacks.fail_on_exception
def _semaphore_wait(*, token, thread, key, index, value, decrement, where):
    _memory().wait(
        thread, _semaphore_key(key, index), int(value), bool(decrement), where
    )
    return token


def _interpret_semaphore_signal(interpreter, eqn, token, invals):
    ref, transforms, increment, device_id, _ = jax.tree.unflatten(
        eqn.params["args_tree"], invals
    )
    key, transforms = resolve_ref(eqn.invars[0].aval, ref, transforms)
    if device_id is not None:
        key = _on_device(key, device_id, eqn.params["device_id_type"])
    return interpreter.call(
        _semaphore_signal,
        token,
        key=key,
        index=_semaphore_index(transforms),
        increment=increment,
    ), []


def _interpret_semaphore_wait(interpreter, eqn, token, invals):
    ref, transforms, value, decrement = jax.tree.unflatten(
        eqn.params["args_tree"], invals
    )
    key, transforms = resolve_ref(eqn.invars[0].aval, ref, transforms)
    return interpreter.call(
        functools.partial(_semaphore_wait, where=_summary(eqn.source_info)),
        token,
        key=key,
        index=_semaphore_index(transforms),
        value=value,
        decrement=jnp.asarray(decrement),
    ), []


def _interpret_get_global(interpreter, eqn, token, invals):
    """One allocation for each ``get_global`` of the kernel, shared by its blocks."""
    what = eqn.params["what"]
    if not jnp.issubdtype(what.dtype, pallas_core.semaphore_dtype):
        raise NotImplementedError(f"pl.get_global of {what} is not interpreted")
    # The equation may be traced more than once, its variable stays.
    known = _current_run().global_buffers
    number = known.setdefault(eqn.outvars[0], 1_000_000 + len(known))
    key = dict.fromkeys(_KEY_FIELDS, -1) | {
        "device_id": interpreter.thread.device_id,
        "buffer_id": number,
    }
    return token, [jnp.stack([jnp.asarray(v, jnp.int32) for v in key.values()])]


# --- wgmma ----------------------------------------------------------------------------


def _access(shared_memory, key, transforms):
    key = memory.HostAllocationKey.from_array(key)
    transforms = jax.tree.map(int, callbacks._remove_noop_transforms(transforms))
    return key, shared_memory.access(key, transforms)


@callbacks.fail_on_exception
def _wgmma(*, token, mesh_location, thread, acc, a, b, source_info, a_is_ref):
    shared_memory = _memory()
    info = memory.GPULoggingInfo(mesh_location, thread, source_info)
    get = functools.partial(
        shared_memory.get_buffer_content, thread=thread, logging_info=info
    )
    operands = [_access(shared_memory, *b)]
    if a_is_ref:
        operands.append(_access(shared_memory, *a))
    b_value, *rest = [get(key, access)[0] for key, access in operands]
    a_value = rest[0] if a_is_ref else np.asarray(a)
    acc_key, acc_access = _access(shared_memory, *acc)
    acc_value, _, _ = get(acc_key, acc_access)
    shared_memory.store_buffer_content(
        acc_key,
        acc_access,
        acc_value + np.matmul(a_value, b_value, dtype=acc_value.dtype),
        thread,
        logging_info=info,
    )
    if shared_memory.detect_races:
        # The tensor core reads on its own time, through the async proxy.
        clock = shared_memory.incr_clock(thread)
        clock.inc(shared_memory.get_next_tma_thread_id())
        for key, access in operands:
            callbacks.get_races().check_read(
                thread, clock.async_smem_clock.copy(), key, access, source_info
            )
        shared_memory.pending_wgmma[thread].append(clock)
    return token


@callbacks.fail_on_exception
def _wgmma_wait(*, token, thread, n):
    _memory().wait_wgmma(thread, n)
    return token


def _interpret_wgmma_wait(interpreter, eqn, token, invals):
    return interpreter.call(
        functools.partial(_wgmma_wait, n=eqn.params["n"]), token
    ), []


# --- TMA stores -----------------------------------------------------------------------


class _AtomicFrame(str):
    """The source line of a reduction, which does not race with other reductions."""


class _ReduceTask(callbacks.AsyncCopySmemToGmemTask):
    """A TMA store that adds to what is there, one element after another."""

    def __call__(self, tma_thread_id: int):
        shared_memory = _memory()
        get = functools.partial(
            shared_memory.get_buffer_content,
            thread=self.thread,
            logging_info=self.logging_info,
        )
        self.pre_read(tma_thread_id, shared_memory)
        value, _, _ = get(self.src_allocation_key, self.src_access)
        self.post_read(tma_thread_id, shared_memory)
        shape, _ = shared_memory.buffer_shape_and_dtype(self.dst_allocation_key)
        store = callbacks._clip_store_to_shape(self.dst_access, value, tuple(shape))
        if store is not None:
            access, value = store
            with shared_memory.atomic:
                old, (_, dtype), _ = get(self.dst_allocation_key, access)
                total = old.astype(np.float32) + value.astype(np.float32)
                shared_memory.store_buffer_content(
                    self.dst_allocation_key,
                    access,
                    total.astype(dtype),
                    self.thread,
                    logging_info=self.logging_info,
                )
        self.post_write(tma_thread_id, shared_memory)

    def post_read(self, tma_thread_id: int, shared_memory):
        if not shared_memory.detect_races:
            return
        self.clock.inc(tma_thread_id)
        self.write_clock = self.clock.copy()
        clock, key = self.clock.async_smem_clock.copy(), self.dst_allocation_key
        span, races = self.dst_access.range, callbacks.get_races()
        frame = _AtomicFrame(_summary(self.source_info))
        with races.lock:
            others = [
                *races.reads[key],
                *(w for w in races.writes[key] if not isinstance(w[3], _AtomicFrame)),
            ]
            races.writes[key].append((self.thread, clock, span, frame))
        for other, other_clock, other_span, other_frame in others:
            if not other_clock.ordered(clock) and race_detection_state._ranges_overlap(
                span, other_span
            ):
                print(
                    f"RACE DETECTED\n  reduction into {key}[{span}] from "
                    f"{self.thread}, {frame}\n  access from {other}, {other_frame}"
                )
                races.races_found = True
                return


@callbacks.fail_on_exception
def copy_smem_to_gmem(*, token, thread, predicate, reduction_op, **copy):
    """The stock copy, with a predicate and with ``reduction_op="add"``."""
    if predicate is not None and not bool(predicate):
        return token
    if reduction_op is None:
        return _stock_copy_smem_to_gmem(
            token=token, thread=thread, predicate=None, reduction_op=None, **copy
        )
    if reduction_op != "add":
        raise NotImplementedError(f"reduction_op={reduction_op!r} is not interpreted")
    shared_memory = _memory()
    clock = shared_memory.incr_clock(thread) if shared_memory.detect_races else None
    (src, src_access), (dst, dst_access) = (
        _access(
            shared_memory,
            copy[f"{end}_allocation_key_as_array"],
            copy[f"{end}_transforms"],
        )
        for end in ("src", "dst")
    )
    task = _ReduceTask(
        mesh_location=copy["mesh_location"],
        thread=thread,
        src_allocation_key=src,
        src_access=src_access,
        dst_allocation_key=dst,
        dst_access=dst_access,
        source_info=copy["source_info"],
        clock=clock,
    )
    shared_memory.execute_async_task(task)
    return token


# --- inline_mgpu ----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class StandIn:
    """What runs in place of an ``inline_mgpu`` function."""

    function: Callable
    writes: tuple[int, ...]


_stand_ins: dict[str, StandIn] = {}


def register_inline(name: str, function: Callable, *, writes: tuple[int, ...] = ()):
    """Interpret the ``inline_mgpu`` functions called ``name`` by a numpy function.

    Args:
        name: The name of the decorated function (``gather``), or its module and
            qualified name (``pallas_kernels.x.mosaic_gpu.f.<locals>.gather``), which
            wins. Give inline functions names that are unique in the project.
        function: Called with one numpy array for each argument of the inline function
            but its context: the logical contents of a ref, or the array. It may write
            into those that ``writes`` names, and returns what ``return_type`` says (a
            pytree of arrays). If it has a parameter ``closure``, it also gets the
            closure variables of the inline function by name.
        writes: Positions, among the flat arguments, of the refs that it writes.
            Writing any other has no effect.

    Raises:
        ValueError: If another function is registered under the name.
    """
    stand_in = StandIn(function, tuple(writes))
    if _stand_ins.setdefault(name, stand_in) != stand_in:
        raise ValueError(
            f"name {name!r} already stands for {_stand_ins[name]}; rename the inline "
            "function or register its qualified name"
        )


def unregister_inline(name: str) -> None:
    """Undo :func:`register_inline`."""
    del _stand_ins[name]


def _find_stand_in(function) -> StandIn:
    qualified = f"{function.__module__}.{function.__qualname__}"
    for name in (qualified, function.__qualname__.rsplit(".", 1)[-1]):
        if name in _stand_ins:
            return _stand_ins[name]
    raise NotImplementedError(
        f"no stand-in for the inline_mgpu function {qualified}; call "
        "tests.interpreter.register_inline with its name"
    )


@callbacks.fail_on_exception
def _inline(*, token, mesh_location, thread, args, is_ref, eqn):
    stand_in, function = (
        _find_stand_in(eqn.params["mgpu_fn"]),
        eqn.params["mgpu_fn"],
    )
    shared_memory, races = _memory(), callbacks.get_races()
    info = memory.GPULoggingInfo(mesh_location, thread, eqn.source_info)
    values, refs = [], {}
    for i, (arg, ref) in enumerate(zip(args, is_ref, strict=True)):
        if not ref:
            values.append(np.asarray(arg))
            continue
        refs[i] = key, access = _access(shared_memory, *arg)
        value, _, clock = shared_memory.get_buffer_content(
            key, access, thread, logging_info=info
        )
        if clock is not None and i not in stand_in.writes:
            races.check_read(thread, clock.generic_clock, key, access, eqn.source_info)
        values.append(value)
    extra = {}
    if "closure" in inspect.signature(stand_in.function).parameters:
        extra["closure"] = dict(inspect.getclosurevars(function).nonlocals)
    result = stand_in.function(
        *jax.tree.unflatten(eqn.params["pytree_args"], values), **extra
    )
    for i in stand_in.writes:
        key, access = refs[i]
        _, _, clock = shared_memory.store_buffer_content(
            key, access, values[i], thread, logging_info=info
        )
        if clock is not None:
            races.check_write(thread, clock.generic_clock, key, access, eqn.source_info)
    return token, [
        np.asarray(leaf, kind.dtype).reshape(kind.shape)
        for leaf, kind in zip(
            jax.tree.leaves(result), eqn.params["flat_ret_ty"], strict=True
        )
    ]


# --- The interpreter of one thread ----------------------------------------------------

EXTENSIONS = {
    pallas_primitives.semaphore_signal_p: _interpret_semaphore_signal,
    pallas_primitives.semaphore_wait_p: _interpret_semaphore_wait,
    pallas_primitives.get_global_p: _interpret_get_global,
    gpu_primitives.semaphore_signal_p: _interpret_semaphore_signal,
    gpu_primitives.semaphore_wait_p: _interpret_semaphore_wait,
    gpu_primitives.wgmma_wait_p: _interpret_wgmma_wait,
}


class Interpreter(stock.JaxprInterpreter):
    """The stock interpreter with the operations of ``EXTENSIONS``."""

    def call(self, function, token, **kwargs):
        """Call ``function`` on the host, in order with the thread's other effects."""
        return callback.io_callback(
            function,
            callbacks.TOKEN_SHAPE_DTYPE,
            token=token,
            thread=self.thread,
            **kwargs,
        )

    def interpret(self, jaxpr, token, *args):
        # The stock loop hands the token to our code for inline_mgpu only, so our own
        # operations travel as one.
        eqns = [
            eqn.replace(
                primitive=gpu_primitives.inline_mgpu_p, params={_STANDS_FOR: eqn}
            )
            if eqn.primitive in EXTENSIONS
            else eqn
            for eqn in jaxpr.eqns
        ]
        previous = _interpreter.set(self)
        try:
            return super().interpret(jaxpr.replace(eqns=eqns), token, *args)
        finally:
            _interpreter.reset(previous)

    def _interpret_inline_mgpu_p(self, eqn, token, get_invals):
        invals = get_invals()
        if _STANDS_FOR in eqn.params:
            original = eqn.params[_STANDS_FOR]
            return EXTENSIONS[original.primitive](self, original, token, invals)
        _find_stand_in(eqn.params["mgpu_fn"])  # fail while tracing
        count = eqn.params["pytree_args"].num_leaves
        transforms = jax.tree.unflatten(
            eqn.params["pytree_ref_transforms"], invals[count:]
        )
        is_ref = tuple(
            isinstance(var.aval, state_types.AbstractRef) for var in eqn.invars[:count]
        )
        args = [
            resolve_ref(var.aval, value, path) if ref else value
            for var, value, path, ref in zip(
                eqn.invars[:count], invals[:count], transforms, is_ref, strict=True
            )
        ]
        return callback.io_callback(
            functools.partial(_inline, is_ref=is_ref, eqn=eqn),
            (callbacks.TOKEN_SHAPE_DTYPE, [var.aval for var in eqn.outvars]),
            token=token,
            mesh_location=self.mesh_location,
            thread=self.thread,
            args=args,
        )

    def _interpret_wgmma_ref_p(self, eqn, token, get_invals):
        acc, a, b, *leaves = get_invals()
        empty = jax.tree.structure([])
        paths = jax.tree.unflatten(
            jax.tree_util.treedef_tuple(
                eqn.params[f"{operand}_transforms_tree"] or empty
                for operand in ("acc", "a", "b")
            ),
            leaves,
        )
        a_is_ref = isinstance(eqn.invars[1].aval, state_types.AbstractRef)
        acc, a, b = (
            resolve_ref(var.aval, value, path) if i != 1 or a_is_ref else value
            for i, (var, value, path) in enumerate(
                zip(eqn.invars[:3], (acc, a, b), paths, strict=True)
            )
        )
        return self.call(
            functools.partial(_wgmma, source_info=eqn.source_info, a_is_ref=a_is_ref),
            token,
            mesh_location=self.mesh_location,
            acc=acc,
            a=a,
            b=b,
        ), []

    def _interpret_wgmma_accumulator_deref_p(self, eqn, token, get_invals):
        waited = functools.partial(_wgmma_wait, n=eqn.params["wait_n"] or 0)
        return super()._interpret_wgmma_accumulator_deref_p(
            eqn, self.call(waited, token), get_invals
        )


def cpu_mesh(**axis_sizes: int) -> jax.sharding.Mesh:
    """A mesh of simulated devices with automatic axes: ``cpu_mesh(dp=2, tp=2)``."""
    count = math.prod(axis_sizes.values())
    devices = list(itertools.islice(jax.devices("cpu"), count))
    return jax.make_mesh(
        tuple(axis_sizes.values()),
        tuple(axis_sizes),
        (jax.sharding.AxisType.Auto,) * len(axis_sizes),
        devices=devices,
    )
