"""Low-latency all-reduce of the few tokens of a decode step, without a barrier per sum.

A row-parallel matmul ends in an all-reduce over the tensor axis: two per layer and
token. XLA's all-reduce takes longer to start than to run.
`pallas_kernels.collective_matmul.all_reduce` has one that starts at once, in memory
that all sums of a program share, one after the other: a `ReduceWorkspace`, made by
`begin`.

It is passed from layer to layer in the attention state (`PagedRows.workspace`), as the
pages are. Within a block, whose layers are functions of activations alone,
`reduce_through` holds it while the block is traced: `sum_over_devices` takes it, and
leaves what the next sum takes.

Legend: D devices, B batch, T tokens of a sequence, N features.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator
from typing import Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxscale.sharding.rules import AxisRules
from pallas_kernels.collective_matmul.all_reduce import (
    AllReduceWorkspace,
    low_latency_all_reduce,
    make_all_reduce_workspace,
    was_faster,
)
from pallas_kernels.dispatch import Unsupported, dispatch
from pallas_kernels.mosaic import DeviceSpec, check_hopper


type AllReduce = Literal["xla", "low_latency"] | None
"""All-reduce of a decode step: XLA's, our kernel, or None for the faster one;
see `Sums.choose`."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ReduceWorkspace:
    """The state that the sums of a program pass on, each to the next."""

    workspace: AllReduceWorkspace
    """The memory of all devices, split along the first dimension."""
    axis: str = dataclasses.field(metadata={"static": True})
    """The mesh axis of the sums."""

    def takes(self, parts: Float[Array, "D B T N"]) -> bool:
        """Whether `parts` can be summed in this workspace."""
        mesh = jax.sharding.get_abstract_mesh()
        cells = self.workspace.cells.shape  # [2 of each device, D, chunks, 512]
        return (
            parts.dtype in (jnp.bfloat16, jnp.float16)
            and parts.shape[0] == mesh.shape.get(self.axis)
            and 0 < parts[0].size <= cells[2] * cells[3]
        )


class _Held:
    """The current workspace while a block is traced."""

    def __init__(self, workspace: ReduceWorkspace | None) -> None:
        self.workspace = workspace


_held: contextvars.ContextVar[_Held] = contextvars.ContextVar("held")


def current() -> ReduceWorkspace | None:
    """The workspace for the next sum; None if XLA sums."""
    held = _held.get(None)
    return None if held is None else held.workspace


@contextlib.contextmanager
def reduce_through(workspace: ReduceWorkspace | None) -> Iterator[_Held]:
    """Let the sums inside use `workspace`; the yielded object holds it afterwards.

    With None XLA sums.
    """
    held = _Held(workspace)
    token = _held.set(held)
    try:
        yield held
    finally:
        _held.reset(token)


def sum_over_devices(parts: Float[Array, "D B T N"]) -> Float[Array, "B T N"]:
    """All-reduce the parts of the devices of the tensor axis."""
    given = current()
    if given is None or not given.takes(parts):
        return parts.sum(0)
    everywhere = PartitionSpec(jax.sharding.get_abstract_mesh().axis_names)
    axis = given.axis

    def local(
        part: Array, workspace: AllReduceWorkspace
    ) -> tuple[Array, AllReduceWorkspace]:
        return low_latency_all_reduce(part[0], workspace, axis_name=axis)

    total, workspace = jax.shard_map(
        local,
        in_specs=(PartitionSpec(axis), everywhere),
        out_specs=(PartitionSpec(), everywhere),
        check_vma=False,
    )(parts, given.workspace)
    _held.get().workspace = ReduceWorkspace(workspace, axis)
    return total


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sums:
    """The sums of a program that use `low_latency_all_reduce`."""

    axis: str
    """The mesh axis."""
    elements: int
    """Maximum number of elements of a sum."""
    dtype: jnp.dtype
    """Type of the numbers: bfloat16 or float16."""
    device: DeviceSpec
    """The GPUs."""

    @classmethod
    def choose(
        cls,
        all_reduce: AllReduce,
        mesh: Mesh | None,
        rules: AxisRules,
        *,
        elements: int,
        dtype: DTypeLike,
        needed: Callable[["Sums"], bool] = lambda sums: False,
    ) -> "Sums | None":
        """Choose what sums the tokens of a program; None is XLA.

        Args:
            all_reduce: The caller's choice. None takes our kernel where measured decode
                steps are faster with it, and where it is `needed`.
            mesh: The devices of the program; None is a single one.
            rules: Mesh axes of each logical axis.
            elements: Maximum number of elements of a sum.
            dtype: Type of the computation.
            needed: Whether the program has kernels that add in our workspace.

        Raises:
            ValueError: `all_reduce` is unknown.
            Unsupported: ``"low_latency"`` does not run on these devices.
        """

        def kernel() -> Sums:
            kind = jnp.dtype(dtype)
            device = check_hopper(DeviceSpec.current(), "all_reduce")
            axis = _axis(mesh, rules, kind)
            return cls(axis=axis, elements=elements, dtype=kind, device=device)

        def declines() -> str | None:
            sums = kernel()
            devices = 1 if mesh is None else mesh.shape[sums.axis]
            if was_faster(elements, devices, sums.device) or needed(sums):
                return None
            return (
                f"sums of {elements} numbers over {devices} devices were not measured"
                f" to be faster on {sums.device.name}"
            )

        return dispatch(
            "all_reduce",
            {"low_latency": kernel, "xla": lambda: None},
            all_reduce,
            declines={"low_latency": declines},
        )

    def begin(self) -> ReduceWorkspace:
        """The workspace of a program, on whose mesh this is called (`jax.set_mesh`).

        It costs one barrier between the devices.
        """
        everywhere = PartitionSpec(jax.sharding.get_abstract_mesh().axis_names)

        def local() -> AllReduceWorkspace:
            return make_all_reduce_workspace(
                self.elements, self.dtype, axis_name=self.axis, device=self.device
            )

        make = jax.shard_map(local, in_specs=(), out_specs=everywhere, check_vma=False)
        return ReduceWorkspace(make(), self.axis)


def _axis(mesh: Mesh | None, rules: AxisRules, dtype: jnp.dtype) -> str:
    """The mesh axis of sums of our own."""
    axes = rules.mesh_axes(["heads"]) | rules.mesh_axes(["mlp"])
    if mesh is None or all(mesh.shape.get(axis, 1) == 1 for axis in axes):
        missing = "a model that is split over several devices"
    elif len(axes) > 1:
        missing = f"rules that split a model over one mesh axis, got {sorted(axes)}"
    elif dtype not in (jnp.bfloat16, jnp.float16):
        missing = f"a model in bfloat16 or float16, got {dtype}"
    elif len({d.process_index for d in mesh.devices.flat}) > 1:
        missing = "devices of one process"
    elif (ids := [d.id for d in mesh.devices.flat]) != [*range(len(ids))]:
        missing = f"a mesh of the devices 0, 1, ... in this order, got {ids}"
    else:
        return next(iter(axes))
    raise Unsupported(f"all_reduce: 'low_latency' needs {missing}; use 'xla' or None")
