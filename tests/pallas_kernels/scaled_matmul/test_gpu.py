"""The product of scaled 8-bit operands on a GPU: values, repeatability, poison."""

import functools
import itertools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import tuning
from pallas_kernels.mosaic import H200
from pallas_kernels.scaled_matmul import quantize_fp8, reference, scaled_matmul, tunable
from pallas_kernels.scaled_matmul.specs import SPECS
from tests.pallas_kernels.scaled_matmul.test_scaled_matmul import E4M3, E5M2, operands
from tests.tolerances import RELATIVE, relative_error


pytestmark = pytest.mark.gpu
TYPES = list(itertools.product((E4M3, E5M2), repeat=2))
kernel = jax.jit(
    functools.partial(scaled_matmul, implementation="mosaic_gpu"),
    static_argnames="out_dtype",
)


def check(arrays, out_dtype=jnp.bfloat16):
    a, b, *_ = arrays
    # NaN in freed memory, where the output will lie.
    jax.block_until_ready([jnp.full((a.shape[0], b.shape[0]), jnp.nan)] * 3)
    y = kernel(*arrays, out_dtype=out_dtype)
    want = reference.scaled_matmul(*arrays)
    dtype = jnp.dtype(out_dtype)
    # In fp32 what is left are the 14 bits of sums of 128.
    assert relative_error(y, want) < (RELATIVE[dtype] if dtype.itemsize == 2 else 2e-4)
    for _ in range(5):
        np.testing.assert_array_equal(y, kernel(*arrays, out_dtype=out_dtype))


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_values_repeat_and_are_right(spec):
    types = [jnp.dtype(t) for t in spec.types]
    axes = (-1, -1) if spec.by_row else (None, None)
    check(operands(spec.m, spec.n, spec.k, types, axes))


@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize("axes", list(itertools.product((None, -1), repeat=2)))
def test_random_shapes(types, axes):
    numbers = random.Random(0)
    for _ in range(6):
        m, n = numbers.randint(1, 900), 64 * numbers.randint(1, 40)
        out_dtype = numbers.choice([jnp.bfloat16, jnp.float16, jnp.float32])
        check(operands(m, n, 128 * numbers.randint(1, 40), types, axes), out_dtype)


def test_every_candidate_of_the_tuner_is_right():
    problem = next(iter(tunable.problems().values()))
    arrays = tunable.arguments(problem)
    want = reference.scaled_matmul(*arrays)
    for config in tunable.candidates(problem, H200):
        with tuning.override("scaled_matmul", config):
            assert relative_error(kernel(*arrays), want) < RELATIVE[problem.out_dtype]


def test_sums_are_promoted():
    """All products are positive: sums grow, and lost bits do not cancel."""
    keys = jax.random.split(jax.random.key(0), 2)
    (a, a_scale), (b, b_scale) = (
        quantize_fp8(jax.random.uniform(key, (512, 16384))) for key in keys
    )
    want = reference.scaled_matmul(a, b, a_scale, b_scale)
    y = kernel(a, b, a_scale, b_scale, out_dtype=jnp.float32)
    assert relative_error(y, want) < 2e-4


def test_xla_equals_the_reference():
    for types in TYPES:
        arrays = operands(256, 512, 1024, types)
        y = jax.jit(functools.partial(scaled_matmul, implementation="xla"))(*arrays)
        want = reference.scaled_matmul(*arrays)
        assert relative_error(y, want) < RELATIVE[jnp.dtype(jnp.bfloat16)]
