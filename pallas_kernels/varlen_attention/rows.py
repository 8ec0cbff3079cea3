"""What the kernels say to the hardware themselves: masks, stores of rows, tickets."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector


__all__ = ["NO_LIMIT", "keep_band", "store_rows", "take_ticket"]

NO_LIMIT = 2**30
"""Larger than any index, and small enough to be added to one."""


def keep_band(
    values: jax.Array,
    rows: tuple[Any, Any],
    columns: tuple[Any, Any],
    distance: tuple[Any, Any],
) -> jax.Array:
    """Accumulators with ``-inf`` wherever an index or a distance is out of bounds.

    A lane holds two rows and, in each, columns at fixed distances: two thresholds a
    side are all that depends on the lane. Comparing index arrays instead would keep one
    register an element, because the compiler computes them ahead of the loop.

    Args:
        values: fp32 [64, columns], in the layout of wgmma accumulators.
        rows: least and largest row that stay.
        columns: least and largest column.
        distance: least and largest ``column - row``. `NO_LIMIT` is no limit.
    """
    scalar, layout = plgpu.Layout.WG_SPLAT(()), plgpu.Layout.WGMMA

    @plgpu.inline_mgpu(
        arg_types=(layout, *[scalar] * 6),
        return_type=plgpu.ShapeDtypeStruct(values.shape, jnp.float32, layout),
    )
    def mask_outside_band(ctx: Any, values: Any, *bounds: Any) -> Any:
        del ctx
        return _keep_band(values, *(bound.registers.item() for bound in bounds))

    bounds = (*rows, *columns, *distance)
    return mask_outside_band(values, *(jnp.int32(bound) for bound in bounds))


def _keep_band(values: Any, *bounds: ir.Value) -> Any:
    """Emits the comparisons of one lane."""
    i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
    row_least, row_most, least, most, near, far = bounds
    compare, is_less = arith.cmpi, arith.CmpIPredicate.sle
    width = values.shape[1]
    lane_row, lane_column = (
        arith.index_cast(i32, i)
        for i in next(iter(values.layout.thread_idxs(values.shape)))
    )
    strides = values.layout.tiling.tile_strides((width, 1))
    places = [
        divmod(sum(i * s for i, s in zip(at, strides, strict=False)), width)
        for at in np.ndindex(values.registers.shape)
    ]
    limits = {}
    for offset in {row for row, _ in places}:
        row = arith.addi(lane_row, arith.constant(i32, offset))
        inside = arith.andi(
            compare(is_less, row_least, row), compare(is_less, row, row_most)
        )
        low = arith.maxsi(least, arith.addi(row, near))
        high = arith.minsi(most, arith.addi(row, far))
        high = arith.select(inside, high, arith.constant(i32, -NO_LIMIT))
        limits[offset] = tuple(arith.subi(x, lane_column) for x in (low, high))
    hidden = arith.constant(f32, ir.FloatAttr.get(f32, -np.inf))
    masked = np.empty_like(values.registers)
    shape = values.registers.shape
    for (row, column), at in zip(places, np.ndindex(shape), strict=True):
        register, (low, high) = values.registers[at], limits[row]
        for i in range(ir.VectorType(register.type).shape[0]):
            here = arith.constant(i32, column + i)
            seen = arith.andi(compare(is_less, low, here), compare(is_less, here, high))
            where = {"dynamic_position": [], "static_position": [i]}
            value = arith.select(seen, vector.extract(register, **where), hidden)
            register = vector.insert(value, register, **where)
        masked[at] = register
    return mgpu.FragmentedArray(
        _registers=masked, _layout=values.layout, _is_signed=values.is_signed
    )


def store_rows(ref: Any, values: jax.Array, first: Any, stop: Any) -> None:
    """Writes rows `first` to `stop` of a tile that lies in registers.

    A tile of a packed sequence may start at any row and end before the tile does: the
    copy engine stores whole boxes, so each lane stores its own elements, predicated.
    Four lanes write 16 bytes of a row at a time, which the L2 cache merges.

    Args:
        ref: [64, columns] or [64] of global memory; other rows are not touched and may
            lie outside the array.
        values: the tile, in the layout of wgmma accumulators (or a column of it).
        first: int32, the first row to write.
        stop: int32, the row after the last.
    """
    layout = plgpu.Layout.WGMMA
    if values.ndim == 1:
        layout = layout.reduce(1)

    scalar = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout, scalar, scalar))
    def store_some_rows(ctx: Any, ref: Any, values: Any, first: Any, stop: Any) -> None:
        del ctx
        _store(ref, values, first.registers.item(), stop.registers.item())

    store: Any = store_some_rows  # the decorator supplies the context
    store(ref, values, jnp.int32(first), jnp.int32(stop))


def _store(ref: Any, values: Any, first: ir.Value, stop: ir.Value) -> None:
    """Emits the stores of one lane."""
    i32, i64 = (ir.IntegerType.get_signless(n) for n in (32, 64))
    strides, _ = ir.MemRefType(ref.type).get_strides_and_offset()
    address = llvm.ptrtoint(i64, mgpu.utils.memref_ptr(ref))
    itemsize = mgpu.utils.bytewidth(values.mlir_dtype)
    places = values.layout.thread_idxs(values.shape)
    for place, at in zip(places, np.ndindex(values.registers.shape), strict=True):
        row = arith.index_cast(i32, place[0])
        inside = arith.andi(
            arith.cmpi(arith.CmpIPredicate.sge, row, first),
            arith.cmpi(arith.CmpIPredicate.slt, row, stop),
        )
        offset = arith.constant(i64, 0)
        for index, stride in zip(place, strides, strict=True):
            scaled = arith.muli(
                arith.index_cast(i64, index), arith.constant(i64, stride * itemsize)
            )
            offset = arith.addi(offset, scaled)
        register = values.registers[at]
        size = mgpu.utils.bitwidth(register.type)
        if size != 32:
            raise NotImplementedError(f"registers of {size} bits")
        llvm.inline_asm(
            ir.Type.parse("!llvm.void"),
            [inside, arith.addi(address, offset), llvm.bitcast(i32, register)],
            "@$0 st.global.b32 [$1], $2;",
            "b,l,r",
            has_side_effects=True,
        )


def take_ticket(counter: Any, mailbox: Any) -> jax.Array:
    """The next number of a counter in global memory, for a whole warpgroup.

    Blocks that take their work by ticket share it as evenly as it can be: whoever is
    done first takes the next piece.

    Args:
        counter: int32 [1] of global memory, zero when the kernel starts.
        mailbox: int32 [1] of shared memory, for this warpgroup alone.

    Returns:
        int32, how many tickets were taken before.
    """

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct((), jnp.int32, plgpu.Layout.WG_SPLAT(())),
    )
    def next_ticket(ctx: Any, counter: Any, mailbox: Any) -> Any:
        del ctx
        i32 = ir.IntegerType.get_signless(32)
        lane = arith.remui(mgpu.utils.thread_idx(), mgpu.utils.c(128, i32))
        first = arith.cmpi(arith.CmpIPredicate.eq, lane, mgpu.utils.c(0, i32))
        mgpu.utils.warpgroup_barrier()  # the last number has been read
        llvm.inline_asm(
            ir.Type.parse("!llvm.void"),
            [first, mgpu.utils.memref_ptr(counter), mgpu.utils.memref_ptr(mailbox)],
            "{ .reg .b32 t; @$0 atom.global.add.u32 t, [$1], 1;"
            " @$0 st.shared.b32 [$2], t; }",
            "b,l,r",
            has_side_effects=True,
        )
        mgpu.utils.warpgroup_barrier()
        number = llvm.inline_asm(
            i32,
            [mgpu.utils.memref_ptr(mailbox)],
            "ld.shared.b32 $0, [$1];",
            "=r,r",
            has_side_effects=True,
        )
        return mgpu.FragmentedArray.splat(number, (), is_signed=True)

    take: Any = next_ticket  # the decorator supplies the context
    return take(counter, mailbox)
