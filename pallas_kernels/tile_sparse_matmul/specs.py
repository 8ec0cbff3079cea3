"""Tile-sparse matmuls of real models: one list for tests, tuner and benchmarks.

Axes: M tokens, K input features, N output features, T tiles, P row capacity of a tile,
G columns of a tile.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.tile_sparse_matmul.format import STEP, TileSparse
from pallas_kernels.tile_sparse_matmul.format_24 import TileSparse24, metadata_shape


@dataclasses.dataclass(frozen=True, kw_only=True)
class TileSparseSpec:
    """A named tile-sparse matmul."""

    name: str
    """Layer, tokens and sparsity."""
    m: int
    """Tokens."""
    n: int
    """Output features."""
    k: int
    """Input features."""
    room: int
    """Rows that each tile keeps, or the fullest of uneven ones."""
    tile: int = 128
    """Columns of a tile."""
    granularity: int = 1
    """Rows are kept in aligned groups of this size."""
    uneven: bool = False
    """Tiles keep unequal numbers of rows, which kernels read."""
    feature_major: tuple[bool, bool] = (True, True)
    """Layout of the input and the output: features or tokens are the leading axis."""
    two_of_four: bool = False
    """Each column keeps two of four of the rows of its tile: half of the sparsity."""

    def weight_shape(
        self, dtype: DTypeLike = jnp.bfloat16
    ) -> TileSparse | TileSparse24:
        """The weight with shapes in place of arrays."""
        tiles = -(-self.n // self.tile)
        values = jax.ShapeDtypeStruct((tiles, self.room, self.tile), dtype)
        leaves: Any = (
            None if self.two_of_four else values,
            jax.ShapeDtypeStruct((tiles, self.room), jnp.int32),
            jax.ShapeDtypeStruct((tiles,), jnp.int32),
            None,
            None,
            jax.ShapeDtypeStruct((tiles,), jnp.int32) if self.uneven else None,
        )
        static = ((self.k, self.n), self.granularity, not self.uneven, None)
        kept = TileSparse.tree_unflatten(static, leaves)
        if not self.two_of_four:
            return kept
        shapes: Any = (
            jax.ShapeDtypeStruct((tiles, self.tile, self.room // 2), dtype),
            jax.ShapeDtypeStruct(
                metadata_shape(tiles, self.tile, self.room), jnp.int32
            ),
        )
        return TileSparse24.tree_unflatten(None, (*shapes, kept))


SHAPES = {
    "bert_up": (768, 3072),
    "bert_down": (3072, 768),
    "square_4096": (4096, 4096),
    "llama3_8b_up": (4096, 14336),
    "llama3_8b_down": (14336, 4096),
    "square_8192": (8192, 8192),
    "llama3_70b_up": (8192, 28672),
}
"""Input and output features of the layers."""


def _spec(layer: str, m: int, sparsity: float, **kwargs: Any) -> TileSparseSpec:
    k, n = SHAPES[layer]
    room = round(k * (1 - sparsity) / STEP) * STEP
    extra = "".join(f"_{name}{value}" for name, value in kwargs.items())
    name = f"{layer}_m{m}_s{100 * sparsity:g}{extra}"
    shorter = {
        "feature_major": "",
        " ": "",
        "granularity": "rows",
        "unevenTrue": "uneven",
        "two_of_fourTrue": "24",
    }
    for word, short in shorter.items():
        name = name.replace(word, short)
    return TileSparseSpec(name=name, m=m, n=n, k=k, room=room, **kwargs)


SPECS: tuple[TileSparseSpec, ...] = (
    _spec("square_4096", 4096, 0.75),
    _spec("square_4096", 4096, 0.75, feature_major=(False, False)),
    _spec("square_4096", 4096, 0.75, granularity=64, feature_major=(False, False)),
    _spec("square_4096", 4096, 0.75, tile=64),
    _spec("square_4096", 4096, 0.75, tile=256),
    _spec("square_4096", 4096, 0.5),
    *(_spec(layer, 4096, 0.75) for layer in SHAPES if layer != "square_4096"),
    *(_spec("llama3_8b_up", m, 0.75) for m in (1, 8, 16, 32, 64, 128, 512, 2048)),
    *(_spec("square_4096", m, 0.75) for m in (8, 64, 512, 2048, 8192)),
    _spec("square_4096", 4096, 0.75, uneven=True),
    _spec("llama3_8b_down", 4096, 0.75, uneven=True),
    _spec("llama3_8b_up", 4096, 0.5, two_of_four=True),
)
"""Every problem that is lowered in the tests and tuned."""
