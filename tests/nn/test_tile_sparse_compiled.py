"""What a pruned MLP of LLaMA-3 8B launches for few tokens, compiled for an H200."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import SingleDeviceSharding

from benchmarks import pruned_model
from jaxscale.models import Decoder, preset
from jaxscale.models.serving import prepare
from jaxscale.models.stack import unstacked
from tests.compiled import compile_for_h200
from tests.tiers import exhaustive


def mlp_program(devices, tokens, sparsity, joined):
    """Norm, MLP and residual sum of a block that keeps few weights."""
    config = dataclasses.replace(preset("llama3_1_8b"), num_layers=2)

    def make():
        options = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
        return unstacked(Decoder(config, rngs=nnx.Rngs(0), **options))

    blocks = pruned_model.layers_for(config, "bytes_27m", "tw", sparsity)
    model = pruned_model.with_sparse_layers(jax.eval_shape(make), blocks, 0)
    mlp, norm = model.blocks[1].mlp, model.blocks[1].mlp_norm

    def shape(x):
        where = SingleDeviceSharding(devices[0])
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

    layers = jax.tree.map(shape, (mlp, norm))
    if joined:
        layers = jax.eval_shape(
            lambda m: (prepare(m[0], m[0].down.rules, {}), m[1]), layers
        )
        layers = jax.tree.map(shape, layers)

    def run(layers, x):
        mlp, norm = layers
        return x + mlp(norm(x))

    x = shape(jax.ShapeDtypeStruct((tokens, 1, config.d_model), jnp.bfloat16))
    return jax.jit(run), (layers, x)


def launches(found):
    """What the command buffer of the program starts."""
    return [line for line in found.thunks if line.startswith(" ")]


@pytest.mark.parametrize(
    ("tokens", "sparsity"), [(1, 0.75), *exhaustive((32, 0.75), (1, 0.9))]
)
def test_gate_and_up_are_one_kernel(tokens, sparsity):
    apart, together = (
        compile_for_h200(mlp_program, tokens, sparsity, joined)
        for joined in (False, True)
    )
    assert len(launches(together)) == len(launches(apart)) - 1
    assert len(launches(together)) <= 6
