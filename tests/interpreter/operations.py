"""Operations of kernels: peers, semaphores, wgmma and TMA stores.

``interpret_*`` functions take an equation apart and call the functions under
``fail_on_exception``.
"""

# The private names of jax are typed for what they take while tracing.

import contextvars
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.pallas import core as pallas_core
from jax._src.pallas.mosaic.interpret import race_detection_state
from jax._src.pallas.mosaic.interpret import utils as interpret_utils
from jax._src.pallas.mosaic_gpu import core as gpu_core
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks as callbacks
from jax._src.pallas.mosaic_gpu.interpret import jaxpr_interpret as stock
from jax._src.pallas.mosaic_gpu.interpret import shared_memory as memory
from jax._src.state import indexing
from jax._src.state import types as state_types

from tests.interpreter.devices import shared_memory_of_run, summary
from tests.interpreter.run import current_run


_KEY_FIELDS = [f.name for f in dataclasses.fields(memory.HostAllocationKey)]
_DEVICE = _KEY_FIELDS.index("device_id")

_stock_resolve_ref = stock.resolve_ref
_stock_get_uninitialized_array = stock.get_uninitialized_array
_stock_copy_gmem_to_smem = callbacks.copy_gmem_to_smem.__wrapped__
_stock_copy_smem_to_gmem = callbacks.copy_smem_to_gmem.__wrapped__


# --- Peers and semaphores -------------------------------------------------------------

current_interpreter: contextvars.ContextVar[Any] = contextvars.ContextVar("interpreter")


def _on_device(key, device_id, device_id_type):
    """The allocation that ``key`` names, on another device."""
    devices = current_interpreter.get().device_info
    logical = interpret_utils._device_id_to_logical(
        device_id, device_id_type, devices.axis_sizes, devices.axis_indices
    )
    key = np.array(key)
    key[..., _DEVICE] = logical
    return key


def _view(member) -> tuple:
    """How a member of a ``RefUnion`` maps its elements to bytes."""
    extract, *layout = member.transforms
    shape = stock._member_inner_aval(member).shape
    tiling, swizzle = (), 0
    for transform in layout:
        if isinstance(transform, gpu_core.UntilingTransform):
            tiling = transform.tiling
        if isinstance(transform, gpu_core.UnswizzleRef):
            swizzle = transform.swizzle
    # Tiles as wide as the array lie one after another, like its rows.
    if tiling and tiling[1:] == shape[len(shape) - len(tiling) + 1 :]:
        tiling = ()
    return extract.offset, extract.dtype, shape, tiling, swizzle


def resolve_ref(aval, allocation_key_as_array, transforms):
    """Let the key of a remote ref name the peer's buffer.

    The stock interpreter gives each member of a ``RefUnion`` a buffer of its own;
    members that map the same elements to the same bytes share one here.
    """
    transforms = tuple(transforms or ())
    if isinstance(aval, gpu_core.AbstractRefUnion):
        extract, *transforms = transforms
        members = stock.union_members(aval)
        slot = [member.transforms[0] for member in members].index(extract)
        views = [_view(member) for member in members]
        key = allocation_key_as_array[views.index(views[slot])]
    else:
        key, transforms = _stock_resolve_ref(aval, allocation_key_as_array, transforms)
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
        return np.zeros(shape, np.int32)
    return _stock_get_uninitialized_array(
        shape, dtype, memory_space, uninitialized_memory
    )


def _semaphore_key(key, index) -> tuple:
    fields = dict(zip(_KEY_FIELDS, np.asarray(key).tolist(), strict=True))
    del fields["initial_ref_count"], fields["memory_space_id"]
    return (*fields.values(), *(int(i) for i in index))


def _semaphore_index(aval, transforms):
    index: list[Any] = []
    for transform in transforms:
        if not isinstance(transform, indexing.NDIndexer):
            raise NotImplementedError(f"semaphore indexed by {transform}")
        for i in transform.indices:
            index.append(i.start if isinstance(i, indexing.Slice) else i)
    rest = aval.shape[len(index) :]
    if any(dim != 1 for dim in rest):
        raise ValueError(f"index {index} names no single semaphore of {aval.shape}")
    index += [0] * len(rest)
    return tuple(index)


def is_semaphore(aval) -> bool:
    return jnp.issubdtype(aval.dtype, pallas_core.semaphore_dtype)


def _semaphore_keys(arg, size: int) -> list[tuple]:
    """The semaphores of a vector of so many, or of a slice of it."""
    key, transforms = arg
    start = 0
    for transform in callbacks._remove_noop_transforms(transforms):
        (index,) = transform.indices
        start, size = start + int(index.start), index.size
    return [_semaphore_key(key, (start + i,)) for i in range(size)]


def semaphore_counts(arg, size: int) -> np.ndarray:
    """The counts of a vector of semaphores, for functions that count by themselves."""
    semaphores = shared_memory_of_run().semaphores
    keys = _semaphore_keys(arg, size)
    return np.array([semaphores[key].count for key in keys], np.int32)


