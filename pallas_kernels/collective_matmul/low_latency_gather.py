"""All-gather matmul of few rows, without a barrier before it.

The kernel is that of `pallas_kernels.collective_matmul.all_gather_matmul`. What it
counts outlives the call, in a `GatherWorkspace` that each call hands to the next:
`pallas_kernels.collective_matmul.workspace` says why that is enough.

Axis letters: B leading axes, m rows of one device, K contraction, N columns; D devices.
"""

import functools
from typing import Any

import jax
from jax import lax

from pallas_kernels import tuned_configs
from pallas_kernels.collective_matmul import mosaic_gpu_gather
from pallas_kernels.collective_matmul.config import (
    Call,
    CollectiveConfig,
    CollectiveProblem,
    heuristic,
)
from pallas_kernels.collective_matmul.ops import TABLE
from pallas_kernels.collective_matmul.workspace import GatherWorkspace
from pallas_kernels.mosaic import DeviceSpec, as_varying, unmarked, varying


def low_latency_all_gather_matmul(
    x: jax.Array,
    w: jax.Array,
    workspace: GatherWorkspace,
    *,
    axis_name: str,
    device: DeviceSpec,
    rhs_transposed: bool = False,
    config: CollectiveConfig | None = None,
) -> tuple[jax.Array, GatherWorkspace]:
    """Multiplies the rows of all devices: ``all_gather(x) @ w``.

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
        ValueError: the workspace was made for other or fewer rows.
        Unsupported: the kernel cannot serve the arguments.
    """
    call = Call.over(axis_name, rhs_transposed=rhs_transposed, out_dtype=x.dtype)
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
