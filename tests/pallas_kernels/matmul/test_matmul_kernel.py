"""The Hopper kernel on a CPU: interpreted with race detection, and lowered for CUDA."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import tuned_configs
from pallas_kernels.matmul import MatmulConfig, matmul, mosaic_gpu, reference
from pallas_kernels.matmul.config import Problem, candidates, heuristic
from pallas_kernels.mosaic import H200, snake_order, use_device
from tests.interpreter import interpret_mosaic_gpu
from tests.lowering import lower_for_cuda
from tests.tiers import exhaustive
from tests.tolerances import RELATIVE, relative_error


BF16 = jnp.dtype(jnp.bfloat16)
SMALL = MatmulConfig(tile_m=128, tile_n=64, stages=2, store_slots=1)
WIDE = MatmulConfig(tile_m=128, tile_n=320, stages=3, store_slots=3)  # two products
P = jax.sharding.PartitionSpec


def interpreted(x, w, config, num_sms=1, **kwargs):
    device = dataclasses.replace(H200, num_sms=num_sms)
    with interpret_mosaic_gpu(detect_races=True):
        return np.asarray(
            mosaic_gpu.matmul(
                x, w, config=config, device=device, out_dtype=x.dtype, **kwargs
            )
        )


@pytest.mark.parametrize(
    ("num_sms", "m", "n", "k", "config"),
    [
        # Several tiles and more k steps than stages, so that the ring wraps and carries
        # over from tile to tile.
        (1, 256, 128, 192, SMALL),
        (2, 256, 192, 192, SMALL),
        (1, 128, 128, 64, SMALL),  # one k step
        (1, 128, 192, 128, dataclasses.replace(SMALL, tile_n=192, store_slots=3)),
        (1, 128, 256, 64, MatmulConfig(tile_n=128, stages=3, split="n", store_slots=1)),
        (1, 64, 256, 128, MatmulConfig(tile_m=64, split="n", stages=2)),
        (2, 256, 128, 64, dataclasses.replace(SMALL, minor="n", group=1)),
        (2, 200, 128, 64, SMALL),  # rows past the end of a tile
        (1, 131, 64, 64, SMALL),  # no multiple of 8: padded
        (1, 128, 640, 256, WIDE),
        (2, 200, 448, 64, WIDE),  # rows and columns past the end, one k step
        # Store buffers that do not divide the chunks of a tile: the next begins with
        # one that the last may still be read from.
        (1, 256, 192, 64, dataclasses.replace(SMALL, tile_n=192, store_slots=2)),
    ],
)
def test_interpreted_kernel_equals_the_reference(num_sms, m, n, k, config):
    x = jax.random.normal(jax.random.key(0), (m, k), BF16)
    w = jax.random.normal(jax.random.key(1), (k, n), BF16)
    y = interpreted(x, w, config, num_sms)
    assert y.shape == (m, n)
    assert relative_error(y, reference.matmul(x, w)) < RELATIVE[BF16]


@pytest.mark.parametrize("k", [128, 100])
@pytest.mark.parametrize("config", [dataclasses.replace(SMALL, tile_n=128), WIDE])
def test_interpreted_kernel_reads_operands_transposed(config, k):
    x = jax.random.normal(jax.random.key(0), (128, k), jnp.float16)
    w = jax.random.normal(jax.random.key(1), (k, config.tile_n), jnp.float16)
    want = reference.matmul(x, w)
    y = interpreted(x.T, w, config, lhs_transposed=True)
    assert relative_error(y, want) < RELATIVE[jnp.dtype(jnp.float16)]
    if k % 64 == 0:
        y = interpreted(x, w.T, config, rhs_transposed=True)
        assert relative_error(y, want) < RELATIVE[jnp.dtype(jnp.float16)]


def test_gradients_run_the_kernel_under_shard_map_and_vmap():
    mesh = jax.make_mesh((2,), ("t",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jax.random.normal(jax.random.key(0), (256, 128), BF16)
    w = jax.random.normal(jax.random.key(1), (128, 64), BF16)

    def loss(x, w, implementation):
        f = functools.partial(matmul, implementation=implementation)
        f = jax.shard_map(
            jax.vmap(f, (0, None)),
            mesh=mesh,
            in_specs=(P("t"), P()),
            out_specs=P("t"),
        )
        y = f(x.reshape(2, 128, 128), w)
        return jnp.sum(jnp.sin(y.astype(jnp.float32)))

    grad = jax.jit(jax.grad(loss, (0, 1)), static_argnums=2)
    want = grad(x, w, "xla")
    device = dataclasses.replace(H200, num_sms=1)
    with (
        use_device(device),
        tuned_configs.override("matmul", SMALL),
        interpret_mosaic_gpu(),
    ):
        got = jax.tree.map(np.asarray, grad(x, w, "mosaic_gpu"))
    for g, r in zip(got, want, strict=True):
        assert relative_error(g, r) < RELATIVE[BF16]


@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(4096, 4096, 4096), *exhaustive((512, 6144, 4096), (2048, 2560, 8192))],
)
@pytest.mark.parametrize("out_dtype", [jnp.bfloat16, *exhaustive(jnp.float32)])
def test_every_candidate_of_the_tuner_lowers(m, n, k, out_dtype):
    problem = Problem(m=m, n=n, k=k, dtype=BF16, out_dtype=jnp.dtype(out_dtype))
    found = candidates(problem, H200)
    assert len(found) >= 3
    x, w = jax.ShapeDtypeStruct((m, k), BF16), jax.ShapeDtypeStruct((k, n), BF16)
    for config in found:
        f = functools.partial(
            mosaic_gpu.matmul, config=config, device=H200, out_dtype=out_dtype
        )
        lower_for_cuda(f, x, w, kernels=1)


def test_wide_tiles_are_chosen_where_they_save_a_wave():
    def tile(m, n):
        problem = Problem(m=m, n=n, k=8192, dtype=BF16, out_dtype=BF16)
        config = heuristic(problem, H200)
        assert config.tile_m == 128
        return config.tile_n

    assert tile(2048, 2560) == tile(4096, 2560) == 320  # 128 and 256 tiles
    assert tile(8192, 2560) == 256  # as much work in five waves as in four of wide ones
    assert tile(2048, 2048) == tile(8192, 8192) == 256


@pytest.mark.parametrize(
    ("storage", "cluster"),
    [
        ({}, "n"),
        ({"lhs_transposed": True}, "m"),
        ({"rhs_transposed": True}, "none"),
        *exhaustive(
            ({}, "none"),
            ({}, "m"),
            ({"lhs_transposed": True}, "none"),
            ({"lhs_transposed": True}, "n"),
            ({"rhs_transposed": True}, "m"),
            ({"rhs_transposed": True}, "n"),
        ),
    ],
)
def test_wide_tiles_lower(storage, cluster):
    m, n, k = 1024, 2624, 512
    x, w = (m, k), (k, n)
    x = x[::-1] if storage.get("lhs_transposed") else x
    w = w[::-1] if storage.get("rhs_transposed") else w
    for dtype, out_dtype in ((jnp.bfloat16, jnp.bfloat16), (jnp.float16, jnp.float32)):
        f = functools.partial(
            mosaic_gpu.matmul,
            config=dataclasses.replace(WIDE, cluster=cluster),
            device=H200,
            out_dtype=out_dtype,
            **storage,
        )
        shapes = (jax.ShapeDtypeStruct(shape, dtype) for shape in (x, w))
        lower_for_cuda(f, *shapes, kernels=1)


@pytest.mark.parametrize("m", [8, 200, 1024])
@pytest.mark.parametrize("n", [64, 4096])
@pytest.mark.parametrize(
    "storage", [{}, {"lhs_transposed": True}, {"rhs_transposed": True}]
)
def test_the_heuristic_always_gives_a_kernel_that_lowers(m, n, storage):
    m = -(-m // 64) * 64 if storage.get("lhs_transposed") else m
    k = 192
    x, w = (m, k), (k, n)
    x = x[::-1] if storage.get("lhs_transposed") else x
    w = w[::-1] if storage.get("rhs_transposed") else w
    x, w = (jax.ShapeDtypeStruct(s, jnp.float16) for s in (x, w))
    problem = Problem.of(x, w, jnp.float32, **storage)
    assert (problem.m, problem.n, problem.k) == (m, n, k)
    config = heuristic(problem, H200)
    f = functools.partial(
        mosaic_gpu.matmul, config=config, device=H200, out_dtype=jnp.float32, **storage
    )
    lower_for_cuda(f, x, w, kernels=1)


@pytest.mark.parametrize("tiles", [(1, 1), (5, 3), (4, 9), (16, 7)])
@pytest.mark.parametrize("minor", ["m", "n"])
@pytest.mark.parametrize("group", [1, 2, 4, 8])
def test_the_order_visits_every_tile_once(tiles, minor, group):
    total = tiles[0] * tiles[1]
    m, n = jax.vmap(lambda i: snake_order(i, tiles, minor, group))(
        jnp.arange(total, dtype=jnp.int32)
    )
    assert set(zip(m.tolist(), n.tolist(), strict=True)) == {
        (i, j) for i in range(tiles[0]) for j in range(tiles[1])
    }
