"""Matmul with an 8-bit weight, which is read in one byte per value."""

from pallas_kernels.quantized_matmul.api import quantized_matmul
from pallas_kernels.quantized_matmul.config import QuantizedMatmulConfig


__all__ = ["QuantizedMatmulConfig", "quantized_matmul"]
