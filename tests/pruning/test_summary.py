"""Numbers of a report against counting by hand."""

import numpy as np
import pytest

from jaxscale.pruning import (
    Masks,
    PruneConfig,
    layer_reports,
    magnitude_scores,
    make_model_masks,
    picture,
    work,
)


def handmade(pattern="tw_k"):
    """Two layers of a stack, tiles of two columns; one single weight."""
    tiled = np.zeros((2, 4, 4), bool)
    tiled[0, :3, :2] = True  # three rows in the first tile of the first layer
    tiled[0, 1, 2:] = True  # one in its second
    tiled[1, :2] = True  # two and two
    kept = tiled.copy()
    kept[0, 3, 3] = True
    return Masks(
        config=PruneConfig(pattern=pattern, tile=2, sparsity=0.5),
        kept={"w": kept},
        tiled={"w": tiled},
        chosen={"w": [0, 1]},
    )


def test_work_counts_tiles_and_single_weights():
    cost = work(handmade())
    assert (cost.dense, cost.tiled, cost.single) == (32, 16, 1)
    assert cost.imbalance == (3 / 2 + 1) / 2
    assert cost.sparse_bytes == 16 * 2 + 6


def test_layers_one_by_one():
    scores = np.arange(32, dtype=np.float32).reshape(2, 4, 4)
    masks = handmade()
    first, second = layer_reports(masks, {"w": scores})
    assert (first.name, second.name) == ("w.0", "w.1") and first.shape == (4, 4)
    assert first.sparsity == 1 - 9 / 16 and second.sparsity == 0.5
    assert first.tile_rows.tolist() == [3, 1] and second.tile_rows.tolist() == [2, 2]
    assert (first.single_weights, second.single_weights) == (1, 0)
    kept = scores[0][masks["w"][0]].sum() / scores[0].sum()
    np.testing.assert_allclose(first.kept_score, kept)


@pytest.mark.parametrize("pattern", ["tw", "tew", "bw"])
def test_reports_of_a_model_agree_with_its_masks(pattern, model):
    scores = magnitude_scores(model)
    config = PruneConfig(
        pattern=pattern, tile=8, block=8, sparsity=0.6, dense=("*.attention.*",)
    )
    masks = make_model_masks(model, scores, config)
    layers, cost = layer_reports(masks, scores), work(masks)
    assert [layer.name for layer in layers][:2] == [
        "blocks.mlp.down.0",
        "blocks.mlp.down.1",
    ]
    sizes = [layer.shape[0] * layer.shape[1] for layer in layers]
    assert sum(sizes) == cost.dense
    pruned = sum(s * layer.sparsity for s, layer in zip(sizes, layers, strict=True))
    np.testing.assert_allclose(pruned / cost.dense, masks.sparsity)
    if pattern == "bw":
        assert all(layer.tile_rows is None for layer in layers)
    else:
        rows = sum(int(layer.tile_rows.sum()) for layer in layers)
        assert rows * 8 == cost.tiled


def test_picture_is_the_share_of_each_point():
    mask = np.zeros((10, 7), bool)
    mask[:4, :3] = True
    mask[9, 6] = True
    found = picture(mask, size=4)  # points of 3 x 2, smaller at the edges
    assert found.shape == (4, 4)
    expected = [
        [1, 0.5, 0, 0],
        [1 / 3, 1 / 6, 0, 0],
        [0, 0, 0, 0],
        [0, 0, 0, 1],
    ]
    np.testing.assert_allclose(found, expected)
    np.testing.assert_array_equal(picture(mask, size=10), mask)
