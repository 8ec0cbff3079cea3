"""Where the forward kernel's keys and values lie, and how its producer copies them.

A source is the operands of the kernel that hold them: packed rows, or the pages of a KV
cache, which a table names in the order of a sequence's tokens.

Axes: R rows of the batch, S packed keys, K key/value heads, H head dim, B sequences, W
pages of a sequence, G tokens of a page.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic.aliases import Ref, Scalar
from pallas_kernels.mosaic.copies import copy_rows, copy_transposed
from pallas_kernels.varlen_attention.config import ForwardBlocks, Problem


class KeysInRows(NamedTuple):
    """Packed keys and values, ``[R, S, K, H]``; 8-bit values are transposed."""

    k: Any
    v: Any

    def pieces(self, problem: Problem, blocks: ForwardBlocks) -> int:
        """Copies that fill a chunk of columns of a step."""
        del problem, blocks
        return 1

    def places(
        self,
        problem: Problem,
        blocks: ForwardBlocks,
        tile: dict[str, Scalar],
        step: Scalar,
        later: int,
    ) -> None:
        """What `copy` has to know of a step before: nothing."""
        del problem, blocks, tile, step, later

    def copy(
        self,
        problem: Problem,
        part: int,
        at: tuple[Scalar, Scalar, Scalar],
        places: None,
        smem: Ref,
        full: Ref,
    ) -> None:
        """Keys (0) or values (1) from a row, token and head on, to shared memory."""
        del places
        copy = copy_transposed if problem.fp8 and part else copy_rows
        copy(self[part], *at, smem, full)


class KeysInPages(NamedTuple):
    """Keys and values in the pages of one layer.

    Keys count from the first token of their sequence. A page past the last token of a
    sequence is none of its own: its last one stands in, whose tokens are masked.
    """

    lines: Any
    """[lines, G, H], the pages of all layers, keys and values, heads: the last two
    vary fastest."""
    table: Any
    """[B, W], the pages of each sequence."""
    layer: Any
    """[1]."""

    def pieces(self, problem: Problem, blocks: ForwardBlocks) -> int:
        """Copies that fill a chunk of columns of a step."""
        return max(1, blocks.block_k // _page(problem))

    def places(
        self,
        problem: Problem,
        blocks: ForwardBlocks,
        tile: dict[str, Scalar],
        step: Scalar,
        later: int,
    ) -> tuple[Scalar, ...]:
        """The first lines of the pages of the step so many `later`."""
        page = jnp.int32(_page(problem))
        start = tile["k0"] + (step + later) * blocks.block_k
        last = lax.div(tile["k_end"] - 1, page)
        first = self.layer[0] * problem.num_pages

        def line(piece: int) -> Scalar:
            index = jnp.minimum(lax.div(start, page) + piece, last)
            number = self.table[tile["sequence"], jnp.maximum(index, 0)]
            # What is no page is never read for a sequence that has tokens there.
            number = jnp.clip(number, 0, problem.num_pages - 1)
            return (first + number) * (2 * problem.kv_heads)

        return tuple(line(piece) for piece in range(self.pieces(problem, blocks)))

    def copy(
        self,
        problem: Problem,
        part: int,
        at: tuple[Scalar, Scalar, Scalar],
        places: tuple[Scalar, ...],
        smem: Ref,
        full: Ref,
    ) -> None:
        """Keys (0) or values (1) from a token and head on, to shared memory."""
        _, start, head = at
        chunks, keys, width = smem.shape
        size = keys // len(places)
        # Larger pages than steps are read in parts.
        offset = pl.multiple_of(lax.rem(start, jnp.int32(_page(problem))), 8)
        for piece, first in enumerate(places):
            line = first + part * problem.kv_heads + head
            rows = pl.ds(offset if len(places) == 1 else 0, size)
            for chunk in range(chunks):
                source = self.lines.at[line, rows, pl.ds(chunk * width, width)]
                target = smem.at[chunk, pl.ds(piece * size, size)]
                plgpu.copy_gmem_to_smem(source, target, full)


type KeySource = KeysInRows | KeysInPages


def _page(problem: Problem) -> int:
    assert problem.page is not None
    return problem.page
