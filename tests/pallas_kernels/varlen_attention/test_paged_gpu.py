"""Chunks over pages on a GPU: values, every bit, poisoned memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.varlen_attention import paged_varlen_attention
from tests.pallas_kernels.varlen_attention.test_mosaic_gpu_gpu import poison
from tests.pallas_kernels.varlen_attention.test_paged import expected, problem
from tests.tolerances import RELATIVE, relative_error


pytestmark = pytest.mark.gpu
CHUNKS = [(300, 300), (1, 700), (0, 0), (200, 1512), (77, 90)]


@functools.cache
def run(**options):
    call = functools.partial(paged_varlen_attention, implementation="mosaic_gpu")
    return jax.jit(functools.partial(call, **options))


@pytest.mark.parametrize(
    ("page", "head_dim", "options"),
    [
        (64, 128, {}),
        (16, 128, {"window": 130}),
        (32, 64, {}),
        (256, 64, {"window": 130, "softcap": 5.0}),
        (64, 256, {"softcap": 5.0}),
        (128, 256, {"window": 130}),
    ],
)
def test_values_and_bits(page, head_dim, options):
    sizes = {"heads": 8, "kv_heads": 2, "head_dim": head_dim}
    arrays, kv = problem(CHUNKS, page, **sizes)
    poison(*arrays)
    got = np.asarray(run(**options)(*arrays))
    np.testing.assert_array_equal(got, run(**options)(*arrays))
    assert relative_error(got, expected(arrays, kv, **options)) < RELATIVE[got.dtype]
    end = int(arrays[4][-1])
    assert (got[end:].astype(np.float32) == 0).all()
    # The fourth sequence alone.
    q, pages, layer, table, cu_q, lengths = arrays
    start, stop = int(cu_q[3]), int(cu_q[4])
    bounds = jnp.array([0, stop - start])
    alone = run(**options)(
        q[start:stop], pages, layer, table[3:4], bounds, lengths[3:4]
    )
    np.testing.assert_array_equal(alone, got[start:stop])


def test_lengths_at_random():
    rng = np.random.default_rng(0)
    for seed in range(20):
        keys = rng.integers(1, 3000, 16)
        chunks = [(int(rng.integers(0, min(n, 400))), int(n)) for n in keys]
        arrays, kv = problem(
            chunks, 64, heads=4, kv_heads=1, head_dim=128, tokens=6500, seed=seed
        )
        got = np.asarray(run()(*arrays))
        assert relative_error(got, expected(arrays, kv)) < RELATIVE[got.dtype]
