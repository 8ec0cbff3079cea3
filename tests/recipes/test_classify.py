"""Texts with labels in memory: the same text from each form, and a classifier of it."""

import dataclasses
import random
from types import SimpleNamespace

import pytest
from flax import nnx

from jaxscale.inference import Encoder
from jaxscale.models import EncoderModel, Tokenizer, encoder_preset, save
from jaxscale.recipes import train_classifier
from jaxscale.training import DataConfig
from jaxscale.training.data.labeled_text import load_labeled


@pytest.fixture(scope="module")
def rows():
    draw = random.Random(0)
    found = []
    for i in range(60):
        words = [draw.choice(["the", "a", "one", "film", "plot"]) for _ in range(4)]
        words.insert(draw.randrange(5), ("awful", "lovely")[i % 2])
        found.append({"text": " ".join(words), "label": i % 2, "other": i})
    return found


@pytest.fixture(scope="module")
def encoder(tmp_path_factory, rows):
    directory = tmp_path_factory.mktemp("encoder")
    names = ("[PAD]", "[CLS]", "[SEP]", "[MASK]")
    config = dataclasses.replace(
        encoder_preset("bert_tiny"), vocab_size=300, num_layers=1
    )
    tokenizer = Tokenizer.train([row["text"] for row in rows], 300, names)
    save(EncoderModel(config, rngs=nnx.Rngs(5)), directory, tokenizer=tokenizer)
    return directory


class DataSet(list):
    """What `datasets` has of a list of records, and what it says of their labels."""

    @property
    def features(self):
        return {"label": SimpleNamespace(names=["bad", "good"])}


def test_columns_rows_and_data_sets_are_alike(rows, encoder):
    config = DataConfig(tokenizer=str(encoder), label_field="label", seq_len=32)
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    of_rows, of_columns, of_set = (
        load_labeled(config, records)
        for records in (iter(rows), columns, DataSet(rows))
    )
    assert of_rows.train == of_columns.train == of_set.train
    assert of_rows.held_out == of_columns.held_out == of_set.held_out != []
    assert of_rows.fingerprint == of_columns.fingerprint != of_set.fingerprint
    assert of_rows.labels == ("0", "1") and of_set.labels == ("bad", "good")
    assert len(of_rows.train) + len(of_rows.held_out) == len(rows)
    with pytest.raises(ValueError, match="records hold no records; give texts with"):
        load_labeled(config, [])
    with pytest.raises(ValueError, match=r"records\[1\] has no field 'label', only"):
        load_labeled(config, [rows[0], {"text": "a"}])


@pytest.mark.usefixtures("compile_once")
def test_a_classifier_in_a_few_lines(rows, encoder, tmp_path):
    run = tmp_path / "run"
    result = train_classifier(
        encoder,
        DataSet(rows),
        output_dir=run,
        steps=40,
        seq_len=32,
        held_out_fraction=0.25,
        learning_rate=0.01,
    )
    assert result.evaluation is not None and result.evaluation.accuracy is not None
    assert result.evaluation.accuracy > 0.7
    answers = Encoder.from_pretrained(run).predict(["an awful plot", "lovely film"])
    assert [int(answer.argmax()) for answer in answers] == [0, 1]
    with pytest.raises(ValueError, match="already holds a run"):
        train_classifier(encoder, rows, output_dir=run)
