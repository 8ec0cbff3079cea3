"""The state of attention: all that it needs besides queries, keys and values.

A form of `AttentionState` says where the keys and values of a sequence lie: in its own
row, in a packed row, or in a cache. One loop over layers runs all of them, for
training, encoding, prefill and decoding. A state is a pytree, so it goes through
`jax.jit`, `jax.lax.scan` and `jax.shard_map` with the tokens that it belongs to.

Legend: B batch, T tokens, S slots, N query heads, K key/value heads, H head dim,
D model, P entries of the table of relative positions, L layers.
"""

import abc
import dataclasses
import typing
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.tree_util import register_dataclass
from jaxtyping import Array, Bool, Float, Int

from jaxscale.nn.attention import AttentionConfig, attention
from jaxscale.nn.cache import CACHE_AXES, KVCache, write_cache
from jaxscale.nn.packing import check_cu_seqlens_of_rows, positions
from jaxscale.sharding.operations import per_shard
from jaxscale.sharding.rules import REPLICATED, AxisRules
from pallas_kernels.attention import attention_mask, masked_attention
from pallas_kernels.varlen_attention import segment_ids_from_cu_seqlens


Q_AXES = ("batch", None, "act_heads", None)
"""Logical axes of queries and of what attention gives, [B, T, N, H]."""
KV_AXES = ("batch", None, "act_kv_heads", None)
"""Logical axes of keys and values, [B, T, K, H]."""


# Transformations rebuild these classes around shardings and shapes, so that their
# fields cannot be checked as arrays.
@typing.no_type_check
@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionState(abc.ABC):
    """Positions, and where keys and values lie, of the tokens that attend.

    A form is a frozen dataclass registered as a pytree. The metadata of a field with an
    array hold ``axes``, its logical axes, and ``carried=True`` where `attend` changes
    it: such a field goes from layer to layer, all others are the same for each.
    """

    positions: Int[Array, "B T"] = dataclasses.field(metadata={"axes": ("batch", None)})
    """Position of each token in its sequence."""
    relative: Float[Array, "P D"] | None = dataclasses.field(
        default=None, metadata={"axes": (None, None)}
    )
    """The table of relative positions, for layers that attend to it."""
    variant: AttentionConfig | None = dataclasses.field(
        default=None, metadata={"static": True}
    )
    """Window and rotary embedding of the layer at hand; None: those it was made with.
    """

    @abc.abstractmethod
    def attend(
        self,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K H"],
        config: AttentionConfig,
        implementation: str | None = None,
    ) -> tuple[Float[Array, "B T N H"], Self]:
        """Attended values, and the state with the new keys and values.

        Runs on the rows and heads of one device, where this state holds their part.

        Args:
            q: Queries, rotated.
            k: Keys of the same tokens, rotated.
            v: Values of the same tokens.
            config: Shape and variant of the layer.
            implementation: Passed to `attention`.
        """

    def sequence_lengths(self) -> Int[Array, "B T"]:
        """The length of the sequence of each token, by its last position.

        Runs on the rows of one device, as `attend` does.

        Raises:
            ValueError: sequences of this form may still grow.
        """
        raise ValueError(
            f"{type(self).__name__} holds sequences that grow, and dynamic rotary "
            "scaling needs their lengths; use whole or packed rows"
        )

    def at(self, layer: Int[Array, ""] | int, variant: AttentionConfig | None) -> Self:
        """The state as the layer of this index and `variant` sees it."""
        del layer
        return dataclasses.replace(self, variant=variant)

    @property
    def carried(self) -> tuple[Array, ...]:
        """The arrays that go from layer to layer."""
        return tuple(getattr(self, name) for name in self._fields("carried"))

    def carrying(self, carried: Sequence[Array]) -> Self:
        """The state with other arrays in the place of `carried`."""
        names = self._fields("carried")
        return dataclasses.replace(self, **dict(zip(names, carried, strict=True)))

    def per_shard(
        self,
        fn: Callable[..., tuple[Array, Self]],
        in_axes: Sequence[Sequence[str | None]],
        rules: AxisRules,
    ) -> Callable[..., tuple[Array, Self]]:
        """`jaxscale.sharding.per_shard` of ``fn(state, *arrays) -> out, state``.

        Args:
            fn: Function of a device's part of the state and of the arrays; the
                result has the axes of queries.
            in_axes: Logical axes of the arrays.
            rules: The table of the recipe.
        """
        leaves, tree = jax.tree.flatten(self)
        axes = self._fields("axes")
        kept = [axes[n] for n in axes if getattr(self, n) is not None]

        def local(*args: Array) -> tuple[Array, ...]:
            state = tree.unflatten(args[: len(leaves)])
            out, state = fn(state, *args[len(leaves) :])
            return out, *state.carried

        mapped = per_shard(
            local,
            [*kept, *in_axes],
            [Q_AXES, *(axes[name] for name in self._fields("carried"))],
            rules,
        )

        def run(*arrays: Array) -> tuple[Array, Self]:
            out, *carried = mapped(*leaves, *arrays)
            return out, self.carrying(carried)

        return run

    def _fields(self, key: str) -> dict[str, Any]:
        """The metadata of the fields under `key`, by the name of the field."""
        fields = dataclasses.fields(self)
        return {f.name: f.metadata[key] for f in fields if key in f.metadata}


