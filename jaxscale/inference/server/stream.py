"""Responses that end when their client disconnects: plain ones, and event streams."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from typing import Any

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from jaxscale.inference.server.config import ServerConfig
from jaxscale.inference.server.errors import api_error


_LOG = logging.getLogger(__name__)
_ENCODE = json.JSONEncoder(
    ensure_ascii=False, separators=(",", ":"), allow_nan=False
).encode
_DONE = b"data: [DONE]\n\n"
_HEARTBEAT = b": still here\n\n"
# A request that is refused is refused at once; one that waits in the queue gets its
# headers now, and its first token later.
_ADMISSION_SECONDS = 1.0


CHUNKS = "jaxscale.chunks"
"""The extension of ASGI's scope by which a server takes a part of an answer at once: a
function of bytes that returns False where they have to be sent as usual."""


class ClientGone(Exception):
    """The client has disconnected; nobody reads an answer."""


def event(data: Any) -> bytes:
    """One server-sent event, of JSON.

    Example:
        >>> event({"text": "a"}).decode().strip()
        'data: {"text":"a"}'
    """
    return f"data: {_ENCODE(data)}\n\n".encode()


def varied(head: Mapping[str, Any], name: str) -> Callable[[Any], bytes]:
    """`event` of `head` with a value of `name`; what all have is encoded once.

    Example:
        >>> make = varied({"id": 1}, "text")
        >>> make("a") == event({"id": 1, "text": "a"})
        True
    """
    before = event({**head, name: 0})[:-4].decode()  # without the value and its end
    return lambda value: f"{before}{_ENCODE(value)}}}\n\n".encode()


async def attended[T](receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is canceled when the client disconnects.

    Raises:
        ClientGone: the client has disconnected first.
    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        await _cancel(task, gone)


def named_event(data: Mapping[str, Any]) -> bytes:
    """One server-sent event of JSON that has the name of its type.

    Example:
        >>> named_event({"type": "ping"}).decode().splitlines()
        ['event: ping', 'data: {"type":"ping"}', '']
    """
    return f"event: {data['type']}\n".encode() + event(data)


async def event_stream(
    events: AsyncGenerator[Any], config: ServerConfig, *, named: bool = False
) -> "EventStream":
    """An answer that streams `events`, as JSON.

    Args:
        events: What is sent, encoded or not; closed at the end or when the client
            leaves.
        config: Says how long a client may stall.
        named: Give events the names of their types; otherwise ``[DONE]`` ends them.

    Raises:
        Exception: what the first event raises, so that the request fails with a status.
    """
    first = asyncio.ensure_future(anext(events, None))

    async def close() -> None:
        await _cancel(first)
        await events.aclose()

    try:
        await asyncio.wait({first}, timeout=_ADMISSION_SECONDS)
        if first.done():
            first.result()
    except BaseException:  # also where the call is canceled: nothing may go on
        await close()
        raise
    return EventStream(_encoded(first, events, named), config, close)


async def _encoded(
    first: Awaitable[Any], events: AsyncGenerator[Any], named: bool
) -> AsyncGenerator[bytes]:
    encode = named_event if named else event
    try:
        data = await first
        while data is not None:
            yield data if isinstance(data, bytes) else encode(data)
            data = await anext(events, None)
    except Exception as error:
        # The status has been sent; clients know errors within streams.
        told = api_error(error)
        if told.status_code == 500 and told is not error:
            _LOG.exception("a stream failed")
        body = told.body()
        told_as = {**body["error"], **body, "type": "error"}
        yield encode(told_as if named else body)
    if not named:
        yield _DONE


class EventStream(Response):
    """Server-sent events.

    A client that leaves, or that does not read for `ServerConfig.stall_seconds`, ends
    them; what it has not read by then is at most what a connection buffers. While there
    is nothing to send, a comment now and then keeps the connection open.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        chunks: AsyncGenerator[bytes],
        config: ServerConfig,
        close: Callable[[], Awaitable[None]],
    ) -> None:
        self._chunks, self._config, self._close = chunks, config, close
        self._sent = 0
        self._since: float | None = None  # when the part began that is not yet sent
        self.status_code = 200
        self.background = None
        # Proxies that buffer would hold the events back.
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until there is no more, or nobody who reads."""
        write = scope.get("extensions", {}).get(CHUNKS)
        sender = asyncio.ensure_future(self._send_all(send, write))
        gone = asyncio.ensure_future(_gone(receive))
        try:
            while not (sender.done() or gone.done()):
                await self._attend(send, {sender, gone})
            if sender.done():
                sender.result()
        finally:
            await _cancel(sender, gone)
            await self._chunks.aclose()
            await self._close()

    async def _attend(self, send: Send, tasks: set[asyncio.Future[None]]) -> None:
        """Wait a while; disconnect stalled clients, keep idle connections open."""
        loop, config = asyncio.get_running_loop(), self._config
        before, wait = self._sent, config.stall_seconds
        if self._since is not None:
            wait += self._since - loop.time()
        wait = max(0.0, min(wait, config.heartbeat_seconds))
        done, _ = await asyncio.wait(
            tasks, timeout=wait, return_when=asyncio.FIRST_COMPLETED
        )
        if done or self._sent != before:
            return
        if self._since is not None:
            if loop.time() - self._since >= config.stall_seconds:
                raise ClientGone
        elif before > 0:
            try:
                async with asyncio.timeout(config.stall_seconds):
                    await send(_part(_HEARTBEAT))
            except TimeoutError:
                raise ClientGone from None

    async def _send_all(
        self, send: Send, write: Callable[[bytes], bool] | None
    ) -> None:
        head = {"status": self.status_code, "headers": self.raw_headers}
        await self._send(send, {"type": "http.response.start", **head})
        async for chunk in self._chunks:
            if write is not None and write(chunk):
                self._sent += 1
            else:
                await self._send(send, _part(chunk))
        await self._send(send, _part(b"", more=False))

    async def _send(self, send: Send, message: Message) -> None:
        self._since = asyncio.get_running_loop().time()
        await send(message)
        self._since = None
        self._sent += 1


def _part(body: bytes, *, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}


async def _gone(receive: Receive) -> None:
    """Wait until the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
