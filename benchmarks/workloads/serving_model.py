"""The models of `benchmarks.serving`."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from benchmarks.measure import timing
from benchmarks.measure.harness import Params


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


def random_model(
    params: Params, seed: int, change: Callable[[Any], Any] | None = None
) -> Any:
    """The decoder of a case with random weights, on GPUs in bf16.

    Args:
        params: Of the case.
        seed: Of the weights.
        change: Replaces layers of the abstract model, whose blocks are not stacked;
            arrays that it makes stay. The engine prepares the result then, as it does
            any model.
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
        return prepared_model(model, {"tensor": tp}) if change is None else model

    @functools.partial(jax.jit, static_argnums=(1, 2, 3))
    def draw(
        key: jax.Array, shape: tuple[int, ...], dtype: Any, where: Any
    ) -> jax.Array:
        weights = 0.02 * jax.random.normal(key, shape, dtype)
        return jax.lax.with_sharding_constraint(weights, where)

    # One program for each shape: a program that makes all weights compiles minutes.
    shapes = jax.eval_shape(make)
    if change is not None:
        shapes = change(jax.eval_shape(unstacked, shapes))
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
