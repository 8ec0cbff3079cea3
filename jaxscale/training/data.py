"""Rows of packed tokens, in an order that depends on nothing but the seed.

Documents are shuffled, laid end to end and cut into rows of `seq_len` tokens; the rows
are shuffled again, so that a batch does not hold neighboring pieces of one document.
Nothing is dropped: a document that crosses the end of a row continues in another row,
and the rows of one epoch are followed by those of the next.

Any row can be computed from its number alone. A position in the data is therefore one
integer, whatever was prefetched; every process reads just the rows of its own devices;
and the global batch is the same on any number of processes, so a run may be resumed on
another number of them.

Shape legend: B batch, T tokens of a row, S sequences (pieces of documents) in a row.
"""

import dataclasses
import functools
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Int64, Shaped

from jaxscale.checks import check_least
from jaxscale.models.tokenizer import Tokenizer
from jaxscale.nn.packing import PackedBatch, cu_seqlens_of_lengths
from jaxscale.training.corpus import (
    TEXT_SUFFIXES,
    TokenCorpus,
    python_corpus,
    read_documents,
    split,
    tokenize,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The text to train on, and the size of its batches.

    Example:
        >>> DataConfig(seq_len=256, batch_size=8).tokens_per_batch
        2048
    """

    paths: tuple[str, ...] = ()
    """Files, directories and glob patterns of UTF-8 text; none means the documentation
    and library source of the running Python."""
    suffixes: tuple[str, ...] = TEXT_SUFFIXES
    """Endings of the files that a directory contributes."""
    tokenizer: str | None = None
    """A tokenizer.json or a directory that holds one; None trains byte-level BPE on the
    training documents."""
    vocab_size: int = 2048
    """Tokens that the model knows. A tokenizer trained here reaches this size; one from
    a file must not exceed it."""
    seq_len: int = 256
    """T, tokens of a row: the token budget that documents are packed into."""
    batch_size: int = 8
    """B, rows of a batch over all processes."""
    max_sequences: int = 32
    """S, most documents or pieces of documents in a row. Documents shorter than about
    seq_len / max_sequences leave padding behind; 1 gives each row to one document, for
    which attention has the faster kernels. A row holds no more pieces than tokens, so
    numbers above seq_len + 1 change nothing."""
    seed: int = 0
    """Decides the order of documents and rows."""
    held_out_fraction: float = 0.05
    """Share of the documents kept for evaluation, chosen by a hash of their names."""
    prefetch: int = 2
    """Batches made ahead of time on another thread, 1,000 at most; 0 makes each when
    asked."""
    cache_dir: str | None = None
    """Directory that keeps the tokenized text for the next run; None: memory only."""

    def __post_init__(self) -> None:
        """Check the settings that need no files."""
        check_least(self, 1, "vocab_size", "batch_size", "max_sequences")
        check_least(self, 2, "seq_len")
        check_least(self, 0, "seed", "prefetch")
        for name, largest in (("prefetch", 1000), ("seed", 2**63 - 1)):
            if getattr(self, name) > largest:
                raise ValueError(
                    f"{name} {getattr(self, name)}, expected at most {largest}"
                )
        if not 0 <= self.held_out_fraction < 1:
            raise ValueError(
                f"held_out_fraction {self.held_out_fraction}, expected at least 0 and "
                "less than 1"
            )

    @property
    def tokens_per_batch(self) -> int:
        """B * T, padding included."""
        return self.batch_size * self.seq_len


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextData:
    """Tokenized text, ready to be batched; made by `load_text`."""

    tokenizer: Tokenizer
    """Encodes and decodes the text."""
    train: TokenCorpus
    """The documents to train on."""
    held_out: TokenCorpus | None
    """The documents to evaluate on; None if no documents are held out."""


def load_text(config: DataConfig) -> TextData:
    """Find, split and tokenize the text of `config`.

    Raises:
        ValueError: a path matches nothing, a file is not UTF-8, one side of the split
            would be empty, or the tokenizer has more tokens than `config.vocab_size`.
        FileNotFoundError: there is no tokenizer where `config.tokenizer` says.
    """
    tokenizer = load_tokenizer(config) if config.tokenizer is not None else None
    documents = (
        read_documents(config.paths, config.suffixes)
        if config.paths
        else python_corpus()
    )
    train, held_out = split(documents, config.held_out_fraction)
    if tokenizer is None:
        tokenizer = Tokenizer.train((d.text for d in train), config.vocab_size)
    return TextData(
        tokenizer=tokenizer,
        train=tokenize(train, tokenizer, config.cache_dir),
        held_out=tokenize(held_out, tokenizer, config.cache_dir) if held_out else None,
    )


def load_tokenizer(config: DataConfig) -> Tokenizer:
    """The tokenizer of the file that `config` names, checked against its vocabulary.

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


class PackedRows:
    """The rows of all epochs of a corpus, each computed from its number.

    Row ``i`` belongs to epoch ``i // rows_per_epoch``. Within an epoch every token
    occurs in one row, once. The target of a token is the token that follows it in its
    document, also where the document is cut; only the last token of a document has
    none.

    To bound the pieces in a row by S without looking at the order, each document is
    given a stretch of at least ``ceil(T / (S - 1))`` places. A row, T places long, then
    meets at most S stretches, and every epoch has the same number of rows.

    Example:
        >>> corpus = TokenCorpus.from_ids([[1, 2, 3, 4, 5], [6, 7, 8]])
        >>> rows = PackedRows(corpus, seq_len=4, max_sequences=4, seed=0, shuffle=False)
        >>> rows.rows_per_epoch
        2
        >>> row = rows[1]
        >>> row["tokens"], row["targets"]
        (array([5, 6, 7, 8], dtype=int32), array([0, 7, 8, 0], dtype=int32))
        >>> row["cu_seqlens"]
        array([0, 1, 4, 4, 4], dtype=int32)
    """

    def __init__(
        self,
        corpus: TokenCorpus,
        *,
        seq_len: int,
        max_sequences: int,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        """Lay out one epoch; see the class and `DataConfig` for the arguments."""
        self._corpus = corpus
        self._seq_len = seq_len
        # With seq_len + 1 every document already has a stretch as short as one place.
        self._max_sequences = max_sequences = min(max_sequences, seq_len + 1)
        self._seed = seed
        self._shuffle = shuffle
        lengths = np.diff(corpus.offsets)
        if max_sequences == 1:
            self._stretches = -(-lengths // seq_len) * seq_len
        else:
            shortest = -(-seq_len // (max_sequences - 1))
            self._stretches = np.maximum(lengths, shortest)
        self.rows_per_epoch = -(-int(self._stretches.sum()) // seq_len)
        # Two epochs are in use while a batch reaches from one into the next.
        self._layout = functools.lru_cache(maxsize=2)(self._lay_out)

    def __getitem__(self, row: int) -> dict[str, Shaped[np.ndarray, " _"]]:
        epoch, place = divmod(row, self.rows_per_epoch)
        order, ends, rows = self._layout(epoch)
        low = int(rows[place]) * self._seq_len
        high = low + self._seq_len
        result = self.empty_row()
        filled, sizes = 0, []
        first = int(np.searchsorted(ends, low, side="right"))
        for position in range(first, len(order)):
            document = int(order[position])
            start = int(ends[position] - self._stretches[document])
            if start >= high:
                break
            ids = self._corpus[document]
            piece = slice(max(low - start, 0), min(high - start, len(ids)))
            size = piece.stop - piece.start
            if size <= 0:
                continue  # The row meets only the padding of this document.
            self._add_piece(result, filled, ids, piece)
            filled += size
            sizes.append(size)
        result["cu_seqlens"] = cu_seqlens_of_lengths(sizes, self._max_sequences)
        return result

    def empty_row(self) -> dict[str, Shaped[np.ndarray, " _"]]:
        """A row of padding, which fills the last batch of an evaluation."""
        return {
            "tokens": np.zeros(self._seq_len, np.int32),
            "targets": np.zeros(self._seq_len, np.int32),
            "loss_mask": np.zeros(self._seq_len, np.bool_),
            "cu_seqlens": np.zeros(self._max_sequences + 1, np.int32),
        }

    @staticmethod
    def _add_piece(
        row: dict[str, Shaped[np.ndarray, " _"]],
        at: int,
        ids: Shaped[np.ndarray, " _"],
        piece: slice,
    ) -> None:
        """Copy ``ids[piece]`` and its targets into `row` from place `at` on."""
        tokens = ids[piece]
        targets = ids[piece.start + 1 : piece.stop + 1]
        row["tokens"][at : at + len(tokens)] = tokens
        row["targets"][at : at + len(targets)] = targets
        row["loss_mask"][at : at + len(targets)] = True

    def _lay_out(self, epoch: int) -> tuple[Int64[np.ndarray, " documents"], ...]:
        """Order of documents, ends of their stretches, and order of rows."""
        order = self._permutation(len(self._corpus), epoch, stream=0)
        rows = self._permutation(self.rows_per_epoch, epoch, stream=1)
        return order, np.cumsum(self._stretches[order]), rows

    def _permutation(self, size: int, epoch: int, stream: int) -> np.ndarray:
        if not self._shuffle:
            return np.arange(size)
        # The raw stream of Philox is the same in every release of numpy.
        bits = np.random.Philox(key=[self._seed, 2 * epoch + stream])
        return np.argsort(bits.random_raw(size), kind="stable")


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

    def __init__(
        self,
        corpus: TokenCorpus,
        config: DataConfig,
        *,
        sharding: NamedSharding | None = None,
        epochs: int | None = None,
        shuffle: bool = True,
    ) -> None:
        """Describe the batches; nothing is read before the first `next`.

        Args:
            corpus: The tokens.
            config: Row length, batch size, seed, prefetch.
            sharding: Sharding of the rows of a batch, for example
                ``NamedSharding(mesh, rules.spec("batch"))``: each process makes just
                the rows that its own devices hold. None: everything on the default
                device of this process.
            epochs: Passes over the corpus, None for no end. The last batch of the last
                pass is filled up with rows of padding, so all processes take equally
                many steps.
            shuffle: True shuffles documents and rows, anew in each epoch.

        Raises:
            ValueError: the rows of a batch cannot be spread evenly, or the corpus holds
                ids from ``config.vocab_size`` on.
        """
        if epochs is not None and epochs < 1:
            raise ValueError(f"epochs {epochs}, expected at least 1, or None for ever")
        if corpus.vocab_size > config.vocab_size:
            raise ValueError(
                f"corpus holds the token id {corpus.vocab_size - 1}, outside the "
                f"vocabulary of vocab_size {config.vocab_size}; raise it in the "
                "configurations of data and model, or tokenize again"
            )
        if sharding is not None:
            _check_divisible(sharding, config.batch_size)
        self.config = config
        self.sharding = sharding
        self.rows = PackedRows(
            corpus,
            seq_len=config.seq_len,
            max_sequences=config.max_sequences,
            seed=config.seed,
            shuffle=shuffle,
        )
        self.num_rows = sys.maxsize
        if epochs is not None:
            self.num_rows = epochs * self.rows.rows_per_epoch
        self.local_rows = _local_rows(sharding, config.batch_size)
        # What a saved position is only good for.
        self.identity = {
            "corpus": corpus.fingerprint,
            "seq_len": config.seq_len,
            "max_sequences": config.max_sequences,
            "seed": config.seed,
            "shuffle": shuffle,
        }

    def __iter__(self) -> "PackedBatchIterator":
        return PackedBatchIterator(self)

    def __len__(self) -> int:
        """Batches until the end; for endless ones a number that is never reached."""
        return -(-self.num_rows // self.config.batch_size)


class PackedBatchIterator(Iterator[PackedBatch]):
    """Walks through `PackedBatches`; its position can be saved and restored."""

    def __init__(self, batches: PackedBatches, first_row: int = 0) -> None:
        """Begin with the batch whose first row has the number `first_row`."""
        self._batches = batches
        self._open(first_row)

    def __next__(self) -> PackedBatch:
        local = next(self._source)
        batch = PackedBatch(
            **{name: self._to_devices(rows) for name, rows in local.items()}
        )
        if self._batches.config.max_sequences > 1:
            return batch
        # A row is one sequence; no token sees the padding behind it.
        return dataclasses.replace(batch, cu_seqlens=None)

    def get_state(self) -> dict[str, Any]:
        """The position, as a small dictionary that JSON can hold."""
        steps = self._source.get_state()["next_index"]
        row = self._first_row + steps * self._batches.config.batch_size
        return {"row": row, **self._batches.identity}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue where `get_state` was called, bit for bit.

        The batch size, the prefetching and the number of processes may have changed.

        Raises:
            ValueError: the state comes from other data or another packing.
        """
        for name, mine in self._batches.identity.items():
            if state.get(name) != mine:
                raise ValueError(
                    f"the saved position was made with {name} {state.get(name)!r}, "
                    f"this data has {mine!r}; resume with the same data settings and "
                    "text, or start a new run"
                )
        self._source.close()
        self._open(int(state["row"]))

    def close(self) -> None:
        """Stop the prefetching thread."""
        self._source.close()

    def _open(self, first_row: int) -> None:
        self._first_row = first_row
        grain = _require_grain()
        prefetch = self._batches.config.prefetch
        options = grain.ReadOptions(
            num_threads=min(prefetch, 1), prefetch_buffer_size=prefetch
        )
        source = _LocalBatches(self._batches, first_row)
        dataset = grain.MapDataset.source(source).to_iter_dataset(options)
        self._source = iter(dataset)

    def _to_devices(self, local: Shaped[np.ndarray, "rows _"]) -> jax.Array:
        sharding, held = self._batches.sharding, self._batches.local_rows
        if sharding is None:
            return jnp.asarray(local)
        shape = (self._batches.config.batch_size, local.shape[1])

        def shard(index: Any) -> np.ndarray:
            low, high, _ = index[0].indices(shape[0])
            start = int(np.searchsorted(held, low))
            return local[start : start + high - low, index[1]]

        return jax.make_array_from_callback(shape, sharding, shard)


class _LocalBatches:
    """The source that Grain reads: this process's rows of each batch, on the host."""

    def __init__(self, batches: PackedBatches, first_row: int) -> None:
        self._batches = batches
        self._first_row = first_row

    def __len__(self) -> int:
        rows = self._batches.num_rows - self._first_row
        return max(0, -(-rows // self._batches.config.batch_size))

    def __getitem__(self, step: int) -> dict[str, np.ndarray]:
        rows, end = self._batches.rows, self._batches.num_rows
        start = self._first_row + step * self._batches.config.batch_size
        made = [
            rows[start + i] if start + i < end else rows.empty_row()
            for i in self._batches.local_rows
        ]
        # [B, T] tokens, [B, S + 1] boundaries.
        return {name: np.stack([row[name] for row in made]) for name in made[0]}


def _local_rows(sharding: NamedSharding | None, batch_size: int) -> Sequence[int]:
    """The rows of a batch that the devices of this process hold, in order."""
    if sharding is None:
        return range(batch_size)
    indices = sharding.addressable_devices_indices_map((batch_size, 1)).values()
    held = {row for index in indices if index for row in range(batch_size)[index[0]]}
    return sorted(held)


def _check_divisible(sharding: NamedSharding, batch_size: int) -> None:
    axes = sharding.spec[0] if len(sharding.spec) else None
    if any(axis is not None for axis in sharding.spec[1:]):
        raise ValueError(
            f"sharding {sharding.spec} splits more than the rows of a batch; give it "
            "the axes of the rows alone"
        )
    names = (axes,) if isinstance(axes, str) else axes or ()
    sizes = {name: sharding.mesh.shape[name] for name in names}
    shards = int(np.prod(list(sizes.values()), initial=1))
    if batch_size % shards:
        written = " x ".join(f"{name}={size}" for name, size in sizes.items())
        raise ValueError(
            f"batch_size {batch_size} is not divisible by the {shards} shards of the "
            f"rows ({written}); make it a multiple of {shards}"
        )


def _require_grain() -> ModuleType:
    """The Grain library, or an error that says how to install it."""
    try:
        import grain
    except ImportError as error:
        raise ImportError(
            "jaxscale.training.data needs Grain: pip install 'jaxscale[train]'"
        ) from error
    return grain
