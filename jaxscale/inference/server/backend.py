"""The interface of engines and models that the server uses."""

import dataclasses
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

from jaxscale.inference.chat import ChatTemplate
from jaxscale.inference.engine.async_engine import AsyncEngine
from jaxscale.inference.engine.engine import Engine
from jaxscale.inference.engine.make import Progress, freeze_gc_heap
from jaxscale.inference.engine.scheduling.scheduler_config import SchedulerConfig
from jaxscale.inference.engine.scheduling.scheduler_output import Counts, SchedulerEvent
from jaxscale.inference.engine.timeline import Timeline
from jaxscale.inference.output import Output
from jaxscale.inference.reasoning import TAIL, ReasoningFormat
from jaxscale.inference.request import Request
from jaxscale.inference.text_bound import TextBound
from jaxscale.inference.tools import ToolFormat
from jaxscale.models.tokenizer import Tokenizer
from jaxscale.observability.trace_events import Event


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
    """How busy an engine is."""

    waiting: int = 0
    """Sequences that wait for pages or a slot."""
    waiting_tokens: int = 0
    """Prompt tokens of new requests that wait."""
    running: int = 0
    """Sequences that hold pages."""
    pages_held: int = 0
    """Pages in use."""
    pages: int = 1
    """All pages."""
    counts: Counts = dataclasses.field(default_factory=Counts)
    """What has happened since the start."""
    programs: tuple[int, int] = (0, 0)
    """Programs that are compiled, and all that there will be."""
    scores_prompts: bool = True
    """Whether prompts can have log-probabilities by now."""

    @property
    def kv_usage(self) -> float:
        """Share of the pages in use, 0 to 1."""
        return self.pages_held / self.pages


@runtime_checkable
class Backend(Protocol):
    """An engine, as the server sees it; all of it is called on the event loop."""

    @property
    def config(self) -> SchedulerConfig:
        """Sizes."""
        ...

    @property
    def error(self) -> BaseException | None:
        """Why it is dead; None while it lives."""
        ...

    def generate(self, request: Request) -> AsyncGenerator[Output]:
        """The request's outputs; closing the iterator aborts it.

        Its deadline is by `time.monotonic`.
        """
        ...

    def load(self) -> Load:
        """How busy it is."""
        ...

    def observe(
        self, on_event: Callable[[SchedulerEvent], None], on_tick: Callable[[], None]
    ) -> None:
        """Have events, and the ends of ticks, reported on any thread."""
        ...

    def recorded(self) -> "AbstractContextManager[Recording]":
        """Record the steps of the engine in this block, which may begin and end on
        different threads.
        """
        ...

    def drain(self) -> None:
        """Refuse what comes from now on; what is here goes on."""
        ...

    def close(self) -> None:
        """End what is still here; blocks."""
        ...


@runtime_checkable
class Recording(Protocol):
    """What a `Timeline` tells in the end."""

    def shares(self) -> object:
        """Who took how much of the time, as a text."""
        ...

    def events(self) -> Iterable[Event]:
        """The events of a trace."""
        ...


class EngineBackend:
    """An `Engine` as the server sees it."""

    def __init__(self, engine: Engine) -> None:
        """Wrap an engine that was started; `close` ends it."""
        self.engine, self._async = engine, AsyncEngine(engine)

    @property
    def config(self) -> SchedulerConfig:
        """Sizes."""
        return self.engine.scheduler.config

    def freeze_gc_heap(self) -> None:
        """See `jaxscale.inference.engine.make.freeze_gc_heap`."""
        freeze_gc_heap(self.engine)

    @property
    def error(self) -> BaseException | None:
        """Why it is dead; None while it lives."""
        return self.engine.error

    def generate(self, request: Request) -> AsyncGenerator[Output]:
        """The request's outputs; closing the iterator aborts it."""
        return self._async.generate(request)

    def load(self) -> Load:
        """How busy it is, as of a moment ago."""
        scheduler = self.engine.scheduler
        return Load(
            waiting=scheduler.num_waiting,
            waiting_tokens=scheduler.waiting_tokens,
            running=scheduler.num_running,
            pages_held=scheduler.pool.num_held,
            pages=scheduler.pool.num_pages,
            counts=dataclasses.replace(scheduler.counts),
            programs=self.engine.runner.table.num_compiled,
            scores_prompts=self.engine.scores_prompts,
        )

    def observe(
        self, on_event: Callable[[SchedulerEvent], None], on_tick: Callable[[], None]
    ) -> None:
        """Have events and the ends of ticks reported, on the engine's thread."""
        self.engine.observers.append(on_event)
        self.engine.after_step.append(on_tick)

    def recorded(self) -> AbstractContextManager[Timeline]:
        """Record the steps of the engine in this block."""
        return self.engine.recorded()

    def drain(self) -> None:
        """Refuse what comes from now on; what is here goes on."""
        self.engine.drain()

    def close(self) -> None:
        """End what is still here; blocks."""
        self.engine.close(timeout=0)
        if self.engine.compiler is not None:
            self.engine.compiler.close()


