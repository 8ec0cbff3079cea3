"""8-bit weights in registers made bfloat16, for the tensor cores.

A thread holds pairs of neighbors, as the tensor cores read them. It reads two bytes at
a time: of four it would have to give two to its neighbor, and get two back. One `prmt`
puts the bytes of a pair where bfloat16 has them.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.mosaic.aliases import Ref


__all__ = ["E4M3_BYTES", "HIGH", "INT8_BYTES", "REBIAS", "load_widened"]

_LAYOUT = plgpu.Layout.WGMMA

INT8_BYTES, E4M3_BYTES = 0x4140, 0x1404
"""Bytes of a pair of bfloat16, the lowest first, by whose number `prmt` takes them: 0
and 1 are the pair, 4 is the lowest byte of `HIGH` or a zero."""
HIGH = 0x43
"""The high byte of bfloat16 from 128 to 510."""
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
    return _int8(narrow) if narrow.dtype == jnp.int8 else _e4m3(narrow)


def _int8(values: jax.Array) -> jax.Array:
    """Int8 as bfloat16: under the high byte seven bits of a number are the mantissa.

    With the eighth, its sign, the exponent is one more: 128 + s, or 256 + 2 (128 + s).
    So the seven bits, as 128 + n, less the power of two that stands above them is s.
    """

    @_on_pairs(values)
    def widen_int8(ctx: Any, values: Any) -> Any:
        del ctx
        return _each_pair(
            values,
            HIGH,
            f"prmt.b32 t, $1, $2, {INT8_BYTES};"
            " and.b32 n, t, 0xff7fff7f; and.b32 t, t, 0xff80ff80;"
            " sub.bf16x2 $0, n, t;",
        )

    return widen_int8(values)


def _e4m3(values: jax.Array) -> jax.Array:
    """E4M3 as bfloat16: Hopper has no instruction for it, and by way of fp32 it needs
    three slow ones. Sign, exponent and mantissa go where bfloat16 has them, and a
    product makes up for the other bias, for subnormal numbers too.
    """

    @_on_pairs(values)
    def widen_e4m3(ctx: Any, values: Any) -> Any:
        del ctx
        return _each_pair(
            values,
            REBIAS << 16 | REBIAS,
            f"prmt.b32 t, $1, 0, {E4M3_BYTES};"
            " and.b32 n, t, 0x7f007f00; shr.u32 n, n, 4;"
            " lop3.b32 n, t, 0x80008000, n, 0xea;"  # t & signs | n
            " mul.bf16x2 $0, n, $2;",
        )

    return widen_e4m3(values)


def _on_pairs(values: jax.Array) -> Any:
    """The decorator of a function that widens `values`; it supplies the context."""
    return plgpu.inline_mgpu(
        arg_types=(_LAYOUT,),
        return_type=plgpu.ShapeDtypeStruct(values.shape, jnp.bfloat16, _LAYOUT),
    )


def _each_pair(values: Any, constant: int, code: str) -> Any:
    """`code` for each register: $0 of the pair $1, with a constant in $2."""
    i16, i32 = (ir.IntegerType.get_signless(bits) for bits in (16, 32))
    pair = ir.VectorType.get((2,), ir.BF16Type.get())
    shared = mgpu.utils.c(constant, i32)
    wide = np.empty_like(values.registers)
    for at, register in np.ndenumerate(values.registers):
        bits = arith.extui(i32, mgpu.utils.bitcast(register, i16))
        found = llvm.inline_asm(
            i32, [bits, shared], f"{{ .reg .b32 t, n; {code} }}", "=r,r,r"
        )
        wide[at] = mgpu.utils.bitcast(found, pair)
    return mgpu.FragmentedArray(_registers=wide, _layout=values.layout, _is_signed=None)
