"""The training step, as one jitted pure function."""

import dataclasses
import typing
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import AxisType, Mesh
from jaxtyping import Array, Float, Int32

from jaxscale.nn.lora import Frozen
from jaxscale.sharding.parameters import shardings
from jaxscale.sharding.rules import REPLICATED, AxisRules
from jaxscale.sharding.state_rules import StateRules
from jaxscale.training.gradients import (
    GradientFunction,
    LossFunction,
    accumulated_sums,
)
from jaxscale.training.losses import LossSums, chunked_cross_entropy
from jaxscale.training.optimizer import Schedule


type Metrics = dict[str, Array]
type TrainStep = Callable[["TrainState", Any], tuple["TrainState", Metrics]]
type EvalStep = Callable[[Any, Any], LossSums]


# Trees of shardings and of shapes have this structure too, so the run-time checks of
# the tests must leave the constructor alone.
@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainState:
    """The training state; a pytree that a step takes and returns.

    Example:
        >>> import jax, optax
        >>> from flax import nnx
        >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        >>> state = TrainState.create(model, optax.adam(1e-3))
        >>> int(state.step), len(jax.tree.leaves(state.opt_state))
        (0, 5)
    """

    step: Int32[Array, ""]
    """Batches consumed, those of skipped updates included."""
    skipped: Int32[Array, ""]
    """Updates skipped because the loss or the gradients were not finite."""
    model: Any
    """The module with its parameters."""
    opt_state: Any
    """Optimizer state, over the `nnx.Param` of the model by path."""

    @classmethod
    def create(
        cls, model: Any, optimizer: optax.GradientTransformation
    ) -> "TrainState":
        """The state before the first step.

        Shard it by ``jaxscale.sharding.create(lambda: TrainState.create(...), ...)``.
        """
        return cls(
            step=jnp.zeros((), jnp.int32),
            skipped=jnp.zeros((), jnp.int32),
            model=model,
            opt_state=optimizer.init(nnx.state(model, nnx.Param)),
        )


def trained_part(state: TrainState) -> TrainState:
    """`state` without the parameters of the model that are `jaxscale.nn.lora.Frozen`.

    The model becomes an `nnx.State`, if it has any.
    """
    if not has_frozen(state.model):
        return state
    trained = nnx.state(state.model, nnx.Not(Frozen))
    return dataclasses.replace(state, model=trained)


def frozen_part(model: Any) -> Any:
    """The frozen parameters of `model`; None if there are none."""
    return nnx.state(model, Frozen) if has_frozen(model) else None


def with_frozen(trained: Any, model: Any) -> Any:
    """`model` with its trained parameters replaced."""
    graph, frozen, _ = nnx.split(model, Frozen, ...)
    return nnx.merge(graph, frozen, trained)


def has_frozen(model: Any) -> bool:
    """True if `model` has frozen parameters."""
    variables = jax.tree.leaves(
        model, is_leaf=lambda node: isinstance(node, nnx.Variable)
    )
    return any(isinstance(variable, Frozen) for variable in variables)


def state_shardings(state: TrainState, mesh: Mesh, rules: StateRules) -> TrainState:
    """A `NamedSharding` for each array of a state; see `jaxscale.sharding.shardings`.

    Args:
        state: The state, or its abstract form.
        mesh: The devices.
        rules: Sharding rules of parameters and optimizer state.

    Raises:
        ValueError: the rules do not fit the mesh or the state.
    """
    parameters = shardings(state, mesh, rules.parameters)
    moments = shardings(state.opt_state, mesh, rules.moments)
    return dataclasses.replace(parameters, opt_state=moments)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NextTokenLoss:
    """The loss of a decoder on a `PackedBatch`: see `next_token_loss`.

    Example:
        >>> NextTokenLoss(chunk_size=512, z_loss=1e-4).chunk_size
        512
    """

    chunk_size: int = 1024
    """Positions per row whose logits are computed at a time."""
    z_loss: float = 0.0
    """Coefficient of the squared log-sum-exp."""

    def __call__(self, model: Any, batch: Any) -> tuple[Array, LossSums]:
        """The summed loss of a batch, and its parts.

        Args:
            model: A `Decoder`.
            batch: A `PackedBatch`.
        """
        hidden = model.hidden(batch.tokens, cu_seqlens=batch.cu_seqlens)
        return self.of_hidden(model, hidden, batch)

    def of_hidden(
        self,
        model: Any,
        hidden: Float[Array, "B T D"],
        batch: Any,
        vocab_axes: tuple[str, ...] = (),
    ) -> tuple[Array, LossSums]:
        """The same for the activations after the last norm.

        Args:
            model: The model with the output projection.
            hidden: Activations of `batch`.
            batch: The batch with the targets.
            vocab_axes: Manual mesh axes over which the columns of the projection are
                split.
        """
        kernel, bias = model.output_embedding()
        return chunked_cross_entropy(
            hidden,
            kernel,
            batch.targets,
            batch.loss_mask,
            chunk_size=self.chunk_size,
            z_loss=self.z_loss,
            bias=bias,
            softcap=model.logit_softcap,
            # A custom model has no padding after its vocabulary.
            vocab_size=getattr(model, "vocab_size", None),
            rules=model.rules,
            vocab_axes=vocab_axes,
        )


