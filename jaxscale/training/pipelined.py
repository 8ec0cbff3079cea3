"""Loss and gradients of a decoder through a pipeline of stages.

One `jax.shard_map` runs the ticks of a schedule (`jaxscale.sharding.pipeline`); what
its stages compute is in `jaxscale.training.pipelined_region`.
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
"""How a pipeline orders backward passes: at once, or after all forward passes."""


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

    The layers of the model lie as `StackLayout` says for the stages of the mesh and for
    `chunks`: a model with another layout is refused. Its embedding and its output
    projection are computed by all stages together, each with its part of the vocabulary
    where the rules split it over `pipe`. `zero` is that of `accumulated`; the
    parameters outside of the layers are gathered, and their gradients scattered, once a
    step.

    The layers of a chunk are looped over, whatever `scan_layers` of the model is.
    A stage keeps what `remat` keeps of its layers for each pass that waits for its
    backward pass. ``kind="gpipe"`` differentiates the loop of forward passes, whose
    memory grows with the microbatches: to compare.

    Args:
        loss: A `PipelinedLoss`: `next_token_loss`, or one that is apart as well.
        microbatches: Parts of a batch, m; of several chunks a multiple of the stages.
        rules: Sharding rules of parameters and rows, which split `layers` over `pipe`.
        chunks: Parts of the layers that each stage holds, v: above 1 interleaved.
        zero: What `fsdp` splits during a step.
        state_rules: Tables of parameters, gradients and moments, instead of those that
            `rules` and `zero` make.
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
        microbatches: Parts of a batch.
        rules: Sharding rules of parameters and rows, which split `layers` over `pipe`.
        chunks: Parts of the layers that each stage holds.
        state_rules: Tables of parameters, instead of those that `rules` make.

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
