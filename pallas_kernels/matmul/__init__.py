"""Matrix product: ``y = x w`` with fp32 sums, on tensor cores; linear layers of it."""

from pallas_kernels.matmul.activations import ACTIVATIONS, gelu
from pallas_kernels.matmul.api import dense, matmul
from pallas_kernels.matmul.config import MatmulConfig


__all__ = ["ACTIVATIONS", "MatmulConfig", "dense", "gelu", "matmul"]
