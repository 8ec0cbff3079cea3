"""Tile-wise sparse matrix product: each tile of columns of a weight keeps its rows."""

from pallas_kernels.tile_sparse_matmul.api import tile_sparse_matmul
from pallas_kernels.tile_sparse_matmul.config import TileSparseConfig
from pallas_kernels.tile_sparse_matmul.files import load_tile_sparse, save_tile_sparse
from pallas_kernels.tile_sparse_matmul.format import TileSparse
from pallas_kernels.tile_sparse_matmul.singles import SingleWeights


__all__ = [
    "SingleWeights",
    "TileSparse",
    "TileSparseConfig",
    "load_tile_sparse",
    "save_tile_sparse",
    "tile_sparse_matmul",
]
