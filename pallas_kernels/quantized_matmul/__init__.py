"""Product with a weight of 8-bit numbers, which is read a byte a number."""

from pallas_kernels.quantized_matmul.api import quantized_matmul
from pallas_kernels.quantized_matmul.config import QuantizedMatmulConfig


__all__ = ["QuantizedMatmulConfig", "quantized_matmul"]
