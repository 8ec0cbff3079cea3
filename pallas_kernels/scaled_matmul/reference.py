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
        a_scale: ``[*B,M]`` or []; ``[*B,M,K/128]`` for each block.
        b_scale: [N] or []; [N,K/128] or [N/128,K/128] for each block.

    Returns:
        ``[*B,M,N]``, float32.
    """
    if b_scale.ndim == 2:
        each = jnp.repeat(b_scale, 128, axis=0)[: b.shape[0]]
        b_scale = b_scale if b_scale.shape[0] == b.shape[0] else each
    a, b = (
        x.astype(jnp.float32) * _spread(scale.astype(jnp.float32), x)  # [..,K]
        for x, scale in ((a, a_scale), (b, b_scale))
    )
    return jnp.matmul(a, b.T, precision=jax.lax.Precision.HIGHEST)


def _spread(scale: Array, x: Array) -> Array:
    """A scale for each number of x, or one that broadcasts."""
    if scale.ndim < x.ndim:
        return scale[..., None]
    return jnp.repeat(scale, 128, axis=-1)[..., : x.shape[-1]]
