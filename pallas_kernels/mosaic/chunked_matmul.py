"""Matmuls of operands that lie in chunks of columns, each as one wgmma group.

`plgpu.wgmma` takes one chunk: its instructions are then only as wide as a chunk of the
right operand, and read the left one again for each.
"""

import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import mma_utils, utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import nvvm

from pallas_kernels.mosaic.aliases import Ref
from pallas_kernels.mosaic.copies import smem_transforms


_LAYOUT = plgpu.Layout.WGMMA

_DEPTH = 16
"""Length of the sum of an instruction, with 16-bit operands."""

# The package has a function of that name.
_wgmma: Any = importlib.import_module("jax.experimental.mosaic.gpu.wgmma")


def add_values(acc: Ref, weights: tuple[jax.Array, ...], values: Ref) -> None:
    """Starts ``acc += weights @ values``.

    Args:
        acc: accumulator, fp32 [64, columns].
        weights: 16 bits, [64, keys], in parts side by side; a multiple of 16 keys.
        values: [chunks, keys, width] of shared memory, as `copies.chunked`.
    """

    @plgpu.inline_mgpu(
        arg_types=(_LAYOUT, _chunks(values), *[_LAYOUT] * len(weights)),
        return_type=plgpu.ShapeDtypeStruct(acc.shape, jnp.float32, _LAYOUT),
    )
    def multiply_values(_: Any, sums: Any, values: Any, *weights: Any) -> Any:
        right = mgpu.memref_transpose(_tiles(values), (1, 0, 2, 3))
        return _committed(_multiply(_accumulator(sums), _joined(weights), right))

    multiply: Any = multiply_values  # the decorator supplies the context
    acc[...] = multiply(_in_flight(acc), values, *weights)


def add_scores(acc: Ref, held: tuple[jax.Array, ...], queries: Ref, keys: Ref) -> None:
    """Starts ``acc += queries @ keys.T``.

    Args:
        acc: accumulator, fp32 [64, keys].
        held: the first chunks of the queries, in registers.
        queries: [chunks, 64, width] of shared memory.
        keys: [chunks, keys, width] of shared memory.
    """

    @plgpu.inline_mgpu(
        arg_types=(_LAYOUT, _chunks(queries), _chunks(keys), *[_LAYOUT] * len(held)),
        return_type=plgpu.ShapeDtypeStruct(acc.shape, jnp.float32, _LAYOUT),
    )
    def multiply_keys(_: Any, sums: Any, queries: Any, keys: Any, *held: Any) -> Any:
        sums = _accumulator(sums)
        left = mgpu.memref_transpose(_tiles(queries), (1, 0, 2, 3))
        right = mgpu.memref_transpose(_tiles(keys), (0, 1, 3, 2))
        here, there = slice(0, len(held)), slice(len(held), right.type.shape[0])
        if held:
            sums = _multiply(sums, _joined(held), mgpu.memref_slice(right, here))
        if there.start < there.stop:
            part = mgpu.memref_slice(left, (slice(None), there))
            sums = _multiply(sums, part, mgpu.memref_slice(right, there))
        return _committed(sums)

    multiply: Any = multiply_keys  # the decorator supplies the context
    acc[...] = multiply(_in_flight(acc), queries, keys, *held)


def _chunks(ref: Ref) -> plgpu.RefType:
    return plgpu.RefType(smem_transforms(ref.shape[-1], ref.dtype))


def _in_flight(acc: Ref) -> jax.Array:
    """An accumulator to which more is added, without a wait."""
    return plgpu.wgmma_accumulator_load(acc, wait_n=None)


def _tiles(chunks: Any) -> Any:
    """The memory of chunks as [chunks, tiles of 8 rows, 8, width]."""
    number, tiles, _, rows, width = chunks.type.shape
    return mgpu.memref_reshape(chunks, (number, tiles, rows, width))


def _joined(parts: tuple[Any, ...]) -> Any:
    """Chunks in registers side by side."""
    registers = np.concatenate([part.registers for part in parts], axis=1)
    first = parts[0]
    return mgpu.FragmentedArray(
        _registers=registers, _layout=first.layout, _is_signed=first.is_signed
    )


def _accumulator(sums: Any) -> Any:
    return mgpu.WGMMAAccumulator.from_registers(sums, sync=False)


def _multiply(sums: Any, left: Any, right: Any) -> Any:
    width = max(right.type.shape[2:])  # a swizzled line
    swizzle = width * mgpu.bytewidth(right.type.element_type)
    rows = right.type.shape[0] * right.type.shape[2]
    rest = rows % width
    if not rest:
        return mgpu.wgmma(sums, left, right, swizzle=swizzle)
    whole = rows - rest
    tiles = whole // right.type.shape[2]
    first = mgpu.memref_slice(right, slice(0, tiles))
    last = mgpu.memref_slice(right, slice(tiles, right.type.shape[0]))
    sums = mgpu.wgmma(sums, left[:, :whole], first, swizzle=swizzle)
    return _multiply_rest(sums, left[:, whole:], last, swizzle)


def _multiply_rest(sums: Any, left: Any, right: Any, swizzle: int) -> Any:
    """`mgpu.wgmma` for sums of any number of instructions, which takes lines alone.

    Args:
        sums: the accumulator.
        left: [64, k] in registers.
        right: [k, n] as tiles of 8 rows of a swizzled line.
        swizzle: bytes of the line.
    """
    (k, n), element = mma_utils.tiled_memref_shape(right)
    describe: Any = mma_utils.create_descriptor
    (start, (_, (stride, *_))), _, fastest = describe(
        right, swizzle=swizzle, group_size=(_DEPTH, n), logical_k_major=True
    )
    value = sums._value
    registers, left = value.registers.copy(), _wgmma.wgmma_fence(left)
    for i, column in enumerate(range(0, k, _DEPTH)):
        offset = utils.c(i * stride >> 4, ir.IntegerType.get_signless(64))
        registers[:1] = _wgmma.wgmma_m64(
            registers[:1],
            left[:, column : column + _DEPTH],
            _wgmma._llvm_add(start, offset),
            a_transpose=None,
            b_transpose=fastest != mma_utils.Dim.K,
            a_k_stride=None,
            b_k_stride=stride,
            n=n,
            swizzle=_DEPTH * mgpu.bytewidth(element),  # one instruction
            a_element_type=element,
            b_element_type=element,
        )
    array = mgpu.FragmentedArray(
        _registers=registers, _layout=value.layout, _is_signed=value.is_signed
    )
    return _wgmma.WGMMAAccumulator(
        _value=array, _original_layout=sums._original_layout, _sync=False
    )


def _committed(sums: Any) -> Any:
    nvvm.wgmma_commit_group_sync_aligned()
    return sums.value
