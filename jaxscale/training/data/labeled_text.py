"""Texts with labels from files, ready to be batched."""

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

from jaxscale.models.tokenizer import EncodedText, Tokenizer
from jaxscale.training.data.corpus import Document, find_files, split
from jaxscale.training.data.labeled import LabeledBatches
from jaxscale.training.data.packed import DataConfig, load_tokenizer
from jaxscale.training.data.text_files import holds_records, read_records, text_of


type Label = str | int
type Example = tuple[EncodedText, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LabeledText:
    """Tokenized texts with the number of their label; made by `load_labeled`."""

    tokenizer: Tokenizer
    """Encodes the texts."""
    labels: tuple[str, ...]
    """Names of the labels, by their numbers."""
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
        """Batches of some of the texts.

        Args:
            examples: `train` or `held_out`.
            config: Row length, batch size, seed, prefetch.
            **options: Further arguments of `LabeledBatches`.
        """
        return LabeledBatches(
            [text for text, _ in examples],
            [label for _, label in examples],
            seq_len=config.seq_len,
            batch_size=config.batch_size,
            max_sequences=config.max_sequences,
            seed=config.seed,
            prefetch=config.prefetch,
            **options,
        )


def load_labeled(config: DataConfig) -> LabeledText:
    """Read and tokenize the records of `config.paths`, and number their labels.

    Records are held out by a hash of their file and line. Texts are cut at
    ``config.seq_len`` tokens. Labels are numbered in their order: names by the
    alphabet, integers by size.

    Args:
        config: Paths, the fields of text and label, and the tokenizer.

    Raises:
        ValueError: a file holds no records or is damaged, a record lacks a field, its
            label is no text and no integer, all labels are equal, or one side of the
            split would be empty.
        FileNotFoundError: there is no tokenizer where `config.tokenizer` says.
    """
    if not config.paths:
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
    found: list[tuple[str, Any, Label]] = []
    for file, name in sorted(find_files(config.paths, config.suffixes).items()):
        if not holds_records(file):
            raise ValueError(
                f"paths: {file} holds no records with labels; give JSON lines (.jsonl) "
                "or Parquet tables"
            )
        for place, record in read_records(file):
            at = f"{name}{place.removeprefix(str(file))}"
            found.append(
                (at, _text(record, config, place), _label(record, config, place))
            )
    if not found:
        raise ValueError(f"paths {config.paths} hold no records")
    # Files of several paths may have one name; their records keep the order of files.
    found.sort(key=lambda example: example[0])
    names = _numbered({label for _, _, label in found})
    encoded = tokenizer.encode_inputs(
        [text for _, text, _ in found], max_length=config.seq_len
    )
    examples = [
        (at, (text, names[label]))
        for (at, _, label), text in zip(found, encoded, strict=True)
    ]
    train, _ = split(
        [Document(name=at, text="") for at, _ in examples], config.held_out_fraction
    )
    to_train = {document.name for document in train}
    return LabeledText(
        tokenizer=tokenizer,
        labels=tuple(map(str, names)),
        train=[example for at, example in examples if at in to_train],
        held_out=[example for at, example in examples if at not in to_train],
    )


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
    if not isinstance(label, str | int):
        raise ValueError(
            f"paths: {place}: field {field!r} is {label!r:.60}, expected a name or an "
            "integer"
        )
    return label


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
