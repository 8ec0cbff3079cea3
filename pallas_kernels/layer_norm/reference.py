"""The definition of layer normalization, in fp32."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def layer_norm(
    x: Float[Array, "*B D"],
    scale: Float[Array, "D"],
    bias: Float[Array, "D"] | None = None,
    *,
    residual: Float[Array, "*B D"] | None = None,
    x_bias: Float[Array, "D"] | None = None,
    eps: float,
) -> Float[Array, "*B D"]:
    """``(h - mean(h)) / sqrt(var(h) + eps) * scale + bias``; h is the sum of the rest.

    Args:
        x: ``[*B,D]``, any floating type.
        scale: [D].
        bias: [D]; None is zero.
        residual: ``[*B,D]``; None is zero.
        x_bias: [D]; None is zero.
        eps: added to the variance.

    Returns:
        ``[*B,D]``, float32.
    """
    h = x.astype(jnp.float32)
    for other in (x_bias, residual):
        if other is not None:
            h = h + other.astype(jnp.float32)
    mean = jnp.mean(h, axis=-1, keepdims=True)
    variance = jnp.var(h, axis=-1, keepdims=True)
    y = (h - mean) / jnp.sqrt(variance + eps) * scale.astype(jnp.float32)
    return y if bias is None else y + bias.astype(jnp.float32)
