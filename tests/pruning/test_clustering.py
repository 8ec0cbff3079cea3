"""Columns that share a tile: the best order of planted ones, and tiles of masks."""

import itertools

import numpy as np
import pytest

from jaxscale.pruning import cluster_columns
from jaxscale.pruning.clustering import tiles_of


def kept_score(scores, order, tile, keep):
    """What the best pieces of tiles cut from an order hold of the score."""
    pieces = scores[:, order].reshape(len(scores), -1, tile).sum(2)
    return np.sort(pieces.ravel())[-keep:].sum()


def planted(rng, tiles, tile, rows):
    """Scores of shuffled columns, of which each kind has rows of its own."""
    own = np.stack([rng.permutation(rows) < rows // 4 for _ in range(tiles)])
    kinds = rng.permutation(np.repeat(np.arange(tiles), tile))
    # Columns differ in size, which must not decide.
    size = rng.lognormal(sigma=0.5, size=tiles * tile)
    noise = rng.random((rows, tiles * tile))
    return (np.where(own[kinds].T, 10.0, 1.0) * noise * size), kinds


@pytest.mark.parametrize("tiles, tile", [(2, 16), (5, 8), (12, 16)])
def test_columns_of_a_kind_share_a_tile(tiles, tile):
    rng = np.random.default_rng(tiles)
    scores, kinds = planted(rng, tiles, tile, 96)
    order = cluster_columns(scores, tile, tiles * 24)
    assert sorted(order) == list(range(tiles * tile))
    assert (np.diff(order.reshape(-1, tile), axis=1) > 0).all()
    found = kinds[order].reshape(-1, tile)
    assert (found == found[:, :1]).all()


def test_few_columns_are_ordered_as_well_as_they_can_be():
    """Against all partitions of eight columns into two tiles."""
    rng = np.random.default_rng(0)
    best = []
    for _ in range(20):
        scores = rng.lognormal(sigma=1.5, size=(12, 8))
        most = max(
            kept_score(scores, [*half, *sorted({*range(8)} - {*half})], 4, 8)
            for half in itertools.combinations(range(8), 4)
        )
        found = kept_score(scores, cluster_columns(scores, 4, 8), 4, 8)
        assert found >= kept_score(scores, range(8), 4, 8)
        best.append(found / most)
        assert found >= 0.9 * most
    assert np.mean(best) > 0.98


def test_a_seed_gives_one_order():
    scores = np.random.default_rng(0).lognormal(sigma=2.0, size=(64, 96))
    orders = [cluster_columns(scores, 8, 100, seed=seed) for seed in (0, 0, 1)]
    np.testing.assert_array_equal(orders[0], orders[1])
    assert (orders[0] != orders[2]).any()


def test_degenerate_scores_have_an_order():
    for scores in (np.zeros((4, 8)), np.ones((4, 8))):
        for keep in (0, 3, 8):
            order = cluster_columns(scores, 4, keep)
            assert sorted(order) == list(range(8))
    with pytest.raises(ValueError, match="tile 3 does not divide the 8 columns"):
        cluster_columns(np.ones((4, 8)), 3, 4)


def test_tiles_of_a_mask_are_found_again():
    rng = np.random.default_rng(0)
    for _ in range(30):
        tiles, tile = int(rng.integers(1, 6)), int(rng.integers(2, 5))
        rows = rng.random((17, tiles)) < 0.4
        places = rng.permutation(tiles * tile + 3)[: tiles * tile]
        mask = np.zeros((17, tiles * tile + 3), bool)
        mask[:, places] = rows.repeat(tile, axis=1)
        found = tiles_of(mask, tile)
        assert found is not None and found.size == mask.any(0).sum()
        for columns in found:
            assert (mask[:, columns] == mask[:, columns[:1]]).all()
        np.testing.assert_array_equal(
            np.sort(found.ravel()), np.nonzero(mask.any(0))[0]
        )
    assert tiles_of(np.eye(4, dtype=bool), 2) is None
    assert tiles_of(np.eye(3, dtype=bool), 2) is None
    # In order where that fits, also if equal tiles lie apart.
    mask = np.array([[1, 1, 0, 0, 1, 1], [0, 0, 1, 1, 0, 0]], bool)
    np.testing.assert_array_equal(tiles_of(mask, 2), [[0, 1], [2, 3], [4, 5]])
