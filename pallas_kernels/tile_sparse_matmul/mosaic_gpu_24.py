"""Hopper's sparse tensor cores: 2:4 weights times gathered rows, by inline PTX.

``wgmma.mma_async.sp`` takes its left operand compressed, both operands from shared
memory and the metadata from registers: a word of each thread serves 64 features by 64
rows, as two selectors choose 32 of the rows. JAX 0.11.2 offers no such instruction, and
references to accumulators cannot be passed to inline PTX: the sums are arrays, operands
and results of each instruction, which ptxas keeps in the same registers.

In the tests numpy functions stand in for the inline functions (see
``tests/interpreter``).

Axes: M tokens, G features of a tile.
"""

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import mma_utils, utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm

from pallas_kernels.matmul.mosaic_gpu import Tiles
from pallas_kernels.mosaic import smem_bytes, smem_transforms
from pallas_kernels.mosaic.aliases import Ref, Scalar
from pallas_kernels.mosaic.pipeline import next_slot, previous_slot
from pallas_kernels.tile_sparse_matmul.format import STEP
from pallas_kernels.tile_sparse_matmul.format_24 import BLOCK


KEPT = STEP // 2
"""Values of a step that a column stores."""
# In registers while products are in flight; `Layout.WGMMA` would wait for them.
_SUMS = plgpu.Layout._WGMMA_ACC_32BIT


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles24(Tiles):
    """A cut whose left operand is compressed, with a ring of metadata."""

    @property
    def _ring(self) -> dict[str, tuple[tuple[int, int], jnp.dtype]]:
        dense = super()._ring
        return dense | {"x_smem": ((self.config.tile_m, KEPT), self.problem.dtype)}

    @property
    def _metadata_shape(self) -> tuple[int, int]:
        return self.config.tile_m // BLOCK, 128

    @property
    def smem_bytes(self) -> int:
        """Shared memory of one block, barriers included."""
        shape = (self.config.stages, *self._metadata_shape)
        return super().smem_bytes + smem_bytes(shape, jnp.int32)

    def scratch_types(self) -> dict[str, Any]:
        """Scratch of one block, as `Tiles.scratch_types`, and the metadata."""
        stages = self.config.stages
        return super().scratch_types() | {
            "metadata_smem": plgpu.SMEM((stages, *self._metadata_shape), jnp.int32),
            "full": plgpu.Barrier(num_arrivals=3, num_barriers=stages),
        }

    def metadata(
        self, scratch: Mapping[str, Ref], slot: Scalar, consumer: Scalar
    ) -> Ref:
        """The metadata of a stage that one consumer needs."""
        blocks = self.config.block[0] // BLOCK
        first = consumer * blocks if self.config.split == "m" else 0
        return scratch["metadata_smem"].at[slot, pl.ds(first, blocks)]


def load_weights(
    values: Ref,
    metadata: Ref,
    scratch: Mapping[str, Ref],
    tile: Scalar,
    k: Scalar,
    slot: Scalar,
    axes: tuple[str, ...] | None,
) -> None:
    """Starts the copies of one step of a tile.

    Args:
        values: [T,G,P/2] in global memory.
        metadata: [T,G/64,P/64,128] in global memory.
        scratch: what `Tiles24.scratch_types` allocated.
        tile: which tile.
        k: which step.
        slot: the stage of the ring.
        axes: the cluster that shares the copies.
    """
    full = scratch["full"].at[slot]
    step = pl.ds(pl.multiple_of(k * KEPT, KEPT), KEPT)
    for source, name in (
        (values.at[tile, :, step], "x_smem"),
        (metadata.at[tile, :, k], "metadata_smem"),
    ):
        target = scratch[name].at[slot]
        plgpu.copy_gmem_to_smem(source, target, full, collective_axes=axes)


