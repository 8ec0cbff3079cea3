"""Tile schedulers: static orders of tiles, and a dynamic scheduler on the device.

With the dynamic scheduler blocks stay on their multiprocessor and take tiles by ticket
(`take_ticket`), so that whoever is done first takes the next one. The tile of a ticket
is a line of a table (`copy_line`) or found from the lengths of sequences (`find_tile`).
"""

import functools
import itertools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, math, memref

from pallas_kernels.mosaic.aliases import Ref, Scalar


def snake_order(
    index: jax.Array,
    tiles: tuple[int, int],
    minor: Literal["m", "n"],
    group: int,
) -> tuple[jax.Array, jax.Array]:
    """Position of the `index`-th output tile in an order that reuses the L2 cache.

    The grid of tiles is cut into bands of `group` along the minor dimension. A band is
    walked line by line, and every other band backwards, so that blocks that run at the
    same time share rows of one operand and columns of the other.

    Args:
        index: int32, ``0 <= index < tiles[0] * tiles[1]``.
        tiles: number of tiles along m and n.
        minor: dimension that is cut into bands.
        group: tiles across one band.

    Returns:
        Tile indices ``(m, n)``.

    Example:
        >>> import jax.numpy as jnp
        >>> [tuple(map(int, snake_order(jnp.int32(i), (2, 4), "n", 2)))
        ...  for i in range(8)]
        [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (1, 3), (0, 2), (0, 3)]
    """
    minor_size, major_size = tiles if minor == "m" else (tiles[1], tiles[0])
    group = min(group, minor_size)
    band = lax.div(index, jnp.int32(group * major_size))
    within = lax.rem(index, jnp.int32(group * major_size))
    # The last band may be narrower.
    width = jnp.minimum(jnp.int32(group), minor_size - band * group)
    line = lax.div(within, width)
    line = jnp.where(lax.rem(band, jnp.int32(2)) == 0, line, major_size - 1 - line)
    across = band * group + lax.rem(within, width)
    return (across, line) if minor == "m" else (line, across)


def decode_block(
    index: Scalar, slots: Scalar, kv_heads: int, copies: int
) -> tuple[Scalar, Scalar]:
    """The slot and the head of a piece of work.

    Slots, the expensive ones first, are the outer loop, but for groups of `kv_heads`
    heads at a time, which share the L2 cache.

    Args:
        index: int32, which piece.
        slots: tiles of a head.
        kv_heads: key/value heads of a group.
        copies: query heads of a key/value head that have blocks of their own.
    """
    width = jnp.int32(kv_heads * copies)
    group = lax.div(index, width * slots)
    within = lax.rem(index, width * slots)
    return lax.div(within, width), group * width + lax.rem(within, width)


def largest_divisor(number: int, most: int) -> int:
    """The largest divisor up to `most`; 1 where that is less."""
    return max(n for n in range(1, max(1, min(number, most)) + 1) if number % n == 0)


def read_number(ref: Ref) -> jax.Array:
    """A number of global memory, read where it is needed.

    Read as any other it would be read once, ahead of a loop, and take a register there.

    Args:
        ref: int32 [1].
    """

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),),
        return_type=plgpu.ShapeDtypeStruct((), jnp.int32, plgpu.Layout.WG_SPLAT(())),
    )
    def read_one_number(ctx: Any, ref: Any) -> Any:
        del ctx
        number = llvm.inline_asm(
            ir.IntegerType.get_signless(32),
            [mgpu.utils.memref_ptr(ref)],
            "ld.global.nc.b32 $0, [$1];",
            "=r,l",
            has_side_effects=True,  # stays where it is
        )
        return mgpu.FragmentedArray.splat(number, (), is_signed=True)

    read: Any = read_one_number  # the decorator supplies the context
    return read(ref)


def take_ticket(counter: Ref, mailbox: Ref) -> jax.Array:
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


def copy_line(source: Ref, target: Ref, last: Scalar) -> None:
    """Copies numbers from global to shared memory, one a lane, by a warpgroup.

    Args:
        source: int32 [n] of global memory, at most 128 numbers.
        target: int32 [n + 1] of shared memory.
        last: int32, goes behind them.
    """
    scalar = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), scalar))
    def copy_one_line(ctx: Any, source: Any, target: Any, last: Any) -> None:
        del ctx
        i32 = ir.IntegerType.get_signless(32)
        size = ir.MemRefType(source.type).shape[0]
        lane = arith.remui(mgpu.utils.thread_idx(), mgpu.utils.c(128, i32))
        addresses = [
            llvm.getelementptr(
                ptr.type, ptr, [lane], [-(2**31)], i32, llvm.GEPNoWrapFlags.none
            )
            for ptr in map(mgpu.utils.memref_ptr, (source, target))
        ]
        copies, ends = (
            arith.cmpi(predicate, lane, mgpu.utils.c(size, i32))
            for predicate in (arith.CmpIPredicate.ult, arith.CmpIPredicate.eq)
        )
        llvm.inline_asm(
            ir.Type.parse("!llvm.void"),
            [copies, ends, *addresses, last.registers.item()],
            "{ .reg .b32 t; @$0 ld.global.b32 t, [$2]; @$0 st.shared.b32 [$3], t;"
            " @$1 st.shared.b32 [$3], $4; }",
            "b,b,l,r,r",
            has_side_effects=True,
        )
        mgpu.utils.warpgroup_barrier()

    copy: Any = copy_one_line  # the decorator supplies the context
    copy(source, target, jnp.int32(last))


