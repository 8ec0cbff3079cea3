"""Attention of unpacked sequences through XLA; stores the scores and runs anywhere.

Axis letters: B batch, T queries, S keys, N query heads, K key/value heads, G query
heads of a key head, H head dim.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.attention.config import Problem


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    sinks: jax.Array | None,
    alibi_slopes: jax.Array | None,
    *,
    problem: Problem,
    scale: float,
) -> jax.Array:
    """See `pallas_kernels.attention.attention`; defaults are resolved.

    Logits and softmax are in fp32.

    Args:
        q: [B,T,N,H].
        k: [B,S,K,H].
        v: [B,S,K,H].
        sinks: [N].
        alibi_slopes: [N].
        problem: mask and shape.
        scale: factor of the scores.

    Returns:
        [B,T,N,H].
    """
    # Not JAX's own XLA implementation: strict promotion forbids it in bf16.
    b, t, n, h = q.shape
    kv_heads = k.shape[2]
    q = q.reshape(b, t, kv_heads, n // kv_heads, h)  # [B, T, K, G, H]
    logits = jnp.einsum("btkgh,bskh->bkgts", q, k, preferred_element_type=jnp.float32)
    logits = logits * scale
    if problem.softcap is not None:
        logits = problem.softcap * jnp.tanh(logits / problem.softcap)
    distance = _distance(problem)  # [T, S]
    if alibi_slopes is not None:
        away = jnp.abs(distance).astype(jnp.float32)
        logits -= _by_group(alibi_slopes, k.shape[2]) * away  # [K, G, T, S]
    mask = _mask(problem, distance)
    logits = jnp.where(mask, logits, jnp.finfo(jnp.float32).min)
    if sinks is not None:  # one more key, whose value is zero
        sink = _by_group(sinks, k.shape[2])  # [K, G, 1, 1]
        column = jnp.broadcast_to(sink, (*logits.shape[:-1], 1))
        logits = jnp.concatenate([logits, column], axis=-1)
    weights = jax.nn.softmax(logits, axis=-1)[..., : problem.keys]
    # A query that attends to no key gets zeros.
    weights = jnp.where(mask, weights, 0.0).astype(v.dtype)
    out = jnp.einsum("bkgts,bskh->btkgh", weights, v)
    return out.reshape(b, t, n, h)  # [B, T, N, H]


def _by_group(x: jax.Array, kv_heads: int) -> jax.Array:
    """Numbers of query heads beside logits, fp32."""
    return x.astype(jnp.float32).reshape(kv_heads, -1, 1, 1)  # [K, G, 1, 1]


def _distance(problem: Problem) -> jax.Array:
    """How far a key lies before each query, [T,S]; the last sees the last key."""
    at = problem.keys - problem.queries + jnp.arange(problem.queries)
    return at[:, None] - jnp.arange(problem.keys)


def _mask(problem: Problem, distance: jax.Array) -> jax.Array:
    """True for the keys that each query attends to, [T,S]."""
    left, right = problem.window
    right = 0 if problem.causal else right
    mask = jnp.ones(distance.shape, bool)
    if left is not None:
        mask &= distance <= left
    if right is not None:
        mask &= -distance <= right
    return mask
