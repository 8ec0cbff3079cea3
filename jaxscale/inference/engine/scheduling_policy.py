"""Choices of the scheduler: which prompts share a prefill, and who is preempted."""

import heapq
from collections import abc

from jaxscale.inference.engine.page_tables import PageTables
from jaxscale.inference.engine.scheduler_config import SchedulerConfig
from jaxscale.inference.engine.sequence import Sequence
from jaxscale.inference.engine.waiting_queue import BY_ORDER


def choose_chunks(
    prefilling: list[Sequence], config: SchedulerConfig
) -> list[tuple[Sequence, int]]:
    """Choose the prompts that are computed in a tick, and up to which token.

    The first of the line gets all that its prompt needs. If the prompt does not end in
    this tick, a split is left for those behind, the shortest first: a long prompt then
    holds up no short one, and gets done itself.

    Args:
        prefilling: Sequences in order; each lacks tokens.
        config: The budgets.

    Returns:
        Each with the position where its chunk ends.
    """
    if not prefilling:
        return []
    first, *others = prefilling
    tokens, keys = config.prefill_tokens, config.keys_budget
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
    """Choose those of lower priority that are preempted, so that `c` can be admitted.

    Args:
        c: Waits, and is the next in turn.
        running: Those that can be preempted.
        tables: The pages.
        num_running: Number of all that hold pages.
        num_slots: S.

    Returns:
        The pages that `PageTables.find` found, and the fewest who have to yield, the
        newest of the lowest priority first; None where all of them would not be enough,
        so that none is preempted in vain.
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
