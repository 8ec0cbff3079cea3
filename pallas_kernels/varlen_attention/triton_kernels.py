"""Variable-length attention in Triton: one kernel forward, two backward.

FlashAttention-2 (arXiv 2307.08691) over tiles. A tile is some queries of one sequence
(or some keys, in the kernel of their gradients). Each program finds its own: where it
begins, where its sequence ends, and where the sequence's keys (queries) begin and end,
all as rows of the packed buffers. So every program has one interval to walk through,
whatever the mask: its first and last steps are masked, those between are not. Rows past
the last sequence form tiles that see nothing, and get zeros.

Scores are held as logarithms to the base 2: ``c * log2(e)``.

Axes: R rows of the batch, T packed queries, S packed keys, N query heads, K key/value
heads, G = N / K, H head dim of queries and keys, Hv head dim of values.
"""

# ruff: noqa: ANN001, ANN201, ANN202

from typing import no_type_check

import triton
import triton.language as tl


_LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
_LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
@no_type_check
def _scores(products, distance, slope, scale: tl.constexpr, softcap: tl.constexpr):
    """Scores to the base 2, and their derivative by the scaled product."""
    if softcap > 0:
        # tanh(u) = 2 sigmoid(2 u) - 1
        capped = 2.0 * tl.sigmoid(products * (2.0 * scale / softcap)) - 1.0
        scores = capped * (softcap * _LOG2_E)
        derivative = 1.0 - capped * capped
    else:
        scores = products * (scale * _LOG2_E)
        derivative = 1.0
    if slope is not None:
        scores -= slope * _LOG2_E * tl.abs(distance).to(tl.float32)
    return scores, derivative


