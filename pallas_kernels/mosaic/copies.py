"""Shared memory: how buffers lie there, and copies that fill them."""

import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm

from pallas_kernels.mosaic.aliases import Ref, Scalar


CHUNK = 64
"""Columns of a chunk: 128 bytes of 16-bit numbers, the widest swizzled line."""


def smem_transforms(minor_size: int, dtype: DTypeLike) -> tuple[Any, ...]:
    """The layout that the tensor cores and the copy engine both read without conflicts.

    Args:
        minor_size: size of the last dimension of the buffer, in elements.
        dtype: type of the elements.

    Returns:
        Transforms for `plgpu.SMEM`: tiles of 8 rows of one swizzled line.
    """
    itemsize = jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(minor_size * itemsize * 8)
    # Their base class is a protocol, which makes them look abstract to a type checker.
    tiling = plgpu.TilingTransform((8, swizzle // itemsize))  # pyright: ignore[reportAbstractUsage]
    return (tiling, plgpu.SwizzleTransform(swizzle))  # pyright: ignore[reportAbstractUsage]


def smem_bytes(shape: tuple[int, ...], dtype: DTypeLike) -> int:
    """Bytes of a shared-memory buffer, rounded up to the alignment of 1,024."""
    return -(-math.prod(shape) * jnp.dtype(dtype).itemsize // 1024) * 1024


def chunked(
    stages: tuple[int, ...],
    rows: int,
    chunks: int,
    dtype: DTypeLike,
    width: int = CHUNK,
) -> Any:
    """Rows in chunks of columns, as wgmma reads them and as copies write them.

    A chunk is a swizzled line wide, of 32, 64 or 128 bytes.
    """
    shape, line = (*stages, chunks, rows, width), width * jnp.dtype(dtype).itemsize
    swizzle = plgpu.SwizzleTransform(line)  # pyright: ignore[reportAbstractUsage]
    tiling = plgpu.TilingTransform((8, width))  # pyright: ignore[reportAbstractUsage]
    return plgpu.RefUnion(
        plgpu.SMEM(shape, dtype, transforms=(tiling, swizzle)),
        plgpu.SMEM(shape, dtype, transforms=(swizzle,)),
    )


def copy_rows(
    ref: Ref, row: Scalar, start: Scalar, head: Scalar, smem: Ref, barrier: Ref
) -> None:
    """Rows of a head into chunks of shared memory; columns that it lacks are zero."""
    chunks, rows, width = smem.shape
    for chunk in range(chunks):
        first = chunk * width
        if first + width > ref.shape[-1]:  # Pallas would refuse what it sees
            first = lax.optimization_barrier(jnp.int32(first))
        source = ref.at[row, pl.ds(start, rows), head, pl.ds(first, width)]
        plgpu.copy_gmem_to_smem(source, smem.at[chunk], barrier)


def copy_transposed(
    ref: Ref, row: Scalar, start: Scalar, head: Scalar, smem: Ref, barrier: Ref
) -> None:
    """Tokens of a head that lie side by side, ``[K, H, R, S]``, into such chunks."""
    chunks, _, width = smem.shape
    for chunk in range(chunks):
        source = ref.at[head, :, row, pl.ds(start + chunk * width, width)]
        plgpu.copy_gmem_to_smem(source, smem.at[chunk], barrier)


_EVICT_FIRST = 0x12F0000000000000
"""The policy as the compiler of CUDA encodes it for ``createpolicy``."""


@plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
def read_once(context: Any, source: Any) -> None:
    """Has the L2 drop first what later copies bring from `source` to shared memory.

    Activations and sums then stay in the L2, beside a stream of weights. Pallas has no
    such argument of a copy.
    """
    inside = source.owner  # the block of a region that has no access to what is around
    source = inside.owner.operands[source.arg_number]
    copy = context.async_copy

    def copy_with_hint(*, src_ref: Any, **arguments: Any) -> None:
        copy(src_ref=src_ref, **arguments)
        if src_ref == source:
            _evict_first(_newest())

    context.async_copy = copy_with_hint


def _newest() -> Any:
    """The operation that was inserted last."""
    where = ir.InsertionPoint.current
    operations = list(where.block.operations)
    if where.ref_operation is None:
        return operations[-1]
    places = [operation.operation for operation in operations]
    return operations[places.index(where.ref_operation.operation) - 1]


def _evict_first(copy: Any) -> None:
    """Gives a copy the hint; its operation has no accessor that sets it."""
    if not isinstance(copy, nvvm.CpAsyncBulkTensorGlobalToSharedClusterOp):
        raise TypeError(f"expected a copy to shared memory, got {copy}")
    hint = ir.IntegerType.get_signless(64)
    nvvm.cp_async_bulk_tensor_shared_cluster_global(
        copy.dstMem,
        copy.tmaDescriptor,
        list(copy.coordinates),
        copy.mbar,
        list(copy.im2colOffsets),
        l2_cache_hint=arith.constant(hint, _EVICT_FIRST),
        predicate=copy.predicate,
    )
    copy.operation.erase()


@plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
def prefetch_row(_: Any, source: Any) -> None:
    """Asks for contiguous memory, so that it lies in the L2 when it is read."""
    kind = ir.MemRefType(source.type)
    size = math.prod(kind.shape) * mgpu.bytewidth(kind.element_type)
    i32 = ir.IntegerType.get_signless(32)
    lane = arith.remui(mgpu.utils.thread_idx(), mgpu.utils.c(128, i32))
    first = arith.cmpi(arith.CmpIPredicate.eq, lane, mgpu.utils.c(0, i32))
    llvm.inline_asm(
        ir.Type.parse("!llvm.void"),
        [first, mgpu.utils.memref_ptr(source), mgpu.utils.c(size, i32)],
        "@$0 cp.async.bulk.prefetch.L2.global [$1], $2;",
        "b,l,r",
        has_side_effects=True,
    )
