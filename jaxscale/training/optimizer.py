"""Optimizers, their learning-rate schedules, and which parameters decay."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jaxscale.checks import check_choice
from jaxscale.keywords import explained
from jaxscale.sharding.parameters import logical_axes
from jaxscale.sharding.rules import STACK_AXES
from jaxscale.training.layerwise import (
    scale_by_muon_of_layers,
    scale_by_trust_ratio_of_layers,
)
from jaxscale.training.moment_dtypes import MemoryKind, keep_moments


type Schedule = Callable[[jax.typing.ArrayLike], jax.Array]


@explained
@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW, LAMB or Muon with a warm-up and a schedule.

    Example:
        >>> OptimizerConfig(learning_rate=1e-3, schedule="wsd").decay_fraction
        0.2
    """

    kind: Literal["adamw", "lamb", "muon"] = "adamw"
    """Optimizer: AdamW; LAMB, for large batches; or Muon for the matrices of hidden
    layers with AdamW for the rest, which the log of the run lists."""
    learning_rate: float = 3e-4
    """Peak learning rate, reached at the end of the warm-up."""
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """Schedule after the warm-up: cosine decay to the minimum, wsd (warm-up, stable,
    linear decay), or constant at the peak."""
    schedule_steps: int | None = None
    """Updates that the schedule spans, after which the learning rate stays constant;
    None is the length of the run. A run resumed with another number of steps must set
    it, to the old number or a new one."""
    warmup_steps: int | None = None
    """Updates of linear warm-up; None is a tenth of the run, at most 100."""
    decay_fraction: float = 0.2
    """Fraction of all steps that the decay of ``"wsd"`` takes."""
    min_ratio: float = 0.1
    """Final learning rate as a fraction of the peak; not used by ``"constant"``."""
    b1: float = 0.9
    """Adam's beta 1: decay rate of the first moment."""
    b2: float = 0.95
    """Adam's beta 2: decay rate of the second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices and embeddings, scaled by the learning
    rate."""
    clip_norm: float | None = 1.0
    """Global gradient norm to clip at; None does not clip."""
    mu_dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type in which the first moment is stored."""
    nu_dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type in which the second moment is stored."""
    memory_kind: MemoryKind = "device"
    """Where optimizer state is stored between steps: pinned_host offloads it to host
    memory, from which each parameter's update fetches it. A run may change it at any
    checkpoint; the result is the same."""

    def __post_init__(self) -> None:
        _check_positive(self, "learning_rate", "eps")
        check_choice("kind", self.kind, ("adamw", "lamb", "muon"))
        _check(
            self.schedule in ("cosine", "wsd", "constant"),
            "schedule",
            self.schedule,
            "cosine, wsd or constant",
        )
        _check(
            self.schedule_steps is None or self.schedule_steps >= 1,
            "schedule_steps",
            self.schedule_steps,
            ">= 1, or None",
        )
        _check(
            self.warmup_steps is None or self.warmup_steps >= 0,
            "warmup_steps",
            self.warmup_steps,
            ">= 0, or None",
        )
        for name in ("decay_fraction", "min_ratio"):
            value = getattr(self, name)
            _check(0 <= value <= 1, name, value, "between 0 and 1")
        for name in ("b1", "b2"):
            value = getattr(self, name)
            _check(0 <= value < 1, name, value, "at least 0 and below 1")
        _check(
            0 <= self.weight_decay < math.inf,
            "weight_decay",
            self.weight_decay,
            ">= 0 and finite",
        )
        _check(
            self.clip_norm is None or self.clip_norm > 0,
            "clip_norm",
            self.clip_norm,
            "> 0, or None",
        )
        for name in ("mu_dtype", "nu_dtype"):
            value = getattr(self, name)
            _check(value in ("float32", "bfloat16"), name, value, "float32 or bfloat16")
        check_choice("memory_kind", self.memory_kind, MemoryKind)
        # A second moment close to its limit moves by (1 - b2) of what is new in it;
        # less than half a unit of bf16 (2^-9) is rounded away.
        _check(
            self.nu_dtype == "float32" or self.b2 <= 0.98,
            "b2",
            self.b2,
            "at most 0.98 with nu_dtype bfloat16, whose rounding swallows the updates; "
            "use nu_dtype float32",
        )


