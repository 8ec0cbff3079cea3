"""Exact selection of the best units of several arrays.

All of this is numpy on the host: masks are made rarely, and must be reproducible.

Legend: K input features, N output features.
"""

import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float, Shaped

from jaxscale.pruning.config import pruned_units


def keep_best(
    scores: Sequence[Float[np.ndarray, "..."]],
    keep: int,
    *,
    allowed: Sequence[Bool[np.ndarray, "..."]] | None = None,
    least: Sequence[int] | None = None,
) -> list[Bool[np.ndarray, "..."]]:
    """Mark the best `keep` units of all arrays together; ties go to the earlier one.

    Args:
        scores: Any arrays, one entry per unit.
        keep: Number of units that are kept, over all arrays.
        allowed: Units that may be kept at all; None is all of them.
        least: Units that each array keeps whatever the others score, as many of them as
            are allowed; at most `keep` together.

    Returns:
        The masks of the kept units, of the same shapes; `keep` true entries in total.

    Raises:
        ValueError: fewer than `keep` units are allowed.

    Example:
        >>> a, b = keep_best([np.array([3.0, 1.0]), np.array([2.0, 2.0, 5.0])], 3)
        >>> a, b
        (array([ True, False]), array([ True, False,  True]))
    """
    flat = np.concatenate([score.ravel() for score in scores])
    if allowed is not None:
        may = np.concatenate([units.ravel() for units in allowed])
        if may.sum() < keep:
            raise ValueError(
                f"{keep} units should be kept, but only {int(may.sum())} were left by "
                "the mask before; sparsity must not fall from stage to stage"
            )
        flat = np.where(may, flat, -np.inf)
    ends = np.cumsum([score.size for score in scores])[:-1]
    if least is not None:
        for part, count in zip(np.split(flat, ends), least, strict=True):  # views
            first = best(part, min(count, int((part > -np.inf).sum())))
            part[first] = np.inf
    kept = best(flat, keep)
    return [
        part.reshape(score.shape)
        for part, score in zip(np.split(kept, ends), scores, strict=True)
    ]


def least_units(sizes: Sequence[int], share: float, keep: int) -> list[int]:
    """Units that arrays keep at least: a share of each, rounded down, but not to none.

    Args:
        sizes: Units of each array.
        share: Share of them; lower where `keep` is a lower one of all.
        keep: Number of units that are kept, over all arrays.

    Example:
        >>> least_units([8, 20], 0.25, 14), least_units([8, 20], 0.9, 14)
        ([2, 5], [4, 10])
    """
    share = min(share, keep / max(sum(sizes), 1))
    counts = [math.floor(round(share * size, 6)) for size in sizes]
    some = [max(count, 1) for count in counts]
    return some if share > 0 and sum(some) <= keep else counts


def best(scores: Float[np.ndarray, " n"], keep: int) -> Bool[np.ndarray, " n"]:
    """The `keep` highest entries of one array; ties go to the earlier one."""
    if keep <= 0:
        return np.zeros(scores.shape, np.bool_)
    if keep >= scores.size:
        return np.ones(scores.shape, np.bool_)
    threshold = np.partition(scores, scores.size - keep)[scores.size - keep]
    kept = scores > threshold
    ties = np.flatnonzero(scores == threshold)
    kept[ties[: keep - int(kept.sum())]] = True
    return kept


def share_out(
    total: int, scores: Sequence[Float[np.ndarray, "..."]], capacity: Sequence[int]
) -> list[int]:
    """Split `total` into parts as equal as possible; the best scores get one more.

    Args:
        total: The sum to split; at most the sum of `capacity`.
        scores: Scores of the units of each part; their mean decides.
        capacity: The maximum of each part.

    Example:
        >>> scores = [np.array([1.0]), np.array([5.0]), np.array([3.0])]
        >>> share_out(7, scores, [9, 9, 9]), share_out(7, scores, [9, 1, 9])
        ([2, 3, 2], [3, 1, 3])
    """
    space = np.array(capacity)
    # The highest level up to which all parts can be filled.
    level = 0
    while level < space.max() and np.minimum(space, level + 1).sum() <= total:
        level += 1
    counts = np.minimum(space, level)
    means = np.array([score.mean() for score in scores])
    more = best(np.where(space > level, means, -np.inf), total - int(counts.sum()))
    return [int(count) for count in counts + more]


def keep_share(
    scores: Sequence[Float[np.ndarray, "..."]],
    sparsity: float,
    *,
    allowed: Sequence[Bool[np.ndarray, "..."]] | None = None,
    least_share: float = 0.0,
) -> list[Bool[np.ndarray, "..."]]:
    """`keep_best` of the units that a sparsity leaves, and of each array a share."""
    sizes = [score.size for score in scores]
    keep = sum(sizes) - pruned_units(sum(sizes), sparsity)
    least = least_units(sizes, least_share, keep)
    return keep_best(scores, keep, allowed=allowed, least=least)


def unit_means(
    matrix: Shaped[np.ndarray, "K N"], rows: int, columns: int
) -> Float[np.ndarray, "a b"]:
    """The mean of each unit of `rows` x `columns` elements."""
    height, width = matrix.shape
    # [a, rows, b, columns]
    parts = matrix.reshape(height // rows, rows, width // columns, columns)
    return parts.mean((1, 3), dtype=np.float64)


def unit_all(
    matrix: Bool[np.ndarray, "K N"], rows: int, columns: int
) -> Bool[np.ndarray, "a b"]:
    """Mark the units whose elements are all true."""
    height, width = matrix.shape
    # [a, rows, b, columns]
    parts = matrix.reshape(height // rows, rows, width // columns, columns)
    return parts.all((1, 3))


def spread(
    units: Shaped[np.ndarray, "a b"], rows: int, columns: int
) -> Shaped[np.ndarray, "K N"]:
    """Expand each unit to `rows` x `columns` elements."""
    return units.repeat(rows, axis=0).repeat(columns, axis=1)
