"""Hopper backward kernel for short sequences: a block is one warpgroup with one tile.

As in the forward pass nothing surrounds the tiles: no table, no counters, no sums in
global memory. With scores ``s``, weights ``p = exp(s - lse)`` and
``delta = dout . out - dlse``::

    dv = p^T dout      ds = p (dout v^T - delta)      dk = ds^T q      dq = ds k

Half of the blocks own 64 keys of a sequence and key/value head, and walk over the
queries that see them, of all query heads of the group, for dk and dv; the others own 64
queries and walk over the keys that they see, for dq. Both compute ``p`` and ``ds``:
seven matmuls instead of five, and whoever sums a gradient is alone with it, so that it
is written once, in its type, and repeats bit for bit.

Queries are rows of the scores in both. Weights that are summed over queries are
transposed by way of shared memory.
"""

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.mosaic.aliases import Ref, Scalar
from pallas_kernels.mosaic.copies import chunked, copy_rows, smem_transforms
from pallas_kernels.mosaic.lanes import keep_band, load_rows, store_rows
from pallas_kernels.mosaic.manual_axes import constant
from pallas_kernels.mosaic.tile_scheduler import find_tile
from pallas_kernels.varlen_attention.config import ROWS, BackwardBlocks, Problem
from pallas_kernels.varlen_attention.forward_short import sequence_of
from pallas_kernels.varlen_attention.inputs import Inputs, Scores
from pallas_kernels.varlen_attention.mainloop import LOG2E
from pallas_kernels.varlen_attention.scheduler import (
    Sequences,
    interval_of_keys,
    most_tiles,
)


_SHAPE = (ROWS, ROWS)

type Place = tuple[Scalar, Scalar, Scalar]
"""Where a tile of 64 rows begins, and which of its rows, [first, stop), are meant."""


def backward_short(
    problem: Problem,
    scores: Scores,
    blocks: BackwardBlocks,
    x: Inputs,
    dout: Float[Array, "R T N H"],
    lse: Float[Array, "R T N"],
    delta: Float[Array, "R T N"],
) -> tuple[Float[Array, "R T N H"], Float[Array, "R S K H"], Float[Array, "R S K H"]]:
    """Runs the kernel; ``(dq, dk, dv)``.

    `delta` must be zero for queries that see no key.
    """
    kinds, cotangents = (KeyTile, QueryTile), (dout, lse, delta)
    dq, dk, dv = run_tiles(problem, scores, blocks, x, cotangents, kinds)
    return dq, dk, dv


def run_tiles(
    problem: Problem,
    scores: Scores,
    blocks: BackwardBlocks,
    x: Inputs,
    cotangents: tuple[Array, Array, Array],
    kinds: "tuple[type[KeyTile], type[QueryTile]]",
    bias: tuple[Array, ...] = (),
    bias_gradients: tuple[jax.ShapeDtypeStruct, ...] = (),
    bias_scratch: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[Array, ...]:
    """Runs a kernel of such tiles; ``(dq, dk, dv, *bias_gradients)``.

    Args:
        problem: what to compute.
        scores: what becomes of products.
        blocks: the size of the ring.
        x: the inputs.
        cotangents: ``(dout, lse, delta)``.
        kinds: of the two halves of the blocks.
        bias: what tiles of these kinds read besides.
        bias_gradients: what they write besides.
        bias_scratch: what they need of shared memory besides.
    """
    slots = (
        most_tiles(1, problem.keys, problem.max_seqs, ROWS),
        most_tiles(1, problem.queries, problem.max_seqs, ROWS),
    )
    bounds = (constant(cu, x.q) for cu in (x.cu_q, x.packing_of_keys))
    numbers = slots[0] * problem.kv_heads, slots[1] * problem.heads
    weights = plgpu.SMEM(
        _SHAPE, problem.dtype, transforms=smem_transforms(ROWS, problem.dtype)
    )
    return plgpu.kernel(
        functools.partial(_body, problem, scores, blocks, slots, kinds, len(bias)),
        out_type=(
            *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (x.q, x.k, x.v)),
            *bias_gradients,
        ),
        scratch_types={
            "own_smem": chunked((2,), ROWS, 1, problem.dtype),
            "ring_smem": chunked((blocks.stages, 2), ROWS, 1, problem.dtype),
            "p_smem": weights,
            "ds_smem": weights,
            "own_full": plgpu.Barrier(num_arrivals=2),
            "ring_full": plgpu.Barrier(num_arrivals=2, num_barriers=blocks.stages),
            **bias_scratch,
        },
        grid=(problem.rows * sum(numbers),),
        grid_names=("block",),
        kernel_name="varlen_attention_backward",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, reduction_scratch_bytes=0
        ),
    )(*bounds, x.q, x.k, x.v, *cotangents, *bias)


