"""DeBERTa's disentangled attention alone: a layer's scores with relative positions.

From queries, keys and values of packed tokens and the projected tables of positions to
the result, and in ``fwd_bwd`` to the gradients of all five; the matmuls of contents
and positions are within the time. Lengths are uniform in [0.2 L, L]. Padded forms get
their operands padded before they are timed; each ends by a gather of its valid rows,
about a hundredth of its time, so that all give the same.

- ``mosaic_gpu``, ``xla``: `varlen_attention` with a `RelativeBias`.
- ``jax_padded``: cuDNN's attention with the terms as a bias, [B, N, L, L].
- ``flash_deberta``: FlashDeBERTa's kernels in Triton, on the same packed tokens.
- ``torch``, ``torch_compile``: scores and terms stored, as transformers does.

Axes: B sequences, L padded length, T tokens, N heads, H head dim, P table rows.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.measure import command, timing
from benchmarks.measure.harness import Benchmark, Case, Jax, Params, Torch
from benchmarks.paged_attention import Remembered
from benchmarks.rivals.attention_baselines import want_package
from pallas_kernels.varlen_attention import (
    RelativeBias,
    RelativeBuckets,
    position_terms,
    varlen_attention,
)
from pallas_kernels.varlen_attention.specs import bytetransformer


MODELS = {"deberta_v3_base": (12, 64, 256), "deberta_v3_large": (16, 64, 256)}
"""Heads, head dim, and half the rows of the tables."""


def lengths_of(params: Params) -> np.ndarray:
    """Tokens of each sequence."""
    return bytetransformer(params["batch"], params["max_len"]).astype(np.int32)


def case(model: str, batch: int, max_len: int, what: str, shape: tuple = ()) -> Case:
    """One layer's attention."""
    heads, dim, span = shape or MODELS[model]
    params = {"pass": what, "batch": batch, "max_len": max_len}
    params |= {"heads": heads, "head_dim": dim, "span": span}
    params["tokens"] = int(lengths_of(params).sum())
    return Case(f"{model}_b{batch}_l{max_len}", params)


def buckets_of(params: Params) -> RelativeBuckets:
    """Which row of the tables a distance takes."""
    return RelativeBuckets(span=params["span"], max_distance=2 * params["span"])


def scale_of(params: Params) -> float:
    """Of the three matmuls together."""
    return (3 * params["head_dim"]) ** -0.5


def inputs(params: Params, key: jax.Array) -> tuple:
    """Random q, k, v of [T, N, H], tables of [P, N, H], gradient of the result."""
    tokens, heads, dim = params["tokens"], params["heads"], params["head_dim"]
    rows = tokens, tokens, tokens, 2 * params["span"], 2 * params["span"], tokens
    keys = jax.random.split(key, len(rows))
    return tuple(
        jax.random.normal(k, (n, heads, dim), jnp.bfloat16)
        for k, n in zip(keys, rows, strict=True)
    )


type Attend = Callable[..., Any]


def passes(params: Params, attend: Attend) -> Callable[..., Any]:
    """The result of `attend`, or the gradients as well."""
    if params["pass"] == "fwd":
        return lambda q, k, v, to_keys, to_queries, dout: attend(
            q, k, v, to_keys, to_queries
        )

    def run(*operands: Any) -> tuple:
        out, back = jax.vjp(attend, *operands[:-1])
        return out, *back(operands[-1])

    return run


# --- Ours -----------------------------------------------------------------------------


def ours(implementation: str) -> Jax:
    """`varlen_attention` on packed tokens."""

    def make(params: Params) -> Callable[..., Any]:
        scale = scale_of(params)
        bounds = np.cumsum([0, *lengths_of(params)], dtype=np.int32)

        def attend(q: Any, k: Any, v: Any, to_keys: Any, to_queries: Any) -> Any:
            bias = RelativeBias(
                query_terms=position_terms(q, to_keys, scale),
                key_terms=position_terms(k, to_queries, scale),
                buckets=buckets_of(params),
            )
            return varlen_attention(
                q,
                k,
                v,
                bounds,
                scale=scale,
                relative_bias=bias,
                implementation=implementation,
            )

        return passes(params, attend)

    return Jax(make)


# --- Padded ---------------------------------------------------------------------------


