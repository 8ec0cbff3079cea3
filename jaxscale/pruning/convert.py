"""Conversion of a pruned model to one that computes only what was kept.

Legend: K input features, N output features, F hidden features of a feed-forward
network, C packed columns, L layers, S shards.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from jaxscale.models.stack import unstacked
from jaxscale.nn.blocks import Block
from jaxscale.nn.linear import Linear
from jaxscale.nn.tile_sparse_linear import TileSparseLinear
from jaxscale.pruning.config import TILE_WISE
from jaxscale.pruning.layers import (
    FeedForward,
    feed_forwards,
    kernels,
    linears,
    matrices,
    replace_linears,
)
from jaxscale.pruning.masks import Masks, check_masks, layer_shards
from jaxscale.pruning.tilewise import tile_columns
from pallas_kernels.tile_sparse_matmul import SingleWeights, TileSparse


DENSE_ABOVE = 0.75
"""Share of its weights from which on a layer is faster dense.

On an H200 the kernel takes 1.10 of the time of a dense product (4096 x 4096, 2,048
tokens) where nothing is pruned, and 0.83 where a quarter is. Beside the kernel a layer
transposes its input and puts its columns in their places, each some 0.09 of it.
"""


def sparsify(
    model: Any,
    masks: Masks,
    *,
    drop_hidden: bool = True,
    dense_above: float = DENSE_ABOVE,
    separate: bool = False,
    implementation: str | None = None,
) -> Any:
    """A copy of `model` whose pruned layers store and compute only what is kept.

    All layers of a stack, and all tensor-parallel shards, get arrays of equal shape:
    room for the fullest tile of any of them, and as many tiles as the one with the
    most, so masks made with ``equal_work`` waste none. `separate` makes single blocks
    of a stack first: each then has only what it needs, and is compiled by itself, as
    those of a model that is served. The result generates, trains (the pattern stays)
    and is saved like any model; place it on a mesh by `jaxscale.sharding.place`.
    ``config.shards`` of the masks must be divisible by the size of the mesh axis
    ``tensor`` to be split over it.

    Hidden features of feed-forward networks whose columns are pruned are left out,
    where that changes nothing (``hidden_together`` of `PruneConfig` sees to it): gate
    and up give fewer features, and the row indices of down count only these.

    Layers that keep more than `dense_above` of their weights stay dense, with zeros
    where they are pruned: `dense_layers` says which.

    Single weights of pattern ``tew`` stand beside the tiles; see `SingleWeights` for
    what they cost.

    The communication of a sparse layer is XLA's, also in a model with
    ``tensor_parallel="fused"``: the kernels that hide it multiply by dense weights.

    Args:
        model: The dense model; its weights may but need not be masked.
        masks: Tile-wise masks (patterns ``tw_k``, ``tw`` and ``tew``).
        drop_hidden: Leave pruned hidden features out.
        dense_above: Share of its weights, 0 to 1, above which a layer stays dense; 1
            leaves none.
        separate: Every block of a stack has shapes of its own; the result is not
            scanned.
        implementation: Passed to `tile_sparse_matmul`.

    Returns:
        A model in which `jaxscale.nn.TileSparseLinear` stand for the pruned layers.
        Other arrays are shared with `model`, those of layers that stay dense apart.

    Raises:
        ValueError: the pattern is not tile-wise, the masks do not fit the model, it
            multiplies in fp8, or it is sparse already.

    Example:
        >>> from flax import nnx
        >>> from jaxscale.models import Decoder, preset
        >>> from jaxscale.pruning import PruneConfig, magnitude_scores, make_model_masks
        >>> model = Decoder(preset("llama_tiny"), rngs=nnx.Rngs(0))
        >>> config = PruneConfig(sparsity=0.75, tile=8)
        >>> masks = make_model_masks(model, magnitude_scores(model), config)
        >>> sparse = sparsify(model, masks)
        >>> type(sparse.blocks.mlp.up).__name__
        'TileSparseLinear'
    """
    if masks.config.pattern not in TILE_WISE:
        raise ValueError(
            f"pattern {masks.config.pattern!r} has no sparse form, expected one of "
            f"{list(TILE_WISE)}; run the masked dense model, as apply_masks gives it"
        )
    check_masks(model, masks)
    if separate and isinstance(model.blocks, Block):
        model, masks = unstacked(model), masks.separated()
    dense = masks.of(dense_layers(model, masks, dense_above))
    masks = masks.of([name for name in masks if name not in dense.kept])
    layers = linears(model)
    if in_fp8 := {layers[name].quantization for name in masks} - {None}:
        raise ValueError(
            f"the model has quantization {next(iter(in_fp8))!r}, and sparse layers do "
            "not multiply in fp8; make or load it with quantization=None, which has "
            "the same parameters"
        )
    packed = _pack_layers(model, masks, drop_hidden)

    def convert(name: str, layer: Linear) -> Linear | TileSparseLinear:
        if name in packed:
            return packed[name].linear(layer, implementation)
        kernel = layer.kernel[...]
        kept = jax.device_put(dense[name], kernel.sharding)
        masked: Any = layer.kernel.replace(jnp.where(kept, kernel, 0))
        layer.kernel = masked
        return layer

    return replace_linears(
        model, {name: functools.partial(convert, name) for name in (*masks, *dense)}
    )


def dense_layers(
    model: Any, masks: Masks, dense_above: float = DENSE_ABOVE
) -> list[str]:
    """The names of pruned layers that `sparsify` leaves dense.

    Those of which more than `dense_above` is kept. A stack is one layer, and so is a
    feed-forward network, whose layers hand each other what is left of the hidden
    features.

    Args:
        model: The dense model.
        masks: Its masks.
        dense_above: Share of the weights, 0 to 1.

    Raises:
        ValueError: `dense_above` is no share.

    Example:
        >>> from flax import nnx
        >>> from jaxscale.models import Decoder, preset
        >>> from jaxscale.pruning import PruneConfig, magnitude_scores, make_model_masks
        >>> model = Decoder(preset("llama_tiny"), rngs=nnx.Rngs(0))
        >>> config = PruneConfig(sparsity=0.5, tile=8, scope="layer")
        >>> masks = make_model_masks(model, magnitude_scores(model), config)
        >>> dense_layers(model, masks), dense_layers(model, masks, 0.4)[:1]
        ([], ['blocks.attention.key'])
    """
    if not 0 <= dense_above <= 1:
        raise ValueError(f"dense_above {dense_above!r}, expected a share, 0 to 1")
    networks = [(*each.inputs, each.down) for each in feed_forwards(model)]
    groups = [names for names in networks if {*names} <= {*masks}]
    together = {name for names in groups for name in names}
    groups += [(name,) for name in masks if name not in together]
    found = set()
    for names in groups:
        kept = sum(int(masks[name].sum()) for name in names)
        if kept > dense_above * sum(masks[name].size for name in names):
            found |= {*names}
    return [name for name in masks if name in found]


def _pack_layers(model: Any, masks: Masks, drop_hidden: bool) -> "dict[str, _Packed]":
    """What is kept of each layer, those after others whose features they take."""
    layers, weights = linears(model), kernels(model, masks)
    alive: dict[str, Bool[np.ndarray, "L F"]] = {}
    feeders: dict[str, str] = {}
    for network in feed_forwards(model) if drop_hidden else ():
        if (hidden := _hidden(network, layers, masks)) is not None:
            alive |= dict.fromkeys(network.inputs, hidden)
            feeders[network.down] = network.inputs[0]
    packed: dict[str, _Packed] = {}
    for name in sorted(masks, key=lambda name: name in feeders):
        feeder = packed[feeders[name]] if name in feeders else None
        parts = _parts(layers[name], weights[name], masks, name, alive.get(name))
        packed[name] = _pack(parts, masks, name in alive, feeder)
    return packed


def _hidden(
    network: FeedForward, layers: Mapping[str, Linear], masks: Masks
) -> Bool[np.ndarray, "L F"] | None:
    """The hidden features to keep; None where leaving others out changes anything."""
    config = masks.config
    names = (*network.inputs, network.down)
    if config.pattern != "tw" or config.k_granularity > 1 or not {*names} <= {*masks}:
        return None
    columns = [matrices(masks.tiled[name]).any(axis=1) for name in network.inputs]
    alive = np.logical_and.reduce(columns)
    _, shards = layer_shards(layers[network.inputs[0]], config.shards)
    for own in columns:
        for kept, hidden in zip(own, alive, strict=True):
            for shard in np.split(np.arange(kept.size), shards):
                tiles = hidden[shard][kept[shard]].reshape(-1, config.tile)  # [T, G]
                if (tiles.any(1) != tiles.all(1)).any():
                    return None  # a tile would lose some of its columns
    # A hidden feature without weights is zero, or what its bias makes of it.
    biased = any(layers[name].bias is not None for name in network.inputs)
    if biased and (matrices(masks.kept[network.down]).any(axis=2) & ~alive).any():
        return None
    return alive


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Packed:
    """The shards of the layers of a stack, layer by layer."""

    split: Literal["rows", "columns"] | None
    weights: list[TileSparse]
    singles: list[SingleWeights]
    columns: list[jax.Array] | None
    """The hidden feature that each output is, where others are left out."""

    def linear(self, layer: Linear, implementation: str | None) -> TileSparseLinear:
        """The sparse form of a layer."""
        weight, singles = self.stacked(layer.kernel.shape[:-2], layer.kernel[...].dtype)
        bias: Any = layer.bias
        if bias is not None and self.columns is not None:
            bias = bias.replace(self.packed_bias(bias[...]))
        return TileSparseLinear(
            weight,
            split=self.split,
            kernel_axes=layer.kernel_axes,
            out_axes=layer.out_axes,
            singles=singles,
            bias=bias,
            dtype=layer.dtype,
            rules=layer.rules,
            implementation=implementation,
        )

    def stacked(
        self, shape: tuple[int, ...], dtype: Any
    ) -> tuple[TileSparse, SingleWeights | None]:
        """[*shape, S, ...] each, for a stack of `shape` layers."""
        shards = len(self.weights) // math.prod(shape)

        def split(x: jax.Array) -> jax.Array:
            return x.reshape(*shape, shards, *x.shape[1:])  # [L, S, ...]

        weight = jax.tree.map(split, TileSparse.stack(self.weights))  # [L, S, T, P, G]
        weight = weight.with_values(weight.values.astype(dtype))
        if not self.singles[0].room:
            return weight, None
        singles = jax.tree.map(lambda *parts: split(jnp.stack(parts)), *self.singles)
        values = singles.values.astype(dtype)
        return weight, dataclasses.replace(singles, values=values)

    def packed_bias(self, bias: jax.Array) -> jax.Array:
        """The bias of the outputs that are left, [..., S C]."""
        assert self.columns is not None
        columns = jnp.stack(self.columns)  # [L S, C]
        leading = bias.shape[:-1]
        shards = len(self.columns) // math.prod(leading)
        bias = bias.reshape(len(columns), bias.shape[-1] // shards)  # [L S, F / S]
        kept = jax.vmap(lambda b, c: jnp.take(b, c, mode="fill", fill_value=0), (0, 0))(
            bias, columns
        )
        return kept.reshape(*leading, -1)  # [L S, C] to [L, S C]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Part:
    """One shard of one layer."""

    weight: Float[np.ndarray, "K N"]
    tiled: Bool[np.ndarray, "K N"]
    single: Bool[np.ndarray, "K N"]
    columns: Int[np.ndarray, " C"] | None
    """Kept columns of a tile; kept rows of a tile are as many in all shards."""


def _parts(
    layer: Linear,
    weight: Float[np.ndarray, "..."],
    masks: Masks,
    name: str,
    alive: Bool[np.ndarray, "L F"] | None,
) -> tuple[Literal["rows", "columns"] | None, list[_Part]]:
    """Return what the shards divide, and the shards of each layer of a stack."""
    config = masks.config
    by_rows, by_columns = layer_shards(layer, config.shards)
    shards = max(by_rows, by_columns)
    split: Literal["rows", "columns"] | None = None
    if shards > 1:
        split = "rows" if by_rows > 1 else "columns"
    axis = 0 if split == "rows" else 1
    parts = []
    stack = matrices(weight), matrices(masks.tiled[name]), matrices(masks.kept[name])
    for i, (dense, tiled, kept) in enumerate(zip(*stack, strict=True)):
        single = kept & ~tiled
        if alive is not None:
            tiled = tiled & alive[i]
        columns = tile_columns(tiled, config.pattern)
        for shard in zip(
            *(np.split(x, shards, axis) for x in (dense, tiled, single)), strict=True
        ):
            own = columns
            if split == "columns":
                own = tile_columns(shard[1], config.pattern)
            if own is not None and not own.size:
                own = np.arange(config.tile)  # a tile without rows
            parts.append(
                _Part(weight=shard[0], tiled=shard[1], single=shard[2], columns=own)
            )
    return split, parts


def _pack(
    split_parts: tuple[Literal["rows", "columns"] | None, list[_Part]],
    masks: Masks,
    drop: bool,
    feeder: _Packed | None,
) -> _Packed:
    """Packs shards.

    Args:
        split_parts: Result of `_parts`.
        masks: The masks of all layers.
        drop: True: outputs without columns are left out.
        feeder: The layer that gives the inputs, where it leaves some out.
    """
    split, parts = split_parts
    config = masks.config
    granularity: Any = config.k_granularity
    weights = [
        TileSparse.from_dense(
            part.weight,
            part.tiled,
            tile=config.tile,
            granularity=granularity,
            columns=part.columns,
        )
        for part in parts
    ]
    tiles = max(w.tiles for w in weights)
    weights = [_with_tiles(w, tiles) for w in weights]
    if feeder is not None and feeder.columns is not None:
        weights = [
            w.fold_rows(columns)
            for w, columns in zip(weights, feeder.columns, strict=True)
        ]
    columns = None
    if drop:
        columns = [w.columns for w in weights if w.columns is not None]
        weights = [w.packed() for w in weights]
    capacity = max(int(part.single.sum(0).max(initial=0)) for part in parts)
    singles = [SingleWeights.from_dense(p.weight, p.single, capacity) for p in parts]
    return _Packed(split=split, weights=weights, singles=singles, columns=columns)


def _with_tiles(w: TileSparse, tiles: int) -> TileSparse:
    """The weight with tiles that keep nothing behind its own."""
    extra = tiles - w.tiles
    if not extra:
        return w
    assert w.columns is not None  # only pruned columns make numbers of tiles differ

    def pad(x: jax.Array, by: int, value: int = 0) -> jax.Array:
        widths = [(0, by), *[(0, 0)] * (x.ndim - 1)]
        return jnp.pad(x, widths, constant_values=value)

    return dataclasses.replace(
        w,
        values=pad(w.values, extra),
        rows=pad(w.rows, extra),
        counts=pad(w.counts, extra),
        columns=pad(w.columns, extra * w.tile, w.shape[1]),
    )
