"""Collectives over Manual mesh axes, for whoever writes the `jax.shard_map`.

Inside a region that is Manual over an axis and that does not track what varies over it
(``check_vma=False``), each device differentiates its own program: what it means for
the others, the collectives say. A parameter is stored as its partition says and is
made `whole` for its use; `scattered` and `summed` bring its gradient back.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
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
    return _sum(x, axes)


def _sum_forward(x: Array, axes: tuple[str, ...]) -> tuple[Array, None]:
    return _sum(x, axes), None


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
    return (_sum(g, axes),)


use_on_each.defvjp(_use_forward, _use_backward)


def whole(
    x: Shaped[Array, "..."], spec: PartitionSpec, placed: PartitionSpec
) -> Shaped[Array, "..."]:
    """`x` gathered over the Manual axes that `spec` splits it over.

    The axes in `placed` that are left to the compiler split the result as they split
    `x`. The gradient of the result is summed over those in `spec`, and each device
    keeps its part: see `scattered`.
    """

    def gather(x: Array) -> Array:
        for dimension, names in enumerate(map(as_tuple, spec)):
            if names:
                x = jax.lax.all_gather(x, names, axis=dimension, tiled=True)
        return x

    return _on_each(gather, x, spec, placed)


def scattered(
    x: Inexact[Array, "..."], spec: PartitionSpec, placed: PartitionSpec
) -> Inexact[Array, "..."]:
    """The sum of `x` over the Manual axes in `spec`, split as it says.

    The axes in `placed` that are left to the compiler split the result as they split
    `x`.
    """

    def scatter(x: Array) -> Array:
        for dimension, names in enumerate(map(as_tuple, spec)):
            if names:
                x = jax.lax.psum_scatter(
                    x, names, scatter_dimension=dimension, tiled=True
                )
        return x

    return _on_each(scatter, x, spec, placed)


def summed(
    x: Shaped[Array, "..."], axes: Sequence[str], spec: PartitionSpec
) -> Shaped[Array, "..."]:
    """The sum of `x` over those Manual `axes` that `spec` does not split it over."""
    split = {name for entry in spec for name in as_tuple(entry)}
    rest = tuple(name for name in axes if name not in split)
    return _sum(x, rest) if rest else x


def _on_each(
    local: Callable[[Array], Array],
    x: Array,
    spec: PartitionSpec,
    placed: PartitionSpec,
) -> Array:
    """`local` of the part of each device, Manual over the axes that are not so yet.

    Without, the compiler would gather `x` over these axes, and cut it again. Where they
    split a dimension that is in `spec` too, it has to: its parts are in another order.
    """
    if not any(map(as_tuple, spec)):
        return x
    mesh = jax.sharding.get_abstract_mesh()
    free = set(mesh.axis_names) - set(mesh.manual_axes)
    entries = [tuple(n for n in as_tuple(entry) if n in free) for entry in placed]
    mixed = any(n and as_tuple(entry) for n, entry in zip(entries, spec, strict=False))
    if not free or mixed or not (any(entries) or _is_half(x)):
        return local(x)
    inner = PartitionSpec(*(names or None for names in entries))
    return jax.shard_map(
        local, axis_names=free, in_specs=inner, out_specs=inner, check_vma=False
    )(x)


def _is_half(x: Array) -> bool:
    """Whether reductions of `x` need care where axes are left to the compiler.

    XLA promotes them on CPUs, and there its pass (all-reduce-promotion) ends the
    process.
    """
    return x.dtype.itemsize < 4 and jnp.issubdtype(x.dtype, jnp.inexact)


def _sum(x: Array, axes: tuple[str, ...]) -> Array:

    def reduce(x: Array) -> Array:
        return jax.lax.psum(x, axes)

    if not _is_half(x):
        return reduce(x)
    return jax.lax.platform_dependent(
        x,
        cpu=lambda x: reduce(x.astype(jnp.float32)).astype(x.dtype),
        default=reduce,
    )
