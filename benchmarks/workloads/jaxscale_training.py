"""Our side of `benchmarks.training`: a step over a mesh.

It is what `jaxscale.training.fit` composes from the same settings; only the weights are
those of `benchmarks.workloads.equal_llama`.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from benchmarks.workloads.equal_llama import LEARNING_RATE, Rows, Shape, weight
from jaxscale import models, sharding, training
from jaxscale.models.stack_layout import StackLayout
from jaxscale.nn.packing import PackedBatch
from jaxscale.sharding import AxisRules, MeshConfig
from pallas_kernels.mosaic import compile_ahead, keep_modules


def prepare(
    job: Mapping[str, Any], devices: Sequence[Any], rows: Sequence[Rows]
) -> tuple[Mesh, Any, Callable[[Any, Any], tuple[Any, Any]], list[Any]]:
    """The mesh, the state, ``step(state, batch) -> (state, loss)``, the batches."""
    axes = ("pipe", "fsdp", "context", "tensor")
    mesh = sharding.make_mesh(MeshConfig(**{a: job[a] for a in axes}), devices)
    split = "fsdp_tp" if job["tensor"] > 1 else "fsdp"
    rules = sharding.preset("megascale_3d" if job["pipe"] > 1 else split)
    config = config_of(job)
    layout = StackLayout(
        num_layers=config.num_layers, stages=job["pipe"], chunks=job["chunks"]
    )
    settings = training.OptimizerConfig(
        kind=job["optimizer"],
        learning_rate=LEARNING_RATE,
        schedule="constant",
        warmup_steps=0,
        mu_dtype=job["moments"],
        nu_dtype=job["moments"],
        memory_kind=job["memory_kind"],
    )
    optimizer = training.make_optimizer(settings, 1000)
    model = _model(job, mesh, config, rules)

    def adopt(model: Any) -> training.TrainState:
        return training.TrainState.create(layout.arrange(model), optimizer)

    places = sharding.shardings(jax.eval_shape(adopt, model), mesh, rules)
    donated = 0 if layout.is_flat else ()
    state = jax.jit(adopt, out_shardings=places, donate_argnums=donated)(model)
    del model
    loss = training.next_token_loss(chunk_size=job["loss_chunk"])
    options = {
        "microbatches": job["microbatches"],
        "rules": rules,
        "zero": job["zero"],
    }
    if job["pipe"] > 1:
        gradients = training.pipelined(
            loss, chunks=job["chunks"], kind=job["schedule"], **options
        )
    else:
        gradients = training.accumulated(loss, **options)
    step = training.make_train_step(
        gradients,
        optimizer,
        schedule=training.make_schedule(settings, 1000),
        shardings=jax.tree.map(lambda x: x.sharding, state),
    )
    by_row = NamedSharding(mesh, rules.spec("batch"))

    def run(state: Any, batch: Any) -> tuple[Any, Any]:
        with keep_modules(), compile_ahead(devices[0]):
            state, metrics = step(state, batch)
        return state, metrics["loss"]

    batches = [jax.device_put(_packed(each), by_row) for each in rows]
    return mesh, state, run, batches


def config_of(job: Mapping[str, Any]) -> models.DecoderConfig:
    """The model that is trained."""
    return dataclasses.replace(
        models.preset(job["model"]),
        parallel_block=job["parallel"],
        window=job["window"],
    )


def _model(
    job: Mapping[str, Any], mesh: Mesh, config: models.DecoderConfig, rules: AxisRules
) -> Any:
    """The decoder with its weights on the mesh, layers in their order."""
    shape = Shape(**job["shape"])

    def init() -> Any:
        return models.Decoder(
            config,
            dtype=jnp.dtype(job["dtype"]),
            remat=job["remat"],
            scan_layers=job["scan_layers"],
            rules=rules,
            tensor_parallel=job["tensor_parallel"] if job["tensor"] > 1 else None,
            quantization=job["quantization"],
            rngs=nnx.Rngs(0),
        )

    def placed(path: Any, x: Any, place: NamedSharding) -> jax.Array:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        drawn = weight(shape, name.removesuffix(".value"), job["seed"])
        if drawn.shape != x.shape:
            raise ValueError(f"{name} is {drawn.shape}, the model has {x.shape}")
        return jax.device_put(drawn, place)

    abstract = jax.eval_shape(init)
    # Layers that will move to places of stages need not divide over them.
    even = config.num_layers % job["pipe"] == 0
    flat = rules if even else dataclasses.replace(rules, layers=None)
    places = sharding.shardings(abstract, mesh, flat)
    return jax.tree.map_with_path(placed, abstract, places)


def _packed(rows: Rows) -> PackedBatch:
    tokens = rows.tokens
    return PackedBatch(
        tokens=tokens[:, :-1],
        targets=tokens[:, 1:],
        loss_mask=np.ones(tokens[:, 1:].shape, np.bool_),
        cu_seqlens=rows.bounds,
    )
