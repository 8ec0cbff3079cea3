"""The definition of the tile-sparse matmul, in fp32: the masked dense layer."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.tile_sparse_matmul.format import TileSparse


def tile_sparse_matmul(
    x: Float[Array, "*B M K"], w: TileSparse
) -> Float[Array, "*B M N"]:
    """``y[..., m, n] = sum_k x[..., m, k] dense(w)[k, n]`` in fp32.

    Args:
        x: ``[*B,M,K]``, any floating type.
        w: [K,N] tile-sparse weight.

    Returns:
        ``[*B,M,N]``, float32.
    """
    return jnp.matmul(
        x.astype(jnp.float32),
        w.to_dense().astype(jnp.float32),
        precision=jax.lax.Precision.HIGHEST,
    )
