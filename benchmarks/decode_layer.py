"""Decoder layers of few requests, from one attention to the next: one launch, or XLA's.

``xla`` is what serving runs without the kernel: the blocks of `jaxscale.models` as they
decode, in bfloat16 and of at least two rows, about ten launches a layer. The attention
between layers is part of neither: its place takes what it would get, the queries. A
call is a chain of layers as in a decode step, each with the residual stream of the one
before, since launches cost most where one waits for the other. ``layer_us`` is the time
of a layer, ``read_gb_per_second`` how fast its weights are read, which is the bound.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks.measure import command
from benchmarks.measure.harness import Benchmark, Case, Jax
from jaxscale.models import Decoder
from jaxscale.models.families.llama import llama_tiny
from jaxscale.models.quantization import replace_linear
from jaxscale.nn.linear import project_together
from jaxscale.nn.quantized_linear import QuantizedLinear, quantize_kernel
from jaxscale.nn.tile_sparse_linear import TileSparseLinear
from pallas_kernels.decode_layer import (
    LayerWeights,
    NextProjection,
    SharedTileSparse,
    as_residual,
    decode_layer,
    from_residual,
    reference,
    rotation,
    share,
)
from pallas_kernels.decode_layer.specs import SPECS, DecodeLayerSpec
from pallas_kernels.mosaic import H200, DeviceSpec
from pallas_kernels.tile_sparse_matmul import TileSparse


QUICK = DecodeLayerSpec(name="tiny", m=3, d_model=256, d_ff=256, heads=2, kv_heads=1)
BY_NAME = {spec.name: spec for spec in (*SPECS, QUICK)}
EPS, LAYERS = 1e-5, 8
QUANTIZED = {"int8": "int8", "float8_e4m3fn": "fp8"}
"""How weights are rounded, by their type."""


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

    def weight(name):
        k, n = s.products[name]
        if s.keep < 1:
            after_norm = name in ("gate_up", "qkv")
            return {name: tile_sparse(s, k, n, next(keys), after_norm)}
        made = normal(k, n, size=k**-0.5)
        if s.weights not in QUANTIZED:
            return {name: made}
        numbers, scale = quantize_kernel(made, QUANTIZED[s.weights])
        return {name: numbers, f"{name}_scale": scale}

    layer = LayerWeights(
        **weight("out"),
        mlp_norm=1 + normal(s.d_model, size=0.2),
        **weight("gate_up"),
        **weight("down"),
    )
    pairs = s.head_dim // 2
    angles = jax.random.uniform(next(keys), (s.m, pairs), maxval=1000.0)
    cos, sin = rotation(angles)
    projection = NextProjection(
        norm=1 + normal(s.d_model, size=0.2),
        **weight("qkv"),
        bias=normal(columns) if s.bias else None,
        cos=cos,
        sin=sin,
        out=layer.out,
        heads=s.heads,
        kv_heads=s.kv_heads,
    )
    return normal(s.m, features), normal(s.m, s.d_model), angles, layer, projection


def tile_sparse(s, k, n, key, after_norm):
    """A weight whose tiles keep random rows."""
    keys, tiles, room = jax.random.split(key, 3), n // 128, s.room(k)
    counts = jnp.full(tiles, room)
    if s.uneven:
        counts = jax.random.randint(keys[0], (tiles,), room // 3, room + 1)
    _, rows = jax.lax.top_k(jax.random.uniform(keys[1], (tiles, k)), room)
    past = jnp.arange(room) >= counts[:, None]  # [T, P]
    rows = jnp.sort(jnp.where(past, k, rows), axis=1)
    last = jnp.max(rows, axis=1, where=~past, initial=0, keepdims=True)
    values = jax.random.normal(keys[2], (tiles, room, 128)) * (s.keep * k) ** -0.5
    leaves = (
        jnp.where(past[..., None], 0, values).astype(jnp.bfloat16),
        jnp.where(past, last, rows),
        counts,
        None,
        None,
        jnp.argsort(-counts) if s.uneven else None,
    )
    w = TileSparse.tree_unflatten(((k, n), 1, not s.uneven, None), leaves)
    return share(w, DeviceSpec.current() or H200, after_norm=after_norm)


def chain(params, run):
    """What some layers make; ``run`` is one of them."""

    def layers(attended, x, angles, layer, projection):
        del angles  # the projection has their cosines and sines
        residual, made = as_residual(x), []
        for _ in range(params["layers"]):
            residual, q, kv = run(attended, residual, layer, projection)
            attended = q.reshape(attended.shape)
            made.append(kv.reshape(len(attended), -1))
        return from_residual(residual, len(x)), attended, made

    return layers


def one_launch(params):
    """The kernel."""

    def run(*operands):
        residual, heads = decode_layer(*operands, eps=EPS, implementation="mosaic_gpu")
        assert heads is not None  # a projection is among the operands
        return residual, *heads

    return chain(params, run)


def blocks(params):
    """The blocks of a model, as `jaxscale.inference` decodes with them."""
    s = BY_NAME[params["spec"]]
    sizes = {
        name: getattr(s, name)
        for name in ("d_model", "d_ff", "heads", "kv_heads", "head_dim")
    }
    names = {"heads": "num_heads", "kv_heads": "num_kv_heads"}
    config = dataclasses.replace(
        llama_tiny(),
        num_layers=1,
        attention_bias=s.bias,
        norm_eps=EPS,
        **{names.get(name, name): size for name, size in sizes.items()},
    )

    def make():
        bf16 = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
        model = Decoder(config, rngs=nnx.Rngs(0), **bf16).for_inference()
        if s.weights in QUANTIZED:
            kind = QUANTIZED[s.weights]
            replace_linear(
                model.blocks[0], lambda layer, _: QuantizedLinear.of(layer, kind)
            )
        return model

    def sparse(module, shared):
        return TileSparseLinear(
            jax.tree.map(lambda leaf: leaf[None], shared.parts[0]),
            split=None,
            kernel_axes=module.kernel_axes,
            out_axes=module.out_axes,
            dtype=jnp.bfloat16,
        )

    structure, shapes = nnx.split(jax.eval_shape(make).blocks[0])

    def run(attended, x, cos, sin, layer, projection):
        block = nnx.merge(structure, shapes)
        attention, mlp = block.attention, block.mlp
        block.mlp_norm.scale = nnx.Param(layer.mlp_norm)
        block.attention_norm.scale = nnx.Param(projection.norm)
        layers = {
            "out": (attention.out, layer),
            "gate_up": (mlp.joined, layer),
            "down": (mlp.down, layer),
            "qkv": (attention.joined, projection),
        }
        if s.keep < 1:
            attention.out = sparse(attention.out, layer.out)
            attention.joined = sparse(attention.joined, projection.qkv)
            mlp.joined = sparse(mlp.joined, layer.gate_up)
            mlp.down = sparse(mlp.down, layer.down)
            layers = {}
        for name, (module, given) in layers.items():
            module.kernel = nnx.Param(getattr(given, name))
            if s.weights in QUANTIZED:
                module.scale = nnx.Param(getattr(given, f"{name}_scale"))
        if s.bias:
            attention.joined.bias = nnx.Param(projection.bias)
        x = x + attention.out(attended)  # [M,1,D]
        x = x + mlp(block.mlp_norm(x))
        projected = project_together(attention.inputs, x, norm=block.attention_norm)
        q, k, v = attention.split_heads(projected)

        def rotated(x):  # as `jaxscale.nn.rotary` does
            a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
            out = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
            return out.astype(x.dtype)

        # The kernel of attention takes keys and values together.
        return x, rotated(q), jnp.stack([rotated(k), v], axis=2)

    def layers(attended, x, angles, layer, projection):
        rows, made = ((0, max(0, 2 - s.m)), (0, 0)), []
        attended, x = (jnp.pad(array, rows)[:, None] for array in (attended, x))
        angles = jnp.pad(angles, rows)[:, None, None]
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        for _ in range(params["layers"]):
            x, q, kv = run(attended, x, cos, sin, layer, projection)
            attended = q.reshape(attended.shape)
            made.append(kv[: s.m].reshape(s.m, -1))
        return x[: s.m, 0].astype(jnp.float32), attended[: s.m, 0], made

    return layers


def definition(params):
    """The reference, as the implementations return it."""
    s = BY_NAME[params["spec"]]

    def run(attended, residual, layer, projection):
        given = {"attended": attended, "residual": residual}
        for part in (layer, projection):
            for k, v in vars(part).items():
                if isinstance(v, jax.Array | SharedTileSparse):
                    given[k] = v
        residual, qkv = reference.decode_layer(
            given, heads=s.heads + s.kv_heads, head_dim=s.head_dim, eps=EPS
        )
        assert qkv is not None
        queries = s.heads * s.head_dim
        return residual, qkv[:, :queries], qkv[:, queries:]

    return chain(params, run)


def read_bytes(params):
    """Bytes of the weights of a layer."""
    s = BY_NAME[params["spec"]]
    size = jnp.dtype(s.weights).itemsize * s.keep
    return int(size * sum(k * n for k, n in s.products.values()))


BENCHMARK = Benchmark(
    name="decode_layer",
    cases=[case(spec) for spec in SPECS],
    quick_cases=[case(QUICK)],
    kernels=("decode_layer",),
    inputs=inputs,
    reference=definition,
    implementations={
        "mosaic_gpu": Jax(one_launch),
        "xla": Jax(blocks),
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
