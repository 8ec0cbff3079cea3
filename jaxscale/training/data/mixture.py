"""A mixture of several corpora, each with a fixed share of the rows.

The corpus of a row depends only on the row's number, by a fixed pattern that keeps
every corpus close to its share at any point of the run. A position in the mixture is
therefore one integer, as in a single corpus.
"""

import dataclasses
import hashlib
import heapq
import math
import numbers
from collections.abc import Sequence
from fractions import Fraction

from jaxscale.training.data.corpus import TokenCorpus


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mixture:
    """Corpora, and the share of rows of each.

    Each is shuffled and repeated separately, so a small one with a large weight has
    more epochs. A weight counts rows, and so tokens, unless documents are too short to
    fill their rows.

    Raises:
        ValueError: there is no corpus, the weights are not as many or not positive and
            finite, or two corpora have one name.

    Example:
        >>> web = TokenCorpus.from_ids([range(1, 90)])
        >>> code = TokenCorpus.from_ids([range(100, 120)])
        >>> mixture = Mixture(corpora=(web, code), weights=(3, 1))
        >>> [str(share) for share in mixture.shares], len(mixture)
        (['3/4', '1/4'], 2)
    """

    corpora: tuple[TokenCorpus, ...]
    """The corpora, all tokenized by the same tokenizer."""
    weights: tuple[float, ...]
    """The weight of each: its share, or any multiple of the shares."""
    names: tuple[str, ...] = ()
    """Names for the metrics; by default numbers from 0."""

    def __post_init__(self) -> None:
        if not self.corpora:
            raise ValueError("corpora is empty; a mixture needs at least one corpus")
        if not self.names:
            names = tuple(str(i) for i in range(len(self.corpora)))
            object.__setattr__(self, "names", names)
        if len(self.names) != len(self.corpora):
            raise ValueError(
                f"names has {len(self.names)} entries for {len(self.corpora)} corpora; "
                "give one for each, or none"
            )
        if len(set(self.names)) < len(self.names):
            raise ValueError(f"names {self.names} must differ: metrics carry them")
        check_weights(self.weights, self.names, "corpora")

    @property
    def shares(self) -> tuple[Fraction, ...]:
        """The normalized weights, as exact fractions."""
        exact = [Fraction(str(weight)) for weight in self.weights]
        return tuple(weight / sum(exact) for weight in exact)

    @property
    def fingerprint(self) -> str:
        """Equal for equal tokens in an equal order of the corpora."""
        parts = "".join(corpus.fingerprint for corpus in self.corpora)
        return hashlib.sha256(parts.encode()).hexdigest()[:16]

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id."""
        return max(corpus.vocab_size for corpus in self.corpora)

    @property
    def num_tokens(self) -> int:
        """Tokens of all corpora, each counted once."""
        return sum(corpus.num_tokens for corpus in self.corpora)

    def __len__(self) -> int:
        """Documents of all corpora."""
        return sum(map(len, self.corpora))


def check_weights(weights: Sequence[float], names: Sequence[str], what: str) -> None:
    """Check the weights of a mixture.

    Raises:
        ValueError: they are not as many, or one is not positive and finite.
    """
    if len(weights) != len(names):
        raise ValueError(
            f"weights has {len(weights)} entries for {len(names)} {what}; give one for "
            "each"
        )
    for i, (weight, name) in enumerate(zip(weights, names, strict=True)):
        number = isinstance(weight, numbers.Real) and not isinstance(weight, bool)
        if not number or not 0 < weight < math.inf:
            raise ValueError(
                f"weights[{i}] {weight!r}, that of {name!r}, expected a positive and "
                f"finite number; leave out of {what} what is not to be read"
            )


class Turns:
    """The schedule of several sources with given shares.

    The two lightest are joined until one is left, which gives a Huffman tree. At each
    fork, of the first n rows round(n share) go to the heavier side (Bresenham). So any
    row is found by descending from its number, and no source is ever two rows away from
    its share.

    Example:
        >>> turns = Turns([Fraction(1, 2), Fraction(1, 3), Fraction(1, 6)])
        >>> [turns.at(row) for row in range(6)]
        [(1, 0), (0, 0), (2, 0), (0, 1), (1, 1), (0, 2)]
        >>> turns.before(6)
        [3, 2, 1]
    """

    def __init__(self, shares: Sequence[Fraction]) -> None:
        """Build the tree; `shares` are positive, their sum is 1."""
        self._count = len(shares)
        heap: list[tuple[Fraction, int, _Leaf | _Fork]]
        heap = [(share, i, _Leaf(i)) for i, share in enumerate(shares)]
        heapq.heapify(heap)
        for i in range(1, len(shares)):
            light, _, right = heapq.heappop(heap)
            heavy, _, left = heapq.heappop(heap)
            fork = _Fork(left, right, heavy / (light + heavy))
            heapq.heappush(heap, (light + heavy, len(shares) + i, fork))
        ((_, _, self._root),) = heap

    def at(self, row: int) -> tuple[int, int]:
        """The source of `row`, and how many rows it gave before."""
        node = self._root
        while isinstance(node, _Fork):
            before = node.to_left(row)
            if node.to_left(row + 1) > before:
                node, row = node.left, before
            else:
                node, row = node.right, row - before
        return node.source, row

    def before(self, row: int) -> list[int]:
        """How many of the rows before `row` each source gave."""
        counts = [0] * self._count
        nodes = [(self._root, row)]
        while nodes:
            node, rows = nodes.pop()
            if isinstance(node, _Fork):
                left = node.to_left(rows)
                nodes += [(node.left, left), (node.right, rows - left)]
            else:
                counts[node.source] = rows
        return counts


@dataclasses.dataclass(frozen=True)
class _Leaf:
    source: int


@dataclasses.dataclass(frozen=True)
class _Fork:
    left: "_Fork | _Leaf"
    right: "_Fork | _Leaf"
    share: Fraction
    """Fraction of the rows that go left."""

    def to_left(self, rows: int) -> int:
        """How many of the first `rows` go left: rounded, halves up."""
        a, b = self.share.numerator, self.share.denominator
        return (2 * rows * a + b) // (2 * b)
