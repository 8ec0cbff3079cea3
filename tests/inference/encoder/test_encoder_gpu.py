"""Tokens in pinned memory, where a GPU reads them, and layers in stacks."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxscale.inference import Encoder
from jaxscale.models import EncoderModel, Tokenizer, encoder_preset
from tests.tolerances import RELATIVE, relative_error


@pytest.mark.gpu
def test_each_call_reads_its_own_tokens():
    """Again and again: a buffer is written while the other batch is computed."""
    config = encoder_preset("bert_base")
    types = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
    model = EncoderModel(config, scan_layers=False, rngs=nnx.Rngs(0), **types)
    tokenizer = Tokenizer.train(["to be"], vocab_size=256 + 1)
    encoder, copied = (Encoder(model, tokenizer, max_length=64) for _ in range(2))
    copied._programs._buffers = None
    draw = np.random.default_rng(0)
    for _ in range(30):
        lengths = draw.integers(8, 64, draw.integers(1, 12))
        many = [draw.integers(0, 30000, n).tolist() for n in lengths]
        want = copied.encode(many, token_budget=128)
        found = encoder.encode(many, token_budget=128)
        np.testing.assert_array_equal(found, want)
    assert jax.devices()[0].platform == "gpu"


@pytest.mark.gpu
@pytest.mark.parametrize("preset", ["albert_base", "deberta_v3_base"])
def test_vectors_are_those_of_the_blocks(preset):
    config = dataclasses.replace(encoder_preset(preset), num_layers=3)
    types = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
    model = EncoderModel(config, scan_layers=False, rngs=nnx.Rngs(0), **types)
    encoder = Encoder(model, Tokenizer.train(["to be"], vocab_size=256 + 1))
    draw = np.random.default_rng(0)
    many = [draw.integers(0, 30000, n).tolist() for n in (100, 9)]
    found = encoder.encode(many)
    plain = model.unstacked()
    for ids, vector in zip(many, found, strict=True):
        hidden = jax.jit(plain.hidden)(jnp.array([ids]))
        want = hidden.astype(jnp.float32).mean(1)[0]
        assert relative_error(vector, want) < 4 * RELATIVE[jnp.dtype(jnp.bfloat16)]
