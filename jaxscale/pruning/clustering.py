"""Which columns share a tile: those that keep the same rows.

Legend: K rows of a matrix, or of several below one another; N columns, C of them in
tiles, T tiles, G columns of a tile.
"""

import itertools

import numpy as np
from jaxtyping import Bool, Float, Int

from jaxscale.pruning.ranking import best


_ROUNDS = 20
_LEAST_GAIN = 1e-3
"""Rounds end when one adds less than this part of the kept score."""
_POWER_STEPS = 12


def cluster_columns(
    scores: Float[np.ndarray, "K N"], tile: int, keep: int, *, seed: int = 0
) -> Int[np.ndarray, " N"]:
    """An order of columns whose tiles keep much of the score in few pieces.

    A piece is a row of a tile, and the `keep` best of all tiles are kept. There are two
    starts: tiles of columns in order, and columns split in two along their first
    principal direction, again and again. From either come rounds of exchange: of each
    two tiles every column goes where more of its score is kept, as many to either as
    before; then the best pieces are found anew. Neither lowers the kept score, so it
    rises to a local maximum, which is at least that of columns in order. The better of
    the two is returned.

    The order is exact: it says which columns share a tile, not what is computed.

    Args:
        scores: Importance of each element, at least 0. Matrices whose columns must have
            the same order are put below one another.
        tile: G, columns of a tile, which divides N.
        keep: Pieces that all tiles keep together.
        seed: Of the first guesses of principal directions.

    Returns:
        The columns, tile by tile, rising within a tile.

    Raises:
        ValueError: `tile` does not divide the columns.

    Example:
        >>> scores = np.array([[9.0, 1.0, 9.0, 1.0], [1.0, 9.0, 1.0, 9.0]])
        >>> cluster_columns(scores, tile=2, keep=2)
        array([0, 2, 1, 3])

    References:
        Exact for the pattern as channel permutation is for 2:4 (Pool and Yu, NeurIPS
        2021), and its search is a balanced k-means.
    """
    number = scores.shape[1]
    if tile < 1 or number % tile:
        raise ValueError(
            f"tile {tile} does not divide the {number} columns; choose a divisor"
        )
    by_column = np.ascontiguousarray(scores.T, np.float32)  # [N, K]
    starts = (
        np.arange(number).reshape(-1, tile),
        _bisected(by_column, tile, np.random.default_rng(seed)),
    )
    found = [_exchanged(by_column, tiles, keep) for tiles in starts]
    tiles, _ = max(found, key=lambda each: each[1])
    return tiles[np.argsort(tiles.min(axis=1))].ravel()


def _exchanged(
    by_column: Float[np.ndarray, "N K"], tiles: Int[np.ndarray, "T G"], keep: int
) -> tuple[Int[np.ndarray, "T G"], float]:
    """The tiles after all rounds, and the score that they keep."""
    kept = 0.0
    for _ in range(_ROUNDS):
        sums = np.stack([by_column[tile].sum(axis=0) for tile in tiles])  # [T, K]
        units = best(sums.ravel(), keep).reshape(sums.shape)
        before, kept = kept, float(sums[units].sum(dtype=np.float64))
        if kept <= before * (1 + _LEAST_GAIN):
            break
        tiles = _exchange(tiles, by_column @ units.T.astype(np.float32))
    return tiles, kept


def _exchange(
    tiles: Int[np.ndarray, "T G"], worth: Float[np.ndarray, "N T"]
) -> Int[np.ndarray, "T G"]:
    """The tiles after the columns of each two were split anew by what either keeps."""
    tiles, size = tiles.copy(), tiles.shape[1]
    for a, b in itertools.combinations(range(len(tiles)), 2):
        both = np.concatenate([tiles[a], tiles[b]])
        order = np.argsort(worth[both, b] - worth[both, a], kind="stable")
        tiles[a], tiles[b] = np.sort(both[order[:size]]), np.sort(both[order[size:]])
    return tiles


def _bisected(
    by_column: Float[np.ndarray, "N K"], tile: int, random: np.random.Generator
) -> Int[np.ndarray, "T G"]:
    """Tiles of columns of similar direction."""
    shape = np.sqrt(by_column)  # scores are squares
    norms = np.linalg.norm(shape, axis=1, keepdims=True)
    shape /= np.where(norms > 0, norms, 1)

    def split(columns: np.ndarray) -> list[np.ndarray]:
        if columns.size <= tile:
            return [np.sort(columns)]
        own = shape[columns]
        own -= own.mean(axis=0)
        along = random.standard_normal(own.shape[1]).astype(np.float32)
        for _ in range(_POWER_STEPS):
            along = (own @ along) @ own
            along /= np.linalg.norm(along) or 1
        order = columns[np.argsort(own @ along, kind="stable")]
        half = columns.size // tile // 2 * tile
        return split(order[:half]) + split(order[half:])

    return np.stack(split(np.arange(len(by_column))))


def tiles_of(mask: Bool[np.ndarray, "K N"], tile: int) -> Int[np.ndarray, "T G"] | None:
    """The columns of each tile of a tile-wise mask; None if it is none.

    Tiles are cut from the columns that keep something, in order. If that is not how the
    mask was made, columns that keep the same rows are put together.

    Args:
        mask: True where a weight is kept. Masks of matrices that must have the same
            tiles are put below one another.
        tile: G, columns of a tile.

    Example:
        >>> mask = np.array([[1, 0, 1, 0], [0, 1, 0, 1]], bool)
        >>> tiles_of(mask, 2)
        array([[0, 2],
               [1, 3]])
    """
    columns = np.flatnonzero(mask.any(axis=0))
    if columns.size % tile:
        return None
    packed = mask[:, columns]  # [K, C]
    parts = packed.reshape(len(mask), -1, tile)  # [K, T, G]
    if (parts == parts[:, :, :1]).all():
        return columns.reshape(-1, tile)
    numbers: dict[bytes, int] = {}
    rows = np.ascontiguousarray(np.packbits(packed, axis=0).T)  # [C, K / 8]
    kinds = [numbers.setdefault(own.tobytes(), len(numbers)) for own in rows]
    if (np.bincount(kinds) % tile).any():
        return None
    return columns[np.argsort(kinds, kind="stable")].reshape(-1, tile)
