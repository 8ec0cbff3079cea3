"""PyTorch behind our queue of texts: transformers in CUDA graphs of padded batches.

There is a graph for each of a few batch sizes and padded lengths. Texts of a pass are
sorted by length and cut into those batches that take least time together, by the times
that the graphs took when they were captured.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.rivals import torch_encoder
from jaxscale import models
from jaxscale.models.tokenizer import EncodedText


BATCHES = (1, 2, 4, 8, 16, 32, 64)
LENGTHS = 8
"""Padded lengths, up to the longest text."""
_REPLAYS = 5


class Bucket(NamedTuple):
    """The shape of a graph."""

    batch: int
    length: int


def buckets(longest: int) -> list[Bucket]:
    """All of them."""
    unit = -(-longest // LENGTHS)
    lengths = [unit * (i + 1) for i in range(LENGTHS)]
    return [Bucket(batch, length) for length in lengths for batch in BATCHES]


def partition(
    lengths: Sequence[int], seconds: Mapping[Bucket, float]
) -> list[tuple[int, Bucket]]:
    """The fastest way to cut texts into batches: the first text of each, and its shape.

    Args:
        lengths: Tokens of the texts, the longest first.
        seconds: What a batch of each shape takes; one of them holds the longest text.
    """
    by_length: dict[int, list[Bucket]] = {}
    for bucket in seconds:
        by_length.setdefault(bucket.length, []).append(bucket)
    padded = sorted(by_length)
    best = [0.0] * (len(lengths) + 1)
    chosen: list[Bucket] = []  # from the last text to the first
    for first in reversed(range(len(lengths))):
        fit = next(length for length in padded if length >= lengths[first])
        best[first], bucket = min(
            (seconds[b] + best[min(first + b.batch, len(lengths))], b)
            for b in by_length[fit]
        )
        chosen.append(bucket)
    chosen.reverse()
    found, first = [], 0
    while first < len(lengths):
        found.append((first, chosen[first]))
        first += chosen[first].batch
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Flying:
    """A batch that the GPU computes."""

    places: Sequence[int]
    """Of its texts in the pass."""
    vectors: Any
    """[B, D] in pinned memory."""
    done: Any
    """An event."""


class CapturedGraphs:
    """Computes passes for `jaxscale.inference.encoder.batching.DynamicBatching`."""

    def __init__(self, name: str, model: models.EncoderModel, longest: int) -> None:
        """Capture the largest graph, which can compute everything.

        Args:
            name: ``torch_cuda_graph`` captures the model as it is;
                ``torch_compile_graphs`` what `torch.compile` makes of it for any shape.
            model: Its parameters are saved and read by transformers.
            longest: Tokens of the longest text.
        """
        import torch

        self._mean = torch_encoder.mean_of(name, model)
        if name == "torch_compile_graphs":
            torch.compiler.reset()
            self._mean = torch.compile(self._mean, dynamic=True)
        # Graphs run one after another and their results are copied at once, so all may
        # compute in the same memory, which the largest has taken before.
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[Bucket, tuple[Any, Callable[[Any], Any]]] = {}
        self._seconds: dict[Bucket, float] = {}
        self._left = buckets(longest)
        self._capture(self._left.pop())

    def capture_all(self) -> None:
        """Capture the other graphs; each is timed."""
        while self._left:
            self._capture(self._left.pop())

    def _capture(self, bucket: Bucket) -> None:
        import torch

        inputs = torch.ones((2, *bucket), dtype=torch.long, device="cuda")
        inputs[1, :, 1::2] = 0  # transformers leaves out a mask that masks nothing
        run = torch_encoder.captured(self._mean, self._pool)
        with torch.no_grad():
            run(inputs)
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(_REPLAYS):
            run(inputs)
        torch.cuda.synchronize()
        self._seconds[bucket] = (time.perf_counter() - start) / _REPLAYS
        self._graphs[bucket] = inputs, run

    def launch(
        self,
        method: str,
        texts: Sequence[EncodedText],
        token_budget: int,
        *,
        stand_in: bool,
    ) -> list[_Flying]:
        """Have the GPU compute texts, and return at once."""
        del method, token_budget, stand_in
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i].ids))
        lengths = [len(texts[i].ids) for i in order]
        return [
            self._launch(texts, order[first : first + bucket.batch], bucket)
            for first, bucket in partition(lengths, self._seconds)
        ]

    def _launch(
        self, texts: Sequence[EncodedText], places: Sequence[int], bucket: Bucket
    ) -> _Flying:
        import torch

        # PyTorch does not give pinned memory away again before a copy from it is done.
        host = torch.zeros((2, *bucket), dtype=torch.long, pin_memory=True)
        tokens, mask = host.numpy()
        mask[:, 0] = 1  # also where there is no text, whose mean is not read
        for row, place in enumerate(places):
            ids = texts[place].array
            tokens[row, : len(ids)] = ids
            mask[row, : len(ids)] = 1
        inputs, run = self._graphs[bucket]
        with torch.no_grad():
            inputs.copy_(host, non_blocking=True)
            output = run(inputs)
            vectors = torch.empty(output.shape, dtype=output.dtype, pin_memory=True)
            vectors.copy_(output, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        return _Flying(places=places, vectors=vectors, done=done)

    def read(self, launched: _Flying) -> Iterator[tuple[int, Any]]:
        """Place in the pass and vector of each text, once they are there."""
        launched.done.synchronize()
        yield from zip(launched.places, launched.vectors.numpy(), strict=False)
