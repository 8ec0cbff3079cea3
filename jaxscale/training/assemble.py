"""The parts of a run, from its settings: a new state, its gradients, its step."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from jaxscale.models.decoder import Decoder
from jaxscale.models.encoder import EncoderModel
from jaxscale.models.encoder_config import EncoderConfig
from jaxscale.nn.lora import add_adapters
from jaxscale.nn.packing import PackedBatch
from jaxscale.sharding.rules import AxisRules
from jaxscale.sharding.tensor_parallel import TensorParallel
from jaxscale.training.config import TrainConfig
from jaxscale.training.encoder_losses import classification_loss, masked_lm_loss
from jaxscale.training.gradients import (
    GradientFunction,
    LossFunction,
    accumulated,
)
from jaxscale.training.optimizer import make_optimizer, make_schedule
from jaxscale.training.pipelined import pipelined, pipelined_sums
from jaxscale.training.step import (
    EvalStep,
    TrainState,
    TrainStep,
    make_eval_step,
    make_train_step,
    next_token_loss,
    state_shardings,
)


def make_model(
    config: TrainConfig,
    *,
    rules: AxisRules | None = None,
    tensor_parallel: TensorParallel = None,
) -> Decoder | EncoderModel:
    """The model of a run, with newly initialized parameters."""
    options: dict[str, Any] = {
        "dtype": jnp.dtype(config.dtype),
        "param_dtype": jnp.dtype(config.param_dtype),
        "remat": config.remat,
        "scan_layers": config.scan_layers,
        "quantization": config.quantization,
        "rules": config.axis_rules if rules is None else rules,
        "rngs": nnx.Rngs(config.seed),
    }
    if isinstance(config.model, EncoderConfig):
        return EncoderModel(config.model, head=config.head, **options)
    return Decoder(config.model, tensor_parallel=tensor_parallel, **options)


def adapted(config: TrainConfig, model: Any) -> Any:
    """A model with the adapters of a run, if it has any."""
    if config.lora.rank == 0:
        return model
    return add_adapters(model, config.lora, seed=config.seed)


def make_loss(config: TrainConfig) -> LossFunction:
    """The loss of a run: that of an encoder's head, otherwise next-token prediction."""
    options = {"chunk_size": config.loss_chunk, "z_loss": config.z_loss}
    if config.head is None:
        return next_token_loss(**options)
    if config.head.kind == "masked_lm":
        return masked_lm_loss(**options)
    return classification_loss()


def new_state(
    config: TrainConfig, mesh: Mesh, optimizer: optax.GradientTransformation
) -> TrainState:
    """The state of a new run, with the stack layout of the mesh."""
    model = make_model(config, tensor_parallel=config.tensor_parallel)
    model = adapted(config, model)
    stack = config.stack_layout(mesh.shape)
    return TrainState.create(stack.arrange(model), optimizer)


def loss_functions(
    config: TrainConfig, mesh: Mesh, loss: Any
) -> tuple[GradientFunction, EvalStep]:
    """The functions that compute gradients of a batch, and evaluate one."""
    options: dict[str, Any] = {"microbatches": config.microbatches}
    options |= {"rules": config.axis_rules, "state_rules": config.state_rules}
    if not config.is_pipelined(mesh.shape):
        evaluate = make_eval_step(loss, rules=config.axis_rules)
        return accumulated(loss, **options), evaluate
    options["chunks"] = config.chunks
    return pipelined(loss, **options), jax.jit(pipelined_sums(loss, **options))


def abstract_step(
    config: TrainConfig, mesh: Mesh
) -> tuple[TrainStep, tuple[TrainState, PackedBatch]]:
    """The training step of a decoder, and the shapes and shardings of its arguments.

    Nothing is computed, so the devices of the mesh need not exist. Lower the step under
    ``jax.set_mesh(mesh)``, or the abstract mesh if they do not.

    Raises:
        ValueError: the settings do not fit the mesh.
    """
    config.check_mesh(mesh.shape)
    optimizer = make_optimizer(config.optimizer, config.steps)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        abstract = jax.eval_shape(lambda: new_state(config, mesh, optimizer))
    layout = state_shardings(abstract, mesh, config.state_rules)
    loss = next_token_loss(chunk_size=config.loss_chunk, z_loss=config.z_loss)
    step = make_train_step(
        loss_functions(config, mesh, loss)[0],
        optimizer,
        schedule=make_schedule(config.optimizer, config.steps),
        shardings=layout,
    )
    rows = NamedSharding(mesh, config.axis_rules.spec("batch"))

    def of(kind: Any, *inner: int) -> Any:
        shape = (config.data.batch_size, *inner)
        return jax.ShapeDtypeStruct(shape, kind, sharding=rows)

    length, pieces = config.data.seq_len, config.data.max_sequences
    bounds = min(pieces, length + 1) + 1
    batch = PackedBatch(
        tokens=of(np.int32, length),
        targets=of(np.int32, length),
        loss_mask=of(np.bool_, length),
        cu_seqlens=of(np.int32, bounds) if pieces > 1 else None,
    )
    state = jax.tree.map(
        lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
        abstract,
        layout,
    )
    return step, (state, batch)
