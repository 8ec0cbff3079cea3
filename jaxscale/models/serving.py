"""Prepare a decoder for serving: parameters in the layout that serves fastest."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding

from jaxscale.models.config import DecoderConfig
from jaxscale.models.decode_layers import share_out
from jaxscale.models.stack import unstacked
from jaxscale.models.vocabulary import fitted, ways_of
from jaxscale.nn.blocks import MLP, Block
from jaxscale.nn.embeddings import Embed
from jaxscale.nn.joined import can_join
from jaxscale.nn.linear import Linear
from jaxscale.nn.quantized_linear import QuantizedLinear
from jaxscale.nn.self_attention import Attention
from jaxscale.nn.tile_sparse_linear import can_join_sparse
from jaxscale.sharding.parameters import place, shardings
from jaxscale.sharding.rules import AxisRules


def for_inference[Model: nnx.Module](model: Model, mesh: Mesh | None = None) -> Model:
    """`Decoder.for_inference`: `model` in the layout that serves fastest.

    An abstract model, whose shapes say where they are, has an abstract result.
    """
    result: Any = model
    if mesh is None and _is_served(result):
        return result
    result = jax.tree.map(lambda p: p, model)
    mesh = mesh or mesh_of(result)
    rules = serving_rules(result.rules)
    result.rules, result.remat, result.scan_layers = rules, "none", False
    modules: list[Any] = [module for _, module in nnx.iter_modules(result)]
    for module in modules:
        if hasattr(module, "rules"):
            module.rules = rules
        if hasattr(module, "quantization"):
            module.quantization = None
    mesh = None if mesh is None else serving_mesh(mesh)
    sizes = {} if mesh is None else dict(mesh.shape)
    if mesh is not None:
        if not isinstance(result.lm_head, QuantizedLinear):  # which pads its own rows
            resize = functools.partial(fitted, mesh_sizes=sizes, rules=rules)
            result = (
                jax.eval_shape(resize, result)
                if is_abstract(result)
                else resize(result)
            )
        if not is_abstract(result):
            result = place(result, mesh, rules)
    result = compiled(lambda model: prepared_model(model, sizes), result, mesh, rules)
    if not (sizes or is_abstract(result)):
        share_out(result.blocks)
    return result


def _is_served(model: Any) -> bool:
    """Whether `for_inference` has made the model."""
    if isinstance(model.blocks, Block):
        return False
    readers = [m for _, m in nnx.iter_modules(model) if isinstance(m, Attention | MLP)]
    inputs = [reader.inputs for reader in readers]
    return not any(can_join(layers, 1) or can_join_sparse(layers) for layers in inputs)


def compiled[M](
    fn: Callable[[Any], M], module: Any, mesh: Mesh | None, rules: AxisRules
) -> M:
    """``fn(module)``, compiled, on the devices that `rules` choose, or those of
    `module`.

    Args:
        fn: The function; it is traced once for modules of the same structure.
        module: A module.
        mesh: The devices; None is where `module` is.
        rules: Mesh axes of each logical axis.
    """
    if mesh is None and not is_abstract(module):
        return jax.jit(fn)(module)
    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        shapes = jax.eval_shape(fn, module)
        if mesh is None:
            where = jax.tree.leaves(module)[0].sharding
            places = jax.tree.map(lambda _: where, shapes)
        else:
            places = shardings(shapes, mesh, rules)
        if is_abstract(module):
            return jax.tree.map(placed, shapes, places)
        return jax.jit(fn, out_shardings=places)(module)


def is_abstract(module: Any) -> bool:
    """Whether a module has shapes instead of arrays."""
    return any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(module))


def placed(shape: jax.ShapeDtypeStruct, where: Any) -> jax.ShapeDtypeStruct:
    """The shape of an array that is somewhere."""
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=where)


def serving_mesh(mesh: Mesh) -> Mesh:
    """`mesh` with axes that the compiler splits."""
    kinds = (AxisType.Auto,) * mesh.devices.ndim
    return Mesh(mesh.devices, mesh.axis_names, axis_types=kinds)


def serving_rules(rules: AxisRules) -> AxisRules:
    """`rules` with only tensor parallelism left.

    Requests share one page pool, so data-parallel devices would each need all of it;
    and FSDP would gather parameters for each token.
    """
    names = [field.name for field in dataclasses.fields(rules)]
    return rules.without(
        rules.mesh_axes(["batch"]) | rules.mesh_axes(["layers"]), names
    )


def prepared_model(model: Any, sizes: dict[str, int]) -> Any:
    """`model` unstacked, in the type of the computation, input projections merged."""
    model = unstacked(model)
    model.config = serving_config(model.config, model.rules, sizes)
    return prepare(model, model.rules, sizes)


def serving_config(
    config: DecoderConfig, rules: AxisRules, sizes: dict[str, int]
) -> DecoderConfig:
    """The abstract model that `prepare` returns.

    Raises:
        ValueError: a mesh cannot split the model.
    """
    ways = ways_of("kv_heads", sizes, rules)
    if _can_repeat(config, ways):
        config = dataclasses.replace(config, num_kv_heads=ways)
    if sizes:
        config.check_mesh(sizes, rules)
    return config


def prepare[M: nnx.Module](module: M, rules: AxisRules, sizes: dict[str, int]) -> M:
    """Convert, repeat and merge parameters of a model, or of a block, in place.

    Args:
        module: Its blocks are no stack.
        rules: Mesh axes of each logical axis.
        sizes: Devices of each mesh axis.

    Returns:
        `module`.
    """
    modules = [part for _, part in nnx.iter_modules(module)]
    for part in modules:
        if isinstance(part, Linear):
            _cast(part.kernel, part.dtype)
            if part.bias is not None:
                _cast(part.bias, part.dtype)
        elif isinstance(part, Embed):
            _cast(part.table, part.dtype)
    for part in modules:
        if isinstance(part, Attention):
            ways = ways_of("kv_heads", sizes, rules)
            _repeat_heads(part, ways)
            part.join_inputs(ways)
        elif isinstance(part, MLP):
            part.join_inputs(ways_of("mlp", sizes, rules))
    return module


def prepare_read[M: nnx.Module](
    block: M,
    number: int,
    convert: Callable[[Any], Any],
    *,
    mesh: Mesh | None,
    rules: AxisRules,
) -> M:
    """Prepare a block for inference, as it was read.

    Args:
        block: Of a model on the result of `serving_mesh`, as the file has it.
        number: Of the block.
        convert: Makes the block's parameters of what the file has, in the same program.
        mesh: The devices; None is where it is.
        rules: A result of `serving_rules`.
    """
    sizes = () if mesh is None else tuple(mesh.shape.items())
    return compiled(_preparer(convert, rules, sizes), block, mesh, rules)


def prepare_rest(model: Any, sizes: dict[str, int]) -> Any:
    """Prepare a model whose blocks are prepared, one parameter at a time, in place."""
    blocks, model.blocks = model.blocks, nnx.List([])
    model = prepare(model, model.rules, sizes)
    model.blocks = blocks
    return model


@functools.cache  # the same function each time: blocks that are alike are compiled once
def _preparer(
    convert: Callable[[Any], Any], rules: AxisRules, sizes: tuple[tuple[str, int], ...]
) -> Any:
    return lambda block: prepare(convert(block), rules, dict(sizes))


def _can_repeat(config: Any, ways: int) -> bool:
    """Whether fewer key/value heads than devices divide evenly over them."""
    heads = config.num_kv_heads
    return heads < ways and ways % heads == 0 and config.num_heads % ways == 0


def _repeat_heads(attention: Attention, ways: int) -> None:
    """Make as many key/value heads as devices, if there are fewer.

    Each head is repeated: a device has the one that its query heads read, and its pages
    hold no other.
    """
    if not _can_repeat(attention.config, ways):
        return  # as it is, or as cannot be
    heads = attention.config.num_kv_heads
    attention.config = dataclasses.replace(attention.config, num_kv_heads=ways)
    attention.repeats = ways // heads
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


def _cast(parameter: nnx.Variable, dtype: Any) -> None:
    parameter.set_value(parameter[...].astype(dtype))


def mesh_of(model: Any) -> Mesh | None:
    """The mesh that the parameters live on."""
    found = (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(model))
    meshes = (s.mesh for s in found if isinstance(s, NamedSharding))
    return next((mesh for mesh in meshes if isinstance(mesh, Mesh)), None)
