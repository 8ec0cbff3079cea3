"""Operations on sharded arrays that choose by the type of the mesh axes.

JAX has three kinds of mesh axes. On an *Auto* axis the compiler propagates shardings
and a constraint steers it. On an *Explicit* axis the sharding is part of the type: an
operation whose result is ambiguous must be told it (``out_sharding``), which Auto axes
reject. On a *Manual* axis, inside `jax.shard_map`, arrays are local and the rules say
nothing: whoever writes the `shard_map` passes each device its rows of the batch and
whole parameters, or makes the collectives that split parameters need. The functions
`constrain`, `contract`, `reshape` and `per_shard`, and `gather` in `lookup`, choose by
axis type, so that the same module runs under all three, and under meshes that mix them.

The mesh is the one of `jax.set_mesh`, or else the one that the arrays live on.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Inexact, Shaped

from jaxscale.sharding.rules import AxisRules, as_tuple, require_axes


def constrain(
    x: Shaped[Array, "..."], axes: Sequence[str | None], rules: AxisRules
) -> Shaped[Array, "..."]:
    """`x` with its dimensions split as `rules` say for the logical `axes`.

    Auto axes get a sharding constraint, Explicit axes a reshard, Manual axes nothing,
    and without a mesh `x` comes back as it is. A dimension that Auto axes do not divide
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
    return _constrain(x, axes, rules, x)


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
    over them first, and once more in the backward pass. A contraction over a dimension
    that stays split (a row-parallel product) leaves partial sums: Explicit axes must
    be told where the sum goes, Auto axes get a constraint.

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
        # The backward pass gathers `w` again: kept from the forward pass, the whole
        # parameters of all layers would lie on every device.
        product = jax.checkpoint(product)
    return product(x, w)


