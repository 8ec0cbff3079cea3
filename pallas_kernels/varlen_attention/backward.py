"""Hopper backward kernel of variable-length attention.

One block computes the gradients of one tile of 128 keys, 64 at head dim 256, of one
sequence and key/value head; it loops over the queries that see them, for all query
heads of the group or for a part of them. With scores ``s``, weights
``p = exp(s - lse)`` and ``delta = dout . out - dlse``::

    dv = p^T dout      ds = p (dout v^T - delta)      dk = ds^T q      dq = ds k

Dk and dv stay in the registers of the two warpgroups for the whole loop (128 registers
of a thread at head dims 128 and 256); 64 queries a step is what fits beside them. The
warpgroups work half a step apart (`mainloop_backward.OwnKeys`).

**dq is summed over blocks**, in fp32 in global memory, which the copy engine adds to.
The order is fixed, and with it every bit: a counter for each tile of queries says how
many tiles of keys have added to it, and each waits for its turn. Blocks go over the
queries that see them from the first to the last, and the last tile of keys that a tile
of queries sees adds first. Under a causal mask that is the order in which blocks come
by when they start together, for every query head of a group; without a mask they follow
one another at the distance of one addition. A block waits only for blocks that come
before it in the grid, which the hardware starts first. One warp waits for turns, a step
ahead of another one that adds. Two passes, each with its own sums in registers, would
need no order but seven matmuls instead of five.

With ``deterministic=False`` only the first one of a tile of queries, which sets the sum
and not adds to it, has its turn; the others add in any order. Under a causal mask tiles
of keys then come from the first, which the most queries see, to the last, and go over
their queries from the last to the first: again the first one to come by sets the sum.

Queries are cut into tiles of their own buffer: a tile's dq, lse and delta lie in arrays
of ``[tile, row of the tile]``, aligned wherever its sequence starts. Queries that are
not the tile's have ``lse = inf``, which makes their weights zero.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.mosaic.aliases import Ref, Scalar
from pallas_kernels.mosaic.copies import CHUNK, chunked, smem_transforms
from pallas_kernels.mosaic.lanes import (
    FLAT,
    load_in_register_order,
    store_rows,
)
from pallas_kernels.mosaic.manual_axes import constant, unmarked
from pallas_kernels.mosaic.tile_scheduler import (
    decode_block,
    largest_divisor,
    read_number,
)
from pallas_kernels.varlen_attention.backward_producer import Producer, units
from pallas_kernels.varlen_attention.config import (
    BACKWARD_CONSUMERS,
    ROWS,
    BackwardBlocks,
    Problem,
)
from pallas_kernels.varlen_attention.inputs import Inputs, Scores
from pallas_kernels.varlen_attention.mainloop import LOG2E
from pallas_kernels.varlen_attention.mainloop_backward import (
    OwnKeys,
    SharedKeys,
    longest_first,
)
from pallas_kernels.varlen_attention.scheduler import (
    AnyArray,
    Sequences,
    Tiles,
    interval_of_keys,
    most_tiles,
    namespace,
    tile_sequences,
)


FIELDS = (
    "row", "k_base", "k_first", "k_stop", "index", "k_tiles", "first", "last",
    "full_first", "full_last", "offset", "q_start", "q_len", "reach", "q_tile",
    "q_total",
)  # fmt: skip
QUERY_FIELDS = "row", "base", "first", "stop", "adders"
# Registers of a thread of the producer and of a consumer.
_REGISTERS = (24, 240)
# Warps of the producer: one loads, one waits for turns, one adds to dq.
_LOADER, _POLLER, _ADDER = 0, 1, 2
# Heads side by side, at most: there may be far fewer sequences than `max_seqs`.
_TOGETHER = 8
# What of the L2 cache such heads may take, by trial.
_L2_BYTES = 40 * 2**20
# Parts of 64 rows and a head that a warpgroup of the last blocks turns into dq.
_UNITS = 4


def key_table(
    problem: Problem,
    scores: Scores,
    blocks: BackwardBlocks,
    seqs: Sequences,
    q_first: Int[AnyArray, " E"],
) -> Int[AnyArray, "slots fields"]:
    """The table of tiles of keys, one line for the block of each."""
    xp = namespace(seqs.k_start)
    block_q, block_k = blocks.block_q, blocks.block_k
    slots = most_tiles(problem.rows, problem.keys, problem.max_seqs, block_k)
    cost = (seqs.q_end - seqs.q_start) * seqs.real
    tiles = tile_sequences(seqs.k_start, seqs.k_end, cost, block_k, slots)
    seq = tiles.sequences(seqs)
    k_tiles = -(-(seq.k_end - seq.k_start) // block_k)
    index = tiles.index
    if not longest_first(scores):
        index = k_tiles - 1 - index  # a tile waits for those behind it
    k0 = seq.k_start + index * block_k
    k1 = xp.minimum(k0 + block_k, seq.k_end)
    # A tile that would read past the data is moved up; the rest of a row is not read.
    base = xp.where(seq.real == 1, xp.minimum(k0, seq.k_total - block_k), k0)
    left, right = scores.window
    offset = seq.k_end - seq.q_end
    row_first, row_last = seq.q_start, seq.q_end
    if right is not None:
        row_first = xp.maximum(row_first, k0 - right - offset)
    if left is not None:
        row_last = xp.minimum(row_last, k1 + left - offset)
    seen = (row_first < row_last) & (seq.real == 1)
    first = xp.where(seen, (row_first - seq.q_start) // block_q, 0)
    last = xp.where(seen, -(-(row_last - seq.q_start) // block_q), 0)
    # Tiles of queries [full_first, full_last) see all of the keys: no mask.
    full_first, full_last = first, last
    if right is not None:
        full_first = -(-(k0 + block_k - 1 - right - offset - seq.q_start) // block_q)
        full_first = xp.clip(full_first, first, last)
    if left is not None:
        full_last = (k0 + left - offset - seq.q_start + 1) // block_q
        full_last = xp.clip(full_last, full_first, last)
    whole = k1 - k0 == block_k
    fields = {
        "row": seq.row,
        "k_base": base,
        "k_first": k0 - base,
        "k_stop": k1 - base,
        "index": index,
        "k_tiles": k_tiles,
        "first": first,
        "last": last,
        "full_first": xp.where(whole, full_first, last),
        "full_last": xp.where(whole, full_last, last),
        "offset": offset,
        "q_start": seq.q_start,
        "q_len": seq.q_end - seq.q_start,
        # Query i of the sequence sees the keys before i + 1 + reach.
        "reach": seq.q_start + offset + (right or 0) - seq.k_start,
        "q_tile": tiles.of(q_first),
        "q_total": seq.q_total,
    }
    return tiles.table([fields[name] for name in FIELDS])


def backward(
    problem: Problem,
    scores: Scores,
    blocks: BackwardBlocks,
    x: Inputs,
    dout: Float[Array, "R T N H"],
    lse: Float[Array, "R T N"],
    delta: Float[Array, "R T N"],
) -> tuple[Array, Array, Array, Array | None]:
    """Runs the kernel; ``(dq, dk, dv, dslopes)``.

    `lse` must be ``inf`` for queries that see no key.
    """
    seqs = Sequences.of(x.cu_q, x.packing_of_keys, problem.queries, problem.keys)
    block_q = blocks.block_q
    q_slots = most_tiles(problem.rows, problem.queries, problem.max_seqs, block_q)
    tiles = tile_sequences(seqs.q_start, seqs.q_end, None, block_q, q_slots)
    q_table = constant(query_table(scores, blocks, seqs, tiles), x.q)
    stats = _stats(problem, lse, delta, q_table, block_q)
    table = constant(key_table(problem, scores, blocks, seqs, tiles.first), x.q)
    slots = table.shape[0]
    extra = [] if x.slopes is None else [x.slopes]
    key_heads = problem.kv_heads * blocks.splits
    by_key_head = (*x.k.shape[:2], key_heads)
    outputs = [
        jax.ShapeDtypeStruct(
            (q_slots, problem.heads, units(problem, blocks), *FLAT), jnp.float32
        ),
        jax.ShapeDtypeStruct(x.q.shape, x.q.dtype),
        *(
            jax.ShapeDtypeStruct((*by_key_head, a.shape[3]), a.dtype)
            for a in (x.k, x.v)
        ),
    ]
    if scores.alibi:
        shape = (slots, problem.heads, BACKWARD_CONSUMERS * ROWS)
        outputs.append(jax.ShapeDtypeStruct(shape, jnp.float32))
    body = functools.partial(_body, problem, scores, blocks, slots, q_slots)
    run = plgpu.kernel(
        body,
        out_type=tuple(outputs),
        scratch_types=_scratch(problem, blocks),
        grid=(slots * key_heads + q_slots * -(-problem.heads // _finished(blocks)),),
        grid_names=("block",),
        num_threads=BACKWARD_CONSUMERS + 1,
        thread_name="warpgroup",
        kernel_name="varlen_attention_backward",
        # Barriers order all that threads share: what a store writes is read by the copy
        # engine or the tensor cores after one, and written again after another.
        compiler_params=plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=True
        ),
    )
    operands = table, q_table, x.q, x.k, x.v, dout, stats, *extra
    _, dq, dk, dv, *slope_sums = unmarked(run)(*operands)
    dk, dv = (_add_splits(grad, problem.kv_heads) for grad in (dk, dv))
    if not slope_sums:
        return dq, dk, dv, None
    row, k_stop = (table[:, FIELDS.index(name)] for name in ("row", "k_stop"))
    by_slot = jnp.sum(slope_sums[0], axis=2)
    # No scatter, which would add in any order.
    mine = (row == jnp.arange(problem.rows, dtype=jnp.int32)[:, None]) & (k_stop > 0)
    return dq, dk, dv, jnp.sum(jnp.where(mine[..., None], by_slot, 0.0), axis=1)


def query_table(
    scores: Scores, blocks: BackwardBlocks, seqs: Sequences, tiles: Tiles
) -> Int[AnyArray, "slots fields"]:
    """`QUERY_FIELDS` of each tile of queries."""
    xp = namespace(seqs.q_start)
    block_q, block_k = blocks.block_q, blocks.block_k
    seq = tiles.sequences(seqs)
    nominal = seq.q_start + tiles.index * block_q
    end = xp.minimum(nominal + block_q, seq.q_end)
    # A tile that would read past the data is moved up; the rest of a row is not read.
    base = xp.where(seq.real == 1, xp.minimum(nominal, seq.q_total - block_q), nominal)
    start, stop = interval_of_keys(nominal, end - 1, seq, scores.window)
    adders = (stop - 1 - seq.k_start) // block_k - (start - seq.k_start) // block_k + 1
    fields = {
        "row": seq.row,
        "base": base,
        "first": nominal - base,
        "stop": end - base,
        "adders": xp.where(start < stop, adders, 0),
    }
    table = tiles.table([fields[name] for name in QUERY_FIELDS])
    # Not computed again for each row and head.
    return table if xp is np else lax.optimization_barrier(table)


def _stats(
    problem: Problem,
    lse: Array,
    delta: Array,
    q_table: Int[Array, "slots fields"],
    block_q: int,
) -> Float[Array, "N slots two block_q"]:
    """Lse, to base 2, and delta of each tile of queries, both negative."""
    row, base, first, stop, _ = jnp.split(q_table, len(QUERY_FIELDS), axis=1)
    index = jnp.arange(block_q, dtype=jnp.int32)
    mine = (index >= first) & (index < stop)
    flat = row * problem.queries + jnp.clip(base + index, 0, problem.queries - 1)
    lse, delta = (x.reshape(-1, problem.heads)[flat] for x in (lse, delta))
    lse = jnp.where(mine[..., None], lse * -LOG2E, -jnp.inf)
    delta = jnp.where(mine[..., None], -delta, 0.0)
    return jnp.stack([lse, delta]).transpose(3, 1, 0, 2)


def _add_splits(
    sums: Float[Array, "R S heads H"], kv_heads: int
) -> Float[Array, "R S K H"]:
    """Sums of blocks that shared the query heads of a group."""
    parts = sums.reshape(*sums.shape[:2], kv_heads, -1, sums.shape[3])
    if parts.shape[3] == 1:
        return sums
    return jnp.sum(parts, axis=3, dtype=jnp.float32).astype(sums.dtype)


def key_heads_together(problem: Problem, blocks: BackwardBlocks) -> int:
    """Heads of keys whose tiles run side by side; a divisor of their number.

    The more there are, the fewer tiles of each run at a time and wait for one another.
    But what their tiles of one sequence read and add to should stay in the L2 cache:
    queries and gradients of 16 bits, and sums of 32.
    """
    length = math.ceil(problem.queries / problem.max_seqs)
    per_head = length * problem.head_dim * (2 * problem.dtype.itemsize + 4)
    heads = problem.kv_heads * blocks.splits
    return largest_divisor(heads, min(_L2_BYTES // per_head, _TOGETHER))


def _finished(blocks: BackwardBlocks) -> int:
    """Heads of a tile of queries that one of the last blocks turns into dq."""
    return _UNITS * BACKWARD_CONSUMERS * ROWS // blocks.block_q


def _scratch(problem: Problem, blocks: BackwardBlocks) -> dict[str, Any]:
    """Shared memory of a block."""
    stages, chunks, dtype = blocks.stages, problem.chunks, problem.dtype
    do_stages, parts = blocks.gradient_stages, blocks.block_q // ROWS
    value_chunks = problem.value_chunks
    keys, values = (
        chunked((), blocks.block_k, n, dtype) for n in (chunks, value_chunks)
    )
    scores = functools.partial(
        plgpu.SMEM, dtype=dtype, transforms=smem_transforms(ROWS, dtype)
    )
    both = functools.partial(plgpu.Barrier, num_arrivals=BACKWARD_CONSUMERS)
    one = functools.partial(plgpu.Barrier, num_arrivals=1)
    if blocks.shared:
        own_or_shared = {
            "p_smem": scores((blocks.block_k, ROWS)),
            "p_full": both(),
            "ds_full": both(),
        }
    else:
        own_or_shared = {
            "ds_full": both(num_barriers=2),
            "ds_empty": both(num_barriers=2),
            "half_a_step": one(),
        }
    return {
        "k_smem": keys,
        "v_smem": values,
        "q_smem": chunked((stages,), blocks.block_q, chunks, dtype),
        "do_smem": chunked((do_stages,), blocks.block_q, value_chunks, dtype),
        "stats_smem": plgpu.SMEM((stages, 2, blocks.block_q), jnp.float32),
        "ds_smem": scores((1 if blocks.shared else 2, parts, blocks.block_k, ROWS)),
        "dq_smem": plgpu.SMEM((BACKWARD_CONSUMERS, *FLAT), jnp.float32),
        "kv_full": plgpu.Barrier(num_arrivals=chunks + value_chunks),
        "q_full": plgpu.Barrier(num_arrivals=chunks + 1, num_barriers=stages),
        "do_full": plgpu.Barrier(num_arrivals=value_chunks, num_barriers=do_stages),
        "q_empty": both(num_barriers=stages),
        "do_empty": both(num_barriers=do_stages),
        "dq_full": one(num_barriers=BACKWARD_CONSUMERS),
        "dq_empty": one(num_barriers=BACKWARD_CONSUMERS),
        "turn_full": one(),
        "turn_empty": one(),
        **own_or_shared,
    }


def _body(
    problem: Problem,
    scores: Scores,
    blocks: BackwardBlocks,
    slots: int,
    q_slots: int,
    table: Ref,
    q_table: Ref,
    q: Ref,
    k: Ref,
    v: Ref,
    dout: Ref,
    stats: Ref,
    *refs: Ref,
    **scratch: Ref,
) -> None:
    """The kernel: two consumers, and a producer whose warps load and add.

    The last blocks turn sums of dq, as they become complete, into dq.
    """
    slopes = refs[0] if scores.alibi else None
    sums, dq, dk, dv, *slope_sums = refs[1:] if scores.alibi else refs
    block, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
    together = key_heads_together(problem, blocks)
    slot, key_head = decode_block(block, slots, together, 1)
    adding = key_head < problem.kv_heads * blocks.splits
    turns = pl.get_global(plgpu.SemaphoreType.REGULAR((problem.heads * q_slots,)))

    def fields() -> dict[str, Scalar]:
        return {name: table[slot, i] for i, name in enumerate(FIELDS)}

    def read(name: str) -> Scalar:
        return read_number(table.at[slot, pl.ds(FIELDS.index(name), 1)])

    @pl.when(warpgroup == BACKWARD_CONSUMERS)
    def _producer() -> None:
        plgpu.set_max_registers(_REGISTERS[0], action="decrease")
        tile = fields()

        @pl.when(adding & (tile["k_stop"] > 0))
        def _() -> None:
            producer = Producer(problem, scores, blocks, tile, key_head, scratch)

            @plgpu.warp_map
            def _(warp: Scalar) -> None:
                @pl.when(warp == _LOADER)
                def _() -> None:
                    producer.load_all(q, k, v, dout, stats)

                @pl.when(warp == _POLLER)
                def _() -> None:
                    producer.poll_all(turns, q_slots)

                @pl.when(warp == _ADDER)
                def _() -> None:
                    producer.add_all(sums, turns, q_slots)

    @pl.when(warpgroup < BACKWARD_CONSUMERS)
    def _consumer() -> None:
        plgpu.set_max_registers(_REGISTERS[1], action="increase")

        @pl.when(adding & (read("k_stop") > 0))
        def _() -> None:
            consumer = (SharedKeys if blocks.shared else OwnKeys)(
                problem, scores, blocks, read, warpgroup, key_head, slopes, scratch
            )
            slope_ref = slope_sums[0].at[slot] if scores.alibi else None
            dk_sums, dv_sums = consumer.run(slope_ref)
            row = read("row")
            consumer.store(dk.at[row, :, key_head], dk_sums * scores.scale)
            consumer.store(dv.at[row, :, key_head], dv_sums)
            # See the last phase.
            plgpu.barrier_wait(scratch["dq_empty"].at[warpgroup])

        @pl.when(~adding)
        def _() -> None:
            index = block - slots * problem.kv_heads * blocks.splits
            finish = functools.partial(_finish, problem, scores, blocks, q_slots)
            finish(index, warpgroup, q_table, turns, sums, dq)


def _finish(
    problem: Problem,
    scores: Scores,
    blocks: BackwardBlocks,
    q_slots: int,
    index: Scalar,
    warpgroup: Scalar,
    q_table: Ref,
    turns: Ref,
    sums: Ref,
    dq: Ref,
) -> None:
    """Dq of a tile of queries and some heads, once all have added to it."""
    group, q_tile = lax.div(index, jnp.int32(q_slots)), lax.rem(index, q_slots)
    tile = {name: q_table[q_tile, i] for i, name in enumerate(QUERY_FIELDS)}

    def unit(i: Scalar, _: None) -> None:
        number = i * BACKWARD_CONSUMERS + warpgroup
        each = jnp.int32(units(problem, blocks))
        head = group * _finished(blocks) + lax.div(number, each)
        number = lax.rem(number, each)
        first = lax.div(number, jnp.int32(problem.chunks)) * ROWS
        column = lax.rem(number, jnp.int32(problem.chunks)) * CHUNK

        @pl.when((head < problem.heads) & (tile["first"] < tile["stop"]))
        def _() -> None:
            turn, adders = turns.at[head * q_slots + q_tile], tile["adders"]
            plgpu.semaphore_wait(turn, adders, decrement=False, memory_scope="gpu")
            here = sums.at[q_tile, head, number]
            zeros = jnp.zeros((ROWS, CHUNK), jnp.float32)
            values = lax.cond(
                adders > 0,
                lambda: load_in_register_order(here),
                lambda: plgpu.layout_cast(zeros, plgpu.Layout.WGMMA),
            )
            values = (values * scores.scale).astype(problem.dtype)
            rows = pl.ds(tile["base"] + first, ROWS)
            target, where = dq.at[tile["row"], rows, head], (column,)
            if dq.shape[3] == problem.head_dim:
                columns, where = pl.ds(column, CHUNK), ()
                target = dq.at[tile["row"], rows, head, columns]
            part = tile["first"] - first, tile["stop"] - first
            store_rows(target, values, *part, *where)

    lax.fori_loop(0, _UNITS * problem.chunks, unit, None)
