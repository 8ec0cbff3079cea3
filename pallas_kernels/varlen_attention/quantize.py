"""Operands of 8 bits, with a scale for each sequence and key/value head."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import check_floating
from pallas_kernels.varlen_attention.segments import segment_ids_from_cu_seqlens


def quantize_heads(
    x: Float[Array, "*R T N H"],
    cu_seqlens: Int[Array | np.ndarray, "*R bounds"] | None = None,
    *,
    num_kv_heads: int | None = None,
) -> tuple[Float[Array, "*R T N H"], Float[Array, "*R B K"]]:
    """Quantizes queries, keys or values to E4M3 for `varlen_attention`.

    ``x ~ data * descale``, with a ``descale = max|x| / 448`` for each sequence and each
    group of heads that read one key/value head.

    Args:
        x: [T, N, H] or [R, T, N, H], of any floating type.
        cu_seqlens: [B+1], prefix sums of the lengths, from 0; [R, B+1] with rows. None:
            each row is one sequence.
        num_kv_heads: K, a divisor of N; None is N.

    Returns:
        float8_e4m3fn of the shape of x, and fp32 [B, K], with rows [R, B, K]. What lies
        past the last sequence is rounded with a scale of 1.

    Raises:
        ValueError: x has no floating type, or N is no multiple of K.

    Example:
        >>> data, descale = quantize_heads(jnp.array([[[1.0, -2.0]], [[0.5, 4.0]]]))
        >>> (data.astype(jnp.float32) * descale[:, :, None]).tolist()
        [[[1.0, -2.0]], [[0.5, 4.0]]]

    References:
        FlashAttention-3 (arXiv 2407.08608), section 3.3; its scales are per head too.
    """
    x = jnp.asarray(x)
    check_floating(x=x.dtype)
    *rows, tokens, heads, _ = x.shape
    kv_heads = num_kv_heads or heads
    if heads % kv_heads:
        raise ValueError(
            f"the number of heads N={heads} must be a multiple of num_kv_heads="
            f"{kv_heads}"
        )
    if cu_seqlens is None:
        cu_seqlens = np.tile(np.array([0, tokens], np.int32), (*rows, 1))

    def of_row(x: Array, bounds: Array) -> tuple[Array, Array]:
        ids = segment_ids_from_cu_seqlens(bounds, tokens)  # -1 past the last
        wide = x.astype(jnp.float32).reshape(tokens, kv_heads, -1)
        largest = jax.ops.segment_max(
            jnp.max(jnp.abs(wide), axis=2), ids % bounds.shape[0], bounds.shape[0]
        )
        descale = jnp.where(largest > 0, largest / 448, 1.0).at[-1].set(1.0)
        data = jnp.clip(wide / descale[ids][..., None], -448, 448)
        return data.reshape(x.shape).astype(jnp.float8_e4m3fn), descale[:-1]

    run = jax.vmap(of_row) if rows else of_row
    return run(x, jnp.asarray(cu_seqlens))
