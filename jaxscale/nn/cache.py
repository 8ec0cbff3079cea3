"""Keys and values of the tokens seen so far.

Legend: B batch, T tokens, S slots, K key/value heads, H head dim, L layers.
"""

import dataclasses
import typing

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxscale.sharding.operations import constrain
from jaxscale.sharding.rules import REPLICATED, AxisRules


CACHE_AXES = (None, "batch", None, "act_kv_heads", None)
"""Logical axes of the keys and of the values of a `KVCache`."""


# Transformations rebuild the class around shardings and shapes, so that its fields
# cannot be checked as arrays.
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
@typing.no_type_check
class KVCache:
    """A contiguous cache: slot `s` of row `b` holds token `s` of sequence `b`.

    Example:
        >>> cache = KVCache.zeros(
        ...     num_layers=2, batch=3, capacity=16, num_kv_heads=4, head_dim=8
        ... )
        >>> cache.k.shape, cache.capacity
        ((2, 3, 16, 4, 8), 16)
    """

    k: Float[Array, "L B S K H"]
    """Keys, rotated."""
    v: Float[Array, "L B S K H"]
    """Values."""
    lengths: Int[Array, "B"]
    """Tokens in each row; slots from there on are free."""

    @classmethod
    def zeros(
        cls,
        *,
        num_layers: int,
        batch: int,
        capacity: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: DTypeLike = jnp.float32,
        rules: AxisRules = REPLICATED,
    ) -> "KVCache":
        """An empty cache of `capacity` tokens a row."""
        shape = (num_layers, batch, capacity, num_kv_heads, head_dim)
        return cls(
            k=constrain(jnp.zeros(shape, dtype), CACHE_AXES, rules),
            v=constrain(jnp.zeros(shape, dtype), CACHE_AXES, rules),
            lengths=constrain(jnp.zeros(batch, jnp.int32), ("batch",), rules),
        )

    @property
    def capacity(self) -> int:
        """Slots of a row, in tokens."""
        return self.k.shape[2]


def write_cache(
    cache: Float[Array, "L B S K H"],
    new: Float[Array, "B T K H"],
    layer: Int[Array, ""],
    positions: Int[Array, "B T"],
) -> Float[Array, "L B S K H"]:
    """`cache` with the keys or values `new` of one layer put at their `positions`.

    Positions past the last slot are dropped.
    """
    rows = jnp.arange(new.shape[0])[:, None]
    return cache.at[layer, rows, positions].set(new.astype(cache.dtype), mode="drop")
