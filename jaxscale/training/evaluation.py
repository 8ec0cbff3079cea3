"""What a model makes of held-out batches: all of them, or a sample that is drawn."""

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
"""Batches that are given to the devices before the results of one are waited for."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Means over the held-out tokens, or over those of a sample of the batches."""

    loss: float
    """Negative log-likelihood, in nats a token."""
    accuracy: float | None
    """Part of the tokens that were the model's first guess, or of the texts with no
    wrong label; None where answers are numbers (regression)."""
    tokens: int
    """Number of predicted tokens, or of the texts that have a label."""
    batches: int
    """Number of batches that were evaluated."""
    batches_held_out: int | None
    """Number of batches that there are; None if the data do not say."""

    @property
    def extent(self) -> str:
        """Which part of the held-out batches was evaluated, in words.

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
    """Held-out data that draw batches themselves, as `PackedBatches`."""

    def sample(self, count: int) -> Iterable[Any]:
        """So many batches, drawn evenly from all."""
        ...


def evaluate(
    config: TrainConfig,
    mesh: Mesh,
    eval_step: EvalStep,
    state: TrainState,
    eval_data: Iterable[Any],
) -> Evaluation:
    """Means over the held-out batches: every token, or labeled text, weighs the same.

    Where there are more than ``config.eval_batches``, so many are evaluated, which are
    drawn evenly from all, the same at each evaluation. Data with ``sample(count)``, as
    `PackedBatches`, draw rows; of others that have a length whole batches are drawn;
    where not even that is known, the first are taken, if the settings say how many.

    Args:
        config: The run.
        mesh: The devices that share the rows of a batch.
        eval_step: From `make_eval_step`.
        state: Has the model.
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
    """`batch` with its rows spread over the mesh; nothing moves if they are already."""
    return jax.device_put(batch, NamedSharding(mesh, config.axis_rules.spec("batch")))


@contextlib.contextmanager
def closing(iterator: Iterator[Any]) -> Iterator[Iterator[Any]]:
    """`iterator`, whose threads are stopped at the end if it has any."""
    try:
        yield iterator
    finally:
        getattr(iterator, "close", lambda: None)()


def _drawn(eval_data: Iterable[Any], config: TrainConfig) -> tuple[Any, int | None]:
    """The batches that an evaluation reads, and how many there are."""
    if not isinstance(eval_data, Sized):
        return _picked(eval_data, range(config.eval_batches or sys.maxsize)), None
    total, limit = len(eval_data), config.eval_limit
    if limit is None or total <= limit:
        return eval_data, total
    if isinstance(eval_data, _Sampled):
        return eval_data.sample(limit), total
    return _picked(eval_data, spread(total, limit).tolist()), total


def _picked(eval_data: Iterable[Any], numbers: Sequence[int]) -> Iterator[Any]:
    """The batches of these numbers, which rise."""
    with closing(iter(eval_data)) as batches:
        at = 0
        for number in numbers:
            found = list(itertools.islice(batches, number - at, number - at + 1))
            if not found:
                return
            yield found[0]
            at = number + 1
