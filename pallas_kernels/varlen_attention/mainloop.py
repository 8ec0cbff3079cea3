"""The mainloop of the Hopper forward kernels: one warpgroup, one tile.

The warpgroup holds 64 queries, their scores, weights and sums in registers and walks
over the keys that they see, as FlashAttention-3 does. Who copies keys and values to
shared memory, and when, is said elsewhere.

**Masks** are applied in the first and last steps of a tile alone: the steps are cut
into three loops, and the one in the middle knows of no mask.
"""

import functools
import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic.aliases import Ref, Scalar
from pallas_kernels.mosaic.chunked_matmul import add_scores, add_values
from pallas_kernels.mosaic.fp8_fragments import as_fp8_operand
from pallas_kernels.mosaic.lanes import (
    any_of_warp,
    distances,
    keep_band,
    lane_sums,
)
from pallas_kernels.varlen_attention.config import (
    ROWS,
    ForwardBlocks,
    Problem,
)
from pallas_kernels.varlen_attention.inputs import Scores
from pallas_kernels.varlen_attention.relative_mosaic_gpu import TileTerms


LOG2E = math.log2(math.e)
_LN2 = math.log(2.0)

_SLACK, _SHARE = 8.0, 3.0
"""Thresholds at which the running maximum of a query follows larger scores: at once if
the largest weight is then a ``2 ** -_SHARE``-th of their sum or more, and if it is
``2 ** _SLACK`` or more. Else most steps leave the sums as they are, as in
FlashAttention-4. A maximum's own weight is 1 and not rounded, which tells in the error
where it is a good part of the sum; 16 bits hold weights up to the limit as well. The
limit is computed anew only where sums are scaled: it is too low meanwhile, at most."""

_FP8_SLACK, _FP8_OFFSET = 2.0, 6.0
"""The same limit for weights that become E4M3, which holds 448, and what weights are
multiplied by, as a power of two: unlike other types it has few numbers below 1."""


_JOINED = 128, 256
"""Columns of values that one instruction multiplies, where they are as many: a half or
a quarter as many instructions as by chunks of 64. Took 2 to 3% less with both."""

_LATE = 32
"""Keys of a step whose weights are then computed only after the wait for the values of
the step before, among the conversions of the others to 16 bits, which have to wait for
them. Another 1% of a pass without a mask, 3% with head dim 256; 64 keys took as long
as none."""


def in_registers(ref: Ref, count: int) -> tuple[Any, ...]:
    """The first chunks of 64 rows of shared memory, as left operands of matmuls."""
    return tuple(
        plgpu.load(ref.at[chunk], layout=operand_layout(ref.dtype), optimized=False)
        for chunk in range(count)
    )


def operand_layout(dtype: jnp.dtype) -> plgpu.Layout:
    """How lanes hold a left operand of a matmul."""
    fp8 = jnp.dtype(dtype).itemsize == 1
    return plgpu.Layout.WGMMA_8BIT if fp8 else plgpu.Layout.WGMMA


def step_start(blocks: ForwardBlocks, tile: dict[str, Scalar], step: Scalar) -> Scalar:
    """The first key of a step; the last step may be moved up to end with the data."""
    return jnp.minimum(
        tile["k0"] + step * blocks.block_k, tile["k_total"] - blocks.block_k
    )


def tile_terms(scores: Scores, blocks: ForwardBlocks) -> TileTerms | None:
    """The terms of a relative bias that a block reads in a step."""
    return TileTerms.of(scores.relative, ROWS, blocks.consumers, blocks.block_k)