def _body(
    problem: Problem,
    scores: Scores,
    blocks: BackwardBlocks,
    slots: tuple[int, int],
    kinds: "tuple[type[KeyTile], type[QueryTile]]",
    num_bias: int,
    cu_q: Ref,
    cu_k: Ref,
    q: Ref,
    k: Ref,
    v: Ref,
    dout: Ref,
    lse: Any,
    delta: Any,
    *refs: Ref,
    **scratch: Ref,
) -> None:
    """The kernel: one tile. Neighbors are the heads of the same tile."""
    bias, gradients = refs[:num_bias], refs[num_bias:]
    block = lax.axis_index("block")
    key_blocks = problem.rows * slots[0] * problem.kv_heads

    def tile(
        kind: "type[Tile]", cu: Ref, number: Scalar, slots: int, heads: int, tokens: int
    ) -> None:
        slot, head = lax.div(number, jnp.int32(heads)), lax.rem(number, heads)
        row = 0  # in a register only if there are others
        if problem.rows > 1:
            row, slot = lax.div(slot, jnp.int32(slots)), lax.rem(slot, slots)
        sequence, index = find_tile(cu.at[row], slot, ROWS, tokens)

        @pl.when(sequence >= 0)
        def _() -> None:
            seq = sequence_of(problem, cu_q, cu_k, row, sequence)
            inputs = (q, dout), (k, v), lse, delta, bias
            mine = kind(problem, scores, blocks, seq, index, head, inputs, scratch)
            mine.run(*gradients)

    @pl.when(block < key_blocks)
    def _() -> None:
        tile(kinds[0], cu_k, block, slots[0], problem.kv_heads, problem.keys)

    @pl.when(block >= key_blocks)
    def _() -> None:
        number = block - key_blocks
        tile(kinds[1], cu_q, number, slots[1], problem.heads, problem.queries)


def _place(start: Scalar, end: Scalar, total: Any, real: Scalar = 1) -> Place:
    """Place a tile; one that would read past the data is moved up.

    What is not real, the rest of a row, is not multiplied.
    """
    base = jnp.where(real == 1, jnp.minimum(start, total - ROWS), start)
    return base, start - base, jnp.minimum(start + ROWS, end) - base


