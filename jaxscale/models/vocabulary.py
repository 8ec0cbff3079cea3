"""Padding of vocabularies that do not divide over the devices, in memory only.

Tables and output projections get rows of zeros after the vocabulary. No look-up reads
them and no logit uses them, so their gradients are zero and they stay zero; files do
not contain them. If the vocabulary divides, nothing is added.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType
from jaxtyping import Array, Float

from jaxscale.sharding.operations import constrain
from jaxscale.sharding.parameters import logical_axes
from jaxscale.sharding.rules import AxisRules, as_tuple


_MULTIPLE = 128
"""Padded tables have a multiple of this many rows, so that most meshes pad alike, and
kernels find whole tiles (as Megatron's ``make_vocab_size_divisible_by``)."""


def vocabulary_rows(
    vocab_size: int, mesh_sizes: Mapping[str, int], rules: AxisRules
) -> int:
    """The rows of the tables of a vocabulary on a mesh, padding included.

    Example:
        >>> from jaxscale.sharding.rules import fsdp_tp
        >>> [vocabulary_rows(50_257, {"tensor": n}, fsdp_tp()) for n in (1, 2, 8)]
        [50257, 50304, 50304]
        >>> vocabulary_rows(32_000, {"tensor": 2}, fsdp_tp())
        32000
    """
    ways = (ways_of(axis, mesh_sizes, rules) for axis in ("vocab", "act_vocab"))
    divisor = math.lcm(*ways)
    if vocab_size % divisor == 0:
        return vocab_size
    multiple = math.lcm(_MULTIPLE, divisor)
    return -(-vocab_size // multiple) * multiple


def ways_of(axis: str, mesh_sizes: Mapping[str, int], rules: AxisRules) -> int:
    """Number of devices of a mesh that a logical axis is split over."""
    names = as_tuple(rules.spec(axis)[0])
    return math.prod(mesh_sizes.get(name, 1) for name in names)


def rows_in_context(vocab_size: int, rules: AxisRules) -> int:
    """`vocabulary_rows` on the mesh of the context."""
    mesh = jax.sharding.get_abstract_mesh()
    sizes = {
        name: size
        for name, size, kind in zip(
            mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True
        )
        if kind != AxisType.Manual  # there each device has all rows
    }
    return vocabulary_rows(vocab_size, sizes, rules)


def vocabulary_dimensions(tree: Any) -> dict[str, int]:
    """The dimension over the vocabulary of each variable that has one, by its path."""
    variables, _ = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda node: isinstance(node, nnx.Variable)
    )
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): axes.index("vocab")
        for path, node in variables
        if isinstance(node, nnx.Variable) and "vocab" in (axes := logical_axes(node))
    }


def with_rows(array: jax.Array, dimension: int, rows: int) -> jax.Array:
    """`array` padded with zeros, or truncated, to `rows` along a dimension."""
    if array.shape[dimension] >= rows:
        return jax.lax.slice_in_dim(array, 0, rows, axis=dimension)
    widths = [(0, 0)] * array.ndim
    widths[dimension] = (0, rows - array.shape[dimension])
    return jnp.pad(array, widths)


def real_logits(
    logits: Float[Array, "B T rows"], vocab_size: int, rules: AxisRules
) -> Float[Array, "B T V"]:
    """The logits of the vocabulary, without the padding.

    The unpadded vocabulary does not divide over the devices: each gets all logits.
    """
    if logits.shape[-1] == vocab_size:
        return logits
    return constrain(logits, ("batch", None, None), rules)[..., :vocab_size]


def fitted[M](model: M, mesh_sizes: Mapping[str, int], rules: AxisRules) -> M:
    """`model` with the rows that its tables have on a mesh; itself if it has them."""
    whole: Any = model
    rows = vocabulary_rows(whole.config.vocab_size, mesh_sizes, rules)
    if whole.embed.table.shape[0] == rows:
        return model

    def resize(node: Any) -> Any:
        if not isinstance(node, nnx.Variable) or "vocab" not in logical_axes(node):
            return node
        at = logical_axes(node).index("vocab")
        return jax.tree.map(lambda x: with_rows(x, at, rows), node)

    return jax.tree.map(
        resize, model, is_leaf=lambda node: isinstance(node, nnx.Variable)
    )
