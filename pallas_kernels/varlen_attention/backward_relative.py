"""Hopper backward kernel of attention with a relative-position bias.

It is the kernel for short sequences (`backward_short`) with logits that read terms, as
in the forward pass, and with gradients of these terms. A block that owns 64 queries
walks over all keys that they see, so it has each diagonal of their rows from end to
end, and a block that owns 64 keys has those of theirs (`diagonal_sums`): each sum has
one writer, and gradients repeat bit for bit. Terms of a step come while the step before
it sums; entries that no key or query of the walk takes are zero.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.mosaic.aliases import Ref, Scalar
from pallas_kernels.mosaic.copies import CHUNK
from pallas_kernels.mosaic.lanes import store_rows
from pallas_kernels.varlen_attention.backward_short import (
    KeyTile,
    Place,
    QueryTile,
    Tile,
    run_tiles,
)
from pallas_kernels.varlen_attention.config import ROWS, BackwardBlocks, Problem
from pallas_kernels.varlen_attention.diagonal_sums import (
    TilePlace,
    store_diagonal_sums,
)
from pallas_kernels.varlen_attention.inputs import Inputs, Scores
from pallas_kernels.varlen_attention.relative_mosaic_gpu import TileTerms


_STAGE = 0
"""The boxes of one step are there at a time: two blocks share a multiprocessor."""


def relative_smem(problem: Problem, scores: Scores) -> int:
    """Bytes of shared memory of a block, beside those of a kernel without a bias."""
    return _tile_terms(scores).smem(1, problem.dtype.itemsize) + ROWS * 4


def backward_relative(
    problem: Problem,
    scores: Scores,
    blocks: BackwardBlocks,
    x: Inputs,
    dout: Float[Array, "R T N H"],
    lse: Float[Array, "R T N"],
    delta: Float[Array, "R T N"],
) -> tuple[Array, ...]:
    """Runs the kernel; ``(dq, dk, dv)`` and the gradients of terms that are there.

    `delta` must be zero for queries that see no key.
    """
    terms = _tile_terms(scores)
    arrays = [a for a in (x.query_terms, x.key_terms) if a is not None]
    width = -(-terms.num_entries // CHUNK) * CHUNK  # chunks are cleared
    gradients = (jax.ShapeDtypeStruct((*a.shape[:3], width), a.dtype) for a in arrays)
    scratch = terms.scratch(1, problem.dtype)
    dq, dk, dv, *dterms = run_tiles(
        problem,
        scores,
        blocks,
        x,
        (dout, lse, delta),
        (_BiasedKeys, _BiasedQueries),
        bias=(jnp.asarray(terms.table()), *arrays),
        bias_gradients=tuple(gradients),
        bias_scratch=scratch | {"carry_smem": plgpu.SMEM((ROWS,), jnp.float32)},
    )
    return dq, dk, dv, *(a[..., : terms.num_entries] for a in dterms)


def _tile_terms(scores: Scores) -> TileTerms:
    terms = TileTerms.of(scores.relative, ROWS, 1, ROWS)
    assert terms is not None  # this kernel is for scores that have them
    return terms


class _BiasedTile(Tile):
    """A tile whose logits read terms, and the gradient of the terms of its rows."""

    of_keys: bool
    gradient: Any
    """[R, T or S, N, entries] of global memory; None without such terms."""

    @property
    def terms(self) -> TileTerms:
        """Of a block of one warpgroup."""
        return _tile_terms(self.scores)

    @property
    def heads(self) -> tuple[Scalar, int]:
        """The first of its query heads, and how many it walks over, one by one."""
        raise NotImplementedError

    def corner(self, step: Scalar) -> tuple[Any, Any, Any]:
        """Query head, first query and first key of a step."""
        raise NotImplementedError

    def run(self, dq: Ref, dk: Ref, dv: Ref, *bias_gradients: Ref) -> None:
        """Computes and writes the gradients of its tile."""
        scratch, self.gradient = self.scratch, None
        if self.terms.by_key if self.of_keys else self.terms.by_query:
            self.gradient = bias_gradients[-1 if self.of_keys else 0]
        entries, full = scratch["entries_smem"], scratch["entries_full"]
        plgpu.copy_gmem_to_smem(self.bias[0], entries, full)
        plgpu.barrier_arrive(scratch["terms_empty"].at[_STAGE])
        pl.when(self.steps > 0)(lambda: self.load_terms(jnp.int32(0)))
        self.clear()
        plgpu.barrier_wait(full)
        super().run(dq, dk, dv)
        plgpu.barrier_wait(scratch["terms_empty"].at[_STAGE])  # see the last phase

    def load_terms(self, step: Scalar) -> None:
        """Asks for the boxes of a step, once those of the step before are read."""
        head, *firsts = self.corner(step)
        where = self.seq.row, head
        self.terms.load(self.scratch, _STAGE, self.bias, where, *firsts)

    def logits(self, s: Any, q_place: Place, k_place: Place) -> tuple[Any, float]:
        """Scaled products and the terms that they read."""
        sums = self.terms.add_step(
            s * self.scores.scale, self.scratch, _STAGE, 0, q_place[0], k_place[0]
        )
        return sums, 1.0

    def meanwhile(self, step: Scalar, ds: Any) -> None:
        """Loads the terms of the next step, and sums gradients of those of this one."""
        following = step + 1
        pl.when(following < self.steps)(lambda: self.load_terms(following))
        if self.gradient is None:
            return
        ds_smem = self.scratch["ds_smem"]
        if not self.of_keys:  # whose products have it there already
            ds_smem[...] = ds
            plgpu.commit_smem()
        head, *firsts = self.corner(step)
        _, first_row, stop_row = self.own_place
        (_, first, stop), _ = self.place(step)
        per_head = jnp.maximum(lax.div(self.steps, jnp.int32(self.heads[1])), 1)
        index = lax.rem(step, per_head)
        place = TilePlace(
            base=self.terms.base(*firsts),
            first_row=first_row,
            stop_row=stop_row,
            first=first,
            stop=stop,
            begins=index == 0,
            ends=index == per_head - 1,
        )
        store_diagonal_sums(
            self.terms,
            self.of_keys,
            ds_smem,
            self.scratch["entries_smem"],
            self.rows_of(head),
            self.scratch["carry_smem"],
            place,
        )

    def rows_of(self, head: Scalar) -> Any:
        """Its rows of the gradient of terms, [64, entries]."""
        return self.gradient.at[self.seq.row, pl.ds(self.own_place[0], ROWS), head]

    def clear(self) -> None:
        """Zeros in its rows; most are overwritten while they are in the cache."""
        if self.gradient is None:
            return
        zeros = jnp.zeros((ROWS, CHUNK), self.problem.dtype)
        zeros = plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)
        _, first, stop = self.own_place
        first_head, count = self.heads

        def of_head(i: Scalar, _: None) -> None:
            rows = self.rows_of(first_head + i)
            for start in range(0, self.gradient.shape[-1], CHUNK):
                store_rows(rows.at[:, pl.ds(start, CHUNK)], zeros, first, stop)

        lax.fori_loop(0, count, of_head, None)


class _BiasedKeys(_BiasedTile, KeyTile):
    """64 keys and values, all queries that see them."""

    of_keys = True

    @property
    def heads(self) -> tuple[Scalar, int]:
        """Those of the group."""
        groups = self.problem.groups
        return self.head * groups, groups

    def corner(self, step: Scalar) -> tuple[Any, Any, Any]:
        """Query head, first query and first key of a step."""
        (first_query, _, _), head = self.place(step)
        return head, first_query, self.own_place[0]


class _BiasedQueries(_BiasedTile, QueryTile):
    """64 queries and their gradients, all keys that they see."""

    of_keys = False

    @property
    def heads(self) -> tuple[Scalar, int]:
        """Its own."""
        return self.head, 1

    def corner(self, step: Scalar) -> tuple[Any, Any, Any]:
        """Query head, first query and first key of a step."""
        (first_key, _, _), _ = self.place(step)
        return self.head, self.own_place[0], first_key
