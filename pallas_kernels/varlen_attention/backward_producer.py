"""The producer warpgroup of the Hopper backward kernel: copies, and sums of dq."""

import functools
from typing import Any, Literal

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic.aliases import Ref, Scalar
from pallas_kernels.mosaic.copies import copy_rows
from pallas_kernels.varlen_attention.config import (
    BACKWARD_CONSUMERS,
    ROWS,
    BackwardBlocks,
    Problem,
)
from pallas_kernels.varlen_attention.inputs import Scores
from pallas_kernels.varlen_attention.mainloop_backward import (
    longest_first,
    query_start,
)


def units(problem: Problem, blocks: BackwardBlocks) -> int:
    """Parts of 64 x 64 of dq of a tile of queries and a head."""
    return blocks.block_q // ROWS * problem.chunks


def rank_of(
    scores: Scores, blocks: BackwardBlocks, tile: dict[str, Scalar], index: Scalar
) -> Any:
    """Number of tiles of keys that add to a tile of queries before this one."""
    if longest_first(scores):
        left, right = scores.window
        start = 0
        if left is not None:
            seen = index * blocks.block_q + tile["reach"] - (left + (right or 0))
            start = lax.div(jnp.maximum(seen, 0), jnp.int32(blocks.block_k))
        return tile["index"] - start
    last = tile["k_tiles"] - 1
    if scores.window[1] is not None:
        stop = jnp.minimum((index + 1) * blocks.block_q, tile["q_len"])
        seen = stop + tile["reach"]
        last = jnp.minimum(last, lax.div(seen - 1, jnp.int32(blocks.block_k)))
    return last - tile["index"]


class Producer:
    """One warp streams queries and gradients in, one waits for turns, one adds dq."""

    def __init__(
        self,
        problem: Problem,
        scores: Scores,
        blocks: BackwardBlocks,
        tile: dict[str, Scalar],
        key_head: Scalar,
        scratch: dict[str, Ref],
    ) -> None:
        self.problem, self.scores, self.blocks = problem, scores, blocks
        self.tile, self.key_head, self.scratch = tile, key_head, scratch
        self.heads = problem.groups // blocks.splits
        self.per_head = tile["last"] - tile["first"]
        self.stages = blocks.stages, blocks.gradient_stages

    def place(self, step: Scalar) -> tuple[Any, Any]:
        """The query head and the tile of queries of a step."""
        head = self.key_head * self.heads + lax.div(step, self.per_head)
        within = lax.rem(step, self.per_head)
        if longest_first(self.scores):
            return head, self.tile["last"] - 1 - within
        return head, self.tile["first"] + within

    @property
    def steps(self) -> Any:
        """The number of steps of all query heads of the block."""
        return self.per_head * self.heads

    def load_all(self, q: Ref, k: Ref, v: Ref, dout: Ref, stats: Ref) -> None:
        """Keys and values, then what each step needs."""
        scratch = self.scratch
        kv_head = lax.div(self.key_head, jnp.int32(self.blocks.splits))
        for ref, name in ((k, "k"), (v, "v")):
            copy_rows(
                ref,
                self.tile["row"],
                self.tile["k_base"],
                kv_head,
                scratch[f"{name}_smem"][1],
                scratch["kv_full"],
            )

        def step(i: Scalar, _: None) -> None:
            self.load(i, q, dout, stats)

        lax.fori_loop(0, self.steps, step, None)

        # Every waiter must see each phase of a barrier.
        for name, stages in zip(("q_empty", "do_empty"), self.stages, strict=True):
            for i in range(stages):
                stage = lax.rem(self.steps + i, jnp.int32(stages))
                plgpu.barrier_wait(scratch[name].at[stage])

    def poll_all(self, turns: Ref, q_slots: int) -> None:
        """Tells the adder of its turns."""

        def step(i: Scalar, _: None) -> None:
            turn, rank = self.turn(i, turns, q_slots)
            if not self.scores.deterministic:
                rank = jnp.minimum(rank, 1)  # all but the first add in any order
            plgpu.semaphore_wait(turn, rank, decrement=False, memory_scope="gpu")
            plgpu.barrier_wait(self.scratch["turn_empty"])
            plgpu.barrier_arrive(self.scratch["turn_full"])

        lax.fori_loop(0, self.steps, step, None)
        plgpu.barrier_wait(self.scratch["turn_empty"])  # see its last phase

    def turn(self, step: Scalar, turns: Ref, q_slots: int) -> tuple[Any, Any]:
        """Return the counter of additions to a step's dq, and how many come before."""
        head, index = self.place(step)
        q_tile = self.tile["q_tile"] + index
        rank = rank_of(self.scores, self.blocks, self.tile, index)
        return turns.at[head * q_slots + q_tile], rank

    def add_all(self, sums: Ref, turns: Ref, q_slots: int) -> None:
        """Dq of each step to global memory."""
        for part in range(BACKWARD_CONSUMERS):
            plgpu.barrier_arrive(self.scratch["dq_empty"].at[part])
        plgpu.barrier_arrive(self.scratch["turn_empty"])

        def step(i: Scalar, _: None) -> None:
            self.add(i, sums, turns, q_slots)

        lax.fori_loop(0, self.steps, step, None)

    def load(self, step: Scalar, q: Ref, dout: Ref, stats: Ref) -> None:
        """Queries, gradients, lse and delta of a step."""
        scratch, row = self.scratch, self.tile["row"]
        head, index = self.place(step)
        stage, do_stage = (lax.rem(step, jnp.int32(n)) for n in self.stages)
        start = query_start(self.blocks, self.tile.__getitem__, index)
        plgpu.barrier_wait(scratch["q_empty"].at[stage])
        full = scratch["q_full"].at[stage]
        copy_rows(q, row, start, head, scratch["q_smem"][1].at[stage], full)
        here = stats.at[head, self.tile["q_tile"] + index]
        plgpu.copy_gmem_to_smem(here, scratch["stats_smem"].at[stage], full)
        plgpu.barrier_wait(scratch["do_empty"].at[do_stage])
        full = scratch["do_full"].at[do_stage]
        copy_rows(dout, row, start, head, scratch["do_smem"][1].at[do_stage], full)

    def add(self, step: Scalar, sums: Ref, turns: Ref, q_slots: int) -> None:
        """Dq of a step to global memory, when it is this block's turn."""
        scratch = self.scratch
        turn, rank = self.turn(step, turns, q_slots)
        head, index = self.place(step)
        here = sums.at[self.tile["q_tile"] + index, head]
        plgpu.barrier_wait(scratch["turn_full"])
        plgpu.barrier_arrive(scratch["turn_empty"])

        def store(unit: int, reduction: Literal["add"] | None) -> None:
            plgpu.copy_smem_to_gmem(
                scratch["dq_smem"].at[unit % BACKWARD_CONSUMERS],
                here.at[unit],
                reduction_op=reduction,
            )

        for unit in range(units(self.problem, self.blocks)):
            part = unit % BACKWARD_CONSUMERS
            plgpu.barrier_wait(scratch["dq_full"].at[part])
            pl.when(rank == 0)(functools.partial(store, unit, None))
            pl.when(rank > 0)(functools.partial(store, unit, "add"))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(scratch["dq_empty"].at[part])
        plgpu.wait_smem_to_gmem(0)
        plgpu.semaphore_signal(turn, memory_scope="gpu")
