"""The prompt chunks of a prefill as one array of integers.

Legend: S slots, T tokens per prefill, N chunks per prefill.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxscale.inference.engine.scheduler_config import SchedulerConfig
from jaxscale.inference.engine.scheduler_output import Chunk


KEY_BLOCK = 128
"""The keys of each prompt begin at a multiple of this: a kernel block then holds keys
of one prompt only, and its sums do not depend on the others."""


class PrefillBatch(NamedTuple):
    """The packed chunks of a prefill, in one array for the transfer.

    Between two chunks there is one without tokens, whose keys are the gap up to a
    multiple of `KEY_BLOCK`.
    """

    tokens: Any
    """[T] ids."""
    positions: Any
    """[T] positions in their sequences."""
    rows: Any
    """[T] rows of the pool to write keys and values to; past the pool for padding."""
    targets: Any
    """[T] the next token of the prompt, if its log-probability is requested; -1
    otherwise."""
    key_rows: Any
    """[keys] rows of the pool that the chunks read."""
    cu_q: Any
    """[2 N + 1] boundaries in T."""
    cu_k: Any
    """[2 N + 1] boundaries in the keys."""
    slots: Any
    """[N] slot of the token sampled after a chunk; S if none is."""
    adapters: Any
    """[T] the adapter of each token; None where no chunk uses one."""

    @staticmethod
    def sizes(
        tokens: int, keys: int, chunks: int, *, adapted: bool = False
    ) -> "PrefillBatch":
        """The length of each part."""
        bounds = 2 * chunks + 1
        last = tokens if adapted else 0
        return PrefillBatch(
            tokens, tokens, tokens, tokens, keys, bounds, bounds, chunks, last
        )

    def split(self, packed: Any) -> "PrefillBatch":
        """Split an array into parts of these sizes."""
        ends = np.cumsum(self)
        return PrefillBatch._make(
            packed[e - n : e] if n else None for e, n in zip(ends, self, strict=True)
        )

    def pack(
        self,
        chunks: Sequence[Chunk],
        targets: Sequence[Sequence[int]] | None,
        config: SchedulerConfig,
    ) -> np.ndarray:
        """The array of `chunks`, with parts of these sizes."""
        size, past = config.page_size, config.num_pages * config.page_size
        x = self.split(packed := np.zeros(sum(self), np.int32))
        x.rows[:], x.key_rows[:], x.targets[:] = past, past, -1
        x.slots[:] = config.num_slots
        at = key_at = 0
        for i, chunk in enumerate(chunks):
            here = slice(at, at := at + len(chunk.tokens))
            x.tokens[here] = chunk.tokens
            x.positions[here] = range(chunk.start, chunk.end)
            x.rows[here] = chunk.write_rows(size)
            if targets is not None:
                x.targets[here] = targets[i]
            x.key_rows[key_at : key_at + chunk.end] = chunk.key_rows(size)
            x.cu_q[2 * i + 1 :] = at
            x.cu_k[2 * i + 1] = key_at + chunk.end
            x.cu_k[2 * i + 2 :] = key_at = key_at + whole_blocks(chunk.end)
            if chunk.slot is not None:
                x.slots[i] = chunk.slot
            if x.adapters is not None:
                x.adapters[here] = chunk.sequence.adapter
        return packed


def whole_blocks(keys: int) -> int:
    """The smallest multiple of `KEY_BLOCK` of at least this many keys."""
    return -(-keys // KEY_BLOCK) * KEY_BLOCK
