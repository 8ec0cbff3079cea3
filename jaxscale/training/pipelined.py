"""Loss and gradients of a decoder with pipeline parallelism.

One `jax.shard_map` runs the ticks of a schedule (`jaxscale.sharding.pipeline`); the
computation of a stage is in `jaxscale.training.pipelined_region`.
"""

from collections.abc import Callable
from typing import Any, Literal

from jaxscale.checks import check_choice
from jaxscale.sharding.rules import AxisRules
from jaxscale.sharding.state_rules import StateRules, Zero
from jaxscale.training.gradients import (
    GradientFunction,
    check_microbatches,
    constrain_variables,
)
from jaxscale.training.losses import LossSums
from jaxscale.training.pipelined_region import Region


type PipelineKind = Literal["1f1b", "gpipe"]
"""The order of backward passes: as early as possible, or after all forward passes."""


def pipelined(
    loss: Any,
    *,
    microbatches: int,
    rules: AxisRules,
    chunks: int = 1,
    zero: Zero = 3,
    state_rules: StateRules | None = None,
    kind: PipelineKind = "1f1b",
) -> GradientFunction:
    """Gradients of a batch through the stages of the mesh axis `pipe`.

    The layers of the model must have the `StackLayout` of the mesh's stages and of
    `chunks`. Embedding and output projection are computed by all stages together, each
    with its part of the vocabulary if the rules split it over `pipe`. `zero` is as for
    `accumulated`; the parameters outside of the layers are all-gathered, and their
    gradients reduce-scattered, once a step.

    The layers of a chunk are scanned, whatever the model's `scan_layers`. A stage saves
    what `remat` saves of its layers for each microbatch in flight. ``kind="gpipe"``
    differentiates the loop of forward passes, whose memory grows with the number of
    microbatches: for comparison.

    Args:
        loss: A `PipelinedLoss`: `next_token_loss`, or another with its interface.
        microbatches: Microbatches per batch, m; with several chunks a multiple of the
            stages.
        rules: Sharding rules of parameters and batches, which split `layers` over
            `pipe`.
        chunks: Model chunks per stage (virtual stages), v: above 1 interleaved.
        zero: ZeRO stage of `fsdp` during a step.
        state_rules: Sharding rules of parameters, gradients and optimizer state,
            instead of those that `rules` and `zero` make.
        kind: How backward passes are ordered.

    Raises:
        ValueError: an argument is out of range; at the first call, before anything is
            compiled, the mesh, the model and the batch do not fit each other.

    References:
        GPipe, arXiv 1811.06965. 1F1B and interleaving, arXiv 2104.04473. MegaScale,
        arXiv 2402.15627.
    """
    tables = state_rules or StateRules.zero(rules, zero)
    check_choice("kind", kind, PipelineKind)
    check_microbatches(microbatches)
    _check_loss(loss)

    def gradients(model: Any, batch: Any) -> tuple[LossSums, Any]:
        region = Region.of(loss, model, rules, microbatches, chunks, tables)
        sums, grads = region.run("forward" if kind == "gpipe" else kind, batch)
        return sums, constrain_variables(grads, tables.moments)

    return gradients


def pipelined_sums(
    loss: Any,
    *,
    microbatches: int,
    rules: AxisRules,
    chunks: int = 1,
    state_rules: StateRules | None = None,
) -> Callable[[Any, Any], LossSums]:
    """``sums(model, batch)`` without gradients, for evaluation; see `pipelined`.

    Args:
        loss: A `PipelinedLoss`.
        microbatches: Microbatches per batch.
        rules: Sharding rules of parameters and batches, which split `layers` over
            `pipe`.
        chunks: Model chunks per stage.
        state_rules: Sharding rules of parameters, instead of those of `rules`.

    Raises:
        ValueError: as `pipelined`.
    """
    check_microbatches(microbatches)
    _check_loss(loss)
    tables = state_rules or StateRules.zero(rules, 1)

    def sums(model: Any, batch: Any) -> LossSums:
        region = Region.of(loss, model, rules, microbatches, chunks, tables)
        return region.run("forward", batch, gradients=False)[0]

    return sums


def _check_loss(loss: Any) -> None:
    if not hasattr(loss, "of_hidden"):
        raise ValueError(
            f"loss {loss!r} cannot be computed apart from the layers, as a pipeline "
            "does; use next_token_loss, or give it a method of_hidden"
        )
