"""Portable attention over packed sequences, in memory linear in the tokens.

Online softmax over blocks of keys (Milakov & Gimelshein, arXiv 1805.02867; Dao et al.,
arXiv 2205.14135), in plain JAX. Sequence, window and causal triangle leave each query
one interval of keys (`segments.visible_ranges`), so a block of queries loops over the
few blocks of keys that its intervals touch, and the backward pass does the same with
the parts exchanged. The trip counts depend on data; the gradient is written by hand
and recomputes the scores, so nothing of size [T, S] exists and nothing has to
differentiate such a loop.

Axes: B sequences, T packed queries, S packed keys, N query heads, K key/value heads,
G = N / K query heads per key/value head, H head dim of queries and keys, Hv head dim of
values, P entries of a row of relative terms. Heads lead inside this file: [K, G, T, H].
"""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_batching import custom_vmap
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import Unsupported
from pallas_kernels.mosaic import DeviceSpec
from pallas_kernels.varlen_attention.relative import (
    RelativeBias,
    RelativeBuckets,
    tile_bias,
    tile_gradient,
)
from pallas_kernels.varlen_attention.segments import (
    Window,
    cut_cu_seqlens,
    visible_ranges,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class XlaConfig:
    """Block sizes of the portable implementation."""

    block_q: int = 128
    """Queries of a block."""
    block_k: int = 128
    """Keys of a block."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            size = getattr(self, field.name)
            if not isinstance(size, int):
                raise ValueError(f"{field.name} must be an integer, got {size!r}")
            if size < 1:
                raise ValueError(f"{field.name} must be at least 1, got {size}")


type _Terms = tuple[Array | None, Array | None]
"""Query and key terms of the relative bias, as they were passed."""


class _Options(NamedTuple):
    """What is static about a call."""

    window: Window
    scale: float
    softcap: float | None
    block_q: int
    block_k: int
    buckets: RelativeBuckets | None


class _Operands(NamedTuple):
    """Arrays of a call, cut into blocks; rows of no sequence are zero."""

    q: Float[Array, "blocks_q K G block_q H"]
    k: Float[Array, "blocks_k K block_k H"]
    v: Float[Array, "blocks_k K block_k Hv"]
    start: Int[Array, "blocks_q block_q"]
    stop: Int[Array, "blocks_q block_q"]
    diagonal: Int[Array, "blocks_q block_q"]
    slopes: Float[Array, "K G 1 1"] | None
    query_terms: Float[Array, "blocks_q K G block_q P"] | None
    key_terms: Float[Array, "blocks_k K G block_k P"] | None


def varlen_attention_xla(
    q: Float[Array, "T N H"],
    k: Float[Array, "S K H"],
    v: Float[Array, "S K Hv"],
    cu_seqlens_q: Int[Array, " bounds"],
    cu_seqlens_k: Int[Array, " bounds"],
    sinks: Float[Array, " N"] | None,
    alibi_slopes: Float[Array, " N"] | None,
    *,
    relative_bias: RelativeBias | None,
    window: Window,
    scale: float,
    softcap: float | None,
    deterministic: bool,
    device: DeviceSpec | None,
    config: object,
) -> tuple[Float[Array, "T N Hv"], Float[Array, "T N"]]:
    """See `varlen_attention`; the arguments are checked and their defaults resolved."""
    del deterministic  # no atomics: every sum has a fixed order
    if config is None:
        config = _heuristic(device)
    if not isinstance(config, XlaConfig):
        raise Unsupported(
            f"xla varlen_attention takes an XlaConfig, got config={config!r}; pass "
            "the config of the implementation that you name"
        )
    buckets = None if relative_bias is None else relative_bias.buckets
    options = _options(config, q, k, window, scale, softcap, buckets)
    terms = None, None
    if relative_bias is not None:
        terms = relative_bias.query_terms, relative_bias.key_terms
    cu_q = cut_cu_seqlens(cu_seqlens_q, q.shape[0])
    cu_k = cut_cu_seqlens(cu_seqlens_k, k.shape[0])
    return _jitted(options, q, k, v, cu_q, cu_k, sinks, alibi_slopes, terms)


def varlen_attention_xla_backward(
    residuals: tuple,
    cotangents: tuple[Array, Array],
    *,
    buckets: RelativeBuckets | None,
    window: Window,
    scale: float,
    softcap: float | None,
    device: DeviceSpec | None,
) -> tuple[Any, ...]:
    """The gradients, whatever computed the results.

    Args:
        residuals: ``(q, k, v, cu_seqlens_q, cu_seqlens_k, sinks, alibi_slopes,
            (query_terms, key_terms), out, lse)``.
        cotangents: of out and lse.
        buckets: of the relative bias.
        window: as for the forward pass, and so are the rest.
        scale: factor of ``q . k``.
        softcap: bound on scores.
        device: what it runs on.

    Returns:
        One gradient for each residual but the last two.
    """
    q, k, v, cu_q, cu_k, *others = residuals
    cu_q, cu_k = cut_cu_seqlens(cu_q, q.shape[0]), cut_cu_seqlens(cu_k, k.shape[0])
    config = _heuristic(device)
    options = _options(config, q, k, window, scale, softcap, buckets)
    return _attention_bwd(options, (q, k, v, cu_q, cu_k, *others), cotangents)


def _options(
    config: XlaConfig,
    q: Array,
    k: Array,
    window: Window,
    scale: float,
    softcap: float | None,
    buckets: RelativeBuckets | None,
) -> _Options:
    return _Options(
        window=window,
        scale=scale,
        softcap=softcap,
        block_q=min(config.block_q, _round_up(q.shape[0], 8)),
        block_k=min(config.block_k, _round_up(k.shape[0], 8)),
        buckets=buckets,
    )


def _heuristic(device: DeviceSpec | None) -> XlaConfig:
    # A GPU needs large products to hide the launches of each step of the loops: on an
    # H200 blocks of 512 are four times as fast as 128. A CPU works in its cache.
    size = 128 if device is None else 512
    return XlaConfig(block_q=size, block_k=size)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(
    options: _Options,
    q: Array,
    k: Array,
    v: Array,
    cu_q: Array,
    cu_k: Array,
    sinks: Array | None,
    slopes: Array | None,
    terms: _Terms,
) -> tuple[Array, Array]:
    return _attention_fwd(options, q, k, v, cu_q, cu_k, sinks, slopes, terms)[0]


def _attention_fwd(
    options: _Options,
    q: Array,
    k: Array,
    v: Array,
    cu_q: Array,
    cu_k: Array,
    sinks: Array | None,
    slopes: Array | None,
    terms: _Terms,
) -> tuple[tuple[Array, Array], tuple]:
    x = _operands(options, q, k, v, cu_q, cu_k, slopes, terms)
    blocks_q, num_kv, groups, *_ = x.q.shape
    first, last = _touched_blocks(x.start, x.stop, options.block_k)
    # Made from an operand, a carry has its sharding and varies over its manual axes,
    # as what the loop returns does.
    column = jnp.zeros_like(x.q[0, ..., :1], dtype=jnp.float32)
    sink = jnp.float32(-jnp.inf)
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(num_kv, groups, 1, 1)
    # A sink is a key with the value zero that every query sees first.
    acc = jnp.broadcast_to(column, (*column.shape[:3], v.shape[-1]))
    carry = acc, column + sink, column + (sink > -jnp.inf).astype(jnp.float32)

    def query_block(i: Array) -> tuple[Array, Array]:
        def key_block(j: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
            acc, m, total = carry
            scores, mask, _ = _scores(options, x, i, j)
            scores = jnp.where(mask, scores, -jnp.inf)
            m_new = jnp.maximum(m, jnp.max(scores, axis=-1, keepdims=True))
            m_safe = jnp.where(m_new == -jnp.inf, 0.0, m_new)
            p = jnp.exp(scores - m_safe)
            alpha = jnp.exp(m - m_safe)
            total = alpha * total + jnp.sum(p, axis=-1, keepdims=True)
            pv = _dot("kgts,ksv->kgtv", p.astype(v.dtype), x.v[j])
            return alpha * acc + pv, m_new, total

        acc, m, total = jax.lax.fori_loop(first[i], last[i], key_block, carry)
        seen = total > 0.0
        total = jnp.where(seen, total, 1.0)
        out = acc / total
        lse = jnp.where(seen, m + jnp.log(total), -jnp.inf)
        return out.astype(q.dtype), lse

    out, lse = jax.lax.map(query_block, jnp.arange(blocks_q, dtype=jnp.int32))
    inside = _inside(cu_q, q.shape[0])
    out = jnp.where(inside[:, None, None], _rows(out, q.shape[0]), 0)
    lse = jnp.where(inside[:, None], _rows(lse, q.shape[0])[:, :, 0], -jnp.inf)
    # Rematerialization policies may keep these two by name.
    out = checkpoint_name(out, "varlen_attention_out")
    lse = checkpoint_name(lse, "varlen_attention_lse")
    return (out, lse), (q, k, v, cu_q, cu_k, sinks, slopes, terms, out, lse)


def _attention_bwd(
    options: _Options, residuals: tuple, cotangents: tuple[Array, Array]
) -> tuple[Any, ...]:
    q, k, v, cu_q, cu_k, sinks, slopes, terms, out, lse = residuals
    x = _operands(options, q, k, v, cu_q, cu_k, slopes, terms)
    dout, dlse = cotangents
    # What arrives for a query that sees nothing, NaN too, is nobody's gradient.
    seen = _inside(cu_q, q.shape[0])[:, None] & (lse > -jnp.inf)
    dout = jnp.where(seen[..., None], dout, 0)
    # With scores s and weights p = exp(s - lse), the gradient of a score is
    # p * (dout . v - delta), delta = dout . out - dlse.
    delta = jnp.sum(dout.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    delta = jnp.where(seen, delta - dlse, 0.0)
    lse = jnp.where(seen, lse, 0.0)
    dsinks = None
    if sinks is not None:
        p_sink = jnp.where(seen, jnp.exp(sinks.astype(jnp.float32) - lse), 0.0)
        dsinks = -jnp.sum(p_sink * delta, axis=0).astype(sinks.dtype)

    groups = q.shape[1] // k.shape[1]
    dout_b, lse_b, delta_b = (
        _query_blocks(a, groups, options.block_q)
        for a in (dout, lse[..., None], delta[..., None])
    )
    # The same ranges seen from the keys: which queries look at a key.
    left, right = options.window
    start, stop, _ = visible_ranges(cu_k, cu_q, k.shape[0], (right, left))
    block_k = options.block_k
    first, last = _touched_blocks(
        _cut(start, block_k), _cut(stop, block_k), options.block_q
    )

    def key_block(carry: tuple, j: Array) -> tuple:
        def query_block(i: Array, carry: tuple) -> tuple:
            (dq, dslopes, dquery_terms), (dk, dv, dkey_terms) = carry
            scores, mask, (derivative, distance) = _scores(options, x, i, j)
            p = jnp.where(mask, jnp.exp(scores - lse_b[i]), 0.0)
            dv += _dot("kgts,kgtv->ksv", p.astype(v.dtype), dout_b[i])
            dp = _dot("kgtv,ksv->kgts", dout_b[i], x.v[j])
            ds = p * (dp - delta_b[i])
            if slopes is not None:
                dslopes -= jnp.sum(ds * distance, axis=(-1, -2), keepdims=True)
            ds = ds * derivative
            if options.buckets is not None:
                present = terms[0] is not None, terms[1] is not None
                first = i * options.block_q - j * options.block_k
                by_query, by_key = tile_gradient(options.buckets, ds, first, present)
                if by_query is not None:
                    dquery_terms = dquery_terms.at[i].add(by_query)
                if by_key is not None:
                    dkey_terms += by_key
            ds = (options.scale * ds).astype(q.dtype)
            dk += _dot("kgts,kgth->ksh", ds, x.q[i])
            dq = dq.at[i].add(_dot("kgts,ksh->kgth", ds, x.k[j]))
            return (dq, dslopes, dquery_terms), (dk, dv, dkey_terms)

        terms_j = None if x.key_terms is None else x.key_terms[j]
        of_block = _zeros((x.k[j], x.v[j], terms_j))
        carry, of_block = jax.lax.fori_loop(
            first[j], last[j], query_block, (carry, of_block)
        )
        originals = k, v, terms[1]
        return carry, jax.tree.map(lambda a, b: a.astype(b.dtype), of_block, originals)

    dq, dquery_terms = _zeros((x.q, x.query_terms))
    carry = dq, jnp.zeros_like(dq[0, ..., :1, :1]), dquery_terms
    blocks_k = jnp.arange(x.k.shape[0], dtype=jnp.int32)
    (dq, dslopes, dquery_terms), (dk, dv, dkey_terms) = jax.lax.scan(
        key_block, carry, blocks_k
    )
    dq = _rows(dq, q.shape[0]).astype(q.dtype)
    dk, dv = (_rows(a[:, :, None], k.shape[0]) for a in (dk, dv))
    if slopes is not None:
        dslopes = dslopes.reshape(slopes.shape).astype(slopes.dtype)
    dterms = tuple(
        None if a is None else _rows(da, a.shape[0]).astype(a.dtype)
        for a, da in zip(terms, (dquery_terms, dkey_terms), strict=True)
    )
    dslopes = None if slopes is None else dslopes
    return dq, dk, dv, None, None, dsinks, dslopes, dterms


_attention.defvjp(_attention_fwd, _attention_bwd)
# Outside of any jit, one program is compiled and not a hundred operations.
_jitted = jax.jit(_attention, static_argnums=0)


def _scores(
    options: _Options, x: _Operands, i: Array, j: Array
) -> tuple[Array, Array, tuple[Array, Array]]:
    """Scores of query block `i` against key block `j`, before the mask.

    Returns:
        Scores [K, G, block_q, block_k], the mask [block_q, block_k] of what is seen,
        and what the backward pass needs: the derivative of a score by its logit and the
        distances that ALiBi multiplies.
    """
    scores = options.scale * _dot("kgth,ksh->kgts", x.q[i], x.k[j])
    if options.buckets is not None:
        scores += tile_bias(
            options.buckets,
            None if x.query_terms is None else x.query_terms[i],
            None if x.key_terms is None else x.key_terms[j],
            i * options.block_q - j * options.block_k,
            (options.block_q, options.block_k),
        )
    derivative = jnp.float32(1.0)
    if options.softcap is not None:
        capped = jnp.tanh(scores / options.softcap)
        scores = options.softcap * capped
        derivative = 1.0 - capped * capped
    columns = j * options.block_k + jnp.arange(options.block_k, dtype=jnp.int32)
    mask = (x.start[i][:, None] <= columns) & (columns < x.stop[i][:, None])
    distance = jnp.abs(x.diagonal[i][:, None] - columns).astype(jnp.float32)
    if x.slopes is not None:
        scores -= x.slopes * distance
    return scores, mask, (derivative, distance)


def _zeros(tree: Any) -> Any:
    """Sums in fp32 that start from nothing, as many as there are arrays."""
    return jax.tree.map(lambda a: jnp.zeros_like(a, dtype=jnp.float32), tree)


def _dot(subscripts: str, a: Array, b: Array) -> Array:
    return jnp.einsum(subscripts, a, b, preferred_element_type=jnp.float32)


def _operands(
    options: _Options,
    q: Array,
    k: Array,
    v: Array,
    cu_q: Array,
    cu_k: Array,
    slopes: Array | None,
    terms: _Terms,
) -> _Operands:
    num_kv = k.shape[1]
    groups = q.shape[1] // num_kv
    # Rows of no sequence may hold anything, NaN too, and 0 * NaN is NaN.
    q = jnp.where(_inside(cu_q, q.shape[0])[:, None, None], q, 0)
    query_terms, key_terms = terms
    if query_terms is not None:
        inside = _inside(cu_q, q.shape[0])[:, None, None]
        query_terms = jnp.where(inside, query_terms, 0)
        query_terms = _query_blocks(query_terms, groups, options.block_q)
    inside = _inside(cu_k, k.shape[0])[:, None, None]
    k, v = (jnp.where(inside, a, 0) for a in (k, v))
    if key_terms is not None:
        key_terms = jnp.where(inside, key_terms, 0)
        key_terms = _query_blocks(key_terms, groups, options.block_k)
    ranges = visible_ranges(cu_q, cu_k, q.shape[0], options.window)
    start, stop, diagonal = (_cut(r, options.block_q) for r in ranges)
    if slopes is not None:
        slopes = slopes.astype(jnp.float32).reshape(num_kv, groups, 1, 1)
    return _Operands(
        q=_query_blocks(q, groups, options.block_q),
        k=_cut(k, options.block_k).swapaxes(1, 2),
        v=_cut(v, options.block_k).swapaxes(1, 2),
        start=start,
        stop=stop,
        diagonal=diagonal,
        slopes=slopes,
        query_terms=query_terms,
        key_terms=key_terms,
    )


def _inside(cu_seqlens: Array, num_tokens: int) -> Array:
    """Which rows belong to a sequence."""
    return jnp.arange(num_tokens, dtype=jnp.int32) < cu_seqlens[-1]


def _cut(x: Array, block: int) -> Array:
    """[T, ...] to [blocks, block, ...], the last block filled with zeros."""
    blocks = max(1, -(-x.shape[0] // block))
    pad = [(0, blocks * block - x.shape[0])] + [(0, 0)] * (x.ndim - 1)
    return jnp.pad(x, pad).reshape(blocks, block, *x.shape[1:])


def _query_blocks(x: Array, groups: int, block: int) -> Array:
    """[T, N, H] to [blocks, K, G, block, H]."""
    x = _cut(x, block)
    x = x.reshape(*x.shape[:2], x.shape[2] // groups, groups, x.shape[3])
    return x.transpose(0, 2, 3, 1, 4)


def _rows(x: Array, num_tokens: int) -> Array:
    """The inverse of `_query_blocks`: [blocks, K, G, block, H] to [T, N, H]."""
    x = x.transpose(0, 3, 1, 2, 4)
    x = x.reshape(x.shape[0] * x.shape[1], x.shape[2] * x.shape[3], x.shape[4])
    return x[:num_tokens]


def _touched_blocks(start: Array, stop: Array, block: int) -> tuple[Array, Array]:
    """For each block of rows, the range of column blocks that its intervals touch.

    Args:
        start: [blocks, rows], where the interval of a row starts.
        stop: [blocks, rows], where it stops; equal to `start` if it is empty.
        block: columns of a block.

    Returns:
        ``(first, last)``, int32 [blocks] each, the bounds of a loop; where nothing is
        seen ``first > last``, and no union with other bounds grows by it.
    """
    seen = start < stop
    limit = jnp.iinfo(jnp.int32).max
    first = jnp.min(jnp.where(seen, start, limit), axis=1) // block
    last = -(-jnp.max(jnp.where(seen, stop, 0), axis=1) // block)
    return _union(first, last)


@custom_vmap
def _union(first: Array, last: Array) -> tuple[Array, Array]:
    """Loop bounds that stay scalars under `jax.vmap`: the union over the batch.

    A loop with batched bounds would turn each slice into a gather and each carry into
    a select. Blocks that one element of the batch does not need are masked there.
    """
    return first, last


@_union.def_vmap
def _union_of_batch(
    axis_size: int, in_batched: list[bool], first: Array, last: Array
) -> tuple[tuple[Array, Array], tuple[bool, bool]]:
    del axis_size
    first = jnp.min(first, axis=0) if in_batched[0] else first
    last = jnp.max(last, axis=0) if in_batched[1] else last
    return _union(first, last), (False, False)


def _round_up(x: int, multiple: int) -> int:
    return max(multiple, -(-x // multiple) * multiple)
