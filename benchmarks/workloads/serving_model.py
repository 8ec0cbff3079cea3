"""The models of `benchmarks.serving`."""

import dataclasses
import functools
from typing import Any

from benchmarks.measure import timing
from benchmarks.measure.harness import Params


def config_of(params: Params) -> Any:
    """The model of a case."""
    from jaxscale import models

    config = models.preset(params["model"])
    layers = params.get("layers", config.num_layers)
    return dataclasses.replace(config, num_layers=layers)


def random_model(params: Params, seed: int) -> Any:
    """The decoder of a case with random weights, on GPUs in bf16."""
    import jax
    import jax.numpy as jnp
    from flax import nnx
    from jax.sharding import SingleDeviceSharding

    from jaxscale import models
    from jaxscale.models.serving import prepared_model, serving_rules
    from jaxscale.sharding import REPLICATED, fsdp_tp, make_mesh, shardings

    dtype = jnp.bfloat16 if timing.on_gpu() else jnp.float32
    config, tp = config_of(params), params.get("tp", 1)
    rules = serving_rules(fsdp_tp()) if tp > 1 else REPLICATED

    def make() -> models.Decoder:
        options: dict[str, Any] = {"dtype": dtype, "param_dtype": dtype, "rules": rules}
        model = models.Decoder(config, rngs=nnx.Rngs(0), **options)
        return prepared_model(model, {"tensor": tp})

    @functools.partial(jax.jit, static_argnums=(1, 2, 3))
    def draw(
        key: jax.Array, shape: tuple[int, ...], dtype: Any, where: Any
    ) -> jax.Array:
        weights = 0.02 * jax.random.normal(key, shape, dtype)
        return jax.lax.with_sharding_constraint(weights, where)

    # One program for each shape: a program that makes all weights compiles minutes.
    shapes = jax.eval_shape(make)
    leaves, tree = jax.tree.flatten(shapes)
    places = [SingleDeviceSharding(jax.devices()[0])] * len(leaves)
    if tp > 1:
        mesh = make_mesh({"tensor": tp}, jax.devices()[:tp])
        places = jax.tree.leaves(shardings(shapes, mesh, rules))
    keys = jax.random.split(jax.random.key(seed, impl="rbg"), len(leaves))
    weights = [
        draw(key, leaf.shape, leaf.dtype, where)
        if leaf.ndim > 1
        else jnp.ones(leaf.shape, leaf.dtype, device=where)
        for key, leaf, where in zip(keys, leaves, places, strict=True)
    ]
    return jax.tree.unflatten(tree, weights)
