"""What the full sampler is told of each row, as arrays.

Legend: B bucket, V vocabulary, E biases of a row.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from jaxscale.inference.request import MAX_BIASES


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleInputs:
    """Further inputs of the full sampler; None is the default."""

    counted: Sequence[int | None] = ()
    """The row of the counts of each row of the batch."""
    want_top: bool = False
    """Report the most likely tokens."""
    masks: np.ndarray | None = None
    """[B, V / 32] int32, one bit per allowed token; None is all."""
    biases: Mapping[int, Mapping[int, float]] = dataclasses.field(default_factory=dict)
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
