"""Sums of a tile along its diagonals: the transpose of reading a relative bias.

The gradient of an entry of a query's row of terms is the sum of that query's ds over
the keys whose distance takes the entry, and the same holds of a key's row. An entry
never falls with the distance, so along a row of ds the keys of an entry lie side by
side: they are a run. Whoever walks over a row from end to end needs one running sum of
it, which is written once, where a run ends, and which the next tile carries on.

A warp goes through 16 rows, half of the 64 columns at a time, a lane a column. Lanes
add up prefix sums, and the last lane of a run takes what stood before its first one
away. Sums so have an order of their own, whatever else runs.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.mosaic.aliases import Ref
from pallas_kernels.mosaic.copies import smem_transforms
from pallas_kernels.varlen_attention.relative_mosaic_gpu import TileTerms


_LANES = 32
_ROWS = 16
"""Rows of a warp, those that it holds of wgmma accumulators."""

_TOGETHER = 8
"""Rows whose instructions alternate, since each waits for the one before it."""


class TilePlace(NamedTuple):
    """Where a tile lies: int32, for the kernel, or each of them as a lane has it."""

    base: Any
    """`TileTerms.base` of the tile."""
    first_row: Any
    """The first row whose sums are written."""
    stop_row: Any
    """The row after the last of those."""
    first: Any
    """The first column that counts; ds of others is zero."""
    stop: Any
    """The column after the last of those."""
    begins: Any
    """1 for the first tile of a walk, or else 0."""
    ends: Any
    """1 for the last tile of a walk, or else 0."""


def store_diagonal_sums(
    terms: TileTerms,
    of_keys: bool,
    ds: Ref,
    table: Ref,
    gradient: Ref,
    carry: Ref,
    place: TilePlace,
) -> None:
    """Adds a tile to the sums of its rows, and writes those that are complete.

    Args:
        terms: of a block of one warpgroup with 64 queries and 64 keys.
        of_keys: rows are keys and columns queries, or else the other way around.
        ds: gradients of logits, [queries, keys], a 16-bit operand of wgmma in shared
            memory.
        table: entries, in shared memory.
        gradient: [64, entries] of global memory.
        carry: fp32 [64] of shared memory, the sums of runs that began in tiles before.
        place: of the tile.
    """
    scalar, reference = plgpu.Layout.WG_SPLAT(()), plgpu.RefType()
    operand = plgpu.RefType(smem_transforms(64, ds.dtype))

    @plgpu.inline_mgpu(
        arg_types=(operand, reference, reference, reference, *[scalar] * len(place))
    )
    def store_sums(
        ctx: Any, ds: Any, table: Any, gradient: Any, carry: Any, *numbers: Any
    ) -> None:
        del ctx
        place = TilePlace(*(number.registers.item() for number in numbers))
        _Warp(terms, of_keys, ds, table, gradient, carry, place).emit()

    store: Any = store_sums  # the decorator supplies the context
    store(ds, table, gradient, carry, *(jnp.int32(number) for number in place))


class _Warp:
    """Emits what a lane does: a column of the 16 rows of its warp, and another one."""

    def __init__(
        self,
        terms: TileTerms,
        of_keys: bool,
        ds: ir.Value,
        table: ir.Value,
        gradient: ir.Value,
        carry: ir.Value,
        place: TilePlace,
    ) -> None:
        self.i32, self.f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        self.nothing = ir.Type.parse("!llvm.void")
        self.of_keys = of_keys
        self.first, self.stop = place.first, place.stop
        self.ends = self.compare("ne", place.ends, self.c(0))
        thread = self.here(mgpu.utils.thread_idx())
        self.lane = arith.andi(thread, self.c(_LANES - 1))
        self.warp = arith.divui(thread, self.c(_LANES))
        self.row = arith.muli(self.warp, self.c(_ROWS))
        self.is_first = self.compare("eq", self.lane, self.c(0))
        self.goes_on = arith.andi(
            self.is_first, self.compare("eq", place.begins, self.c(0))
        )
        self.carry = arith.addi(self.smem(carry), arith.muli(self.row, self.c(4)))
        self.first_row, self.stop_row = (
            arith.subi(x, self.row) for x in (place.first_row, place.stop_row)
        )
        self.dtype = ir.MemRefType(ds.type).element_type
        self.ds = [self.start_of_gradient(ds, i) for i in range(2)]
        # Distances rise with the query and fall with the key.
        self.sign = 1 if of_keys else -1
        away = arith.muli(arith.subi(self.lane, self.row), self.c(self.sign))
        index = arith.addi(arith.addi(place.base, self.c(terms.reach)), away)
        self.table = arith.addi(self.smem(table), arith.muli(index, self.c(4)))
        (self.stride, _), _ = ir.MemRefType(gradient.type).get_strides_and_offset()
        i64 = ir.IntegerType.get_signless(64)
        self.gradient = arith.addi(
            llvm.ptrtoint(i64, mgpu.utils.memref_ptr(gradient)),
            arith.muli(arith.extui(i64, self.row), mgpu.utils.c(2 * self.stride, i64)),
        )

    def emit(self) -> None:
        """Both halves of the columns, of some rows at a time."""
        for start in range(0, _ROWS, _TOGETHER):
            rows = range(start, start + _TOGETHER)
            running = [self.load_carry(row) for row in rows]
            for half in range(2):
                running = self.half(rows, half, running)
            for row, value in zip(rows, running, strict=True):
                self.store_carry(row, value)

    def half(self, rows: range, half: int, running: list[ir.Value]) -> list[ir.Value]:
        """Half of the columns; takes and returns the running sum of each row."""
        column = arith.addi(self.lane, self.c(half * _LANES))
        begun = self.compare("sge", column, self.first)
        inside = arith.andi(begun, self.compare("slt", column, self.stop))
        last = self.compare("eq", column, arith.subi(self.stop, self.c(1)))
        last = arith.andi(last, self.ends)
        # A step along a row is one across rows, in the other direction.
        entries = {
            row: self.load_entry(half, row)
            for row in range(rows.start - 1, rows.stop + 1)
        }
        heads = [
            arith.andi(begun, self.compare("ne", entries[row], entries[row + 1]))
            for row in rows
        ]
        zero, sums = arith.constant(self.f32, 0.0), []
        for row, head, carried in zip(rows, heads, running, strict=True):
            carried = arith.select(head, zero, carried)
            carried = arith.select(self.is_first, carried, zero)
            sums.append(arith.addf(self.load_gradient(half, row), carried))
        for distance in (1, 2, 4, 8, 16):
            sums = [self.add_from_below(x, distance) for x in sums]
        sums = [self.of_run(x, head) for x, head in zip(sums, heads, strict=True)]
        for row, value in zip(rows, sums, strict=True):
            entry = entries[row]
            is_end = arith.ori(last, self.compare("ne", entry, entries[row - 1]))
            self.store(row, entry, value, arith.andi(inside, is_end))
        return [self.of_lane(x, self.c(_LANES - 1)) for x in sums]

    # --- memory -----------------------------------------------------------------------

    def load_carry(self, row: int) -> ir.Value:
        """The running sum of a row, in the first lane, which alone adds it."""
        text = f"{{ mov.f32 $0, 0f00000000; @$1 ld.shared.f32 $0, [$2+{4 * row}]; }}"
        return self.asm(self.f32, text, "=&f,b,r", self.goes_on, self.carry)

    def store_carry(self, row: int, value: ir.Value) -> None:
        """Keeps the running sum of a row: by the lane that reads it, so no two race."""
        text = f"@$0 st.shared.f32 [$1+{4 * row}], $2;"
        self.asm(self.nothing, text, "b,r,f", self.is_first, self.carry, value)

    def load_entry(self, half: int, row: int) -> ir.Value:
        """The entry of the distance of a row and the lane's column."""
        offset = 4 * self.sign * (half * _LANES - row)
        text = f"ld.shared.b32 $0, [$1+{offset}];"
        return self.asm(self.i32, text, "=r,r", self.table)

    def start_of_gradient(self, ds: ir.Value, i: int) -> ir.Value:
        """The address that `load_gradient` begins with.

        Lines of 64 queries have 128 bytes; their eight pieces of 16 bytes are permuted
        by the number of the line.

        Args:
            ds: the tile.
            i: which half of the rows, where they are keys, or else of the columns.
        """
        c = self.c
        eighth, within = arith.divui(self.lane, c(8)), arith.andi(self.lane, c(7))
        if self.of_keys:  # the lane's line, the row's column
            piece = arith.addi(arith.muli(self.warp, c(2)), c(i))
            parts = (self.lane, 128), (arith.xori(piece, within), 16)
        else:
            piece = arith.xori(eighth, c(4 * i))
            parts = (self.row, 128), (piece, 16), (within, 2)
        address = self.smem(ds)
        for index, size in parts:
            address = arith.addi(address, arith.muli(index, c(size)))
        return address

    def load_gradient(self, half: int, row: int) -> ir.Value:
        """Ds of a row and the lane's column, fp32."""
        if self.of_keys:
            address = self.ds[row // 8]
            offset = half * _LANES * 128 + row % 8 * 2
        else:
            address = arith.xori(self.ds[half], self.c(row % 8 * 16))
            offset = row * 128
        text, i16 = f"ld.shared.b16 $0, [$1+{offset}];", ir.IntegerType.get_signless(16)
        value = self.asm(i16, text, "=h,r", address)
        return arith.extf(self.f32, arith.bitcast(self.dtype, value))

    def store(
        self, row: int, entry: ir.Value, value: ir.Value, is_end: ir.Value
    ) -> None:
        """Writes the sum of a run, if it ends here and its row is one to be written."""
        i16, i64 = (ir.IntegerType.get_signless(n) for n in (16, 64))
        for relation, bound in (("sle", self.first_row), ("sgt", self.stop_row)):
            is_end = arith.andi(is_end, self.compare(relation, bound, self.c(row)))
        offset = arith.muli(arith.extui(i64, entry), mgpu.utils.c(2, i64))
        self.asm(
            self.nothing,
            f"@$0 st.global.b16 [$1+{2 * row * self.stride}], $2;",
            "b,l,h",
            is_end,
            arith.addi(self.gradient, offset),
            arith.bitcast(i16, arith.truncf(self.dtype, value)),
        )

    # --- lanes ------------------------------------------------------------------------

    def add_from_below(self, value: ir.Value, distance: int) -> ir.Value:
        """Adds the value of the lane so far below, if there is one."""
        text = (
            "{ .reg .pred p; .reg .f32 t; mov.f32 $0, $1;"
            f" shfl.sync.up.b32 t|p, $1, {distance}, 0, 0xffffffff;"
            " @p add.f32 $0, $0, t; }"
        )
        return self.asm(self.f32, text, "=&f,f", value)

    def of_run(self, prefix: ir.Value, head: ir.Value) -> ir.Value:
        """The sum from the first lane of the lane's run, or from lane 0, to itself."""
        text = (
            "{ .reg .b32 m, t; vote.sync.ballot.b32 t, $1, 0xffffffff;"
            " mov.b32 m, %lanemask_le; and.b32 t, t, m; or.b32 t, t, 1;"
            " bfind.u32 $0, t; }"
        )
        start = self.asm(self.i32, text, "=r,b", head)
        before = self.of_lane(prefix, arith.subi(start, self.c(1)))
        zero = arith.constant(self.f32, 0.0)
        there = self.compare("ne", start, self.c(0))
        return arith.subf(prefix, arith.select(there, before, zero))

    def of_lane(self, value: ir.Value, lane: ir.Value) -> ir.Value:
        """The value of another lane, anything if there is none."""
        text = "shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;"
        return self.asm(self.f32, text, "=f,f,r", value, lane)

    # --- shorthands -------------------------------------------------------------------

    def c(self, value: int) -> ir.Value:
        """A constant."""
        return arith.constant(self.i32, value)

    def compare(self, relation: str, a: ir.Value, b: ir.Value) -> ir.Value:
        """Whether a relation holds."""
        return arith.cmpi(getattr(arith.CmpIPredicate, relation), a, b)

    def smem(self, ref: ir.Value) -> ir.Value:
        """The address of shared memory."""
        return llvm.ptrtoint(self.i32, mgpu.utils.memref_ptr(ref))

    def here(self, value: ir.Value) -> ir.Value:
        """The same number, of which the compiler does not know.

        It would compute the addresses of all rows ahead of the loop over tiles, and
        there are no registers for them.
        """
        return self.asm(self.i32, "mov.b32 $0, $1;", "=r,r", value)

    def asm(self, kind: ir.Type, text: str, constraints: str, *operands: Any) -> Any:
        """An instruction that stays where it is."""
        return llvm.inline_asm(
            kind, list(operands), text, constraints, has_side_effects=True
        )
