"""Matrix product of 8-bit floating-point operands with scales, and their rounding."""

from pallas_kernels.scaled_matmul.api import scaled_matmul
from pallas_kernels.scaled_matmul.config import ScaledMatmulConfig
from pallas_kernels.scaled_matmul.quantize import quantize_fp8


__all__ = ["ScaledMatmulConfig", "quantize_fp8", "scaled_matmul"]
