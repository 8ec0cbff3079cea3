"""Operations of each lane on its registers: masks, rows, columns, votes.

Inline PTX and MLIR, for what Pallas has no operation.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, math, vector

from pallas_kernels.mosaic.aliases import Ref, Scalar
from pallas_kernels.mosaic.copies import smem_transforms


_FAR = 2**30
"""Larger than any index, and small enough to be added to one."""

FLAT = (16, 256)
_REGISTER_ORDER = plgpu.Layout.WG_STRIDED(FLAT, vec_size=4)

type Limits = tuple[Scalar, Scalar]
"""The least and the largest index that stay; None is no limit."""


def keep_band(
    values: jax.Array,
    rows: Limits = (None, None),
    columns: Limits = (None, None),
    distance: Limits = (None, None),
) -> jax.Array:
    """Accumulators with ``-inf`` wherever an index or a distance is out of bounds.

    A lane holds two rows and, in each, columns at fixed distances: two thresholds a
    side are all that depends on the lane. Comparing index arrays instead would keep one
    register an element, because the compiler computes them ahead of the loop.

    Args:
        values: fp32 [64, columns], in the layout of wgmma accumulators.
        rows: limits of the row.
        columns: limits of the column.
        distance: limits of ``column - row``.
    """
    scalar, layout = plgpu.Layout.WG_SPLAT(()), plgpu.Layout.WGMMA
    limits = (*rows, *columns, *distance)
    given = tuple(limit is not None for limit in limits)

    @plgpu.inline_mgpu(
        arg_types=(layout, *[scalar] * sum(given)),
        return_type=plgpu.ShapeDtypeStruct(values.shape, jnp.float32, layout),
    )
    def mask_outside_band(ctx: Any, values: mgpu.FragmentedArray, *bounds: Any) -> Any:
        del ctx
        numbers = iter(bound.registers.item() for bound in bounds)
        return _keep_band(
            values, *(next(numbers) if there else None for there in given)
        )

    bounds = (jnp.int32(limit) for limit in limits if limit is not None)
    return mask_outside_band(values, *bounds)


def lane_sums(values: jax.Array) -> jax.Array:
    """Sums of every eighth column, which a lane has without asking another one.

    Args:
        values: fp32 [64, columns], in the layout of wgmma accumulators.

    Returns:
        fp32 [64, 8], whose sums are those of the rows.
    """
    layout = plgpu.Layout.WGMMA

    @plgpu.inline_mgpu(
        arg_types=(layout,),
        return_type=plgpu.ShapeDtypeStruct((values.shape[0], 8), jnp.float32, layout),
    )
    def add_own_columns(ctx: Any, values: mgpu.FragmentedArray) -> Any:
        del ctx
        columns = np.split(values.registers, values.registers.shape[1], axis=1)
        sums = functools.reduce(np.vectorize(arith.addf, otypes=[object]), columns)
        return mgpu.FragmentedArray(
            _registers=sums, _layout=values.layout, _is_signed=values.is_signed
        )

    add: Any = add_own_columns  # the decorator supplies the context
    return add(values)


def _first_element(values: mgpu.FragmentedArray) -> tuple[ir.Value, ir.Value]:
    """Row and column of the first element of a lane, int32."""
    i32 = ir.IntegerType.get_signless(32)
    row, column = next(iter(values.layout.thread_idxs(values.shape)))
    return arith.index_cast(i32, row), arith.index_cast(i32, column)


def _register_places(values: Any) -> dict[tuple[int, ...], tuple[int, int]]:
    """Return the offset of each register's element from its lane's first."""
    return register_places(values.layout, values.shape)


def register_places(
    layout: Any, shape: tuple[int, ...]
) -> dict[tuple[int, ...], tuple[int, int]]:
    """The offset of each register's element from its lane's first, row and column."""
    width = shape[1]
    strides = layout.tiling.tile_strides((width, 1))
    return {
        at: divmod(sum(i * s for i, s in zip(at, strides, strict=False)), width)
        for at in np.ndindex(layout.registers_shape(shape))
    }


_WORD = 32
"""Columns of a lane in a row for which a word has a bit."""


def _keep_band(values: mgpu.FragmentedArray, *limits: ir.Value | None) -> Any:
    """Emits the selections of one lane, by words that have a bit for each column.

    A lane has two columns of every eight. An instruction makes predicates of seven
    bits, where comparisons take one or two for each column: of a step of 64 queries and
    128 keys under a window words save 150 of 719 instructions.
    """
    i32 = ir.IntegerType.get_signless(32)
    c = functools.partial(mgpu.utils.c, ty=i32)
    row_least, row_most, least, most, near, far = limits
    is_less = functools.partial(arith.cmpi, arith.CmpIPredicate.sle)
    lane_row, lane_column = _first_element(values)
    lanes: dict[int, dict[int, tuple[int, ...]]] = {}
    for at, (row, column) in _register_places(values).items():
        lanes.setdefault(row, {})[column] = at

    def both(
        combine: Callable[[ir.Value, ir.Value], ir.Value],
        first: ir.Value | None,
        second: ir.Value | None,
    ) -> ir.Value | None:
        """Combine two limits, each of which may not be there."""
        if first is None or second is None:
            return second if first is None else first
        return combine(first, second)

    def columns_of(row_offset: int) -> tuple[ir.Value | None, ...]:
        """Return the least and largest offset of the columns that stay in a row."""
        row = arith.addi(lane_row, c(row_offset))
        stays = both(
            arith.andi,
            None if row_least is None else is_less(row_least, row),
            None if row_most is None else is_less(row, row_most),
        )
        low, high = (
            both(combine, limit, None if away is None else arith.addi(row, away))
            for combine, limit, away in (
                (arith.maxsi, least, near),
                (arith.minsi, most, far),
            )
        )
        if stays is not None:
            high = c(_FAR) if high is None else high
            high = arith.select(stays, high, c(-_FAR))
        return tuple(
            None if x is None else arith.subi(x, lane_column) for x in (low, high)
        )

    def shifted(bound: ir.Value, first: int) -> ir.Value:
        """Ones for the columns from a bound on, of those from `first` on."""
        past = arith.subi(bound, c(first))
        eights = arith.shrsi(past, c(3))
        count = arith.minsi(arith.andi(past, c(7)), c(2))
        count = arith.addi(arith.addi(eights, eights), count)
        count = arith.maxsi(count, c(0))
        return llvm.inline_asm(i32, [c(-1), count], "shl.b32 $0, $1, $2;", "=r,r,r")

    masked = values.registers.copy()
    for row, registers in lanes.items():
        low, high = columns_of(row)
        if low is None and high is None:
            continue
        columns = sorted(registers)
        for start in range(0, len(columns), _WORD // 2):
            part = columns[start : start + _WORD // 2]
            word = None if low is None else shifted(low, part[0])
            if high is not None:
                past = arith.xori(shifted(arith.addi(high, c(1)), part[0]), c(-1))
                word = past if word is None else arith.andi(word, past)
            for j, column in enumerate(part):
                register = masked[registers[column]]
                for i in range(2):
                    where = {"dynamic_position": [], "static_position": [i]}
                    value = llvm.inline_asm(
                        ir.F32Type.get(),
                        [vector.extract(register, **where), word],
                        "{ .reg .pred p; .reg .b32 t;"
                        f" and.b32 t, $2, {1 << (2 * j + i)}; setp.ne.u32 p, t, 0;"
                        " selp.f32 $0, $1, 0fFF800000, p; }",
                        "=f,f,r",
                    )
                    register = vector.insert(value, register, **where)
                masked[registers[column]] = register
    return mgpu.FragmentedArray(
        _registers=masked, _layout=values.layout, _is_signed=values.is_signed
    )


def distances(values: jax.Array, shift: Scalar) -> jax.Array:
    """``|column - row + shift|`` of each accumulator, fp32.

    A lane computes it from one number a row. Index arrays would keep one register an
    element, as for `keep_band`.

    Args:
        values: fp32 [64, columns], in the layout of wgmma accumulators; not read.
        shift: int32; up to 2 ** 24 distances are exact.
    """
    layout = plgpu.Layout.WGMMA

    @plgpu.inline_mgpu(
        arg_types=(layout, plgpu.Layout.WG_SPLAT(())),
        return_type=plgpu.ShapeDtypeStruct(values.shape, jnp.float32, layout),
    )
    def measure_distances(ctx: Any, values: mgpu.FragmentedArray, shift: Any) -> Any:
        del ctx
        return _distances(values, shift.registers.item())

    measure: Any = measure_distances  # the decorator supplies the context
    return measure(values, jnp.int32(shift))


def _distances(values: mgpu.FragmentedArray, shift: ir.Value) -> Any:
    """Emits the distances of one lane."""
    i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
    lane_row, lane_column = _first_element(values)
    start = arith.addi(arith.subi(lane_column, lane_row), shift)
    places = _register_places(values)
    by_row = {
        row: arith.sitofp(f32, arith.subi(start, arith.constant(i32, row)))
        for row in {row for row, _ in places.values()}
    }
    found = np.empty_like(values.registers)
    for at, (row, column) in places.items():
        register = values.registers[at]
        for i in range(ir.VectorType(register.type).shape[0]):
            here = arith.constant(f32, ir.FloatAttr.get(f32, float(column + i)))
            value = math.absf(arith.addf(by_row[row], here))
            where = {"dynamic_position": [], "static_position": [i]}
            register = vector.insert(value, register, **where)
        found[at] = register
    return mgpu.FragmentedArray(
        _registers=found, _layout=values.layout, _is_signed=values.is_signed
    )


def scale_and_add_row(values: jax.Array, factor: float, row: Ref) -> jax.Array:
    """``values * factor + row``, the row read from shared memory where it is needed.

    As an array the row would take a register for every fourth column, for as long as
    the compiler likes to load it ahead.

    Args:
        values: fp32 [64, columns], in the layout of wgmma accumulators.
        factor: of all values.
        row: fp32 [columns] of shared memory.
    """
    layout = plgpu.Layout.WGMMA

    @plgpu.inline_mgpu(
        arg_types=(layout, plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct(values.shape, jnp.float32, layout),
    )
    def add_shared_row(ctx: Any, values: mgpu.FragmentedArray, row: Any) -> Any:
        del ctx
        return _scale_and_add_row(values, factor, row)

    add: Any = add_shared_row  # the decorator supplies the context
    return add(values, row)


def _scale_and_add_row(
    values: mgpu.FragmentedArray, factor: float, row: ir.Value
) -> Any:
    """Emits the loads and additions of one lane."""
    i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
    pair = ir.VectorType.get((2,), f32)
    factors = arith.constant(
        pair, ir.DenseElementsAttr.get_splat(pair, ir.FloatAttr.get(f32, factor))
    )
    _, lane_column = _first_element(values)
    address = llvm.ptrtoint(i32, mgpu.utils.memref_ptr(row))
    address = arith.addi(address, arith.muli(lane_column, arith.constant(i32, 4)))
    places = _register_places(values)
    results = np.empty_like(values.registers)
    for column in sorted({column for _, column in places.values()}):
        loaded = llvm.inline_asm(
            ir.Type.parse("!llvm.struct<(f32, f32)>"),
            [address],
            f"ld.shared.v2.f32 {{$0, $1}}, [$2+{4 * column}];",
            "=f,=f,r",
            has_side_effects=True,  # stays where it is
        )
        numbers = [llvm.extractvalue(f32, loaded, [i]) for i in range(2)]
        numbers = vector.from_elements(pair, numbers)
        for at, (_, register_column) in places.items():
            if register_column == column:
                results[at] = math.fma(values.registers[at], factors, numbers)
    return mgpu.FragmentedArray(
        _registers=results, _layout=values.layout, _is_signed=values.is_signed
    )


def in_register_order(values: jax.Array) -> jax.Array:
    """Accumulators in the order in which lanes hold them, 16 bytes of each in turn.

    Stored in this order, a tile takes a quarter of the instructions that rows take, and
    no two lanes want the same bank. For tiles that are read back in the same order.

    Args:
        values: fp32 [64, 64], in the layout of wgmma accumulators.

    Returns:
        fp32 [16, 256], which `load_in_register_order` reads.
    """

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA,),
        return_type=plgpu.ShapeDtypeStruct(FLAT, jnp.float32, _REGISTER_ORDER),
    )
    def flatten_registers(ctx: Any, values: mgpu.FragmentedArray) -> Any:
        del ctx
        return _with_layout(values, _REGISTER_ORDER.to_mgpu(), FLAT)

    flatten: Any = flatten_registers  # the decorator supplies the context
    return flatten(values)


def load_in_register_order(ref: Ref) -> jax.Array:
    """Load what was stored `in_register_order`.

    Args:
        ref: fp32 [16, 256] of global memory.

    Returns:
        fp32 [64, 64], in the layout of wgmma accumulators.
    """
    values = plgpu.load(ref, layout=_REGISTER_ORDER, optimized=False)

    @plgpu.inline_mgpu(
        arg_types=(_REGISTER_ORDER,),
        return_type=plgpu.ShapeDtypeStruct((64, 64), jnp.float32, plgpu.Layout.WGMMA),
    )
    def unflatten_registers(ctx: Any, values: mgpu.FragmentedArray) -> Any:
        del ctx
        return _with_layout(values, plgpu.Layout.WGMMA.to_mgpu(), (64, 64))

    unflatten: Any = unflatten_registers  # the decorator supplies the context
    return unflatten(values)


def _with_layout(
    values: mgpu.FragmentedArray, layout: Any, shape: tuple[int, ...]
) -> Any:
    """The same fp32 numbers of each lane, as registers of another layout."""
    f32 = ir.F32Type.get()
    numbers = [
        vector.extract(register, dynamic_position=[], static_position=[i])
        for register in values.registers.flat
        for i in range(ir.VectorType(register.type).shape[0])
    ]
    registers = np.empty(layout.registers_shape(shape), object)
    width = len(numbers) // registers.size
    each = ir.VectorType.get((width,), f32)
    for i, at in enumerate(np.ndindex(registers.shape)):
        mine = numbers[i * width : (i + 1) * width]
        registers[at] = vector.from_elements(each, mine)
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)


def store_rows(
    ref: Ref,
    values: jax.Array,
    first: Scalar,
    stop: Scalar,
    column: Scalar = None,
) -> None:
    """Writes rows `first` to `stop` of a tile that lies in registers.

    A tile of a packed sequence may start at any row and end before the tile does: the
    copy engine stores whole boxes, so each lane stores its own elements, predicated.
    Each writes 16 bytes at a time.

    Args:
        ref: [64, columns] or [64] of global memory; other rows are not touched and may
            lie outside the array.
        values: the tile, in the layout of wgmma accumulators (or a column of it).
        first: int32, the first row to write.
        stop: int32, the row after the last.
        column: int32, where the tile begins in `ref`; None is 0. Columns of the tile
            that `ref` lacks are not written; it has a multiple of 16 bytes of them.
    """
    layout = plgpu.Layout.WGMMA
    if values.ndim == 1:
        layout = layout.reduce(1)

    scalar = plgpu.Layout.WG_SPLAT(())
    numbers = [first, stop]
    if values.ndim == 2 and (column is not None or ref.shape[1] < values.shape[1]):
        numbers.append(0 if column is None else column)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout, *[scalar] * len(numbers)))
    def store_some_rows(
        ctx: Any, ref: Any, values: mgpu.FragmentedArray, *numbers: Any
    ) -> None:
        del ctx
        _store(ref, values, *(number.registers.item() for number in numbers))

    store: Any = store_some_rows  # the decorator supplies the context
    store(ref, values, *(jnp.int32(number) for number in numbers))


def _store(
    ref: ir.Value,
    values: mgpu.FragmentedArray,
    first: ir.Value,
    stop: ir.Value,
    column: ir.Value | None = None,
) -> None:
    """Emits the stores of one lane."""
    i32, index = ir.IntegerType.get_signless(32), ir.IndexType.get()
    strides, _ = ir.MemRefType(ref.type).get_strides_and_offset()
    strides = [stride * mgpu.utils.bytewidth(values.mlir_dtype) for stride in strides]
    indices = np.ndindex(values.registers.shape)
    words = {at: llvm.bitcast(i32, values.registers[at]) for at in indices}
    if len(values.shape) == 1:
        places = list(values.layout.thread_idxs(values.shape))
        pieces = [(place, [w]) for place, w in zip(places, words.values(), strict=True)]
    else:
        pieces = _whole_pieces(values, words)
    for place, piece in pieces:
        inside = _is_between(arith.index_cast(i32, place[0]), first, stop)
        if column is not None:
            width = mgpu.utils.c(ir.MemRefType(ref.type).shape[1], i32)
            here = arith.addi(arith.index_cast(i32, place[1]), column)
            is_there = arith.cmpi(arith.CmpIPredicate.slt, here, width)
            inside = arith.andi(inside, is_there)
            place = place[0], arith.index_cast(index, here)
        address = _address(ref, place, strides)
        names = ", ".join(f"${2 + i}" for i in range(len(piece)))
        vector_of = f".v{len(piece)}" if len(piece) > 1 else ""
        llvm.inline_asm(
            ir.Type.parse("!llvm.void"),
            [inside, address, *piece],
            f"@$0 st.global{vector_of}.b32 [$1], {{{names}}};",
            "b,l" + ",r" * len(piece),
            has_side_effects=True,
        )


def load_rows(ref: Ref, first: Scalar, stop: Scalar, otherwise: float) -> jax.Array:
    """Reads rows `first` to `stop` of a column of a tile, each lane what it needs.

    Args:
        ref: fp32 [64] of global memory; other rows are not read and may lie outside the
            array.
        first: int32, the first row to read.
        stop: int32, the row after the last.
        otherwise: what the other rows are.

    Returns:
        fp32 [64], in the layout of a column of wgmma accumulators.
    """
    layout, scalar = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), scalar, scalar),
        return_type=plgpu.ShapeDtypeStruct(ref.shape, jnp.float32, layout),
    )
    def load_some_rows(ctx: Any, ref: Any, first: Any, stop: Any) -> Any:
        del ctx
        first, stop = first.registers.item(), stop.registers.item()
        return _load(ref, layout.to_mgpu(), first, stop, otherwise)

    load: Any = load_some_rows  # the decorator supplies the context
    return load(ref, jnp.int32(first), jnp.int32(stop))


def _load(
    ref: ir.Value, layout: Any, first: ir.Value, stop: ir.Value, otherwise: float
) -> Any:
    """Emits the loads of one lane."""
    f32, i32 = ir.F32Type.get(), ir.IntegerType.get_signless(32)
    shape = tuple(ir.MemRefType(ref.type).shape)
    strides, _ = ir.MemRefType(ref.type).get_strides_and_offset()
    registers = np.empty(layout.registers_shape(shape), object)
    places = layout.thread_idxs(shape)
    for at, place in zip(np.ndindex(registers.shape), places, strict=True):
        loaded = llvm.inline_asm(
            f32,
            [
                _is_between(arith.index_cast(i32, place[0]), first, stop),
                _address(ref, place, [4 * strides[0]]),
                arith.constant(f32, ir.FloatAttr.get(f32, otherwise)),
            ],
            "{ .reg .b32 t; mov.b32 t, $3; @$1 ld.global.b32 t, [$2]; mov.b32 $0, t; }",
            "=f,b,l,f",
            has_side_effects=True,  # stays where it is
        )
        registers[at] = vector.broadcast(ir.VectorType.get((1,), f32), loaded)
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)


def _is_between(row: ir.Value, first: ir.Value, stop: ir.Value) -> ir.Value:
    return arith.andi(
        arith.cmpi(arith.CmpIPredicate.sge, row, first),
        arith.cmpi(arith.CmpIPredicate.slt, row, stop),
    )


def _address(ref: ir.Value, place: Sequence[ir.Value], strides: list[int]) -> ir.Value:
    """Compute the address of an element of a ref; strides are in bytes."""
    i64 = ir.IntegerType.get_signless(64)
    address = llvm.ptrtoint(i64, mgpu.utils.memref_ptr(ref))
    for index, stride in zip(place, strides, strict=True):
        offset = arith.muli(arith.index_cast(i64, index), mgpu.utils.c(stride, i64))
        address = arith.addi(address, offset)
    return address


def store_columns(ref: Ref, values: jax.Array, first: Scalar) -> None:
    """Writes some columns of a tile of shared memory that is an operand of wgmma.

    A slice of such a tile must be of whole lines: two warpgroups that have the columns
    of one line write their own part of it this way.

    Args:
        ref: 16-bit [64, 64] of shared memory, in tiles of 8 swizzled lines.
        values: [64, columns], in the layout of wgmma accumulators.
        first: int32, the first column, a multiple of 8.
    """
    scalar, transforms = plgpu.Layout.WG_SPLAT(()), smem_transforms(64, values.dtype)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(transforms), plgpu.Layout.WGMMA, scalar)
    )
    def store_some_columns(
        ctx: Any, ref: Any, values: mgpu.FragmentedArray, first: Any
    ) -> None:
        del ctx
        _store_columns(ref, values, first.registers.item())

    store: Any = store_some_columns  # the decorator supplies the context
    store(ref, values, jnp.int32(first))


def _store_columns(
    ref: ir.Value, values: mgpu.FragmentedArray, first: ir.Value
) -> None:
    """Emits the stores of one lane, of two values each."""
    i32 = ir.IntegerType.get_signless(32)
    c = functools.partial(mgpu.utils.c, ty=i32)
    lane_row, lane_column = _first_element(values)
    line = llvm.ptrtoint(i32, mgpu.utils.memref_ptr(ref))
    line = arith.addi(line, arith.muli(lane_row, c(128)))
    line = arith.addi(line, arith.muli(lane_column, c(2)))
    # The eight pieces of 16 bytes of a line are permuted by the number of the line.
    swizzle = arith.muli(arith.remui(lane_row, c(8)), c(16))
    swizzle = arith.xori(swizzle, arith.muli(first, c(2)))
    for at, (row, column) in _register_places(values).items():
        llvm.inline_asm(
            ir.Type.parse("!llvm.void"),
            [
                arith.addi(line, arith.xori(swizzle, c(2 * column))),
                llvm.bitcast(i32, values.registers[at]),
            ],
            f"st.shared.b32 [$0+{128 * row}], $1;",
            "r,r",
            has_side_effects=True,
        )


def _whole_pieces(
    values: mgpu.FragmentedArray, words: dict[tuple[int, ...], ir.Value]
) -> list[tuple[tuple[ir.Value, ir.Value], list[ir.Value]]]:
    """16-bit values in pieces of 16 bytes, with the row and the column of each.

    A lane holds 4 bytes out of every 16 of its rows, the next lane the next 4. Four
    lanes transpose four such words of each, so that a lane has all 16 bytes of one.
    """
    i32, index = ir.IntegerType.get_signless(32), ir.IndexType.get()
    lane_row, lane_column = _first_element(values)
    lane = arith.remui(mgpu.utils.thread_idx(), mgpu.utils.c(4, i32))
    lane_column = arith.muli(lane, mgpu.utils.c(8, i32))
    by_place = {place: words[at] for at, place in _register_places(values).items()}
    pieces = []
    for row, column in by_place:
        if column % 32:
            continue
        four = [by_place[row, column + 8 * i] for i in range(4)]
        for bit in (1, 2):
            odd = arith.cmpi(
                arith.CmpIPredicate.ne,
                arith.andi(lane, mgpu.utils.c(bit, i32)),
                mgpu.utils.c(0, i32),
            )
            for low in (i for i in range(4) if not i & bit):
                high = low + bit
                received = llvm.inline_asm(
                    i32,
                    [arith.select(odd, four[low], four[high])],
                    f"shfl.sync.bfly.b32 $0, $1, {bit}, 31, 0xffffffff;",
                    "=r,r",
                    has_side_effects=True,
                )
                four[low] = arith.select(odd, received, four[low])
                four[high] = arith.select(odd, four[high], received)
        place = (
            arith.index_cast(index, arith.addi(at, mgpu.utils.c(offset, i32)))
            for at, offset in ((lane_row, row), (lane_column, column))
        )
        pieces.append((tuple(place), four))
    return pieces


def any_of_warp(column: jax.Array) -> jax.Array:
    """Return whether something holds for any row of this warp; other warps may differ.

    For branches without barriers and without matmuls of the tensor cores, which a
    warp may take or not by itself.

    Args:
        column: bool [64], in the layout of a column of wgmma accumulators.

    Returns:
        bool [].
    """
    scalar = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA.reduce(1),),
        return_type=plgpu.ShapeDtypeStruct((), jnp.bool_, scalar),
    )
    def vote_of_warp(ctx: Any, column: Any) -> Any:
        del ctx
        mine = [
            vector.extract(register, dynamic_position=[], static_position=[0])
            for register in column.registers.flat
        ]
        vote = llvm.inline_asm(
            ir.IntegerType.get_signless(1),
            [functools.reduce(arith.ori, mine)],
            "vote.sync.any.pred $0, $1, 0xffffffff;",
            "=b,b",
            has_side_effects=True,  # all lanes of the warp meet here
        )
        return mgpu.FragmentedArray.splat(vote, (), is_signed=False)

    vote: Any = vote_of_warp  # the decorator supplies the context
    return vote(column)
