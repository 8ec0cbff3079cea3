"""The plan of a tick, from scheduler to device side, and the results that come back.

Legend: S slots, B bucket, R tokens a step (1 + drafts), G tokens of a page.
"""

import dataclasses
import enum
from collections.abc import Collection, Sequence
from typing import Literal

from jaxscale.inference.request import FinishReason, Request


class State(enum.Enum):
    """Stage of a continuation."""

    WAITING = enum.auto()
    PREFILL = enum.auto()
    DECODE = enum.auto()
    ENDED = enum.auto()


@dataclasses.dataclass(eq=False, slots=True, kw_only=True)
class Continuation:
    """One of the n continuations of a request, while it is in the engine.

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
    """Tokens of prompt and continuation at which it ends."""
    stops: frozenset[int]
    """Tokens that end it."""
    tokens: list[int]
    """Prompt and continuation, as far as the host knows."""
    state: State = State.WAITING
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
        """Tokens of the continuation, as far as the host knows."""
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
        return self.state is State.DECODE and self.kv + self.due < self.limit - 1

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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Neighboring tokens of one prompt, to be computed in this tick.

    Their keys and values are appended first, then each attends to what lies in the
    cache of its request up to itself.
    """

    continuation: Continuation
    tokens: Sequence[int]
    """Token ids."""
    start: int
    """Position of the first; all before it are in the cache."""
    pages: Sequence[int]
    """Pages of the positions 0 to `end` - 1."""
    slot: int | None
    """Row for a token that is drawn after the last one: the device puts it there and
    sets the row live, unless the token ends it. None where none is drawn."""

    @property
    def sampled(self) -> bool:
        """True where a token is drawn after the last one."""
        return self.slot is not None

    @property
    def end(self) -> int:
        """Position after the last token: keys that the last token attends to."""
        return self.start + len(self.tokens)

    def write_rows(self, page_size: int) -> list[int]:
        """Rows of the pool, page * G + offset, that the tokens are written to."""
        return _rows(self.pages, self.start, self.end, page_size)

    def key_rows(self, page_size: int) -> list[int]:
        """Rows of the pool of the positions 0 to `end` - 1."""
        return _rows(self.pages, 0, self.end, page_size)


