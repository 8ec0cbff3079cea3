"""Attention with grouped key/value heads, on padded, packed and cached tokens.

Legend: B batch, T tokens, S keys, N query heads, K key/value heads, H head dim,
D model, L layers.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn.initializers import Initializer
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jaxscale.nn.cache import CACHE_AXES, write_cache
from jaxscale.nn.embeddings import NORMAL_INIT, RopeConfig, rotary
from jaxscale.nn.linear import ColumnParallelLinear, RowParallelLinear
from jaxscale.sharding.operations import per_shard, reshape
from jaxscale.sharding.rules import REPLICATED, AxisRules
from jaxscale.sharding.tensor_parallel import TensorParallel
from pallas_kernels.dispatch import Unsupported
from pallas_kernels.mosaic import DeviceSpec
from pallas_kernels.varlen_attention import varlen_attention


type Window = tuple[int | None, int | None]


def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    *,
    cu_seqlens: Int[Array, "B seqs_plus_1"] | None = None,
    causal: bool = False,
    window: Window = (None, None),
    scale: float | None = None,
    softcap: float | None = None,
    implementation: str | None = None,
) -> Float[Array, "B T N H"]:
    """``softmax(mask(softcap(scale * q k^T))) v`` with N / K query heads a key head.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        cu_seqlens: Packed rows: sequence `i` of row `b` is the tokens from
            ``cu_seqlens[b, i]`` to ``cu_seqlens[b, i + 1]`` and attends only to itself;
            tokens past the last sequence give zeros. None: a row is one sequence.
        causal: A query sees no later key; the last query sees the last key.
        window: (left, right): a query sees at most so many keys before and after its
            own position; None is no limit.
        scale: Factor of the logits, ``1 / sqrt(H)`` if None.
        softcap: Logits become ``softcap * tanh(logits / softcap)``.
        implementation: None picks one. For a row that is one sequence, ``"cudnn"`` is
            that of `jax.nn.dot_product_attention` and ``"xla"`` `masked_attention`;
            any other name, and every name with `cu_seqlens`, is an implementation of
            `pallas_kernels.varlen_attention`.

    Returns:
        The attended values in the type of `q`.

    Raises:
        ValueError: N is no multiple of K, or packed queries and keys differ in number.
        Unsupported: the named implementation cannot do it.

    Example:
        >>> q, kv = jnp.ones((1, 3, 4, 8)), jnp.ones((1, 3, 2, 8))
        >>> attention(q, kv, kv, causal=True).shape
        (1, 3, 4, 8)

    References:
        GQA, arXiv 2305.13245.
    """
    (_, num_q, n, h), (_, num_k, kv_heads, _) = q.shape, k.shape
    if n % kv_heads:
        raise ValueError(f"q has {n} heads, no multiple of the {kv_heads} of k and v")
    scale = 1 / math.sqrt(h) if scale is None else scale
    dense = cu_seqlens is None
    if dense and implementation in (None, "cudnn", "xla"):
        unlimited = causal or window == (None, None)
        plain = softcap is None and num_q == num_k and unlimited
        chosen = _dense_implementation(implementation, q, plain)
        if chosen == "cudnn":
            return jax.nn.dot_product_attention(
                q,
                k,
                v,
                scale=scale,
                is_causal=causal,
                local_window_size=None if window[0] is None else (window[0], 0),
                implementation="cudnn",
            )
        # Not JAX's own XLA implementation: strict promotion forbids it in bf16.
        positions = jnp.arange(num_q)[None] + (num_k - num_q)
        mask = attention_mask(positions, num_k, causal=causal, window=window)
        return masked_attention(q, k, v, mask, scale=scale, softcap=softcap)
    if num_q != num_k:
        raise ValueError(
            f"q has {num_q} tokens a row and k has {num_k}; packed rows and kernels "
            "need self-attention, where they are equal"
        )
    if dense:
        cu_seqlens = jnp.broadcast_to(jnp.array([0, num_q]), (q.shape[0], 2))

    def one_row(
        q: Float[Array, "T N H"],
        k: Float[Array, "T K H"],
        v: Float[Array, "T K H"],
        cu_seqlens: Int[Array, "seqs_plus_1"],
    ) -> Float[Array, "T N H"]:
        out = varlen_attention(
            q,
            k,
            v,
            cu_seqlens,
            causal=causal,
            window=window,
            scale=scale,
            softcap=softcap,
            implementation=implementation,
        )
        return cast(Array, out)  # a tuple only with return_lse

    return jax.vmap(one_row)(q, k, v, cu_seqlens)


def attention_mask(
    q_positions: Int[Array, "B T"],
    num_keys: int,
    *,
    causal: bool,
    window: Window = (None, None),
) -> Bool[Array, "B T S"]:
    """Which of the keys 0, 1, ... each query sees.

    Example:
        >>> attention_mask(jnp.array([[2]]), 4, causal=True, window=(1, 0))
        Array([[[False,  True,  True, False]]], dtype=bool)
    """
    distance = q_positions[..., None] - jnp.arange(num_keys)  # [B, T, S]
    left, right = window
    right = 0 if causal else right
    mask = jnp.ones(distance.shape, bool)
    if left is not None:
        mask &= distance <= left
    if right is not None:
        mask &= -distance <= right
    return mask


def masked_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    mask: Bool[Array, "_B T S"],
    *,
    scale: float,
    softcap: float | None = None,
) -> Float[Array, "B T N H"]:
    """Attention under any mask, with logits and softmax in fp32.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        mask: Which keys each query sees, at least one; the first axis may be 1.
        scale: Factor of the logits.
        softcap: Logits become ``softcap * tanh(logits / softcap)``.
    """
    b, t, n, h = q.shape
    q = q.reshape(b, t, k.shape[2], -1, h)  # [B, T, K, G, H]
    logits = jnp.einsum("btkgh,bskh->bkgts", q, k, preferred_element_type=jnp.float32)
    logits = logits * scale
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    logits = jnp.where(mask[:, None, None], logits, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(logits, axis=-1).astype(v.dtype)
    return jnp.einsum("bkgts,bskh->btkgh", weights, v).reshape(b, t, n, h)


def _dense_implementation(
    name: str | None, q: Float[Array, "B T N H"], plain: bool
) -> Literal["cudnn", "xla"]:
    """`name`, or if None cuDNN's flash attention where it can do it, else XLA."""
    types = (jnp.bfloat16, jnp.float16)
    supported = plain and q.dtype in types and q.shape[-1] % 8 == 0
    if name == "cudnn" and not supported:
        raise Unsupported(
            "cudnn attention needs bf16 or fp16, a head dim divisible by 8, as many "
            "queries as keys, no softcap, and a window only if causal, got "
            f"{q.dtype}, head dim {q.shape[-1]}; use implementation=None to fall back "
            "to xla"
        )
    if name is not None:
        return "cudnn" if name == "cudnn" else "xla"
    device = DeviceSpec.current()
    if not supported or device is None:
        return "xla"
    widest = 256 if device.compute_capability >= (9, 0) else 128
    return "cudnn" if q.shape[-1] <= widest else "xla"


