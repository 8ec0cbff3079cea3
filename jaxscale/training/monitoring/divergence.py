"""Detection of wrong values in a run: not finite, or different between replicas."""

import collections
import logging
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxscale.supervision import EventLog, phases
from jaxscale.training.checkpoint.digest import ReplicasDiffer, check_replicas
from jaxscale.training.checkpoint.store import Checkpointer
from jaxscale.training.config import TrainConfig
from jaxscale.training.step import TrainState, frozen_part, global_norm, trained_part


logger = logging.getLogger("jaxscale.training")


class Diverged(RuntimeError):
    """A run skipped too many updates; its last good checkpoint is kept."""


class SkippedInARow:
    """Counts consecutive skipped updates, up to the newest step that was read.

    Metrics are read two steps late, when they are on the host: `Monitor.log` lets the
    host run no further ahead, so nothing waits. Every process reads the same values at
    the same step, and all of them stop together.

    Example:
        >>> skipped = SkippedInARow()
        >>> for step in range(1, 6):
        ...     skipped.add(step, {"loss": math.nan, "z_loss": 0.0, "grad_norm": 1.0})
        >>> skipped.count, skipped.last
        (3, 3)
        >>> skipped.catch_up()
        5
    """

    def __init__(self) -> None:
        self.count = 0
        self.last = 0
        """The newest step that was read."""
        self._pending: collections.deque[tuple[int, Mapping[str, Any]]]
        self._pending = collections.deque()

    def add(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Take the metrics of `step`, and read those of two steps before."""
        self._pending.append((step, metrics))
        if len(self._pending) > 2:
            self._read()

    def catch_up(self) -> int:
        """The count with the newest step; waits for its metrics."""
        while self._pending:
            self._read()
        return self.count

    def _read(self) -> None:
        self.last, metrics = self._pending.popleft()
        # What makes a step skip its update, see `make_train_step`.
        finite = all(math.isfinite(metrics[n]) for n in ("loss", "z_loss", "grad_norm"))
        self.count = 0 if finite else self.count + 1


class DivergenceGuard:
    """Ends a run with wrong values, and saves none of them."""

    def __init__(
        self, config: TrainConfig, checkpoints: Checkpointer, events: EventLog
    ) -> None:
        """Begin before the first step.

        Args:
            config: The settings of the run.
            checkpoints: Store for the good states.
            events: Receiver of events that name devices with wrong values.
        """
        self._config = config
        self._checkpoints, self._events = checkpoints, events
        self._skipped = SkippedInARow()

    def check(self, step: int, state: TrainState, metrics: Any) -> None:
        """Count skipped updates, without waiting for those of this step.

        Every `TrainConfig.check_replicas_every` steps it waits to compare replicas.

        Raises:
            Diverged: too many updates were skipped in a row.
            ReplicasDiffer: a device's replica differs from the others.
        """
        self._skipped.add(step, metrics)
        self._check_count()
        every = self._config.check_replicas_every
        if every is not None and step % every == 0:
            self._compare(step, state)

    def save(self, step: int, state: TrainState, batches: Any, *, final: bool) -> None:
        """Save `state` if it is good.

        If replicas are compared at all, they are compared before each save, so that no
        checkpoint contains wrong values.

        Raises:
            Diverged: the state is not finite, and no step follows (`final`).
            ReplicasDiffer: a device's replica differs from the others.
        """
        self._skipped.catch_up()
        self._check_count()
        if self._config.check_replicas_every is not None:
            self._compare(step, state)
        finite = bool(is_finite(state.model))
        if finite and (final or not self._skipped.count):
            self._checkpoints.save(
                step,
                trained_part(state),
                batches.get_state(),
                base=frozen_part(state.model),
            )
        elif final:
            raise self._diverged()
        else:
            logger.warning("step %d is not saved: not finite", step)

    def _compare(self, step: int, state: TrainState) -> None:
        """Compare the replicas of the state after `step`, and report which differ."""
        try:
            check_replicas(state)
        except ReplicasDiffer as error:
            self._events.emit(
                phases.WRONG_VALUES,
                step,
                kind="fault",
                error=str(error),
                suspects=list(error.processes),
                sure=error.sure,
            )
            raise

    def _check_count(self) -> None:
        if self._skipped.count >= self._config.max_skipped:
            raise self._diverged()

    def _diverged(self) -> Diverged:
        config, skipped, checkpoints = self._config, self._skipped, self._checkpoints
        checkpoints.wait()
        good = f"that of step {checkpoints.steps[-1]}" if checkpoints.steps else "none"
        return Diverged(
            f"the run diverged: at step {skipped.last} of {config.steps}, "
            f"{skipped.count} updates in a row were skipped because loss or gradients "
            f"were not finite; the newest good checkpoint in {config.output_dir} is "
            f"{good}; lower optimizer.learning_rate or look at the data"
        )


@jax.jit
def is_finite(model: Any) -> jax.Array:
    """True if the norm of all parameters is finite, so the state may be saved."""
    return jnp.isfinite(global_norm(nnx.state(model, nnx.Param)))
