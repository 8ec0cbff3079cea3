"""The loop of the inference engine: one thread that owns the scheduler and the device.

In each step it processes client commands, asks the scheduler for a plan, dispatches it,
and reads the results of the previous plan: the device has the next plan when one is
done, and detokenization overlaps with its computation. Where nobody waits, a plan is
made just before the device needs it, for those who come meanwhile.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import queue
import threading
import time
from collections import abc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from jaxscale.inference.engine.output_processor import OutputProcessor, Sink
from jaxscale.inference.engine.pace import Pace
from jaxscale.inference.engine.runner import Runner
from jaxscale.inference.engine.sample_inputs import (
    SampleInputs,
    stops_late,
    token_masks,
)
from jaxscale.inference.engine.scheduling.scheduler import Scheduler
from jaxscale.inference.engine.scheduling.scheduler_output import (
    Drawn,
    SchedulerEvent,
    SchedulerOutput,
)
from jaxscale.inference.engine.scheduling.sequence import Sequence, SequenceStatus
from jaxscale.inference.engine.timeline import Timeline
from jaxscale.inference.grammar import GrammarCompiler, Matcher
from jaxscale.inference.request import (
    EngineDead,
    InvalidRequest,
    Overloaded,
    Request,
)
from jaxscale.inference.text import TextDecoder, ends_by_text
from jaxscale.inference.token_rules import TokenRules


@dataclasses.dataclass(slots=True)
class _Flight:
    """A dispatched plan; None are results that it does not have, or that were read."""

    plan: SchedulerOutput
    prefill: Any
    scores: Any
    decode: Any
    begun: float
    """When the device began with it, at the earliest."""

    @property
    def ready(self) -> bool:
        """Whether all results are there."""
        outs = (self.prefill, self.scores, self.decode)
        return all(out is None or out.is_ready() for out in outs)

    @property
    def steps(self) -> int:
        """Of decoding."""
        return 1 if self.plan.decode is None else self.plan.decode.steps

    @property
    def kind(self) -> tuple[int, ...]:
        """Plans of a kind take the device about as long."""
        tokens, decode = self.plan.prefill_tokens.bit_length(), self.plan.decode
        if decode is None:
            return (tokens,)
        full = bool(decode.full)
        sizes = decode.bucket, decode.steps, decode.drafts
        return tokens, *sizes, full, decode.mixed


class Engine:
    """Runs requests; its methods may be called from any thread.

    Example:
        >>> from flax import nnx
        >>> from jaxscale.inference.engine.scheduling import scheduler_config
        >>> from jaxscale.models.families.llama import llama_tiny
        >>> from jaxscale.models import Decoder
        >>> from jaxscale.inference import SamplingParams
        >>> config = scheduler_config.SchedulerConfig(
        ...     num_pages=8, vocab_size=256, max_len=64, page_size=16, num_slots=2,
        ...     prefill_tokens=16, split=16, prefill_requests=2, steps=1,
        ... )
        >>> runner = Runner(Decoder(llama_tiny(), rngs=nnx.Rngs(0)), config)
        >>> runner.compile()
        >>> with Engine(runner, Scheduler(config)) as engine:
        ...     outputs = queue.SimpleQueue()
        ...     params = SamplingParams(max_tokens=1)
        ...     engine.submit(Request(prompt=[1, 2], params=params), outputs.put)
        ...     [output] = outputs.get()
        >>> output.finish, len(output.tokens)
        ('length', 1)
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        *,
        tokenizer: TextDecoder | None = None,
        compiler: GrammarCompiler | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Assemble the parts; `start` starts it.

        Args:
            runner: A compiled runner, with the config of the scheduler.
            scheduler: A scheduler without requests.
            tokenizer: For detokenization; without one outputs have tokens only, and
                requests with stop strings are refused.
            compiler: For guided requests; without one they are refused.
            clock: Function that returns seconds, for deadlines and events.
        """
        self.runner, self.scheduler = runner, scheduler
        self.tokenizer, self.compiler = tokenizer, compiler
        self.clock = clock
        self.error: BaseException | None = None
        """Why the engine is dead."""
        self.observers: list[Callable[[SchedulerEvent], None]] = []
        """Called with every event of the scheduler, on the engine's thread."""
        self.after_tick: list[Callable[[], None]] = []
        """Called after outputs were delivered, on the engine's thread."""
        self.after_step: list[Callable[[], None]] = []
        """Called after each step that had a plan, on the engine's thread."""
        self.at_end: list[Callable[[BaseException | None], None]] = []
        """Called once when the engine has stopped, with the error if it failed."""
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._flying: collections.deque[_Flight] = collections.deque()
        self._processors: dict[str, OutputProcessor] = {}
        self._changed: dict[str, OutputProcessor] = {}
        self._counted: dict[Sequence, int] = {}
        self._uncounted = list(range(runner.config.num_slots))
        self._closing = False
        self._pace = Pace()
        self._phase: Callable[[str], None] = _unrecorded
        self._lock = threading.Lock()
        self._thread = threading.Thread(
            target=self._run, name="jaxscale-engine", daemon=True
        )

    # For clients.

    def start(self) -> "Engine":
        """Start to serve."""
        self._thread.start()
        return self

    def submit(self, request: Request, sink: Sink) -> None:
        """Submit a request.

        Args:
            request: The request; its `arrival` is set to the current time.
            sink: Receiver of its outputs.

        Raises:
            InvalidRequest: it cannot be served.
            Overloaded: the waiting queue is full.
            Draining: the engine is shutting down.
            EngineDead: the engine has failed.
        """
        self.admit(request, sink).result()

    def admit(
        self,
        request: Request,
        sink: Sink,
        matcher: Matcher | None = None,
        *,
        text: bool = True,
    ) -> concurrent.futures.Future[None]:
        """As `submit`, without waiting for admission to the queue.

        Args:
            request: As for `submit`.
            sink: As for `submit`.
            matcher: The compiled guide; None compiles it here.
            text: False leaves outputs without text, for a sink that makes it by a
                `TextStream`. Where text ends the request, they have it anyway.

        Raises:
            InvalidRequest: the request is guided, and there is no compiler or it
                refuses the guide.
        """
        guide = request.params.guided
        if guide is not None and matcher is None:
            if self.compiler is None:
                raise InvalidRequest(
                    f"guided {guide.kind!r} is not supported by this engine; give it a "
                    "GrammarCompiler"
                )
            matcher = self.compiler.compile(guide, request.client)
        admitted: concurrent.futures.Future[None] = concurrent.futures.Future()

        def command() -> None:
            if not admitted.set_running_or_notify_cancel():
                return
            try:
                self._admit(request, sink, matcher, text=text)
            except Exception as error:
                admitted.set_exception(error)
            else:
                admitted.set_result(None)

        self._send(command, admitted)
        return admitted

    def enter(
        self, request: Request, sink: Sink, *, text: bool = True
    ) -> concurrent.futures.Future[None]:
        """As `admit`, with the guide compiled on another thread."""
        guide = request.params.guided
        if guide is None or self.compiler is None:
            return self.admit(request, sink, text=text)
        entered: concurrent.futures.Future[None] = concurrent.futures.Future()

        def compiled(made: concurrent.futures.Future[Matcher]) -> None:
            if not entered.set_running_or_notify_cancel():
                return
            try:
                admitted = self.admit(request, sink, made.result(), text=text)
            except Exception as error:
                entered.set_exception(error)
                return
            admitted.add_done_callback(told)

        def told(admitted: concurrent.futures.Future[None]) -> None:
            if (error := admitted.exception()) is not None:
                entered.set_exception(error)
            else:
                entered.set_result(None)

        self.compiler.submit(guide, request.client).add_done_callback(compiled)
        return entered

    @property
    def scores_prompts(self) -> bool:
        """Whether prompts can have log-probabilities by now."""
        return self.runner.table.scores_prompts

    def abort(self, request_id: str, sink: Sink | None = None) -> None:
        """Abort a request in any state; nothing happens if it has ended.

        Args:
            request_id: Id of the request.
            sink: Abort only if this is its sink; otherwise the id belongs to another
                request.
        """

        def command() -> None:
            processor = self._processors.get(request_id)
            if processor is not None and sink in (None, processor.sink):
                self.scheduler.abort(request_id, now=self.clock())

        with contextlib.suppress(EngineDead):
            self._send(command)

    def drain(self) -> None:
        """Refuse new requests; accepted ones continue."""
        with contextlib.suppress(EngineDead):
            self._send(self.scheduler.drain)

    def close(self, timeout: float | None = None) -> None:
        """Finish accepted requests for `timeout` seconds, then abort the rest."""
        self.drain()

        def command() -> None:
            self._closing = True

        def give_up() -> None:
            for request_id in list(self._processors):
                self.scheduler.abort(request_id, now=self.clock())

        with contextlib.suppress(EngineDead):
            self._send(command)
        if self._thread.ident is None:
            self._die(None)
            return
        if self.error is not None:
            # Its thread may wait for devices that never respond.
            self._thread.join(1.0)
            return
        self._thread.join(timeout)
        if self._thread.is_alive():
            with contextlib.suppress(EngineDead):
                self._send(give_up)
            while self._thread.is_alive() and self.error is None:
                self._thread.join(1.0)

    def fail(self, error: BaseException) -> None:
        """Stop at once, even if the engine's thread is waiting for something."""
        self._die(error)
        self._commands.put(lambda: None)  # wakes the thread

    def __enter__(self) -> "Engine":
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(timeout=0 if kind is not None else None)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return self.scheduler.idle and not self._flying

    @contextlib.contextmanager
    def recorded(self) -> Iterator[Timeline]:
        """Record what host and device do in this block; on any thread.

        Yields:
            The timeline, whose results are there after the block.
        """
        timeline = Timeline()
        self._phase, self.runner.timeline = timeline.phase, timeline
        try:
            yield timeline
        finally:
            self._phase, self.runner.timeline = _unrecorded, None
            timeline.stop()

    # The thread.

    def _send(
        self,
        command: Callable[[], None],
        waiting: concurrent.futures.Future[None] | None = None,
    ) -> None:
        with self._lock:
            if self.error is None:
                self._commands.put(command)
                return
        dead = self._dead()
        if waiting is None:
            raise dead
        waiting.set_exception(dead)

    def _dead(self) -> EngineDead:
        dead = EngineDead(f"the engine has stopped: {self.error!r}")
        dead.__cause__ = self.error
        return dead

    def _run(self) -> None:
        try:
            while self.error is None and not (self._closing and self.idle):
                self.step(wait=self.idle)
                self._linger()
        except BaseException as error:
            self._die(error)
        else:
            self._die(None)

    def _die(self, error: BaseException | None) -> None:
        """End everything, by the first error, or None if the engine was closed."""
        with self._lock:
            if self.error is not None:
                return
            self.error = error or RuntimeError("it was closed")
        processors, self._processors = self._processors, {}
        for processor in processors.values():
            with contextlib.suppress(Exception):
                processor.sink(self._dead())
        with contextlib.suppress(queue.Empty):
            while True:
                # Callers that wait for an answer get the error.
                self._commands.get_nowait()()
        for call in self.after_tick:
            with contextlib.suppress(Exception):
                call()
        for end in self.at_end:
            with contextlib.suppress(Exception):
                end(error)

    def _obey(self, *, wait: bool) -> None:
        """Execute commands; wait for one if there is nothing else to do."""
        with contextlib.suppress(queue.Empty):
            if wait and not self._closing:
                self._phase("idle")
                first = self._commands.get()
                self._phase("commands")
                first()
            while True:
                self._commands.get_nowait()()

    def step(self, *, wait: bool = False) -> None:
        """Run one step, for callers that run the loop instead of `start`.

        Args:
            wait: Wait for a command first.
        """
        self._phase("commands")
        self._obey(wait=wait)
        self._phase("schedule")
        begun, table = self.clock(), self.runner.table
        soon = self._pace.device_bound and self._pace.expects(begun)
        plain = not table.whole
        if plain or self.scheduler.max_running < self.runner.config.num_slots:
            self.scheduler.max_running = table.max_rows
        plan = self.scheduler.schedule(
            now=begun, soon=soon, plain=plain, mixes=table.mixes
        )
        self._take_events()
        if plan is not None:
            self._phase("prepare")
            self._flying.append(self._dispatch(plan))
            self._pace.planned(self._flying[-1].begun - begun)
        while len(self._flying) > (plan is not None):
            self._read()
        if plan is None and not self.scheduler.idle and not self._flying:
            self._phase("idle")
            time.sleep(0.001)  # until a deadline, or pages
        self._give_out()
        if self._flying:
            self._read_prompts(self._flying[0])
            self._give_out()
        for call in self.after_step if plan is not None else ():
            call()

    def _linger(self) -> None:
        """Execute commands until just before the device needs another plan, which then
        has those who have come meanwhile.
        """
        if len(self._flying) != 1 or self.scheduler.num_waiting or self._closing:
            return
        flight = self._flying[0]
        until = flight.begun + self._pace.spare(flight.kind)
        self._phase("linger")
        with contextlib.suppress(queue.Empty):
            while self.error is None and (left := until - self.clock()) > 0:
                self._commands.get(timeout=left)()

    def _admit(
        self,
        request: Request,
        sink: Sink,
        matcher: Matcher | None,
        *,
        text: bool = True,
    ) -> None:
        if self.error is not None:
            raise self._dead()
        params = request.params
        if params.stop and self.tokenizer is None:
            raise InvalidRequest(
                f"stop {params.stop} needs the text, but the engine has no tokenizer; "
                "give it one, or use stop_token_ids"
            )
        if params.prompt_logprobs is not None and not self.scores_prompts:
            raise Overloaded("prompt log-probabilities are being compiled", 10)
        if request.id in self._processors:
            # An aborted request may not have been notified yet.
            self._take_events()
            self._give_out()
        now = self.clock()
        self._pace.arrived(now)
        request = dataclasses.replace(request, arrival=now)
        rules = TokenRules.of(params, self.scheduler.config.vocab_size)
        tokenizer = self.tokenizer if text or ends_by_text(params) else None
        processor = OutputProcessor(request, sink, tokenizer, matcher, rules)
        self.scheduler.add(request, now=now)
        self._processors[request.id] = processor

    # To the device.

    def _dispatch(self, plan: SchedulerOutput) -> _Flight:
        runner = self.runner
        runner.update(plan.source, plan.changes)
        for row, c in plan.placed:
            self._count(c)
            runner.remember(row, c.tokens)
        prefill = scores = decode = None
        steps = plan.decode
        if steps is not None and steps.mixed:
            prefill, decode = runner.mixed(plan.prefill, steps.bucket)
            return _Flight(plan, prefill, None, decode, self.clock())
        if plan.prefill:
            prefill, scores = runner.prefill(plan.prefill, self._targets(plan))
        if steps is not None and steps.full:
            logits = runner.forward(bucket=steps.bucket, adapted=steps.adapted)
            rows = list(steps.rows)
            for row in steps.replayed:
                rows[row] = None
            decode = runner.sample(logits, self._inputs(rows))
        elif steps is not None:
            decode = runner.decode(
                bucket=steps.bucket,
                steps=steps.steps,
                drafts=steps.drafts,
                adapted=steps.adapted,
            )
        return _Flight(plan, prefill, scores, decode, self.clock())

    def _count(self, c: Sequence) -> None:
        """Have the device count the tokens of a sequence with penalties."""
        if not c.request.params.counts_tokens:
            return
        if c not in self._counted:
            self._counted[c] = self._uncounted.pop()
        prompt = len(c.request.prompt)
        self.runner.count(self._counted[c], c.tokens, prompt)

    def _targets(self, plan: SchedulerOutput) -> list[list[int]] | None:
        """The next token of each token of each chunk, for prompt log-probabilities."""
        targets = []
        for chunk in plan.prefill:
            prompt, count = chunk.sequence.request.prompt, len(chunk.tokens)
            wanted = self._scored(chunk.sequence) is not None
            following = prompt[chunk.start + 1 : chunk.end + 1] if wanted else ()
            targets.append([*following, *[-1] * (count - len(following))])
        scored = any(self._scored(chunk.sequence) for chunk in plan.prefill)
        return targets if scored else None

    def _processor(self, c: Sequence) -> OutputProcessor | None:
        """That of a sequence, and not of another request with the same id."""
        found = self._processors.get(c.request.id)
        return found if found is not None and found.request is c.request else None

    def _scored(self, c: Sequence) -> OutputProcessor | None:
        """That of a sequence whose prompt log-probabilities are still missing."""
        found = self._processor(c)
        return found if found is not None and found.wants_scores(c) else None

    def _inputs(self, rows: abc.Sequence[Sequence | None]) -> SampleInputs:
        """The sampler's inputs for each row."""
        if any(c and (c.request.params.masked or stops_late(c)) for c in rows):
            # The mask of a row depends on pending tokens. The device computes the
            # logits in the meantime.
            while self._flying:
                self._read()
        live = [
            (i, c) for i, c in enumerate(rows) if c and c.state is SequenceStatus.DECODE
        ]
        waiting = [
            (i, c, processor) for i, c in live if (processor := self._processor(c))
        ]
        vocab = self.runner.model_config.vocab_size
        return SampleInputs(
            counted=[None if c is None else self._counted.get(c) for c in rows],
            want_top=any(c.request.params.logprobs for _, c in live),
            masks=token_masks(waiting, len(rows), vocab),
            biases={
                i: c.request.params.logit_bias
                for i, c in live
                if c.request.params.logit_bias
            },
        )

    # From the device.

    def _read(self) -> None:
        """Wait for the oldest dispatched plan, and process its results."""
        flight = self._flying.popleft()
        self._phase("wait")
        waited = not flight.ready
        prefill, scores, decode = (
            None if out is None else np.asarray(out)
            for out in (flight.prefill, flight.scores, flight.decode)
        )
        now = self.clock()
        seconds = now - flight.begun
        self._pace.ended(flight.kind, flight.steps, seconds, waited=waited)
        if waited and self._flying:
            self._flying[0].begun = now
        self._collect(flight.plan, prefill, scores, decode)

    def _read_prompts(self, flight: _Flight) -> None:
        """Wait for the first tokens of prompts only: their plan goes on decoding."""
        decode = flight.plan.decode
        if flight.prefill is None or decode is None or decode.mixed:
            return
        self._phase("wait")
        prefill = np.asarray(flight.prefill)
        scores = None if flight.scores is None else np.asarray(flight.scores)
        flight.prefill = flight.scores = None
        self._collect(flight.plan, prefill, scores, None)

    def _collect(
        self,
        plan: SchedulerOutput,
        prefill: np.ndarray | None,
        scores: np.ndarray | None,
        decode: np.ndarray | None,
    ) -> None:
        """Process results of a plan, all or the first part of them."""
        self._phase("collect")
        if scores is not None:
            self._take_scores(plan, scores)
        top = None if decode is None else decode[:, :, 0, 3:]
        results = {"prefill": _drawn(prefill), "decode": _drawn(decode)}
        changed, processors = self._changed, self._processors
        for progress in self.scheduler.update(plan, **results, now=self.clock()):
            c = progress.sequence
            processor = processors.get(c.request.id)
            if processor is not None and processor.request is c.request:
                verdict = processor.take(progress, top)
                changed[c.request.id] = processor
                if verdict is not None:
                    self.scheduler.finish(c, verdict, now=self.clock())
        self._take_events()

    def _take_scores(self, plan: SchedulerOutput, scores: np.ndarray) -> None:
        """Log-probabilities of prompts."""
        at = 0
        for chunk in plan.prefill:
            rows = scores[at : (at := at + len(chunk.tokens))]
            processor = self._scored(chunk.sequence)
            if processor is not None:
                processor.take_scores(chunk, rows)
                self._changed[processor.request.id] = processor

    def _take_events(self) -> None:
        for event in self.scheduler.take_events():
            c = event.sequence
            processor = self._processor(c)
            if event.kind == "admitted" and processor is not None and c.index == 0:
                processor.cached_tokens = event.cached_tokens
            if event.kind in ("preempted", "ended") and c in self._counted:
                self._uncounted.append(self._counted.pop(c))
            if event.kind == "ended" and processor is not None:
                processor.end(c, event.finish)
                self._changed[processor.request.id] = processor
            for observe in self.observers:
                observe(event)

    def _give_out(self) -> None:
        """Send the new outputs to the clients."""
        self._phase("answer")
        changed, self._changed = self._changed, {}
        for processor in changed.values():
            outputs = processor.outputs()
            if not processor.remaining:
                self._processors.pop(processor.request.id, None)
            try:
                processor.sink(outputs)
            except Exception:  # a failing client must not stop the engine
                self.scheduler.abort(processor.request.id, now=self.clock())
        if changed:
            for call in self.after_tick:
                call()


def _unrecorded(phase: str) -> None:
    """Where no timeline is."""


def _drawn(values: np.ndarray | None) -> Drawn | None:
    """The results in the form that the scheduler takes."""
    if values is None:
        return None
    logprobs = np.ascontiguousarray(values[..., 2]).view(np.float32)
    if values.shape[0] == values.shape[2] == 1:
        tokens, flags = values[0, :, 0, :2].T.tolist()
        one = logprobs[0, :, 0].tolist()
        return Drawn(tokens=tokens, flags=flags, logprobs=one, flat=True)
    return Drawn(
        tokens=values[..., 0].tolist(),
        flags=values[..., 1].tolist(),
        logprobs=logprobs.tolist(),
    )
