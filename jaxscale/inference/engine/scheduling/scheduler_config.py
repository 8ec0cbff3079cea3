"""The sizes that the scheduler plans for.

Legend: S slots, G tokens of a page, P pages, V vocabulary, W pages of a request.
"""

import dataclasses
from collections.abc import Sequence

from jaxscale.checks import check_integers


FEW_ROWS = 32
"""Rows whose decode step may take the device less time than the host."""

LONGEST_NGRAM = 32
"""Maximum n-gram length to look up: each token is another pass over the sequence."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SchedulerSettings:
    """The user's settings of the scheduler."""

    page_size: int = 64
    """G, tokens per page (block) of the KV cache."""
    steps: int = 4
    """Decode steps per launch of at most 32 sequences, while no request waits or is to
    be expected; otherwise one, so that requests join at the next token."""
    drafts: int = 0
    """Draft tokens per request and step, by n-gram lookup in the request's own tokens
    (prompt-lookup speculative decoding); 0 is off. Results do not change."""
    draft_bucket: int = 8
    """Largest decode batch with draft tokens; larger batches keep the device busy."""
    shortest_ngram: int = 2
    """Shortest n-gram that must recur before tokens are drafted."""
    longest_ngram: int = 4
    """Longest n-gram that is looked up; the longest match decides."""
    prefix_cache: bool = True
    """Prefix caching: compute a shared beginning of prompts once."""
    max_waiting: int = 2048
    """Maximum number of requests in the waiting queue; further ones are refused."""
    max_waiting_tokens: int = 2**20
    """Maximum number of prompt tokens in the waiting queue."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SchedulerConfig(SchedulerSettings):
    """The sizes that the scheduler plans for, most of them those of compiled programs.

    Example:
        >>> SchedulerConfig(num_pages=8, vocab_size=100, max_len=4096).longest
        512
    """

    num_pages: int
    """P, pages of the KV cache on the device."""
    vocab_size: int
    """V, size of the vocabulary."""
    max_len: int
    """Maximum tokens of prompt and completion together."""
    num_slots: int = 128
    """S, maximum number of running requests, which decode together: a power of two, at
    least 2."""
    adapters: Sequence[str] = ()
    """Names of the LoRA adapters that requests may choose."""
    eos_ids: Sequence[int] = ()
    """Tokens that end a sequence, unless its request ignores them."""
    prefill_tokens: int = 2048
    """Maximum prompt tokens prefilled per engine step."""
    prefill_requests: int = 16
    """Maximum number of prompts per prefill."""
    prefill_keys: int | None = None
    """Maximum keys, in whole pages, that the prompts of one prefill attend to; None is
    16,384, or what the longest request needs if that is more."""
    split: int = 512
    """Tokens per split of the attention: prefill chunks end at multiples of it or at
    the end of the prompt, so that no result depends on what was cached."""
    watermark: float = 0.01
    """Fraction of the pages that admission reserves for running requests."""

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
        if not is_power(self.num_slots):
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
        """Batch sizes of decode, ascending, up to S: powers of two, and from 64 on up
        to three more between two of them, multiples of 32.
        """
        # XLA turns the matmul of one row with the embedding table into fp32 copies of
        # the table.
        found = {2}
        for whole in (2**i for i in range(2, self.num_slots.bit_length())):
            step = max(FEW_ROWS, whole // 8)
            found |= {whole, *range(whole // 2 + step, whole, step)}
        return sorted(found)

    def steps_of(self, bucket: int) -> int:
        """Decode steps per launch of a batch of this size, where none waits."""
        return self.steps if bucket <= FEW_ROWS else 1

    def drafts_of(self, bucket: int) -> int:
        """Draft tokens per sequence in a batch of this size."""
        return self.drafts if bucket <= self.draft_bucket else 0

    @property
    def longest(self) -> int:
        """Maximum tokens of a request, as model and pages allow."""
        return min(self.max_len, self.num_pages * self.page_size)

    @property
    def table_width(self) -> int:
        """W, width of a page table: pages of the longest request."""
        return -(-self.longest // self.page_size)

    @property
    def keys_budget(self) -> int:
        """`prefill_keys`, or its default."""
        if self.prefill_keys is not None:
            return self.prefill_keys
        return max(16_384, self._whole_pages())

    def _whole_pages(self) -> int:
        return self.table_width * self.page_size


def prefill_sizes(config: SchedulerConfig, sizes: Sequence[int] | None) -> list[int]:
    """The token counts that prefill is compiled for, ascending."""
    most = config.prefill_tokens
    chosen = sorted(sizes or {most, max(most // 4, 1), max(most // 16, 1)})
    if chosen[-1] != most or chosen[0] < 1:
        raise ValueError(
            f"prefill_tokens {chosen} must be positive and end with {most}, the most "
            "tokens of a tick"
        )
    return chosen


def bucket_sizes(config: SchedulerConfig, buckets: Sequence[int] | None) -> list[int]:
    """The batch sizes that decode is compiled for, ascending."""
    batches = config.batches
    # A step of few rows reads the weights, whatever their number; one of many computes.
    few = [rows for rows in batches if rows <= FEW_ROWS][::2]
    many = [rows for rows in batches if rows > FEW_ROWS]
    chosen = sorted(buckets or {*few, *many, config.num_slots})
    if chosen[-1] != config.num_slots or not set(chosen) <= set(batches):
        raise ValueError(
            f"buckets {chosen} must be among {batches} and end with "
            f"{config.num_slots}, the most requests that are decoded together"
        )
    return chosen


def is_power(rows: int) -> bool:
    """Whether a batch size is a power of two: others have no programs for the full
    sampler, for which the next power stands in.
    """
    return rows & (rows - 1) == 0


def bucket_of(rows: int, buckets: Sequence[int]) -> int:
    """The smallest compiled batch size that holds `rows` sequences."""
    return next(bucket for bucket in buckets if bucket >= rows)


def decode_sizes(
    config: SchedulerConfig, buckets: Sequence[int]
) -> list[tuple[int, int, int]]:
    """Batch size, steps and draft tokens of each decode program.

    Example:
        >>> config = SchedulerConfig(
        ...     num_pages=8, vocab_size=9, max_len=99, num_slots=8, drafts=3,
        ...     draft_bucket=4,
        ... )
        >>> decode_sizes(config, [4, 8])
        [(4, 1, 0), (4, 1, 3), (4, 4, 3), (8, 1, 0), (8, 4, 0)]
    """
    found = set[tuple[int, int, int]]()
    for rows in config.batches:
        bucket, drafts = bucket_of(rows, buckets), config.drafts_of(rows)
        found |= {(bucket, steps, drafts) for steps in (1, config.steps_of(rows))}
        # When pages are scarce there are no draft tokens.
        found.add((bucket, 1, 0))
    return sorted(found)
