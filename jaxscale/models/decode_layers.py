"""Decoding a token of few requests: a layer is one launch.

Layers as of LLaMA take `pallas_kernels.decode_layer` in place of twelve launches: what
follows the attention of a layer and what precedes that of the next are one kernel. On
one GPU, with dense weights and pages in bfloat16, the attention can be in it, too. It
is for weights in bfloat16, dense or pruned, or all in the same 8 bits, and up to 64
rows of one token; all else runs block by block (`jaxscale.models.stack`). On several
GPUs that split heads and hidden features the kernel adds up over them, in the workspace
of all-reduces (`jaxscale.sharding.decode_all_reduce`); pruned models are for one GPU.
Of these, layers may keep dense weights, and only some of queries, keys and values be
pruned: `share_out` plans for all weights alike how blocks of the GPU share them.

Legend: B rows, T tokens of a row, D model.
"""

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.core import Tracer
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Array, Float

from jaxscale.nn.attention import AttentionConfig
from jaxscale.nn.blocks import Block
from jaxscale.nn.cache import PagedRows, append_rows
from jaxscale.nn.joined import JoinedLinear
from jaxscale.nn.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    project_together,
)
from jaxscale.nn.norms import RMSNorm
from jaxscale.nn.quantized_linear import QuantizedLinear
from jaxscale.nn.self_attention import Attention
from jaxscale.nn.tile_sparse_linear import SparsePattern, TileSparseLinear
from jaxscale.sharding.decode_all_reduce import ReduceWorkspace
from pallas_kernels.decode_layer import (
    LayerWeights,
    NextProjection,
    PagedCache,
    SharedTileSparse,
    as_residual,
    attending_decode_layer,
    declines,
    decode_layer,
    from_residual,
    padded_queries,
    places_of_new_tokens,
    rotation,
    tensor_parallel_decode_layer,
)
from pallas_kernels.decode_layer.config import padded_rows
from pallas_kernels.decode_layer.shares import SHARED_TILE, plan_shares
from pallas_kernels.mosaic import DeviceSpec
from pallas_kernels.tile_sparse_matmul import TileSparse


_log = logging.getLogger(__name__)

MOST_ROWS = 32
"""Rows up to which the kernel decodes by itself: in trials on an H200 a layer of LLaMA
3 8B took less time with it, with weights in bfloat16, int8 and fp8; rows are due. More
have not been timed."""

_FASTER_OVER = {("nvidia_h200", 2)}
"""GPUs, and numbers of them that split a layer, over which it was timed and faster."""


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
    devices, device = _devices(_axis(blocks[0])), DeviceSpec.current()
    name = None if device is None else device.name
    if devices > 1 and (name, devices) not in _FASTER_OVER:
        return None
    # Under the pruner's masks a step takes as long or longer (trial, H200).
    return None if _are_pruned(blocks) else "mosaic_gpu"


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
    if type(state) is not PagedRows or x.shape[1] != 1:
        return False
    return takes(blocks, x[:, 0], variants, implementation, state.workspace)


