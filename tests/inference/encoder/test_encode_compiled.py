"""The program of `Encoder.encode`, compiled for an H200 without a GPU: its launches."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import SingleDeviceSharding

from jaxscale.inference import Encoder
from jaxscale.models import EncoderModel, Tokenizer, encoder_preset
from tests.compiled import compile_for_h200
from tests.tiers import exhaustive


LAYERS = 8


def encoding(devices, size, room):
    where = SingleDeviceSharding(devices[0])
    config = dataclasses.replace(encoder_preset("bert_base"), num_layers=LAYERS)
    types = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
    model = jax.eval_shape(
        lambda: EncoderModel(config, rngs=nnx.Rngs(0), **types).unstacked()
    )
    model = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), model
    )
    encoder = Encoder(model, Tokenizer.train(["to be"], vocab_size=256 + 1))
    programs = encoder._programs
    width = programs._width(size, room)
    pinned = programs._buffers.where
    batch = jax.ShapeDtypeStruct(
        (1, width), jnp.int32, sharding=pinned, _memory_space=jax.memory.Space.Host
    )
    return programs._jitted["encode"], (programs._leaves, batch, size)


# One, four and sixteen texts of up to 256 tokens, and 84 of 32.
@pytest.mark.parametrize(
    ("size", "room", "others"),
    [(256, 32, 7), *exhaustive((688, 32, 12), (2688, 32, 12), (2688, 88, 12))],
)
def test_a_layer_is_seven_launches_and_all_are_one_graph(size, room, others):
    whole, *launches = compile_for_h200(encoding, size, room).thunks
    assert whole == "kCommandBuffer"
    assert all(launch.startswith(" ") for launch in launches)
    kinds = [launch.split()[0] for launch in launches]
    # Queries, keys and values; attention; sum and norm; the hidden layer; sum and norm.
    assert kinds.count("kCustomCall") == 5 * LAYERS
    # Boundaries, positions, look-ups and their norm; two kernels read the vectors of
    # all layers, of which there are two sizes. Means are one kernel, or a matmul.
    assert len(launches) <= 7 * LAYERS + others


def test_biases_and_norms_are_few_arguments():
    """Of 16 parameters of a layer the six matrices stay arrays of their own."""
    _, (leaves, *_) = encoding(jax.devices(), 256, 32)
    sizes = [leaf.shape for leaf in leaves]
    assert sizes[:2] == [(9 * LAYERS + 2, 768), (LAYERS, 3072)]
    assert len(leaves) == 2 + 6 * LAYERS + 3
