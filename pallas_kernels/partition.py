"""Ops on meshes: the compiler does not partition kernels, so they need local arrays.

Inside `jax.shard_map` over all mesh axes a kernel sees the arrays of one device, as it
must. Elsewhere it depends on the type of the axes:

- *Explicit*: the types of the operands say how they are split. `by_shards` runs the op
  in a `jax.shard_map` of its own, each device on its shards of the independent
  dimensions: rows, columns, heads.
- *Auto*: the compiler splits the operands after tracing. `check_local` makes the kernel
  decline, and XLA computes the op.

An op calls `by_shards` once, in its public function, and `check_local` in each of its
kernels. The layers of jaxscale have their own functions for shards
(`jaxscale.sharding.shards`), which split by the rules of logical axes, on Auto axes
too, and may communicate. An op called in one of these finds all axes Manual, and
`by_shards` does nothing.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from pallas_kernels.dispatch import Unsupported


def current_mesh(arrays: Sequence[jax.Array]) -> AbstractMesh:
    """The mesh of the context, or else that of the first array that has one."""
    context = jax.sharding.get_abstract_mesh()
    meshes = (context, *(jax.typeof(x).sharding.mesh for x in arrays))
    return next((mesh for mesh in meshes if not mesh.empty), context)


def check_local(op_name: str, *arrays: jax.Array | None) -> None:
    """Refuses arrays that may be split over devices.

    Raises:
        Unsupported: the compiler may split them over several devices.
    """
    mesh = current_mesh([x for x in arrays if x is not None])
    free = _free_axes(mesh)
    explicit = _explicit_axes(mesh)
    if explicit or any(mesh.shape[name] > 1 for name in free):
        raise Unsupported(
            f"{op_name}: the compiler does not partition the kernel over the mesh axes"
            f" {sorted(free)}; call it inside jax.shard_map over all of them, or use"
            " implementation='xla'"
        )


def by_shards[R](
    fn: Callable[..., R],
    args: Sequence[jax.Array | None],
    dims: Sequence[str],
    out_dims: Any,
    *,
    gather: bool = True,
) -> Callable[..., R]:
    """`fn` or, on an Explicit mesh, `fn` run by each device on its own shards.

    A dimension has the same letter in all arrays that share it. The op is independent
    along lower-case dimensions: a device computes its part of the result from its part
    of the operands. Other dimensions must be whole; if they are split, they are
    gathered.

    Args:
        fn: a function of arrays.
        args: its arguments; None for one that is not given.
        dims: a letter for each dimension of each argument.
        out_dims: a letter for each dimension of the result, or a pytree of such strings
            like the result.
        gather: False returns `fn` as it is if a dimension that must be whole is split:
            for ops that XLA computes without a gather.

    Returns:
        A function of `args` with the results of `fn`, split as the operands are.

    Example:
        >>> import jax.numpy as jnp
        >>> mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
        >>> with jax.set_mesh(mesh):
        ...     x = jax.device_put(jnp.ones((8, 4)), PartitionSpec("data"))
        ...     sums = by_shards(lambda x: x.sum(1), [x], ["mK"], "m")(x)
        >>> jax.typeof(sums)
        ShapedArray(float32[8@data])
    """
    present = [x for x in args if x is not None]
    mesh = current_mesh(present)
    free = _free_axes(mesh)
    explicit = _explicit_axes(mesh)
    large = {name for name in free if mesh.shape[name] > 1}
    # jax 0.11.2 cannot differentiate a shard_map within one that tracks what varies.
    tracked = any(jax.typeof(x).manual_axis_type.varying for x in present)
    if not explicit or large - explicit or tracked:
        return fn
    given = [letters for x, letters in zip(args, dims, strict=True) if x is not None]
    if not gather and not all(map(_is_whole, present, given)):
        return fn
    split = _split(present, given)

    def spec(letters: str) -> PartitionSpec:
        return PartitionSpec(*(split.get(letter) for letter in letters))

    specs = tuple(map(spec, dims))
    mapped = jax.shard_map(
        fn,
        mesh=mesh,
        # None given means all but those over which a `jax.vmap` is split already.
        axis_names=free if mesh.manual_axes else frozenset(),
        in_specs=specs,
        out_specs=jax.tree.map(spec, out_dims),
        check_vma=False,
    )

    def placed(*args: jax.Array | None) -> R:
        shardings = (NamedSharding(mesh, spec) for spec in specs)
        return mapped(
            *(
                None if x is None else jax.sharding.reshard(x, where)
                for x, where in zip(args, shardings, strict=True)
            )
        )

    # Outside of `jax.jit`, jax 0.11.2 runs a shard_map operation by operation.
    return jax.jit(placed, inline=True)


def _free_axes(mesh: AbstractMesh) -> frozenset[str]:
    """The axes over which the compiler, not the program, splits arrays."""
    return frozenset(mesh.axis_names) - frozenset(mesh.manual_axes)


def _explicit_axes(mesh: AbstractMesh) -> set[str]:
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return {name for name, kind in types if kind == AxisType.Explicit}


def _split(arrays: Sequence[jax.Array], dims: Sequence[str]) -> dict[str, Any]:
    """The mesh axes of each letter along which devices share the work."""
    mesh = current_mesh(arrays)
    found: dict[str, Any] = {}
    used: set[str] = set()
    for x, letters in zip(arrays, dims, strict=True):
        for letter, entry in zip(letters, jax.typeof(x).sharding.spec, strict=True):
            axes = entry if isinstance(entry, tuple) else (entry,)
            if entry is None or letter in found or used.intersection(axes):
                continue
            # Heads of queries and of keys share a letter and differ in number.
            count = math.prod(mesh.shape[name] for name in axes)
            if letter.islower() and all(
                size % count == 0
                for y, names in zip(arrays, dims, strict=True)
                for size, name in zip(y.shape, names, strict=True)
                if name == letter
            ):
                found[letter] = entry
                used.update(axes)
    return found


def _is_whole(x: jax.Array, letters: str) -> bool:
    """True if no dimension that must be whole is split."""
    spec = jax.typeof(x).sharding.spec
    return all(
        entry is None or letter.islower()
        for letter, entry in zip(letters, spec, strict=True)
    )
