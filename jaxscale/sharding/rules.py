"""Logical axes, and the table that maps them to mesh axes.

Every parameter and activation names its axes by what they mean (``"embed"``,
``"heads"``, ``"batch"``). One `AxisRules` table per recipe says which mesh axis each
name is split over. Modules hold the table as a static attribute, so a jitted function
is retraced when the recipe changes, and nothing depends on hidden global state.
`jaxscale.sharding.operations` acts on it.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from jaxscale.keywords import meant


type MeshAxes = str | tuple[str, ...] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class AxisRules:
    """The mesh axes that each logical axis is split over; ``None`` means replicated.

    Example:
        >>> rules = fsdp_tp()
        >>> rules.spec("embed", "mlp")
        P('fsdp', 'tensor')
        >>> dataclasses.replace(rules, mlp=None).spec("embed", "mlp")
        P('fsdp', None)
    """

    rounds: MeshAxes = None
    """Parameters: the chunks that each pipeline stage holds."""
    layers: MeshAxes = None
    """Parameters: the stack of identical blocks, split over pipeline stages."""
    places: MeshAxes = None
    """Parameters: the blocks within a chunk."""
    vocab: MeshAxes = None
    """Parameters: rows of the embedding table, columns of the output projection."""
    embed: MeshAxes = None
    """Parameters: the model dimension."""
    heads: MeshAxes = None
    """Parameters: query heads times head dimension."""
    kv_heads: MeshAxes = None
    """Parameters: key and value heads times head dimension."""
    mlp: MeshAxes = None
    """Parameters: the hidden dimension of the feed-forward network."""
    norm: MeshAxes = None
    """Parameters: scales and biases of normalization layers."""
    batch: MeshAxes = None
    """Activations: the batch dimension."""
    context: MeshAxes = None
    """Activations: tokens of a sequence, in all layers of a training step (context
    parallelism). Each device has two pieces of a sequence, and gathers keys and
    values."""
    tokens: MeshAxes = None
    """Activations: tokens of a sequence, between the tensor-parallel regions (sequence
    parallelism)."""
    act_embed: MeshAxes = None
    """Activations: the model dimension."""
    act_heads: MeshAxes = None
    """Activations: query heads."""
    act_kv_heads: MeshAxes = None
    """Activations: key and value heads."""
    act_mlp: MeshAxes = None
    """Activations: the hidden dimension of the feed-forward network."""
    act_vocab: MeshAxes = None
    """Activations: logits."""

    def __post_init__(self) -> None:
        """Check the entries; a list would make the table unhashable."""
        for field in dataclasses.fields(self):
            entry = getattr(self, field.name)
            names = entry if isinstance(entry, tuple) else (entry,)
            if entry is not None and not all(isinstance(n, str) and n for n in names):
                raise ValueError(
                    f"the rule {field.name} is {entry!r}, expected a mesh axis, a "
                    "tuple of mesh axes, or None"
                )

    def spec(self, *axes: str | None) -> PartitionSpec:
        """The `PartitionSpec` of an array whose dimensions are the logical `axes`.

        Raises:
            ValueError: a name is unknown, or two dimensions claim one mesh axis.
        """
        check_axes(*axes)
        entries = [None if axis is None else getattr(self, axis) for axis in axes]
        used = [name for entry in entries for name in as_tuple(entry)]
        if len(used) != len(set(used)):
            raise ValueError(
                f"the axes {axes} map to {entries}, which uses a mesh axis twice; "
                "give one of them another rule"
            )
        return PartitionSpec(*entries)

    def mesh_axes(self, axes: Sequence[str | None] | None = None) -> frozenset[str]:
        """Every mesh axis that the logical `axes` use; by default, that the table uses.

        Example:
            >>> sorted(fsdp_tp().mesh_axes(("embed", "mlp")))
            ['fsdp', 'tensor']
        """
        entries = dataclasses.astuple(self) if axes is None else self.spec(*axes)
        return frozenset(name for entry in entries for name in as_tuple(entry))

    @property
    def placing(self) -> frozenset[str]:
        """The mesh axes that arrays are sharded over, which a mesh must have.

        A mesh may lack the axis of `context`, which only a training step uses.
        """
        return dataclasses.replace(self, context=None).mesh_axes()

    def without(
        self, mesh_axes: Iterable[str], axes: Sequence[str | None]
    ) -> "AxisRules":
        """The table in which the logical `axes` are not split over `mesh_axes`.

        Example:
            >>> fsdp_tp().without({"tensor"}, ("batch", "tokens")).batch
            ('data', 'fsdp')
        """
        dropped = set(mesh_axes)
        kept = {
            axis: tuple(n for n in as_tuple(getattr(self, axis)) if n not in dropped)
            for axis in axes
            if axis is not None and self.mesh_axes([axis]) & dropped
        }
        return dataclasses.replace(
            self, **{a: names or None for a, names in kept.items()}
        )

    def only(self, mesh_axes: Iterable[str]) -> "AxisRules":
        """The table that splits over these mesh axes only.

        Example:
            >>> fsdp_tp().only({"data", "tensor"}).spec("batch", "embed", "mlp")
            P('data', None, 'tensor')
        """
        names = [field.name for field in dataclasses.fields(self)]
        return self.without(self.mesh_axes().difference(mesh_axes), names)


def check_rules(rules: Any) -> None:
    """Raise where what should be a table of axes is something else.

    Raises:
        ValueError: it is the name of a preset, or of another type.

    Example:
        >>> check_rules("fsdp")
        Traceback (most recent call last):
        ...
        ValueError: rules 'fsdp', expected an AxisRules; jaxscale.sharding.preset(...
    """
    if not isinstance(rules, AxisRules):
        name = rules if isinstance(rules, str) else "fsdp"
        raise ValueError(
            f"rules {rules!r}, expected an AxisRules; "
            f"jaxscale.sharding.preset({name!r}) makes the table of that name"
        )


_NAMES = frozenset(field.name for field in dataclasses.fields(AxisRules))

STACK_AXES = ("rounds", "layers", "places")
"""Logical axes of a stack of layers that is stored by pipeline stages."""

REPLICATED = AxisRules()
"""Rules that split no axis: one device, or full copies everywhere."""


def dp() -> AxisRules:
    """Data parallelism: the batch is split, parameters are replicated."""
    return AxisRules(batch=("data", "fsdp"), context="context")


def fsdp() -> AxisRules:
    """Fully sharded data parallelism (ZeRO-3): each parameter is split over `fsdp`."""
    return AxisRules(
        batch=("data", "fsdp"),
        context="context",
        vocab=None,
        embed="fsdp",
    )


def fsdp_tp() -> AxisRules:
    """`fsdp` plus Megatron tensor and sequence parallelism over `tensor`.

    Between the tensor-parallel regions the tokens of a sequence are split over `tensor`
    (sequence parallelism, arXiv 2205.05198), inside them heads and hidden features.
    """
    return AxisRules(
        batch=("data", "fsdp"),
        context="context",
        tokens="tensor",
        vocab="tensor",
        embed="fsdp",
        heads="tensor",
        kv_heads="tensor",
        mlp="tensor",
        act_heads="tensor",
        act_kv_heads="tensor",
        act_mlp="tensor",
        act_vocab="tensor",
    )


def megascale_3d() -> AxisRules:
    """MegaScale's 3-D parallelism: `fsdp_tp` with the layers split over `pipe`.

    The vocabulary is split over `pipe` too, so that all stages share the work of
    embedding and output projection. `jaxscale.training.pipelined` runs the stages as a
    pipeline. In other programs every device computes every layer, with weights that the
    compiler gathers.
    """
    return dataclasses.replace(fsdp_tp(), layers="pipe", vocab=("pipe", "tensor"))


PRESETS = {
    "replicated": lambda: REPLICATED,
    "dp": dp,
    "fsdp": fsdp,
    "fsdp_tp": fsdp_tp,
    "megascale_3d": megascale_3d,
}


def preset(name: str) -> AxisRules:
    """The preset called `name`.

    Raises:
        ValueError: no preset has this name.

    Example:
        >>> preset("dp").batch
        ('data', 'fsdp')
    """
    if name not in PRESETS:
        guess = meant(name.lower().replace("-", "_"), list(PRESETS))
        raise ValueError(
            f"rules {name!r} is no preset{guess}; use one of {sorted(PRESETS)}"
        )
    return PRESETS[name]()


def check_axes(*axes: str | None) -> None:
    """Raise if a logical axis is not a field of `AxisRules`."""
    for axis in axes:
        if axis is not None and axis not in _NAMES:
            raise ValueError(
                f"logical axis {axis!r} is unknown; use None or one of {sorted(_NAMES)}"
            )


def require_axes(names: Iterable[str], mesh_axes: Sequence[str]) -> None:
    """Raise if the rules name mesh axes that the mesh lacks."""
    for name in names:
        if name not in mesh_axes:
            raise ValueError(
                f"the rules use the mesh axis {name!r}, but the mesh has only "
                f"{tuple(mesh_axes)}; make it with jaxscale.sharding.make_mesh or "
                "choose other rules"
            )


def as_tuple(axes: MeshAxes) -> tuple[str, ...]:
    """The mesh axes of one entry of a table or of a partition."""
    if axes is None:
        return ()
    return (axes,) if isinstance(axes, str) else tuple(axes)
