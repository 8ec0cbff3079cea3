"""Statistics and images of the masks of each layer.

Legend: K input features, N output features, T tiles.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float, Int

from jaxscale.pruning.layers import layer_names, matrices
from jaxscale.pruning.masks import Masks, Scores
from jaxscale.pruning.tilewise import tile_counts


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerReport:
    """One pruned layer."""

    name: str
    """Name of the layer, with its index in the stack."""
    shape: tuple[int, int]
    """K and N."""
    sparsity: float
    """Fraction of its weights that is pruned."""
    kept_score: float
    """Fraction of its total score that is kept."""
    tile_rows: Int[np.ndarray, " T"] | None
    """Rows that each tile keeps, its work; None without tiles."""
    single_weights: int
    """Weights that are kept outside of tiles."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """The cost of running the pruned layers, compared with the dense ones."""

    dense: int
    """Multiply-adds per token of the dense layers."""
    tiled: int
    """Multiply-adds per token of weights in tiles; without tiles, of all kept
    weights."""
    single: int
    """Multiply-adds per token of single weights. Tensor cores cannot do them: each
    costs a kernel as much as many in a tile, and has its own index."""
    imbalance: float
    """Rows of the fullest tile over the mean of its layer, averaged over layers; 1 is
    balanced. A kernel waits for the fullest tile."""

    @property
    def sparse_bytes(self) -> int:
        """Bytes of the kept weights in bf16; single ones carry a row number."""
        return 2 * self.tiled + 6 * self.single


def layer_reports(masks: Masks, scores: Scores) -> list[LayerReport]:
    """One entry per pruned layer, in the order of the names.

    Args:
        masks: The masks to report on.
        scores: Importance of the weights before they were pruned.

    Example:
        >>> from flax import nnx
        >>> from jaxscale.models import Decoder, preset
        >>> from jaxscale.pruning import PruneConfig, magnitude_scores, make_model_masks
        >>> model = Decoder(preset("llama_tiny"), rngs=nnx.Rngs(0))
        >>> config = PruneConfig(sparsity=0.5, tile=16, scope="layer")
        >>> scores = magnitude_scores(model)
        >>> layer_reports(make_model_masks(model, scores, config), scores)[0].sparsity
        0.5
    """
    found = []
    for name, places in masks.chosen.items():
        names = layer_names(name, masks.kept[name].shape)
        for i in places:
            kept = matrices(masks.kept[name])[i]
            tiled = matrices(masks.tiled[name])[i]
            score = matrices(scores[name])[i]
            total = float(score.sum(dtype=np.float64))
            config = masks.config
            rows = None
            if config.tiled:
                rows = tile_counts(tiled, config.tile, config.pattern)
            found.append(
                LayerReport(
                    name=names[i],
                    shape=(kept.shape[0], kept.shape[1]),
                    sparsity=1 - float(kept.mean()),
                    kept_score=float(score[kept].sum(dtype=np.float64)) / (total or 1),
                    tile_rows=rows,
                    single_weights=int((kept & ~tiled).sum()),
                )
            )
    return found


def lost_layers(reports: Sequence[LayerReport]) -> list[str]:
    """The names of layers of which nothing is kept.

    Such a layer outputs zeros (or its bias) for any input.

    Args:
        reports: From `layer_reports`.
    """
    return [layer.name for layer in reports if layer.sparsity == 1.0]


def work(masks: Masks) -> Work:
    """Count what the chosen layers cost to run."""
    dense = tiled = single = 0
    ratios = []
    for name, places in masks.chosen.items():
        for i in places:
            kept = matrices(masks.kept[name])[i]
            in_tiles = matrices(masks.tiled[name])[i]
            dense += kept.size
            tiled += int((kept & in_tiles).sum())
            single += int((kept & ~in_tiles).sum())
            if masks.config.tiled:
                rows = tile_counts(in_tiles, masks.config.tile, masks.config.pattern)
                if rows.size and rows.sum():
                    ratios.append(float(rows.max() / rows.mean()))
    return Work(
        dense=dense,
        tiled=tiled,
        single=single,
        imbalance=float(np.mean(ratios)) if ratios else 1.0,
    )


def picture(
    mask: Bool[np.ndarray, "K N"], size: int = 64
) -> Float[np.ndarray, "rows columns"]:
    """A mask as an image of at most `size` x `size` pixels: the kept fraction in each.

    Args:
        mask: True where a weight is kept.
        size: Maximum pixels along the longer side.

    Example:
        >>> mask = np.zeros((4, 8), bool)
        >>> mask[:2] = True
        >>> picture(mask, size=2)
        array([[1., 1.],
               [0., 0.]])
    """
    height, width = (-(-length // size) for length in mask.shape)
    rows = np.arange(0, mask.shape[0], height)
    columns = np.arange(0, mask.shape[1], width)
    sums = np.add.reduceat(mask.astype(np.float64), rows, axis=0)  # [rows, N]
    sums = np.add.reduceat(sums, columns, axis=1)  # [rows, columns]
    heights = np.diff([*rows, mask.shape[0]])
    widths = np.diff([*columns, mask.shape[1]])
    return sums / (heights[:, None] * widths)
