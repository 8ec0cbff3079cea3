"""The kernel of compressed weights on a GPU: values, and the same bits each time.

Steps are of 64 kept rows. Metadata that are loaded too early would be wrong by chance.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.tile_sparse_matmul import tile_sparse_matmul
from tests.pallas_kernels.tile_sparse_matmul.test_24 import SMALL, random_24
from tests.tolerances import RELATIVE, relative_error


pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("weight", "tokens", "config"),
    [
        ((512, 256, 128, [64, 1]), 64, SMALL),  # one step
        ((512, 512, 128, [512, 448, 300, 0]), 512, None),  # even, odd, cut, none
        ((1024, 512, 128, [960, 512, 700, 640]), 512, SMALL),
        ((512, 512, 128, [512] * 4), 512, None),  # all rows, none gathered
        ((512, 512, 128, [512] * 4), 5, None),
        ((512, 512, 128, [512, 64, 0, 128], 64), 512, SMALL),  # groups of rows
        ((1024, 512, 64, [1000, 12, 500, 0, 64, 128, 192, 1024]), 100, None),
        ((1024, 256, 128, [960, 960]), 1, None),
    ],
)
@pytest.mark.parametrize("feature_major", [True, False])
def test_values(feature_major, weight, tokens, config):
    w, dense = random_24(*weight)
    x = np.random.default_rng(1).normal(size=(tokens, weight[0]))
    x = jnp.asarray(x, jnp.bfloat16)
    multiply = functools.partial(
        tile_sparse_matmul, implementation="mosaic_gpu", feature_major=feature_major
    )
    run = jax.jit(functools.partial(multiply, config=config))
    poison = jnp.full((2**24,), jnp.nan)  # in freed memory, where results will lie
    jax.block_until_ready(poison)
    del poison
    found = [np.asarray(run(x.T if feature_major else x, w)) for _ in range(20)]
    for again in found[1:]:
        np.testing.assert_array_equal(found[0], again)
    y = found[0].T if feature_major else found[0]
    want = np.asarray(x, np.float32) @ dense
    assert relative_error(y, want) < RELATIVE[jnp.dtype(jnp.bfloat16)]