def reshape(
    x: Shaped[Array, "..."],
    shape: Sequence[int],
    out_axes: Sequence[str | None],
    rules: AxisRules,
) -> Shaped[Array, "..."]:
    """``x.reshape(shape)`` split as `out_axes` say (splitting or merging of heads).

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


def per_shard[Result](
    fn: Callable[..., Result],
    in_axes: Sequence[Any],
    out_axes: Sequence[Any],
    rules: AxisRules,
    *,
    parameters: Sequence[int] = (),
) -> Callable[..., Result]:
    """`fn` run by each device on its own shards, for work that no split axis couples.

    Attention is independent over rows and heads, and a Pallas kernel cannot be split
    by the compiler: both run under `jax.shard_map` over the Auto and Explicit axes of
    the mesh. Without a mesh, or where no axis splits anything, `fn` runs as it is. Auto
    axes that do not divide one of the dimensions are left out for all arguments.

    Args:
        fn: Function of arrays, or of pytrees of them, that returns a tuple.
        in_axes: Logical axes of each argument; of a pytree, one with axes in the place
            of its arrays.
        out_axes: Logical axes of each result, in the same way.
        rules: Mesh axes of each logical axis.
        parameters: Which arguments are parameters. Over the axes that split the batch
            they are only stored: `fn` gets them gathered.

    Returns:
        A function of the same arguments, whole arrays, that gives the whole results.

    Raises:
        ValueError: as `constrain`, or an enclosing `jax.shard_map` over only some of
            the axes tracks what varies over them; both when called.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxscale.sharding import dp, make_mesh
        >>> axes = [("batch", None)]
        >>> rows = per_shard(lambda x: (x.cumsum(axis=1),), axes, axes, dp())
        >>> with jax.set_mesh(make_mesh({"data": -1})):
        ...     (sums,) = rows(jnp.ones((8, 4)))
        >>> print(sums[0])
        [1. 2. 3. 4.]
    """

    def run(*args: Any) -> Result:
        shards = Shards.of(args, in_axes, rules)
        return shards.over(fn, out_axes, parameters=parameters)(*shards.place(args))

    return run


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shards:
    """The specs by which a `jax.shard_map` over all but the Manual axes cuts arguments.

    `per_shard` is this without knowledge of the axes; a function that communicates asks
    `names` over which axes a dimension is split.
    """

    mesh: AbstractMesh
    """Mesh of the context, or that of the arguments."""
    free: frozenset[str]
    """The mesh axes that are not Manual yet; empty where none of them splits anything.
    """
    divided: frozenset[str]
    """The free axes that divide every dimension which the rules split over them."""
    in_axes: tuple[Any, ...]
    """Logical axes of each argument."""
    rules: AxisRules
    """Mesh axes of each logical axis."""

    @classmethod
    def of(
        cls, args: Sequence[Any], in_axes: Sequence[Any], rules: AxisRules
    ) -> "Shards":
        """Return how `args` are cut, arrays or pytrees of them."""
        in_axes = tuple(in_axes)
        leaves, tree = jax.tree.flatten(tuple(args))
        mesh = current_mesh(leaves)
        types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
        free = frozenset(n for n, kind in types.items() if kind != AxisType.Manual)
        pairs = zip(leaves, tree.flatten_up_to(in_axes), strict=True)
        if not any(mesh.shape[n] > 1 or types[n] == AxisType.Explicit for n in free):
            free, pairs = frozenset(), ()
        divided = set(free)
        for x, axes in pairs:
            require_axes(sorted(rules.mesh_axes(axes)), mesh.axis_names)
            for size, entry in zip(x.shape, rules.spec(*axes), strict=True):
                names = free.intersection(as_tuple(entry))
                if size % math.prod(mesh.shape[n] for n in names):
                    divided -= names
        return cls(
            mesh=mesh,
            free=free,
            divided=frozenset(divided),
            in_axes=in_axes,
            rules=rules,
        )

    @property
    def devices(self) -> int:
        """Number of devices among which arguments may be split."""
        return math.prod(self.mesh.shape[name] for name in self.free)

    def names(self, axis: str | None) -> tuple[str, ...]:
        """The mesh axes that split the logical `axis` here."""
        entry = None if axis is None else self.rules.spec(axis)[0]
        return tuple(n for n in as_tuple(entry) if n in self.divided)

    def splits(self, axis: str | None) -> bool:
        """True where several devices share the work along the logical `axis`."""
        names = set(self.names(axis)) - self.storing
        return any(self.mesh.shape[name] > 1 for name in names)

    @property
    def storing(self) -> frozenset[str]:
        """The mesh axes that split the batch, over which parameters are only stored."""
        return self.rules.mesh_axes(["batch"])

    def spec(self, axes: Sequence[str | None]) -> PartitionSpec:
        """The partition of an array with these logical `axes`."""
        entries = [self.names(axis) for axis in axes]
        if entries:
            # A gradient is summed over axes that its array does not name, those of one
            # device too; on Explicit axes the name would be part of the type.
            used = {name for names in entries for name in names}
            entries[0] += tuple(name for name in self._of_one if name not in used)
        return PartitionSpec(*(names or None for names in entries))

    @property
    def _of_one(self) -> tuple[str, ...]:
        types = zip(self.mesh.axis_names, self.mesh.axis_types, strict=True)
        return tuple(
            n for n, kind in types if kind == AxisType.Auto and self.mesh.shape[n] == 1
        )

    def place(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """The arguments, split as a function from `over` takes them."""
        if not self.free:
            return tuple(args)
        leaves, tree = jax.tree.flatten(tuple(args))
        if any(jax.typeof(x).manual_axis_type.varying for x in leaves):
            # JAX 0.11.2 cannot differentiate a tracking shard_map within another.
            raise ValueError(
                "check_vma True of the enclosing jax.shard_map leaves no room for the "
                "one that splits work over the remaining mesh axes; pass "
                "check_vma=False to it, or make it manual over all axes"
            )
        axes = tree.flatten_up_to(self.in_axes)

        def placed(*leaves: Array) -> list[Array]:
            pairs = zip(leaves, axes, strict=True)
            return [_constrain(x, names, self.rules, *leaves) for x, names in pairs]

        # Outside of `jax.jit`, arrays of one device go to the mesh of the others.
        return tree.unflatten(jax.jit(placed, inline=True)(*leaves))

    def over[Result](
        self,
        fn: Callable[..., Result],
        out_axes: Sequence[Any],
        *,
        parameters: Sequence[int] = (),
        storing: frozenset[str] | None = None,
    ) -> Callable[..., Result]:
        """`fn` run by each device on its shards, or `fn` itself where nothing is split.

        Args:
            fn: Function of arguments that `place` has split; it returns a tuple.
            out_axes: Logical axes of each result.
            parameters: Which arguments, single arrays, `fn` gets gathered.
            storing: Mesh axes to gather them over; None is `self.storing`.
        """
        if not self.free:
            return fn
        storing = self.storing if storing is None else storing
        stored = {i: self.in_axes[i] for i in parameters}
        mapped = jax.shard_map(
            self._gathering(fn, stored, storing),
            mesh=self.mesh,
            axis_names=self.free,
            in_specs=self._specs(self.in_axes),
            out_specs=self._specs(tuple(out_axes)),
            check_vma=False,
        )
        # Outside of `jax.jit`, jax 0.11.2 runs a shard_map operation by operation, and
        # XLA crashes on some of them. Inside, this changes nothing.
        return jax.jit(mapped, inline=True)

    def _specs(self, axes: tuple[Any, ...]) -> tuple[Any, ...]:
        """The partitions of a tree with logical axes in the place of its arrays."""
        return jax.tree.map(self.spec, axes, is_leaf=_are_axes)

    def _gathering[Result](
        self,
        fn: Callable[..., Result],
        parameters: Mapping[int, Sequence[str | None]],
        storing: frozenset[str],
    ) -> Callable[..., Result]:
        """`fn`, called with `parameters` whole over the mesh axes `storing`."""

        def storage(axis: str | None) -> tuple[str, ...]:
            names, sizes = self.names(axis), self.mesh.shape
            return tuple(n for n in names if n in storing and sizes[n] > 1)

        stored = {i: list(map(storage, axes)) for i, axes in parameters.items()}
        all_names = {n for dims in stored.values() for names in dims for n in names}
        if not all_names:
            return fn

        def gathered(*args: Any) -> Result:
            whole = list(args)
            for i, dims in stored.items():
                for dimension, names in enumerate(dims):
                    if names:
                        whole[i] = jax.lax.all_gather(
                            whole[i], names, axis=dimension, tiled=True
                        )
            return fn(*whole)

        def saveable(primitive: Any, *_: Any, **params: Any) -> bool:
            # The backward pass gathers them again: kept from the forward pass, the
            # whole parameters of all layers would lie on every device.
            axes = as_tuple(params.get("axis_name", ()))
            return primitive.name != "all_gather" or all_names.isdisjoint(axes)

        return jax.checkpoint(gathered, policy=saveable)


def _are_axes(node: Any) -> bool:
    """Return whether a node of a tree names logical axes, one for each dimension."""
    return isinstance(node, tuple | list) and all(
        axis is None or isinstance(axis, str) for axis in node
    )


def _constrain(
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
    """`w` split only over the mesh axes that its computation is split over."""
    computed = rules.without(rules.mesh_axes(["batch"]), w_axes)
    if computed != rules:
        # Constraints hold for cotangents too: with this one the gradient leaves the
        # backward pass split as the parameter, a reduce-scatter instead of a sum.
        w = constrain(w, w_axes, rules)
    return constrain(w, w_axes, computed)


def _is_gathered(
    w: Shaped[Array, "..."], w_axes: Sequence[str | None], rules: AxisRules
) -> bool:
    """Return whether one device computes with more than one shard of `w`."""
    mesh = current_mesh((w,))
    manual = set(mesh.manual_axes)
    stored = rules.mesh_axes(w_axes) & rules.mesh_axes(["batch"]) - manual
    return any(mesh.shape.get(axis, 1) > 1 for axis in stored)


def _is_narrow_row(subscripts: str, x: Array, w: Array) -> bool:
    """Whether XLA would store each term of a product of one row.

    It makes a sum along columns of the product of a row and a weight [K, N]. For a
    narrow weight that is two kernels, with K N terms between them: 38 us for [4096,
    2048] on an H200, where the matrix product of two rows takes 12. For wider, longer
    and smaller ones it is one kernel, as fast as the product or faster.
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


def current_mesh(arrays: Sequence[Array]) -> AbstractMesh:
    """The mesh of the context, or else that of the first array that has one."""
    context = jax.sharding.get_abstract_mesh()
    meshes = (context, *(jax.typeof(array).sharding.mesh for array in arrays))
    return next((mesh for mesh in meshes if not mesh.empty), context)


def partly_manual(mesh: AbstractMesh) -> bool:
    """Whether some axes of a mesh are Manual and others are not."""
    types = set(mesh.axis_types)
    return AxisType.Manual in types and len(types) > 1
