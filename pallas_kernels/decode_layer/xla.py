"""A decoder layer from one attention to the next through XLA: a dozen launches."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.decode_layer.shares import SharedTileSparse
from pallas_kernels.tile_sparse_matmul import TileSparse, tile_sparse_matmul


def decode_layer(
    operands: Mapping[str, Any],
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    eps: float,
    axis_name: str | None = None,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """What `mosaic_gpu.decode_layer` computes, with sums of matmuls in fp32.

    Args:
        operands: arrays by name, as there.
        heads: query heads.
        kv_heads: key/value heads.
        head_dim: features of a head.
        eps: added to the mean squares of both norms.
        axis_name: mesh axis over which the layer is split, if it is.

    Returns:
        ``(residual, queries, keys and values)``, as there.
    """
    dtype, m = operands["attended"].dtype, operands["attended"].shape[0]

    def matmul(x: jax.Array, name: str) -> jax.Array:
        if isinstance(shared := operands[name], SharedTileSparse):
            x = x.astype(dtype)
            return jnp.concatenate([_matmul(x, w) for w in shared.parts], axis=-1)
        weight, scale = operands[name], operands.get(f"{name}_scale")
        if scale is not None:
            weight = weight.astype(dtype).T
        sums = jnp.matmul(x, weight, preferred_element_type=jnp.float32)
        return sums if scale is None else sums * scale

    def norm(x: jax.Array, name: str) -> jax.Array:
        mean = jnp.mean(x * x, axis=-1, keepdims=True)
        scale = operands[name].astype(jnp.float32)
        return (x * lax.rsqrt(mean + eps) * scale).astype(dtype)

    def over_devices(part: jax.Array) -> jax.Array:
        return part if axis_name is None else lax.psum(part, axis_name)

    x = operands["residual"].T[:m]  # [M,D]
    x = x + over_devices(matmul(operands["attended"], "out"))
    gate, up = jnp.split(matmul(norm(x, "mlp_norm"), "gate_up"), 2, axis=-1)
    x = x + over_devices(matmul((jax.nn.silu(gate) * up).astype(dtype), "down"))
    rows = operands["residual"].shape[1]
    residual = jnp.pad(x, ((0, rows - m), (0, 0))).T
    if "qkv" not in operands:
        return residual, None, None
    qkv = matmul(norm(x, "norm"), "qkv")
    if "bias" in operands:
        qkv = qkv + operands["bias"].astype(jnp.float32)
    qkv = qkv.reshape(m, -1, head_dim)
    a, b = jnp.split(qkv[:, : heads + kv_heads], 2, axis=-1)
    cos, sin = (operands[name].T[:m, None] for name in ("cos", "sin"))
    rotated = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    kv = jnp.concatenate([rotated[:, heads:], qkv[:, heads + kv_heads :]], axis=1)
    q, kv = (x.reshape(m, -1).astype(dtype) for x in (rotated[:, :heads], kv))
    return residual, q, kv


def _matmul(x: jax.Array, weight: Any) -> jax.Array:
    """With a part of a tile-sparse weight."""
    if not isinstance(weight, TileSparse):
        return jnp.matmul(x, weight, preferred_element_type=jnp.float32)
    return tile_sparse_matmul(x, weight, implementation="xla").astype(jnp.float32)