@triton.jit
@no_type_check
def _find(
    tile, cu_rows, cu_columns,
    num_rows: tl.constexpr, num_columns: tl.constexpr,
    bounds: tl.constexpr, halvings: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """A tile of rows: ``(first, end, begin, stop)``.

    The first row and the end of its sequence, where the columns of its sequence begin,
    and where they end: at -1 past the last sequence. An empty tile begins at its end or
    later. Tiles of sequence b that begins at row c are those from ``c // block + b``
    on: that is room enough for each, and no sum over sequences before.
    """
    # By numbers, one at a time: of a sum over a vector the compiler does not see that
    # all threads have the same, and loops that depend on it are slower.
    sequence = 0
    for halving in tl.static_range(halvings):
        later = sequence + (1 << (halvings - 1 - halving))
        begin = tl.load(cu_rows + tl.minimum(later, bounds - 1))
        begin = tl.minimum(begin, num_rows)
        started = (later < bounds) & (begin // block + later <= tile)
        sequence = tl.where(started, later, sequence)
    # What follows the last sequence is one more.
    real = sequence < bounds - 1
    begin = tl.minimum(tl.load(cu_rows + sequence), num_rows)
    end = tl.load(cu_rows + sequence + 1, mask=real, other=num_rows)
    begin_columns = tl.minimum(tl.load(cu_columns + sequence), num_columns)
    end_columns = tl.load(cu_columns + sequence + 1, mask=real, other=-1)
    first = begin + (tile - begin // block - sequence) * block
    return (
        first,
        tl.minimum(end, num_rows),
        begin_columns,
        tl.minimum(end_columns, num_columns),
    )


@triton.jit
@no_type_check
def _columns_seen(
    first, last, end, begin_k, end_k, left: tl.constexpr, right: tl.constexpr
):
    """The keys that queries `first` to `last` see, and those that all of them see."""
    shift = end_k - end  # from a query to the key on its diagonal
    start, all_start = begin_k, begin_k
    stop, all_stop = end_k, end_k
    if left >= 0:
        start = tl.maximum(begin_k, first + shift - left)
        all_start = tl.maximum(begin_k, last + shift - left)
    if right >= 0:
        stop = tl.minimum(end_k, last + shift + right + 1)
        all_stop = tl.minimum(end_k, first + shift + right + 1)
    return start, stop, all_start, all_stop


@triton.jit
@no_type_check
def _rows_seeing(
    first, last, end, begin_q, end_q, left: tl.constexpr, right: tl.constexpr
):
    """The queries that see keys `first` to `last`, and those that see all of them."""
    shift = end - end_q
    start, all_start = begin_q, begin_q
    stop, all_stop = end_q, end_q
    if right >= 0:
        start = tl.maximum(begin_q, first - shift - right)
        all_start = tl.maximum(begin_q, last - shift - right)
    if left >= 0:
        stop = tl.minimum(end_q, last - shift + left + 1)
        all_stop = tl.minimum(end_q, first - shift + left + 1)
    return start, stop, all_start, all_stop


@triton.jit
@no_type_check
def _phases(start, stop, all_start, all_stop, block: tl.constexpr):
    """Where steps of `block` from `start` cease to need a mask, and need one again."""
    masked = tl.cdiv(tl.maximum(all_start - start, 0), block) * block
    whole = tl.maximum(tl.minimum(start + masked, stop), start)
    return whole, whole + tl.maximum(all_stop - whole, 0) // block * block


@triton.jit
@no_type_check
def _step(number, start, whole, ragged, block: tl.constexpr, masked: tl.constexpr):
    """Where a step begins: of those without a mask, or of those before and after."""
    if masked:
        before = tl.cdiv(whole - start, block)
        first = tl.where(number < before, start, ragged - before * block)
    else:
        first = whole
    return first + number * block


@triton.jit
@no_type_check
def _number_of_steps(
    start, stop, whole, ragged, block: tl.constexpr, masked: tl.constexpr
):
    """Steps without a mask, or those before and after them."""
    if masked:
        return tl.cdiv(whole - start, block) + tl.cdiv(stop - ragged, block)
    return (ragged - whole) // block


@triton.jit
@no_type_check
def _within(seen, i, j, shift, left: tl.constexpr, right: tl.constexpr):
    """Of what is seen otherwise, the keys j in the windows of queries i."""
    if left >= 0:
        seen = seen & (j >= i + shift - left)
    if right >= 0:
        seen = seen & (j <= i + shift + right)
    return seen


@triton.jit
@no_type_check
def _tile(
    a, rows, stride, columns, inside,
    width: tl.constexpr, block: tl.constexpr, masked: tl.constexpr,
):  # fmt: skip
    """[rows, block] of a matrix of `width` columns; where `masked`, zeros outside."""
    place = a + rows[:, None] * stride + columns[None, :]
    if masked and width != block:
        return tl.load(
            place, mask=inside[:, None] & (columns < width)[None, :], other=0.0
        )
    if masked:
        return tl.load(place, mask=inside[:, None], other=0.0)
    if width != block:
        return tl.load(place, mask=(columns < width)[None, :], other=0.0)
    return tl.load(place)


@triton.jit
@no_type_check
def _numbers(a, rows, inside, other: tl.constexpr, masked: tl.constexpr):
    """A number for each row; where `masked`, `other` outside."""
    if masked:
        return tl.load(a + rows, mask=inside, other=other)
    return tl.load(a + rows)


@triton.jit
@no_type_check
def _weigh(
    sums, weights, before, v, first, end_k,
    kv_heads: tl.constexpr, value_dim: tl.constexpr,
    block_k: tl.constexpr, block_v: tl.constexpr, masked: tl.constexpr,
):  # fmt: skip
    """Add the values of keys from `first` on by their weights."""
    j = first + tl.arange(0, block_k)
    columns = tl.arange(0, block_v)
    values = _tile(
        v, j, kv_heads * value_dim, columns, j < end_k, value_dim, block_v, masked
    )
    return tl.dot(weights.to(v.dtype.element_ty), values, sums * before[:, None])


@triton.jit
@no_type_check
def _attend(
    sums, most, total, weights, before, previous,
    q, k, v, i, start, stop, whole, ragged, end, end_k, slope,
    kv_heads: tl.constexpr, head_dim: tl.constexpr, value_dim: tl.constexpr,
    block_k: tl.constexpr, block_h: tl.constexpr, block_v: tl.constexpr,
    scale: tl.constexpr, softcap: tl.constexpr,
    left: tl.constexpr, right: tl.constexpr, late: tl.constexpr, masked: tl.constexpr,
):  # fmt: skip
    """The online softmax of a tile of queries over keys from `start` to `stop`.

    With `late` the weights of a step, which are returned, meet their values in the next
    step: these products run while the weights of that step are computed.
    """
    columns_h = tl.arange(0, block_h)
    shift = end_k - end
    steps = _number_of_steps(start, stop, whole, ragged, block_k, masked)
    for number in range(steps):
        first = _step(number, start, whole, ragged, block_k, masked)
        j = first + tl.arange(0, block_k)
        keys = _tile(
            k, j, kv_heads * head_dim, columns_h, j < end_k, head_dim, block_h, masked
        )
        products = tl.dot(q, tl.trans(keys))
        if late:
            sums = _weigh(
                sums, weights, before, v, previous, end_k,
                kv_heads, value_dim, block_k, block_v, masked,
            )  # fmt: skip
            previous = first
        # Of products alone the maximum is taken first, and the scale is part of the
        # multiply-add of the exponent.
        plain: tl.constexpr = softcap == 0 and slope is None and scale > 0
        factor: tl.constexpr = scale * _LOG2_E if plain else 1.0
        scores = products
        if not plain:
            distance = i[:, None] + shift - j[None, :]
            scores, _ = _scores(products, distance, slope, scale, softcap)
        if masked:
            seen = (j < end_k)[None, :]
            seen = _within(seen, i[:, None], j[None, :], shift, left, right)
            scores = tl.where(seen, scores, float("-inf"))
        new = tl.maximum(most, tl.max(scores, 1) * factor)
        # A query that has seen nothing yet: -inf - -inf is no number.
        shared = tl.where(new == float("-inf"), 0.0, new) if masked else new
        # Rounded where they are multiplied: only so do they stay in registers.
        weights = tl.exp2(scores * factor - shared[:, None])
        before = tl.exp2(most - shared)
        total = total * before + tl.sum(weights, 1)
        most = new
        if not late:
            sums = _weigh(
                sums, weights, before, v, first, end_k,
                kv_heads, value_dim, block_k, block_v, masked,
            )  # fmt: skip
    return sums, most, total, weights, before, previous


@triton.jit
@no_type_check
def forward(
    q, k, v, cu_q, cu_k, sinks, slopes,
    out, lse, rest,
    queries: tl.constexpr, keys: tl.constexpr,
    heads: tl.constexpr, kv_heads: tl.constexpr,
    head_dim: tl.constexpr, value_dim: tl.constexpr,
    bounds: tl.constexpr, halvings: tl.constexpr,
    block_q: tl.constexpr, block_k: tl.constexpr,
    block_h: tl.constexpr, block_v: tl.constexpr,
    scale: tl.constexpr, softcap: tl.constexpr,
    left: tl.constexpr, right: tl.constexpr,
    has_sinks: tl.constexpr, has_slopes: tl.constexpr, with_rest: tl.constexpr,
    late: tl.constexpr,
):  # fmt: skip
    """A tile of queries of one head: out, lse, and what rounding took from out.

    q [R,T,N,H], k [R,S,K,H], v [R,S,K,Hv], cu_q and cu_k [R,B+1], sinks and slopes
    [R,N].
    """
    # The last tiles first: under a causal mask they are the longest of a sequence.
    tiles = tl.num_programs(0)
    tile = tiles - 1 - tl.program_id(0)
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    first, end, begin_k, end_k = _find(
        tile, cu_q + row * bounds, cu_k + row * bounds,
        queries, keys, bounds, halvings, block_q,
    )  # fmt: skip
    if first >= end:
        return
    kv_head = head // (heads // kv_heads)
    q += row * (queries * heads * head_dim) + head * head_dim
    k += row * (keys * kv_heads * head_dim) + kv_head * head_dim
    v += row * (keys * kv_heads * value_dim) + kv_head * value_dim
    i = first + tl.arange(0, block_q)
    columns_h, columns_v = tl.arange(0, block_h), tl.arange(0, block_v)
    q_tile = _tile(q, i, heads * head_dim, columns_h, i < end, head_dim, block_h, True)
    slope = None
    if has_slopes:
        slope = tl.load(slopes + row * heads + head)
    sums = tl.zeros((block_q, block_v), tl.float32)
    most = tl.full((block_q,), float("-inf"), tl.float32)
    total = tl.zeros((block_q,), tl.float32)
    if has_sinks:  # one more key, whose value is zero
        most = (
            tl.zeros((block_q,), tl.float32)
            + tl.load(sinks + row * heads + head) * _LOG2_E
        )
        total += 1.0

    last = tl.minimum(first + block_q, end) - 1
    start, stop, all_start, all_stop = _columns_seen(
        first, last, end, begin_k, end_k, left, right
    )
    whole, ragged = _phases(start, stop, all_start, all_stop, block_k)
    weights = tl.zeros((block_q, block_k), tl.float32)
    before = tl.full((block_q,), 1.0, tl.float32)
    previous = whole
    for masked in tl.static_range(2):
        sums, most, total, weights, before, previous = _attend(
            sums, most, total, weights, before, previous,
            q_tile, k, v, i, start, stop, whole, ragged, end, end_k, slope,
            kv_heads, head_dim, value_dim, block_k, block_h, block_v,
            scale, softcap, left, right, late, masked,
        )  # fmt: skip
    if late:
        sums = _weigh(
            sums, weights, before, v, previous, end_k,
            kv_heads, value_dim, block_k, block_v, True,
        )  # fmt: skip

    inside = i < end
    there = total > 0
    exact = tl.where(there, 1.0 / tl.where(there, total, 1.0), 0.0)[:, None] * sums
    logs = (most + tl.log2(tl.where(there, total, 1.0))) * _LN_2
    logs = tl.where(there & (end_k >= 0), logs, float("-inf"))
    tl.store(lse + (row * queries + i) * heads + head, logs, mask=inside)
    rounded = exact.to(out.dtype.element_ty)
    place = (row * queries + i)[:, None] * (heads * value_dim)
    place += head * value_dim + columns_v[None, :]
    mask = inside[:, None] & (columns_v < value_dim)[None, :]
    tl.store(out + place, rounded, mask=mask)
    if with_rest:
        lost = exact - rounded.to(tl.float32)
        tl.store(rest + place, lost.to(rest.dtype.element_ty), mask=mask)


@triton.jit
@no_type_check
def _query_gradient(
    sums, by_slope,
    q, dout, logs, delta, k, v, i, start, stop, whole, ragged, end, end_k, slope,
    kv_heads: tl.constexpr, head_dim: tl.constexpr, value_dim: tl.constexpr,
    block_k: tl.constexpr, block_h: tl.constexpr, block_v: tl.constexpr,
    scale: tl.constexpr, softcap: tl.constexpr,
    left: tl.constexpr, right: tl.constexpr,
    has_slopes: tl.constexpr, masked: tl.constexpr,
):  # fmt: skip
    """Add what keys from `start` to `stop` give to dq / scale and the slope."""
    columns_h, columns_v = tl.arange(0, block_h), tl.arange(0, block_v)
    shift = end_k - end
    steps = _number_of_steps(start, stop, whole, ragged, block_k, masked)
    for number in range(steps):
        first = _step(number, start, whole, ragged, block_k, masked)
        j = first + tl.arange(0, block_k)
        inside = j < end_k
        keys = _tile(
            k, j, kv_heads * head_dim, columns_h, inside, head_dim, block_h, masked
        )
        values = _tile(
            v, j, kv_heads * value_dim, columns_v, inside, value_dim, block_v, masked
        )
        products = tl.dot(q, tl.trans(keys))
        distance = i[:, None] + shift - j[None, :]
        scores, derivative = _scores(products, distance, slope, scale, softcap)
        weights = tl.exp2(scores - logs[:, None])
        if masked:
            seen = (j < end_k)[None, :]
            seen = _within(seen, i[:, None], j[None, :], shift, left, right)
            weights = tl.where(seen, weights, 0.0)
        gradient = weights * (tl.dot(dout, tl.trans(values)) - delta[:, None])
        if has_slopes:
            by_slope -= tl.sum(gradient * tl.abs(distance).to(tl.float32), 1)
        sums = tl.dot((gradient * derivative).to(k.dtype.element_ty), keys, sums)
    return sums, by_slope


@triton.jit
@no_type_check
def gradient_of_queries(
    q, k, v, dout, lse, delta, cu_q, cu_k, slopes,
    dq, logs_of_head, delta_of_head, dslopes,
    queries: tl.constexpr, keys: tl.constexpr,
    heads: tl.constexpr, kv_heads: tl.constexpr,
    head_dim: tl.constexpr, value_dim: tl.constexpr,
    bounds: tl.constexpr, halvings: tl.constexpr,
    block_q: tl.constexpr, block_k: tl.constexpr,
    block_h: tl.constexpr, block_v: tl.constexpr,
    scale: tl.constexpr, softcap: tl.constexpr,
    left: tl.constexpr, right: tl.constexpr, has_slopes: tl.constexpr,
):  # fmt: skip
    """A tile of queries of one head: dq, and its part of the gradient of the slope.

    lse and delta [R,T,N]; dslopes [R,tiles,N]. Queries of a head become neighbors in
    logs_of_head and delta_of_head [R,N,T], with logarithms to the base 2 and +inf for
    queries that see nothing.
    """
    tiles = tl.num_programs(0)
    tile = tiles - 1 - tl.program_id(0)
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    first, end, begin_k, end_k = _find(
        tile, cu_q + row * bounds, cu_k + row * bounds,
        queries, keys, bounds, halvings, block_q,
    )  # fmt: skip
    if has_slopes:
        tl.store(dslopes + (row * tiles + tile) * heads + head, 0.0)
    if first >= end:
        return
    kv_head = head // (heads // kv_heads)
    q += row * (queries * heads * head_dim) + head * head_dim
    dout += row * (queries * heads * value_dim) + head * value_dim
    k += row * (keys * kv_heads * head_dim) + kv_head * head_dim
    v += row * (keys * kv_heads * value_dim) + kv_head * value_dim
    i = first + tl.arange(0, block_q)
    # Rows past the last sequence may hold anything in dout, and see no keys.
    inside = (i < end) & (end_k >= 0)
    lse += row * (queries * heads) + head
    delta += row * (queries * heads) + head
    logs = tl.load(lse + i * heads, mask=inside, other=float("-inf"))
    deltas = tl.load(delta + i * heads, mask=inside, other=0.0)
    columns_h, columns_v = tl.arange(0, block_h), tl.arange(0, block_v)
    q_tile = _tile(q, i, heads * head_dim, columns_h, inside, head_dim, block_h, True)
    dout_tile = _tile(
        dout, i, heads * value_dim, columns_v, inside, value_dim, block_v, True
    )
    logs = tl.where(logs > float("-inf"), logs * _LOG2_E, float("inf"))
    of_head = (row * heads + head) * queries
    tl.store(logs_of_head + of_head + i, logs, mask=inside)
    tl.store(delta_of_head + of_head + i, deltas, mask=inside)
    slope = None
    if has_slopes:
        slope = tl.load(slopes + row * heads + head)
    sums = tl.zeros((block_q, block_h), tl.float32)
    by_slope = tl.zeros((block_q,), tl.float32)

    last = tl.minimum(first + block_q, end) - 1
    start, stop, all_start, all_stop = _columns_seen(
        first, last, end, begin_k, end_k, left, right
    )
    whole, ragged = _phases(start, stop, all_start, all_stop, block_k)
    for masked in tl.static_range(2):
        sums, by_slope = _query_gradient(
            sums, by_slope, q_tile, dout_tile, logs, deltas, k, v, i,
            start, stop, whole, ragged, end, end_k, slope,
            kv_heads, head_dim, value_dim, block_k, block_h, block_v,
            scale, softcap, left, right, has_slopes, masked,
        )  # fmt: skip

    place = (row * queries + i)[:, None] * (heads * head_dim)
    place += head * head_dim + columns_h[None, :]
    mask = (i < end)[:, None] & (columns_h < head_dim)[None, :]
    tl.store(dq + place, (sums * scale).to(dq.dtype.element_ty), mask=mask)
    if has_slopes:
        tl.store(dslopes + (row * tiles + tile) * heads + head, tl.sum(by_slope, 0))


@triton.jit
@no_type_check
def _key_gradient(
    dk, dv,
    k, v, q, dout, lse, delta, j, start, stop, whole, ragged, end, end_q, slope,
    heads: tl.constexpr, head_dim: tl.constexpr, value_dim: tl.constexpr,
    block_q: tl.constexpr, block_h: tl.constexpr, block_v: tl.constexpr,
    scale: tl.constexpr, softcap: tl.constexpr,
    left: tl.constexpr, right: tl.constexpr, masked: tl.constexpr,
):  # fmt: skip
    """Add what queries from `start` to `stop` of a head give to dk / scale, dv."""
    columns_h, columns_v = tl.arange(0, block_h), tl.arange(0, block_v)
    shift = end - end_q
    steps = _number_of_steps(start, stop, whole, ragged, block_q, masked)
    for number in range(steps):
        first = _step(number, start, whole, ragged, block_q, masked)
        i = first + tl.arange(0, block_q)
        inside = i < end_q
        q_tile = _tile(
            q, i, heads * head_dim, columns_h, inside, head_dim, block_h, masked
        )
        dout_tile = _tile(
            dout, i, heads * value_dim, columns_v, inside, value_dim, block_v, masked
        )
        logs = _numbers(lse, i, inside, float("inf"), masked)
        deltas = _numbers(delta, i, inside, 0.0, masked)
        products = tl.dot(k, tl.trans(q_tile))  # [keys, queries]
        distance = i[None, :] + shift - j[:, None]
        scores, derivative = _scores(products, distance, slope, scale, softcap)
        weights = tl.exp2(scores - logs[None, :])
        # A query that is none has no weights, and what a key that is none gets goes
        # nowhere.
        if masked and (left >= 0 or right >= 0):
            seen = (i < end_q)[None, :]
            seen = _within(seen, i[None, :], j[:, None], shift, left, right)
            weights = tl.where(seen, weights, 0.0)
        dv = tl.dot(weights.to(v.dtype), dout_tile, dv)
        gradient = weights * (tl.dot(v, tl.trans(dout_tile)) - deltas[None, :])
        dk = tl.dot((gradient * derivative).to(k.dtype), q_tile, dk)
    return dk, dv


@triton.jit
@no_type_check
def gradient_of_keys(
    q, k, v, dout, lse, delta, cu_q, cu_k, slopes,
    dk, dv,
    queries: tl.constexpr, keys: tl.constexpr,
    heads: tl.constexpr, kv_heads: tl.constexpr,
    head_dim: tl.constexpr, value_dim: tl.constexpr,
    bounds: tl.constexpr, halvings: tl.constexpr,
    block_q: tl.constexpr, block_k: tl.constexpr,
    block_h: tl.constexpr, block_v: tl.constexpr,
    scale: tl.constexpr, softcap: tl.constexpr,
    left: tl.constexpr, right: tl.constexpr, has_slopes: tl.constexpr,
):  # fmt: skip
    """A tile of keys of one key/value head: dk and dv, over all queries of its group.

    lse and delta are those of heads, which `gradient_of_queries` writes.
    """
    tile, kv_head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = row.to(tl.int64)
    first, end, begin_q, end_q = _find(
        tile, cu_k + row * bounds, cu_q + row * bounds,
        keys, queries, bounds, halvings, block_k,
    )  # fmt: skip
    if first >= end:
        return
    k += row * (keys * kv_heads * head_dim) + kv_head * head_dim
    v += row * (keys * kv_heads * value_dim) + kv_head * value_dim
    q += row * (queries * heads * head_dim)
    dout += row * (queries * heads * value_dim)
    lse += row * (queries * heads)
    delta += row * (queries * heads)
    j = first + tl.arange(0, block_k)
    inside = (j < end) & (end_q >= 0)
    columns_h, columns_v = tl.arange(0, block_h), tl.arange(0, block_v)
    k_tile = _tile(
        k, j, kv_heads * head_dim, columns_h, inside, head_dim, block_h, True
    )
    v_tile = _tile(
        v, j, kv_heads * value_dim, columns_v, inside, value_dim, block_v, True
    )
    dk_sums = tl.zeros((block_k, block_h), tl.float32)
    dv_sums = tl.zeros((block_k, block_v), tl.float32)

    last = tl.minimum(first + block_k, end) - 1
    start, stop, all_start, all_stop = _rows_seeing(
        first, last, end, begin_q, end_q, left, right
    )
    whole, ragged = _phases(start, stop, all_start, all_stop, block_q)
    for head in range(
        kv_head * (heads // kv_heads), (kv_head + 1) * (heads // kv_heads)
    ):
        slope = None
        if has_slopes:
            slope = tl.load(slopes + row * heads + head)
        q_head, dout_head = q + head * head_dim, dout + head * value_dim
        for masked in tl.static_range(2):
            dk_sums, dv_sums = _key_gradient(
                dk_sums, dv_sums, k_tile, v_tile, q_head, dout_head,
                lse + head * queries, delta + head * queries, j,
                start, stop, whole, ragged, end, end_q, slope,
                heads, head_dim, value_dim, block_q, block_h, block_v,
                scale, softcap, left, right, masked,
            )  # fmt: skip

    rows = (row * keys + j)[:, None]
    mask = (j < end)[:, None]
    place = rows * (kv_heads * head_dim) + kv_head * head_dim + columns_h[None, :]
    tl.store(
        dk + place,
        (dk_sums * scale).to(dk.dtype.element_ty),
        mask=mask & (columns_h < head_dim)[None, :],
    )
    place = rows * (kv_heads * value_dim) + kv_head * value_dim + columns_v[None, :]
    tl.store(
        dv + place,
        dv_sums.to(dv.dtype.element_ty),
        mask=mask & (columns_v < value_dim)[None, :],
    )
