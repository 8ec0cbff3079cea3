"""The transpose of a weight of granularity 64, on the device, for gradients of inputs.

Groups of 64 rows become tiles of 64 columns, and a tile becomes a group of its G
columns: the transpose is tile-wise again, so the gradient of the inputs is a sparse
matmul too. Other granularities have no such transpose.

Axes: K input features, N output features, T tiles, P row capacity of a tile, G columns
of a tile, B groups of 64 rows.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.tile_sparse_matmul.format import STEP, TileSparse


def has_tiles(w: TileSparse) -> bool:
    """Return whether the transpose of a weight is tile-wise, for the kernels."""
    whole = w.shape[1] == w.tiles * w.tile and w.columns is None
    return w.granularity == STEP and w.tile % STEP == 0 and whole


def transposed(w: TileSparse) -> TileSparse:
    """The weight [N,K] with tiles of 64, for kernels: values past counts are not zero.

    Works under `jax.jit`, where it is not known how many tiles keep a group: there is
    room for all, as much as the dense weight has.

    Args:
        w: a weight for which `has_tiles` holds.

    Returns:
        The transpose: B tiles with capacity for N rows.
    """
    inputs, outputs = w.shape
    groups, per_tile = inputs // STEP, w.room // STEP
    number = jnp.arange(w.tiles, dtype=jnp.int32)
    kept = jnp.arange(per_tile) * STEP < w.counts[:, None]  # [T, P/64]
    group = jnp.where(kept, w.rows[:, ::STEP] // STEP, groups)  # [T, P/64]
    # Where a tile stores each group; -1 if it does not keep it.
    place = jnp.full((w.tiles, groups), -1, jnp.int32)
    place = place.at[number[:, None], group].set(
        jnp.arange(per_tile, dtype=jnp.int32), mode="drop"
    )
    # The tiles that keep a group, in order, before those that do not: [B, T].
    tiles = jnp.argsort(place.T < 0, axis=1, stable=True).astype(jnp.int32)
    found = jnp.maximum(jnp.take_along_axis(place.T, tiles, axis=1), 0)  # [B, T]
    blocks = w.values.reshape(w.tiles, per_tile, STEP, w.tile)  # [T, P/64, 64, G]
    blocks = jnp.swapaxes(blocks[tiles, found], 2, 3)  # [B, T, G, 64]
    within = jnp.arange(w.tile, dtype=jnp.int32)
    rows = tiles[:, :, None] * w.tile + within  # [B, T, G]
    counts = jnp.sum(place >= 0, axis=0, dtype=jnp.int32) * w.tile
    leaves = (
        blocks.reshape(groups, outputs, STEP),  # [B, N, 64]
        rows.reshape(groups, outputs),  # [B, N]
        counts,
        None,
        None,
        _falling(counts),
    )
    return TileSparse.tree_unflatten(((outputs, inputs), STEP, False, None), leaves)


def _falling(counts: jax.Array) -> jax.Array:
    """The tiles by falling count, int32 [T]; comparisons are cheaper than a sort."""
    number = jnp.arange(len(counts), dtype=jnp.int32)
    before = (counts[:, None] < counts) | (
        (counts[:, None] == counts) & (number[:, None] > number)
    )  # [T, T]
    rank = jnp.sum(before, axis=1, dtype=jnp.int32)  # [T]
    return jnp.sum(
        jnp.where(rank == number[:, None], number, 0), axis=1, dtype=jnp.int32
    )
