"""The definition of the matmul with a quantized weight, in fp32."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Num


def quantized_matmul(
    x: Float[Array, "*B M K"], w: Num[Array, "N K"], scale: Float[Array, " N"]
) -> Float[Array, "*B M N"]:
    """``y[..., m, n] = sum_k x[..., m, k] w[n, k] scale[n]`` in fp32.

    Args:
        x: ``[*B,M,K]``, any floating type.
        w: [N,K], int8 or float8_e4m3fn.
        scale: [N].

    Returns:
        ``[*B,M,N]``, float32.
    """
    weight = w.astype(jnp.float32) * scale.astype(jnp.float32)[:, None]  # [N,K]
    return jnp.matmul(
        x.astype(jnp.float32), weight.T, precision=jax.lax.Precision.HIGHEST
    )
