"""fp8 matmul with scales, and quantization to fp8."""

from pallas_kernels.scaled_matmul.api import scaled_matmul
from pallas_kernels.scaled_matmul.config import ScaledMatmulConfig
from pallas_kernels.scaled_matmul.quantize import quantize_fp8


__all__ = ["ScaledMatmulConfig", "quantize_fp8", "scaled_matmul"]