def set_semaphore_counts(arg, counts: np.ndarray) -> None:
    semaphores = shared_memory_of_run().semaphores
    keys = _semaphore_keys(arg, len(counts))
    for key, count in zip(keys, counts, strict=True):
        semaphores[key].count = int(count)


@callbacks.fail_on_exception
def _semaphore_signal(*, token, thread, key, index, increment):
    shared_memory_of_run().signal(thread, _semaphore_key(key, index), int(increment))
    return token


@callbacks.fail_on_exception
def _semaphore_wait(*, token, thread, key, index, value, decrement, where):
    shared_memory_of_run().wait(
        thread, _semaphore_key(key, index), int(value), bool(decrement), where
    )
    return token


def interpret_semaphore_signal(interpreter, eqn, token, invals):
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
        index=_semaphore_index(eqn.invars[0].aval, transforms),
        increment=increment,
    ), []


def interpret_semaphore_wait(interpreter, eqn, token, invals):
    ref, transforms, value, decrement = jax.tree.unflatten(
        eqn.params["args_tree"], invals
    )
    key, transforms = resolve_ref(eqn.invars[0].aval, ref, transforms)
    return interpreter.call(
        functools.partial(_semaphore_wait, where=summary(eqn.source_info)),
        token,
        key=key,
        index=_semaphore_index(eqn.invars[0].aval, transforms),
        value=value,
        decrement=decrement,
    ), []


def interpret_get_global(interpreter, eqn, token, invals):
    """One allocation for each ``get_global`` of the kernel, shared by its blocks."""
    what = eqn.params["what"]
    if not jnp.issubdtype(what.dtype, pallas_core.semaphore_dtype):
        raise NotImplementedError(f"pl.get_global of {what} is not interpreted")
    with shared_memory_of_run().atomic:
        known = current_run().global_buffers
        number = known.setdefault(eqn.outvars[0], 1_000_000 + len(known))
    key = dict.fromkeys(_KEY_FIELDS, -1) | {
        "device_id": interpreter.thread.device_id,
        "buffer_id": number,
    }
    return token, np.array(list(key.values()), np.int32)


# --- wgmma ----------------------------------------------------------------------------


def access_of(shared_memory, key, transforms):
    key = memory.HostAllocationKey.from_array(key)
    transforms = jax.tree.map(int, callbacks._remove_noop_transforms(transforms))
    return key, shared_memory.access(key, transforms)


def accumulate(sums, products):
    """What tensor cores add; a test may replace it by less exact ones."""
    return sums + products


@callbacks.fail_on_exception
def wgmma(*, token, mesh_location, thread, acc, a, b, source_info, a_is_ref):
    shared_memory = shared_memory_of_run()
    info = memory.GPULoggingInfo(mesh_location, thread, source_info)
    get = functools.partial(
        shared_memory.get_buffer_content, thread=thread, logging_info=info
    )
    operands = [access_of(shared_memory, *b)]
    if a_is_ref:
        operands.append(access_of(shared_memory, *a))
    b_value, *rest = [get(key, access)[0] for key, access in operands]
    a_value = rest[0] if a_is_ref else np.asarray(a)
    acc_key, acc_access = access_of(shared_memory, *acc)
    acc_value, _, _ = get(acc_key, acc_access)
    shared_memory.store_buffer_content(
        acc_key,
        acc_access,
        accumulate(acc_value, np.matmul(a_value, b_value, dtype=acc_value.dtype)),
        thread,
        logging_info=info,
    )
    read_by_tensor_cores(shared_memory, thread, operands, source_info)
    return token


def read_by_tensor_cores(shared_memory, thread, operands, source_info):
    """Reads that last until ``wgmma_wait``, for race detection."""
    if not shared_memory.detect_races or not operands:
        return
    # The tensor core reads on its own time, through the async proxy.
    clock = shared_memory.incr_clock(thread)
    clock.inc(shared_memory.get_next_tma_thread_id())
    for key, access in operands:
        callbacks.get_races().check_read(
            thread, clock.async_smem_clock.copy(), key, access, source_info
        )
    shared_memory.pending_wgmma[thread].append(clock)


@callbacks.fail_on_exception
def wgmma_wait(*, token, thread, n):
    shared_memory_of_run().wait_wgmma(thread, n)
    return token


def interpret_wgmma_wait(interpreter, eqn, token, invals):
    return interpreter.call(functools.partial(wgmma_wait, n=eqn.params["n"]), token), []


def interpret_accumulator_store(interpreter, eqn, token, invals):
    """Overwrite an accumulator."""
    return callbacks.call_swap(
        token=token,
        result_shape_and_dtype=eqn.outvars[0].aval,
        mesh_location=interpreter.mesh_location,
        thread=interpreter.thread,
        allocation_key_as_array=invals[0],
        transforms=(),
        val=invals[1],
        mask=None,
        source_info=eqn.source_info,
    )


