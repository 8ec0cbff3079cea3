"""The page tables of sequences: prefix cache hits, allocation, naming.

Legend: G tokens of a page.
"""

import collections
import math
from collections import abc
from collections.abc import Iterable, Iterator

from jaxscale.inference.engine.scheduling.block_pool import (
    BlockPool,
    page_hash,
    root_of,
)
from jaxscale.inference.engine.scheduling.scheduler_config import SchedulerConfig
from jaxscale.inference.engine.scheduling.sequence import Sequence


class PageTables:
    """Allocates, names and frees `Sequence.pages` from one pool."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.pool = BlockPool(num_pages=config.num_pages, page_size=config.page_size)
        self._config = config
        self._watermark = math.ceil(config.watermark * config.num_pages)

    def sharable(self, c: Sequence) -> int:
        """Full pages before its last token, which must be computed anyway."""
        if not self._config.prefix_cache:
            return 0
        return (len(c.tokens) - 1) // self._config.page_size

    def find(self, c: Sequence) -> list[int]:
        """The cached pages of its prefix, not held yet."""
        wants_all = c.request.params.prompt_logprobs is not None and c.index == 0
        if wants_all and not c.prompt_done:
            return []
        names = (self._named(c, page) for page in range(self.sharable(c)))
        return self.pool.find(names)

    def lacks(self, c: Sequence, found: abc.Sequence[int], *, alone: bool) -> int:
        """Number of pages missing before `admit` may be called; 0 or less for none.

        Args:
            c: A sequence without pages.
            found: The result of `find` for it.
            alone: No other running sequence will need pages too.
        """
        reserved = 0 if alone else self._watermark
        return self.adds(c, found) - self.pool.num_available + reserved

    def adds(self, c: Sequence, found: abc.Sequence[int]) -> int:
        """Number of pages that `admit` makes unavailable."""
        return self.size(c) - len(found) + self.pool.num_unheld(found)

    def gains(
        self, others: Iterable[Sequence], found: abc.Sequence[int]
    ) -> Iterator[int]:
        """By how much `lacks` decreases after the release of each of `others`."""
        # A found page that becomes available must be held again.
        gained, wanted = 0, set(found)
        holders: collections.Counter[int] = collections.Counter()
        for other in others:
            holders.update(other.pages)
            gained += sum(
                holders[page] == self.pool.holders(page) and page not in wanted
                for page in other.pages
            )
            yield gained

    def admit(self, c: Sequence, found: list[int]) -> None:
        """Hold the found pages, and allocate the rest for its tokens and a step."""
        self.pool.hold(found)
        c.pages = found + self.pool.allocate(self.size(c) - len(found))
        c.kv = len(found) * self._config.page_size
        c.named = len(found)

    def size(self, c: Sequence) -> int:
        """Number of pages of an admitted sequence."""
        reach = min(len(c.tokens) + 1 + self._config.drafts, c.limit - 1)
        return self.pool.pages_for(max(reach, len(c.tokens)))

    def missing(
        self, sequences: Iterable[Sequence], ahead: int
    ) -> list[tuple[Sequence, int]]:
        """Who needs more pages before a dispatch that writes at most `ahead` tokens,
        and how many.
        """
        size, found = self._config.page_size, []
        for c in sequences:
            reach = c.kv + c.pending + ahead
            if reach <= len(c.pages) * size:  # as nearly all
                continue
            # The last token is never in the cache.
            if (need := -(-min(reach, c.limit - 1) // size) - len(c.pages)) > 0:
                found.append((c, need))
        return found

    def name(self, c: Sequence) -> None:
        """Add pages that have become full to the prefix cache."""
        full = c.kv // self._config.page_size
        if c.named >= full or not self._config.prefix_cache:
            return
        while c.named < full:
            self.pool.name(c.pages[c.named], self._named(c, c.named))
            c.named += 1

    def release(self, c: Sequence, *, keep: bool) -> None:
        """Release all its pages.

        Args:
            c: A sequence with pages.
            keep: True: they stay in the prefix cache.
        """
        self.pool.release(c.pages, keep=keep)
        c.pages = []
        c.kv = c.pending = c.due = c.named = c.told = 0

    def _named(self, c: Sequence, page: int) -> bytes:
        size = self._config.page_size
        while len(c.names) <= page:
            start = len(c.names) * size
            parent = c.names[-1] if c.names else root_of(c.request.lora)
            tokens = c.tokens[start : start + size]
            decoded = c.target if start + size > c.target else None
            c.names.append(page_hash(parent, tokens, c.request.salt, decoded=decoded))
        return c.names[page]
