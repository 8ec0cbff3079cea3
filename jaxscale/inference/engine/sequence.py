"""A sequence: one of the n continuations of a request, while it is in the engine."""

import dataclasses
import enum

from jaxscale.inference.request import FinishReason, Request


class SequenceStatus(enum.Enum):
    """Stage of a sequence."""

    WAITING = enum.auto()
    PREFILL = enum.auto()
    DECODE = enum.auto()
    ENDED = enum.auto()


@dataclasses.dataclass(eq=False, slots=True, kw_only=True)
class Sequence:
    """One of the n sequences of a request, while it is in the engine.

    The scheduler alone changes it; others may read it on the engine's thread.
    """

    request: Request
    index: int
    """Number among the n."""
    order: tuple[int, int, int]
    """Sort key of turns: negated priority, number of its arrival, index."""
    seed: int
    """64 bits that its draws depend on, besides the position."""
    limit: int
    """Tokens of prompt and completion at which it ends."""
    stops: frozenset[int]
    """Tokens that end it."""
    tokens: list[int]
    """Prompt and completion, as far as the host knows."""
    adapter: int = 0
    """Place of its adapter in `SchedulerConfig.adapters`, from 1 on; 0 for none."""
    state: SequenceStatus = SequenceStatus.WAITING
    slot: int | None = None
    """Row on the device, from the end of the prompt on."""
    pages: list[int] = dataclasses.field(default_factory=list)
    """Pages, in the order of the tokens."""
    kv: int = 0
    """Tokens in the cache, as far as the host knows."""
    pending: int = 0
    """Tokens that dispatches whose results are not back yet may add to them."""
    due: int = 0
    """Tokens that those add at least, unless it ends."""
    placed: int = 0
    """The tick in which it went live; results of earlier plans are not meant."""
    known: int = 0
    """Number of its tokens when it went live. Those behind the prompt are decoded
    again, whatever is drawn, so that their keys and values are the same bits."""
    names: list[bytes] = dataclasses.field(default_factory=list)
    """Names of its full pages, as far as they were needed."""
    named: int = 0
    """Number of pages that were given their names."""
    told: int = 0
    """Number of pages that are in the table on the device."""
    admitted: bool = False
    """True once it has held pages."""
    prompt_done: bool = False
    """True once its whole prompt was planned."""
    finish: FinishReason | None = None
    """Reason for its end."""

    @property
    def num_drawn(self) -> int:
        """Tokens of the sequence, as far as the host knows."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def needs_sampler(self) -> bool:
        """True where its next token needs the full sampler."""
        params = self.request.params
        return params.needs_sampler or (
            params.min_tokens > 0
            and self.num_drawn < params.min_tokens
            and bool(self.stops)
        )

    @property
    def goes_on(self) -> bool:
        """True where its row may have tokens to draw after those on their way."""
        return (
            self.state is SequenceStatus.DECODE and self.kv + self.due < self.limit - 1
        )

    @property
    def target(self) -> int:
        """Tokens that prefill puts into the cache, also after a preemption.

        Prefill draws with a temperature alone. Who needs the full sampler for the first
        token leaves the last one of the prompt to the first step of decoding.
        """
        params, length = self.request.params, len(self.request.prompt)
        full = params.needs_sampler or (params.min_tokens > 0 and bool(self.stops))
        return length - (full and self.limit > length)

    @property
    def forced(self) -> int | None:
        """The token that the next step has to read; None for that which was drawn."""
        position = self.kv + self.pending
        return self.tokens[position] if position < self.known else None

    @property
    def replays(self) -> bool:
        """True where the token after the next step is known already."""
        return self.kv + self.pending < self.known - 1
