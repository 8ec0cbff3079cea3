"""Evaluation of a model on held-out batches: all of them, or a sample."""

import contextlib
import dataclasses
import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import Any, Protocol, runtime_checkable

import jax
from jax.sharding import Mesh, NamedSharding

from jaxscale.supervision import current, phases
from jaxscale.training.config import TrainConfig
from jaxscale.training.data.row_packing import spread
from jaxscale.training.losses import LossSums
from jaxscale.training.step import EvalStep, TrainState


_BATCHES_AT_A_TIME = 64
"""Batches that are dispatched before waiting for a result."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Means over the held-out tokens, or over those of a sample."""

    loss: float
    """Negative log-likelihood, in nats/token."""
    accuracy: float | None
    """Fraction of tokens predicted correctly (top-1), or of texts without a wrong
    label; None for regression."""
    tokens: int
    """Number of predicted tokens, or of the texts that have a label."""
    batches: int
    """Number of batches that were evaluated."""
    batches_held_out: int | None
    """Number of held-out batches; None if unknown."""

    @property
    def extent(self) -> str:
        """The evaluated part of the held-out batches, in words.

        Example:
            >>> Evaluation(
            ...     loss=2.0, accuracy=0.5, tokens=90, batches=3, batches_held_out=7
            ... ).extent
            '3 of 7 held-out batches'
        """
        if self.batches_held_out is None:
            return f"{self.batches:,} held-out batches"
        return f"{self.batches:,} of {self.batches_held_out:,} held-out batches"


@runtime_checkable
class _Sampled(Protocol):
    """Held-out data that sample batches themselves, as `PackedBatches`."""

    def sample(self, count: int) -> Iterable[Any]:
        """Return `count` evenly spaced batches."""
        ...


def evaluate(
    config: TrainConfig,
    mesh: Mesh,
    eval_step: EvalStep,
    state: TrainState,
    eval_data: Iterable[Any],
) -> Evaluation:
    """Means over the held-out batches, in which every token, or labeled text, weighs
    the same.

    If there are more than ``config.eval_batches``, an evenly spaced sample of this size
    is evaluated, the same at each evaluation. Data with ``sample(count)``, as
    `PackedBatches`, sample rows; other data with a length sample whole batches; without
    a length, the first batches are used, if the settings say how many.

    Args:
        config: The run.
        mesh: The devices that a batch is split over.
        eval_step: The result of `make_eval_step`.
        state: The state with the model.
        eval_data: Held-out batches, as given to `fit`.

    Raises:
        ValueError: no batch has a target.
    """
    chosen, held_out = _drawn(eval_data, config)
    sums: list[LossSums] = []
    with closing(iter(chosen)) as batches:
        while some := [
            eval_step(state.model, to_rows(batch, config, mesh))
            for batch in itertools.islice(batches, _BATCHES_AT_A_TIME)
        ]:
            if sums:  # a supervisor hears that it goes on
                current().emit(phases.EVAL, int(state.step))
            sums += jax.device_get(some)
    tokens = sum(int(s.tokens) for s in sums)
    if tokens == 0:
        raise ValueError("eval_data has no batch with a target; give held-out text")
    return Evaluation(
        loss=sum(float(s.nll) for s in sums) / tokens,
        accuracy=_accuracy(sums, tokens),
        tokens=tokens,
        batches=len(sums),
        batches_held_out=held_out,
    )


def _accuracy(sums: Sequence[LossSums], tokens: int) -> float | None:
    correct = [int(s.correct) for s in sums if s.correct is not None]
    return sum(correct) / tokens if correct else None


def to_rows(batch: Any, config: TrainConfig, mesh: Mesh) -> Any:
    """`batch` sharded over the mesh; nothing moves if it is already."""
    return jax.device_put(batch, NamedSharding(mesh, config.axis_rules.spec("batch")))


@contextlib.contextmanager
def closing(iterator: Iterator[Any]) -> Iterator[Iterator[Any]]:
    """`iterator`, whose threads, if any, are stopped at the end."""
    try:
        yield iterator
    finally:
        getattr(iterator, "close", lambda: None)()


def _drawn(eval_data: Iterable[Any], config: TrainConfig) -> tuple[Any, int | None]:
    """The batches that an evaluation reads, and the number of all batches."""
    if not isinstance(eval_data, Sized):
        return _picked(eval_data, range(config.eval_batches or sys.maxsize)), None
    total, limit = len(eval_data), config.eval_limit
    if limit is None or total <= limit:
        return eval_data, total
    if isinstance(eval_data, _Sampled):
        return eval_data.sample(limit), total
    return _picked(eval_data, spread(total, limit).tolist()), total


def _picked(eval_data: Iterable[Any], numbers: Sequence[int]) -> Iterator[Any]:
    """The batches of these increasing numbers."""
    with closing(iter(eval_data)) as batches:
        at = 0
        for number in numbers:
            found = list(itertools.islice(batches, number - at, number - at + 1))
            if not found:
                return
            yield found[0]
            at = number + 1