class Tile:
    """One warpgroup: a tile of its own against those that it walks over."""

    masks_columns: bool
    own_place: Place
    steps: Scalar

    def __init__(
        self,
        problem: Problem,
        scores: Scores,
        blocks: BackwardBlocks,
        seq: Sequences,
        index: Scalar,
        head: Scalar,
        inputs: tuple[Any, ...],
        scratch: dict[str, Ref],
    ) -> None:
        self.problem, self.scores, self.blocks = problem, scores, blocks
        self.seq, self.head, self.scratch = seq, head, scratch
        *pairs, self.lse, self.delta, self.bias = inputs
        self.queries, self.keys = pairs
        self.offset = seq.k_end - seq.q_end
        self.own = scratch["own_smem"][0]
        self.cut(index)

    def cut(self, index: Scalar) -> None:
        """Says which rows its tile has and which it walks over."""
        raise NotImplementedError

    def run(self, dq: Ref, dk: Ref, dv: Ref, *bias_gradients: Ref) -> None:
        """Computes and writes the gradients of its tile."""
        raise NotImplementedError

    # --- copies -----------------------------------------------------------------------

    def load_own(self, pair: tuple[Ref, Ref]) -> None:
        """Asks for its own tile."""
        smem, full = self.scratch["own_smem"][1], self.scratch["own_full"]
        self._load(pair, self.own_place, self.head, smem, full)

    def load_step(self, pair: tuple[Ref, Ref], step: Scalar) -> None:
        """Asks for the tile of a step."""
        stage = lax.rem(step, jnp.int32(self.blocks.stages))
        smem = self.scratch["ring_smem"][1].at[stage]
        full = self.scratch["ring_full"].at[stage]
        self._load(pair, *self.place(step), smem, full)

    def _load(
        self, pair: tuple[Ref, Ref], place: Place, head: Scalar, smem: Ref, full: Ref
    ) -> None:
        for i, ref in enumerate(pair):
            copy_rows(ref, self.seq.row, place[0], head, smem.at[i], full)

    def place(self, step: Scalar) -> tuple[Place, Any]:
        """The tile of a step, and its head."""
        raise NotImplementedError

    def stats(self, place: Place, head: Scalar) -> tuple[Any, Any]:
        """Lse and delta of a tile of queries; ``inf`` and zero of other rows."""
        base, first, stop = place
        here = self.seq.row, pl.ds(base, ROWS), head
        lse = load_rows(self.lse.at[here], first, stop, jnp.inf)
        delta = load_rows(self.delta.at[here], first, stop, 0.0)
        return lse, delta

    # --- steps ------------------------------------------------------------------------

    def walk(self, pair: tuple[Ref, Ref], step: Callable[..., Any], carry: Any) -> Any:
        """``step(i, smem, carry)`` for the tiles of `pair`, which it loads."""
        stages = self.blocks.stages

        def begin(i: Scalar, _: None) -> None:
            self.load_step(pair, i)

        lax.fori_loop(0, jnp.minimum(self.steps, stages), begin, None)
        plgpu.barrier_wait(self.scratch["own_full"])

        def one(i: Scalar, carry: Any) -> Any:
            stage = lax.rem(i, jnp.int32(stages))
            plgpu.barrier_wait(self.scratch["ring_full"].at[stage])
            carry = step(i, self.scratch["ring_smem"][0].at[stage], carry)
            following = i + stages
            pl.when(following < self.steps)(lambda: self.load_step(pair, following))
            return carry

        return lax.fori_loop(0, self.steps, one, carry)

    def score_gradients(
        self,
        queries: tuple[Any, Place, tuple[Any, Any]],
        keys: tuple[Any, Place],
        p_smem: Ref = None,
    ) -> Any:
        """Ds of queries and keys, 16-bit; weights are written to shared memory.

        Args:
            queries: queries and gradients in shared memory, their place and `stats`.
            keys: keys and values in shared memory, and their place.
            p_smem: for the weights; None drops them.
        """
        q_smem, q_place, (lse, delta) = queries
        k_smem, k_place = keys
        dtype = self.problem.dtype

        def products(s_acc: Ref, dp_acc: Ref) -> Any:
            for i, acc in enumerate((s_acc, dp_acc)):
                plgpu.wgmma(acc, q_smem.at[i, 0], k_smem.at[i, 0].transpose((1, 0)))
            s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
            p, derivative = self.weights(s, lse, q_place, k_place)
            # Before the weights are written: at most 168 registers, and so three blocks
            # on a multiprocessor.
            dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=0)
            if p_smem is not None:
                p_smem[...] = p.astype(dtype)
            if derivative is not None:
                p = p * derivative
            return (p * (dp - _spread(delta))).astype(dtype)

        acc = plgpu.WGMMAAccumulatorRef(_SHAPE, jnp.float32)
        return pl.run_scoped(products, acc, acc)

    def weights(
        self, s: Any, lse: Any, q_place: Place, k_place: Place
    ) -> tuple[Any, Any]:
        """Weights, and the derivative of a score by the product."""
        x = self.scores
        s, scale = self.logits(s, q_place, k_place)
        factor, derivative = scale * LOG2E, None
        if x.softcap is not None:
            s = jnp.tanh(s * (scale / x.softcap))
            factor, derivative = x.softcap * LOG2E, 1.0 - s * s
        # Of a query that attends to nothing and of no query, weights are zero.
        minus_lse = jnp.where(lse == -jnp.inf, lse, lse * -LOG2E)
        s = s * factor + _spread(minus_lse)
        return jnp.exp2(self.mask(s, q_place, k_place)), derivative

    def logits(self, s: Any, q_place: Place, k_place: Place) -> tuple[Any, float]:
        """Logits of products, up to the factor that comes with them."""
        del q_place, k_place
        return s, self.scores.scale

    def meanwhile(self, step: Scalar, ds: Any) -> None:
        """What else is done with ds, while the matmuls of a step run."""

    def mask(self, s: Any, q_place: Place, k_place: Place) -> Any:
        """``-inf`` for keys that are not seen.

        Rows and columns of its own tile that are not meant stay: they reach gradients
        that are not written, and no others.
        """
        left, right = self.scores.window
        q_base, q_first, q_stop = q_place
        k_base, k_first, k_stop = k_place
        # Column minus row, and this, is how far a key lies right of the diagonal.
        shift = k_base - q_base - self.offset
        seen, limits = [], {}
        if self.masks_columns:
            seen.append(k_stop - k_first == ROWS)
            limits["columns"] = k_first, k_stop - 1
        if left is not None:
            seen.append(shift - (q_stop - 1) >= -left)
        if right is not None:
            seen.append(shift + ROWS - 1 - q_first <= right)
        if not seen:
            return s
        limits["distance"] = (
            None if left is None else -left - shift,
            None if right is None else right - shift,
        )
        hide = functools.partial(keep_band, **limits)
        return lax.cond(functools.reduce(jnp.logical_and, seen), lambda s: s, hide, s)

    def store(self, ref: Ref, sums: Any) -> None:
        """Writes gradients of its tile."""
        base, first, stop = self.own_place
        here = ref.at[self.seq.row, pl.ds(base, ROWS), self.head]
        store_rows(here, sums.astype(self.problem.dtype), first, stop)


