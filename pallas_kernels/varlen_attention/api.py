"""Variable-length attention over packed sequences: the public functions.

Axes: R packed rows of a batch, B sequences per row, T packed queries, S packed keys,
N query heads, K key/value heads, H head dim of queries and keys, Hv head dim of values.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer
from jaxtyping import Array, Float, Int

from pallas_kernels.arrays import concrete
from pallas_kernels.dispatch import dispatch, no_derivative
from pallas_kernels.mosaic import DeviceSpec, vary_alike
from pallas_kernels.partition import by_shards
from pallas_kernels.varlen_attention.inputs import (
    Inputs,
    KnownPacking,
    Passes,
    Scores,
    resolve_descales,
    resolve_per_head,
    resolve_scale,
    resolve_softcap,
    resolve_window,
)
from pallas_kernels.varlen_attention.mosaic_gpu import varlen_attention_mosaic_gpu
from pallas_kernels.varlen_attention.relative import RelativeBias, check_relative_bias
from pallas_kernels.varlen_attention.segments import (
    Window,
    check_cu_seqlens,
    cu_seqlens_from_segment_ids,
)
from pallas_kernels.varlen_attention.triton import varlen_attention_triton
from pallas_kernels.varlen_attention.xla import varlen_attention_xla


IMPLEMENTATIONS: Mapping[str, Callable[..., Passes]] = {
    "mosaic_gpu": varlen_attention_mosaic_gpu,
    "triton": varlen_attention_triton,
    "xla": varlen_attention_xla,
}
"""Functions that return the passes of a call or decline it, the preferred one first.

