"""Hopper forward kernel of variable-length attention.

A tile is some queries of one sequence and head. A producer warpgroup streams keys and
values through a ring of shared-memory stages; each consumer holds 64 queries, its
scores, its weights and its sums in registers, as FlashAttention-3 does. Blocks stay on
their multiprocessor and take tiles by ticket, the expensive ones first: while the
consumers end one tile the producer loads the next.

**Any row.** A sequence starts wherever the one before it ends, and the copy engine
writes shared memory as the tensor cores want it (tiles of 8 rows) only from rows that
are multiples of 8. But a chunk of 64 columns with swizzled lines has the same bytes,
tiled by 8 rows or not, and without tiles the copy may start at any row. So every buffer
is a union of two views, one that the copies write and one that wgmma reads.

**Past the end.** Tiles at the end of a sequence also hold rows of its neighbors. Their
weights are masked to zero, but zero times NaN is NaN, and what lies past the last
sequence may be NaN. A step that would read it is moved up to end with the data; the
keys that it then holds twice are masked.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int

from pallas_kernels.fp8_operands import mosaic_gpu as fp8_operands
from pallas_kernels.mosaic.aliases import Ref, Scalar
from pallas_kernels.mosaic.copies import chunked, copy_rows
from pallas_kernels.mosaic.device import DeviceSpec
from pallas_kernels.mosaic.fp8_fragments import ORDER
from pallas_kernels.mosaic.lanes import store_rows
from pallas_kernels.mosaic.manual_axes import constant
from pallas_kernels.mosaic.pipeline import launch
from pallas_kernels.mosaic.tile_scheduler import (
    copy_line,
    decode_block,
    largest_divisor,
    take_ticket,
)
from pallas_kernels.varlen_attention.config import (
    ROWS,
    ForwardBlocks,
    Problem,
    query_buffers,
)
from pallas_kernels.varlen_attention.inputs import Inputs, Scores
from pallas_kernels.varlen_attention.key_sources import KeysInRows, KeySource
from pallas_kernels.varlen_attention.mainloop import (
    ForwardMainloop,
    step_start,
    tile_terms,
)
from pallas_kernels.varlen_attention.relative_mosaic_gpu import TileTerms
from pallas_kernels.varlen_attention.scheduler import (
    AnyArray,
    Sequences,
    interval_of_keys,
    most_tiles,
    namespace,
    tile_sequences,
)


LINE = len(ORDER)
"""Bytes of which copies take a multiple: where the copy engine begins along the last
axis of an array, it begins at a multiple of 16, or stops the kernel."""

_L2_BYTES = 32 * 2**20
"""Keys and values of the heads that run together should fit in the L2 cache."""

_FIELDS = ("row", "q0", "rows", "k0", "steps", "first", "last", "offset", "k_end",
           "k_total", "real", "slots")  # fmt: skip


def _fields(problem: Problem) -> tuple[str, ...]:
    """`_FIELDS`, with the number of the sequence where each has scales or pages of its
    own, and in 8 bits the first key: `k0` may lie before it.
    """
    more = ("sequence", "k_first") if problem.fp8 else ()
    if problem.page is not None:
        more = ("sequence",)
    return *_FIELDS[:-1], *more, _FIELDS[-1]


def heads_together(problem: Problem) -> int:
    """Key/value heads whose tiles run side by side; a divisor of their number."""
    columns = problem.head_dim + problem.value_size
    per_head = problem.keys * columns * problem.dtype.itemsize
    return largest_divisor(problem.kv_heads, _L2_BYTES // per_head)


def tile_fields(
    scores: Scores,
    blocks: ForwardBlocks,
    seq: Sequences,
    index: AnyArray,
    align: int = 1,
    fp8: bool = False,
) -> dict[str, Any]:
    """`_FIELDS` but the last of the tile of a sequence, all of one shape.

    In 8 bits steps end at multiples of `align` tokens, too, and there is "k_first".

    Args:
        scores: what queries see.
        blocks: size of tiles and steps.
        seq: the tile's sequence.
        index: which tile of it. If queries see no keys to their right, the last tile,
            which sees the most, is number 0.
        align: steps begin at multiples of so many keys.
        fp8: whether the values are transposed.
    """
    xp = namespace(seq.q_start)
    block_q, block_k = blocks.block_q, blocks.block_k
    if scores.window[1] is not None:
        index = -(-(seq.q_end - seq.q_start) // block_q) - 1 - index
    q0 = seq.q_start + index * block_q
    q1 = xp.minimum(q0 + block_q, seq.q_end)
    start, stop = interval_of_keys(q0, q1 - 1, seq, scores.window)
    k0, k_total = start, seq.k_total
    if align > 1:
        k0 = start - start % align
    if fp8:
        k_total = k_total + -k_total % align
    steps = xp.maximum(-(-(stop - k0) // block_k), 0)
    if fp8:
        steps = xp.where(start < stop, steps, 0)
    # Steps [first, last) need no mask: each of their keys is seen by all queries.
    left, right = scores.window
    offset = seq.k_end - seq.q_end
    first, seen_by_all = xp.zeros_like(steps), seq.k_end
    if left is not None:
        first = -(-(q1 - 1 + offset - left - k0) // block_k)
        first = xp.clip(first, 0, steps)
    if fp8:
        first = xp.minimum(xp.maximum(first, xp.where(k0 < start, 1, 0)), steps)
    if right is not None:
        seen_by_all = xp.minimum(seen_by_all, q0 + offset + right + 1)
    last = xp.clip((seen_by_all - k0) // block_k, first, steps)
    return {
        "row": seq.row,
        "q0": q0,
        "rows": q1 - q0,
        "k0": k0,
        "steps": steps,
        "first": first,
        "last": last,
        "offset": offset,
        "k_end": stop if right is None else seq.k_end,
        "k_total": k_total,
        "real": seq.real,
        **({"k_first": start} if fp8 else {}),
    }


def forward_outputs(x: Inputs, with_rest: bool) -> tuple[jax.ShapeDtypeStruct, ...]:
    """``(out, lse)``, [R, T, N, Hv] and [R, T, N]; and ``rest``, as out, if wanted."""
    dtype = jnp.bfloat16 if x.q.dtype.itemsize == 1 else x.q.dtype
    value_dim = x.q.shape[3] if x.v is None else x.v.shape[3]
    out = jax.ShapeDtypeStruct((*x.q.shape[:3], value_dim), dtype)
    lse = jax.ShapeDtypeStruct(x.q.shape[:3], jnp.float32)
    return (out, lse, out) if with_rest else (out, lse)


def store_outputs(
    results: tuple[Any, Any],
    outputs: tuple[Ref, ...],
    here: tuple[Any, ...],
    rows: Scalar,
) -> None:
    """Writes the results of 64 queries, `rows` of them real, to `forward_outputs`."""
    (sums, log_sum), (out, lse, *rest) = results, outputs
    values = sums.astype(out.dtype)
    store_rows(out.at[here], values, 0, rows)
    store_rows(lse.at[here], log_sum, 0, rows)
    if rest:
        taken = sums - values.astype(jnp.float32)
        store_rows(rest[0].at[here], taken.astype(out.dtype), 0, rows)


def tile_table(
    problem: Problem, scores: Scores, blocks: ForwardBlocks, seqs: Sequences
) -> Int[AnyArray, "slots fields"]:
    """`_FIELDS` of the tile in each slot; "slots" are those that are used.

    The last line has no rows: it is for every ticket past the last tile.
    """
    slots = most_tiles(problem.rows, problem.queries, problem.max_seqs, blocks.block_q)
    cost = (seqs.k_end - seqs.k_start) * seqs.real
    tiles = tile_sequences(seqs.q_start, seqs.q_end, cost, blocks.block_q, slots + 1)
    align = LINE if problem.fp8 else 1
    if problem.page is not None:
        align = min(problem.page, blocks.block_k)
    fields = tile_fields(
        scores, blocks, tiles.sequences(seqs), tiles.index, align, problem.fp8
    )
    if "sequence" in _fields(problem):
        xp = namespace(seqs.q_start)
        number = xp.arange(cost.shape[0], dtype=np.int32)
        number = number % np.int32(cost.shape[0] // problem.rows)
        fields["sequence"] = tiles.of(xp.minimum(number, problem.max_seqs - 1))
    return tiles.table([fields[name] for name in _fields(problem)[:-1]], total=True)


def forward(
    problem: Problem,
    scores: Scores,
    blocks: ForwardBlocks,
    x: Inputs,
    with_rest: bool,
    device: DeviceSpec,
) -> tuple[Array, ...]:
    """Runs the kernel on packed keys and values; `forward_outputs`."""
    seqs = Sequences.of(x.cu_q, x.packing_of_keys, problem.queries, problem.keys)
    v = transposed_values(x.v, x.packing_of_keys[:, -1]) if problem.fp8 else x.v
    held = KeysInRows(x.k, v)
    return forward_from(held, seqs, problem, scores, blocks, x, with_rest, device)


def forward_from(
    held: KeySource,
    seqs: Sequences,
    problem: Problem,
    scores: Scores,
    blocks: ForwardBlocks,
    x: Inputs,
    with_rest: bool,
    device: DeviceSpec,
) -> tuple[Array, ...]:
    """Runs the kernel on the sequences' keys and values in `held`, not those of `x`."""
    table = constant(tile_table(problem, scores, blocks, seqs), x.q)
    consumers, stages = blocks.consumers, blocks.stages
    chunks, width, ahead = problem.chunks, problem.width, query_buffers(problem)
    value_chunks, *value_tile = problem.value_tiles(blocks.block_k)
    keys, values = (
        chunked((stages,), rows, n, problem.dtype, columns)
        for n, rows, columns in (
            (chunks, blocks.block_k, width),
            (value_chunks, *value_tile),
        )
    )
    relative = tile_terms(scores, blocks)
    bias, bias_scratch = (), {}
    if relative is not None:
        bias_scratch = relative.scratch(stages, problem.dtype)
        terms = (t for t in (x.query_terms, x.key_terms) if t is not None)
        bias = jnp.asarray(relative.table()), *terms
    of_products = (x.score_descale, x.v_descale) if problem.fp8 else None
    extra, structure = jax.tree.flatten((held, x.sinks, x.slopes, bias, of_products))
    pieces = held.pieces(problem, blocks)
    params = plgpu.CompilerParams()
    if problem.head_dim == 256:  # leaves no room for sums over warps, of which are none
        params = dataclasses.replace(params, reduction_scratch_bytes=0)
    return plgpu.kernel(
        functools.partial(_body, problem, scores, blocks, structure, len(extra)),
        out_type=forward_outputs(x, with_rest),
        scratch_types={
            "q_smem": chunked((ahead, consumers), ROWS, chunks, problem.dtype, width),
            "k_smem": keys,
            "v_smem": values,
            "tile_smem": plgpu.SMEM((2, len(_fields(problem)) + 1), jnp.int32),
            "mailbox": plgpu.SMEM((1,), jnp.int32),
            "q_full": plgpu.Barrier(
                num_arrivals=chunks, num_barriers=ahead * consumers
            ),
            "k_full": plgpu.Barrier(num_arrivals=chunks * pieces, num_barriers=stages),
            "v_full": plgpu.Barrier(
                num_arrivals=value_chunks * pieces, num_barriers=stages
            ),
            "tile_full": plgpu.Barrier(num_arrivals=1, num_barriers=2),
            "q_empty": plgpu.Barrier(num_arrivals=1, num_barriers=ahead * consumers),
            "k_empty": plgpu.Barrier(num_arrivals=consumers, num_barriers=stages),
            "v_empty": plgpu.Barrier(num_arrivals=consumers, num_barriers=stages),
            "tile_empty": plgpu.Barrier(num_arrivals=consumers, num_barriers=2),
            "turn": plgpu.Barrier(num_arrivals=consumers),
            **bias_scratch,
        },
        **launch(
            (table.shape[0] - 1) * (problem.heads // blocks.heads),
            device,
            "varlen_attention",
            warpgroups=consumers + 1,
        ),
        kernel_name="varlen_attention",
        compiler_params=dataclasses.replace(params, approx_math=True),
    )(table, x.q, *extra)


def transposed_values(v: Array, ends: Int[AnyArray, " R"]) -> Array:
    """8-bit values ``[R, S, K, Hv]``, transposed to ``[K, Hv, R, S]``.

    One more pass reads and writes them once: the tensor cores cannot transpose 8-bit
    operands. S grows to a multiple of 128, and each `LINE` tokens have the order in
    which lanes have the weights of keys. Tokens from the end of the last sequence to
    the next such line, which its last step reads, are zero.

    Args:
        v: the values.
        ends: where the last sequence of each row ends.
    """
    if missing := -v.shape[1] % fp8_operands.TILE:
        v = jnp.pad(v, ((0, 0), (0, missing), (0, 0), (0, 0)))
    rows, tokens, heads, size = v.shape
    flat = v.reshape(rows * tokens, heads * size)
    whole = flat.shape[1] % fp8_operands.TILE == 0
    if whole:
        turned = fp8_operands.transpose(flat, ORDER)
    else:
        halves, lanes = flat.reshape(-1, 2, 4, 2, heads * size), (0, 2, 1, 3, 4)
        turned = halves.transpose(lanes).reshape(flat.shape).T
    turned = turned.reshape(heads, size, rows, tokens)
    if isinstance(ends, np.ndarray) and not (ends % LINE).any():
        return turned
    ends = jnp.minimum(jnp.asarray(ends, jnp.int32), tokens)
    zero, order = jnp.zeros((), turned.dtype), np.asarray(ORDER, np.int32)
    if rows > 1:  # one more pass; of a single row a line is written in place
        token = np.arange(0, tokens, LINE, dtype=np.int32)[:, None] + order
        return jnp.where(token.reshape(-1) < ends[:, None], turned, zero)
    first = jnp.minimum(ends[0] - ends[0] % LINE, tokens - LINE)
    line = lax.dynamic_slice_in_dim(turned, first, LINE, axis=3)
    line = jnp.where(first + order < ends[0], line, zero)
    return lax.dynamic_update_slice_in_dim(turned, line, first, axis=3)


_REGISTERS = {2: (24, 240), 3: (32, 160), 4: (24, 112)}
"""Registers of a thread of the producer and of a consumer, by number of consumers.

A block starts with as many for each thread as the whole file holds for that number of
threads, 168 for 384 and 128 for 512, and what one gives up others may take: more would
wait forever.
"""
_WIDE_PRODUCER_REGISTERS = (40, 232)
"""The same where the producer would spill: for queries and keys of three chunks, and
keys in pages, whose places it holds.
"""


def _body(
    problem: Problem,
    scores: Scores,
    blocks: ForwardBlocks,
    structure: Any,
    num_extra: int,
    table: Ref,
    q: Ref,
    *refs: Ref,
    **scratch: Ref,
) -> None:
    """The kernel: one producer and some consumers."""
    held, sinks, slopes, bias, of_products = structure.unflatten(refs[:num_extra])
    published = *_fields(problem), "head"
    outputs = refs[num_extra:]
    warpgroup = lax.axis_index("warpgroup")
    registers = _REGISTERS[blocks.consumers]
    if problem.chunks == 3 or problem.page is not None:
        registers = _WIDE_PRODUCER_REGISTERS
    counter = pl.get_global(plgpu.SemaphoreType.REGULAR((1,)))
    relative = tile_terms(scores, blocks)

    @pl.when(warpgroup == blocks.consumers)
    def _producer() -> None:
        plgpu.set_max_registers(registers[0], action="decrease")
        load_queries = functools.partial(_load_queries, problem, blocks, q, scratch)
        load_steps = functools.partial(
            _load_steps, problem, blocks, relative, bias, held, scratch
        )
        workers = lax.axis_size("worker")
        together = heads_together(problem), problem.groups // blocks.heads
        heads = problem.heads // blocks.heads

        def take(number: Scalar, ticket: Scalar) -> dict[str, Scalar]:
            """Tells the consumers which tile it is; without rows it is the end."""
            slots = table[0, published.index("slots")]
            slot, head = decode_block(ticket, slots, *together)
            slot = jnp.where(head < heads, slot, slots)
            place = lax.rem(number, jnp.int32(2))
            line = scratch["tile_smem"].at[place]
            plgpu.barrier_wait(scratch["tile_empty"].at[place])
            copy_line(table.at[slot], line, head)
            plgpu.barrier_arrive(scratch["tile_full"].at[place])
            fields = {name: line[i] for i, name in enumerate(published[:-1])}
            return fields | {"head": head}

        if relative is not None:
            entries = scratch["entries_smem"]
            plgpu.copy_gmem_to_smem(bias[0], entries, scratch["entries_full"])

        def next_tile(carry: Any) -> Any:
            tile, number, steps = carry
            # The first step is under way while the next tile is looked up.
            begun = jnp.minimum(tile["steps"], 1)
            loads = [
                functools.partial(load_queries, tile, number),
                functools.partial(load_steps, tile, steps, 0, begun),
            ]
            if query_buffers(problem) == 1:
                # Queries wait for the last step of the tile before, keys do not.
                loads.reverse()
            for load in loads:
                load()
            ticket = take_ticket(counter, scratch["mailbox"]) + workers
            following = take(number + 1, ticket)
            load_steps(tile, steps, begun, tile["steps"])
            return following, number + 1, steps + tile["steps"]

        first = take(jnp.int32(0), lax.axis_index("worker"))
        _, number, steps = lax.while_loop(
            lambda carry: carry[0]["rows"] > 0,
            next_tile,
            (first, jnp.int32(0), jnp.int32(0)),
        )
        _drain(problem, blocks, scratch, number, steps, relative is not None)

    @pl.when(warpgroup < blocks.consumers)
    def _consumer() -> None:
        plgpu.set_max_registers(registers[1], action="increase")
        _hand_over(problem, blocks, scratch, warpgroup, relative is not None)
        if relative is not None:
            plgpu.barrier_wait(scratch["entries_full"])

        def next_tile(carry: Any) -> Any:
            _, number, steps = carry
            place = lax.rem(number, jnp.int32(2))
            plgpu.barrier_wait(scratch["tile_full"].at[place])
            tile = {
                name: scratch["tile_smem"][place, i] for i, name in enumerate(published)
            }
            plgpu.barrier_arrive(scratch["tile_empty"].at[place])
            there = tile["rows"] > 0

            @pl.when(there)
            def _() -> None:
                row, head = tile["row"], blocks.head(tile["head"], warpgroup)
                sink = None if sinks is None else sinks[row, head]
                slope = None if slopes is None else slopes[row, head]
                descales = None
                if of_products is not None:
                    kv_head = lax.div(head, jnp.int32(problem.groups))
                    where = row, tile["sequence"], kv_head
                    descales = of_products[0][where], of_products[1][where]
                buffer = _query_buffer(problem, number)
                mainloop = ForwardMainloop(
                    problem, scores, blocks, tile, warpgroup,
                    sink, slope, scratch, buffer, steps, descales,
                )  # fmt: skip
                q0 = tile["q0"] + blocks.first_token(warpgroup)
                here = row, pl.ds(q0, ROWS), head
                rows = tile["rows"] - blocks.first_token(warpgroup)

                @pl.when(rows > 0)
                def _() -> None:
                    store_outputs(mainloop.run(), outputs, here, rows)

                pl.when(rows <= 0)(mainloop.stand_by)

            return there, number + 1, steps + jnp.where(there, tile["steps"], 0)

        start = jnp.bool_(True), jnp.int32(0), jnp.int32(0)
        lax.while_loop(lambda carry: carry[0], next_tile, start)


def _hand_over(
    problem: Problem,
    blocks: ForwardBlocks,
    scratch: dict[str, Ref],
    warpgroup: Scalar,
    relative: bool,
) -> None:
    """A consumer gives all buffers to the producer."""
    for name in ("k_empty", "v_empty", *(("terms_empty",) if relative else ())):
        for stage in range(blocks.stages):
            plgpu.barrier_arrive(scratch[name].at[stage])
    for place in range(2):
        plgpu.barrier_arrive(scratch["tile_empty"].at[place])
    for i in range(query_buffers(problem)):
        plgpu.barrier_arrive(scratch["q_empty"].at[i * blocks.consumers + warpgroup])


def _drain(
    problem: Problem,
    blocks: ForwardBlocks,
    scratch: dict[str, Ref],
    number: Scalar,
    steps: Scalar,
    relative: bool,
) -> None:
    """The producer takes all buffers back: waiters must see each phase of a barrier."""
    for i in range(blocks.stages):
        stage = lax.rem(steps + i, jnp.int32(blocks.stages))
        plgpu.barrier_wait(scratch["k_empty"].at[stage])
        plgpu.barrier_wait(scratch["v_empty"].at[stage])
        if relative:
            plgpu.barrier_wait(scratch["terms_empty"].at[stage])
    for i in range(2):
        place = lax.rem(number + 1 + i, jnp.int32(2))
        plgpu.barrier_wait(scratch["tile_empty"].at[place])
    for i in range(query_buffers(problem)):
        buffer = _query_buffer(problem, number + i)
        for w in range(blocks.consumers):
            plgpu.barrier_wait(scratch["q_empty"].at[buffer * blocks.consumers + w])


def _query_buffer(problem: Problem, number: Scalar) -> Any:
    """The buffer for the queries of a block's nth tile."""
    return lax.rem(number, jnp.int32(query_buffers(problem)))


def _load_queries(
    problem: Problem,
    blocks: ForwardBlocks,
    q: Ref,
    scratch: dict[str, Ref],
    tile: dict[str, Scalar],
    number: Scalar,
) -> None:
    """The producer: queries of a block's nth tile."""
    buffer, smem = _query_buffer(problem, number), scratch["q_smem"][1]
    for w in range(blocks.consumers):
        start = tile["q0"] + blocks.first_token(w)
        head = blocks.head(tile["head"], w)
        place = buffer * blocks.consumers + w
        plgpu.barrier_wait(scratch["q_empty"].at[place])
        full = scratch["q_full"].at[place]
        copy_rows(q, tile["row"], start, head, smem.at[buffer, w], full)


def _load_steps(
    problem: Problem,
    blocks: ForwardBlocks,
    relative: TileTerms | None,
    bias: tuple[Ref, ...],
    held: KeySource,
    scratch: dict[str, Ref],
    tile: dict[str, Scalar],
    steps: Scalar,
    begin: Scalar,
    end: Scalar,
) -> None:
    """The producer: keys and values of some steps of a tile."""
    row, head = tile["row"], tile["head"]
    kv_head = lax.div(head, jnp.int32(problem.groups // blocks.heads))

    def step(i: Scalar, places: Any) -> Any:
        stage = lax.rem(steps + i, jnp.int32(blocks.stages))
        start = step_start(blocks, tile, i)
        # Where the next ones lie is under way while these are copied.
        following = held.places(problem, blocks, tile, i, 1)
        for part, name in enumerate("kv"):
            smem = scratch[f"{name}_smem"][1]
            plgpu.barrier_wait(scratch[f"{name}_empty"].at[stage])
            full = scratch[f"{name}_full"].at[stage]
            held.copy(
                problem, part, (row, start, kv_head), places, smem.at[stage], full
            )
            if name == "k" and relative is not None:
                place = row, head
                relative.load(scratch, stage, bias, place, tile["q0"], start)
        return following

    lax.fori_loop(begin, end, step, held.places(problem, blocks, tile, begin, 0))
