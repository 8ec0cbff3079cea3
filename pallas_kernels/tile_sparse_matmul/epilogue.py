"""What follows a product: bias and activation, in fp32, rounded once."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


__all__ = ["ACTIVATIONS", "KERNEL_ACTIVATIONS", "apply"]


def _relu(x: jax.Array) -> jax.Array:
    return jnp.where(x > 0, x, jnp.zeros_like(x))  # jax.nn.relu does not lower


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "relu": _relu,
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}
"""Activations by name; all keep zero."""

# erf(x) = 1 - (a1 t + ... + a5 t^5) exp(-x^2) with t = 1 / (1 + p x), for x >= 0, to
# 1.5e-7 (Abramowitz and Stegun, 7.1.26).
_ERF_P = 0.3275911
_ERF_A = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)


def _gelu_without_erf(x: jax.Array) -> jax.Array:
    """The exact GELU to fp32 accuracy, of operations that Mosaic GPU lowers."""
    u = jnp.abs(x) * math.sqrt(0.5)
    t = 1.0 / (1.0 + _ERF_P * u)
    tail = jnp.zeros_like(t)
    for a in reversed(_ERF_A):
        tail = (tail + a) * t
    half = 0.5 * tail * jnp.exp(-u * u)  # the Gaussian's tail beyond |x|
    return x * jnp.where(x > 0, 1.0 - half, half)


KERNEL_ACTIVATIONS = ACTIVATIONS | {"gelu": _gelu_without_erf}
"""`ACTIVATIONS` for the bodies of Pallas kernels."""


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
        y = y + (bias[:, None] if feature_major else bias)
    if activation is not None:
        y = ACTIVATIONS[activation](y)
    return y.astype(dtype)
