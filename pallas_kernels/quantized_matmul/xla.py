"""The matmul with a quantized weight through XLA.

On a GPU XLA may write the whole weight in the type of x before it multiplies.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike


def quantized_matmul(
    x: jax.Array, w: jax.Array, scale: jax.Array, *, out_dtype: DTypeLike
) -> jax.Array:
    """Computes ``(x @ w.T) * scale`` with fp32 sums.

    Args:
        x: [M,K].
        w: [N,K], int8 or float8_e4m3fn.
        scale: [N], fp32.
        out_dtype: type of the output.

    Returns:
        [M,N] of `out_dtype`.
    """
    # Both 8-bit types are exact in bfloat16, float16 and float32.
    y = lax.dot_general(
        x,
        w.astype(x.dtype),
        (((1,), (1,)), ((), ())),
        preferred_element_type=jnp.float32,
    )
    return (y * scale).astype(out_dtype)  # [M,N]
