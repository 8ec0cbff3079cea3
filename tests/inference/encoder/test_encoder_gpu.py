"""Tokens in pinned memory, where a GPU reads them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from benchmarks.encode import Fused, Pinned, Spins
from jaxscale.inference import Encoder
from jaxscale.models import EncoderModel, Tokenizer, encoder_preset
from tests.tolerances import relative_error


@pytest.mark.gpu
def test_each_call_reads_its_own_tokens():
    """Again and again: a buffer is written while the other batch is computed."""
    config = encoder_preset("bert_base")
    types = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
    model = EncoderModel(config, scan_layers=False, rngs=nnx.Rngs(0), **types)
    tokenizer = Tokenizer.train(["to be"], vocab_size=256 + 1)
    copied, *others = (
        kind(model, tokenizer, max_length=64) for kind in (Encoder, Pinned, Spins)
    )
    draw = np.random.default_rng(0)
    for _ in range(30):
        lengths = draw.integers(8, 64, draw.integers(1, 12))
        many = [draw.integers(0, 30000, n).tolist() for n in lengths]
        want = copied.encode(many, token_budget=128)
        for encoder in others:
            found = encoder.encode(many, token_budget=128)
            np.testing.assert_array_equal(found, want)
    assert jax.devices()[0].platform == "gpu"


@pytest.mark.gpu
def test_norms_in_matmuls_change_little():
    """Sums are rounded before the norm instead of the products in them."""
    config = encoder_preset("bert_base")
    wide = EncoderModel(config, scan_layers=False, rngs=nnx.Rngs(0))
    model = EncoderModel(
        config,
        scan_layers=False,
        rngs=nnx.Rngs(0),
        dtype=jnp.bfloat16,
        param_dtype=jnp.bfloat16,
    )
    tokenizer = Tokenizer.train(["to be"], vocab_size=256 + 1)
    draw = np.random.default_rng(0)
    many = [draw.integers(0, 30000, n).tolist() for n in (57, 9, 41)]
    exact, apart, fused = (
        kind(of, tokenizer).encode(many, token_budget=128)
        for kind, of in ((Encoder, wide), (Encoder, model), (Fused, model))
    )
    assert relative_error(fused, exact) < 1.5 * relative_error(apart, exact) + 1e-3
