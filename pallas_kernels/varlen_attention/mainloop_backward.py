"""The mainloop of the Hopper backward kernel: one warpgroup of a block.

Scores are computed transposed, keys by queries. At head dims up to 128 a warpgroup owns
64 keys: it keeps their dk and dv in registers, and ``p^T`` and ``ds^T`` are left
operands in registers too. At head dim 256 sums of 64 keys fill the registers of both
warpgroups, which so share the keys: each has the scores of half of the queries of a
step, and half of the columns of dk, dv and dq; weights go through shared memory.
"""

import copy
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic.aliases import Ref, Scalar
from pallas_kernels.mosaic.copies import CHUNK
from pallas_kernels.mosaic.lanes import (
    distances,
    in_register_order,
    keep_band,
    scale_and_add_row,
    store_columns,
    store_rows,
)
from pallas_kernels.varlen_attention.config import (
    BACKWARD_CONSUMERS,
    ROWS,
    BackwardBlocks,
    Problem,
)
from pallas_kernels.varlen_attention.inputs import Scores
from pallas_kernels.varlen_attention.mainloop import (
    LOG2E,
    in_registers,
)


_DQ_PART = plgpu.WGMMAAccumulatorRef((ROWS, CHUNK), jnp.float32)


def query_start(
    blocks: BackwardBlocks, field: Callable[[str], Scalar], index: Scalar
) -> Any:
    """The first row of a tile of queries; the last one may be moved up."""
    block_q = blocks.block_q
    return jnp.minimum(field("q_start") + index * block_q, field("q_total") - block_q)


def longest_first(scores: Scores) -> bool:
    """Whether tiles come from the first keys to the last, the longest first.

    Then each goes over its queries from the last to the first, so that the first tile
    of keys that a query sees is also the first one to come by.
    """
    return not scores.deterministic and scores.window[1] is not None


