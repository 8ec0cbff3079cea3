"""Mesh axes that arrays vary over inside `jax.shard_map`: kernels lose the mark."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import jaxpr_as_fun


def varying(*arrays: jax.Array) -> frozenset[str]:
    """Mesh axes over which any of the arrays varies, inside `jax.shard_map`."""
    return frozenset().union(*(jax.typeof(a).manual_axis_type.varying for a in arrays))


def unmarked(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel whose body does not see over which mesh axes its arguments vary.

    `plgpu.warp_map` refuses references that are marked so.
    """

    def run(*args: jax.Array) -> Any:
        unmarked_args = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in args]
        jaxpr, outputs = jax.make_jaxpr(kernel, return_shape=True)(*unmarked_args)
        results = jaxpr_as_fun(jaxpr)(*args)
        return jax.tree.unflatten(jax.tree.structure(outputs), results)

    return run


def as_varying(x: jax.Array, axes: frozenset[str]) -> jax.Array:
    """Marks an array as varying over mesh axes.

    The transpose of the mark sums gradients over the axes, which a gradient rule,
    seeing only local values, could not know.
    """
    missing = tuple(sorted(axes - varying(x)))
    return lax.pcast(x, missing, to="varying") if missing else x


def keep_mark[T](results: T, *operands: jax.Array) -> T:
    """What a kernel gives, marked as varying where its operands vary."""
    axes = varying(*operands)
    return jax.tree.map(lambda y: as_varying(y, axes), results)


def constant(x: jax.Array | np.ndarray, like: jax.Array) -> jax.Array:
    """An array of numpy as a constant that varies as `like` does; others as they are.

    A kernel's operands must vary over the same mesh axes.
    """
    return as_varying(jnp.asarray(x), varying(like)) if isinstance(x, np.ndarray) else x


def vary_alike(tree: Any) -> Any:
    """Marks all arrays as varying over the mesh axes over which any of them does."""
    axes = varying(*jax.tree.leaves(tree))
    return jax.tree.map(lambda x: as_varying(x, axes), tree)
