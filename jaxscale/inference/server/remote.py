"""An engine whose server is another process, seen from both sides.

The engine's process sends one message per step: the tokens of all streams, what has
happened to sequences, and how busy it is. The server's process makes text, JSON and
answers of them, so that the engine's thread never waits for its turn in Python.
"""

import concurrent.futures
import contextlib
import dataclasses
import itertools
import pickle
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import Any

from jaxscale.inference.engine.async_engine import AsyncEngine
from jaxscale.inference.engine.output_processor import Sink
from jaxscale.inference.engine.scheduling import sequence
from jaxscale.inference.engine.scheduling.scheduler_config import SchedulerConfig
from jaxscale.inference.engine.scheduling.scheduler_output import SchedulerEvent
from jaxscale.inference.engine.scheduling.sequence import SequenceStatus
from jaxscale.inference.output import Output
from jaxscale.inference.request import EngineDead, Request
from jaxscale.inference.server.backend import EngineBackend, Load
from jaxscale.inference.server.channel import Channel
from jaxscale.inference.text import TextDecoder
from jaxscale.observability.trace_events import Event


_LOAD_SECONDS = 0.05  # how old a load may be that goes with a step, or is asked for

type _Part = Output | tuple[int, tuple[int, ...], int]
"""An output, or index, tokens and cached tokens of one that has no more, as most."""


@dataclasses.dataclass(slots=True)
class _News:
    """What the engine's process tells after outputs, or after a step without any."""

    outputs: list[tuple[int, list[_Part]]] = dataclasses.field(default_factory=list)
    """By the number of the request."""
    events: list[tuple[str, int, str, bool]] = dataclasses.field(default_factory=list)
    """Kind, number of the sequence, id of the request, and whether its prompt is still
    to be computed."""
    begun: list[int] = dataclasses.field(default_factory=list)
    """Sequences whose prompt is done."""
    steps: int = 0
    """Steps that have ended."""
    load: Load | None = None
    """How busy it is, now and then and when something has ended."""

    def __bool__(self) -> bool:
        return bool(self.outputs or self.events or self.begun or self.steps)


@dataclasses.dataclass
class _Entered:
    """A request in the engine."""

    id: str
    sink: Sink
    future: concurrent.futures.Future[None]


class EngineHost:
    """The side of the engine: does what the other process asks for, and tells it."""

    def __init__(self, backend: EngineBackend, channel: Channel) -> None:
        """Begin to observe an engine; `run` serves it."""
        self._backend, self._channel = backend, channel
        self._engine = engine = backend.engine
        self._news, self._told = _News(), False
        self._numbers: dict[sequence.Sequence, int] = {}
        self._prompts: dict[sequence.Sequence, int] = {}
        self._sequences = itertools.count()
        self._load_at = 0.0
        self._requests: dict[int, _Entered] = {}
        self._recording: contextlib.ExitStack = contextlib.ExitStack()
        self._timeline: Any = None
        backend.observe(self._observe, self._step)
        engine.after_tick.append(self._tell)
        engine.at_end.append(self._end)

    def run(self) -> None:
        """Serve until the other process closes the engine, or has ended."""
        try:
            while (message := self._channel.receive()) is not None:
                name, *arguments = message
                if name == "close":
                    break
                getattr(self, f"_do_{name}")(*arguments)
        finally:
            self._recording.close()
            self._backend.close()
            self._channel.send(("closed",))

    # What the other process asks for.

    def _do_enter(self, number: int, request: Request, text: bool) -> None:
        remaining = request.params.n

        def sink(outputs: list[Output] | EngineDead) -> None:
            nonlocal remaining
            if isinstance(outputs, EngineDead):
                return  # `_end` tells it once
            self._news.outputs.append((number, [_part(output) for output in outputs]))
            remaining -= sum(output.finish is not None for output in outputs)
            if not remaining:
                self._requests.pop(number, None)

        def entered(future: concurrent.futures.Future[None]) -> None:
            if future.cancelled():
                return
            if (error := future.exception()) is not None:
                self._requests.pop(number, None)
            load = None if error is None else self._backend.load()
            self._channel.send(("entered", number, sendable(error), load))

        future: concurrent.futures.Future[None] = concurrent.futures.Future()
        # Known before: its last output may come while `enter` is still here.
        known = self._requests[number] = _Entered(request.id, sink, future)
        try:
            future = known.future = self._engine.enter(request, sink, text=text)
        except Exception as error:
            future.set_exception(error)
        future.add_done_callback(entered)

    def _do_leave(self, number: int) -> None:
        if (known := self._requests.pop(number, None)) is not None:
            known.future.cancel()  # what has not begun
            self._engine.abort(known.id, known.sink)

    def _do_load(self) -> None:
        self._channel.send(("load", self._backend.load()))

    def _do_drain(self) -> None:
        self._backend.drain()

    def _do_record(self, begin: bool) -> None:
        self._recording.close()
        timeline, self._timeline = self._timeline, None
        if begin:
            self._timeline = self._recording.enter_context(self._backend.recorded())
        elif timeline is not None:
            found = str(timeline.shares()), list(timeline.events())
            self._channel.send(("recorded", *found))

    # On the engine's thread.

    def _observe(self, event: SchedulerEvent) -> None:
        c = event.sequence
        if event.kind == "admitted":
            number = self._numbers[c] = next(self._sequences)
            if c.state is SequenceStatus.PREFILL:
                self._prompts[c] = number
        elif event.kind != "queued":
            number = self._numbers.pop(c, -1)
            self._prompts.pop(c, None)
        if event.kind != "queued" and number >= 0:
            told = event.kind, number, c.request.id, c in self._prompts
            self._news.events.append(told)

    def _step(self) -> None:
        news = self._news
        news.steps += 1
        for c in [c for c in self._prompts if c.state is not SequenceStatus.PREFILL]:
            news.begun.append(self._prompts.pop(c))
        if not self._told or self._engine.idle:
            self._tell()
        self._told = False

    def _tell(self) -> None:
        """Send what is new."""
        news = self._news
        if not news:
            return
        self._told, self._news = True, _News()
        now = time.monotonic()
        ended = any(event[0] == "ended" for event in news.events)
        if ended or now - self._load_at > _LOAD_SECONDS:
            self._load_at, news.load = now, self._backend.load()
        fields = (news.outputs, news.events, news.begun, news.steps, news.load)
        self._channel.send(("news", *fields))

    def _end(self, error: BaseException | None) -> None:
        self._channel.send(("ended", repr(error or "it was closed")))


