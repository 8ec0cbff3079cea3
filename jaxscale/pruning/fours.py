"""The fours of pattern tw24: which kept rows of a tile stand together.

A kernel gathers the rows of a tile in any order, so that which four rows share the two
places of each column is free. Rows that many columns need should not meet: they are
exchanged between fours as long as more of the score is kept.

Legend: K input features, N output features, T tiles, G columns of a tile, R rows.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float, Int


_ROUNDS = 48
"""Of exchanges: 96 take twice as long and find 3% more of what is lost."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Fours:
    """The tiles of a matrix, or of stacked ones, and the order of their rows.

    In this order four rows that follow each other are a four; the last of a tile may
    have fewer. With row shards the fours of each shard are counted apart.
    """

    columns: Int[np.ndarray, "*layers T G"]
    """The columns of each tile; -1 where a matrix has fewer tiles."""
    rows: Int[np.ndarray, "*layers T K"]
    """The kept rows of each tile; -1 from their number on."""

    @classmethod
    def none(cls, shape: Sequence[int], tile: int) -> "Fours":
        """Those of a weight of `shape` without tiles."""
        *lead, height, width = shape
        tiles = width // tile
        return cls(
            columns=np.full((*lead, tiles, tile), -1, np.int32),
            rows=np.full((*lead, tiles, height), -1, np.int32),
        )

    def layer(self, place: int) -> "Fours":
        """Those of one matrix of a stack; views."""
        columns, rows = self.columns, self.rows
        return Fours(
            columns=columns.reshape(-1, *columns.shape[-2:])[place],
            rows=rows.reshape(-1, *rows.shape[-2:])[place],
        )


def best_fours(scores: Float[np.ndarray, "R G"], seed: int = 0) -> Int[np.ndarray, "R"]:
    """An order of rows in which the best two of each four keep much of the score.

    In every round each four meets another, and they exchange the two rows that gain the
    most, if any do. Rows that no four is whole with come last.

    Args:
        scores: Importance of each element, at least 0.
        seed: Of who meets whom.

    Example:
        >>> scores = np.array([[9.0]] * 4 + [[1.0]] * 4)
        >>> ordered = scores[best_fours(scores)]
        >>> [float(x[two_of_four(x)].sum()) for x in (scores, ordered)]
        [20.0, 36.0]
    """
    number = len(scores) // 4
    order = np.arange(len(scores))
    if number < 2:
        return order
    random = np.random.default_rng(seed)
    scores = np.asarray(scores, np.float32)
    # Rows far from each other start together: half of them may be much alike.
    fours = order[: 4 * number].reshape(4, number).T.copy()
    worth = _worth(scores[fours])
    for _ in range(_ROUNDS):
        met = random.permutation(number)[: number // 2 * 2].reshape(2, -1)
        members = random.permuted(fours[met], axis=2)
        fours[met] = members
        left, right = scores[members[0]], scores[members[1]]
        gains = np.zeros((5, met.shape[1]), np.float32)  # the last exchanges none
        found = np.zeros((4, 2, met.shape[1]), np.float32)
        for i in range(4):
            _swap(left, right, i)
            found[i] = _worth(left), _worth(right)
            gains[i] = found[i].sum(0) - worth[met].sum(0)
            _swap(left, right, i)
        gains[:4] -= 1e-6 * worth[met].sum(0)  # of rounding
        choice = gains.argmax(0)
        for i in range(4):
            a, b = met[:, choice == i]
            fours[a, i], fours[b, i] = fours[b, i], fours[a, i].copy()
            worth[a], worth[b] = found[i][:, choice == i]
    return np.concatenate([fours.ravel(), order[4 * number :]])


def _swap(left: np.ndarray, right: np.ndarray, i: int) -> None:
    left[:, i], right[:, i] = right[:, i], left[:, i].copy()


def _worth(fours: Float[np.ndarray, "F 4 G"]) -> Float[np.ndarray, "F"]:
    """The score that the best two of each column keep."""
    a, b, c, d = np.moveaxis(fours, 1, 0)
    high, other = np.maximum(a, b), np.maximum(c, d)
    second = np.maximum(np.minimum(a, b), np.minimum(c, d))
    second = np.maximum(second, np.minimum(high, other))
    return (np.maximum(high, other) + second).sum(1)


def two_of_four(scores: Float[np.ndarray, "R G"]) -> Bool[np.ndarray, "R G"]:
    """Mark the best two of every four rows in each column, of equal ones the first.

    Of a last four of fewer rows up to two stay.
    """
    rows, columns = scores.shape
    padded = np.pad(scores, ((0, -rows % 4), (0, 0)), constant_values=-np.inf)
    fours = padded.reshape(-1, 4, columns)
    rank = np.argsort(np.argsort(-fours, axis=1, kind="stable"), axis=1)
    return (rank < 2).reshape(-1, columns)[:rows]
