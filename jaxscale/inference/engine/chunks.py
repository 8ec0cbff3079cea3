"""Choice of the prompts that share the prefill of a tick."""

import heapq

from jaxscale.inference.engine.scheduler_config import SchedulerConfig
from jaxscale.inference.engine.scheduler_output import Continuation


def choose_chunks(
    prefilling: list[Continuation], config: SchedulerConfig
) -> list[tuple[Continuation, int]]:
    """Choose the prompts that are computed in a tick, and up to which token.

    The first of the line gets all that its prompt needs. If the prompt does not end in
    this tick, a split is left for those behind, the shortest first: a long prompt then
    holds up no short one, and gets done itself.

    Args:
        prefilling: Continuations in order; each lacks tokens.
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
