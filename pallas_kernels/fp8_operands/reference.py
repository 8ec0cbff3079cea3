"""The definition of fp8 operands, in fp32."""

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float


def scale_of(
    x: Float[Array, "..."], dtype: DTypeLike, axis: int | None = None
) -> Array:
    """The smallest power of two, and normal number, that brings x within `dtype`."""
    largest = jnp.max(jnp.abs(x.astype(jnp.float32)), axis=axis, initial=0)
    # x is m 2^e, and the largest number of the type is 0.875 2^e: halves up to one.
    (m, e), (most, last) = jnp.frexp(largest), np.frexp(float(jnp.finfo(dtype).max))
    exponent = jnp.maximum(jnp.where(m > most, e + 1, e) - int(last), -126)
    scale = jnp.where(largest == 0, 1, jnp.ldexp(jnp.ones_like(largest), exponent))
    return jnp.where(jnp.isfinite(largest), scale, jnp.nan)


def quantize_rows(
    x: Float[Array, "M K"], dtype: DTypeLike
) -> tuple[Array, Array, Array]:
    """``x / scale`` in 8 bits, the scale of each row, the largest of each column.

    Args:
        x: [M,K], any floating type.
        dtype: float8_e4m3fn or float8_e5m2.

    Returns:
        [M,K] of `dtype`; [M] and [K], float32.
    """
    wide = x.astype(jnp.float32)
    scale = scale_of(wide, dtype, axis=1)
    data = (wide / scale[:, None]).astype(dtype)
    return data, scale, jnp.max(jnp.abs(wide), axis=0, initial=0)


def rms_norm(x: Float[Array, "M K"], weight: Float[Array, " K"], eps: float) -> Array:
    """``x / sqrt(mean(x^2) + eps) * weight`` in fp32.

    Args:
        x: [M,K].
        weight: [K].
        eps: added to the mean square.
    """
    wide = x.astype(jnp.float32)
    return wide / jnp.sqrt(jnp.mean(wide**2, axis=1, keepdims=True) + eps) * weight


def swiglu(gate: Float[Array, "M K"], up: Float[Array, "M K"]) -> Array:
    """``silu(gate) * up`` in fp32.

    Args:
        gate: [M,K].
        up: [M,K].
    """
    z = gate.astype(jnp.float32)
    return z / (1 + jnp.exp(-z)) * up.astype(jnp.float32)


def swiglu_gradients(
    gate: Float[Array, "M K"], up: Float[Array, "M K"], g: Float[Array, "M K"]
) -> tuple[Array, Array]:
    """The gradients of `swiglu` by gate and up in fp32.

    Args:
        gate: [M,K].
        up: [M,K].
        g: [M,K], the gradient of the result.
    """
    z, u, d = (x.astype(jnp.float32) for x in (gate, up, g))
    sigmoid = 1 / (1 + jnp.exp(-z))
    return d * u * sigmoid * (1 + z * (1 - sigmoid)), d * z * sigmoid


def requantize_transposed(
    x: Float[Array, "M K"],
    scale: Float[Array, "..."],
    column_scale: Float[Array, "..."],
    dtype: DTypeLike,
) -> Float[Array, "K M"]:
    """``(x * scale / column_scale)^T`` in fp8, saturated.

    Column scales that fit the original values may not fit the rounded ones: a subnormal
    value of its row may have doubled.

    Args:
        x: [M,K].
        scale: [M] or [].
        column_scale: [K] or [].
        dtype: float8_e4m3fn or float8_e5m2.

    Returns:
        [K,M] of `dtype`.
    """
    wide = x.astype(jnp.float32) * scale[..., None] / column_scale
    most = float(jnp.finfo(dtype).max)
    return jnp.clip(wide, -most, most).astype(dtype).T
