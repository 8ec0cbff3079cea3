"""Paged attention in plain JAX; runs anywhere.

Axes: B sequences, R new tokens each, N query heads, K key/value heads, H head dim, L
layers, P pages, G tokens of a page, W pages of a row's table.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.paged_attention.inputs import Inputs, Scores, as_stored


_CHUNK = 512
"""Tokens of a row that are gathered at a time, about."""


def append(x: Inputs) -> Float[Array, "L P 2 K G H"]:
    """The pages with the new tokens in them; what has no place is dropped."""
    num_pages, size = x.pages.shape[1], x.pages.shape[4]
    positions = x.positions()
    real = jnp.arange(x.q.shape[1], dtype=jnp.int32) < x.num_new[:, None]
    index = jnp.minimum(positions // size, x.table.shape[1] - 1)
    page = jnp.take_along_axis(x.table, index, axis=1)
    # A negative index would count from the end.
    inside = real & (positions < x.capacity) & (page >= 0)
    page = jnp.where(inside, page, num_pages)
    scales = None
    if x.kv_scales is not None:
        scales = x.kv_scales.at[x.layer, page].get(mode="fill", fill_value=1.0)
    new = as_stored(x.kv, x.pages.dtype, scales)
    return x.pages.at[x.layer, page, :, :, positions % size].set(new, mode="drop")


def paged_attention(
    x: Inputs, scores: Scores
) -> tuple[Float[Array, "B R N H"], Float[Array, "L P 2 K G H"]]:
    """See `pallas_kernels.paged_attention.paged_attention`; the arguments are checked.

    A loop over the tables, as far as the longest row goes: what is gathered at a time
    has a fixed size.
    """
    x = x._replace(pages=append(x))
    rows, num_new, _, head_dim = x.q.shape
    kv_heads, size = x.pages.shape[3:5]
    width = max(1, min(_CHUNK // size, x.table.shape[1]))
    missing = -x.table.shape[1] % width
    x = x._replace(table=jnp.pad(x.table, ((0, 0), (0, missing))))
    queries = x.q.astype(jnp.float32).reshape(rows, num_new, kv_heads, -1, head_dim)
    totals, positions = x.totals(), x.positions()
    step = functools.partial(_step, x, scores, width, queries, totals, positions)
    empty = jnp.zeros_like(queries)
    column = empty[..., :1]
    chunks = -(-jnp.max(totals) // (width * size))
    sums, _, total = lax.fori_loop(0, chunks, step, (empty, column - jnp.inf, column))
    real = jnp.arange(num_new, dtype=jnp.int32) < x.num_new[:, None]
    # A sum that is NaN has seen keys.
    seen = (total != 0) & real[..., None, None, None]
    out = jnp.where(seen, sums / jnp.where(seen, total, 1.0), 0.0)
    return out.reshape(x.q.shape).astype(x.q.dtype), x.pages


type _State = tuple[Array, Array, Array]
"""Sums, the largest score and the sum of weights of each query."""


def _step(
    x: Inputs,
    scores: Scores,
    width: int,
    queries: Float[Array, "B R K g H"],
    totals: Array,
    positions: Array,
    i: Array,
    state: _State,
) -> _State:
    """Adds `width` pages of each row."""
    sums, highest, total = state
    size = x.pages.shape[4]
    ids = lax.dynamic_slice_in_dim(x.table, i * width, width, axis=1)
    at = i * width * size + jnp.arange(width * size, dtype=jnp.int32)
    held = at < totals[:, None]
    distance = positions[..., None] - at  # [B, R, S]
    mask = held[:, None] & (distance >= 0)
    first = jnp.zeros_like(totals)
    if scores.window is not None:
        mask &= distance < scores.window
        first = positions[:, 0] - scores.window + 1
    # What no query attends to may be NaN, and zero times NaN is NaN.
    held &= at >= first[:, None]
    ids = jnp.where(held.reshape(*ids.shape, size).any(2), ids, 0)
    found = x.pages.at[x.layer, ids].get(mode="fill", fill_value=0)
    found = found.astype(jnp.float32)  # [B, pages, 2, K, G, H]
    if x.kv_scales is not None:
        scales = x.kv_scales.at[x.layer, ids].get(mode="fill", fill_value=1.0)
        found = found * scales[..., None, None]
    found = jnp.moveaxis(found, 1, 3)  # [B, 2, K, pages, G, H]
    found = found.reshape(*found.shape[:3], -1, found.shape[5])
    found = jnp.where(held[:, None, None, :, None], found, 0.0)
    s = jnp.einsum("brkgh,bksh->brkgs", queries, found[:, 0]) * scores.scale
    if scores.softcap is not None:
        s = scores.softcap * jnp.tanh(s / scores.softcap)
    s = jnp.where(mask[:, :, None, None], s, -jnp.inf)
    grown = jnp.maximum(highest, jnp.max(s, axis=-1, keepdims=True))
    safe = jnp.where(grown == -jnp.inf, 0.0, grown)
    weights, factor = jnp.exp(s - safe), jnp.exp(highest - safe)
    values = jnp.einsum("brkgs,bksh->brkgh", weights, found[:, 1])
    total = total * factor + jnp.sum(weights, axis=-1, keepdims=True)
    return sums * factor + values, grown, total
