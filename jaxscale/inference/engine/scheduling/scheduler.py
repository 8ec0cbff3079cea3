"""The scheduler: one plan per engine step, from the requests and the device's results.

A request joins the decode batch in the step in which its prompt ends, and leaves it in
the step after its last token. The work of a step grows with the changes and the live
rows, not with the waiting requests.
"""

import bisect
from collections import abc
from collections.abc import Iterator

from jaxscale.inference.engine.scheduling.batch_rows import (
    BatchRows,
    OutFlag,
    RowUpdates,
)
from jaxscale.inference.engine.scheduling.block_pool import BlockPool
from jaxscale.inference.engine.scheduling.page_forecast import (
    AnswerLengths,
    PageForecast,
    forecast,
    growth,
)
from jaxscale.inference.engine.scheduling.page_tables import PageTables
from jaxscale.inference.engine.scheduling.request_table import RequestTable
from jaxscale.inference.engine.scheduling.scheduler_config import SchedulerConfig
from jaxscale.inference.engine.scheduling.scheduler_output import (
    Chunk,
    Counts,
    Decode,
    Drawn,
    Mixes,
    Progress,
    SchedulerEvent,
    SchedulerOutput,
    whole_blocks,
)
from jaxscale.inference.engine.scheduling.scheduling_policy import (
    choose_chunks,
    choose_yielding,
)
from jaxscale.inference.engine.scheduling.sequence import Sequence, SequenceStatus
from jaxscale.inference.engine.scheduling.waiting_queue import BY_ORDER, WaitingQueue
from jaxscale.inference.output import FinishReason
from jaxscale.inference.request import Draining, InvalidRequest, Overloaded, Request


