"""The public op: the mean of each packed sequence.

Axis letters: B rows, T tokens of a row, S sequences of a row, D features.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

from pallas_kernels.dispatch import as_hashable, check_floating, dispatch
from pallas_kernels.mosaic import DeviceSpec, check_hopper, keep_mark, vary_alike
from pallas_kernels.partition import check_local
from pallas_kernels.segment_mean import mosaic_gpu
from pallas_kernels.varlen_attention import segment_ids_from_cu_seqlens


def segment_mean(
    x: Float[Array, "B T D"],
    cu_seqlens: Integer[Array, "..."],
    *,
    implementation: str | Sequence[str] | None = None,
) -> Float[Array, "B S D"]:
    """The mean over the tokens of each packed sequence, in fp32.

    ``mean[b, s] = sum(x[b, cu[b, s]:cu[b, s + 1]]) / (cu[b, s + 1] - cu[b, s])``

    Empty sequences have zeros. NaN or infinity in x makes its feature of its sequence
    NaN or infinite, and may make other features of that sequence NaN; other sequences
    are as without. On Hopper GPUs one launch reads each token once. Differentiable by
    x, in reverse mode.

    Args:
        x: [B,T,D] tokens of packed rows.
        cu_seqlens: [B,S+1] integers, boundaries of the sequences of each row: from
            zero, never falling, at most T; the end may repeat.
        implementation: "mosaic_gpu" (Hopper; bfloat16 or float16, D a multiple of 128,
            at least 8 tokens, a row and a sequence; one device), "xla", a sequence of
            these, or None for the first that serves the arguments.

    Returns:
        [B,S,D] fp32.

    Raises:
        ValueError: the shapes do not belong together, x is not floating, or cu_seqlens
            are no integers.
        Unsupported: the implementation named cannot serve the arguments here.
        ExceptionGroup: none of several implementations can.

    Example:
        >>> x = jnp.array([[[1.0], [3.0], [5.0], [9.0]]])
        >>> segment_mean(x, jnp.array([[0, 2, 3, 3]]))[0, :, 0]
        Array([2., 5., 0.], dtype=float32)
    """
    check_floating(x=x.dtype)
    if x.ndim != 3 or cu_seqlens.ndim != 2 or x.shape[0] != cu_seqlens.shape[0]:
        raise ValueError(
            f"x and cu_seqlens have shapes {x.shape} and {cu_seqlens.shape}, expected"
            " [B, T, D] and [B, S + 1]"
        )
    if not jnp.issubdtype(cu_seqlens.dtype, jnp.integer):
        raise ValueError(
            f"cu_seqlens has type {cu_seqlens.dtype}, expected integers; cast it"
        )
    given = vary_alike({"x": x, "cu_seqlens": cu_seqlens.astype(jnp.int32)})
    return _mean(given["x"], given["cu_seqlens"], as_hashable(implementation))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _mean(x: Array, cu_seqlens: Array, implementation: Any) -> Array:
    implementations = {"mosaic_gpu": _mosaic_gpu, "xla": _xla}
    return dispatch("segment_mean", implementations, implementation, x, cu_seqlens)


def _forward(x: Array, cu_seqlens: Array, implementation: Any) -> Any:
    # Of x the gradient needs shape and type alone, which an array of no features keeps.
    return _mean(x, cu_seqlens, implementation), (x[..., :0], cu_seqlens)


def _backward(implementation: Any, residuals: Any, g: Array) -> tuple[Array, None]:
    del implementation
    like, cu_seqlens = residuals

    def one_row(g: Array, cu: Array) -> Array:
        ids = segment_ids_from_cu_seqlens(cu, like.shape[1])
        shares = jnp.pad(g / _counts(cu), ((0, 1), (0, 0)))  # [S + 1, D]
        return shares[ids]  # padding has -1, the zeros behind the last sequence

    return jax.vmap(one_row)(g, cu_seqlens).astype(like.dtype), None


_mean.defvjp(_forward, _backward)


def _mosaic_gpu(x: Array, cu_seqlens: Array) -> Array:
    device = check_hopper(DeviceSpec.current(), "segment_mean")
    check_local("segment_mean", x, cu_seqlens)
    mosaic_gpu.check(x, cu_seqlens.shape[1] - 1)
    return keep_mark(mosaic_gpu.segment_mean(x, cu_seqlens, device=device), x)


_FEW_TOKENS, _FEW_SEQUENCES = 256, 32
"""Of at most so many a GPU has means in one kernel. By a matmul it would take five."""


def _xla(x: Array, cu_seqlens: Array) -> Array:
    num_tokens, sequences = x.shape[1], cu_seqlens.shape[1] - 1
    few = num_tokens <= _FEW_TOKENS and sequences <= _FEW_SEQUENCES
    return jax.vmap(_selected if few else _multiplied)(x, cu_seqlens)


def _counts(cu: Array) -> Array:
    return jnp.maximum(cu[1:] - cu[:-1], 1)[:, None].astype(jnp.float32)  # [S, 1]


def _selected(x: Array, cu: Array) -> Array:
    at = jnp.arange(x.shape[0])
    member = (at >= cu[:-1, None]) & (at < cu[1:, None])  # [S, T]
    shares = x.astype(jnp.float32) / _counts(cu)[:, None]  # [S, T, D]
    # Selected, not multiplied: NaN stays in its sequence.
    return jnp.where(member[..., None], shares, 0).sum(axis=1)


def _multiplied(x: Array, cu: Array) -> Array:
    ids = segment_ids_from_cu_seqlens(cu, x.shape[0])
    member = ids[None] == jnp.arange(cu.shape[0] - 1)[:, None]  # [S, T]
    # A matmul, not a scatter: the same sums in the same order in every run. Its zeros
    # would spread NaN to the other sequences.
    finite = jnp.isfinite(x).all(axis=1)  # [T]
    values = jnp.where(((ids >= 0) & finite)[:, None], x, 0)
    spoiled = (member & ~finite).any(axis=1)[:, None]  # [S, 1]
    # Of 0 and 1, so exact in any type; the sums are in fp32.
    sums = jnp.matmul(
        member.astype(x.dtype),
        values,
        precision="highest",
        preferred_element_type=jnp.float32,
    )
    return jnp.where(spoiled, jnp.nan, sums / _counts(cu))
