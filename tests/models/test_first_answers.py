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
from jaxscale.keywords import explain_keywords
from jaxscale.models import Decoder, EncoderModel, Tokenizer, load, preset
from jaxscale.nn import attention_state


FIXTURES = Path(__file__).parents[1] / "fixtures"
CALLS = """
import jax.numpy as jnp
from flax import nnx
import jaxscale
from jaxscale import inference, models, nn, pruning, recipes, sharding, training

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
    lambda: models.preset("google-bert/bert-base-uncased"),
    lambda: models.preset("gpt2"),
    lambda: sharding.make_mesh({"tp": 2}),
    lambda: sharding.make_mesh({"fsdp": "all"}),
    lambda: sharding.make_mesh(fsdp=2),
    lambda: sharding.preset("FSDP-TP"),
    lambda: models.Decoder("llama_tiny", rngs=rngs),
    lambda: models.Decoder(tiny, rngs=0),
    lambda: models.Decoder(tiny, rngs),
    lambda: models.EncoderModel("bert_tiny", rngs=rngs),
    lambda: models.Decoder(tiny, rngs=rngs)([[1, 2]]),
    lambda: models.Decoder(tiny, rngs=rngs)(tokens[0]),
    lambda: models.Decoder(tiny, rngs=rngs)(tokens * 1.0),
    lambda: models.Decoder(tiny, rngs=rngs).generate,
    lambda: models.Decoder(tiny, rngs=rngs).nothing,
    lambda: models.DecoderConfig(hidden_size=3),
    lambda: inference.LLM("gpt2"),
    lambda: inference.LLM("gpt2", tensor_parallel_size=2),
    lambda: inference.LLM.from_pretrained("gpt2", max_model_len=2),
    lambda: inference.Encoder("bert", None),
    lambda: inference.SamplingParams(max_new_tokens=3),
    lambda: inference.SamplingParams(0.8),
    lambda: inference.EngineConfig(max_num_seqs=3),
    lambda: training.TrainConfig(model="llama_tiny"),
    lambda: training.TrainConfig(model=tiny, lr=1e-3),
    lambda: training.OptimizerConfig(learning_rate="1e-3"),
    lambda: training.DataConfig(paths="notes.txt"),
    lambda: training.DataConfig(seq_len="8"),
    lambda: pruning.PruneConfig(amount=0.5),
    lambda: nn.Linear(4, 8, bias=False, rngs=rngs),
    lambda: nn.Attention(64, 4, rngs=rngs),
    lambda: nn.Attention(64, num_heads=4, rngs=rngs),
    lambda: jaxscale.Decoder,
    lambda: models.Decoder(tiny, dtype="bf16", rngs=rngs),
    lambda: nn.Block(tiny, rngs=rngs),
    lambda: nn.attention_state(4),
    lambda: training.load_text("notes.txt"),
    lambda: training.TrainConfig(model=tiny, optimizer="adamw"),
    lambda: training.TrainConfig(model=tiny, mesh={"fsdp": 2}),
    lambda: training.TrainConfig(model=tiny, steps="10"),
    lambda: pruning.sparsify(None, 0.75),
    lambda: recipes.train_classifier("bert", [], output_dir="x", epochs=3),
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
    "ValueError: preset 'google-bert/bert-base-uncased' is unknown, but the other kind "
    "of model has it: use encoder_preset('bert_base')",
    "ValueError: preset 'gpt2' is unknown; did you mean gpt2_tiny, gpt2_small",
    "ValueError: mesh axis 'tp' is unknown (did you mean tensor?); use some of",
    "ValueError: mesh axis fsdp has size 'all', expected at least 1, or -1",
    "TypeError: make_mesh() takes no 'fsdp': sizes of axes come together, such as {'fs",
    "ValueError: rules 'FSDP-TP' is no preset (did you mean fsdp_tp?); use one of",
    "ValueError: config is 'llama_tiny', expected DecoderConfig; jaxscale.models.pre",
    "ValueError: rngs is 0, expected Rngs; flax.nnx.Rngs(0) is one",
    "TypeError: Decoder.__init__() takes 1 by position, got 2; write the others as r",
    "ValueError: config is 'bert_tiny', expected EncoderConfig; jaxscale.models.enco",
    "ValueError: tokens is a list, expected an array of token ids, [batch, tokens]; ",
    "ValueError: tokens is of shape (4,) and type int32, expected integers [batch, tok",
    "ValueError: tokens is of shape (1, 4) and type float32, expected integers",
    "AttributeError: 'Decoder' object has no attribute 'generate'; call jaxscale.inf",
    "AttributeError: 'Decoder' object has no attribute 'nothing'",
    "TypeError: DecoderConfig.__init__() takes no 'hidden_size' (did you mean d_mode",
    "ValueError: model is 'gpt2', expected Decoder; LLM.from_pretrained(path) loads ",
    "TypeError: LLM.__init__() takes no 'tensor_parallel_size': give a mesh, `jaxscale",
    "TypeError: LLM.from_pretrained() takes no 'max_model_len': sizes are in config=",
    "ValueError: model is 'bert', expected EncoderModel; from_pretrained(path) loads",
    "TypeError: SamplingParams.__init__() takes no 'max_new_tokens' (did you mean ma",
    "TypeError: SamplingParams.__init__() takes 0 by position, got 1; write the others",
    "TypeError: EngineConfig.__init__() takes no 'max_num_seqs' (did you mean num_sl",
    "ValueError: model is 'llama_tiny', expected a DecoderConfig or EncoderConfig, s",
    "TypeError: TrainConfig.__init__() takes no 'lr': it is in optimizer=OptimizerCo",
    "ValueError: learning_rate '1e-3' must be a number",
    "ValueError: paths 'notes.txt', expected several; write ('notes.txt',)",
    "ValueError: seq_len '8', expected a number",
    "TypeError: PruneConfig.__init__() takes no 'amount' (did you mean sparsity?)",
    "TypeError: Linear.__init__() takes no 'bias' (did you mean use_bias?)",
    "ValueError: config is 4, expected AttentionConfig; AttentionConfig(num_heads=",
    "TypeError: Attention.__init__() takes no 'num_heads': the shape of attention is",
    "AttributeError: module 'jaxscale' has no attribute 'Decoder'; what it has is in",
    "ValueError: dtype 'bf16' is no data type; use one such as 'bfloat16'",
    "ValueError: config is a DecoderConfig, expected BlockConfig; model_config.block()",
    "ValueError: shape 4, expected (batch, tokens), as in x.shape[:2]",
    "ValueError: config is 'notes.txt', expected DataConfig; DataConfig(paths=(",
    "ValueError: optimizer is 'adamw', expected OptimizerConfig; OptimizerConfig(...)",
    "ValueError: mesh is a dict, expected MeshConfig; MeshConfig(...) makes one",
    "ValueError: steps '10', expected an integer",
    "ValueError: masks is 0.75, expected Masks; make_model_masks(model, scores, config",
    "TypeError: train_classifier() takes no 'epochs' (did you mean steps?); it takes",
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
