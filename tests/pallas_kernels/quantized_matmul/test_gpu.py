"""The product with a quantized weight on a GPU: values, repeatability, poison."""

import functools
import random

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.quantized_matmul import quantized_matmul, reference
from pallas_kernels.quantized_matmul.specs import SPECS
from tests.pallas_kernels.quantized_matmul.test_quantized_matmul import TYPES, operands
from tests.tolerances import RELATIVE, num_different, relative_error


pytestmark = pytest.mark.gpu
kernel = jax.jit(
    functools.partial(quantized_matmul, implementation="mosaic_gpu"),
    static_argnames="out_dtype",
)
# Compiled, so that an fp32 weight of 128,256 rows (2 GB) is in memory at most once.
definition = jax.jit(reference.quantized_matmul)
draw = jax.jit(operands, static_argnums=(0, 1, 2, 3))


def check(x, w, scale, out_dtype):
    shape = x.shape[0], w.shape[0]
    # NaN in freed memory, where the output and its parts will lie.
    jax.block_until_ready([jnp.full((8, *shape), jnp.nan) for _ in range(3)])
    y = kernel(x, w, scale, out_dtype=out_dtype)
    want = definition(x, w, scale)
    assert relative_error(y, want) < RELATIVE[jnp.dtype(out_dtype)]
    for _ in range(5):
        assert num_different(kernel(x, w, scale, out_dtype=out_dtype), y) == 0


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_values_repeat_and_are_right(spec):
    x, w, scale = draw(spec.m, spec.n, spec.k, spec.weight_dtype)
    check(x, w, scale, jnp.dtype(spec.out_dtype))


@pytest.mark.parametrize("dtype", TYPES)
def test_random_shapes(dtype):
    numbers = random.Random(0)
    for _ in range(12):
        m, n = numbers.randint(1, 600), 8 * numbers.randint(1, 600)
        out_dtype = numbers.choice([jnp.bfloat16, jnp.float32])
        x, w, scale = draw(m, n, 64 * numbers.randint(1, 90), dtype)
        check(x, w, scale, out_dtype)


@pytest.mark.parametrize("dtype", TYPES)
def test_every_number_is_exact(dtype):
    every = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
    every = every if dtype != "int8" else every.view(np.int8)
    numbers = every[np.isfinite(every.astype(np.float32))][:192].reshape(3, 64)
    w = jnp.asarray(np.repeat(numbers, 8, axis=0))  # [24, 64]
    y = kernel(jnp.eye(64, dtype=jnp.bfloat16), w, jnp.ones(24), out_dtype=jnp.float32)
    np.testing.assert_array_equal(y.T, w.astype(jnp.float32))
