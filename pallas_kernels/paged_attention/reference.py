"""The definition of paged attention, in fp32, token by token."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float


def paged_attention(
    q: Float[Array, "B R N H"],
    kv: Float[Array, "B R 2 K H"],
    pages: Float[Array, "L P 2 K G H"],
    layer: int,
    table: np.ndarray,
    lengths: np.ndarray,
    *,
    kv_scales: Float[Array, "L P 2 K"] | None = None,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    num_new: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """See `pallas_kernels.paged_attention.paged_attention`; all arrays are concrete.

    Returns:
        ``(out, pages)``: [B,R,N,H] fp32, and the pages in their own type.
    """
    rows, new_tokens, heads, head_dim = q.shape
    num_pages, kv_heads, size = (pages.shape[i] for i in (1, 3, 4))
    scale = head_dim**-0.5 if scale is None else scale
    ids, known = np.asarray(table).tolist(), np.asarray(lengths).tolist()
    counts = [new_tokens] * rows if num_new is None else np.asarray(num_new).tolist()
    stored = np.array(pages)
    scales = np.ones(pages.shape[:4], np.float32)
    if kv_scales is not None:
        scales = np.asarray(kv_scales)
    most = float(jnp.finfo(pages.dtype).max)
    out = np.zeros(q.shape, np.float32)

    def place(row: int, position: int) -> tuple[int, int] | None:
        """Page and row of the page of a token."""
        if position >= len(ids[row]) * size:
            return None
        page = ids[row][position // size]
        return (page, position % size) if 0 <= page < num_pages else None

    for b in range(rows):
        for r in range(counts[b]):
            if (where := place(b, known[b] + r)) is not None:
                page, offset = where
                new = np.asarray(kv[b, r], np.float32)
                new = new / scales[layer, page, ..., None]
                if kv_scales is not None:
                    new = np.clip(new, -most, most)
                # numpy rounds to fp8 through fp16 or not at all as XLA does.
                stored[layer, page, :, :, offset] = jnp.asarray(new).astype(pages.dtype)
    for b in range(rows):
        total = known[b] + counts[b]
        places = [place(b, position) for position in range(total)]
        seen = [(p, where) for p, where in enumerate(places) if where is not None]
        if not seen or not counts[b]:
            continue
        at, (page, offset) = np.array([p for p, _ in seen]), np.array(
            [where for _, where in seen]
        ).T  # fmt: skip
        keys, values = (
            stored[layer, page, i, :, offset].astype(np.float32)  # [S, K, H]
            * scales[layer, page, i][..., None]
            for i in range(2)
        )
        for r in range(counts[b]):
            distance = known[b] + r - at
            mask = distance >= 0
            if window is not None:
                mask &= distance < window
            if not mask.any():
                continue
            queries = np.asarray(q[b, r], np.float32).reshape(kv_heads, -1, head_dim)
            scores = np.einsum("kgh,skh->kgs", queries, keys[mask]) * scale
            if softcap is not None:
                scores = softcap * np.tanh(scores / softcap)
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            weights = weights / weights.sum(axis=-1, keepdims=True)
            result = np.einsum("kgs,skh->kgh", weights, values[mask])
            out[b, r] = result.reshape(heads, head_dim)
    return out, stored
