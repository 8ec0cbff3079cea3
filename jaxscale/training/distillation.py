"""Distillation: a model learns the next-token probabilities of another, its teacher.

The teacher runs on each batch as it is read, outside of the training step, and only its
most probable tokens are kept. So neither its parameters nor logits of a whole batch are
part of the step, which is sharded as any other.

Axes: B batch, T tokens of a row, D model, k most probable tokens.
"""

import dataclasses
import functools
import typing
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxscale.nn.packing import PackedBatch
from jaxscale.training.losses import LossSums
from jaxscale.training.step import NextTokenLoss


# As a pytree it also carries shardings or shapes in the place of arrays.
@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TaughtBatch:
    """A batch, and what a teacher predicts at each of its positions."""

    batch: PackedBatch
    """The batch."""
    likely: Int[Array, "B T k"]
    """The tokens that the teacher finds most probable."""
    probability: Float[Array, "B T k"]
    """Their probabilities, which add up to one."""


def taught(
    teacher: Any, batch: PackedBatch, *, top: int = 64, chunk_size: int = 1024
) -> TaughtBatch:
    """A batch with the predictions of a teacher.

    Args:
        teacher: A `Decoder` with the vocabulary of the student.
        batch: The batch.
        top: Most probable tokens that are kept of each position.
        chunk_size: Positions per row whose logits exist at one time.
    """
    top = min(top, teacher.vocab_size)

    def most(hidden: Array) -> tuple[Array, Array]:
        values, likely = jax.lax.top_k(teacher.unembed(hidden), top)
        return likely, jax.nn.softmax(values)

    hidden = teacher.hidden(batch.tokens, cu_seqlens=batch.cu_seqlens)
    rows, length = batch.tokens.shape
    likely, probability = (
        jnp.moveaxis(x, 0, 1).reshape(rows, -1, top)[:, :length]
        for x in _in_chunks(most, chunk_size, hidden)  # [chunks, B, t, k]
    )
    return TaughtBatch(batch=batch, likely=likely, probability=probability)


class TaughtBatches:
    """Batches for `fit`, `taught` as they are read.

    Example::

        fit(
            config,
            train_data=TaughtBatches(train_data, teacher),
            loss=DistillationLoss(share=0.5),
            model=student,
            eval_data=eval_data,  # measured without a teacher
        )
    """

    def __init__(
        self,
        batches: Iterable[PackedBatch],
        teacher: Any,
        *,
        top: int = 64,
        chunk_size: int = 1024,
    ) -> None:
        """Describe the batches; nothing is read before the first `next`.

        Args:
            batches: The batches, with an iterator as `fit` wants.
            teacher: As for `taught`.
            top: As for `taught`.
            chunk_size: As for `taught`.
        """
        self._batches = batches
        teach = jax.jit(functools.partial(taught, top=top, chunk_size=chunk_size))
        self._teach = functools.partial(teach, teacher)

    def __iter__(self) -> Iterator[TaughtBatch]:
        return _Taught(iter(self._batches), self._teach)


class _Taught(Iterator[TaughtBatch]):
    """An iterator with the position, and all else, of another."""

    def __init__(
        self, batches: Iterator[PackedBatch], teach: Callable[..., TaughtBatch]
    ) -> None:
        self._batches, self._teach = batches, teach

    def __next__(self) -> TaughtBatch:
        return self._teach(next(self._batches))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistillationLoss:
    r"""The loss of a decoder on a `TaughtBatch`.

    .. math:: (1 - s) L - s \sum_t \sum_k p_{tk} \log q_{tk}

    with the loss :math:`L` of `next_token_loss`, and the probabilities :math:`p` of the
    teacher and :math:`q` of the model. On a `PackedBatch`, as in evaluations, it is
    :math:`L`.

    Example:
        >>> DistillationLoss(share=0.5).chunk_size
        1024

    References:
        Hinton et al., "Distilling the Knowledge in a Neural Network" (arXiv
        1503.02531), at temperature 1.
    """

    share: float = 0.5
    """s, the part of the loss that the teacher decides, 0 to 1."""
    chunk_size: int = 1024
    """Positions per row whose logits exist at one time."""
    z_loss: float = 0.0
    """Coefficient of the squared log-sum-exp in L."""

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ValueError(f"share {self.share}, expected a part of the loss, 0 to 1")

    def __call__(
        self, model: Any, batch: PackedBatch | TaughtBatch
    ) -> tuple[Float[Array, ""], LossSums]:
        """The summed loss of a batch, and the parts of L.

        Args:
            model: A decoder.
            batch: Packed rows, with or without what the teacher expects.
        """
        plain = NextTokenLoss(chunk_size=self.chunk_size, z_loss=self.z_loss)
        if not isinstance(batch, TaughtBatch):
            return plain(model, batch)
        own = batch.batch
        hidden = model.hidden(own.tokens, cu_seqlens=own.cu_seqlens)
        loss, sums = plain.of_hidden(model, hidden, own)

        def apart(h: Array, likely: Array, probability: Array, mask: Array) -> Array:
            logs = jax.nn.log_softmax(model.unembed(h))
            logs = jnp.take_along_axis(logs, likely, axis=-1)  # [B, T, k]
            return -jnp.where(mask[..., None], probability * logs, 0).sum()

        taught = _in_chunks(
            apart,
            self.chunk_size,
            hidden,
            batch.likely,
            batch.probability,
            jnp.asarray(own.loss_mask),
        )
        return (1 - self.share) * loss + self.share * taught.sum(), sums


def _in_chunks(function: Callable[..., Any], size: int, *rows: Any) -> Any:
    """The results of `function` for chunks of positions, one after another, stacked.

    Args:
        function: Is given some positions of each array.
        size: Positions at most.
        rows: Arrays [B, T, ...]; zeros fill the last chunk.
    """
    batch, length = rows[0].shape[:2]
    chunks = -(-length // size)
    size = -(-length // chunks)

    def cut(x: Array) -> Array:
        x = jnp.pad(x, [(0, 0), (0, chunks * size - length), *[(0, 0)] * (x.ndim - 2)])
        return jnp.moveaxis(x.reshape(batch, chunks, size, *x.shape[2:]), 1, 0)

    once = jax.checkpoint(function)
    return jax.lax.map(lambda parts: once(*parts), [cut(x) for x in rows])
