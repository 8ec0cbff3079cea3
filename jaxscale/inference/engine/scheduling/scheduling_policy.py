"""Policies of the scheduler: which prompts share a prefill, and preemption."""

import heapq
from collections import abc

from jaxscale.inference.engine.scheduling.page_tables import PageTables
from jaxscale.inference.engine.scheduling.scheduler_config import SchedulerConfig
from jaxscale.inference.engine.scheduling.sequence import Sequence
from jaxscale.inference.engine.scheduling.waiting_queue import BY_ORDER


def choose_chunks(
    prefilling: list[Sequence],
    config: SchedulerConfig,
    *,
    decoding: int = 0,
    turn: bool = False,
) -> list[tuple[Sequence, int]]:
    """Choose the prompt chunks of a step (chunked prefill).

    The first in the queue gets all that its prompt needs. If the prompt does not end in
    this step, one split is left for the others, the shortest first: a long prompt then
    blocks no short one, and still makes progress. While more sequences decode than wait
    for their prompt, a split of a long prompt is a step's only chunk, so that the step
    of the many is not much longer, and prompts that end within a split have the other
    steps.

    Args:
        prefilling: Sequences in order; each lacks tokens.
        config: The budgets.
        decoding: Number of sequences that decode in this step.
        turn: Whether it is the step of short prompts, where a long one is first.

    Returns:
        Each with the position where its chunk ends.
    """
    if not prefilling:
        return []
    first, *others = prefilling
    tokens, keys = config.prefill_tokens, config.keys_budget
    if decoding > len(prefilling):
        short = [
            c
            for c in prefilling
            if c.target - c.kv <= config.split and c.order[0] == first.order[0]
        ]
        if short and (turn or first is short[0]):
            first, *others = short
        else:
            others = []
        tokens = min(tokens, config.split * (2 if others else 1))
    others = heapq.nsmallest(
        config.prefill_requests - 1,
        others,
        key=lambda c: (c.order[0], c.target - c.kv, c.order),
    )
    chosen = []
    for c in (first, *others):
        room = tokens
        if c is first and others and c.target - c.kv > tokens >= 2 * config.split:
            room -= config.split
        end = min(c.target, c.kv + room)
        if end < c.target:
            end -= end % config.split
        needed = -(-end // config.page_size) * config.page_size
        if end > c.kv and needed <= keys:
            chosen.append((c, end))
            tokens -= end - c.kv
            keys -= needed
    return chosen


def choose_yielding(
    c: Sequence,
    running: abc.Iterable[Sequence],
    tables: PageTables,
    *,
    num_running: int,
    num_slots: int,
) -> tuple[list[int], abc.Sequence[Sequence]] | None:
    """Choose sequences of lower priority to preempt, so that `c` can be admitted.

    Args:
        c: The next waiting sequence.
        running: Sequences that can be preempted.
        tables: The page tables.
        num_running: Number of sequences with pages.
        num_slots: S.

    Returns:
        The pages that `PageTables.find` found, and the minimal set to preempt, the
        newest of the lowest priority first; None if all of them would not be enough, so
        that none is preempted in vain.
    """
    free, level = num_running < num_slots, c.order[0]
    below = [r for r in running if r.order[0] > level]
    if not (free or below):
        return None
    found = tables.find(c)
    lacking = tables.lacks(c, found, alone=not num_running)
    if free and lacking <= 0:
        return found, ()
    below = sorted(set(below), key=BY_ORDER, reverse=True)
    for count, gain in enumerate(tables.gains(below, found), start=1):
        if count == num_running:
            lacking = tables.lacks(c, found, alone=True)
        if gain >= lacking:
            return found, below[:count]
    return None