def _part(output: Output) -> _Part:
    """An output as it is sent."""
    if output.finish or output.text or output.logprobs or output.prompt_logprobs:
        return output
    return output.index, output.tokens, output.cached_tokens


def sendable(error: BaseException | None) -> BaseException | None:
    """An error that the other process can read."""
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(repr(error))


# --- The side of the server -----------------------------------------------------------


class _Stream:
    """A request that another process answers."""

    def __init__(
        self, request: Request, sink: Sink, entered: concurrent.futures.Future[None]
    ) -> None:
        self.sink, self.entered = sink, entered
        self.remaining, self._id = request.params.n, request.id

    def take(self, parts: list[_Part]) -> None:
        """Pass outputs on."""
        outputs = []
        for part in parts:
            if isinstance(part, Output):
                self.remaining -= part.finish is not None
                outputs.append(part)
                continue
            index, tokens, cached = part
            output = Output(
                request=self._id, index=index, tokens=tokens, cached_tokens=cached
            )
            outputs.append(output)
        self.sink(outputs)

    def tell(self, error: BaseException | None) -> None:
        """Say whether the request was admitted."""
        if self.entered.done() or not self.entered.set_running_or_notify_cancel():
            return
        if error is not None:
            self.entered.set_exception(error)
        else:
            self.entered.set_result(None)


class _Recording:
    """A timeline of the other process."""

    def __init__(self, shares: str = "", events: Sequence[Event] = ()) -> None:
        self._shares, self._events = shares, events

    def take(self, other: "_Recording") -> None:
        """What has come."""
        self._shares, self._events = other._shares, other._events

    def shares(self) -> str:
        """See `Timeline.shares`."""
        return self._shares

    def events(self) -> Iterator[Event]:
        """See `Timeline.events`."""
        return iter(self._events)


