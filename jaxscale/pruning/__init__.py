"""Pruning to tile-wise and other patterns: scores, masks, schedules, sparse models."""

from jaxscale.pruning.clustering import cluster_columns
from jaxscale.pruning.config import PATTERNS, TILE_WISE, PruneConfig, pruned_units
from jaxscale.pruning.convert import DENSE_ABOVE, dense_layers, sparsify
from jaxscale.pruning.layers import choose, linears
from jaxscale.pruning.masks import (
    Masks,
    Scores,
    apply_masks,
    check_layers,
    make_model_masks,
)
from jaxscale.pruning.matrix import Mask, Matrix
from jaxscale.pruning.schedule import (
    PAPER_STAGES,
    Pruner,
    Stage,
    cubic_stages,
    mask_gradients,
    one_shot,
    paper_stages,
    set_masks,
)
from jaxscale.pruning.scores import (
    input_products,
    input_squares,
    magnitude_scores,
    taylor_scores,
    wanda_scores,
)
from jaxscale.pruning.second_order import sparsegpt_scores, update_weights
from jaxscale.pruning.summary import (
    LayerReport,
    Work,
    layer_reports,
    lost_layers,
    picture,
    work,
)
from jaxscale.pruning.tilewise import make_masks, tile_counts
from jaxscale.public import listing


__all__ = [
    "DENSE_ABOVE",
    "PAPER_STAGES",
    "PATTERNS",
    "TILE_WISE",
    "LayerReport",
    "Mask",
    "Masks",
    "Matrix",
    "PruneConfig",
    "Pruner",
    "Scores",
    "Stage",
    "Work",
    "apply_masks",
    "check_layers",
    "choose",
    "cluster_columns",
    "cubic_stages",
    "dense_layers",
    "input_products",
    "input_squares",
    "layer_reports",
    "linears",
    "lost_layers",
    "magnitude_scores",
    "make_masks",
    "make_model_masks",
    "mask_gradients",
    "one_shot",
    "paper_stages",
    "picture",
    "pruned_units",
    "set_masks",
    "sparsegpt_scores",
    "sparsify",
    "taylor_scores",
    "tile_counts",
    "update_weights",
    "wanda_scores",
    "work",
]

__dir__ = listing(__all__)
