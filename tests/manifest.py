"""Every kernel at every spec, as hashes of its Mosaic modules.

A module is what Pallas hands to Mosaic GPU: all operations of a kernel, without their
places in the source. Layout inference and what follows see nothing but the module, so
equal hashes are equal kernels: code can be moved, and no GPU is needed to know that
speed and numbers stay the same. The hashes are equal on all machines.

`python -m tests.manifest` names the kernels that differ from those of `manifest.json`.
With ``--write`` it lowers these to the end, as `tests.lowering` does, and writes them
down: a commit that changes kernels on purpose holds their new hashes and says so.

Nothing is traced for an op whose code is the one that `manifest.json` was written for:
it holds a digest of all syntax that an op is made of. The digest changes with the code,
not with comments and docstrings, and a stale one costs time and hides nothing. Before
``--write`` writes another digest, it compiles the cases of `tests.registers` and
refuses kernels that spill, so that equal code need not be compiled again.
"""

import argparse
import contextlib
import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import core as mosaic

from benchmarks.publish import kernel_code
from pallas_kernels.collective_matmul import (
    all_gather_matmul,
    low_latency_all_gather_matmul,
    low_latency_all_reduce,
    make_all_reduce_workspace,
    make_gather_workspace,
    matmul_all_reduce,
    matmul_reduce_scatter,
    scaled_all_gather_matmul,
    scaled_matmul_reduce_scatter,
)
from pallas_kernels.collective_matmul.specs import ROWS, TENSOR_PARALLEL
from pallas_kernels.collective_matmul.specs import SPECS as COLLECTIVE
from pallas_kernels.collective_matmul.tunable import problems as collective_problems
from pallas_kernels.decode_layer import (
    LayerWeights,
    NextProjection,
    PagedCache,
    SharedTileSparse,
    attending_decode_layer,
    decode_layer,
    share,
)
from pallas_kernels.decode_layer.specs import SPECS as DECODE_LAYER
from pallas_kernels.decode_layer.specs import DecodeLayerSpec
from pallas_kernels.encode_layer import EncodeLayerWeights, encode_layer
from pallas_kernels.encode_layer.specs import SPECS as ENCODE_LAYER
from pallas_kernels.fp8_operands import (
    quantize_and_transpose,
    quantize_gated,
    quantize_gated_gradients,
    quantize_rms_norm,
    quantize_rows,
    quantize_squares,
    transpose,
    transpose_blocks,
    transpose_rows,
)
from pallas_kernels.fp8_operands.specs import SPECS as FP8_OPERANDS
from pallas_kernels.layer_norm import layer_norm
from pallas_kernels.layer_norm.specs import SPECS as LAYER_NORM
from pallas_kernels.matmul import ResidualNorm, dense, matmul
from pallas_kernels.matmul.specs import SPECS as MATMUL
from pallas_kernels.mosaic import H200, use_device
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention.specs import SPECS as PAGED
from pallas_kernels.quantized_matmul import quantized_matmul
from pallas_kernels.quantized_matmul.specs import SPECS as QUANTIZED
from pallas_kernels.scaled_matmul import scaled_matmul
from pallas_kernels.scaled_matmul.specs import SPECS as SCALED
from pallas_kernels.segment_mean import segment_mean
from pallas_kernels.segment_mean.specs import SPECS as SEGMENT_MEAN
from pallas_kernels.tile_sparse_matmul import TileSparse, tile_sparse_matmul
from pallas_kernels.tile_sparse_matmul.specs import SPECS as TILE_SPARSE
from pallas_kernels.varlen_attention import (
    RelativeBias,
    RelativeBuckets,
    paged_varlen_attention,
    varlen_attention,
)
from pallas_kernels.varlen_attention.specs import SPECS as ATTENTION
from tests.lowering import MulticastRefused, lower_for_cuda


P = jax.sharding.PartitionSpec
BF16 = jnp.dtype(jnp.bfloat16)
FP32 = jnp.dtype(jnp.float32)
INT32 = jnp.dtype(jnp.int32)

PATH = Path(__file__).with_suffix(".json")

MULTICAST_MARKS = (
    "mosaic_gpu.multimem_used",
    "mosaic_gpu.symmetric_memory_args",
    "is_global_broadcast = true",
    "multimem = true",
    "multimem.",
)
"""What NVLink multicast leaves in a module."""


