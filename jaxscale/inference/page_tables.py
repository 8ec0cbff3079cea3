"""The pages of each continuation: those it finds, those it needs, what they are named.

Legend: G tokens of a page, W pages of a slot.
"""

from jaxscale.inference.block_pool import ROOT, BlockPool, page_hash
from jaxscale.inference.plan import Continuation
from jaxscale.inference.scheduler_config import SchedulerConfig


class PageTables:
    """Fills, names and empties `Continuation.pages` from one pool.

    With contiguous caches each slot has W neighboring pages, and the pool is unused.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        """All pages free.

        Args:
            config: Number and size of the pages, and the sharing of prompts.
        """
        self.pool = BlockPool(num_pages=config.num_pages, page_size=config.page_size)
        self._config = config

    def sharable(self, c: Continuation) -> int:
        """Full pages before its last token, which has to be computed anyway."""
        if not self._config.prefix_cache or self._config.contiguous:
            return 0
        return (len(c.tokens) - 1) // self._config.page_size

    def find(self, c: Continuation) -> list[int]:
        """The pages in the cache that begin like its tokens; nobody holds them yet."""
        wants_all = c.request.params.prompt_logprobs is not None and c.index == 0
        if wants_all and not c.prompt_done:
            return []
        names = (self._named(c, page) for page in range(self.sharable(c)))
        return self.pool.find(names)

    def admit(self, c: Continuation, found: list[int], reserve: int) -> bool:
        """Take the found pages, and new ones for the rest of its tokens and a step.

        Args:
            c: Holds no pages.
            found: The result of `find` for it.
            reserve: Pages that must stay available.

        Returns:
            True if there were enough; otherwise nothing has changed.
        """
        reach = min(len(c.tokens) + 1 + self._config.drafts, c.limit - 1)
        new = self.pool.pages_for(max(reach, len(c.tokens))) - len(found)
        if new + self.pool.num_unheld(found) + reserve > self.pool.num_available:
            return False
        self.pool.hold(found)
        c.pages = found + self.pool.allocate(new)
        c.kv = len(found) * self._config.page_size
        c.named = len(found)
        return True

    def missing(self, c: Continuation, ahead: int) -> int:
        """Pages to add before a dispatch that writes at most `ahead` tokens."""
        # The last token is never in the cache.
        reach = min(c.kv + c.pending + ahead, c.limit - 1)
        return max(0, self.pool.pages_for(reach) - len(c.pages))

    def name(self, c: Continuation) -> None:
        """Let others find the pages that have become full."""
        full = c.kv // self._config.page_size
        if c.named >= full or not self._config.prefix_cache or self._config.contiguous:
            return
        while c.named < full:
            self.pool.name(c.pages[c.named], self._named(c, c.named))
            c.named += 1

    def move_home(self, c: Continuation) -> None:
        """Give it the pages of its slot, where caches are contiguous."""
        assert c.slot is not None
        first = c.slot * self._config.pages_per_slot
        c.pages = list(range(first, first + self._config.table_width))
        c.told = 0

    def release(self, c: Continuation, *, keep: bool) -> None:
        """Take all pages from it.

        Args:
            c: Holds pages.
            keep: True: others may still find them.
        """
        if not self._config.contiguous:
            self.pool.release(c.pages, keep=keep)
        c.pages = []
        c.kv = c.pending = c.due = c.named = c.told = 0

    def _named(self, c: Continuation, page: int) -> bytes:
        size = self._config.page_size
        while len(c.names) <= page:
            start = len(c.names) * size
            parent = c.names[-1] if c.names else ROOT
            tokens = c.tokens[start : start + size]
            c.names.append(page_hash(parent, tokens, c.request.salt))
        return c.names[page]
