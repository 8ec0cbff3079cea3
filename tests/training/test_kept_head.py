"""What a run's head takes over from that of the files that it begins with."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from flax import nnx

from jaxscale.models import (
    EncoderModel,
    HeadConfig,
    Tokenizer,
    encoder_head,
    encoder_preset,
    load,
    save,
)
from jaxscale.recipes import from_source, prepare
from jaxscale.sharding import fsdp, make_mesh
from jaxscale.training.kept_head import kept_of
from jaxscale.training.pretrained import pretrained


NAMES = ("[PAD]", "[CLS]", "[SEP]", "[MASK]")
TOKENIZER = Tokenizer.train(["a lovely film, an awful plot"], 270, special_tokens=NAMES)
BERT = dataclasses.replace(encoder_preset("bert_tiny"), vocab_size=270, num_layers=1)
TOKENS = jax.numpy.arange(4, 16)[None]


def sequence(*labels, count=None):
    count = count or len(labels)
    return HeadConfig(kind="sequence", num_labels=count, labels=labels)


@pytest.mark.parametrize(
    ("own", "new", "rows", "told"),
    [
        (
            sequence("no", "yes"),
            sequence("yes", "no"),
            (1, 0),
            "the head keeps yes, no of the files",
        ),
        (
            sequence("no", "yes"),
            sequence("maybe", "no"),
            (None, 0),
            "the head keeps no of the files; new: maybe; left out: yes",
        ),
        (
            sequence(count=2),
            sequence("bad", "good"),
            (0, 1),
            "the head keeps bad (from LABEL_0), good (from LABEL_1) of the files",
        ),
        (
            sequence(count=3),
            sequence("0", "2", "7"),
            (0, 2, None),
            "the head keeps 0 (from LABEL_0), 2 (from LABEL_2) of the files; new: 7; "
            "left out: LABEL_1",
        ),
        (
            sequence("no", "yes"),
            sequence("1", "0"),
            (1, 0),
            "the head keeps 1 (from yes), 0 (from no) of the files",
        ),
        (sequence(count=2), sequence("a", "b", "c"), (None,) * 3, "the head is new"),
        (sequence("a", "b"), sequence("c", "d"), (None,) * 2, "the head is new"),
        (None, sequence("c", "d"), (None,) * 2, "the head is new"),
    ],
)
def test_rows_go_by_the_names_of_their_labels(own, new, rows, told):
    kept = kept_of(BERT, own, new)
    assert (kept.rows or (None,) * new.num_labels) == rows
    assert kept.told == told


def written(path, model=BERT, **head):
    kind = head.pop("kind", "sequence")
    head = encoder_head(model, kind, **head)
    made = EncoderModel(model, head=head, rngs=nnx.Rngs(5))
    # Biases are made zero, and would not tell rows apart.
    if made.head.output is not None:
        made.head.output.bias[...] = jax.numpy.arange(1.0, 1 + head.num_labels)
    save(made, path, tokenizer=TOKENIZER)
    return load(path)


def answers(model):
    return np.asarray(jax.jit(lambda model: model(TOKENS))(model))


def begun(path, head, rules="fsdp"):
    config = dataclasses.replace(
        from_source(str(path)), head=head, dtype="float32", rules=rules
    )
    mesh = make_mesh({"fsdp": 4}, jax.devices()[:4])
    with jax.set_mesh(mesh):
        model = pretrained(config, mesh)
        place = model.head.transform.kernel.sharding
        assert place.spec == fsdp().spec("embed", None)
        return answers(model), model


def test_labels_in_another_order_answer_as_before(tmp_path, caplog):
    theirs = written(tmp_path, labels=("no", "yes", "well"))
    new = dataclasses.replace(
        theirs.head.config, num_labels=4, labels=("well", "maybe", "no", "yes")
    )
    with caplog.at_level("INFO", "jaxscale.training"):
        ours, _ = begun(tmp_path, new)
    before = answers(theirs)[0, 0]
    np.testing.assert_allclose(ours[0, 0][[2, 3, 0]], before, rtol=1e-5, atol=1e-6)
    assert "the head keeps well, no, yes of the files; new: maybe" in caplog.text
    assert abs(ours[0, 0, 1]) < 1  # its bias is 0, those of the file are 1 to 3


def test_a_new_head_of_bert_has_the_pooler_of_the_file(tmp_path):
    theirs = written(tmp_path / "bert", kind="pooler")
    head = encoder_head(BERT, "sequence", labels=("a", "b"))
    _, model = begun(tmp_path / "bert", head)
    for part in ("kernel", "bias"):
        np.testing.assert_array_equal(
            getattr(model.head.transform, part)[...],
            getattr(theirs.head.transform, part)[...],
        )
    assert model.head.config == head
    told = kept_of(BERT, theirs.head.config, head).told
    assert told == "the head is new, behind the pooler of the files"
    roberta = encoder_preset("roberta_tiny")
    pooler = encoder_head(roberta, "pooler")
    assert not kept_of(
        roberta, pooler, encoder_head(roberta, "sequence", num_labels=2)
    ).anything


def test_a_task_says_what_it_keeps(tmp_path):
    written(tmp_path / "bert", labels=("good", "bad"))
    lines = [
        json.dumps({"text": f"{word} film {i}", "label": label})
        for i in range(30)
        for word, label in (("a lovely", "good"), ("an awful", "bad"))
    ]
    (tmp_path / "reviews.jsonl").write_text("\n".join(lines))
    config = from_source(str(tmp_path / "bert"))
    data = dataclasses.replace(
        config.data, paths=(str(tmp_path / "reviews.jsonl"),), label_field="label"
    )
    task = prepare(dataclasses.replace(config, data=data))
    assert task.config.head.labels == ("bad", "good")
    assert task.told.endswith("labels bad, good; the head keeps bad, good of the files")
