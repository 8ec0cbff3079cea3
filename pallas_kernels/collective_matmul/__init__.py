"""Tensor-parallel matmuls fused with their communication."""

from pallas_kernels.collective_matmul.api import (
    all_gather_matmul,
    matmul_all_reduce,
    matmul_reduce_scatter,
)
from pallas_kernels.collective_matmul.config import CollectiveConfig
from pallas_kernels.collective_matmul.scaled import (
    scaled_all_gather_matmul,
    scaled_matmul_reduce_scatter,
)


__all__ = [
    "CollectiveConfig",
    "all_gather_matmul",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "scaled_all_gather_matmul",
    "scaled_matmul_reduce_scatter",
]
