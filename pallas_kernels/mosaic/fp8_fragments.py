"""Accumulators of wgmma in registers, as its 8-bit operands.

Inline PTX and MLIR, for what Pallas has no operation.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector

from pallas_kernels.mosaic.lanes import register_places


ORDER = tuple(
    8 * half + 2 * lane + i for lane in range(4) for half in range(2) for i in range(2)
)
"""Of 16 columns of an accumulator a lane has two pairs, 8 apart, and of an operand of 8
bits four columns in a row: which column of the accumulator it takes each of them for.
Nothing is exchanged between lanes where the other operand has its rows in this order.
"""


def as_fp8_operand(values: jax.Array) -> jax.Array:
    """Rounds accumulators to E4M3, as the left operand of a matmul in registers.

    Args:
        values: fp32 [64, columns], in the layout of wgmma accumulators; a multiple of
            32 columns. What is too large saturates.

    Returns:
        float8_e4m3fn [64, columns], each 16 columns in `ORDER`.
    """
    layout = plgpu.Layout.WGMMA_8BIT

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA,),
        return_type=plgpu.ShapeDtypeStruct(values.shape, jnp.float8_e4m3fn, layout),
    )
    def round_to_operand(ctx: Any, values: mgpu.FragmentedArray) -> Any:
        del ctx
        return _as_fp8_operand(values, layout.to_mgpu())

    convert: Any = round_to_operand  # the decorator supplies the context
    return convert(values)


def _as_fp8_operand(values: mgpu.FragmentedArray, layout: Any) -> Any:
    """Emits the conversions of one lane."""
    i32 = ir.IntegerType.get_signless(32)
    by_place = {
        place: values.registers[at]
        for at, place in register_places(values.layout, values.shape).items()
    }

    def four(*registers: ir.Value) -> ir.Value:
        numbers = [
            vector.extract(register, dynamic_position=[], static_position=[i])
            for register in registers
            for i in range(2)
        ]
        return llvm.inline_asm(
            i32,
            numbers,
            "{ .reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f32 l, $2, $1;"
            " cvt.rn.satfinite.e4m3x2.f32 h, $4, $3; mov.b32 $0, {l, h}; }",
            "=r,f,f,f,f",
        )

    registers = np.empty(layout.registers_shape(values.shape), object)
    kind = ir.VectorType.get((4,), ir.Float8E4M3FNType.get())
    for at, (row, column) in register_places(layout, values.shape).items():
        word = four(by_place[row, column], by_place[row, column + 8])
        registers[at] = mgpu.utils.bitcast(word, kind)
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)
