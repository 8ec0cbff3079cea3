"""Decoding a token of few requests: a layer is one launch between two attentions.

Layers as of LLaMA take `pallas_kernels.decode_layer` in place of a dozen launches: what
follows the attention of a layer and what precedes that of the next are one kernel. It
is for one GPU, dense weights in bfloat16, and up to 64 tokens; all else runs block by
block (`jaxscale.models.stack`).

Legend: B rows of one token, T tokens of a row, N query heads, K key/value heads, H head
dim, D model.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxscale.nn.attention import AttentionConfig
from jaxscale.nn.blocks import Block
from jaxscale.nn.cache import PagedRows
from jaxscale.nn.embeddings import RopeConfig
from jaxscale.nn.joined import JoinedLinear
from jaxscale.nn.linear import RowParallelLinear
from jaxscale.nn.norms import RMSNorm
from jaxscale.nn.self_attention import AttentionState
from pallas_kernels.decode_layer import (
    LayerWeights,
    NextProjection,
    as_residual,
    declines,
    decode_layer,
    from_residual,
    rotation,
)


def fits(
    blocks: Any,
    x: Float[Array, "B T D"],
    state: AttentionState,
    variants: Sequence[AttentionConfig | None],
) -> bool:
    """Whether `run` computes what the blocks do, and a kernel is there for it.

    Args:
        blocks: The blocks of a decoder, one by one, or a stack.
        x: The residual stream.
        state: The state of attention.
        variants: The attention of each layer.
    """
    if isinstance(blocks, Block) or type(state) is not PagedRows:
        return False
    if state.workspace is not None or x.shape[1] != 1:
        return False
    if not all(_is_plain(block) for block in blocks):
        return False
    if len({norm.eps for block in blocks for norm in _norms(block)}) != 1:
        return False
    heads = (block.attention.config.head_dim for block in blocks)
    turned = (
        variant is not None and _turns_whole_heads(variant.rope, head_dim)
        for variant, head_dim in zip(variants, heads, strict=True)
    )
    if not all(turned):
        return False
    call = _Layers(blocks, variants)
    reason = declines(x[:, 0], call.weights(0), call.projection(1, state))
    return reason is None


def run(
    blocks: Sequence[Block],
    x: Float[Array, "B T D"],
    state: PagedRows,
    variants: Sequence[AttentionConfig],
    implementation: str | None = "mosaic_gpu",
) -> tuple[Float[Array, "B T D"], PagedRows]:
    """The residual stream after the last of blocks that `fits`, and the state.

    Args:
        blocks: The blocks of a decoder.
        x: The residual stream.
        state: The state of attention.
        variants: The attention of each layer.
        implementation: Of `pallas_kernels.decode_layer.decode_layer`.
    """
    layers = _Layers(blocks, variants)
    first = blocks[0].attention
    heads = first.split_heads(
        project_together(first.inputs, blocks[0].attention_norm(x))
    )
    out, state = first.attend(heads, state.at(0, variants[0]))
    residual = as_residual(x[:, 0])
    for i in range(1, len(blocks) + 1):
        residual, projected = decode_layer(
            out.reshape(len(x), -1),
            residual,
            layers.weights(i - 1),
            layers.projection(i, state) if i < len(blocks) else None,
            eps=blocks[0].mlp_norm.eps,
            implementation=implementation,
        )
        if projected is not None:
            q, kv = projected
            here = state.at(i, variants[i])
            out, state = here.attend_joined(q[:, None], kv[:, None], variants[i])
    return from_residual(residual, len(x))[:, None].astype(x.dtype), state
