"""Sequence packing of texts into rows of a few sizes."""

import bisect
import functools
import numbers
from collections.abc import Sequence
from typing import NamedTuple

from jaxscale.nn.packing import assign_rows


_SMALLEST_BUDGET = 128
_TOKENS_A_TEXT = (128, 32, 8, 1)
"""Rows are compiled for texts of at least these average lengths."""
_FEWEST_TEXTS = 32
"""A smaller capacity would not be faster."""
_GPU_BUDGET = 16384
_CPU_BUDGET = 512


class EncodePlan(NamedTuple):
    """A packing: the texts of each row, and the sizes of the rows."""

    lengths: tuple[int, ...]
    """Tokens of each text."""
    rows: tuple[tuple[int, ...], ...]
    """Indices of the texts of each row."""
    budgets: tuple[int, ...]
    """Size of each row in tokens, one of `budgets`."""
    capacities: tuple[int, ...]
    """Capacity of each row, in texts."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all texts."""
        return sum(self.lengths)

    @property
    def computed_tokens(self) -> int:
        """Tokens of all rows, padding included."""
        return sum(self.budgets)


def plan_rows(
    lengths: Sequence[int], token_budget: int, *, parts: int = 1
) -> EncodePlan:
    """Pack texts into rows of at most `token_budget` tokens, the longest texts first.

    The number of rows is the minimum for the budget, and they are about equally full.

    Args:
        lengths: Tokens of each text.
        token_budget: Maximum tokens per row.
        parts: Rows per batch, one per device; rows of a batch have the same size.

    Raises:
        ValueError: a text is longer than a row, or the budget is not a positive
            integer.

    Example:
        >>> plan_rows([3, 60, 2], 64).rows
        ((1, 0), (2,))
    """
    known = type(token_budget) is int  # asking an abstract class takes long
    if not (known or isinstance(token_budget, numbers.Integral)) or token_budget < 1:
        raise ValueError(
            f"token_budget {token_budget!r} must be at least 1, an integer"
        )
    sizes = budgets(token_budget)
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    needed = max(sum(lengths), len(order))
    if parts == 1 and 0 < needed <= token_budget:
        # One row: as below, which for few texts takes longer than the rest of a call.
        size = sizes[bisect.bisect_left(sizes, needed)]
        rooms = capacities(size)
        room = rooms[bisect.bisect_left(rooms, len(order))]
        return EncodePlan(
            lengths=tuple(lengths),
            rows=(tuple(order),),
            budgets=(size,),
            capacities=(room,),
        )
    sorted_lengths = [lengths[i] for i in order]
    if order and sorted_lengths[0] > token_budget:
        raise ValueError(
            f"token_budget {token_budget} is smaller than the {sorted_lengths[0]} "
            f"tokens of texts[{order[0]}]; raise it, or lower max_length and truncate"
        )
    rows = _even_rows(sorted_lengths, sizes, parts)
    used = [sum(sorted_lengths[i] for i in row) for row in rows]
    found: list[tuple[int, int]] = []
    for start in range(0, len(rows), parts):
        group = slice(start, start + parts)
        size = next(size for size in sizes if size >= max(used[group]))
        texts = max(map(len, rows[group]))
        room = next(most for most in capacities(size) if most >= texts)
        found += [(size, room)] * len(rows[group])
    return EncodePlan(
        lengths=tuple(lengths),
        rows=tuple(tuple(order[i] for i in row) for row in rows),
        budgets=tuple(size for size, _ in found),
        capacities=tuple(room for _, room in found),
    )


def _even_rows(
    lengths: Sequence[int], sizes: Sequence[int], parts: int
) -> list[list[int]]:
    """As few times `parts` rows as the largest size needs, of the smallest that does.

    The fullest rows come first.
    """
    rows = assign_rows(lengths, sizes[-1], sizes[-1])
    most = -(-len(rows) // parts) * parts
    least = max(max(lengths, default=0), -(-sum(lengths) // max(most, 1)))
    for size in sizes[bisect.bisect_left(sizes, least) : -1]:
        even = assign_rows(lengths, size, size)
        if len(even) <= most:
            rows = even
            break
    return sorted(rows, key=lambda row: -sum(lengths[i] for i in row))


@functools.lru_cache
def budgets(token_budget: int) -> tuple[int, ...]:
    """The row sizes that the model is compiled for, the smallest first.

    At most 15% of a row is padding, unless it has fewer tokens than 85% of the smallest
    size.

    Example:
        >>> budgets(300)
        (128, 144, 160, 176, 192, 224, 256, 300)
    """
    sizes = [token_budget]
    while (size := sizes[-1]) > _SMALLEST_BUDGET:
        # One token more than the next smaller size holds may waste 15% of this one.
        least = -(-17 * size // 20) - 1
        unit = 128 if size > 2048 else 16
        sizes.append(max(_SMALLEST_BUDGET, -(-least // unit) * unit))
    return tuple(sorted(sizes))


def default_budget(platform: str, lengths: Sequence[int]) -> int:
    """Tokens per row, for a kind of device and the lengths of the texts."""
    if platform != "cpu":
        return _GPU_BUDGET
    # Attention on a CPU scores all pairs of a row, also across texts.
    budget = _CPU_BUDGET
    while budget < max(lengths, default=0):
        budget *= 2
    return budget


def coarse_first(token_budget: int) -> list[int]:
    """The sizes of `budgets` in the order in which to compile them.

    The first few, of which each is about half of the one before, soon stand in for all
    others at no more than twice the cost.

    Example:
        >>> coarse_first(300)
        [300, 176, 224, 144, 256, 192, 160, 128]
    """
    sizes = budgets(token_budget)[::-1]
    found = [size for step in (4, 2, 1) for size in sizes[::step]]
    return list(dict.fromkeys(found))


@functools.lru_cache
def capacities(size: int) -> tuple[int, ...]:
    """The capacities, in texts, that rows of a size are compiled for, the smallest
    first.

    Attention chooses its kernel by the average length at capacity.

    Example:
        >>> capacities(4096)
        (32, 128, 512, 4096)
    """
    # Tensor cores take multiples of 8.
    rooms = [-(-size // (8 * tokens)) * 8 for tokens in _TOKENS_A_TEXT]
    return tuple(sorted({min(size, max(_FEWEST_TEXTS, room)) for room in rooms}))


def usual_capacities(size: int) -> tuple[int, ...]:
    """Those of texts of at least 8 tokens on average.

    Example:
        >>> usual_capacities(4096)
        (32, 128, 512)
    """
    return capacities(size)[:-1] or (size,)
