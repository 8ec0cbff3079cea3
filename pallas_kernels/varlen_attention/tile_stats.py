"""Hopper kernel of what the backward pass reads of a query: lse and delta, by tile.

Delta, the sum of ``dout * out`` over the columns of a head, takes one pass over memory,
and nothing else limits it: a block is one warpgroup with a tile of queries and a head,
whose three arrays the copy engine brings, and several share a multiprocessor.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.mosaic.aliases import Ref, Scalar
from pallas_kernels.mosaic.copies import chunked, copy_rows
from pallas_kernels.mosaic.lanes import load_rows, store_rows
from pallas_kernels.varlen_attention.config import ROWS, BackwardBlocks, Problem
from pallas_kernels.varlen_attention.mainloop import LOG2E


def tile_stats(
    problem: Problem,
    blocks: BackwardBlocks,
    q_table: Int[Array, "slots fields"],
    dout: Float[Array, "R T N H"],
    out: Float[Array, "R T N H"],
    rest: Float[Array, "R T N H"],
    lse: Float[Array, "R T N"],
) -> Float[Array, "N slots two block_q"]:
    """Lse, to base 2, and delta of each tile of queries, both negative.

    Of a query that is not the tile's or sees nothing, they are ``-inf`` and zero. Tiles
    to which nothing is added are not written.
    """
    slots = q_table.shape[0]
    chunks, block_q = problem.value_chunks, blocks.block_q
    arrays = chunked((3,), block_q, chunks, problem.dtype)
    return plgpu.kernel(
        functools.partial(_body, problem, blocks),
        out_type=jax.ShapeDtypeStruct((problem.heads, slots, 2, block_q), jnp.float32),
        scratch_types={"smem": arrays, "full": plgpu.Barrier(num_arrivals=3 * chunks)},
        grid=(slots * problem.heads,),
        grid_names=("block",),
        kernel_name="varlen_attention_tile_stats",
        compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=0),
    )(q_table, dout, out, rest, lse)


def _body(
    problem: Problem,
    blocks: BackwardBlocks,
    table: Ref,
    dout: Ref,
    out: Ref,
    rest: Ref,
    lse: Ref,
    stats: Ref,
    *,
    smem: Any,
    full: Ref,
) -> None:
    """The kernel: one tile. Neighbors are the heads of the same tile."""
    block, heads = lax.axis_index("block"), jnp.int32(problem.heads)
    slot, head = lax.div(block, heads), lax.rem(block, heads)
    row, base, first, stop, adders = (table[slot, i] for i in range(5))

    @pl.when(adders > 0)
    def _() -> None:
        for i, ref in enumerate((dout, out, rest)):
            copy_rows(ref, row, base, head, smem[1].at[i], full)
        plgpu.barrier_wait(full)
        for part in range(0, blocks.block_q, ROWS):
            rows = pl.ds(part, ROWS)
            logs = load_rows(
                lse.at[row, pl.ds(base + part, ROWS), head],
                first - part,
                stop - part,
                -jnp.inf,
            )
            # A loop: unrolled, it has registers for two blocks on a multiprocessor.
            sums = lax.fori_loop(
                0,
                problem.value_chunks,
                functools.partial(_add_chunk, smem[0].at[:, :, rows]),
                plgpu.layout_cast(jnp.zeros(ROWS), plgpu.Layout.WGMMA.reduce(1)),
            )
            seen = logs > -jnp.inf
            here = stats.at[head, slot]
            store_rows(
                here.at[0, rows], jnp.where(seen, logs * -LOG2E, -jnp.inf), 0, ROWS
            )
            store_rows(here.at[1, rows], jnp.where(seen, -sums, 0.0), 0, ROWS)


def _add_chunk(arrays: Ref, c: Scalar, sums: jax.Array) -> jax.Array:
    """Adds the products of a chunk of columns of 64 queries."""
    gradient, rounded, taken = (
        plgpu.load(arrays.at[i, c], layout=plgpu.Layout.WGMMA).astype(jnp.float32)
        for i in range(3)
    )
    return sums + jnp.sum(gradient * (rounded + taken), axis=1)
