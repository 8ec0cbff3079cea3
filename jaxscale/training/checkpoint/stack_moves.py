"""Conversion of stacks of layers that were saved for other pipeline stages."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from jaxscale.models.stack_layout import StackLayout
from jaxscale.sharding.parameters import logical_axes
from jaxscale.sharding.rules import STACK_AXES, as_tuple


@dataclasses.dataclass(frozen=True, kw_only=True)
class StackMove:
    """The conversion of an array of layers to the wanted layout."""

    saved: jax.ShapeDtypeStruct
    """The array as read."""
    wanted: jax.ShapeDtypeStruct
    """The array as wanted."""
    num_layers: int
    """Layers of the model."""
    inner: int
    """Dimensions of one layer."""

    @classmethod
    def between(
        cls,
        saved: tuple[int, ...],
        wanted: jax.ShapeDtypeStruct,
        lead: int,
        num_layers: int | None,
    ) -> "StackMove | None":
        """The conversion, or None if the shapes do not match the same layers.

        Args:
            saved: Shape in the checkpoint.
            wanted: The array as wanted.
            lead: Dimensions of layers that `wanted` has.
            num_layers: Layers of the model, if known.
        """
        inner = wanted.shape[lead:]
        leads = saved[: len(saved) - len(inner)], wanted.shape[:lead]
        flat = {shape[0] for shape in leads if len(shape) == 1}
        if num_layers is not None:
            flat.add(num_layers)
        if len(flat) != 1 or saved[len(leads[0]) :] != inner:
            return None
        (count,) = flat
        for shape in leads:
            if len(shape) not in (1, len(STACK_AXES)):
                return None
            if len(shape) > 1 and _places(shape, count) != shape:
                return None
        place = _place(wanted.sharding, lead, leads[0])
        return cls(
            saved=jax.ShapeDtypeStruct(saved, wanted.dtype, sharding=place),
            wanted=wanted,
            num_layers=count,
            inner=len(inner),
        )

    def __call__(self, x: Array) -> Array:
        """Convert the array."""
        return jax.jit(self._moved, out_shardings=self.wanted.sharding)(x)

    def _moved(self, x: Array) -> Array:
        inner = self.inner
        if x.ndim - inner > 1:
            layout = StackLayout.of_array(x.shape, self.num_layers)
            x = layout.flatten_array(x)
        if self.wanted.ndim - inner > 1:
            layout = StackLayout.of_array(self.wanted.shape, self.num_layers)
            x = layout.arrange_array(x)
        return x


def stack_ranks(tree: Any) -> Mapping[str, int]:
    """The number of dimensions of layers of each stacked variable, by its path."""
    variables, _ = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda node: isinstance(node, nnx.Variable)
    )
    ranks = {}
    for path, node in variables:
        axes = logical_axes(node) if isinstance(node, nnx.Variable) else ()
        if "layers" in axes:
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            ranks[name] = sum(axis in STACK_AXES for axis in axes)
    return ranks


def _places(shape: tuple[int, ...], num_layers: int) -> tuple[int, ...] | None:
    """The leading shape of `num_layers` layers in the chunks and stages of `shape`."""
    try:
        return StackLayout.of_array(shape, num_layers).places.shape
    except ValueError:
        return None


def _place(sharding: Any, lead: int, saved: tuple[int, ...]) -> Any:
    """Sharding to read an array with the layout `saved`, given the wanted one.

    Layers are split over the same mesh axes if they divide.
    """
    if not isinstance(sharding, NamedSharding):
        return sharding
    entries = list(sharding.spec)
    axis = lead // 2
    names = as_tuple(entries[axis]) if len(entries) > axis else ()
    ways = 1
    for name in names:
        ways *= sharding.mesh.shape[name]
    leading: list[Any] = [None] * len(saved)
    if saved[len(saved) // 2] % ways == 0:
        leading[len(saved) // 2] = names or None
    return NamedSharding(sharding.mesh, PartitionSpec(*leading, *entries[lead:]))
