"""Texts with labels, packed: classification of texts and of tokens.

Axes: B packed rows, T tokens per row, S sequences per row, C labels.
"""

import copy
import dataclasses
import functools
import hashlib
import sys
import typing
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Bool, Int, Shaped

from jaxscale.checks import check_choice
from jaxscale.models.heads import Problem
from jaxscale.models.tokenizer import EncodedText
from jaxscale.nn.packing import assign_rows, cu_seqlens_of_lengths
from jaxscale.training.data.iterator import MAX_PREFETCH, BatchIterator
from jaxscale.training.data.placement import RowPlacement
from jaxscale.training.data.row_packing import spread


# As a pytree it also carries shardings or shapes in the place of arrays.
@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LabeledBatch:
    """Packed rows of texts, and the label of each text or token."""

    tokens: Int[Array | np.ndarray, "B T"]
    """int32, token ids; 0 in the padding."""
    token_types: Int[Array | np.ndarray, "B T"]
    """int32, segment of each token, 0 or 1 for pairs."""
    cu_seqlens: Int[Array | np.ndarray, "B bounds"]
    """int32 [B, S+1], prefix sums of the lengths; the last value is repeated."""
    labels: Shaped[Array | np.ndarray, "B _ *C"]
    """int32 per sequence [B, S] or per token [B, T]; or float32 [B, S, C] with 1 for
    each label of a sequence, or its regression targets."""
    loss_mask: Bool[Array | np.ndarray, "B _"]
    """True for labels that count in the loss."""
    num_labels: int | None = dataclasses.field(default=None, metadata={"static": True})
    """One more than the largest label of all batches, if known."""
    problem: Problem = dataclasses.field(
        default="single_label", metadata={"static": True}
    )
    """Problem type of the labels, as `HeadConfig.problem`."""


class LabeledBatches:
    """Batches of packed texts with labels; each `iter` starts at the first.

    Texts are shuffled in each epoch and packed into rows in that order; rows of padding
    fill the last batch of an epoch. No text is split or dropped. Each process makes
    only the rows of its own devices.

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

    start: Mapping[str, int] = MappingProxyType({"epoch": 0, "row": 0})

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
            labels: The label of each text; or a label per token, -1 for tokens that do
                not count. With "multi_label" any number of labels per text; with
                "regression" one or several numbers per text.
            problem: Problem type of the labels, as `HeadConfig.problem`.
            num_labels: C, labels of "multi_label"; None is one more than the largest.
            seq_len: T, tokens per packed row.
            batch_size: B, packed rows per batch.
            max_sequences: S, maximum number of texts per row.
            seed: Random seed of the order of the texts.
            sharding: Sharding of the rows of a batch; None: the default device.
            epochs: Passes over the texts, None for no end.
            shuffle: True shuffles texts, anew in each epoch.
            prefetch: Number of batches to prefetch on another thread, onto the devices;
                0 is off.

        Raises:
            TypeError: a text is not encoded, or a label does not match `problem`.
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
        """True if the number of epochs is unlimited."""
        return self.epochs is None

    def sample(self, count: int) -> "LabeledBatches":
        """Return `count` batches of evenly spaced rows, always the same.

        Args:
            count: Number of batches, fewer than there are.
        """
        size = count * self.batch_size

        def rows_of(epoch: int) -> list[list[int]]:
            rows = self.rows_of(epoch)
            return [rows[i] for i in spread(len(rows), min(size, len(rows)))]

        drawn = copy.copy(self)
        drawn.epochs = 1
        drawn._rows_of = functools.lru_cache(maxsize=2)(rows_of)
        return drawn

    def source(self, position: Mapping[str, int]) -> "_LocalBatches":
        """The batches from a position on."""
        return _LocalBatches(self, position["epoch"], position["row"])

    def progress(self, position: Mapping[str, int]) -> dict[str, float]:
        """How often the texts were read until a position, for the metrics."""
        epoch = position["epoch"]
        return {"epochs": epoch + position["row"] / len(self.rows_of(epoch))}

    def __iter__(self) -> BatchIterator[LabeledBatch]:
        return BatchIterator(self)

    def __len__(self) -> int:
        """Number of batches; for endless ones a number that is never reached."""
        return len(_LocalBatches(self, 0, 0))


class _LocalBatches:
    """The source that Grain reads: this process's rows of the batches."""

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
        at, size = self.place(step), self._batches.batch_size
        rows = self._batches.rows_of(at["epoch"])[at["row"] : at["row"] + size]
        mine = self._batches.placement.local_rows
        return self._make([rows[i] if i < len(rows) else [] for i in mine])

    def place(self, step: int) -> dict[str, int]:
        """Epoch and first row of a batch, `step` batches after the first."""
        epoch, batch = self._epoch, self._first + step
        while batch >= self._count(epoch):
            batch -= self._count(epoch)
            epoch += 1
        return {"epoch": epoch, "row": batch * self._batches.batch_size}

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
    """The array of each label, and the number of labels."""
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
    """Raise for entries that would fail without a clear error, or be rounded."""
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
