"""The self-attention layer, and the state of the tokens that attend in it.

`Attention` has the projections. Besides queries, keys and values it needs an
`AttentionState`, whose class says where the keys and values of a sequence are: in its
own batch element (`Whole`), in a packed row (`Packed`), or in the pages of a KV cache
(`jaxscale.nn.cache`). One loop over layers runs all of them, for training, encoding,
prefill and decode. A state is a pytree, so it passes through `jax.jit`, `jax.lax.scan`
and `jax.shard_map` with the tokens that it belongs to.

Legend: B batch, T tokens, N query heads, K key/value heads, H head dim, D model, P rows
of the table of relative positions.
"""

import abc
import dataclasses
import typing
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.nn.initializers import Initializer
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jaxscale.checks import check_type
from jaxscale.keywords import explain_keywords
from jaxscale.nn.attention import AttentionConfig
from jaxscale.nn.embeddings import NORMAL_INIT, rotary
from jaxscale.nn.joined import JoinedLinear, Parts, join_inputs
from jaxscale.nn.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    project_together,
)
from jaxscale.nn.norms import RMSNorm
from jaxscale.nn.packing import check_cu_seqlens_of_rows, positions
from jaxscale.nn.state import register_state
from jaxscale.nn.tile_sparse_linear import (
    TileSparseLinear,
    can_join_sparse,
    join_sparse,
)
from jaxscale.sharding.decode_all_reduce import ReduceWorkspace
from jaxscale.sharding.fp8 import Fp8
from jaxscale.sharding.manual import manual_names
from jaxscale.sharding.operations import reshape
from jaxscale.sharding.rules import REPLICATED, AxisRules
from jaxscale.sharding.shards import Shards, per_shard
from jaxscale.sharding.tensor_parallel import TensorParallel
from pallas_kernels.attention import attention
from pallas_kernels.varlen_attention import (
    segment_ids_from_cu_seqlens,
    varlen_attention,
)


Q_AXES = ("batch", None, "act_heads", None)
"""Logical axes of queries and of the output of attention, [B, T, N, H]."""
KV_AXES = ("batch", None, "act_kv_heads", None)
"""Logical axes of keys and values, [B, T, K, H]."""
STACKED_AXES = ("batch", None, None, "act_kv_heads", None)
"""Logical axes of keys and values in one array, [B, T, 2, K, H]."""
ROTATED_NAME = "rotated_heads"
"""The name of queries and keys as attention takes them, for policies of
`jax.checkpoint`."""


