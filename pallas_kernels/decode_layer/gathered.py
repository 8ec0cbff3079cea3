"""Tile-sparse weights in the decoder layer's launch: what differs.

A tile of the kernel, 4 groups of 64 features, is then 64 kept rows of two tiles of the
weight, one for each warpgroup that multiplies. Each has rows of its own, so a stage
multiplies two tiles of activations. The copy engine cannot gather them on Hopper: a
warpgroup reads them from global memory into registers and writes them where a copy
would have. What a stage hands to the next is feature-major, so that a thread reads 8
requests at a time; the attention's output comes token by token. Several steps are read
at a time: memory answers once for all.

Sums of all blocks meet in memory. A feature is finished where it is in the natural
order, from the parts of whichever packed column is its own: epilogues know nothing of
tiles and pruned columns.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf, vector

from pallas_kernels.decode_layer.config import (
    GROUP,
    UNIT,
    WARPGROUPS,
    Piece,
    Stage,
    part_names,
    quotient,
)
from pallas_kernels.decode_layer.shares import Shares
from pallas_kernels.mosaic import smem_transforms
from pallas_kernels.mosaic.aliases import Ref, Scalar
from pallas_kernels.mosaic.pipeline import next_slot


_THREADS = 128
_LINE = 128
"""Bytes of 64 input features of a token."""
_REGISTERS = 64
"""Of a thread, for numbers on their way."""
_MOST_STEPS = 4


@dataclasses.dataclass(frozen=True)
class SparsePiece(Piece):
    """Some steps of a pair of tiles."""

    tiles: tuple[Any, ...]
    """One of each warpgroup."""


class Stretch:
    """What a block has of a tile-sparse weight, and where sums of its parts lie.

    When it is made it reads the first piece; see `shares` for the plan.
    """

    def __init__(self, refs: Mapping[str, Ref], stage: Stage, worker: Scalar) -> None:
        self.refs, self.stage, self.worker = refs, stage, worker
        self.plan = refs[f"{stage.weight}_plan"]
        sizes = stage.sparse_tiles, stage.n, stage.workers, stage.depth
        self.shares = Shares(*sizes)
        self.number, self.first, skip, taken, *tiles, self.begin, self.end = (
            self.plan[worker * 8 + i] for i in range(8)
        )
        self.first_piece = (skip, taken, *tiles)

    def for_each_piece(self, body: Callable[[Any, Any], Any], carry: Any) -> Any:
        """Loops over the pieces: ``body(piece, carry)`` returns the carry."""

        def one(index: Scalar, carry: Any) -> Any:
            numbers, carry = carry
            pair = self.first + index
            # Asked for while this piece is worked at.
            following = self.later_piece(jnp.minimum(pair + 1, self.shares.pairs - 1))
            return following, body(self.piece(pair, *numbers), carry)

        start = self.first_piece, carry
        return lax.fori_loop(0, self.number, one, start)[1]

    def piece(self, pair: Scalar, skip: Any, taken: Any, *tiles: Any) -> SparsePiece:
        """Some steps of a pair."""
        return SparsePiece(pair, pair + self.worker, skip, 1, taken, tiles)

    def later_piece(self, pair: Scalar) -> tuple[Scalar, ...]:
        """From which step of a pair on the stretch reaches how far, and its tiles."""
        at = self.shares.of_pair + pair * 4
        first, second, before, after = (self.plan[at + i] for i in range(4))
        skip = jnp.maximum(self.begin - before, 0)
        return skip, jnp.minimum(self.end, after) - before - skip, first, second

    def copy(self, piece: SparsePiece, step: Scalar, smem: Ref, barrier: Ref) -> None:
        """Starts the copies of a step of a piece; past the end of a tile of a part
        that has fewer steps are zeros.
        """
        names, begin = part_names(self.stage.weight, self.stage.kept), 0
        for name, part in zip(names, self.stage.kept, strict=True):
            end, source = begin + part.tiles, self.refs[name]
            for number, tile in enumerate(piece.tiles):

                def start(
                    tile: Scalar = tile - begin,
                    number: int = number,
                    source: Ref = source,
                    dense: bool = part.dense,
                ) -> None:
                    rows = pl.ds(step * GROUP, GROUP)
                    for j in range(UNIT):
                        at = rows, pl.ds(j * GROUP, GROUP)
                        if dense:
                            at = rows, pl.ds((tile * UNIT + j) * GROUP, GROUP)
                        else:
                            at = tile, *at
                        target = smem.at[number * UNIT + j]
                        plgpu.copy_gmem_to_smem(source.at[at], target, barrier)

                if len(names) == 1:
                    start()
                else:
                    pl.when((begin <= tile) & (tile < end))(start)
            begin = end

    def find_sums(self, group: Scalar) -> jax.Array:
        """Where the parts of 64 output features lie; see `load_places`."""
        first = self.shares.of_feature + group * (2 * GROUP)
        return load_places(self.plan, first)

    def load_sums(self, places: jax.Array, row: Scalar) -> jax.Array:
        """The sums of all parts for the features that `find_sums` was asked for."""
        eight, rows = quotient(row, 8), self.stage.item_rows
        return add_parts(self.refs["parts"], places, eight, rows=rows)


class Gather:
    """Gathers the activations of a stage.

    When it is made it reads the first indices, which depend on nothing.
    """

    def __init__(self, block: Any, stage: Stage) -> None:
        self.block, self.stage = block, stage
        self.rows = stage.rows
        # The attention's output comes as it is.
        self.by_tokens = stage.source == "attended"
        held = block.problem.m if self.by_tokens else self.rows // 2
        self.steps = max(1, min(_MOST_STEPS, _REGISTERS // held))
        self.kept = block.refs[f"{stage.weight}_rows"]
        self.stretch = block.stretches[stage.weight]
        self.first = self.indices(self.stretch.begin)

    def indices(self, begin: Scalar) -> tuple[jax.Array, ...]:
        """The indices of some steps, past the end of a tile any."""
        shares, found = self.stretch.shares, []
        for n in range(self.steps):
            step = jnp.minimum(begin + n, shares.most_steps - 1)
            at = shares.of_step + 2 * step
            found.append(load_kept(self.stretch.plan, self.kept, at))
        return tuple(found)

    def gather(self, source: Ref, indices: jax.Array) -> jax.Array:
        """Reads the activations of a step."""
        if self.by_tokens:
            return gather_tokens(source, indices, self.rows)
        return gather_features(source, indices)

    def stream(self, source: Ref, ring: Mapping[str, Ref], slot: Scalar) -> Scalar:
        """Fills the ring with the tiles of the stage, from the slot on.

        Returns:
            The slot after the last tile.
        """
        slots = ring["smem"].shape[0]

        def put(slot: Scalar, values: jax.Array) -> Scalar:
            plgpu.barrier_wait(ring["empty"].at[slot])
            store_gathered(ring["smem"].at[slot], values)
            plgpu.commit_smem()
            plgpu.barrier_arrive(ring["full"].at[slot])
            return next_slot(slot, slots)

        begin, end = self.stretch.begin, self.stretch.end

        def some(i: Scalar, carry: Any) -> Any:
            slot, indices = carry
            first = begin + i * self.steps
            values = [self.gather(source, at) for at in indices]
            indices = self.indices(first + self.steps)
            for n, value in enumerate(values):
                slot = lax.cond(
                    first + n < end,
                    lambda slot, value=value: put(slot, value),
                    lambda slot: slot,
                    slot,
                )
            return slot, indices

        times = quotient(end - begin + (self.steps - 1), self.steps)
        slot, _ = lax.fori_loop(0, times, some, (slot, self.first))
        return slot


# --- Instructions ---------------------------------------------------------------------


_OF_THREADS = plgpu.Layout.WG_STRIDED((_THREADS,), 1)
_SPLAT = plgpu.Layout.WG_SPLAT


def _held(rows: int) -> Any:
    """Layout of numbers of which each thread has those of one input feature."""
    return plgpu.Layout.WG_STRIDED((_THREADS * rows,), rows)


def _i32(value: int) -> Any:
    return utils.c(value, ir.IntegerType.get_signless(32))


def _thread() -> ir.Value:
    return arith.remui(utils.thread_idx(), _i32(_THREADS))


def load_kept(plan: Ref, kept: Ref, at: Scalar) -> jax.Array:
    """Reads which input features two tiles of a weight keep, 64 of each.

    Args:
        plan: int32 in global memory.
        kept: int32 in global memory; past its end the last 64 are read.
        at: int32, where `plan` says where those of each begin in `kept`.

    Returns:
        int32 [128], one a thread.
    """
    last = math.prod(kept.shape) - GROUP

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType(), _SPLAT),
        return_type=plgpu.ShapeDtypeStruct((_THREADS,), jnp.int32, layout=_OF_THREADS),
    )
    def load_kept_rows(_: Any, plan: Any, kept: Any, at: Any) -> Any:
        i32 = ir.IntegerType.get_signless(32)
        thread = _thread()

        def load(ref: Any, where: Any) -> Any:
            address = utils.getelementptr(utils.memref_ptr(ref), [where], i32)
            return llvm.load(i32, address, alignment=4)

        tile = arith.divui(thread, _i32(GROUP))
        begin = load(plan, arith.addi(at.registers.item(), tile))
        begin = arith.minsi(begin, _i32(last))
        found = load(kept, arith.addi(begin, arith.remui(thread, _i32(GROUP))))
        loaded = vector.from_elements(ir.VectorType.get((1,), i32), [found])
        return mgpu.FragmentedArray(
            _registers=np.array([loaded], dtype=object),
            _layout=mgpu.WGStridedFragLayout((_THREADS,), 1),
            _is_signed=True,
        )

    call: Any = load_kept_rows  # without its context
    return call(plan, kept, jnp.int32(at))


def gather_tokens(source: Ref, indices: jax.Array, rows: int) -> jax.Array:
    """Reads one input feature of all tokens in each thread.

    Args:
        source: [m,K] in bfloat16 in global memory; it may be written before, by others.
        indices: what `load_kept` returned.
        rows: tokens of a tile: at least m, and zeros from there on.

    Returns:
        bfloat16 [128 rows], those of a thread side by side.
    """
    m, k = source.shape

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), _OF_THREADS),
        return_type=plgpu.ShapeDtypeStruct(
            (_THREADS * rows,), jnp.bfloat16, layout=_held(rows)
        ),
    )
    def gather_kept(_: Any, source: Any, indices: Any) -> Any:
        bf16 = ir.BF16Type.get()
        index = vector.extract(indices.registers.item(), [], [0])
        first = utils.getelementptr(utils.memref_ptr(source), [index], bf16)
        zero = arith.constant(bf16, ir.FloatAttr.get(bf16, 0.0))
        numbers = [
            llvm.load(
                bf16, utils.getelementptr(first, [_i32(row * k)], bf16), alignment=2
            )
            for row in range(min(m, rows))
        ]
        numbers += [zero] * (rows - len(numbers))
        loaded = vector.from_elements(ir.VectorType.get((rows,), bf16), numbers)
        return mgpu.FragmentedArray(
            _registers=np.array([loaded], dtype=object),
            _layout=mgpu.WGStridedFragLayout((_THREADS * rows,), rows),
            _is_signed=None,
        )

    call: Any = gather_kept  # without its context
    return call(source, indices)


def gather_features(source: Ref, indices: jax.Array) -> jax.Array:
    """Reads what `gather_tokens` does of feature-major activations.

    Args:
        source: [K,rows] in bfloat16 in global memory, rows a multiple of 8.
        indices: what `load_kept` returned.

    Returns:
        bfloat16 [128 rows], those of a thread side by side.
    """
    _, rows = source.shape

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), _OF_THREADS),
        return_type=plgpu.ShapeDtypeStruct(
            (_THREADS * rows,), jnp.bfloat16, layout=_held(rows)
        ),
    )
    def gather_kept_features(_: Any, source: Any, indices: Any) -> Any:
        bf16 = ir.BF16Type.get()
        eight, whole = (ir.VectorType.get((n,), bf16) for n in (8, rows))
        index = vector.extract(indices.registers.item(), [], [0])
        first = arith.muli(index, _i32(rows))
        numbers = []
        for begin in range(0, rows, 8):
            at = arith.addi(first, _i32(begin))
            address = utils.getelementptr(utils.memref_ptr(source), [at], bf16)
            loaded = llvm.load(eight, address, alignment=16)
            numbers += [vector.extract(loaded, [], [i]) for i in range(8)]
        return mgpu.FragmentedArray(
            _registers=np.array([vector.from_elements(whole, numbers)], dtype=object),
            _layout=mgpu.WGStridedFragLayout((_THREADS * rows,), rows),
            _is_signed=None,
        )

    call: Any = gather_kept_features  # without its context
    return call(source, indices)


def store_gathered(smem: Ref, values: jax.Array) -> None:
    """Writes what `gather_tokens` read where tensor cores read it.

    Args:
        smem: [2,rows,64] in bfloat16, tiled and swizzled as `smem_transforms` says.
        values: as returned there.
    """
    _, rows, _ = smem.shape

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(smem_transforms(GROUP, jnp.bfloat16)), _held(rows))
    )
    def store_two_tiles(_: Any, smem: Any, values: Any) -> None:
        i8, thread = ir.IntegerType.get_signless(8), _thread()
        tile = arith.divui(thread, _i32(GROUP))
        feature = arith.remui(thread, _i32(GROUP))
        # Lines of 128 bytes are a token each, and their chunks of 16 bytes are permuted
        # by the lowest bits of its number.
        in_line = arith.muli(feature, _i32(2))
        begin = arith.muli(tile, _i32(rows * _LINE))
        target = utils.getelementptr(utils.memref_ptr(smem), [begin], i8)
        numbers = values.registers.item()
        for row in range(rows):
            at = arith.xori(in_line, _i32(row % 8 * 16))
            at = arith.addi(at, _i32(row * _LINE))
            llvm.store(
                vector.extract(numbers, [], [row]),
                utils.getelementptr(target, [at], i8),
                alignment=2,
            )

    call: Any = store_two_tiles  # without its context
    call(smem, values)


_LOADS = 8
"""Parts of eight tokens that a thread reads at a time."""


def load_places(plan: Ref, first: Scalar) -> jax.Array:
    """Reads what `Shares.of_feature` says of 64 features.

    Args:
        plan: int32 in global memory.
        first: int32, where it says it.

    Returns:
        int32 [512]: of the two features that a thread has in the layout of sums.
    """

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), _SPLAT),
        return_type=plgpu.ShapeDtypeStruct((4 * _THREADS,), jnp.int32, layout=_PLACES),
    )
    def load_part_places(_: Any, plan: Any, first: Any) -> Any:
        i32 = ir.IntegerType.get_signless(32)
        two, four = (ir.VectorType.get((n,), i32) for n in (2, 4))
        begin = arith.muli(_first_feature(), _i32(2))
        begin = arith.addi(first.registers.item(), begin)
        numbers = []
        for half in range(2):
            at = arith.addi(begin, _i32(16 * half))
            address = utils.getelementptr(utils.memref_ptr(plan), [at], i32)
            loaded = llvm.load(two, address, alignment=8)
            numbers += [vector.extract(loaded, [], [i]) for i in range(2)]
        return mgpu.FragmentedArray(
            _registers=np.array([vector.from_elements(four, numbers)], dtype=object),
            _layout=mgpu.WGStridedFragLayout((4 * _THREADS,), 4),
            _is_signed=True,
        )

    call: Any = load_part_places  # without its context
    return call(plan, jnp.int32(first))


_PLACES = plgpu.Layout.WG_STRIDED((4 * _THREADS,), 4)


def _first_feature() -> ir.Value:
    """The first of the two of 64 features that a thread has in the layout of sums.

    The other one is 8 further on.
    """
    thread = _thread()
    of_warp = arith.muli(arith.divui(thread, _i32(32)), _i32(16))
    lane = arith.remui(thread, _i32(32))
    return arith.addi(of_warp, arith.divui(lane, _i32(4)))


def add_parts(parts: Ref, places: jax.Array, eight: Scalar, *, rows: int) -> jax.Array:
    """Adds the parts of the sums of 64 features, in their order.

    Args:
        parts: fp32 [any,2,M/8,64,8] in global memory, pairs of them for each part.
        places: what `load_places` returned.
        eight: int32, from which eight tokens on.
        rows: tokens, a multiple of 8.

    Returns:
        fp32 [64,rows], in the layout of sums.
    """
    _, _, all_eights, _, _ = parts.shape
    eights = rows // 8
    group = all_eights * GROUP * 8  # numbers of a group of 64 features
    together = max(1, _LOADS // eights)
    shape = GROUP, rows

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), _PLACES, _SPLAT),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, plgpu.Layout.WGMMA),
    )
    def add_sparse_parts(_: Any, parts: Any, places: Any, eight: Any) -> Any:
        f32, signed = ir.F32Type.get(), arith.CmpIPredicate.slt
        pair = ir.VectorType.get((2,), f32)
        nothing = ir.FloatAttr.get(f32, 0.0)
        zero = arith.constant(pair, ir.DenseElementsAttr.get_splat(pair, nothing))
        token = arith.muli(arith.remui(_thread(), _i32(4)), _i32(2))
        token = arith.addi(token, arith.muli(eight.registers.item(), _i32(GROUP * 8)))
        source, begins, counts = utils.memref_ptr(parts), [], []
        for half in range(2):
            where, count = (
                vector.extract(places.registers.item(), [], [2 * half + i])
                for i in range(2)
            )
            place = arith.muli(arith.divui(where, _i32(GROUP)), _i32(group))
            line = arith.muli(arith.remui(where, _i32(GROUP)), _i32(8))
            begins.append(arith.addi(arith.addi(place, line), token))
            counts.append(count)
        most = arith.maxsi(*counts)
        loop = scf.ForOp(_i32(0), most, _i32(together), [zero] * (2 * eights))
        with ir.InsertionPoint(loop.body):
            sums, loaded = list(loop.inner_iter_args), []
            for n in range(together):
                number = arith.addi(loop.induction_variable, _i32(n))
                for half, (begin, count) in enumerate(zip(begins, counts, strict=True)):
                    is_there = arith.cmpi(signed, number, count)
                    part = arith.select(is_there, number, _i32(0))
                    part = arith.muli(part, _i32(WARPGROUPS * UNIT * group))
                    at = arith.addi(begin, part)
                    for n_eight in range(eights):
                        here = arith.addi(at, _i32(n_eight * GROUP * 8))
                        address = utils.getelementptr(source, [here], f32)
                        value = llvm.load(pair, address, alignment=8)
                        loaded.append((2 * n_eight + half, is_there, value))
            for place, is_there, value in loaded:
                value = arith.select(is_there, value, zero)
                sums[place] = arith.addf(sums[place], value)
            scf.yield_(sums)
        layout: Any = plgpu.Layout.WGMMA.to_mgpu()
        registers = np.empty(layout.registers_shape(shape), object)
        for at in np.ndindex(registers.shape):
            _, n_eight, _, _, half, *_ = at
            registers[at] = loop.results[2 * n_eight + half]
        return mgpu.FragmentedArray(
            _registers=registers, _layout=layout, _is_signed=None
        )

    call: Any = add_sparse_parts  # without its context
    return call(parts, places, eight)
