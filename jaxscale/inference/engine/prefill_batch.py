"""The prompt chunks of a prefill as one array of integers.

Legend: S slots, T tokens per prefill, N chunks per prefill.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxscale.inference.engine.scheduling.scheduler_config import (
    SchedulerConfig,
    prefill_sizes,
)
from jaxscale.inference.engine.scheduling.scheduler_output import (
    KEY_BLOCK,
    Chunk,
    whole_blocks,
)


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


def prefill_programs(
    config: SchedulerConfig, sizes: Sequence[int] | None
) -> list[tuple[int, int]]:
    """Tokens and keys of the prefill programs, the smallest first.

    Args:
        config: The sizes of the scheduler.
        sizes: The token counts; see `prefill_sizes`.
    """
    blocks = config.prefill_requests * (KEY_BLOCK - 1)
    keys = whole_blocks(config.keys_budget + blocks)
    # Gathering unused keys costs little, another program costs seconds.
    few = whole_blocks(keys // 8)
    return [
        (tokens, most)
        for most in ([few, keys] if keys > 8192 else [keys])
        for tokens in prefill_sizes(config, sizes)
        if most >= tokens or most == keys
    ]
