"""8-bit weights in registers made bfloat16, for the tensor cores.

A thread holds pairs, as the tensor cores take them: of every sixteen input features a
pair from the first eight and one from the last eight. It reads four neighbors at once,
so both pairs come from these, and the tokens of a matmul have their features
`in_order_of_pairs`: exchanges between threads cost more than a matmul of few tokens.
The first pair is the even two of the four and the second the odd two, since masks take
these from a word, a shift apart.
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


_NARROW, _WIDE = plgpu.Layout.WGMMA_8BIT, plgpu.Layout.WGMMA

HIGH = 0x4300_4300
"""The high bytes of a pair of bfloat16 from 128 to 510."""
REBIAS = 0x7B80_7B80
"""2^120 as a pair of bfloat16: exponents of bfloat16 start at -127, of E4M3 at -7."""


def in_order_of_pairs(x: jax.Array) -> jax.Array:
    """Activations with their features in the order in which weights are loaded.

    Args:
        x: [M,K], K a multiple of 16.

    Returns:
        [M,K].
    """
    m, k = x.shape
    x = x.reshape(m, k // 16, 4, 2, 2)  # [M,K/16,thread,number,pair]
    return x.transpose(0, 1, 4, 2, 3).reshape(m, k)  # [M,K]


def load_words(ref: Ref) -> jax.Array:
    """A tile of weights in shared memory, for `widen_words`.

    Args:
        ref: [64, n] int8 or float8_e4m3fn, not NaN; n a multiple of 16.

    Returns:
        [64, n] of its type in registers.
    """
    return plgpu.load(ref, layout=_NARROW, optimized=False)


def widen_words(values: jax.Array) -> jax.Array:
    """A tile of weights as the left operand of a matmul.

    Args:
        values: what `load_words` returns.

    Returns:
        [64, n] bfloat16 in registers, columns `in_order_of_pairs`; every value is
        exact.
    """
    return _int8(values) if values.dtype == jnp.int8 else _e4m3(values)


def load_pairs(ref: Ref) -> jax.Array:
    """A tile of weights in shared memory, for `widen_pairs`.

    A thread reads two bytes at a time, so that columns keep their order: twice as many
    reads of shared memory, and more instructions to widen what they bring.

    Args:
        ref: as that of `load_words`.

    Returns:
        [64, n] of its type in registers.
    """
    return plgpu.load(ref, layout=_WIDE, optimized=False)


def widen_pairs(values: jax.Array) -> jax.Array:
    """A tile of weights as the left operand of a matmul.

    Args:
        values: what `load_pairs` returns.

    Returns:
        [64, n] bfloat16 in registers; every value is exact.
    """
    is_int8 = values.dtype == jnp.int8
    return _int8_pairs(values) if is_int8 else _e4m3_pairs(values)


def _int8_pairs(values: jax.Array) -> jax.Array:
    """As `_int8`, for two numbers in a register."""

    @_on_pairs(values)
    def widen_int8_pairs(ctx: Any, values: Any) -> Any:
        del ctx
        return _each_pair(
            values,
            # The numbers under the high bytes of bfloat16.
            f"prmt.b32 v, v, {HIGH}, 0x7170;"
            " and.b32 n, v, 0xff7fff7f; and.b32 v, v, 0xff80ff80;"
            " sub.bf16x2 $0, n, v;",
        )

    return widen_int8_pairs(values)


def _e4m3_pairs(values: jax.Array) -> jax.Array:
    """As `_e4m3`, for two numbers in a register."""

    @_on_pairs(values)
    def widen_e4m3_pairs(ctx: Any, values: Any) -> Any:
        del ctx
        return _each_pair(
            values,
            "prmt.b32 v, v, 0, 0x1404;"
            " and.b32 n, v, 0x7f007f00; shr.u32 n, n, 4;"
            " lop3.b32 n, v, 0x80008000, n, 0xea;"
            f" mov.b32 v, {REBIAS}; mul.bf16x2 $0, n, v;",
        )

    return widen_e4m3_pairs(values)


def _on_pairs(values: jax.Array) -> Any:
    return plgpu.inline_mgpu(
        arg_types=(_WIDE,),
        return_type=plgpu.ShapeDtypeStruct(values.shape, jnp.bfloat16, _WIDE),
    )


def _each_pair(values: Any, code: str) -> Any:
    """`code` for each register: the pair $0 of bfloat16 from the pair $1."""
    pair = ir.VectorType.get((2,), ir.BF16Type.get())
    i16, i32 = (ir.IntegerType.get_signless(n) for n in (16, 32))
    wide = np.empty_like(values.registers)
    for at, register in np.ndenumerate(values.registers):
        bits = llvm.inline_asm(
            i32,
            [mgpu.utils.bitcast(register, i16)],
            f"{{ .reg .b32 v, n; cvt.u32.u16 v, $1; {code} }}",
            "=r,h",
        )
        wide[at] = mgpu.utils.bitcast(bits, pair)
    return mgpu.FragmentedArray(_registers=wide, _layout=values.layout, _is_signed=None)


def _int8(values: jax.Array) -> jax.Array:
    """Int8 as bfloat16: under the high byte seven bits of a number are the mantissa.

    With the eighth, its sign, the exponent is one more: 128 + s, or 256 + 2 (128 + s).
    So the seven bits, as 128 + n, less the power of two that stands above them is s.
    """

    @_on_words(values)
    def widen_int8(ctx: Any, values: Any) -> Any:
        del ctx
        masks = [_in_register(mask) for mask in (0x007F_007F, 0x0080_0080)]
        pair = (
            f"lop3.b32 n, v, $3, {HIGH}, 0xea; lop3.b32 t, v, $4, {HIGH}, 0xea;"  # &, |
            " sub.bf16x2"
        )
        return _each_word(
            values,
            masks,
            f"mov.b32 v, $2; {pair} $0, n, t; shr.u32 v, $2, 8; {pair} $1, n, t;",
        )

    return widen_int8(values)


def _e4m3(values: jax.Array) -> jax.Array:
    """E4M3 as bfloat16: Hopper has no instruction for it, and by way of fp32 it needs
    three slow ones. Sign, exponent and mantissa go where bfloat16 has them, and a
    product makes up for the other bias, for subnormal numbers too.
    """

    @_on_words(values)
    def widen_e4m3(ctx: Any, values: Any) -> Any:
        del ctx
        pair = (
            "and.b32 n, v, 0x7f007f00; shr.u32 n, n, 4;"
            " lop3.b32 n, v, 0x80008000, n, 0xea;"  # v & signs | n
            " mul.bf16x2"
        )
        rebias = mgpu.utils.c(REBIAS, ir.IntegerType.get_signless(32))
        return _each_word(
            values,
            [rebias],
            f"shl.b32 v, $2, 8; {pair} $0, n, $3; mov.b32 v, $2; {pair} $1, n, $3;",
        )

    return widen_e4m3(values)


def _on_words(values: jax.Array) -> Any:
    """The decorator of a function that widens `values`; it supplies the context."""
    return plgpu.inline_mgpu(
        arg_types=(_NARROW,),
        return_type=plgpu.ShapeDtypeStruct(values.shape, jnp.bfloat16, _WIDE),
    )


def _in_register(mask: int) -> ir.Value:
    """A number that ptxas does not know: what it knows it writes anew for each use.

    No multiprocessor has a number of 32 bits.
    """
    i32 = ir.IntegerType.get_signless(32)
    code = "{ .reg .b32 t; mov.u32 t, %smid; shr.u32 t, t, 31; or.b32 $0, t, $1; }"
    return llvm.inline_asm(i32, [mgpu.utils.c(mask, i32)], code, "=r,n")


def _each_word(values: Any, shared: list[ir.Value], code: str) -> Any:
    """`code` for each register: pairs $0 and $1 of the word $2, the rest is shared."""
    i32 = ir.IntegerType.get_signless(32)
    two = ir.Type.parse("!llvm.struct<(i32, i32)>")
    pair = ir.VectorType.get((2,), ir.BF16Type.get())
    layout = _WIDE.to_mgpu()
    wide = np.empty(layout.registers_shape(values.shape), dtype=object)
    inputs = ",r" * (1 + len(shared))
    for at, register in np.ndenumerate(values.registers):
        found = llvm.inline_asm(
            two,
            [mgpu.utils.bitcast(register, i32), *shared],
            f"{{ .reg .b32 v, n, t; {code} }}",
            f"=r,=r{inputs}",
        )
        _, sixteen, _, _, half, *_ = at  # rows 8 to 15 of a group are the second half
        for i in range(2):
            bits = llvm.extractvalue(i32, found, [i])
            # Registers are counted by groups of eight columns, then by halves.
            wide[:, 2 * sixteen + i].flat[half] = mgpu.utils.bitcast(bits, pair)
    return mgpu.FragmentedArray(_registers=wide, _layout=layout, _is_signed=None)
