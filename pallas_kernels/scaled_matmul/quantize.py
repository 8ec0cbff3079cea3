"""Quantization to fp8 with scales that use the whole range."""

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Num

from pallas_kernels.dispatch import check_floating


FP8_DTYPES = ("float8_e4m3fn", "float8_e5m2")
"""Types of the operands: E4M3, up to 448, and E5M2, up to 57,344 with one bit less of
mantissa."""


def check_fp8(**dtypes: DTypeLike) -> None:
    """Refuses types other than the fp8 types of the tensor cores.

    Raises:
        ValueError: a type is none of `FP8_DTYPES`.
    """
    for name, dtype in dtypes.items():
        if jnp.dtype(dtype).name not in FP8_DTYPES:
            raise ValueError(
                f"{name} has type {jnp.dtype(dtype)}, expected one of {FP8_DTYPES};"
                " pallas_kernels.scaled_matmul.quantize_fp8 makes them"
            )


def quantize_fp8(
    x: Num[Array, "..."],
    dtype: DTypeLike = jnp.float8_e4m3fn,
    *,
    axis: int | None = None,
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """Quantizes values to fp8, with scales that use the whole range.

    ``x ~ q * scale`` with ``scale = max|x| / max(dtype)``, of the whole array or along
    one axis. Infinities do not count for the maximum and saturate; NaN stays NaN. If
    all values are zero the scale is 1. Not meant to be differentiated.

    Args:
        x: bfloat16, float16, float32 or float64.
        dtype: float8_e4m3fn (3 bits of mantissa) or float8_e5m2 (2, wider range).
        axis: None for one scale of the array; else the axis that shares a scale, -1 for
            the rows of an operand of `scaled_matmul`.

    Returns:
        q, of the shape of x and of `dtype`, and the fp32 scale, of the shape of x
        without `axis`; [] with None.

    Raises:
        ValueError: x has no floating type, `dtype` is none of the two, or there is no
            such axis.

    Example:
        >>> q, scale = quantize_fp8(jnp.array([[1.0, -2.0], [0.0, 0.0]]), axis=-1)
        >>> q
        Array([[224, -448],
               [0, 0]], dtype=float8_e4m3fn)
        >>> (q.astype(jnp.float32) * scale[:, None]).tolist()
        [[1.0, -2.0], [0.0, 0.0]]

    References:
        P. Micikevicius et al., "FP8 Formats for Deep Learning", 2022, section 3.
    """
    x = jnp.asarray(x)
    check_floating(x=x.dtype)
    check_fp8(dtype=dtype)
    if axis is not None and not -x.ndim <= axis < x.ndim:
        raise ValueError(
            f"axis {axis} of x of shape {x.shape}, expected None or an axis of it"
        )
    limits = jnp.finfo(dtype)
    wide = x.astype(jnp.float32)
    size = jnp.where(jnp.isfinite(wide), jnp.abs(wide), 0)
    largest = jnp.max(size, axis=axis, keepdims=True, initial=0)
    # Of the least numbers the quotient would be subnormal, and flushed to zero.
    least = jnp.finfo(jnp.float32).smallest_normal
    scale = jnp.maximum(largest / jnp.float32(limits.max), least)
    scale = lax.stop_gradient(jnp.where(largest > 0, scale, 1))
    q = jnp.clip(
        wide / scale, limits.min.astype(jnp.float32), limits.max.astype(jnp.float32)
    )
    return q.astype(dtype), jnp.squeeze(scale, axis)
