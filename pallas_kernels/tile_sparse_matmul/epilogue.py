"""What follows a product: bias and activation, in fp32, rounded once."""

import functools
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


__all__ = ["ACTIVATIONS", "Activation", "apply"]

type Activation = Literal["relu", "silu", "gelu", "gelu_tanh"]
"""Names of `ACTIVATIONS`."""

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}
"""Activations by name; all keep zero."""


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
