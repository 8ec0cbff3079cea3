"""Sums ``[features, tokens]`` stored as tokens, from registers to global memory.

The copy engine would need them in shared memory first, and the next stage would wait
for both. Few tokens are few stores.
"""

import functools
from typing import Any

import jax
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, vector

from pallas_kernels.mosaic.aliases import Ref


def store_turned(target: Ref, values: jax.Array, *, in_pairs: bool) -> None:
    """Stores the sums of 64 features.

    Args:
        target: [m,64] of 16 bits in global memory.
        values: [64,M] of the same type, in the layout of sums; M at least m, and
            tokens from m on are left out.
        in_pairs: whether each token gets its features
            `pallas_kernels.quantized_matmul.widen.in_order_of_pairs`.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA))
    def store_tokens(_: Any, target: Any, values: Any) -> None:
        index = ir.IndexType.get()

        def beyond(first: ir.Value, more: int) -> ir.Value:
            return arith.addi(first, mgpu.utils.c(more, index))

        # A warp has 16 features. A thread has the rows r and r + 8 of them, and two
        # tokens of each eight. In order of pairs the lowest bit of r is the pair, the
        # next the number, the third and which eight the thread.
        of_r = [(2, 1, 8), (3, 1, 1), (4, 1, 2)] if in_pairs else [(2, 3, 1)]
        features = [_bits(*bits) for bits in [(5, 2, 16), *of_r]]
        feature, token = functools.reduce(arith.addi, features), _bits(0, 2, 2)
        tokens, _ = ir.MemRefType(target.type).shape
        for at, register in np.ndenumerate(values.registers):
            _, eight, _, _, half, *_ = at
            for i in range(2):
                row = beyond(token, 8 * eight + i)
                column = beyond(feature, (4 if in_pairs else 8) * half)
                number = vector.extract(register, [], [i])
                if tokens >= values.shape[1]:
                    memref.store(number, target, [row, column])
                    continue
                end = mgpu.utils.c(tokens, index)
                is_there = arith.cmpi(arith.CmpIPredicate.ult, row, end)
                with mgpu.utils.when(is_there):
                    memref.store(number, target, [row, column])

    store: Any = store_tokens  # the decorator supplies the context
    store(target, values)


def _bits(first: int, count: int, times: int) -> ir.Value:
    """`count` bits of a thread's number from `first` on, times a number."""
    i32 = ir.IntegerType.get_signless(32)
    shifted = arith.shrui(mgpu.utils.thread_idx(), mgpu.utils.c(first, i32))
    number = arith.andi(shifted, mgpu.utils.c(2**count - 1, i32))
    scaled = arith.muli(number, mgpu.utils.c(times, i32))
    return arith.index_cast(ir.IndexType.get(), scaled)
