"""Texts with labels, packed: classification of texts and of tokens.

Axes: B rows, T tokens of a row, S sequences of a row, C labels.
"""

import copy
import dataclasses
import functools
import hashlib
import sys
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Bool, Int, Shaped

from jaxscale.checks import check_choice
from jaxscale.models.heads import Problem
from jaxscale.models.tokenizer import EncodedText
from jaxscale.nn.packing import assign_rows, cu_seqlens_of_lengths
from jaxscale.training.data.placement import (
    MAX_PREFETCH,
    RowPlacement,
    prefetched,
    saved_place,
)
from jaxscale.training.data.row_packing import spread
from jaxscale.training.losses import LossSums
from jaxscale.training.step import LossFunction


# As a pytree it also carries shardings or shapes in the place of arrays.
@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LabeledBatch:
    """Packed rows of texts, and what each text or token should be called."""

    tokens: Int[Array | np.ndarray, "B T"]
    """int32, token ids; 0 in the padding."""
    token_types: Int[Array | np.ndarray, "B T"]
    """int32, which text of a pair each token belongs to."""
    cu_seqlens: Int[Array | np.ndarray, "B bounds"]
    """int32 [B, S+1], prefix sums of the lengths; the last value is repeated."""
    labels: Shaped[Array | np.ndarray, "B _ *C"]
    """int32, of each sequence [B, S] or of each token [B, T]; or float32 [B, S, C], 1
    for each label of a sequence, or its numbers."""
    loss_mask: Bool[Array | np.ndarray, "B _"]
    """True for the labels that count."""
    num_labels: int | None = dataclasses.field(default=None, metadata={"static": True})
    """One more than the largest label of all batches, if that is known."""
    problem: Problem = dataclasses.field(
        default="single_label", metadata={"static": True}
    )
    """What the labels are, as `HeadConfig.problem`."""


