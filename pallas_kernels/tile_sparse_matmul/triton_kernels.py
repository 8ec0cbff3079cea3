"""The tile-sparse matmul in Triton, and the gradient of its values.

Axes: M tokens, K input features, N packed output features, T tiles, P row capacity of a
tile, G columns of a tile.
"""

# ruff: noqa: ANN001, ANN201

from typing import no_type_check

import triton
import triton.language as tl


@triton.jit
@no_type_check
def multiply(
    x,
    values,
    rows,
    counts,
    bias,
    out,
    tokens: tl.constexpr,
    features: tl.constexpr,
    room: tl.constexpr,
    tile: tl.constexpr,
    block_tokens: tl.constexpr,
    step: tl.constexpr,
    has_bias: tl.constexpr,
    activation: tl.constexpr,
    y_major: tl.constexpr,
):
    """One tile of features by `block_tokens` tokens of ``values^T x[rows]``.

    x is [K,M]; out is [N,M], or [M,N] unless `y_major`.
    """
    # Programs that run together share a tile of the weight.
    block, number = tl.program_id(0), tl.program_id(1)
    token = block * block_tokens + tl.arange(0, block_tokens)
    token = tl.max_contiguous(tl.multiple_of(token, block_tokens), block_tokens)
    column = tl.arange(0, tile)
    count = tl.load(counts + number)
    sums = tl.zeros((tile, block_tokens), tl.float32)
    for first in range(0, count, step):
        place = number * room + first + tl.arange(0, step)
        row = tl.load(rows + place)
        source = x + row.to(tl.int64)[:, None] * tokens + token[None, :]
        if tokens % block_tokens == 0:
            part = tl.load(source)
        else:
            part = tl.load(source, mask=token[None, :] < tokens, other=0.0)
        weight = tl.load(values + place.to(tl.int64)[:, None] * tile + column[None, :])
        sums = tl.dot(tl.trans(weight), part, sums)
    feature = number * tile + column
    inside = (feature[:, None] < features) & (token[None, :] < tokens)
    if has_bias:
        shift = tl.load(bias + feature, mask=feature < features, other=0.0)
        sums += shift.to(tl.float32)[:, None]
    if activation == "relu":
        sums = tl.maximum(sums, 0.0)
    elif activation == "silu":
        sums = sums * tl.sigmoid(sums)
    elif activation == "gelu":
        sums = 0.5 * sums * (1.0 + tl.erf(sums * 0.7071067811865476))
    elif activation == "gelu_tanh":
        # (1 + tanh(u)) / 2 = sigmoid(2 u)
        cubic = sums + 0.044715 * sums * sums * sums
        sums = sums * tl.sigmoid(1.5957691216057308 * cubic)
    if y_major:
        target = out + feature.to(tl.int64)[:, None] * tokens + token[None, :]
    else:
        target = out + token.to(tl.int64)[None, :] * features + feature[:, None]
    tl.store(target, sums.to(out.dtype.element_ty), mask=inside)


@triton.jit
@no_type_check
def gradient_of_values(
    x, dy, rows, counts,
    out,
    tokens: tl.constexpr, stride: tl.constexpr, features: tl.constexpr,
    room: tl.constexpr, tile: tl.constexpr,
    block_rows: tl.constexpr, step: tl.constexpr, y_major: tl.constexpr,
):  # fmt: skip
    """`block_rows` kept rows of one tile: ``x[rows] dy``, zeros past its count.

    x is [K,stride] and dy [N,stride], or [M,N] unless `y_major`; out is [T,P,G].
    """
    number = tl.program_id(1)
    place = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    column = tl.arange(0, tile)
    feature = number * tile + column
    kept = place < tl.load(counts + number)
    row = tl.load(rows + number * room + place, mask=kept, other=0).to(tl.int64)
    sums = tl.zeros((block_rows, tile), tl.float32)
    if tl.max(kept.to(tl.int32), 0) > 0:
        for first in range(0, tokens, step):
            token = first + tl.arange(0, step)
            there = token < tokens
            part = tl.load(
                x + row[:, None] * stride + token[None, :],
                mask=kept[:, None] & there[None, :],
                other=0.0,
            )
            inside = (feature < features)[:, None] & there[None, :]
            if y_major:
                source = dy + feature.to(tl.int64)[:, None] * stride + token[None, :]
                other = tl.trans(tl.load(source, mask=inside, other=0.0))
            else:
                source = dy + token.to(tl.int64)[:, None] * features + feature[None, :]
                other = tl.load(source, mask=tl.trans(inside), other=0.0)
            sums = tl.dot(part, other, sums)
    target = out + (number * room + place).to(tl.int64)[:, None] * tile
    tl.store(
        target + column[None, :],
        sums.to(out.dtype.element_ty),
        mask=(place < room)[:, None],
    )
