"""Tables of rules for the parts of a training state, which ZeRO tells apart."""

import dataclasses
import itertools
from typing import Literal

from jax.sharding import PartitionSpec

from jaxscale.checks import check_choice
from jaxscale.sharding.rules import AxisRules, as_tuple


type Zero = Literal[1, 2, 3]
"""What the axis `fsdp` splits during a step: moments alone, gradients too, or
parameters too."""

_AXES = ("vocab", "embed", "heads", "kv_heads", "mlp", "norm")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateRules:
    """The tables by which parameters, gradients and moments are split.

    They differ in the mesh axes that see other rows, over which whole copies are not
    needed all the time. `zero` makes the usual ones from one table.

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
    """Parameters during a step: what splits them there is gathered at each use, what
    splits them between steps alone is gathered once a step."""
    gradients: AxisRules
    """Gradients while microbatches are added up."""
    moments: AxisRules
    """Moments between steps, and the sums of gradients for an update."""

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
        """The tables of a stage of ZeRO.

        Args:
            rules: Table of a state that is split as far as can be.
            stage: What is split during a step: moments alone, gradients too, or
                parameters too.
            replicated: Whether parameters stay whole between steps. By default they are
                split, and gathered in the type of the computation once a step.

        Raises:
            ValueError: the stage is unknown, or splits parameters that stay whole.
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
        """Whether all are one table."""
        return self.parameters == self.computed == self.gradients == self.moments

    def with_flat_layers(self) -> "StateRules":
        """The tables in which the stack of layers is not split."""
        names = (field.name for field in dataclasses.fields(self))
        return StateRules(
            **{n: dataclasses.replace(getattr(self, n), layers=None) for n in names}
        )


def beyond(spec: PartitionSpec, done: PartitionSpec) -> PartitionSpec:
    """What `spec` splits over more mesh axes than `done`.

    Example:
        >>> beyond(PartitionSpec(("tensor", "data"), "fsdp"), PartitionSpec("tensor"))
        P('data', 'fsdp')
    """
    entries = []
    for more, fewer in itertools.zip_longest(spec, done):
        names = tuple(n for n in as_tuple(more) if n not in as_tuple(fewer))
        entries.append(names[0] if len(names) == 1 else names or None)
    return PartitionSpec(*entries)
