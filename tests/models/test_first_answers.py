"""What a newcomer types, without the run-time types of the tests: each answer helps."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxscale import nn
from jaxscale.models import Decoder, EncoderModel, Tokenizer, load, preset
from jaxscale.nn import attention_state
from jaxscale.nn.keywords import explain_keywords


FIXTURES = Path(__file__).parents[1] / "fixtures"
CALLS = """
import jax.numpy as jnp
from flax import nnx
from jaxscale import inference, models, nn, sharding

tiny, rngs = models.preset("llama_tiny"), nnx.Rngs(0)
tokens = jnp.ones((1, 4), jnp.int32)
block = nn.Block(tiny.block(), rngs=rngs)
calls = [
    lambda: sharding.make_mesh((2, 2)),
    lambda: models.Decoder(tiny, rules="fsdp", rngs=rngs),
    lambda: models.EncoderModel(
        models.encoder_preset("bert_tiny"), rules="fsdp", rngs=rngs
    ),
    lambda: models.Decoder(tiny, rngs=rngs)(tokens, attention_mask=tokens),
    lambda: block(jnp.ones((1, 4, tiny.d_model)), cu_seqlens=tokens),
    lambda: inference.LLM(None, confg=None),
    lambda: inference.LLM.from_pretrained("x", quite=True),
    lambda: models.preset("llama3.1-8b"),
    lambda: models.preset("bert_base"),
    lambda: models.encoder_preset("llama3_8b"),
]
for call in calls:
    try:
        call()
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
"""
ANSWERS = [
    "ValueError: config (2, 2), expected the sizes of axes by their names, such as {",
    "ValueError: rules 'fsdp', expected an AxisRules; jaxscale.sharding.preset('fsdp')",
    "ValueError: rules 'fsdp', expected an AxisRules; jaxscale.sharding.preset('fsdp')",
    "TypeError: Decoder.__call__() takes no 'attention_mask': sequences are packed",
    "TypeError: Block.__call__() takes no 'cu_seqlens': give state=jaxscale.nn",
    "TypeError: LLM.__init__() takes no 'confg' (did you mean config?); it takes",
    "TypeError: LLM.from_pretrained() takes no 'quite' (did you mean quiet?); it",
    "ValueError: preset 'llama3.1-8b' is unknown; did you mean llama3_1_8b",
    "ValueError: preset 'bert_base' is unknown, but the other kind of model has it: "
    "use encoder_preset('bert_base')",
    "ValueError: encoder_preset 'llama3_8b' is unknown, but the other kind of model",
]


def test_mistakes_are_answered():
    found = subprocess.run(
        [sys.executable, "-c", CALLS],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.getcwd(), "JAX_PLATFORMS": "cpu"},
        check=True,
    )
    said = found.stdout.splitlines()
    assert [s[: len(a)] for s, a in zip(said, ANSWERS, strict=True)] == ANSWERS


def test_whole_rows_need_no_state():
    config = preset("llama_tiny").block()
    block = nn.Block(config, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (2, 5, config.d_model))
    for layer in (block, block.attention):
        alone, _ = layer(x)
        stated, _ = layer(x, attention_state((2, 5)))
        np.testing.assert_array_equal(alone, stated)


def test_models_and_tokenizers_have_the_usual_constructor():
    decoder, encoder = FIXTURES / "models" / "gpt2", FIXTURES / "encoders" / "bert"
    tokens = jnp.ones((1, 3), jnp.int32)
    np.testing.assert_array_equal(
        Decoder.from_pretrained(decoder)(tokens), load(decoder)(tokens)
    )
    assert isinstance(EncoderModel.from_pretrained(encoder), EncoderModel)
    with pytest.raises(
        ValueError, match=r"give it to EncoderModel\.from_pre.*\.Encoder"
    ):
        Decoder.from_pretrained(encoder)
    with pytest.raises(ValueError, match=r"give it to Decoder\.from_pretrained.*\.LLM"):
        EncoderModel.from_pretrained(decoder)


def test_a_tokenizer_comes_from_the_hub_without_the_weights(monkeypatch, tmp_path):
    Tokenizer.train(["to be or not to be"], 300).save(tmp_path)
    asked = []

    def download(name, **options):
        asked.append((name, options["allow_patterns"]))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    found = Tokenizer.from_pretrained("someone/tiny")
    assert found.encode("to be") == Tokenizer.from_file(tmp_path).encode("to be")
    assert asked == [("someone/tiny", ["*.json", "*.jinja"])]


def test_a_known_keyword_passes():
    @explain_keywords
    def call(a, *, b=2):
        return a + b

    assert call(1, b=3) == 4 and call(a=1) == 3
