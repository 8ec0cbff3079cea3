"""A decoder made ready to serve: parameters as compiled programs read them best."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding

from jaxscale.models.stack import unstacked
from jaxscale.nn.blocks import MLP, Block
from jaxscale.nn.embeddings import Embed
from jaxscale.nn.linear import Linear
from jaxscale.nn.self_attention import Attention
from jaxscale.sharding.parameters import place, shardings
from jaxscale.sharding.rules import AxisRules, as_tuple


def for_inference[Model: nnx.Module](model: Model, mesh: Mesh | None = None) -> Model:
    """`Decoder.for_inference`: `model` as compiled programs read it best."""
    result: Any = model
    if mesh is None and not isinstance(result.blocks, Block):
        return result  # it is already
    result = jax.tree.map(lambda p: p, model)
    mesh = mesh or _mesh_of(result)
    rules = serving_rules(result.rules)
    result.rules, result.remat, result.scan_layers = rules, "none", False
    modules: list[Any] = [module for _, module in nnx.iter_modules(result)]
    for module in modules:
        if hasattr(module, "rules"):
            module.rules = rules
    if mesh is None:
        return jax.jit(lambda model: _prepared(model, {}))(result)
    mesh = Mesh(
        mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * mesh.devices.ndim
    )
    sizes = dict(mesh.shape)
    with jax.set_mesh(mesh):
        result = place(result, mesh, rules)
        prepared = lambda model: _prepared(model, sizes)  # noqa: E731
        shapes = jax.eval_shape(prepared, result)
        return jax.jit(prepared, out_shardings=shardings(shapes, mesh, rules))(result)


def serving_rules(rules: AxisRules) -> AxisRules:
    """`rules` in which nothing is split over what splits the batch or the layers.

    Requests share the pages of their keys and values, so every such device would need
    all of them; and parameters that are stored in parts would be gathered for each
    token. Tensor parallelism is left.
    """
    names = [field.name for field in dataclasses.fields(rules)]
    return rules.without(
        rules.mesh_axes(["batch"]) | rules.mesh_axes(["layers"]), names
    )


def _prepared(model: Any, sizes: dict[str, int]) -> Any:
    """`model` with single blocks, in the type of the computation, inputs joined."""

    def ways(axis: str) -> int:
        names = as_tuple(model.rules.spec(axis)[0])
        return math.prod(sizes.get(name, 1) for name in names)

    model = _repeated(unstacked(model), ways("kv_heads"))
    if sizes:
        model.config.check_mesh(sizes, model.rules)
    for _, module in nnx.iter_modules(model):
        if isinstance(module, Linear):
            _cast(module.kernel, module.dtype)
            if module.bias is not None:
                _cast(module.bias, module.dtype)
        elif isinstance(module, Embed):
            _cast(module.table, module.dtype)
    for block in model.blocks:
        for layer, axis in ((block.attention, "kv_heads"), (block.mlp, "mlp")):
            if isinstance(layer, Attention | MLP):
                layer.join_inputs(ways(axis))
    return model


def _repeated(model: Any, ways: int) -> Any:
    """`model` with as many key/value heads as devices, if it has fewer.

    Each of them is there several times: a device has the one that its query heads read,
    and its pages hold no other.
    """
    heads = model.config.num_kv_heads
    if heads >= ways or ways % heads or model.config.num_heads % ways:
        return model  # as it is, or as cannot be
    model.config = dataclasses.replace(model.config, num_kv_heads=ways)
    for block in model.blocks:
        attention = block.attention
        attention.config = dataclasses.replace(attention.config, num_kv_heads=ways)
        for layer in (attention.key, attention.value):
            if not isinstance(layer, Linear):
                raise ValueError(
                    f"num_kv_heads {heads} is less than {ways} devices, among which "
                    f"heads of a {type(layer).__name__} cannot be repeated; use at "
                    f"most {heads} devices"
                )
            for parameter in (layer.kernel, layer.bias):
                if parameter is not None:
                    value = parameter[...]
                    apart = value.reshape(*value.shape[:-1], heads, -1)  # [.., K, H]
                    more = jnp.repeat(apart, ways // heads, axis=-2)
                    parameter.set_value(more.reshape(*value.shape[:-1], -1))
    return model


def _cast(parameter: nnx.Variable, dtype: Any) -> None:
    parameter.set_value(parameter[...].astype(dtype))


def _mesh_of(model: Any) -> Mesh | None:
    """The mesh that the parameters live on."""
    found = (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(model))
    meshes = (s.mesh for s in found if isinstance(s, NamedSharding))
    return next((mesh for mesh in meshes if isinstance(mesh, Mesh)), None)
