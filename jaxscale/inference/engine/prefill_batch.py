"""The prompt chunks of a prefill as one array of integers.

Legend: S slots, T tokens per prefill, N chunks per prefill, W pages of a request.
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
    """The packed chunks of a prefill, in one array for the transfer."""

    tokens: Any
    """[T] ids."""
    positions: Any
    """[T] positions in their sequences."""
    rows: Any
    """[T] rows of the pool to write keys and values to; past the pool for padding."""
    targets: Any
    """[T] the next token of the prompt, if its log-probability is requested; -1
    otherwise."""
    table: Any
    """[N W] the pages of each chunk's sequence."""
    cu_q: Any
    """[N + 1] boundaries in T."""
    ends: Any
    """[N] tokens of each sequence up to the last of its chunk."""
    slots: Any
    """[N] slot of the token sampled after a chunk; S if none is."""
    adapters: Any
    """[T] the adapter of each token; None where no chunk uses one."""

    @staticmethod
    def sizes(
        tokens: int, chunks: int, width: int, *, adapted: bool = False
    ) -> "PrefillBatch":
        """The length of each part."""
        table, last = chunks * width, tokens if adapted else 0
        return PrefillBatch(
            tokens, tokens, tokens, tokens, table, chunks + 1, chunks, chunks, last
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
        x.rows[:], x.targets[:] = past, -1
        x.slots[:] = config.num_slots
        at, width = 0, config.table_width
        for i, chunk in enumerate(chunks):
            here = slice(at, at := at + len(chunk.tokens))
            x.tokens[here] = chunk.tokens
            x.positions[here] = range(chunk.start, chunk.end)
            x.rows[here] = chunk.write_rows(size)
            if targets is not None:
                x.targets[here] = targets[i]
            x.table[i * width : i * width + len(chunk.pages)] = chunk.pages
            x.cu_q[i + 1 :] = at
            x.ends[i] = chunk.end
            if chunk.slot is not None:
                x.slots[i] = chunk.slot
            if x.adapters is not None:
                x.adapters[here] = chunk.sequence.adapter
        return packed


def prefill_programs(
    config: SchedulerConfig, sizes: Sequence[int] | None, *, gathers: bool
) -> list[tuple[int, int]]:
    """Tokens and keys of the prefill programs, the smallest first.

    Args:
        config: The sizes of the scheduler.
        sizes: The token counts; see `prefill_sizes`.
        gathers: Whether attention gathers as many keys as a program has room for.
    """
    blocks = config.prefill_requests * (KEY_BLOCK - 1)
    keys = whole_blocks(config.keys_budget + blocks)
    # Gathering unused keys costs little, another program costs seconds.
    few = whole_blocks(keys // 8)
    return [
        (tokens, most)
        for most in ([few, keys] if gathers and keys > 8192 else [keys])
        for tokens in prefill_sizes(config, sizes)
        if most >= tokens or most == keys
    ]