def _rows(pages: Sequence[int], start: int, end: int, page_size: int) -> list[int]:
    first = start // page_size
    rows = []
    for page in pages[first : -(-end // page_size)]:
        rows += range(page * page_size, (page + 1) * page_size)
    return rows[start - first * page_size : end - first * page_size]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Decode:
    """A few steps of all rows."""

    rows: Sequence[Continuation | None]
    """[B] whose row each is when the steps begin; None for rows that are not live.
    Results are matched by it, whatever has become of the rows meanwhile."""
    bucket: int
    """B, rows to decode: a power of two."""
    steps: int
    """Tokens that a row draws at most, apart from accepted drafts."""
    drafts: int = 0
    """Tokens that the device guesses for each row and step: R - 1."""
    full: Sequence[int] = ()
    """Rows that need the full sampler. With any, there is one step without drafts: the
    logits of all rows, then the full sampler."""
    replayed: Collection[int] = ()
    """Rows that were preempted and are decoded again: what they draw is known, and must
    not be counted twice. With any, there is one step without drafts."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The work of a tick, in the order of the fields.

    Moves and `source` come before `changes`, which name rows as they are after that;
    then the prefill, then the decode, which sees the tokens that the prefill has drawn.
    """

    tick: int
    """Number of the plan, from 1."""
    moves: Sequence[tuple[int, int]] = ()
    """Pages whose keys and values move, (from, to); only with contiguous caches."""
    source: Sequence[int] | None = None
    """[S] the row that each row is taken from; None where all stay."""
    changes: Sequence[tuple[int, int, int]] = ()
    """(row, column, value), no cell twice; columns are those of `slots.Column`. Any
    number: more than fit into one array are applied in several."""
    placed: Sequence[tuple[int, Continuation]] = ()
    """Rows that belong to another continuation than before: what the device keeps by
    row beside the slots, such as counts of tokens, is to be made anew."""
    prefill: Sequence[Chunk] = ()
    """Chunks to compute together; none where no prompt waits."""
    decode: Decode | None = None
    """None where no row is live."""

    @property
    def prefill_tokens(self) -> int:
        """Tokens of all chunks."""
        return sum(len(chunk.tokens) for chunk in self.prefill)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """The results of a dispatch: [n, B, R] of a decode, [1, chunks, 1] of a prefill.

    Example:
        >>> flags = [[[1], [0]], [[0], [0]]]
        >>> drawn = Drawn(tokens=[[[7], [5]], [[-1], [6]]], flags=flags)
        >>> drawn.of_row(0), drawn.of_row(1)
        (([7], [1], []), ([5, 6], [0, 0], []))
    """

    tokens: Sequence[Sequence[Sequence[int]]]
    """Token ids; -1 where a row has none."""
    flags: Sequence[Sequence[Sequence[int]]]
    """Bits of `slots.OutFlag`."""
    logprobs: Sequence[Sequence[Sequence[float]]] | None = None
    """Log-probabilities in nats; None where nobody wants them."""

    def of_row(self, row: int) -> tuple[list[int], list[int], list[float]]:
        """Tokens, flags and log-probabilities of a row, places without a token gone."""
        values = self.logprobs
        steps = [step[row] for step in self.tokens]
        if len(steps) == 1 and len(steps[0]) == 1 and steps[0][0] >= 0:  # as a rule
            found = [] if values is None else list(values[0][row])
            return list(steps[0]), list(self.flags[0][row]), found
        places = [
            (i, r) for i, step in enumerate(steps) for r in range(len(step))
            if step[r] >= 0
        ]  # fmt: skip
        tokens = [steps[i][r] for i, r in places]
        flags = [self.flags[i][row][r] for i, r in places]
        if values is None:
            return tokens, flags, []
        return tokens, flags, [values[i][row][r] for i, r in places]


@dataclasses.dataclass(slots=True, kw_only=True)
class Progress:
    """Gain of a continuation from the results of a plan."""

    continuation: Continuation
    tokens: Sequence[int]
    """New tokens, the one that ended it included."""
    logprobs: Sequence[float]
    """One for each of `tokens`, or none at all."""
    row: int
    """Row in `Plan.decode`, or place in `Plan.prefill`."""
    decoded: bool
    """True: `row` is one of `Plan.decode`."""
    finish: FinishReason | None
    """Reason for its end with the last of them."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened to a continuation, for its client and the metrics."""

    kind: Literal["queued", "admitted", "preempted", "ended"]
    continuation: Continuation
    time: float
    """Time of the clock that the scheduler is given."""
    cached_tokens: int = 0
    """Tokens found in the cache, of ``"admitted"``."""
    finish: FinishReason | None = None
    """Reason of ``"ended"``."""


@dataclasses.dataclass(slots=True)
class Counts:
    """Requests since the start: those received are in one of the other numbers, or are
    still here.
    """

    received: int = 0
    finished: int = 0
    """Ended by a stop token or string, or by their length."""
    aborted: int = 0
    """Number that their clients gave up."""
    rejected: int = 0
    """Refused at once: not possible, too many, or the engine is draining."""
    timeout: int = 0
    """Past the deadline that their clients gave them."""
    failed: int = 0
    """Their logits were not finite, or their guide allowed no token."""
    preempted: int = 0
    """Preemptions; the continuations go on later."""
    prompt_tokens: int = 0
    """Tokens that prefill computed."""
    cached_tokens: int = 0
    """Tokens of prompts that were found in the cache."""
    drawn_tokens: int = 0
    """Tokens drawn."""
    drafted_tokens: int = 0
    """Drafts: tokens that were guessed before they were drawn."""
    accepted_tokens: int = 0
    """Drafts that were right, and saved a step."""
    compactions: int = 0
    """Times that rows moved."""

    def add_drafts(self, drawn: Drawn, row: int) -> None:
        """Count the drafts of a row."""
        for tokens, flags in zip(drawn.tokens, drawn.flags, strict=True):
            # Behind the first place there are flags where there was a draft.
            self.drafted_tokens += sum(flag != 0 for flag in flags[row][1:])
            self.accepted_tokens += sum(token >= 0 for token in tokens[row][1:])
