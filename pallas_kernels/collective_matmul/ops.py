"""The three collective matmuls: their implementations and gradients.

Each is an `Op`, a record of the functions that implement it; `run` picks one of them.
After it come the wrappers of the kernel, and at the end the gradient rules. The
gradient of an all-gather is a reduce-scatter over the same devices, and vice versa, so
the backward pass communicates through the same implementations.

Axis letters: B merged leading axes, m rows of a device, M rows of all, K contraction,
N columns, D devices of the axis.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_batching import custom_vmap

from pallas_kernels import tuned_configs
from pallas_kernels.collective_matmul import (
    mosaic_gpu_gather,
    mosaic_gpu_reduce,
    xla,
)
from pallas_kernels.collective_matmul.config import (
    Call,
    CollectiveConfig,
    CollectiveProblem,
    Kind,
    heuristic,
)
from pallas_kernels.collective_matmul.device_order import by_device_order
from pallas_kernels.dispatch import Unsupported, dispatch, no_config
from pallas_kernels.matmul.api import run as run_local
from pallas_kernels.mosaic import DeviceSpec, as_varying, check_hopper, varying


type Arrays = tuple[jax.Array, ...]
type Operands = tuple[Any, ...]
"""Arrays or `ScaledArray`s."""
type Implementation = Callable[[Any, Any, Call], Any]

TABLE = "collective_matmul"
"""The name in tables of tuned configs."""

SIZES = (2, 4, 8)
"""Devices of an axis that the kernels are built for."""

PREFERRED = ("mosaic_gpu", "xla")
"""Implementations that ``implementation=None`` tries, in this order."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Op:
    """A collective matmul and its implementations.

    An all-gather takes x [B,m,K] and returns ``(results, gathered x or None)``; a
    reduction takes a tuple of x [B,M,K_i] and returns one sum.
    """

    name: str
    """Name of the public function."""
    kind: Kind
    """Pattern of communication, as in keys of tuned configs."""
    kernel: Callable[..., Any]
    """``(x, ws, call, config, device)``, for Hopper."""
    xla: Implementation
    """A collective and a matmul, one after the other."""
    xla_ring: Implementation | None = None
    """A ring, with one step per device."""

    @property
    def implementations(self) -> Mapping[str, Implementation]:
        """Implementations of the op, by name."""
        found: dict[str, Implementation] = {
            "mosaic_gpu": functools.partial(_run_kernel, self)
        }
        for name, form in (("xla", self.xla), ("xla_ring", self.xla_ring)):
            if form is not None:
                found[name] = functools.partial(_run_portable, self, name, form)
        return found


ALL_GATHER = Op(
    name="all_gather_matmul",
    kind="all_gather",
    kernel=mosaic_gpu_gather.all_gather_matmul,
    xla=xla.all_gather_matmul,
    xla_ring=xla.ring_all_gather_matmul,
)
REDUCE_SCATTER = Op(
    name="matmul_reduce_scatter",
    kind="reduce_scatter",
    kernel=mosaic_gpu_reduce.matmul_reduce_scatter,
    xla=xla.matmul_reduce_scatter,
    xla_ring=xla.ring_matmul_reduce_scatter,
)
ALL_REDUCE = Op(
    name="matmul_all_reduce",
    kind="all_reduce",
    kernel=mosaic_gpu_reduce.matmul_all_reduce,
    xla=xla.matmul_all_reduce,
    xla_ring=xla.ring_matmul_all_reduce,
)
OPS = (ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE)


def run(op: Op, x: Any, ws: Operands, call: Call) -> Any:
    """Computes an op without its gradient rule.

    Args:
        op: one of `OPS`.
        x: [B,m,K], or of reductions a tuple of [B,M,K_i].
        ws: a tuple of weights.
        call: the rest.

    Returns:
        The result of the function of `pallas_kernels.collective_matmul.xla`.
    """
    implementations = op.implementations
    if call.implementation is None:
        implementations = {name: implementations[name] for name in PREFERRED}

    def declines() -> str | None:
        problem = CollectiveProblem.of(op.kind, x, ws, call)
        return tuned_configs.declines(TABLE, problem, call.device, call.config)

    return dispatch(
        op.name,
        implementations,
        call.implementation,
        x,
        ws,
        call,
        declines={"mosaic_gpu": declines},
    )


def _run_portable(
    op: Op, name: str, form: Implementation, x: Any, ws: Operands, call: Call
) -> Any:
    """An XLA implementation, which takes no config."""
    no_config(op.name, call.config, repr(name))
    return form(x, ws, call)


# --- The kernel -----------------------------------------------------------------------


