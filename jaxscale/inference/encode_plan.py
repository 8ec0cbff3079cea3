"""The packing of texts into rows of a few sizes."""

import dataclasses
import numbers
from collections.abc import Sequence

from jaxscale.nn.packing import assign_rows


# A row of T tokens has a capacity of T / 8 texts: shorter ones leave some of it empty.
_TOKENS_A_SEQUENCE = 8
_SMALLEST_BUDGET = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncodePlan:
    """The packing of texts: the texts of each row, and the size of the rows."""

    lengths: tuple[int, ...]
    """Tokens of each text."""
    rows: tuple[tuple[int, ...], ...]
    """Indices of the texts of each row."""
    budgets: tuple[int, ...]
    """Tokens that each row is computed with; a few different numbers."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all texts."""
        return sum(self.lengths)

    @property
    def computed_tokens(self) -> int:
        """Tokens of all rows, the unused ones among them."""
        return sum(self.budgets)


def plan_rows(lengths: Sequence[int], token_budget: int) -> EncodePlan:
    """Pack texts into rows of at most `token_budget` tokens, the longest texts first.

    Args:
        lengths: Tokens of each text.
        token_budget: Most tokens of a row.

    Raises:
        ValueError: a text is longer than a row, or the budget is no positive integer.

    Example:
        >>> plan_rows([3, 60, 2], 64).rows
        ((1, 0), (2,))
    """
    if not isinstance(token_budget, numbers.Integral) or token_budget < 1:
        raise ValueError(
            f"token_budget {token_budget!r} must be at least 1, an integer"
        )
    longest = max(range(len(lengths)), key=lambda i: lengths[i], default=None)
    if longest is not None and lengths[longest] > token_budget:
        raise ValueError(
            f"token_budget {token_budget} is smaller than the {lengths[longest]} "
            f"tokens of texts[{longest}]; raise it, or lower max_length and "
            "truncate"
        )
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    rows = assign_rows(
        [lengths[i] for i in order], token_budget, max_sequences(token_budget)
    )
    rows = [tuple(order[i] for i in row) for row in rows]
    sizes = budgets(token_budget)

    def budget(row: Sequence[int]) -> int:
        needed = sum(lengths[i] for i in row)
        return min(
            size for size in sizes if size >= needed and max_sequences(size) >= len(row)
        )

    return EncodePlan(
        lengths=tuple(lengths),
        rows=tuple(rows),
        budgets=tuple(budget(row) for row in rows),
    )


def budgets(token_budget: int) -> tuple[int, ...]:
    """The sizes of rows that the model is compiled for, the smallest first.

    A quarter each time, so that the last rows of a list, which are not full, do not
    cost as much as full ones.

    Example:
        >>> budgets(16384)
        (256, 1024, 4096, 16384)
    """
    sizes = [token_budget]
    while sizes[-1] // 4 >= _SMALLEST_BUDGET:
        sizes.append(sizes[-1] // 4)
    return tuple(sorted(sizes))


def max_sequences(token_budget: int) -> int:
    """Most texts of a row of `token_budget` tokens."""
    return max(8, token_budget // _TOKENS_A_SEQUENCE)
