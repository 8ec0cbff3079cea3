"""Attention of prompts in chunks over a paged KV cache.

Axes: B sequences, T packed queries, N query heads, K key/value heads, H head dim, L
layers, P pages, G tokens of a page, W pages of a sequence, S gathered keys.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import Unsupported, dispatch
from pallas_kernels.mosaic import (
    DeviceSpec,
    check_hopper,
    check_smem,
    keep_mark,
    unmarked,
    vary_alike,
)
from pallas_kernels.partition import by_shards, check_local
from pallas_kernels.varlen_attention.api import varlen_attention
from pallas_kernels.varlen_attention.config import (
    HEAD_DIMS,
    ForwardBlocks,
    Problem,
    forward_blocks,
    forward_smem,
)
from pallas_kernels.varlen_attention.forward import forward_from
from pallas_kernels.varlen_attention.inputs import (
    Inputs,
    Scores,
    resolve_scale,
    resolve_softcap,
    resolve_window,
)
from pallas_kernels.varlen_attention.key_sources import KeysInPages
from pallas_kernels.varlen_attention.scheduler import Sequences
from pallas_kernels.varlen_attention.segments import segment_ids_from_cu_seqlens


KEY_BLOCK = 128
"""Gathered keys of each sequence begin at a multiple of this: a step of a kernel then
holds keys of one sequence only, and its sums do not depend on the others."""
_PAGES = (16, 32, 64, 128, 256)
_ENDLESS = 2**30


class PagedInputs(NamedTuple):
    """The arrays of a call."""

    q: Float[Array, "T N H"]
    pages: Float[Array, "L P 2 K G H"]
    layer: Int[Array, ""]
    table: Int[Array, "B W"]
    cu_q: Int[Array, " bounds"]
    lengths: Int[Array, " B"]
    kv_scales: Float[Array, "L P 2 K"] | None = None


def paged_varlen_attention(
    q: Float[Array, "T N H"],
    pages: Float[Array, "L P 2 K G H"],
    layer: Int[Array, ""] | int,
    table: Int[Array | np.ndarray, "B W"],
    cu_seqlens_q: Int[Array | np.ndarray, " bounds"],
    lengths: Int[Array | np.ndarray, " B"],
    *,
    kv_scales: Float[Array, "L P 2 K"] | None = None,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    max_keys: int | None = None,
    implementation: str | Sequence[str] | None = None,
) -> Float[Array, "T N H"]:
    """Causal attention of packed chunks to the tokens of their sequences, in pages.

    Sequence ``b`` has ``lengths[b]`` tokens, the ``t``-th of them in page ``table[b, t
    // G]`` at offset ``t % G``. The queries ``cu_seqlens_q[b]:cu_seqlens_q[b + 1]``
    belong to its last tokens, and each attends to the tokens up to its own: `q`, `k`
    and `v` are those of `varlen_attention` with ``causal=True``, where k and v are what
    the pages hold. It is the prefill step beside the decode step of `paged_attention`;
    the keys and values of the chunks must be in the pages already. Not differentiable.

    Args:
        q: [T, N, H], queries of all chunks.
        pages: [L, P, 2, K, G, H], keys and values of all layers, of the type of q, or
            float8_e4m3fn with `kv_scales`.
        layer: which layer; may be traced.
        table: [B, W], page table of each sequence. Entries past those that its tokens
            need may be anything.
        cu_seqlens_q: [B+1], prefix sums of the lengths of the chunks. A chunk may be
            empty.
        lengths: [B], tokens of each sequence that are in its pages.
        kv_scales: [L, P, 2, K], fp32, of fp8 pages.
        window: how many tokens a query attends to, itself included; None is no limit.
        scale: factor of ``q . k``; None is ``1 / sqrt(H)``.
        softcap: bound on the magnitude of scores; None is no bound.
        max_keys: for "gather" and "xla", most tokens of all sequences together, each
            rounded up to a multiple of 128; None is all that the tables have room for.
        implementation: "mosaic_gpu" (the Hopper kernel of `varlen_attention`, which
            reads pages as it goes: bf16 and fp16 pages of 16 to 256 tokens, head dims
            64, 128 and 256), "gather" (gathers the keys and values of all sequences to
            one array for `varlen_attention`), "xla" (the same without kernels), several
            names, or None for the best that supports the arguments.

    Returns:
        [T, N, H] in the type of q; zeros past the last chunk. In "xla" a sequence with
        keys or values that are not finite has NaN for all queries, others are not
        affected. "mosaic_gpu" multiplies values past the end of a sequence, in its last
        page, by zero: they must be finite.

    Raises:
        ValueError: shapes do not fit.
        Unsupported: the implementation that was named cannot serve the arguments.

    Example:
        A chunk of the last two of five tokens, pages of four:

        >>> import jax
        >>> keys = jax.random.split(jax.random.key(0), 2)
        >>> q = jax.random.normal(keys[0], (2, 4, 16))
        >>> pages = jax.random.normal(keys[1], (1, 6, 2, 2, 4, 16))
        >>> table, bounds = np.array([[3, 1]]), np.array([0, 2])
        >>> paged_varlen_attention(q, pages, 0, table, bounds, np.array([5])).shape
        (2, 4, 16)

    References:
        The block table of ``flash_attn_varlen_func``; here keys and values of all
        layers are one array, which the layers of a model update in place.
    """
    q, pages = jnp.asarray(q), jnp.asarray(pages)
    x = PagedInputs(
        q,
        pages,
        layer=jnp.asarray(layer, jnp.int32),
        table=jnp.asarray(table, jnp.int32),
        cu_q=jnp.asarray(cu_seqlens_q, jnp.int32),
        lengths=jnp.asarray(lengths, jnp.int32),
        kv_scales=kv_scales,
    )
    _check(x)
    left = None if window is None else window - 1
    capacity = x.table.shape[1] * pages.shape[4]
    scores = Scores(
        resolve_window(True, (left, None), q.shape[0] + capacity),
        resolve_scale(scale, q.shape[2]),
        resolve_softcap(softcap),
    )
    keys = x.table.shape[0] * -(-capacity // KEY_BLOCK) * KEY_BLOCK
    keys = keys if max_keys is None else min(max_keys, keys)

    def run(*arrays: Any) -> Array:
        return dispatch(
            "paged_varlen_attention",
            IMPLEMENTATIONS,
            implementation,
            vary_alike(PagedInputs(*arrays)),
            scores,
            keys,
            device=DeviceSpec.current(),
        )

    return by_shards(run, x, _DIMS, _DIMS[0])(*x)


_DIMS = ("TnH", "LPXnGH", "", "BW", "C", "B", "LPXn")
"""A letter for each dimension of `PagedInputs`: heads are independent."""


def _check(x: PagedInputs) -> None:
    shapes = f"q {x.q.shape}, pages {x.pages.shape}, table {x.table.shape}"
    if x.q.ndim != 3 or x.pages.ndim != 6 or x.table.ndim != 2:
        raise ValueError(f"{shapes}: expected [T, N, H], [L, P, 2, K, G, H], [B, W]")
    if x.pages.shape[2] != 2 or x.pages.shape[5] != x.q.shape[2]:
        raise ValueError(f"{shapes} do not fit: expected [T, N, H], [L, P, 2, K, G, H]")
    if x.q.shape[1] % x.pages.shape[3]:
        raise ValueError(
            f"the number of query heads N={x.q.shape[1]} must be a multiple of the"
            f" number of key/value heads K={x.pages.shape[3]}"
        )
    rows = x.table.shape[0]
    if x.lengths.shape != (rows,) or x.cu_q.shape != (rows + 1,):
        raise ValueError(
            f"lengths {x.lengths.shape} and cu_seqlens_q {x.cu_q.shape} do not fit a "
            f"table of {rows} sequences: expected [B] and [B + 1]"
        )
    if (x.kv_scales is None) == (x.pages.dtype.itemsize == 1):
        raise ValueError(
            f"pages of type {x.pages.dtype.name}: those of 8 bits need kv_scales, "
            "others take none"
        )


# --- The Hopper kernel ----------------------------------------------------------------


def gathers_pages(
    dtype: DTypeLike, page_dtype: DTypeLike, head_dim: int, page_size: int
) -> bool:
    """Whether `paged_varlen_attention` gathers keys and values on this device.

    Args:
        dtype: of queries.
        page_dtype: of pages.
        head_dim: H.
        page_size: G.
    """
    try:
        check_hopper(DeviceSpec.current(), "paged_varlen_attention")
    except Unsupported:
        return True
    types = jnp.dtype(dtype), jnp.dtype(page_dtype)
    return _refusal(*types, head_dim, page_size) is not None


def _refusal(
    dtype: jnp.dtype, page_dtype: jnp.dtype, head_dim: int, page: int
) -> str | None:
    """Why the kernel does not take what is so typed and shaped."""
    if dtype not in (jnp.bfloat16, jnp.float16) or page_dtype != dtype:
        return (
            f"types {dtype.name} and {page_dtype.name} of q and pages, the kernel "
            "takes bfloat16 or float16 for both"
        )
    if head_dim not in HEAD_DIMS:
        return f"head dim {head_dim}, the kernel takes {HEAD_DIMS}"
    if page not in _PAGES:
        return f"pages of {page} tokens, the kernel takes {_PAGES}"
    return None


def _mosaic_gpu(
    x: PagedInputs, scores: Scores, max_keys: int, *, device: DeviceSpec | None
) -> Array:
    del max_keys
    check_local("paged_varlen_attention", *x)
    device = check_hopper(device, "paged_varlen_attention")
    _, num_pages, _, kv_heads, page, head_dim = x.pages.shape
    if reason := _refusal(x.q.dtype, x.pages.dtype, head_dim, page):
        raise Unsupported(
            f"paged_varlen_attention: {reason}; use implementation='gather'"
        )
    if math.prod(x.pages.shape[:4]) >= 2**31:
        raise Unsupported(
            f"paged_varlen_attention: pages of shape {x.pages.shape}, the kernel counts"
            " to 2**31; use implementation='gather'"
        )
    problem = Problem(
        rows=1,
        queries=x.q.shape[0],
        keys=x.table.shape[1] * page,
        max_seqs=x.table.shape[0],
        heads=x.q.shape[1],
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=x.q.dtype,
        page=page,
        num_pages=num_pages,
    )
    blocks = forward_blocks(problem, device)
    if blocks.consumers != 2:  # the producer has too few registers for three
        blocks = ForwardBlocks()
    check_smem(forward_smem(problem, blocks), device, "paged_varlen_attention")
    out = _jitted(problem, scores, blocks, device, x)
    return keep_mark(out, *(a for a in x if a is not None))


# The layers of a model are traced and lowered once.
@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _jitted(
    problem: Problem,
    scores: Scores,
    blocks: ForwardBlocks,
    device: DeviceSpec,
    x: PagedInputs,
) -> Array:
    def run(
        q: Array, pages: Array, layer: Array, table: Array, cu_q: Array, lengths: Array
    ) -> Array:
        held = KeysInPages(pages.reshape(-1, *pages.shape[4:]), table, layer.reshape(1))
        seqs = Sequences.of(cu_q[None], cu_q[None], problem.queries, problem.queries)
        ends = jnp.pad(lengths, (0, len(seqs.row) - len(lengths)))
        seqs = seqs._replace(
            k_start=jnp.zeros_like(ends),
            k_end=ends,
            # No step ends past the data: pages are whole.
            k_total=jnp.full_like(ends, _ENDLESS),
        )
        packed: Any = Inputs(q[None], None, None, None)  # type: ignore[arg-type]
        results = forward_from(
            held, seqs, problem, scores, blocks, packed, False, device
        )
        return results[0][0]

    return unmarked(run)(*x[:-1])


# --- Gathered by XLA, for `varlen_attention` ------------------------------------------


def _gathered(
    x: PagedInputs,
    scores: Scores,
    max_keys: int,
    *,
    device: DeviceSpec | None,
    implementation: str | None = None,
) -> Array:
    del device
    rows, width = x.table.shape
    page = x.pages.shape[4]
    whole = -(-x.lengths // KEY_BLOCK) * KEY_BLOCK
    ends = jnp.cumsum(whole, dtype=jnp.int32)
    starts = ends - whole
    # After each sequence one without queries, with the keys up to a whole block.
    zero = jnp.zeros(1, jnp.int32)
    both = jnp.stack([starts + x.lengths, ends], axis=1).reshape(-1)
    cu_k = jnp.concatenate([zero, both])
    cu_q = jnp.concatenate([zero, jnp.repeat(x.cu_q[1:], 2)])
    index = jnp.arange(max_keys, dtype=jnp.int32)
    row = jnp.searchsorted(ends, index, side="right", method="scan_unrolled")
    row = jnp.minimum(row.astype(jnp.int32), rows - 1)
    position = index - starts[row]
    real = position < x.lengths[row]
    number = x.table[row, jnp.minimum(position // page, width - 1)]
    number = jnp.where(real, number, x.pages.shape[1])
    held = x.pages.at[x.layer, number, :, :, position % page]
    held = held.get(mode="fill", fill_value=0)  # [S, 2, K, H]
    if x.kv_scales is not None:
        scales = x.kv_scales.at[x.layer, number].get(mode="fill", fill_value=0.0)
        held = held.astype(jnp.float32) * scales[..., None]
    held = held.astype(x.q.dtype)
    # Kernels multiply masked values by zero: what is not finite would reach others.
    finite = jnp.isfinite(held).all(axis=(1, 2, 3))
    held = jnp.where(finite[:, None, None, None], held, 0)
    lost = jnp.zeros(rows, bool).at[row].max(~finite)
    left, _ = scores.window
    out: Any = varlen_attention(
        x.q,
        held[:, 0],
        held[:, 1],
        cu_q,
        cu_k,
        causal=True,
        window=(left, None),
        scale=scores.scale,
        softcap=scores.softcap,
        implementation=implementation,
    )
    of_tokens = segment_ids_from_cu_seqlens(x.cu_q, x.q.shape[0])
    hit = (of_tokens >= 0) & lost[of_tokens]
    return jnp.where(hit[:, None, None], jnp.nan, out)


IMPLEMENTATIONS: Mapping[str, Callable[..., Array]] = {
    "mosaic_gpu": _mosaic_gpu,
    "gather": _gathered,
    "xla": functools.partial(_gathered, implementation="xla"),
}
"""Implementations of `paged_varlen_attention`, the preferred one first."""
