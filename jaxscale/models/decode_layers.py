"""Decoding a token of few requests: between two attentions a layer is one launch.

Layers as of LLaMA take `pallas_kernels.decode_layer` in place of ten launches: what
follows the attention of a layer and what precedes that of the next are one kernel. It
is for one GPU, weights in bfloat16, all dense or all tile-sparse, or all in the same 8
bits, and up to 64 rows of one token; all else runs block by block
(`jaxscale.models.stack`).

Legend: B rows, T tokens of a row, D model.
"""

import logging
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxscale.nn.attention import AttentionConfig
from jaxscale.nn.blocks import Block
from jaxscale.nn.cache import PagedRows
from jaxscale.nn.joined import JoinedLinear
from jaxscale.nn.linear import RowParallelLinear, project_together
from jaxscale.nn.norms import RMSNorm
from jaxscale.nn.quantized_linear import QuantizedLinear
from jaxscale.nn.self_attention import Attention
from jaxscale.nn.tile_sparse_linear import TileSparseLinear
from pallas_kernels.decode_layer import (
    LayerWeights,
    NextProjection,
    SharedTileSparse,
    as_residual,
    declines,
    decode_layer,
    from_residual,
    rotation,
)


_log = logging.getLogger(__name__)

MOST_ROWS = 32
"""Rows up to which the kernel decodes by itself: in trials on an H200 a layer of LLaMA
3 8B took less time with it, with weights in bfloat16, int8 and fp8; rows are due. More
have not been timed."""


def faster(blocks: Any, rows: int) -> str | None:
    """The implementation that decodes so many rows in less time than blocks do.

    Args:
        blocks: The blocks of a decoder.
        rows: How many rows there are.

    Returns:
        ``"mosaic_gpu"``, or None: the blocks are faster, or nothing was timed.

    Example:
        >>> from flax import nnx
        >>> from jaxscale.models.decoder import Decoder
        >>> from jaxscale.models.families.llama import llama_tiny
        >>> blocks = Decoder(llama_tiny(), rngs=nnx.Rngs(0)).for_inference().blocks
        >>> faster(blocks, 32), faster(blocks, 64)
        ('mosaic_gpu', None)
    """
    if rows > MOST_ROWS or isinstance(blocks, Block):
        return None
    pruned = isinstance(blocks[0].attention.out, TileSparseLinear)  # not timed yet
    return None if pruned else "mosaic_gpu"


def runs(
    blocks: Any,
    x: Float[Array, "B T D"],
    state: Any,
    variants: Sequence[AttentionConfig],
    implementation: str,
) -> bool:
    """Whether `run` computes what the blocks do, and can do so here.

    Args:
        blocks: The blocks of a decoder.
        x: The residual stream.
        state: The state of attention.
        variants: The attention of each layer.
        implementation: Of `pallas_kernels.decode_layer.decode_layer`.
    """
    if isinstance(blocks, Block) or type(state) is not PagedRows or x.shape[1] != 1:
        return False
    if state.workspace is not None or not _are_plain(blocks, variants):
        return False
    out = blocks[0].attention.out
    if isinstance(out, QuantizedLinear) and len(x) >= out.rounds_from:
        return False  # it rounds activations, too
    if implementation != "mosaic_gpu":
        return True
    after = _projection(blocks[-1], variants[-1], state, {})
    features = variants[0].num_heads * variants[0].head_dim
    attended = jnp.zeros((len(x), features), x.dtype)
    residual = as_residual(x[:, 0])
    reason = declines(attended, residual, _weights(blocks[0]), after)
    if reason is not None:
        _log.info("decoding block by block: %s", reason)
    return reason is None


def run(
    blocks: Any,
    x: Float[Array, "B 1 D"],
    state: Any,
    variants: Sequence[AttentionConfig],
    implementation: str,
) -> tuple[Float[Array, "B 1 D"], Any]:
    """The residual stream after the last block, and the state.

    Args:
        blocks: Blocks of which `runs` is true.
        x: The residual stream. Within the layers it is in fp32.
        state: The state of attention, of type `PagedRows`.
        variants: The attention of each layer.
        implementation: Of `pallas_kernels.decode_layer.decode_layer`.
    """
    block: Any = blocks[0]
    attention = block.attention
    projected = project_together(attention.inputs, block.attention_norm(x))
    out, state = attention.attend(
        attention.split_heads(projected), state.at(0, variants[0])
    )
    residual, tables = as_residual(x[:, 0]), {}
    for i, (block, variant) in enumerate(zip(blocks, variants, strict=True)):
        following = None
        if i + 1 < len(blocks):
            variant = variants[i + 1]
            following = _projection(blocks[i + 1], variant, state, tables)
        residual, heads = decode_layer(
            out.reshape(len(x), -1),
            residual,
            _weights(block),
            following,
            eps=block.mlp_norm.eps,
            implementation=implementation,
        )
        if heads is not None:
            q, kv = (array[:, None] for array in heads)
            here = state.at(i + 1, variant)
            out, state = here.attend_stacked(q, kv, variant)
    return from_residual(residual, len(x))[:, None].astype(x.dtype), state


