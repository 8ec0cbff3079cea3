"""The program of `Encoder.encode`, compiled for an H200 without a GPU: its launches."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import SingleDeviceSharding

from jaxscale.inference import Encoder
from jaxscale.models import EncoderModel, Tokenizer, encode_layers, encoder_preset
from pallas_kernels.mosaic import H200, use_device
from tests.compiled import compile_for_h200
from tests.tiers import exhaustive


LAYERS = 8


ONE_LAUNCH = "mosaic_gpu", "dense"


def encoding(devices, size, room, part, implementation=None):
    if implementation is not None:
        encode_layers.IMPLEMENTATION = implementation  # of the process that compiles
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
    ("size", "room", "others", "implementation"),
    [
        (256, 32, 9, "dense"),
        (256, 32, 11, ONE_LAUNCH),
        *exhaustive(
            (688, 32, 15, "dense"),
            (688, 32, 17, ONE_LAUNCH),
            (2688, 32, 15, ONE_LAUNCH),
            (2688, 88, 16, "dense"),
        ),
    ],
)
def test_a_layer_is_few_launches_of_one_graph(size, room, others, implementation):
    kinds = []
    for part in range(2):
        compiled = compile_for_h200(encoding, size, room, part, implementation)
        assert compiled.aliased == part * compiled.outputs
        whole, *launches = compiled.thunks
        assert whole == "kCommandBuffer"
        assert all(launch.startswith(" ") for launch in launches)
        kinds += [launch.split()[0] for launch in launches]
    # Vectors are read as they appear. A matmul might write some of them twice.
    assert kinds[-1] == "kCustomKernel"
    # Attention; its output and a norm; the hidden layer; its output and a norm;
    # queries, keys and values. One launch for all but attention has the first queries,
    # keys and values of each program apart.
    one = implementation == ONE_LAUNCH and size <= 1024
    layers = (2 if one else 5) * LAYERS
    assert kinds.count("kCustomCall") == layers + 2 * one
    # Boundaries, positions, look-ups and their norm; counters, vectors, and the means.
    assert len(kinds) <= layers + others


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
