"""The public attention of rows that are one sequence each.

Axis letters: B batch, T queries, S keys, N query heads, K key/value heads, H head dim.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
from jaxtyping import Array, Float

from pallas_kernels import tuning
from pallas_kernels.attention import cudnn, xla
from pallas_kernels.attention.config import Problem
from pallas_kernels.dispatch import dispatch
from pallas_kernels.mosaic import DeviceSpec
from pallas_kernels.partition import by_shards
from pallas_kernels.varlen_attention import varlen_attention
from pallas_kernels.varlen_attention.segments import Window


__all__ = ["attention"]


def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    *,
    causal: bool = False,
    window: Window = (None, None),
    scale: float | None = None,
    softcap: float | None = None,
    implementation: str | Sequence[str] | None = None,
) -> Float[Array, "B T N H"]:
    """``softmax(mask(softcap(scale * q k^T))) v`` of rows without padding.

    With ``implementation=None`` cuDNN runs on NVIDIA GPUs. On Hopper GPUs the kernel of
    `pallas_kernels.varlen_attention` runs where it was measured to be faster (heads of
    64 or 128 and rows of at least 2,048 tokens), where cuDNN cannot do it (a softcap,
    more keys than queries, a window on both sides), and where there is no cuDNN, as
    when a program is lowered for a GPU on a machine without one. XLA runs elsewhere and
    stores the scores. Differentiable.

    Args:
        q: [B,T,N,H] queries.
        k: [B,S,K,H] keys; query head n reads key head ``n // (N / K)``.
        v: [B,S,K,H] values.
        causal: a query sees no later key; the last query sees the last key.
        window: (left, right): a query sees at most so many keys before and after its
            own position; None is no limit.
        scale: factor of the scores; None is ``1 / sqrt(H)``.
        softcap: scores become ``softcap * tanh(score / softcap)``; None leaves them.
        implementation: "mosaic_gpu" (Hopper; bfloat16 or float16, H at most 256),
            "cudnn" (bfloat16 or float16, H a multiple of 8, at most 256 on Hopper and
            128 elsewhere), "xla", a sequence of these, or None for the best.

    Returns:
        [B,T,N,H] of the type of q.

    Raises:
        ValueError: N is no multiple of K.
        Unsupported: the implementation named cannot serve the arguments here.
        ExceptionGroup: none of several implementations can.

    Example:
        >>> import jax.numpy as jnp
        >>> q, kv = jnp.ones((1, 3, 4, 8)), jnp.ones((1, 3, 2, 8))
        >>> attention(q, kv, kv, causal=True).shape
        (1, 3, 4, 8)

    References:
        FlashAttention-3, arXiv 2407.08608; GQA, arXiv 2305.13245.
    """
    if not k.shape[2] or q.shape[2] % k.shape[2]:
        raise ValueError(
            f"q has {q.shape[2]} heads, no multiple of the {k.shape[2]} of k and v"
        )
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    device = DeviceSpec.current()

    def local(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        problem = Problem.of(q, k, causal=causal, window=tuple(window), softcap=softcap)
        return dispatch(
            "attention",
            {
                "mosaic_gpu": _mosaic_gpu,
                "cudnn": functools.partial(cudnn.attention, device=device),
                "xla": xla.attention,
            },
            implementation,
            q,
            k,
            v,
            declines={"mosaic_gpu": functools.partial(_declines, problem, device)},
            problem=problem,
            scale=scale,
        )

    dims = ["bTnH", "bSnH", "bSnH"]
    return by_shards(local, [q, k, v], dims, "bTnH")(q, k, v)


def _declines(problem: Problem, device: DeviceSpec | None) -> str | None:
    """Say why cuDNN is to run where our kernel can, or None."""
    if cudnn.unsupported(problem, device) is not None:
        return None
    return tuning.declines("attention", problem, device)


def _mosaic_gpu(
    q: jax.Array, k: jax.Array, v: jax.Array, *, problem: Problem, scale: float
) -> jax.Array:
    out: Any = varlen_attention(
        q,
        k,
        v,
        causal=problem.causal,
        window=problem.window,
        scale=scale,
        softcap=problem.softcap,
        implementation="mosaic_gpu",
    )
    return out
