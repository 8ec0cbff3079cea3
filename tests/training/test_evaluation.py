"""Evaluations: what of the held-out data they read, and how it is weighed."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxscale.models import EncoderConfig, HeadConfig, Tokenizer, encoder_preset
from jaxscale.models.families.llama import llama_tiny
from jaxscale.sharding import make_mesh
from jaxscale.training import (
    DataConfig,
    LabeledBatches,
    LossSums,
    MaskedBatches,
    PackedBatches,
    TokenCorpus,
    TrainConfig,
    TrainState,
    evaluate,
)


DATA = DataConfig(seq_len=16, batch_size=4, max_sequences=4, vocab_size=256)
TEXT = TrainConfig(model=llama_tiny(), data=DATA)
ZERO = jnp.zeros((), jnp.int32)
STATE = TrainState(step=ZERO, skipped=ZERO, model=None, opt_state=None)
MESH = make_mesh({"data": 1}, jax.devices()[:1])


def told_by_targets(_, batch):
    """A loss that is the target, and right where that is above 100."""
    targets, mask = np.asarray(batch.targets), np.asarray(batch.loss_mask)
    return LossSums(
        nll=targets[mask].sum(dtype=np.float64),
        z_loss=0.0,
        tokens=mask.sum(),
        correct=(targets[mask] > 100).sum(),
    )


def told_by_labels(_, batch):
    labels, mask = np.asarray(batch.labels), np.asarray(batch.loss_mask)
    return LossSums(
        nll=labels[mask].sum(dtype=np.float64),
        z_loss=0.0,
        tokens=mask.sum(),
        correct=(labels[mask] == 0).sum(),
    )


def measured(config, data, step=told_by_targets):
    return evaluate(config, MESH, step, STATE, data)


@pytest.fixture(scope="module")
def corpus():
    """Documents of two sources, three to one in tokens, one behind the other."""
    rng = np.random.default_rng(3)
    sizes = rng.integers(3, 40, 400)
    halves = np.cumsum(sizes) < 0.75 * sizes.sum()
    return TokenCorpus.from_ids(
        rng.integers(1, 100, n) if first else rng.integers(101, 250, n)
        for n, first in zip(sizes, halves, strict=True)
    )


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_sample_has_every_source_in_its_share(corpus, shuffle):
    data = PackedBatches(corpus, DATA, epochs=1, shuffle=shuffle)
    with_target = np.concatenate([corpus[i][1:] for i in range(len(corpus))])
    everything = measured(dataclasses.replace(TEXT, eval_batches=len(data)), data)
    assert everything.tokens == len(with_target)
    assert everything.loss == pytest.approx(with_target.mean(), rel=1e-12)
    assert everything.accuracy == pytest.approx((with_target > 100).mean(), rel=1e-12)
    assert everything.batches == everything.batches_held_out == len(data) > 100
    some = measured(TEXT, data)
    assert (some.batches, some.batches_held_out) == (32, len(data))
    assert some.extent == f"32 of {len(data)} held-out batches"
    rows = 32 * DATA.batch_size
    # Lying by source, each is a row or two from its share; shuffled rows are a draw.
    near = 3 / rows if not shuffle else 4 * 0.43 / rows**0.5
    assert abs(some.accuracy - everything.accuracy) < near
    assert some == measured(TEXT, data)


def test_a_sample_is_of_different_rows_on_any_devices(corpus):
    data = PackedBatches(corpus, DATA, epochs=1, shuffle=False)
    mesh = make_mesh({"data": 4}, jax.devices()[:4])
    place = NamedSharding(mesh, PartitionSpec("data"))
    spread = PackedBatches(corpus, DATA, epochs=1, shuffle=False, sharding=place)
    all_rows = {bytes(row) for b in data for row in np.asarray(b.tokens)}
    drawn = [np.asarray(b.tokens) for b in data.sample(9)]
    seen = {bytes(row) for rows in drawn for row in rows}
    assert len(seen) == 36 and seen < all_rows
    for mine, theirs in zip(drawn, spread.sample(9), strict=True):
        np.testing.assert_array_equal(mine, theirs.tokens)


def test_masked_text_is_sampled_too(corpus):
    names = ("[PAD]", "[CLS]", "[SEP]", "[MASK]")
    tokenizer = Tokenizer.train(["to be"], 260, special_tokens=names)
    data = dataclasses.replace(DATA, vocab_size=260)
    held_out = PackedBatches(corpus, data, epochs=1, shuffle=False)
    found = measured(TEXT, MaskedBatches(held_out, tokenizer))
    assert (found.batches, found.batches_held_out) == (32, len(held_out))
    assert abs(found.accuracy - 0.25) < 0.1


def labeled_config(**options):
    model = encoder_preset("bert_tiny")
    assert isinstance(model, EncoderConfig)
    return TrainConfig(
        model=model,
        head=HeadConfig(kind="sequence", num_labels=5),
        data=DATA,
        **options,
    )


def test_texts_that_are_sorted_by_label_are_all_evaluated():
    tokenizer = Tokenizer.train(["to be or not to be"], vocab_size=260)
    labels = np.repeat(np.arange(5), [60, 50, 40, 28, 25])
    texts = tokenizer.encode_inputs(["to be or not"[: 2 + i % 9] for i in range(203)])
    data = LabeledBatches(
        texts,
        labels.tolist(),
        seq_len=16,
        batch_size=2,
        max_sequences=4,
        epochs=1,
        shuffle=False,
    )
    found = measured(labeled_config(), data, told_by_labels)
    assert found.tokens == 203 and found.batches == found.batches_held_out > 16
    assert found.accuracy == pytest.approx(60 / 203, rel=1e-12)
    assert found.loss == pytest.approx(labels.mean(), rel=1e-12)
    limited = labeled_config(eval_batches=10)
    some = measured(limited, data, told_by_labels)
    assert (some.batches, some.batches_held_out) == (10, found.batches)
    assert abs(some.accuracy - 60 / 203) < 0.12 and abs(some.loss - found.loss) < 0.25
    seen = {int(x) for b in data.sample(10) for x in b.labels[b.loss_mask]}
    assert seen == {0, 1, 2, 3, 4}


def test_batches_of_any_kind_are_drawn_where_their_number_is_known(corpus):
    batches = list(PackedBatches(corpus, DATA, epochs=1, shuffle=False))
    found = measured(TEXT, batches)
    assert (found.batches, found.batches_held_out) == (32, len(batches))
    whole = measured(dataclasses.replace(TEXT, eval_batches=1000), batches)
    assert abs(found.accuracy - whole.accuracy) < 2 / 32

    class Stream:
        def __iter__(self):
            yield from batches

    assert measured(TEXT, Stream()) == dataclasses.replace(whole, batches_held_out=None)
    first = measured(dataclasses.replace(TEXT, eval_batches=3), Stream())
    assert first.batches == 3 and first.extent == "3 held-out batches"
    with pytest.raises(ValueError, match="eval_batches 0 must be at least 1, or None"):
        dataclasses.replace(TEXT, eval_batches=0)