def next_token_loss(*, chunk_size: int = 1024, z_loss: float = 0.0) -> NextTokenLoss:
    """The loss of a decoder on a `PackedBatch`.

    Args:
        chunk_size: Positions per row whose logits are computed at a time.
        z_loss: Coefficient of the squared log-sum-exp.
    """
    return NextTokenLoss(chunk_size=chunk_size, z_loss=z_loss)


def make_train_step(
    gradients: GradientFunction,
    optimizer: optax.GradientTransformation,
    *,
    schedule: Schedule,
    shardings: TrainState | None = None,
) -> TrainStep:
    r"""The jitted ``step(state, batch) -> (state, metrics)``; `state` is donated.

    The gradient is :math:`\sum_i g_i / \sum_i n_i` over microbatches and devices, with
    :math:`g_i` the gradient of a summed loss and :math:`n_i` its unmasked tokens: each
    token weighs the same, however the batch is split.

    When the loss or the norm of the gradients is not finite, parameters and optimizer
    state, including the count that the schedule reads, do not change: ``state.step``
    and ``state.skipped`` grow by one and the batch is skipped.

    Call it under ``jax.set_mesh(mesh)``: without a mesh, the rules have no effect.

    Args:
        gradients: Function that returns the sums and the gradients of a batch:
            `accumulated` or `pipelined`.
        optimizer: Optimizer of fp32 gradients of the `nnx.Param` of the model.
        schedule: Learning rate by count of applied updates, for the metrics only.
        shardings: Shardings of the returned state, for example ``jax.tree.map(lambda x:
            x.sharding, state)``. Without them the compiler may express an equal
            sharding differently, for which the second call recompiles.

    Returns:
        The step. Its metrics are scalars: mean `loss` and `z_loss` by token, `accuracy`
        if the loss reports it, `grad_norm` before clipping, `param_norm` before the
        update, `lr`, `tokens` of this batch (all that the model read, if the loss
        reports them), and `skipped` updates so far.
    """
    optimizer = optax.with_extra_args_support(optimizer)

    def step(state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        sums, grads = gradients(state.model, batch)
        tokens = jnp.maximum(sums.tokens, 1).astype(jnp.float32)
        grads = jax.tree.map(lambda g: _row_major(g) / tokens, grads)
        norm = global_norm(grads)
        finite = jnp.isfinite(norm) & jnp.isfinite(sums.nll + sums.z_loss)

        params = nnx.state(state.model, nnx.Param)
        with jax.numpy_dtype_promotion("standard"):
            updates, opt_state = optimizer.update(
                grads, state.opt_state, params, finite=finite
            )
            updated = optax.apply_updates(params, updates)

        def keep_if_finite(new: Any, old: Any) -> Any:
            def choose(new: Any, old: Any) -> Any:
                # `keep_moments` has chosen what is on the host.
                on_host = jax.typeof(new).memory_space == jax.memory.Space.Host
                if on_host:
                    return new
                return jnp.where(finite, _split_as(old, new), old)

            return jax.tree.map(choose, new, old)

        model = _replace(state.model, keep_if_finite(updated, params))
        new_state = TrainState(
            step=state.step + 1,
            skipped=state.skipped + (~finite).astype(jnp.int32),
            model=model,
            opt_state=keep_if_finite(opt_state, state.opt_state),
        )
        metrics = {
            "loss": sums.nll / tokens,
            "z_loss": sums.z_loss / tokens,
            "grad_norm": norm,
            "param_norm": global_norm(params),
            "lr": schedule(state.step - state.skipped),
            "tokens": sums.tokens if sums.inputs is None else sums.inputs,
            "skipped": new_state.skipped,
        }
        if sums.correct is not None:
            metrics["accuracy"] = sums.correct.astype(jnp.float32) / tokens
        return new_state, metrics

    outputs = None if shardings is None else (shardings, None)
    return jax.jit(step, donate_argnums=0, out_shardings=outputs)


def make_eval_step(loss_fn: LossFunction, *, rules: AxisRules = REPLICATED) -> EvalStep:
    """The jitted ``step(model, batch) -> LossSums``; add those of several batches.

    Args:
        loss_fn: Summed loss of a model on a batch.
        rules: Sharding rules, including `context` for context parallelism.
    """
    return jax.jit(accumulated_sums(loss_fn, rules=rules))


def global_norm(tree: Any) -> Float[Array, ""]:
    r""":math:`\sqrt{\sum x^2}` over all arrays of a tree, in fp32."""
    squares = (jnp.square(x.astype(jnp.float32)).sum() for x in jax.tree.leaves(tree))
    return jnp.sqrt(sum(squares, jnp.zeros((), jnp.float32)))


def _row_major(grad: Array) -> Array:
    """`grad` in the layout of its parameter.

    XLA reduce-scatters along the major dimension, so it makes a split dimension the
    major one. Left so, the gradient of a matrix that is split by columns would be
    transposed inside the update, together with the parameter and its moments, which
    takes four times as long and copies of all three.
    """
    return with_layout_constraint(grad, Layout(major_to_minor=tuple(range(grad.ndim))))


def _split_as(old: Array, new: Array) -> Array:
    """`new` sharded as `old` over Explicit mesh axes; others follow the outputs."""
    split = jax.typeof(old).sharding
    if AxisType.Explicit in split.mesh.axis_types:
        return jax.sharding.reshard(new, split)
    return new


def _replace(model: Any, params: Any) -> Any:
    """`model` with other parameters."""
    graph, _, rest = nnx.split(model, nnx.Param, ...)
    return nnx.merge(graph, params, rest)
