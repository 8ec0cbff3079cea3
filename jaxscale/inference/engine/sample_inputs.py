"""What the full sampler is told of each row, as arrays.

Legend: B bucket, V vocabulary, E biases of a row.
"""

import dataclasses
import functools
from collections import abc

import numpy as np

from jaxscale.inference.engine.output_processor import OutputProcessor
from jaxscale.inference.engine.scheduling.batch_rows import NUM_STOPS
from jaxscale.inference.engine.scheduling.sequence import Sequence
from jaxscale.inference.grammar import fill_masks
from jaxscale.inference.request import MAX_BIASES
from jaxscale.inference.token_rules import token_mask


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleInputs:
    """Further inputs of the full sampler; None is the default."""

    counted: abc.Sequence[int | None] = ()
    """The row of the counts of each row of the batch."""
    want_top: bool = False
    """Report the most likely tokens."""
    masks: np.ndarray | None = None
    """[B, V / 32] int32, one bit per allowed token; None is all."""
    biases: abc.Mapping[int, abc.Mapping[int, float]] = dataclasses.field(
        default_factory=dict
    )
    """Logit biases of tokens, by row."""

    def arrays(
        self, bucket: int, vocab: int, none: int
    ) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
        """The inputs of `DecodePrograms.sample` besides the state.

        Args:
            bucket: B.
            vocab: V.
            none: The row of the counts that stands for none.

        Returns:
            ``extra``, ``mask`` and ``bias``; None for one that changes nothing.
        """
        extra = np.full(bucket + 1, none, np.int32)
        extra[bucket] = self.want_top
        for row, counted in enumerate(self.counted):
            extra[row] = none if counted is None else counted
        mask = bias = None
        if self.masks is not None:
            missing = bucket - len(self.masks)
            mask = np.pad(self.masks, ((0, missing), (0, 0))).view(np.uint32)
        if self.biases:
            _, bias = neutral_arrays(bucket, vocab)
            for row, added in self.biases.items():
                bias[row, : len(added), 0] = list(added)
                values = np.asarray(list(added.values()), np.float32)
                bias[row, : len(added), 1] = values.view(np.int32)
        return extra, mask, bias


def neutral_arrays(bucket: int, vocab: int) -> tuple[np.ndarray, np.ndarray]:
    """Mask and bias that change nothing, [B, V / 32] and [B, E, 2]."""
    mask = np.full((bucket, -(-vocab // 32)), 2**32 - 1, np.uint32)
    return mask, np.full((bucket, MAX_BIASES, 2), vocab, np.int32)


def token_masks(
    live: abc.Sequence[tuple[int, Sequence, OutputProcessor]],
    num_rows: int,
    vocab: int,
) -> np.ndarray | None:
    """The masks of rows with these sequences; None if the device needs none."""
    matchers = [(client.matchers[c.index], i) for i, c, client in live]
    guided = [(matcher, i) for matcher, i in matchers if matcher is not None]
    ruled = [(i, c, client) for i, c, client in live if client.rules]
    if not guided and not ruled and not any(stops_late(c) for _, c, _ in live):
        return None
    masks = np.tile(_all_tokens(vocab), (num_rows, 1))
    fill_masks(guided, masks)
    for i, c, client in ruled:
        client.rules[c.index].narrow(masks[i])
    for i, c, client in live:
        if c.num_drawn < c.request.params.min_tokens:
            masks[i] &= ~token_mask(c.stops, vocab)
        if not masks[i].any():
            client.stuck.add(c.index)
    return masks


def stops_late(c: Sequence) -> bool:
    """Whether the host masks stop tokens of a row; the device knows `NUM_STOPS`."""
    return len(c.stops) > NUM_STOPS and c.num_drawn < c.request.params.min_tokens


@functools.cache
def _all_tokens(vocab_size: int) -> np.ndarray:
    return token_mask(range(vocab_size), vocab_size)