def _run_kernel(op: Op, x: Any, ws: Operands, call: Call) -> Any:
    device = check_mesh(op.name, call)
    problem = CollectiveProblem.of(op.kind, x, ws, call)
    config = tuned_configs.lookup(
        TABLE,
        problem.key,
        device,
        CollectiveConfig,
        config=call.config,
        heuristic=functools.partial(heuristic, problem, device),
    )
    axes = varying(*jax.tree.leaves((x, ws)))
    if op is ALL_REDUCE:
        axes -= {call.axis_name}

    def kernel(x: Any, ws: Operands) -> Any:
        outputs = op.kernel(x, ws, call, config, device)
        return jax.tree.map(lambda y: as_varying(y, axes), outputs)  # it lost the marks

    def product(x: Any, ws: Operands) -> Any:
        # jax 0.11.2 refuses kernels that run warps of their own on operands whose types
        # say over which mesh axes they vary, so the kernel is traced without.
        types = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (x, ws))
        fused, outputs = jax.make_jaxpr(kernel, return_shape=True)(*types)
        following = _after("mosaic_gpu", op, call)
        other = None if following is None else jax.make_jaxpr(following)(x, ws)
        leaves = by_device_order(
            op.name,
            fused,
            other,
            *jax.tree.leaves((x, ws)),
            axis_name=call.axis_name,
        )
        return jax.tree.unflatten(jax.tree.structure(outputs), leaves)

    mapped = custom_vmap(product)
    mapped.def_vmap(functools.partial(_batched, op, call))
    return mapped(x, ws)


def check_mesh(name: str, call: Call) -> DeviceSpec:
    """Checks that a kernel can reach its peers, as far as is known at trace time.

    The order of the devices and their processes are known only when the function is
    lowered: see `pallas_kernels.collective_matmul.device_order`.

    Returns:
        The GPU.

    Raises:
        Unsupported: the kernel cannot run there.
    """
    device = check_hopper(call.device, name)
    instead = "use implementation='xla'"
    if call.size not in SIZES:
        raise Unsupported(
            f"{name}: axis {call.axis_name!r} has {call.size} devices, expected one"
            f" of {SIZES}; {instead}"
        )
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.are_all_axes_manual:
        others = sorted(set(mesh.axis_names) - set(mesh.manual_axes))
        raise Unsupported(
            f"{name}: the compiler divides arrays over axes {others}, and the kernel"
            " addresses GPUs of the entire mesh; make all axes manual"
            " (jax.shard_map without axis_names)"
        )
    return device


def _after(name: str, op: Op, call: Call) -> Callable[[Any, Any], Any] | None:
    """The next implementation that the caller allows, if any."""
    names = PREFERRED if call.implementation is None else call.implementation
    if isinstance(names, str) or names[-1] == name or call.config is not None:
        return None
    following = op.implementations[names[names.index(name) + 1]]
    return lambda x, ws: following(x, ws, call)


def _batched(
    op: Op, call: Call, size: int, batched: Any, x: Any, ws: Any
) -> tuple[Any, Any]:
    """`jax.vmap` of a kernel: more leading axes, or sequential calls."""
    x_batched, w_batched = (jax.tree.leaves(flags) for flags in batched)
    if any(w_batched) or not all(x_batched):
        flags = jax.tree.leaves(batched)
        leaves, structure = jax.tree.flatten((x, ws))
        mapped = [a for a, flag in zip(leaves, flags, strict=True) if flag]

        def one(mapped: list[jax.Array]) -> Any:
            rest = iter(mapped)
            own = [next(rest) if f else a for a, f in zip(leaves, flags, strict=True)]
            own_x, own_ws = structure.unflatten(own)
            return run(op, own_x, own_ws, call)

        outputs = lax.map(one, mapped)
    else:
        merged = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), x)  # [size*B,..]
        outputs = jax.tree.map(
            lambda y: y.reshape(size, -1, *y.shape[1:]),  # [size,B,..]
            run(op, merged, ws, call),
        )
    return outputs, jax.tree.map(lambda _: True, outputs)


# --- Gradients ------------------------------------------------------------------------

# Names of results, for policies of `jax.checkpoint`.
GATHER_OUT_NAME = "all_gather_matmul_out"
GATHERED_NAME = "all_gather_matmul_gathered"
SCATTER_OUT_NAME = "matmul_reduce_scatter_out"
REDUCE_OUT_NAME = "matmul_all_reduce_out"


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def all_gather_matmul(x: jax.Array, ws: Arrays, call: Call) -> Arrays:
    """The result [B,D*m,N_i] of each weight, then the gathered x if requested."""
    ys, gathered = run(ALL_GATHER, x, ws, call)
    return (*ys, gathered) if call.return_gathered else ys


def _all_gather_forward(
    x: jax.Array, ws: Arrays, call: Call
) -> tuple[Arrays, tuple[Any, ...]]:
    kept = dataclasses.replace(call, return_gathered=True)
    ys, gathered = run(ALL_GATHER, x, ws, kept)
    ys = checkpoint_name(ys, GATHER_OUT_NAME)
    gathered = checkpoint_name(gathered, GATHERED_NAME)
    return ((*ys, gathered) if call.return_gathered else ys), (gathered, ws)


