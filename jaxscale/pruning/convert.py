"""Conversion of a pruned model to sparse layers, which compute only kept weights.

Legend: K input features, N output features, F hidden features of a feed-forward
network, C packed columns, L layers, S shards.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from jaxscale.checks import check_type
from jaxscale.models.stack import unstacked
from jaxscale.nn.blocks import Block
from jaxscale.nn.linear import Linear
from jaxscale.nn.tile_sparse_linear import TileSparseLinear
from jaxscale.pruning.clustering import tiles_of
from jaxscale.pruning.config import TILE_WISE, PruneConfig
from jaxscale.pruning.fours import Fours
from jaxscale.pruning.layers import (
    FeedForward,
    feed_forwards,
    kernels,
    linears,
    matrices,
    replace_linears,
)
from jaxscale.pruning.masks import Masks, apply_masks, check_masks, layer_shards
from jaxscale.pruning.tilewise import tile_columns
from pallas_kernels.tile_sparse_matmul import (
    TileSparse,
    TileSparse24,
    cover,
    group_columns,
)


DENSE_ABOVE = 0.75
"""Fraction of kept weights above which a layer is expected to be faster dense.

An estimate for an H200, of 4096 x 4096 and 2,048 tokens: the kernel alone takes as long
as the dense matmul if some 90% are kept, and a layer copies its input and its output
once more, each for about 0.09 of that time by the bytes. No stored benchmark measures
it.
"""


def sparsify(
    model: Any,
    masks: Masks,
    *,
    drop_hidden: bool = True,
    dense_above: float = DENSE_ABOVE,
    separate: bool = False,
    compress: bool = False,
    implementation: str | None = None,
) -> Any:
    """A copy of `model` whose pruned layers store and compute only what is kept.

    All layers of a stack, and all tensor-parallel shards, get arrays of equal shape,
    with room for the fullest tile and the largest number of tiles of any of them; masks
    made with ``equal_work`` waste none. `separate` unstacks the blocks first: each then
    has only the size that it needs, and is compiled separately, as in a served model.
    The result generates, trains (the pattern stays) and is saved like any model; place
    it on a mesh by `jaxscale.sharding.place`. ``config.shards`` of the masks must be
    divisible by the size of the mesh axis ``tensor`` to be split over it.

    Hidden features of feed-forward networks whose columns are pruned are removed, if
    that does not change the result (as with ``hidden_together`` of `PruneConfig`): gate
    and up have fewer outputs, and the row indices of down count only these.

    Layers that keep more than `dense_above` of their weights stay dense, with zeros
    where they are pruned: `dense_layers` says which.

    Single weights of pattern ``tew`` become rows of tiles, in which pruned weights are
    zero and stay zero in training. Columns that keep weights in the same rows share
    tiles (`group_columns`), so that few rows are added; columns are reordered for this,
    unless it gains little.

    Sparse layers communicate by XLA collectives, also in a model with
    ``tensor_parallel="fused"``, whose kernels take dense weights.

    Args:
        model: The dense model; its weights may be masked already.
        masks: Tile-wise masks (patterns ``tw_k``, ``tw``, ``tew`` and ``tw24``).
        drop_hidden: Remove pruned hidden features.
        dense_above: Fraction of kept weights, 0 to 1, above which a layer stays dense;
            1 keeps none dense.
        separate: Give every block of a stack its own shapes; the result is not scanned.
        compress: Compress the layers of pattern ``tw24`` for sparse tensor cores
            (`pallas_kernels.tile_sparse_matmul.TileSparse24`), for inference alone.
        implementation: Implementation of `tile_sparse_matmul`; None picks one.

    Returns:
        A model with `jaxscale.nn.TileSparseLinear` in place of the pruned layers. Other
        arrays are shared with `model`, except those of layers that stay dense.

    Raises:
        ValueError: the pattern is not tile-wise, the masks do not fit the model, or it
            has fp8 matmuls or sparse layers; with `compress`, the pattern is not tw24
            or tiles are no multiple of 64.

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
    check_type("masks", masks, Masks, "make_model_masks(model, scores, config)")
    if masks.config.pattern not in TILE_WISE:
        raise ValueError(
            f"pattern {masks.config.pattern!r} has no sparse form, expected one of "
            f"{list(TILE_WISE)}; run the masked dense model, as apply_masks gives it"
        )
    check_masks(model, masks)
    if compress and masks.config.pattern != "tw24":
        raise ValueError(
            f"compress of pattern {masks.config.pattern!r}, expected 'tw24': only 2:4 "
            "inside the rows of tiles can be compressed"
        )
    if masks.config.pattern == "tw24":
        # Whole rows of tiles, in which some weights are zero.
        model = apply_masks(model, masks)
        masks = dataclasses.replace(masks, kept=masks.tiled)
        if compress:  # half of it is multiplied
            dense_above = min(2 * dense_above, 1.0)
    if separate and isinstance(model.blocks, Block):
        model, masks = unstacked(model), masks.separated()
    cut = _cut_layers(model, masks, drop_hidden)
    dense = masks.of(_dense_layers(model, masks, cut, dense_above))
    masks = masks.of([name for name in masks if name not in dense.kept])
    layers = linears(model)
    if in_fp8 := {layers[name].quantization for name in masks} - {None}:
        raise ValueError(
            f"the model has quantization {next(iter(in_fp8))!r}, and sparse layers do "
            "not multiply in fp8; make or load it with quantization=None, which has "
            "the same parameters"
        )
    packed: dict[str, _Packed] = {}
    for name, own in cut.items():
        if name in masks:
            feeder = packed[own.feeder] if own.feeder else None
            packed[name] = _pack(own, masks.config, feeder)

    def convert(name: str, layer: Linear) -> Linear | TileSparseLinear:
        if name in packed:
            return packed[name].linear(layer, implementation, compress)
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

    These are layers of which more than `dense_above` is kept, including rows of tiles
    for single weights. A stack counts as one layer, and so does a feed-forward network,
    whose layers share the remaining hidden features.

    Args:
        model: The dense model.
        masks: Its masks.
        dense_above: Fraction of kept weights, 0 to 1.

    Raises:
        ValueError: `dense_above` is not between 0 and 1.

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
    return _dense_layers(model, masks, _cut_layers(model, masks, True), dense_above)


