"""Numpy stand-ins for ``inline_mgpu`` functions."""

import dataclasses
import inspect
from collections.abc import Callable

import jax
import numpy as np
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks as callbacks
from jax._src.pallas.mosaic_gpu.interpret import shared_memory as memory

from tests.interpreter.devices import shared_memory_of_run
from tests.interpreter.operations import access_of


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


def find_stand_in(function) -> StandIn:
    qualified = f"{function.__module__}.{function.__qualname__}"
    for name in (qualified, function.__qualname__.rsplit(".", 1)[-1]):
        if name in _stand_ins:
            return _stand_ins[name]
    raise NotImplementedError(
        f"no stand-in for the inline_mgpu function {qualified}; call "
        "tests.interpreter.register_inline with its name"
    )


@callbacks.fail_on_exception
def inline(*, token, mesh_location, thread, args, is_ref, eqn):
    stand_in, function = (
        find_stand_in(eqn.params["mgpu_fn"]),
        eqn.params["mgpu_fn"],
    )
    shared_memory, races = shared_memory_of_run(), callbacks.get_races()
    info = memory.GPULoggingInfo(mesh_location, thread, eqn.source_info)
    values, refs = [], {}
    for i, (arg, ref) in enumerate(zip(args, is_ref, strict=True)):
        if not ref:
            values.append(np.asarray(arg))
            continue
        refs[i] = key, access = access_of(shared_memory, *arg)
        value, _, clock = shared_memory.get_buffer_content(
            key, access, thread, logging_info=info
        )
        if clock is not None and i not in stand_in.writes:
            races.check_read(thread, clock.generic_clock, key, access, eqn.source_info)
        values.append(value)
    extra = {}
    if "closure" in inspect.signature(stand_in.function).parameters:
        # The run-time type checker wraps functions, nested ones too.
        inner = inspect.unwrap(function)
        extra["closure"] = dict(inspect.getclosurevars(inner).nonlocals)
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
