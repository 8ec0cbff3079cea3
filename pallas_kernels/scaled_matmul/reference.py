"""The definition of the matmul of scaled fp8 operands, in fp32."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def scaled_matmul(
    a: Float[Array, "*B M K"],
    b: Float[Array, "N K"],
    a_scale: Float[Array, "..."],
    b_scale: Float[Array, "..."],
) -> Float[Array, "*B M N"]:
    """``y[..., m, n] = sum_k (a_scale[m] a[..., m, k]) (b_scale[n] b[n, k])`` in fp32.

    Args:
        a: ``[*B,M,K]``.
        b: [N,K].
        a_scale: ``[*B,M]`` or [].
        b_scale: [N] or [].

    Returns:
        ``[*B,M,N]``, float32.
    """
    a, b = (
        x.astype(jnp.float32) * scale.astype(jnp.float32)[..., None]  # [..,K]
        for x, scale in ((a, a_scale), (b, b_scale))
    )
    return jnp.matmul(a, b.T, precision=jax.lax.Precision.HIGHEST)