class KeyTile(Tile):
    """64 keys and values, all queries that see them."""

    masks_columns = False

    def cut(self, index: Scalar) -> None:
        """Cut out the tile's keys, and the queries of one head that see them."""
        seq, offset = self.seq, self.offset
        left, right = self.scores.window
        start = seq.k_start + index * ROWS
        self.own_place = _place(start, seq.k_end, seq.k_total, seq.real)
        first, last = seq.q_start, seq.q_end
        if right is not None:
            first = jnp.maximum(first, start - right - offset)
        if left is not None:
            stop = jnp.minimum(start + ROWS, seq.k_end)
            last = jnp.minimum(last, stop + left - offset)
        self.first, self.last = first, last
        self.per_head = _tiles(first, last) * seq.real
        self.steps = self.per_head * self.problem.groups

    def place(self, step: Scalar) -> tuple[Place, Any]:
        """A tile of queries, of one head after the other."""
        head, index = self.head, step
        if (groups := self.problem.groups) > 1:
            per_head = jnp.maximum(self.per_head, 1)
            head = head * groups + lax.div(step, per_head)
            index = lax.rem(step, per_head)
        start = self.first + index * ROWS
        return _place(start, self.last, self.seq.q_total), head

    def run(self, dq: Ref, dk: Ref, dv: Ref, *bias_gradients: Ref) -> None:
        """Dk and dv."""
        del dq, bias_gradients
        self.load_own(self.keys)
        acc = plgpu.WGMMAAccumulatorRef(_SHAPE, jnp.float32)
        dk_sums, dv_sums = pl.run_scoped(self._sums, acc, acc)
        self.store(dk, dk_sums * self.scores.scale)
        self.store(dv, dv_sums)

    def _sums(self, dk: Ref, dv: Ref) -> tuple[Any, Any]:
        p_smem, ds_smem = self.scratch["p_smem"], self.scratch["ds_smem"]

        def stats(step: Scalar) -> tuple[Any, Any]:
            (base, first, stop), head = self.place(step)
            stop = jnp.where(step < self.steps, stop, first)
            return self.stats((base, first, stop), head)

        def step(i: Scalar, smem: Ref, now: tuple[Any, Any]) -> tuple[Any, Any]:
            queries = smem, self.place(i)[0], now
            ds = self.score_gradients(queries, (self.own, self.own_place), p_smem)
            ds_smem[...] = ds
            plgpu.commit_smem()
            plgpu.wgmma(dv, p_smem.transpose((1, 0)), smem.at[1, 0])
            plgpu.wgmma(dk, ds_smem.transpose((1, 0)), smem.at[0, 0])
            following = stats(i + 1)  # on their way while the matmuls run
            self.meanwhile(i, ds)
            plgpu.wgmma_wait(0)
            return following

        self.walk(self.queries, step, stats(jnp.int32(0)))
        return dk[...], dv[...]


class QueryTile(Tile):
    """64 queries and their gradients, all keys that they see."""

    masks_columns = True

    def cut(self, index: Scalar) -> None:
        """Cut out the tile's queries, and the keys that they see."""
        seq = self.seq
        start = seq.q_start + index * ROWS
        self.own_place = _place(start, seq.q_end, seq.q_total, seq.real)
        end = jnp.minimum(start + ROWS, seq.q_end)
        self.first, self.last = interval_of_keys(
            start, end - 1, seq, self.scores.window
        )
        self.steps = _tiles(self.first, self.last)

    def place(self, step: Scalar) -> tuple[Place, Any]:
        """A tile of keys."""
        head = lax.div(self.head, jnp.int32(self.problem.groups))
        start = self.first + step * ROWS
        return _place(start, self.last, self.seq.k_total), head

    def run(self, dq: Ref, dk: Ref, dv: Ref, *bias_gradients: Ref) -> None:
        """Dq."""
        del dk, dv, bias_gradients
        self.load_own(self.queries)
        acc = plgpu.WGMMAAccumulatorRef(_SHAPE, jnp.float32)
        self.store(dq, pl.run_scoped(self._sums, acc) * self.scores.scale)

    def _sums(self, dq: Ref) -> Any:
        queries = self.own, self.own_place, self.stats(self.own_place, self.head)

        def step(i: Scalar, smem: Ref, _: None) -> None:
            ds = self.score_gradients(queries, (smem, self.place(i)[0]))
            plgpu.wgmma(dq, ds, smem.at[0, 0])
            self.meanwhile(i, ds)
            plgpu.wgmma_wait(0)

        self.walk(self.keys, step, None)
        return dq[...]


def _spread(column: Any) -> Any:
    """A number a query to the shape of scores."""
    return lax.broadcast_in_dim(column, _SHAPE, [0])


def _tiles(start: Scalar, end: Scalar) -> Any:
    """Count the tiles of 64 rows from `start` to `end`."""
    return jnp.maximum(lax.div(end - start + ROWS - 1, jnp.int32(ROWS)), 0)
