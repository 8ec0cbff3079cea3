"""The sizes that the scheduler plans for.

Legend: S slots, G tokens of a page, P pages, V vocabulary, W pages of a request.
"""

import dataclasses
from collections.abc import Sequence

from jaxscale.checks import check_integers


LONGEST_NGRAM = 32
"""Most tokens that can be looked for: each is another pass over the tokens."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """The sizes that the scheduler plans for, most of them those of compiled programs.

    Example:
        >>> SchedulerConfig(num_pages=8, vocab_size=100, max_len=4096).longest
        512
    """

    num_pages: int
    """P, pages on the device."""
    vocab_size: int
    """V, tokens that the model knows."""
    max_len: int
    """Most tokens of prompt and continuation together."""
    page_size: int = 64
    """G, tokens of a page."""
    num_slots: int = 128
    """S, most requests that are decoded together: a power of two, at least 2."""
    eos_ids: Sequence[int] = ()
    """Tokens that end a continuation, unless its request ignores them."""
    prefill_tokens: int = 2048
    """Most tokens of prompts that are computed in a tick."""
    prefill_requests: int = 16
    """Most prompts that share them."""
    prefill_keys: int | None = None
    """Most keys, in whole pages, that the prompts of a tick attend to; None is 16,384,
    or what the longest request needs if that is more."""
    split: int = 512
    """Tokens of a split of the attention: chunks end on multiples of it, or with their
    prompt, so that no result depends on what was cached."""
    steps: int = 4
    """Steps of a decode where nothing waits; otherwise one, so that a request still
    joins at the next token."""
    drafts: int = 0
    """Tokens that the device guesses ahead for each row and step."""
    draft_bucket: int = 8
    """Largest bucket that guesses: more rows keep the device busy by themselves."""
    shortest_ngram: int = 2
    """Fewest tokens before a place that say what is guessed there."""
    longest_ngram: int = 4
    """Most tokens before a place that are looked for."""
    watermark: float = 0.01
    """Share of the pages that admission leaves to requests that already run."""
    max_waiting: int = 2048
    """Most requests that wait for their first turn; then more are refused."""
    max_waiting_tokens: int = 2**20
    """Most tokens of prompts that wait."""
    prefix_cache: bool = True
    """True: prompts find what others have computed."""
    contiguous: bool = False
    """Give each slot neighboring pages of its own, as Flover does, and move them when
    rows move. For comparison: without sharing, and a request takes all of its pages."""

    def __post_init__(self) -> None:
        counts = ("num_pages", "vocab_size", "page_size", "prefill_tokens", "split")
        counts += ("prefill_requests", "steps", "draft_bucket", "max_waiting")
        counts += ("shortest_ngram", "longest_ngram")
        check_integers(self, 1, *counts, "max_waiting_tokens")
        check_integers(self, 2, "max_len", "num_slots")
        check_integers(self, 0, "drafts")
        if not self.shortest_ngram <= self.longest_ngram <= LONGEST_NGRAM:
            raise ValueError(
                f"longest_ngram {self.longest_ngram} must be at least shortest_ngram "
                f"{self.shortest_ngram}, and at most {LONGEST_NGRAM}"
            )
        if self.num_slots & (self.num_slots - 1):
            raise ValueError(f"num_slots {self.num_slots} must be a power of two")
        if self.split % self.page_size:
            raise ValueError(
                f"split {self.split} must be a multiple of page_size {self.page_size}"
            )
        if self.prefill_tokens < self.split:
            raise ValueError(
                f"prefill_tokens {self.prefill_tokens} must be at least split "
                f"{self.split}"
            )
        if not 0 <= self.watermark < 1:
            raise ValueError(
                f"watermark {self.watermark} must be at least 0 and below 1"
            )
        if self.contiguous and self.num_pages < self.num_slots:
            raise ValueError(
                f"num_pages {self.num_pages} must be at least num_slots "
                f"{self.num_slots} where caches are contiguous"
            )
        object.__setattr__(self, "eos_ids", tuple(self.eos_ids))
        if any(not 0 <= token < self.vocab_size for token in self.eos_ids):
            raise ValueError(
                f"eos_ids {self.eos_ids} must be tokens of the vocabulary of "
                f"{self.vocab_size}"
            )
        if self.prefill_keys is not None:
            check_integers(self, self._whole_pages(), "prefill_keys")

    @property
    def batches(self) -> Sequence[int]:
        """Sizes of batches that are decoded: powers of two up to S."""
        return [2**i for i in range(1, self.num_slots.bit_length())]

    def drafts_of(self, bucket: int) -> int:
        """Drafts of each row in a batch of this size, where pages are enough."""
        return self.drafts if bucket <= self.draft_bucket else 0

    @property
    def pages_per_slot(self) -> int:
        """Pages that a slot can have: all, unless caches are contiguous."""
        return self.num_pages // (self.num_slots if self.contiguous else 1)

    @property
    def longest(self) -> int:
        """Most tokens of a request: what the model allows, and the pages."""
        return min(self.max_len, self.pages_per_slot * self.page_size)

    @property
    def table_width(self) -> int:
        """W, pages of the longest request."""
        return -(-self.longest // self.page_size)

    @property
    def keys_budget(self) -> int:
        """`prefill_keys`, or its default."""
        if self.prefill_keys is not None:
            return self.prefill_keys
        return max(16_384, self._whole_pages())

    def _whole_pages(self) -> int:
        return self.table_width * self.page_size
