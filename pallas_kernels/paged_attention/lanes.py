"""What the kernel of paged attention does that Pallas has no operation for."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, math, memref

from pallas_kernels.mosaic.aliases import Ref, Scalar
from pallas_kernels.paged_attention.problem import Cut


_LANES = 32


def find_split(
    lengths: Ref,
    num_new: Ref,
    number: Scalar,
    more: tuple[Scalar, ...],
    cut: Cut,
    found: Ref,
) -> None:
    """Finds the row that a split belongs to, and which of its splits, by a warpgroup.

    Args:
        lengths: int32 [B] of global memory, at most 1,024.
        num_new: int32 [B].
        number: int32, which split of all rows.
        more: int32, go behind what is found.
        cut: how they are cut.
        found: int32 of shared memory, becomes the row (-1 past the last split), which
            of its splits, its length and its new tokens; and the others.
    """
    scalar = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(
        arg_types=(
            plgpu.RefType(),
            plgpu.RefType(),
            scalar,
            plgpu.RefType(),
            *[scalar] * len(more),
        )
    )
    def search_split(
        ctx: Any, lengths: Any, num_new: Any, number: Any, found: Any, *more: Any
    ) -> None:
        del ctx
        i32, index = ir.IntegerType.get_signless(32), ir.IndexType.get()
        row, within = _search(lengths, num_new, number.registers.item(), cut)
        at = arith.index_cast(index, arith.maxsi(row, mgpu.utils.c(0, i32)))
        length, new = (memref.load(ref, [at]) for ref in (lengths, num_new))
        # Every lane has the same numbers.
        others = (x.registers.item() for x in more)
        for i, value in enumerate((row, within, length, new, *others)):
            memref.store(value, found, [mgpu.utils.c(i, index)])
        mgpu.utils.warpgroup_barrier()

    search: Any = search_split  # the decorator supplies the context
    search(lengths, num_new, jnp.int32(number), found, *map(jnp.int32, more))


def _search(
    lengths: ir.Value, num_new: ir.Value, number: ir.Value, cut: Cut
) -> tuple[ir.Value, ir.Value]:
    """Emits the search: each lane counts the splits of some rows that follow."""
    i32 = ir.IntegerType.get_signless(32)
    c = functools.partial(mgpu.utils.c, ty=i32)
    lane = arith.remui(mgpu.utils.thread_idx(), c(_LANES))
    (rows,) = ir.MemRefType(lengths.type).shape

    def count(row: ir.Value) -> ir.Value:
        inside = arith.minui(row, c(rows - 1))
        at = [arith.index_cast(ir.IndexType.get(), inside)]
        length, new = memref.load(lengths, at), memref.load(num_new, at)
        length = arith.maxsi(length, c(0))
        new = arith.minsi(new, c(cut.queries))
        total = arith.minsi(arith.addi(length, new), c(cut.capacity))
        splits = arith.addi(total, c(cut.split // 2 - 1))
        splits = arith.divui(splits, c(cut.split))
        if cut.window is not None:
            seen = arith.maxsi(arith.subi(length, c(cut.window - 1)), c(0))
            splits = arith.subi(splits, arith.divui(seen, c(cut.split)))
        dead = arith.cmpi(arith.CmpIPredicate.sle, new, c(0))
        splits = arith.select(dead, c(1), arith.maxsi(splits, c(1)))
        past = arith.cmpi(arith.CmpIPredicate.uge, row, c(rows))
        return arith.select(past, c(0), splits)

    each = -(-rows // _LANES)
    mine = arith.muli(lane, c(each))
    counts = [count(arith.addi(mine, c(i))) for i in range(each)]
    owner, within = _owner(number, functools.reduce(arith.addi, counts), lane)
    found = arith.cmpi(arith.CmpIPredicate.ult, owner, c(_LANES))
    row = arith.muli(owner, c(each))
    if each > 1:
        past = arith.cmpi(arith.CmpIPredicate.uge, lane, c(each))
        theirs = arith.select(past, c(0), count(arith.addi(row, lane)))
        owner, within = _owner(within, theirs, lane)
        row = arith.addi(row, owner)
    return arith.select(found, row, c(-1)), within


def _owner(
    number: ir.Value, count: ir.Value, lane: ir.Value
) -> tuple[ir.Value, ir.Value]:
    """The lane that has the element of a number, and the element's number there.

    Lane 32 if there are not so many elements.
    """
    i32 = ir.IntegerType.get_signless(32)
    c = functools.partial(mgpu.utils.c, ty=i32)

    def shuffle(kind: str, value: ir.Value, by: ir.Value, limit: int) -> ir.Value:
        return llvm.inline_asm(
            i32,
            [value, by],
            f"shfl.sync.{kind}.b32 $0, $1, $2, {limit}, 0xffffffff;",
            "=r,r,r",
            has_side_effects=True,
        )

    end = count
    for distance in (1, 2, 4, 8, 16):
        other = shuffle("up", end, c(distance), 0)
        there = arith.cmpi(arith.CmpIPredicate.uge, lane, c(distance))
        end = arith.addi(end, arith.select(there, other, c(0)))
    votes = llvm.inline_asm(
        i32,
        [arith.cmpi(arith.CmpIPredicate.slt, number, end)],
        "vote.sync.ballot.b32 $0, $1, 0xffffffff;",
        "=r,b",
        has_side_effects=True,
    )
    owner = math.cttz(votes)
    before = shuffle("idx", arith.subi(end, count), owner, 31)
    return owner, arith.subi(number, before)


def copy_page_ids(
    table: Ref, first: Scalar, stop: Scalar, target: Ref, num_pages: int
) -> None:
    """Copies page ids from global to shared memory, one a lane, by a warpgroup.

    Args:
        table: int32 [n] of global memory.
        first: int32, the first to copy; the target takes at most 128.
        stop: int32, where what is needed ends; the rest of the target becomes -1.
        target: int32 [m] of shared memory.
        num_pages: of which ids may name one; others become -1.
    """
    scalar = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), scalar, scalar, plgpu.RefType()),
    )
    def copy_ids(ctx: Any, table: Any, first: Any, stop: Any, target: Any) -> None:
        del ctx
        i32 = ir.IntegerType.get_signless(32)
        c = functools.partial(mgpu.utils.c, ty=i32)
        (size,) = ir.MemRefType(target.type).shape
        lane = arith.remui(mgpu.utils.thread_idx(), c(128))
        at = arith.addi(first.registers.item(), lane)
        source, place = (
            llvm.getelementptr(
                ptr.type, ptr, [index], [-(2**31)], i32, llvm.GEPNoWrapFlags.none
            )
            for ptr, index in (
                (mgpu.utils.memref_ptr(table), at),
                (mgpu.utils.memref_ptr(target), lane),
            )
        )
        inside = arith.cmpi(arith.CmpIPredicate.slt, at, stop.registers.item())
        mine = arith.cmpi(arith.CmpIPredicate.ult, lane, c(size))
        llvm.inline_asm(
            ir.Type.parse("!llvm.void"),
            [arith.andi(inside, mine), mine, source, place, c(num_pages)],
            "{ .reg .b32 t; .reg .pred p; mov.b32 t, -1; @$0 ld.global.b32 t, [$2];"
            " setp.ge.u32 p, t, $4; @p mov.b32 t, -1; @$1 st.shared.b32 [$3], t; }",
            "b,b,l,r,r",
            has_side_effects=True,
        )
        mgpu.utils.warpgroup_barrier()

    copy: Any = copy_ids  # the decorator supplies the context
    copy(table, jnp.int32(first), jnp.int32(stop), target)


def store_first_rows(ref: Ref, values: jax.Array, layout: Any, stop: Scalar) -> None:
    """Writes the first rows of a tile that lies in registers, each lane its own.

    Args:
        ref: [rows, columns] of global memory; rows from `stop` on are not touched and
            may lie outside the array.
        values: the tile, 16-bit or fp32, in pieces of 4, 8 or 16 bytes a register.
        layout: its layout.
        stop: int32, the first row that is not written.
    """
    scalar = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout, scalar))
    def store_leading_rows(ctx: Any, ref: Any, values: Any, stop: Any) -> None:
        del ctx
        _store(ref, values, stop.registers.item())

    store: Any = store_leading_rows  # the decorator supplies the context
    store(ref, values, jnp.int32(stop))


def _store(ref: ir.Value, values: Any, stop: ir.Value) -> None:
    """Emits the stores of one lane."""
    i32, i64 = (ir.IntegerType.get_signless(n) for n in (32, 64))
    strides, _ = ir.MemRefType(ref.type).get_strides_and_offset()
    base = llvm.ptrtoint(i64, mgpu.utils.memref_ptr(ref))
    itemsize = mgpu.utils.bytewidth(values.mlir_dtype)
    places = values.layout.thread_idxs(values.shape)
    for at, place in zip(np.ndindex(values.registers.shape), places, strict=True):
        register = values.registers[at]
        address = base
        for index, stride in zip(place, strides, strict=True):
            offset = arith.index_cast(i64, index)
            offset = arith.muli(offset, mgpu.utils.c(stride * itemsize, i64))
            address = arith.addi(address, offset)
        count = ir.VectorType(register.type).shape[0] * itemsize // 4
        words = llvm.bitcast(ir.VectorType.get((count,), i32), register)
        words = [llvm.extractelement(words, mgpu.utils.c(i, i32)) for i in range(count)]
        row = arith.index_cast(i32, place[0])
        inside = arith.cmpi(arith.CmpIPredicate.slt, row, stop)
        names = ", ".join(f"${2 + i}" for i in range(count))
        vector_of = f".v{count}" if count > 1 else ""
        llvm.inline_asm(
            ir.Type.parse("!llvm.void"),
            [inside, address, *words],
            f"@$0 st.global{vector_of}.b32 [$1], {{{names}}};",
            "b,l" + ",r" * count,
            has_side_effects=True,
        )


def take_ticket_and_count(
    counters: Ref, at: Scalar, counts: Scalar, mailbox: Ref
) -> tuple[jax.Array, jax.Array]:
    """The next number of a counter, and counts what was written to global memory.

    Two warps wait for memory side by side, the others for them.

    Args:
        counters: int32 of global memory; the first counts tickets.
        at: int32, which counts those who have written what the last one reads.
        counts: bool, whether it does.
        mailbox: int32 [2] of shared memory, for this warpgroup alone.

    Returns:
        ``(ticket, others)``: int32, how many tickets were taken before; and how many
        have been counted before, whose writes may be read.
    """
    scalar = plgpu.Layout.WG_SPLAT(())
    number = plgpu.ShapeDtypeStruct((), jnp.int32, scalar)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), scalar, scalar, plgpu.RefType()),
        return_type=(number, number),
    )
    def ticket_and_count(
        ctx: Any, counters: Any, at: Any, counts: Any, mailbox: Any
    ) -> Any:
        del ctx
        i32 = ir.IntegerType.get_signless(32)
        c = functools.partial(mgpu.utils.c, ty=i32)
        thread = arith.remui(mgpu.utils.thread_idx(), c(128))
        takes, writes = (
            arith.cmpi(arith.CmpIPredicate.eq, thread, c(who)) for who in (0, _LANES)
        )
        pointer = mgpu.utils.memref_ptr(counters)
        counter = llvm.getelementptr(
            pointer.type,
            pointer,
            [at.registers.item()],
            [-(2**31)],
            i32,
            llvm.GEPNoWrapFlags.none,
        )
        box = mgpu.utils.memref_ptr(mailbox)
        void = ir.Type.parse("!llvm.void")
        mgpu.utils.warpgroup_barrier()  # the last numbers have been read
        counting = arith.cmpi(arith.CmpIPredicate.ne, counts.registers.item(), c(0))
        llvm.inline_asm(
            void,
            [arith.andi(writes, counting), counter, box],
            "{ .reg .b32 t; @$0 fence.acq_rel.gpu;"
            " @$0 atom.relaxed.gpu.global.add.u32 t, [$1], 1;"
            " @$0 fence.acq_rel.gpu; @$0 st.shared.b32 [$2+4], t; }",
            "b,l,r",
            has_side_effects=True,
        )
        llvm.inline_asm(
            void,
            [takes, pointer, box],
            "{ .reg .b32 t; @$0 atom.global.add.u32 t, [$1], 1;"
            " @$0 st.shared.b32 [$2], t; }",
            "b,l,r",
            has_side_effects=True,
        )
        mgpu.utils.warpgroup_barrier()
        found = llvm.inline_asm(
            ir.Type.parse("!llvm.struct<(i32, i32)>"),
            [box],
            "ld.shared.v2.b32 {$0, $1}, [$2];",
            "=r,=r,r",
            has_side_effects=True,
        )
        return tuple(
            mgpu.FragmentedArray.splat(
                llvm.extractvalue(i32, found, [i]), (), is_signed=True
            )
            for i in range(2)
        )

    take: Any = ticket_and_count  # the decorator supplies the context
    return take(counters, jnp.int32(at), jnp.int32(counts), mailbox)
