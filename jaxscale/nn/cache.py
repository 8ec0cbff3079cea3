"""Keys and values of the tokens seen so far, and the state of tokens that follow them.

Legend: B batch, T tokens, S slots, K key/value heads, H head dim, L layers.
"""

import dataclasses
import typing
from typing import Self

import jax
import jax.numpy as jnp
from jax.tree_util import register_dataclass
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxscale.nn.attention import AttentionConfig
from jaxscale.nn.self_attention import AttentionState
from jaxscale.sharding.operations import constrain
from jaxscale.sharding.rules import REPLICATED, AxisRules
from pallas_kernels.attention import attention, attention_mask, masked_attention


CACHE_AXES = (None, "batch", None, "act_kv_heads", None)
"""Logical axes of the keys and of the values of a `KVCache`."""


# Transformations rebuild the class around shardings and shapes, so that its fields
# cannot be checked as arrays.
@register_dataclass
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


@typing.no_type_check
@register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Cached(AttentionState):
    """New tokens of rows whose earlier keys and values lie in a `KVCache`.

    The positions are the slots that the new tokens take, consecutive in each row.
    """

    k: Float[Array, "L B S K H"] = dataclasses.field(
        metadata={"axes": CACHE_AXES, "carried": True}
    )
    """Keys of all layers, rotated."""
    v: Float[Array, "L B S K H"] = dataclasses.field(
        metadata={"axes": CACHE_AXES, "carried": True}
    )
    """Values of all layers."""
    layer: Int[Array, ""] = dataclasses.field(metadata={"axes": ()})
    """Number of the layer at hand in the cache."""
    is_empty: bool = dataclasses.field(default=False, metadata={"static": True})
    """Promise that nothing precedes the new tokens: attention then reads them alone,
    through the kernels for whole rows, and not the slots."""

    @classmethod
    def of(cls, cache: KVCache, num_tokens: int, *, is_empty: bool = False) -> Self:
        """The state of `num_tokens` new tokens in each row of `cache`."""
        slots = cache.lengths[:, None] + jnp.arange(num_tokens)  # [B, T]
        first = jnp.zeros((), jnp.int32)
        return cls(
            positions=slots, k=cache.k, v=cache.v, layer=first, is_empty=is_empty
        )

    @typing.override
    def sequence_lengths(self) -> Array:
        # Keys stay as they were rotated, so the frequencies must never change: those
        # of the longest sequence that has a place here.
        return jnp.full_like(self.positions, self.k.shape[2])

    @typing.override
    def at(self, layer: Array | int, variant: AttentionConfig | None) -> Self:
        layer = jnp.asarray(layer, jnp.int32)
        return dataclasses.replace(self, variant=variant, layer=layer)

    @typing.override
    def attend(
        self,
        q: Array,
        k: Array,
        v: Array,
        config: AttentionConfig,
        implementation: str | None = None,
    ) -> tuple[Array, Self]:
        if not config.causal:
            raise ValueError("causal False: only causal attention can be continued")
        after = self.carrying(
            [
                write_cache(cache, new, self.layer, self.positions)
                for cache, new in ((self.k, k), (self.v, v))
            ]
        )
        if self.is_empty:
            options = {**config.options, "implementation": implementation}
            return attention(q, k, v, **options), after
        keys, values = (
            jax.lax.dynamic_index_in_dim(cache, self.layer, keepdims=False)
            for cache in after.carried
        )  # [B, S, K, H]
        window = config.limits
        mask = attention_mask(self.positions, keys.shape[1], causal=True, window=window)
        scale, softcap = config.logits_scale, config.softcap
        out = masked_attention(q, keys, values, mask, scale=scale, softcap=softcap)
        return out, after


def write_cache(
    cache: Float[Array, "L B S K H"],
    new: Float[Array, "B T K H"],
    layer: Int[Array, ""],
    positions: Int[Array, "B T"],
) -> Float[Array, "L B S K H"]:
    """`cache` with the keys or values `new` of one layer put at their `positions`.

    Positions past the last slot are dropped.
    """
    rows = jnp.arange(new.shape[0])[:, None]  # [B, 1], beside positions [B, T]
    return cache.at[layer, rows, positions].set(new.astype(cache.dtype), mode="drop")