class ForwardMainloop:
    """One warpgroup: 64 queries against all keys that the tile attends to."""

    def __init__(
        self,
        problem: Problem,
        scores: Scores,
        blocks: ForwardBlocks,
        tile: dict[str, Scalar],
        warpgroup: Scalar,
        sink: Scalar,
        slope: Scalar,
        scratch: dict[str, Ref],
        buffer: Scalar = 0,
        steps_before: Scalar = 0,
        descales: tuple[Scalar, Scalar] | None = None,
    ) -> None:
        self.problem, self.scores, self.blocks = problem, scores, blocks
        self.tile, self.warpgroup, self.scratch = tile, warpgroup, scratch
        self.sink, self.slope, self.steps_before = sink, slope, steps_before
        self.buffer, self.descales = buffer, descales
        self.q_barrier = buffer * blocks.consumers + warpgroup
        self.q_smem, self.k_smem, self.v_smem = (
            scratch[f"{name}_smem"][0] for name in "qkv"
        )
        self.shape = (ROWS, blocks.block_k)
        self.q0 = tile["q0"] + blocks.first_token(warpgroup)
        # In few steps a branch takes longer than what it may leave out.
        self.on_demand = blocks.consumers > 1
        self.values_behind, _, self.value_width = problem.value_tiles(blocks.block_k)
        fp8 = problem.fp8
        self.joined = problem.value_size in _JOINED and not fp8
        if self.joined:
            self.values_behind = 1
        self.late = _LATE if self.joined and blocks.overlap else 0
        self.slack, self.offset = (_FP8_SLACK, _FP8_OFFSET) if fp8 else (_SLACK, 0.0)

    @property
    def scale(self) -> Any:
        """The factor of the products of queries and keys."""
        scale = self.scores.scale
        return scale if self.descales is None else scale * self.descales[0]

    @property
    def log2_factor(self) -> Any:
        """The factor that turns the scores of `log2_scores` into exponents of two."""
        return self.scale * LOG2E if self.scores.plain else 1.0

    def early_and_late(self, x: Any) -> tuple[Any, ...]:
        """The keys of a step in two parts, if the last ones are late: `_LATE`."""
        early = self.shape[1] - self.late
        return (x[:, :early], x[:, early:]) if self.late else (x,)

    def operand(self, weights: Any) -> Any:
        """Weights in the type of the values, as the left operand of a matmul."""
        fp8, dtype = self.problem.fp8, self.problem.dtype
        return as_fp8_operand(weights) if fp8 else weights.astype(dtype)

    # --- pieces of a step -------------------------------------------------------------

    def stage(self, step: Scalar) -> Scalar:
        """The stage of the ring that holds a step."""
        return lax.rem(self.steps_before + step, jnp.int32(self.blocks.stages))

    def wait(self, name: str, step: Scalar) -> Any:
        """The stage of a step, once its keys or values are there."""
        stage = self.stage(step)
        plgpu.barrier_wait(self.scratch[f"{name}_full"].at[stage])
        return stage

    def release(self, name: str, step: Scalar) -> None:
        """Hands the stage of a step back to the producer."""
        plgpu.barrier_arrive(self.scratch[f"{name}_empty"].at[self.stage(step)])

    def release_queries(self) -> None:
        """Hands the queries back."""
        plgpu.barrier_arrive(self.scratch["q_empty"].at[self.q_barrier])

    def take_turns(self) -> None:
        """Meets the other consumer: one has multiplied, the other one exponentiated."""
        if self.blocks.ping_pong:
            plgpu.barrier_arrive(self.scratch["turn"])
            plgpu.barrier_wait(self.scratch["turn"])

    def multiply_keys(self, acc: Ref, stage: Scalar) -> None:
        """Starts ``q @ k.T``, one wgmma group a chunk, or one in all."""
        if self.joined:
            add_scores(acc, self.held, self.queries, self.k_smem.at[stage])
            return
        for chunk in range(self.problem.chunks):
            keys = self.k_smem.at[stage, chunk].transpose((1, 0))
            held = chunk < len(self.held)
            queries = self.held[chunk] if held else self.queries.at[chunk]
            plgpu.wgmma(acc, queries, keys)

    def multiply_values(self, acc: Ref, weights: Any, stage: Scalar) -> None:
        """Starts ``weights @ v``, `values_behind` wgmma groups."""
        if self.joined:
            add_values(acc, weights, self.v_smem.at[stage])
            return
        (weights,) = weights
        for chunk in range(self.values_behind):
            values = self.v_smem.at[stage, chunk]
            part = slice(chunk * self.value_width, (chunk + 1) * self.value_width)
            if self.problem.fp8:
                plgpu.wgmma(acc, weights[:, part], values.transpose((1, 0)))
            else:
                plgpu.wgmma(acc.at[:, part], weights, values)

    def log2_scores(self, products: Any, step: Scalar, masked: bool) -> Any:
        """Scores; times `log2_factor` they are logarithms to base 2."""
        x = self.scores
        start = step_start(self.blocks, self.tile, step)
        # How far the first key lies to the right of the first query's diagonal.
        shift = start - self.q0 - self.tile["offset"]
        scale = self.scale
        if (relative := tile_terms(x, self.blocks)) is not None:
            products = relative.add_step(
                products * scale,
                self.scratch,
                self.stage(step),
                self.warpgroup,
                self.tile["q0"],
                start,
            )
            scale = 1.0
        if not x.plain:
            if x.softcap is not None:
                capped = jnp.tanh(products * (scale / x.softcap))
                products = capped * (x.softcap * LOG2E)
            else:
                products = products * (scale * LOG2E)
            if x.alibi:
                away = distances(products, shift)
                products = products - away * (self.slope * LOG2E)
        if masked:
            left, right = x.window
            # Keys of the step before, which a step that was moved up holds again.
            least = self.tile["k0"] + step * self.blocks.block_k - start
            if self.problem.fp8:  # and those before the first, see `tile_fields`
                least = jnp.maximum(least, self.tile["k_first"] - start)
            products = keep_band(
                products,
                columns=(least, self.tile["k_end"] - start - 1),
                distance=(
                    None if left is None else -left - shift,
                    None if right is None else right - shift,
                ),
            )
        return products

    def softmax(
        self, s: Any, state: tuple[Any, ...], masked: bool
    ) -> tuple[tuple[Any, ...], tuple[Any, ...], Any, tuple[Any, ...]]:
        """Weights of a step, of late ones logarithms; what `accumulate` has to know.

        The state of a query is the score that weights are relative to, the limit above
        which another one takes its place, and the sum of the weights: `sum_of`.
        """
        factor = self.log2_factor
        m, limit, total = state
        highest = jnp.max(s, axis=1) * factor
        grown = highest > limit
        on_demand = self.on_demand
        if self.offset:
            highest = highest - self.offset
        m_new = jnp.where(grown, highest, m) if on_demand else jnp.maximum(highest, m)
        safe = m_new
        if masked:  # a query may have seen nothing yet
            safe = jnp.where(m_new == -jnp.inf, jnp.zeros_like(m_new), m_new)
        s = s * factor if self.scores.plain else s
        s = s - lax.broadcast_in_dim(safe, self.shape, [0])
        s, *late = self.early_and_late(s)
        p = jnp.exp2(s)
        added = m - safe, self.sum_of(p)
        scales = any_of_warp(grown) if on_demand else None
        return (p, *late), (m_new, limit, total), scales, added

    def late_weights(self, p: tuple[Any, ...], total: Any) -> tuple[Any, Any]:
        """All weights of a step from the early ones, and the sum of all."""
        p = (p[0], *map(jnp.exp2, p[1:]))
        for part in p[1:]:
            total += self.sum_of(part)
        return p, total

    def sum_of(self, weights: Any) -> Any:
        """Sums of the rows, [64], or of what each lane has of them, [64, 8]."""
        return lane_sums(weights) if self.late else jnp.sum(weights, axis=1)

    def of_rows(self, total: Any) -> Any:
        """The sums of the rows from those of `sum_of`."""
        return jnp.sum(total, axis=1) if self.late else total

    def accumulate(
        self,
        sums: Any,
        state: tuple[Any, ...],
        scales: Any,
        added: tuple[Any, Any],
    ) -> tuple[Any, tuple[Any, ...]]:
        """Sums and state for a step's values; most steps leave the sums as they are."""
        m, limit, total = state
        shift, weights = added

        def follow() -> tuple[Any, ...]:
            alpha = jnp.exp2(shift)
            new = total * (self.spread(alpha, 8) if self.late else alpha) + weights
            moved = self.limit(m, new)
            if self.on_demand:
                # Only of queries that follow themselves: another one of the warp may be
                # the next sequence's, and no bit of a query may depend on it.
                moved = jnp.where(shift < 0, moved, limit)
            return sums * self.spread(alpha, self.problem.value_size), moved, new

        def stay() -> tuple[Any, ...]:
            return sums, limit, total + weights

        if self.on_demand:
            sums, limit, total = lax.cond(scales, follow, stay)
        else:
            sums, limit, total = follow()
        return sums, (m, limit, total)

    def limit(self, m: Any, total: Any) -> Any:
        """The score above which weights become relative to a larger one."""
        if not self.on_demand:
            return m
        share = jnp.log2(self.of_rows(total)) - _SHARE
        least, most = self.offset, self.offset + self.slack
        return m + jnp.minimum(jnp.maximum(share, least), most)

    def spread(self, column: Any, width: int) -> Any:
        """A number a query to so many columns."""
        return lax.broadcast_in_dim(column, (ROWS, width), [0])

    # --- loops ------------------------------------------------------------------------

    def sections(self, step: Scalar, carry: Any, start: int) -> Any:
        """All steps from `start`: with a mask, without, with a mask."""
        first, last, steps = (self.tile[x] for x in ("first", "last", "steps"))
        masked = functools.partial(step, masked=True)
        before = self.problem.fp8 and start == 0  # of the first key
        if self.scores.window[0] is not None or before:
            carry = lax.fori_loop(start, first, masked, carry)
            last = jnp.maximum(last, start)
            first = jnp.maximum(first, start)
        else:
            first = jnp.int32(start)
            last = jnp.maximum(last, start)
        carry = lax.fori_loop(first, last, functools.partial(step, masked=False), carry)
        return lax.fori_loop(last, steps, masked, carry)

    def run(self) -> tuple[Any, Any]:
        """The outputs of the tile: values [64, Hv] and lse [64], fp32."""
        plgpu.barrier_wait(self.scratch["q_full"].at[self.q_barrier])
        self.queries = self.q_smem.at[self.buffer, self.warpgroup]
        held = min(self.blocks.held, self.problem.chunks)
        self.held = in_registers(self.queries, held)
        if held:  # before the copy engine writes the next ones
            plgpu.commit_smem()
        column = plgpu.Layout.WGMMA.reduce(1)
        m = plgpu.layout_cast(jnp.full((ROWS,), -jnp.inf, jnp.float32), column)
        total = jnp.zeros((ROWS, 8) if self.late else (ROWS,), jnp.float32)
        total = plgpu.layout_cast(total, plgpu.Layout.WGMMA if self.late else column)
        loop = self.overlapped if self.blocks.overlap else self.in_turn
        acc = plgpu.WGMMAAccumulatorRef((ROWS, self.problem.value_size), jnp.float32)
        sums, state = pl.run_scoped(functools.partial(loop, (m, m, total)), acc)
        m, _, total = state
        return self.normalize(sums, m, total)

    def stand_by(self) -> None:
        """Keeps step with the others where a sequence ends before this warpgroup."""
        plgpu.barrier_wait(self.scratch["q_full"].at[self.q_barrier])
        self.release_queries()

        relative = tile_terms(self.scores, self.blocks) is not None

        def step(i: Scalar, _: None) -> None:
            for name in ("k", "v"):
                self.wait(name, i)
                self.release(name, i)
                self.take_turns()
            if relative:
                self.wait("terms", i)
                self.release("terms", i)

        if self.blocks.ping_pong:
            pl.when(self.warpgroup == 1)(self.take_turns)
        lax.fori_loop(0, self.tile["steps"], step, None)
        if self.blocks.ping_pong:
            pl.when(self.warpgroup == 0)(self.take_turns)

    def in_turn(self, state: tuple[Any, ...], acc: Ref) -> tuple[Any, tuple[Any, ...]]:
        """Steps one after another; two consumers keep the tensor cores busy."""
        steps = self.tile["steps"]

        def step(i: Scalar, state: Any, masked: bool) -> Any:
            stage = self.wait("k", i)

            def product(scores: Any) -> Any:
                self.multiply_keys(scores, stage)
                self.take_turns()
                return scores[...]

            s = pl.run_scoped(
                product, plgpu.WGMMAAccumulatorRef(self.shape, jnp.float32)
            )
            self.release("k", i)
            pl.when(i == steps - 1)(self.release_queries)
            s = self.log2_scores(s, i, masked)
            p, state, scales, added = self.softmax(s, state, masked)
            sums = plgpu.wgmma_accumulator_load(acc, wait_n=None)
            acc[...], state = self.accumulate(sums, state, scales, added)
            p = tuple(map(self.operand, p))
            state, p = lax.optimization_barrier((state, p))
            stage = self.wait("v", i)
            self.take_turns()
            self.multiply_values(acc, p, stage)
            plgpu.wgmma_wait(0)
            self.release("v", i)
            return state

        if self.blocks.ping_pong:
            pl.when(self.warpgroup == 1)(self.take_turns)
        state = self.sections(step, state, 0)
        pl.when(steps == 0)(self.release_queries)
        if self.blocks.ping_pong:
            pl.when(self.warpgroup == 0)(self.take_turns)
        return acc[...], state

    def overlapped(
        self, state: tuple[Any, ...], acc: Ref
    ) -> tuple[Any, tuple[Any, ...]]:
        """Overlap the weights of a step with the values of the one before."""
        steps = self.tile["steps"]

        def step(i: Scalar, carry: Any, masked: bool) -> Any:
            state, p = carry
            keys = self.wait("k", i)
            self.take_turns()

            def products(scores: Any) -> Any:
                self.multiply_keys(scores, keys)
                self.multiply_values(acc, p, self.stage(i - 1))
                return plgpu.wgmma_accumulator_load(scores, wait_n=self.values_behind)

            s = pl.run_scoped(
                products, plgpu.WGMMAAccumulatorRef(self.shape, jnp.float32)
            )
            self.release("k", i)
            self.take_turns()
            s = self.log2_scores(s, i, masked)
            p, state, scales, added = self.softmax(s, state, masked)
            # Also keeps the exponentials ahead of the wait for the matmuls: without a
            # loop between them, the assembler moves that wait before all of them.
            self.wait("v", i)
            sums = acc[...]
            # No register that a later matmul reads may be written while matmuls run,
            # or the assembler (its note C7513) makes them run one after another. So the
            # weights become 16-bit operands only here.
            p, state, added = lax.optimization_barrier((p, state, added))
            self.release("v", i - 1)
            acc[...], (*state, total) = self.accumulate(sums, state, scales, added)
            p, total = self.late_weights(p, total)
            return (*state, total), tuple(map(self.operand, p))

        def first_step(_: Any, carry: Any, masked: bool) -> Any:
            state, _ = carry
            keys = self.wait("k", 0)
            self.take_turns()

            def products(scores: Any) -> Any:
                self.multiply_keys(scores, keys)
                return scores[...]

            s = pl.run_scoped(
                products, plgpu.WGMMAAccumulatorRef(self.shape, jnp.float32)
            )
            self.release("k", 0)
            self.take_turns()
            s = self.log2_scores(s, jnp.int32(0), masked)
            p, (m, _, _), _, (_, total) = self.softmax(s, state, masked)
            self.wait("v", 0)
            p, total = self.late_weights(p, total)
            return (m, self.limit(m, total), total), tuple(map(self.operand, p))

        def last_values(_: Any, p: Any) -> Any:
            self.multiply_values(acc, p, self.stage(steps - 1))
            plgpu.wgmma_wait(0)
            self.release("v", steps - 1)
            return p

        if self.blocks.ping_pong:
            pl.when(self.warpgroup == 1)(self.take_turns)
        dtype = self.problem.dtype
        p = plgpu.layout_cast(jnp.zeros(self.shape, dtype), operand_layout(dtype))
        p = self.early_and_late(p)
        # Loops of at most one trip, because tiles without keys exist.
        once = jnp.minimum(steps, 1)
        clear = jnp.where(self.tile["first"] == 0, jnp.minimum(self.tile["last"], 1), 0)
        carry = state, p
        for begin, end, masked in ((0, clear, False), (clear, once, True)):
            body = functools.partial(first_step, masked=masked)
            carry = lax.fori_loop(begin, end, body, carry)
        state, p = self.sections(step, carry, 1)
        self.release_queries()
        lax.fori_loop(0, once, last_values, p)
        if self.blocks.ping_pong:
            pl.when(self.warpgroup == 0)(self.take_turns)
        return acc[...], state

    def normalize(self, sums: Any, m: Any, total: Any) -> tuple[Any, Any]:
        """Divides by the sum of weights, the sink's included; and the logarithm."""
        total = self.of_rows(total)
        zero, minus_inf = jnp.zeros_like(m), jnp.full_like(m, -jnp.inf)
        if self.sink is not None:  # one more key, whose value is zero
            sink = jnp.where(self.tile["real"] == 1, self.sink * LOG2E, -jnp.inf)
            m_new = jnp.maximum(m, sink)
            safe = jnp.where(m_new == -jnp.inf, zero, m_new)
            alpha = jnp.exp2(m - safe)
            total = total * alpha + jnp.exp2(sink - safe)
            sums = sums * self.spread(alpha, self.problem.value_size)
            m = m_new
        seen = total > 0
        inverse = jnp.where(seen, 1.0 / jnp.where(seen, total, zero + 1.0), zero)
        if self.descales is not None:
            inverse = inverse * self.descales[1]
        log_sum = jnp.where(seen, (m + jnp.log2(total)) * _LN2, minus_inf)
        return sums * self.spread(inverse, self.problem.value_size), log_sum