def _check_positive(config: Any, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        _check(isinstance(value, int | float), name, value, "a number")
        _check(0 < value < math.inf, name, value, "> 0 and finite")


def _check(ok: bool, name: str, value: Any, expected: str) -> None:
    if not ok:
        raise ValueError(f"{name} {value!r} must be {expected}")


def make_schedule(config: OptimizerConfig, total_steps: int) -> Schedule:
    r"""The learning rate of update `n`, counted from 0.

    With peak :math:`p`, warm-up :math:`w`, total :math:`N` and minimum :math:`m`:
    :math:`p (n + 1) / w` while :math:`n < w`; then for ``"cosine"`` :math:`m + (p -
    m)(1 + \cos \pi x) / 2` with :math:`x = (n - w) / (N - w)`; for ``"wsd"`` :math:`p`,
    and over the last ``decay_fraction`` of the steps a linear decay to :math:`m`,
    reached at :math:`n = N`. After that the rate stays constant: at :math:`p` where no
    steps are left for a decay.

    Args:
        config: Shape of the schedule.
        total_steps: Updates in the entire run, if ``config.schedule_steps`` is None.

    Raises:
        ValueError: the warm-up, and for ``"wsd"`` the decay, do not fit in the run.

    Example:
        >>> config = OptimizerConfig(learning_rate=1.0, warmup_steps=2, min_ratio=0.0)
        >>> schedule = make_schedule(config, total_steps=6)
        >>> [round(float(schedule(n)), 2) for n in range(7)]
        [0.5, 1.0, 1.0, 0.85, 0.5, 0.15, 0.0]

    References:
        WSD: MiniCPM (arXiv 2404.06395), section 4.
    """
    warmup, peak = config.warmup_steps, config.learning_rate
    total_steps = config.schedule_steps or total_steps
    if warmup is None:
        warmup = min(100, total_steps // 10)
    low = peak * config.min_ratio
    descent = round(total_steps * config.decay_fraction)
    needed = warmup + (descent if config.schedule == "wsd" else 0)
    if config.schedule != "constant" and needed > total_steps:
        raise ValueError(
            f"warmup_steps {warmup} and the decay do not fit in {total_steps} steps, "
            f"they need {needed}; lower warmup_steps or decay_fraction"
        )

    def schedule(count: jax.typing.ArrayLike) -> jax.Array:
        n = jnp.asarray(count).astype(jnp.float32)
        rate = jnp.full((), peak, jnp.float32)
        if config.schedule == "cosine" and warmup < total_steps:
            x = jnp.clip((n - warmup) / (total_steps - warmup), 0, 1)
            rate = low + (peak - low) * (1 + jnp.cos(jnp.pi * x)) / 2
        elif config.schedule == "wsd" and descent:
            x = jnp.clip((n - (total_steps - descent)) / descent, 0, 1)
            rate = peak + (low - peak) * x
        return jnp.where(n < warmup, peak * (n + 1) / max(warmup, 1), rate)

    return schedule


def check_same_schedule(
    config: OptimizerConfig, steps: int, planned: int | None
) -> None:
    """Raise if a resumed run's learning rate would jump.

    Raises:
        ValueError: the schedule depends on the number of steps, which has changed.
    """
    if planned is None or planned == steps:
        return
    if config.schedule == "constant" or config.schedule_steps is not None:
        return
    before, now = (
        float(make_schedule(config, total)(min(planned, steps)))
        for total in (planned, steps)
    )
    raise ValueError(
        f"steps {steps}, but the schedule of this run was made for {planned}, and a "
        f"new one would take the learning rate after step {min(planned, steps)} from "
        f"{before:.2e} to {now:.2e}; set optimizer.schedule_steps to {planned} to keep "
        f"the old one, or to {steps} for the new one"
    )


def decays(variable: nnx.Variable) -> bool:
    """True if weight decay applies: to matrices, not to scales and biases.

    The rank does not decide it: in a stack of blocks the scale of a norm has the shape
    [L, D]. The logical axes do: without the stack's there are two or more, and none of
    them is ``"norm"``.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxscale.sharding.parameters import partitioned
        >>> def param(*axes, shape):
        ...     init = partitioned(jax.nn.initializers.ones, *axes)
        ...     return nnx.Param(init(jax.random.key(0), shape, jnp.float32))
        >>> scale = param("layers", "norm", shape=(4, 8))
        >>> kernel = param("embed", "mlp", shape=(8, 16))
        >>> decays(scale), decays(kernel)
        (False, True)
    """
    axes = [axis for axis in logical_axes(variable) if axis not in STACK_AXES]
    return len(axes) >= 2 and "norm" not in axes


def make_optimizer(
    config: OptimizerConfig,
    total_steps: int,
    *,
    gradient_transforms: Sequence[optax.GradientTransformation] = (),
    transforms: Sequence[optax.GradientTransformation] = (),
) -> optax.GradientTransformation:
    """The optimizer, with clipping by global norm, decay by logical axes, the schedule.

    Optimizer state is initialized from the parameters, so that
    `jaxscale.sharding.shardings` shards it in the same way. It is updated in fp32, and
    stored in the types and in the memory that `config` names.

    Args:
        config: Learning rate, schedule and types.
        total_steps: Updates in the entire run, for the schedule.
        gradient_transforms: Optax transforms of the gradients, before they are clipped,
            such as the masks of a pruned model.
        transforms: More optax transforms of the update, before the learning rate.

    References:
        AdamW: arXiv 1711.05101. LAMB: arXiv 1904.00962. Muon: arXiv 2502.16982.
    """
    clip = (
        optax.identity()
        if config.clip_norm is None
        else optax.clip_by_global_norm(config.clip_norm)
    )
    scale = keep_moments(
        optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps),
        {"mu": config.mu_dtype, "nu": config.nu_dtype},
        config.memory_kind,
    )
    if config.kind == "muon":
        scale = scale_by_muon_of_layers(
            scale,
            mu_dtype=config.mu_dtype,
            memory_kind=config.memory_kind,
        )
    ratios = [scale_by_trust_ratio_of_layers()] if config.kind == "lamb" else []
    return optax.chain(
        *gradient_transforms,
        clip,
        scale,
        _add_decayed_weights(config.weight_decay),
        *ratios,
        *transforms,
        optax.scale_by_learning_rate(make_schedule(config, total_steps)),
    )


def _add_decayed_weights(weight_decay: float) -> optax.GradientTransformation:
    def add(update: Any, parameter: Any) -> Any:
        if not decays(parameter if _is_variable(parameter) else nnx.Param(parameter)):
            return update
        return jax.tree.map(
            lambda u, p: u + weight_decay * p.astype(u.dtype), update, parameter
        )

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return jax.tree.map(add, updates, params, is_leaf=_is_variable), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def _is_variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable)
