"""Layer normalization through XLA, which fuses it; runs anywhere."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


def layer_norm(
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array | None,
    residual: jax.Array | None,
    x_bias: jax.Array | None,
    *,
    eps: float,
    dtype: DTypeLike,
) -> jax.Array:
    """Normalizes ``x + x_bias + residual``; the sum and the statistics are fp32.

    Args:
        x: ``[*B,D]``.
        scale: [D].
        bias: [D], or None.
        residual: ``[*B,D]``, or None.
        x_bias: [D], or None.
        eps: added to the variance.
        dtype: type of the output.

    Returns:
        ``[*B,D]`` of `dtype`.
    """
    x = x.astype(jnp.float32)
    for other in (x_bias, residual):
        if other is not None:
            x = x + other.astype(jnp.float32)
    x = x - jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
    y = x * jax.lax.rsqrt(variance + eps) * scale.astype(jnp.float32)
    return (y if bias is None else y + bias.astype(jnp.float32)).astype(dtype)