class BackwardMainloop:
    """One warpgroup: its part of the scores of all steps, its part of the sums."""

    def __init__(
        self,
        problem: Problem,
        scores: Scores,
        blocks: BackwardBlocks,
        read: Callable[[str], Scalar],
        warpgroup: Scalar,
        key_head: Scalar,
        slopes: Ref,
        scratch: dict[str, Ref],
    ) -> None:
        self.problem, self.scores, self.blocks = problem, scores, blocks
        # Registers are scarce: what of the tile only some steps need, they read again.
        self.read, self.warpgroup, self.key_head = read, warpgroup, key_head
        self.slopes, self.scratch = slopes, scratch
        self.slope: Any = None  # of the head whose steps run, in units of exp2
        self.k_smem, self.v_smem, self.q_smem, self.do_smem = (
            scratch[f"{name}_smem"][0] for name in ("k", "v", "q", "do")
        )
        self.stages = blocks.stages, blocks.gradient_stages
        self.zero = jnp.int32(0)

    def afresh(self) -> "BackwardMainloop":
        """Itself, for one step.

        The compiler does not see that places in shared memory are the same in every
        step. It would compute the descriptors of all operands ahead of the loop, more
        than there are registers for, and read them back in each step.
        """
        step = copy.copy(self)
        step.warpgroup, step.zero = lax.optimization_barrier(
            (self.warpgroup, self.zero)
        )
        return step

    # Its share. At each use anew: numbers that a loop keeps take registers.

    @property
    def mine(self) -> Any:
        """The rows of this warpgroup, out of the rows of both."""
        return pl.ds(self.warpgroup * ROWS, ROWS)

    @property
    def key_offset(self) -> Any:
        """The first of its 64 keys, in the tile."""
        return 0 if self.blocks.shared else self.warpgroup * ROWS

    @property
    def query_offset(self) -> Any:
        """The first of its queries, in those of a step."""
        return self.warpgroup * self.shape[1] if self.blocks.shared else 0

    @property
    def sharing(self) -> int:
        """Warpgroups that share keys, and with them queries and columns."""
        return BACKWARD_CONSUMERS if self.blocks.shared else 1

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of this warpgroup's scores of a step, keys by queries."""
        return ROWS, self.blocks.block_q // self.sharing

    @property
    def queries(self) -> Any:
        """The queries of this warpgroup."""
        return pl.ds(self.query_offset, self.shape[1])

    def sums_shape(self, chunks: int) -> tuple[int, int]:
        """The shape of its sums of dk or dv, which have so many chunks of columns."""
        return ROWS, chunks // self.sharing * CHUNK

    def first_chunk(self, sums: Any) -> Any:
        """The first chunk of columns of such sums."""
        return self.warpgroup * (sums.shape[1] // CHUNK) if self.blocks.shared else 0

    def free(self) -> dict[str, int]:
        """Barriers that say what may be written, and how many of each: all of it."""
        return dict(zip(("q_empty", "do_empty"), self.stages, strict=True))

    def run(self, slope_ref: Ref) -> tuple[Any, Any]:
        """The sums dk and dv, fp32; partial sums for slopes are stored."""
        for name, stages in self.free().items():
            for stage in range(stages):
                plgpu.barrier_arrive(self.scratch[name].at[stage])
        plgpu.barrier_wait(self.scratch["kv_full"])
        keys = self.k_smem.at[:, pl.ds(self.key_offset, ROWS)]
        self.held = in_registers(keys, min(self.blocks.held, self.problem.chunks))
        sums = (
            plgpu.WGMMAAccumulatorRef(self.sums_shape(chunks), jnp.float32)
            for chunks in (self.problem.chunks, self.problem.value_chunks)
        )
        return pl.run_scoped(functools.partial(self._loop, slope_ref), *sums)

    def store(self, ref: Ref, values: Any) -> None:
        """Writes its part of dk or dv of the tile to ``[S, H]``."""
        offset = self.key_offset
        start, stop = self.read("k_first") - offset, self.read("k_stop") - offset
        rows = pl.ds(self.read("k_base") + offset, ROWS)
        first, values = self.first_chunk(values) * CHUNK, values.astype(ref.dtype)
        if ref.shape[1] == values.shape[1] * self.sharing:
            columns = pl.ds(first, values.shape[1])
            store_rows(ref.at[rows, columns], values, start, stop)
        else:
            store_rows(ref.at[rows], values, start, stop, first)

    def _loop(self, slope_ref: Ref, dk: Ref, dv: Ref) -> tuple[Any, Any]:
        first, last = self.read("first"), self.read("last")
        full = self.read("full_first"), self.read("full_last")

        # Slopes have a sum for each head; else the heads are one loop.
        heads = self.problem.groups // self.blocks.splits
        loops = heads if self.scores.alibi else 1
        steps = (last - first) * (heads // loops)

        def head_loop(group: Scalar, number: Scalar) -> Any:
            head = self.key_head * heads + group
            row_sums = ()
            if self.scores.alibi:
                # In each step its address would take more registers than the number.
                self.slope = self.slopes[self.read("row"), head] * LOG2E
                zero = jnp.zeros((ROWS,), jnp.float32)
                row_sums = plgpu.layout_cast(zero, plgpu.Layout.WGMMA.reduce(1))

            def step(i: Scalar, carry: Any, **options: bool) -> Any:
                del i
                number, index, sums = carry
                sums = self.afresh().step(number, index, full, sums, dk, dv, **options)
                if longest_first(self.scores):
                    following = jnp.where(index == first, last - 1, index - 1)
                else:
                    following = jnp.where(index + 1 == last, first, index + 1)
                return number + 1, following, sums

            begin = last - 1 if longest_first(self.scores) else first
            carry = number, begin, row_sums
            number, _, row_sums = self.steps(steps, step, carry)
            if self.scores.alibi:
                store_rows(slope_ref.at[head, self.mine], row_sums, 0, ROWS)
            return number

        lax.fori_loop(0, loops, head_loop, jnp.int32(0))
        return dk[...], dv[...]

    def steps(self, count: Scalar, step: Callable[..., Any], carry: Any) -> Any:
        """All steps of a head or of several; the carry begins with a step's number."""
        return lax.fori_loop(0, count, step, carry)

    def step(
        self,
        number: Scalar,
        index: Scalar,
        full: tuple[Scalar, Scalar],
        slope_sums: Any,
        dk: Ref,
        dv: Ref,
    ) -> Any:
        """One tile of queries; returns the sums for slopes."""
        raise NotImplementedError

    # --- pieces of a step -------------------------------------------------------------

    def start_scores(
        self,
        acc: Ref,
        left: Any,
        right: Any,
        chunks: int,
        held: tuple[Any, ...] = (),
    ) -> None:
        """Starts keys by queries, one wgmma group a chunk."""
        for c in range(chunks):
            columns = right.at[c, self.queries].transpose((1, 0))
            rows = pl.ds(self.key_offset, ROWS)
            here = held[c] if c < len(held) else left.at[self.zero + c, rows]
            plgpu.wgmma(acc, here, columns)

    def start_sum(self, acc: Ref, left: Any, right: Any, c: int) -> None:
        """Starts a matmul of keys by queries, a chunk of columns of dk or dv."""
        columns = acc.at[:, c * CHUNK : (c + 1) * CHUNK]
        plgpu.wgmma(columns, left, right.at[self.first_chunk(acc) + c])

    def start_dq(self, acc: Ref, buffer: Scalar, n: int) -> None:
        """Starts the nth of its parts of dq; both warpgroups' ds lies in the buffer."""
        chunks = jnp.int32(self.problem.chunks)
        unit = n * BACKWARD_CONSUMERS + self.warpgroup
        left = buffer.at[lax.div(unit, chunks)].transpose((1, 0))
        plgpu.wgmma(acc, left, self.k_smem.at[lax.rem(unit, chunks)])

    def hand_over_dq(self, acc: Ref) -> None:
        """Gives a part of dq, which is complete, to the producer, who adds it."""
        plgpu.barrier_wait(self.scratch["dq_empty"].at[self.warpgroup])
        values = in_register_order(plgpu.wgmma_accumulator_load(acc, wait_n=None))
        self.scratch["dq_smem"].at[self.warpgroup][...] = values
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.scratch["dq_full"].at[self.warpgroup])

    def stats(self, stage: Scalar, which: int) -> Any:
        """Minus lse (0) or minus delta (1) of its queries."""
        return self.scratch["stats_smem"].at[stage, which, self.queries]

    def score_gradients(
        self,
        p: Any,
        dp: Any,
        derivative: Any,
        index: Scalar,
        stage: Scalar,
        slope_sums: Any,
    ) -> tuple[Any, Any]:
        """Ds, and the sums for slopes with it."""
        ds = p * scale_and_add_row(dp, 1.0, self.stats(stage, 1))
        if self.scores.alibi:
            # Computed again: until here distances would take a register an element.
            # The compiler must not see that they are those of the weights.
            away = distances(ds, lax.optimization_barrier(-self.shift(index)))
            slope_sums = slope_sums - jnp.sum(ds * away, axis=1)
        if derivative is not None:
            ds = ds * derivative
        return ds, slope_sums

    def weights(
        self,
        s: Any,
        stage: Scalar,
        index: Scalar,
        full: tuple[Scalar, Scalar],
    ) -> tuple[Any, Any]:
        """Weights, and the derivative of a score by the product."""
        x = self.scores
        derivative = None
        factor = x.scale * LOG2E
        if x.softcap is not None:
            capped = jnp.tanh(s * (x.scale / x.softcap))
            derivative = 1.0 - capped * capped
            s, factor = capped, x.softcap * LOG2E
        if x.alibi:
            away = distances(s, -self.shift(index))
            s, factor = s * factor - away * self.slope, 1.0
        elif factor <= 0:  # which would not leave -inf as it is
            s, factor = s * factor, 1.0
        unmasked = index >= full[0]
        if x.window[0] is not None:
            unmasked &= index < full[1]
        # One loop whose steps may mask: loops of their own for steps that do and steps
        # that do not would need more registers than there are.
        mask = functools.partial(self.mask, index=index)
        s = lax.cond(unmasked, lambda s: s, mask, s)
        weights = jnp.exp2(scale_and_add_row(s, factor, self.stats(stage, 0)))
        return weights, derivative

    def shift(self, index: Scalar) -> Any:
        """Distance of the first key to the right of the first query's diagonal."""
        first_key = self.read("k_base") + self.key_offset
        first_query = query_start(self.blocks, self.read, index) + self.query_offset
        return first_key - first_query - self.read("offset")

    def mask(self, s: Any, index: Scalar) -> Any:
        """``-inf`` for keys that are not the tile's and beyond the window."""
        left, right = self.scores.window
        first, last = self.read("k_first"), self.read("k_stop") - 1
        offset, shift = self.key_offset, self.shift(index)
        return keep_band(
            s,
            rows=(first - offset, last - offset),
            distance=(
                None if right is None else shift - right,
                None if left is None else shift + left,
            ),
        )


class OwnKeys(BackwardMainloop):
    """64 keys of its own, all queries of a step, all columns.

    Matmuls and what lies between them take turns in a warpgroup: it stands still until
    all but the last few of the matmuls it started are done. So the tensor cores are
    busy only while the warpgroups are at different places of a step. The second one
    starts half a step late, and nothing makes them meet: dq of a step, which needs the
    ds of both, is multiplied in the step after it.
    """

    def free(self) -> dict[str, int]:
        """Free the stages and both buffers of ds."""
        return super().free() | {"ds_empty": 2}

    def steps(self, count: Scalar, step: Callable[..., Any], carry: Any) -> Any:
        """All steps, and dq of the last one."""
        once = jnp.minimum(count, 1)

        @pl.when((self.warpgroup == 1) & (count > 0))
        def _() -> None:
            plgpu.barrier_wait(self.scratch["half_a_step"])

        def end(_: Any, number: Scalar) -> Any:
            last = functools.partial(self.last_dq, number - 1)
            pl.run_scoped(last, _DQ_PART)
            return number

        carry = lax.fori_loop(0, once, functools.partial(step, begin=True), carry)
        carry = lax.fori_loop(once, count, step, carry)
        lax.fori_loop(0, once, end, carry[0])
        return carry

    def _loop(self, slope_ref: Ref, dk: Ref, dv: Ref) -> tuple[Any, Any]:
        sums = super()._loop(slope_ref, dk, dv)
        for buffer in range(2):  # see the last phase
            plgpu.barrier_wait(self.scratch["ds_empty"].at[buffer])
        return sums

    def step(
        self,
        number: Scalar,
        index: Scalar,
        full: tuple[Scalar, Scalar],
        slope_sums: Any,
        dk: Ref,
        dv: Ref,
        begin: bool = False,
    ) -> Any:
        """One tile of queries, and dq of the one before it."""
        stage, do_stage = (lax.rem(number, jnp.int32(n)) for n in self.stages)
        scratch, dtype = self.scratch, self.problem.dtype
        plgpu.barrier_wait(scratch["q_full"].at[stage])

        def weights(s_acc: Ref, dp_acc: Ref) -> tuple[Any, ...]:
            chunks, behind = self.problem.score_chunks, self.problem.value_chunks
            q = self.q_smem.at[stage]
            self.start_scores(s_acc, self.k_smem, q, chunks, self.held)
            plgpu.barrier_wait(scratch["do_full"].at[do_stage])
            self.start_scores(dp_acc, self.v_smem, self.do_smem.at[do_stage], behind)
            s = plgpu.wgmma_accumulator_load(s_acc, wait_n=behind)
            p, derivative = self.weights(s, stage, index, full)
            dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=0)
            if begin:

                @pl.when(self.warpgroup == 0)
                def _() -> None:
                    plgpu.barrier_arrive(scratch["half_a_step"])

            # Operands in registers are made after the matmuls, see the forward pass.
            p = lax.optimization_barrier(p)
            ds, sums = self.score_gradients(p, dp, derivative, index, stage, slope_sums)
            p, ds = lax.optimization_barrier((p.astype(dtype), ds.astype(dtype)))
            return p, ds, sums

        acc = plgpu.WGMMAAccumulatorRef(self.shape, jnp.float32)
        p, ds, slope_sums = pl.run_scoped(weights, acc, acc)

        def products(*dq_acc: Ref) -> None:
            chunks = range(self.problem.chunks)
            for c in chunks:
                self.start_sum(dv, p, self.do_smem.at[do_stage], c)
            self.hand_over_ds(ds, number)
            for acc in dq_acc:
                self.start_dq_of(number - 1, acc)
            for c in chunks:
                self.start_sum(dk, ds, self.q_smem.at[stage], c)
            plgpu.wgmma_wait(len(dq_acc) + len(chunks))
            plgpu.barrier_arrive(scratch["do_empty"].at[do_stage])
            plgpu.wgmma_wait(len(chunks))
            for acc in dq_acc:
                self.finish_dq_of(number - 1, acc)
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(scratch["q_empty"].at[stage])

        if begin:
            products()
        else:
            pl.run_scoped(products, _DQ_PART)
        return slope_sums

    def hand_over_ds(self, ds: Any, number: Scalar) -> None:
        """Gives ds of a step to both warpgroups."""
        buffer = lax.rem(number, jnp.int32(2))
        plgpu.barrier_wait(self.scratch["ds_empty"].at[buffer])
        smem = self.scratch["ds_smem"].at[buffer]
        for m in range(self.blocks.block_q // ROWS):
            smem[m, self.mine] = ds[:, m * ROWS : (m + 1) * ROWS]
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.scratch["ds_full"].at[buffer])

    def start_dq_of(self, number: Scalar, acc: Ref) -> None:
        """Starts dq of a step, once ds of both warpgroups is there."""
        buffer = lax.rem(number, jnp.int32(2))
        plgpu.barrier_wait(self.scratch["ds_full"].at[buffer])
        self.start_dq(acc, self.scratch["ds_smem"].at[buffer], 0)

    def finish_dq_of(self, number: Scalar, acc: Ref) -> None:
        """Gives dq of a step, which is complete, to the producer."""
        buffer = lax.rem(number, jnp.int32(2))
        plgpu.barrier_arrive(self.scratch["ds_empty"].at[buffer])
        self.hand_over_dq(acc)

    def last_dq(self, number: Scalar, acc: Ref) -> None:
        """Dq of the last step."""
        self.start_dq_of(number, acc)
        plgpu.wgmma_wait(0)
        self.finish_dq_of(number, acc)


