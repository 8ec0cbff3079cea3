"""Which implementation computes a collective matrix product here.

Axis letters: B merged leading axes, m rows of a device, M rows of all, K contraction,
N columns, D devices of the axis.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from pallas_kernels import tuning
from pallas_kernels.collective_matmul import mosaic_gpu, xla
from pallas_kernels.collective_matmul.config import (
    CollectiveConfig,
    CollectiveProblem,
    Kind,
    heuristic,
)
from pallas_kernels.collective_matmul.device_order import by_device_order
from pallas_kernels.dispatch import Unsupported, dispatch
from pallas_kernels.mosaic import DeviceSpec, as_varying, check_hopper, varying


__all__ = ["IMPLEMENTATIONS", "OPS", "Call", "problem_of", "run"]

type Arrays = tuple[jax.Array, ...]

OP = "collective_matmul"
"""The name in tables of tuned configs."""
OPS: Mapping[str, Kind] = {
    "all_gather_matmul": "all_gather",
    "matmul_reduce_scatter": "reduce_scatter",
    "matmul_all_reduce": "all_reduce",
}
"""Ops and the kind of communication, as in keys of tuned configs."""

SIZES = (2, 4, 8)
"""Devices of an axis that the kernels are built for."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """What a call of an op asks for, apart from its operands."""

    axis_name: str
    """Mesh axis over which devices communicate."""
    size: int
    """D, devices of that axis."""
    rhs_transposed: bool
    """Weights are stored as [N,K]."""
    out_dtype: Any
    """Type of the products."""
    implementation: str | tuple[str, ...] | None
    """As the caller gave it."""
    config: Any
    """As the caller gave it; gradients look theirs up."""
    device: DeviceSpec | None
    """The GPU that kernels are built for."""
    tracked: bool
    """Types say over which mesh axes arrays vary: `check_vma` of `jax.shard_map`."""
    return_gathered: bool = False
    """The gathered operand is an output."""
    deterministic: bool = True
    """Sums are equal bit for bit between runs."""

    def transposed(self, out_dtype: Any, **changes: Any) -> "Call":
        """The call that multiplies by the transposed weights."""
        return dataclasses.replace(
            self,
            rhs_transposed=not self.rhs_transposed,
            out_dtype=out_dtype,
            config=None,
            **changes,
        )


PREFERRED = ("mosaic_gpu", "xla")
"""What ``implementation=None`` tries, in this order."""


def _without_config(op_name: str, function: Callable[..., Any], name: str) -> Any:
    """An XLA form, which knows no config and needs no permission."""

    @functools.wraps(function)
    def implementation(x: Any, ws: Any, call: Call) -> Any:
        if call.config is not None:
            raise Unsupported(
                f"{op_name}: {name!r} takes no config, got {call.config!r}; pass None"
                " or use implementation='mosaic_gpu'"
            )
        return function(
            x,
            ws,
            axis_name=call.axis_name,
            out_dtype=call.out_dtype,
            rhs_transposed=call.rhs_transposed,
        )

    return implementation


def check_mesh(op_name: str, call: Call) -> DeviceSpec:
    """Checks that a kernel can reach its peers, as far as tracing shows.

    That the devices stand in order shows only when the function is lowered:
    `pallas_kernels.collective_matmul.device_order`.

    Returns:
        The GPU.

    Raises:
        Unsupported: it cannot.
    """
    device = check_hopper(call.device, op_name)
    instead = "use implementation='xla'"
    if (count := jax.process_count()) > 1:
        raise Unsupported(
            f"{op_name}: there are {count} processes, and the kernel addresses GPUs of"
            f" one process; {instead}"
        )
    if call.size not in SIZES:
        raise Unsupported(
            f"{op_name}: axis {call.axis_name!r} has {call.size} devices, expected one"
            f" of {SIZES}; {instead}"
        )
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.are_all_axes_manual:
        others = sorted(set(mesh.axis_names) - set(mesh.manual_axes))
        raise Unsupported(
            f"{op_name}: the compiler divides arrays over axes {others}, and the kernel"
            " addresses GPUs of the entire mesh; make all axes manual"
            " (jax.shard_map without axis_names)"
        )
    return device


def problem_of(op_name: str, x: Any, ws: Arrays, call: Call) -> CollectiveProblem:
    """The problem that an op solves, by which its config is known."""
    xs = (x,) if op_name == "all_gather_matmul" else x
    batch, rows, _ = xs[0].shape
    columns = tuple(w.shape[0 if call.rhs_transposed else 1] for w in ws)
    gathers = op_name == "all_gather_matmul"
    return CollectiveProblem(
        kind=OPS[op_name],
        batch=batch,
        m=rows * call.size if gathers else -(-rows // call.size) * call.size,
        n=columns if gathers else columns[:1],
        k=tuple(x.shape[-1] for x in xs),
        devices=call.size,
        dtype=xs[0].dtype,
        rhs_transposed=call.rhs_transposed,
    )


def _mosaic_gpu(op_name: str, x: Any, ws: Arrays, call: Call) -> Any:
    device = check_mesh(op_name, call)
    problem = problem_of(op_name, x, ws, call)
    config = tuning.lookup(
        OP,
        problem.key,
        device,
        CollectiveConfig,
        config=call.config,
        heuristic=functools.partial(heuristic, problem, device),
    )
    kernel = functools.partial(
        getattr(mosaic_gpu, op_name),
        axis_name=call.axis_name,
        config=config,
        device=device,
        out_dtype=call.out_dtype,
        rhs_transposed=call.rhs_transposed,
    )
    if op_name == "matmul_all_reduce" and not config.one_shot:
        kernel = _with_padded_rows(kernel, call.size)
    portable = _after("mosaic_gpu", op_name, call)
    axes = varying(*jax.tree.leaves((x, ws)))
    if op_name == "matmul_all_reduce":
        axes -= {call.axis_name}

    def marked(x: Any, ws: Arrays) -> Any:
        return jax.tree.map(lambda y: as_varying(y, axes), kernel(x, ws))

    product = custom_vmap(functools.partial(by_device_order, op_name, marked, portable))
    product.def_vmap(functools.partial(_batched, op_name, call))
    return product(x, ws)


def _after(name: str, op_name: str, call: Call) -> Callable[..., Any] | None:
    """The implementation that the caller would have next, if any."""
    names = PREFERRED if call.implementation is None else call.implementation
    if isinstance(names, str) or names[-1] == name or call.config is not None:
        return None
    implementation = IMPLEMENTATIONS[op_name][names[names.index(name) + 1]]
    return lambda x, ws: implementation(x, ws, call)


def _batched(
    op_name: str, call: Call, size: int, batched: Any, x: Any, ws: Arrays
) -> tuple[Any, Any]:
    """`jax.vmap` of a kernel: more leading axes, or one call after the other."""
    x_batched, w_batched = (jax.tree.leaves(flags) for flags in batched)
    if any(w_batched) or not all(x_batched):
        flags = jax.tree.leaves(batched)
        leaves, structure = jax.tree.flatten((x, ws))
        mapped = [a for a, flag in zip(leaves, flags, strict=True) if flag]

        def one(mapped: list[jax.Array]) -> Any:
            rest = iter(mapped)
            own = [next(rest) if f else a for a, f in zip(leaves, flags, strict=True)]
            own_x, own_ws = structure.unflatten(own)
            return run(op_name, own_x, own_ws, call)

        outputs = lax.map(one, mapped)
    else:
        merged = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), x)
        outputs = jax.tree.map(
            lambda y: y.reshape(size, -1, *y.shape[1:]), run(op_name, merged, ws, call)
        )
    return outputs, jax.tree.map(lambda _: True, outputs)


def _with_padded_rows(kernel: Callable[..., Any], size: int) -> Callable[..., Any]:
    """An all-reduce whose devices each reduce a whole number of rows."""

    def padded(xs: Arrays, ws: Arrays) -> jax.Array:
        rows = xs[0].shape[1]
        more = -rows % size
        return kernel(tuple(jnp.pad(x, ((0, 0), (0, more), (0, 0))) for x in xs), ws)[
            :, :rows
        ]

    return padded


IMPLEMENTATIONS: Mapping[str, Mapping[str, Callable[[Any, Any, Call], Any]]] = {
    op_name: {
        "mosaic_gpu": functools.partial(_mosaic_gpu, op_name),
        "xla": _without_config(op_name, getattr(xla, op_name), "xla"),
        "xla_ring": _without_config(
            op_name, getattr(xla, f"ring_{op_name}"), "xla_ring"
        ),
    }
    for op_name in OPS
}
"""Op and name to implementation."""


def run(op_name: str, x: Any, ws: tuple[jax.Array, ...], call: Call) -> Any:
    """Computes an op without its gradient rule.

    Args:
        op_name: one of `OPS`.
        x: [B,m,K], or of reductions a tuple of [B,M,K_i].
        ws: a tuple of weights.
        call: the rest.

    Returns:
        As the functions of `pallas_kernels.collective_matmul.xla`.
    """
    implementations = IMPLEMENTATIONS[op_name]
    if call.implementation is None:
        implementations = {name: implementations[name] for name in PREFERRED}

    def declines() -> str | None:
        problem = problem_of(op_name, x, ws, call)
        return tuning.declines(OP, problem, call.device, call.config)

    return dispatch(
        op_name,
        implementations,
        call.implementation,
        x,
        ws,
        call,
        declines={"mosaic_gpu": declines},
    )
