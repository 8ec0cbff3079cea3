"""A move of pages in plain JAX; runs anywhere.

Axes: L layers, P pages, M moves.
"""

from jax import lax
from jaxtyping import Array, Int, Shaped


__all__ = ["move_pages"]


def move_pages(
    pages: Shaped[Array, "L P *page"],
    source: Int[Array, " M"],
    target: Int[Array, " M"],
    count: Int[Array, ""],
) -> Shaped[Array, "L P *page"]:
    """The first `count` moves, one after another: a page is copied at a time."""

    def move(i: Array, pages: Array) -> Array:
        page = lax.dynamic_index_in_dim(pages, source[i], axis=1)
        return lax.dynamic_update_slice_in_dim(pages, page, target[i], axis=1)

    return lax.fori_loop(0, count, move, pages)
