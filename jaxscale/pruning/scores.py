r"""Importance scores of weights.

A score estimates the damage of removing a weight, so the scores of a unit's weights add
up. All are at least 0.

- magnitude: :math:`w^2`. Ranks tiles as the L2 norm of the paper does.
- Taylor: :math:`\sum_b (w \, \partial L_b / \partial w)^2` over batches :math:`b`.
- Wanda: :math:`w^2 \sum_t x_t^2`, with the inputs :math:`x_t` of the weight: the square
  of the score of the paper, :math:`|w| \cdot \lVert x \rVert`. It compares weights of
  one layer; rank with ``scope="layer"``.
- SparseGPT, in `jaxscale.pruning.second_order`.

Legend: K input features, L layers.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from jaxscale.nn.linear import Linear
from jaxscale.pruning.layers import kernels, linears, replace_linears
from jaxscale.pruning.masks import Scores
from jaxscale.sharding.parameters import logical_axes


type Loss = Callable[[Any, Any], Float[Array, ""]]
"""``loss(model, batch)``: a scalar."""


def magnitude_scores(model: Any) -> Scores:
    """:math:`w^2` of every weight.

    Example:
        >>> from jaxscale.models import Decoder, preset
        >>> model = Decoder(preset("llama_tiny"), rngs=nnx.Rngs(0))
        >>> magnitude_scores(model)["blocks.mlp.up"].shape
        (2, 32, 64)
    """
    return {n: np.square(w) for n, w in kernels(model, linears(model)).items()}


def taylor_scores(model: Any, loss: Loss, batches: Iterable[Any]) -> Scores:
    r"""The sum of :math:`(w \, \partial L / \partial w)^2` over batches.

    To first order, removing :math:`w` changes the loss by :math:`w \partial L /
    \partial w`.

    Args:
        model: The model.
        loss: The loss of a model on a batch, for example its mean over tokens.
        batches: Batches that the gradients are measured on.

    Raises:
        ValueError: there is no batch.

    References:
        Molchanov et al., "Importance Estimation for Neural Network Pruning" (CVPR
        2019), equation 8, which the authors of tile-wise sparsity use.
    """
    names = list(linears(model))

    @functools.partial(jax.jit, donate_argnums=0)
    def add(totals: dict[str, Array], model: Any, batch: Any) -> dict[str, Array]:
        graph, params, rest = nnx.split(model, nnx.Param, ...)
        grads = jax.grad(lambda p: loss(nnx.merge(graph, p, rest), batch))(params)
        layers, grads = linears(model), linears(nnx.merge(graph, grads, rest))
        for name in names:
            weight, gradient = layers[name].kernel[...], grads[name].kernel[...]
            product = weight.astype(jnp.float32) * gradient.astype(jnp.float32)
            totals[name] += jnp.square(product)
        return totals

    totals = {
        name: jnp.zeros_like(layer.kernel[...], jnp.float32)
        for name, layer in linears(model).items()
    }
    for batch in _some(batches):
        totals = add(totals, model, batch)
    return {name: np.asarray(total) for name, total in jax.device_get(totals).items()}


def wanda_scores(model: Any, loss: Loss, batches: Iterable[Any]) -> Scores:
    r"""The square of Wanda's score, :math:`w^2 \sum_t x_t^2`.

    Args:
        model: The model.
        loss: Function that runs the model on a batch, for example the mean loss over
            tokens.
        batches: Batches that the activations are measured on.

    Raises:
        ValueError: there is no batch.

    References:
        Sun et al., "A Simple and Effective Pruning Approach for Large Language Models"
        (arXiv 2306.11695). It ranks the weights of one output; a pattern here ranks its
        own units.
    """
    squares = input_squares(model, loss, batches)
    weights = kernels(model, linears(model))
    # [..., K, 1] beside [..., K, N].
    return {n: np.square(w) * squares[n][..., None] for n, w in weights.items()}


def input_squares(
    model: Any, loss: Loss, batches: Iterable[Any]
) -> dict[str, Float[np.ndarray, "..."]]:
    r"""The sum of squares :math:`\sum_t x_t^2` of each input feature of each layer.

    Every layer gets a probe: a parameter without effect in the forward pass, whose
    gradient is the sum. So one backward pass collects it, through scanned and
    rematerialized layers and on any mesh. Padding counts like other tokens: use batches
    with little of it.

    Args:
        model: The model, which is not changed.
        loss: A scalar that depends on the output of every layer.
        batches: Batches that the activations are measured on.

    Returns:
        The sums of each layer, [K], or [L, K] for a stack, in fp32.

    Raises:
        ValueError: there is no batch.
    """
    return _input_sums(model, loss, batches, products=False)


def input_products(
    model: Any, loss: Loss, batches: Iterable[Any]
) -> dict[str, Float[np.ndarray, "..."]]:
    r"""The sum of products :math:`\sum_t x_t x_t^T` of the inputs of each layer.

    This is the Hessian of the squared error of the layer's outputs, by which
    `sparsegpt_scores` and `update_weights` work. It is collected as by `input_squares`,
    and takes K times as much memory, on the devices too: 39 GB for the layers of an 8B
    model.

    Args:
        model: The model, which is not changed.
        loss: A scalar that depends on the output of every layer.
        batches: Batches that the activations are measured on.

    Returns:
        The sums of each layer, [K, K], or [L, K, K] for a stack, in fp32.

    Raises:
        ValueError: there is no batch.
    """
    return _input_sums(model, loss, batches, products=True)


def _input_sums(
    model: Any, loss: Loss, batches: Iterable[Any], *, products: bool
) -> dict[str, np.ndarray]:
    names = list(linears(model))
    probe = functools.partial(_Probed, products=products)
    probed = replace_linears(model, dict.fromkeys(names, probe))

    @jax.jit
    def sums(model: Any, batch: Any) -> dict[str, Array]:
        graph, probes, rest = nnx.split(model, _Probe, ...)
        grads = jax.grad(lambda p: loss(nnx.merge(graph, p, rest), batch))(probes)
        layers: dict[str, Any] = dict(linears(nnx.merge(graph, grads, rest)))
        return {name: layers[name].probe[...] for name in names}

    totals = None
    for batch in _some(batches):
        found = jax.device_get(sums(probed, batch))
        if totals is None:
            totals = {name: np.zeros_like(x) for name, x in found.items()}
        for name, x in found.items():
            totals[name] += x
    return totals or {}


class _Probe(nnx.Variable):
    """The parameter whose gradient is the sum of squares, or of products."""


class _Probed(Linear):
    """A linear layer with a probe on its input."""

    def __init__(self, layer: Linear, *, products: bool = False) -> None:
        self.kernel_axes = layer.kernel_axes
        self.out_axes = layer.out_axes
        self.dtype = layer.dtype
        self.rules = layer.rules
        self.kernel = layer.kernel
        self.bias = layer.bias
        more = layer.kernel.shape[-2:-1] if products else ()
        self.probe = _Probe(
            jnp.zeros((*layer.kernel.shape[:-1], *more), jnp.float32),
            out_sharding=(*logical_axes(layer.kernel)[:-1], *[None] * len(more)),
            eager_sharding=False,
        )

    def __call__(
        self, x: Float[Array, "B T in"], activation: str | None = None
    ) -> Float[Array, "B T out"]:
        """Return the output of the layer without a probe."""
        return super().__call__(_observe(x, self.probe[...]), activation)


@jax.custom_vjp
def _observe(x: Array, probe: Array) -> Array:
    return x


def _observe_forward(x: Array, probe: Array) -> tuple[Array, tuple[Array, Array]]:
    return x, (x, probe)


def _observe_backward(
    observed: tuple[Array, Array], cotangent: Array
) -> tuple[Array, Array]:
    x, probe = observed
    x, tokens = x.astype(jnp.float32), tuple(range(x.ndim - 1))
    if probe.ndim == 1:
        return cotangent, jnp.square(x).sum(axis=tokens)
    exact = jax.lax.Precision.HIGHEST
    return cotangent, jnp.tensordot(x, x, (tokens, tokens), precision=exact)


_observe.defvjp(_observe_forward, _observe_backward)


def _some(batches: Iterable[Any]) -> Iterable[Any]:
    """`batches`, of which there must be one."""
    iterator = iter(batches)
    try:
        first = next(iterator)
    except StopIteration:
        raise ValueError(
            "batches is empty; give at least one batch to measure scores on"
        ) from None
    yield first
    yield from iterator