# Transformations rebuild these classes around shardings and shapes, so that their
# fields cannot be checked as arrays.
@typing.no_type_check
@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionState(abc.ABC):
    """Positions of the tokens, and where their keys and values are.

    A subclass is a frozen dataclass registered as a pytree. The metadata of an array
    field holds ``axes``, its logical axes, and ``carried=True`` if `attend` changes it:
    such a field is passed from layer to layer, all others are the same for every layer.
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
    """Window and rotary embedding of the current layer; None: those it was made with.
    """
    workspace: ReduceWorkspace | None = dataclasses.field(
        default=None, metadata={"carried": True}
    )
    """The workspace of all-reduces in a decode step; None if XLA does them."""

    @abc.abstractmethod
    def attend(
        self,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K H"],
        config: AttentionConfig,
        implementation: str | None = None,
    ) -> tuple[Float[Array, "B T N H"], Self]:
        """Attention output, and the state with the new keys and values.

        Queries and keys are rotated. It runs on one device's shard of batch and heads,
        as does this state.
        """

    def sequence_lengths(self) -> Int[Array, "B T"]:
        """The length of each token's sequence, from its last position.

        It runs on one device's shard of the batch, as `attend` does.

        Raises:
            ValueError: sequences of this state may still grow.
        """
        raise ValueError(
            f"{type(self).__name__} holds sequences that grow, and dynamic rotary "
            "scaling needs their lengths; use whole or packed rows"
        )

    def at(self, layer: Int[Array, ""] | int, variant: AttentionConfig | None) -> Self:
        """The state for the layer of this index and `variant`."""
        del layer
        return dataclasses.replace(self, variant=variant)

    @property
    def carried(self) -> tuple[Any, ...]:
        """The fields that are passed from layer to layer."""
        return tuple(getattr(self, name) for name in self._carried_names)

    def carrying(self, carried: Sequence[Any]) -> Self:
        """The state with the fields of `carried` replaced."""
        names = self._carried_names
        return dataclasses.replace(self, **dict(zip(names, carried, strict=True)))

    @property
    def _carried_names(self) -> list[str]:
        names = self._fields("carried")
        return [name for name in names if getattr(self, name) is not None]

    @property
    def axes(self) -> Self:
        """The state with logical axes in place of its arrays."""
        axes = self._fields("axes")
        given = {n: axes[n] for n in axes if getattr(self, n) is not None}
        return dataclasses.replace(self, **given)

    def _fields(self, key: str) -> dict[str, Any]:
        """The metadata entries under `key`, by field name."""
        fields = dataclasses.fields(self)
        return {f.name: f.metadata[key] for f in fields if key in f.metadata}


@typing.no_type_check
@register_state
@dataclasses.dataclass(frozen=True, kw_only=True)
class Whole(AttentionState):
    """Unpacked sequences, one per batch element, without padding in the middle."""

    @typing.override
    def attend(
        self,
        q: Array,
        k: Array,
        v: Array,
        config: AttentionConfig,
        implementation: str | None = None,
    ) -> tuple[Array, Self]:
        out = attention(q, k, v, **config.options, implementation=implementation)
        return out, self

    @typing.override
    def sequence_lengths(self) -> Array:
        longest = self.positions.max(axis=1, keepdims=True) + 1  # [B, 1]
        return jnp.broadcast_to(longest, self.positions.shape)


@typing.no_type_check
@register_state
@dataclasses.dataclass(frozen=True, kw_only=True)
class Packed(AttentionState):
    """Packed rows: consecutive sequences, each of which attends only to itself."""

    cu_seqlens: Int[Array, "B seqs_plus_1"] = dataclasses.field(
        metadata={"axes": ("batch", None)}
    )
    """Boundaries: sequence `i` of row `b` is the tokens from ``cu_seqlens[b, i]`` to
    ``cu_seqlens[b, i + 1]``; tokens past the last one are padding."""

    @typing.override
    def attend(
        self,
        q: Array,
        k: Array,
        v: Array,
        config: AttentionConfig,
        implementation: str | None = None,
    ) -> tuple[Array, Self]:
        options = {**config.options, "implementation": implementation}
        out = varlen_attention(q, k, v, self.cu_seqlens, **options)
        return typing.cast(Array, out), self  # a tuple only with return_lse

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
        """Mark all tokens of sequences that have a `marked` token."""

        def one_row(cu_seqlens: Array, marked: Array) -> Array:
            # Padding has the id -1, the last of as many entries as there are bounds.
            ids = segment_ids_from_cu_seqlens(cu_seqlens, marked.shape[0])  # [T]
            return jnp.zeros(cu_seqlens.shape, bool).at[ids].max(marked)[ids]

        def local(cu_seqlens: Array, marked: Array) -> tuple[Array]:
            return (jax.vmap(one_row)(cu_seqlens, marked),)

        rows = ("batch", None)
        mapped = per_shard(local, [rows, rows], [rows], rules)
        return mapped(self.cu_seqlens, marked)[0]


def attention_state(
    shape: tuple[int, ...],
    *,
    cu_seqlens: Int[Array, "B seqs_plus_1"] | None = None,
    positions: Int[Array, "B T"] | None = None,
    relative: Float[Array, "P D"] | None = None,
    rules: AxisRules = REPLICATED,
) -> Whole | Packed:
    """The state of unpacked sequences, or of packed ones if `cu_seqlens` is given.

    Args:
        shape: (B, T), batch size and tokens per batch element.
        cu_seqlens: Boundaries of packed sequences, as for `Packed`.
        positions: Position of each token in its sequence; by default counted from the
            start of the batch element or of the packed sequence.
        relative: The table of relative positions.
        rules: The sharding rules.

    Raises:
        ValueError: `cu_seqlens` does not have B rows; or its values, if not traced, do
            not start at 0, decrease or exceed T; or context parallelism is on, which
            only decoders support.

    Example:
        >>> attention_state((1, 3), cu_seqlens=jnp.array([[0, 1, 3]]))
        ... # doctest: +ELLIPSIS
        Packed(positions=Array([[0, 0, 1]], dtype=int32), ...)
    """
    if names := manual_names(rules.context):
        raise ValueError(
            f"the mesh axes {names} share the tokens of a row, which only decoders can "
            "do; set the mesh axis context to 1"
        )
    if not isinstance(shape, tuple) or len(shape) != 2:
        raise ValueError(f"shape {shape}, expected (batch, tokens), as in x.shape[:2]")
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
    """Positions counted from the start of each batch element or packed sequence."""
    num_tokens = shape[1]
    if cu_seqlens is None:
        return jnp.broadcast_to(jnp.arange(num_tokens), shape)

    def local(cu_seqlens: Array) -> tuple[Array]:
        return (positions(cu_seqlens, num_tokens),)

    axes = [("batch", None)]
    return per_shard(local, axes, axes, rules)(cu_seqlens)[0]


class Attention(nnx.Module):
    """Self-attention with its four projections.

    The tokens of the input are all-gathered, heads are split over the tensor axis, and
    the result is reduce-scattered along the tokens (sequence parallelism). A block may
    call the projections `inputs` and `out` itself, to share their communication with
    other layers, and `attend` between them, which subclasses may override.

    Example:
        >>> config = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8)
        >>> layer = Attention(32, config, rngs=nnx.Rngs(0))
        >>> from jaxscale.nn import attention_state
        >>> state = attention_state((1, 5))
        >>> x = jnp.ones((1, 5, 32))
        >>> out, state = layer(x, state)
        >>> out.shape
        (1, 5, 32)
    """

    repeats: int = 1
    """How many key/value heads side by side are one of the checkpoint, for as many
    devices: see `jaxscale.models.serving.prepare`."""

    @explain_keywords
    def __init__(
        self,
        d_model: int,
        config: AttentionConfig,
        *,
        out_init: Initializer = NORMAL_INIT,
        implementation: str | None = None,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        rules: AxisRules = REPLICATED,
        tensor_parallel: TensorParallel = None,
        quantization: Fp8 = None,
        rngs: nnx.Rngs,
    ) -> None:
        """Make the projections.

        Args:
            d_model: Features of the input and the output.
            config: Shape and variant.
            out_init: Initializer of the output projection.
            implementation: Name of an attention implementation, see `Block`; None picks
                one.
            dtype: Type of the computation.
            param_dtype: Type of the parameters.
            rules: The sharding rules.
            tensor_parallel: Communication, see `jaxscale.sharding.column_parallel`.
            quantization: Quantization of the projections, see `jaxscale.nn.Linear`.
            rngs: Source of the random keys.
        """
        remedy = "AttentionConfig(num_heads=..., num_kv_heads=..., head_dim=...) is one"
        check_type("config", config, AttentionConfig, remedy)
        self.config = config
        self.implementation = implementation
        self.rules = rules
        options: dict[str, Any] = {
            "dtype": dtype,
            "param_dtype": param_dtype,
            "rules": rules,
            "tensor_parallel": tensor_parallel,
            "quantization": quantization,
            "rngs": rngs,
        }

        def project(
            heads: int, name: str, use_bias: bool = config.use_bias
        ) -> ColumnParallelLinear:
            return ColumnParallelLinear(
                d_model,
                heads * config.head_dim,
                kernel_axes=("embed", name),
                out_axes=("batch", None, f"act_{name}"),
                use_bias=use_bias,
                **options,
            )

        self.query = project(config.num_heads, "heads")
        key_bias = config.use_bias and config.use_key_bias
        self.key = project(config.num_kv_heads, "kv_heads", key_bias)
        self.value = project(config.num_kv_heads, "kv_heads")
        self.joined: JoinedLinear | TileSparseLinear | None = None
        self.out = RowParallelLinear(
            config.num_heads * config.head_dim,
            d_model,
            kernel_axes=("heads", "embed"),
            out_axes=("batch", "tokens", "act_embed"),
            use_bias=config.use_out_bias,
            kernel_init=out_init,
            **options,
        )

        def head_norm() -> RMSNorm | None:
            if config.qk_norm_eps is None:
                return None
            return RMSNorm(
                config.head_dim,
                eps=config.qk_norm_eps,
                plus_one=config.qk_norm_1p,
                axis=None,  # every head, on whatever device, has the same scale
                dtype=dtype,
                param_dtype=param_dtype,
                rules=rules,
                rngs=rngs,
            )

        self.query_norm, self.key_norm = head_norm(), head_norm()

    @property
    def inputs(self) -> tuple[Any, ...]:
        """The layers that make queries, keys and values."""
        if self.joined is None:
            return self.query, self.key, self.value
        return (self.joined,) if self.query is None else (self.query, self.joined)

    def join_inputs(self, shards: int) -> None:
        """Merge the query, key and value projections, see `JoinedLinear`.

        Pruned ones are merged as `join_sparse` does. Beside a pruned query projection
        alone, those of keys and values are merged.
        """
        join_inputs(self, ("query", "key", "value"), shards)
        if can_join_sparse(self.inputs):
            self.joined = nnx.data(join_sparse(self.inputs))
            for name in ("query", "key", "value"):
                setattr(self, name, None)
        if self.joined is None and isinstance(self.query, TileSparseLinear):
            join_inputs(self, ("key", "value"), shards)

    @explain_keywords
    def __call__(
        self, x: Float[Array, "B T D"], state: Any = None
    ) -> tuple[Float[Array, "B T D"], Any]:
        """Run the layer: `inputs`, `attend` and `out`.

        Args:
            x: Normalized activations.
            state: Positions of the tokens, and the keys and values that they attend to;
                made by `attention_state`. None is one sequence per row.

        Returns:
            The output that the block adds to its residual stream, and the state with
            the keys and values of the tokens.
        """
        if state is None:
            state = attention_state(x.shape[:2], rules=self.rules)
        heads = self.split_heads(project_together(self.inputs, x))
        out, state = self.attend(heads, state)
        return self.out(self.join_heads(out)), state

    def attend[State: AttentionState](
        self, heads: Sequence[Float[Array, "B T _heads H"]], state: State
    ) -> tuple[Float[Array, "B T N H"], State]:
        """Attention output of `heads`, and the state with their keys and values.

        Args:
            heads: Queries, keys and values from `split_heads`.
            state: Positions, and where the keys and values of a sequence are.
        """
        config = self.config if state.variant is None else state.variant

        def local(state: State, q: Array, k: Array, v: Array) -> tuple[Array, State]:
            q, k = _rotate(config, q, k, state)
            if self.query_norm is None:
                # What was rotated is then needed no more, but for a norm's gradients.
                q, k = checkpoint_name((q, k), ROTATED_NAME)
            return state.attend(q, k, v, config, self.implementation)

        return self._over_heads(local, state, heads, (Q_AXES, KV_AXES, KV_AXES))

    def rotate(
        self, heads: Sequence[Float[Array, "B T _heads H"]], state: AttentionState
    ) -> tuple[Float[Array, "B T _heads H"], ...]:
        """Queries, keys and values from `split_heads`, rotated by their positions, of
        which one device has all.
        """
        q, k, v = heads
        config = self.config if state.variant is None else state.variant
        return *_rotate(config, q, k, state), v

    def attend_rotated[State: AttentionState](
        self,
        q: Float[Array, "B T N H"],
        kv: Float[Array, "B T 2 K H"],
        state: State,
    ) -> tuple[Float[Array, "B T N H"], State]:
        """`attend` of heads that are rotated, with keys and values in one array.

        Args:
            q: Queries.
            kv: Keys and values.
            state: A state with a method `attend_stacked`, as `PagedRows` has.
        """
        config = self.config if state.variant is None else state.variant

        def local(state: Any, q: Array, kv: Array) -> tuple[Array, State]:
            return state.attend_stacked(q, kv, config)

        return self._over_heads(local, state, (q, kv), (Q_AXES, STACKED_AXES))

    def _over_heads[State: AttentionState](
        self,
        attend: Callable[..., tuple[Array, State]],
        state: State,
        heads: Sequence[Array],
        axes_of_heads: Sequence[tuple[str | None, ...]],
    ) -> tuple[Array, State]:
        """``attend(state, *heads)`` on each device's own heads."""
        workspace, state = state.workspace, dataclasses.replace(state, workspace=None)

        def local(state: State, *heads: Array) -> tuple[Array, tuple[Array, ...]]:
            out, after = attend(state, *heads)
            return out, after.carried

        args, axes = (state, *heads), (state.axes, *axes_of_heads)
        shards = Shards.of(args, axes, self._head_rules)
        mapped = shards.over(local, [Q_AXES, state.axes.carried])
        out, carried = mapped(*shards.place(args))
        state = dataclasses.replace(state.carrying(carried), workspace=workspace)
        return out, state

    def split_heads(
        self, projected: Sequence[Float[Array, "B T _features"]]
    ) -> tuple[Float[Array, "B T _heads H"], ...]:
        """Split the outputs of `inputs` into heads, normalized if asked."""
        c = self.config
        if self.joined is not None:
            *query, others = projected
            if isinstance(self.joined, Parts):  # which its devices may share
                others = self.joined.split(others)
            else:
                queries, keys = (c.head_dim * n for n in (c.num_heads, c.num_kv_heads))
                others = jnp.split(others, (queries, queries + keys), axis=-1)
            projected = (*query, *others)
        q, k, v = (
            reshape(x, (*x.shape[:2], heads, c.head_dim), axes, self.rules)
            for x, heads, axes in zip(
                projected,
                (c.num_heads, c.num_kv_heads, c.num_kv_heads),
                (Q_AXES, KV_AXES, KV_AXES),
                strict=True,
            )
        )  # [B, T, heads, H] each
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        return q, k, v

    def join_heads(self, out: Float[Array, "B T N H"]) -> Float[Array, "B T features"]:
        """Join the heads that `attend` returns, as `out` takes them."""
        b, t, n, h = out.shape
        shape, axes = (b, t, n * h), ("batch", None, "act_heads")
        return reshape(out, shape, axes, self.rules)  # [B, T, N H]

    @property
    def _head_rules(self) -> AxisRules:
        """The rules that split query heads together with their key/value heads.

        Some query heads next to all key heads would be grouped evenly over them, which
        is right only for a single key head.
        """
        if self.config.num_kv_heads == 1:
            return self.rules
        return dataclasses.replace(self.rules, act_heads=self.rules.act_kv_heads)


def _rotate(
    config: AttentionConfig, q: Array, k: Array, state: AttentionState
) -> tuple[Array, Array]:
    rope, positions = config.rope, state.positions
    if rope is None:
        return q, k
    inv_freq: Any = rope.inv_freq(config.head_dim)
    if rope.is_dynamic:
        inv_freq = rope.dynamic_inv_freq(config.head_dim, state.sequence_lengths())
    return (
        rotary(q, positions, inv_freq, rope.interleaved, rope.attention_factor),
        rotary(k, positions, inv_freq, rope.interleaved, rope.attention_factor),
    )
