"""Operands of 8 bits with the scales of their rows, in collective products.

Axis letters: B leading axes, M rows of all devices, m rows of one, K contraction,
N columns; D devices.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.matmul.mosaic_gpu import Tiles
from pallas_kernels.scaled_matmul.mosaic_gpu import Scales


__all__ = ["ScaledArray", "scales_of", "values_of"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ScaledArray:
    """An operand of 8 bits and the scales of its rows, with the shape of the former."""

    values: Any
    """[..,rows,K]."""
    scale: Any
    """fp32; of x [B,D,m] for the rows of all devices, of a weight [N]."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the values."""
        return self.values.shape

    @property
    def dtype(self) -> Any:
        """The type of the values."""
        return self.values.dtype


def values_of(x: Any) -> jax.Array:
    """The numbers of an operand, which may have scales."""
    return x.values if isinstance(x, ScaledArray) else x


def scales_of(
    x: Any, ws: Sequence[Any], tiles: Sequence[Tiles], blocks: int
) -> tuple[Scales | None, tuple[jax.Array, ...]]:
    """How a kernel reads scales, and the scales as it takes them.

    Args:
        x: the left operand; its scales are those of the rows of all devices.
        ws: the weights.
        tiles: the tiles of each product.
        blocks: row blocks of one device within one leading index.

    Returns:
        The reader and two arrays: a scale for each row of a row block, row blocks in
        the order of a [B*D,m] view, and one for each column of a column tile, one
        weight after the other. None and nothing for operands without scales.
    """
    if not isinstance(x, ScaledArray):
        return None, ()
    config = tiles[0].config

    def padded(scale: jax.Array, size: int) -> jax.Array:
        widths = [(0, 0)] * (scale.ndim - 1) + [(0, size - scale.shape[-1])]
        return jnp.pad(scale, widths).reshape(-1)

    columns = [
        padded(w.scale, cut.counts[1] * config.tile_n)
        for w, cut in zip(ws, tiles, strict=True)
    ]
    scales = Scales(tiles=tiles[0], by_row=True, by_column=True)
    return scales, (padded(x.scale, blocks * config.tile_m), jnp.concatenate(columns))
