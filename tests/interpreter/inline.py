"""Numpy stand-ins for ``inline_mgpu`` functions."""

import contextlib
import dataclasses
import inspect
import time
from collections.abc import Callable

import jax
import numpy as np
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks as callbacks
from jax._src.pallas.mosaic_gpu.interpret import shared_memory as memory

from tests.interpreter.devices import inner_part, shared_memory_of_run, summary
from tests.interpreter.operations import (
    access_of,
    read_by_tensor_cores,
    semaphore_counts,
    set_semaphore_counts,
)
from tests.interpreter.run import current_run


@dataclasses.dataclass(frozen=True)
class StandIn:
    """What runs in place of an ``inline_mgpu`` function."""

    function: Callable
    writes: tuple[int, ...]
    part: Callable | None = None
    flags: tuple[int, ...] = ()
    wgmma: bool = False


class NotYet(Exception):
    """What a stand-in raises that waits for other numbers in its flags."""


def _raise_counter(counter):
    counter += 1


def _await_at_least(counter, closure):
    if counter[0] < closure["value"]:
        raise NotYet


def _await_by_warp(counter, value):
    if counter[0] < value:
        raise NotYet


def _clear_by_lanes(counters):
    counters[:] = 0


def _toggle_number(number):
    number[:] = 1 - number


_stand_ins: dict[str, StandIn] = {
    # Fences order accesses that the interpreter already makes in order.
    "proxy_fence": StandIn(lambda: (), (), None),
    "wgmma_fence": StandIn(lambda: (), (), None),
    # So do hints.
    "read_once": StandIn(lambda source: (), (), None),
    "prefetch_row": StandIn(lambda source: (), (), None),
    "raise_counter": StandIn(_raise_counter, (0,), flags=(0,)),
    "await_at_least": StandIn(_await_at_least, (), flags=(0,)),
    "await_at_least_some": StandIn(_await_by_warp, (), flags=(0,)),
    "raise_by_lane": StandIn(_raise_counter, (0,), flags=(0,)),
    "await_by_warp": StandIn(_await_by_warp, (), flags=(0,)),
    "clear_by_lanes": StandIn(_clear_by_lanes, (0,)),
    "toggle_number": StandIn(_toggle_number, (0,)),
}


