"""The requests in the engine: sequences, deadlines, and how they end."""

import dataclasses
import heapq
import random
from collections.abc import Iterator

from jaxscale.inference.engine.scheduling.scheduler_config import SchedulerConfig
from jaxscale.inference.engine.scheduling.scheduler_output import Counts
from jaxscale.inference.engine.scheduling.sequence import Sequence, SequenceStatus
from jaxscale.inference.output import FinishReason
from jaxscale.inference.request import Request


_GOLDEN = 0x9E3779B97F4A7C15  # spreads the seeds of the n continuations
_OUTCOMES = {"aborted": "aborted", "timeout": "timeout", "error": "failed"}
_WORST = ("finished", "aborted", "timeout", "failed")


@dataclasses.dataclass(eq=False, slots=True)
class _Entry:
    """A request in the engine."""

    sequences: list[Sequence]
    number: int
    remaining: int
    # Sequences that wait until the first one has computed the prompt.
    held: list[Sequence]
    outcome: str = "finished"


class RequestTable:
    """Requests from their arrival to the end of their last sequence."""

    def __init__(
        self, config: SchedulerConfig, counts: Counts, seed: int | None
    ) -> None:
        self._config, self._counts = config, counts
        self._random = random.Random(seed)
        self._requests: dict[str, _Entry] = {}
        self._deadlines: list[tuple[float, int, str]] = []
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def sequences(self) -> Iterator[Sequence]:
        """All active requests, in the order of arrival."""
        for entry in self._requests.values():
            for c in entry.sequences:
                if c.state is not SequenceStatus.ENDED:
                    yield c

    def of(self, request_id: str) -> list[Sequence]:
        """The sequences of a request; empty if there is no such request."""
        entry = self._requests.get(request_id)
        return entry.sequences if entry else []

    def open(self, request: Request) -> list[Sequence]:
        """The sequences of a new request; all but the first are held."""
        self._arrivals += 1
        params = request.params
        seed = self._random.getrandbits(64) if params.seed is None else params.seed
        stops = set(params.stop_token_ids)
        stops.update(() if params.ignore_eos else self._config.eos_ids)
        plain = not (params.needs_sampler or (params.min_tokens and stops))
        adapters = (None, *self._config.adapters)
        sequences = [
            Sequence(
                request=request,
                adapter=adapters.index(request.lora),
                index=index,
                order=(-request.priority, self._arrivals, index),
                seed=(seed + index * _GOLDEN) % 2**64,
                limit=request.limit(self._config.longest),
                stops=frozenset(stops),
                plain=plain,
                tokens=list(request.prompt),
            )
            for index in range(params.n)
        ]
        self._requests[request.id] = _Entry(
            sequences, self._arrivals, params.n, sequences[1:]
        )
        if request.deadline is not None:
            deadline = (request.deadline, self._arrivals, request.id)
            heapq.heappush(self._deadlines, deadline)
        return sequences

    def is_held(self, c: Sequence) -> bool:
        """True while it waits for the first sequence of its request."""
        return c in self._requests[c.request.id].held

    def let_go(self, c: Sequence) -> list[Sequence]:
        """Release the sequences that its request held, and return them."""
        entry = self._requests[c.request.id]
        held, entry.held = entry.held, []
        return held

    def close(self, c: Sequence, reason: FinishReason) -> None:
        """Count the end of a sequence, and of its request after the last one.

        The outcome of a request is that of its worst sequence.
        """
        entry = self._requests[c.request.id]
        outcome = _OUTCOMES.get(reason, "finished")
        entry.outcome = max(entry.outcome, outcome, key=_WORST.index)
        entry.remaining -= 1
        if not entry.remaining:
            del self._requests[c.request.id]
            counts = self._counts
            setattr(counts, entry.outcome, getattr(counts, entry.outcome) + 1)

    def take_late(self, now: float) -> list[str]:
        """The ids of requests whose deadline has passed since the last call."""
        late = []
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline = heapq.heappop(self._deadlines)
            if self._is_here(deadline):
                late.append(deadline[2])
        if len(self._deadlines) > 2 * len(self._requests) + 64:
            self._deadlines = [d for d in self._deadlines if self._is_here(d)]
            heapq.heapify(self._deadlines)
        return late

    def _is_here(self, deadline: tuple[float, int, str]) -> bool:
        """An id may be reused once its request has ended."""
        entry = self._requests.get(deadline[2])
        return entry is not None and entry.number == deadline[1]
