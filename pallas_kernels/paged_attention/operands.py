"""Operands and results of the matmuls: in registers, by each lane.

Matmuls are transposed: keys, and then the columns of values, are the 64 rows of a
matmul of the tensor cores, and queries its columns, of which there may be eight only.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.mosaic.aliases import Ref, Scalar
from pallas_kernels.mosaic.copies import CHUNK, smem_transforms
from pallas_kernels.paged_attention.config import BLOCK


PER_QUERY = plgpu.Layout.WGMMA.reduce(0)
"""Layout of a number for each column of accumulators."""

_LANES, _WARPS = 32, 4


def largest_of_keys(values: jax.Array, of_warps: Ref) -> jax.Array:
    """The largest value of each column of accumulators.

    Warps, which have rows of their own, tell one another theirs in shared memory. Until
    that is used again, they must have met elsewhere.

    Args:
        values: fp32 [64, columns], in the layout of wgmma accumulators.
        of_warps: fp32 [2, 4, columns] of shared memory, for this warpgroup alone.

    Returns:
        fp32 [columns], in the layout `PER_QUERY`.
    """

    @_of_columns(values)
    def find_largest(ctx: Any, values: Any, of_warps: Any) -> Any:
        del ctx
        return _reduce_columns(values, of_warps, 0, arith.maximumf)

    find: Any = find_largest  # the decorator supplies the context
    return find(values, of_warps)


def add_keys(values: jax.Array, of_warps: Ref) -> jax.Array:
    """The sum of each column of accumulators, see `largest_of_keys`."""

    @_of_columns(values)
    def add_columns(ctx: Any, values: Any, of_warps: Any) -> Any:
        del ctx
        mgpu.utils.warpgroup_barrier()  # all have read the sums before
        return _reduce_columns(values, of_warps, 1, arith.addf)

    add: Any = add_columns  # the decorator supplies the context
    return add(values, of_warps)


def _of_columns(values: jax.Array) -> Any:
    """Decorates what makes a number of each column, with shared memory."""
    return plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA, plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct(values.shape[1:], jnp.float32, PER_QUERY),
    )


def _lane_and_warp() -> tuple[ir.Value, ir.Value]:
    i32 = ir.IntegerType.get_signless(32)
    thread = arith.remui(mgpu.utils.thread_idx(), mgpu.utils.c(128, i32))
    lanes = mgpu.utils.c(_LANES, i32)
    return arith.remui(thread, lanes), arith.divui(thread, lanes)


def _reduce_columns(values: Any, of_warps: ir.Value, part: int, combine: Any) -> Any:
    """Emits the reduction: of a lane, of a warp, and of all in a fixed order."""
    i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
    pair = ir.VectorType.get((2,), f32)
    columns = values.shape[1]
    lane, warp = _lane_and_warp()
    # A lane has two columns of every eight.
    first = arith.muli(arith.remui(lane, mgpu.utils.c(4, i32)), mgpu.utils.c(2, i32))
    address = llvm.ptrtoint(i32, mgpu.utils.memref_ptr(of_warps))
    address = arith.addi(address, mgpu.utils.c(part * _WARPS * columns * 4, i32))
    address = arith.addi(address, arith.muli(first, mgpu.utils.c(4, i32)))
    mine = arith.addi(address, arith.muli(warp, mgpu.utils.c(columns * 4, i32)))
    writes = arith.cmpi(
        arith.CmpIPredicate.ult, lane, mgpu.utils.c(4, i32)
    )  # the others of a column have the same
    for j in range(columns // 8):
        total = functools.reduce(combine, values.registers[0, j].flat)
        numbers = [
            vector.extract(total, dynamic_position=[], static_position=[i])
            for i in range(2)
        ]
        for distance in (4, 8, 16):
            numbers = [combine(x, mgpu.utils.shfl_bfly(x, distance)) for x in numbers]
        llvm.inline_asm(
            ir.Type.parse("!llvm.void"),
            [writes, mine, *numbers],
            f"@$0 st.shared.v2.f32 [$1+{32 * j}], {{$2, $3}};",
            "b,r,f,f",
            has_side_effects=True,
        )
    mgpu.utils.warpgroup_barrier()
    layout = PER_QUERY.to_mgpu()
    registers = np.empty(layout.registers_shape((columns,)), object)
    for j, at in enumerate(np.ndindex(registers.shape)):
        parts = []
        for other in range(_WARPS):
            loaded = llvm.inline_asm(
                ir.Type.parse("!llvm.struct<(f32, f32)>"),
                [address],
                f"ld.shared.v2.f32 {{$0, $1}}, [$2+{4 * (other * columns + 8 * j)}];",
                "=f,=f,r",
                has_side_effects=True,  # stays where it is
            )
            numbers = [llvm.extractvalue(f32, loaded, [i]) for i in range(2)]
            parts.append(vector.from_elements(pair, numbers))
        registers[at] = functools.reduce(combine, parts)
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)


def store_transposed(ref: Ref, values: jax.Array) -> None:
    """Writes accumulators to shared memory, columns as rows.

    Args:
        ref: 16-bit [columns, 64] of shared memory, in swizzled tiles of 8 rows.
        values: [64, columns], in the layout of wgmma accumulators.
    """
    transforms = plgpu.RefType(smem_transforms(CHUNK, values.dtype))

    @plgpu.inline_mgpu(arg_types=(transforms, plgpu.Layout.WGMMA))
    def store_as_rows(ctx: Any, ref: Any, values: Any) -> None:
        del ctx
        i32 = ir.IntegerType.get_signless(32)
        c = functools.partial(mgpu.utils.c, ty=i32)
        lane, warp = _lane_and_warp()
        # Lanes 0 to 15 have the addresses: those of 8 rows, left and right.
        row, right = arith.remui(lane, c(8)), arith.divui(lane, c(8))
        right = arith.andi(right, c(1))
        piece = arith.addi(arith.muli(warp, c(2)), right)
        offset = arith.muli(arith.xori(piece, row), c(16))
        offset = arith.addi(offset, arith.muli(row, c(128)))
        address = arith.addi(llvm.ptrtoint(i32, mgpu.utils.memref_ptr(ref)), offset)
        for j in range(values.shape[1] // 8):
            words = [llvm.bitcast(i32, x) for x in values.registers[0, j].flat]
            llvm.inline_asm(
                ir.Type.parse("!llvm.void"),
                [address, *words],
                "stmatrix.sync.aligned.m8n8.x2.trans.shared.b16"
                f" [$0+{1024 * j}], {{$1, $2}};",
                "r,r,r",
                has_side_effects=True,
            )

    store: Any = store_as_rows  # the decorator supplies the context
    store(ref, values)


def in_order_of_keys(head_dim: int) -> np.ndarray:
    """The columns of keys in the order in which `load_keys` gives them.

    Of every sixteen, matmuls take the first and the second eight in pairs, a lane one
    of each: here both come from the same four.
    """
    columns = np.arange(head_dim).reshape(-1, 4, 2, 2)
    return columns.swapaxes(1, 2).reshape(-1)


def in_order_of_values(head_dim: int) -> np.ndarray:
    """The columns of values in the order in which `load_values` gives them, as rows.

    A lane has four rows of every 128, in which matmuls take one of every sixteen and
    of every eight: here they are neighbors.
    """
    columns = np.arange(head_dim).reshape(-1, 4, 8, 2, 2)  # .., warp, lane, tile, half
    return columns.transpose(0, 3, 1, 4, 2).reshape(-1)


def load_keys(ref: Ref) -> tuple[jax.Array, ...]:
    """Keys in fp8, widened, as left operands of matmuls.

    Args:
        ref: fp8 [64, columns] of shared memory, in swizzled tiles of 8 rows and 128
            columns.

    Returns:
        float16 [64, 64] for every 64 columns, in the layout of wgmma operands; columns
        are `in_order_of_keys`.
    """
    size = ref.shape[1]
    chunk = plgpu.ShapeDtypeStruct((BLOCK, CHUNK), jnp.float16, plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(smem_transforms(size, ref.dtype)),),
        return_type=(chunk,) * (size // CHUNK),
    )
    def load_wide_keys(ctx: Any, ref: Any) -> Any:
        del ctx
        c, (lane, warp) = _i32, _lane_and_warp()
        tiles = size // 128
        row, column = arith.divui(lane, c(4)), arith.remui(lane, c(4))
        base = llvm.ptrtoint(c(0).type, mgpu.utils.memref_ptr(ref))
        base = arith.addi(base, arith.muli(warp, c(2 * tiles * 1024)))
        base = arith.addi(base, arith.muli(row, c(128)))
        base = arith.addi(base, arith.muli(column, c(4)))
        layout = plgpu.Layout.WGMMA.to_mgpu()
        shape = layout.registers_shape((BLOCK, CHUNK))
        chunks = [np.empty(shape, object) for _ in range(size // CHUNK)]
        for piece in range(8):
            swizzled = arith.muli(arith.xori(row, c(piece)), c(16))
            address = arith.addi(base, swizzled)
            for tile, half in np.ndindex(tiles, 2):
                word = _load_word(address, (half * tiles + tile) * 1024)
                chunk, at = divmod(8 * tile + piece, 4)
                for i, x in enumerate(_widen(word)):
                    chunks[chunk][0, 2 * at + i].flat[half] = x
        return tuple(
            mgpu.FragmentedArray(_registers=x, _layout=layout, _is_signed=None)
            for x in chunks
        )

    load: Any = load_wide_keys  # the decorator supplies the context
    return load(ref)


def load_values(ref: Ref, held: tuple[Scalar, Scalar] | None = None) -> jax.Array:
    """Values in fp8, widened and transposed, as a left operand of matmuls.

    Args:
        ref: fp8 [64, columns] of shared memory, in swizzled tiles of 8 rows and 128
            columns.
        held: int32, the first row that counts and the one after the last; others
            become zeros. None is all of them.

    Returns:
        float16 [columns, 64], in the layout of wgmma operands; its rows are
        `in_order_of_values`.
    """
    size, layout = ref.shape[1], plgpu.Layout.WGMMA
    bounds = () if held is None else tuple(map(jnp.int32, held))

    @plgpu.inline_mgpu(
        arg_types=(
            plgpu.RefType(smem_transforms(size, ref.dtype)),
            *(plgpu.Layout.WG_SPLAT(()),) * len(bounds),
        ),
        return_type=plgpu.ShapeDtypeStruct((size, BLOCK), jnp.float16, layout),
    )
    def load_wide_values(ctx: Any, ref: Any, *bounds: Any) -> Any:
        del ctx
        numbers = [bound.registers.item() for bound in bounds]
        registers = _load_values(ref, size, numbers)
        return mgpu.FragmentedArray(
            _registers=registers, _layout=layout.to_mgpu(), _is_signed=None
        )

    load: Any = load_wide_values  # the decorator supplies the context
    return load(ref, *bounds)


def _load_values(ref: ir.Value, size: int, bounds: Sequence[ir.Value]) -> np.ndarray:
    """Emits the loads of one lane: four columns of two rows at a time."""
    c, (lane, warp) = _i32, _lane_and_warp()
    tiles = size // 128
    column, pair = arith.divui(lane, c(4)), arith.remui(lane, c(4))
    pair = arith.muli(pair, c(2))
    piece = arith.addi(arith.muli(warp, c(2)), arith.divui(column, c(4)))
    base = llvm.ptrtoint(c(0).type, mgpu.utils.memref_ptr(ref))
    base = arith.addi(base, arith.muli(arith.remui(column, c(4)), c(4)))
    addresses, rows = [], []
    for i in range(2):
        row = arith.addi(pair, c(i))
        swizzled = arith.muli(arith.xori(piece, row), c(16))
        address = arith.addi(base, arith.addi(arith.muli(row, c(128)), swizzled))
        addresses.append(address)
        rows.append(row)
    registers = np.empty(
        plgpu.Layout.WGMMA.to_mgpu().registers_shape((size, BLOCK)), object
    )
    is_less = functools.partial(arith.cmpi, arith.CmpIPredicate.slt)
    for eight in range(BLOCK // 8):
        held = []
        for row in rows if bounds else ():
            at = arith.addi(row, c(8 * eight))
            seen = arith.cmpi(arith.CmpIPredicate.sle, bounds[0], at)
            held.append(arith.andi(seen, is_less(at, bounds[1])))
        for tile in range(tiles):
            words = [_load_word(x, (eight * tiles + tile) * 1024) for x in addresses]
            if held:
                words = [
                    arith.select(there, word, c(0))
                    for word, there in zip(words, held, strict=True)
                ]
            for i, order in enumerate((0x5140, 0x7362)):
                both = llvm.inline_asm(
                    c(0).type, words, f"prmt.b32 $0, $1, $2, {order};", "=r,r,r"
                )
                halves = registers[2 * tile + i, eight]
                for half, x in enumerate(_widen(both)):
                    halves.flat[half] = x
    return registers


def _i32(value: int) -> ir.Value:
    return mgpu.utils.c(value, ir.IntegerType.get_signless(32))


def _load_word(address: ir.Value, offset: int) -> ir.Value:
    """A word of shared memory."""
    return llvm.inline_asm(
        ir.IntegerType.get_signless(32),
        [address],
        f"ld.shared.b32 $0, [$1+{offset}];",
        "=r,r",
        has_side_effects=True,  # stays behind the barrier
    )


def _widen(word: ir.Value) -> list[ir.Value]:
    """Two pairs of numbers in fp16 from four in fp8, an instruction a pair."""
    i32 = ir.IntegerType.get_signless(32)
    pairs = llvm.inline_asm(
        ir.Type.parse("!llvm.struct<(i32, i32)>"),
        [word],
        "{ .reg .b16 low, high; mov.b32 {low, high}, $2;"
        " cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }",
        "=r,=r,r",
    )
    halves = ir.VectorType.get((2,), ir.F16Type.get())
    return [llvm.bitcast(halves, llvm.extractvalue(i32, pairs, [i])) for i in range(2)]


def store_queries(
    ref: Ref, values: jax.Array, stop: Scalar, *, interleaved: bool = False
) -> None:
    """Writes the first columns of accumulators as rows of global memory.

    Args:
        ref: [columns, rows], or [columns] where there is a number for each.
        values: [rows, columns], 16-bit or fp32, in the layout of wgmma accumulators, or
            [columns] in the layout `PER_QUERY`.
        stop: int32, the first column that is not written.
        interleaved: whether rows are `in_order_of_values`.
    """
    scalar = plgpu.Layout.WG_SPLAT(())
    layout = plgpu.Layout.WGMMA if values.ndim == 2 else PER_QUERY

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout, scalar))
    def store_leading_columns(ctx: Any, ref: Any, values: Any, stop: Any) -> None:
        del ctx
        _store_columns(ref, values, stop.registers.item(), interleaved)

    store: Any = store_leading_columns  # the decorator supplies the context
    store(ref, values, jnp.int32(stop))


def _store_columns(
    ref: ir.Value, values: Any, stop: ir.Value, interleaved: bool
) -> None:
    """Emits the stores of one lane, a number at a time."""
    i32, i64 = (ir.IntegerType.get_signless(n) for n in (32, 64))
    itemsize = mgpu.utils.bytewidth(values.mlir_dtype)
    word = ir.IntegerType.get_signless(8 * itemsize)
    constraint = {2: "h", 4: "r"}[itemsize]
    strides, _ = ir.MemRefType(ref.type).get_strides_and_offset()
    base = llvm.ptrtoint(i64, mgpu.utils.memref_ptr(ref))
    places = values.layout.thread_idxs(values.shape)
    for at, place in zip(np.ndindex(values.registers.shape), places, strict=True):
        address = base
        place = [arith.index_cast(i32, x) for x in place]
        if interleaved:
            place[0] = _row_of_values(place[0])
        for index, stride in zip(reversed(place), strides, strict=True):
            offset = arith.muli(
                arith.extui(i64, index), mgpu.utils.c(stride * itemsize, i64)
            )
            address = arith.addi(address, offset)
        for i in range(2):
            number = vector.extract(
                values.registers[at], dynamic_position=[], static_position=[i]
            )
            column = arith.addi(place[-1], _i32(i))
            llvm.inline_asm(
                ir.Type.parse("!llvm.void"),
                [
                    arith.cmpi(arith.CmpIPredicate.slt, column, stop),
                    address,
                    arith.bitcast(word, number),
                ],
                f"@$0 st.global.b{8 * itemsize} [$1+{i * strides[0] * itemsize}], $2;",
                f"b,l,{constraint}",
                has_side_effects=True,
            )


def _row_of_values(row: ir.Value) -> ir.Value:
    """Which column of values a row is, `in_order_of_values`."""
    c, parts = _i32, []
    for size in (8, 2, 4, 2):  # lane, half, warp, tile
        parts.append(arith.remui(row, c(size)))
        row = arith.divui(row, c(size))
    total = arith.muli(row, c(128))
    for part, stride in zip(parts, (4, 1, 32, 2), strict=True):
        total = arith.addi(total, arith.muli(part, c(stride)))
    return total
