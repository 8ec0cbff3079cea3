"""How many pages running sequences will need, by how others have ended.

Legend: G tokens of a page.
"""

import math
from collections.abc import Iterable

from jaxscale.inference.engine.scheduling.block_pool import BlockPool
from jaxscale.inference.engine.scheduling.sequence import Sequence


_MOST = 4096  # tokens of an answer that are expected at most
_KEPT = 0.99  # weight of what is known, with each sequence that ends


class AnswerLengths:
    """What share of the tokens that they may have sequences take.

    Example:
        >>> from jaxscale.inference.request import Request
        >>> c = Sequence(
        ...     request=Request(prompt=[1]), index=0, order=(0, 1, 0), seed=0,
        ...     limit=101, stops=frozenset(), tokens=[1] * 26,
        ... )
        >>> lengths = AnswerLengths()
        >>> lengths.left(c)
        75.0
        >>> lengths.ended(c)
        >>> lengths.left(c)
        18.75
    """

    def __init__(self) -> None:
        """Until one has ended, all take all that they may."""
        self._taken = self._allowed = 0.0

    def ended(self, c: Sequence) -> None:
        """Note the tokens of a sequence that has ended by itself."""
        allowed = c.limit - len(c.request.prompt)
        self._taken = _KEPT * self._taken + min(c.num_drawn, _MOST)
        self._allowed = _KEPT * self._allowed + min(allowed, _MOST)

    def left(self, c: Sequence) -> float:
        """Tokens that a sequence is expected to have yet."""
        share = self._taken / self._allowed if self._allowed else 1.0
        return share * min(c.limit - len(c.tokens), _MOST)


class PageForecast:
    """The most pages that are held at a time, until all of some sequences have ended.

    Sequences go on side by side, each holds a page more every G steps, and who ends
    gives all back. So the most are held when one of them is about to end.

    Example:
        >>> forecast = PageForecast(10, page_size=4)
        >>> forecast.add(3, 4, 16), forecast.add(2, 1, 4)
        (None, None)
        >>> forecast.fits(1, 1, 4)  # 9 when two end, then 7
        True
        >>> forecast.fits(1, 4, 16)  # 12 at the end
        False
    """

    def __init__(self, room: int, *, page_size: int) -> None:
        """No sequence holds any.

        Args:
            room: Pages that there are.
            page_size: G.
        """
        self._room, self._size = room, page_size
        self._pages: list[int] = []
        self._left: list[float] = []
        self._all = 0

    def add(self, pages: int, more: int, left: float) -> None:
        """Add a sequence.

        Args:
            pages: That it holds.
            more: Pages that it will hold besides.
            left: Tokens that it has yet to come.
        """
        self._pages.append(pages)
        self._left.append(left)
        self._all += pages + more

    def fits(self, pages: int, more: int, left: float) -> bool:
        """Whether there is room for another one; alone it has all that there is."""
        if not self._pages or self._all + pages + more <= self._room:
            return True  # even if none ended before the others
        both = zip((*self._left, left), (*self._pages, pages), strict=True)
        held = 0
        for count, (steps, its) in enumerate(sorted(both, reverse=True), start=1):
            held += its
            if held + count * steps / self._size > self._room:
                return False
        return True


def growth(
    c: Sequence, num_pages: int, lengths: AnswerLengths, page_size: int
) -> tuple[int, float]:
    """Pages besides so many, and tokens, that a sequence is expected to have yet."""
    left = lengths.left(c)
    whole = math.ceil((len(c.tokens) + left) / page_size)
    return max(whole - num_pages, 0), left


def forecast(
    running: Iterable[Sequence], lengths: AnswerLengths, pool: BlockPool, level: int
) -> PageForecast:
    """The forecast for sequences of a priority, or of a higher one.

    Args:
        running: All sequences that hold pages.
        lengths: What is expected of them.
        pool: The pages.
        level: `Sequence.order[0]` of the priority; others yield to it.
    """
    running, size = list(running), pool.page_size
    # What several sequences hold is there once.
    shared = sum(len(c.pages) for c in running) - pool.num_held
    found = PageForecast(pool.num_pages + max(shared, 0), page_size=size)
    for c in running:
        if c.order[0] <= level:
            held = len(c.pages)
            found.add(held, *growth(c, held, lengths, size))
    return found
