"""Operands of fp8 matmuls: quantized by rows and transposed, with their scales."""

from pallas_kernels.fp8_operands.api import (
    QuantizedRows,
    quantize_and_transpose,
    quantize_gated,
    quantize_gated_gradients,
    quantize_rms_norm,
    quantize_rows,
    quantize_squares,
    transpose,
    transpose_blocks,
    transpose_rows,
)
from pallas_kernels.fp8_operands.scales import BLOCK, inverse_scale, power_of_two_scale


__all__ = [
    "BLOCK",
    "QuantizedRows",
    "inverse_scale",
    "power_of_two_scale",
    "quantize_and_transpose",
    "quantize_gated",
    "quantize_gated_gradients",
    "quantize_rms_norm",
    "quantize_rows",
    "quantize_squares",
    "transpose",
    "transpose_blocks",
    "transpose_rows",
]
