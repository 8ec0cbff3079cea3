"""Matrix product: ``y = x w`` with fp32 sums, on tensor cores."""

from pallas_kernels.matmul.api import matmul
from pallas_kernels.matmul.config import MatmulConfig


__all__ = ["MatmulConfig", "matmul"]
