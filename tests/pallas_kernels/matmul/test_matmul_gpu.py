"""The Hopper kernel on a GPU: values, gradients, repeatability, poisoned outputs."""

import functools
import random

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.matmul import MatmulConfig, matmul, mosaic_gpu, reference
from pallas_kernels.matmul.config import Problem, candidates, heuristic
from pallas_kernels.mosaic import DeviceSpec, check_hopper
from tests.tolerances import RELATIVE, relative_error


pytestmark = pytest.mark.gpu
BF16 = jnp.dtype(jnp.bfloat16)
kernel = functools.partial(matmul, implementation="mosaic_gpu")
# Compiled whole: each operation by itself would take a GPU a tenth of a second.
definition = jax.jit(reference.matmul)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def operands(m, n, k, dtype=BF16, seed=0):
    keys = jax.random.split(jax.random.key(seed), 3)
    return (
        jax.random.normal(keys[0], (m, k), dtype),
        jax.random.normal(keys[1], (k, n), dtype),
        jax.random.normal(keys[2], (m, n), dtype),
    )


def poison(shape, dtype):
    """Leaves NaN in freed memory, where the next output of this size will lie."""
    jax.block_until_ready([jnp.full(shape, jnp.nan, dtype) for _ in range(3)])


@pytest.mark.parametrize(
    ("shape", "rhs_transposed", "dtype"),
    [
        ((1024, 2048, 1024), False, jnp.bfloat16),
        ((1000, 4096, 512), True, jnp.bfloat16),
        ((1000, 4096, 512), False, jnp.float16),
    ],
)
def test_values_and_gradients(shape, rhs_transposed, dtype):
    x, w, dy = operands(*shape, dtype)
    stored = w.T if rhs_transposed else w
    f = functools.partial(kernel, rhs_transposed=rhs_transposed)
    y, pullback = jax.vjp(f, x, stored)
    want, wide = jax.vjp(definition, x, w)
    tolerance = RELATIVE[jnp.dtype(dtype)]
    assert relative_error(y, want) < tolerance
    (dx, dw), (want_dx, want_dw) = pullback(dy), wide(dy.astype(jnp.float32))
    assert relative_error(dx, want_dx) < tolerance
    assert relative_error(dw.T if rhs_transposed else dw, want_dw) < tolerance


@pytest.mark.parametrize(
    "shape", [(2048, 2048, 1024), (392, 6144, 2048), (2048, 2560, 1024)]
)
def test_every_candidate_of_the_tuner(shape):
    m, n, k = shape
    device = check_hopper(DeviceSpec.current(), "matmul")
    x, w, _ = operands(m, n, k)
    want = definition(x, w)
    problem = Problem.of(x, w, BF16)
    for config in candidates(problem, device):
        poison((m, n), BF16)
        y = mosaic_gpu.matmul(x, w, config=config, device=device, out_dtype=BF16)
        assert relative_error(y, want) < RELATIVE[BF16], config


@pytest.mark.parametrize("cluster", ["none", "m", "n"])
@pytest.mark.parametrize("stored", ["x", "w", "neither"])
@pytest.mark.parametrize("shape", [(2048, 2560, 1024), (1032, 5888, 64)])
def test_tiles_of_two_products(shape, stored, cluster):
    """Of each storage and type; the second shape ends within tiles, of odd numbers."""
    m, n, k = shape
    m = -(-m // 64) * 64 if stored == "x" else m
    config = MatmulConfig(tile_n=320, stages=3, store_slots=3, cluster=cluster)
    for dtype, out_dtype in ((BF16, BF16), (jnp.float16, jnp.float32)):
        x, w, _ = operands(m, n, k, dtype)
        poison((m, n), out_dtype)
        y = mosaic_gpu.matmul(
            x.T if stored == "x" else x,
            w.T if stored == "w" else w,
            config=config,
            device=check_hopper(DeviceSpec.current(), "matmul"),
            out_dtype=out_dtype,
            lhs_transposed=stored == "x",
            rhs_transposed=stored == "w",
        )
        tolerance = 1e-4 if out_dtype == jnp.float32 else RELATIVE[BF16]
        assert relative_error(y, definition(x, w)) < tolerance, dtype


@pytest.mark.parametrize("shape", [(4104, 4096, 2048), (2048, 2560, 2048)])
def test_results_repeat_bit_for_bit(shape):
    x, w, _ = operands(*shape)
    f = jax.jit(kernel)
    first = f(x, w)
    for _ in range(50):
        assert bool(jnp.all(f(x, w) == first))


def test_random_shapes():
    draw = random.Random(0)
    device = check_hopper(DeviceSpec.current(), "matmul")
    for seed in range(8):
        m = draw.choice([7, 8, *(draw.randrange(1, 3000) for _ in range(4))])
        n, k = 64 * draw.randrange(1, 40), 64 * draw.randrange(1, 40)
        out_dtype = jnp.dtype(draw.choice([jnp.bfloat16, jnp.float32]))
        x, w, _ = operands(m, n, k, seed=seed)
        poison((-(-m // 8) * 8, n), out_dtype)
        y = matmul(
            x,
            w,
            implementation="mosaic_gpu",
            config=heuristic(Problem.of(x, w, out_dtype), device),
            out_dtype=out_dtype,
        )
        tolerance = 1e-4 if out_dtype == jnp.float32 else RELATIVE[BF16]
        assert relative_error(y, definition(x, w)) < tolerance, (m, n, k)


@pytest.mark.parametrize("cluster", ["none", "m", "n"])
def test_rows_past_the_end_are_not_read(cluster):
    # The tile covers rows 104..127 of the buffer: they hold NaN.
    x, w, _ = operands(128, 512, 512)
    x = x.at[104:].set(jnp.nan)
    y = matmul(
        x[:104],
        w,
        implementation="mosaic_gpu",
        config=MatmulConfig(cluster=cluster),
    )
    assert relative_error(y, definition(x[:104], w)) < RELATIVE[BF16]


def test_vmap_scan_and_remat():
    x, w, _ = operands(1024, 512, 512)

    def through(f):
        def loss(x, w):
            step = jax.checkpoint(lambda c, _: (f(c, w) * 0.05, None))
            y, _ = jax.lax.scan(step, x, None, length=3)
            return jnp.sum(jnp.sin(y.astype(jnp.float32)))

        grad = jax.jit(jax.vmap(jax.grad(loss, (0, 1)), (0, None)))
        return grad(x.reshape(4, 256, 512), w)

    want = through(functools.partial(matmul, implementation="xla"))
    for got, r in zip(through(kernel), want, strict=True):
        assert relative_error(got, r) < 3e-2
