"""Heads of several labels and of numbers: from records to losses, files and answers."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from flax import nnx

from jaxscale.inference import Encoder
from jaxscale.models import (
    EncoderModel,
    HeadConfig,
    Tokenizer,
    encoder_head,
    encoder_preset,
    load,
    save,
)
from jaxscale.models.families.registry import head_from_hf
from jaxscale.recipes import export, from_source, prepare
from jaxscale.sharding import MeshConfig
from jaxscale.training import LabeledBatches, classification_loss, fit
from jaxscale.training import run as run_directory
from tests.tiers import exhaustive


NAMES = ("[PAD]", "[CLS]", "[SEP]", "[MASK]")
TOKENIZER = Tokenizer.train(["a lovely film, an awful plot"], 270, special_tokens=NAMES)
BERT = dataclasses.replace(encoder_preset("bert_tiny"), vocab_size=270, num_layers=1)
TEXTS = TOKENIZER.encode_inputs(["a film", "an awful plot", "lovely", "a plot", "an"])
SIZES = {"seq_len": 32, "batch_size": 2, "max_sequences": 4, "epochs": 1, "prefetch": 0}


def means(model, data):
    """Loss and accuracy of the loss function, over all texts."""
    sums = [classification_loss()(model, batch) for batch in data]
    count = sum(int(s.tokens) for _, s in sums)
    assert sum(float(v) for v, _ in sums) == pytest.approx(
        sum(float(s.nll) for _, s in sums)
    )
    right = [s.correct for _, s in sums]
    if None not in right:
        right = sum(int(r) for r in right) / count
    return sum(float(v) for v, _ in sums) / count, right


def made(problem, count):
    head = encoder_head(BERT, "sequence", num_labels=count, problem=problem)
    model = EncoderModel(BERT, head=head, rngs=nnx.Rngs(3))
    key = jax.random.key(1)
    model.head.output.kernel[...] = jax.random.normal(key, (BERT.d_model, count))
    logits = [
        np.asarray(model(jax.numpy.asarray([t.ids])), np.float64)[0, 0] for t in TEXTS
    ]
    return model, np.stack(logits)


def test_several_labels_have_a_cross_entropy_each():
    model, logits = made("multi_label", 3)
    labels = [(0, 2), (), (1,), (0, 1, 2), (2,)]
    targets = np.array([[i in label for i in range(3)] for label in labels])
    data = LabeledBatches(TEXTS, labels, problem="multi_label", num_labels=3, **SIZES)
    p = 1 / (1 + np.exp(-logits))
    loss, accuracy = means(model, data)
    expected = -np.where(targets, np.log(p), np.log1p(-p)).mean()
    assert loss == pytest.approx(expected, rel=1e-5)
    assert accuracy == ((p > 0.5) == targets).all(axis=1).mean()


@pytest.mark.parametrize("count", [1, 2])
def test_numbers_have_a_squared_error(count):
    model, logits = made("regression", count)
    labels = np.random.default_rng(0).normal(size=(5, count))
    given = labels[:, 0].tolist() if count == 1 else labels.tolist()
    data = LabeledBatches(TEXTS, given, problem="regression", **SIZES)
    loss, accuracy = means(model, data)
    assert loss == pytest.approx(np.square(logits - labels).mean(), rel=1e-5)
    assert accuracy == [None] * len(data)


def test_answers_to_long_texts_are_those_of_training(tmp_path, caplog):
    """They are cut where training cut them, and a line says so."""
    model, _ = made("single_label", 3)
    rng = np.random.default_rng(0)
    words = ["a", "film", "an", "awful", "plot", "lovely"]
    texts = [" ".join(rng.choice(words, n)) for n in (3, 60, 40, 5, 70, 50, 33, 4)]
    labels = rng.integers(0, 3, len(texts)).tolist()
    cut = TOKENIZER.encode_inputs(texts, max_length=12)
    loss, accuracy = means(model, LabeledBatches(cut, labels, **SIZES))
    save(model, tmp_path, tokenizer=TOKENIZER.with_max_length(12))
    for encoder in (
        Encoder.from_pretrained(tmp_path),
        Encoder(model, TOKENIZER.with_max_length(12)),
    ):
        with caplog.at_level("INFO", "jaxscale.inference"):
            logits = encoder.predict(texts)
        assert "5 of 8 texts are cut at 12 tokens" in caplog.text
        caplog.clear()
        found = jax.nn.log_softmax(logits)[np.arange(len(texts)), labels]
        assert -found.mean() == pytest.approx(loss, rel=1e-5)
        assert (logits.argmax(-1) == labels).mean() == pytest.approx(accuracy)
        with pytest.raises(ValueError, match=r"texts\[1\] has .* max_length 12"):
            encoder.predict(texts, truncate=False)
    given = Encoder.from_pretrained(tmp_path, max_length=12)
    with pytest.raises(ValueError, match=r"texts\[1\] has .* max_length 12"):
        given.predict(texts)


def test_problems_that_do_not_fit():
    model, _ = made("multi_label", 3)
    one = LabeledBatches(TEXTS, [0, 1, 2, 0, 1], **SIZES)
    message = "problem 'multi_label' of the head, but the labels are those of 'single_l"
    with pytest.raises(ValueError, match=message):
        classification_loss()(model, next(iter(one)))
    two = LabeledBatches(
        TEXTS, [(0,), (1,), (), (), ()], problem="multi_label", **SIZES
    )
    with pytest.raises(ValueError, match="num_labels 3 of the head, but the data have"):
        classification_loss()(model, next(iter(two)))
    with pytest.raises(ValueError, match=r"labels\[1\] \(5,\) must be numbers of lab"):
        LabeledBatches(
            TEXTS,
            [(0,), (5,), (), (), ()],
            problem="multi_label",
            num_labels=3,
            **SIZES,
        )
    with pytest.raises(ValueError, match=r"labels\[4\] nan must be 1 finite numbers"):
        numbers = [0.1, 0.2, 0.3, 0.4, float("nan")]
        LabeledBatches(TEXTS, numbers, problem="regression", **SIZES)
    with pytest.raises(TypeError, match=r"labels\[0\] must be a number, or a list"):
        LabeledBatches(TEXTS, ["a"] * 5, problem="regression", **SIZES)
    with pytest.raises(ValueError, match="problem 'regression' is for kind 'sequence'"):
        HeadConfig(kind="token", num_labels=2, problem="regression")
    values = {"model_type": "bert", "architectures": ["BertForSequenceClassification"]}
    with pytest.raises(ValueError, match="problem_type 'ordinal' of config"):
        head_from_hf(values | {"problem_type": "ordinal"})


@pytest.mark.parametrize(
    ("problem", "good", "bad", "names", "told"),
    [
        (
            "multi_label",
            ["film", "good"],
            ["bad"],
            ("bad", "film", "good"),
            "any of the",
        ),
        ("regression", 1.5, -0.5, (), "with 1 numbers to predict"),
        *exhaustive(("regression", [1.5, 0], [0, 2], (), "with 2 numbers to predict")),
    ],
)
def test_from_records_to_answers(tmp_path, problem, good, bad, names, told):
    save(EncoderModel(BERT, rngs=nnx.Rngs(5)), tmp_path / "bert", tokenizer=TOKENIZER)
    lines = [
        json.dumps({"text": f"{text} {i % 7}", "label": label})
        for i in range(40)
        for text, label in (("a lovely film", good), ("an awful plot", bad))
    ]
    (tmp_path / "texts.jsonl").write_text("\n".join(lines))
    config = from_source(str(tmp_path / "bert"))
    data = dataclasses.replace(
        config.data,
        paths=(str(tmp_path / "texts.jsonl"),),
        label_field="label",
        held_out_fraction=0.2,
        seq_len=32,
        prefetch=0,
    )
    config = dataclasses.replace(
        config,
        data=data,
        optimizer=dataclasses.replace(config.optimizer, learning_rate=0.02),
        mesh=MeshConfig(fsdp=2, data=4),
        rules="fsdp",
        dtype="float32",
        steps=25,
        output_dir=str(tmp_path / "run"),
    )
    task = prepare(config)
    assert told in task.told and task.config.head.problem == problem
    assert task.text.labels == names
    run_directory.write(tmp_path / "run", task.config, task.text)
    result = fit(
        task.config,
        train_data=task.train_data,
        eval_data=task.eval_data,
        writers=(),
    )
    assert result.evaluation.tokens == len(task.text.held_out)
    assert (result.evaluation.accuracy is None) == (problem == "regression")
    export(tmp_path / "run", tmp_path / "hf")
    written = json.loads((tmp_path / "hf" / "config.json").read_text())
    expected = {"multi_label": "multi_label_classification"}.get(problem, problem)
    assert written["problem_type"] == expected
    assert load(tmp_path / "hf").head.config == task.config.head
    encoder = Encoder.from_pretrained(tmp_path / "hf")
    # Texts are cut as in training, by transformers too.
    assert encoder.max_length == 32
    settings = json.loads((tmp_path / "hf" / "tokenizer_config.json").read_text())
    assert settings["model_max_length"] == 32
    answers = encoder.predict(["a lovely film 3", "an awful plot 3"])
    if problem == "multi_label":
        assert (answers > 0).tolist() == [[False, True, True], [True, False, False]]
    else:
        wanted = [np.atleast_1d(good), np.atleast_1d(bad)]
        np.testing.assert_allclose(answers, wanted, atol=0.5)
