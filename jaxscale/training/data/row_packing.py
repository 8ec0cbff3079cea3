"""The packed rows of a corpus or of a mixture, each computed from its number.

Shape legend: T tokens per packed row, S sequences (pieces of documents) per row.
"""

import functools
from typing import Any

import numpy as np
from jaxtyping import Int64, Shaped

from jaxscale.nn.packing import cu_seqlens_of_lengths
from jaxscale.training.data.corpus import TokenCorpus
from jaxscale.training.data.mixture import Mixture, Turns


def spread(total: int, count: int) -> Int64[np.ndarray, " count"]:
    """`count` evenly spaced numbers below `total`: a systematic sample.

    If items are ordered by source, each source has its share of the sample, to within
    one; every item is equally likely. The sample is always the same.

    Args:
        total: Number of items.
        count: Size of the sample, at most `total`.

    Example:
        >>> spread(10, 5) // 2
        array([0, 1, 2, 3, 4])
    """
    # The raw stream of Philox is the same in every release of numpy.
    start = int(np.random.Philox(key=total).random_raw()) % total
    return (np.arange(count) * total + start) // count


class PackedRows:
    """The packed rows of all epochs of a corpus, each computed from its number.

    Row ``i`` belongs to epoch ``i // rows_per_epoch``. Within an epoch every token
    occurs exactly once. The target of a token is the next token of its document, even
    if the document is cut there; only the last token of a document has none.

    To bound the pieces in a row by S for any order, each document takes a stretch of at
    least ``ceil(T / (S - 1))`` places. A row of T places then overlaps at most S
    stretches, and every epoch has the same number of rows.

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
        """Lay out one epoch.

        Args:
            corpus: The documents.
            seq_len: Tokens per row, T.
            max_sequences: Maximum number of pieces of documents per row, S.
            seed: Random seed of the order of documents, which differs between epochs.
            shuffle: False takes documents in the order of the corpus in every epoch.
        """
        self._corpus = corpus
        self._seq_len = seq_len
        # With seq_len + 1 a document's stretch can already be a single place.
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

    def progress(self, row: int) -> dict[str, float]:
        """Epochs of the corpus before `row`."""
        return {"epochs": row / self.rows_per_epoch}

    def empty_row(self) -> dict[str, Shaped[np.ndarray, " _"]]:
        """A row of padding, for the last batch of an evaluation."""
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
        """Copy ``ids[piece]`` and its targets into `row` from position `at` on."""
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


class MixedRows:
    """The rows of a mixture: the next row of the corpus whose turn it is.

    Args:
        mixture: Corpora and weights.
        options: Those of `PackedRows`, for each corpus.
    """

    def __init__(self, mixture: Mixture, **options: Any) -> None:
        """Lay out one epoch of each corpus."""
        self._names = mixture.names
        self._turns = Turns(mixture.shares)
        self._sources = [PackedRows(corpus, **options) for corpus in mixture.corpora]

    def __getitem__(self, row: int) -> dict[str, Shaped[np.ndarray, " _"]]:
        source, place = self._turns.at(row)
        return self._sources[source][place]

    def empty_row(self) -> dict[str, Shaped[np.ndarray, " _"]]:
        """A row of padding."""
        return self._sources[0].empty_row()

    def progress(self, row: int) -> dict[str, float]:
        """Each corpus's share of the rows before `row`, and its epochs."""
        found = {}
        counts = self._turns.before(row)
        for name, source, count in zip(self._names, self._sources, counts, strict=True):
            found[f"share/{name.strip('/')}"] = count / max(row, 1)
            found[f"epochs/{name.strip('/')}"] = count / source.rows_per_epoch
        return found
