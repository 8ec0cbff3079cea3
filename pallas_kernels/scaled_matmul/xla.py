"""The matmul of scaled 8-bit operands through XLA: cuBLASLt on NVIDIA GPUs."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.scaled_matmul.config import DEPTH


def scaled_matmul(
    a: jax.Array,
    b: jax.Array,
    a_scale: jax.Array,
    b_scale: jax.Array,
    *,
    out_dtype: DTypeLike,
) -> jax.Array:
    """Computes ``(a @ b.T) * scales`` with fp32 sums.

    Args:
        a: [M,K], float8_e4m3fn or float8_e5m2.
        b: [N,K], one of the two.
        a_scale: [M] or [], fp32; [M,K/128] for each block of a row.
        b_scale: [N] or [], fp32; [N,K/128] if `a_scale` is by blocks.
        out_dtype: type of the output.

    Returns:
        [M,N] of `out_dtype`.
    """
    if a_scale.ndim == 2:  # no 8-bit matmul of XLA has such scales on Hopper
        a, b = (
            x.astype(jnp.float32) * jnp.repeat(scale, DEPTH, axis=1)[:, : x.shape[1]]
            for x, scale in ((a, a_scale), (b, b_scale))
        )
        a_scale = b_scale = jnp.ones((), jnp.float32)
    sums = lax.dot_general(
        a,
        b,
        (((1,), (1,)), ((), ())),
        # On Hopper this asks cuBLASLt for sums that are promoted to fp32.
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    return (sums * a_scale[..., None] * b_scale).astype(out_dtype)  # [M,N]
