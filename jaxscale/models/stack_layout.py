"""How the layers of a stack are stored for pipeline stages.

Legend: L layers, v chunks per stage, p stages, k places per chunk.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Shaped

from jaxscale.models.config import DecoderConfig
from jaxscale.nn.attention import AttentionConfig
from jaxscale.sharding.parameters import logical_axes
from jaxscale.sharding.rules import STACK_AXES
from jaxscale.sharding.schedule import place_layers


@dataclasses.dataclass(frozen=True, kw_only=True)
class StackLayout:
    """Where each layer of a stack is stored.

    With one chunk per stage and layers that divide, the parameters stay [L, ...] with
    the axis ``layers``, whose p parts are the stages. Otherwise they are [v, p, k, ...]
    with the axes ``rounds``, ``layers`` and ``places``, so that a device holds the
    chunks of its stage; a place without a layer holds zeros.

    Example:
        >>> StackLayout(num_layers=8, stages=2).is_flat
        True
        >>> layout = StackLayout(num_layers=5, stages=2, chunks=2)
        >>> layout.places.tolist()
        [[[0, 1], [2, -1]], [[3, -1], [4, -1]]]
        >>> layers = layout.arrange_array(jnp.arange(1, 6))
        >>> layers.tolist()
        [[[1, 2], [3, 0]], [[4, 0], [5, 0]]]
        >>> layout.flatten_array(layers).tolist()
        [1, 2, 3, 4, 5]
    """

    num_layers: int
    """Layers of the model, L."""
    stages: int = 1
    """Stages of the pipeline, p."""
    chunks: int = 1
    """Model chunks per stage (virtual stages), v."""

    def __post_init__(self) -> None:
        place_layers(self.num_layers, self.stages, self.chunks)  # raises

    @classmethod
    def of_array(cls, shape: tuple[int, ...], num_layers: int) -> "StackLayout":
        """The layout of an array of `num_layers` layers that begins [v, p, k]."""
        return cls(num_layers=num_layers, chunks=shape[0], stages=shape[1])

    @functools.cached_property
    def places(self) -> np.ndarray:
        """[v, p, k] The layer at each place; -1 is none."""
        return place_layers(self.num_layers, self.stages, self.chunks)

    @property
    def is_flat(self) -> bool:
        """Whether the parameters stay [L, ...]."""
        return self.chunks == 1 and self.is_even

    @property
    def is_even(self) -> bool:
        """Whether there is a layer at each place."""
        return self.places.size == self.num_layers

    def holds(self, tree: Any) -> bool:
        """Whether the stack of a module, or of a tree of variables, has this layout."""
        leading = (self.num_layers,) if self.is_flat else self.places.shape
        axes = ("layers",) if self.is_flat else STACK_AXES
        variables = jax.tree.leaves(tree, is_leaf=_variable)
        stacked = [x for x in variables if _variable(x) and "layers" in logical_axes(x)]
        return all(
            _leads(x, axes) and x.shape[: len(leading)] == leading for x in stacked
        )

    def arrange_array(self, x: Shaped[Array, "L ..."]) -> Shaped[Array, "v p k ..."]:
        """An array of layers, rearranged to this layout."""
        if self.is_even:
            return x.reshape(*self.places.shape, *x.shape[1:])
        index = np.where(self.places < 0, self.num_layers, self.places)
        return jnp.take(x, index, axis=0, mode="fill", fill_value=0)

    def flatten_array(self, x: Shaped[Array, "v p k ..."]) -> Shaped[Array, "L ..."]:
        """The inverse of `arrange_array`."""
        x = x.reshape(self.places.size, *x.shape[3:])
        if self.is_even:
            return x
        return x[np.flatnonzero(self.places.ravel() >= 0)]

    def arrange[Tree](self, tree: Tree) -> Tree:
        """A module, or another tree of variables, with its stack in this layout."""
        if self.is_flat:
            return tree
        return _map_stacks(tree, ("layers",), self.arrange_array, STACK_AXES)

    def flatten[Tree](self, tree: Tree) -> Tree:
        """The inverse of `arrange`."""
        return _map_stacks(tree, STACK_AXES, self.flatten_array, ("layers",))


def flat_stack[Tree](tree: Tree, num_layers: int) -> Tree:
    """`tree` with its stack as [L, ...], whatever its layout is."""
    for variable in jax.tree.leaves(tree, is_leaf=_variable):
        if _leads(variable, STACK_AXES):
            layout = StackLayout.of_array(variable.shape, num_layers)
            return layout.flatten(tree)
    return tree


def place_variants(config: DecoderConfig, layout: StackLayout) -> list[AttentionConfig]:
    """The attention of the layer at each place of a chunk.

    All stages run one program, so the layers at the same place of all chunks must have
    the same attention.

    Raises:
        ValueError: they do not.
    """
    variants = []
    for place in range(layout.places.shape[-1]):
        layers = layout.places[:, :, place]
        found = {config.attention(int(i)) for i in layers.flat if i >= 0}
        if len(found) > 1:
            raise ValueError(_no_repetition(config, layout, place))
        variants += found
    return variants


def _no_repetition(config: DecoderConfig, layout: StackLayout, place: int) -> str:
    """The error for windows that do not repeat, with chunks that would fit."""
    name = "window_pattern" if config.window_pattern else "global_layers"
    count, stages = config.num_layers, layout.stages
    chunks = [v for v in range(1, count // stages + 1) if _repeats(config, stages, v)]
    others = [p for p in range(2, count + 1) if _repeats(config, p, 1)]
    fitting = f"chunks {_either(chunks)}" if chunks else f"stages {_either(others)}"
    return (
        f"{name} {getattr(config, name)}: the layers at place {place} of the chunks of "
        f"stages {stages} x chunks {layout.chunks} have different windows, and all "
        "stages run one program, so windows must repeat with each chunk; "
        + (f"use {fitting}" if chunks or others else "use no pipeline")
    )


def _either(numbers: list[int]) -> str:
    return " or ".join(map(str, numbers))


def _repeats(config: DecoderConfig, stages: int, chunks: int) -> bool:
    layout = StackLayout(num_layers=config.num_layers, stages=stages, chunks=chunks)
    places = layout.places.reshape(-1, layout.places.shape[-1])  # [v p, k]
    windows = config.windows
    return all(len({windows[i] for i in layers if i >= 0}) <= 1 for layers in places.T)


def _map_stacks[Tree](
    tree: Tree,
    before: tuple[str, ...],
    move: Callable[[Array], Array],
    after: tuple[str, ...],
) -> Tree:
    """`tree` with each variable whose axes begin as `before` moved to those `after`."""

    def moved(node: Any) -> Any:
        if not _leads(node, before):
            return node
        axes = logical_axes(node)
        result = jax.tree.map(move, node)
        result.set_metadata(out_sharding=(*after, *axes[len(before) :]))
        return result

    return jax.tree.map(moved, tree, is_leaf=_variable)


def _leads(node: Any, axes: tuple[str, ...]) -> bool:
    return _variable(node) and logical_axes(node)[: len(axes)] == axes


def _variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable)