class Loading:
    """A function that loads a model, and how far it is.

    Example:
        >>> load = Loading(lambda progress: progress(1, 5, False))
        >>> load()
        >>> load.state
        {'compiled': 1, 'programs': 5, 'weights': 'loading'}
    """

    def __init__(self, load: Callable[[Progress], Any]) -> None:
        """Nothing has happened.

        Args:
            load: Loads it, and tells its argument how far it is.
        """
        self._load = load
        self.state: dict[str, Any] = {}
        """What ``/ready`` says of it."""
        self.on_change: Callable[[dict[str, Any]], None] = lambda state: None
        """Told of changes, on any thread."""
        self.on_texts: Callable[[dict[str, Any]], None] = lambda fields: None
        """Told the fields of the `TextModel` besides its backend, before that is made;
        on any thread."""

    def __call__(self) -> Any:
        """The model."""
        return self._load(self._tell)

    def _tell(self, compiled: int, programs: int, read: bool) -> None:
        weights = "loaded" if read else "loading"
        self.state = {"compiled": compiled, "programs": programs, "weights": weights}
        self.on_change(self.state)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextModel:
    """A decoder that is served."""

    name: str
    """Model name in requests."""
    backend: Backend
    """Its engine."""
    tokenizer: Tokenizer
    """Tokenizes prompts."""
    chat: ChatTemplate | None = None
    """The chat template; None where the model has none."""
    aliases: Sequence[str] = ()
    """Other model names that requests may use."""
    adapters: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Directories of its adapters, by their model name in requests."""
    parent: str | None = None
    """Name of the base model if this is an adapter, otherwise None."""
    tool_format: ToolFormat | None = None
    """Format of its tool calls; None where that is not known."""
    reasoning_format: ReasoningFormat | None = None
    """Format of its reasoning; None leaves that in the text."""
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Defaults of `SamplingParams` for what a request leaves out."""
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))
    """When it was loaded, in seconds since 1970."""
    _texts: dict[int, str] = dataclasses.field(default_factory=dict, repr=False)

    def named(self, name: str | None) -> "TextModel":
        """The model that a request names, which may be an adapter."""
        if name not in self.adapters:
            return self
        return dataclasses.replace(self, name=name, parent=self.name)

    @property
    def lora(self) -> str | None:
        """The adapter that a request names."""
        return None if self.parent is None else self.name

    @property
    def longest(self) -> int:
        """Maximum number of tokens of a prompt and its completion."""
        return self.backend.config.longest

    def bound(self, gone: threading.Event | None = None) -> TextBound:
        """What says that a text is too long, before all of it is tokenized.

        Args:
            gone: Set once nobody waits for the answer.
        """
        left = {} if gone is None else {"left": gone.is_set}
        most = self.longest
        return TextBound(tokenizer=self.tokenizer, most=most, **left)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a prompt, after the BOS token."""
        tokenizer = self.tokenizer
        return tokenizer.encode(text, add_bos=add_special_tokens and tokenizer.adds_bos)

    def prompt_end(self, prompt: Sequence[int]) -> str:
        """The text of the last tokens of a prompt, which the template has written."""
        return self.tokenizer.decode(prompt[-TAIL:])

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token, which may be part of a character."""
        known = token < self.tokenizer.vocab_size
        return self.tokenizer.token_bytes(token) if known else b""

    def token_text(self, token: int) -> str:
        """The text of one token; tables are rounded up to tokens that have none."""
        found = self._texts.get(token)
        if found is None:
            known = token < self.tokenizer.vocab_size
            found = self.tokenizer.decode([token]) if known else ""
            self._texts[token] = found
        return found
