"""Optax transforms that treat each layer of a stack by itself: LAMB and Muon.

A stack of layers is one array, which Optax's own transforms take for one layer.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array
from optax import contrib

from jaxscale.sharding.parameters import logical_axes
from jaxscale.sharding.rules import STACK_AXES
from jaxscale.training.moment_dtypes import MemoryKind, keep_moments


def scale_by_trust_ratio_of_layers() -> optax.GradientTransformation:
    r"""The trust ratio of LAMB, :math:`\|w\| / \|u\|`, of each layer's parameters.

    It is 1 where a parameter or its update is zero. The update `u` is that of Adam with
    the decay added. On a single layer it is `optax.scale_by_trust_ratio`.

    Example:
        >>> from jaxscale.sharding.parameters import partitioned
        >>> init = partitioned(jax.nn.initializers.ones, "layers", "norm")
        >>> stack = nnx.Param(init(jax.random.key(0), (2, 4), jnp.float32))
        >>> weights = jax.tree.map(lambda w: w * jnp.array([[1.0], [10.0]]), stack)
        >>> lamb = scale_by_trust_ratio_of_layers()
        >>> scaled, _ = lamb.update(stack, lamb.init(weights), weights)
        >>> scaled[...][:, 0]
        Array([ 1., 10.], dtype=float32)

    References:
        LAMB: arXiv 1904.00962. MegaScale trains with it at 4 times the batch.
    """

    def scale(update: Any, parameter: Any) -> Any:
        axes = logical_axes(parameter) if _is_variable(parameter) else ()
        inner = tuple(
            i for i in range(parameter.ndim) if not axes or axes[i] not in STACK_AXES
        )

        def norm(x: Array) -> Array:
            squares = jnp.square(x.astype(jnp.float32))
            return jnp.sqrt(squares.sum(inner, keepdims=True))

        def scaled(update: Array, weight: Array) -> Array:
            ours, its = norm(weight), norm(update)
            some = (ours > 0) & (its > 0)
            ratio = jnp.where(some, ours / jnp.where(some, its, 1), 1)
            return update * ratio.astype(update.dtype)

        return jax.tree.map(scaled, update, parameter)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return jax.tree.map(scale, updates, params, is_leaf=_is_variable), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def scale_by_muon_of_layers(
    others: optax.GradientTransformation,
    *,
    is_matrix: Callable[[nnx.Variable], bool],
    mu_dtype: str = "float32",
    memory_kind: MemoryKind = "device",
) -> optax.GradientTransformation:
    """Muon of Optax for the matrices of layers, another transform for all else.

    The update of each layer's matrix is orthogonalized by itself, and scaled to the
    root mean square of Adam's, 0.2, so that the learning rates of Adam serve.

    Args:
        others: For norms, biases, embeddings and the output projection.
        is_matrix: Which parameters of layers are matrices.
        mu_dtype: Type in which the momentum is kept.
        memory_kind: Where it is kept.

    References:
        Muon is Scalable for LLM Training, arXiv 2502.16982.
    """

    def dimensions(updates: Any) -> Any:
        return jax.tree.map(
            lambda x: contrib.MuonDimensionNumbers(x.ndim - 2, x.ndim - 1), updates
        )

    def label(node: Any) -> str:
        of_layers = _is_variable(node) and "layers" in logical_axes(node)
        return "muon" if of_layers and is_matrix(node) else "others"

    muon = optax.chain(
        keep_moments(
            contrib.scale_by_muon(weight_dimension_numbers=dimensions),
            {"mu": mu_dtype},
            memory_kind,
        ),
        _scale_to_rms(0.2),
    )
    return optax.partition(
        {"muon": muon, "others": others},
        lambda params: jax.tree.map(label, params, is_leaf=_is_variable),
    )


def _scale_to_rms(rms: float) -> optax.GradientTransformation:
    """Orthogonal matrices [..., m, n] with this root mean square of their entries."""

    def scaled(x: Array) -> Array:
        return x * (rms * max(x.shape[-2:]) ** 0.5)

    return optax.stateless(lambda updates, params: jax.tree.map(scaled, updates))


def _is_variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable)
