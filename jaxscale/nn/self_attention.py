"""The self-attention layer: projections, heads, and attention in any state.

Legend: B batch, T tokens, N query heads, K key/value heads, H head dim, D model.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.nn.initializers import Initializer
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxscale.nn.attention import AttentionConfig
from jaxscale.nn.embeddings import NORMAL_INIT, rotary
from jaxscale.nn.joined import JoinedLinear, join_inputs
from jaxscale.nn.linear import ColumnParallelLinear, RowParallelLinear
from jaxscale.nn.norms import RMSNorm
from jaxscale.nn.state import KV_AXES, Q_AXES, AttentionState
from jaxscale.sharding.operations import reshape
from jaxscale.sharding.rules import REPLICATED, AxisRules
from jaxscale.sharding.tensor_parallel import TensorParallel


class Attention(nnx.Module):
    """Self-attention with its four projections.

    The tokens of the input are gathered, heads are split over the tensor axis, and the
    result leaves split along the tokens (sequence parallelism). A block may
    call the projections `inputs` and `out` itself, to share their communication with
    other layers, and `attend` between them, which subclasses may replace.

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
        rngs: nnx.Rngs,
    ) -> None:
        """Make the projections.

        Args:
            d_model: Features of the input and the output.
            config: Shape and variant.
            out_init: Initializer of the output projection.
            implementation: Passed to `attention`.
            dtype: Type of the computation.
            param_dtype: Type of the parameters.
            rules: The table of the recipe.
            tensor_parallel: Communication: see `jaxscale.sharding.column_parallel`.
            rngs: Source of the keys.
        """
        self.config = config
        self.implementation = implementation
        self.rules = rules
        options: dict[str, Any] = {
            "dtype": dtype,
            "param_dtype": param_dtype,
            "rules": rules,
            "tensor_parallel": tensor_parallel,
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
        self.joined: JoinedLinear | None = None
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
                rngs=rngs,
            )

        self.query_norm, self.key_norm = head_norm(), head_norm()

    @property
    def inputs(self) -> tuple[nnx.Module, ...]:
        """The layers that make queries, keys and values."""
        if self.joined is not None:
            return (self.joined,)
        return self.query, self.key, self.value

    def join_inputs(self, shards: int) -> None:
        """Make queries, keys and values in one product, as `JoinedLinear` says."""
        join_inputs(self, ("query", "key", "value"), shards)

    def __call__[State: AttentionState](
        self, x: Float[Array, "B T D"], state: State
    ) -> tuple[Float[Array, "B T D"], State]:
        """The layer alone: `inputs`, `attend` and `out` of normalized activations."""
        heads = self.split_heads(ColumnParallelLinear.together(self.inputs, x))
        out, state = self.attend(heads, state)
        return self.out(self.join_heads(out)), state

    def attend[State: AttentionState](
        self, heads: Sequence[Float[Array, "B T _heads H"]], state: State
    ) -> tuple[Float[Array, "B T N H"], State]:
        """The attended values of `heads`, and the state with their keys and values.

        Args:
            heads: Queries, keys and values from `split_heads`.
            state: Positions, and where the keys and values of a sequence lie.
        """
        config = self.config if state.variant is None else state.variant

        def local(state: State, q: Array, k: Array, v: Array) -> tuple[Array, State]:
            q, k = _rotate(config, q, k, state)
            return state.attend(q, k, v, config, self.implementation)

        axes = [Q_AXES, KV_AXES, KV_AXES]
        return state.per_shard(local, axes, self._head_rules)(*heads)

    def split_heads(
        self, projected: Sequence[Float[Array, "B T _features"]]
    ) -> tuple[Float[Array, "B T _heads H"], ...]:
        """Split the outputs of `inputs` into heads, normalized if asked."""
        c = self.config
        if self.joined is not None:
            projected = self.joined.split(*projected)
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
        return reshape(out, (b, t, n * h), ("batch", None, "act_heads"), self.rules)

    @property
    def _head_rules(self) -> AxisRules:
        """The rules by which query heads are split with the key heads that they read.

        One device's query heads beside all key heads would be taken to share those
        evenly, which is right only for a single key head.
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