def find_tile(
    bounds: Ref, number: Scalar, block: int, tokens: int
) -> tuple[jax.Array, jax.Array]:
    """The sequence that holds a tile, and which tile of it, found by each warp.

    Each lane counts the tiles of some sequences in a row, finds out how many tiles come
    before them, and says so if the one asked for is among them. If it counted more than
    one sequence, those are searched in turn. Up to 31 sequences are in the order of
    falling length: the expensive tiles come first.

    Args:
        bounds: int32 [B + 1] of global memory, prefix sums of at most 1023 lengths.
            What they leave of the tokens counts as one more sequence.
        number: int32, which tile of all.
        block: rows of a tile.
        tokens: rows of the packed buffer.

    Returns:
        ``(sequence, index)``; -1 and anything past the last tile.
    """
    scalar = plgpu.Layout.WG_SPLAT(())
    integer = plgpu.ShapeDtypeStruct((), jnp.int32, scalar)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), scalar), return_type=(integer, integer)
    )
    def search_tile(ctx: Any, bounds: Any, number: Any) -> Any:
        del ctx
        found = _search_tile(bounds, number.registers.item(), block, tokens)
        return tuple(mgpu.FragmentedArray.splat(x, (), is_signed=True) for x in found)

    search: Any = search_tile  # the decorator supplies the context
    return search(bounds, jnp.int32(number))


def _search_tile(
    bounds: Any, number: ir.Value, block: int, tokens: int
) -> tuple[ir.Value, ir.Value]:
    """Emits the search."""
    i32 = ir.IntegerType.get_signless(32)
    c = functools.partial(mgpu.utils.c, ty=i32)
    lane = arith.remui(mgpu.utils.thread_idx(), c(32))
    sequences = ir.MemRefType(bounds.type).shape[0]

    def bound(at: ir.Value) -> ir.Value:
        """Return where a sequence starts; the tokens after the last count as one."""
        inside = arith.minui(at, c(sequences - 1))
        value = memref.load(bounds, [arith.index_cast(ir.IndexType.get(), inside)])
        past = arith.cmpi(arith.CmpIPredicate.uge, at, c(sequences))
        return arith.select(past, c(tokens), arith.minsi(value, c(tokens)))

    def count(first: ir.Value, size: int) -> ir.Value:
        """The tiles of some sequences."""
        starts = [bound(arith.addi(first, c(i))) for i in range(size + 1)]
        counts = [
            arith.divui(arith.addi(arith.subi(end, start), c(block - 1)), c(block))
            for start, end in itertools.pairwise(starts)
        ]
        return functools.reduce(arith.addi, counts)

    each = -(-sequences // 32)
    mine = arith.muli(lane, c(each))
    owner, number = _owner(number, count(mine, each), lane, -(-sequences // each))
    found = arith.cmpi(arith.CmpIPredicate.ult, owner, c(32))
    sequence = arith.muli(owner, c(each))
    if each > 1:
        mine = arith.addi(sequence, lane)
        owner, number = _owner(number, count(mine, 1), lane, each)
        sequence = arith.addi(sequence, owner)
    return arith.select(found, sequence, c(-1)), number


def _owner(
    number: ir.Value, count: ir.Value, lane: ir.Value, lanes: int
) -> tuple[ir.Value, ir.Value]:
    """The lane of a warp that has the element of a number, and its number in the lane.

    Lanes with the most elements come first.

    Args:
        number: which of all elements of the warp.
        count: how many elements this lane has.
        lane: this one.
        lanes: those past so many are not asked.

    Returns:
        ``(lane, number)``; lane 32 if there are not so many elements.
    """
    i32 = ir.IntegerType.get_signless(32)
    c = functools.partial(mgpu.utils.c, ty=i32)

    def take(value: ir.Value, source: ir.Value) -> ir.Value:
        return llvm.inline_asm(
            i32,
            [value, source],
            "shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;",
            "=r,r,r",
            has_side_effects=True,
        )

    asked = arith.cmpi(arith.CmpIPredicate.ult, lane, c(lanes))
    count = arith.select(asked, count, c(0))
    # Of lanes with as many elements the first one comes first.
    key = arith.addi(arith.muli(count, c(32)), arith.subi(c(31), lane))
    within = number
    for other in range(lanes):
        theirs = take(key, c(other))
        ahead = arith.cmpi(arith.CmpIPredicate.ugt, theirs, key)
        before = arith.select(ahead, arith.shrui(theirs, c(5)), c(0))
        within = arith.subi(within, before)
    votes = llvm.inline_asm(
        i32,
        [arith.cmpi(arith.CmpIPredicate.ult, within, count)],
        "vote.sync.ballot.b32 $0, $1, 0xffffffff;",
        "=r,b",
        has_side_effects=True,
    )
    owner = math.cttz(votes)
    return owner, take(within, owner)
