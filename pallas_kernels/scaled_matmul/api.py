"""The public product of scaled 8-bit floating-point operands.

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

from pallas_kernels.dispatch import check_floating, dispatch
from pallas_kernels.mosaic import DeviceSpec, as_varying, vary_alike, varying
from pallas_kernels.partition import by_shards
from pallas_kernels.scaled_matmul import xla
from pallas_kernels.scaled_matmul.quantize import check_fp8


__all__ = ["scaled_matmul"]


def scaled_matmul(
    a: Float[Array, "*B M K"],
    b: Float[Array, "N _K"],
    a_scale: Float[Array, "..."],
    b_scale: Float[Array, "..."],
    *,
    out_dtype: DTypeLike = jnp.bfloat16,
    implementation: str | Sequence[str] | None = None,
) -> Float[Array, "*B M N"]:
    """Multiplies 8-bit floating-point operands, with fp32 sums that are scaled.

    ``y[..., m, n] = a_scale[m] b_scale[n] sum_k a[..., m, k] b[n, k]``

    Both operands are stored with K last: the tensor cores of Hopper transpose numbers
    of 16 bits only. The two types may differ, as E4M3 activations and E5M2 gradients
    do. Not differentiable.

    Args:
        a: ``[*B,M,K]`` float8_e4m3fn or float8_e5m2; leading axes are merged with M.
        b: [N,K] of either type: a column of the product is a row.
        a_scale: fp32, what a one of a stands for: ``[*B,M]``, or [] for all of it.
        b_scale: fp32, of b: [N], or [] for all of it.
        out_dtype: type of y.
        implementation: "xla", or None for the best.

    Returns:
        ``[*B,M,N]`` of `out_dtype`.

    Raises:
        ValueError: shapes or types disagree.
        Unsupported: the implementation named cannot serve the arguments here.
        ExceptionGroup: none of several implementations can.
        NotImplementedError: it is differentiated.

    Example:
        >>> from pallas_kernels.scaled_matmul import quantize_fp8
        >>> a, a_scale = quantize_fp8(jnp.array([[1.0, 7.0], [0.1, 0.7]]), axis=-1)
        >>> b, b_scale = quantize_fp8(jnp.array([[1.0, -1.0]]))
        >>> print(scaled_matmul(a, b, a_scale, b_scale))
        [[-6]
         [-0.601562]]
    """
    _check(a, b, a_scale, b_scale)
    check_floating(out_dtype=out_dtype)
    call = _Call(
        out_dtype=jnp.dtype(out_dtype),
        implementation=(
            implementation
            if implementation is None or isinstance(implementation, str)
            else tuple(implementation)
        ),
        device=DeviceSpec.current(),
    )

    def local(a: Array, b: Array, a_scale: Array, b_scale: Array) -> Array:
        rows = a.reshape(math.prod(a.shape[:-1]), a.shape[-1])  # [M,K]
        y: Any = _run(
            rows, b, a_scale.reshape(-1) if a_scale.ndim else a_scale, b_scale, call
        )
        return y.reshape(*a.shape[:-1], y.shape[-1])  # [..,N]

    *rows, columns = string.ascii_lowercase[: a.ndim]
    leading = "".join(rows)
    dims = [
        leading + "K",
        columns + "K",
        leading if a_scale.ndim else "",
        columns if b_scale.ndim else "",
    ]
    arrays = [a, b, a_scale, b_scale]
    return by_shards(local, arrays, dims, leading + columns)(*arrays)


def _check(a: Array, b: Array, a_scale: Array, b_scale: Array) -> None:
    check_fp8(a=a.dtype, b=b.dtype)
    if a.ndim < 2 or b.ndim != 2 or a.shape[-1] != b.shape[1]:
        raise ValueError(
            f"a and b have shapes {a.shape} and {b.shape}, expected [*B, M, K] and"
            " [N, K]: both end with the dimension that is summed"
        )
    for name, scale, x in (("a", a_scale, a), ("b", b_scale, b)):
        if scale.dtype != jnp.float32 or scale.shape not in ((), x.shape[:-1]):
            raise ValueError(
                f"{name}_scale has type {scale.dtype} and shape {scale.shape}, expected"
                f" float32 and () or {x.shape[:-1]}, the rows of {name}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Call:
    out_dtype: Any
    implementation: str | tuple[str, ...] | None
    device: DeviceSpec | None


@functools.partial(jax.custom_jvp, nondiff_argnums=(4,))
def _run(a: Array, b: Array, a_scale: Array, b_scale: Array, call: _Call) -> Array:
    axes = varying(a, b, a_scale, b_scale)
    operands = vary_alike((a, b, a_scale, b_scale))
    implementations = {"xla": _xla}
    y = dispatch("scaled_matmul", implementations, call.implementation, *operands, call)
    return as_varying(y, axes)  # kernels lose the mark


@_run.defjvp
def _refuse_derivatives(call: _Call, *_: Any) -> Any:
    raise NotImplementedError(
        "scaled_matmul has no derivatives: rounding to 8 bits has none; give the layer"
        " that rounds its operands a gradient rule of its own"
    )


def _xla(a: Array, b: Array, a_scale: Array, b_scale: Array, call: _Call) -> Array:
    return xla.scaled_matmul(a, b, a_scale, b_scale, out_dtype=call.out_dtype)