def _all_gather_backward(
    call: Call, saved: tuple[Any, ...], cotangents: Arrays
) -> tuple[jax.Array, Arrays]:
    gathered, ws = saved
    dys = tuple(dy.astype(gathered.dtype) for dy in cotangents[: len(ws)])
    transposed = call.transposed(gathered.dtype, return_gathered=False)
    dx = run(REDUCE_SCATTER, dys, ws, transposed)
    if call.return_gathered:
        dx += xla.reduce_scatter(cotangents[-1], call.axis_name)
    pairs = zip(dys, ws, strict=True)
    return dx, tuple(_weight_gradient(gathered, dy, w, call) for dy, w in pairs)


all_gather_matmul.defvjp(_all_gather_forward, _all_gather_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def matmul_reduce_scatter(xs: Arrays, ws: Arrays, call: Call) -> jax.Array:
    """Rows [B,M/D,N] of the sum over pairs and devices."""
    return run(REDUCE_SCATTER, xs, ws, call)


def _reduce_scatter_forward(
    xs: Arrays, ws: Arrays, call: Call
) -> tuple[jax.Array, tuple[Arrays, Arrays]]:
    y = matmul_reduce_scatter(xs, ws, call)
    return checkpoint_name(y, SCATTER_OUT_NAME), (xs, ws)


def _reduce_scatter_backward(
    call: Call, saved: tuple[Arrays, Arrays], dy: jax.Array
) -> tuple[Arrays, Arrays]:
    xs, ws = saved
    dtype = xs[0].dtype
    kept = call.transposed(dtype, return_gathered=True)
    dxs, gathered = run(ALL_GATHER, dy.astype(dtype), ws, kept)
    pairs = zip(xs, ws, strict=True)
    return dxs, tuple(_weight_gradient(x, gathered, w, call) for x, w in pairs)


matmul_reduce_scatter.defvjp(_reduce_scatter_forward, _reduce_scatter_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def matmul_all_reduce(xs: Arrays, ws: Arrays, call: Call) -> jax.Array:
    """The sum over pairs and devices, [B,M,N] on each device."""
    return run(ALL_REDUCE, xs, ws, call)


def _all_reduce_forward(
    xs: Arrays, ws: Arrays, call: Call
) -> tuple[jax.Array, tuple[Arrays, Arrays]]:
    y = matmul_all_reduce(xs, ws, call)
    return checkpoint_name(y, REDUCE_OUT_NAME), (xs, ws)


def _all_reduce_backward(
    call: Call, saved: tuple[Arrays, Arrays], dy: jax.Array
) -> tuple[Arrays, Arrays]:
    xs, ws = saved
    if dy.size == 0:
        axes = varying(*xs, *ws)
        dxs, dws = (
            tuple(xla.zeros(a.shape, a.dtype, axes) for a in arrays)
            for arrays in (xs, ws)
        )
        return dxs, dws
    dy = dy.astype(xs[0].dtype)
    # With tracked types the cotangent of what is equal everywhere is equal everywhere.
    # Without, every device holds the part that its own use of y contributed.
    if not call.tracked:
        dy = xla.all_reduce(dy, call.axis_name)
    dy = as_varying(dy, varying(*xs, *ws))
    rows = dy.reshape(math.prod(dy.shape[:-1]), dy.shape[-1])  # [B*M,N]
    dxs = tuple(
        run_local(
            rows,
            w,
            _local(call),
            device=call.device,
            out_dtype=x.dtype,
            rhs_transposed=not call.rhs_transposed,
        ).reshape(x.shape)  # [B,M,K]
        for x, w in zip(xs, ws, strict=True)
    )
    pairs = zip(xs, ws, strict=True)
    return dxs, tuple(_weight_gradient(x, dy, w, call) for x, w in pairs)


matmul_all_reduce.defvjp(_all_reduce_forward, _all_reduce_backward)


def _weight_gradient(
    x: jax.Array, dy: jax.Array, w: jax.Array, call: Call
) -> jax.Array:
    """``x^T dy``, or its transpose if the weight is stored so; sums are fp32."""
    if x.size == 0 or dy.size == 0:
        return xla.zeros(w.shape, w.dtype, varying(x, dy))
    left, right = (dy, x) if call.rhs_transposed else (x, dy)
    return run_local(
        left.reshape(math.prod(left.shape[:-1]), left.shape[-1]),  # [B*M,K or N]
        right.reshape(math.prod(right.shape[:-1]), right.shape[-1]),  # [B*M,N or K]
        _local(call),
        device=call.device,
        out_dtype=w.dtype,
        lhs_transposed=True,
    )


def _local(call: Call) -> str | None:
    """Implementation of the local matmuls: XLA if the caller allows only XLA."""
    names: Sequence[str] = (
        (call.implementation,)
        if isinstance(call.implementation, str)
        else call.implementation or ()
    )
    return "xla" if names and all(n.startswith("xla") for n in names) else None
