"""Texts with labels from files, ready to be batched."""

import dataclasses
import hashlib
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np

from jaxscale.models.heads import Problem
from jaxscale.models.tokenizer import EncodedText, Tokenizer
from jaxscale.training.data.corpus import Document, find_files, split
from jaxscale.training.data.labeled import LabeledBatches
from jaxscale.training.data.packed import DataConfig, load_tokenizer
from jaxscale.training.data.text_files import holds_records, read_records, text_of


logger = logging.getLogger("jaxscale.training")

type Records = Iterable[Mapping[str, Any]] | Mapping[str, Sequence[Any]]
"""Records, or columns of them by their names."""
type Label = str | int | float | list[Any]
type Answer = int | tuple[int, ...] | tuple[float, ...]
type Example = tuple[EncodedText, Answer]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LabeledText:
    """Tokenized texts with the number of their label; made by `load_labeled`."""

    tokenizer: Tokenizer
    """Tokenizer of the texts, with the length that they were truncated to."""
    labels: tuple[str, ...]
    """Names of the labels, by number; empty for regression."""
    problem: Problem
    """Problem type of the labels, as `HeadConfig.problem`."""
    num_labels: int
    """C, number of labels, or of regression targets per text."""
    train: list[Example]
    """The texts to train on."""
    held_out: list[Example]
    """The texts to evaluate on; may be empty."""

    @property
    def fingerprint(self) -> str:
        """Equal for equal tokens and labels to train on."""
        digest = hashlib.sha256("\0".join(self.labels).encode())
        for text, label in self.train:
            digest.update(repr((text.ids, text.types, label)).encode())
        return digest.hexdigest()[:16]

    def batches(
        self, examples: list[Example], config: DataConfig, **options: Any
    ) -> LabeledBatches:
        """Batches of some of the texts."""
        return LabeledBatches(
            [text for text, _ in examples],
            [label for _, label in examples],
            problem=self.problem,
            num_labels=self.num_labels if self.problem == "multi_label" else None,
            seq_len=config.seq_len,
            batch_size=config.batch_size,
            max_sequences=config.max_sequences,
            seed=config.seed,
            prefetch=config.prefetch,
            **options,
        )


def load_labeled(config: DataConfig, records: Records | None = None) -> LabeledText:
    """Read and tokenize records with labels, and number these.

    Records are held out by a hash of their file and line, or of their number. Texts
    are truncated to ``config.seq_len`` tokens. Labels are numbered in order: names
    alphabetically, integers by size. Lists of them are several labels of one text, and
    numbers with a fraction, or lists of these, are regression targets
    (`DataConfig.problem`).

    Args:
        config: Paths, the fields of text and label, and the tokenizer.
        records: The records, instead of those of `config.paths`. Integers that a data
            set of `datasets` has names for become these.

    Raises:
        ValueError: a file holds no records or is damaged, a record lacks a field, its
            label is not of the kind of the others, all labels are equal, or one side of
            the split would be empty.
        FileNotFoundError: there is no tokenizer where `config.tokenizer` says.
    """
    if records is None and not config.paths:
        raise ValueError(
            "data.label_field is given without data.paths; name files of JSON lines or "
            "Parquet tables that hold texts and labels"
        )
    if config.weights:
        raise ValueError(
            f"data.weights {config.weights} mix sources of text, and labeled texts are "
            "read as they are; leave them out"
        )
    tokenizer = load_tokenizer(config)
    logger.info(
        "reading texts with labels from %s", ", ".join(config.paths) or "memory"
    )
    read = _of_files(config) if records is None else _of_memory(records, config)
    found: list[tuple[str, Any, Label]] = [
        (at, _text(record, config, place), _label(record, config, place))
        for at, place, record in read
    ]
    if not found:
        where = "records" if records is not None else f"paths {config.paths}"
        raise ValueError(f"{where} hold no records; give texts with labels")
    # Files of several paths may have one name; their records keep the order of files.
    found.sort(key=lambda example: example[0])
    labels = [label for _, _, label in found]
    problem = _problem(labels) if config.problem is None else config.problem
    names, answers = _answers(labels, problem)
    encoded = tokenizer.encode_inputs(
        [text for _, text, _ in found], max_length=config.seq_len
    )
    examples = [
        (at, (text, answer))
        for (at, _, _), text, answer in zip(found, encoded, answers, strict=True)
    ]
    train, _ = split(
        [Document(name=at, text="") for at, _ in examples], config.held_out_fraction
    )
    to_train = {document.name for document in train}
    return LabeledText(
        tokenizer=tokenizer.with_max_length(config.seq_len),
        labels=tuple(map(str, names)),
        problem=problem,
        num_labels=len(names) or len(np.atleast_1d(answers[0])),
        train=[example for at, example in examples if at in to_train],
        held_out=[example for at, example in examples if at not in to_train],
    )


