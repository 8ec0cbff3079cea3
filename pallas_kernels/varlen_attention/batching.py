"""The batching rule of the kernels: `jax.vmap` of a call is one with more rows."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jaxtyping import Array


LARGEST_INT = 2**31 - 1


def batched(run: Callable[..., tuple[Array, ...]]) -> Callable[..., tuple[Array, ...]]:
    """A function of arrays with rows, whose `jax.vmap` is one call with more rows."""

    @custom_vmap
    def rows(*arrays: Any) -> tuple[Array, ...]:
        results = [run(*part) for part in _parts(arrays)]
        if len(results) == 1:
            return results[0]
        return tuple(jnp.concatenate(parts) for parts in zip(*results, strict=True))

    @rows.def_vmap
    def _(size: int, batched_: Any, *arrays: Any) -> tuple[Any, Any]:
        def merge(a: Array, has_axis: bool) -> Array:
            a = a if has_axis else jnp.broadcast_to(a, (size, *a.shape))
            return a.reshape(-1, *a.shape[2:])  # [size, R, ...] to [size R, ...]

        results = batched(run)(*jax.tree.map(merge, arrays, tuple(batched_)))
        split = tuple(
            a.reshape(size, -1, *a.shape[1:]) for a in results
        )  # [size, R, ...] each
        return split, tuple(True for _ in split)

    return rows


def _parts(arrays: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """The arrays, cut along the rows where they hold more than a kernel counts to."""
    leaves = jax.tree.leaves(arrays)
    rows = leaves[0].shape[0]
    most = max(1, LARGEST_INT // max(math.prod(a.shape[1:]) for a in leaves))
    if rows <= most:
        return [arrays]
    return [
        jax.tree.map(lambda a, i=i: a[i : i + most], arrays)  # [most, ...]
        for i in range(0, rows, most)
    ]
