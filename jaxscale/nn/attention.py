"""Attention with grouped key/value heads, as functions of arrays.

Legend: B batch, T tokens, S keys, N query heads, K key/value heads, H head dim.
"""

import dataclasses
import math
from typing import Literal, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxscale.nn.embeddings import RopeConfig
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
    cu_seqlens_k: Int[Array, "B seqs_plus_1"] | None = None,
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
        cu_seqlens_k: The same of the keys, where a sequence has more or fewer of them
            than queries (a chunk of a prompt and what lies before it); None takes
            `cu_seqlens`.
        causal: A query sees no later key; the last query of a sequence sees its last
            key.
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
        ValueError: N is no multiple of K, `cu_seqlens_k` comes without `cu_seqlens`, or
            packed queries and keys differ in number and it is missing.
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
    if dense and cu_seqlens_k is not None:
        raise ValueError(
            "cu_seqlens None, but cu_seqlens_k is given; packed keys need the "
            "boundaries of their queries too"
        )
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
    out = varlen_attention(
        q,
        k,
        v,
        cu_seqlens,
        cu_seqlens_k,
        causal=causal,
        window=window,
        scale=scale,
        softcap=softcap,
        implementation=implementation,
    )
    return cast(Array, out)  # a tuple only with return_lse


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
    qk_norm_eps: float | None = None
    """RMS norm of the queries and keys of each head, before they are rotated, with this
    added to the mean square; None has no norm (Qwen3, arXiv 2505.09388)."""

    def __post_init__(self) -> None:
        for name in ("num_heads", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} must be positive")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} must be a multiple of "
                f"num_kv_heads {self.num_kv_heads}"
            )

    @property
    def limits(self) -> Window:
        """(left, right): how many keys a query sees on each side of its own."""
        if self.window is None:
            return (None, None)
        return (self.window - 1, 0) if self.causal else (self.window, self.window)
