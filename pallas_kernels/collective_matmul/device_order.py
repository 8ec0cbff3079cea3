"""A choice that waits for the devices: kernels address peers by their place in a mesh.

A kernel of Pallas that communicates takes the number of a device in the mesh for the
number of the GPU, so the devices of the mesh must be 0, 1, 2, ... in this order. While
a function is traced only sizes and names of the mesh are known; which devices it has
is known when it is lowered. So both forms are traced, and one of them is lowered.

With several processes a kernel reaches the GPUs of its own. For peers in another one
JAX 0.11 has two ways: symmetric memory, whose address Mosaic GPU takes from NVLink
multicast, and NVSHMEM, whose memory the XLA of JAX's wheels cannot allocate. So the
kernel is lowered for the part of the mesh that the process has, and names the places of
these devices. The programs of the processes then differ in these names.
"""

import dataclasses
import logging
import os
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.extend.mlir import ir
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, Mesh

from pallas_kernels.dispatch import Unsupported


logger = logging.getLogger("pallas_kernels")

_logged: set[tuple[str, str]] = set()


def by_device_order(
    op_name: str,
    kernel: ClosedJaxpr,
    portable: ClosedJaxpr | None,
    *arrays: jax.Array,
    axis_name: str,
) -> list[jax.Array]:
    """Computes `kernel` where it reaches its peers, else `portable`.

    Why the kernel does not run is logged once per op, as a warning.

    Args:
        op_name: name of the op, for messages.
        kernel: a traced function, which must mark its outputs as varying itself.
        portable: another one with outputs of the same types; None where there is no
            other way.
        *arrays: the arguments of both.
        axis_name: the mesh axis over which the kernel communicates.

    Returns:
        The result of the chosen function.

    Raises:
        Unsupported: devices are in another order, or those of the axis belong to
            several processes, and `portable` is None. It is raised when the function is
            lowered, before it runs.
    """
    if portable is not None and portable.out_avals != kernel.out_avals:
        raise TypeError(
            f"{op_name}: the kernel returns {kernel.out_avals}, its replacement"
            f" {portable.out_avals}"
        )
    return _by_device_order.bind(
        *arrays,
        op_name=op_name,
        kernel=kernel,
        portable=portable,
        axis_name=axis_name,
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


def _lower(
    context: Any,
    *args: Any,
    op_name: str,
    kernel: Any,
    portable: Any,
    axis_name: str,
) -> Any:
    mesh = getattr(context.module_context.axis_context, "mesh", None)
    reason, part = None, None  # an abstract mesh has no devices
    if isinstance(mesh, Mesh):
        if len({d.process_index for d in mesh.devices.flat}) > 1:
            part = _own_part(mesh, axis_name)
            reason = part if isinstance(part, str) else _tuned_together()
        else:
            reason = _out_of_order(mesh)
    chosen = kernel
    if reason is not None:
        if portable is None:
            raise Unsupported(f"{op_name}: {reason}; use implementation='xla'")
        if (op_name, reason) not in _logged:
            _logged.add((op_name, reason))
            logger.warning("%s runs without the kernel: %s", op_name, reason)
        chosen = portable
    as_traced = context.replace(avals_in=chosen.in_avals)
    if reason is None and isinstance(part, _Part):
        as_traced = as_traced.replace(module_context=part.instead(context))
    results = mlir.lower_fun(jaxpr_as_fun(chosen))(as_traced, *args)
    if as_traced.tokens_out is not None:
        context.set_tokens_out(as_traced.tokens_out)
    if reason is None and isinstance(part, _Part):
        part.name_places(results)
    return results


def _out_of_order(mesh: Mesh) -> str | None:
    """Say what is wrong with the devices of a mesh."""
    ids = mesh.device_ids.ravel()
    if np.array_equal(ids, np.arange(ids.size)):
        return None
    return (
        f"the devices of the mesh are {ids.tolist()}, and kernels that communicate need"
        f" 0 to {ids.size - 1} in order"
    )


_FLAG = "--xla_gpu_shard_autotuning=false"


def _tuned_together() -> str | None:
    """Say what keeps processes from compiling programs that differ."""
    if _FLAG in os.environ.get("XLA_FLAGS", "").split():
        return None
    return (
        "there are several processes, whose programs differ with the kernel, and XLA"
        " would wait for ever for what the others tuned; its flags (XLA_FLAGS) need"
        f" {_FLAG}"
    )


@dataclasses.dataclass(frozen=True)
class _Part:
    """The devices of a mesh that belong to this process."""

    mesh: AbstractMesh
    places: tuple[int, ...]
    """Where they stand in the mesh of all."""

    def instead(self, context: Any) -> Any:
        """The context of a module whose mesh is this part."""
        module = context.module_context
        axes = dataclasses.replace(module.axis_context, mesh=self.mesh)
        return module.replace(axis_context=axes)

    def name_places(self, results: Any) -> None:
        """Name the devices in the kernels of the function that has `results`."""
        function = jax.tree.leaves(results)[0].owner
        while function.parent is not None:
            function = function.parent

        def fill(op: Any) -> Any:
            attributes = op.operation.attributes
            if _CONFIG in attributes:
                found = {entry.name: entry.attr for entry in attributes[_CONFIG]}
                if _PLACES in found and not ir.StringAttr(found[_PLACES]).value:
                    places = ",".join(map(str, self.places))
                    found[_PLACES] = ir.StringAttr.get(places)
                    attributes[_CONFIG] = ir.DictAttr.get(found)
            return ir.WalkResult.ADVANCE

        function.operation.walk(fill)


_CONFIG = "mhlo.backend_config"
_PLACES = "xla_replica_ids"


def _own_part(mesh: Mesh, axis_name: str) -> _Part | str:
    """The part of this process, or what is wrong with it."""
    owners = np.array([d.process_index for d in mesh.devices.flat])
    sizes = set()
    for process in set(owners.tolist()):
        at = np.unravel_index(np.flatnonzero(owners == process), mesh.devices.shape)
        size = tuple(len(set(indices.tolist())) for indices in at)
        ids = mesh.device_ids.ravel()[owners == process]
        whole = np.prod(size) == ids.size and (np.diff(ids) == 1).all()
        sizes.add(size if whole else None)
    own = np.flatnonzero(owners == jax.process_index())
    size = next(iter(sizes))
    if len(sizes) > 1 or size is None or own.size == 0:
        return (
            f"the devices of the mesh are {mesh.device_ids.ravel().tolist()}, in which"
            " those of each process are no equal blocks in order"
        )
    if dict(zip(mesh.axis_names, size, strict=True))[axis_name] < mesh.shape[axis_name]:
        return (
            f"the axis {axis_name!r} has devices of several processes, and kernels"
            f" reach the {own.size} of one; start one process on each host, with all"
            " its GPUs (Slurm: srun --ntasks-per-node=1 --gpus-per-node=8; Open MPI:"
            " mpirun --map-by ppr:1:node; else JAX_NUM_PROCESSES=<hosts>), set"
            f" XLA_FLAGS={_FLAG}, and keep the axis inside a host"
        )
    part = AbstractMesh(size, mesh.axis_names, axis_types=mesh.axis_types)
    return _Part(part, tuple(own.tolist()))


mlir.register_lowering(_by_device_order, _lower)
