"""Logical axes, the table that maps them to mesh axes, and sharding-aware operations.

Every parameter and activation names its axes by what they mean (``"embed"``,
``"heads"``, ``"batch"``). One `AxisRules` table per recipe says which mesh axis each
name is split over. Modules hold the table as a static attribute, so a jitted function
is traced again when the recipe changes and nothing depends on hidden global state.

JAX has three kinds of mesh axes. On an *Auto* axis the compiler propagates shardings
and a constraint steers it. On an *Explicit* axis the sharding is part of the type: an
operation whose result is ambiguous must be told it (``out_sharding``), which Auto axes
reject. On a *Manual* axis, inside `jax.shard_map`, arrays are already local. The
functions `constrain`, `contract`, `gather` and `reshape` choose by axis type, so that
the same module runs under all three.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Inexact, Int, Shaped


type MeshAxes = str | tuple[str, ...] | None

PARAMETER_AXES = ("layers", "vocab", "embed", "heads", "kv_heads", "mlp", "norm")
ACTIVATION_AXES = (
    "batch",
    "tokens",
    "act_embed",
    "act_heads",
    "act_kv_heads",
    "act_mlp",
    "act_vocab",
)


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

    layers: MeshAxes = None
    """Parameters: the stack of identical blocks."""
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
    """Activations: rows of the batch."""
    tokens: MeshAxes = None
    """Activations: tokens of a row, between the tensor-parallel regions."""
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

    def spec(self, *axes: str | None) -> PartitionSpec:
        """The partition of an array whose dimensions are the named logical `axes`.

        Raises:
            ValueError: a name is unknown, or two dimensions claim one mesh axis.
        """
        entries = []
        for axis in axes:
            if axis is not None and axis not in _NAMES:
                raise ValueError(
                    f"logical axis {axis!r} is unknown; use one of {sorted(_NAMES)}"
                )
            entries.append(None if axis is None else getattr(self, axis))
        used = [name for entry in entries for name in _as_tuple(entry)]
        if len(used) != len(set(used)):
            raise ValueError(
                f"the axes {axes} map to {entries}, which uses a mesh axis twice; "
                "give one of them another rule"
            )
        return PartitionSpec(*entries)

    def mesh_axes(self) -> frozenset[str]:
        """Every mesh axis that the table mentions."""
        return frozenset(
            name
            for field in dataclasses.fields(self)
            for name in _as_tuple(getattr(self, field.name))
        )


_NAMES = frozenset(field.name for field in dataclasses.fields(AxisRules))

REPLICATED = AxisRules()
"""No axis is split: one device, or full copies everywhere."""


def dp() -> AxisRules:
    """Data parallelism: rows are split, parameters are copied."""
    return AxisRules(batch=("data", "fsdp"))


def fsdp() -> AxisRules:
    """Fully sharded data parallelism (ZeRO-3): each parameter is split over `fsdp`."""
    return AxisRules(
        batch=("data", "fsdp"),
        vocab=None,
        embed="fsdp",
    )


def fsdp_tp() -> AxisRules:
    """`fsdp` plus Megatron tensor and sequence parallelism over `tensor`.

    Between the tensor-parallel regions the tokens of a row are split over `tensor`
    (sequence parallelism, arXiv 2205.05198), inside them heads and hidden features.
    """
    return AxisRules(
        batch=("data", "fsdp"),
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
    """MegaScale's 3-D parallelism: `fsdp_tp` with the layers split over `pipe`."""
    return dataclasses.replace(fsdp_tp(), layers="pipe")


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
        raise ValueError(f"rules {name!r} is no preset; use one of {sorted(PRESETS)}")
    return PRESETS[name]()


# ------------------------------------------------------------------------------------
# Operations that choose by axis type


def constrain(
    x: Shaped[Array, "..."], axes: Sequence[str | None], rules: AxisRules
) -> Shaped[Array, "..."]:
    """`x` with its dimensions split as `rules` say for the logical `axes`.

    Auto axes get a sharding constraint, Explicit axes a reshard, Manual axes nothing,
    and without a mesh `x` comes back as it is.

    Args:
        x: Any array.
        axes: One logical axis name, or None, for each dimension of `x`.
        rules: The table of the recipe.

    Raises:
        ValueError: `axes` does not name every dimension, or a rule names an axis that
            the current mesh lacks.
    """
    if len(axes) != x.ndim:
        raise ValueError(f"axes {tuple(axes)} must name the {x.ndim} dimensions of x")
    spec = rules.spec(*axes)
    explicit, auto = _split_by_type(spec)
    if explicit is not None:
        x = jax.sharding.reshard(x, explicit)
    if auto is not None:
        x = jax.lax.with_sharding_constraint(x, auto)
    return x


