"""Rows of global memory into swizzled shared memory, any rows, by cp.async.

The copy engine (TMA) cannot gather on Hopper, and Pallas has no gather of its own:
these functions write the instructions. One warpgroup copies 16 bytes a lane at a time;
a row of 512 bytes is one instruction of a warp, whose lanes write four lines free of
bank conflicts.

A gather runs in the background. `commit_gather` ends a group of copies, `wait_gathers`
waits until at most so many younger groups are in flight. What has arrived must still be
shown to the tensor cores: ``plgpu.commit_smem()``, then arrive at the barrier.

In the tests numpy functions stand in for these (see ``tests/interpreter``).
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, vector

from pallas_kernels.mosaic import smem_transforms
from pallas_kernels.mosaic.aliases import Ref


_LANES, _WARPS = 32, 4
_CHUNK = 16  # bytes of one copy
_LINE = 128  # bytes of a swizzled line: eight chunks
_ATOM = 1024  # bytes of eight lines, in which the chunks are permuted


def held_rows(count: int) -> int:
    """Row indices that each thread of the warpgroup holds for gathers of `count` rows.

    A warp gathers a quarter of the rows; its lanes hold their indices.
    """
    return max(count // (_LANES * _WARPS), 1)


def _layout(count: int) -> Any:
    held = held_rows(count)
    return plgpu.Layout.WG_STRIDED((held * _LANES * _WARPS,), held)


def _i32(value: int) -> Any:
    return utils.c(value, ir.IntegerType.get_signless(32))


def load_rows(rows: Ref, count: int) -> jax.Array:
    """Reads the row indices of a gather from global memory into registers.

    Issue it one step ahead: the copies need the indices at once.

    Args:
        rows: int32 view of [count] in global memory; `count` is 64 or a multiple of
            128.
        count: rows of the gather.

    Returns:
        int32, in the order in which `gather_rows` wants them.
    """
    held = held_rows(count)
    per_warp = count // _WARPS

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),),
        return_type=plgpu.ShapeDtypeStruct(
            (held * _LANES * _WARPS,), jnp.int32, layout=_layout(count)
        ),
    )
    def load_row_indices(_ctx: Any, rows: Any) -> Any:
        i32 = ir.IntegerType.get_signless(32)
        thread = arith.remui(utils.thread_idx(), _i32(_LANES * _WARPS))
        warp = arith.divui(thread, _i32(_LANES))
        lane = arith.remui(thread, _i32(_LANES))
        # Where a warp has fewer rows than lanes, the lanes beyond repeat them.
        lane = arith.remui(lane, _i32(min(per_warp, _LANES)))
        first = arith.addi(
            arith.muli(warp, _i32(per_warp)), arith.muli(lane, _i32(held))
        )
        kind = ir.VectorType.get((held,), i32)
        address = utils.getelementptr(utils.memref_ptr(rows), [first], i32)
        loaded = llvm.load(kind, address, alignment=4 * held)
        return mgpu.FragmentedArray(
            _registers=np.array([loaded], dtype=object),
            _layout=mgpu.WGStridedFragLayout((held * _LANES * _WARPS,), held),
            _is_signed=True,
        )

    call: Any = load_row_indices  # without its context
    return call(rows)


def gather_rows(
    x: Ref,
    indices: jax.Array,
    start: jax.Array,
    smem: Ref,
    *,
    count: int,
    width: int,
    masked: bool,
) -> None:
    """Starts copies of ``x[rows, start : start + width]`` into shared memory.

    Args:
        x: [K,M] 16-bit elements in global memory; M a multiple of 8.
        indices: what `load_rows` returned.
        start: int32, first column; a multiple of 8.
        smem: [count, columns], tiled and swizzled as `smem_transforms` says; 64, 128 or
            256 columns.
        count: rows.
        width: columns to copy: all of those, or the first 8, 16 or 32 of 64. The others
            are left as they are.
        masked: columns may pass the end of x, where zeros are written instead.
    """
    chunks = 2 * width // _CHUNK  # of a row
    together = _LANES // chunks  # rows of one instruction
    per_warp = count // _WARPS
    held = held_rows(count)
    columns = smem.shape[1]
    atoms = 2 * columns // _LINE  # side by side
    (_, row_length), itemsize = x.shape, 2

    @plgpu.inline_mgpu(
        arg_types=(
            plgpu.RefType(),
            _layout(count),
            plgpu.Layout.WG_SPLAT,
            plgpu.RefType(smem_transforms(columns, jnp.bfloat16)),
        )
    )
    def gather_into_smem(
        _ctx: Any, x: Any, indices: Any, start: Any, smem: Any
    ) -> None:
        i8 = ir.IntegerType.get_signless(8)
        i64 = ir.IntegerType.get_signless(64)
        thread = arith.remui(utils.thread_idx(), _i32(_LANES * _WARPS))
        warp = arith.divui(thread, _i32(_LANES))
        lane = arith.remui(thread, _i32(_LANES))
        chunk = arith.remui(lane, _i32(chunks))
        mine = arith.divui(lane, _i32(chunks))  # which of the rows together
        (first,) = start.registers.flat
        column = arith.addi(first, arith.muli(chunk, _i32(_CHUNK // itemsize)))
        size = None
        if masked:
            inside = arith.cmpi(arith.CmpIPredicate.slt, column, _i32(row_length))
            size = arith.select(inside, _i32(_CHUNK), _i32(0))
            column = arith.select(inside, column, _i32(0))
        source = llvm.addrspacecast(
            llvm.PointerType.get(address_space=1), utils.memref_ptr(x)
        )
        source = utils.getelementptr(source, [arith.muli(column, _i32(itemsize))], i8)
        target = utils.memref_ptr(smem)
        # The atom beside which a chunk lies, and the chunk within its line.
        beside = arith.muli(arith.divui(chunk, _i32(8)), _i32(_ATOM))
        within = arith.remui(chunk, _i32(8))
        pitch = utils.c(row_length * itemsize, i64)
        (registers,) = indices.registers.flat
        parts = [
            vector.extract(
                registers,
                dynamic_position=[],
                static_position=ir.DenseI64ArrayAttr.get([i]),
            )
            for i in range(held)
        ]
        if together > per_warp:  # lanes beyond do what others do
            mine = arith.remui(mine, _i32(per_warp))
        for step in range(max(per_warp // together, 1)):
            local = arith.addi(mine, _i32(step * together))  # row of this warp
            held_by = arith.divui(local, _i32(held))
            index = [_shuffle(part, held_by) for part in parts]
            value = index[0]
            for i in range(1, held):
                chosen = arith.cmpi(
                    arith.CmpIPredicate.eq, arith.remui(local, _i32(held)), _i32(i)
                )
                value = arith.select(chosen, index[i], value)
            row = arith.addi(arith.muli(warp, _i32(per_warp)), local)
            line = arith.remui(row, _i32(8))
            offset = arith.addi(
                arith.muli(arith.divui(row, _i32(8)), _i32(atoms * _ATOM)),
                arith.addi(beside, arith.muli(line, _i32(_LINE))),
            )
            offset = arith.addi(
                offset, arith.muli(arith.xori(within, line), _i32(_CHUNK))
            )
            nvvm.cp_async_shared_global(
                utils.getelementptr(target, [offset], i8),
                utils.getelementptr(
                    source, [arith.muli(arith.extui(i64, value), pitch)], i8
                ),
                _CHUNK,
                nvvm.LoadCacheModifierKind.CG,
                cp_size=size,
            )

    call: Any = gather_into_smem  # without its context
    call(x, indices, start, smem)


def _shuffle(value: ir.Value, lane: ir.Value) -> ir.Value:
    return nvvm.shfl_sync(_i32(0xFFFFFFFF), value, lane, _i32(0x1F), nvvm.ShflKind.idx)


def commit_gather() -> None:
    """Ends a group of copies; an empty group is fine."""

    @plgpu.inline_mgpu()
    def commit_gather_group(_ctx: Any) -> None:
        nvvm.cp_async_commit_group()

    call: Any = commit_gather_group
    call()


def wait_gathers(in_flight: int) -> None:
    """Waits until at most so many of the youngest groups of copies are in flight."""

    @plgpu.inline_mgpu()
    def wait_gather_groups(_ctx: Any) -> None:
        nvvm.cp_async_wait_group(in_flight)

    call: Any = wait_gather_groups
    call()
