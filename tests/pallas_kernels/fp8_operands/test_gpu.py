"""Operands in 8 bits on a GPU: bits, repeatability, poisoned outputs, random shapes."""

import functools
import random

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.fp8_operands.specs import SPECS
from tests.pallas_kernels.fp8_operands.test_fp8_operands import (
    BF16,
    E4M3,
    all_of,
    assert_nearly_same,
    assert_same,
    by_blocks,
    computed,
    numbers,
    tokens,
)
from tests.tolerances import num_different


pytestmark = pytest.mark.gpu


run = functools.partial(all_of, through=BF16)


def assert_same_bits(x, dtype):
    """No bit differs from XLA's, and none between calls; NaN is not among them."""
    expected = run(x, dtype, "xla")
    shapes = (x.shape, x.shape[::-1])
    jax.block_until_ready([jnp.full(shape, jnp.nan, dtype) for shape in shapes])
    for _ in range(3):
        found = run(x, dtype, "mosaic_gpu")
        for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
            assert num_different(a, b) == 0


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_every_bit(spec):
    x = numbers(spec.m, spec.k, jnp.dtype(spec.x_dtype))
    assert_same_bits(x, jnp.dtype(spec.dtype))


def test_random_shapes():
    draw = random.Random(0)
    for seed in range(3):
        m, k = 128 * draw.randint(1, 20), 128 * draw.randint(2, 40)
        x_dtype = draw.choice([jnp.bfloat16, jnp.float32])
        dtype = draw.choice([jnp.float8_e4m3fn, jnp.float8_e5m2])
        assert_same_bits(numbers(m, k, x_dtype, seed), jnp.dtype(dtype))


@pytest.mark.parametrize("k", [3584, 5632, 8192, 11008, 14336])
def test_what_is_rounded_as_it_is_computed(k):
    arrays = tokens(1001, k)
    jax.block_until_ready([jnp.full((1001, k), jnp.nan, E4M3) for _ in range(4)])
    expected = computed(arrays, "xla")
    found, again = (computed(arrays, None) for _ in range(2))
    assert_nearly_same(found, expected)
    for a, b in zip(*map(jax.tree.leaves, (found, again)), strict=True):
        assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize(("m", "k"), [(384, 512), (1152, 3584), (256, 8192)])
def test_blocks(m, k):
    """Rows, their transpose and squares in every bit; NaN stays in its block."""
    x, *more = tokens(m, k)
    arrays = (x.at[3, 5].set(jnp.nan).at[7].set(0), *more)
    shapes = ((m, k), (k, m))
    jax.block_until_ready([jnp.full(s, jnp.nan, E4M3) for s in shapes * 4])
    found, again = (by_blocks(arrays, "mosaic_gpu") for _ in range(2))
    expected = by_blocks(arrays, "xla")
    assert jnp.isnan(found[0].data[3].astype(jnp.float32)).sum() == 128
    assert_same(found[:3], expected[:3])
    assert_nearly_same(found[3:], expected[3:])
    for a, b in zip(*map(jax.tree.leaves, (found, again)), strict=True):
        assert a.tobytes() == b.tobytes()


def test_what_is_not_finite():
    x = numbers(256, 512).at[3, 5].set(jnp.nan).at[7, 9].set(-jnp.inf)
    for dtype in (jnp.float8_e4m3fn, jnp.float8_e5m2):
        found, expected = (run(x, jnp.dtype(dtype), i) for i in ("mosaic_gpu", "xla"))
        for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
            a, b = (y.astype(jnp.float32) for y in (a, b))
            assert jnp.array_equal(a, b, equal_nan=True)
