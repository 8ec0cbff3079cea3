"""Checks of the arguments of tile-sparse products."""

from typing import Any

import jax

from pallas_kernels.dispatch import check_floating
from pallas_kernels.matmul.activations import check_activation
from pallas_kernels.tile_sparse_matmul.format import TileSparse


__all__ = ["check_product"]


def check_product(
    x: jax.Array, w: TileSparse, bias: Any, activation: str | None, x_major: bool
) -> None:
    """Refuses what the caller got wrong."""
    if not isinstance(w, TileSparse):
        raise TypeError(
            f"w is a {type(w).__name__}, expected a TileSparse; pack a dense weight"
            " with TileSparse.from_dense"
        )
    inputs, outputs = w.shape
    if w.values.ndim != 3:
        raise ValueError(
            f"w has values of shape {w.values.shape}, expected [T, P, G]; scan or vmap"
            " over stacked weights"
        )
    if w.values.shape[:-1] != w.rows.shape or w.tiles * w.tile < w.packed_columns:
        raise ValueError(
            f"w has values of shape {w.values.shape} for rows of shape {w.rows.shape}"
            f" and {w.packed_columns} columns; see with_values"
        )
    if x.ndim < 1 or x.shape[0 if x_major else -1] != inputs:
        raise ValueError(
            f"x has shape {x.shape} ({'feature' if x_major else 'token'}-major),"
            f" expected {inputs} features as w of shape {w.shape} has; see"
            " feature_major"
        )
    if x.dtype != w.dtype:
        raise ValueError(f"w has type {w.dtype}, expected that of x, {x.dtype}")
    check_floating(x=x.dtype)
    if bias is not None:
        check_floating(bias=bias.dtype)
    if bias is not None and bias.shape != (outputs,):
        raise ValueError(f"bias has shape {bias.shape}, expected ({outputs},)")
    check_activation(activation)
