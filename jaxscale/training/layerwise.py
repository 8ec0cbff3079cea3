"""Optax transforms that treat each layer of a stack separately: LAMB and Muon.

A stack of layers is one array, which Optax's own transforms treat as one layer.
"""

import collections
import re
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
    mu_dtype: str = "float32",
    memory_kind: MemoryKind = "device",
) -> optax.GradientTransformation:
    """Optax's Muon for the matrices of hidden layers, another transform for the rest.

    `of_muon` decides which these are.

    The update of each layer's matrix is orthogonalized separately, and scaled to the
    RMS of Adam's updates, 0.2, so that Adam's learning rates apply. Weights that never
    had a gradient are not updated, so that pruned weights stay zero.

    Args:
        others: The transform for norms, biases, embeddings and heads.
        mu_dtype: Data type in which the momentum is stored.
        memory_kind: Where the momentum is stored.

    References:
        Muon is Scalable for LLM Training, arXiv 2502.16982.
    """

    def dimensions(updates: Any) -> Any:
        return jax.tree.map(
            lambda x: contrib.MuonDimensionNumbers(x.ndim - 2, x.ndim - 1), updates
        )

    muon = optax.chain(
        keep_moments(
            _only_with_momentum(
                contrib.scale_by_muon(weight_dimension_numbers=dimensions)
            ),
            {"mu": mu_dtype},
            memory_kind,
        ),
        _scale_to_rms(0.2),
    )
    return optax.partition(
        {"muon": muon, "others": others},
        lambda params: jax.tree.map(
            lambda m: "muon" if m else "others", of_muon(params)
        ),
    )


def _only_with_momentum(
    muon: optax.GradientTransformation,
) -> optax.GradientTransformation:
    """Zero updates where the momentum is zero: orthogonalizing fills these in."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, state = muon.update(updates, state, params)
        zeroed = jax.tree.map(
            lambda u, m: jnp.where(m == 0, jnp.zeros_like(u), u), updates, state.mu
        )
        return zeroed, state

    return optax.GradientTransformation(muon.init, update)


_OUTSIDE = re.compile(
    r"embed|^(table|wte|wpe|.*tokens?|.*positions?)$"
    r"|(^|_)(un)?(heads?|logits|classifier|score|readout|vocab)$"
)
"""Names of input and output modules and parameters."""


def of_muon(params: Any) -> Any:
    """True for each parameter that Muon takes: the matrices of hidden layers.

    A matrix has two dimensions besides those of a stack of layers, by the logical axes
    or, without these, by its shape. Embeddings and heads are excluded: by their axis
    ``vocab``, by their name or that of an enclosing module, or, without axes, as the
    only matrix between the width and the number of rows of an embedding table.

    Returns:
        The tree with a boolean in place of each variable.

    Example:
        >>> rngs = nnx.Rngs(0)
        >>> layers = nnx.Dict(
        ...     embed=nnx.Embed(9, 4, rngs=rngs), up=nnx.Linear(4, 8, rngs=rngs)
        ... )
        >>> found = of_muon(nnx.state(layers, nnx.Param))
        >>> found["embed"]["embedding"], found["up"]["kernel"], found["up"]["bias"]
        (False, True, False)
    """
    nodes, structure = jax.tree_util.tree_flatten_with_path(
        params, is_leaf=_is_variable
    )
    found = [_inside(path, node) for path, node in nodes]
    shapes = [
        tuple(sorted(node.shape)) if set(_axes(node)) == {None} else None
        for _, node in nodes
    ]
    tables = {
        shape
        for shape, (path, _) in zip(shapes, nodes, strict=True)
        if shape and re.search("embed|wte", "/".join(_names(path)))
    }
    count = collections.Counter(
        shape for shape, inside in zip(shapes, found, strict=True) if inside
    )
    heads = {shape for shape in tables if count[shape] == 1}
    found = [
        inside and shape not in heads
        for inside, shape in zip(found, shapes, strict=True)
    ]
    return jax.tree.unflatten(structure, found)


def _axes(node: Any) -> tuple[str | None, ...]:
    return logical_axes(node) if _is_variable(node) else (None,) * node.ndim


def _inside(path: tuple[Any, ...], node: Any) -> bool:
    """Whether a parameter is a matrix of a hidden layer, by its names."""
    axes = _axes(node)
    inner = [i for i, axis in enumerate(axes) if axis not in STACK_AXES]
    named = [axes[i] for i in inner]
    return (
        len(inner) == 2
        and min(node.shape[i] for i in inner) > 1
        and not {"norm", "vocab"} & set(named)
        and not any(_OUTSIDE.search(name) for name in _names(path))
    )


def _names(path: tuple[Any, ...]) -> list[str]:
    return [
        name.lower()
        for entry in path
        if (name := jax.tree_util.keystr((entry,), simple=True)) != "value"
    ]


def _scale_to_rms(rms: float) -> optax.GradientTransformation:
    """Orthogonal matrices [..., m, n] with this RMS of their entries."""

    def scaled(x: Array) -> Array:
        return x * (rms * max(x.shape[-2:]) ** 0.5)

    return optax.stateless(lambda updates, params: jax.tree.map(scaled, updates))


def _is_variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable)
