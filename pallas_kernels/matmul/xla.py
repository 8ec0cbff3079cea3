"""The matmul through XLA: cuBLAS on NVIDIA GPUs, portable elsewhere."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike


def matmul(
    x: jax.Array,
    w: jax.Array,
    *,
    out_dtype: DTypeLike,
    lhs_transposed: bool = False,
    rhs_transposed: bool = False,
    wide: bool = False,
) -> jax.Array:
    """Computes ``x @ w``; sums are fp32 for 16-bit operands.

    Args:
        x: [M,K], or [K,M] with `lhs_transposed`.
        w: [K,N], or [N,K] with `rhs_transposed`.
        out_dtype: type of the output.
        lhs_transposed: x is stored with K as rows.
        rhs_transposed: w is stored with N as rows.
        wide: ask for the sums themselves and round them after: XLA on a CPU may keep
            sums in the type asked for. NVIDIA GPUs sum in fp32 in any case.

    Returns:
        [M,N] of `out_dtype`.
    """
    # XLA may sum in the type asked for: another type is rounded from fp32 sums.
    rounded = jnp.dtype(out_dtype) != x.dtype or (wide and x.dtype.itemsize < 4)
    sums = jnp.float32 if rounded else out_dtype
    contracted = ((0 if lhs_transposed else 1,), (1 if rhs_transposed else 0,))
    y = lax.dot_general(x, w, (contracted, ((), ())), preferred_element_type=sums)
    return y.astype(out_dtype)  # [M,N]
