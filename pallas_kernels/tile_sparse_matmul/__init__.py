"""Tile-wise sparse matmul: each tile of columns of a weight keeps its own rows."""

from pallas_kernels.tile_sparse_matmul.api import tile_sparse_matmul
from pallas_kernels.tile_sparse_matmul.config import TileSparseConfig
from pallas_kernels.tile_sparse_matmul.cover import cover, group_columns, pin_zeros
from pallas_kernels.tile_sparse_matmul.files import load_tile_sparse, save_tile_sparse
from pallas_kernels.tile_sparse_matmul.format import TileSparse
from pallas_kernels.tile_sparse_matmul.format_24 import TileSparse24


__all__ = [
    "TileSparse",
    "TileSparse24",
    "TileSparseConfig",
    "cover",
    "group_columns",
    "load_tile_sparse",
    "pin_zeros",
    "save_tile_sparse",
    "tile_sparse_matmul",
]
