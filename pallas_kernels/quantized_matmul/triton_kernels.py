"""The matmul with a quantized weight in Triton.

The weight is widened to the type of x in registers. Where tensor cores wait for what
they multiply (``mma.sync``), it is the first operand, which they take from there, and
its rows fill a tile however few tokens there are. Where they do not (``wgmma``), Triton
3.6 lets the next step's weight overwrite registers that they still read, so the weight
is the second operand, which goes through shared memory.

Axes: M tokens, K input features, N output features.
"""

# ruff: noqa: ANN001, ANN201

from typing import no_type_check

import triton
import triton.language as tl


@triton.jit
@no_type_check
def multiply(
    x, w, scale,
    out,
    tokens: tl.constexpr, depth: tl.constexpr, features: tl.constexpr,
    block_m: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr,
    weight_first: tl.constexpr,
):  # fmt: skip
    """A tile of ``(x w^T) scale``: x [M,K], w [N,K], scale [N], out [M,N]."""
    feature = tl.program_id(0) * block_n + tl.arange(0, block_n)
    token = tl.program_id(1) * block_m + tl.arange(0, block_m)
    here, real = feature < features, token < tokens
    rows_w = w + feature.to(tl.int64)[:, None] * depth
    rows_x = x + token.to(tl.int64)[:, None] * depth
    if weight_first:
        sums = tl.zeros((block_n, block_m), tl.float32)
    else:
        sums = tl.zeros((block_m, block_n), tl.float32)
    for first in range(0, depth, block_k):
        column = first + tl.arange(0, block_k)
        mask_w, mask_x = here[:, None], real[:, None]
        if depth % block_k != 0:
            inside = (column < depth)[None, :]
            mask_w, mask_x = mask_w & inside, mask_x & inside
        part_w = tl.load(rows_w + column[None, :], mask=mask_w, other=0.0)
        part_x = tl.load(rows_x + column[None, :], mask=mask_x, other=0.0)
        wide = part_w.to(part_x.dtype)
        if weight_first:
            sums = tl.dot(wide, tl.trans(part_x), sums)
        else:
            sums = tl.dot(part_x, tl.trans(wide), sums)
    if not weight_first:
        sums = tl.trans(sums)
    factors = tl.load(scale + feature, mask=here, other=0.0)
    place = token.to(tl.int64)[None, :] * features + feature[:, None]
    tl.store(
        out + place,
        (sums * factors[:, None]).to(out.dtype.element_ty),
        mask=here[:, None] & real[None, :],
    )
