"""Choice of the implementation of a matrix product.

Axis letters: M rows, K contraction, N columns.
"""

import functools
from typing import Any

import jax

from pallas_kernels import tuned_configs
from pallas_kernels.dispatch import dispatch, no_config
from pallas_kernels.matmul import mosaic_gpu, xla
from pallas_kernels.matmul.config import MatmulConfig, Problem, heuristic
from pallas_kernels.mosaic import (
    DeviceSpec,
    keep_mark,
)


__all__ = ["run"]


def run(
    x: jax.Array,
    w: jax.Array,
    implementation: str | tuple[str, ...] | None,
    *,
    device: DeviceSpec | None,
    config: MatmulConfig | None = None,
    **storage: Any,
) -> jax.Array:
    """`matmul` of two matrices without its gradient rule, for other ops' rules.

    Args:
        x: [M,K], or [K,M] with `lhs_transposed`.
        w: [K,N], or [N,K] with `rhs_transposed`.
        implementation: as in `matmul`.
        device: the GPU that the kernel is built for, if there is one.
        config: as in `matmul`.
        **storage: `out_dtype`, `lhs_transposed`, `rhs_transposed`.

    Returns:
        [M,N] of `out_dtype`.
    """
    problem = Problem.of(x, w, **storage)
    declines = functools.partial(
        tuned_configs.declines, "matmul", problem, device, config
    )
    implementations = {
        "mosaic_gpu": functools.partial(_mosaic_gpu, device=device, config=config),
        "xla": functools.partial(_xla, wide=device is None, config=config),
    }
    y = dispatch(
        "matmul",
        implementations,
        implementation,
        x,
        w,
        declines={"mosaic_gpu": declines},
        **storage,
    )
    return keep_mark(y, x, w)


def _xla(
    x: jax.Array,
    w: jax.Array,
    *,
    wide: bool,
    config: MatmulConfig | None,
    **storage: Any,
) -> jax.Array:
    no_config("matmul", config)
    return xla.matmul(x, w, wide=wide, **storage)


def _mosaic_gpu(
    x: jax.Array,
    w: jax.Array,
    *,
    device: DeviceSpec | None,
    config: MatmulConfig | None,
    **storage: Any,
) -> jax.Array:
    device, config = tuned_configs.hopper_config(
        "matmul",
        Problem.of(x, w, **storage),
        device,
        MatmulConfig,
        arrays=(x, w),
        check=mosaic_gpu.check_problem,
        config=config,
        heuristic=heuristic,
    )
    return mosaic_gpu.matmul(x, w, config=config, device=device, **storage)
