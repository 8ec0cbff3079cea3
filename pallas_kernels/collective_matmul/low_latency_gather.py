"""All-gather matmul of few rows, without a barrier before it.

The kernel is that of `pallas_kernels.collective_matmul.all_gather_matmul`. What it
counts outlives the call, in a `GatherWorkspace` that each call hands to the next:
`pallas_kernels.collective_matmul.workspace` says why that is enough.

Axis letters: m rows of one device, M of all, K contraction, N columns; D devices.
"""

import functools
from typing import Any

import jax
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels import tuned_configs
from pallas_kernels.collective_matmul import mosaic_gpu_gather
from pallas_kernels.collective_matmul.config import (
    Call,
    CollectiveConfig,
    CollectiveProblem,
    heuristic,
)
from pallas_kernels.collective_matmul.ops import TABLE, check_mesh
from pallas_kernels.collective_matmul.workspace import GatherWorkspace
from pallas_kernels.dispatch import no_derivative
from pallas_kernels.mosaic import DeviceSpec, as_varying, unmarked, varying


_NAME = "low_latency_all_gather_matmul"


def low_latency_all_gather_matmul(
    x: Float[Array, "m K"],
    w: Float[Array, "P Q"],
    workspace: GatherWorkspace,
    *,
    axis_name: str,
    device: DeviceSpec,
    rhs_transposed: bool = False,
    config: CollectiveConfig | None = None,
) -> tuple[Float[Array, "M N"], GatherWorkspace]:
    """Multiplies the rows of all devices: ``all_gather(x) @ w``.

    It has no gradients, and is called inside `jax.shard_map` on the arrays of one
    device, with all mesh axes manual. The mesh has the devices of one process in the
    order of `jax.devices()`.

    Args:
        x: [m,K], rows of this device; bfloat16 or float16.
        w: [K,N], columns of this device; [N,K] with `rhs_transposed`.
        workspace: from `make_gather_workspace` or the previous call.
        axis_name: mesh axis to gather over.
        device: the GPU that the kernel is built for.
        rhs_transposed: the weight is stored as [N,K].
        config: tiling; by default that of `all_gather_matmul`.

    Returns:
        [D*m,N], and the workspace of the next call.

    Raises:
        ValueError: shapes or types of x and w disagree, or the workspace was made for
            fewer rows, or for another depth, type or GPU.
        Unsupported: the kernel cannot serve the arguments, or there are not 2, 4 or 8
            devices.

    Example:
        >>> import jax.numpy as jnp
        >>> from jax.sharding import AxisType, PartitionSpec as P
        >>> from pallas_kernels.collective_matmul import make_gather_workspace
        >>> from pallas_kernels.mosaic import H200
        >>> mesh = jax.make_mesh((4,), ("tensor",), axis_types=(AxisType.Auto,))
        >>> on = {"axis_name": "tensor", "device": H200}
        >>> def layers(x, *ws):
        ...     workspace, ys = make_gather_workspace(*x.shape, x.dtype, **on), []
        ...     for w in ws:  # each call takes what the previous one hands on
        ...         y, workspace = low_latency_all_gather_matmul(x, w, workspace, **on)
        ...         ys.append(y)
        ...     return ys
        >>> rows, columns = P("tensor"), P(None, "tensor")
        >>> f = jax.shard_map(layers, mesh=mesh, in_specs=(rows, columns, columns),
        ...     out_specs=columns, check_vma=False)
        >>> x = jax.ShapeDtypeStruct((4 * 128, 512), jnp.bfloat16)
        >>> w = jax.ShapeDtypeStruct((512, 4 * 256), jnp.bfloat16)
        >>> [y.shape for y in jax.eval_shape(f, x, w, w)]  # it runs on GPUs
        [(512, 1024), (512, 1024)]
    """
    depth = w.shape[1 if rhs_transposed else 0]
    if x.dtype != w.dtype or x.shape[1] != depth:
        raise ValueError(
            f"x and w have types {x.dtype} and {w.dtype} and shapes {x.shape} and"
            f" {w.shape} (rhs_transposed={rhs_transposed}), expected one type and as"
            " many input features"
        )
    call = Call.over(
        axis_name, rhs_transposed=rhs_transposed, out_dtype=x.dtype, device=device
    )
    check_mesh(_NAME, call)
    x, w = no_derivative(
        (x, w), f"{_NAME} has no gradients; use all_gather_matmul for training"
    )
    problem = CollectiveProblem.of("all_gather", x[None], (w,), call)
    config = tuned_configs.lookup(
        TABLE,
        problem.key,
        device,
        CollectiveConfig,
        config=config,
        heuristic=functools.partial(heuristic, problem, device),
    )

    def kernel(x: jax.Array, w: jax.Array, *parts: jax.Array) -> Any:
        given = jax.tree.unflatten(jax.tree.structure(workspace), parts)
        (y,), _, after = mosaic_gpu_gather.all_gather_matmul(
            x, (w,), call, config, device, given
        )
        return y[0], after

    # XLA fuses a slice or a pad with the kernel that reads it, and the fusion loses
    # the aliasing of the workspace.
    operands = lax.optimization_barrier((x[None], w))
    y, after = unmarked(kernel)(*operands, *jax.tree.leaves(workspace))
    axes = varying(x, w, *jax.tree.leaves(workspace)) | {axis_name}
    if not call.tracked:
        return y, after
    return jax.tree.map(lambda a: as_varying(a, axes), (y, after))
