"""Matmul: ``y = x w`` with fp32 accumulation, on tensor cores; fused linear layers."""

from pallas_kernels.matmul.activations import ACTIVATIONS, gelu
from pallas_kernels.matmul.api import matmul
from pallas_kernels.matmul.config import MatmulConfig
from pallas_kernels.matmul.dense import ResidualNorm, dense


__all__ = ["ACTIVATIONS", "MatmulConfig", "ResidualNorm", "dense", "gelu", "matmul"]
