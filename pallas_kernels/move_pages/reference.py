"""The definition of a move of pages, one after another."""

import numpy as np
from jaxtyping import Array, Shaped


__all__ = ["move_pages"]


def move_pages(
    pages: Shaped[Array, "L P *page"], source: np.ndarray, target: np.ndarray
) -> np.ndarray:
    """See `pallas_kernels.move_pages.move_pages`; all arrays are concrete."""
    moved = np.array(pages)
    num_pages = moved.shape[1]
    for old, new in zip(source.tolist(), target.tolist(), strict=True):
        if 0 <= old < num_pages and 0 <= new < num_pages:
            moved[:, new] = moved[:, old]
    return moved
