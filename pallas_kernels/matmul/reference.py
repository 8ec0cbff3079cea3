"""The definition of the matmul, in fp32."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def matmul(x: Float[Array, "*B M K"], w: Float[Array, "K N"]) -> Float[Array, "*B M N"]:
    """``y[..., m, n] = sum_k x[..., m, k] w[k, n]`` in fp32.

    Args:
        x: ``[*B,M,K]``, any floating type.
        w: [K,N].

    Returns:
        ``[*B,M,N]``, float32.
    """
    return jnp.matmul(
        x.astype(jnp.float32),
        w.astype(jnp.float32),
        precision=jax.lax.Precision.HIGHEST,
    )