def register_inline(
    name: str,
    function: Callable,
    *,
    writes: tuple[int, ...] = (),
    part: Callable | None = None,
    flags: tuple[int, ...] = (),
    wgmma: bool = False,
):
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
            Writing any other has no effect. A ref of semaphores is their counts.
        part: Which part of the refs it writes, a tuple of slices, from the same
            arguments; None is all. What it leaves alone may be written by others.
        flags: Positions of refs through which threads tell each other something. They
            race with nothing; what was done before such a ref was written is done for
            who has read it. The function may raise `NotYet` to be called again when
            one of them has changed.
        wgmma: It starts instructions of tensor cores, or loads what these take from
            registers: it reads its refs until a ``wgmma_wait``.

    Raises:
        ValueError: If another function is registered under the name.
    """
    stand_in = StandIn(function, tuple(writes), part, tuple(flags), wgmma)
    if _stand_ins.setdefault(name, stand_in) != stand_in:
        raise ValueError(
            f"name {name!r} already stands for {_stand_ins[name]}; rename the inline "
            "function or register its qualified name"
        )


def unregister_inline(name: str) -> None:
    """Undo :func:`register_inline`."""
    del _stand_ins[name]


def find_stand_in(function) -> StandIn:
    qualified = f"{function.__module__}.{function.__qualname__}"
    for name in (qualified, function.__qualname__.rsplit(".", 1)[-1]):
        if name in _stand_ins:
            return _stand_ins[name]
    raise NotImplementedError(
        f"no stand-in for the inline_mgpu function {qualified}; call "
        "tests.interpreter.register_inline with its name"
    )


def part_of(access, part: tuple[slice, ...]):
    """The access to a part of a window."""
    if access.permutation is not None:
        raise NotImplementedError("a part of a transposed ref")
    parts = iter(part)
    window = tuple(
        slice(index.start + within.start, index.start + within.stop)
        if isinstance(index, slice) and (within := next(parts, None)) is not None
        else index
        for index in access.range
    )
    return dataclasses.replace(access, range=window)


@callbacks.fail_on_exception
def inline(*, token, mesh_location, thread, args, is_ref, counts, eqn):
    # What counts by itself does so at once.
    at_once = any(counts) or bool(find_stand_in(eqn.params["mgpu_fn"]).flags)

    def attempt():
        atomic = shared_memory_of_run().atomic
        with atomic if at_once else contextlib.nullcontext():
            return _inline(mesh_location, thread, args, is_ref, counts, eqn)

    what = f"inline_mgpu at {summary(eqn.source_info)} on {thread}"
    return token, _when_ready(attempt, what)


def _when_ready(attempt: Callable, what: str):
    """What ``attempt`` returns once it does not ask to be called again."""
    shared_memory, timeout = shared_memory_of_run(), current_run().timeout
    deadline = time.monotonic() + timeout
    while True:
        with contextlib.suppress(NotYet):
            return attempt()
        shared_memory.check_failed()
        with shared_memory.semaphore_changed:
            # Short, since it may have changed in between.
            shared_memory.semaphore_changed.wait(0.01)
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} waited {timeout} s for its flags")


def _flag(key, access) -> tuple:
    """The name of the clock of a flag."""
    return "flag", key, repr(access.range)


def _inline(mesh_location, thread, args, is_ref, counts, eqn):
    stand_in, function = (
        find_stand_in(eqn.params["mgpu_fn"]),
        eqn.params["mgpu_fn"],
    )
    shared_memory, races = shared_memory_of_run(), callbacks.get_races()
    info = memory.GPULoggingInfo(mesh_location, thread, eqn.source_info)
    values, refs, reads = [], {}, []
    for i, (arg, ref) in enumerate(zip(args, is_ref, strict=True)):
        if not ref:
            values.append(np.asarray(arg))
            continue
        if counts[i]:
            values.append(semaphore_counts(arg, counts[i]))
            continue
        refs[i] = key, access = access_of(shared_memory, *arg)
        value, (_, dtype), clock = shared_memory.get_buffer_content(
            key, access, thread, logging_info=info
        )
        if value is None or value.shape != access.shape:  # reaches past the end
            value = callbacks._pad_to_requested(value, access.shape, dtype, 0)
        if stand_in.wgmma:
            reads.append((key, access))
        elif clock is not None and i not in (*stand_in.writes, *stand_in.flags):
            races.check_read(thread, clock.generic_clock, key, access, eqn.source_info)
        values.append(value)
    read_by_tensor_cores(shared_memory, thread, reads, eqn.source_info)
    extra = {}
    if "closure" in inspect.signature(stand_in.function).parameters:
        # The run-time type checker wraps functions, nested ones too.
        inner = inspect.unwrap(function)
        extra["closure"] = dict(inspect.getclosurevars(inner).nonlocals)
    result = stand_in.function(
        *jax.tree.unflatten(eqn.params["pytree_args"], values), **extra
    )
    for i in stand_in.flags:
        where = summary(eqn.source_info)
        shared_memory.wait(thread, _flag(*refs[i]), 0, decrement=False, where=where)
    for i in stand_in.writes:
        if counts[i]:
            set_semaphore_counts(args[i], values[i])
            continue
        key, access = refs[i]
        shape, _ = shared_memory.buffer_shape_and_dtype(key)
        if stand_in.part is not None:
            part = stand_in.part(*jax.tree.unflatten(eqn.params["pytree_args"], values))
            access = part_of(access, part)
            values[i] = values[i][part]
        inside, cut = inner_part(access.range, tuple(shape))
        if inside is None:
            continue
        access = dataclasses.replace(access, range=inside)
        _, _, clock = shared_memory.store_buffer_content(
            key, access, values[i][cut], thread, logging_info=info
        )
        if i in stand_in.flags:
            shared_memory.signal(thread, _flag(key, access), 1)
        elif clock is not None:
            races.check_write(thread, clock.generic_clock, key, access, eqn.source_info)
    return [
        np.asarray(leaf, kind.dtype).reshape(kind.shape)
        for leaf, kind in zip(
            jax.tree.leaves(result), eqn.params["flat_ret_ty"], strict=True
        )
    ]
