"""Encoders through `fit`: what is masked and learned, and sharded alike."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jaxscale.models import EncoderModel, Tokenizer, encoder_head, encoder_preset
from jaxscale.models.tokenizer import EncodedText
from jaxscale.nn.packing import PackedBatch
from jaxscale.sharding import MeshConfig, fsdp_tp, make_mesh
from jaxscale.training import (
    DataConfig,
    LabeledBatches,
    MaskedBatches,
    MaskingConfig,
    OptimizerConfig,
    PackedBatches,
    TokenCorpus,
    TrainConfig,
    TrainState,
    accumulated,
    classification_loss,
    fit,
    make_train_step,
    masked_lm_loss,
)
from jaxscale.training.data.labeled import _LocalBatches
from jaxscale.training.data.masked import hide_tokens
from jaxscale.training.monitoring.monitor import Writer
from tests.tiers import exhaustive


NAMES = ("[PAD]", "[CLS]", "[SEP]", "[MASK]")
TOKENIZER = Tokenizer.train(["abc"], 260, special_tokens=NAMES)
MODEL = dataclasses.replace(encoder_preset("bert_tiny"), vocab_size=260)
DATA = DataConfig(vocab_size=260, seq_len=32, batch_size=4, max_sequences=8, prefetch=0)
CONFIG = TrainConfig(
    model=MODEL,
    data=DATA,
    optimizer=OptimizerConfig(learning_rate=0.01, warmup_steps=2, weight_decay=0.0),
    dtype="float32",
    scan_layers=True,  # less to compile
    steps=30,
    loss_chunk=16,
    eval_every=1000,
    checkpoint_every=1000,
)


pytestmark = pytest.mark.usefixtures("compile_once")


def documents(count=12):
    """Sentences in which each token determines the others."""
    rng = np.random.default_rng(0)
    starts, lengths = rng.integers(4, 200, count), rng.integers(4, 12, count)
    body = [start + np.arange(n) for start, n in zip(starts, lengths, strict=True)]
    return TokenCorpus.from_ids([np.concatenate([[1], ids, [2]]) for ids in body])


def labeled(count=24, kind="sequence"):
    """A text is of class 1 if it has a 7 anywhere; a token if it follows one."""
    rng = np.random.default_rng(1)
    texts, labels = [], []
    for i in range(count):
        ids = rng.integers(10, 30, rng.integers(4, 12))
        if i % 2:
            ids[rng.integers(len(ids))] = 7
        ids = [1, *map(int, ids), 2]
        zeros = [0] * len(ids)
        texts.append(
            EncodedText(
                ids=ids,
                types=zeros,
                spans=[(0, 0)] * len(ids),
                control=[False] * len(ids),
            )
        )
        after = [-1, *(int(a == 7) for a in ids[:-1])]
        labels.append(i % 2 if kind == "sequence" else after)
    return texts, labels


class Losses(Writer):
    def __init__(self):
        self.records = []

    def write(self, record):
        if "loss" in record:
            self.records.append(record)


def train(config, kind, train_data, loss, directory, devices, **options):
    writer = Losses()
    head = encoder_head(config.model, kind, **options)
    rules = config.axis_rules
    result = fit(
        dataclasses.replace(config, output_dir=str(directory)),
        train_data=train_data,
        eval_data=train_data_once(train_data),
        model=EncoderModel(config.model, head=head, rules=rules, rngs=nnx.Rngs(0)),
        loss=loss,
        writers=[writer],
        devices=devices,
    )
    return result, [record["loss"] for record in writer.records], writer.records


def train_data_once(data):
    """A few of its batches, for the evaluation."""
    batches = iter(data)
    return [next(batches) for _ in range(2)]


def masked(config=CONFIG, **masking):
    batches = PackedBatches(documents(), config.data)
    return MaskedBatches(batches, TOKENIZER, MaskingConfig(**masking))


# ------------------------------------------------------------------------------------
# Masking


def test_what_is_hidden_and_how_often():
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(0, 260, (64, 512)), jnp.int32)
    bounds = jnp.tile(jnp.array([[0, 200, 500, 500]]), (64, 1))
    batch = PackedBatch(
        tokens=tokens, targets=tokens, loss_mask=tokens > 0, cu_seqlens=bounds
    )
    options = {"mask_id": 3, "control_ids": (0, 1, 2, 3), "vocab_size": 260}
    config = MaskingConfig()
    hidden = hide_tokens(batch, jnp.int32(5), config=config, **options)
    chosen = np.asarray(hidden.loss_mask)
    np.testing.assert_array_equal(hidden.targets, tokens)
    np.testing.assert_array_equal(hidden.tokens[~chosen], tokens[~chosen])
    assert not chosen[:, 500:].any()
    assert not chosen[np.asarray(tokens) < 4].any()
    candidates = (np.asarray(tokens)[:, :500] >= 4).sum()
    assert abs(chosen.sum() / candidates - 0.15) < 0.01
    was, now = np.asarray(tokens)[chosen], np.asarray(hidden.tokens)[chosen]
    # One random token in 260 is the mask token, another the old one.
    assert abs((now == 3).mean() - 0.8) < 0.02
    assert abs((now == was).mean() - 0.1) < 0.02
    others = now[(now != 3) & (now != was)]
    assert abs(len(others) / len(now) - 0.1) < 0.02
    assert abs(others.mean() - 130) < 10

    # Row 6 is hidden alike wherever the batch begins, and unlike row 5.
    later = jax.tree.map(lambda x: x[1:], batch)
    again = hide_tokens(later, jnp.int32(6), config=config, **options)
    np.testing.assert_array_equal(again.tokens, hidden.tokens[1:])
    assert (np.asarray(hidden.loss_mask[0]) != np.asarray(hidden.loss_mask[1])).any()
    other = MaskingConfig(seed=1)
    other = hide_tokens(batch, jnp.int32(5), config=other, **options)
    assert (np.asarray(other.loss_mask) != chosen).any()


def test_masks_change_between_epochs_and_positions_are_restored():
    data = masked()
    first, second = iter(data), iter(data)
    batches = [next(first) for _ in range(6)]
    same = [np.array_equal(batches[0].loss_mask, b.loss_mask) for b in batches[1:]]
    assert not any(same)
    for _ in range(3):
        next(second)
    restored = iter(data)
    restored.set_state(second.get_state())
    got, want = next(restored), next(second)
    np.testing.assert_array_equal(got.tokens, want.tokens)
    np.testing.assert_array_equal(got.tokens, batches[3].tokens)
    other = iter(masked(seed=1))
    with pytest.raises(ValueError, match=r"made with masking .*'seed': 0.* has .*1"):
        other.set_state(second.get_state())


def test_throughput_counts_what_the_model_read():
    head = encoder_head(MODEL, "masked_lm")
    model = EncoderModel(MODEL, head=head, rngs=nnx.Rngs(0))
    batch = next(iter(masked(probability=0.3)))
    _, sums = jax.jit(masked_lm_loss())(model, batch)
    assert int(sums.inputs) == int(batch.cu_seqlens[:, -1].sum())
    assert int(sums.tokens) == int(batch.loss_mask.sum()) < int(sums.inputs)
    optimizer = optax.sgd(0.1)
    step = make_train_step(
        accumulated(masked_lm_loss()), optimizer, schedule=lambda n: jnp.asarray(0.1)
    )
    _, metrics = step(TrainState.create(model, optimizer), batch)
    assert int(metrics["tokens"]) == int(sums.inputs)
    assert abs(float(metrics["loss"]) - float(sums.nll) / int(sums.tokens)) < 1e-4


def test_wrong_masking():
    with pytest.raises(ValueError, match=r"probability 1\.5, expected between 0 and 1"):
        MaskingConfig(probability=1.5)
    with pytest.raises(ValueError, match=r"0\.8 and random_share 0\.3 exceed 1"):
        MaskingConfig(random_share=0.3)
    batches = PackedBatches(documents(), DATA)
    with pytest.raises(ValueError, match="tokenizer has no mask token"):
        MaskedBatches(batches, Tokenizer.train(["abc"], 260))
    alone = dataclasses.replace(DATA, max_sequences=1)
    with pytest.raises(ValueError, match="max_sequences 1 of the data leaves out"):
        MaskedBatches(PackedBatches(documents(), alone), TOKENIZER)


# ------------------------------------------------------------------------------------
# Learning


def test_masked_tokens_are_learned(tmp_path):
    config = dataclasses.replace(CONFIG, steps=150)
    data, devices = masked(probability=0.3), jax.devices()[:1]
    found, losses, _ = train(
        config, "masked_lm", data, masked_lm_loss(), tmp_path, devices
    )
    assert abs(losses[0] - np.log(260)) < 0.5
    assert np.mean(losses[-10:]) < 0.4 * losses[0]
    assert found.evaluation.loss < 0.4 * losses[0]


@pytest.mark.parametrize("kind", ["sequence", *exhaustive("token")])
def test_labels_are_learned(kind, tmp_path):
    texts, labels = labeled(kind=kind)
    data = LabeledBatches(texts, labels, seq_len=32, batch_size=4, max_sequences=4)
    config = dataclasses.replace(CONFIG, steps=70)
    options = {"num_labels": 2}
    result, losses, _ = train(
        *(config, kind, data, classification_loss(), tmp_path, jax.devices()[:1]),
        **options,
    )
    assert losses[0] > 0.4
    assert np.mean(losses[-5:]) < 0.25 * losses[0]
    assert result.evaluation.accuracy > 0.95


@pytest.mark.parametrize("kind", ["masked_lm", *exhaustive("sequence")])
def test_sharded_training_equals_training_on_one_device(kind, tmp_path):
    model = dataclasses.replace(MODEL, num_layers=1)
    config = dataclasses.replace(CONFIG, steps=3, model=model)
    split = dataclasses.replace(config, mesh=MeshConfig(data=2, fsdp=2, tensor=2))
    losses = {}
    for name, one, count in (("one", config, 1), ("split", split, 8)):
        data, loss, options = masked(probability=0.3), masked_lm_loss(), {}
        if kind == "sequence":
            data = LabeledBatches(*labeled(), seq_len=32, batch_size=4, max_sequences=4)
            loss, options = classification_loss(), {"num_labels": 2}
        devices = jax.devices()[:count]
        losses[name] = train(
            one, kind, data, loss, tmp_path / name, devices, **options
        )[1]
    np.testing.assert_allclose(losses["split"], losses["one"], rtol=2e-4)
    assert split.axis_rules == fsdp_tp()


# ------------------------------------------------------------------------------------
# Labeled texts


def test_every_text_occurs_once_an_epoch():
    texts, labels = labeled(24)
    data = LabeledBatches(
        *(texts, labels), seq_len=32, batch_size=2, max_sequences=4, epochs=1
    )
    batches = list(data)
    seen = []
    for batch in batches:
        for b, s in zip(*np.nonzero(np.asarray(batch.loss_mask)), strict=True):
            begin, end = np.asarray(batch.cu_seqlens[b, s : s + 2])
            ids = tuple(np.asarray(batch.tokens[b, begin:end]).tolist())
            seen.append((ids, int(batch.labels[b, s])))
    given = [(tuple(t.ids), label) for t, label in zip(texts, labels, strict=True)]
    assert sorted(seen) == sorted(given)
    assert data.rows_of(0) != data.rows_of(1)
    iterator = iter(data)
    for _ in range(3):
        next(iterator)
    restored = iter(data)
    restored.set_state(iterator.get_state())
    np.testing.assert_array_equal(next(restored).tokens, batches[3].tokens)
    other = LabeledBatches(texts, labels, seq_len=64, batch_size=4, max_sequences=4)
    with pytest.raises(ValueError, match="made with seq_len 32, this data has 64"):
        iter(other).set_state(iterator.get_state())


@pytest.mark.parametrize("prefetch", [0, 3])
@pytest.mark.parametrize("epochs", [None, 3])
def test_labels_resume_anywhere_whatever_was_prefetched(prefetch, epochs):
    """At each batch, beyond ends of epochs; the rows of two processes are the batch."""
    options = {"seq_len": 32, "batch_size": 4, "max_sequences": 4, "epochs": epochs}
    mesh = make_mesh({"data": 4, "tensor": 2})
    rows = NamedSharding(mesh, PartitionSpec("data"))
    plain = LabeledBatches(*labeled(48), **options, prefetch=0)
    data = LabeledBatches(*labeled(48), **options, prefetch=prefetch, sharding=rows)
    per_epoch = -(-len(plain.rows_of(0)) // 4)
    assert per_epoch > 1 and len(plain.rows_of(0)) % 4  # padding at the end
    unbroken, iterator = iter(plain), iter(data)
    total = epochs * per_epoch if epochs else 3 * per_epoch
    for _ in range(total):
        state = json.loads(json.dumps(iterator.get_state()))
        assert iterator.progress()["epochs"] == pytest.approx(
            state["epoch"] + state["row"] / len(plain.rows_of(state["epoch"]))
        )
        expected = next(unbroken)
        iterator.set_state(state)
        batch = next(iterator)
        assert batch.labels.sharding.is_equivalent_to(rows, 2)
        jax.tree.map(np.testing.assert_array_equal, batch, expected)
        parts = []
        for mine in ([0, 1], [2, 3]):
            process = LabeledBatches(*labeled(48), **options)
            process.placement.local_rows = mine
            parts.append(
                _LocalBatches(process, state["epoch"], state["row"]).on_host(0)
            )
        together = jax.tree.map(lambda *x: np.concatenate(x), *parts)
        jax.tree.map(np.testing.assert_array_equal, together, expected)
    iterator.close()
    if epochs:
        with pytest.raises(StopIteration):
            next(unbroken)
        done = iter(data)
        done.set_state(unbroken.get_state())
        assert next(done, None) is None
    with pytest.raises(ValueError, match=r"batch_size 2 is not divisible by the 4 sh"):
        LabeledBatches(*labeled(3), **options | {"batch_size": 2}, sharding=rows)


def test_wrong_labels():
    texts, labels = labeled(3)
    sizes = {"seq_len": 32, "batch_size": 2, "max_sequences": 4}
    with pytest.raises(ValueError, match="labels has 2 entries for 3 texts"):
        LabeledBatches(texts, labels[:2], **sizes)
    with pytest.raises(ValueError, match=r"labels\[1\] -1 must not be negative"):
        LabeledBatches(texts, [0, -1, 1], **sizes)
    with pytest.raises(ValueError, match=r"labels\[0\] has shape \(1,\), expected \("):
        LabeledBatches(texts, [[0], [1], [0]], **sizes)
    with pytest.raises(ValueError, match=r"texts\[\d\] has \d+ tokens, more than"):
        LabeledBatches(texts, labels, **sizes | {"seq_len": 5})
    with pytest.raises(ValueError, match="texts is empty"):
        LabeledBatches([], [], **sizes)
    empty = EncodedText(ids=[], types=[], spans=[], control=[])
    with pytest.raises(ValueError, match=r"texts\[2\] has no tokens; leave it out"):
        LabeledBatches([*texts[:2], empty], labels, **sizes)


def test_wrong_types(no_shape_hook):
    texts, labels = labeled(3)
    sizes = {"seq_len": 32, "batch_size": 2, "max_sequences": 4}
    with pytest.raises(TypeError, match=r"texts\[0\] must be an EncodedText, got 'a'"):
        LabeledBatches(["a", "b", "c"], labels, **sizes)
    message = r"labels\[1\] must be an integer, or one for each token, got 0\.7"
    with pytest.raises(TypeError, match=message):
        LabeledBatches(texts, [0, 0.7, 1], **sizes)
    with pytest.raises(TypeError, match=r"labels\[0\] must be an integer, .* got 'no'"):
        LabeledBatches(texts, ["no", "yes", "no"], **sizes)


def test_one_label_is_no_choice():
    texts, labels = labeled(3)
    data = LabeledBatches(texts, labels, seq_len=32, batch_size=2, max_sequences=4)
    head = encoder_head(MODEL, "sequence", num_labels=1)
    model = EncoderModel(MODEL, head=head, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="num_labels 1 of the head leaves nothing to"):
        classification_loss()(model, next(iter(data)))


@pytest.mark.parametrize("kind", ["sequence", "token"])
def test_labels_beyond_those_of_the_head(kind):
    texts, labels = labeled(3, kind=kind)
    labels[2] = 2 if kind == "sequence" else [2 for _ in labels[2]]
    data = LabeledBatches(texts, labels, seq_len=32, batch_size=2, max_sequences=4)
    head = encoder_head(MODEL, kind, num_labels=2)
    model = EncoderModel(MODEL, head=head, rngs=nnx.Rngs(0))
    message = "num_labels 2 of the head is too small for the data, whose labels reach 2"
    with pytest.raises(ValueError, match=message):
        jax.jit(classification_loss())(model, next(iter(data)))


def test_encoders_need_a_head_and_a_loss(tmp_path):
    config = dataclasses.replace(CONFIG, output_dir=str(tmp_path), steps=2)
    with pytest.raises(ValueError, match="head None of the encoder has no loss of its"):
        fit(config, train_data=masked())
    bare = EncoderModel(MODEL, rules=fsdp_tp(), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="the head of the model is None, expected one"):
        fit(
            *(config,),
            train_data=masked(),
            model=bare,
            loss=masked_lm_loss(),
            writers=[],
            devices=jax.devices()[:1],
        )
