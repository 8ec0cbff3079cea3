"""Tensor-parallel matmuls fused with their communication."""

from pallas_kernels.collective_matmul.all_reduce import (
    AllReduceWorkspace,
    low_latency_all_reduce,
    make_all_reduce_workspace,
)
from pallas_kernels.collective_matmul.api import (
    all_gather_matmul,
    matmul_all_reduce,
    matmul_reduce_scatter,
)
from pallas_kernels.collective_matmul.config import CollectiveConfig
from pallas_kernels.collective_matmul.low_latency_gather import (
    low_latency_all_gather_matmul,
)
from pallas_kernels.collective_matmul.scaled import (
    scaled_all_gather_matmul,
    scaled_matmul_reduce_scatter,
)
from pallas_kernels.collective_matmul.workspace import (
    GatherWorkspace,
    make_gather_workspace,
)


__all__ = [
    "AllReduceWorkspace",
    "CollectiveConfig",
    "GatherWorkspace",
    "all_gather_matmul",
    "low_latency_all_gather_matmul",
    "low_latency_all_reduce",
    "make_all_reduce_workspace",
    "make_gather_workspace",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "scaled_all_gather_matmul",
    "scaled_matmul_reduce_scatter",
]
