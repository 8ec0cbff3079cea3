"""Engine requests of one HTTP request: run together, measured, and collected."""

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from jaxscale.inference.output import Output, joined
from jaxscale.inference.request import Request
from jaxscale.inference.server.backend import Backend
from jaxscale.inference.server.errors import check_outcome
from jaxscale.inference.server.metrics import Metrics


_LOG = logging.getLogger(__name__)
_BUFFERED = 16


async def _measured(
    backend: Backend, number: int, request: Request, metrics: Metrics
) -> AsyncGenerator[tuple[int, Output]]:
    """The outputs of a request, with its number; measures its latencies.

    Raises:
        ApiError: the request has failed.
    """
    start = time.monotonic()
    last: dict[int, float] = {}
    async with contextlib.aclosing(backend.generate(request)) as outputs:
        async for output in outputs:
            now, count = time.monotonic(), len(output.tokens)
            if count:
                before = last.get(output.index)
                if before is None:
                    metrics.first_token(now - start)
                else:
                    metrics.gaps((now - before) / count, count)
                last[output.index] = now
            if output.finish == "error" and not output.blames_request:
                _LOG.error("request %s failed: %s", request.id, output.error)
            check_outcome(output)
            yield number, output
    metrics.finished(time.monotonic() - start)


def merged(
    backend: Backend, requests: Sequence[Request], metrics: Metrics
) -> AsyncGenerator[tuple[int, Output]]:
    """The outputs of several requests, each with its number, as they come.

    A consumer that is slow holds back what is read from the engine, not the engine.
    Closing the iterator aborts all of them, and so does the failure of one.

    Raises:
        ApiError: a request has failed.
    """
    runs = [_measured(backend, *item, metrics) for item in enumerate(requests)]
    return runs[0] if len(runs) == 1 else _together(runs)


async def _together(
    runs: Sequence[AsyncGenerator[tuple[int, Output]]],
) -> AsyncGenerator[tuple[int, Output]]:
    """The outputs of all requests."""
    news: asyncio.Queue[Any] = asyncio.Queue(_BUFFERED)

    async def pump(run: AsyncGenerator[tuple[int, Output]]) -> None:
        try:
            async with contextlib.aclosing(run):
                async for item in run:
                    await news.put(item)
        except Exception as error:  # of any kind: who reads the news raises it
            await news.put(error)
        else:
            await news.put(None)

    tasks = [asyncio.ensure_future(pump(run)) for run in runs]
    try:
        running = len(tasks)
        while running:
            item = await news.get()
            if isinstance(item, Exception):
                raise item
            running -= item is None
            if item is not None:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclasses.dataclass
class Usage:
    """Token usage of a request."""

    prompt: int
    completion: int = 0
    cached: dict[int, int] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, requests: Sequence[Request]) -> "Usage":
        """Before anything was drawn."""
        return cls(prompt=sum(len(request.prompt) for request in requests))

    def add(self, number: int, output: Output) -> None:
        """Count what is new of the request with this number."""
        self.completion += len(output.tokens)
        self.cached[number] = max(output.cached_tokens, self.cached.get(number, 0))

    def body(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": sum(self.cached.values())},
        }


async def collect(
    backend: Backend, requests: Sequence[Request], metrics: Metrics
) -> tuple[list[list[Output]], Usage]:
    """The whole outputs of each request, by index, and their tokens."""
    found: list[list[Output]] = [[] for _ in requests]
    usage = Usage.of(requests)
    async with contextlib.aclosing(merged(backend, requests, metrics)) as outputs:
        async for number, output in outputs:
            found[number].append(output)
            usage.add(number, output)
    return [sorted(joined(each), key=lambda o: o.index) for each in found], usage
