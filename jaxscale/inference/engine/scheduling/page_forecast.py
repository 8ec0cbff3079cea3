"""How many pages running sequences will need, by how others have ended.

Legend: G tokens of a page.
"""

import math
from collections.abc import Iterable

from jaxscale.inference.engine.scheduling.block_pool import BlockPool
from jaxscale.inference.engine.scheduling.sequence import Sequence


_MOST = 4096  # tokens of an answer that are expected at most
_USUAL = 256.0  # of one without a bound, until some have ended
_KEPT = 0.99  # weight of what is known, with each sequence that ends


class AnswerLengths:
    """How many tokens sequences take, by those before.

    With `SamplingParams.max_tokens`, a share of these: all, until one has ended.
    Without, as many as others without.

    Example:
        >>> from jaxscale.inference.request import Request, SamplingParams
        >>> c = Sequence(
        ...     request=Request(prompt=[1], params=SamplingParams(max_tokens=100)),
        ...     index=0, order=(0, 1, 0), seed=0, limit=101, stops=frozenset(),
        ...     tokens=[1] * 26,
        ... )
        >>> lengths = AnswerLengths()
        >>> lengths.left(c)
        75.0
        >>> lengths.ended(c)
        >>> lengths.left(c)
        18.75
    """

    def __init__(self) -> None:
        """Of an answer without a bound nothing is known but a usual length."""
        # Tokens that were taken, and of how many: of answers with a bound; without one,
        # of how many answers.
        self._known = {True: (0.0, 0.0), False: (_USUAL, 1.0)}
        self._ratio = {True: 1.0, False: _USUAL}

    def ended(self, c: Sequence, *, itself: bool = True) -> None:
        """Note the tokens of a sequence that has ended, maybe because it was told to.

        The latter would have had more, so they count where they are more than expected.
        """
        bounded, unit, drawn = _parts(c)
        if itself or drawn > self._ratio[bounded] * unit:
            taken, of = self._known[bounded]
            self._known[bounded] = _KEPT * taken + drawn, _KEPT * of + unit
            self.watch(())

    def watch(self, running: Iterable[Sequence]) -> None:
        """Take account of those that run and have more tokens than was expected."""
        parts = [_parts(c) for c in running]
        for bounded, (taken, of) in self._known.items():
            expected = taken / of if of else 1.0
            for b, unit, drawn in parts:
                if b == bounded and drawn > expected * unit:
                    taken, of = taken + drawn, of + unit
            self._ratio[bounded] = taken / of if of else 1.0

    def left(self, c: Sequence) -> float:
        """Tokens that a sequence is expected to have yet."""
        bounded, _, drawn = _parts(c)
        ratio, most = self._ratio[bounded], min(c.limit - len(c.tokens), _MOST)
        if bounded:
            return ratio * most
        return min(max(ratio - drawn, ratio / 4), most)


def _parts(c: Sequence) -> tuple[bool, int, int]:
    """Whether an answer has a bound; this, or one answer; its tokens as yet."""
    bounded = c.request.params.max_tokens is not None
    allowed = min(c.limit - len(c.request.prompt), _MOST)
    return bounded, allowed if bounded else 1, min(c.num_drawn, _MOST)


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
    """Pages and tokens that a sequence is expected to have yet.

    Args:
        c: The sequence.
        num_pages: Pages that it has or gets, which do not count.
        lengths: What is expected of it.
        page_size: Tokens of a page.
    """
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
    lengths.watch(running)
    found = PageForecast(pool.num_pages, page_size=size)
    sizes = [
        (c, *growth(c, len(c.pages), lengths, size))
        for c in running
        if c.order[0] <= level
    ]
    if sum(len(c.pages) for c in running) > pool.num_held:
        # What several hold is there once, for as long as the last of them.
        sizes.sort(key=lambda each: each[2], reverse=True)
        counted: set[int] = set()
        for c, more, left in sizes:
            found.add(len(set(c.pages) - counted), more, left)
            counted.update(c.pages)
    else:
        for c, more, left in sizes:
            found.add(len(c.pages), more, left)
    return found
