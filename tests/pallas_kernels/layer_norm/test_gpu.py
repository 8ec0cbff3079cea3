"""Layer normalization on a GPU: values, repeatability, poisoned outputs, gradients."""

import functools
import random

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.layer_norm.specs import SPECS
from tests.pallas_kernels.layer_norm.test_layer_norm import (
    CONFIGS,
    expected,
    operands,
    run,
)
from tests.tolerances import RELATIVE, num_different, relative_error


pytestmark = pytest.mark.gpu
kernel = functools.partial(run, implementation="mosaic_gpu")
# Compiled whole: each operation by itself would take a GPU a tenth of a second.
definition = jax.jit(expected)
draw = jax.jit(
    operands,
    static_argnums=(0, 1, 2),
    static_argnames=("bias", "residual", "x_bias"),
)


def poison(shape, dtype):
    """Leaves NaN in freed memory, where the next output of this size will lie."""
    jax.block_until_ready([jnp.full(shape, jnp.nan, dtype) for _ in range(3)])


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize(
    "spec", [s for s in SPECS if s.t >= 4], ids=lambda spec: spec.name
)
def test_values_repeat_and_are_right(spec, config):
    arrays = draw(spec.t, spec.d)
    f = jax.jit(functools.partial(kernel, config=config))
    poison(arrays["x"].shape, arrays["x"].dtype)
    y = f(arrays)
    assert relative_error(y, definition(arrays)) < RELATIVE[y.dtype]
    for _ in range(5):
        assert num_different(f(arrays), y) == 0


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_random_shapes_and_types(config):
    numbers = random.Random(0)
    for _ in range(8):
        t, d = numbers.randint(4, 3000), 64 * numbers.randint(1, 80)
        dtype = numbers.choice([jnp.bfloat16, jnp.float16])
        bias, residual = numbers.random() < 0.5, numbers.random() < 0.5
        arrays = draw(t, d, dtype, bias=bias, residual=residual, x_bias=bias)
        poison((t, d), dtype)
        y = jax.jit(functools.partial(kernel, config=config))(arrays)
        error = relative_error(y, definition(arrays))
        assert error < RELATIVE[y.dtype], (t, d, dtype, bias, residual)


def test_gradients():
    arrays = draw(1000, 768)
    dy = jax.random.normal(jax.random.key(1), arrays["x"].shape)

    def loss(f, arrays):
        return jnp.vdot(f(arrays).astype(jnp.float32), dy)

    found = jax.jit(jax.grad(functools.partial(loss, kernel)))(arrays)
    wide = jax.tree.map(lambda a: a.astype(jnp.float32), arrays)
    wanted = jax.jit(jax.grad(functools.partial(loss, expected)))(wide)
    for g, w in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert relative_error(g, w) < RELATIVE[g.dtype]