def multiply_steps(
    tiles: Tiles24,
    scratch: Mapping[str, Ref],
    consumer: Scalar,
    first: Scalar,
    last: Scalar,
    slot: Scalar,
) -> tuple[jax.Array, Scalar]:
    """`pallas_kernels.tile_sparse_matmul.ring.multiply_steps` of compressed weights."""
    stages = tiles.config.stages
    full, empty = scratch["full"], scratch["empty"]

    def step(k: Scalar, carry: Any) -> Any:
        sums, words_before, slot = carry
        plgpu.barrier_wait(full.at[slot])
        w, x = tiles.operands(scratch, slot, consumer)
        words = _load_words(tiles.metadata(scratch, slot, consumer))
        sums = _multiply(sums, w, words, x)
        # One step stays in flight, the one before it has left its stage.
        plgpu.wgmma_wait(1)
        _keep(words_before)
        before = previous_slot(slot, 1, stages)
        pl.when(k > first)(lambda: plgpu.barrier_arrive(empty.at[before]))
        return sums, words, next_slot(slot, stages)

    # In twos: metadata of a step in flight and of the next one have registers each.
    odd = lax.rem(last - first, jnp.int32(2))

    def two_steps(i: jax.Array, carry: Any) -> Any:
        k = first + odd + 2 * i
        return step(k + 1, step(k, carry))

    block = tiles.config.block
    words = jnp.zeros((2 * block[0],), jnp.int32)
    words = plgpu.layout_cast(words, _words_layout(block[0] // BLOCK))
    carry = _zeros(block), words, slot
    carry = lax.fori_loop(first, first + odd, step, carry)
    pairs = lax.div(last - first, jnp.int32(2))
    sums, words, after = lax.fori_loop(0, pairs, two_steps, carry)
    plgpu.wgmma_wait(0)
    _keep(words)
    sums = _finish(sums)
    before = previous_slot(after, 1, stages)
    pl.when(last > first)(lambda: plgpu.barrier_arrive(empty.at[before]))
    return sums, after


def _words_layout(blocks: int) -> Any:
    """A register of each thread for each 64 features."""
    return plgpu.Layout.WG_STRIDED((128 * blocks,), vec_size=1)


def _load_words(metadata: Ref) -> jax.Array:
    """Each thread's words, [128 * blocks], of the metadata [blocks,128] of a step."""
    blocks = metadata.shape[0]

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),),
        return_type=plgpu.ShapeDtypeStruct(
            (128 * blocks,), jnp.int32, _words_layout(blocks)
        ),
    )
    def load_words_24(_ctx: Any, metadata: Any) -> Any:
        i32, i8 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(8)
        thread = arith.remui(utils.thread_idx(), utils.c(128, i32))
        at = arith.muli(thread, utils.c(4, i32))
        ptr = utils.getelementptr(utils.memref_ptr(metadata), [at], i8)
        words = np.empty((blocks,), object)
        for i in range(blocks):
            load = f"ld.shared.b32 $0, [$1+{512 * i}];"
            word = llvm.inline_asm(i32, [ptr], load, "=r,r", has_side_effects=True)
            words[i] = utils.bitcast(word, ir.VectorType.get((1,), i32))
        return mgpu.FragmentedArray(
            _registers=words, _layout=_words_layout(blocks).to_mgpu(), _is_signed=True
        )

    call: Any = load_words_24  # without its context
    return call(metadata)