def _dense_layers(
    model: Any, masks: Masks, cut: "Mapping[str, _Cut]", dense_above: float
) -> list[str]:
    if not 0 <= dense_above <= 1:
        raise ValueError(f"dense_above {dense_above!r}, expected a share, 0 to 1")
    tile = masks.config.tile
    networks = [(*each.inputs, each.down) for each in feed_forwards(model)]
    groups = [names for names in networks if {*names} <= {*masks}]
    together = {name for names in groups for name in names}
    groups += [(name,) for name in masks if name not in together]
    found = set()
    for names in groups:
        parts = [part for name in names for part in cut[name].parts]
        kept = sum(int(part.covered(tile).sum()) for part in parts)
        if kept > dense_above * sum(masks[name].size for name in names):
            found |= {*names}
    return [name for name in masks if name in found]


def _cut_layers(model: Any, masks: Masks, drop_hidden: bool) -> "dict[str, _Cut]":
    """The kept weights of each layer, producers of features first."""
    layers, weights = linears(model), kernels(model, masks)
    kept = {name: matrices(masks.kept[name]) for name in masks}  # [L, K, N]
    together: dict[str, tuple[str, ...]] = {}
    feeders: dict[str, str] = {}
    for network in feed_forwards(model) if drop_hidden else ():
        if (hidden := _hidden(network, layers, masks)) is not None:
            for name in network.inputs:
                kept[name] = kept[name] & hidden[:, None]
            kept[network.down] = kept[network.down] & hidden[:, :, None]
            together |= dict.fromkeys(network.inputs, network.inputs)
            feeders[network.down] = network.inputs[0]
    found: dict[str, _Cut] = {}
    for name in sorted(masks, key=lambda name: name in feeders):
        shared = [kept[each] for each in together.get(name, ())]
        of = layers[name], weights[name], kept[name], shared
        split, parts = _parts(*of, masks.config, masks.fours.get(name))
        found[name] = _Cut(
            split=split,
            parts=parts,
            drop=name in together,
            feeder=feeders.get(name),
        )
    return found


