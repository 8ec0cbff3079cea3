"""Moves of pages on a GPU: every spec, bit for bit, and repeatedly."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.move_pages import move_pages
from pallas_kernels.move_pages.specs import SPECS


pytestmark = pytest.mark.gpu


@jax.jit
def same(a, b):
    """Whether two pools are equal bit for bit, NaN included."""
    kind = jnp.uint8 if a.dtype.itemsize == 1 else jnp.uint16
    return jnp.all(a.view(kind) == b.view(kind))


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_pages_move(spec):
    rng = np.random.default_rng(0)
    order = rng.permutation(spec.num_pages)
    source, target = order[: spec.moves], order[spec.moves : 2 * spec.moves]
    source[::7] = -1  # which move nothing
    layers = 4  # of which the pool and its copies fit
    shape = (layers, *spec.shape[1:])
    bits = jax.random.bits(jax.random.key(0), shape, jnp.uint8)
    pages = bits.astype(jnp.float32).astype(spec.dtype)
    pages = jnp.where(bits == 7, jnp.nan, pages)
    real = source >= 0
    wanted = pages.at[:, target[real]].set(pages[:, source[real]])
    for implementation in ("mosaic_gpu", "xla"):
        run = jax.jit(move_pages, static_argnames="implementation", donate_argnums=0)
        for _ in range(3):
            moved = run(jnp.copy(pages), source, target, implementation=implementation)
            assert same(moved, wanted)
