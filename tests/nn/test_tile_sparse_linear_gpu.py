"""Sparse feed-forward networks on a GPU: values and gradients, in the layers' way."""

import functools

import jax
import jax.numpy as jnp
import pytest

from tests.nn.test_tile_sparse_linear import BF16, normal, sparse_mlp
from tests.tolerances import RELATIVE, relative_error


pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("tokens", [1, 1000])
@pytest.mark.parametrize("activation", ["swiglu", "geglu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("implementation", ["mosaic_gpu", "triton", None])
def test_values_and_gradients(implementation, activation, tokens):
    if implementation == "triton":
        pytest.importorskip("jax_triton", exc_type=ImportError)
    sparse, dense = sparse_mlp(activation, implementation, d=512, f=2048)
    x = normal(1, 2, tokens, 512, dtype=BF16)
    dy = normal(2, 2, tokens, 512, dtype=BF16)

    @functools.partial(jax.jit, static_argnums=2)
    def both(model, x, dtype):
        y, pullback = jax.vjp(lambda model, x: model(x), model, x)
        return y, *pullback(dy.astype(dtype))

    with jax.default_matmul_precision("highest"):
        want, want_grads, want_dx = both(dense, x.astype(jnp.float32), jnp.float32)
    y, grads, dx = both(sparse, x, BF16)
    bound = RELATIVE[BF16]
    assert relative_error(y, want) < bound
    assert relative_error(dx, want_dx) < 2 * bound
    names = ["up", "down"] if sparse.gate is None else ["gate", "up", "down"]
    for name in names:
        layer, found = getattr(sparse, name), getattr(grads, name)
        wanted = getattr(want_grads, name)
        assert relative_error(found.bias[...], wanted.bias[...]) < 2 * bound
        w = jax.tree.map(lambda x: x[0], layer.weight)
        found = w.with_values(found.values[0].astype(BF16)).to_dense()
        kernel = jnp.where(w.mask(), wanted.kernel[...], 0)
        assert relative_error(found, kernel) < 2 * bound
