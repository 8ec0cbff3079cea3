"""How many pages running sequences will need, by how others have ended.

Legend: G tokens of a page.
"""

from collections.abc import Iterable

import numpy as np

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
        >>> forecast.add(3, 16), forecast.add(2, 4)
        (None, None)
        >>> forecast.fits(1, 4)  # 9 when two end, then 7
        True
        >>> forecast.fits(1, 16)  # 11 at the end
        False
    """

    def __init__(self, room: float, *, page_size: int) -> None:
        """No sequence holds any.

        Args:
            room: Pages that there are.
            page_size: G.
        """
        self._room, self._size = room, page_size
        self._pages: list[int] = []
        self._left: list[float] = []
        self._all = 0.0

    def add(self, pages: int, left: float) -> None:
        """Add a sequence that holds so many pages, and has so many tokens left."""
        self._pages.append(pages)
        self._left.append(left)
        self._all += pages + left / self._size

    def fits(self, pages: int, left: float) -> bool:
        """Whether there is room for another one; alone it has all that there is."""
        if not self._pages or self._all + pages + left / self._size <= self._room:
            return True  # even if none ended before the others
        steps = np.array([*self._left, left])
        longest = np.argsort(-steps)
        held = np.array([*self._pages, pages])[longest].cumsum()
        grown = steps[longest] / self._size * np.arange(1, len(steps) + 1)
        return float((held + grown).max()) <= self._room


def forecast(
    running: Iterable[Sequence],
    lengths: AnswerLengths,
    *,
    room: float,
    num_held: int,
    page_size: int,
    level: int,
) -> PageForecast:
    """The forecast for sequences of a priority, or of a higher one.

    Args:
        running: All sequences that hold pages.
        lengths: What is expected of them.
        room: Pages that there are.
        num_held: Pages that are held, those that several sequences hold counted once.
        page_size: G.
        level: `Sequence.order[0]` of the priority; others yield to it.
    """
    running = list(running)
    shared = sum(len(c.pages) for c in running) - num_held
    found = PageForecast(room + max(shared, 0), page_size=page_size)
    for c in running:
        if c.order[0] <= level:
            found.add(len(c.pages), lengths.left(c))
    return found
