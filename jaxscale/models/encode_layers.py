"""Encoding with parameters in stacks: between two attentions a layer is one op.

Layers as of BERT take `pallas_kernels.encode_layer`, which computes few tokens in one
launch, in place of four. It is for inference on one device with the parameters of all
layers in one array each; all else runs block by block (`jaxscale.models.stack`).

Legend: B rows, T tokens of a row, D model.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxscale.nn.attention import AttentionConfig
from jaxscale.nn.blocks import GATED, Block
from jaxscale.nn.disentangled import DisentangledAttention
from jaxscale.nn.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    project_together,
)
from jaxscale.nn.norms import LayerNorm
from jaxscale.nn.self_attention import Attention
from jaxscale.nn.stacked import stacks_of
from pallas_kernels.encode_layer import EncodeLayerWeights, encode_layer


def runs(blocks: Any) -> bool:
    """Whether `run` computes what the blocks of an encoder do."""
    if blocks is None or isinstance(blocks, Block) or not blocks:
        return False
    return all(map(_is_plain, blocks)) and len({b.mlp_norm.eps for b in blocks}) == 1


def run(
    blocks: Sequence[Any],
    x: Float[Array, "B T D"],
    projected: Sequence[Float[Array, "B T _"]] | None,
    state: Any,
    variants: Sequence[AttentionConfig],
) -> tuple[Float[Array, "B T D"], Sequence[Float[Array, "B T _"]]]:
    """The activations behind the last layer, and the next one's projections of them.

    Args:
        blocks: Blocks of which `runs` is true, in the order of the layers, with the one
            behind the last, if there is one.
        x: The activations before them.
        projected: The first layer's queries, keys and values, if they are there.
        state: The state of attention.
        variants: The attention of each layer.
    """
    if projected is None:
        projected = project_together(blocks[0].attention.inputs, x)
    for i, (block, variant) in enumerate(zip(blocks, variants, strict=False)):
        attention = block.attention
        heads = attention.split_heads(projected)
        attended, state = attention.attend(heads, state.at(i, variant))
        parts = [
            _stacks(layer) for layer in (attention.out, block.mlp.up, block.mlp.down)
        ]
        following = blocks[i + 1 : i + 2]
        inputs = [_stacks(layer) for b in following for layer in b.attention.inputs]
        norms = [
            (norm.scale[...], None if norm.bias is None else norm.bias[...])
            for norm in (block.attention_norm, block.mlp_norm)
        ]
        out, up, down = ((kernel.stack, bias.stack) for kernel, bias in parts)
        x, projected = encode_layer(
            attention.join_heads(attended),
            x,
            EncodeLayerWeights(*out, *norms[0], *up, *down, *norms[1]),
            [(kernel.stack, bias.stack) for kernel, bias in inputs],
            layer=jnp.asarray(parts[0][0].layer),
            following=jnp.asarray(inputs[0][0].layer) if inputs else None,
            activation=block.mlp.activation,
            eps=block.mlp_norm.eps,
        )
    return x, projected


def _is_plain(block: Any) -> bool:
    """Whether norms follow sums, and linear layers and their biases are in stacks."""
    attention, mlp = block.attention, block.mlp
    if not block.post_norm or mlp.activation in GATED:
        return False
    layers = [*attention.inputs, attention.out, mlp.up, mlp.down]
    norms = [block.attention_norm, block.mlp_norm]
    return (
        _projects_nothing_else(attention)
        and len(attention.inputs) == 3
        and all(isinstance(n, LayerNorm) and n.dtype == mlp.down.dtype for n in norms)
        and norms[0].eps == norms[1].eps
        and all(_stacks(layer) is not None for layer in layers)
    )


def _projects_nothing_else(attention: Any) -> bool:
    """Whether attention reads projections of its input, and no others."""
    if type(attention) is DisentangledAttention:
        return attention.projected is not None
    return type(attention) is Attention


def _stacks(layer: Any) -> Any:
    """Kernel and bias of a dense layer, if both are parts of stacks."""
    if type(layer) not in (ColumnParallelLinear, RowParallelLinear):
        return None
    return stacks_of([layer.kernel, layer.bias], layer.dtype)
