"""The definition of a decoder layer from one attention to the next, in fp32."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.decode_layer.shares import SharedTileSparse
from pallas_kernels.tile_sparse_matmul import TileSparse


def decode_layer(
    operands: Mapping[str, Any], *, heads: int, head_dim: int, eps: float
) -> tuple[Float[Array, "D R"], Float[Array, "M C"] | None]:
    """The residual after the layer, and queries, keys and values of the next.

    Args:
        operands: arrays by name, as `pallas_kernels.decode_layer.DecodeLayer` has them,
            besides `attended` and `residual`.
        heads: query heads and key heads: those that are rotated.
        head_dim: features of a head.
        eps: added to the mean squares.

    Returns:
        In fp32: ``(residual, queries keys and values)``, feature-major [D,R] and [M,C];
        the second None without a weight `qkv`.
    """
    dense = {
        name: _dense(a) if isinstance(a, SharedTileSparse) else a
        for name, a in operands.items()
    }
    given = {name: a.astype(jnp.float32) for name, a in dense.items()}
    for name in ("out", "gate_up", "down", "qkv"):
        if (scale := given.get(f"{name}_scale")) is not None:
            given[name] = (given[name] * scale[:, None]).T
    m = given["attended"].shape[0]

    def matmul(x: Array, name: str) -> Array:
        return jnp.matmul(x, given[name], precision=jax.lax.Precision.HIGHEST)

    def norm(x: Array, name: str) -> Array:
        mean = jnp.mean(x * x, axis=-1, keepdims=True)
        return x * jax.lax.rsqrt(mean + eps) * given[name]

    x = given["residual"][:, :m].T + matmul(given["attended"], "out")  # [M,D]
    gate, up = jnp.split(matmul(norm(x, "mlp_norm"), "gate_up"), 2, axis=-1)
    x = x + matmul(jax.nn.silu(gate) * up, "down")
    rows = given["residual"].shape[1]
    residual = jnp.pad(x, ((0, rows - m), (0, 0))).T
    if "qkv" not in given:
        return residual, None
    qkv = matmul(norm(x, "norm"), "qkv")
    if "bias" in given:
        qkv = qkv + given["bias"]
    qkv = qkv.reshape(m, -1, head_dim)  # [M,heads,H]
    cos, sin = (given[name].T[:m, None] for name in ("cos", "sin"))
    a, b = jnp.split(qkv[:, :heads], 2, axis=-1)
    rotated = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return residual, jnp.concatenate([rotated, qkv[:, heads:]], axis=1).reshape(m, -1)


def _dense(weight: SharedTileSparse) -> Array:
    parts: Any = weight.parts
    found = [w.to_dense() if isinstance(w, TileSparse) else w for w in parts]
    return jnp.concatenate(found, axis=1)