@typing.no_type_check
@register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Whole(AttentionState):
    """Rows that hold one sequence each, without padding that a token could see."""

    @typing.override
    def attend(
        self,
        q: Array,
        k: Array,
        v: Array,
        config: AttentionConfig,
        implementation: str | None = None,
    ) -> tuple[Array, Self]:
        return _attention(q, k, v, config, implementation), self

    @typing.override
    def sequence_lengths(self) -> Array:
        longest = self.positions.max(axis=1, keepdims=True) + 1
        return jnp.broadcast_to(longest, self.positions.shape)


@typing.no_type_check
@register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Packed(AttentionState):
    """Rows in which sequences lie one after another and see themselves alone."""

    cu_seqlens: Int[Array, "B seqs_plus_1"] = dataclasses.field(
        metadata={"axes": ("batch", None)}
    )
    """Boundaries: sequence `i` of row `b` is the tokens from ``cu_seqlens[b, i]`` to
    ``cu_seqlens[b, i + 1]``; what lies past the last one is padding."""

    @typing.override
    def attend(
        self,
        q: Array,
        k: Array,
        v: Array,
        config: AttentionConfig,
        implementation: str | None = None,
    ) -> tuple[Array, Self]:
        out = _attention(q, k, v, config, implementation, self.cu_seqlens)
        return out, self

    @typing.override
    def sequence_lengths(self) -> Array:
        def one_row(cu_seqlens: Array, positions: Array) -> Array:
            ids = segment_ids_from_cu_seqlens(cu_seqlens, positions.shape[0])  # [T]
            zeros = jnp.zeros(cu_seqlens.shape, positions.dtype)
            return zeros.at[ids].max(positions + 1)[ids]

        return jax.vmap(one_row)(self.cu_seqlens, self.positions)

    def in_sequence_with(
        self, marked: Bool[Array, "B T"], rules: AxisRules = REPLICATED
    ) -> Bool[Array, "B T"]:
        """Mark the tokens of sequences that hold a `marked` token."""

        def one_row(cu_seqlens: Array, marked: Array) -> Array:
            # Padding has the id -1, the last of as many entries as there are bounds.
            ids = segment_ids_from_cu_seqlens(cu_seqlens, marked.shape[0])  # [T]
            return jnp.zeros(cu_seqlens.shape, bool).at[ids].max(marked)[ids]

        def local(cu_seqlens: Array, marked: Array) -> tuple[Array]:
            return (jax.vmap(one_row)(cu_seqlens, marked),)

        rows = ("batch", None)
        mapped = per_shard(local, [rows, rows], [rows], rules)
        return mapped(self.cu_seqlens, marked)[0]


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
            return _attention(q, k, v, config, implementation), after
        keys, values = (
            jax.lax.dynamic_index_in_dim(cache, self.layer, keepdims=False)
            for cache in after.carried
        )  # [B, S, K, H]
        window = config.limits
        mask = attention_mask(self.positions, keys.shape[1], causal=True, window=window)
        scale, softcap = config.logits_scale, config.softcap
        out = masked_attention(q, keys, values, mask, scale=scale, softcap=softcap)
        return out, after


def attention_state(
    shape: tuple[int, ...],
    *,
    cu_seqlens: Int[Array, "B seqs_plus_1"] | None = None,
    positions: Int[Array, "B T"] | None = None,
    relative: Float[Array, "P D"] | None = None,
    rules: AxisRules = REPLICATED,
) -> Whole | Packed:
    """The state of whole rows, or of packed ones where `cu_seqlens` is given.

    Args:
        shape: (B, T), rows and tokens of a row.
        cu_seqlens: Boundaries of packed sequences, as for `Packed`.
        positions: Position of each token in its sequence; counted from the start of the
            row or of the packed sequence if None.
        relative: The table of relative positions.
        rules: The table of the recipe.

    Raises:
        ValueError: `cu_seqlens` has not B rows; or its values, where
            they are not traced, do not start at 0, decrease or pass T.

    Example:
        >>> attention_state((1, 3), cu_seqlens=jnp.array([[0, 1, 3]]))
        ... # doctest: +ELLIPSIS
        Packed(positions=Array([[0, 0, 1]], dtype=int32), ...)
    """
    if cu_seqlens is not None:
        check_cu_seqlens_of_rows(cu_seqlens, shape)
    if positions is None:
        positions = token_positions(shape, cu_seqlens, rules)
    if cu_seqlens is None:
        return Whole(positions=positions, relative=relative)
    return Packed(positions=positions, cu_seqlens=cu_seqlens, relative=relative)


def token_positions(
    shape: tuple[int, ...],
    cu_seqlens: Int[Array, "B seqs_plus_1"] | None,
    rules: AxisRules,
) -> Int[Array, "B T"]:
    """Positions counted from the start of each row or packed sequence."""
    num_tokens = shape[1]
    if cu_seqlens is None:
        return jnp.broadcast_to(jnp.arange(num_tokens), shape)

    def local(cu_seqlens: Array) -> tuple[Array]:
        return (positions(cu_seqlens, num_tokens),)

    axes = [("batch", None)]
    return per_shard(local, axes, axes, rules)(cu_seqlens)[0]


def _attention(
    q: Array,
    k: Array,
    v: Array,
    config: AttentionConfig,
    implementation: str | None,
    cu_seqlens: Array | None = None,
) -> Array:
    return attention(
        q,
        k,
        v,
        cu_seqlens=cu_seqlens,
        causal=config.causal,
        window=config.limits,
        scale=config.logits_scale,
        softcap=config.softcap,
        implementation=implementation,
    )