def _of_files(config: DataConfig) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """The name of each record, its place for messages, and the record."""
    for file, name in sorted(find_files(config.paths, config.suffixes).items()):
        if not holds_records(file):
            raise ValueError(
                f"paths: {file} holds no records with labels; give JSON lines (.jsonl) "
                "or Parquet tables"
            )
        for place, record in read_records(file):
            yield f"{name}{place.removeprefix(str(file))}", place, record


def _of_memory(
    records: Records, config: DataConfig
) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """The same of records in memory, or of columns."""
    # Data sets of `datasets` say so what their integers mean.
    field = str(config.label_field)
    feature = getattr(records, "features", {}).get(field)
    names = getattr(feature, "names", None)
    for number, record in enumerate(_rows(records)):
        if names is not None:
            record = {**record, field: names[record[field]]}
        yield f"{number:012}", f"records[{number}]", record


def _rows(records: Records) -> Iterator[Mapping[str, Any]]:
    if not isinstance(records, Mapping):
        yield from records
        return
    columns = cast(Mapping[str, Sequence[Any]], records)
    for row in zip(*columns.values(), strict=True):
        yield dict(zip(columns, row, strict=True))


def _text(
    record: Mapping[str, Any], config: DataConfig, place: str
) -> str | tuple[str, str]:
    text = text_of(record, config.text_field, place)
    if config.pair_field is None:
        return text
    return text, text_of(record, config.pair_field, place)


def _label(record: Mapping[str, Any], config: DataConfig, place: str) -> Label:
    field = config.label_field
    if field is None or field not in record:
        raise ValueError(
            f"paths: {place} has no field {field!r}, only {sorted(record)}; name the "
            "field of the label in data.label_field"
        )
    label = record[field]
    parts = label if isinstance(label, list) else [label]
    if not all(isinstance(part, str | int | float) for part in parts):
        raise ValueError(
            f"paths: {place}: field {field!r} is {label!r:.60}, expected a name, a "
            "number, or a list of them"
        )
    return label


def _problem(labels: list[Label]) -> Problem:
    """The problem type of the labels, by their Python types."""
    lists = [label for label in labels if isinstance(label, list)]
    parts = [part for label in lists for part in label] if lists else labels
    if any(isinstance(part, float) for part in parts):
        return "regression"
    return "multi_label" if lists else "single_label"


def _answers(
    labels: list[Label], problem: Problem
) -> tuple[dict[Label, int], list[Any]]:
    """The number of each name, and the target of each text."""
    if problem == "single_label":
        for label in labels:
            if isinstance(label, list | float):
                raise ValueError(
                    f"problem 'single_label', but a label is {label!r:.60}; expected "
                    "a name or an integer"
                )
        names = _numbered(set(labels))
        return names, [names[label] for label in labels]
    several = [label if isinstance(label, list) else [label] for label in labels]
    if problem == "multi_label":
        names = _numbered({part for label in several for part in label})
        return names, [tuple(names[part] for part in label) for label in several]
    for label in several:
        fits = len(label) == len(several[0]) > 0
        if not fits or not all(_is_number(part) for part in label):
            raise ValueError(
                f"problem 'regression', but a label is {label!r:.60}; expected "
                f"{len(several[0]) or 1} finite numbers"
            )
    return {}, [tuple(map(float, label)) for label in several]


def _is_number(part: Any) -> bool:
    return isinstance(part, int | float) and math.isfinite(part)


def _numbered(labels: set[Label]) -> dict[Label, int]:
    kinds = {type(label).__name__ for label in labels}
    if len(kinds) > 1:
        raise ValueError(
            f"labels are of the types {sorted(kinds)}; write all of them alike"
        )
    if len(labels) < 2:
        raise ValueError(
            f"all labels are {labels}, which leaves nothing to learn; give texts of "
            "at least two"
        )
    ordered: list[Any] = sorted(labels)
    return {label: number for number, label in enumerate(ordered)}
