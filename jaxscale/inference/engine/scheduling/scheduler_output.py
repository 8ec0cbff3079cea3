"""The plan of an engine step, from scheduler to device, and its results.

Legend: S slots, B bucket, R tokens per step (1 + draft tokens), G tokens per page.
"""

import dataclasses
from collections import abc
from collections.abc import Callable, Collection
from typing import Any, Literal

from jaxscale.inference.engine.scheduling.sequence import Sequence
from jaxscale.inference.output import FinishReason


KEY_BLOCK = 128
"""Where attention gathers keys, those of each prompt begin at a multiple of this."""

type Mixes = Callable[[int, int, int], bool]
"""Whether one program can take so many prompt tokens, the keys that they read, and rows
to decode."""


def whole_blocks(keys: int) -> int:
    """The smallest multiple of `KEY_BLOCK` of at least this many keys."""
    return -(-keys // KEY_BLOCK) * KEY_BLOCK


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A chunk of one prompt, to be computed in this step.

    Its keys and values are appended first, then each token attends to the cached tokens
    of its request up to itself.
    """

    sequence: Sequence
    tokens: abc.Sequence[int]
    """Token ids."""
    start: int
    """Position of the first token; all before it are cached."""
    pages: abc.Sequence[int]
    """Pages of the positions 0 to `end` - 1."""
    slot: int | None
    """Row for the token sampled after the last one: the device writes it there and sets
    the row live, unless the token ends it. None if none is sampled."""

    @property
    def sampled(self) -> bool:
        """True if a token is sampled after the last one."""
        return self.slot is not None

    @property
    def end(self) -> int:
        """Position after the last token: keys that the last token attends to."""
        return self.start + len(self.tokens)

    def write_rows(self, page_size: int) -> list[int]:
        """Rows of the pool, page * G + offset, that the tokens are written to."""
        return _rows(self.pages, self.start, self.end, page_size)


def _rows(pages: abc.Sequence[int], start: int, end: int, page_size: int) -> list[int]:
    first = start // page_size
    rows = []
    for page in pages[first : -(-end // page_size)]:
        rows += range(page * page_size, (page + 1) * page_size)
    return rows[start - first * page_size : end - first * page_size]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Decode:
    """A few decode steps of all rows."""

    rows: abc.Sequence[Sequence | None]
    """[B] the owner of each row when the steps begin; None for rows that are not live.
    Results are matched by it, even if rows have changed owners since."""
    bucket: int
    """B, rows to decode."""
    steps: int
    """Maximum tokens per row, without accepted draft tokens."""
    drafts: int = 0
    """Draft tokens per row and step: R - 1."""
    full: abc.Sequence[int] = ()
    """Rows that need the full sampler. With any, there is a single step without draft
    tokens: the logits of all rows, then the full sampler."""
    mixed: bool = False
    """Computed together with the prefill of the plan: rows whose first token that
    prefill samples are left out."""
    replayed: Collection[int] = ()
    """Preempted rows that are replayed: their tokens are known, and must not be counted
    twice. With any, there is a single step without draft tokens."""
    adapted: bool = False
    """Some row uses an adapter."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOutput:
    """The work of an engine step, in the order of the fields.

    `source` comes before `changes`, which refer to the rows after the move; then the
    prefill, then the decode, which sees the tokens that the prefill has sampled unless
    it is `Decode.mixed`.
    """

    tick: int
    """Number of the plan, from 1."""
    source: abc.Sequence[int] | None = None
    """[S] the source row of each row; None if none move."""
    changes: abc.Sequence[tuple[int, int, int]] = ()
    """(row, column, value), no cell twice; columns are those of
    `batch_rows.Column`. Any number: more than fit into one array are applied in
    several."""
    placed: abc.Sequence[tuple[int, Sequence]] = ()
    """Rows with a new owner: other per-row device state, such as token counts, must be
    reset."""
    prefill: abc.Sequence[Chunk] = ()
    """Chunks to compute together; empty if no prompt waits."""
    decode: Decode | None = None
    """None if no row is live."""

    @property
    def prefill_tokens(self) -> int:
        """Tokens of all chunks."""
        return sum(len(chunk.tokens) for chunk in self.prefill)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """The results of a dispatch: [n, B, R] of a decode, [1, chunks, 1] of a prefill.

    Where a row has at most one token, as mostly, they may be flat, [B].

    Example:
        >>> flags = [[[1], [0]], [[0], [0]]]
        >>> drawn = Drawn(tokens=[[[7], [5]], [[-1], [6]]], flags=flags)
        >>> drawn.of_row(0), drawn.of_row(1)
        (([7], [1], []), ([5, 6], [0, 0], []))
        >>> Drawn(tokens=[7, -1], flags=[1, 0], flat=True).of_row(0)
        ([7], [1], [])
    """

    tokens: abc.Sequence[Any]
    """Token ids; -1 if a row has none."""
    flags: abc.Sequence[Any]
    """Bits of `batch_rows.OutFlag`."""
    logprobs: abc.Sequence[Any] | None = None
    """Log-probabilities in nats; None if not requested."""
    flat: bool = False
    """Whether they are [B]."""

    def of_row(
        self, row: int
    ) -> tuple[abc.Sequence[int], abc.Sequence[int], abc.Sequence[float]]:
        """Tokens, flags and log-probabilities of a row, without empty places."""
        values = self.logprobs
        if self.flat:
            if self.tokens[row] < 0:
                return [], [], []
            found = [] if values is None else [values[row]]
            return [self.tokens[row]], [self.flags[row]], found
        steps = [step[row] for step in self.tokens]
        places = [
            (i, r) for i, step in enumerate(steps) for r in range(len(step))
            if step[r] >= 0
        ]  # fmt: skip
        tokens = [steps[i][r] for i, r in places]
        flags = [self.flags[i][row][r] for i, r in places]
        if values is None:
            return tokens, flags, []
        return tokens, flags, [values[i][row][r] for i, r in places]


@dataclasses.dataclass(slots=True)
class Progress:
    """Progress of a sequence from the results of a plan."""

    sequence: Sequence
    tokens: abc.Sequence[int]
    """New tokens, including the one that ended it."""
    logprobs: abc.Sequence[float]
    """One for each of `tokens`, or none at all."""
    row: int
    """Row in `SchedulerOutput.decode`, or index in `SchedulerOutput.prefill`."""
    decoded: bool
    """True: `row` is one of `SchedulerOutput.decode`."""
    finish: FinishReason | None
    """Finish reason, if it ended with the last token."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerEvent:
    """An event of a sequence, for its client and the metrics."""

    kind: Literal["queued", "admitted", "preempted", "ended"]
    sequence: Sequence
    time: float
    """Time, by the scheduler's clock."""
    cached_tokens: int = 0
    """Prefix cache hit in tokens, for ``"admitted"``."""
    finish: FinishReason | None = None
    """Finish reason, for ``"ended"``."""


@dataclasses.dataclass(slots=True)
class Counts:
    """Counters of requests since the start: each received one is in another counter, or
    still active.
    """

    received: int = 0
    finished: int = 0
    """Finished by a stop token or string, or by their length."""
    aborted: int = 0
    """Aborted by their clients."""
    rejected: int = 0
    """Rejected at once: invalid, queue full, or the engine is draining."""
    timeout: int = 0
    """Past their deadline."""
    failed: int = 0
    """Failed: logits were not finite, or their guide allowed no token."""
    preempted: int = 0
    """Preemptions; the sequences continue later."""
    prompt_tokens: int = 0
    """Tokens that prefill computed."""
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    drawn_tokens: int = 0
    """Sampled tokens."""
    drafted_tokens: int = 0
    """Draft tokens proposed."""
    accepted_tokens: int = 0
    """Draft tokens accepted."""
    compactions: int = 0
    """Number of batch compactions."""

    def add_drafts(self, drawn: Drawn, row: int) -> None:
        """Count the draft tokens of a row."""
        for tokens, flags in zip(drawn.tokens, drawn.flags, strict=True):
            # After the first place there are flags where there was a draft token.
            self.drafted_tokens += sum(flag != 0 for flag in flags[row][1:])
            self.accepted_tokens += sum(token >= 0 for token in tokens[row][1:])