def places(params: Params) -> tuple[np.ndarray, np.ndarray]:
    """For padded rows [B, L] their packed row, and for packed rows their padded one."""
    lengths = lengths_of(params)
    starts = np.cumsum([0, *lengths[:-1]])
    offsets = np.arange(params["max_len"])
    inside = offsets < lengths[:, None]  # [B, L]
    return np.where(inside, starts[:, None] + offsets, 0), np.flatnonzero(inside)


def entries_of(params: Params) -> np.ndarray:
    """The row of the tables for each pair of places, [L, L]."""
    i = np.arange(params["max_len"])
    return buckets_of(params).entry(i[:, None] - i)


def padded_attend(params: Params, cudnn: bool) -> Attend:
    """Attention of [B, L, N, H] with the terms as a bias; gives packed rows.

    Args:
        params: of the case.
        cudnn: whether cuDNN computes it; or else scores are stored.
    """
    entries, valid = entries_of(params)[None, None], places(params)[1]
    inside = np.arange(params["max_len"]) < lengths_of(params)[:, None]
    scale = scale_of(params)

    def attend(q: Any, k: Any, v: Any, to_keys: Any, to_queries: Any) -> jax.Array:
        by_query = jnp.einsum("blnh,pnh->bnlp", q, to_keys)
        by_key = jnp.einsum("blnh,pnh->bnlp", k, to_queries)
        bias = jnp.take_along_axis(by_query, entries, axis=3)
        read = jnp.take_along_axis(by_key, entries.swapaxes(2, 3), axis=3)
        bias = (bias + read.swapaxes(2, 3)) * jnp.asarray(scale, q.dtype)
        bias = jnp.where(inside[:, None, None], bias, jnp.asarray(-1e9, q.dtype))
        if cudnn:
            out = jax.nn.dot_product_attention(
                q, k, v, bias=bias, scale=scale, implementation="cudnn"
            )
        else:
            scores = scale * jnp.einsum("blnh,bsnh->bnls", q, k) + bias
            out = jnp.einsum("bnls,bsnh->blnh", jax.nn.softmax(scores), v)
        return out.reshape(-1, *out.shape[2:])[valid]  # [T, N, H]

    return attend


def padded(params: Params, cudnn: bool) -> Callable[..., Any]:
    """The same of packed rows, whose padding is not timed."""
    rows, valid = places(params)

    def prepare(*packed: Any) -> tuple:
        q, k, v, *tables, dout = packed
        return *(x[rows] for x in (q, k, v)), *tables, dout

    def run(*operands: Any) -> Any:
        found = passes(params, padded_attend(params, cudnn))(*operands)
        if params["pass"] == "fwd":
            return found
        out, *grads = found
        flat = [x.reshape(-1, *x.shape[2:])[valid] for x in grads[:3]]  # [T, N, H]
        return out, *flat, *grads[3:]

    jitted = jax.jit(run)
    return Remembered(prepare, lambda ready: (jitted(*ready), ready))


def jax_padded(params: Params) -> Callable[..., Any]:
    """The padded form by cuDNN."""
    if not timing.on_gpu():
        raise NotImplementedError("cuDNN needs a GPU")
    return padded(params, cudnn=True)


def reference(params: Params) -> Callable[..., Any]:
    """The definition: scores stored."""
    rows, _ = places(params)
    attend = padded_attend(params, cudnn=False)

    def packed_attend(q: Any, k: Any, v: Any, *tables: Any) -> Any:
        return attend(q[rows], k[rows], v[rows], *tables)

    return passes(params, packed_attend)


# --- PyTorch --------------------------------------------------------------------------


def torch_passes(params: Params, attend: Attend) -> Callable[..., Any]:
    """As `passes`, of a function of torch."""
    import torch

    def run(*operands: Any) -> Any:
        *wanted, dout = operands
        if params["pass"] == "fwd":
            with torch.no_grad():
                return attend(*wanted)
        wanted = [x.detach().requires_grad_() for x in wanted]
        out = attend(*wanted)
        return out, *torch.autograd.grad(out, wanted, dout)

    return run


