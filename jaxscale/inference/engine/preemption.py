"""Choice of the continuations that lose their pages to others."""

from collections.abc import Iterable, Sequence

from jaxscale.inference.engine.page_tables import PageTables
from jaxscale.inference.engine.scheduler_output import Continuation
from jaxscale.inference.engine.waiting_queue import BY_ORDER


def choose_yielding(
    c: Continuation,
    running: Iterable[Continuation],
    tables: PageTables,
    *,
    num_running: int,
    num_slots: int,
) -> tuple[list[int], Sequence[Continuation]] | None:
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
