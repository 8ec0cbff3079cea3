"""The plan of a tick, from scheduler to device side, and the results that come back.

Legend: S slots, B bucket, R tokens a step (1 + drafts), G tokens of a page.
"""

import dataclasses
from collections import abc
from collections.abc import Collection
from typing import Literal

from jaxscale.inference.engine.sequence import Sequence
from jaxscale.inference.request import FinishReason


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Neighboring tokens of one prompt, to be computed in this tick.

    Their keys and values are appended first, then each attends to what lies in the
    cache of its request up to itself.
    """

    sequence: Sequence
    tokens: abc.Sequence[int]
    """Token ids."""
    start: int
    """Position of the first; all before it are in the cache."""
    pages: abc.Sequence[int]
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


def _rows(pages: abc.Sequence[int], start: int, end: int, page_size: int) -> list[int]:
    first = start // page_size
    rows = []
    for page in pages[first : -(-end // page_size)]:
        rows += range(page * page_size, (page + 1) * page_size)
    return rows[start - first * page_size : end - first * page_size]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Decode:
    """A few steps of all rows."""

    rows: abc.Sequence[Sequence | None]
    """[B] whose row each is when the steps begin; None for rows that are not live.
    Results are matched by it, whatever has become of the rows meanwhile."""
    bucket: int
    """B, rows to decode: a power of two."""
    steps: int
    """Tokens that a row draws at most, apart from accepted drafts."""
    drafts: int = 0
    """Tokens that the device guesses for each row and step: R - 1."""
    full: abc.Sequence[int] = ()
    """Rows that need the full sampler. With any, there is one step without drafts: the
    logits of all rows, then the full sampler."""
    replayed: Collection[int] = ()
    """Rows that were preempted and are decoded again: what they draw is known, and must
    not be counted twice. With any, there is one step without drafts."""

    @property
    def adapted(self) -> bool:
        """True where some row uses an adapter."""
        return any(c is not None and c.adapter for c in self.rows)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOutput:
    """The work of a tick, in the order of the fields.

    `source` comes before `changes`, which name rows as they are after that;
    then the prefill, then the decode, which sees the tokens that the prefill has drawn.
    """

    tick: int
    """Number of the plan, from 1."""
    source: abc.Sequence[int] | None = None
    """[S] the row that each row is taken from; None where all stay."""
    changes: abc.Sequence[tuple[int, int, int]] = ()
    """(row, column, value), no cell twice; columns are those of
    `batch_rows.Column`. Any number: more than fit into one array are applied in
    several."""
    placed: abc.Sequence[tuple[int, Sequence]] = ()
    """Rows that belong to another sequence than before: what the device keeps by
    row beside the slots, such as counts of tokens, is to be made anew."""
    prefill: abc.Sequence[Chunk] = ()
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

    tokens: abc.Sequence[abc.Sequence[abc.Sequence[int]]]
    """Token ids; -1 where a row has none."""
    flags: abc.Sequence[abc.Sequence[abc.Sequence[int]]]
    """Bits of `batch_rows.OutFlag`."""
    logprobs: abc.Sequence[abc.Sequence[abc.Sequence[float]]] | None = None
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
    """Gain of a sequence from the results of a plan."""

    sequence: Sequence
    tokens: abc.Sequence[int]
    """New tokens, the one that ended it included."""
    logprobs: abc.Sequence[float]
    """One for each of `tokens`, or none at all."""
    row: int
    """Row in `SchedulerOutput.decode`, or place in `SchedulerOutput.prefill`."""
    decoded: bool
    """True: `row` is one of `SchedulerOutput.decode`."""
    finish: FinishReason | None
    """Reason for its end with the last of them."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerEvent:
    """Something that happened to a sequence, for its client and the metrics."""

    kind: Literal["queued", "admitted", "preempted", "ended"]
    sequence: Sequence
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
    """Preemptions; the sequences go on later."""
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
