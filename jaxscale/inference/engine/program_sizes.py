"""The sizes that the engine's programs are compiled for.

Each is checked, and chosen where the caller leaves it open.
"""

from collections.abc import Sequence

from jaxscale.inference.engine.scheduler_config import SchedulerConfig


def prefill_sizes(config: SchedulerConfig, sizes: Sequence[int] | None) -> list[int]:
    """The numbers of tokens that prefill is compiled for, ascending."""
    most = config.prefill_tokens
    chosen = sorted(sizes or {most, max(most // 4, 1), max(most // 16, 1)})
    if chosen[-1] != most or chosen[0] < 1:
        raise ValueError(
            f"prefill_tokens {chosen} must be positive and end with {most}, the most "
            "tokens of a tick"
        )
    return chosen


def bucket_sizes(config: SchedulerConfig, buckets: Sequence[int] | None) -> list[int]:
    """The sizes of batches that decoding is compiled for, ascending."""
    powers = config.batches
    chosen = sorted(buckets or {*powers[::2], config.num_slots})
    if chosen[-1] != config.num_slots or not set(chosen) <= set(powers):
        raise ValueError(
            f"buckets {chosen} must be powers of two from 2 on and end with "
            f"{config.num_slots}, the most requests that are decoded together"
        )
    return chosen


def bucket_of(rows: int, buckets: Sequence[int]) -> int:
    """The smallest compiled batch of at least so many rows."""
    return next(bucket for bucket in buckets if bucket >= rows)


def decode_sizes(
    config: SchedulerConfig, buckets: Sequence[int]
) -> list[tuple[int, int, int]]:
    """Rows, steps and drafts of the programs that decode: what a plan may ask for.

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
        found |= {(bucket, steps, drafts) for steps in (1, config.steps)}
        # Where pages are short, there are no drafts.
        found.add((bucket, 1, 0))
    return sorted(found)