def contract(
    subscripts: str,
    x: Inexact[Array, "..."],
    w: Inexact[Array, "..."],
    w_axes: Sequence[str | None],
    out_axes: Sequence[str | None],
    rules: AxisRules,
    *,
    preferred_element_type: DTypeLike | None = None,
) -> Inexact[Array, "..."]:
    """``einsum(subscripts, x, w)`` of an activation and a parameter.

    Mesh axes that split the batch only store the parameter (FSDP): `w` is gathered
    over them first. A contraction over a dimension that stays split (a row-parallel
    product) leaves partial sums: Explicit axes must be told where the sum goes, Auto
    axes get a constraint.

    Args:
        subscripts: As for `jax.numpy.einsum`, two operands.
        x: Activation.
        w: Parameter, already in the type of the computation.
        w_axes: Logical axes of `w`.
        out_axes: Logical axes of the result.
        rules: The table of the recipe.
        preferred_element_type: Type of the accumulation and of the result.
    """
    w = _gather_storage_axes(w, w_axes, rules)
    explicit, auto = _split_by_type(rules.spec(*out_axes))
    out = jnp.einsum(
        subscripts,
        x,
        w,
        out_sharding=explicit,
        preferred_element_type=preferred_element_type,
    )
    return out if auto is None else jax.lax.with_sharding_constraint(out, auto)


def gather(
    table: Shaped[Array, "rows *rest"],
    indices: Int[Array, "..."],
    table_axes: Sequence[str | None],
    out_axes: Sequence[str | None],
    rules: AxisRules,
) -> Shaped[Array, "..."]:
    """``table[indices]`` along the first dimension, split as `out_axes` say."""
    table = _gather_storage_axes(table, table_axes, rules)
    explicit, auto = _split_by_type(rules.spec(*out_axes))
    if explicit is not None:
        return table.at[indices].get(out_sharding=explicit)
    out = jnp.take(table, indices, axis=0)
    return out if auto is None else jax.lax.with_sharding_constraint(out, auto)


def reshape(
    x: Shaped[Array, "..."],
    shape: Sequence[int],
    out_axes: Sequence[str | None],
    rules: AxisRules,
) -> Shaped[Array, "..."]:
    """``x.reshape(shape)`` split as `out_axes` say (splitting or merging of heads)."""
    explicit, auto = _split_by_type(rules.spec(*out_axes))
    out = jax.lax.reshape(x, tuple(shape), out_sharding=explicit)
    return out if auto is None else jax.lax.with_sharding_constraint(out, auto)


def _gather_storage_axes(
    w: Shaped[Array, "..."], w_axes: Sequence[str | None], rules: AxisRules
) -> Shaped[Array, "..."]:
    """`w` split only over the mesh axes that its computation is split over."""
    storage = set(_as_tuple(rules.batch))
    kept = {
        axis: tuple(n for n in _as_tuple(getattr(rules, axis)) if n not in storage)
        for axis in w_axes
        if axis is not None
    }
    return constrain(w, w_axes, dataclasses.replace(rules, **kept))


def _as_tuple(axes: MeshAxes) -> tuple[str, ...]:
    if axes is None:
        return ()
    return (axes,) if isinstance(axes, str) else tuple(axes)


def _split_by_type(
    spec: PartitionSpec,
) -> tuple[PartitionSpec | None, PartitionSpec | None]:
    """The parts of `spec` on Explicit and on Auto axes of the current mesh.

    A part is None when the mesh has no axis of that type.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return None, None
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    for entry in spec:
        for name in _as_tuple(entry):
            if name not in types:
                raise ValueError(
                    f"the rules use the mesh axis {name!r}, but the mesh has only "
                    f"{mesh.axis_names}; make it with jaxscale.sharding.make_mesh or "
                    "choose other rules"
                )

    def part(kind: AxisType) -> PartitionSpec | None:
        if kind not in types.values():
            return None
        entries = []
        for entry in spec:
            names = tuple(n for n in _as_tuple(entry) if types[n] == kind)
            entries.append(names[0] if len(names) == 1 else names or None)
        return PartitionSpec(*entries)

    return part(AxisType.Explicit), part(AxisType.Auto)