class Scheduler:
    """The scheduling policy of the engine; one thread owns it.

    In a loop: `add`, `abort` and `finish` for client commands, `schedule` for the next
    plan, `update` with results, however late, and `take_events`.

    Example:
        >>> config = SchedulerConfig(num_pages=8, vocab_size=100, max_len=64)
        >>> scheduler = Scheduler(config)
        >>> scheduler.add(Request(prompt=[1, 2, 3], id="a"), now=0.0)
        >>> plan = scheduler.schedule(now=0.0)
        >>> [chunk.tokens for chunk in plan.prefill], plan.decode.bucket
        ([[1, 2, 3]], 2)
        >>> drawn = Drawn(tokens=[[[7]]], flags=[[[0]]])
        >>> [p.tokens for p in scheduler.update(plan, prefill=drawn, now=0.1)]
        [[7]]
        >>> scheduler.abort("a", now=0.2)
        True
        >>> scheduler.idle, scheduler.counts.aborted
        (True, 1)
    """

    def __init__(self, config: SchedulerConfig, *, seed: int | None = None) -> None:
        self.config = config
        self.max_running = config.num_slots
        """Number of sequences that may hold pages."""
        self.counts = Counts()
        self._requests = RequestTable(config, self.counts, seed)
        self._waiting = WaitingQueue(config)
        self._num_running = 0
        self._prefilling: list[Sequence] = []
        self._slots = BatchRows[Sequence](config.batches, self._moved)
        self._tables = PageTables(config)
        self._lengths = AnswerLengths()
        self._refused: tuple[Sequence, int] | None = None  # with `_changes` of then
        self._again = 0  # the tick in which that one is looked at again
        self._changes = 0  # of who holds pages
        self._updates = RowUpdates(self._slots)
        self._events: list[SchedulerEvent] = []
        self._sampled: list[Sequence] = []  # rows of this tick, by the full sampler
        self._tick = 0
        self._draining = False

    @property
    def idle(self) -> bool:
        """True if there are no requests."""
        return not self._requests

    @property
    def num_waiting(self) -> int:
        """Number of sequences that wait for pages or a row, also preempted ones."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Number of sequences that hold pages."""
        return self._num_running

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens of new requests in the waiting queue."""
        return self._waiting.num_tokens

    @property
    def pool(self) -> BlockPool:
        """The page pool, for inspection."""
        return self._tables.pool

    def sequences(self) -> Iterator[Sequence]:
        """All active requests, in the order of arrival."""
        return self._requests.sequences()

    # What clients want.

    def add(self, request: Request, *, now: float) -> None:
        """Add a request to the waiting queue.

        Args:
            request: The request; it is checked here against the model and the cache.
            now: The time in seconds, by any monotonic clock.

        Raises:
            InvalidRequest: it can never run, or its id is in use.
            Overloaded: the waiting queue is full.
            Draining: `drain` was called.
        """
        self.counts.received += 1
        try:
            self._check(request)
        except (InvalidRequest, Overloaded, Draining):
            self.counts.rejected += 1
            raise
        sequences = self._requests.open(request)
        self._waiting.join(sequences[0])
        for c in sequences:
            self._events.append(SchedulerEvent(kind="queued", sequence=c, time=now))
        params = request.params
        if params.max_tokens == 0 and params.prompt_logprobs is None:
            for c in sequences:  # there is nothing to compute
                self._end(c, "length", now)

    def abort(
        self, request_id: str, *, now: float, reason: FinishReason = "aborted"
    ) -> bool:
        """End all sequences of a request, in any state.

        Returns:
            True if there was such an active request.
        """
        sequences = self._requests.of(request_id)
        for c in sequences:
            self._end(c, reason, now)
        return bool(sequences)

    def finish(self, c: Sequence, reason: FinishReason, *, now: float) -> None:
        """End one sequence, for example because its text has a stop string.

        Nothing happens if it has ended already.
        """
        self._end(c, reason, now)

    def drain(self) -> None:
        """Refuse new requests; accepted ones continue."""
        self._draining = True

    def take_events(self) -> list[SchedulerEvent]:
        """Return the events since the last call, in order."""
        events, self._events = self._events, []
        return events

    def _check(self, request: Request) -> None:
        config = self.config
        if self._draining:
            raise Draining("the engine is shutting down; send the request elsewhere")
        request.check(vocab_size=config.vocab_size, max_len=config.longest)
        if request.id in self._requests:
            raise InvalidRequest(f"id {request.id!r} is in use; choose another")
        if request.lora not in (None, *config.adapters):
            raise InvalidRequest(
                f"lora {request.lora!r} is no adapter of the model, which has "
                f"{', '.join(config.adapters) or 'none'}"
            )
        self._waiting.check(request)

    def _end(self, c: Sequence, reason: FinishReason, now: float) -> None:
        if c.state is SequenceStatus.ENDED:
            return
        if c.index == 0:
            self._let_others_go(c)
        if c.state is not SequenceStatus.WAITING:
            self._release(c, keep=reason != "error")
        elif not self._requests.is_held(c):
            self._waiting.leave(c)
        c.state, c.finish = SequenceStatus.ENDED, reason
        if c.admitted:
            self._lengths.ended(c, itself=reason in ("stop", "length"))
        event = SchedulerEvent(kind="ended", sequence=c, time=now, finish=reason)
        self._events.append(event)
        self._requests.close(c, reason)

    # What the device is to do.

    def schedule(
        self,
        *,
        now: float,
        soon: bool = False,
        plain: bool = False,
        mixes: Mixes | None = None,
    ) -> SchedulerOutput | None:
        """Return the next plan; None if there is nothing to do.

        A plan must be dispatched: its pages and rows are already assigned.

        Args:
            now: The time in seconds.
            soon: Decode a single step, as if a request waited: one may come.
            plain: Also without draft tokens.
            mixes: Which mixed batches there are programs for; None is for none.
        """
        for request_id in self._requests.take_late(now):
            self.abort(request_id, now=now, reason="timeout")
        self._tick += 1
        live, ahead = self._grow(now, soon, plain)
        ready = self._admit(now)
        chosen = choose_chunks(
            self._prefilling,
            self.config,
            decoding=len(live),
            turn=self._tick % 2 == 0,
        )
        if not (live or ready or chosen):
            return None
        placed, source = self._place(ready, chosen)
        prefill = [self._chunk(c, end) for c, end in chosen]
        changes = self._updates.take(placed, self._tick)
        tokens = sum(len(chunk.tokens) for chunk in prefill)
        bucket, keys = self._slots.bucket, sum(whole_blocks(c.end) for c in prefill)
        mixed = bool(mixes and prefill and mixes(tokens, keys, bucket))
        mixed = mixed and not any(chunk.sequence.needs_own_prefill for chunk in prefill)
        decode = self._decode(*ahead, placed, prefill if mixed else ())
        self.counts.prompt_tokens += tokens
        self.counts.compactions += source is not None
        self._waiting.speed.count(tokens, now)
        return SchedulerOutput(
            tick=self._tick,
            source=source,
            changes=changes,
            placed=[(c.slot, c) for c in placed if c.slot is not None],
            prefill=prefill,
            decode=decode,
        )

    def _grow(
        self, now: float, soon: bool, plain: bool
    ) -> tuple[list[Sequence], tuple[int, int]]:
        """Allocate the pages that the next dispatch may write, for each live row.

        Returns:
            The rows that continue, and for how many steps and draft tokens they have
            pages.
        """
        config = self.config
        live = [c for c in self._slots.owners() if c.goes_on]
        self._sampled = [c for c in live if not c.plain and c.needs_sampler]
        busy = self.num_waiting or self._prefilling or self._updates.replaying
        one_step = soon or busy or self._sampled
        bucket = self._slots.bucket
        steps = 1 if one_step or plain else config.steps_of(bucket)
        drafts = 0 if plain else config.drafts_of(bucket)
        needs = self._tables.missing(live, steps * (1 + drafts))
        if sum(need for _, need in needs) > self.pool.num_available:
            steps, drafts = 1, 0
            needs = self._tables.missing(live, 1)
        for c, need in sorted(needs, key=lambda item: item[0].order):
            while need > self.pool.num_available and c.state is SequenceStatus.DECODE:
                self._preempt(max(self._preemptible(), key=BY_ORDER), now)
            if c.state is SequenceStatus.DECODE:
                c.pages += self.pool.allocate(need)
                self._updates.grow(c)
        return [c for c in live if c.state is SequenceStatus.DECODE], (steps, drafts)

    def _preemptible(self) -> list[Sequence]:
        return [*self._prefilling, *self._slots.owners()]

    def _preempt(self, c: Sequence, now: float) -> None:
        """Preempt a sequence: release its pages, to be recomputed later."""
        self._release(c, keep=True)
        c.state = SequenceStatus.WAITING
        self._waiting.come_back(c)
        self.counts.preempted += 1
        self._events.append(SchedulerEvent(kind="preempted", sequence=c, time=now))

    def _admit(self, now: float) -> list[Sequence]:
        """Admit sequences from the waiting queue, while there are enough pages.

        A new one waits while those that run are expected to need them: a sequence that
        is preempted is computed again, its answer token by token.

        Returns:
            The sequences whose prompts need no prefill.
        """
        ready: list[Sequence] = []
        expected, level = None, 0
        while (c := self._waiting.peek()) is not None:
            if self._refused == (c, self._changes) and self._tick < self._again:
                break  # who runs takes what was expected
            room = choose_yielding(
                c,
                self._preemptible(),
                self._tables,
                num_running=self._num_running,
                num_slots=self.max_running,
            )
            if room is None:
                break
            found, yielding = room
            if expected is None or level != c.order[0]:
                level = c.order[0]
                expected = self._forecast(level)
            held, page_size = self._tables.size(c), self.config.page_size
            added = self._tables.adds(c, found)
            size = added, *growth(c, held, self._lengths, page_size)
            if not expected.fits(*size):
                # It may fit before anybody ends: the others' ends come nearer.
                self._refused = c, self._changes
                self._again = self._tick + page_size
                break
            expected.add(*size)
            for other in yielding:
                self._preempt(other, now)
            self._waiting.leave(c)
            self._tables.admit(c, found)
            c.state = SequenceStatus.PREFILL
            self._num_running += 1
            self._changes += 1
            self._count_admission(c, now)
            if c.kv >= c.target:
                ready.append(c)
            else:
                bisect.insort(self._prefilling, c, key=BY_ORDER)
            if c.index == 0 and not self._tables.sharable(c):
                self._let_others_go(c)
        return ready

    def _forecast(self, level: int) -> PageForecast:
        return forecast(self._preemptible(), self._lengths, self.pool, level)

    def _count_admission(self, c: Sequence, now: float) -> None:
        self._events.append(
            SchedulerEvent(kind="admitted", sequence=c, time=now, cached_tokens=c.kv)
        )
        if not c.admitted:
            c.admitted = True
            self.counts.cached_tokens += c.kv
            self._waiting.charge([(c, len(c.tokens) - c.kv)])

    def _let_others_go(self, first: Sequence) -> None:
        """Queue the other sequences of a request, after its first one."""
        for c in self._requests.let_go(first):
            if c.state is SequenceStatus.WAITING:
                self._waiting.come_back(c)

    def _release(self, c: Sequence, *, keep: bool) -> None:
        if c in self._prefilling:
            self._prefilling.remove(c)
        if c.slot is not None:
            self._slots.free(c.slot)
            c.slot = None
        self._tables.release(c, keep=keep)
        self._num_running -= 1
        self._changes += 1

    def _place(
        self, ready: list[Sequence], chosen: list[tuple[Sequence, int]]
    ) -> tuple[list[Sequence], list[int] | None]:
        """Compact the batch, and assign rows to sequences whose prompt ends now."""
        done = [c for c, end in chosen if end == c.target] + ready
        placed = [c for c in done if c.limit > len(c.tokens)]
        more = sum(c.slot is None for c in placed)
        source = self._slots.resize(self._slots.num_used + more)
        for c in done:
            c.prompt_done = True
            if c in self._prefilling:
                self._prefilling.remove(c)
        for c in placed:
            if c.slot is None:
                c.slot = self._slots.take(c)
            c.state, c.placed, c.known = (
                SequenceStatus.DECODE,
                self._tick,
                len(c.tokens),
            )
        return placed, source

    def _moved(self, c: Sequence, slot: int) -> None:
        c.slot = slot

    def _chunk(self, c: Sequence, end: int) -> Chunk:
        draws = c.placed == self._tick and end == len(c.tokens)
        chunk = Chunk(
            sequence=c,
            tokens=c.tokens[c.kv : end],
            start=c.kv,
            pages=c.pages[: self.pool.pages_for(end)],
            slot=c.slot if draws else None,
        )
        c.kv = end
        # Readers of the pages are planned later, so the pages will have been written.
        self._tables.name(c)
        if c.index == 0 and c.prompt_done:
            self._let_others_go(c)
        return chunk

    def _decode(
        self,
        steps: int,
        drafts: int,
        placed: list[Sequence],
        beside: abc.Sequence[Chunk],
    ) -> Decode | None:
        """The decode steps; one, together with the chunks `beside` if that can be."""
        bucket = self._slots.bucket
        rows = self._slots.rows[:bucket]
        if not any(c is not None and c.goes_on for c in rows):
            return None
        replaying = self._updates.replaying
        replayed = {c.slot for c in replaying if c.slot is not None}
        sampled = {
            c.slot
            for c in (*self._sampled, *placed)
            if c.slot is not None and c.goes_on and c.needs_sampler
        }
        full = sorted(sampled - replayed)
        most = self.config.drafts_of(bucket)
        drafts = 0 if full or replayed else min(drafts, most)
        if drafts < most:
            steps = 1
        mixed = bool(beside and steps == 1 and not (drafts or full))
        if mixed:
            first = {chunk.slot for chunk in beside}
            others = [None if i in first else c for i, c in enumerate(rows)]
            live = [c for c in others if c is not None and c.goes_on]
            mixed = bool(live) and not any(c.adapter for c in live)
            rows = others if mixed else rows
        for c in rows:
            if c is not None:
                c.pending += steps * (1 + drafts)
                c.due += steps
        return Decode(
            rows=rows,
            bucket=bucket,
            steps=steps,
            drafts=drafts,
            full=full,
            mixed=mixed,
            replayed=replayed,
            adapted=bool(self.config.adapters) and any(c and c.adapter for c in rows),
        )

    # What came back.

    def update(
        self,
        plan: SchedulerOutput,
        *,
        prefill: Drawn | None = None,
        decode: Drawn | None = None,
        now: float,
    ) -> list[Progress]:
        """Process the results of a plan, after those of earlier plans.

        Results of sequences that have ended or were preempted are dropped.

        Args:
            plan: The dispatched plan.
            prefill: Results of its prefill; None if there are none, or not yet.
            decode: Results of its decode, likewise.
            now: The time in seconds.

        Returns:
            The progress of each sequence with new tokens.
        """
        news = []
        for row, chunk in enumerate(plan.prefill):
            c = chunk.sequence
            if prefill is None:
                break
            if (
                c.state is SequenceStatus.DECODE
                and c.placed == plan.tick
                and chunk.sampled
            ):
                news.append(self._advance(c, row, prefill, now, decoded=False))
            elif c.state is SequenceStatus.PREFILL and chunk.end == c.limit:
                # Only the prompt was requested.
                self._end(c, "length", now)
        if decode is not None and plan.decode is not None:
            news += self._decoded(plan.tick, plan.decode, decode, now)
        self._waiting.charge((p.sequence, len(p.tokens)) for p in news)
        return news

    def _decoded(
        self, tick: int, plan: Decode, drawn: Drawn, now: float
    ) -> list[Progress]:
        news = []
        steps, drafts, replayed = plan.steps, plan.drafts, plan.replayed
        flat, size, live = drawn.flat, self.config.page_size, SequenceStatus.DECODE
        for row, c in enumerate(plan.rows):
            if c is None or c.state is not live or c.placed > tick:
                continue
            c.pending -= steps * (1 + drafts)
            c.due -= steps
            if flat and not drawn.flags[row] and row not in replayed:
                token, tokens = drawn.tokens[row], c.tokens
                stays = token >= 0 and token not in c.stops
                if stays and len(tokens) + 1 < c.limit:
                    # As nearly all rows of nearly all steps.
                    tokens.append(token)
                    c.kv += 1
                    self.counts.drawn_tokens += 1
                    if c.kv >= (c.named + 1) * size:
                        self._tables.name(c)
                    values = drawn.logprobs
                    if values is None or c.request.params.logprobs is None:
                        logprobs: abc.Sequence[float] = ()
                    else:
                        logprobs = (values[row],)
                    news.append(Progress(c, (token,), logprobs, row, True, None))
                    continue
            if drafts:
                self.counts.add_drafts(drawn, row)
            if row in replayed:
                c.kv += 1
                self._tables.name(c)
            else:
                news.append(self._advance(c, row, drawn, now, decoded=True))
        return news

    def _advance(
        self, c: Sequence, row: int, drawn: Drawn, now: float, *, decoded: bool
    ) -> Progress:
        tokens, flags, logprobs = drawn.of_row(row)
        # A live row without a token is one that the device does not have.
        finish: FinishReason | None = None if tokens else "error"
        kept = 0
        for token, flag in zip(tokens, flags, strict=True):
            if not flag and len(c.tokens) + 1 < c.limit and token not in c.stops:
                c.tokens.append(token)  # as nearly all
                kept += 1
                continue
            if flag & OutFlag.NOT_FINITE:
                finish = "error"
                break
            c.tokens.append(token)
            kept += 1
            finish = _reason(c, token, flag)
            if finish is not None:
                break
        c.kv += kept * decoded
        self.counts.drawn_tokens += kept
        if c.kv >= (c.named + 1) * self.config.page_size:
            self._tables.name(c)
        if finish is not None:
            self._end(c, finish, now)
        if kept < len(tokens):
            tokens, logprobs = tokens[:kept], logprobs[:kept]
        return Progress(
            sequence=c,
            tokens=tokens,
            logprobs=logprobs,
            row=row,
            decoded=decoded,
            finish=finish,
        )


def _reason(c: Sequence, token: int, flag: int) -> FinishReason | None:
    """The finish reason, if the newest token ends the sequence."""
    length = len(c.tokens)
    if token in c.stops and c.num_drawn > c.request.params.min_tokens:
        return "stop"
    if length >= c.limit:
        return "length"
    if flag and flag & OutFlag.ENDED:
        return "stop" if flag & OutFlag.STOPPED else "length"
    return None
