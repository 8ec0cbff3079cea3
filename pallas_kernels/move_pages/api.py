"""The public move of pages.

Axes: L layers, P pages, M moves.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Shaped

from pallas_kernels.arrays import concrete
from pallas_kernels.dispatch import dispatch, no_derivative
from pallas_kernels.mosaic import DeviceSpec, vary_alike
from pallas_kernels.move_pages import mosaic_gpu, xla
from pallas_kernels.partition import by_shards


__all__ = ["move_pages"]


def move_pages(
    pages: Shaped[Array, "L P *page"],
    source: Int[Array | np.ndarray, " M"],
    target: Int[Array | np.ndarray, " M"],
    *,
    implementation: str | Sequence[str] | None = None,
) -> Shaped[Array, "L P *page"]:
    """Moves what lies in some pages to other pages, in all layers::

        out[l, target[i]] = pages[l, source[i]]

    Under `jax.jit` the pages are changed in place where they are donated or carried by
    a loop: nothing of their size is copied. Bits are copied, whatever they mean. Not
    differentiable; not for `jax.vmap` but in its implementation "xla".

    Args:
        pages: [L, P, ...], as `pallas_kernels.paged_attention.paged_attention` takes
            them: of any type.
        source: [M], pages to read.
        target: [M], pages to write: each is named once, and none is read. A pair of
            which either is not in [0, P) moves nothing.
        implementation: "mosaic_gpu" (a kernel for Hopper GPUs: all moves of all layers
            in one launch; the last dimension is at most 256 and a multiple of 16
            bytes), "xla", a sequence of these, or None for the best that supports the
            arguments on this device.

    Returns:
        The pages, changed.

    Raises:
        TypeError: source or target do not hold integers, or the op is differentiated.
        ValueError: shapes do not fit, or a target is named twice or read, where source
            and target are not traced.
        Unsupported: the implementation named cannot serve the arguments here.
        ExceptionGroup: none of several implementations can.

    Example:
        >>> pages = jnp.arange(8.0).reshape(1, 4, 2)
        >>> move_pages(pages, np.array([3, -1]), np.array([0, 1]))[0].tolist()
        [[6.0, 7.0], [2.0, 3.0], [4.0, 5.0], [6.0, 7.0]]

    References:
        Flover, arXiv 2305.13484, section 4: when requests end, the buffers of others
        are moved so that the batch is in one piece. Page tables make that unnecessary;
        this op is there to measure what they save.
    """
    pages = jnp.asarray(pages)
    if pages.ndim < 3 or 0 in pages.shape:
        raise ValueError(
            f"pages has shape {pages.shape}, expected [L, P, ...] with at least one"
            " number a page"
        )
    _check_ids(source, target, pages.shape[1])
    source, target = (jnp.asarray(ids).astype(jnp.int32) for ids in (source, target))
    device = DeviceSpec.current()

    def run(*arrays: Array) -> Array:
        pages, source, target = vary_alike(
            no_derivative(arrays, _NO_DERIVATIVE, TypeError)
        )
        most = pages.shape[1]
        real = (source >= 0) & (source < most) & (target >= 0) & (target < most)
        order = jnp.argsort(~real)  # those to do come first
        return dispatch(
            "move_pages",
            IMPLEMENTATIONS,
            implementation,
            pages,
            source[order],
            target[order],
            jnp.sum(real, dtype=jnp.int32),
            device=device,
        )

    letters = "LP" + "abcdefghijkl"[: pages.ndim - 2]
    arrays = pages, source, target
    return by_shards(run, arrays, (letters, "M", "M"), letters)(*arrays)


_NO_DERIVATIVE = (
    "move_pages is a step of serving and has no derivative; hide its arguments"
    " behind jax.lax.stop_gradient"
)


def _xla(
    pages: Array,
    source: Array,
    target: Array,
    count: Array,
    *,
    device: DeviceSpec | None,
) -> Array:
    del device
    return xla.move_pages(pages, source, target, count)


IMPLEMENTATIONS: Mapping[str, Callable[..., Array]] = {
    "mosaic_gpu": mosaic_gpu.move_pages,
    "xla": _xla,
}
"""Implementations of `move_pages`, the preferred one first."""


def _check_ids(source: Any, target: Any, num_pages: int) -> None:
    for name, ids in (("source", source), ("target", target)):
        if not jnp.issubdtype(ids.dtype, jnp.integer):
            raise TypeError(f"{name} must hold integers, got {ids.dtype}")
    if np.ndim(source) != 1 or np.shape(source) != np.shape(target):
        raise ValueError(
            f"source has shape {np.shape(source)} and target {np.shape(target)},"
            " expected [M] for both"
        )
    old, new = (
        concrete(ids) if isinstance(ids, jax.Array) else ids for ids in (source, target)
    )
    if old is None or new is None:
        return
    pairs = np.stack([old, new])
    pairs = pairs[:, ((pairs >= 0) & (pairs < num_pages)).all(axis=0)]
    named, counts = np.unique(pairs[1], return_counts=True)
    wrong = {
        "is named twice": named[counts > 1],
        "is also a source": np.intersect1d(pairs[0], named),
    }
    for why, ids in wrong.items():
        if ids.size:
            raise ValueError(
                f"target {ids[0]} {why}: what it would hold is not defined; move in"
                " several calls"
            )
