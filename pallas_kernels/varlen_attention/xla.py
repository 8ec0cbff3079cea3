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
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import Unsupported
from pallas_kernels.mosaic import DeviceSpec
from pallas_kernels.varlen_attention.inputs import Inputs, Passes, Scores
from pallas_kernels.varlen_attention.relative import tile_bias, tile_gradient
from pallas_kernels.varlen_attention.segments import (
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


class _Operands(NamedTuple):
    """Arrays of a row, cut into blocks; rows of no sequence are zero."""

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
    x: Inputs, scores: Scores, *, device: DeviceSpec | None, config: object
) -> Passes:
    """The passes in plain JAX, which serve all inputs."""
    if config is None:
        return default_passes(scores, x, device)
    if not isinstance(config, XlaConfig):
        raise Unsupported(
            f"xla varlen_attention takes an XlaConfig, got config={config!r}; pass "
            "the config of the implementation that you name"
        )
    return _passes(scores, x, config)


def default_passes(scores: Scores, x: Inputs, device: DeviceSpec | None) -> Passes:
    """The passes in plain JAX, in blocks that suit the device.

    A GPU needs large matmuls to hide the launches of each step of the loops: on an
    H200 blocks of 512 are four times as fast as 128. A CPU works in its cache.
    """
    size = 128 if device is None else 512
    return _passes(scores, x, XlaConfig(block_q=size, block_k=size))


def _passes(scores: Scores, x: Inputs, config: XlaConfig) -> "_Loops":
    return _Loops(
        scores,
        min(config.block_q, _round_up(x.q.shape[1], 8)),
        min(config.block_k, _round_up(x.k.shape[1], 8)),
    )


@dataclasses.dataclass(frozen=True)
class _Loops:
    """The passes by loops over blocks of the scores."""

    scores: Scores
    block_q: int
    block_k: int

    def forward(self, x: Inputs, with_rest: bool) -> tuple[Array, Array, Array | None]:
        """``(out, lse, rest)``."""
        x = x.widened()
        exact, lse = jax.vmap(functools.partial(_forward, self), (_axes(x),))(x)
        if exact.dtype == x.q.dtype:
            return exact, lse, None
        # Not by `astype` alone, whose rounding XLA may leave out.
        kind = jnp.finfo(x.q.dtype)
        out = jax.lax.reduce_precision(exact, kind.nexp, kind.nmant)
        rest = (exact - out).astype(x.q.dtype) if with_rest else None
        return out.astype(x.q.dtype), lse, rest

    def backward(self, x: Inputs, dout: Array, lse: Array, delta: Array) -> Inputs:
        """The gradients."""
        run = jax.vmap(functools.partial(_backward, self), (_axes(x), 0, 0, 0))
        grads = run(x, dout, lse, delta)
        # Of all rows, [R, N] to [N].
        slopes = jax.tree.map(lambda da: jnp.sum(da, axis=0), grads.slopes)
        return jax.tree.map(
            lambda da, a: da.astype(a.dtype), grads._replace(slopes=slopes), x
        )


def _axes(x: Inputs) -> Inputs:
    """Return the axes of `jax.vmap` over rows, by input."""
    return jax.tree.map(lambda _: 0, x)._replace(sinks=None, slopes=None)


