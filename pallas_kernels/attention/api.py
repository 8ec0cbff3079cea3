"""The public attention without sequence packing.

Axis letters: B batch, T queries, S keys, N query heads, K key/value heads, H head dim.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jaxtyping import Array, Float

from pallas_kernels import tuned_configs
from pallas_kernels.attention import cudnn, xla
from pallas_kernels.attention.config import Problem
from pallas_kernels.dispatch import dispatch
from pallas_kernels.mosaic import DeviceSpec
from pallas_kernels.partition import by_shards
from pallas_kernels.varlen_attention import varlen_attention
from pallas_kernels.varlen_attention.inputs import (
    resolve_per_head,
    resolve_scale,
    resolve_softcap,
    resolve_window,
)
from pallas_kernels.varlen_attention.segments import Window


def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    *,
    causal: bool = False,
    window: Window = (None, None),
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    alibi_slopes: Float[Array, " N"] | None = None,
    implementation: str | Sequence[str] | None = None,
) -> Float[Array, "B T N H"]:
    """``softmax(mask(softcap(scale * q k^T) - alibi)) v`` without padding.

    With ``implementation=None`` cuDNN runs on NVIDIA GPUs. The kernels of
    `pallas_kernels.varlen_attention`, Mosaic's on Hopper and Triton's from Ampere on,
    run instead if cuDNN does not support the call (a softcap, sinks, ALiBi, more keys
    than queries, a window on both sides; head dims above 128 before Hopper), and if
    there is no cuDNN, as when a program is lowered for a GPU on a machine without one;
    on Hopper also where Mosaic's was measured to be faster (head dims 64 or 128 and
    sequences of at least 1,024 tokens if the call is differentiated, 2,048 if it is not
    and causal; without a mask 8,192 with head dim 128). XLA runs elsewhere and stores
    the scores, [B,N,T,S]; all others take memory linear in the tokens. Differentiable.

    The kernel's schedule is a constant of the program, made while it is traced.

    Args:
        q: [B,T,N,H] queries.
        k: [B,S,K,H] keys; query head n reads key head ``n // (N / K)``.
        v: [B,S,K,H] values.
        causal: a query attends to no later key; the last query attends to the last key.
        window: (left, right): a query attends to at most so many keys before and after
            its own position; None is no limit.
        scale: factor of the scores; None is ``1 / sqrt(H)``.
        softcap: scores become ``softcap * tanh(score / softcap)``; None leaves them.
        sinks: [N] logit of one more key per head, whose value is zero, unscaled.
        alibi_slopes: [N] penalty per token of distance between a key and the query's
            own position, subtracted after the softcap.
        implementation: "mosaic_gpu" (Hopper; bfloat16 or float16, H at most 256),
            "cudnn" (bfloat16 or float16, H a multiple of 8, at most 256 on Hopper and
            128 elsewhere), "triton" (Ampere and later, the types and head dims of
            "mosaic_gpu"; needs the extra ``triton``), "xla", a sequence of these, or
            None for the best.

    Returns:
        [B,T,N,H] of the type of q; zeros for a query without keys.

    Raises:
        TypeError: scale or softcap is traced or no number, or sinks or alibi_slopes are
            not floating.
        ValueError: N is no multiple of K, a window, scale or softcap is out of range,
            or sinks or alibi_slopes are not one for each query head.
        Unsupported: the implementation named cannot serve the arguments here.
        ExceptionGroup: none of several implementations can.

    Example:
        >>> import jax.numpy as jnp
        >>> q, kv = jnp.ones((1, 3, 4, 8)), jnp.ones((1, 3, 2, 8))
        >>> attention(q, kv, kv, causal=True).shape
        (1, 3, 4, 8)

    References:
        FlashAttention-3, arXiv 2407.08608; GQA, arXiv 2305.13245; ALiBi, arXiv
        2108.12409; sinks, arXiv 2309.17453, as in gpt-oss.
    """
    if not k.shape[2] or q.shape[2] % k.shape[2]:
        raise ValueError(
            f"q has {q.shape[2]} heads, no multiple of the {k.shape[2]} of k and v"
        )
    heads, head_dim = q.shape[2:]
    sinks = resolve_per_head("sinks", sinks, heads)
    alibi_slopes = resolve_per_head("alibi_slopes", alibi_slopes, heads)
    variant = {
        "causal": causal,
        "window": resolve_window(False, window, q.shape[1] + k.shape[1]),
        "softcap": resolve_softcap(softcap),
        "sinks": sinks is not None,
        "alibi": alibi_slopes is not None,
    }
    local = functools.partial(
        _attention, variant, resolve_scale(scale, head_dim), implementation
    )
    args = q, k, v, sinks, alibi_slopes
    return by_shards(local, args, ["bTnH", "bSnH", "bSnH", "n", "n"], "bTnH")(*args)


def _attention(
    variant: Mapping[str, Any],
    scale: float,
    implementation: str | Sequence[str] | None,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *per_head: jax.Array | None,
) -> jax.Array:
    """The best implementation for these shapes, forward only or with gradients."""
    device = DeviceSpec.current()
    problems = [Problem.of(q, k, **variant, gradient=g) for g in (False, True)]
    forward, both = (
        functools.partial(
            dispatch,
            "attention",
            {
                "mosaic_gpu": functools.partial(_packed, "mosaic_gpu"),
                "cudnn": functools.partial(cudnn.attention, device=device),
                "triton": functools.partial(_packed, "triton"),
                "xla": xla.attention,
            },
            implementation,
            declines={"mosaic_gpu": functools.partial(_declines, problem, device)},
            problem=problem,
            scale=scale,
        )
        for problem in problems
    )
    reasons = [_declines(problem, device) for problem in problems]
    if implementation is not None or (reasons[0] is None) == (reasons[1] is None):
        return forward(q, k, v, *per_head)

    @jax.custom_vjp
    def by_pass(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return forward(q, k, v, *per_head)

    def gradient_follows(*args: jax.Array) -> Any:
        return jax.vjp(lambda *args: both(*args, *per_head), *args)

    by_pass.defvjp(gradient_follows, lambda pullback, dout: pullback(dout))
    return by_pass(q, k, v)


def _declines(problem: Problem, device: DeviceSpec | None) -> str | None:
    """Say why cuDNN is to run where our kernel can, or None."""
    if cudnn.unsupported(problem, device) is not None:
        return None
    return tuned_configs.declines("attention", problem, device)


def _packed(
    implementation: str,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    sinks: jax.Array | None,
    alibi_slopes: jax.Array | None,
    *,
    problem: Problem,
    scale: float,
) -> jax.Array:
    """Each row is one sequence of `varlen_attention`."""
    out: Any = varlen_attention(
        q,
        k,
        v,
        causal=problem.causal,
        window=problem.window,
        scale=scale,
        softcap=problem.softcap,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        implementation=implementation,
    )
    return out