def _hidden(
    network: FeedForward, layers: Mapping[str, Linear], masks: Masks
) -> Bool[np.ndarray, "L F"] | None:
    """The hidden features to keep; None if removing the others changes the result."""
    config = masks.config
    names = (*network.inputs, network.down)
    whole = config.pattern == "tew" or (
        config.pattern in ("tw", "tw24") and config.k_granularity == 1
    )
    if not whole or not {*names} <= {*masks}:
        return None
    if config.pattern == "tw24" and not config.hidden_together:
        return None  # fours of `down` hold features that gate or up may lack
    masked = [matrices(masks.kept[name]) for name in network.inputs]
    alive = np.logical_and.reduce([mask.any(axis=1) for mask in masked])
    _, shards = layer_shards(layers[network.inputs[0]], config.shards)
    for hidden, *kept in zip(alive, *masked, strict=True):
        both = np.concatenate(kept) & hidden  # [K of all inputs, F]
        parts = np.split(both, shards, 1) if config.pattern != "tew" else ()
        if any(tiles_of(part, config.tile) is None for part in parts):
            return None  # a tile would lose some of its columns
    # A hidden feature without weights is zero, or the activation of its bias.
    biased = any(layers[name].bias is not None for name in network.inputs)
    if biased and (matrices(masks.kept[network.down]).any(axis=2) & ~alive).any():
        return None
    return alive


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Cut:
    """The shards of the layers of a stack, layer by layer, with their kept weights."""

    split: Literal["rows", "columns"] | None
    """The dimension that the shards split."""
    parts: "list[_Part]"
    drop: bool
    """Outputs without columns are removed."""
    feeder: str | None
    """The layer that produces the inputs, if it removes some."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Packed:
    """The shards of the layers of a stack, layer by layer."""

    split: Literal["rows", "columns"] | None
    weights: list[TileSparse]
    zeros_stay: bool
    """Tiles keep rows with pruned parts."""
    columns: list[jax.Array] | None
    """The hidden feature of each output, if others are removed."""
    fours: list[list[np.ndarray]] | None
    """The rows of each tile, four by four."""

    def linear(
        self, layer: Linear, implementation: str | None, compress: bool
    ) -> TileSparseLinear:
        """The sparse form of a layer."""
        weight = self.stacked(layer.kernel.shape[:-2], layer.kernel[...].dtype)
        bias: Any = layer.bias
        if bias is not None and self.columns is not None:
            bias = bias.replace(self.packed_bias(bias[...]))
        form: TileSparse | TileSparse24 = weight
        if compress:
            form = TileSparse24.compress(weight, self._rows(weight))
        return TileSparseLinear(
            form,
            split=self.split,
            kernel_axes=layer.kernel_axes,
            out_axes=layer.out_axes,
            zeros_stay=self.zeros_stay,
            bias=bias,
            dtype=layer.dtype,
            rules=layer.rules,
            implementation=implementation,
        )

    def _rows(self, weight: TileSparse) -> Int[np.ndarray, "*layers S T P"] | None:
        """The rows of the stacked weight, four by four; -1 past them."""
        if self.fours is None:
            return None
        rows = np.full(weight.rows.shape, -1, np.int32)
        flat = rows.reshape(-1, weight.room)
        for place, found in enumerate(rows for shard in self.fours for rows in shard):
            flat[place, : len(found)] = found
        return rows

    def stacked(self, shape: tuple[int, ...], dtype: Any) -> TileSparse:
        """[*shape, S, ...], for a stack of `shape` layers."""
        shards = len(self.weights) // math.prod(shape)

        def split(x: jax.Array) -> jax.Array:
            return x.reshape(*shape, shards, *x.shape[1:])  # [L, S, ...]

        weight = jax.tree.map(split, TileSparse.stack(self.weights))  # [L, S, T, P, G]
        return weight.with_values(weight.values.astype(dtype))

    def packed_bias(self, bias: jax.Array) -> jax.Array:
        """The bias of the remaining outputs, [..., S C]."""
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
    kept: Bool[np.ndarray, "K N"]
    columns: Int[np.ndarray, " C"] | None
    """The columns of the tiles; each tile keeps equally many rows in all shards."""
    fours: list[np.ndarray] | None = None
    """With tw24, the rows of each tile, four by four."""

    def covered(self, tile: int) -> Bool[np.ndarray, "K N"]:
        """The rows that tiles keep, whole."""
        return cover(self.kept, tile, self.columns)


def _parts(
    layer: Linear,
    weight: Float[np.ndarray, "..."],
    kept: Bool[np.ndarray, "L K N"],
    shared: Sequence[Bool[np.ndarray, "L K N"]],
    config: PruneConfig,
    fours: Fours | None,
) -> tuple[Literal["rows", "columns"] | None, list[_Part]]:
    """Return the dimension that shards split, and the shards of each layer of a stack.

    Args:
        layer: The dense layer.
        weight: Its kernel.
        kept: Its mask of kept weights.
        shared: Masks of layers that must keep the same columns in the same order; empty
            if there are none.
        config: Pattern, tile and shards.
        fours: With tw24, the tiles and the order of their rows.
    """
    by_rows, by_columns = layer_shards(layer, config.shards)
    shards = max(by_rows, by_columns)
    split: Literal["rows", "columns"] | None = None
    if shards > 1:
        split = "rows" if by_rows > 1 else "columns"
    axis = 0 if split == "rows" else 1
    parts = []
    for i, (dense, mask) in enumerate(zip(matrices(weight), kept, strict=True)):
        wide = np.concatenate([m[i] for m in shared]) if shared else mask
        if fours is not None:
            tiles = _tiles_of_fours(fours.layer(i), mask, wide if shared else None)
            cut = _Part(weight=dense, kept=mask, columns=None)
            parts += _in_fours(cut, tiles, shards, axis, config)
            continue
        if split == "columns":
            columns = [_columns(part, config) for part in np.split(wide, shards, 1)]
        else:
            columns = [_columns(wide, config)] * shards
        pieces = np.split(dense, shards, axis), np.split(mask, shards, axis)
        parts += [
            _Part(weight=w, kept=m, columns=c)
            for w, m, c in zip(*pieces, columns, strict=True)
        ]
    if not shared:
        parts = (
            _in_order(parts, config)
            if fours is None
            else _columns_in_order(parts, config.tile)
        )
    return split, parts


type _Tiles = list[tuple[np.ndarray, np.ndarray]]
"""Columns and rows of each tile."""


def _tiles_of_fours(
    fours: Fours, kept: Bool[np.ndarray, "K N"], wide: np.ndarray | None
) -> _Tiles:
    """The tiles that are left.

    Args:
        fours: Of the matrix.
        kept: What it keeps now: some input features may have gone.
        wide: With that of layers that share its columns, of which some may have gone.
    """
    found = []
    for columns, rows in zip(fours.columns, fours.rows, strict=True):
        first = columns[0]
        if first < 0 or (wide is not None and not wide[:, first].any()):
            continue
        rows = rows[rows >= 0]
        found.append((columns, rows[kept[rows, first]]))
    return found


def _in_fours(
    part: _Part, tiles: _Tiles, shards: int, axis: int, config: PruneConfig
) -> list[_Part]:
    """The shards of a layer of pattern tw24.

    Args:
        part: The layer.
        tiles: Its tiles.
        shards: How many shards there are.
        axis: What they split, 0 for rows.
        config: Pattern and tile.
    """
    size = part.kept.shape[axis] // shards
    found = []
    for shard, (weight, kept) in enumerate(
        zip(
            np.split(part.weight, shards, axis),
            np.split(part.kept, shards, axis),
            strict=True,
        )
    ):
        first = shard * size
        if axis == 0:
            mine = [(c, rows[rows // size == shard] - first) for c, rows in tiles]
        else:
            mine = [(c - first, rows) for c, rows in tiles if c[0] // size == shard]
        if not mine:  # a tile without rows
            mine = [(np.arange(config.tile), np.zeros(0, np.int32))]
        columns = np.concatenate([c for c, _ in mine])
        fours = [rows for _, rows in mine]
        found.append(_Part(weight=weight, kept=kept, columns=columns, fours=fours))
    return found


def _columns_in_order(parts: list[_Part], tile: int) -> list[_Part]:
    """The parts with all columns in order, if all tiles allow it."""
    found = []
    for part in parts:
        assert part.columns is not None and part.fours is not None
        tiles = part.columns.reshape(-1, tile)
        if (tiles[:, 0] % tile).any() or (np.diff(tiles) != 1).any():
            return parts
        rows = dict(zip(tiles[:, 0].tolist(), part.fours, strict=True))
        firsts = range(0, part.kept.shape[1], tile)
        fours = [rows.get(first, part.fours[0][:0]) for first in firsts]
        found.append(dataclasses.replace(part, columns=None, fours=fours))
    return found


def _columns(
    kept: Bool[np.ndarray, "K N"], config: PruneConfig
) -> Int[np.ndarray, " C"] | None:
    """The columns of a mask's tiles, in whole tiles; None is all, in order."""
    if config.pattern == "tew":
        columns = group_columns(kept, config.tile)
        extra = -len(columns) % config.tile
        columns = np.pad(columns, (0, extra), constant_values=kept.shape[1])
    else:
        columns = tile_columns(kept, config.tile, config.pattern)
    if columns is not None and not columns.size:
        return np.arange(config.tile)  # a tile without rows
    return columns


