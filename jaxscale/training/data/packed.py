"""Sequence packing of a corpus, in an order that depends only on the seed.

Documents are shuffled, concatenated and cut into packed rows of `seq_len` tokens; the
rows are shuffled again, so that a batch does not hold neighboring pieces of one
document. Nothing is dropped: a document that crosses the end of a row continues in
another row, and the next epoch follows without a gap.

Any row can be computed from its number alone. A position in the data is therefore one
integer, independent of prefetching; every process reads only the rows of its own
devices; and the global batch is the same on any number of processes, so a run may
resume on another number of them.

Shape legend: B batch, T tokens per packed row, S sequences (pieces of documents) per
row.
"""

import copy
import dataclasses
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from jax.sharding import NamedSharding

from jaxscale.checks import check_choice, check_least, check_type
from jaxscale.keywords import explained
from jaxscale.models.heads import Problem
from jaxscale.models.tokenizer import Tokenizer
from jaxscale.nn.packing import PackedBatch
from jaxscale.training.data.corpus import (
    TEXT_SUFFIXES,
    Document,
    TokenCorpus,
    python_corpus,
    read_documents,
    read_sources,
    split,
    split_sources,
    tokenize,
)
from jaxscale.training.data.iterator import MAX_PREFETCH, BatchIterator
from jaxscale.training.data.mixture import Mixture, check_weights
from jaxscale.training.data.placement import RowPlacement
from jaxscale.training.data.row_packing import MixedRows, PackedRows, spread


logger = logging.getLogger("jaxscale.training")


