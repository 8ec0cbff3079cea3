"""The token budget that `Encoder` chooses where none is given."""

import dataclasses
import types

import jax
from flax import nnx

from jaxscale.inference import Encoder
from jaxscale.models import EncoderModel, Tokenizer, encoder_preset


def test_it_suits_the_device_and_the_longest_text(monkeypatch):
    texts = ["to be " * count for count in (1, 2, 4, 8)] * 40
    tokenizer = Tokenizer.train(texts, 257)
    config = dataclasses.replace(encoder_preset("bert_tiny"), vocab_size=300)
    model = EncoderModel(config, rngs=nnx.Rngs(0))
    encoder = Encoder(model, tokenizer)
    assert encoder.plan(texts) == encoder.plan(texts, token_budget=512)
    monkeypatch.setattr("jaxscale.inference.encoder.encode_plan._CPU_BUDGET", 16)
    longest = max(encoder.plan(texts).lengths)
    fits = 16
    while fits < longest:
        fits *= 2
    assert fits > 16
    assert encoder.plan(texts) == encoder.plan(texts, token_budget=fits)
    gpu = types.SimpleNamespace(platform="gpu")
    monkeypatch.setattr(jax, "devices", lambda: [gpu])
    assert encoder.plan(texts) == encoder.plan(texts, token_budget=16384)
