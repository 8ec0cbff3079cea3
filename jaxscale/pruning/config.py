"""The settings that masks are made from: pattern, sparsity, layers."""

import dataclasses
import math
from numbers import Integral, Real
from typing import Literal, get_args

from jaxscale.checks import check_choice
from jaxscale.keywords import explained


type Pattern = Literal["ew", "vw", "bw", "2:4", "tw_k", "tw", "tew", "tw24"]

PATTERNS: dict[str, str] = {
    "ew": "single weights, anywhere",
    "vw": "weights of each vector along K, as many in every vector",
    "bw": "square blocks",
    "2:4": "two of every four weights along K",
    "tw_k": "pieces of rows in tiles of columns",
    "tw": "whole columns, then pieces of rows in tiles of the kept columns",
    "tew": "as tw, and a few single weights besides",
    "tw24": "as tw, and of each column two of every four kept rows",
}
"""Each pattern, and the unit that it keeps or prunes as a whole."""

TILE_WISE = ("tw_k", "tw", "tew", "tw24")
"""Patterns whose masks `jaxscale.pruning.sparsify` turns into sparse layers."""


_LEAST = 0.25
"""What each layer keeps at least, as a part of what it would keep if all lost alike."""


@explained
@dataclasses.dataclass(frozen=True, kw_only=True)
class PruneConfig:
    """Pattern, sparsity and the layers that they apply to.

    Example:
        >>> PruneConfig(sparsity=0.75, tile=64).with_sparsity(0.5).tile
        64
        >>> PruneConfig(sparsity=75)
        Traceback (most recent call last):
        ...
        ValueError: sparsity 75, expected at least 0 and below 1: the share of ...
    """

    sparsity: float = 0.75
    """Fraction of the chosen layers' weights to prune, at least 0 and below 1."""
    pattern: Pattern = "tw"
    """Sparsity pattern: ew (single weights), vw (vectors along K), bw (blocks), 2:4,
    tw_k (tile-wise, rows only), tw (tile-wise, columns then rows), tew (tw and
    some single weights), tw24 (tw and 2:4 inside the kept rows)."""
    tile: int = 128
    """G, columns of a tile; the GPU kernels take 64, 128 and 256."""
    k_granularity: int = 1
    """Rows that a tile keeps or loses together: 1, 8 or 64."""
    block: int = 32
    """Side of the blocks of bw."""
    vector: int = 16
    """Length of the vectors of vw."""
    single_fraction: float = 0.02
    """Fraction of its kept weights that tew keeps as single weights."""
    scope: Literal["global", "layer"] = "global"
    """Rank the units of all chosen layers together (global), or give every layer the
    same sparsity (layer), for scores that do not compare across layers (wanda)."""
    max_layer_sparsity: float | None = None
    """Highest sparsity of a single layer, at least `sparsity`; other layers lose more
    instead. None leaves each layer a quarter of what it would keep if all were pruned
    alike: at 75%, no layer loses more than 93.75%. 1 sets no bound: a layer may then
    lose all its weights."""
    apriori: float = 0.0
    """Exponent of the a-priori bias in the ranking of tiles: a unit's score is
    multiplied by the fraction of it that ew would keep, to this power."""
    permute: bool = True
    """With tw and tew, put columns that would keep the same rows into one tile, where
    that costs nothing when the model runs; False cuts tiles from columns in order."""
    equal_work: bool = False
    """Keep equally many rows in all tiles of a layer, and in all shards: balanced work
    for the kernels, at some cost in accuracy."""
    shards: int = 1
    """Tensor-parallel shards that the tiles must fit into and that equal_work
    balances."""
    hidden_together: bool = True
    """With tw, and with tew if its columns are permuted, choose hidden features
    jointly: the gate and up projections of a feed-forward network keep the same
    columns, and its down projection only rows of these, so that
    `jaxscale.pruning.sparsify` removes the other hidden features. Only with
    ``scope="global"``."""
    fours_in_order: bool = True
    """With tw24, a layer whose tiles keep all rows, or 63 of 64, keeps all with its
    fours in the order of its inputs, as plain 2:4 has, and its kernel gathers nothing;
    but not one of which a search for better fours would keep much more. False searches
    in all layers, and all gather."""
    dense: tuple[str, ...] = ()
    """Layers to leave dense: names such as `blocks.mlp.up`, `blocks.mlp.up.0` for the
    first of a stack, or patterns such as ``*.down``. Heads and embeddings are always
    dense."""

    def __post_init__(self) -> None:
        if not isinstance(self.sparsity, Real) or not 0 <= self.sparsity < 1:
            raise ValueError(
                f"sparsity {self.sparsity!r}, expected at least 0 and below 1: the "
                "share of weights that is pruned"
            )
        bound = self.max_layer_sparsity
        if bound is not None and not self.sparsity <= bound <= 1:
            raise ValueError(
                f"max_layer_sparsity {bound}, expected sparsity {self.sparsity} to 1: "
                "where no layer may lose so much, all of them cannot; raise it, or "
                "leave it out"
            )
        check_choice("pattern", self.pattern, list(PATTERNS))
        if self.pattern == "2:4" and self.sparsity not in (0.0, 0.5):
            raise ValueError(
                f"sparsity {self.sparsity}, expected 0.5: pattern 2:4 knows no other; "
                "use tw for other shares"
            )
        if self.pattern == "tw24" and 0 < self.sparsity < 0.5:
            raise ValueError(
                f"sparsity {self.sparsity}, expected at least 0.5: pattern tw24 prunes "
                "half of what its tiles keep; use tw for less, or fewer stages"
            )
        for name in ("tile", "block", "vector", "shards"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
                raise ValueError(f"{name} {value!r}, expected at least 1, whole")
        granularity = self.k_granularity
        if isinstance(granularity, bool) or granularity not in (1, 8, 64):
            raise ValueError(
                f"k_granularity {granularity!r}, expected 1, 8 or 64, which the "
                "kernels know"
            )
        if not 0 <= self.single_fraction < 1:
            raise ValueError(
                f"single_fraction {self.single_fraction}, expected at least 0 and "
                "below 1: a share of the kept weights"
            )
        if self.scope not in get_args(_SCOPES):
            raise ValueError(f"scope {self.scope!r}, expected 'global' or 'layer'")
        if not 0 <= self.apriori < math.inf:
            raise ValueError(f"apriori {self.apriori}, expected 0 (off) or more")
        if isinstance(self.dense, str):
            raise ValueError(f"dense {self.dense!r}, expected a tuple of names")

    def with_sparsity(self, sparsity: float) -> "PruneConfig":
        """The same settings for another sparsity."""
        return dataclasses.replace(self, sparsity=sparsity)

    @property
    def whole_rows(self) -> "PruneConfig":
        """The settings of the tiles of tw24, half of which 2:4 then prunes."""
        bound = self.max_layer_sparsity
        return dataclasses.replace(
            self,
            pattern="tw",
            sparsity=max(2 * self.sparsity - 1, 0.0),
            max_layer_sparsity=None if bound is None else max(2 * bound - 1, 0),
        )

    @property
    def least_share(self) -> float:
        """The share of its weights that each layer keeps at least."""
        if self.max_layer_sparsity is None:
            return _LEAST * (1 - self.sparsity)
        return 1 - self.max_layer_sparsity

    @property
    def tiled(self) -> bool:
        """True if the pattern has tiles of columns."""
        return self.pattern in TILE_WISE


_SCOPES = Literal["global", "layer"]


def pruned_units(total: int, sparsity: float) -> int:
    """Return how many of `total` equal units a sparsity prunes; half a unit rounds up.

    ``floor(total * sparsity + 1/2)``; every mask keeps exactly the rest.

    Args:
        total: How many units there are.
        sparsity: The fraction to prune, between 0 and 1.

    Example:
        >>> pruned_units(10, 0.75), pruned_units(1000, 0.9)
        (8, 900)
    """
    # 0.29 * 100 is a little less than 29: undo the rounding error.
    return math.floor(round(total * sparsity, 6) + 0.5)
