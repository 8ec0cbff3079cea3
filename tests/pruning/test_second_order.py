"""Scores and updates of the second order against least squares."""

import jax
import numpy as np
import pytest

from jaxscale.pruning import (
    PruneConfig,
    linears,
    magnitude_scores,
    make_model_masks,
    sparsegpt_scores,
    update_weights,
)
from jaxscale.pruning.second_order import DAMPING
from tests.pruning.conftest import perturbed


def made_products(model, seed=0):
    """Inputs that depend on each other, and their products, by layer."""
    rng = np.random.default_rng(seed)
    inputs, products = {}, {}
    for name, layer in linears(model).items():
        layers, features, _ = layer.kernel.shape
        mixed = rng.standard_normal((layers, features, features))
        x = rng.standard_normal((layers, 3 * features, features)) @ mixed
        inputs[name] = x
        products[name] = np.einsum("ltk,ltj->lkj", x, x).astype(np.float32)
    return inputs, products


def damped_rows(x):
    """Inputs with rows behind them whose products are the damping."""
    damping = DAMPING * np.square(x).sum() / x.shape[1]
    return np.concatenate([x, np.sqrt(damping) * np.eye(x.shape[1])])


def best_columns(x, weight, kept):
    """Least squares for each column alone, on the inputs."""
    best = np.zeros_like(weight)
    for column, rows in enumerate(kept.T):
        solved = np.linalg.lstsq(x[:, rows], x @ weight[:, column], rcond=None)
        best[rows, column] = solved[0]
    return best


def row_after_row(x, weight, kept):
    """Each pruned weight made up for by all weights after it, one by one."""
    new = weight.astype(np.float64)
    for column, rows in enumerate(kept.T):
        for k in np.flatnonzero(~rows):
            lost, new[k, column] = new[k, column], 0
            if k + 1 < len(new):
                change = np.linalg.lstsq(x[:, k + 1 :], x[:, k] * lost, rcond=None)[0]
                new[k + 1 :, column] += change
    return new


@pytest.mark.parametrize(
    "pattern, reference", [("tw", best_columns), ("2:4", row_after_row)]
)
def test_kept_weights_make_up_for_the_pruned(model, pattern, reference):
    model = perturbed(model)
    inputs, products = made_products(model)
    config = PruneConfig(pattern=pattern, sparsity=0.5, tile=8)
    masks = make_model_masks(model, magnitude_scores(model), config)
    before = jax.tree.leaves(model)
    updated = update_weights(model, masks, products)
    for old, new in zip(before, jax.tree.leaves(model), strict=True):
        assert old is new  # the model is left as it was
    for name in ("blocks.mlp.down", "blocks.attention.query"):
        layer, dense = linears(updated)[name], linears(model)[name]
        assert layer.kernel[...].sharding == dense.kernel[...].sharding
        for i, x in enumerate(inputs[name]):
            found, kept = np.asarray(layer.kernel[...][i]), masks[name][i]
            weight = np.asarray(dense.kernel[...][i])
            expected = reference(damped_rows(x), weight, kept)
            scale = np.abs(expected).max()
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-3 * scale)
            assert (found[~kept] == 0).all()
            errors = [
                np.square(x @ (w - weight)).sum()
                for w in (found, np.where(kept, weight, 0))
            ]
            assert errors[0] < 0.95 * errors[1]


def test_the_score_is_the_least_error_without_a_weight(model):
    inputs, products = made_products(model)
    name = "blocks.attention.key"
    scores = sparsegpt_scores(model, {name: products[name]})
    assert list(scores) == [name] and scores[name].dtype == np.float32
    x, weight = damped_rows(inputs[name][1]), np.asarray(linears(model)[name].kernel)[1]
    for k, n in [(0, 0), (7, 3), (31, 15)]:
        others = np.arange(len(weight)) != k
        lost = x[:, k] * weight[k, n]
        left = lost - x[:, others] @ np.linalg.lstsq(x[:, others], lost, rcond=None)[0]
        np.testing.assert_allclose(scores[name][1, k, n], np.square(left).sum(), 1e-3)


def test_every_layer_needs_its_products(model):
    config = PruneConfig(sparsity=0.5, tile=8)
    masks = make_model_masks(model, magnitude_scores(model), config)
    with pytest.raises(ValueError, match=r"products lack the layer blocks\.attention"):
        update_weights(model, masks, {})
