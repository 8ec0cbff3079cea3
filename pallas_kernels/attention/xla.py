"""Attention under any mask through XLA, which stores the scores; runs anywhere.

Axis letters: B batch, T queries, S keys, N query heads, K key/value heads, G query
heads of a key head, H head dim.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.varlen_attention.segments import Window


__all__ = ["attention_mask", "masked_attention"]


def attention_mask(
    q_positions: Int[Array, "B T"],
    num_keys: int,
    *,
    causal: bool,
    window: Window = (None, None),
) -> Bool[Array, "B T S"]:
    """Return which of the keys 0, 1, ... each query sees.

    Example:
        >>> attention_mask(jnp.array([[2]]), 4, causal=True, window=(1, 0))
        Array([[[False,  True,  True, False]]], dtype=bool)
    """
    distance = q_positions[..., None] - jnp.arange(num_keys)  # [B, T, S]
    left, right = window
    right = 0 if causal else right
    mask = jnp.ones(distance.shape, bool)
    if left is not None:
        mask &= distance <= left
    if right is not None:
        mask &= -distance <= right
    return mask


def masked_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    mask: Bool[Array, "_B T S"],
    *,
    scale: float,
    softcap: float | None = None,
) -> Float[Array, "B T N H"]:
    """Attention under any mask, with logits and softmax in fp32.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        mask: True for the keys that a query sees, at least one; its first axis may be
            1.
        scale: Factor of the logits.
        softcap: Logits become ``softcap * tanh(logits / softcap)``.
    """
    b, t, n, h = q.shape
    q = q.reshape(b, t, k.shape[2], -1, h)  # [B, T, K, G, H]
    logits = jnp.einsum("btkgh,bskh->bkgts", q, k, preferred_element_type=jnp.float32)
    logits = logits * scale
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    logits = jnp.where(mask[:, None, None], logits, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(logits, axis=-1).astype(v.dtype)
    out = jnp.einsum("bkgts,bskh->btkgh", weights, v)
    return out.reshape(b, t, n, h)  # [B, T, N, H]