class LabeledBatches:
    """Batches of packed texts with labels; each `iter` starts at the first.

    Texts are shuffled in each epoch and packed into rows in that order; rows of padding
    fill the last batch of an epoch. No text is split or left out. Each process makes
    just the rows of its own devices.

    Example:
        >>> from jaxscale.models import Tokenizer
        >>> tokenizer = Tokenizer.train(["to be or not to be"], vocab_size=260)
        >>> texts = tokenizer.encode_inputs(["to be", "or", "not", "to"])
        >>> batches = LabeledBatches(
        ...     texts, [1, 0, 0, 1], seq_len=8, batch_size=2, max_sequences=4, epochs=1
        ... )
        >>> sum(int(batch.loss_mask.sum()) for batch in batches)
        4
    """

    def __init__(
        self,
        texts: Sequence[EncodedText],
        labels: Sequence[Any],
        *,
        problem: Problem = "single_label",
        num_labels: int | None = None,
        seq_len: int,
        batch_size: int,
        max_sequences: int,
        seed: int = 0,
        sharding: NamedSharding | None = None,
        epochs: int | None = None,
        shuffle: bool = True,
        prefetch: int = 2,
    ) -> None:
        """Describe the batches.

        Args:
            texts: Results of ``Tokenizer.encode_inputs``.
            labels: The label of each text; or, for each text, one of each token, -1
                where none counts. With "multi_label" the labels of each text, any
                number of them; with "regression" its number, or its numbers.
            problem: What the labels are, as `HeadConfig.problem`.
            num_labels: C, labels of "multi_label"; None is one more than the largest.
            seq_len: T, tokens of a row.
            batch_size: B, rows of a batch.
            max_sequences: S, most texts of a row.
            seed: Decides the order of the texts.
            sharding: Sharding of the rows of a batch; None: the default device.
            epochs: Passes over the texts, None for no end.
            shuffle: True shuffles texts, anew in each epoch.
            prefetch: Batches made ahead of time on another thread, on the devices too;
                0 makes each when asked.

        Raises:
            TypeError: a text is not encoded, or a label is not what `problem` says.
            ValueError: labels do not fit the texts, a text is empty or longer than a
                row, or the rows of a batch cannot be spread evenly.
        """
        if not texts:
            raise ValueError("texts is empty; training needs at least one text")
        if len(texts) != len(labels):
            raise ValueError(
                f"labels has {len(labels)} entries for {len(texts)} texts; give one "
                "for each"
            )
        for name, value in (("batch_size", batch_size), ("epochs", epochs)):
            if value is not None and value < 1:
                raise ValueError(f"{name} {value}, expected at least 1")
        if not 0 <= prefetch <= MAX_PREFETCH:
            raise ValueError(f"prefetch {prefetch}, expected 0 to {MAX_PREFETCH}")
        check_choice("problem", problem, Problem)
        for i, (text, label) in enumerate(zip(texts, labels, strict=True)):
            _check_types(i, text, label, problem)
        self.texts = [np.asarray(text.ids, np.int32) for text in texts]
        self.types = [np.asarray(text.types, np.int32) for text in texts]
        self.problem: Problem = problem
        self.labels, self.num_labels = _targets(labels, problem, num_labels)
        single = problem == "single_label"
        self.by_token = single and self.labels[0].ndim == 1
        for i, (ids, label) in enumerate(zip(self.texts, self.labels, strict=True)):
            expected = ids.shape if self.by_token else ()
            if single and label.shape != expected:
                raise ValueError(
                    f"labels[{i}] has shape {label.shape}, expected {expected}: one "
                    f"label for the text, or one for each of its {len(ids)} tokens"
                )
            if not len(ids):
                raise ValueError(f"texts[{i}] has no tokens; leave it out")
            if len(ids) > seq_len:
                raise ValueError(
                    f"texts[{i}] has {len(ids)} tokens, more than seq_len {seq_len}; "
                    "raise it, or cut the text with encode_inputs(max_length=...)"
                )
            if single and not self.by_token and label < 0:
                raise ValueError(f"labels[{i}] {label} must not be negative")
        self.seq_len = seq_len
        self.batch_size = batch_size
        self.max_sequences = max_sequences
        self.seed = seed
        self.placement = RowPlacement(sharding, batch_size)
        self.epochs = epochs
        self.shuffle = shuffle
        self.prefetch = prefetch
        # Two epochs are in use while the next one is prefetched.
        self._rows_of = functools.lru_cache(maxsize=2)(self._pack)
        digest = hashlib.sha256()
        for array in (*self.texts, *self.types, *self.labels):
            digest.update(array.tobytes())
        self.identity = {
            "texts": digest.hexdigest()[:16],
            "seq_len": seq_len,
            "batch_size": batch_size,
            "max_sequences": max_sequences,
            "seed": seed,
            "shuffle": shuffle,
        }
        if not single:
            self.identity |= {"problem": problem, "num_labels": self.num_labels}

    def rows_of(self, epoch: int) -> list[list[int]]:
        """The texts of each row of an epoch."""
        return self._rows_of(epoch)

    def _pack(self, epoch: int) -> list[list[int]]:
        order = np.arange(len(self.texts))
        if self.shuffle:
            # The raw stream of Philox is the same in every release of numpy.
            bits = np.random.Philox(key=[self.seed, epoch])
            order = np.argsort(bits.random_raw(len(order)), kind="stable")
        lengths = [len(self.texts[i]) for i in order]
        rows = assign_rows(lengths, self.seq_len, self.max_sequences)
        return [[int(order[i]) for i in row] for row in rows]

    @property
    def is_endless(self) -> bool:
        """True if no pass over the texts is the last."""
        return self.epochs is None

    def sample(self, count: int) -> "LabeledBatches":
        """Return `count` batches of rows that are drawn evenly from all, always alike.

        Args:
            count: Batches, fewer than there are.
        """
        size = count * self.batch_size

        def rows_of(epoch: int) -> list[list[int]]:
            rows = self.rows_of(epoch)
            return [rows[i] for i in spread(len(rows), min(size, len(rows)))]

        drawn = copy.copy(self)
        drawn.epochs = 1
        drawn._rows_of = functools.lru_cache(maxsize=2)(rows_of)
        return drawn

    def __iter__(self) -> "LabeledBatchIterator":
        return LabeledBatchIterator(self)

    def __len__(self) -> int:
        """Batches until the end; for endless ones a number that is never reached."""
        return len(_LocalBatches(self, 0, 0))