def _are_plain(blocks: Sequence[Any], variants: Sequence[AttentionConfig]) -> bool:
    """Whether blocks are serial, with RMS norms of one epsilon before attention and a
    SwiGLU network, dense, tile-sparse or all in the same 8 bits, and heads are rotated
    as a whole.
    """
    norms = [n for b in blocks for n in (b.attention_norm, b.mlp_norm)]
    plain_norms = all(type(n) is RMSNorm and not n.plus_one for n in norms)
    return (
        plain_norms
        and len({norm.eps for norm in norms}) == 1
        and all(map(_is_plain, blocks))
        and len({kind for block in blocks for kind in _kinds(block)}) == 1
        and all(map(_rotates_heads, variants))
    )


def _is_plain(block: Any) -> bool:
    attention, mlp = block.attention, block.mlp
    more = (
        block.attention_out_norm,
        block.mlp_out_norm,
        attention.query_norm,
        attention.key_norm,
        attention.out.bias,
        mlp.down.bias,
    )
    joined, rows = (attention.joined, mlp.joined), (attention.out, mlp.down)
    layers = *joined, *rows
    return (
        not (block.parallel or block.post_norm)
        and type(attention) is Attention
        and attention.query is None  # it may be pruned
        and mlp.activation == "swiglu"
        and (
            all(map(_is_whole, layers))
            or all(map(_is_one_shard, layers))
            or (
                all(type(layer) is JoinedLinear for layer in joined)
                and all(type(layer) is RowParallelLinear for layer in rows)
                and all(layer.dtype == layer.kernel.dtype for layer in layers)
            )
        )
        and all(getattr(layer, "shards", 1) == 1 for layer in joined)
        and all(getattr(layer, "low_rank", None) is None for layer in layers)
        and all(part is None for part in (*more, mlp.joined.bias))
    )


def _is_one_shard(layer: Any) -> bool:
    """Whether a layer is tile-sparse, on one device."""
    return (
        type(layer) is TileSparseLinear
        and layer.metadata is None
        and len(layer.values[...]) == 1
        and layer.dtype == layer.values[...].dtype
    )


def _is_whole(layer: Any) -> bool:
    """Whether weights have 8 bits and no features that only fill up."""
    return (
        type(layer) is QuantizedLinear
        and layer.dtype == layer.out_dtype
        and layer.features == layer.kernel.shape[0]
    )


def _kinds(block: Any) -> list[Any]:
    attention, mlp = block.attention, block.mlp
    layers = attention.joined, attention.out, mlp.joined, mlp.down
    return [
        (TileSparseLinear, layer.values[...].dtype)
        if isinstance(layer, TileSparseLinear)
        else (type(layer) is QuantizedLinear, layer.kernel.dtype)
        for layer in layers
    ]


def _rotates_heads(config: AttentionConfig) -> bool:
    rope = config.rope
    return (
        rope is not None
        and not (rope.interleaved or rope.is_dynamic)
        and rope.rotary_dim in (None, config.head_dim)
    )


def _weights(block: Any) -> LayerWeights:
    return LayerWeights(
        mlp_norm=block.mlp_norm.scale[...],
        **_kernel("out", block.attention.out),
        **_kernel("gate_up", block.mlp.joined),
        **_kernel("down", block.mlp.down),
    )


def _sparse(layer: TileSparseLinear) -> SharedTileSparse:
    """The one shard of a weight."""
    plan = None if layer.plan is None else layer.plan[...]
    weight, plan = jax.tree.map(lambda leaf: leaf[0], (layer.weight, plan))
    return SharedTileSparse(weight=weight, plan=plan)


def _kernel(name: str, layer: Any) -> dict[str, Any]:
    """A weight, and its scales if it has 8 bits."""
    if isinstance(layer, TileSparseLinear):
        return {name: _sparse(layer)}
    found = {name: layer.kernel[...]}
    if isinstance(layer, QuantizedLinear):
        found[f"{name}_scale"] = layer.scale[...]
    return found


def _projection(
    block: Any, config: AttentionConfig, state: PagedRows, tables: dict[Any, Any]
) -> NextProjection:
    """What precedes the attention of a block; `tables` holds rotations of others."""
    joined, rope = block.attention.joined, config.rope
    if rope is None:
        raise ValueError("rope None: _rotates_heads lets no such block pass")
    if (key := (rope, config.head_dim)) not in tables:
        positions = state.positions.astype(jnp.float32)  # [B, 1]
        angles = positions * rope.inv_freq(config.head_dim)  # [B, pairs]
        tables[key] = rotation(angles, rope.attention_factor)
    cos, sin = tables[key]
    return NextProjection(
        norm=block.attention_norm.scale[...],
        **_kernel("qkv", joined),
        bias=None if joined.bias is None else joined.bias[...],
        cos=cos,
        sin=sin,
        out=_kernel("out", block.attention.out)["out"],
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
    )
