"""The definition of variable-length attention: dense and in fp32.

Axes: B sequences, T packed queries, S packed keys, N query heads, K key/value heads,
H head dim of queries and keys, Hv head dim of values.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.varlen_attention.relative import RelativeBias
from pallas_kernels.varlen_attention.segments import (
    positions_from_cu_seqlens,
    segment_ids_from_cu_seqlens,
)


def varlen_attention_reference(
    q: Float[Array, "T N H"],
    k: Float[Array, "S K H"],
    v: Float[Array, "S K Hv"],
    cu_seqlens_q: Int[Array, " bounds"],
    cu_seqlens_k: Int[Array, " bounds"],
    *,
    window: tuple[int | Array | None, int | Array | None],
    scale: float,
    softcap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    alibi_slopes: Float[Array, " N"] | None = None,
    relative_bias: RelativeBias | None = None,
) -> tuple[Float[Array, "T N Hv"], Float[Array, "T N"]]:
    """Attention over packed sequences through one dense [N, T, S] mask.

    See `varlen_attention` for the formula. No default depends on the shapes, and a
    causal mask is ``window=(left, 0)``.

    Args:
        q: Queries of all sequences.
        k: Keys; K divides N.
        v: Values.
        cu_seqlens_q: Prefix sums of the numbers of queries, from 0.
        cu_seqlens_k: The same for the keys.
        window: Keys that are visible on each side of the diagonal; None is no limit.
        scale: Factor of the product of query and key.
        softcap: Bound on the magnitude of scores; None is no bound.
        sinks: Logit of one more key per head, whose value is zero.
        alibi_slopes: Penalty per token of distance from the diagonal.
        relative_bias: Terms that each score adds, by distance.

    Returns:
        ``(out, lse)``, both fp32.

    Example:
        >>> x = jnp.eye(3, 4)[:, None]  # [3,1,4]: sequences of two tokens and of one
        >>> bounds = jnp.array([0, 2, 3])
        >>> out, lse = varlen_attention_reference(
        ...     x, x, x, bounds, bounds, window=(None, 0), scale=1.0)
        >>> (100 * out[:, 0]).round().astype(int).tolist()
        [[100, 0, 0, 0], [27, 73, 0, 0], [0, 0, 100, 0]]
    """
    ids_q = segment_ids_from_cu_seqlens(cu_seqlens_q, q.shape[0])
    ids_k = segment_ids_from_cu_seqlens(cu_seqlens_k, k.shape[0])
    clean = [
        jnp.where((ids >= 0)[:, None, None], x.astype(jnp.float32), 0.0)
        for x, ids in ((q, ids_q), (k, ids_k), (v, ids_k))
    ]
    groups = q.shape[1] // k.shape[1]
    # [T, N, H], [S, N, H], [S, N, Hv]
    q, k, v = clean[0], *(jnp.repeat(x, groups, axis=1) for x in clean[1:])

    # Distance of key j to the right of the diagonal of query i.
    lengths_q, lengths_k = jnp.diff(cu_seqlens_q), jnp.diff(cu_seqlens_k)
    offset = (lengths_k - lengths_q)[ids_q]
    i = positions_from_cu_seqlens(cu_seqlens_q, q.shape[0])
    j = positions_from_cu_seqlens(cu_seqlens_k, k.shape[0])
    distance = j[None, :] - i[:, None] - offset[:, None]  # [T, S]
    mask = (ids_q[:, None] == ids_k[None, :]) & (ids_q >= 0)[:, None]  # [T, S]
    left, right = window
    if left is not None:
        mask &= distance >= -left
    if right is not None:
        mask &= distance <= right

    scores = scale * jnp.einsum("tnh,snh->nts", q, k, precision="highest")
    if relative_bias is not None:
        entries = relative_bias.buckets.entry(-distance)  # [T, S]
        if (terms := relative_bias.query_terms) is not None:
            terms = jnp.where((ids_q >= 0)[:, None, None], terms, 0.0)
            terms = terms.astype(jnp.float32).swapaxes(0, 1)  # [N, T, P]
            scores += jnp.take_along_axis(terms, entries[None], axis=2)  # [N, T, S]
        if (terms := relative_bias.key_terms) is not None:
            terms = jnp.where((ids_k >= 0)[:, None, None], terms, 0.0)
            terms = terms.astype(jnp.float32).swapaxes(0, 1)  # [N, S, P]
            read = jnp.take_along_axis(terms, entries.T[None], axis=2)  # [N, S, T]
            scores += read.swapaxes(1, 2)
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    if alibi_slopes is not None:
        slopes = alibi_slopes.astype(jnp.float32)[:, None, None]  # [N, 1, 1]
        scores -= slopes * jnp.abs(distance).astype(jnp.float32)
    scores = jnp.where(mask, scores, -jnp.inf)
    if sinks is not None:  # one more key, whose value is zero
        sink = jnp.broadcast_to(
            sinks.astype(jnp.float32)[:, None, None], (*scores.shape[:2], 1)
        )
        sink = jnp.where((ids_q >= 0)[None, :, None], sink, -jnp.inf)  # [N, T, 1]
        scores = jnp.concatenate([scores, sink], axis=2)
        v = jnp.concatenate([v, jnp.zeros_like(v[:1])])
    seen = jnp.any(scores > -jnp.inf, axis=2, keepdims=True)
    safe = jnp.where(seen, scores, 0.0)  # rows that see nothing: keep NaN away
    lse = jnp.where(seen, jax.nn.logsumexp(safe, axis=2, keepdims=True), -jnp.inf)
    weights = jnp.where(seen, jax.nn.softmax(safe, axis=2), 0.0)
    out = jnp.einsum("nts,snv->tnv", weights, v, precision="highest")  # [T, N, Hv]
    return out, lse[:, :, 0].T  # [T, N, Hv], [T, N]