def _keep(words: jax.Array) -> None:
    """Keeps the registers of metadata until here.

    The tensor cores read them until a wait. A use after it, which ptxas cannot leave
    out, keeps it from loading the next words into the same ones: no metadata are -1.
    """

    @plgpu.inline_mgpu(arg_types=(_words_layout(words.shape[0] // 128),))
    def keep_words_24(_ctx: Any, words: Any) -> None:
        for word in words.registers.flat:
            llvm.inline_asm(
                ir.Type.parse("!llvm.void"),
                [utils.bitcast(word, ir.IntegerType.get_signless(32))],
                "{ .reg .pred p; setp.eq.b32 p, $0, -1; @p st.shared.b32 [$0], $0; }",
                "r",
                has_side_effects=True,
            )

    call: Any = keep_words_24
    call(words)


def _zeros(shape: tuple[int, int]) -> jax.Array:
    @plgpu.inline_mgpu(return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, _SUMS))
    def start_sums_24(_ctx: Any) -> Any:
        f32 = ir.F32Type.get()
        zero = arith.constant(f32, ir.FloatAttr.get(f32, 0.0))
        array = mgpu.FragmentedArray.splat(zero, shape, _SUMS.to_mgpu())
        return mgpu.fragmented_array.optimization_barrier(array)

    call: Any = start_sums_24  # without its context
    return call()


def _finish(sums: jax.Array) -> jax.Array:
    """The sums after a wait, as other functions take them."""
    layout = plgpu.Layout.WGMMA

    @plgpu.inline_mgpu(
        arg_types=(_SUMS,),
        return_type=plgpu.ShapeDtypeStruct(sums.shape, jnp.float32, layout),
    )
    def finish_sums_24(_ctx: Any, sums: Any) -> Any:
        # Without it LLVM would read the sums before the wait.
        sums = mgpu.fragmented_array.optimization_barrier(sums)
        return sums.to_layout(layout.to_mgpu())

    call: Any = finish_sums_24
    return call(sums)


def _multiply(sums: jax.Array, w: Ref, words: jax.Array, x: Ref) -> jax.Array:
    """Starts the products of a step; the sums are valid after a wait.

    Args:
        sums: [G,M], fp32.
        w: [G,32] compressed weights in shared memory.
        words: what `_load_words` returned.
        x: [64,M] in shared memory.
    """
    rows, tokens = sums.shape
    blocks, dtype = rows // BLOCK, jnp.dtype(x.dtype)
    kind = {"bfloat16": "bf16", "float16": "f16"}[dtype.name]

    @plgpu.inline_mgpu(
        arg_types=(
            _SUMS,
            plgpu.RefType(smem_transforms(KEPT, dtype)),
            _words_layout(blocks),
            plgpu.RefType(smem_transforms(tokens, dtype)),
        ),
        return_type=plgpu.ShapeDtypeStruct((rows, tokens), jnp.float32, _SUMS),
    )
    def multiply_24(_ctx: Any, sums: Any, w: Any, words: Any, x: Any) -> Any:
        registers = sums.registers.copy()
        describe: Any = mma_utils.create_descriptor
        (b, (_, (b_stride,))), _, fastest = describe(
            x,
            swizzle=128,
            group_size=(STEP, tokens),
            logical_k_major=True,
            large_tile=(64, 64),
        )
        (a, (_, (a_stride,))), (m_stride, _), _ = describe(
            w, swizzle=64, group_size=(BLOCK, KEPT), logical_k_major=False
        )
        i32 = ir.IntegerType.get_signless(32)
        metadata = [utils.bitcast(word, i32) for word in words.registers.flat]
        nvvm.wgmma_fence_aligned()
        for half, i in itertools.product(range(2), range(blocks)):
            part = registers[i : i + 1]
            registers[i : i + 1] = np.array(
                _wgmma_24(
                    list(part.flat),
                    _advance(a, i * m_stride + half * a_stride),
                    # An instruction takes 32 rows, twice those of a dense one.
                    _advance(b, 2 * half * b_stride),
                    metadata[i],
                    selector=half,
                    transposed=fastest == mma_utils.Dim.MN,
                    kind=kind,
                ),
                dtype=object,
            ).reshape(part.shape)
        nvvm.wgmma_commit_group_sync_aligned()
        return mgpu.FragmentedArray(
            _registers=registers, _layout=sums.layout, _is_signed=None
        )

    call: Any = multiply_24
    return call(sums, w, words, x)


def _advance(descriptor: ir.Value, offset: int) -> ir.Value:
    """The descriptor of a matrix `offset` bytes further."""
    i64 = ir.IntegerType.get_signless(64)
    return arith.addi(descriptor, utils.c(offset >> 4, i64)) if offset else descriptor


def _wgmma_24(
    sums: list[ir.Value],
    a: ir.Value,
    b: ir.Value,
    metadata: ir.Value,
    *,
    selector: int,
    transposed: bool,
    kind: str,
) -> list[ir.Value]:
    """One instruction: 64 features by 32 rows, of which 16 are stored, by tokens."""
    count = len(sums)
    names = ",".join(f"${i}" for i in range(count))
    # The operands that are results come again, as inputs, before the others.
    a_name, b_name, word, use = (f"${2 * count + i}" for i in range(4))
    code = (
        f"{{ .reg .pred p; setp.ne.b32 p, {use}, 0;"
        f" wgmma.mma_async.sp.sync.aligned.m64n{2 * count}k32.f32.{kind}.{kind}"
        f" {{{names}}}, {a_name}, {b_name}, {word}, {selector}, p, 1, 1, 0,"
        f" {int(transposed)}; }}"
    )
    kinds = ["=f"] * count + [str(i) for i in range(count)] + ["l", "l", "r", "n"]
    one = utils.c(1, ir.IntegerType.get_signless(32))
    found = llvm.inline_asm(
        llvm.StructType.get_literal([sums[0].type] * count),
        [*sums, a, b, metadata, one],
        code,
        ",".join(kinds),
        asm_dialect=0,
        has_side_effects=True,
    )
    return [llvm.extractvalue(sum.type, found, [i]) for i, sum in enumerate(sums)]
