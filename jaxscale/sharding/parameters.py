"""Parameters of NNX modules on a mesh: shardings, sharded creation, placement.

A module is a pytree, so a tree of `NamedSharding` with the module's structure says
where every parameter is stored. The logical axes come from the metadata that
`partitioned` leaves on each parameter.
"""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.nn.initializers import Initializer
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxscale.sharding.rules import AxisRules, check_axes, require_axes


_KIND = "memory_kind"
"""Name in the metadata of a parameter."""


def partitioned(init: Initializer, *axes: str | None) -> Callable[..., Any]:
    """`init` whose parameter carries the logical `axes`, for `nnx.Param`.

    The eager form of Flax, which places the parameter at once, fails without a mesh
    and inside `jax.shard_map`; `create` places all parameters in one step instead.

    Args:
        init: ``init(key, shape, dtype)``, as those of `jax.nn.initializers`.
        *axes: A logical axis for each dimension; None is never split.

    Raises:
        ValueError: an axis is none of `AxisRules`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from flax import nnx
        >>> init = partitioned(jax.nn.initializers.ones, "embed", "mlp")
        >>> kernel = nnx.Param(init(jax.random.key(0), (4, 8), jnp.float32))
        >>> logical_axes(kernel)
        ('embed', 'mlp')
    """
    check_axes(*axes)
    return nnx.with_partitioning(init, axes, eager_sharding=False)


def logical_axes(variable: nnx.Variable) -> tuple[str | None, ...]:
    """The logical axes of a parameter, one for each dimension; None where unnamed."""
    axes = variable.get_metadata().get("out_sharding")
    return tuple(axes) if axes is not None else (None,) * variable.ndim


def kept_in[M](memory_kind: str, module: M) -> M:
    """`module` with each parameter marked with the memory kind that stores it.

    `shardings` reads it. The arrays stay where they are.

    Args:
        memory_kind: ``"device"``, or ``"pinned_host"`` for host memory.
        module: A module or a pytree as for `specs`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxscale.sharding import make_mesh, REPLICATED
        >>> moments = kept_in("pinned_host", {"w": nnx.Param(jnp.zeros(4))})
        >>> mesh = make_mesh({"data": 1}, jax.devices()[:1])
        >>> shardings(moments, mesh, REPLICATED)["w"].get_value().memory_kind
        'pinned_host'
    """

    def mark(node: Any) -> Any:
        if isinstance(node, nnx.Variable):
            node = jax.tree.map(lambda x: x, node)
            node.set_metadata(_KIND, memory_kind)
        return node

    return jax.tree.map(mark, module, is_leaf=lambda n: isinstance(n, nnx.Variable))


def specs[M](module: M, rules: AxisRules) -> M:
    """The partition of each parameter of `module`, as a tree of its structure.

    Args:
        module: A module, its abstract form, or any pytree of variables and arrays:
            `flax.nnx.State`, the state of an optimizer. Plain arrays are replicated.
        rules: Mesh axes of each logical axis.

    Raises:
        ValueError: the logical axes of a parameter do not fit its shape or are unknown;
            the message names the parameter.
    """

    def spec(name: str, variable: nnx.Variable) -> PartitionSpec:
        axes = logical_axes(variable)
        if len(axes) != variable.ndim:
            raise ValueError(
                f"parameter {name} of shape {variable.shape} has the logical axes "
                f"{axes}, expected {variable.ndim}; name each dimension, and stack "
                "layers by nnx.vmap with transform_metadata="
                "{nnx.PARTITION_NAME: 'layers'}"
            )
        try:
            return rules.spec(*axes)
        except ValueError as error:
            raise ValueError(f"parameter {name}: {error}") from error

    return _map_variables(spec, module)


def shardings[M](module: M, mesh: Mesh, rules: AxisRules) -> M:
    """A `NamedSharding` for each parameter of `module`, as a tree of its structure.

    The memory kind is that of the device, or what `kept_in` has marked.

    Args:
        module: A module, the abstract module that `jax.eval_shape` gives, or a pytree
            as for `specs`.
        mesh: The devices.
        rules: Mesh axes of each logical axis.

    Raises:
        ValueError: the rules name an axis that the mesh lacks, the axes of a parameter
            do not fit its shape, or a dimension is not divisible by the mesh axes that
            it is split over; the message names the parameter.
    """
    require_axes(sorted(rules.placing), mesh.axis_names)

    def place(
        path: tuple[Any, ...], leaf: Any, spec: PartitionSpec, kind: str
    ) -> NamedSharding:
        sharding = NamedSharding(mesh, spec, memory_kind=kind or None)
        try:
            sharding.shard_shape(leaf.shape)
        except ValueError as error:
            raise ValueError(
                f"parameter {_name(path)} of shape {leaf.shape} cannot be split as "
                f"{spec} over the mesh {dict(mesh.shape)}: a dimension is not "
                "divisible; change the mesh or the rules"
            ) from error
        return sharding

    kinds = _map_variables(lambda _, x: x.get_metadata().get(_KIND, ""), module)
    return jax.tree_util.tree_map_with_path(place, module, specs(module, rules), kinds)


def create[M](init: Callable[[], M], mesh: Mesh, rules: AxisRules) -> M:
    """The module that `init` makes; each device initializes only its own shards.

    Args:
        init: Makes the module, for example ``lambda: Decoder(config, rngs=rngs)``.
        mesh: The devices.
        rules: Mesh axes of each logical axis.
    """
    with jax.set_mesh(mesh):
        abstract = jax.eval_shape(init)
        return jax.jit(init, out_shardings=shardings(abstract, mesh, rules))()


def place[M](module: M, mesh: Mesh, rules: AxisRules) -> M:
    """`module` moved to the mesh, or from one mesh to another.

    Args:
        module: An NNX module, or a tree with its parameters.
        mesh: The target devices.
        rules: Mesh axes of each logical axis.

    Example:
        >>> from flax import nnx
        >>> from jaxscale import models, sharding
        >>> model = models.Decoder(models.preset("llama_tiny"), rngs=nnx.Rngs(0))
        >>> mesh, rules = sharding.make_mesh({"fsdp": -1}), sharding.fsdp()
        >>> sharding.place(model, mesh, rules).blocks.mlp.up.kernel.sharding.spec
        P(None, 'fsdp', None)
    """
    return jax.device_put(module, shardings(module, mesh, rules))


def _map_variables(fn: Callable[[str, nnx.Variable], Any], module: Any) -> Any:
    """`module` with the leaf of each variable replaced by ``fn(name, variable)``."""

    def replace(path: tuple[Any, ...], node: Any) -> Any:
        if not isinstance(node, nnx.Variable):
            return fn(_name(path), nnx.Param(node))
        value = fn(_name(path), node)
        return jax.tree.map(lambda _: value, node)

    return jax.tree_util.tree_map_with_path(
        replace, module, is_leaf=lambda node: isinstance(node, nnx.Variable)
    )


def _name(path: tuple[Any, ...]) -> str:
    name = jax.tree_util.keystr(path, simple=True, separator=".")
    return name.removesuffix(".value")