@explained
@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The text to train on, and the size of its batches.

    Example:
        >>> DataConfig(seq_len=256, batch_size=8).tokens_per_batch
        2048
    """

    paths: tuple[str, ...] = ()
    """Files, directories and glob patterns of UTF-8 text, of JSON lines (.jsonl, both
    also .gz) or of Parquet tables; none means the documentation and library source of
    the running Python."""
    text_field: str = "text"
    """Field of a JSON line, or column of a Parquet table, that holds the text."""
    pair_field: str | None = None
    """Field of the second text, for labeled pairs."""
    label_field: str | None = None
    """Field of the label: a name or an integer, a list of them, or numbers, as
    `problem` says. None is for text without labels."""
    problem: Problem | None = None
    """Problem type of the labels: one of several (``single_label``), any number of them
    (``multi_label``), or ``regression``. None infers it: lists are multi_label, numbers
    with a fraction regression, everything else single_label."""
    weights: tuple[float, ...] = ()
    """Mixture weights of the paths, in any unit: 7 3 is 0.7 0.3. Each path is then a
    separate source, shuffled and repeated by itself. Empty: the paths are one
    source."""
    suffixes: tuple[str, ...] = TEXT_SUFFIXES
    """Suffixes of the files that a directory contributes."""
    tokenizer: str | None = None
    """A tokenizer.json or a directory that holds one; None trains byte-level BPE on the
    training documents."""
    control_tokens: tuple[str, ...] = ("<|endoftext|>",)
    """Control tokens of a tokenizer that is trained here; see `Tokenizer.train`."""
    vocab_size: int = 2048
    """Vocabulary size. A tokenizer trained here reaches this size; one from a file must
    not exceed it."""
    seq_len: int = 256
    """T, sequence length: the tokens per row that documents are packed into."""
    batch_size: int = 8
    """B, global batch size, in rows of `seq_len` tokens."""
    max_sequences: int = 32
    """S, maximum number of documents or pieces of documents packed into a row.
    Documents shorter than about seq_len / max_sequences leave padding; 1 turns sequence
    packing off, for which attention has faster kernels. Values above seq_len + 1 have
    no further effect."""
    seed: int = 0
    """Random seed of the order of documents and rows."""
    held_out_fraction: float = 0.05
    """Fraction of the documents held out for evaluation, chosen by a hash of their
    names."""
    prefetch: int = 2
    """Number of batches to prefetch on another thread, onto the devices; at most 1,000.
    0 is off."""
    cache_dir: str | None = None
    """Directory that caches the tokenized text for the next run; None: memory only."""

    def __post_init__(self) -> None:
        """Check the settings that need no files."""
        if isinstance(self.paths, str):
            raise ValueError(
                f"paths {self.paths!r}, expected several; write ({self.paths!r},)"
            )
        check_least(self, 1, "vocab_size", "batch_size", "max_sequences")
        check_least(self, 2, "seq_len")
        check_least(self, 0, "seed", "prefetch")
        for name, largest in (("prefetch", MAX_PREFETCH), ("seed", 2**63 - 1)):
            if getattr(self, name) > largest:
                raise ValueError(
                    f"{name} {getattr(self, name)}, expected at most {largest}"
                )
        if not 0 <= self.held_out_fraction < 1:
            raise ValueError(
                f"held_out_fraction {self.held_out_fraction}, expected at least 0 and "
                "less than 1"
            )
        if self.pair_field is not None and self.label_field is None:
            raise ValueError(
                f"pair_field {self.pair_field!r} is for texts with labels; name their "
                "field in label_field, or leave it out"
            )
        if self.problem is not None:
            check_choice("problem", self.problem, Problem)
            if self.label_field is None:
                raise ValueError(
                    f"problem {self.problem!r} is for texts with labels; name their "
                    "field in label_field, or leave it out"
                )
        if self.weights:
            check_weights(self.weights, self.paths, "paths")

    @property
    def tokens_per_batch(self) -> int:
        """B * T, padding included."""
        return self.batch_size * self.seq_len


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextData:
    """Tokenized text, ready to be batched; made by `load_text`."""

    tokenizer: Tokenizer
    """Tokenizer of the text."""
    train: TokenCorpus | Mixture
    """The documents to train on."""
    held_out: TokenCorpus | None
    """The documents to evaluate on; None if no documents are held out."""

    @property
    def fingerprint(self) -> str:
        """Equal for equal tokens to train on."""
        return self.train.fingerprint


def load_text(config: DataConfig) -> TextData:
    """Find, split and tokenize the text of `config`.

    Held-out documents of all sources form one corpus, regardless of the weights.

    Raises:
        ValueError: a path matches nothing, a file is not UTF-8 or damaged, a record has
            no text, one side of the split would be empty, or the tokenizer has more
            tokens than `config.vocab_size`.
        FileNotFoundError: there is no tokenizer where `config.tokenizer` says.
    """
    check_type("config", config, DataConfig, "DataConfig(paths=(...,)) makes one")
    tokenizer = load_tokenizer(config) if config.tokenizer is not None else None
    where = ", ".join(config.paths) or "the documentation and library of this Python"
    logger.info("reading %s", where)
    sources, held_out = _documents(config)
    count = sum(map(len, sources)) + len(held_out)
    if tokenizer is None:
        logger.info(
            "training a tokenizer of %s tokens on %s documents",
            f"{config.vocab_size:,}",
            f"{count - len(held_out):,}",
        )
        texts = (document.text for source in sources for document in source)
        tokenizer = Tokenizer.train(texts, config.vocab_size, config.control_tokens)
    logger.info("tokenizing %s documents", f"{count:,}")
    corpora = [tokenize(source, tokenizer, config.cache_dir) for source in sources]
    train: TokenCorpus | Mixture = corpora[0]
    if config.weights:
        train = Mixture(
            corpora=tuple(corpora), weights=config.weights, names=config.paths
        )
    return TextData(
        tokenizer=tokenizer,
        train=train,
        held_out=tokenize(held_out, tokenizer, config.cache_dir) if held_out else None,
    )


def _documents(config: DataConfig) -> tuple[list[list[Document]], list[Document]]:
    """The training documents of each source, and the held-out ones of all."""
    if config.weights:
        sources = read_sources(config.paths, config.suffixes, config.text_field)
        return split_sources(sources, config.held_out_fraction, config.paths)
    if config.paths:
        documents = read_documents(config.paths, config.suffixes, config.text_field)
    else:
        documents = python_corpus()
    train, held_out = split(documents, config.held_out_fraction)
    return [train], held_out


def load_tokenizer(config: DataConfig) -> Tokenizer:
    """The tokenizer of the file that `config` names, checked against `vocab_size`.

    Raises:
        ValueError: no file is named, or the tokenizer is larger than the vocabulary.
        FileNotFoundError: there is no such file.
    """
    if config.tokenizer is None:
        raise ValueError("tokenizer is None: it is trained with the text by load_text")
    tokenizer = Tokenizer.from_file(Path(config.tokenizer))
    if tokenizer.vocab_size > config.vocab_size:
        raise ValueError(
            f"vocab_size {config.vocab_size} is too small for the tokenizer "
            f"{config.tokenizer}, which has {tokenizer.vocab_size} tokens; set the "
            f"vocabulary of data and model to at least {tokenizer.vocab_size}"
        )
    return tokenizer


class PackedBatches:
    """Batches of packed rows on the devices; each `iter` starts at the first.

    Example:
        >>> corpus = TokenCorpus.from_ids([range(1, 40), range(40, 80)])
        >>> config = DataConfig(seq_len=8, batch_size=2, max_sequences=4)
        >>> batches = PackedBatches(corpus, config)
        >>> iterator = iter(batches)
        >>> next(iterator).tokens.shape
        (2, 8)
        >>> state = iterator.get_state()
        >>> again = iter(batches)
        >>> again.set_state(state)
        >>> bool((next(again).tokens == next(iterator).tokens).all())
        True
    """

    start: Mapping[str, int] = MappingProxyType({"row": 0})

    def __init__(
        self,
        corpus: TokenCorpus | Mixture,
        config: DataConfig,
        *,
        sharding: NamedSharding | None = None,
        epochs: int | None = None,
        shuffle: bool = True,
    ) -> None:
        """Describe the batches; nothing is read before the first `next`.

        Args:
            corpus: The tokens, or several corpora with weights.
            config: Sequence length, batch size, seed, prefetch.
            sharding: Sharding of the batch dimension, for example ``NamedSharding(mesh,
                rules.spec("batch"))``: each process makes only the rows of its own
                devices. None: the default device of this process.
            epochs: Passes over the corpus, None for no limit. The last batch of the
                last epoch is padded with empty rows, so all processes take equally many
                steps.
            shuffle: True shuffles documents and rows, anew in each epoch.

        Raises:
            ValueError: the rows of a batch cannot be spread evenly, the corpus holds
                ids from ``config.vocab_size`` on, or `epochs` is given for a mixture.
        """
        if epochs is not None and epochs < 1:
            raise ValueError(f"epochs {epochs}, expected at least 1, or None for ever")
        if corpus.vocab_size > config.vocab_size:
            raise ValueError(
                f"corpus holds the token id {corpus.vocab_size - 1}, outside the "
                f"vocabulary of vocab_size {config.vocab_size}; raise it in the "
                "configurations of data and model, or tokenize again"
            )
        self.config = config
        self.placement = RowPlacement(sharding, config.batch_size)
        options = {
            "seq_len": config.seq_len,
            "max_sequences": config.max_sequences,
            "seed": config.seed,
            "shuffle": shuffle,
        }
        # The identity of the data, for which alone a saved position is valid.
        self.identity: dict[str, Any] = {"corpus": corpus.fingerprint, **options}
        self.num_rows = sys.maxsize
        self.drawn: np.ndarray | None = None
        if isinstance(corpus, Mixture):
            if epochs is not None:
                raise ValueError(
                    f"epochs {epochs} of a mixture: its corpora do not end together; "
                    "leave epochs None, or give one corpus"
                )
            self.rows = MixedRows(corpus, **options)
            self.identity["weights"] = [str(share) for share in corpus.shares]
        else:
            self.rows = PackedRows(corpus, **options)
            if epochs is not None:
                self.num_rows = epochs * self.rows.rows_per_epoch

    @property
    def is_endless(self) -> bool:
        """True if the number of epochs is unlimited."""
        return self.num_rows == sys.maxsize

    def sample(self, count: int) -> "PackedBatches":
        """Return `count` batches of evenly spaced rows, always the same.

        Args:
            count: Number of batches, fewer than there are.
        """
        drawn = copy.copy(self)
        drawn.drawn = spread(self.num_rows, count * self.config.batch_size)
        drawn.num_rows = len(drawn.drawn)
        return drawn

    @property
    def prefetch(self) -> int:
        """Number of prefetched batches."""
        return self.config.prefetch

    def source(self, position: Mapping[str, int]) -> "_LocalBatches":
        """The batches from a position on."""
        return _LocalBatches(self, position["row"])

    def progress(self, position: Mapping[str, int]) -> dict[str, float]:
        """Epochs of the text until a position, for the metrics.

        ``epochs`` of a corpus; ``epochs/NAME`` and ``share/NAME``, the fraction of rows
        so far, for each corpus of a mixture.
        """
        return self.rows.progress(position["row"])

    def __iter__(self) -> "PackedBatchIterator":
        return PackedBatchIterator(self)

    def __len__(self) -> int:
        """Number of batches; for endless ones a number that is never reached."""
        return -(-self.num_rows // self.config.batch_size)


class PackedBatchIterator(BatchIterator[PackedBatch]):
    """An iterator over `PackedBatches`, whose position can be saved and restored.

    It may continue with another batch size.
    """


class _LocalBatches:
    """The source that Grain reads: this process's rows of the batches."""

    def __init__(self, batches: PackedBatches, first_row: int) -> None:
        self._batches = batches
        self._first_row = first_row

    def __len__(self) -> int:
        rows = self._batches.num_rows - self._first_row
        return max(0, -(-rows // self._batches.config.batch_size))

    def __getitem__(self, step: int) -> PackedBatch:
        local = self.on_host(step)
        if self._batches.config.max_sequences == 1:
            # A row is one sequence; no token attends to the padding after it.
            del local["cu_seqlens"]
        place = self._batches.placement.to_devices
        arrays = {name: place(rows) for name, rows in local.items()}
        return PackedBatch(**{"cu_seqlens": None, **arrays})

    def place(self, step: int) -> dict[str, int]:
        """The first row of a batch, `step` batches after the first."""
        return {"row": self._first_row + step * self._batches.config.batch_size}

    def on_host(self, step: int) -> dict[str, np.ndarray]:
        """The rows of this process: [B, T] tokens, [B, S + 1] boundaries."""
        rows, end = self._batches.rows, self._batches.num_rows
        start = self.place(step)["row"]
        drawn = self._batches.drawn

        def row(number: int) -> dict[str, np.ndarray]:
            if number >= end:
                return rows.empty_row()
            return rows[number if drawn is None else int(drawn[number])]

        made = [row(start + i) for i in self._batches.placement.local_rows]
        return {name: np.stack([row[name] for row in made]) for name in made[0]}
