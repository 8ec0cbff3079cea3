"""Tile-sparse weights in the decoder layer's launch: their activations are gathered.

A tile of the kernel, 4 groups of 64 features, then belongs to two tiles of the weight,
each with rows of its own: a stage multiplies two tiles of activations, and which
warpgroup takes which says `config.Stage.halves_apart`. Rows of a few tokens are read
from global memory, number by number, into registers and written where a copy would have
put them. The kept rows rise, so that what 32 threads read of a token lies in few lines,
and one request reads no more than it has; feature-major activations would read 8
requests at least.

Several steps are read at a time: memory answers once for all.
"""

import dataclasses
from collections.abc import Mapping
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
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.decode_layer.config import (
    GROUP,
    UNIT,
    Piece,
    Stage,
    quotient,
    remainder,
)
from pallas_kernels.mosaic import smem_transforms
from pallas_kernels.mosaic.aliases import Ref, Scalar
from pallas_kernels.mosaic.pipeline import next_slot


_THREADS = 128
_LINE = 128
"""Bytes of 64 input features of a token."""
_NUMBERS = 64
"""Numbers that a thread may hold on their way."""
_MOST_STEPS = 8


def depth(refs: Mapping[str, Ref], stage: Stage, column: Scalar) -> Scalar:
    """Tiles of a column: as many as the fuller one of its two tiles needs.

    Values of the other one are zero there.
    """
    counts = refs[f"{stage.weight}_counts"]
    first, second = stage.sparse_tiles(column)
    most = jnp.maximum(counts[first], counts[second])
    return quotient(most + (stage.tile_k - 1), stage.tile_k)


def cut_to(piece: Piece, depth: Scalar) -> Piece:
    """A piece of a column that has no more than so many tiles."""
    count = lax.div(depth - piece.first + piece.step - 1, jnp.int32(piece.step))
    return dataclasses.replace(piece, count=count)


def tile_of(rows: Any, group: Scalar) -> tuple[Any, ...]:
    """Where some rows of a group of 64 features lie among the values [T,P,G]."""
    return (
        quotient(group, UNIT),
        rows,
        pl.ds(pl.multiple_of(remainder(group, UNIT) * GROUP, GROUP), GROUP),
    )


class Gather:
    """Gathers the activations of a stage.

    When it is made it reads the first indices, which depend on nothing.
    """

    def __init__(self, block: Any, stage: Stage) -> None:
        self.block, self.stage = block, stage
        self.rows = stage.rows
        self.steps = max(1, min(_MOST_STEPS, _NUMBERS // block.problem.m))
        self.kept = block.refs[f"{stage.weight}_rows"]
        self.first = self.indices(stage.piece(block.worker, 0), jnp.int32(0))

    def indices(self, piece: Piece, begin: Scalar) -> tuple[jax.Array, ...]:
        """The indices of some steps of a piece, past its end any of the room."""
        _, room = self.kept.shape
        at = [tile * room for tile in self.stage.sparse_tiles(piece.column)]
        found = []
        for n in range(self.steps):
            step = jnp.minimum(piece.k(begin + n), self.stage.depth - 1) * GROUP
            found.append(load_kept(self.kept, at[0] + step, at[1] + step))
        return tuple(found)

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

        def load(piece: Piece, carry: Any) -> Any:
            def some(i: Scalar, carry: Any) -> Any:
                slot, indices = carry
                begin = i * self.steps
                values = [gather_tokens(source, at, self.rows) for at in indices]
                indices = self.indices(piece, begin + self.steps)
                for n, value in enumerate(values):
                    slot = lax.cond(
                        begin + n < piece.count,
                        lambda slot, value=value: put(slot, value),
                        lambda slot: slot,
                        slot,
                    )
                return slot, indices

            slot, is_first = carry
            start = lax.cond(
                is_first == 1,
                lambda: self.first,
                lambda: self.indices(piece, jnp.int32(0)),
            )
            times = quotient(piece.count + (self.steps - 1), self.steps)
            slot, _ = lax.fori_loop(0, times, some, (slot, start))
            return slot, jnp.int32(0)

        slot, _ = self.block.for_each_piece(self.stage, load, (slot, jnp.int32(1)))
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


def load_kept(kept: Ref, first: Scalar, second: Scalar) -> jax.Array:
    """Reads which input features two tiles of a weight keep, 64 of each.

    Args:
        kept: int32 [T,P] in global memory.
        first: int32, where those of the first tile begin, counted over all.
        second: those of the second tile.

    Returns:
        int32 [128], one a thread.
    """

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), _SPLAT, _SPLAT),
        return_type=plgpu.ShapeDtypeStruct((_THREADS,), jnp.int32, layout=_OF_THREADS),
    )
    def load_kept_rows(_: Any, kept: Any, first: Any, second: Any) -> Any:
        i32 = ir.IntegerType.get_signless(32)
        thread = _thread()
        is_first = arith.cmpi(arith.CmpIPredicate.ult, thread, _i32(GROUP))
        begin = arith.select(is_first, first.registers.item(), second.registers.item())
        at = arith.addi(begin, arith.remui(thread, _i32(GROUP)))
        address = utils.getelementptr(utils.memref_ptr(kept), [at], i32)
        loaded = llvm.load(ir.VectorType.get((1,), i32), address, alignment=4)
        return mgpu.FragmentedArray(
            _registers=np.array([loaded], dtype=object),
            _layout=mgpu.WGStridedFragLayout((_THREADS,), 1),
            _is_signed=True,
        )

    call: Any = load_kept_rows  # without its context
    return call(kept, jnp.int32(first), jnp.int32(second))


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
