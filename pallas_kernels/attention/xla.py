"""Attention of whole rows through XLA, which stores the scores; runs anywhere.

Axis letters: B batch, T queries, S keys, N query heads, K key/value heads, G query
heads of a key head, H head dim.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.attention.config import Problem


__all__ = ["attention"]


def attention(
    q: jax.Array, k: jax.Array, v: jax.Array, *, problem: Problem, scale: float
) -> jax.Array:
    """See `pallas_kernels.attention.attention`; defaults are resolved.

    Logits and softmax are in fp32.

    Args:
        q: [B,T,N,H].
        k: [B,S,K,H].
        v: [B,S,K,H].
        problem: mask and shape.
        scale: factor of the scores.

    Returns:
        [B,T,N,H].
    """
    # Not JAX's own XLA implementation: strict promotion forbids it in bf16.
    b, t, n, h = q.shape
    q = q.reshape(b, t, k.shape[2], -1, h)  # [B, T, K, G, H]
    logits = jnp.einsum("btkgh,bskh->bkgts", q, k, preferred_element_type=jnp.float32)
    logits = logits * scale
    if problem.softcap is not None:
        logits = problem.softcap * jnp.tanh(logits / problem.softcap)
    logits = jnp.where(_mask(problem), logits, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(logits, axis=-1).astype(v.dtype)
    out = jnp.einsum("bkgts,bskh->btkgh", weights, v)
    return out.reshape(b, t, n, h)  # [B, T, N, H]


def _mask(problem: Problem) -> jax.Array:
    """True for the keys that each query sees, [T,S]; the last sees the last key."""
    at = problem.keys - problem.queries + jnp.arange(problem.queries)
    distance = at[:, None] - jnp.arange(problem.keys)  # [T, S]
    left, right = problem.window
    right = 0 if problem.causal else right
    mask = jnp.ones(distance.shape, bool)
    if left is not None:
        mask &= distance <= left
    if right is not None:
        mask &= -distance <= right
    return mask
