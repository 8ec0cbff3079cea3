"""Random tile-wise weights for the tests."""

import jax.numpy as jnp
import numpy as np

from pallas_kernels.tile_sparse_matmul import TileSparse


def random_mask(rng, inputs, outputs, tile, counts, granularity=1):
    """A tile-wise mask; `counts` says how many rows each tile keeps."""
    mask = np.zeros((inputs, outputs), bool)
    for t in range(-(-outputs // tile)):
        groups = rng.permutation(inputs // granularity)[: counts[t] // granularity]
        rows = (groups[:, None] * granularity + np.arange(granularity)).reshape(-1)
        mask[rows, t * tile : (t + 1) * tile] = True
    return mask


def random_weight(
    inputs,
    outputs,
    tile,
    counts,
    granularity=1,
    dtype=jnp.float32,
    seed=0,
    pruned=(),
    **kwargs,
):
    """A packed weight, its dense form as a float32 array and its mask.

    `pruned` columns are left out; then `counts` are those of the packed tiles.
    """
    rng = np.random.default_rng(seed)
    kept = np.setdiff1d(np.arange(outputs), pruned)
    mask = np.zeros((inputs, outputs), bool)
    mask[:, kept] = random_mask(rng, inputs, len(kept), tile, counts, granularity)
    dense = rng.normal(size=(inputs, outputs)).astype(np.float32)
    weight = TileSparse.from_dense(
        np.asarray(jnp.asarray(dense, dtype)),
        mask,
        tile=tile,
        granularity=granularity,
        columns=kept if len(pruned) else None,
        **kwargs,
    )
    rounded = np.asarray(jnp.asarray(dense, dtype).astype(jnp.float32))
    return weight, np.where(mask, rounded, 0), mask
