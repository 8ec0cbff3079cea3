"""A sequence: one of the n completions of a request, while it is in the engine."""

import dataclasses
import enum

from jaxscale.inference.output import FinishReason
from jaxscale.inference.request import Request


class SequenceStatus(enum.Enum):
    """Stage of a sequence."""

    WAITING = enum.auto()
    PREFILL = enum.auto()
    DECODE = enum.auto()
    ENDED = enum.auto()


@dataclasses.dataclass(eq=False, slots=True, kw_only=True)
class Sequence:
    """One of the n sequences of a request, while it is in the engine.

    Only the scheduler changes it; others may read it on the engine's thread.
    """

    request: Request
    index: int
    """Index among the n."""
    order: tuple[int, int, int]
    """Sort key of the queue: negated priority, arrival number, index."""
    seed: int
    """64-bit seed of its sampling, used with the position."""
    limit: int
    """Tokens of prompt and completion at which it ends."""
    stops: frozenset[int]
    """Tokens that end it."""
    tokens: list[int]
    """Prompt and completion, as known to the host."""
    plain: bool = False
    """True if none of its tokens needs the full sampler."""
    adapter: int = 0
    """Index of its adapter in `SchedulerConfig.adapters`, from 1; 0 for none."""
    state: SequenceStatus = SequenceStatus.WAITING
    slot: int | None = None
    """Row on the device, after the end of the prompt."""
    pages: list[int] = dataclasses.field(default_factory=list)
    """Pages, in the order of the tokens."""
    kv: int = 0
    """Cached tokens, as known to the host."""
    pending: int = 0
    """Maximum tokens that pending dispatches may add."""
    due: int = 0
    """Minimum tokens that pending dispatches add, unless it ends."""
    placed: int = 0
    """The step in which it went live; results of earlier plans do not apply."""
    known: int = 0
    """Number of its tokens when it went live. Completion tokens are then decoded again,
    whatever is sampled, so that their keys and values are bitwise the same."""
    names: list[bytes] = dataclasses.field(default_factory=list)
    """Names of its full pages, as far as needed."""
    named: int = 0
    """Number of named pages."""
    told: int = 0
    """Number of pages in the device's page table."""
    admitted: bool = False
    """True once it has held pages."""
    prompt_done: bool = False
    """True once its whole prompt was planned."""
    finish: FinishReason | None = None
    """Finish reason."""

    @property
    def num_drawn(self) -> int:
        """Tokens of the sequence, as known to the host."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def needs_sampler(self) -> bool:
        """True if its next token needs the full sampler."""
        params = self.request.params
        return params.needs_sampler or (
            params.min_tokens > 0
            and self.num_drawn < params.min_tokens
            and bool(self.stops)
        )

    @property
    def needs_own_prefill(self) -> bool:
        """True if its prompt needs a program of its own: it has an adapter, or the
        log-probabilities of its prompt are asked for.
        """
        return bool(self.adapter) or self.request.params.prompt_logprobs is not None

    @property
    def goes_on(self) -> bool:
        """True if its row may have tokens to sample after the pending ones."""
        return (
            self.state is SequenceStatus.DECODE and self.kv + self.due < self.limit - 1
        )

    @property
    def target(self) -> int:
        """Tokens that prefill puts into the cache, also after a preemption.

        Prefill samples with a temperature only. If the first token needs the full
        sampler, the last prompt token is left to the first decode step.
        """
        params, length = self.request.params, len(self.request.prompt)
        full = params.needs_sampler or (params.min_tokens > 0 and bool(self.stops))
        return length - (full and self.limit > length)

    @property
    def forced(self) -> int | None:
        """The known input token of the next step; None is the sampled one."""
        position = self.kv + self.pending
        return self.tokens[position] if position < self.known else None

    @property
    def replays(self) -> bool:
        """True if the token after the next step is known already."""
        return self.kv + self.pending < self.known - 1
