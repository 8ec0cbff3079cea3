"""Decoder layers of few requests, from one attention to the next: one launch, or XLA's.

``xla`` is the same layer as the compiler cuts it, about ten launches; the attention
between layers is part of neither: its place takes what it would get, the queries. A
call is a chain of layers as in a decode step, each with the residual stream of the one
before, since launches cost most where one waits for the other. ``layer_us`` is the time
of a layer, ``read_gb_per_second`` how fast its weights are read, which is the bound.
"""

import jax
import jax.numpy as jnp

from benchmarks.measure import command
from benchmarks.measure.harness import Benchmark, Case, Jax
from pallas_kernels.decode_layer import (
    LayerWeights,
    NextProjection,
    as_residual,
    decode_layer,
    reference,
    rotation,
)
from pallas_kernels.decode_layer.specs import SPECS, DecodeLayerSpec


QUICK = DecodeLayerSpec(name="tiny", m=3, d_model=256, d_ff=256, heads=2, kv_heads=1)
BY_NAME = {spec.name: spec for spec in (*SPECS, QUICK)}
EPS, LAYERS = 1e-5, 8


def case(spec):
    """Layers of a model and the requests of a step."""
    return Case(spec.name, {"M": spec.m, "spec": spec.name, "layers": LAYERS})


def inputs(params, key):
    """Random normal activations, and weights that keep their size."""
    s = BY_NAME[params["spec"]]
    keys = iter(jax.random.split(key, 12))
    features, columns = s.heads * s.head_dim, (s.heads + 2 * s.kv_heads) * s.head_dim

    def normal(*shape, size=1.0):
        return (jax.random.normal(next(keys), shape) * size).astype(jnp.bfloat16)

    def weight(k, n):
        return normal(k, n, size=k**-0.5)

    layer = LayerWeights(
        out=weight(features, s.d_model),
        mlp_norm=1 + normal(s.d_model, size=0.2),
        gate_up=weight(s.d_model, 2 * s.d_ff),
        down=weight(s.d_ff, s.d_model),
    )
    pairs = s.head_dim // 2
    angles = jax.random.uniform(next(keys), (s.m, pairs), maxval=1000.0)
    cos, sin = rotation(angles)
    projection = NextProjection(
        norm=1 + normal(s.d_model, size=0.2),
        qkv=weight(s.d_model, columns),
        bias=normal(columns) if s.bias else None,
        cos=cos,
        sin=sin,
        heads=s.heads,
        kv_heads=s.kv_heads,
    )
    residual = as_residual(normal(s.m, s.d_model))
    return normal(s.m, features), residual, layer, projection


def chain(params, run):
    """The residual stream after some layers; ``run`` is one of them."""

    def layers(attended, residual, layer, projection):
        for _ in range(params["layers"]):
            residual, q = run(attended, residual, layer, projection)
            attended = q.reshape(attended.shape)
        return residual[:, : params["M"]], attended

    return layers


def implementation(name):
    """The public function with one implementation."""

    def make(params):
        def run(*operands):
            residual, heads = decode_layer(*operands, eps=EPS, implementation=name)
            assert heads is not None  # a projection is among the operands
            return residual, heads[0]

        return chain(params, run)

    return Jax(make)


def definition(params):
    """The reference, as the implementations return it."""
    s = BY_NAME[params["spec"]]

    def run(attended, residual, layer, projection):
        given = {"attended": attended, "residual": residual}
        for part in (layer, projection):
            given |= {k: v for k, v in vars(part).items() if isinstance(v, jax.Array)}
        residual, qkv = reference.decode_layer(
            given, heads=s.heads + s.kv_heads, head_dim=s.head_dim, eps=EPS
        )
        assert qkv is not None
        return residual, qkv[:, : s.heads * s.head_dim]

    return chain(params, run)


def read_bytes(params):
    """Bytes of the weights of a layer."""
    s = BY_NAME[params["spec"]]
    features, columns = s.heads * s.head_dim, (s.heads + 2 * s.kv_heads) * s.head_dim
    return 2 * s.d_model * (features + 3 * s.d_ff + columns)


BENCHMARK = Benchmark(
    name="decode_layer",
    cases=[case(spec) for spec in SPECS],
    quick_cases=[case(QUICK)],
    kernels=("decode_layer",),
    inputs=inputs,
    reference=definition,
    implementations={
        "mosaic_gpu": implementation("mosaic_gpu"),
        "xla": implementation("xla"),
    },
    metrics=lambda params, seconds: {
        "layer_us": 1e6 * seconds / params["layers"],
        "read_gb_per_second": read_bytes(params) * params["layers"] / seconds / 1e9,
    },
    time="wall",
    burst=8,
    count_kernels=True,
    read_bytes=read_bytes,
    max_rel_error=0.05,
    selectors={"requests": "M"},
)

if __name__ == "__main__":
    command.run(BENCHMARK)
