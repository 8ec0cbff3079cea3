"""Masks of single weights as rows of tiles."""

import numpy as np
import pytest

from pallas_kernels.tile_sparse_matmul import TileSparse, cover, group_columns
from tests.pallas_kernels.tile_sparse_matmul.cases import random_mask


@pytest.mark.parametrize("counts", [[7, 0, 64, 30, 30], [5, 5, 5, 5, 5]])
def test_columns_of_a_tile_find_each_other(counts):
    rng = np.random.default_rng(0)
    mask = random_mask(rng, 64, 40, 8, counts)[:, rng.permutation(40)]
    columns = group_columns(mask, 8)
    np.testing.assert_array_equal(np.sort(columns), np.flatnonzero(mask.any(0)))
    np.testing.assert_array_equal(cover(mask, 8, columns), mask)
    weight = mask.astype(np.float32)
    packed = TileSparse.from_dense(weight, mask, tile=8, columns=columns)
    assert sorted(packed.counts.tolist()) == sorted(filter(None, counts))


def test_single_weights_in_the_same_rows_share_tiles():
    """Columns come by turns from two groups that keep weights in other rows."""
    rng = np.random.default_rng(0)
    likely = np.repeat(np.eye(2), 32, axis=0)[:, np.arange(32) % 2]
    mask = rng.random((64, 32)) < 0.3 * likely
    in_order, grouped = cover(mask, 16), cover(mask, 16, group_columns(mask, 16))
    assert (mask <= in_order).all() and (mask <= grouped).all()
    assert grouped.sum() <= 32 * 32 < in_order.sum() / 1.7
    columns = np.append(group_columns(mask[:, :15], 8), 32)  # 32 stands for none
    np.testing.assert_array_equal(
        cover(mask & (np.arange(32) < 15), 8, columns)[:, 15:], False
    )


def test_steps_are_those_of_the_counts():
    """Of all tiles, of stacked weights the most; unknown where the counts are."""
    rng = np.random.default_rng(0)
    few, many = (
        TileSparse.from_dense(mask.astype(np.float32), mask, tile=64)
        for mask in (random_mask(rng, 256, 128, 64, n) for n in ([1, 65], [64, 193]))
    )
    assert (few.steps, many.steps) == (1 + 2, 1 + 4)
    assert TileSparse.stack([few, many]).steps == many.steps
    assert few.with_room(256).steps == few.packed().steps == few.steps