class SharedKeys(BackwardMainloop):
    """The 64 keys of both warpgroups, half of the queries, half of the columns."""

    def step(
        self,
        number: Scalar,
        index: Scalar,
        full: tuple[Scalar, Scalar],
        slope_sums: Any,
        dk: Ref,
        dv: Ref,
    ) -> Any:
        """One tile of queries."""
        stage, do_stage = (lax.rem(number, jnp.int32(n)) for n in self.stages)
        scratch, dtype = self.scratch, self.problem.dtype
        # One buffer each. Once the gradients of the next step are there, both
        # warpgroups have multiplied with these weights; once its weights are there,
        # with this ds.
        p_smem, buffer = scratch["p_smem"], scratch["ds_smem"].at[0]
        plgpu.barrier_wait(scratch["q_full"].at[stage])

        def weights(s_acc: Ref, dp_acc: Ref) -> Any:
            chunks, behind = self.problem.score_chunks, self.problem.value_chunks
            q = self.q_smem.at[stage]
            self.start_scores(s_acc, self.k_smem, q, chunks, self.held)
            plgpu.barrier_wait(scratch["do_full"].at[do_stage])
            self.start_scores(dp_acc, self.v_smem, self.do_smem.at[do_stage], behind)
            s = plgpu.wgmma_accumulator_load(s_acc, wait_n=behind)
            p, derivative = self.weights(s, stage, index, full)
            store_columns(p_smem, p.astype(dtype), self.query_offset)
            self.meet("p_full")
            self.start_sum(dv, p_smem, self.do_smem.at[do_stage], 0)
            dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=1)
            ds, sums = self.score_gradients(p, dp, derivative, index, stage, slope_sums)
            store_columns(buffer.at[0], ds.astype(dtype), self.query_offset)
            return sums

        def products(*dq_accs: Ref) -> None:
            self.meet("ds_full")
            # Parts of dq as far apart as can be: the producer has room for one of each
            # warpgroup, and adds it while the others are multiplied.
            more = range(1, dv.shape[1] // CHUNK)
            self.start_dq(dq_accs[0], buffer, 0)
            for c in more:
                self.start_sum(dv, p_smem, self.do_smem.at[do_stage], c)
            self.start_dq(dq_accs[1], buffer, 1)
            for c in range(2):
                self.start_sum(dk, buffer.at[0], self.q_smem.at[stage], c)
            plgpu.wgmma_wait(3 + len(more))
            self.hand_over_dq(dq_accs[0])
            plgpu.wgmma_wait(3)
            plgpu.barrier_arrive(scratch["do_empty"].at[do_stage])
            plgpu.wgmma_wait(2)
            self.hand_over_dq(dq_accs[1])
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(scratch["q_empty"].at[stage])

        acc = plgpu.WGMMAAccumulatorRef(self.shape, jnp.float32)
        slope_sums = pl.run_scoped(weights, acc, acc)
        pl.run_scoped(products, _DQ_PART, _DQ_PART)
        return slope_sums

    def meet(self, name: str) -> None:
        """Wait until the writes of both warpgroups are visible."""
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.scratch[name])
        plgpu.barrier_wait(self.scratch[name])
