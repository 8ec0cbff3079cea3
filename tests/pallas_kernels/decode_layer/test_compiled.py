"""A decoder layer compiled for H200s: one kernel, no spills, no weight copied."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.decode_layer import DecodeLayerConfig, mosaic_gpu, share
from pallas_kernels.decode_layer.api import _arrays
from pallas_kernels.mosaic import H200
from pallas_kernels.tile_sparse_matmul import TileSparse
from tests.compiled import compile_for_h200
from tests.pallas_kernels.decode_layer.test_decode_layer import EPS, operands
from tests.pallas_kernels.decode_layer.test_gpu import LLAMA3_8B
from tests.pallas_kernels.decode_layer.test_peers import (
    P,
    begin,
    layer_of,
    local_problem,
    split,
)
from tests.registers import kernels, on_one
from tests.tiers import exhaustive


@pytest.mark.parametrize(
    "name",
    [
        "llama3_8b_m64",
        "llama3_8b_m32_fp8",
        "llama3_8b_m32_uneven75",
        *exhaustive(
            "llama3_8b_m1",
            "qwen2_7b_m8",
            "llama3_8b_m32_int8",
            "llama3_8b_m1_sparse75",
        ),
    ],
)
def test_it_is_one_launch_and_spills_nothing(name):
    found = compile_for_h200(kernels, "decode_layer", name)
    assert [(k.name, k.spilled) for k in found.kernels] == [("decode_layer", 0)]
    # The other one clears the semaphores.
    started = [x for x in found.thunks if x.split()[0] != "kCommandBuffer"]
    assert [x.split()[0] for x in started] == ["kCustomKernel", "kCustomCall"]
    assert found.count("copy") == found.count("transpose") == 0


def mixed_layer(devices, m):
    """A layer of LLaMA 3 8B of whose weights some, or parts of them, stay dense."""
    problem = dataclasses.replace(LLAMA3_8B, m=m, d_ff=1024)

    def sparse(key, k, n, tiles, room):
        values = jax.random.normal(key, (tiles, room, 128), jnp.bfloat16)
        rows, counts = jnp.zeros((tiles, room), jnp.int32), jnp.full(tiles, room)
        return TileSparse(values, rows, counts, jnp.arange(tiles * 128), shape=(k, n))

    def make(key):
        given = operands(problem)
        parts = {
            "out": [given["out"]],
            "gate_up": [sparse(key, 4096, 1024, 8, room) for room in (1408, 640)],
            "down": [sparse(key, 1024, 4096, 32, 128)],
            "qkv": [
                sparse(key, 4096, 4096, 8, 128),
                sparse(key, 4096, 1024, 8, 1856),
                given["qkv"][:, :1024],
            ],
        }
        given |= {name: share(several, H200) for name, several in parts.items()}
        return given | {"next_out": given["out"]}

    def run(given):
        kept = tuple(given[n].kept for n in ("out", "gate_up", "down", "qkv"))
        return mosaic_gpu.decode_layer(
            _arrays(given),
            problem=dataclasses.replace(problem, kept=kept),
            config=DecodeLayerConfig(),
            device=H200,
            eps=EPS,
        )

    return jax.jit(run), (on_one(devices, jax.eval_shape(make, jax.random.key(0))),)


@pytest.mark.parametrize("m", [32, *exhaustive(1, 64)])
def test_parts_of_which_some_are_dense_are_one_launch(m):
    found = compile_for_h200(mixed_layer, m)
    assert [(k.name, k.spilled) for k in found.kernels] == [("decode_layer", 0)]
    assert found.count("copy") == found.count("transpose") == 0


@pytest.mark.parametrize("name", ["m32", *exhaustive("m1", "m1_int8", "m32_fp8")])
def test_attention_in_the_launch_spills_nothing(name):
    found = compile_for_h200(kernels, "decode_layer", f"llama3_8b_{name}_attending")
    assert [(k.name, k.spilled) for k in found.kernels] == [("decode_layer", 0)]


def layers_over_devices(devices, m, weights, count):
    """Two steps of two layers of LLaMA 3 8B, and between them what attention is."""
    mesh = jax.sharding.Mesh(np.array(devices), ("tensor",))
    size = len(devices)
    problem = dataclasses.replace(LLAMA3_8B, m=m, weights=weights)
    local = local_problem(problem, size)
    shapes = jax.eval_shape(lambda: split(problem, operands(problem), size))

    def run(given):
        given = jax.tree.map(lambda a: a[0], given)

        def step(carry, _):
            attended, residual, workspace = carry
            for _ in range(count):
                here = given | {"attended": attended, "residual": residual}
                residual, q, _, workspace = layer_of(local, here, workspace, H200)
                attended = jnp.tanh(q).reshape(attended.shape)
            return (attended, residual, workspace), None

        carry = given["attended"], given["residual"], begin(problem, H200)
        (attended, residual, _), _ = jax.lax.scan(step, carry, length=2)
        return attended[None], residual[None]

    mapped = jax.shard_map(
        run, mesh=mesh, in_specs=P("tensor"), out_specs=P("tensor"), check_vma=False
    )
    where = jax.sharding.NamedSharding(mesh, P("tensor"))
    return jax.jit(mapped), (
        jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=where), shapes
        ),
    )


@pytest.mark.parametrize(
    ("size", "m", "weights"),
    [(2, 32, "int8"), *exhaustive((2, 1, "bfloat16"), (4, 32, "float8_e4m3fn"))],
)
def test_sums_over_devices_stay_in_their_memory(size, m, weights):
    """A copy between two calls would lose what a peer wrote before it."""
    found = compile_for_h200(layers_over_devices, m, weights, 2, count=size)
    named = [(k.name, k.spilled) for k in found.kernels]
    assert ("decode_layer", 0) in named and all(not spilled for _, spilled in named)
    cells = 2 * size * 4096 * max(8, m) * 4
    assert max(found.sizes("copy"), default=0) < cells // 4
    assert found.count("all-reduce") == 0
