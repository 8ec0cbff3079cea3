"""The engine for asyncio, used by servers."""

import asyncio
import collections
import concurrent.futures
import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import Any, Protocol, runtime_checkable

from jaxscale.inference.engine.output_processor import Sink
from jaxscale.inference.output import Output, joined
from jaxscale.inference.request import EngineDead, Request
from jaxscale.inference.text import TextDecoder, TextStream, ends_by_text


type _News = list[Output] | EngineDead

_KEPT = 32  # pending outputs of a request, before they are merged


class _Mailbox:
    """The pending outputs of a request; used on the event loop.

    It never holds more than a few outputs: for a slow reader they are merged, one per
    sequence.
    """

    def __init__(self, request: Request) -> None:
        self._most = _KEPT + request.params.n
        self._outputs: list[Output] = []
        self._dead: EngineDead | None = None
        self._news = asyncio.Event()

    def put(self, news: _News) -> None:
        """Add an output."""
        if isinstance(news, EngineDead):
            self._dead = news
        else:
            self._outputs += news
        if len(self._outputs) > self._most:
            self._outputs = joined(self._outputs)
        self._news.set()

    async def get(self) -> list[Output]:
        """Wait for outputs, and take them.

        Raises:
            EngineDead: the engine has failed.
        """
        await self._news.wait()
        self._news.clear()
        if self._dead is not None:
            raise self._dead
        outputs, self._outputs = self._outputs, []
        return outputs if len(outputs) == 1 else joined(outputs)


@runtime_checkable
class EngineClient(Protocol):
    """What an `AsyncEngine` needs of an `Engine`, which may be in another process."""

    tokenizer: TextDecoder | None
    """For detokenization."""
    after_tick: list[Callable[[], None]]
    """Called after outputs were delivered."""

    @property
    def error(self) -> BaseException | None:
        """Why it is dead."""
        ...

    @property
    def scores_prompts(self) -> bool:
        """Whether prompts can have log-probabilities by now."""
        ...

    def enter(
        self, request: Request, sink: Sink, *, text: bool = True
    ) -> concurrent.futures.Future[None]:
        """See `Engine.enter`."""
        ...

    def abort(self, request_id: str, sink: Sink | None = None) -> None:
        """See `Engine.abort`."""
        ...


class AsyncEngine:
    """An `Engine` for asyncio: outputs of a step reach the event loop together, where
    tokens become text.

    Example:
        >>> import asyncio
        >>> async def count(engine, request):
        ...     outputs = [output async for output in engine.generate(request)]
        ...     return sum(len(output.tokens) for output in outputs)
    """

    def __init__(self, engine: EngineClient) -> None:
        """Wrap a started engine.

        Args:
            engine: The engine, which may also have other clients.
        """
        self.engine = engine
        self._ready: list[tuple[asyncio.AbstractEventLoop, _Mailbox, _News]] = []
        engine.after_tick.append(self._post)

    async def generate(self, request: Request) -> AsyncGenerator[Output]:
        """The outputs of the request, until it has ended.

        A slow reader gets longer outputs: pending ones are merged. Closing the
        iterator, or canceling the task that reads it, aborts the request.

        Raises:
            InvalidRequest, Overloaded, Draining, EngineDead: as `Engine.submit`.
        """
        loop = asyncio.get_running_loop()
        news = _Mailbox(request)
        ready = self._ready
        remaining = request.params.n

        def sink(outputs: _News) -> None:
            ready.append((loop, news, outputs))

        engine, params = self.engine, request.params
        while params.prompt_logprobs is not None and not (
            engine.scores_prompts or engine.error
        ):
            await asyncio.sleep(0.1)  # its program is being compiled
        texts, tokenizer = [], engine.tokenizer
        if tokenizer is not None and not ends_by_text(params):
            texts = [
                TextStream(tokenizer, request.prompt, params) for _ in range(params.n)
            ]
        try:
            await asyncio.wrap_future(engine.enter(request, sink, text=not texts))
            while remaining:
                for output in await news.get():
                    if texts:
                        text = texts[output.index]
                        output.text = text.add(output.tokens, output.finish)
                    remaining -= output.finish is not None
                    yield output
        finally:
            if remaining:  # a dead engine drops outputs
                engine.abort(request.id, sink)

    def _post(self) -> None:
        """Pass pending outputs to each event loop, on the engine's thread."""
        by_loop: dict[Any, list[tuple[_Mailbox, _News]]]
        by_loop = collections.defaultdict(list)
        for loop, news, outputs in self._ready:
            by_loop[loop].append((news, outputs))
        self._ready.clear()
        for loop, items in by_loop.items():
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(_put, items)


def _put(items: list[tuple[_Mailbox, _News]]) -> None:
    for news, outputs in items:
        news.put(outputs)
