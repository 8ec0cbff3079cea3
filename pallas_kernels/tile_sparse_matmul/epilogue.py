"""Epilogue of a matmul by XLA: bias and activation in fp32, rounded once."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.matmul.activations import activate, gelu_by_erf


def activate_in_fp32(
    x: jax.Array, activation: str | None, dtype: DTypeLike
) -> jax.Array:
    """An activation of x in fp32, as exact as `dtype`, its type, can tell."""
    x = x.astype(jnp.float32)
    if activation == "gelu" and jnp.dtype(dtype).itemsize <= 2:
        return gelu_by_erf(x).astype(dtype)
    return activate(x, activation).astype(dtype)


def apply(
    sums: jax.Array,
    bias: jax.Array | None,
    activation: str | None,
    *,
    feature_major: bool,
    dtype: DTypeLike,
) -> jax.Array:
    """``activation(sums + bias)``.

    Args:
        sums: [M,N], or [N,M] with `feature_major`.
        bias: [N], or None.
        activation: a name in `ACTIVATIONS`, or None.
        feature_major: how the sums are stored.
        dtype: type of the result.

    Returns:
        An array like `sums`, of `dtype`.
    """
    if bias is None and activation is None:
        return sums.astype(dtype)
    y = sums.astype(jnp.float32)
    if bias is not None:
        bias = bias.astype(jnp.float32)
        y = y + (bias[:, None] if feature_major else bias)  # [N,1] beside [N,M]
    return activate_in_fp32(y, activation, dtype)
