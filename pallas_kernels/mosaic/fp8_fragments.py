"""Accumulators of wgmma in registers, as its 8-bit operands.

Inline PTX and MLIR, for what Pallas has no operation.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.mosaic.lanes import register_places


def as_fp8_operand(values: jax.Array) -> jax.Array:
    """Rounds accumulators to E4M3, as the left operand of a matmul in registers.

    Of 16 columns a lane has two pairs of an accumulator, and four in a row of an
    operand of 8 bits. The four lanes of a row exchange them: for two times 16 columns
    each sends two words and takes two.

    Args:
        values: fp32 [64, columns], in the layout of wgmma accumulators; a multiple of
            32 columns. What is too large saturates.

    Returns:
        float8_e4m3fn [64, columns].
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
    """Emits the conversions and exchanges of one lane."""
    i32 = ir.IntegerType.get_signless(32)
    c = functools.partial(mgpu.utils.c, ty=i32)
    lane = arith.remui(mgpu.utils.thread_idx(), c(32))
    within = arith.remui(lane, c(4))
    odd, upper = (
        arith.cmpi(arith.CmpIPredicate.ne, arith.andi(within, c(bit)), c(0))
        for bit in (1, 2)
    )
    # Lane 0 to 3 has columns 0, 4, 8, 12 and on: of the pairs of lanes 0 and 1 or of
    # lanes 2 and 3, those of the first 8 columns or of the last.
    pair = arith.addi(arith.subi(lane, within), arith.select(odd, c(2), c(0)))
    sources = [arith.addi(pair, arith.select(upper, c(1 - i), c(i))) for i in (0, 1)]
    orders = [
        arith.select(upper, c(swapped), c(order))
        for order, swapped in ((0x5410, 0x1054), (0x7632, 0x3276))
    ]
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

    words = {}
    for row, column in by_place:
        if column % 32:
            continue
        low, high = (
            four(by_place[row, column + i], by_place[row, column + 16 + i])
            for i in (0, 8)
        )
        sent = arith.select(odd, high, low), arith.select(odd, low, high)
        taken = [
            llvm.inline_asm(
                i32,
                [word, source],
                "shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;",
                "=r,r,r",
                has_side_effects=True,
            )
            for word, source in zip(sent, sources, strict=True)
        ]
        for i, order in enumerate(orders):
            words[row, column + 16 * i] = mgpu.utils.prmt(taken[0], taken[1], order)
    registers = np.empty(layout.registers_shape(values.shape), object)
    kind = ir.VectorType.get((4,), ir.Float8E4M3FNType.get())
    for at, place in register_places(layout, values.shape).items():
        registers[at] = mgpu.utils.bitcast(words[place], kind)
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)
