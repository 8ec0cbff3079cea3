"""The kernels on a GPU: values, gradients, repeatability, poisoned memory."""

import dataclasses
import functools
import random

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.matmul import ACTIVATIONS
from pallas_kernels.mosaic import DeviceSpec, check_hopper
from pallas_kernels.tile_sparse_matmul import (
    mosaic_gpu,
    mosaic_gpu_grad,
    reference,
    tile_sparse_matmul,
)
from pallas_kernels.tile_sparse_matmul.config import GradConfig, Problem, candidates
from tests.pallas_kernels.tile_sparse_matmul.cases import random_weight
from tests.tolerances import RELATIVE, relative_error


pytestmark = pytest.mark.gpu
BF16 = jnp.dtype(jnp.bfloat16)
UNEVEN = [700, 0, 1024, 64, 1, 512, 512, 99]
KERNELS = ["mosaic_gpu", "triton"]
# Compiled whole: each operation by itself would take a GPU a tenth of a second.
definition = jax.jit(reference.tile_sparse_matmul)


def normal(seed, shape, dtype=jnp.bfloat16):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def poison(shape, dtype):
    """Leaves NaN in freed memory, where the next output of this size will lie."""
    jax.block_until_ready([jnp.full(shape, jnp.nan, dtype) for _ in range(3)])


def skip_without_triton(implementation):
    if implementation == "triton":
        pytest.importorskip("jax_triton", exc_type=ImportError)


