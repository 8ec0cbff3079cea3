"""A choice that waits for the devices: kernels address peers by their place in a mesh.

A kernel of Pallas that communicates takes the number of a device in the mesh for the
number of the GPU, so the devices of the mesh must be 0, 1, 2, ... in this order. While
a function is traced only sizes and names of the mesh are known; which devices it has
is known when it is lowered. So both forms are traced, and one of them is lowered.
"""

import logging
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import mlir
from jax.sharding import Mesh

from pallas_kernels.dispatch import Unsupported


__all__ = ["by_device_order"]

logger = logging.getLogger("pallas_kernels")

_logged: set[tuple[str, str]] = set()


def by_device_order(
    op_name: str,
    kernel: ClosedJaxpr,
    portable: ClosedJaxpr | None,
    *arrays: jax.Array,
) -> list[jax.Array]:
    """Computes `kernel` where devices stand in order, else `portable`.

    Why the kernel does not run is logged once per op.

    Args:
        op_name: name of the op, for messages.
        kernel: a traced function, which must mark its outputs as varying itself.
        portable: another one with outputs of the same types; None where there is no
            other way.
        *arrays: the arguments of both.

    Returns:
        The result of the chosen function.

    Raises:
        Unsupported: devices are in another order and `portable` is None. It is raised
            when the function is lowered, before it runs.
    """
    if portable is not None and portable.out_avals != kernel.out_avals:
        raise TypeError(
            f"{op_name}: the kernel returns {kernel.out_avals}, its replacement"
            f" {portable.out_avals}"
        )
    return _by_device_order.bind(
        *arrays, op_name=op_name, kernel=kernel, portable=portable
    )


_by_device_order = Primitive("by_device_order")
_by_device_order.multiple_results = True


@_by_device_order.def_impl
def _run(*args: Any, **params: Any) -> Any:
    return jax.jit(lambda *args: _by_device_order.bind(*args, **params))(*args)


@_by_device_order.def_effectful_abstract_eval
def _types(*_: Any, kernel: Any, portable: Any, **__: Any) -> Any:
    effects = kernel.effects | (portable.effects if portable else frozenset())
    return kernel.out_avals, effects


def _lower(context: Any, *args: Any, op_name: str, kernel: Any, portable: Any) -> Any:
    reason = _out_of_order(context)
    chosen = kernel
    if reason is not None:
        if portable is None:
            raise Unsupported(f"{op_name}: {reason}; use implementation='xla'")
        if (op_name, reason) not in _logged:
            _logged.add((op_name, reason))
            logger.info("%s runs without the kernel: %s", op_name, reason)
        chosen = portable
    as_traced = context.replace(avals_in=chosen.in_avals)
    results = mlir.lower_fun(jaxpr_as_fun(chosen))(as_traced, *args)
    if as_traced.tokens_out is not None:
        context.set_tokens_out(as_traced.tokens_out)
    return results


def _out_of_order(context: Any) -> str | None:
    """Say what is wrong with the devices of a mesh; an abstract mesh has none."""
    mesh = getattr(context.module_context.axis_context, "mesh", None)
    if not isinstance(mesh, Mesh):
        return None
    ids = mesh.device_ids.ravel()
    if np.array_equal(ids, np.arange(ids.size)):
        return None
    return (
        f"the devices of the mesh are {ids.tolist()}, and kernels that communicate need"
        f" 0 to {ids.size - 1} in order"
    )


mlir.register_lowering(_by_device_order, _lower)