def _forward(loops: _Loops, x: Inputs) -> tuple[Array, Array]:
    """``(out, lse)`` of one row, both fp32."""
    o = _operands(loops, x)
    blocks_q, num_kv, groups, *_ = o.q.shape
    first, last = _touched_blocks(o.start, o.stop, loops.block_k)
    # Made from an operand, a carry has its sharding and varies over its manual axes,
    # as what the loop returns does.
    column = jnp.zeros_like(o.q[0, ..., :1], dtype=jnp.float32)
    sink = jnp.float32(-jnp.inf)
    if x.sinks is not None:
        sink = x.sinks.astype(jnp.float32).reshape(num_kv, groups, 1, 1)  # [K, G, 1, 1]
    # A sink is a key with the value zero that every query attends to first.
    acc = jnp.broadcast_to(column, (*column.shape[:3], x.v.shape[-1]))
    carry = acc, column + sink, column + (sink > -jnp.inf).astype(jnp.float32)

    def query_block(i: Array) -> tuple[Array, Array]:
        def key_block(j: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
            acc, m, total = carry
            scores, mask, _ = _scores(loops, o, i, j)
            scores = jnp.where(mask, scores, -jnp.inf)
            m_new = jnp.maximum(m, jnp.max(scores, axis=-1, keepdims=True))
            m_safe = jnp.where(m_new == -jnp.inf, 0.0, m_new)
            p = jnp.exp(scores - m_safe)
            alpha = jnp.exp(m - m_safe)
            total = alpha * total + jnp.sum(p, axis=-1, keepdims=True)
            pv = _dot("kgts,ksv->kgtv", p.astype(o.v.dtype), o.v[j])  # [K, G, T, Hv]
            return alpha * acc + pv, m_new, total

        acc, m, total = jax.lax.fori_loop(first[i], last[i], key_block, carry)
        seen = total > 0.0
        total = jnp.where(seen, total, 1.0)
        out = acc / total
        lse = jnp.where(seen, m + jnp.log(total), -jnp.inf)
        return out, lse

    out, lse = jax.lax.map(query_block, jnp.arange(blocks_q, dtype=jnp.int32))
    num_queries = x.q.shape[0]
    inside = _inside(x.cu_q, num_queries)
    out = jnp.where(inside[:, None, None], _rows(out, num_queries), 0)
    lse = jnp.where(inside[:, None], _rows(lse, num_queries)[:, :, 0], -jnp.inf)
    return out, lse


def _backward(
    loops: _Loops, x: Inputs, dout: Array, lse: Array, delta: Array
) -> Inputs:
    """Compute the gradients of one row."""
    o = _operands(loops, x)
    scale, relative = loops.scores.scale, loops.scores.relative
    num_queries, num_keys = x.q.shape[0], x.k.shape[0]
    groups = x.q.shape[1] // x.k.shape[1]
    # Rows past the last sequence may hold anything.
    dout = jnp.where(_inside(x.cu_q, num_queries)[:, None, None], dout, 0)
    lse = jnp.where(lse > -jnp.inf, lse, 0.0)
    dout_b, lse_b, delta_b = (
        _query_blocks(a, groups, loops.block_q)
        for a in (dout, lse[..., None], delta[..., None])
    )
    # The same ranges seen from the keys: which queries look at a key.
    left, right = loops.scores.window
    cu_q, cu_k = _packing(x)
    start, stop, _ = visible_ranges(cu_k, cu_q, num_keys, (right, left))
    block_k = loops.block_k
    first, last = _touched_blocks(
        _cut(start, block_k), _cut(stop, block_k), loops.block_q
    )

    def key_block(carry: tuple, j: Array) -> tuple:
        def query_block(i: Array, carry: tuple) -> tuple:
            (dq, dslopes, dquery_terms), (dk, dv, dkey_terms) = carry
            scores, mask, (derivative, distance) = _scores(loops, o, i, j)
            p = jnp.where(mask, jnp.exp(scores - lse_b[i]), 0.0)
            dv += _dot("kgts,kgtv->ksv", p.astype(o.v.dtype), dout_b[i])
            dp = _dot("kgtv,ksv->kgts", dout_b[i], o.v[j])
            ds = p * (dp - delta_b[i])
            if x.slopes is not None:
                dslopes -= jnp.sum(ds * distance, axis=(-1, -2), keepdims=True)
            ds = ds * derivative
            if relative is not None:
                buckets, *_ = relative
                first = i * loops.block_q - j * loops.block_k
                by_query, by_key = tile_gradient(buckets, ds, first, relative[1:])
                if by_query is not None:
                    dquery_terms = dquery_terms.at[i].add(by_query)
                if by_key is not None:
                    dkey_terms += by_key
            ds = (scale * ds).astype(o.q.dtype)
            dk += _dot("kgts,kgth->ksh", ds, o.q[i])
            dq = dq.at[i].add(_dot("kgts,ksh->kgth", ds, o.k[j]))
            return (dq, dslopes, dquery_terms), (dk, dv, dkey_terms)

        terms_j = None if o.key_terms is None else o.key_terms[j]
        of_block = _zeros((o.k[j], o.v[j], terms_j))
        carry, of_block = jax.lax.fori_loop(
            first[j], last[j], query_block, (carry, of_block)
        )
        originals = x.k, x.v, x.key_terms
        return carry, jax.tree.map(lambda a, b: a.astype(b.dtype), of_block, originals)

    dq, dquery_terms = _zeros((o.q, o.query_terms))
    carry = dq, jnp.zeros_like(dq[0, ..., :1, :1]), dquery_terms
    blocks_k = jnp.arange(o.k.shape[0], dtype=jnp.int32)
    (dq, dslopes, dquery_terms), (dk, dv, dkey_terms) = jax.lax.scan(
        key_block, carry, blocks_k
    )
    dk, dv = (_rows(a[:, :, None], num_keys) for a in (dk, dv))  # [S, K, _] each
    dterms = [
        None if a is None else _rows(da, a.shape[0])
        for a, da in ((x.query_terms, dquery_terms), (x.key_terms, dkey_terms))
    ]
    return x._replace(
        q=_rows(dq, num_queries),
        k=dk,
        v=dv,
        slopes=None if x.slopes is None else dslopes.reshape(x.slopes.shape),  # [N]
        query_terms=dterms[0],
        key_terms=dterms[1],
    )


def _scores(
    loops: _Loops, o: _Operands, i: Array, j: Array
) -> tuple[Array, Array, tuple[Array, Array]]:
    """Scores of query block `i` against key block `j`, before the mask.

    Returns:
        Scores [K, G, block_q, block_k], the mask [block_q, block_k] of what is seen,
        and what the backward pass needs: the derivative of a score by its logit and the
        distances that ALiBi multiplies.
    """
    scores = loops.scores.scale * _dot("kgth,ksh->kgts", o.q[i], o.k[j])
    if loops.scores.relative is not None:
        scores += tile_bias(
            loops.scores.relative[0],
            None if o.query_terms is None else o.query_terms[i],
            None if o.key_terms is None else o.key_terms[j],
            i * loops.block_q - j * loops.block_k,
            (loops.block_q, loops.block_k),
        )
    derivative = jnp.float32(1.0)
    if loops.scores.softcap is not None:
        capped = jnp.tanh(scores / loops.scores.softcap)
        scores = loops.scores.softcap * capped
        derivative = 1.0 - capped * capped
    columns = j * loops.block_k + jnp.arange(loops.block_k, dtype=jnp.int32)  # [S]
    mask = (o.start[i][:, None] <= columns) & (columns < o.stop[i][:, None])
    distance = jnp.abs(o.diagonal[i][:, None] - columns).astype(jnp.float32)
    if o.slopes is not None:
        scores -= o.slopes * distance
    return scores, mask, (derivative, distance)


def _zeros(tree: Any) -> Any:
    """Sums in fp32 that start from nothing, as many as there are arrays."""
    return jax.tree.map(lambda a: jnp.zeros_like(a, dtype=jnp.float32), tree)


def _dot(subscripts: str, a: Array, b: Array) -> Array:
    return jnp.einsum(subscripts, a, b, preferred_element_type=jnp.float32)


def _packing(x: Inputs) -> tuple[Array, Array]:
    """Prefix sums of queries and keys of one row, which end with the buffers."""
    return (
        cut_cu_seqlens(x.cu_q, x.q.shape[0]),
        cut_cu_seqlens(x.packing_of_keys, x.k.shape[0]),
    )


def _operands(loops: _Loops, x: Inputs) -> _Operands:
    """Cut the inputs of one row into blocks."""
    num_queries, num_heads, _ = x.q.shape
    num_kv = x.k.shape[1]
    groups = num_heads // num_kv
    cu_q, cu_k = _packing(x)
    block_q, block_k = loops.block_q, loops.block_k
    slopes = x.slopes
    if slopes is not None:
        slopes = slopes.astype(jnp.float32)
        slopes = slopes.reshape(num_kv, groups, 1, 1)  # [K, G, 1, 1]

    def clean(a: Array, cu_seqlens: Array) -> Array:
        # Rows of no sequence may hold anything, NaN too, and 0 * NaN is NaN.
        return jnp.where(_inside(cu_seqlens, a.shape[0])[:, None, None], a, 0)

    def terms(a: Array | None, cu_seqlens: Array, block: int) -> Array | None:
        if a is None:
            return None
        return _query_blocks(clean(a, cu_seqlens), groups, block)

    start, stop, diagonal = (
        _cut(r, block_q)
        for r in visible_ranges(cu_q, cu_k, num_queries, loops.scores.window)
    )
    return _Operands(
        q=_query_blocks(clean(x.q, cu_q), groups, block_q),
        k=_cut(clean(x.k, cu_k), block_k).swapaxes(1, 2),  # [blocks, K, S, H]
        v=_cut(clean(x.v, cu_k), block_k).swapaxes(1, 2),  # [blocks, K, S, Hv]
        start=start,
        stop=stop,
        diagonal=diagonal,
        slopes=slopes,
        query_terms=terms(x.query_terms, cu_q, block_q),
        key_terms=terms(x.key_terms, cu_k, block_k),
    )


def _inside(cu_seqlens: Array | np.ndarray, num_tokens: int) -> Array:
    """Mark the rows that belong to a sequence."""
    return jnp.arange(num_tokens, dtype=jnp.int32) < cu_seqlens[-1]


def _cut(x: Array, block: int) -> Array:
    """[T, ...] to [blocks, block, ...], the last block filled with zeros."""
    blocks = max(1, -(-x.shape[0] // block))
    pad = [(0, blocks * block - x.shape[0])] + [(0, 0)] * (x.ndim - 1)
    return jnp.pad(x, pad).reshape(blocks, block, *x.shape[1:])  # [blocks, block, ...]


def _query_blocks(x: Array, groups: int, block: int) -> Array:
    """[T, N, H] to [blocks, K, G, block, H]."""
    x = _cut(x, block)
    heads = x.shape[2] // groups, groups
    x = x.reshape(*x.shape[:2], *heads, x.shape[3])  # [blocks, block, K, G, H]
    return x.transpose(0, 2, 3, 1, 4)  # [blocks, K, G, block, H]


def _rows(x: Array, num_tokens: int) -> Array:
    """The inverse of `_query_blocks`: [blocks, K, G, block, H] to [T, N, H]."""
    x = x.transpose(0, 3, 1, 2, 4)  # [blocks, block, K, G, H]
    x = x.reshape(x.shape[0] * x.shape[1], x.shape[2] * x.shape[3], x.shape[4])
    return x[:num_tokens]  # [T, N, H]


def _touched_blocks(start: Array, stop: Array, block: int) -> tuple[Array, Array]:
    """Return the range of column blocks that each block of rows touches.

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
