"""Paged attention in Triton: sequences in splits of fixed size, and their sum.

As Flash-Decoding splits a sequence, but with splits that have the same size whatever
the batch, so that the result of a sequence does not depend on the others. All queries
of a key/value head, of all new tokens, are the rows of one tile.

Axes: B sequences, R new tokens each, N query heads, K key/value heads, H head dim, L
layers, P pages, G tokens of a page, W pages of a row's table, Z splits of a row, M rows
of a tile: R N / K, rounded up to what tensor cores take.
"""

# ruff: noqa: ANN001, ANN201, ANN202

from typing import no_type_check

import triton
import triton.language as tl


_LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
@no_type_check
def _tokens(lengths, num_new, row, capacity: tl.constexpr):
    """Tokens of a sequence before the step, new ones, and those after it."""
    before, new = tl.load(lengths + row), tl.load(num_new + row)
    total = tl.minimum(before + new, capacity)
    return before, new, tl.where(new > 0, total, 0)


@triton.jit
@no_type_check
def attend_split(
    q, pages, layer, table, lengths, num_new, kv_scales,
    sums, tops, totals,
    queries: tl.constexpr, heads: tl.constexpr, kv_heads: tl.constexpr,
    head_dim: tl.constexpr, num_pages: tl.constexpr, page: tl.constexpr,
    width: tl.constexpr, split: tl.constexpr, splits: tl.constexpr,
    block: tl.constexpr, block_m: tl.constexpr, block_h: tl.constexpr,
    scale: tl.constexpr, softcap: tl.constexpr, window: tl.constexpr,
    has_scales: tl.constexpr,
):  # fmt: skip
    """A split of the keys of one sequence and key/value head: its online softmax.

    q [B,R,N,H], pages [L,P,2,K,G,H] with the new tokens in them, kv_scales [L,P,2,K].
    Writes sums [B,K,Z,M,H], and tops and totals [B,K,Z,M]; of splits past the end of a
    sequence nothing.
    """
    row, kv_head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    before, new, total = _tokens(lengths, num_new, row, width * page)
    if part * split >= total:
        return
    group: tl.constexpr = heads // kv_heads
    line = tl.arange(0, block_m)
    token = line // group
    real = (line < queries * group) & (token < new)
    position = before + token
    column = tl.arange(0, block_h)
    inside = column < head_dim
    place = (row * queries + token) * heads + kv_head * group + line % group
    q_tile = tl.load(
        q + place[:, None] * head_dim + column[None, :],
        mask=real[:, None] & inside[None, :],
        other=0.0,
    )
    acc = tl.zeros((block_m, block_h), tl.float32)
    most = tl.full((block_m,), float("-inf"), tl.float32)
    weight = tl.zeros((block_m,), tl.float32)

    start, stop = part * split, tl.minimum(total, part * split + split)
    begin = start
    if window > 0:  # before it is what no query sees, perhaps in a page of others
        begin = tl.maximum(start, before - window + 1)
    first_page = tl.load(layer).to(tl.int64) * num_pages
    for first in range(start + (begin - start) // block * block, stop, block):
        at = first + tl.arange(0, block)
        held = (at >= begin) & (at < stop)
        number = tl.load(table + row * width + at // page, mask=held, other=-1)
        held = held & (number >= 0) & (number < num_pages)
        where = (first_page + tl.where(held, number, 0)) * (2 * kv_heads) + kv_head
        tile = pages + (where * page + at % page)[:, None] * head_dim + column[None, :]
        mask = held[:, None] & inside[None, :]
        keys = tl.load(tile, mask=mask, other=0.0).to(q_tile.dtype)
        scores = tl.dot(q_tile, tl.trans(keys))
        if has_scales:
            scores *= tl.load(kv_scales + where, mask=held, other=0.0)[None, :]
        if softcap > 0:
            # tanh(u) = 2 sigmoid(2 u) - 1
            capped = 2.0 * tl.sigmoid(scores * (2.0 * scale / softcap)) - 1.0
            scores = capped * (softcap * _LOG2_E)
        else:
            scores = scores * (scale * _LOG2_E)
        seen = held[None, :] & (at[None, :] <= position[:, None]) & real[:, None]
        if window > 0:
            seen = seen & (at[None, :] > position[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
        grown = tl.maximum(most, tl.max(scores, 1))
        shared = tl.where(grown == float("-inf"), 0.0, grown)
        weights = tl.exp2(scores - shared[:, None])
        shrink = tl.exp2(most - shared)
        weight = weight * shrink + tl.sum(weights, 1)
        if has_scales:
            of_values = tl.load(kv_scales + where + kv_heads, mask=held, other=0.0)
            weights *= of_values[None, :]
        values = tl.load(tile + kv_heads * page * head_dim, mask=mask, other=0.0)
        values = values.to(q_tile.dtype)
        acc = tl.dot(weights.to(q_tile.dtype), values, acc * shrink[:, None])
        most = grown

    line += ((row * kv_heads + kv_head) * splits + part) * block_m
    tl.store(tops + line, most)
    tl.store(totals + line, weight)
    lines = line.to(tl.int64)[:, None] * head_dim
    tl.store(sums + lines + column[None, :], acc, mask=inside[None, :])


@triton.jit
@no_type_check
def join_splits(
    sums, tops, totals, lengths, num_new,
    out,
    queries: tl.constexpr, heads: tl.constexpr, kv_heads: tl.constexpr,
    head_dim: tl.constexpr, page: tl.constexpr, width: tl.constexpr,
    split: tl.constexpr, splits: tl.constexpr,
    block_m: tl.constexpr, block_h: tl.constexpr,
):  # fmt: skip
    """The output of one sequence and key/value head, [B,R,N,H], from its splits."""
    row, kv_head = tl.program_id(0), tl.program_id(1)
    _, new, total = _tokens(lengths, num_new, row, width * page)
    group: tl.constexpr = heads // kv_heads
    line = tl.arange(0, block_m)
    token = line // group
    column = tl.arange(0, block_h)
    inside = column < head_dim
    acc = tl.zeros((block_m, block_h), tl.float32)
    most = tl.full((block_m,), float("-inf"), tl.float32)
    weight = tl.zeros((block_m,), tl.float32)
    for part in range(tl.cdiv(total, split)):
        lines = line + ((row * kv_heads + kv_head) * splits + part) * block_m
        top = tl.load(tops + lines)
        grown = tl.maximum(most, top)
        shared = tl.where(grown == float("-inf"), 0.0, grown)
        shrink, share = tl.exp2(most - shared), tl.exp2(top - shared)
        weight = weight * shrink + tl.load(totals + lines) * share
        place = lines.to(tl.int64)[:, None] * head_dim + column[None, :]
        found = tl.load(sums + place, mask=inside[None, :], other=0.0)
        acc = acc * shrink[:, None] + found * share[:, None]
        most = grown
    # A weight that is NaN has seen keys.
    seen = (weight != 0) & (token < new)
    result = tl.where(seen[:, None], acc / tl.where(seen, weight, 1.0)[:, None], 0.0)
    place = (row * queries + token) * heads + kv_head * group + line % group
    tl.store(
        out + place[:, None] * head_dim + column[None, :],
        result.to(out.dtype.element_ty),
        mask=(line < queries * group)[:, None] & inside[None, :],
    )
