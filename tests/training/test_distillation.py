"""Distillation against the probabilities of all tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxscale.models import Decoder
from jaxscale.training import (
    DistillationLoss,
    TaughtBatches,
    next_token_loss,
    taught,
)
from tests.pruning.conftest import CONFIG, batches, perturbed


@pytest.fixture(scope="module")
def models():
    """A student and its teacher."""
    return [perturbed(Decoder(CONFIG, rngs=nnx.Rngs(0)), seed) for seed in (0, 1)]


@pytest.mark.parametrize("top, chunk", [(32, 5), (4, 16)])
def test_loss_and_gradient(models, top, chunk):
    """Of all tokens and of few, in chunks that do and do not fill the row."""
    student, teacher = models
    (batch,) = batches(1, padding=3)
    lesson = jax.jit(lambda t, b: taught(t, b, top=top, chunk_size=chunk))(
        teacher, batch
    )
    assert lesson.likely.shape == (2, 16, top)
    whole = jax.jit(lambda model, b: model(b.tokens, cu_seqlens=b.cu_seqlens))
    logits = np.asarray(whole(teacher, batch), np.float64)
    wanted = np.exp(logits - logits.max(-1, keepdims=True))
    least = np.sort(wanted, axis=-1)[..., -top, None]
    wanted = np.where(wanted >= least, wanted, 0)
    wanted = (wanted / wanted.sum(-1, keepdims=True)).astype(np.float32)

    def reference(model):
        logs = jax.nn.log_softmax(model(batch.tokens, cu_seqlens=batch.cu_seqlens))
        hot = jax.nn.one_hot(batch.targets, logs.shape[-1])
        target = 0.75 * hot + 0.25 * wanted
        return -jnp.where(batch.loss_mask[..., None], target * logs, 0).sum()

    loss = DistillationLoss(share=0.25, chunk_size=chunk)
    found, grads = jax.jit(jax.value_and_grad(lambda m: loss(m, lesson)[0]))(student)
    expected, wanted_grads = jax.jit(jax.value_and_grad(reference))(student)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(wanted_grads), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4 * np.abs(b).max())
    # Evaluations have no teacher; what they report is the loss of the text.
    _, plain = jax.jit(next_token_loss(chunk_size=chunk))(student, batch)
    for each in (lesson, batch):
        _, sums = jax.jit(loss)(student, each)
        np.testing.assert_allclose(sums.nll, plain.nll, rtol=1e-6)
        assert int(sums.tokens) == int(plain.tokens)


def test_batches_are_taught_as_they_are_read(models):
    class Numbered:
        """An iterator with a position."""

        def __init__(self):
            self.left = batches(2)

        def __iter__(self):
            return self

        def __next__(self):
            return self.left.pop()

        def get_state(self):
            return {"row": len(self.left)}

    read = iter(TaughtBatches(Numbered(), models[1], top=3))
    assert read.get_state() == {"row": 2}
    first = next(read)
    assert first.likely.shape == (2, 16, 3) and read.get_state() == {"row": 1}
    np.testing.assert_allclose(first.probability.sum(-1), 1, rtol=1e-5)
    assert not hasattr(read, "progress")


def test_a_share_is_a_part():
    with pytest.raises(ValueError, match=r"share 1\.5, expected a part of the loss"):
        DistillationLoss(share=1.5)
