"""The waiting queue: new requests, and those that were admitted before."""

import bisect
import math
import operator
from collections.abc import Iterable

from jaxscale.inference.engine.scheduling.scheduler_config import SchedulerConfig
from jaxscale.inference.engine.scheduling.sequence import Sequence
from jaxscale.inference.fair_queue import FairQueue
from jaxscale.inference.request import Overloaded, Request


_LONGEST_RETRY = 60  # seconds

BY_ORDER = operator.attrgetter("order")
"""Sorts sequences by priority, arrival and index."""


class Speed:
    """Recent prompt throughput, in tokens per second."""

    def __init__(self) -> None:
        self._rate = 0.0
        self._last: float | None = None

    def count(self, tokens: int, now: float) -> None:
        """Record the prompt tokens of a step."""
        if self._last is not None and tokens and now > self._last:
            rate = tokens / (now - self._last)
            self._rate = rate if not self._rate else 0.9 * self._rate + 0.1 * rate
        self._last = now

    def retry_after(self, tokens: int) -> int:
        """Estimated seconds until this many tokens are computed, at least 1."""
        seconds = math.ceil(tokens / self._rate) if self._rate else 1
        return min(max(seconds, 1), _LONGEST_RETRY)


class WaitingQueue:
    """Sequences that wait for pages and a row.

    Preempted sequences, and those whose request was admitted before, precede new ones
    of their priority, by arrival.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.speed = Speed()
        """Throughput of the queue."""
        self._config = config
        self._new = FairQueue[Sequence]()
        self._returning: list[Sequence] = []
        self.num_tokens = 0
        """Prompt tokens of new sequences."""

    def __len__(self) -> int:
        return len(self._new) + len(self._returning)

    @property
    def num_new(self) -> int:
        """Number of sequences not admitted before."""
        return len(self._new)

    def check(self, request: Request) -> None:
        """Raise `Overloaded` if the queue has no room for a request."""
        config, waiting, tokens = self._config, self.num_new, self.num_tokens
        full = waiting + 1 > config.max_waiting
        long = tokens + len(request.prompt) > config.max_waiting_tokens
        # An empty queue takes anything, or the largest request would never run.
        if waiting and (full or long):
            raise Overloaded(
                f"{waiting} requests with {tokens} tokens wait, at most "
                f"{config.max_waiting} with {config.max_waiting_tokens} may",
                self.speed.retry_after(tokens),
            )

    def join(self, c: Sequence) -> None:
        """Add a new sequence."""
        self._new.push(c, priority=c.request.priority, client=c.request.client)
        self.num_tokens += len(c.request.prompt)

    def come_back(self, c: Sequence) -> None:
        """Add a sequence that was admitted before."""
        bisect.insort(self._returning, c, key=BY_ORDER)

    def peek(self) -> Sequence | None:
        """The next sequence, None if the queue is empty."""
        new = self._new.peek()
        back = self._returning[0] if self._returning else None
        if new is None or (back is not None and back.order[0] <= new.order[0]):
            return back
        return new

    def leave(self, c: Sequence) -> None:
        """Remove a sequence, at any position."""
        if c in self._returning:
            self._returning.remove(c)
            return
        self._new.remove(c, priority=c.request.priority, client=c.request.client)
        self.num_tokens -= len(c.request.prompt)

    def charge(self, served: Iterable[tuple[Sequence, int]]) -> None:
        """Count the tokens served to the clients of sequences, while others wait."""
        if not self._new:
            return
        tokens: dict[tuple[int, str], int] = {}
        for c, count in served:
            key = c.request.priority, c.request.client
            tokens[key] = tokens.get(key, 0) + count
        for (priority, client), count in tokens.items():
            self._new.charge(count, priority=priority, client=client)
