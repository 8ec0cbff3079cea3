"""Device meshes with the five axes that every recipe of jaxscale uses.

The axes are ordered by the bandwidth that they need, least first. Neighboring devices
of one host share the last axis, so `tensor`, which communicates in every layer, runs
over the fastest links, and `pipe`, which sends one activation per microbatch, over the
slowest. `context` is next to `tensor`: it gathers keys and values in every layer, a
part of what `tensor` moves. `data` comes after `pipe`: it all-reduces all gradients,
but only once a step. This is the order of MegaScale (arXiv 2402.15627) and of `jaxscale
plan`.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
from jax.sharding import AxisType, Mesh

from jaxscale.checks import check_choice
from jaxscale.keywords import explain_keywords, explained, meant


MESH_AXES = ("pipe", "data", "fsdp", "context", "tensor")
"""The axes of every mesh, slowest links first."""

_AXIS_TYPES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}


@explained
@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Sizes of the mesh axes; their product is the number of devices.

    Example:
        >>> MeshConfig(fsdp=-1, tensor=2).sizes(8)
        {'pipe': 1, 'data': 1, 'fsdp': 4, 'context': 1, 'tensor': 2}
    """

    pipe: int = 1
    """Pipeline-parallel stages; -1 for all remaining devices."""
    data: int = 1
    """Data-parallel replicas of the model; -1 for all remaining devices."""
    fsdp: int = 1
    """FSDP shards of the parameters, also data-parallel; -1 for all remaining
    devices."""
    context: int = 1
    """Context-parallel shards of each training sequence; -1 for all remaining
    devices."""
    tensor: int = 1
    """Tensor-parallel shards of heads and hidden features, with sequence parallelism;
    -1 for all remaining devices."""
    axis_type: Literal["auto", "explicit"] = "auto"
    """Kind of `jax.sharding` axes: auto (the compiler propagates shardings) or explicit
    (array types carry them)."""

    def __post_init__(self) -> None:
        """Check what can be checked without devices."""
        sizes = {axis: getattr(self, axis) for axis in MESH_AXES}
        for axis, size in sizes.items():
            if not isinstance(size, int) or (size < 1 and size != -1):
                raise ValueError(
                    f"mesh axis {axis} has size {size!r}, expected at least 1, or -1 "
                    "for all devices that the other axes leave"
                )
        rest = [axis for axis, size in sizes.items() if size == -1]
        if len(rest) > 1:
            raise ValueError(
                f"mesh axes {' and '.join(rest)} are both -1, expected at most one; "
                "give all but one of them a size"
            )
        check_choice("axis_type", self.axis_type, sorted(_AXIS_TYPES))

    def sizes(self, num_devices: int) -> dict[str, int]:
        """The size of each axis on `num_devices` devices, with -1 filled in.

        Raises:
            ValueError: the sizes do not multiply to `num_devices`.
        """
        sizes = {axis: getattr(self, axis) for axis in MESH_AXES}
        written = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
        fixed = math.prod(size for size in sizes.values() if size != -1)
        if fixed > num_devices:
            raise ValueError(
                f"the mesh {written} needs {fixed} devices, but there are "
                f"{num_devices}; make an axis smaller, start more hosts, or simulate "
                f"devices on a CPU with JAX_NUM_CPU_DEVICES={fixed}"
            )
        rest = [axis for axis, size in sizes.items() if size == -1]
        if rest and num_devices % fixed == 0:
            return sizes | {rest[0]: num_devices // fixed}
        if rest:
            raise ValueError(
                f"the mesh {written} leaves no whole number for {rest[0]}: "
                f"{num_devices} devices are not divisible by {fixed}; change the "
                "other axes"
            )
        if fixed != num_devices:
            raise ValueError(
                f"the mesh {written} uses {fixed} of {num_devices} devices; set one "
                "axis to -1 to use all, or pass make_mesh the devices to use, for "
                f"example devices=jax.devices()[:{fixed}]"
            )
        return sizes


@explain_keywords
def make_mesh(
    config: MeshConfig | Mapping[str, Any], devices: Sequence[Any] | None = None
) -> Mesh:
    """A mesh with the axes of `MESH_AXES`, in this order.

    Axes of size one cost nothing, so rules may name any of them on every mesh.

    Args:
        config: The sizes of the axes, as a `MeshConfig` or a mapping of its fields.
        devices: The `jax.Device` objects to use; by default all of all processes.

    Raises:
        ValueError: sizes have no names, an axis is unknown, or the sizes do not fit the
            devices.

    Example:
        >>> import jax
        >>> mesh = make_mesh({"fsdp": 2, "tensor": -1}, jax.devices()[:4])
        >>> dict(mesh.shape)
        {'pipe': 1, 'data': 1, 'fsdp': 2, 'context': 1, 'tensor': 2}
    """
    if not isinstance(config, MeshConfig | Mapping):
        raise ValueError(
            f"config {config!r}, expected the sizes of axes by their names, such as "
            f"{{'fsdp': 2, 'tensor': 2}}, or a MeshConfig; the axes are {MESH_AXES}"
        )
    if not isinstance(config, MeshConfig):
        fields = {field.name for field in dataclasses.fields(MeshConfig)}
        unknown = sorted(set(config) - fields)
        if unknown:
            raise ValueError(
                f"mesh axis {unknown[0]!r} is unknown{meant(unknown[0], MESH_AXES)}; "
                f"use some of {MESH_AXES}"
            )
        config = MeshConfig(**config)
    devices = jax.devices() if devices is None else devices
    sizes = config.sizes(len(devices))
    return jax.make_mesh(
        tuple(sizes.values()),
        tuple(sizes),
        axis_types=(_AXIS_TYPES[config.axis_type],) * len(sizes),
        devices=devices,
    )