_Q_AXES = ("batch", None, "act_heads", None)
_KV_AXES = ("batch", None, "act_kv_heads", None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Shape and variant of an attention layer.

    Example:
        >>> AttentionConfig(num_heads=8, num_kv_heads=2, head_dim=64).window is None
        True
    """

    num_heads: int
    """Query heads."""
    num_kv_heads: int
    """Key and value heads."""
    head_dim: int
    """Features of a head."""
    use_bias: bool = False
    """Bias in the query, key and value projections."""
    use_out_bias: bool = False
    """Bias in the output projection."""
    rope: RopeConfig | None = None
    """Rotary embedding of queries and keys."""
    window: int | None = None
    """Causal: a token attends to this many tokens, itself included. Otherwise: to
    itself and this many tokens on each side."""
    softcap: float | None = None
    """Logits become ``softcap * tanh(logits / softcap)``."""
    causal: bool = True
    """No token sees a later one."""

    def __post_init__(self) -> None:
        for name in ("num_heads", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} must be positive")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} must be a multiple of "
                f"num_kv_heads {self.num_kv_heads}"
            )


class Attention(nnx.Module):
    """Self-attention with its four projections.

    The tokens of the input are gathered, heads are split over the tensor axis, and the
    result leaves split along the tokens (sequence parallelism). A block calls the
    projections `inputs` and `out` itself, since it may share their communication with
    other layers, and `attend` or `attend_cached` between them, which subclasses may
    replace.

    Example:
        >>> config = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8)
        >>> layer = Attention(32, config, rngs=nnx.Rngs(0))
        >>> x, positions = jnp.ones((1, 5, 32)), jnp.arange(5)[None]
        >>> layer(x, positions).shape
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
            tensor_parallel: Who communicates: `jaxscale.sharding.column_parallel`.
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

        def project(heads: int, name: str) -> ColumnParallelLinear:
            return ColumnParallelLinear(
                d_model,
                heads * config.head_dim,
                kernel_axes=("embed", name),
                out_axes=("batch", None, f"act_{name}"),
                use_bias=config.use_bias,
                **options,
            )

        self.query = project(config.num_heads, "heads")
        self.key = project(config.num_kv_heads, "kv_heads")
        self.value = project(config.num_kv_heads, "kv_heads")
        self.out = RowParallelLinear(
            config.num_heads * config.head_dim,
            d_model,
            kernel_axes=("heads", "embed"),
            out_axes=("batch", "tokens", "act_embed"),
            use_bias=config.use_out_bias,
            kernel_init=out_init,
            **options,
        )

    @property
    def inputs(self) -> tuple[nnx.Module, ...]:
        """The layers that make queries, keys and values."""
        return self.query, self.key, self.value

    def __call__(
        self,
        x: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
        cu_seqlens: Int[Array, "B seqs_plus_1"] | None = None,
        *,
        config: AttentionConfig | None = None,
        shared: Any = None,
    ) -> Float[Array, "B T D"]:
        """Attend among the tokens of `x`, whole rows or packed sequences.

        Args:
            x: Normalized activations.
            positions: Position of each token in its sequence.
            cu_seqlens: Boundaries of packed sequences, as for `attention`.
            config: Window and rotary embedding in the place of the layer's own, for
                stacks whose layers differ in them; the shapes are the same.
            shared: What all layers of a model read besides `x`; used by layers that add
                a bias to the scores.
        """
        heads = self.split_heads(ColumnParallelLinear.together(self.inputs, x))
        out = self.attend(heads, positions, cu_seqlens, config=config, shared=shared)
        return self.out(self.join_heads(out))

    def attend(
        self,
        heads: Sequence[Float[Array, "B T _heads H"]],
        positions: Int[Array, "B T"],
        cu_seqlens: Int[Array, "B seqs_plus_1"] | None = None,
        *,
        config: AttentionConfig | None = None,
        shared: Any = None,
    ) -> Float[Array, "B T N H"]:
        """The attended values of queries, keys and values from `split_heads`."""
        del shared
        config = self.config if config is None else config
        packed = () if cu_seqlens is None else (cu_seqlens,)

        def attend(
            q: Array, k: Array, v: Array, positions: Array, *packed: Array
        ) -> tuple[Array]:
            q, k = _rotate(config, q, k, positions)
            return (self._attend(config, q, k, v, *packed),)

        (out,) = per_shard(
            attend,
            [_Q_AXES, _KV_AXES, _KV_AXES, *[("batch", None)] * (1 + len(packed))],
            [_Q_AXES],
            self._head_rules,
        )(*heads, positions, *packed)
        return out

    def decode(
        self,
        x: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
        cache_k: Float[Array, "L B S K H"],
        cache_v: Float[Array, "L B S K H"],
        layer: Int[Array, ""],
        *,
        cache_is_empty: bool = False,
    ) -> tuple[
        Float[Array, "B T D"],
        Float[Array, "L B S K H"],
        Float[Array, "L B S K H"],
    ]:
        """Attend to the cache and to `x`, whose keys and values are added to it.

        Args:
            x: Normalized activations of the new tokens.
            positions: Slots of the new tokens, consecutive in each row.
            cache_k: Keys of all layers.
            cache_v: Values of all layers.
            layer: Which layer of the cache is this one's.
            cache_is_empty: Promise that nothing precedes `x`: attention then reads
                `x` alone and uses the kernels for whole rows.

        Returns:
            The output and the two updated caches.

        Raises:
            ValueError: the attention is not causal, so that old tokens would have to
                see the new ones.
        """
        heads = self.split_heads(ColumnParallelLinear.together(self.inputs, x))
        out, cache_k, cache_v = self.attend_cached(
            heads, positions, cache_k, cache_v, layer, cache_is_empty=cache_is_empty
        )
        return self.out(self.join_heads(out)), cache_k, cache_v

    def attend_cached(
        self,
        heads: Sequence[Float[Array, "B T _heads H"]],
        positions: Int[Array, "B T"],
        cache_k: Float[Array, "L B S K H"],
        cache_v: Float[Array, "L B S K H"],
        layer: Int[Array, ""],
        *,
        cache_is_empty: bool = False,
    ) -> tuple[
        Float[Array, "B T N H"],
        Float[Array, "L B S K H"],
        Float[Array, "L B S K H"],
    ]:
        """As `attend`, with the cache and the other arguments of `decode`."""
        config = self.config
        if not config.causal:
            raise ValueError("causal False: only causal attention can be continued")

        def attend(
            q: Array,
            k: Array,
            v: Array,
            positions: Array,
            cache_k: Array,
            cache_v: Array,
            layer: Array,
        ) -> tuple[Array, Array, Array]:
            q, k = _rotate(config, q, k, positions)
            cache_k = write_cache(cache_k, k, layer, positions)
            cache_v = write_cache(cache_v, v, layer, positions)
            if cache_is_empty:
                return self._attend(config, q, k, v), cache_k, cache_v
            mask = attention_mask(
                positions, cache_k.shape[2], causal=True, window=_window(config)
            )
            out = masked_attention(
                q,
                jax.lax.dynamic_index_in_dim(cache_k, layer, keepdims=False),
                jax.lax.dynamic_index_in_dim(cache_v, layer, keepdims=False),
                mask,
                scale=1 / math.sqrt(config.head_dim),
                softcap=config.softcap,
            )
            return out, cache_k, cache_v

        axes = [_Q_AXES, _KV_AXES, _KV_AXES, ("batch", None)]
        out, cache_k, cache_v = per_shard(
            attend,
            [*axes, CACHE_AXES, CACHE_AXES, ()],
            [_Q_AXES, CACHE_AXES, CACHE_AXES],
            self._head_rules,
        )(*heads, positions, cache_k, cache_v, layer)
        return out, cache_k, cache_v

    def split_heads(
        self, projected: Sequence[Float[Array, "B T _features"]]
    ) -> tuple[Float[Array, "B T _heads H"], ...]:
        """What the layers `inputs` give, with the heads apart."""
        c = self.config
        return tuple(
            reshape(x, (*x.shape[:2], heads, c.head_dim), axes, self.rules)
            for x, heads, axes in zip(
                projected,
                (c.num_heads, c.num_kv_heads, c.num_kv_heads),
                (_Q_AXES, _KV_AXES, _KV_AXES),
                strict=True,
            )
        )

    def join_heads(self, out: Float[Array, "B T N H"]) -> Float[Array, "B T features"]:
        """What `attend` gives, with the heads side by side, as `out` takes it."""
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

    def _attend(
        self,
        config: AttentionConfig,
        q: Array,
        k: Array,
        v: Array,
        cu_seqlens: Array | None = None,
    ) -> Array:
        return attention(
            q,
            k,
            v,
            cu_seqlens=cu_seqlens,
            causal=config.causal,
            window=_window(config),
            softcap=config.softcap,
            implementation=self.implementation,
        )


def _window(config: AttentionConfig) -> Window:
    if config.window is None:
        return (None, None)
    return (config.window - 1, 0) if config.causal else (config.window, config.window)


def _rotate(
    config: AttentionConfig, q: Array, k: Array, positions: Array
) -> tuple[Array, Array]:
    rope = config.rope
    if rope is None:
        return q, k
    inv_freq = rope.inv_freq(config.head_dim)
    return (
        rotary(q, positions, inv_freq, rope.interleaved),
        rotary(k, positions, inv_freq, rope.interleaved),
    )
