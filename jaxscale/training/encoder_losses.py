"""Losses of encoders: masked tokens, and labels of texts and tokens.

Axes: B packed rows, T tokens per row, S sequences per row, C labels.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxscale.models.heads import Problem
from jaxscale.training.gradients import LossFunction
from jaxscale.training.losses import LossSums, chunked_cross_entropy


def masked_lm_loss(*, chunk_size: int = 1024, z_loss: float = 0.0) -> LossFunction:
    """The loss of an encoder with a ``masked_lm`` head on batches of `MaskedBatches`.

    Args:
        chunk_size: Positions per row whose logits are computed at a time.
        z_loss: Coefficient of the squared log-sum-exp.
    """

    def loss(model: Any, batch: Any) -> tuple[Array, LossSums]:
        _require_head(model, "masked_lm")
        hidden = model.hidden(batch.tokens, cu_seqlens=batch.cu_seqlens)
        kernel, bias = model.output_embedding()
        value, sums = chunked_cross_entropy(
            model.head.features(hidden),
            kernel,
            batch.targets,
            batch.loss_mask,
            chunk_size=chunk_size,
            z_loss=z_loss,
            bias=bias,
            vocab_size=model.head.answers,
            rules=model.rules,
        )
        return value, sums._replace(inputs=batch.cu_seqlens[:, -1].sum())

    return loss


def _require_head(model: Any, *kinds: str) -> None:
    found = None if model.head is None else model.head.config.kind
    if found not in kinds:
        raise ValueError(
            f"the head of the model is {found!r}, expected one of {kinds} for this "
            "loss; make the model with head=encoder_head(config, ...)"
        )


def classification_loss() -> LossFunction:
    r"""The loss of an encoder with a ``sequence`` or ``token`` head.

    The sum of :math:`-\log \mathrm{softmax}(l)_y` over the texts, or tokens, that have
    a label :math:`y`, on batches of `LabeledBatches`. For a head with ``problem``
    ``multi_label`` it is the binary cross-entropy of the sigmoids, for ``regression``
    the squared error; both are means over the labels of a text. It raises ValueError
    for another head, one with fewer labels than the data, and one with a single label,
    which has nothing to learn.
    """

    def loss(model: Any, batch: Any) -> tuple[Array, LossSums]:
        head = None if model.head is None else model.head.config
        found = None if head is None else head.kind
        expected = "sequence"
        if batch.labels.shape[1] == batch.tokens.shape[1] and found == "token":
            expected = "token"
        if head is None or found != expected:
            raise ValueError(
                f"the head of the model is {found!r}, expected {expected!r} for these "
                "labels; make the model with head=encoder_head(config, ...)"
            )
        count = head.num_labels
        if head.problem != batch.problem:
            raise ValueError(
                f"problem {head.problem!r} of the head, but the labels are those of "
                f"{batch.problem!r}; make the head with problem={batch.problem!r}"
            )
        if count < 2 and head.problem == "single_label":
            raise ValueError(
                f"num_labels {count} of the head leaves nothing to choose, and a loss "
                "of 0; give it one for each class, at least 2, or number what is to be "
                "predicted, with problem='regression'"
            )
        fixed = head.problem != "single_label"
        if fixed and batch.labels.shape[-1] != count:
            raise ValueError(
                f"num_labels {count} of the head, but the data have "
                f"{batch.labels.shape[-1]}; make both alike"
            )
        if batch.num_labels is not None and batch.num_labels > count:
            raise ValueError(
                f"num_labels {count} of the head is too small for the data, whose "
                f"labels reach {batch.num_labels - 1}; make the head with "
                f"num_labels={batch.num_labels}"
            )
        types = batch.token_types if model.config.token_types > 1 else None
        logits = model(batch.tokens, cu_seqlens=batch.cu_seqlens, token_types=types)
        each, right = _LOSSES[head.problem](logits, batch.labels)  # [B, S or T]
        nll = jnp.where(batch.loss_mask, each, 0).sum()
        correct = None
        if right is not None:
            correct = (right & batch.loss_mask).sum(dtype=jnp.int32)
        sums = LossSums(
            nll=nll,
            z_loss=jnp.zeros((), jnp.float32),
            tokens=batch.loss_mask.sum(dtype=jnp.int32),
            correct=correct,
            inputs=batch.cu_seqlens[:, -1].sum(),
        )
        return nll, sums

    return loss


def _of_one_label(logits: Array, labels: Array) -> tuple[Array, Array]:
    log_p = jax.nn.log_softmax(logits, axis=-1)
    picked = jnp.take_along_axis(log_p, labels[..., None], axis=-1)[..., 0]
    return -picked, logits.argmax(-1) == labels


def _of_several_labels(logits: Array, labels: Array) -> tuple[Array, Array]:
    each = jax.nn.softplus(logits) - logits * labels
    return each.mean(-1), ((logits > 0) == (labels > 0)).all(-1)


def _of_numbers(logits: Array, labels: Array) -> tuple[Array, None]:
    return jnp.square(logits - labels).mean(-1), None


_LOSSES: dict[Problem, Callable[[Array, Array], tuple[Array, Array | None]]] = {
    "single_label": _of_one_label,
    "multi_label": _of_several_labels,
    "regression": _of_numbers,
}
"""Loss of each text or token, and whether the prediction is correct."""
