"""Differentiable collectives over Manual mesh axes, for use inside `jax.shard_map`.

Inside a region that is Manual over an axis and does not track what varies over it
(``check_vma=False``), each device differentiates its own program, and the collectives
define how gradients cross devices. A parameter is stored sharded and made `whole`
(all-gather) for its use; `scattered` (reduce-scatter) and `summed` (all-reduce) bring
its gradient back.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Inexact, Shaped

from jaxscale.sharding.rules import MeshAxes, as_tuple


def manual_names(axes: MeshAxes) -> tuple[str, ...]:
    """The mesh `axes` that are Manual here and have several devices."""
    mesh = jax.sharding.get_abstract_mesh()
    manual = set(mesh.manual_axes)
    return tuple(n for n in as_tuple(axes) if n in manual and mesh.shape[n] > 1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def sum_for_all(
    x: Inexact[Array, "..."], axes: tuple[str, ...]
) -> Inexact[Array, "..."]:
    """The sum over Manual `axes`, for a use that is the same on all of their devices.

    The gradient of the result is then the same on all devices, and is the gradient of
    each term. `jax.lax.psum` instead sums gradients over the devices, for uses that
    differ.

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
    """`x` all-gathered over the Manual axes that `spec` splits it over.

    Axes in `placed` that are left to the compiler split the result as they split `x`.
    The gradient is reduce-scattered over the axes in `spec`: see `scattered`.
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
    """Reduce-scatter `x` over the Manual axes in `spec`, split as it says.

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
    """All-reduce `x` over the Manual `axes` that `spec` does not split it over."""
    split = {name for entry in spec for name in as_tuple(entry)}
    rest = tuple(name for name in axes if name not in split)
    return _sum(x, rest) if rest else x


def _on_each(
    local: Callable[[Array], Array],
    x: Array,
    spec: PartitionSpec,
    placed: PartitionSpec,
) -> Array:
    """Run `local` on each device's part, Manual over the axes that are not so yet.

    Otherwise the compiler would all-gather `x` over these axes, and split it again.
    Where they split a dimension that is in `spec` too, it has to: its parts are in
    another order.
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
