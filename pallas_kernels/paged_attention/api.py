"""The public paged attention.

Axes: B sequences, R new tokens per sequence, N query heads, K key/value heads, H head
    dim, L layers, P pages, G tokens per page, W width of the page table.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels import tuned_configs
from pallas_kernels.arrays import concrete
from pallas_kernels.dispatch import dispatch, no_config, no_derivative
from pallas_kernels.mosaic import DeviceSpec, vary_alike
from pallas_kernels.paged_attention import mosaic_gpu, triton, xla
from pallas_kernels.paged_attention.config import PagedAttentionConfig
from pallas_kernels.paged_attention.inputs import FP8, Inputs, Scores
from pallas_kernels.partition import by_shards
from pallas_kernels.varlen_attention.inputs import resolve_scale, resolve_softcap


def paged_attention(
    q: Float[Array, "B R N H"],
    kv: Float[Array, "B R 2 K H"],
    pages: Float[Array, "L P 2 K G H"],
    layer: Int[Array, ""] | int,
    table: Int[Array | np.ndarray, "B W"],
    lengths: Int[Array | np.ndarray, " B"],
    *,
    kv_scales: Float[Array, "L P 2 K"] | None = None,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    num_new: Int[Array | np.ndarray, " B"] | None = None,
    implementation: str | Sequence[str] | None = None,
    config: PagedAttentionConfig | None = None,
) -> tuple[Float[Array, "B R N H"], Float[Array, "L P 2 K G H"]]:
    """A decode step: appends new keys and values to a paged KV cache, and attends to
    it.

    Token ``t`` of sequence ``b`` is stored in page ``table[b, t // G]`` at offset ``t %
    G``. The new tokens take the positions ``lengths[b] + r``; the query of each attends
    to the tokens ``j`` of its sequence up to itself with ``0 <= d < window`` for ``d =
    lengths[b] + r - j``, as they are stored::

        s[r, j] = cap(scale * q[b, r] . k[j])
        out[b, r] = sum_j softmax_j(s[r, j]) * v[j]

    where ``cap(x) = softcap * tanh(x / softcap)``. Scores and sums are fp32. Under
    `jax.jit` the pages are updated in place if they are donated or carried by a loop:
    nothing of their size is copied. The result of a sequence depends on its own tokens
    only: not on what the other sequences hold, the choice of pages, or the contents of
    other pages, NaN included; with the Hopper kernel bitwise. Bits do depend on B, on K
    of a device, on G and on the GPU, which decide the length of the kernel's splits;
    ``PagedAttentionConfig(split=512)`` fixes it. Not differentiable; `jax.vmap` works
    with the implementation "xla" only.

    Args:
        q: [B, R, N, H], queries of the new tokens; R is 1 plus the number of draft
            tokens.
        kv: [B, R, 2, K, H], their keys and values. K divides N: query head n reads
            key/value head ``n // (N / K)``.
        pages: [L, P, 2, K, G, H], keys and values of all layers: fp32, bf16, fp16, or
            float8_e4m3fn with `kv_scales`.
        layer: which layer; may be traced.
        table: [B, W], page table of each sequence. Entries past those that its tokens
            need (or before those that its window needs) may be anything. Sequences may
            share a page that no new token goes to.
        lengths: [B], tokens of each sequence in the cache before the step, in [0, W *
            G].
        kv_scales: [L, P, 2, K], fp32, of fp8 pages: a value ``x`` is stored as ``x /
            scale``, rounded and saturated. The caller chooses the scales: those of a
            page must stay the same from its first token to its last, as with calibrated
            scales per layer and head.
        window: how many tokens a query attends to, itself included; None is no limit.
        softcap: bound on the magnitude of scores; None is no bound.
        scale: factor of ``q . k``; None is ``1 / sqrt(H)``.
        num_new: [B], how many of the R new tokens are real, in [0, R]; None is all. The
            others are not written, and their output is zero. 0 marks an unused batch
            slot.
        implementation: "mosaic_gpu" (a kernel for Hopper GPUs: q and kv both bf16 or
            both fp16; head dims 64, 128 and 256; pages of 8 to 256 tokens of the same
            type, or in fp8 of 64 to 256 with head dims 128 and 256; at most 64 queries
            per key/value head; it takes fp32 memory for the partial sums of each
            split of 512 to 2,048 tokens that the tables have room for), "triton"
            (kernels for Ampere and later GPUs; bf16 and fp16 with pages of the same
            type, or in fp8 from compute capability 8.9 on; at most 64 queries per
            key/value head; needs the extra ``triton``), "xla", a sequence of
            these, or None for the best that supports the arguments on this device.
        config: tiling of the kernel; None uses a heuristic. XLA refuses one.

    Returns:
        ``(out, pages)``: [B, R, N, H] in the type of q, and the pages with the new
        tokens in them. A token beyond the end of its page table is neither stored nor
        attended to. One whose page is not in [0, P) is not stored, and the output of
        its sequence is undefined.

    Raises:
        TypeError: types do not fit, an option is traced, or the op is differentiated.
        ValueError: shapes do not fit, an option is out of range, or lengths, num_new
            or layer are, where they are not traced.
        Unsupported: the implementation named cannot serve the arguments here.
        ExceptionGroup: none of several implementations can.

    Example:
        Two sequences of 2 and 0 tokens, pages of 4 tokens:

        >>> import jax, numpy as np
        >>> keys = jax.random.split(jax.random.key(0), 3)
        >>> q = jax.random.normal(keys[0], (2, 1, 4, 8))
        >>> kv = jax.random.normal(keys[1], (2, 1, 2, 2, 8))
        >>> pages = jax.random.normal(keys[2], (3, 6, 2, 2, 4, 8))
        >>> table = np.array([[5, 0], [2, 0]])
        >>> out, pages = paged_attention(q, kv, pages, 1, table, np.array([2, 0]))
        >>> bool((pages[1, 5, :, :, 2] == kv[0, 0]).all())  # the third token of row 0
        True
        >>> bool((out[1, 0, :2] == kv[1, 0, 1, 0]).all())  # row 1 sees itself alone
        True

    References:
        Paged attention: vLLM, arXiv 2309.06180. Splits of a sequence combined by their
        log-sum-exp: Flash-Decoding; here the length of splits does not follow from
        that of sequences, so that the result of one does not depend on what the others
        hold. Scales are static as in vLLM, which has one per tensor.
    """
    q, kv, pages = (jnp.asarray(a) for a in (q, kv, pages))
    _check_arrays(q, kv, pages, kv_scales)
    rows, queries = q.shape[:2]
    if num_new is None:
        num_new = np.full(rows, queries, np.int32)
    x = Inputs(
        q,
        kv,
        pages,
        _integers("layer", layer, (), pages.shape[0] - 1),
        _integers("table", table, (rows, None), None),
        _integers("lengths", lengths, (rows,), np.shape(table)[-1] * pages.shape[4]),
        _integers("num_new", num_new, (rows,), queries),
        None if kv_scales is None else jnp.asarray(kv_scales),
    )
    scores = Scores(
        resolve_scale(scale, q.shape[3]), resolve_softcap(softcap), _window(window)
    )
    tuned_configs.check_config("paged_attention", config, PagedAttentionConfig)
    device = DeviceSpec.current()

    def run(*arrays: Any) -> tuple[Array, Array]:
        return dispatch(
            "paged_attention",
            IMPLEMENTATIONS,
            implementation,
            vary_alike(Inputs(*no_derivative(arrays, _NO_DERIVATIVE, TypeError))),
            scores,
            config=config,
            device=device,
        )

    return by_shards(run, x, _DIMS, (_DIMS[0], _DIMS[2]))(*x)


_DIMS = ("BRnH", "BRTnH", "LPTnGH", "", "BW", "B", "B", "LPTn")
"""A letter for each dimension of `Inputs`. Heads are independent; sequences are not,
since they write to the same page pool."""


_NO_DERIVATIVE = (
    "paged_attention is a step of serving and has no derivative; train with"
    " varlen_attention, or hide its arguments behind jax.lax.stop_gradient"
)


def _xla(
    x: Inputs,
    scores: Scores,
    *,
    config: PagedAttentionConfig | None,
    device: DeviceSpec | None,
) -> tuple[Array, Array]:
    del device
    no_config("paged_attention", config)
    return xla.paged_attention(x, scores)


IMPLEMENTATIONS: Mapping[str, Callable[..., tuple[Array, Array]]] = {
    "mosaic_gpu": mosaic_gpu.paged_attention,
    "triton": triton.paged_attention,
    "xla": _xla,
}
"""Implementations of `paged_attention`, the preferred one first."""

_DTYPES = ("float32", "bfloat16", "float16")


def _check_arrays(q: Array, kv: Array, pages: Array, kv_scales: Any) -> None:
    known = [("q", q, _DTYPES), ("kv", kv, _DTYPES)]
    for name, x, dtypes in (*known, ("pages", pages, (*_DTYPES, FP8.name))):
        if x.dtype.name not in dtypes:
            raise TypeError(
                f"{name} has type {x.dtype.name}, expected one of {', '.join(dtypes)};"
                " cast it with .astype"
            )
    shapes = f"q {q.shape}, kv {kv.shape} and pages {pages.shape}"
    if q.ndim != 4 or kv.ndim != 5 or pages.ndim != 6:
        raise ValueError(
            f"{shapes}: expected [B, R, N, H], [B, R, 2, K, H] and [L, P, 2, K, G, H]"
        )
    fits = (
        kv.shape[:3] == (*q.shape[:2], 2)
        and pages.shape[2:4] == kv.shape[2:4]
        and kv.shape[4] == pages.shape[5] == q.shape[3]
    )
    if not fits:
        raise ValueError(
            f"{shapes} do not fit: expected [B, R, N, H], [B, R, 2, K, H] and"
            " [L, P, 2, K, G, H]"
        )
    if 0 in (*q.shape, *kv.shape, *pages.shape):
        raise ValueError(f"{shapes}: every dimension must be at least 1")
    if q.shape[2] % kv.shape[3]:
        raise ValueError(
            f"the number of query heads N={q.shape[2]} must be a multiple of the"
            f" number of key/value heads K={kv.shape[3]}"
        )
    if (kv_scales is None) == (pages.dtype == FP8):
        raise ValueError(
            f"kv_scales {'are missing' if kv_scales is None else 'are given'} and the"
            f" pages have type {pages.dtype.name}; {FP8.name} pages need scales,"
            " others take none"
        )
    if kv_scales is None:
        return
    if np.shape(kv_scales) != pages.shape[:4] or kv_scales.dtype != jnp.float32:
        raise ValueError(
            f"kv_scales has shape {np.shape(kv_scales)} and type {kv_scales.dtype},"
            f" expected [L, P, 2, K] = {pages.shape[:4]} and float32"
        )


def _integers(
    name: str, value: Any, shape: tuple[int | None, ...], most: int | None
) -> Array:
    """An int32 array; its values are checked if they are not traced."""
    dtype = value.dtype if hasattr(value, "dtype") else np.asarray(value).dtype
    if not jnp.issubdtype(dtype, jnp.integer):
        raise TypeError(f"{name} must hold integers, got {dtype}")
    found = np.shape(value)
    fits = len(found) == len(shape) and all(
        size >= 1 if want is None else size == want
        for size, want in zip(found, shape, strict=False)
    )
    if not fits:
        wanted = tuple("W" if size is None else size for size in shape)
        raise ValueError(f"{name} has shape {found}, expected {wanted}")
    known = concrete(value) if isinstance(value, jax.Array) else np.asarray(value)
    if most is not None and known is not None:
        outside = known[(known < 0) | (known > most)] if known.size else known
        if np.size(outside):
            raise ValueError(
                f"{name} must lie in [0, {most}], got {np.ravel(outside)[0]}"
            )
    return jnp.asarray(value).astype(jnp.int32)


def _window(window: Any) -> int | None:
    if window is None:
        return None
    whole = isinstance(window, int | np.integer) and not isinstance(window, bool)
    if not whole or window < 1:
        raise ValueError(
            f"window must be None or an integer of at least 1, got {window!r}: a query"
            " sees so many tokens, itself included"
        )
    return min(int(window), math.floor(2**30))
