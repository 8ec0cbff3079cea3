"""A decoder layer in one launch: XLA's form, and the kernel interpreted."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.decode_layer import mosaic_gpu, reference
from pallas_kernels.decode_layer.config import DecodeLayerConfig, Problem, Schedule
from pallas_kernels.mosaic import H200
from tests.interpreter import interpret_mosaic_gpu
from tests.tolerances import RELATIVE, relative_error


EPS = 1e-5
BF16 = jnp.dtype(jnp.bfloat16)
TINY = Problem(m=3, d_model=128, d_ff=256, heads=2, kv_heads=1, head_dim=128)


def operands(problem, seed=0):
    """Arrays of a layer, whose results are of the size of one."""
    p, keys = problem, iter(jax.random.split(jax.random.key(seed), 16))
    columns = (p.heads + 2 * p.kv_heads) * p.head_dim

    def array(*shape, dtype=jnp.bfloat16, size=1.0):
        return (jax.random.normal(next(keys), shape) * size).astype(dtype)

    def weight(k, n):
        return array(k, n, size=k**-0.5)

    residual = array(p.d_model, p.rows, dtype=jnp.float32)
    found = {
        "attended": array(p.m, p.heads * p.head_dim),
        "residual": residual.at[:, p.m :].set(0),
        "out": weight(p.heads * p.head_dim, p.d_model),
        "mlp_norm": 1 + array(p.d_model, size=0.2),
        "gate_up": weight(p.d_model, 2 * p.d_ff),
        "down": weight(p.d_ff, p.d_model),
    }
    if p.projects:
        angles = array(p.head_dim // 2, p.rows, dtype=jnp.float32, size=9.0)
        found |= {
            "norm": 1 + array(p.d_model, size=0.2),
            "qkv": weight(p.d_model, columns),
            "cos": jnp.cos(angles),
            "sin": jnp.sin(angles),
        }
    if p.bias:
        found["bias"] = array(columns)
    return found


def reference_of(problem, given):
    return reference.decode_layer(
        given,
        heads=problem.heads + problem.kv_heads,
        head_dim=problem.head_dim,
        eps=EPS,
    )


def check(problem, given, found):
    residual, q, kv = found
    want, qkv = reference_of(problem, given)
    m = problem.m
    assert relative_error(residual[:, :m], want[:, :m]) < RELATIVE[BF16]
    if problem.projects:
        got = jnp.concatenate([q, kv], axis=1)
        assert got.dtype == BF16 and got.shape == qkv.shape
        assert relative_error(got, qkv) < 2 * RELATIVE[BF16]


def interpreted(problem, given, num_sms=1, **config):
    device = dataclasses.replace(H200, num_sms=num_sms)
    with interpret_mosaic_gpu(detect_races=True, concurrent_blocks=num_sms > 1):
        found = mosaic_gpu.decode_layer(
            given,
            problem=problem,
            config=DecodeLayerConfig(**config),
            device=device,
            eps=EPS,
        )
        return [None if a is None else np.asarray(a) for a in found]


@pytest.mark.parametrize(
    ("changes", "num_sms", "config"),
    [
        ({}, 1, {}),
        ({"m": 16, "bias": True}, 1, {"tile_k": 64, "weight_slots": 2}),
        ({"projects": False}, 1, {}),
        # More than one part for some tiles, and none for others.
        ({"m": 8, "heads": 4, "kv_heads": 2}, 3, {"tile_k": 64, "weight_slots": 3}),
    ],
)
def test_interpreted_kernel_equals_the_reference(changes, num_sms, config):
    problem = dataclasses.replace(TINY, **changes)
    given = operands(problem)
    check(problem, given, interpreted(problem, given, num_sms, **config))


def test_every_tile_is_in_one_share():
    """And shares differ by one tile at most, whatever the sizes."""
    for workers in (1, 2, 5, 132):
        device = dataclasses.replace(H200, num_sms=workers)
        for problem in (TINY, dataclasses.replace(TINY, d_model=384, d_ff=1280)):
            schedule = Schedule(
                problem=problem, config=DecodeLayerConfig(), device=device
            )
            for stage in schedule.stages:
                bounds = [stage.first_tile(i) for i in range(stage.shares + 1)]
                sizes = np.diff(bounds)
                assert bounds[0] == 0 and bounds[-1] == stage.tiles
                assert sizes.min() >= 1 and sizes.max() - sizes.min() <= 1
                owners = [stage.share_of(tile) for tile in range(stage.tiles)]
                assert owners == np.repeat(range(stage.shares), sizes).tolist()
                groups = [g for u in range(stage.units) for g in stage.groups_of(u)]
                assert sorted(groups) == list(range(stage.groups))
