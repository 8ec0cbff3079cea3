"""Any mask as a tile-wise one: single weights become rows of tiles.

A matrix unit multiplies a row of a tile whole, be it full or not. So a few weights that
are kept anywhere cost least as rows of tiles in which most values are zero: a tile
keeps every row in which one of its columns keeps a weight. What that costs is the
number of rows, and which columns share a tile decides it: `group_columns` puts those
together that keep weights in the same rows. The values that are zero stay zero in
training by `pin_zeros`.

Legend: K input features, N output features, C packed columns, T tiles, P rows that fit
into a tile, G columns of a tile.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int


def group_columns(mask: Bool[np.ndarray, "K N"], tile: int) -> Int[np.ndarray, " C"]:
    """The columns that keep weights, so ordered that tiles of them keep few rows.

    Each tile starts with the fullest column that is left and takes, one after another,
    the column that keeps most weights in rows that it has already. Columns of a
    tile-wise mask come in its tiles.

    Args:
        mask: [K,N], true where a weight is kept. Masks of matrices that are to have the
            same columns may be stacked along K.
        tile: G, columns of a tile.

    Returns:
        Columns, rising within a tile.

    Example:
        >>> mask = np.array([[1, 0, 1, 0, 0], [0, 1, 0, 1, 0]], bool)
        >>> group_columns(mask, 2)
        array([0, 2, 1, 3])
    """
    (inputs, _), counts = mask.shape, mask.sum(0)
    rows_of = [np.flatnonzero(column) for column in np.ascontiguousarray(mask.T)]
    columns_of = [np.flatnonzero(row) for row in mask]
    left = counts > 0
    tiles = []
    while left.any():
        shared, has = np.zeros_like(counts), np.zeros(inputs, np.bool_)
        tiles.append([])
        for _ in range(min(tile, int(left.sum()))):
            # The most rows shared, then the fewest new ones; at first the fullest.
            worth = shared * (inputs + 2) - counts if tiles[-1] else counts
            column = int(np.argmax(np.where(left, worth, -inputs - 1)))
            for row in rows_of[column][~has[rows_of[column]]]:
                shared[columns_of[row]] += 1
                has[row] = True
            left[column] = False
            tiles[-1].append(column)
    return np.array([c for columns in tiles for c in sorted(columns)], np.int64)


def cover(
    mask: Bool[np.ndarray, "K N"],
    tile: int,
    columns: Int[np.ndarray, " C"] | None = None,
) -> Bool[np.ndarray, "K N"]:
    """The least tile-wise mask that keeps what a mask keeps.

    Args:
        mask: [K,N], true where a weight is kept.
        tile: G, columns of a tile.
        columns: [C], the columns of the tiles in order, among them all that keep
            weights; None is all as they are. N stands for none.

    Example:
        >>> mask = np.array([[1, 0, 1, 0], [0, 0, 1, 1]], bool)
        >>> cover(mask, 2).astype(int)
        array([[1, 1, 1, 1],
               [0, 0, 1, 1]])
        >>> cover(mask, 2, np.array([0, 2, 1, 3])).astype(int)
        array([[1, 0, 1, 0],
               [1, 1, 1, 1]])
    """
    order = np.arange(mask.shape[1]) if columns is None else columns
    covered = np.zeros_like(mask)
    for start in range(0, len(order), tile):
        own = order[start : start + tile]
        own = own[own < mask.shape[1]]
        covered[:, own] = mask[:, own].any(1, keepdims=True)
    return covered


def pin_zeros(values: Float[Array, "*layers T P G"]) -> Float[Array, "*layers T P G"]:
    """The values of a weight; those that are zero get no gradient.

    So no weight comes back that a row of a tile holds only for the sake of others.

    Args:
        values: values of a weight, as they are trained.

    Example:
        >>> jax.grad(lambda v: jnp.sum(pin_zeros(v)))(jnp.array([[[2.0, 0.0]]]))
        Array([[[1., 0.]]], dtype=float32)
    """
    pinned: Any = _pinned(values)
    return pinned


@jax.custom_vjp
def _pinned(values: jax.Array) -> jax.Array:
    return values


def _forward(values: jax.Array) -> tuple[jax.Array, Any]:
    return values, values


def _backward(values: jax.Array, gradient: jax.Array) -> tuple[jax.Array]:
    return (jnp.where(values != 0, gradient, 0),)


_pinned.defvjp(_forward, _backward)