class RemoteBackend:
    """The engine of another process, as a server sees it."""

    def __init__(
        self,
        channel: Channel,
        config: SchedulerConfig,
        tokenizer: TextDecoder | None,
        *,
        gone: Callable[[], None] = lambda: None,
    ) -> None:
        """Begin to listen, and wait until it is known how busy the engine is.

        Args:
            channel: To an `EngineHost`.
            config: Sizes of the engine.
            tokenizer: Makes texts of tokens.
            gone: Called when the other process has ended, on any thread.
        """
        self.config, self.tokenizer = config, tokenizer
        self.error: BaseException | None = None
        """Why the engine is dead."""
        self.after_tick: list[Callable[[], None]] = []
        """Called after outputs were delivered, on the thread that listens."""
        self._channel, self._gone = channel, gone
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._streams: dict[int, _Stream] = {}
        self._by_sink: dict[Sink, int] = {}
        self._load, self._asked = Load(), 0.0
        self._on_event: Callable[[SchedulerEvent], None] = lambda event: None
        self._on_tick: Callable[[], None] = lambda: None
        self._sequences: dict[int, sequence.Sequence] = {}
        self._closed, self._known = threading.Event(), threading.Event()
        self._recorded: concurrent.futures.Future[_Recording]
        self._async = AsyncEngine(self)
        self._thread = threading.Thread(
            target=self._listen, name="engine-news", daemon=True
        )
        self._thread.start()
        self.load()
        self._known.wait()

    def generate(self, request: Request) -> AsyncGenerator[Output]:
        """The request's outputs; closing the iterator aborts it."""
        return self._async.generate(request)

    def load(self) -> Load:
        """How busy it is, as of a moment ago."""
        now = time.monotonic()
        if now - self._asked > _LOAD_SECONDS:
            self._asked = now
            self._channel.send(("load",))
        return self._load

    def observe(
        self, on_event: Callable[[SchedulerEvent], None], on_tick: Callable[[], None]
    ) -> None:
        """Have events and the ends of ticks reported."""
        self._on_event, self._on_tick = on_event, on_tick

    @contextlib.contextmanager
    def recorded(self) -> Iterator["_Recording"]:
        """Record the steps of the engine in this block."""
        recording = _Recording()
        self._channel.send(("record", True))
        try:
            yield recording
        finally:
            with self._lock:
                self._recorded = concurrent.futures.Future()
                if self.error is not None:
                    self._recorded.set_result(recording)
            self._channel.send(("record", False))
            recording.take(self._recorded.result())

    def drain(self) -> None:
        """Refuse what comes from now on; what is here goes on."""
        self._channel.send(("drain",))

    def close(self) -> None:
        """End what is still here; blocks."""
        self._channel.send(("close",))
        self._closed.wait()

    # For `AsyncEngine`.

    @property
    def scores_prompts(self) -> bool:
        """Whether prompts can have log-probabilities by now."""
        return self.load().scores_prompts

    def enter(
        self, request: Request, sink: Sink, *, text: bool = True
    ) -> concurrent.futures.Future[None]:
        """See `Engine.enter`."""
        entered: concurrent.futures.Future[None] = concurrent.futures.Future()
        number = next(self._numbers)
        with self._lock:
            if self.error is not None:
                entered.set_exception(self._dead())
                return entered
            self._streams[number] = _Stream(request, sink, entered)
            self._by_sink[sink] = number
        self._channel.send(("enter", number, request, text))
        return entered

    def abort(self, request_id: str, sink: Sink | None = None) -> None:
        """See `Engine.abort`; the request is that of the sink."""
        with self._lock:
            number = None if sink is None else self._by_sink.pop(sink, None)
            found = None if number is None else self._streams.pop(number, None)
        if found is not None:
            self._channel.send(("leave", number))

    # On the thread that listens.

    def _listen(self) -> None:
        try:
            while (message := self._channel.receive()) is not None:
                name, *arguments = message
                getattr(self, f"_on_{name}")(*arguments)
        finally:
            self._on_ended("its process has ended")
            self._closed.set()
            self._gone()

    def _on_news(
        self,
        outputs: list[tuple[int, list[_Part]]],
        events: list[tuple[str, int, str, bool]],
        begun: list[int],
        steps: int,
        load: Load | None,
    ) -> None:
        if load is not None:
            self._load = load
        for event in events:
            self._happened(*event)
        for number in begun:
            if (c := self._sequences.get(number)) is not None:
                c.state = SequenceStatus.DECODE
        streams = self._streams
        for number, parts in outputs:
            stream = streams.get(number)
            if stream is not None:
                stream.tell(None)  # outputs may overtake the word that it was admitted
                stream.take(parts)
                if not stream.remaining:
                    self._forget(number)
        if outputs:
            for call in self.after_tick:
                call()
        for _ in range(steps):
            self._on_tick()

    def _happened(self, kind: Any, number: int, request: str, prompt: bool) -> None:
        if kind == "admitted":
            state = SequenceStatus.PREFILL if prompt else SequenceStatus.DECODE
            # Of its request observers read the id.
            c = self._sequences[number] = sequence.Sequence(
                request=Request(prompt=(0,), id=request),
                index=0,
                order=(0, number, 0),
                seed=0,
                limit=0,
                stops=frozenset(),
                tokens=[],
                state=state,
            )
        else:
            c = self._sequences.pop(number)
            c.state = SequenceStatus.ENDED
        self._on_event(SchedulerEvent(kind=kind, sequence=c, time=0.0))

    def _on_entered(
        self, number: int, error: BaseException | None, load: Load | None
    ) -> None:
        if load is not None:
            self._load = load
        stream = self._streams.get(number)
        if stream is None:
            return
        if error is not None:
            self._forget(number)
        stream.tell(error)

    def _on_load(self, load: Load) -> None:
        self._load = load
        self._known.set()

    def _on_recorded(self, shares: str, events: list[Any]) -> None:
        if not self._recorded.done():  # the engine may have died
            self._recorded.set_result(_Recording(shares, events))

    def _on_loading(self, state: dict[str, Any]) -> None:
        """It is loaded; a thread that compiled for it was late to tell."""

    def _on_closed(self) -> None:
        self._closed.set()

    def _on_ended(self, why: str) -> None:
        with self._lock:
            if self.error is not None:
                return
            self.error = RuntimeError(why)
            self._known.set()
            streams, self._streams = self._streams, {}
            self._by_sink.clear()
            waiting = getattr(self, "_recorded", None)
        for stream in streams.values():
            stream.tell(self._dead())
            stream.sink(self._dead())
        for call in self.after_tick:
            call()
        if waiting is not None and not waiting.done():
            waiting.set_result(_Recording())

    def _forget(self, number: int) -> None:
        with self._lock:
            stream = self._streams.pop(number, None)
            if stream is not None:
                self._by_sink.pop(stream.sink, None)

    def _dead(self) -> EngineDead:
        return EngineDead(f"the engine has stopped: {self.error}")
