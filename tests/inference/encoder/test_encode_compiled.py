"""The program of `Encoder.encode`, compiled for an H200 without a GPU: its launches."""

import dataclasses
import sys

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import SingleDeviceSharding

from jaxscale.inference import Encoder
from jaxscale.models import EncoderModel, Tokenizer, encoder_preset
from tests.compiled import compile_for_h200
from tests.tiers import exhaustive


pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="the plugin that compiles is for Linux"
)
LAYERS = 2


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
    batch = jax.ShapeDtypeStruct((1, width), jnp.int32, sharding=where)
    return programs._jitted["encode"], (programs._leaves, batch, size)


# One, four and sixteen texts of up to 256 tokens, and 84 of 32.
@pytest.mark.parametrize(
    ("size", "room"), [(2688, 88), *exhaustive((256, 32), (688, 32), (2688, 32))]
)
def test_a_layer_is_seven_launches_and_all_are_one_graph(size, room):
    whole, *launches = compile_for_h200(encoding, size, room).thunks
    assert whole == "kCommandBuffer"
    assert all(launch.startswith(" ") for launch in launches)
    kinds = [launch.split()[0] for launch in launches]
    # Queries, keys and values; attention; sum and norm; the hidden layer; sum and norm.
    assert kinds.count("kCustomCall") == 5 * LAYERS
    assert len(launches) <= 7 * LAYERS + 13
