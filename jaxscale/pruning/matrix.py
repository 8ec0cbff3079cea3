"""A weight to prune, and what is kept of it.

Legend: K input features, N output features.
"""

import dataclasses

import numpy as np
from jaxtyping import Bool, Float

from jaxscale.pruning.fours import Fours


@dataclasses.dataclass(frozen=True, kw_only=True)
class Matrix:
    """A weight to prune, or one of a stack.

    Example:
        >>> Matrix(name="mlp.up", scores=np.ones((4, 8), np.float32)).scores.shape
        (4, 8)
    """

    name: str
    """Name of the layer, for messages."""
    scores: Float[np.ndarray, "K N"]
    """Importance of each element, at least 0."""
    previous: Bool[np.ndarray, "K N"] | None = None
    """Units that the previous stage kept; None for the first stage."""
    previous_tiled: Bool[np.ndarray, "K N"] | None = None
    """The part of it in tiles."""
    row_shards: int = 1
    """Devices that K is split over."""
    column_shards: int = 1
    """Devices that N is split over."""
    shares: str | None = None
    """An earlier matrix that must keep the same columns."""
    fed_by: str | None = None
    """An earlier matrix whose columns are this one's input features: rows of its pruned
    columns are pruned."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mask:
    """The elements that one matrix keeps."""

    kept: Bool[np.ndarray, "K N"]
    """All kept elements."""
    tiled: Bool[np.ndarray, "K N"]
    """The part in tiles: all but the single weights of tew."""
    fours: Fours | None = None
    """With tw24, its tiles and the order of their rows."""
