"""Layer normalization in Triton: some whole rows a program.

Axes: T rows, D columns.
"""

# ruff: noqa: ANN001, ANN201

from typing import no_type_check

import triton
import triton.language as tl


@triton.jit
@no_type_check
def normalize(
    x, scale, bias, residual, x_bias,
    out,
    rows: tl.constexpr, width: tl.constexpr, eps: tl.constexpr,
    block_t: tl.constexpr, block_d: tl.constexpr,
    has_bias: tl.constexpr, has_residual: tl.constexpr, has_x_bias: tl.constexpr,
):  # fmt: skip
    """`block_t` rows of ``norm(x + x_bias + residual) scale + bias``; x is [T,D]."""
    row = tl.program_id(0) * block_t + tl.arange(0, block_t)
    column = tl.arange(0, block_d)
    inside = column < width
    mask = (row < rows)[:, None] & inside[None, :]
    place = row.to(tl.int64)[:, None] * width + column[None, :]
    h = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
    if has_x_bias:
        first = tl.load(x_bias + column, mask=inside, other=0.0)
        h += first.to(tl.float32)[None, :]
    if has_residual:
        h += tl.load(residual + place, mask=mask, other=0.0).to(tl.float32)
    h = tl.where(mask, h - (tl.sum(h, 1) / width)[:, None], 0.0)
    variance = tl.sum(h * h, 1) / width
    y = h * tl.rsqrt(variance + eps)[:, None]
    y *= tl.load(scale + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    if has_bias:
        y += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    tl.store(out + place, y.to(out.dtype.element_ty), mask=mask)
