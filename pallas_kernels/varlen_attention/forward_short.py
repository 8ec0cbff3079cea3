"""Hopper forward kernel for short sequences: a block is one warpgroup with one tile.

Where a tile has a handful of steps, what surrounds them costs more than they do. So
nothing does: no table is computed ahead (each block finds its tile in ``cu_seqlens``),
no other warpgroup is told what to do, nobody waits for a turn. The first keys and
values are all asked for before the first matmul, and what hides latency is that four
blocks share a multiprocessor.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels.mosaic.aliases import Ref, Scalar
from pallas_kernels.mosaic.copies import chunked, copy_rows
from pallas_kernels.mosaic.manual_axes import constant
from pallas_kernels.mosaic.tile_scheduler import find_tile
from pallas_kernels.varlen_attention.config import ROWS, ForwardBlocks, Problem
from pallas_kernels.varlen_attention.forward import (
    forward_outputs,
    store_outputs,
    tile_fields,
)
from pallas_kernels.varlen_attention.inputs import Inputs, Scores
from pallas_kernels.varlen_attention.mainloop import ForwardMainloop, step_start
from pallas_kernels.varlen_attention.scheduler import Sequences, most_tiles
from pallas_kernels.varlen_attention.segments import cut_cu_seqlens


def forward_short(
    problem: Problem,
    scores: Scores,
    blocks: ForwardBlocks,
    x: Inputs,
    with_rest: bool,
) -> tuple[Array, ...]:
    """Runs the kernel; `forward_outputs`."""
    extra, structure = jax.tree.flatten((x.sinks, x.slopes))
    stages, chunks = blocks.stages, problem.chunks
    ring = chunked((stages,), blocks.block_k, chunks, problem.dtype)
    slots = most_tiles(1, problem.queries, problem.max_seqs, ROWS)
    bounds = (constant(cu, x.q) for cu in (x.cu_q, x.packing_of_keys))
    return plgpu.kernel(
        functools.partial(_body, problem, scores, blocks, slots, structure, len(extra)),
        out_type=forward_outputs(x, with_rest),
        scratch_types={
            "q_smem": chunked((1, 1), ROWS, chunks, problem.dtype),
            "k_smem": ring,
            "v_smem": ring,
            "q_full": plgpu.Barrier(num_arrivals=chunks, num_barriers=1),
            "k_full": plgpu.Barrier(num_arrivals=chunks, num_barriers=stages),
            "v_full": plgpu.Barrier(num_arrivals=chunks, num_barriers=stages),
        },
        grid=(problem.rows * slots * problem.heads,),
        grid_names=("block",),
        kernel_name="varlen_attention",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, reduction_scratch_bytes=0
        ),
    )(*bounds, x.q, x.k, x.v, *extra)


def _body(
    problem: Problem,
    scores: Scores,
    blocks: ForwardBlocks,
    slots: int,
    structure: Any,
    num_extra: int,
    cu_q: Ref,
    cu_k: Ref,
    q: Ref,
    k: Ref,
    v: Ref,
    *refs: Ref,
    **scratch: Ref,
) -> None:
    """The kernel: one tile. Neighbors are the heads of the same queries."""
    sinks, slopes = structure.unflatten(refs[:num_extra])
    block, heads = lax.axis_index("block"), jnp.int32(problem.heads)
    slot, head = lax.div(block, heads), lax.rem(block, heads)
    row, slot = lax.div(slot, jnp.int32(slots)), lax.rem(slot, jnp.int32(slots))
    sequence, index = find_tile(cu_q.at[row], slot, ROWS, problem.queries)

    @pl.when(sequence >= 0)
    def _() -> None:
        seq = sequence_of(problem, cu_q, cu_k, row, sequence)
        tile = tile_fields(scores, blocks, seq, index)
        q0 = tile["q0"]
        sink = None if sinks is None else sinks[row, head]
        slope = None if slopes is None else slopes[row, head]
        alone = _Alone(problem, scores, blocks, tile, 0, sink, slope, scratch)
        alone.keys_of(k, v, lax.div(head, jnp.int32(problem.groups)))
        copy_rows(q, row, q0, head, scratch["q_smem"][1].at[0, 0], scratch["q_full"])

        def begin(i: Scalar, _: None) -> None:
            alone.load("k", i)
            alone.load("v", i)

        lax.fori_loop(0, jnp.minimum(tile["steps"], blocks.stages), begin, None)
        here = row, pl.ds(q0, ROWS), head
        store_outputs(alone.run(), refs[num_extra:], here, tile["rows"])


def sequence_of(
    problem: Problem, cu_q: Ref, cu_k: Ref, row: Scalar, number: Scalar
) -> Sequences:
    """One sequence of a row; the last one is what the others leave of it."""
    last = problem.max_seqs
    real = number < last

    def of(cu: Ref, tokens: int) -> tuple[Any, ...]:
        following = jnp.where(real, cu[row, jnp.minimum(number + 1, last)], tokens)
        bounds = cu[row, number], following, cu[row, last]
        return tuple(cut_cu_seqlens(x, tokens) for x in bounds)

    q_start, q_end, q_total = of(cu_q, problem.queries)
    k_start, k_end, k_total = of(cu_k, problem.keys)
    return Sequences(
        row=row,
        q_start=q_start,
        q_end=q_end,
        k_start=k_start,
        k_end=k_end,
        q_total=q_total,
        k_total=k_total,
        real=real.astype(jnp.int32),
    )


class _Alone(ForwardMainloop):
    """A warpgroup that copies its keys and values itself."""

    def keys_of(self, k: Ref, v: Ref, head: Scalar) -> None:
        """Says what to copy."""
        self.sources, self.kv_head = {"k": k, "v": v}, head

    def load(self, name: str, step: Scalar) -> None:
        """Asks for the keys or values of a step."""
        stage, start = self.stage(step), step_start(self.blocks, self.tile, step)
        smem = self.scratch[f"{name}_smem"][1].at[stage]
        full = self.scratch[f"{name}_full"].at[stage]
        source = self.sources[name]
        copy_rows(source, self.tile["row"], start, self.kv_head, smem, full)

    def release(self, name: str, step: Scalar) -> None:
        """Fills the stage of a step again."""
        following = step + self.blocks.stages
        pl.when(following < self.tile["steps"])(lambda: self.load(name, following))

    def release_queries(self) -> None:
        """Do nothing: no tile follows."""