cuDNN's packed attention is none of them. JAX has it in a private function, from Hopper
on alone, where the Mosaic kernel is faster, and its statistics take memory for each
pair of a sequence and a token.
"""

DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn")


def varlen_attention(
    q: Float[Array, "*R T N H"],
    k: Float[Array, "*R S K H"],
    v: Float[Array, "*R S K Hv"],
    cu_seqlens_q: Int[Array | np.ndarray, "*R bounds"] | None = None,
    cu_seqlens_k: Int[Array | np.ndarray, "*R bounds"] | None = None,
    *,
    causal: bool = False,
    window: Window = (None, None),
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    alibi_slopes: Float[Array, " N"] | None = None,
    relative_bias: RelativeBias | None = None,
    q_descale: Float[Array | np.ndarray, "..."] | float | None = None,
    k_descale: Float[Array | np.ndarray, "..."] | float | None = None,
    v_descale: Float[Array | np.ndarray, "..."] | float | None = None,
    return_lse: bool = False,
    deterministic: bool = True,
    implementation: str | Sequence[str] | None = None,
    config: object | None = None,
) -> (
    Float[Array, "*R T N Hv"] | tuple[Float[Array, "*R T N Hv"], Float[Array, "*R T N"]]
):
    """Attention in which every packed sequence attends only to itself.

    For query ``i`` and key ``j`` of one sequence, counted from the sequence's start,
    let ``d = j - i - (len_k - len_q)`` be the distance of the key to the right of the
    diagonal that ends in the bottom right corner. Then, for each head::

        s[i, j] = cap(scale * q[i] . k[j] + relative_bias(i, j)) - alibi_slope * |d|
        lse[i]  = log(sum_j exp(s[i, j]) + exp(sink))
        out[i]  = sum_j exp(s[i, j] - lse[i]) * v[j]

    over the keys with ``-left <= d <= right``, and ``d <= 0`` if causal, where ``cap(x)
    = softcap * tanh(x / softcap)``. Sequences are packed without padding, so no work
    and no memory is spent on it; scores are accumulated and normalized in fp32 and
    never stored. Differentiable once in reverse mode by q, k, v, sinks, alibi_slopes
    and the terms of relative_bias, through ``out`` and through ``lse``; works under
    `jax.jit`, `jax.vmap`, `jax.lax.scan`, `jax.checkpoint` (the residuals are named
    ``varlen_attention_out`` and ``varlen_attention_lse``) and `jax.shard_map` over
    heads and over data.

    Args:
        q: [T, N, H], queries of all sequences, or [R, T, N, H] for a batch of packed
            rows: everything that begins with T, S or B+1 here has that leading axis
            too. T is a static token budget; tokens past the last sequence may hold
            anything, even NaN.
        k: [S, K, H], keys. K divides N: query head n reads key head ``n // (N / K)``.
        v: [S, K, Hv], values. Hv may differ from H. NaN or infinity inside a sequence
            may reach its neighbors, which share blocks with it.
        cu_seqlens_q: [B+1], prefix sums of the numbers of queries, from 0. To leave
            room for more sequences, repeat the last value. A sequence may be empty.
            None: each row is one sequence, of T queries and S keys.
        cu_seqlens_k: [B+1], the same for the keys; None takes `cu_seqlens_q`, and so
            does the same array.
        causal: hide keys to the right of the diagonal.
        window: (left, right), keys that are visible on each side of the diagonal
            besides the one on it; None is no limit.
        scale: factor of ``q . k``; None is ``1 / sqrt(H)``.
        softcap: bound on the magnitude of scores; None is no bound.
        sinks: [N], logit of one more key per head whose value is zero, unscaled.
        alibi_slopes: [N], penalty per token of distance from the diagonal.
        relative_bias: terms of [T, N, P] and [S, N, P] from which each score reads one
            entry by ``-d`` (`RelativeBias`), for self-attention: DeBERTa's disentangled
            attention. The terms are not scaled.
        q_descale: of q of type float8_e4m3fn, whose values are ``q * q_descale``:
            [B, K] or what broadcasts to it, positive, a number for each sequence and
            key/value head (`quantize_heads` makes them); [R, B, K] with rows. None is
            1. The result is bfloat16, and has no gradients.
        k_descale: the same for k.
        v_descale: the same for v.
        return_lse: also return ``lse``.
        deterministic: gradients are bitwise equal between runs. False allows an
            implementation a faster sum whose order varies: that of q's gradient in
            "mosaic_gpu", but for short sequences.
        implementation: "xla", "mosaic_gpu" (a kernel for Hopper GPUs, bf16 and fp16),
            "triton" (kernels for Ampere and later GPUs, bf16 and fp16, no
            relative_bias; needs the extra ``triton``), or several names in order of
            preference; None takes the best one that supports the arguments on this
            device, and always works.
        config: block sizes of the named implementation (`XlaConfig` for "xla",
            `MosaicGpuConfig` for "mosaic_gpu"); None uses its heuristic.

    Returns:
        ``out`` [T, N, Hv] in the type of q, bfloat16 of 8 bits; or ``(out, lse)`` with
        lse fp32 [T, N], in natural logarithm. A query without keys gets ``out = 0`` and
        as lse the sink, ``-inf`` without one. Rows past the last sequence get ``out =
        0``, ``lse = -inf`` and zero gradients.

    Raises:
        TypeError: q, k and v are not all fp32, bf16, fp16 or E4M3; a descale is given
            for others than E4M3; cu_seqlens are not integers; or scale or softcap is
            traced or no number.
        ValueError: shapes do not match, N is not a multiple of K, an option is out of
            range, relative_bias comes with a cu_seqlens_k that is another array than
            cu_seqlens_q, or cu_seqlens that are not traced do not fit (traced ones
            cannot be checked: prefix sums beyond T or S count as T or S).
        Unsupported: the implementation that was named cannot serve the arguments.
        NotImplementedError: a call in E4M3 is differentiated.

    Example:
        Three sequences of 3, 0 and 4 tokens in a budget of 8, 4 query heads on 2
        key/value heads:

        >>> import jax, numpy as np
        >>> keys = jax.random.split(jax.random.key(0), 3)
        >>> q = jax.random.normal(keys[0], (8, 4, 16))
        >>> k, v = (jax.random.normal(key, (8, 2, 16)) for key in keys[1:])
        >>> out = varlen_attention(q, k, v, np.array([0, 3, 3, 7]), causal=True)
        >>> out.shape
        (8, 4, 16)
        >>> bool((out[0, :2] == v[0, 0]).all())  # a first token attends to itself
        True
        >>> bool((out[7] == 0).all())  # past the last sequence
        True

    References:
        ByteTransformer (arXiv 2210.03052), section III: attention without padding. It
        unpacks q, k and v for longer sequences and stores the scores; here nothing is
        unpacked, scores stay in blocks as in FlashAttention (arXiv 2205.14135), and
        there is a backward pass. Argument names follow ``flash_attn_varlen_func``, but
        no limit is None, not -1, and the lengths' maxima need not be known. ALiBi:
        arXiv 2108.12409, penalizing both sides when not causal. Sinks: gpt-oss, after
        arXiv 2309.17453. Softcap: Gemma 2 (arXiv 2408.00118), before ALiBi. Relative
        bias: DeBERTa (arXiv 2006.03654), whose code adds it to the logits as the
        content term is, hence within the softcap.
    """
    q, k, v = (jnp.asarray(x) for x in (q, k, v))
    _check_arrays(q, k, v)
    *rows, num_queries, num_heads, head_dim = q.shape
    num_keys = k.shape[-3]
    if cu_seqlens_k is cu_seqlens_q and num_keys == num_queries:
        cu_seqlens_k = None  # every query sees itself, and one table serves both
    cu_q, cu_k = _packing(
        cu_seqlens_q, cu_seqlens_k, tuple(rows), num_queries, num_keys
    )
    known = _known_packing(cu_seqlens_q, cu_seqlens_k, q, k)
    sinks = resolve_per_head("sinks", sinks, num_heads)
    alibi_slopes = resolve_per_head("alibi_slopes", alibi_slopes, num_heads)
    terms, relative = (None, None), None
    if relative_bias is not None:
        # With the same packing the distance is that of the rows, in a tile of scores
        # too.
        if cu_k is not None:
            raise ValueError(
                "relative_bias needs keys that are packed as the queries are, got "
                "cu_seqlens_k; leave it None"
            )
        bias = check_relative_bias(relative_bias, q.shape[:-2], k.shape[:-2], num_heads)
        terms = bias.query_terms, bias.key_terms
        relative = bias.buckets, terms[0] is not None, terms[1] is not None
    descales = resolve_descales(
        q,
        {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale},
        (*rows, cu_q.shape[-1] - 1, k.shape[-2]),
    )
    scores = Scores(
        resolve_window(causal, window, num_queries + num_keys),
        resolve_scale(scale, head_dim),
        resolve_softcap(softcap),
        alibi_slopes is not None,
        relative,
        bool(deterministic),
    )

    def local(*arrays: Any) -> tuple[Array, Array]:
        # Where heads are split and, say, one key/value head is on every device, the
        # gradient of the latter is the sum over devices, the transpose of the mark.
        x = vary_alike(Inputs(*arrays, known=known))
        passes = dispatch(
            "varlen_attention",
            IMPLEMENTATIONS,
            implementation,
            x,
            scores,
            device=DeviceSpec.current(),
            config=config,
        )
        return _one_program(passes, x)

    x = Inputs(q, k, v, cu_q, cu_k, None, None, *terms, *descales)
    if not rows:
        x = jax.tree.map(lambda a: a[None], x)  # [R, ...] with R = 1
    x = x._replace(sinks=sinks, slopes=alibi_slopes)
    if x.fp8:
        x = no_derivative(x, _NO_GRADIENT)
    arrays: Any = x[: len(_DIMS)]
    out, lse = by_shards(local, arrays, _DIMS, ("rTnV", "rTn"))(*arrays)
    if not rows:
        out, lse = out[0], lse[0]  # [T, N, Hv], [T, N]
    return (out, lse) if return_lse else out


OUT_NAME, LSE_NAME = "varlen_attention_out", "varlen_attention_lse"
"""Names of the residuals, for policies of `jax.checkpoint`."""

_NO_GRADIENT = (
    "varlen_attention has no gradients with q, k and v of type float8_e4m3fn: rounding "
    "to 8 bits has none; pass bfloat16"
)

_DIMS = ("rTnH", "rSnH", "rSnV", "rB", "rB", "n", "n", "rTnP", "rSnP", "rEn", "rEn")
"""A letter for each dimension of the arrays of `Inputs`: rows and heads are
independent."""


# --- The gradient rule, one for all implementations -----------------------------------
#
# With scores ``s``, weights ``p = exp(s - lse)`` and ``out = p v``, the gradient of a
# score is ``p * (dout . v - delta)``, where ``delta = dout . out - dlse`` is a number
# for each query and head. An implementation gives the two passes over the scores; what
# needs no scores is here: which queries see anything, delta, and the gradient of sinks.
#
# Where one key has nearly all of the weight, ``dout . v`` and ``delta`` are nearly
# equal. With out rounded to 16 bits their difference would be mostly the error of the
# rounding, as it is in FlashAttention-2 and -3. So a forward pass that is
# differentiated also gives ``rest``, what the rounding took from out, in 16 bits. What
# stays is the rounding of the two sums in fp32, about 2^-22 of ``|dout| . |v|``:
# gradients below that are noise. Only a sum of ``p * (dout . v)`` over all keys,
# another pass, would be exact.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(passes: Passes, x: Inputs) -> tuple[Array, Array]:
    """``(out, lse)``; differentiable once in reverse mode."""
    out, lse, _ = passes.forward(x, False)
    return out, lse


type _Residuals = tuple[Inputs, Array, Array, Array | None]


def _attention_fwd(passes: Passes, x: Inputs) -> tuple[tuple[Array, Array], _Residuals]:
    out, lse, rest = passes.forward(x, True)
    out, rest = checkpoint_name((out, rest), OUT_NAME)
    lse = checkpoint_name(lse, LSE_NAME)
    return (out, lse), (x, out, lse, rest)


def _attention_bwd(
    passes: Passes, residuals: _Residuals, cotangents: tuple[Array, Array]
) -> tuple[Inputs]:
    x, out, lse, rest = residuals
    dout, dlse = cotangents
    inside = jnp.arange(x.q.shape[1], dtype=jnp.int32) < x.cu_q[:, -1:]  # [R, T]
    seen = inside[..., None] & (lse > -jnp.inf)
    # Cotangents of queries without keys, even NaN, are ignored.
    if x.cu_k is not None:
        dout = jnp.where(seen[..., None], dout, 0)  # [R, T, N, Hv]
    exact = out.astype(jnp.float32)
    if rest is not None:
        exact += rest.astype(jnp.float32)
    # Summed in one pass over memory. What follows goes into what XLA makes of it for
    # the kernel, if anything, and does not take the products along.
    delta = lax.optimization_barrier(jnp.sum(dout.astype(jnp.float32) * exact, axis=-1))
    delta = jnp.where(seen, delta - dlse, 0.0)
    sinks = x.sinks
    if sinks is not None:
        # A sink is a key whose value is zero.
        logits = jnp.where(seen, sinks.astype(jnp.float32) - lse, -jnp.inf)
        of_rows = -jnp.exp(logits) * delta  # [R, T, N]
        sinks = jnp.sum(of_rows, axis=(0, 1)).astype(sinks.dtype)
    grads = passes.backward(x, dout, lse, delta)
    return (grads._replace(cu_q=None, cu_k=None, sinks=sinks),)


_attention.defvjp(_attention_fwd, _attention_bwd)
# Outside of any jit, not a hundred operations.
_one_program = jax.jit(_attention, static_argnums=0)


# --- Other arguments ------------------------------------------------------------------


def varlen_attention_segment_ids(
    q: Float[Array, "T N H"],
    k: Float[Array, "S K H"],
    v: Float[Array, "S K Hv"],
    segment_ids_q: Int[Array | np.ndarray, " T"],
    segment_ids_k: Int[Array | np.ndarray, " S"] | None = None,
    *,
    max_seqs: int,
    **options: Any,
) -> Float[Array, "T N Hv"] | tuple[Float[Array, "T N Hv"], Float[Array, "T N"]]:
    """`varlen_attention` for sequences that are marked by a segment id per token.

    A query attends to keys with its own id, within the causal mask and the window.

    Args:
        q: [T, N, H], queries.
        k: [S, K, H], keys.
        v: [S, K, Hv], values.
        segment_ids_q: [T], ids in ``[0, max_seqs)`` that do not decrease, then negative
            ids to the end for padding. If 0 marks padding, pass ``segment_ids - 1``.
        segment_ids_k: [S], the same for keys; None takes `segment_ids_q`.
        max_seqs: B, static; tokens with a larger id count as padding if the ids are
            traced.
        **options: keyword arguments of `varlen_attention`.

    Returns:
        As `varlen_attention`.

    Raises:
        TypeError: ids or `max_seqs` are not integers; and as `varlen_attention`.
        ValueError: ids that are not traced are out of order or reach `max_seqs`, or
            their number is not that of the tokens; and as `varlen_attention`.

    Example:
        >>> import jax, numpy as np
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 6, 2, 8))
        >>> ids = np.array([0, 0, 0, 1, 1, -1])
        >>> out = varlen_attention_segment_ids(q, k, v, ids, max_seqs=2)
        >>> same = varlen_attention(q, k, v, np.array([0, 3, 5]))
        >>> bool((out == same).all())
        True
    """
    q, k, v = (jnp.asarray(x) for x in (q, k, v))
    _check_arrays(q, k, v)
    if segment_ids_k is None and k.shape[0] != q.shape[0]:
        raise ValueError(
            f"segment_ids_k is None but k has S={k.shape[0]} rows and q "
            f"T={q.shape[0]}; pass segment_ids_k when keys are packed differently"
        )
    pairs = [("segment_ids_q", segment_ids_q, "q", q)]
    if segment_ids_k is not None:
        pairs.append(("segment_ids_k", segment_ids_k, "k", k))
    for name, ids, rows_name, rows in pairs:
        if np.shape(ids) != rows.shape[:1]:
            raise ValueError(
                f"{name} must hold one id for each of the {rows.shape[0]} rows of "
                f"{rows_name}, got shape {np.shape(ids)}; for batched rows use jax.vmap"
            )
    cu_seqlens = [cu_seqlens_from_segment_ids(ids, max_seqs) for _, ids, *_ in pairs]
    return varlen_attention(q, k, v, *cu_seqlens, **options)


def _check_arrays(q: Array, k: Array, v: Array) -> None:
    dtypes = [str(x.dtype) for x in (q, k, v)]
    if len(set(dtypes)) > 1 or dtypes[0] not in DTYPES:
        raise TypeError(
            f"q, k and v must have one type of {', '.join(DTYPES)}, got "
            f"{', '.join(dtypes)}; cast them with .astype"
        )
    for name, x, letters in (("q", q, "T, N, H"), ("k", k, "S, K, H")):
        if x.ndim not in (3, 4):
            raise ValueError(
                f"{name} must be [{letters}] or [R, {letters}], got shape {x.shape}; "
                "use jax.vmap for further axes"
            )
    if k.shape[:-3] != q.shape[:-3]:
        raise ValueError(
            f"q and k must have the same leading axis or none, got shapes {q.shape} and"
            f" {k.shape}"
        )
    if v.shape[:-1] != k.shape[:-1]:
        raise ValueError(
            f"v must have the S, K = {k.shape[-3:-1]} of k and its leading axis, if "
            f"any, got shapes {v.shape} and {k.shape}"
        )
    if q.shape[-1] != k.shape[-1] or not q.shape[-1]:
        raise ValueError(
            f"q and k must have one head dim, got {q.shape[-1]} and {k.shape[-1]}; "
            "expected at least 1"
        )
    if 0 in (q.shape[-2], k.shape[-2]) or q.shape[-2] % k.shape[-2]:
        raise ValueError(
            f"the number of query heads N={q.shape[-2]} must be a multiple of the "
            f"number of key/value heads K={k.shape[-2]}"
        )


def _packing(
    cu_q: Array | np.ndarray | None,
    cu_k: Array | np.ndarray | None,
    rows: tuple[int, ...],
    num_queries: int,
    num_keys: int,
) -> tuple[Array, Array | None]:
    """Checked prefix sums of queries and keys; None if the keys' are the same."""
    if cu_q is None:
        if cu_k is not None:
            raise ValueError(
                "cu_seqlens_q is None but cu_seqlens_k is given; pass both, or neither "
                "for rows that are one sequence"
            )
        # Not an array of numpy: `jax.checkpoint` with `prevent_cse` for each argument
        # cannot transpose a `jax.shard_map` that holds one (JAX 0.11.2).
        ends = jnp.arange(2, dtype=jnp.int32)
        whole_q, whole_k = (
            jnp.broadcast_to(ends * size, (*rows, 2))
            for size in (num_queries, num_keys)
        )
        return whole_q, None if num_queries == num_keys else whole_k
    checked_q = check_cu_seqlens("cu_seqlens_q", cu_q, num_queries, rows)
    if cu_k is None:
        if num_queries != num_keys:
            raise ValueError(
                f"cu_seqlens_k is None but k has S={num_keys} rows and q "
                f"T={num_queries}; pass cu_seqlens_k when keys are packed differently "
                "from queries"
            )
        return checked_q, None
    checked_k = check_cu_seqlens("cu_seqlens_k", cu_k, num_keys, rows)
    if checked_k.shape != checked_q.shape:
        raise ValueError(
            "cu_seqlens_q and cu_seqlens_k must have one length, got "
            f"{checked_q.shape[-1]} and {checked_k.shape[-1]}; repeat the last value "
            "to pad"
        )
    return checked_q, checked_k


def _known_packing(
    cu_q: Array | np.ndarray | None, cu_k: Array | np.ndarray | None, q: Array, k: Array
) -> KnownPacking | None:
    """The packing, if it is not traced and all rows, on all devices, have the same.

    Programs that the caller does not trace are not rebuilt for each packing.
    """
    num_queries, num_keys = q.shape[-3], k.shape[-3]
    if cu_q is None:
        whole_k = None if num_queries == num_keys else (0, num_keys)
        return KnownPacking((0, num_queries), whole_k)
    if not isinstance(q, Tracer):
        return None

    def of_each_row(cu: Array | np.ndarray) -> tuple[int, ...] | None:
        values = concrete(cu)
        if values is None:
            return None
        first, *others = values.reshape(-1, values.shape[-1]).tolist()
        return None if any(row != first for row in others) else tuple(first)

    known_q = of_each_row(cu_q)
    known_k = None if cu_k is None else of_each_row(cu_k)
    if known_q is None or (cu_k is not None and known_k is None):
        return None
    return KnownPacking(known_q, known_k)