def takes(
    blocks: Any,
    x: Float[Array, "B D"],
    variants: Sequence[AttentionConfig],
    implementation: str,
    workspace: ReduceWorkspace | None,
) -> bool:
    """Whether an implementation computes what the blocks do for rows of one token.

    Args:
        blocks: The blocks of a decoder.
        x: The residual stream; only shapes and types of it and the blocks count.
        variants: The attention of each layer.
        implementation: Of `pallas_kernels.decode_layer.decode_layer`.
        workspace: That of all-reduces, of which only the shape counts.
    """
    if isinstance(blocks, Block):
        return False
    axis = _axis(blocks[0])
    if workspace is not None and workspace.axis != axis:
        return False
    if not _are_plain(blocks, variants, _devices(axis)):
        return False
    out = blocks[0].attention.out
    if isinstance(out, QuantizedLinear) and len(x) >= out.rounds_from:
        return False  # it rounds activations, too
    if implementation != "mosaic_gpu":
        return True
    pruned, reasons = _are_pruned(blocks), []

    def ask(
        attended: Array, residual: Array, layer: Any, following: Any, held: Any
    ) -> tuple[()]:
        given = attended, residual, layer, following
        reasons.append(declines(*given, held and held.workspace, axis))
        return ()

    def call(block: Any, after: Any, workspace: Any) -> tuple[()]:
        variant = variants[-1]
        angles = jnp.zeros((len(x), variant.head_dim // 2))
        following = _projection(after, variant, rotation(angles), axis, pruned)
        features = variant.num_heads * variant.head_dim
        attended = jnp.zeros((len(x), features), x.dtype)
        residual = as_residual(jnp.zeros(x.shape, x.dtype))
        given = attended, residual, _weights(block, pruned), following, workspace
        return _over_devices(ask, axis, given, ())

    # Layers of a pruned model differ in their sizes.
    pairs = zip(blocks, (*blocks[1:], blocks[-1]), strict=True)
    for pair in pairs if pruned else [(blocks[0], blocks[-1])]:
        jax.eval_shape(call, *pair, workspace)
        if reasons[-1] is not None:
            _log.info("decoding block by block: %s", reasons[-1])
            return False
    return True


def run(
    blocks: Any,
    x: Float[Array, "B 1 D"],
    state: Any,
    variants: Sequence[AttentionConfig],
    implementation: str,
    *,
    attend: bool,
) -> tuple[Float[Array, "B 1 D"], Any]:
    """The residual stream after the last block, and the state.

    Args:
        blocks: Blocks of which `runs` is true.
        x: The residual stream. Within the layers it is in fp32.
        state: The state of attention, of type `PagedRows`.
        variants: The attention of each layer.
        implementation: Of `pallas_kernels.decode_layer.decode_layer`.
        attend: Have attention over pages in the launches where it can be.
    """
    block: Any = blocks[0]
    attention, axis, workspace = block.attention, _axis(block), state.workspace
    pruned = _are_pruned(blocks)
    attend = attend and implementation == "mosaic_gpu" and not pruned
    if attend and _attends(blocks, x, state, variants):
        return _run_attending(blocks, x, state, variants)

    def layer(
        attended: Array, residual: Array, layer: Any, following: Any, held: Any
    ) -> Any:
        given = attended, residual, layer, following
        options = {"eps": block.mlp_norm.eps, "implementation": implementation}
        if axis is None:
            return *decode_layer(*given, **options), None
        residual, heads, cells = tensor_parallel_decode_layer(
            *given, held and held.workspace, axis_name=axis, **options
        )
        return residual, heads, cells and ReduceWorkspace(cells, axis)

    projected = project_together(attention.inputs, block.attention_norm(x))
    out, state = attention.attend(
        attention.split_heads(projected), state.at(0, variants[0])
    )
    residual, tables = as_residual(x[:, 0]), {}
    for i, (block, variant) in enumerate(zip(blocks, variants, strict=True)):
        following = None
        if i + 1 < len(blocks):
            variant = variants[i + 1]
            table = _table(variant, state, tables)
            following = _projection(blocks[i + 1], variant, table, axis, pruned)
        attended = attention.join_heads(out)[:, 0]
        given = attended, residual, _weights(block, pruned), following, workspace
        spec = PartitionSpec(None, axis), PartitionSpec(None, None, axis)
        results = PartitionSpec(), following and spec, workspace and _everywhere()
        residual, heads, workspace = _over_devices(layer, axis, given, results)
        if heads is not None:
            q, kv = (array[:, None] for array in heads)
            attention = blocks[i + 1].attention
            out, state = attention.attend_rotated(q, kv, state.at(i + 1, variant))
    state = dataclasses.replace(state, workspace=workspace)
    return from_residual(residual, len(x))[:, None].astype(x.dtype), state


# --- Pruned models --------------------------------------------------------------------


def share_out(blocks: Any) -> None:
    """Plans how the blocks of this GPU share the weights of a pruned model.

    Where there is a GPU, and all layers are such as `pallas_kernels.decode_layer`
    takes.

    Args:
        blocks: The blocks of a decoder, prepared for inference.
    """
    device = DeviceSpec.current()
    if device is None or isinstance(blocks, Block) or not _are_pruned(blocks):
        return
    if not all(_is_plain(block, 1, pruned=True) for block in blocks):
        return
    for block in blocks:
        shares = {}
        for name, layers in _products(block).items():
            patterns = [_pattern(layer) for layer in layers]
            after_norm = name in ("qkv", "gate_up")
            planned = plan_shares(patterns, device, after_norm=after_norm)
            for field, array in zip(("rows", "plan"), planned, strict=True):
                if array is None:
                    continue
                if not isinstance(array, Tracer):  # planned on the host
                    where = jax.tree.leaves(layers[0])[0].sharding
                    array = jax.device_put(array, where)
                shares[f"{name}_{field}"] = SparsePattern(array)
        block.shares = nnx.data(shares)


def _pattern(layer: Any) -> Any:
    """A weight, or of a tile-sparse one the pattern, on the host if it is known."""
    if not isinstance(layer, TileSparseLinear):
        return jax.ShapeDtypeStruct(layer.kernel.shape, layer.kernel.dtype)
    variables = layer.rows, layer.counts, layer.columns, layer.places, layer.order
    leaves = [None if leaf is None else leaf.get_value()[0] for leaf in variables]
    if not any(isinstance(leaf, Tracer) for leaf in leaves):
        leaves = jax.device_get(leaves)
    static = (layer.shape, layer.granularity, layer.equal_counts, layer.steps)
    values = jax.ShapeDtypeStruct(layer.values.shape[1:], layer.dtype)  # none is read
    return TileSparse.tree_unflatten(static, (values, *leaves))


# --- With attention -------------------------------------------------------------------


def _cache(state: PagedRows, variant: AttentionConfig, places: Array) -> PagedCache:
    return PagedCache(
        pages=state.pages,
        layer=jnp.asarray(state.layer, jnp.int32),
        table=state.table,
        lengths=state.lengths,
        num_new=state.num_new,
        places=places,
        scale=variant.logits_scale,
        window=variant.window,
        softcap=variant.softcap,
    )


def _attends(
    blocks: Any, x: Array, state: PagedRows, variants: Sequence[AttentionConfig]
) -> bool:
    """Whether the attention of layers can be in their launches."""
    rows = len(x)
    if _axis(blocks[0]) is not None or len(state.lengths) != rows:
        return False  # heads are split, or requests have drafts
    state = state.at(0, variants[0])
    places = jnp.zeros(padded_rows(rows), jnp.int32)
    attended = jnp.zeros((rows, variants[0].num_heads * variants[0].head_dim), x.dtype)
    residual = as_residual(x[:, 0])
    table = _table(variants[0], state, {})
    after = _projection(blocks[-1], variants[-1], table, None, pruned=False)
    reason = declines(
        attended,
        residual,
        _weights(blocks[0], pruned=False),
        after,
        cache=_cache(state, variants[0], places),
    )
    return reason is None


def _run_attending(
    blocks: Any, x: Array, state: PagedRows, variants: Sequence[AttentionConfig]
) -> tuple[Array, PagedRows]:
    """`run` with one launch a layer, its attention in it."""
    block: Any = blocks[0]
    attention, state = block.attention, state.at(0, variants[0])
    projected = project_together(attention.inputs, block.attention_norm(x))
    q, k, v = attention.rotate(attention.split_heads(projected), state)
    kv = jnp.stack([k[:, 0], v[:, 0]], axis=1)  # [B, 2, K, H]
    size, num_pages, kv_heads = (state.pages.shape[i] for i in (4, 1, 3))
    places = places_of_new_tokens(
        state.pages, state.table, state.lengths, state.num_new
    )
    page, within = jnp.divmod(places[: len(x)], 2 * kv_heads * size)
    row = jnp.where(page >= 0, page * size + within, num_pages * size)
    state = dataclasses.replace(state, pages=append_rows(state.pages, 0, row, kv))
    queries: Any = padded_queries(q[:, 0], kv_heads)
    residual = as_residual(x[:, 0])
    tables: dict[Any, Any] = {}
    for i, (block, variant) in enumerate(zip(blocks, variants, strict=True)):
        following = None
        if i + 1 < len(blocks):
            table = _table(variants[i + 1], state, tables)
            args = blocks[i + 1], variants[i + 1], table, None
            following = _projection(*args, pruned=False)
        residual, queries, pages = attending_decode_layer(
            queries,
            residual,
            _weights(block, pruned=False),
            following,
            _cache(state.at(i, variant), variant, places),
            eps=block.mlp_norm.eps,
        )
        state = dataclasses.replace(state, pages=pages)
    return from_residual(residual, len(x))[:, None].astype(x.dtype), state


# --- Several devices ------------------------------------------------------------------

_SPLIT = {
    "attended": 1,
    "out": 0,
    "gate_up": 1,
    "gate_up_scale": 0,
    "down": 0,
    "qkv": 1,
    "qkv_scale": 0,
    "bias": 0,
}
"""In which dimension devices have parts of an operand; others are whole."""


def _axis(block: Any) -> str | None:
    """The mesh axis over which heads and hidden features are split, if there is one,
    and all devices are on it.
    """
    mesh, rules = jax.sharding.get_abstract_mesh(), block.attention.rules
    names = rules.mesh_axes(["heads"]) | rules.mesh_axes(["mlp"])
    found = [name for name in names if mesh.shape.get(name, 1) > 1]
    if len(found) != 1 or mesh.shape[found[0]] != mesh.size:
        return None
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    return found[0] if kinds[found[0]] == AxisType.Auto else None


def _devices(axis: str | None) -> int:
    return 1 if axis is None else jax.sharding.get_abstract_mesh().shape[axis]


def _everywhere() -> PartitionSpec:
    """How a workspace is split: along the first dimension."""
    return PartitionSpec(jax.sharding.get_abstract_mesh().axis_names)


def _over_devices(
    fn: Callable[..., Any], axis: str | None, given: tuple[Any, ...], results: Any
) -> Any:
    """``fn(*given)`` on each device's part: `attended`, `residual`, `LayerWeights`,
    `NextProjection` with the heads of a device, and the workspace.

    Args:
        fn: The function.
        axis: The mesh axis over which it is split; None calls it as it is.
        given: Its arguments.
        results: The `PartitionSpec`s of what it returns.
    """
    if axis is None:
        return fn(*given)

    def spec(name: str, array: Array) -> PartitionSpec:
        if name not in _SPLIT:
            return PartitionSpec()
        dimension = _SPLIT[name]
        if array.dtype.itemsize == 1:  # such weights are turned
            dimension = 1 - dimension
        return PartitionSpec(*(None,) * dimension, axis)

    attended, residual, *parts, workspace = given
    specs = (
        spec("attended", attended),
        spec("residual", residual),
        *jax.tree.map_with_path(lambda path, a: spec(path[-1].name, a), parts),
        jax.tree.map(lambda _: _everywhere(), workspace),
    )
    return jax.shard_map(fn, in_specs=specs, out_specs=results, check_vma=False)(*given)


# --- Which layers ---------------------------------------------------------------------


def _are_plain(
    blocks: Sequence[Any], variants: Sequence[AttentionConfig], devices: int
) -> bool:
    """Whether blocks are serial, with RMS norms of one epsilon before attention and a
    SwiGLU network, in bfloat16 or all in the same 8 bits, heads are rotated as a whole,
    and devices have as many of all.
    """
    pruned = _are_pruned(blocks)
    norms = [n for b in blocks for n in (b.attention_norm, b.mlp_norm)]
    plain_norms = all(type(n) is RMSNorm and not n.plus_one for n in norms)
    return (
        plain_norms
        and len({norm.eps for norm in norms}) == 1
        and all(_is_plain(block, devices, pruned) for block in blocks)
        and all(variant.num_kv_heads % devices == 0 for variant in variants)
        and len({dtype for block in blocks for dtype in _dtypes(block)}) == 1
        and all(map(_rotates_heads, variants))
    )


def _is_plain(block: Any, devices: int, pruned: bool) -> bool:
    attention, mlp = block.attention, block.mlp
    if type(attention) is not Attention or mlp.activation != "swiglu":
        return False
    products = _products(block)
    qkv, gate_up = products["qkv"], products["gate_up"]
    layers = [layer for several in products.values() for layer in several]
    # Only joined layers have a bias that the kernel adds.
    biased = (attention.out, mlp.down, *gate_up, *(qkv if len(qkv) > 1 else ()))
    more = (
        block.attention_out_norm,
        block.mlp_out_norm,
        attention.query_norm,
        attention.key_norm,
        *(layer.bias for layer in biased),
    )
    if pruned:
        fits = all(_is_one_shard(layer) or _is_dense(layer) for layer in layers)
    else:
        are_joined = len(layers) == len(products)
        fits = are_joined and (
            all(map(_is_whole, layers)) or all(map(_is_dense, layers))
        )
    return (
        not (block.parallel or block.post_norm)
        and fits
        and all(getattr(layer, "shards", 1) == devices for layer in (*qkv, *gate_up))
        and all(getattr(layer, "low_rank", None) is None for layer in layers)
        and all(part is None for part in more)
    )


def _products(block: Any) -> dict[str, tuple[Any, ...]]:
    """The layers of each matmul of the kernel, whose outputs lie side by side."""
    attention, mlp = block.attention, block.mlp
    return {
        "out": (attention.out,),
        "gate_up": mlp.inputs,
        "down": (mlp.down,),
        "qkv": attention.inputs,
    }


def _are_pruned(blocks: Sequence[Any]) -> bool:
    """Whether a layer of any block is tile-sparse."""
    modules = (part for block in blocks for _, part in nnx.iter_modules(block))
    return any(isinstance(part, TileSparseLinear) for part in modules)


def _is_dense(layer: Any) -> bool:
    dense = JoinedLinear, ColumnParallelLinear, RowParallelLinear
    return type(layer) in dense and layer.dtype == layer.kernel.dtype


def _is_one_shard(layer: Any) -> bool:
    """Whether a layer is tile-sparse, on one device, with tiles that blocks share."""
    return (
        type(layer) is TileSparseLinear
        and layer.metadata is None
        and layer.values.shape[0] == 1
        and layer.values.shape[-1] == SHARED_TILE
        and layer.dtype == layer.values.dtype
    )


def _is_whole(layer: Any) -> bool:
    """Whether weights have 8 bits and no features that only fill up."""
    return (
        type(layer) is QuantizedLinear
        and layer.dtype == layer.out_dtype
        and layer.features == layer.kernel.shape[0]
    )


def _dtypes(block: Any) -> list[Any]:
    return [
        (layer.values if isinstance(layer, TileSparseLinear) else layer.kernel).dtype
        for several in _products(block).values()
        for layer in several
    ]


def _rotates_heads(config: AttentionConfig) -> bool:
    rope = config.rope
    return (
        rope is not None
        and not (rope.interleaved or rope.is_dynamic)
        and rope.rotary_dim in (None, config.head_dim)
    )


def _weights(block: Any, pruned: bool) -> LayerWeights:
    return LayerWeights(
        mlp_norm=block.mlp_norm.scale[...],
        **_kernel(block, "out", pruned),
        **_kernel(block, "gate_up", pruned),
        **_kernel(block, "down", pruned),
    )


def _kernel(block: Any, name: str, pruned: bool) -> dict[str, Any]:
    """A weight, and its scales if it has 8 bits."""
    layers = _products(block)[name]
    if pruned:
        shares = {} if block.shares is None else block.shares
        planned = {
            field: shares[key][...] if (key := f"{name}_{field}") in shares else None
            for field in ("rows", "plan")
        }
        parts = tuple(
            _first_shard(layer.weight)
            if isinstance(layer, TileSparseLinear)
            else layer.kernel[...]
            for layer in layers
        )
        return {name: SharedTileSparse(parts=parts, **planned)}
    (layer,) = layers
    found = {name: layer.kernel[...]}
    if isinstance(layer, QuantizedLinear):
        found[f"{name}_scale"] = layer.scale[...]
    return found


def _first_shard(weight: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf[0], weight)


def _table(
    config: AttentionConfig, state: PagedRows, tables: dict[Any, Any]
) -> tuple[Array, Array]:
    """Cosines and sines of positions; `tables` holds those of others."""
    rope = config.rope
    if rope is None:
        raise ValueError("rope None: _rotates_heads lets no such block pass")
    if (key := (rope, config.head_dim)) not in tables:
        positions = state.positions.astype(jnp.float32)  # [B, 1]
        angles = positions * rope.inv_freq(config.head_dim)  # [B, pairs]
        tables[key] = rotation(angles, rope.attention_factor)
    return tables[key]


def _projection(
    block: Any,
    config: AttentionConfig,
    table: tuple[Array, Array],
    axis: str | None,
    pruned: bool,
) -> NextProjection:
    """What precedes the attention of a block, with the heads of a device."""
    bias, (cos, sin) = block.attention.inputs[0].bias, table
    return NextProjection(
        norm=block.attention_norm.scale[...],
        **_kernel(block, "qkv", pruned),
        bias=None if bias is None else bias[...],
        cos=cos,
        sin=sin,
        out=_kernel(block, "out", pruned)["out"],
        heads=config.num_heads // _devices(axis),
        kv_heads=config.num_kv_heads // _devices(axis),
    )