_PLACING = 0.09
"""Time to put columns in their places, relative to the dense matmul: measured on an
H200 with 4,096 inputs and outputs and 2,048 tokens."""


def _in_order(parts: list[_Part], config: PruneConfig) -> list[_Part]:
    """The parts with all columns in order, if another order gains too little."""
    plain = [dataclasses.replace(part, columns=None) for part in parts]
    rows = [
        sum(int(p.covered(config.tile).sum()) for p in each) for each in (plain, parts)
    ]
    size = sum(part.kept.size for part in parts)
    gain = _PLACING * size if config.pattern == "tew" else 0
    return plain if rows[0] <= rows[1] + gain else parts


def _pack(cut: _Cut, config: PruneConfig, feeder: _Packed | None) -> _Packed:
    """Pack shards.

    Args:
        cut: The kept weights of the layer.
        config: Pattern and tile.
        feeder: The layer that produces the inputs, if it removes some.
    """
    parts = cut.parts
    covered = [part.covered(config.tile) for part in parts]
    zeros_stay = any(
        (mask != part.kept).any() for mask, part in zip(covered, parts, strict=True)
    )
    # A row kept for a single weight has no neighbors.
    granularity: Any = 1 if zeros_stay else config.k_granularity
    weights = [
        TileSparse.from_dense(
            np.where(part.kept, part.weight, 0),
            mask,
            tile=config.tile,
            granularity=granularity,
            columns=part.columns,
        )
        for mask, part in zip(covered, parts, strict=True)
    ]
    tiles = max(w.tiles for w in weights)
    weights = [_with_tiles(w, tiles) for w in weights]
    fours = [part.fours for part in parts if part.fours is not None]
    fours = [rows + [rows[0][:0]] * (tiles - len(rows)) for rows in fours]
    if feeder is not None and feeder.columns is not None:
        weights = [
            w.fold_rows(columns)
            for w, columns in zip(weights, feeder.columns, strict=True)
        ]
        fours = [
            _renumbered(rows, np.asarray(columns))
            for rows, columns in zip(fours, feeder.columns, strict=bool(fours))
        ]
    columns = None
    if cut.drop:
        columns = [w.columns for w in weights if w.columns is not None]
        weights = [w.packed() for w in weights]
    return _Packed(
        split=cut.split,
        weights=weights,
        zeros_stay=zeros_stay or config.pattern == "tw24",
        columns=columns,
        fours=fours or None,
    )


def _renumbered(
    tiles: list[np.ndarray], columns: Int[np.ndarray, " C"]
) -> list[np.ndarray]:
    """The rows of tiles where inputs are the packed outputs of another layer."""
    places = np.zeros(columns.max() + 1, np.int32)
    places[columns] = np.arange(len(columns))
    return [places[rows] for rows in tiles]


def _with_tiles(w: TileSparse, tiles: int) -> TileSparse:
    """The weight padded with empty tiles."""
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
