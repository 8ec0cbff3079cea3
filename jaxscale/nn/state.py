"""Registration of attention states as pytrees."""

import dataclasses
from typing import Any

import jax


def register_state[Cls: type](cls: Cls) -> Cls:
    """Register a frozen dataclass as `jax.tree_util.register_dataclass` does.

    Mapped to text, its tree becomes a dict of the fields, as `flax.nnx.tabulate` needs
    for the arguments of layers: flax 0.12 fails there on pytrees other than lists,
    tuples and dicts.

    Args:
        cls: The class; fields with ``static`` in their metadata are not children.
    """
    fields = dataclasses.fields(cls)
    static = tuple(f.name for f in fields if f.metadata.get("static"))
    names = tuple(f.name for f in fields if f.name not in static)
    keys = tuple(map(jax.tree_util.GetAttrKey, names))

    def flatten(state: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        children = tuple(getattr(state, name) for name in names)
        return children, tuple(getattr(state, name) for name in static)

    def flatten_with_keys(state: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        children, fixed = flatten(state)
        return tuple(zip(keys, children, strict=True)), fixed

    def unflatten(fixed: tuple[Any, ...], children: Any) -> Any:
        values = dict(zip(names, children, strict=True))
        if any(type(value) is str for value in values.values()):
            return values
        return cls(**values, **dict(zip(static, fixed, strict=True)))

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
    return cls
