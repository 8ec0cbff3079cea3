"""How optimizer state is stored between steps: in which type, and where."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from jaxscale.sharding.parameters import kept_in


type MemoryKind = Literal["device", "pinned_host"]
"""Device memory, or pinned host memory, which the device can read."""


def keep_moments(
    inner: optax.GradientTransformation,
    dtypes: Mapping[str, str],
    memory_kind: MemoryKind = "device",
) -> optax.GradientTransformationExtraArgs:
    """`inner` with its state in other types, and optionally offloaded to host memory.

    Its arithmetic is in fp32. Offloaded state is copied to the device parameter by
    parameter, and back before that of the next one: the device holds at most the state
    of two parameters.

    Args:
        inner: A transform that treats each parameter separately.
        dtypes: Data type of each moment, by its name in the state of `inner`.
        memory_kind: Where they are stored between steps.

    Returns:
        A transform whose update takes `finite`, a boolean: if it is false, the state
        does not change.
    """
    on_host = memory_kind == "pinned_host"
    transform: Any = inner

    def keep(name: str, x: Array) -> Array:
        x = x.astype(dtypes[name])
        return jax.device_put(x, jax.memory.Space.Host) if on_host else x

    def fetch(x: Array, last: Sequence[Array]) -> Array:
        if on_host:
            for before in last:  # wait until there is room
                x, _ = jax.lax.optimization_barrier((x, before))
            x = jax.device_put(x, jax.memory.Space.Device)
        return x.astype(jnp.float32)

    def init(params: optax.Params) -> Any:
        state = transform.init(jax.tree.map(lambda x: x.astype(jnp.float32), params))
        kept = {}
        for name in dtypes:
            tree = jax.tree.map(functools.partial(keep, name), getattr(state, name))
            kept[name] = kept_in(memory_kind, tree) if on_host else tree
        return state._replace(**kept)

    def update(
        updates: Any, state: Any, params: Any = None, *, finite: Any = True, **_: Any
    ) -> tuple[Any, Any]:
        del params
        gradients, structure = jax.tree.flatten(updates)
        before = {name: jax.tree.leaves(getattr(state, name)) for name in dtypes}
        after: dict[str, list[Array]] = {name: [] for name in dtypes}
        results: list[Any] = []
        one: Any = state
        for i, gradient in enumerate(gradients):
            old = {name: fetch(before[name][i], after[name][-1:]) for name in dtypes}
            one = state._replace(**{name: [x] for name, x in old.items()})
            result, one = transform.update([gradient.astype(jnp.float32)], one)
            results += result
            for name, x in old.items():
                (new,) = getattr(one, name)
                after[name].append(keep(name, jnp.where(finite, new, x)))
        trees = {
            name: jax.tree.unflatten(jax.tree.structure(getattr(state, name)), leaves)
            for name, leaves in after.items()
        }
        return jax.tree.unflatten(structure, results), one._replace(**trees)

    return optax.GradientTransformationExtraArgs(init, update)
