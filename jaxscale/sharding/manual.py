"""Collectives over Manual mesh axes, for whoever writes the `jax.shard_map`.

Inside a region that is Manual over an axis and that does not track what varies over it
(``check_vma=False``), each device differentiates its own program: what it means for
the others, the collectives say. A parameter is stored as its partition says and is
made `whole` for its use; `scattered` and `summed` bring its gradient back.
"""

import functools
from collections.abc import Sequence

import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Inexact, Shaped

from jaxscale.sharding.rules import MeshAxes, as_tuple


def manual_names(axes: MeshAxes) -> tuple[str, ...]:
    """Those of the mesh `axes` that are Manual here and have several devices."""
    mesh = jax.sharding.get_abstract_mesh()
    manual = set(mesh.manual_axes)
    return tuple(n for n in as_tuple(axes) if n in manual and mesh.shape[n] > 1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def sum_for_all(
    x: Inexact[Array, "..."], axes: tuple[str, ...]
) -> Inexact[Array, "..."]:
    """The sum over Manual `axes`, for a use that is the same on all of their devices.

    The gradient of the result is then the same on all devices too, and is that of each
    term. That of `jax.lax.psum` is the sum over the devices, for uses that differ.

    References:
        The operator g of Megatron-LM, arXiv 1909.08053, section 3.
    """
    return jax.lax.psum(x, axes)


def _sum_forward(x: Array, axes: tuple[str, ...]) -> tuple[Array, None]:
    return jax.lax.psum(x, axes), None


def _sum_backward(axes: tuple[str, ...], residual: None, g: Array) -> tuple[Array]:
    del axes, residual
    return (g,)


sum_for_all.defvjp(_sum_forward, _sum_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def use_on_each(
    x: Inexact[Array, "..."], axes: tuple[str, ...]
) -> Inexact[Array, "..."]:
    """`x`, the same on all devices of Manual `axes`, for a use that differs on them.

    The gradient is the sum over the devices.

    References:
        The operator f of Megatron-LM, arXiv 1909.08053, section 3.
    """
    del axes
    return x


def _use_forward(x: Array, axes: tuple[str, ...]) -> tuple[Array, None]:
    del axes
    return x, None


def _use_backward(axes: tuple[str, ...], residual: None, g: Array) -> tuple[Array]:
    del residual
    return (jax.lax.psum(g, axes),)


use_on_each.defvjp(_use_forward, _use_backward)


def whole(x: Shaped[Array, "..."], spec: PartitionSpec) -> Shaped[Array, "..."]:
    """`x` gathered over the Manual axes that `spec` splits it over.

    The gradient of the result is summed over these axes, and each device keeps its
    part: see `scattered`.
    """
    for dimension, names in enumerate(map(as_tuple, spec)):
        if names:
            x = jax.lax.all_gather(x, names, axis=dimension, tiled=True)
    return x


def scattered(x: Inexact[Array, "..."], spec: PartitionSpec) -> Inexact[Array, "..."]:
    """The sum of `x` over the Manual axes in `spec`, split as it says."""
    for dimension, names in enumerate(map(as_tuple, spec)):
        if names:
            x = jax.lax.psum_scatter(x, names, scatter_dimension=dimension, tiled=True)
    return x


def summed(
    x: Shaped[Array, "..."], axes: Sequence[str], spec: PartitionSpec
) -> Shaped[Array, "..."]:
    """The sum of `x` over those Manual `axes` that `spec` does not split it over."""
    split = {name for entry in spec for name in as_tuple(entry)}
    rest = tuple(name for name in axes if name not in split)
    return jax.lax.psum(x, rest) if rest else x
