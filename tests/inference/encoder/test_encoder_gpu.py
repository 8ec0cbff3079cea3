"""Tokens in pinned memory, where a GPU reads them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxscale.inference import Encoder
from jaxscale.models import EncoderModel, Tokenizer, encoder_preset


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
