"""From a pruned model to one that computes only what was kept.

Legend: K input features, N output features, C packed columns, J tiles.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from jaxscale.nn.linear import Linear, TileSparseLinear
from jaxscale.pruning.config import TILE_WISE
from jaxscale.pruning.layers import kernels, matrices, replace_linears
from jaxscale.pruning.masks import Masks, check_masks, layer_shards
from jaxscale.pruning.tilewise import tile_columns
from pallas_kernels.tile_sparse_matmul import TileSparse


def sparsify(model: Any, masks: Masks, *, implementation: str | None = None) -> Any:
    """A copy of `model` whose pruned layers store and compute only what is kept.

    All layers of a stack, and all tensor-parallel shards, get arrays of equal shape:
    room for the fullest tile of any of them, so masks made with ``equal_work`` waste
    none. The result generates, trains (the pattern stays) and is saved like any model;
    place it on a mesh by `jaxscale.sharding.place`. ``config.shards`` of the masks
    must be divisible by the size of the mesh axis ``tensor`` to be split over it.

    The communication of a sparse layer is XLA's, also in a model with
    ``tensor_parallel="fused"``: the kernels that hide it multiply by dense weights.

    Args:
        model: The dense model; its weights may but need not be masked.
        masks: Tile-wise masks (patterns ``tw`` and ``tw_k``).
        implementation: Passed to `tile_sparse_matmul`.

    Returns:
        A model in which `jaxscale.nn.TileSparseLinear` stand for the pruned layers.
        Other arrays are shared with `model`.

    Raises:
        ValueError: the pattern is not tile-wise, the masks do not fit the model, or it
            is sparse already.

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
    weights = kernels(model, masks)

    def convert(name: str, layer: Linear) -> TileSparseLinear:
        split, weight = _pack(layer, weights[name], masks, name)
        return TileSparseLinear(
            weight,
            split=split,
            kernel_axes=layer.kernel_axes,
            out_axes=layer.out_axes,
            bias=layer.bias,
            dtype=layer.dtype,
            rules=layer.rules,
            implementation=implementation,
        )

    return replace_linears(
        model, {n: lambda layer, n=n: convert(n, layer) for n in masks}
    )


def _pack(
    layer: Linear, weight: Float[np.ndarray, "..."], masks: Masks, name: str
) -> tuple[Literal["rows", "columns"] | None, TileSparse]:
    """The shards of a layer, stacked: [S, ...], or [L, S, ...] for a stack."""
    config = masks.config
    by_rows, by_columns = layer_shards(layer, config.shards)
    shards = max(by_rows, by_columns)
    split: Literal["rows", "columns"] | None = None
    if shards > 1:
        split = "rows" if by_rows > 1 else "columns"
    axis = 0 if split == "rows" else 1
    packed = []
    for dense, mask in zip(matrices(weight), matrices(masks.tiled[name]), strict=True):
        # The columns of a tile are the same in all shards of its rows.
        columns = tile_columns(mask, config.pattern)
        for part, keeps in zip(
            np.split(dense, shards, axis), np.split(mask, shards, axis), strict=True
        ):
            own = columns
            if split == "columns":
                own = tile_columns(keeps, config.pattern)
            packed.append(_from_dense(part, keeps, own, masks))
    tiles = max(w.tiles for w in packed)
    packed = [_with_tiles(w, tiles) for w in packed]
    stacked: TileSparse = TileSparse.stack(packed)
    dtype = layer.kernel[...].dtype
    leading = (shards,) if weight.ndim == 2 else (-1, shards)
    stacked = jax.tree.map(lambda x: x.reshape(*leading, *x.shape[1:]), stacked)
    return split, stacked.with_values(stacked.values.astype(dtype))


def _from_dense(
    weight: Float[np.ndarray, "K N"],
    mask: Bool[np.ndarray, "K N"],
    columns: np.ndarray | None,
    masks: Masks,
) -> TileSparse:
    config = masks.config
    granularity: Any = config.k_granularity
    if columns is not None and not columns.size:
        columns = np.arange(config.tile)  # a tile without rows
    return TileSparse.from_dense(
        weight, mask, tile=config.tile, granularity=granularity, columns=columns
    )


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