class Case(NamedTuple):
    """A function that calls kernels, and what it takes."""

    name: str
    fn: Callable[..., Any]
    arguments: tuple[Any, ...]
    mesh: Mapping[str, int] | None = None


def array(*sizes: int, dtype: Any = BF16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def with_gradients(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The results of ``fn`` and its gradients, with the results as cotangents."""

    def both(*arguments: Any) -> Any:
        outputs, pullback = jax.vjp(fn, *arguments)
        return outputs, pullback(outputs)

    return both


# --- What is lowered ------------------------------------------------------------------


def attention_cases() -> Iterator[Case]:
    for spec in ATTENTION:
        q = array(sum(spec.lengths_q), spec.num_heads, spec.head_dim)
        k = array(sum(spec.lengths_k), spec.num_kv_heads, spec.head_dim)
        v = array(sum(spec.lengths_k), spec.num_kv_heads, spec.value_size)
        per_head = {
            name: array(spec.num_heads, dtype=FP32)
            for name, given in (("sinks", spec.sinks), ("alibi_slopes", spec.alibi))
            if given
        }
        cu_seqlens_q, cu_seqlens_k = spec.cu_seqlens()
        attend = functools.partial(
            varlen_attention,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            causal=spec.causal,
            window=spec.window,
            softcap=spec.softcap,
            implementation="mosaic_gpu",
        )

        # The arguments are bound now: `attend` is another one in the next turn.
        def run(q, k, v, per_head, attend=attend):
            return attend(q, k, v, **per_head)

        # A forward pass that is differentiated stores more.
        def both(*arguments, run=run):
            return run(*arguments), with_gradients(run)(*arguments)

        yield Case(spec.name, both, (q, k, v, per_head))
    yield from fp8_cases()
    yield from relative_cases()
    yield from chunk_cases()


def fp8_cases() -> Iterator[Case]:
    """Attention of 8-bit operands, which has no gradients."""
    every = {"window": (500, 0), "softcap": 5.0}
    cases: tuple[tuple[int, dict[str, Any]], ...] = (
        *((head_dim, {"causal": True}) for head_dim in (64, 128, 256)),
        (128, {}),
        (128, every),
    )
    for head_dim, options in cases:
        q, k = (array(8192, n, head_dim, dtype=jnp.float8_e4m3fn) for n in (32, 8))

        def run(q, k, v, cu, descale, options=options):
            scales = dict.fromkeys(("q_descale", "k_descale", "v_descale"), descale)
            return varlen_attention(
                q, k, v, cu, implementation="mosaic_gpu", **scales, **options
            )

        arguments = q, k, k, array(9, dtype=jnp.int32), array(8, 8, dtype=FP32)
        yield Case("_".join(["fp8", str(head_dim), *options]), run, arguments)


def relative_cases() -> Iterator[Case]:
    """Attention with a relative-position bias; with ALiBi its gradient is XLA's."""
    deberta = RelativeBuckets(span=256, max_distance=512)
    both = ("query_terms", "key_terms")
    cases: tuple[Any, ...] = (
        ("relative_deberta", deberta, both, {}),
        ("relative_deberta_softcap", deberta, both, {"softcap": 1.5}),
        ("relative_linear", RelativeBuckets(span=30), both[1:], {"causal": True}),
        ("relative_window", deberta, both[:1], {"window": (70, 20)}),
    )
    for name, buckets, terms, options in cases:
        q = array(4939, 12, 64)
        entries = array(4939, 12, buckets.num_entries)
        per_head = {"sinks": array(12, dtype=FP32)} if "window" in options else {}
        if "causal" in options:
            per_head = {"alibi_slopes": array(12, dtype=FP32)}

        def run(q, terms, per_head, buckets=buckets, options=options):
            bias = RelativeBias(
                **{"query_terms": None, "key_terms": None} | terms, buckets=buckets
            )
            return varlen_attention(
                q,
                q,
                q,
                cu_seqlens_q=jnp.arange(17, dtype=jnp.int32) * 308,
                relative_bias=bias,
                implementation="mosaic_gpu",
                **per_head,
                **options,
            )

        arguments = q, dict.fromkeys(terms, entries), per_head
        yield Case(name, with_gradients(run), arguments)


def chunk_cases() -> Iterator[Case]:
    """Chunks of prompts over pages: as LLaMA 3 8B is served, and other sizes."""
    for head_dim, page, options in (
        (128, 64, {}),
        (64, 16, {"window": 1000}),
        (256, 256, {"softcap": 50.0}),
    ):
        arrays = {
            "q": array(2048, 32, head_dim),
            "pages": array(2, 1024, 2, 8, page, head_dim),
            "layer": array(dtype=INT32),
            "table": array(16, 64, dtype=INT32),
            "cu_seqlens_q": array(17, dtype=INT32),
            "lengths": array(16, dtype=INT32),
        }

        def run(arrays, options=options):
            options = options | {"implementation": "mosaic_gpu"}
            return paged_varlen_attention(**arrays, **options)

        yield Case(f"chunks_d{head_dim}_page{page}", run, (arrays,))


def paged_attention_cases() -> Iterator[Case]:
    for spec in PAGED:
        rows, new, size = spec.batch, spec.queries, spec.head_dim
        pool = 2, rows * spec.width, 2, spec.num_kv_heads
        scales = {}
        if spec.dtype != "bfloat16":
            scales = {"kv_scales": array(*pool, dtype=FP32)}
        arrays = scales | {
            "q": array(rows, new, spec.num_heads, size),
            "kv": array(rows, new, 2, spec.num_kv_heads, size),
            "pages": array(*pool, spec.page, size, dtype=spec.dtype),
            "layer": array(dtype=INT32),
            "table": array(rows, spec.width, dtype=INT32),
            "lengths": array(rows, dtype=INT32),
        }

        def run(arrays, window=spec.window):
            return paged_attention(**arrays, window=window, implementation="mosaic_gpu")

        yield Case(spec.name, run, (arrays,))


def matmul_cases() -> Iterator[Case]:
    run = functools.partial(matmul, implementation="mosaic_gpu")
    for spec in MATMUL:
        x, w = array(spec.m, spec.k), array(spec.k, spec.n)
        yield Case(spec.name, with_gradients(run), (x, w))
    layer = functools.partial(dense, activation="gelu", implementation="mosaic_gpu")
    for m, widths, k in (
        (9984, (768, 768, 768), 768),
        (9984, (3072,), 768),
        (2048, (1024, 256, 256), 1024),
        (256, (64,), 64),
    ):
        ws, biases = [array(k, n) for n in widths], [array(n) for n in widths]
        name = f"dense_m{m}_k{k}_n" + "_".join(map(str, widths))
        yield Case(name, with_gradients(layer), (array(m, k), ws, biases))

    def in_place(x, w, bias, layer, *norm):
        options = {"layer": layer, "implementation": "mosaic_gpu"}
        norm = ResidualNorm(*norm, eps=1e-12)
        return dense(x, [w], [bias], norm=norm, **options)

    for m, n, k in ((256, 768, 768), (688, 768, 3072), (4096, 1024, 1024)):
        of_layers = array(12, k, n), array(12, n), array(dtype=INT32)
        added = array(m, n), array(n), array(n)
        name = f"dense_norm_m{m}_k{k}_n{n}"
        yield Case(name, in_place, (array(m, k), *of_layers, *added))


def encode_layer_cases() -> Iterator[Case]:
    for name, p in ENCODE_LAYER.items():

        def run(attended, residual, weights, heads, layer, following, last=not p.heads):
            return encode_layer(
                attended,
                residual,
                weights,
                heads,
                layer=layer,
                following=None if last else following,
                activation="gelu",
                eps=1e-12,
                implementation="mosaic_gpu",
            )

        def linear(k, n):
            return array(12, k, n), array(12, n)

        d, f = p.d_model, p.d_ff
        norm = array(d), array(d)
        weights = EncodeLayerWeights(
            *linear(p.attended, d), *norm, *linear(d, f), *linear(f, d), *norm
        )
        rows, number = (array(p.m, p.attended), array(p.m, d)), array(dtype=INT32)
        heads = [linear(d, n) for n in p.heads]
        yield Case(name, run, (*rows, weights, heads, number, number))


def quantized_matmul_cases() -> Iterator[Case]:
    for spec in QUANTIZED:
        run = functools.partial(
            quantized_matmul, out_dtype=spec.out_dtype, implementation="mosaic_gpu"
        )
        w = array(spec.n, spec.k, dtype=spec.weight_dtype)
        arguments = array(spec.m, spec.k), w, array(spec.n, dtype=FP32)
        yield Case(spec.name, run, arguments)


def decode_layer_cases() -> Iterator[Case]:
    run = functools.partial(decode_layer, eps=1e-5, implementation="mosaic_gpu")
    for s in DECODE_LAYER:
        rows, columns = max(s.m, 8), (s.heads + 2 * s.kv_heads) * s.head_dim

        def weight(name: str, s: DecodeLayerSpec = s) -> dict[str, Any]:
            shape = s.products[name]
            if s.keep < 1:
                return {name: tile_sparse_shapes(shape, s)}
            if s.weights == "bfloat16":
                return {name: array(*shape)}
            found = array(*shape[::-1], dtype=jnp.dtype(s.weights))
            return {name: found, f"{name}_scale": array(shape[1], dtype=FP32)}

        layer = LayerWeights(
            **weight("out"),
            mlp_norm=array(s.d_model),
            **weight("gate_up"),
            **weight("down"),
        )
        table = array(s.head_dim // 2, rows, dtype=FP32)
        projection = NextProjection(
            norm=array(s.d_model),
            **weight("qkv"),
            bias=array(columns) if s.bias else None,
            cos=table,
            sin=table,
            out=layer.out,
            heads=s.heads,
            kv_heads=s.kv_heads,
        )
        attended = array(s.m, s.heads * s.head_dim)
        residual = array(s.d_model, rows, dtype=FP32)
        yield Case(s.name, run, (attended, residual, layer, projection))
        if s.context:
            queries = array(s.m, s.kv_heads, 8, s.head_dim)
            given = queries, residual, layer, projection, paged_cache(s)
            run_attending = functools.partial(attending_decode_layer, eps=1e-5)
            yield Case(f"{s.name}_attending", run_attending, given)


def paged_cache(s: DecodeLayerSpec) -> PagedCache:
    """The pages of as many requests, in two layers."""
    width = -(-s.context // 64)

    def integers(*shape: int) -> Any:
        return array(*shape, dtype=jnp.dtype(jnp.int32))

    return PagedCache(
        pages=array(2, s.m * width, 2, s.kv_heads, 64, s.head_dim),
        layer=integers(),
        table=integers(s.m, width),
        lengths=integers(s.m),
        num_new=integers(s.m),
        places=integers(max(s.m, 8)),
        scale=s.head_dim**-0.5,
    )


def tile_sparse_shapes(shape: tuple[int, int], s: DecodeLayerSpec) -> SharedTileSparse:
    """A weight of a decoder layer."""
    k, n = shape
    room, tiles = s.room(k), n // 128
    leaves = (
        array(tiles, room, 128),
        array(tiles, room, dtype=INT32),
        array(tiles, dtype=INT32),
        None,
        None,
        array(tiles, dtype=INT32) if s.uneven else None,
    )
    w = TileSparse.tree_unflatten((shape, 1, not s.uneven, None), leaves)
    return jax.eval_shape(functools.partial(share, device=H200), w)


def scaled_matmul_cases() -> Iterator[Case]:
    run = functools.partial(scaled_matmul, implementation="mosaic_gpu")
    for spec in SCALED:
        rows = spec.m, spec.n
        operands = [
            array(size, spec.k, dtype=dtype)
            for size, dtype in zip(rows, spec.types, strict=True)
        ]
        scales = [array(*([n] if spec.by_row else []), dtype=FP32) for n in rows]
        yield Case(spec.name, run, (*operands, *scales))
    shapes = {  # the second operand by squares, as a weight is, and by rows
        "llama3_8b_down_blocks": (8192, 4096, 14336, 4096 // 128),
        "llama3_8b_up_dw_blocks": (4096, 14336, 8192, 14336),
    }
    for name, (m, n, k, b_scales) in shapes.items():
        arrays = [array(size, k, dtype="float8_e4m3fn") for size in (m, n)]
        scales = [array(size, k // 128, dtype=FP32) for size in (m, b_scales)]
        yield Case(name, run, (*arrays, *scales))


def fp8_operand_cases() -> Iterator[Case]:
    options = {"implementation": "mosaic_gpu"}
    for spec in FP8_OPERANDS:

        def run(x, spec=spec):
            rows = quantize_rows(x, spec.dtype, through=BF16, **options)
            return rows, transpose_rows(*rows, **options)

        x = array(spec.m, spec.k, dtype=spec.x_dtype)
        yield Case(spec.name, run, (x,))

        def both(x, scale, spec=spec):
            found = quantize_and_transpose(
                x, scale, spec.dtype, through=BF16, **options
            )
            return *found, transpose(found[0], **options)

        yield Case(f"{spec.name}_per_tensor", both, (x, array(dtype=FP32)))
        if spec.x_dtype != "bfloat16" or spec.dtype != "float8_e4m3fn":
            continue

        def gated(gate, up, g):
            gate_options = {"activation": "silu", **options}
            return (
                quantize_gated(gate, up, "float8_e4m3fn", **gate_options),
                quantize_gated_gradients(gate, up, g, "float8_e5m2", **gate_options),
            )

        def norm(x, weight):
            return quantize_rms_norm(x, weight, "float8_e4m3fn", eps=1e-5, **options)

        if "mlp" in spec.name:
            yield Case(f"{spec.name}_gated", gated, (x, x, x))
        elif "hidden" in spec.name:
            yield Case(f"{spec.name}_norm", norm, (x, array(spec.k, dtype=FP32)))

    def blocks(x, up, g, weight, w):
        e4m3, e5m2, more = "float8_e4m3fn", "float8_e5m2", {"blocks": True, **options}
        gated = {"activation": "silu", **more}
        rows = quantize_rows(x, e4m3, **more)
        return (
            rows,
            transpose_blocks(rows.data, rows.scale, **options),
            quantize_squares(w, e4m3, through=BF16, **options),
            quantize_rms_norm(x, weight, e4m3, eps=1e-5, **more),
            quantize_gated(x, up, e4m3, **gated),
            quantize_gated_gradients(x, up, g, e5m2, **gated),
        )

    def served(x, weight, both):
        """As a decode step with 8-bit weights has it."""
        return (
            quantize_rms_norm(x, weight, "float8_e4m3fn", eps=1e-5, **options),
            quantize_gated(both, None, "float8_e4m3fn", activation="silu", **options),
        )

    for m in (128, 2048):
        shapes = array(m, 4096), array(4096), array(m, 2 * 14336)
        yield Case(f"llama3_8b_served_{m}", served, shapes)

    for k in (3584, 4096):  # 4 and 8 numbers of a block in each lane
        x, weight, w = array(8192, k), array(k, dtype=FP32), array(4096, k, dtype=FP32)
        yield Case(f"blocks_{k}", blocks, (x, x, x, weight, w))


def segment_mean_cases() -> Iterator[Case]:
    run = functools.partial(segment_mean, implementation="mosaic_gpu")
    for name, spec in SEGMENT_MEAN.items():
        x = array(1, spec.tokens, spec.features)
        yield Case(name, run, (x, array(1, spec.sequences + 1, dtype=INT32)))


def layer_norm_cases() -> Iterator[Case]:
    run = functools.partial(layer_norm, eps=1e-5, implementation="mosaic_gpu")
    for spec in LAYER_NORM:
        if spec.t < 4:  # which the kernel declines
            continue
        rows, row = array(spec.t, spec.d), array(spec.d)
        arrays = {"x": rows, "residual": rows, "scale": row, "bias": row, "x_bias": row}
        both = with_gradients(lambda arrays: run(**arrays))
        yield Case(spec.name, both, (arrays,))


def tile_sparse_cases() -> Iterator[Case]:
    for spec in TILE_SPARSE:
        w = spec.weight_shape()
        x = array(*(spec.k, spec.m) if spec.feature_major[0] else (spec.m, spec.k))

        def run(x, w, layout=spec.feature_major):
            if not isinstance(w, TileSparse):  # it has no gradient
                return tile_sparse_matmul(
                    x, w, feature_major=layout, implementation="mosaic_gpu"
                )

            def multiply(x, values):
                return tile_sparse_matmul(
                    x,
                    w.with_values(values),
                    feature_major=layout,
                    implementation="mosaic_gpu",
                )

            return with_gradients(multiply)(x, w.values)

        yield Case(spec.name, run, (x, w))


def collective_cases() -> Iterator[Case]:
    whole, rows, columns = P(), P("tensor"), P(None, "tensor")
    ops = {
        "all_gather": (all_gather_matmul, rows, columns, columns),
        "reduce_scatter": (matmul_reduce_scatter, columns, rows, rows),
        "all_reduce": (matmul_all_reduce, columns, rows, whole),
    }
    found = dict(collective_problems())
    for name, problem in collective_problems().items():
        if problem.kind == "all_reduce" and problem.m == min(ROWS):
            for rows in {max(rows, problem.devices) for rows in (1, 4)}:  # as it pads
                few = dataclasses.replace(problem, m=rows)
                found[f"{name.partition(' ')[0]} {few.key}"] = few
    for name, problem in found.items():
        op, x_spec, w_spec, y_spec = ops[problem.kind]
        size, (k,), (n,) = problem.devices, problem.k, problem.n
        if problem.kind == "all_gather":
            x, w = array(problem.m, k), array(k, n * size)
        else:
            x, w = array(problem.m, k * size), array(k * size, n)
        run = functools.partial(op, axis_name="tensor", implementation="mosaic_gpu")
        sharded = jax.shard_map(
            run, in_specs=(x_spec, w_spec), out_specs=y_spec, check_vma=False
        )
        yield Case(name, sharded, (x, w), {"tensor": size})
    yield from low_latency_cases()
    yield from scaled_collective_cases()


def low_latency_cases() -> Iterator[Case]:
    """Calls without a barrier, and what each program begins with."""
    rows, columns = P("tensor"), P(None, "tensor")
    on: dict[str, Any] = {"axis_name": "tensor", "device": H200}

    def gather(x, w, push):
        workspace = make_gather_workspace(*x.shape, x.dtype, push=push, **on)
        y, workspace = low_latency_all_gather_matmul(x, w, workspace, **on)
        return y, workspace.turns

    def reduce(y):
        workspace = make_all_reduce_workspace(y.size, y.dtype, **on)
        y, workspace = low_latency_all_reduce(y, workspace, axis_name="tensor")
        return y, workspace.turns

    for size in TENSOR_PARALLEL:
        for push in (False, True):
            sharded = jax.shard_map(
                functools.partial(gather, push=push),
                in_specs=(rows, columns),
                out_specs=(columns, rows),
                check_vma=False,
            )
            arguments = array(1024, 4096), array(4096, 6144)
            name = f"low_latency_all_gather {'push' if push else 'pull'} tp={size}"
            yield Case(name, sharded, arguments, {"tensor": size})
        sharded = jax.shard_map(
            reduce, in_specs=rows, out_specs=(P(), rows), check_vma=False
        )
        name = f"low_latency_all_reduce tp={size}"
        yield Case(name, sharded, (array(16 * size, 4096),), {"tensor": size})


def scaled_collective_cases() -> Iterator[Case]:
    rows, columns = P("tensor"), P(None, "tensor")
    ops = {
        "all_gather": (scaled_all_gather_matmul, rows, rows, (rows, rows), columns),
        "reduce_scatter": (
            *(scaled_matmul_reduce_scatter, columns, columns),
            *((P(), P()), rows),
        ),
    }
    for spec in COLLECTIVE:
        for m, size in ((2048, 4), (8192, 4), (8192, 2)):
            if not spec.name.startswith("llama70b"):
                continue
            op, a_spec, b_spec, scale_specs, y_spec = ops[spec.kind]
            a, b = (array(n, spec.k, dtype=jnp.float8_e4m3fn) for n in (m, spec.n))
            scales = (array(n, dtype=FP32) for n in (m, spec.n))
            run = functools.partial(op, axis_name="tensor", implementation="mosaic_gpu")
            sharded = jax.shard_map(
                run,
                in_specs=(a_spec, b_spec, *scale_specs),
                out_specs=y_spec,
                check_vma=False,
            )
            name = f"{spec.name} fp8 tp={size} m={m}"
            yield Case(name, sharded, (a, b, *scales), {"tensor": size})


OPS: Mapping[str, Callable[[], Iterator[Case]]] = {
    "varlen_attention": attention_cases,
    "paged_attention": paged_attention_cases,
    "matmul": matmul_cases,
    "decode_layer": decode_layer_cases,
    "encode_layer": encode_layer_cases,
    "quantized_matmul": quantized_matmul_cases,
    "scaled_matmul": scaled_matmul_cases,
    "fp8_operands": fp8_operand_cases,
    "layer_norm": layer_norm_cases,
    "segment_mean": segment_mean_cases,
    "tile_sparse_matmul": tile_sparse_cases,
    "collective_matmul": collective_cases,
}
"""The packages of kernels, and every call of them that is written down."""


# --- Hashes ---------------------------------------------------------------------------


@contextlib.contextmanager
def recorded(found: list[str], *, to_the_end: bool) -> Iterator[None]:
    """Appends name and hash of each module that is lowered inside."""
    lower = mosaic.lower_mgpu_module

    def record(module: Any, *arguments: Any, **options: Any) -> None:
        text = module.operation.get_asm(enable_debug_info=False)
        name = module.operation.attributes["sym_name"].value
        if marks := [mark for mark in MULTICAST_MARKS if mark in text]:
            raise MulticastRefused(f"kernel {name} uses NVLink multicast: {marks}")
        found.append(f"{name} {hashlib.sha256(text.encode()).hexdigest()[:12]}")
        if to_the_end:
            lower(module, *arguments, **options)
        else:  # nothing is left that takes time
            for operation in list(module.body):
                operation.erase()

    with mock.patch.object(mosaic, "lower_mgpu_module", record):
        yield


def kernels(case: Case, *, to_the_end: bool = False) -> str:
    """Names and hashes of the kernels of a case, in the order of the program.

    Args:
        case: What to lower.
        to_the_end: Whether to run the passes after Pallas too, which check layouts and
            shared memory and take most of the time.
    """
    found: list[str] = []
    fn = functools.partial(case.fn)  # a new one: nothing comes from caches of JAX
    with use_device(H200), recorded(found, to_the_end=to_the_end):
        lower_for_cuda(fn, *case.arguments, mesh=case.mesh)
    return ", ".join(found)


def differences(op: str, cases: Iterator[Case]) -> Iterator[tuple[Case, str]]:
    """The cases whose kernels are not as written down, and their kernels now."""
    written = read()["kernels"][op]
    for case in cases:
        if (now := kernels(case)) != written.get(case.name):
            yield case, now


def digest(op: str) -> str:
    """A hash of all that the kernels of an op come from: its code and its cases."""
    return kernel_code.digest(sorted([Path(__file__), *kernel_code.sources(op)]))


def is_written(op: str, manifest: Mapping[str, Any]) -> bool:
    """Whether the code of an op is the one that was compiled and written down."""
    code = manifest["code"].get(op)
    return manifest["jax"] == jax.__version__ and code == digest(op)


# --- The file -------------------------------------------------------------------------


def read() -> dict[str, Any]:
    """Version of JAX, digest of the code of each op, kernels of each of its cases."""
    return json.loads(PATH.read_text())


def compare(op: str, manifest: dict[str, Any], *, write: bool) -> int:
    """Prints the cases of an op that differ, writes them down, returns how many."""
    written = manifest["kernels"].get(op, {})
    again = manifest["jax"] != jax.__version__
    current, changed = {}, 0
    for case in OPS[op]():
        now, before = kernels(case), written.get(case.name)
        if different := now != before:
            print(f"{op} {case.name}: was {before}, is {now}", flush=True)
        if write and (different or again):
            kernels(case, to_the_end=True)
        changed += different
        current[case.name] = now
    for name in written.keys() - current.keys():
        print(f"{op} {name}: gone")
        changed += 1
    if write and not is_written(op, manifest):
        from tests import registers

        for name in registers.CASES.get(op, ()):
            registers.check(op, name)
    manifest["kernels"][op], manifest["code"][op] = current, digest(op)
    return changed


def main() -> None:
    """Compares every kernel, or writes them down."""
    parser = argparse.ArgumentParser(prog="python -m tests.manifest")
    parser.add_argument("ops", nargs="*", default=list(OPS), help="all by default")
    parser.add_argument("--write", action="store_true", help=f"write {PATH.name}")
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    manifest = read()
    ops = OPS if manifest["jax"] != jax.__version__ else arguments.ops
    changed = sum(compare(op, manifest, write=arguments.write) for op in ops)
    if arguments.write:
        manifest["jax"] = jax.__version__
        PATH.write_text(json.dumps(manifest, indent=1) + "\n")
    elif changed:
        raise SystemExit(f"{changed} cases are not as in {PATH.name}")


if __name__ == "__main__":
    main()
