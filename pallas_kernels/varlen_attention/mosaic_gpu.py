"""Hopper implementation of variable-length attention: what surrounds the kernels.

The forward and the backward kernel take a batch of R packed rows. One call has one row;
`jax.vmap` over a leading axis makes it many, in one grid, so that the blocks of all
rows share the multiprocessors. What is done here: checks, padding, the gradient rule,
the batching rule.

Axes: R rows of the batch, T packed queries, S packed keys, N query heads, K key/value
heads, H head dim.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_batching import custom_vmap
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import Unsupported
from pallas_kernels.mosaic import (
    DeviceSpec,
    as_varying,
    check_hopper,
    check_smem,
    varying,
)
from pallas_kernels.partition import check_local
from pallas_kernels.varlen_attention.backward import backward
from pallas_kernels.varlen_attention.backward_short import backward_short
from pallas_kernels.varlen_attention.config import (
    BACKWARD_TILES,
    HEAD_DIMS,
    MOST_SHORT_SEQUENCES,
    ROWS,
    BackwardBlocks,
    ForwardBlocks,
    MosaicGpuConfig,
    Problem,
    backward_blocks,
    backward_smem,
    forward_blocks,
    forward_smem,
)
from pallas_kernels.varlen_attention.forward import forward
from pallas_kernels.varlen_attention.forward_short import forward_short
from pallas_kernels.varlen_attention.mainloop import Scores, tile_terms
from pallas_kernels.varlen_attention.relative import RelativeBias, RelativeBuckets
from pallas_kernels.varlen_attention.scheduler import Sequences
from pallas_kernels.varlen_attention.segments import Window
from pallas_kernels.varlen_attention.xla import varlen_attention_xla_backward


__all__ = ["varlen_attention_mosaic_gpu"]

_LARGEST_INT = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class _Call:
    """What is static about a call."""

    scores: Scores
    config: MosaicGpuConfig
    device: DeviceSpec
    one_packing: bool
    """Keys are packed as the queries are, so every query sees at least itself."""


def varlen_attention_mosaic_gpu(
    q: Float[Array, "T N H"],
    k: Float[Array, "S K H"],
    v: Float[Array, "S K Hv"],
    cu_seqlens_q: Int[Array, " bounds"],
    cu_seqlens_k: Int[Array, " bounds"],
    sinks: Float[Array, " N"] | None,
    alibi_slopes: Float[Array, " N"] | None,
    *,
    relative_bias: RelativeBias | None,
    window: Window,
    scale: float,
    softcap: float | None,
    deterministic: bool,
    device: DeviceSpec | None,
    config: object,
) -> tuple[Float[Array, "T N Hv"], Float[Array, "T N"]]:
    """See `varlen_attention`; the arguments are checked and their defaults resolved.

    Head dims other than 64, 128 and 256 are padded with zeros to the next of them. The
    gradient with a relative bias is that of the portable implementation.
    """
    del deterministic  # sums have a fixed order
    device = check_hopper(device, "varlen_attention")
    check_local("varlen_attention", q, k, v)
    head_dim = _padded_head_dim(q, k, v)
    if config is not None and not isinstance(config, MosaicGpuConfig):
        raise Unsupported(
            f"mosaic_gpu varlen_attention takes a MosaicGpuConfig, got {config!r}; pass"
            " the config of the implementation that you name"
        )
    config = config or MosaicGpuConfig()
    relative, terms = _checked_terms(relative_bias, q)
    scores = Scores(
        window, scale, softcap, sinks is not None, alibi_slopes is not None, relative
    )
    value_dim = v.shape[2]
    q, k, v = (_pad(x, head_dim) for x in (q, k, v))
    call = _Call(scores, config, device, cu_seqlens_k is cu_seqlens_q)
    # Raised here, where another implementation may still be chosen.
    _forward_blocks(call, _problem(q[None], k[None], cu_seqlens_q[None]))
    out, lse = _jitted(
        call, q, k, v, cu_seqlens_q, cu_seqlens_k, sinks, alibi_slopes, terms
    )
    return out[..., :value_dim], lse


def _padded_head_dim(q: Array, k: Array, v: Array) -> int:
    """The head dim that the kernels are built for."""
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        raise Unsupported(
            f"varlen_attention: type {q.dtype.name}, the kernel takes bfloat16 or"
            " float16; cast them or use implementation='xla'"
        )
    widest = max(q.shape[2], v.shape[2])
    if widest > HEAD_DIMS[-1]:
        raise Unsupported(
            f"varlen_attention: head dim {widest}, the kernel takes at most"
            f" {HEAD_DIMS[-1]}; use implementation='xla'"
        )
    if 0 in (*q.shape, *k.shape, *v.shape):
        raise Unsupported(
            f"varlen_attention: empty arrays of shapes {q.shape}, {k.shape}, {v.shape};"
            " use implementation='xla'"
        )
    return min(n for n in HEAD_DIMS if n >= widest)


type _Terms = tuple[Array | None, Array | None]
"""Query and key terms of a relative bias."""


def _checked_terms(
    bias: RelativeBias | None, q: Array
) -> tuple[tuple[RelativeBuckets, bool, bool] | None, _Terms]:
    """What `Scores` says of a relative bias, and its terms."""
    if bias is None:
        return None, (None, None)
    terms = bias.query_terms, bias.key_terms
    for x in terms:
        if x is not None and x.dtype != q.dtype:
            raise Unsupported(
                f"varlen_attention: terms of a relative bias of type {x.dtype.name}, "
                f"the kernel takes that of q, {q.dtype.name}; cast them or use "
                "implementation='xla'"
            )
    relative = bias.buckets, terms[0] is not None, terms[1] is not None
    return relative, terms


def _pad(x: Array, head_dim: int) -> Array:
    """Columns to the head dim of the kernel, with zeros."""
    missing = head_dim - x.shape[2]
    return jnp.pad(x, ((0, 0), (0, 0), (0, missing))) if missing else x


# --- The gradient rule ----------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(
    call: _Call,
    q: Array,
    k: Array,
    v: Array,
    cu_q: Array,
    cu_k: Array,
    sinks: Array | None,
    slopes: Array | None,
    terms: _Terms,
) -> tuple[Array, Array]:
    return _attention_fwd(call, q, k, v, cu_q, cu_k, sinks, slopes, terms)[0]


def _attention_fwd(
    call: _Call,
    q: Array,
    k: Array,
    v: Array,
    cu_q: Array,
    cu_k: Array,
    sinks: Array | None,
    slopes: Array | None,
    terms: _Terms,
) -> tuple[tuple[Array, Array], tuple]:
    optional = [x.astype(jnp.float32) for x in (sinks, slopes) if x is not None]
    # The copy engine moves whole lines of 16 bytes.
    optional += [
        jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % 8)))
        for x in terms
        if x is not None
    ]
    out, lse = _batched(_forward, call)(q, k, v, cu_q, cu_k, *optional)
    axes = varying(q, k, v, cu_q, cu_k)
    out, lse = as_varying(out, axes), as_varying(lse, axes)
    # Rematerialization policies may keep these two by name.
    out = checkpoint_name(out, "varlen_attention_out")
    lse = checkpoint_name(lse, "varlen_attention_lse")
    return (out, lse), (q, k, v, cu_q, cu_k, sinks, slopes, terms, out, lse)


def _attention_bwd(
    call: _Call, residuals: tuple, cotangents: tuple[Array, Array]
) -> tuple[Any, ...]:
    q, k, v, cu_q, cu_k, sinks, slopes, _, out, lse = residuals
    if (relative := call.scores.relative) is not None:
        return varlen_attention_xla_backward(
            residuals,
            cotangents,
            buckets=relative[0],
            window=call.scores.window,
            scale=call.scores.scale,
            softcap=call.scores.softcap,
            device=call.device,
        )
    dout, dlse = cotangents
    # What arrives for a query that sees nothing, NaN too, is nobody's gradient. What
    # lies past the last sequence is not read.
    inside = jnp.arange(q.shape[0], dtype=jnp.int32) < cu_q[-1]
    seen = inside[:, None] & (lse > -jnp.inf)
    if not call.one_packing:
        dout = jnp.where(seen[..., None], dout, 0)
    delta = jnp.sum(dout.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    delta = jnp.where(seen, delta - dlse, 0.0)
    dsinks = None
    if sinks is not None:
        logits = jnp.where(seen, sinks.astype(jnp.float32) - lse, -jnp.inf)
        dsinks = -jnp.sum(jnp.exp(logits) * delta, axis=0).astype(sinks.dtype)
    optional = [] if slopes is None else [slopes.astype(jnp.float32)]
    grads = _batched(_backward, call)(q, k, v, dout, lse, delta, cu_q, cu_k, *optional)
    axes = varying(q, k, v, cu_q, cu_k, dout)
    dq, dk, dv, *dslopes = (as_varying(x, axes) for x in grads)
    dslopes = dslopes[0].astype(slopes.dtype) if slopes is not None else None
    return dq, dk, dv, None, None, dsinks, dslopes, (None, None)


_attention.defvjp(_attention_fwd, _attention_bwd)
# Outside of any jit, one program is compiled and not a hundred operations.
_jitted = jax.jit(_attention, static_argnums=0)


# --- The batching rule ----------------------------------------------------------------


def _batched(run: Callable[..., tuple[Array, ...]], call: _Call) -> Callable[..., Any]:
    """A function of one row from one of many rows, whose `jax.vmap` is one call."""

    def of_rows(*arrays: Array) -> tuple[Array, ...]:
        @custom_vmap
        def rows(*arrays: Array) -> tuple[Array, ...]:
            return run(call, *arrays)

        @rows.def_vmap
        def _(size: int, batched: list[bool], *arrays: Array) -> tuple[Any, Any]:
            most = _LARGEST_INT // max(
                x.size // size if has_axis else x.size
                for x, has_axis in zip(arrays, batched, strict=True)
            )
            if 0 < most < size:  # more than the kernel counts to: some rows at a time
                results = _some_at_a_time(of_rows, most, batched, arrays)
                return results, tuple(True for _ in results)

            def merge(x: Array, has_axis: bool) -> Array:
                x = x if has_axis else jnp.broadcast_to(x, (size, *x.shape))
                return x.reshape(-1, *x.shape[2:])

            flat = map(merge, arrays, batched)
            results = of_rows(*flat)
            split = tuple(x.reshape(size, -1, *x.shape[1:]) for x in results)
            return split, tuple(True for _ in split)

        return rows(*arrays)

    def of_one(*arrays: Array) -> tuple[Array, ...]:
        return tuple(x[0] for x in of_rows(*(a[None] for a in arrays)))

    return of_one


def _some_at_a_time(
    run: Callable[..., tuple[Array, ...]],
    most: int,
    batched: list[bool],
    arrays: tuple[Array, ...],
) -> tuple[Array, ...]:
    """`jax.vmap` of `run` over those arrays that are `batched`, a few at a time."""

    def one(mapped: tuple[Array, ...]) -> tuple[Array, ...]:
        mine = iter(mapped)
        pairs = zip(arrays, batched, strict=True)
        return run(*(next(mine) if has_axis else x for x, has_axis in pairs))

    mapped = tuple(x for x, has_axis in zip(arrays, batched, strict=True) if has_axis)
    return lax.map(one, mapped, batch_size=most)


def _problem(q: Array, k: Array, cu_q: Array) -> Problem:
    problem = Problem(
        rows=q.shape[0],
        queries=q.shape[1],
        keys=k.shape[1],
        max_seqs=cu_q.shape[1] - 1,
        heads=q.shape[2],
        kv_heads=k.shape[2],
        head_dim=q.shape[3],
        dtype=q.dtype,
    )
    for name, x in (("q", q), ("k", k)):
        if x.size > _LARGEST_INT:
            raise Unsupported(
                f"varlen_attention: {name} has {x.size} elements, the kernel counts to"
                f" {_LARGEST_INT}; split the batch or use implementation='xla'"
            )
    return problem


def _forward_blocks(call: _Call, problem: Problem) -> ForwardBlocks:
    alibi = call.scores.alibi
    blocks = call.config.forward or forward_blocks(problem, call.device, alibi)
    if call.scores.relative is not None and call.config.forward is None:
        blocks = ForwardBlocks(block_k=64)  # the terms take more room than the keys
    most = MOST_SHORT_SEQUENCES
    if blocks.consumers == 1 and (call.scores.relative or problem.max_seqs > most):
        raise Unsupported(
            "varlen_attention: consumers=1 takes no relative bias and at most "
            f"{most} sequences, got {problem.max_seqs}; expected 2 or 3"
        )
    size = forward_smem(problem, blocks)
    if (relative := tile_terms(call.scores, blocks)) is not None:
        size += relative.smem(blocks.stages, problem.dtype.itemsize)
    check_smem(size, call.device, f"varlen_attention with {blocks}")
    return blocks


def _backward_blocks(call: _Call, problem: Problem) -> BackwardBlocks:
    alibi = call.scores.alibi
    blocks = call.config.backward or backward_blocks(problem, call.device, alibi)
    tile, expected = (blocks.block_q, blocks.block_k), BACKWARD_TILES[problem.head_dim]
    if blocks.consumers == 1:
        expected, most = (ROWS, ROWS), MOST_SHORT_SEQUENCES
        if problem.head_dim != 64 or alibi or problem.max_seqs > most:
            raise Unsupported(
                "varlen_attention: a gradient with consumers=1 takes head dim 64, no"
                f" ALiBi and at most {most} sequences, got head dim {problem.head_dim}"
                f" and {problem.max_seqs} sequences; expected 2"
            )
    if tile != expected:
        raise Unsupported(
            f"varlen_attention: block_q, block_k = {tile} with head dim"
            f" {problem.head_dim}, expected {expected}"
        )
    if problem.groups % blocks.splits:
        raise Unsupported(
            f"varlen_attention: splits={blocks.splits} of {problem.groups} query heads,"
            " expected a divisor"
        )
    size = backward_smem(problem, blocks)
    check_smem(size, call.device, f"gradient of varlen_attention with {blocks}")
    return blocks


def _forward(
    call: _Call,
    q: Array,
    k: Array,
    v: Array,
    cu_q: Array,
    cu_k: Array,
    *optional: Array,
) -> tuple[Array, Array]:
    """Of many rows: ``(out, lse)``."""
    problem = _problem(q, k, cu_q)
    arrays = iter(optional)
    sinks = next(arrays) if call.scores.sinks else None
    slopes = next(arrays) if call.scores.alibi else None
    terms = tuple(arrays)
    blocks = _forward_blocks(call, problem)
    if blocks.consumers == 1:
        return forward_short(
            problem, call.scores, blocks, q, k, v, cu_q, cu_k, sinks, slopes
        )
    seqs = Sequences.of(cu_q, cu_k, problem.queries, problem.keys)
    return forward(
        problem, call.scores, blocks, q, k, v, seqs, sinks, slopes, call.device, terms
    )


def _backward(
    call: _Call,
    q: Array,
    k: Array,
    v: Array,
    dout: Array,
    lse: Array,
    delta: Array,
    cu_q: Array,
    cu_k: Array,
    *optional: Array,
) -> tuple[Array, ...]:
    """Of many rows: ``(dq, dk, dv)`` and, with slopes, their gradient."""
    problem = _problem(q, k, cu_q)
    blocks = _backward_blocks(call, problem)
    if blocks.consumers == 1:
        return backward_short(
            problem, call.scores, blocks, q, k, v, dout, lse, delta, cu_q, cu_k
        )
    # Summed in one pass, and not where it is cut into tiles.
    delta = lax.optimization_barrier(delta)
    lse = jnp.where(lse > -jnp.inf, lse, jnp.inf)
    seqs = Sequences.of(cu_q, cu_k, problem.queries, problem.keys)
    slopes = optional[0] if optional else None
    grads = backward(
        problem, call.scores, blocks, q, k, v, dout, lse, delta, seqs, slopes
    )
    return tuple(x for x in grads if x is not None)
