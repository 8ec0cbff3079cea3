"""The engine for asyncio, which servers run on."""

import asyncio
import collections
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from jaxscale.inference.clients import EngineDead
from jaxscale.inference.engine import Engine
from jaxscale.inference.request import Output, Request


class AsyncEngine:
    """An `Engine` for asyncio: outputs of a tick reach the event loop together.

    Example:
        >>> import asyncio
        >>> async def count(engine, request):
        ...     outputs = [output async for output in engine.generate(request)]
        ...     return sum(len(output.tokens) for output in outputs)
    """

    def __init__(self, engine: Engine) -> None:
        """Wrap an engine that was started.

        Args:
            engine: It may serve others, too.
        """
        self.engine = engine
        self._ready: list[tuple[asyncio.AbstractEventLoop, Any, Any]] = []
        engine.after_tick.append(self._post)

    async def generate(self, request: Request) -> AsyncIterator[Output]:
        """What the request brings, until it has ended.

        Closing the iterator, or canceling the task that reads it, aborts the request.

        Raises:
            InvalidRequest, Overloaded, Draining, EngineDead: as `Engine.submit`.
        """
        loop = asyncio.get_running_loop()
        news: asyncio.Queue[list[Output] | EngineDead] = asyncio.Queue()
        ready = self._ready
        remaining = request.params.n

        def sink(outputs: list[Output] | EngineDead) -> None:
            ready.append((loop, news, outputs))

        guide, compiler, matcher = request.params.guided, self.engine.compiler, None
        if guide is not None and compiler is not None:
            matcher = await asyncio.wrap_future(compiler.submit(guide))
        try:
            await asyncio.wrap_future(self.engine.admit(request, sink, matcher))
            while remaining:
                outputs = await news.get()
                if isinstance(outputs, EngineDead):
                    remaining = 0
                    raise outputs
                for output in outputs:
                    remaining -= output.finish is not None
                    yield output
        finally:
            if remaining:
                self.engine.abort(request.id, sink)

    def _post(self) -> None:
        """Hand what is ready to each event loop, on the engine's thread."""
        by_loop: dict[Any, list[tuple[Any, Any]]] = collections.defaultdict(list)
        for loop, news, outputs in self._ready:
            by_loop[loop].append((news, outputs))
        self._ready.clear()
        for loop, items in by_loop.items():
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(_put, items)


def _put(items: list[tuple[Any, Any]]) -> None:
    for news, outputs in items:
        news.put_nowait(outputs)
