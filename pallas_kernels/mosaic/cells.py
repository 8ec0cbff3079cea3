"""Numbers sent to another GPU with the word that they are there.

A *cell* is 8 bytes that are written at once: data and a flag. Who sees the flag has the
data: no fence, no second message. Reading a cell empties it, so that it can be used
again once the sender knows that it was read.

References:
    The cells are those of NCCL's LL protocol, which numbers its flags instead of
    emptying cells, and must clear them before the numbers repeat.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.mosaic.aliases import Ref


LINE = 512
"""Numbers that are sent at a time: 8 bytes of each thread of a warpgroup."""


def send(there: Ref, values: jax.Array, layout: Any) -> None:
    """Writes numbers to cells, which must be empty; returns at once.

    Args:
        there: int32 [512] in global memory, usually a peer's.
        values: 512 numbers of 16 bits, 4 per thread.
        layout: which thread has which of them.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout))
    def send_cells(ctx: Any, there: Any, values: mgpu.FragmentedArray) -> None:
        del ctx
        i32 = ir.IntegerType.get_signless(32)
        words = []
        for register in values.registers.flat:
            (size,) = ir.VectorType(register.type).shape
            pair = llvm.bitcast(ir.VectorType.get((size // 2,), i32), register)
            words += [
                llvm.extractelement(pair, arith.constant(i32, place))
                for place in range(size // 2)
            ]
        # Each 8 bytes are one atomic write.
        llvm.inline_asm(
            ir.Type.parse("!llvm.void"),
            [_cell(there), *words],
            "{ .reg .b32 one; .reg .b64 a, b; mov.b32 one, 1;"
            " mov.b64 a, {$1, one}; mov.b64 b, {$2, one};"
            " st.relaxed.sys.global.v2.b64 [$0], {a, b}; }",
            "l,r,r",
            has_side_effects=True,
        )

    write: Any = send_cells  # the decorator supplies the context
    write(there, values)


def receive(
    here: Ref, shape: tuple[int, ...], dtype: jnp.dtype, layout: Any
) -> jax.Array:
    """Waits for numbers in cells, reads them, and empties the cells.

    Args:
        here: int32 [512] in this device's global memory.
        shape: of the 512 numbers.
        dtype: their type, of 16 bits.
        layout: that in which they were sent.

    Returns:
        An array of the shape.
    """

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),),
        return_type=plgpu.ShapeDtypeStruct(shape, dtype, layout),
    )
    def receive_cells(ctx: Any, here: Any) -> mgpu.FragmentedArray:
        del ctx
        i32 = ir.IntegerType.get_signless(32)
        words = llvm.inline_asm(
            llvm.StructType.get_literal([i32, i32]),
            [_cell(here)],
            "{ .reg .pred empty; .reg .b32 f, g; .reg .b64 a, b;"
            " again: ld.relaxed.sys.global.v2.b64 {a, b}, [$2];"
            " mov.b64 {$0, f}, a; mov.b64 {$1, g}, b; and.b32 f, f, g;"
            " setp.eq.u32 empty, f, 0; @empty bra again;"
            " mov.b64 a, 0; st.relaxed.sys.global.v2.b64 [$2], {a, a}; }",
            "=&r,=&r,l",
            has_side_effects=True,
        )
        places = layout.to_mgpu()
        registers = np.empty(places.registers_shape(shape), dtype=object)
        size = 4 // math.prod(registers.shape)
        kind = ir.VectorType.get((size,), mgpu.utils.dtype_to_ir_type(dtype))
        for number, at in enumerate(np.ndindex(registers.shape)):
            value = llvm.mlir_undef(ir.VectorType.get((size // 2,), i32))
            for place in range(size // 2):
                word = llvm.extractvalue(i32, words, [number * size // 2 + place])
                value = llvm.insertelement(value, word, arith.constant(i32, place))
            registers[at] = llvm.bitcast(kind, value)
        return mgpu.FragmentedArray(
            _registers=registers, _layout=places, _is_signed=None
        )

    read: Any = receive_cells  # the decorator supplies the context
    return read(here)


def _cell(cells: ir.Value) -> ir.Value:
    """The address of a thread's 16 bytes."""
    i32 = ir.IntegerType.get_signless(32)
    thread = arith.remui(mgpu.utils.thread_idx(), mgpu.utils.c(128, i32))
    place = arith.muli(thread, mgpu.utils.c(4, i32))
    start = mgpu.utils.memref_ptr(cells)
    return llvm.getelementptr(
        start.type, start, [place], [-(2**31)], i32, llvm.GEPNoWrapFlags.none
    )
