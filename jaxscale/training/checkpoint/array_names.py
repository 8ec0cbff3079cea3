"""Names of the arrays of a pytree: their paths."""

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx


def named_leaves(tree: Any) -> dict[str, Any]:
    """The leaves of a pytree by their path, for example ``model.blocks.mlp.up.kernel``.

    The value of an `nnx.Variable` has the name of the variable.

    Example:
        >>> named_leaves({"a": [1, 2], "b": {"c": 3}})
        {'a.0': 1, 'a.1': 2, 'b.c': 3}
    """
    variables, _ = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda node: isinstance(node, nnx.Variable)
    )
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, node in variables
        for leaf in jax.tree.leaves(node)
    }


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Names with dots as dictionaries of dictionaries."""
    nested: dict[str, Any] = {}
    for name, leaf in flat.items():
        *parents, last = name.split(".")
        node = nested
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return nested


def flatten(nested: Any, prefix: str = "") -> dict[str, Any]:
    """The inverse of `nest`; lists are leaves."""
    if not isinstance(nested, Mapping):
        return {prefix: nested}
    flat: dict[str, Any] = {}
    for key, node in nested.items():
        flat |= flatten(node, f"{prefix}.{key}" if prefix else str(key))
    return flat
