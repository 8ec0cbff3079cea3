"""Operations on sharded arrays that choose by the type of the mesh axes.

JAX has three kinds of mesh axes. On an *Auto* axis the compiler propagates shardings
and a constraint steers it. On an *Explicit* axis the sharding is part of the type: an
operation whose result is ambiguous must be told it (``out_sharding``), which Auto axes
reject. On a *Manual* axis, inside `jax.shard_map`, arrays are local and the rules say
nothing: whoever writes the `shard_map` passes each device its shard of the batch and
    unsharded parameters, or calls the collectives that sharded parameters need. The
    functions
`constrain`, `contract` and `reshape`, `per_shard` in `shards` and `gather` in `lookup`
choose by axis type, so that the same module runs under all three, and under meshes that
mix them.

The mesh is the one of `jax.set_mesh`, or else the one that the arrays live on.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Inexact, Shaped

from jaxscale.sharding.rules import AxisRules, as_tuple, require_axes
from pallas_kernels.partition import current_mesh


def constrain(
    x: Shaped[Array, "..."], axes: Sequence[str | None], rules: AxisRules
) -> Shaped[Array, "..."]:
    """`x` with its dimensions sharded as `rules` say for the logical `axes`.

    Auto axes get a sharding constraint, Explicit axes a reshard, Manual axes nothing;
    without a mesh `x` is returned unchanged. A dimension that Auto axes do not divide
    (one token over two devices) is left to the compiler; Explicit axes must divide it.

    Args:
        x: Any array.
        axes: One logical axis name, or None, for each dimension of `x`.
        rules: Mesh axes of each logical axis.

    Raises:
        ValueError: `axes` does not name every dimension, a rule names an axis that the
            mesh lacks, or an Explicit axis does not divide its dimension.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxscale.sharding import dp, make_mesh
        >>> with jax.set_mesh(make_mesh({"data": -1})):
        ...     x = constrain(jnp.ones((8, 4)), ("batch", None), dp())
        >>> x.sharding.spec
        P(('data', 'fsdp'), None)
    """
    return constrain_beside(x, axes, rules, x)


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
    """``einsum(subscripts, x, w)`` of an activation and a sharded parameter.

    Mesh axes that split the batch only store the parameter (FSDP): `w` is all-gathered
    over them first, and again in the backward pass. A contraction over a dimension that
    stays sharded (a row-parallel matmul) leaves partial sums: Explicit axes must be
    told where the sum goes, Auto axes get a constraint.

    Args:
        subscripts: Terms of `jax.numpy.einsum`: two operands and the result, one letter
            for each dimension.
        x: Activation.
        w: Parameter, already in the type of the computation.
        w_axes: Logical axes of `w`.
        out_axes: Logical axes of the result.
        rules: Mesh axes of each logical axis.
        preferred_element_type: Type of the accumulation and of the result.

    Raises:
        ValueError: `subscripts` are not of the form ``"ab,bc->ac"``, or as `constrain`.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxscale.sharding import fsdp_tp
        >>> x, w = jnp.ones((2, 3, 4)), jnp.ones((4, 5))
        >>> axes = ("embed", "mlp"), ("batch", None, "act_mlp")
        >>> contract("btd,df->btf", x, w, *axes, fsdp_tp())[0, 0]
        Array([4., 4., 4., 4., 4.], dtype=float32)
    """
    shape = _einsum_shape(subscripts, x.shape, w.shape)
    explicit, auto = layout_of(shape, out_axes, rules, x, w)

    twice = explicit is auto is None and _is_narrow_row(subscripts, x, w)

    def product(x: Array, w: Array) -> Array:
        if twice:
            x = jnp.pad(x, [*[(0, 0)] * (x.ndim - 2), (0, 1), (0, 0)])  # [.., 2, K]
        out = jnp.einsum(
            subscripts,
            x,
            gather_storage_axes(w, w_axes, rules),
            out_sharding=explicit,
            preferred_element_type=preferred_element_type,
        )
        return out[..., :1, :] if twice else steer(out, auto)

    if _is_gathered(w, w_axes, rules):
        # The backward pass gathers `w` again: saved by the forward pass, the unsharded
        # parameters of all layers would fill every device.
        product = jax.checkpoint(product)
    return product(x, w)


def reshape(
    x: Shaped[Array, "..."],
    shape: Sequence[int],
    out_axes: Sequence[str | None],
    rules: AxisRules,
) -> Shaped[Array, "..."]:
    """``x.reshape(shape)`` sharded as `out_axes` say (to split or merge heads).

    Args:
        x: Any array.
        shape: Shape of the result, without -1.
        out_axes: Logical axes of the result.
        rules: Mesh axes of each logical axis.

    Raises:
        ValueError: as `constrain`.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxscale.sharding import fsdp_tp
        >>> axes = ("batch", None, "act_heads", None)
        >>> reshape(jnp.ones((2, 3, 8)), (2, 3, 2, 4), axes, fsdp_tp()).shape
        (2, 3, 2, 4)
    """
    explicit, auto = layout_of(tuple(shape), out_axes, rules, x)
    return steer(jax.lax.reshape(x, tuple(shape), out_sharding=explicit), auto)


def constrain_beside(
    x: Array, axes: Sequence[str | None], rules: AxisRules, *arrays: Array
) -> Array:
    """`constrain` on the mesh of the context, or else that of `arrays`."""
    explicit, auto = layout_of(x.shape, axes, rules, *arrays)
    if explicit is not None:
        x = jax.sharding.reshard(x, explicit)
    return steer(x, auto)


def gather_storage_axes(
    w: Shaped[Array, "..."], w_axes: Sequence[str | None], rules: AxisRules
) -> Shaped[Array, "..."]:
    """`w` gathered over the mesh axes that only store it."""
    computed = rules.without(rules.mesh_axes(["batch"]), w_axes)
    if computed != rules:
        # Constraints hold for cotangents too: with this one the gradient leaves the
        # backward pass sharded as the parameter, a reduce-scatter instead of an
        # all-reduce.
        w = constrain(w, w_axes, rules)
    return constrain(w, w_axes, computed)


def _is_gathered(
    w: Shaped[Array, "..."], w_axes: Sequence[str | None], rules: AxisRules
) -> bool:
    """Return whether a device computes with more than one shard of `w`."""
    mesh = current_mesh((w,))
    manual = set(mesh.manual_axes)
    stored = rules.mesh_axes(w_axes) & rules.mesh_axes(["batch"]) - manual
    return any(mesh.shape.get(axis, 1) > 1 for axis in stored)


def _is_narrow_row(subscripts: str, x: Array, w: Array) -> bool:
    """Whether XLA would store each term of a matmul with a single row.

    XLA turns the matmul of one row and a weight [K, N] into a sum over columns. For a
    narrow weight that is two kernels, with K N terms between them: 38 us for [4096,
    2048] on an H200, where the matmul of two rows takes 12. For wider, longer and
    smaller ones it is one kernel, as fast as the matmul or faster.
    """
    xs, ws, _, out = _terms(subscripts)
    if (len(ws), out) != (2, xs[:-1] + ws[1:]) or xs[-1] != ws[0] or x.ndim < 2:
        return False
    size, width = w.shape
    narrow = size <= 4096 and width <= 2048 and size * width >= 2**21
    return narrow and x.size == size


def _einsum_shape(
    subscripts: str, x_shape: Sequence[int], w_shape: Sequence[int]
) -> tuple[int, ...]:
    """The shape of the result of an einsum of two operands."""
    x_letters, w_letters, arrow, out = _terms(subscripts)
    lengths = len(x_letters), len(w_letters)
    if (
        not arrow
        or not (x_letters + w_letters + out).isalpha()
        or lengths != (len(x_shape), len(w_shape))
    ):
        raise ValueError(
            f"subscripts {subscripts!r} do not fit operands of shapes "
            f"{tuple(x_shape)} and {tuple(w_shape)}; write one letter for each "
            "dimension, as in 'btd,df->btf'"
        )
    sizes = dict(zip(x_letters + w_letters, (*x_shape, *w_shape), strict=True))
    return tuple(sizes[letter] for letter in out)


def _terms(subscripts: str) -> tuple[str, str, str, str]:
    """The letters of both operands, the arrow if there is one, those of the result."""
    operands, arrow, out = subscripts.replace(" ", "").partition("->")
    x, _, w = operands.partition(",")
    return x, w, arrow, out


def steer(x: Array, auto: NamedSharding | None) -> Array:
    """`x` with the sharding over Auto axes that `layout_of` gives, if there are any."""
    return x if auto is None else jax.lax.with_sharding_constraint(x, auto)


def layout_of(
    shape: Sequence[int],
    axes: Sequence[str | None],
    rules: AxisRules,
    *arrays: Array,
) -> tuple[NamedSharding | None, NamedSharding | None]:
    """The sharding of an array over the Explicit and over the Auto axes of the mesh.

    A part is None when the mesh has no axis of that type.
    """
    if len(axes) != len(shape):
        raise ValueError(
            f"axes {tuple(axes)} do not fit the shape {tuple(shape)}; name each "
            "dimension, with None for one that is not split"
        )
    spec = rules.spec(*axes)
    mesh = current_mesh(arrays)
    if mesh.empty:
        return None, None
    require_axes(sorted(rules.mesh_axes(axes)), mesh.axis_names)
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))

    def part(kind: AxisType) -> NamedSharding | None:
        if kind not in types.values():
            return None
        entries = []
        for size, axis, entry in zip(shape, axes, spec, strict=True):
            names = tuple(n for n in as_tuple(entry) if types[n] == kind)
            count = math.prod(mesh.shape[n] for n in names)
            if size % count and kind == AxisType.Explicit:
                raise ValueError(
                    f"dimension {axis!r} of size {size} is not divisible by the "
                    f"{count} devices of the Explicit mesh axes {names}; pad it, or "
                    f"use dataclasses.replace(rules, {axis}=None)"
                )
            if size % count:
                entries.append(PartitionSpec.UNCONSTRAINED)
            else:
                entries.append(names[0] if len(names) == 1 else names or None)
        return NamedSharding(mesh, PartitionSpec(*entries))

    return part(AxisType.Explicit), part(AxisType.Auto)


def partly_manual(mesh: AbstractMesh) -> bool:
    """Whether some axes of a mesh are Manual and others are not."""
    types = set(mesh.axis_types)
    return AxisType.Manual in types and len(types) > 1