def interpret_run_state(interpreter, eqn, token, invals):
    """Run a block with accumulators, and what it closes over, as registers."""
    if not all(eqn.params["is_initialized"]):
        raise NotImplementedError("pl.run_state with uninitialized refs")
    place = {
        "mesh_location": interpreter.mesh_location,
        "thread": interpreter.thread,
        "source_info": eqn.source_info,
    }
    is_ref = [isinstance(var.aval, state_types.AbstractRef) for var in eqn.invars]
    keys = []
    for value, ref in zip(invals, is_ref, strict=True):
        if ref:
            keys.append(value)
            continue
        token, request = callbacks.call_make_allocation_request_array(
            token=token,
            compute_unit=interpreter.thread,
            memory_space_id=memory.get_memory_space_idx(gpu_core.MemorySpace.REGS),
        )
        token, key = callbacks.call_allocate_buffer(
            token=token, allocation_request_as_array=request, value=value, **place
        )
        keys.append(key)
    token, _ = interpreter.interpret(eqn.params["jaxpr"], token, *keys)
    token = interpreter.call(functools.partial(wgmma_wait, n=0), token)
    outputs = []
    for var, key, ref in zip(eqn.outvars, keys, is_ref, strict=True):
        if ref:
            outputs.append(key)
            continue
        token, value = callbacks.call_get(
            token=token,
            result_shape_and_dtype=var.aval,
            allocation_key_as_array=key,
            transforms=(),
            **place,
        )
        outputs.append(value)
        token = callbacks.call_deallocate_buffer(
            token=token, allocation_key_as_array=key, **place
        )
    return token, outputs


# --- TMA stores -----------------------------------------------------------------------


class AtomicFrame(str):
    """The source line of a reduction, which does not race with other reductions."""


class ReduceTask(callbacks.AsyncCopySmemToGmemTask):
    """A TMA store that adds to what is there, one element after another."""

    def __call__(self, tma_thread_id: int):
        shared_memory = shared_memory_of_run()
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
        frame = AtomicFrame(summary(self.source_info))
        with races.lock:
            others = [
                *races.reads[key],
                *(w for w in races.writes[key] if not isinstance(w[3], AtomicFrame)),
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


def _check_column(copy: dict) -> None:
    """Refuse stores past the columns of an array that is one line of 128 bytes wide.

    Jax 0.11.2 ignores the column of a line there: what lies past the end would be
    written over what does not.
    """
    shared_memory = shared_memory_of_run()
    dst, access = access_of(
        shared_memory,
        copy["dst_allocation_key_as_array"],
        copy["dst_transforms"],
    )
    shape, dtype = shared_memory.buffer_shape_and_dtype(dst)
    if len(shape) < 2 or len(access.range) != len(shape):
        return
    column = access.range[-1]
    start = column.start if isinstance(column, slice) else column
    if shape[-1] * np.dtype(dtype).itemsize <= 128 and start >= shape[-1]:
        raise IndexError(
            f"store at column {start} of an array of shape {tuple(shape)}, one line "
            "wide: jax ignores the column there; leave the store out"
        )


def _check_start(copy: dict, end: str) -> None:
    """Refuse copies that begin within 16 bytes, at which a GPU stops the kernel."""
    shared_memory = shared_memory_of_run()
    key, access = access_of(
        shared_memory,
        copy[f"{end}_allocation_key_as_array"],
        copy[f"{end}_transforms"],
    )
    shape, dtype = shared_memory.buffer_shape_and_dtype(key)
    if not access.range or len(access.range) != len(shape):
        return
    last = access.range[-1]
    if isinstance(last, slice) and (last.start or 0) * np.dtype(dtype).itemsize % 16:
        raise IndexError(
            f"copy from element {last.start} of the last axis of an array of type "
            f"{np.dtype(dtype)} and shape {tuple(shape)}: a GPU stops the kernel unless"
            " it begins at a multiple of 16 bytes there"
        )


@callbacks.fail_on_exception
def copy_gmem_to_smem(**copy):
    """The stock copy, where it may begin."""
    _check_start(copy, "src")
    return _stock_copy_gmem_to_smem(**copy)


@callbacks.fail_on_exception
def copy_smem_to_gmem(*, token, thread, predicate, reduction_op, **copy):
    """The stock copy, with a predicate and with ``reduction_op="add"``."""
    if predicate is not None and not bool(predicate):
        return token
    _check_column(copy)
    _check_start(copy, "dst")
    if reduction_op is None:
        return _stock_copy_smem_to_gmem(
            token=token, thread=thread, predicate=None, reduction_op=None, **copy
        )
    if reduction_op != "add":
        raise NotImplementedError(f"reduction_op={reduction_op!r} is not interpreted")
    shared_memory = shared_memory_of_run()
    clock = shared_memory.incr_clock(thread) if shared_memory.detect_races else None
    (src, src_access), (dst, dst_access) = (
        access_of(
            shared_memory,
            copy[f"{end}_allocation_key_as_array"],
            copy[f"{end}_transforms"],
        )
        for end in ("src", "dst")
    )
    task = ReduceTask(
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
