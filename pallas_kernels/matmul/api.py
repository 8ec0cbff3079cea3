"""The public matmul.

Axis letters: B any leading axes, M rows, K contraction, N columns.
"""

import dataclasses
import functools
import math
import string
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels import tuned_configs
from pallas_kernels.dispatch import (
    as_hashable,
    check_floating,
    dispatch,
    no_config,
)
from pallas_kernels.matmul import mosaic_gpu, xla
from pallas_kernels.matmul.config import MatmulConfig, Problem, heuristic
from pallas_kernels.mosaic import DeviceSpec, as_varying, keep_mark, varying
from pallas_kernels.partition import by_shards


def matmul(
    x: Float[Array, "*B M K"],
    w: Float[Array, "P Q"],
    *,
    rhs_transposed: bool = False,
    out_dtype: DTypeLike | None = None,
    implementation: str | Sequence[str] | None = None,
    config: MatmulConfig | None = None,
) -> Float[Array, "*B M N"]:
    """Multiplies activations by a weight, with fp32 accumulation.

    ``y[..., m, n] = sum_k x[..., m, k] w[k, n]``

    Differentiable; both gradients run through the same implementations, with operands
    read transposed where they are stored: ``dx = dy w^T`` and ``dw = x^T dy``. The
    gradient of the output is rounded to the type of the operands first.

    With ``implementation=None`` the Hopper kernel runs on Hopper GPUs if it is expected
    to be at least as fast as XLA (GEMMs of cuBLAS): if it is faster or within 2% in the
    table of tuned problems, and for other problems if M is a multiple of 8 and whole
    output tiles keep 83% of the GPU busy. XLA runs elsewhere. The compiler does not
    partition the kernel: on several devices it runs inside `jax.shard_map`, and where
    the types of Explicit mesh axes say that rows or columns are split.

    Args:
        x: ``[*B,M,K]`` activations; leading axes are merged with M.
        w: [K,N] weight of the same type, or [N,K] with `rhs_transposed`.
        rhs_transposed: w is stored as [N,K], as an embedding table is.
        out_dtype: type of y; that of x by default.
        implementation: "mosaic_gpu" (Hopper; bfloat16 or float16, K and N multiples of
            64), "xla", a sequence of these, or None for the best.
        config: tiling of the kernel (gradients look theirs up); None looks it up in
            `pallas_kernels.tuned_configs`. With one, or inside `override` of that
            module, the kernel is tried first. XLA refuses one given here.

    Returns:
        ``[*B,M,N]`` of `out_dtype`.

    Raises:
        ValueError: shapes or types of x and w disagree, or are no matrices of floating
            numbers of 16 bits or more, or the config is another op's.
        Unsupported: the implementation named cannot serve the arguments here.
        ExceptionGroup: none of several implementations can.

    Example:
        >>> import jax.numpy as jnp
        >>> x = jnp.arange(6, dtype=jnp.float32).reshape(2, 3)
        >>> w = jnp.ones((3, 4), jnp.float32)
        >>> matmul(x, w)
        Array([[ 3.,  3.,  3.,  3.],
               [12., 12., 12., 12.]], dtype=float32)
    """
    x, w = jnp.asarray(x), jnp.asarray(w)
    if x.ndim < 2 or w.ndim != 2:
        raise ValueError(
            f"x has shape {x.shape} and w {w.shape}, expected [*B, M, K] and a matrix;"
            " use jax.vmap for batches of weights"
        )
    if x.dtype != w.dtype:
        raise ValueError(
            f"w has type {w.dtype}, expected that of x, {x.dtype}; cast one of them"
        )
    out_dtype = jnp.dtype(x.dtype if out_dtype is None else out_dtype)
    check_floating(x=x.dtype, out_dtype=out_dtype)
    tuned_configs.check_config("matmul", config, MatmulConfig)
    contracted = w.shape[1 if rhs_transposed else 0]
    if contracted != x.shape[-1]:
        raise ValueError(
            f"w has shape {w.shape} (rhs_transposed={rhs_transposed}), expected"
            f" {x.shape[-1]} input features as x of shape {x.shape} has"
        )
    call = _Call(
        rhs_transposed=rhs_transposed,
        out_dtype=out_dtype,
        implementation=as_hashable(implementation),
        config=config,
        device=DeviceSpec.current(),
    )

    def local(x: jax.Array, w: jax.Array) -> jax.Array:
        axes = varying(x, w)
        x = as_varying(x, axes)
        rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])  # [M,K]
        y: Any = _matmul(rows, as_varying(w, axes), call)
        return y.reshape(*x.shape[:-1], y.shape[-1])  # [..,N]

    *rows, columns = string.ascii_lowercase[: x.ndim]
    leading = "".join(rows)
    w_dims = columns + "K" if rhs_transposed else "K" + columns
    dims = [leading + "K", w_dims]
    return by_shards(local, [x, w], dims, leading + columns)(x, w)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Call:
    rhs_transposed: bool
    out_dtype: Any
    implementation: str | tuple[str, ...] | None
    config: MatmulConfig | None
    device: DeviceSpec | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _matmul(x: jax.Array, w: jax.Array, call: _Call) -> jax.Array:
    return run(
        x,
        w,
        call.implementation,
        device=call.device,
        config=call.config,
        out_dtype=call.out_dtype,
        rhs_transposed=call.rhs_transposed,
    )


def _forward(x: jax.Array, w: jax.Array, call: _Call) -> tuple[jax.Array, Any]:
    return _matmul(x, w, call), (x, w)


def _backward(call: _Call, saved: Any, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, w = saved
    dy = dy.astype(x.dtype)
    product = functools.partial(
        run, implementation=call.implementation, device=call.device
    )
    dx = product(
        dy,
        w,
        out_dtype=x.dtype,
        rhs_transposed=not call.rhs_transposed,
    )
    left, right = (dy, x) if call.rhs_transposed else (x, dy)
    dw = product(left, right, out_dtype=w.dtype, lhs_transposed=True)
    return dx, dw


_matmul.defvjp(_forward, _backward)


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
