"""Attention with grouped key/value heads, as functions of arrays.

Legend: B batch, T tokens, S keys, N query heads, K key/value heads, H head dim.
"""

import dataclasses
import math
from typing import Any, cast

from jaxtyping import Array, Float, Int

from jaxscale.keywords import explained
from jaxscale.nn.embeddings import RopeConfig
from pallas_kernels import attention as kernels
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
    """``softmax(mask(softcap(scale * q k^T))) v`` with N / K query heads per key head.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        cu_seqlens: Sequence packing: sequence `i` of batch element `b` is the tokens
            from ``cu_seqlens[b, i]`` to ``cu_seqlens[b, i + 1]`` and attends only to
            itself; tokens past the last sequence give zeros. None: each batch element
            is one sequence.
        cu_seqlens_k: The same for the keys, if a sequence has more or fewer keys than
            queries (a chunk of a prompt after its beginning); None takes `cu_seqlens`.
        causal: A query attends to no later key; the last query of a sequence attends to
            its last key.
        window: (left, right): a query attends to at most so many keys before and after
            its own position; None is no limit.
        scale: Factor of the logits, ``1 / sqrt(H)`` if None.
        softcap: Logits become ``softcap * tanh(logits / softcap)``.
        implementation: Name of an implementation of `pallas_kernels.varlen_attention`
            with `cu_seqlens`, otherwise of `pallas_kernels.attention`; None picks one.

    Returns:
        The attended values in the type of `q`.

    Raises:
        ValueError: shapes do not fit, N is no multiple of K, `cu_seqlens_k` comes
            without `cu_seqlens`, or is missing although packed queries and keys differ
            in number.
        Unsupported: the named implementation does not support the arguments.

    Example:
        >>> import jax.numpy as jnp
        >>> q, kv = jnp.ones((1, 3, 4, 8)), jnp.ones((1, 3, 2, 8))
        >>> attention(q, kv, kv, causal=True).shape
        (1, 3, 4, 8)

    References:
        GQA, arXiv 2305.13245.
    """
    _check_shapes(q, k, v, cu_seqlens=cu_seqlens, cu_seqlens_k=cu_seqlens_k)
    options: Any = {
        "causal": causal,
        "window": window,
        "scale": scale,
        "softcap": softcap,
        "implementation": implementation,
    }
    if cu_seqlens is not None:
        out = varlen_attention(q, k, v, cu_seqlens, cu_seqlens_k, **options)
        return cast(Array, out)  # a tuple only with return_lse
    if cu_seqlens_k is not None:
        raise ValueError(
            "cu_seqlens None, but cu_seqlens_k is given; packed keys need the "
            "boundaries of their queries too"
        )
    return kernels.attention(q, k, v, **options)


def _check_shapes(q: Array, k: Array, v: Array, **bounds: Array | None) -> None:
    for name, x, axes in (("q", q, "T, N"), ("k", k, "S, K"), ("v", v, "S, K")):
        if x.ndim != 4:
            raise ValueError(
                f"{name} of shape {x.shape} has {x.ndim} dimensions, expected "
                f"[B, {axes}, H]; add the missing ones, as in {name}[None] for one row"
            )
    if v.shape != k.shape:
        raise ValueError(f"v has the shape {v.shape}, expected that of k, {k.shape}")
    if (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]):
        raise ValueError(
            f"q of shape {q.shape} and k of shape {k.shape} must have the same rows B "
            "and features of a head H; split the heads as [B, T, N, H]"
        )
    if q.shape[2] % k.shape[2]:
        raise ValueError(
            f"q has {q.shape[2]} heads, no multiple of the {k.shape[2]} of k and v"
        )
    for name, x in bounds.items():
        if x is not None and (x.ndim != 2 or x.shape[0] != q.shape[0]):
            raise ValueError(
                f"{name} of shape {x.shape}, expected [B, sequences + 1] with "
                f"B={q.shape[0]}: boundaries for each row; of a single row pass "
                f"{name}[None]"
            )


@explained
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
    use_key_bias: bool = True
    """With `use_bias`: the key projection has a bias too, also for relative positions
    (not in DeBERTa v1)."""
    use_out_bias: bool = False
    """Bias in the output projection."""
    rope: RopeConfig | None = None
    """Rotary embedding of queries and keys."""
    window: int | None = None
    """Sliding window. Causal: a token attends to this many tokens, itself included.
    Otherwise: to itself and this many tokens on each side."""
    softcap: float | None = None
    """Logits become ``softcap * tanh(logits / softcap)``."""
    query_pre_attn_scalar: int | None = None
    """Logits are divided by the root of this; None takes `head_dim` (Gemma 2)."""
    causal: bool = True
    """Causal mask: no token attends to a later one."""
    qk_norm_eps: float | None = None
    """Epsilon of an RMS norm of each head's queries and keys, before the rotary
    embedding; None is no norm (Qwen3, arXiv 2505.09388)."""
    qk_norm_1p: bool = False
    """The scale of that norm is one plus its parameter (Gemma 3)."""

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
    def logits_scale(self) -> float:
        """Factor of the logits."""
        return 1 / math.sqrt(self.query_pre_attn_scalar or self.head_dim)

    @property
    def limits(self) -> Window:
        """(left, right): how many keys a query attends to on each side of its own."""
        if self.window is None:
            return (None, None)
        return (self.window - 1, 0) if self.causal else (self.window, self.window)

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of attention for this layer."""
        return {
            "causal": self.causal,
            "window": self.limits,
            "scale": self.logits_scale,
            "softcap": self.softcap,
        }