def flash_deberta(params: Params) -> Callable[..., Any]:
    """FlashDeBERTa on packed tokens."""
    want_package("flashdeberta", "flashdeberta")
    import torch

    module = importlib.import_module("flashdeberta.ops.flash_attention_varlen")
    bounds = np.cumsum([0, *lengths_of(params)], dtype=np.int32)
    bounds = torch.tensor(bounds, device="cuda")
    longest, span = int(lengths_of(params).max()), params["span"]

    def attend(q: Any, k: Any, v: Any, to_keys: Any, to_queries: Any) -> Any:
        # [P, N, H] to [1, N, P, H]
        tables = (x.transpose(0, 1)[None] for x in (to_keys, to_queries))
        return module.flash_attention_with_disentangled_varlen(
            q,
            k,
            v,
            *tables,
            bounds,
            bounds,
            longest,
            longest,
            sm_scale=scale_of(params),
            position_buckets=span,
            max_relative_distance=2 * span,
        )

    return torch_passes(params, attend)


def torch_padded(params: Params, compiled: bool) -> Callable[..., Any]:
    """Scores and terms stored, as transformers does."""
    import torch

    rows, valid = (torch.tensor(x) for x in places(params))
    entries = torch.tensor(entries_of(params).astype(np.int64))
    inside = torch.arange(params["max_len"]) < torch.tensor(lengths_of(params))[:, None]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows, valid, entries, inside = (
        x.to(device) for x in (rows, valid, entries, inside)
    )
    scale = scale_of(params)

    def attend(q: Any, k: Any, v: Any, to_keys: Any, to_queries: Any) -> Any:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B, N, L, H]
        shape = (*q.shape[:2], *entries.shape)
        by_query = q @ to_keys.permute(1, 2, 0)  # [B, N, L, P]
        by_key = k @ to_queries.permute(1, 2, 0)
        scores = q @ k.transpose(-1, -2) + by_query.gather(3, entries.expand(shape))
        read = by_key.gather(3, entries.T.expand(shape)).transpose(-1, -2)
        scores = (scores + read) * scale
        scores = scores.masked_fill(~inside[:, None, None], float("-inf"))
        out = torch.softmax(scores, -1, dtype=torch.float32).to(v.dtype) @ v
        return out.transpose(1, 2).flatten(0, 1)[valid]  # [T, N, H]

    if compiled:
        torch.compiler.reset()
        attend = torch.compile(attend, dynamic=False)
    both = torch_passes(params, attend)

    def prepare(*packed: Any) -> tuple:
        q, k, v, *tables, dout = packed
        return *(x[rows] for x in (q, k, v)), *tables, dout

    def run(ready: Any) -> tuple[Any, Any]:
        found = both(*ready)
        if params["pass"] == "fwd":
            return found, ready
        out, *grads = found
        flat = [x.flatten(0, 1)[valid] for x in grads[:3]]
        return (out, *flat, *grads[3:]), ready

    return Remembered(prepare, run)


def metrics(params: Params, seconds: float) -> dict[str, float]:
    """Rate of what is useful: two products of pairs, two of tokens and positions."""
    pairs = int((lengths_of(params).astype(np.int64) ** 2).sum())
    wide = params["heads"] * params["head_dim"]
    flops = 4 * wide * (pairs + params["tokens"] * 2 * params["span"])
    factor = 1 if params["pass"] == "fwd" else 3.5
    return {"tflops": factor * flops / seconds / 1e12}


SIZES = ((16, 512), (16, 256), (16, 128), (16, 1024), (1, 512), (64, 512))

BENCHMARK = Benchmark(
    name="disentangled_attention",
    cases=[
        case(model, batch, length, what)
        for model, sizes in zip(MODELS, (SIZES, SIZES[:1]), strict=True)
        for batch, length in sizes
        for what in ("fwd", "fwd_bwd")
    ],
    quick_cases=[case("tiny", 3, 16, "fwd_bwd", (2, 16, 4))],
    kernels=("varlen_attention",),
    # Those of tests at the same tables, which no case is named like.
    spec=lambda case: "relative_deberta",
    inputs=inputs,
    reference=reference,
    implementations={
        "mosaic_gpu": ours("mosaic_gpu"),
        "xla": ours("xla"),
        "jax_padded": Jax(jax_padded, jit=False),
        "flash_deberta": Torch(flash_deberta),
        "torch": Torch(functools.partial(torch_padded, compiled=False)),
        "torch_compile": Torch(functools.partial(torch_padded, compiled=True)),
    },
    metrics=metrics,
    selectors={"pass": "pass", "batch": "batch", "max_len": "max_len"},
)

if __name__ == "__main__":
    command.run(BENCHMARK)
