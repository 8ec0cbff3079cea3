"""8-bit weights in registers made bfloat16, for the tensor cores.

Four numbers that lie behind one another are one register of a thread. The layout of
what the tensor cores read has two in a register; threads exchange the others.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallas_kernels.mosaic.aliases import Ref


__all__ = ["HALVES", "REBIAS", "load_widened"]

_LAYOUT = plgpu.Layout.WGMMA_UPCAST_2X

HALVES = (0x1404, 0x3424)
"""Bytes of a pair of bfloat16, by whose number `prmt` takes them: 4 is a zero."""
REBIAS = 0x7B80
"""2^120 as bfloat16: the exponents of bfloat16 and E4M3 start at -127 and at -7."""


def load_widened(ref: Ref) -> jax.Array:
    """A tile of weights in shared memory as the left operand of a product.

    Args:
        ref: [64, n] int8 or float8_e4m3fn, not NaN.

    Returns:
        [64, n] bfloat16 in registers; every value is exact.
    """
    narrow = plgpu.load(ref, layout=_LAYOUT, optimized=False)
    if narrow.dtype == jnp.int8:
        wide = narrow.astype(jnp.bfloat16)
    else:
        wide = _widened_e4m3(narrow)
    return plgpu.layout_cast(wide, plgpu.Layout.WGMMA)


def _widened_e4m3(values: jax.Array) -> jax.Array:
    """E4M3 as bfloat16: Hopper has no instruction for it, and by way of fp32 it needs
    three slow ones. Sign, exponent and mantissa go where bfloat16 has them, and a
    product makes up for the other bias, for subnormal numbers too.
    """

    @plgpu.inline_mgpu(
        arg_types=(_LAYOUT,),
        return_type=plgpu.ShapeDtypeStruct(values.shape, jnp.bfloat16, _LAYOUT),
    )
    def widen_e4m3(ctx: Any, values: Any) -> Any:
        del ctx
        i32 = ir.IntegerType.get_signless(32)
        pair = ir.VectorType.get((2,), ir.BF16Type.get())
        rebias = mgpu.utils.c(REBIAS << 16 | REBIAS, i32)
        wide = np.empty_like(values.registers)
        for at, register in np.ndenumerate(values.registers):
            bits = mgpu.utils.bitcast(register, i32)
            halves = [
                llvm.inline_asm(
                    i32,
                    [bits, rebias],
                    "{ .reg .b32 t, m;"
                    f" prmt.b32 t, $1, 0, {half};"
                    " and.b32 m, t, 0x7f007f00; shr.u32 m, m, 4;"
                    " lop3.b32 m, t, 0x80008000, m, 0xea;"  # t & signs | m
                    " mul.bf16x2 $0, m, $2; }",
                    "=r,r,r",
                )
                for half in HALVES
            ]
            wide[at] = mgpu.utils.vector_concat(
                [mgpu.utils.bitcast(half, pair) for half in halves]
            )
        return mgpu.FragmentedArray(
            _registers=wide, _layout=values.layout, _is_signed=None
        )

    widen: Any = widen_e4m3  # the decorator supplies the context
    return widen(values)