@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize("layout", [(True, True), (True, False), (False, False)])
@pytest.mark.parametrize("tokens", [1, 12, 40, 1000, 2048])
@pytest.mark.parametrize(
    ("tile", "granularity", "dtype"),
    [(128, 1, jnp.bfloat16), (256, 8, jnp.float16), (64, 64, jnp.bfloat16)],
)
def test_values(implementation, layout, tokens, tile, granularity, dtype):
    skip_without_triton(implementation)
    counts = [c // granularity * granularity for c in UNEVEN]
    w, _, _ = random_weight(1024, 8 * tile - 8, tile, counts, granularity, dtype)
    x, bias = normal(1, (tokens, 1024), dtype), normal(2, (w.shape[1],), dtype)
    poison((w.shape[1], tokens), dtype)
    y = tile_sparse_matmul(
        x.T if layout[0] else x,
        w,
        bias=bias,
        activation="gelu",
        feature_major=layout,
        implementation=implementation,
    )
    linear = definition(x, w) + bias.astype(jnp.float32)
    want = ACTIVATIONS["gelu"](linear)
    assert relative_error(y.T if layout[1] else y, want) < RELATIVE[jnp.dtype(dtype)]


@pytest.mark.parametrize("tokens", [1, 8, 13, 32, 64])
def test_few_tokens_in_a_program(tokens):
    """Pruned columns, rows that stay rows, and parts of tiles without steps."""
    pruned = range(0, 2048, 2)
    w, _, _ = random_weight(1024, 2048, 128, UNEVEN, dtype=BF16, pruned=pruned)
    x, dy = normal(1, (tokens, 1024)), normal(2, (tokens, 2048))

    def run(x):
        return tile_sparse_matmul(x, w, implementation="mosaic_gpu")

    poison((tokens, 2048), BF16)
    y = jax.jit(run)(x)
    assert relative_error(y, definition(x, w)) < RELATIVE[BF16]
    (dx,) = jax.jit(lambda x, dy: jax.vjp(run, x)[1](dy))(x, dy)
    want = dy.astype(jnp.float32) @ w.to_dense().astype(jnp.float32).T
    assert relative_error(dx, want) < RELATIVE[BF16]


@pytest.mark.parametrize("layout", [(True, True), (True, False), (False, False)])
@pytest.mark.parametrize("tokens", [1, 3, 16, 1000])
def test_every_candidate_of_the_tuner(layout, tokens):
    device = check_hopper(DeviceSpec.current(), "tile_sparse_matmul")
    w, _, _ = random_weight(1024, 1024, 128, UNEVEN, dtype=BF16)
    x = normal(1, (tokens, 1024))
    want = definition(x, w)
    stored = x.T if layout[0] else x
    for config in candidates(Problem.of(stored, w, layout), device):
        y = mosaic_gpu.tile_sparse_matmul(
            stored, w, feature_major=layout, config=config, device=device
        )
        y = y.T if layout[1] else y
        assert relative_error(y, want) < RELATIVE[BF16], config


@pytest.mark.parametrize(
    ("tokens", "outputs", "tile", "granularity", "layout"),
    [
        (64, 512, 64, 1, (True, True)),
        (64, 512, 64, 64, (True, True)),
        (16, 60, 128, 1, (True, False)),
        (200, 64, 128, 8, (False, False)),
        (33, 64, 256, 1, (True, True)),
        (1, 64, 256, 1, (True, True)),
        (1, 512, 64, 64, (True, True)),
        (5, 512, 64, 64, (False, False)),
    ],
)
def test_outputs_one_line_wide(tokens, outputs, tile, granularity, layout):
    """Stores past their columns would overwrite what lies before."""
    tiles = -(-outputs // tile)
    counts = [448, 64, 0, 512, 128, 192, 256, 64][:tiles]
    w, _, _ = random_weight(512, outputs, tile, counts, granularity, BF16)
    x = normal(1, (tokens, 512))
    poison((outputs, tokens), BF16)
    y = tile_sparse_matmul(
        x.T if layout[0] else x,
        w,
        feature_major=layout,
        implementation="mosaic_gpu",
    )
    want = definition(x, w)
    assert relative_error(y.T if layout[1] else y, want) < RELATIVE[BF16]


@pytest.mark.parametrize("layout", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("cluster", [1, 2])
def test_gradient_of_the_values(layout, cluster):
    w, _, mask = random_weight(1024, 1000, 128, UNEVEN, dtype=BF16)
    x, dy = normal(1, (1000, 1024)), normal(2, (1000, 1000))
    poison(w.values.shape, BF16)
    grad = mosaic_gpu_grad.grad_values(
        x.T if layout[0] else x,
        dy.T if layout[1] else dy,
        w,
        feature_major=layout,
        config=dataclasses.replace(
            GradConfig.of(Problem.of(x, w, (False, False))), cluster=cluster
        ),
        device=DeviceSpec.current(),
    )
    wide = x.T.astype(jnp.float32) @ dy.astype(jnp.float32)
    want = jnp.where(mask, wide, 0.0)
    assert relative_error(w.with_values(grad).to_dense(), want) < RELATIVE[BF16]
    past = jnp.arange(w.room) >= w.counts[:, None]
    assert not bool(jnp.any(grad[past]))


def test_gradients_of_a_layer():
    w, dense, mask = random_weight(1024, 1024, 128, UNEVEN, dtype=BF16)
    x, dy = normal(1, (512, 1024)), normal(2, (512, 1024))

    def ours(x, values):
        return tile_sparse_matmul(
            x, w.with_values(values), activation="silu", implementation="mosaic_gpu"
        )

    def plain(x, dense):
        z = x.astype(jnp.float32) @ jnp.where(mask, dense, 0.0)
        return ACTIVATIONS["silu"](z)

    dx, dvalues = jax.vjp(ours, x, w.values)[1](dy)
    wide = jax.vjp(plain, x.astype(jnp.float32), jnp.asarray(dense))[1]
    want_dx, want_dense = wide(dy.astype(jnp.float32))
    assert relative_error(dx, want_dx) < RELATIVE[BF16]
    assert relative_error(w.with_values(dvalues).to_dense(), want_dense) < 2e-2


@pytest.mark.parametrize("implementation", KERNELS)
def test_results_repeat_bit_for_bit(implementation):
    skip_without_triton(implementation)
    w, _, _ = random_weight(1024, 1024, 128, UNEVEN, dtype=BF16)
    x = normal(1, (1024, 4104))
    f = jax.jit(
        functools.partial(
            tile_sparse_matmul, feature_major=True, implementation=implementation
        )
    )
    first = f(x, w)
    for _ in range(50):
        assert bool(jnp.all(f(x, w) == first))


def test_random_shapes():
    draw = random.Random(0)
    for seed in range(8):
        granularity, tile = draw.choice([1, 8, 64]), draw.choice([64, 128, 256])
        inputs, tiles = 64 * draw.randrange(1, 24), draw.randrange(1, 9)
        outputs = tiles * tile - draw.randrange(tile)
        counts = [
            granularity * draw.randrange(inputs // granularity + 1)
            for _ in range(tiles)
        ]
        w, _, _ = random_weight(
            inputs, outputs, tile, counts, granularity, BF16, seed=seed
        )
        tokens = draw.choice([7, 64, *(draw.randrange(1, 3000) for _ in range(3))])
        x, layout = normal(seed, (tokens, inputs)), draw.choice([True, False])
        y = tile_sparse_matmul(
            x.T if layout else x, w, feature_major=layout, implementation="mosaic_gpu"
        )
        want = definition(x, w)
        y = y.T if layout else y
        assert relative_error(y, want) < RELATIVE[BF16], (tokens, w.shape, counts)


@pytest.mark.parametrize("implementation", KERNELS)
def test_rows_that_no_tile_keeps_are_not_read(implementation):
    skip_without_triton(implementation)
    w, dense, _ = random_weight(512, 256, 128, [100, 7], dtype=BF16)
    unused = ~jnp.any(w.mask(), axis=1)
    x = normal(1, (512, 256))
    poisoned = jnp.where(unused[:, None], jnp.nan, x)
    y = tile_sparse_matmul(
        poisoned, w, feature_major=True, implementation=implementation
    )
    want = x.T.astype(jnp.float32) @ dense
    assert relative_error(y.T, want) < RELATIVE[BF16]


def test_vmap_scan_and_remat():
    pairs = [
        random_weight(512, 512, 128, UNEVEN[3:7], dtype=BF16, seed=s) for s in (0, 1)
    ]
    stacked = type(pairs[0][0]).stack([w for w, _, _ in pairs])
    x = normal(1, (4, 512, 256))

    def through(implementation):
        def loss(x):
            def step(c, w):
                y = tile_sparse_matmul(
                    c, w, feature_major=True, implementation=implementation
                )
                return y * 0.05, None

            y, _ = jax.lax.scan(jax.checkpoint(step), x, stacked)
            return jnp.sum(jnp.sin(y.astype(jnp.float32)))

        return jax.jit(jax.vmap(jax.grad(loss)))(x)

    assert relative_error(through("mosaic_gpu"), through("xla")) < 3e-2
