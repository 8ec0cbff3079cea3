"""Linear layers with bias and activation on a GPU."""

import functools

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.matmul import ACTIVATIONS, dense
from tests.pallas_kernels.matmul.test_dense import (
    PLAIN,
    assert_close,
    expected,
    operands,
)
from tests.tolerances import RELATIVE, num_different, relative_error


pytestmark = pytest.mark.gpu
run = functools.partial(dense, implementation="mosaic_gpu")
# Compiled whole: each operation by itself would take a GPU a tenth of a second.
products = jax.jit(functools.partial(expected, activation=None))
draw = jax.jit(operands, static_argnums=(0, 1, 2))


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
@pytest.mark.parametrize(
    ("m", "widths", "k"),
    [
        (9984, (768, 768, 768), 768),
        (5120, (3072,), 768),
        (8, (64,), 64),
        (256, (768, 768, 768), 768),
        (1000, (1024, 128), 256),
        (4104, (192, 64), 4096),
    ],
)
def test_values_repeat_and_are_right(m, widths, k, activation):
    x, ws, biases = draw(m, widths, k)
    f = jax.jit(functools.partial(run, activation=activation))
    ys = f(x, ws, biases)
    assert_close(ys, [PLAIN[activation](y) for y in products(x, ws, biases)])
    for _ in range(10):
        for y, again in zip(ys, f(x, ws, biases), strict=True):
            assert num_different(again, y) == 0


@pytest.mark.parametrize("m", [128, 256, 688, 2688])
def test_each_layer_of_stacks_is_what_it_is_alone(m):
    x, *pairs = draw(m, (768, 768, 768), 768)
    stacks = jax.tree.map(lambda a: jnp.stack([a * (1 + i) for i in range(12)]), pairs)
    in_place = jax.jit(functools.partial(run, activation="gelu"))
    for layer in range(12):
        found = in_place(x, *stacks, layer=jnp.int32(layer))
        alone = in_place(x, *jax.tree.map(lambda a, i=layer: a[i], stacks))
        for y, want in zip(found, alone, strict=True):
            assert num_different(y, want) == 0


def test_gradients():
    x, ws, biases = draw(1024, (256, 128), 512)
    dys = [
        jax.random.normal(jax.random.key(i), (1024, n))
        for i, n in enumerate((256, 128))
    ]

    def loss(f, arguments):
        ys = f(*arguments, activation="gelu")
        return sum(
            jnp.vdot(y.astype(jnp.float32), d) for y, d in zip(ys, dys, strict=True)
        )

    found = jax.jit(jax.grad(functools.partial(loss, run)))((x, ws, biases))
    want = jax.jit(jax.grad(functools.partial(loss, expected)))((x, ws, biases))
    for g, w in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        assert relative_error(g, w) < 2 * RELATIVE[jnp.dtype(jnp.bfloat16)]
