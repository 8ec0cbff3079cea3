"""The product of scaled 8-bit operands on a GPU: values, repeatability, poison."""

import functools
import itertools
import random

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import tuned_configs
from pallas_kernels.mosaic import H200
from pallas_kernels.scaled_matmul import (
    ScaledMatmulConfig,
    quantize_fp8,
    reference,
    scaled_matmul,
    tunable,
)
from pallas_kernels.scaled_matmul.specs import SPECS
from tests.pallas_kernels.scaled_matmul.test_scaled_matmul import (
    E4M3,
    E5M2,
    block_operands,
    operands,
)
from tests.tolerances import RELATIVE, num_different, relative_error


pytestmark = pytest.mark.gpu
# XLA chooses as it does for users, and not as for the definition.
AUTOTUNED = {"xla_gpu_autotune_level": 4, "xla_gpu_enable_triton_gemm": True}
TYPES = list(itertools.product((E4M3, E5M2), repeat=2))
kernel = jax.jit(
    functools.partial(scaled_matmul, implementation="mosaic_gpu"),
    static_argnames="out_dtype",
)
compiled = jax.jit(reference.scaled_matmul)
draw = jax.jit(operands, static_argnums=(0, 1, 2, 3, 4))
draw_blocks = jax.jit(
    block_operands, static_argnums=(0, 1, 2, 3), static_argnames="square"
)
BLOCK_CONFIGS = [
    ScaledMatmulConfig(tile_m=128, tile_n=128, stages=6, store_slots=2),
    ScaledMatmulConfig(tile_m=128, tile_n=64, stages=8, store_slots=1),
    ScaledMatmulConfig(tile_m=64, tile_n=128, stages=8, store_slots=1, split="n"),
]


def definition(a, b, a_scale, b_scale):
    """Of fp32 operands: of fp8 ones XLA would make a product by fp8 instructions."""
    return compiled(a.astype(jnp.float32), b.astype(jnp.float32), a_scale, b_scale)


def check(arrays, out_dtype=jnp.bfloat16):
    a, b, *_ = arrays
    # NaN in freed memory, where the output will lie.
    jax.block_until_ready([jnp.full((a.shape[0], b.shape[0]), jnp.nan)] * 3)
    y = kernel(*arrays, out_dtype=out_dtype)
    want = definition(*arrays)
    dtype = jnp.dtype(out_dtype)
    # In fp32 what is left are the 14 bits of sums of 128.
    assert relative_error(y, want) < (RELATIVE[dtype] if dtype.itemsize == 2 else 2e-4)
    for _ in range(5):
        assert num_different(kernel(*arrays, out_dtype=out_dtype), y) == 0


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_values_repeat_and_are_right(spec):
    types = tuple(jnp.dtype(t) for t in spec.types)
    axes = (-1, -1) if spec.by_row else (None, None)
    check(draw(spec.m, spec.n, spec.k, types, axes))


@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize("axes", list(itertools.product((None, -1), repeat=2)))
def test_random_shapes(types, axes):
    numbers = random.Random(0)
    for _ in range(6):
        m, n = numbers.randint(1, 900), 64 * numbers.randint(1, 40)
        out_dtype = numbers.choice([jnp.bfloat16, jnp.float16, jnp.float32])
        a, b, a_scale, b_scale = draw(m, n, 128 * numbers.randint(1, 40), types, axes)
        # The largest sum is near 120,000; fp16 ends at 65,504.
        check((a, b, a_scale / 64, b_scale), out_dtype)


@pytest.mark.parametrize("square", [True, False])
@pytest.mark.parametrize("n", [4096, 4032])  # the latter ends within a square
@pytest.mark.parametrize("config", BLOCK_CONFIGS, ids=str)
def test_scales_of_blocks(config, n, square):
    arrays = draw_blocks(1000, n, 1024, (E5M2, E4M3), square=square)
    with tuned_configs.override("scaled_matmul", config):
        check(arrays)
        a, *others = arrays
        y, poisoned = (kernel(x, *others) for x in (a, a.at[3, 7].set(jnp.nan)))
    bad = jnp.isnan(poisoned)
    assert bad[3].all() and bad.sum() == n
    good = [jnp.delete(each, 3, axis=0) for each in (poisoned, y)]
    assert num_different(*good) == 0


def test_every_candidate_of_the_tuner_is_right():
    problem = next(iter(tunable.problems().values()))
    arrays = tunable.arguments(problem)
    want = definition(*arrays)
    for config in tunable.candidates(problem, H200):
        with tuned_configs.override("scaled_matmul", config):
            assert relative_error(kernel(*arrays), want) < RELATIVE[problem.out_dtype]


def test_sums_are_promoted():
    """All products are positive: sums grow, and lost bits do not cancel."""

    @jax.jit
    def positive(key):
        return quantize_fp8(jax.random.uniform(key, (512, 16384)))

    (a, a_scale), (b, b_scale) = map(positive, jax.random.split(jax.random.key(0), 2))
    want = definition(a, b, a_scale, b_scale)
    y = kernel(a, b, a_scale, b_scale, out_dtype=jnp.float32)
    # Tensor cores keep 14 bits of each product, aligned to the largest number of a
    # step, and cut off the rest, here always downwards. In a model of that in numpy
    # sums of 128 lose 5.7e-4, and those of all 16,384 a quarter; an H200 gave 6.0e-4.
    assert relative_error(y, want) < 7e-4


@pytest.mark.parametrize("types", TYPES)
def test_xla_equals_the_reference(types):
    arrays = draw(256, 512, 1024, types)
    portable = jax.jit(
        functools.partial(scaled_matmul, implementation="xla"),
        compiler_options=AUTOTUNED,
    )
    y, want = portable(*arrays), definition(*arrays)
    assert relative_error(y, want) < RELATIVE[jnp.dtype(jnp.bfloat16)]
