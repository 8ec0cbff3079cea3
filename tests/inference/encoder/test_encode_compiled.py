"""The program of `Encoder.encode`, compiled for an H200 without a GPU: its launches."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import SingleDeviceSharding

from jaxscale.inference import Encoder
from jaxscale.models import EncoderModel, Tokenizer, encoder_preset
from pallas_kernels.mosaic import H200, use_device
from tests.compiled import compile_for_h200
from tests.tiers import exhaustive


LAYERS = 8


def encoding(devices, size, room, part, preset="bert_base", num_layers=LAYERS):
    where = SingleDeviceSharding(devices[0])
    config = dataclasses.replace(encoder_preset(preset), num_layers=num_layers)
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
    first = programs._leaves, batch, size, None, None
    (begin,) = programs._earlier
    if part == 0:
        return begin, first
    given, bounds = programs._on_device(begin.lower(*first).out_info)
    out = jax.ShapeDtypeStruct(
        (1, room, config.d_model),
        jnp.float32,
        sharding=pinned,
        _memory_space=jax.memory.Space.Host,
    )
    return programs._jitted["encode"], (programs._leaves, bounds, size, given, out)


# One, four and sixteen texts of up to 256 tokens, and 84 of 32.
@pytest.mark.parametrize(
    ("size", "room", "launches"),
    [(256, 32, 2), *exhaustive((688, 32, 5), (2688, 32, 5), (2688, 88, 5))],
)
def test_a_layer_is_few_launches_of_one_graph(size, room, launches):
    kinds = []
    for part in range(2):
        compiled = compile_for_h200(encoding, size, room, part)
        assert compiled.aliased == part * compiled.outputs
        whole, *inside = compiled.thunks
        assert whole == "kCommandBuffer"
        assert all(launch.startswith(" ") for launch in inside)
        kinds += [launch.split()[0] for launch in inside]
        last = compiled.hlo
    # Vectors are read as they appear. A matmul might write some of them twice.
    assert kinds[-1] == "kCustomCall"
    assert "segment_mean" in re.findall(r"custom-call\(.*", last)[-1]
    # Attention; its output and a norm; the hidden layer; its output and a norm;
    # queries, keys and values. Of few tokens one launch has all but attention and the
    # very first queries, keys and values. Then the means.
    calls = launches * LAYERS + (launches == 2) + 1
    assert kinds.count("kCustomCall") == calls
    # Boundaries, look-ups and their norm; twice vectors, with counters.
    assert len(kinds) == calls + 5


# Layers of ALBERT share their parameters. Those of DeBERTa have two products more, of
# queries and keys with relative positions, which are projected before.
@pytest.mark.parametrize(
    ("preset", "products"),
    [("albert_base", 0), *exhaustive(("deberta_v3_base", 2))],
)
def test_other_models_layers_are_as_few_launches(preset, products):
    compiled = compile_for_h200(encoding, 256, 32, 1, preset, 2)
    kinds = [launch.split()[0] for launch in compiled.thunks]
    assert kinds.count("kCustomCall") == 3  # attention, the layer, the means
    assert kinds.count("kCublasLtMatmul") == products


def test_a_program_has_few_arguments():
    """All parameters of a layer are in stacks."""
    with use_device(H200):
        _, (leaves, *_) = encoding(jax.devices(), 256, 32, 0)
    sizes = [leaf.shape for leaf in leaves]
    assert sizes[0] == (4 * LAYERS + 2, 768)
    assert sizes.count((LAYERS, 768)) == 5
    assert sizes.count((LAYERS, 768, 768)) == 4
    assert {(LAYERS, 3072), (LAYERS, 768, 3072), (LAYERS, 3072, 768)} <= {*sizes}
    assert len(leaves) == 1 + 12 + 3
