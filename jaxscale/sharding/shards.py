"""Run functions on each device's own shards: kernels and collectives.

`pallas_kernels.partition` does the same for one op on Explicit axes, by the types of
its operands; it has no rules, and so cannot treat Auto axes or parameters that are only
stored over the axes of the batch (FSDP).
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec
from jaxtyping import Array

from jaxscale.sharding.operations import constrain_beside
from jaxscale.sharding.rules import AxisRules, as_tuple, require_axes
from pallas_kernels.partition import current_mesh


def per_shard[Result](
    fn: Callable[..., Result],
    in_axes: Sequence[Any],
    out_axes: Sequence[Any],
    rules: AxisRules,
    *,
    parameters: Sequence[int] = (),
) -> Callable[..., Result]:
    """Run `fn` on each device's own shards, for work that no split axis couples.

    Attention is independent over sequences and heads, and the compiler cannot partition
    a Pallas kernel: both run under `jax.shard_map` over the Auto and Explicit axes of
    the mesh. Without a mesh, or if no axis splits anything, `fn` runs as it is. Auto
    axes that do not divide one of the dimensions are left out for all arguments.

    Args:
        fn: Function of arrays, or of pytrees of them, that returns a tuple.
        in_axes: Logical axes of each argument; for a pytree, a tree with axes in place
            of the arrays.
        out_axes: Logical axes of each result, in the same way.
        rules: Mesh axes of each logical axis.
        parameters: Which arguments are parameters. Axes that split the batch only store
            them (FSDP): `fn` gets them all-gathered.

    Returns:
        A function of the same arguments, global arrays, that returns the global
        results.

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
    """The specs of a `jax.shard_map` over all axes that are not Manual yet.

    `per_shard` uses it for functions that do not communicate; a function that does asks
    `names` which axes split a dimension.
    """

    mesh: AbstractMesh
    """Mesh of the context, or that of the arguments."""
    free: frozenset[str]
    """The mesh axes that are not Manual yet; empty if none of them splits anything."""
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
        """Return how `args`, arrays or pytrees, are split."""
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
        """Number of devices that arguments may be split over."""
        return math.prod(self.mesh.shape[name] for name in self.free)

    def names(self, axis: str | None) -> tuple[str, ...]:
        """The mesh axes that split the logical `axis` here."""
        entry = None if axis is None else self.rules.spec(axis)[0]
        return tuple(n for n in as_tuple(entry) if n in self.divided)

    def splits(self, axis: str | None) -> bool:
        """True if several devices share the work along the logical `axis`."""
        names = set(self.names(axis)) - self.storing
        return any(self.mesh.shape[name] > 1 for name in names)

    @property
    def storing(self) -> frozenset[str]:
        """The mesh axes that split the batch, and only store parameters (FSDP)."""
        return self.rules.mesh_axes(["batch"])

    def spec(self, axes: Sequence[str | None]) -> PartitionSpec:
        """The `PartitionSpec` of an array with these logical `axes`."""
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
            return [
                constrain_beside(x, names, self.rules, *leaves) for x, names in pairs
            ]

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
        """`fn` under `jax.shard_map`, or `fn` itself if nothing is split.

        Args:
            fn: Function of arguments that `place` has split; it returns a tuple.
            out_axes: Logical axes of each result.
            parameters: Which arguments, single arrays, `fn` gets all-gathered.
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
        """The `PartitionSpec`s of a tree with logical axes in place of arrays."""
        return jax.tree.map(self.spec, axes, is_leaf=_are_axes)

    def _gathering[Result](
        self,
        fn: Callable[..., Result],
        parameters: Mapping[int, Sequence[str | None]],
        storing: frozenset[str],
    ) -> Callable[..., Result]:
        """`fn`, called with `parameters` all-gathered over the mesh axes `storing`."""

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
            # The backward pass gathers them again: saved by the forward pass, the
            # unsharded parameters of all layers would fill every device.
            axes = as_tuple(params.get("axis_name", ()))
            return primitive.name != "all_gather" or all_names.isdisjoint(axes)

        return jax.checkpoint(gathered, policy=saveable)


def _are_axes(node: Any) -> bool:
    """Return whether a node of a tree names logical axes, one for each dimension."""
    return isinstance(node, tuple | list) and all(
        axis is None or isinstance(axis, str) for axis in node
    )