class LabeledBatchIterator(Iterator[LabeledBatch]):
    """Walks through `LabeledBatches`; its position can be saved and restored."""

    def __init__(self, batches: LabeledBatches) -> None:
        """Begin with the first batch."""
        self._batches = batches
        self._open(0, 0)

    def __next__(self) -> LabeledBatch:
        return next(self._source)

    def progress(self) -> dict[str, float]:
        """How often the texts were read so far, for the metrics."""
        epoch, row = self._place()
        return {"epochs": epoch + row / len(self._batches.rows_of(epoch))}

    def get_state(self) -> dict[str, Any]:
        """The position, as a small dictionary that JSON can hold."""
        epoch, row = self._place()
        return {"epoch": epoch, "row": row, **self._batches.identity}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue where `get_state` was called, bit for bit.

        Raises:
            ValueError: the state is none, or comes from other texts or another packing.
        """
        for name, mine in self._batches.identity.items():
            if state.get(name) != mine:
                raise ValueError(
                    f"the saved position was made with {name} {state.get(name)!r}, "
                    f"this data has {mine!r}; resume with the same settings and texts"
                )
        epoch, row = saved_place(state, "epoch"), saved_place(state, "row")
        self.close()
        self._open(epoch, row)

    def close(self) -> None:
        """Stop the prefetching thread."""
        self._source.close()

    def _open(self, epoch: int, row: int) -> None:
        self._made = _LocalBatches(self._batches, epoch, row)
        self._source = prefetched(self._made, self._batches.prefetch)

    def _place(self) -> tuple[int, int]:
        """Epoch and first row of the next batch."""
        return self._made.place(self._source.get_state()["next_index"])


class _LocalBatches:
    """The source that Grain reads: batches of which this process makes its rows."""

    def __init__(self, batches: LabeledBatches, epoch: int, row: int) -> None:
        self._batches = batches
        self._epoch = epoch
        self._first = row // batches.batch_size
        self._counts: dict[int, int] = {}

    def __len__(self) -> int:
        if self._batches.epochs is None:
            return sys.maxsize
        left = range(self._epoch, self._batches.epochs)
        return max(0, sum(map(self._count, left)) - self._first)

    def __getitem__(self, step: int) -> LabeledBatch:
        return jax.tree.map(self._batches.placement.to_devices, self.on_host(step))

    def on_host(self, step: int) -> LabeledBatch:
        """The rows of this process."""
        epoch, row = self.place(step)
        rows = self._batches.rows_of(epoch)[row : row + self._batches.batch_size]
        mine = self._batches.placement.local_rows
        return self._make([rows[i] if i < len(rows) else [] for i in mine])

    def place(self, step: int) -> tuple[int, int]:
        """Epoch and first row of a batch, `step` batches after the first."""
        epoch, batch = self._epoch, self._first + step
        while batch >= self._count(epoch):
            batch -= self._count(epoch)
            epoch += 1
        return epoch, batch * self._batches.batch_size

    def _count(self, epoch: int) -> int:
        """Batches of an epoch."""
        if epoch not in self._counts:
            rows = len(self._batches.rows_of(epoch))
            self._counts[epoch] = -(-rows // self._batches.batch_size)
        return self._counts[epoch]

    def _make(self, rows: Sequence[Sequence[int]]) -> LabeledBatch:
        batches = self._batches
        shape = (len(rows), batches.seq_len)
        seqs = batches.max_sequences
        answers = shape if batches.by_token else (shape[0], seqs)
        single = batches.problem == "single_label"
        tokens, types = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        bounds = np.zeros((shape[0], seqs + 1), np.int32)
        mask = np.zeros(answers, np.bool_)
        labels = (
            np.zeros(answers, np.int32)
            if single
            else np.zeros((*answers, batches.num_labels), np.float32)
        )
        for b, row in enumerate(rows):
            lengths = [len(batches.texts[i]) for i in row]
            bounds[b] = cu_seqlens_of_lengths(lengths, seqs)
            if not row:
                continue  # padding
            filled = slice(bounds[b, -1])
            tokens[b, filled] = np.concatenate([batches.texts[i] for i in row])
            types[b, filled] = np.concatenate([batches.types[i] for i in row])
            chosen = [batches.labels[i] for i in row]
            join = np.concatenate if batches.by_token else np.stack
            joined = join(chosen)
            counts = joined >= 0 if single else True
            mask[b, : len(joined)] = counts
            labels[b, : len(joined)] = np.where(counts, joined, 0)
        return LabeledBatch(
            tokens=tokens,
            token_types=types,
            cu_seqlens=bounds,
            labels=labels,
            loss_mask=mask,
            num_labels=batches.num_labels,
            problem=batches.problem,
        )


def _targets(
    labels: Sequence[Any], problem: Problem, num_labels: int | None
) -> tuple[list[np.ndarray], int]:
    """The array of each label, and how many labels there are."""
    if problem == "single_label":
        numbers = [np.asarray(label, np.int32) for label in labels]
        return numbers, 1 + max(int(label.max(initial=-1)) for label in numbers)
    if problem == "regression":
        numbers = [np.atleast_1d(np.asarray(label, np.float32)) for label in labels]
        for i, array in enumerate(numbers):
            if array.shape != numbers[0].shape or not np.isfinite(array).all():
                raise ValueError(
                    f"labels[{i}] {labels[i]!r} must be {len(numbers[0])} finite "
                    "numbers, as labels[0]"
                )
        return numbers, len(numbers[0])
    largest = max((max(label, default=-1) for label in labels), default=-1)
    count = 1 + largest if num_labels is None else num_labels
    targets = []
    for i, label in enumerate(labels):
        if not all(0 <= number < count for number in label):
            raise ValueError(
                f"labels[{i}] {label!r} must be numbers of labels from 0 to {count - 1}"
            )
        targets.append(np.zeros(count, np.float32))
        targets[-1][list(label)] = 1
    return targets, count


def _check_types(i: int, text: Any, label: Any, problem: Problem) -> None:
    """Stop at what would fail without a name, and at a number that would be rounded."""
    if not isinstance(text, EncodedText):
        raise TypeError(
            f"texts[{i}] must be an EncodedText, got {text!r}; pass "
            "tokenizer.encode_inputs(texts)"
        )
    array = np.asarray(label)
    if problem == "regression":
        if array.ndim > 1 or not array.size or array.dtype.kind not in "iuf":
            raise TypeError(
                f"labels[{i}] must be a number, or a list of them, got {label!r}"
            )
        return
    if problem == "multi_label" and array.ndim != 1:
        raise TypeError(
            f"labels[{i}] must be a list of the numbers of labels, got {label!r}"
        )
    if array.size and array.dtype.kind not in "biu":
        raise TypeError(
            f"labels[{i}] must be an integer, or one for each token, got {label!r}; "
            "number the classes from 0"
        )


def classification_loss() -> LossFunction:
    r"""The loss of an encoder with a ``sequence`` or ``token`` head.

    The sum of :math:`-\log \mathrm{softmax}(l)_y` over the texts, or tokens, that have
    a label :math:`y`, on batches of `LabeledBatches`. Of a head whose ``problem`` is
    ``multi_label`` the binary cross-entropy of the sigmoids, of ``regression`` the
    squared error; both are means over the labels of a text.
    It raises ValueError for another head, one that has fewer labels than the data, and
    one of a single label, which has nothing to learn.
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
"""Loss of each text or token, and whether the model is right."""
