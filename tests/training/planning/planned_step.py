"""A training step of a real shape, to compile for GPUs that need not exist."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding

from jaxscale.models import Decoder, preset
from jaxscale.nn.packing import PackedBatch
from jaxscale.sharding import fsdp_tp, make_mesh, shardings
from jaxscale.training import (
    OptimizerConfig,
    TrainState,
    accumulated,
    make_optimizer,
    make_schedule,
    make_train_step,
    next_token_loss,
)


def shape(layers: int):
    """LLaMA-3 8B with fewer layers."""
    return dataclasses.replace(preset("llama3_8b"), num_layers=layers)


def step(
    devices: list[Any],
    sizes: dict[str, int],
    layers: int,
    rows: int,
    remat: str,
    moments: dict[str, str] | None = None,
) -> tuple[Any, tuple[Any, ...]]:
    """A step on packed rows of 4,096 tokens, as `tests.compiled` takes it."""
    mesh, rules = make_mesh(sizes, devices), fsdp_tp()
    settings = OptimizerConfig(
        learning_rate=1e-4, warmup_steps=0, schedule="constant", **(moments or {})
    )
    optimizer = make_optimizer(settings, 10)

    def init():
        model = Decoder(
            shape(layers),
            dtype=jnp.bfloat16,
            remat=remat,
            scan_layers=remat != "none",
            tensor_parallel="xla",
            rules=rules,
            rngs=nnx.Rngs(0),
        )
        return TrainState.create(model, optimizer)

    with jax.set_mesh(mesh):
        state = jax.eval_shape(init)
        places = shardings(state, mesh, rules)
    train = make_train_step(
        accumulated(next_token_loss(chunk_size=1024), rules=rules),
        optimizer,
        schedule=make_schedule(settings, 10),
        shardings=places,
    )

    def of(kind, *sizes):
        where = NamedSharding(mesh, rules.spec("batch", *[None] * (len(sizes) - 1)))
        return jax.ShapeDtypeStruct(sizes, kind, sharding=where)

    batch = PackedBatch(
        tokens=of(np.int32, rows, 4096),
        targets=of(np.int32, rows, 4096),
        loss_mask=of(np.bool_, rows, 4096),
        cu_seqlens=of(np.int32, rows, 9),
    )
    state = jax.tree.map(
        lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
        state,
        places,
    )
    return train, (state, batch)
