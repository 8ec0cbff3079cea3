"""The models of `benchmarks.serving`."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from benchmarks.measure import timing
from benchmarks.measure.harness import Params


if TYPE_CHECKING:
    from benchmarks.pruned_model import Part


TILE_WISE = {"tw50": 0.5, "tw75": 0.75}
"""The sparsity of blocks, by ``weights`` of a case."""
SMALL = "bytes_small"
"""A model in the proportions of the untrained one of `benchmarks.pruned_model`."""


def config_of(params: Params) -> Any:
    """The model of a case."""
    if params["model"] == SMALL:
        from benchmarks.workloads import byte_text

        return byte_text.decoder(128, 4, 32, 128)
    from jaxscale import models

    config = models.preset(params["model"])
    layers = params.get("layers", config.num_layers)
    return dataclasses.replace(config, num_layers=layers)


def is_pruned(params: Params) -> bool:
    """Whether the blocks of a case are tile-wise sparse."""
    return params.get("weights") in TILE_WISE


def parts_of(params: Params) -> "list[Mapping[str, Part]]":
    """What is kept of each kind of matrix in each block of a pruned case.

    The masks are those of the trained model that ``masks`` names, at the sizes of this
    one; see `benchmarks.pruned_model`.
    """
    from benchmarks import pruned_model

    config = config_of(params)
    wide, heads = config.d_model, config.num_heads * config.head_dim
    few = config.num_kv_heads * config.head_dim
    sizes = {
        "query": (wide, heads),
        "key": (wide, few),
        "value": (wide, few),
        "out": (heads, wide),
        **dict.fromkeys(("gate", "up"), (wide, config.d_ff)),
        "down": (config.d_ff, wide),
    }
    found = pruned_model.load(params["masks"])
    blocks = found.layers("tw", TILE_WISE[params["weights"]], config.num_layers)
    return [
        {kind: part.scaled(*sizes[kind]) for kind, part in block.items()}
        for block in blocks
    ]


def read_weights(params: Params) -> tuple[float, float]:
    """The weights that a step reads, and the share of the blocks' that is kept.

    The table of embeddings is looked up, not read; the output projection is.
    """
    config = config_of(params)
    table = 0 if config.tie_embeddings else config.vocab_size * config.d_model
    read = config.num_parameters() - table
    if not is_pruned(params):
        return read, 1.0
    parts = [part for block in parts_of(params) for part in block.values()]
    size = sum(part.shape[0] * part.shape[1] for part in parts)
    stays = sum(part.multiplied * part.shape[0] * part.shape[1] for part in parts)
    return read - size + stays, sum(part.weights for part in parts) / size


def random_model(params: Params, seed: int) -> Any:
    """The decoder of a case with random weights, on GPUs in bf16.

    Of a pruned case the blocks are what `jaxscale.pruning.sparsify` makes with
    ``separate``, as `jaxscale serve` has them: unstacked, pruned layers sparse, and
    those that keep most of their weights dense.
    """
    import jax
    import jax.numpy as jnp
    from flax import nnx
    from jax.sharding import SingleDeviceSharding

    from jaxscale import models
    from jaxscale.models.serving import prepared_model, serving_rules
    from jaxscale.models.stack import unstacked
    from jaxscale.sharding import REPLICATED, fsdp_tp, make_mesh, shardings

    dtype = jnp.bfloat16 if timing.on_gpu() else jnp.float32
    config, tp = config_of(params), params.get("tp", 1)
    rules = serving_rules(fsdp_tp()) if tp > 1 else REPLICATED

    def make() -> models.Decoder:
        options: dict[str, Any] = {"dtype": dtype, "param_dtype": dtype, "rules": rules}
        model = models.Decoder(config, rngs=nnx.Rngs(0), **options)
        if is_pruned(params):  # the engine prepares what stays dense
            return unstacked(model)
        return prepared_model(model, {"tensor": tp})

    @functools.partial(jax.jit, static_argnums=(1, 2, 3))
    def draw(
        key: jax.Array, shape: tuple[int, ...], dtype: Any, where: Any
    ) -> jax.Array:
        weights = 0.02 * jax.random.normal(key, shape, dtype)
        return jax.lax.with_sharding_constraint(weights, where)

    # One program for each shape: a program that makes all weights compiles minutes.
    shapes = jax.eval_shape(make)
    if is_pruned(params):
        shapes = _pruned(shapes, params, seed)
    leaves, tree = jax.tree.flatten(shapes)
    places = [SingleDeviceSharding(jax.devices()[0])] * len(leaves)
    if tp > 1:
        mesh = make_mesh({"tensor": tp}, jax.devices()[:tp])
        places = jax.tree.leaves(shardings(shapes, mesh, rules))
    keys = jax.random.split(jax.random.key(seed, impl="rbg"), len(leaves))

    def filled(key: jax.Array, leaf: Any, where: Any) -> jax.Array:
        if isinstance(leaf, jax.Array):
            return leaf
        if leaf.ndim > 1:
            return draw(key, leaf.shape, leaf.dtype, where)
        return jnp.ones(leaf.shape, leaf.dtype, device=where)

    weights = map(filled, keys, leaves, places)
    return jax.tree.unflatten(tree, list(weights))


def _pruned(model: Any, params: Params, seed: int) -> Any:
    """The model with sparse layers in its blocks; the rest are shapes as before."""
    from jaxscale.pruning.layers import linears, replace_linears

    blocks, makers = parts_of(params), {}
    for place, name in enumerate(linears(model)):
        _, block, *path = name.split(".")
        part = blocks[int(block)][path[-1]]
        if not part.dense:
            own = seed + 1000 * (place + 1)
            makers[name] = functools.partial(part.linear, seed=own)
    return replace_linears(model, makers)
