r"""Second-order pruning: SparseGPT's score, and its update of the weights that stay.

A layer :math:`y = x W` without some of its weights changes its outputs least, in
squares over the inputs, if the others make up for them. With :math:`H = \sum_t x_t
x_t^T` and a column :math:`w` of which the rows :math:`S` stay,

.. math:: w_S \leftarrow w_S + H_{SS}^{-1} H_{SP} w_P

for the pruned rows :math:`P`. To lose one weight alone costs
:math:`w_k^2 / (H^{-1})_{kk}`. In a tile all columns keep the same rows, so one
factorization serves all of them, and the cost of a piece is the sum of its weights'.

Legend: K input features, N output features, L layers.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Float

from jaxscale.nn.linear import Linear
from jaxscale.pruning.layers import kernels, matrices, replace_linears
from jaxscale.pruning.masks import Masks, Scores, check_masks


DAMPING = 0.01
"""Added to the diagonal of H, in parts of its mean."""

_COLUMNS_EACH = 8
"""Columns with the same rows from which one factorization for each set of rows takes
less time than one pass over all rows."""
_BLOCK = 128


def sparsegpt_scores(
    model: Any, products: Mapping[str, Float[np.ndarray, "..."]]
) -> Scores:
    r"""The squared error of the layer's outputs without a weight, if others make up.

    :math:`w^2 / (H^{-1})_{kk}`. It compares weights of one layer; rank with
    ``scope="layer"``.

    Args:
        model: The model.
        products: H of each layer, as `input_products` gives it.

    References:
        Frantar and Alistarh, "SparseGPT" (arXiv 2301.00774), which chooses weights row
        by row, with the updated weights.
    """
    scores = {}
    for name, weight in kernels(model, products).items():
        inverses = [np.linalg.inv(_damped(h)) for h in matrices(products[name])]
        error = 1 / np.stack([np.diagonal(inverse) for inverse in inverses])  # [L, K]
        score = np.square(matrices(weight)) * error[..., None]
        scores[name] = score.reshape(weight.shape).astype(np.float32)
    return scores


def update_weights(
    model: Any, masks: Masks, products: Mapping[str, Float[np.ndarray, "..."]]
) -> Any:
    """A copy of `model` whose kept weights make up for the pruned, which are zero.

    Exact where some columns keep the same rows, as those of a tile do. Columns that
    each keep rows of their own, of the other patterns, are updated as SparseGPT does:
    row by row, each pruned weight made up for by the rows after it.

    Args:
        model: The dense model.
        masks: What each layer keeps.
        products: H of each layer, as `input_products` gives it for the dense model.

    Raises:
        ValueError: as `apply_masks`, or `products` lacks a layer.
    """
    check_masks(model, masks)
    if missing := [name for name in masks if name not in products]:
        raise ValueError(
            f"products lack the layer {missing[0]}; make them from this model, by "
            "input_products"
        )

    def change(name: str, layer: Linear) -> Linear:
        old = kernels(model, [name])[name]
        new = np.stack(
            [
                _update(w, kept, _damped(h))
                for w, kept, h in zip(
                    matrices(old),
                    matrices(masks[name]),
                    matrices(products[name]),
                    strict=True,
                )
            ]
        )
        kernel = layer.kernel[...]
        placed = jax.device_put(
            new.reshape(old.shape).astype(kernel.dtype), kernel.sharding
        )
        changed: Any = layer.kernel.replace(placed)
        layer.kernel = changed
        return layer

    changes = {name: functools.partial(change, name) for name in masks}
    return replace_linears(model, changes)


def _damped(products: Float[np.ndarray, "K K"]) -> Float[np.ndarray, "K K"]:
    hessian = products.astype(np.float64)
    mean = float(np.trace(hessian)) / len(hessian)
    hessian[np.diag_indices_from(hessian)] += DAMPING * mean or 1.0
    return hessian


def _update(
    weight: Float[np.ndarray, "K N"],
    kept: Bool[np.ndarray, "K N"],
    hessian: Float[np.ndarray, "K K"],
) -> Float[np.ndarray, "K N"]:
    """The kept weights after the update, zeros elsewhere."""
    if kept.all():
        return weight
    groups: dict[bytes, list[int]] = {}
    for column, rows in enumerate(np.ascontiguousarray(kept.T)):
        groups.setdefault(rows.tobytes(), []).append(column)
    if len(groups) * _COLUMNS_EACH > kept.shape[1]:
        return _row_by_row(weight, kept, hessian)
    new = np.zeros_like(weight)
    for columns in groups.values():
        stays = kept[:, columns[0]]
        if not stays.any():
            continue
        own, gone = weight[np.ix_(stays, columns)], weight[np.ix_(~stays, columns)]
        change = hessian[np.ix_(stays, ~stays)] @ gone
        change = np.linalg.solve(hessian[np.ix_(stays, stays)], change)
        new[np.ix_(stays, columns)] = own + change
    return new


def _row_by_row(
    weight: Float[np.ndarray, "K N"],
    kept: Bool[np.ndarray, "K N"],
    hessian: Float[np.ndarray, "K K"],
) -> Float[np.ndarray, "K N"]:
    """SparseGPT's update for a given mask."""
    factor = np.linalg.cholesky(np.linalg.inv(hessian)).T  # upper triangle
    new = weight.astype(np.float64)
    for start in range(0, len(new), _BLOCK):
        end = min(start + _BLOCK, len(new))
        errors = np.zeros((end - start, new.shape[1]))
        for i in range(start, end):
            errors[i - start] = np.where(kept[i], 0, new[i]) / factor[i, i]
            new[i:end] -= np.outer(factor[i, i:end], errors[i - start])
        new[end:] -= factor[start:end, end:].T @ errors
    return np.where(kept, new, 0).astype(weight.dtype)
