"""Sharding rules for the parts of a training state, by ZeRO stage."""

import dataclasses
import itertools
from typing import Literal

from jax.sharding import PartitionSpec

from jaxscale.checks import check_choice
from jaxscale.sharding.rules import AxisRules, as_tuple


type Zero = Literal[1, 2, 3]
"""ZeRO stage: `fsdp` shards optimizer state (1), gradients too (2), or parameters too
(3) during a step."""

_AXES = ("vocab", "embed", "heads", "kv_heads", "mlp", "norm")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateRules:
    """The sharding rules of parameters, gradients and optimizer state.

    They differ in the data-parallel mesh axes, over which full copies are not needed
    all the time. `zero` makes the usual ones from one table.

    Example:
        >>> from jaxscale.sharding import fsdp
        >>> rules = StateRules.zero(fsdp(), 2)
        >>> rules.parameters.embed, rules.computed.embed, rules.gradients.embed
        ('fsdp', None, 'fsdp')

    References:
        ZeRO: arXiv 1910.02054.
    """

    parameters: AxisRules
    """Parameters between steps."""
    computed: AxisRules
    """Parameters during a step: axes that split them here are gathered at each use,
    axes that split them only between steps once a step."""
    gradients: AxisRules
    """Gradients during gradient accumulation."""
    moments: AxisRules
    """Optimizer state between steps, and the accumulated gradients of an update."""

    def __post_init__(self) -> None:
        for inner, outer in (
            ("computed", "parameters"),
            ("computed", "gradients"),
            ("gradients", "moments"),
            ("parameters", "moments"),
        ):
            for axis in _AXES:
                fewer, more = (
                    as_tuple(getattr(getattr(self, name), axis))
                    for name in (inner, outer)
                )
                if fewer != more[: len(fewer)]:
                    raise ValueError(
                        f"the rule {axis} of {outer} is {more or None!r}, expected "
                        f"it to begin with that of {inner}, {fewer!r}: what splits "
                        f"{inner} must split {outer} too"
                    )

    @classmethod
    def zero(
        cls, rules: AxisRules, stage: Zero, *, replicated: bool = False
    ) -> "StateRules":
        """The rules of a ZeRO stage.

        Args:
            rules: Rules of the fully sharded state.
            stage: What is sharded during a step: optimizer state (1), gradients too
                (2), or parameters too (3).
            replicated: Whether parameters stay unsharded between steps. By default they
                are sharded, and all-gathered once a step in the type of the
                computation.

        Raises:
            ValueError: the stage is unknown, or shards parameters that stay unsharded.
        """
        check_choice("zero", stage, Zero)
        if replicated and stage == 3:
            raise ValueError(
                "zero 3 splits parameters during a step, and replicated True asks for "
                "whole ones between steps; use zero 1 or 2, or replicated=False"
            )
        whole = rules.without(as_tuple(rules.batch), _AXES)
        return cls(
            parameters=whole if replicated else rules,
            computed=rules if stage == 3 else whole,
            gradients=rules if stage > 1 else whole,
            moments=rules,
        )

    @property
    def is_uniform(self) -> bool:
        """Whether all tables are the same."""
        return self.parameters == self.computed == self.gradients == self.moments

    def with_flat_layers(self) -> "StateRules":
        """The tables in which the stack of layers is not split."""
        names = (field.name for field in dataclasses.fields(self))
        return StateRules(
            **{n: dataclasses.replace(getattr(self, n), layers=None) for n in names}
        )


def beyond(spec: PartitionSpec, done: PartitionSpec) -> PartitionSpec:
    """The mesh axes of `spec` that `done` lacks.

    Example:
        >>> beyond(PartitionSpec(("tensor", "data"), "fsdp"), PartitionSpec("tensor"))
        P('data', 'fsdp')
    """
    entries = []
    for more, fewer in itertools.zip_longest(spec, done):
        names = tuple(n for n in as_tuple(more) if n not in as_tuple(fewer))
        entries.append(names[0] if len(names) == 1 else names or None)
    return PartitionSpec(*entries)
