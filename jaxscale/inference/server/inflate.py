"""Bodies that come compressed."""

import asyncio
import zlib

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxscale.inference.server.calls import Caller
from jaxscale.inference.server.errors import ApiError


_GZIP = 16 + zlib.MAX_WBITS


class Inflate:
    """Middleware that unpacks bodies with ``content-encoding: gzip``."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        """Stand before an application.

        Args:
            app: What comes after.
            most: Bytes of a body that is unpacked.
        """
        self._app, self._most = app, most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on.

        Raises:
            ApiError: the content encoding is unknown.
        """
        coding = ""
        if scope["type"] == "http":
            coding = Headers(scope=scope).get("content-encoding", "").strip().lower()
        if coding in ("", "identity"):
            await self._app(scope, receive, send)
            return
        if coding not in ("gzip", "x-gzip"):
            raise ApiError(
                415,
                f"content-encoding {coding:.40} is not understood; send gzip, or the "
                "body as it is",
            )
        dropped = (b"content-encoding", b"content-length")
        headers = [(k, v) for k, v in scope["headers"] if k.lower() not in dropped]
        unpacked = _unpacked(receive, scope["state"]["caller"], self._most)
        await self._app({**scope, "headers": headers}, unpacked, send)


def _unpacked(receive: Receive, caller: Caller, most: int) -> Receive:
    """`receive` for a body that comes compressed."""
    unpack, size, ended = zlib.decompressobj(_GZIP), 0, False

    async def unpacked() -> Message:
        nonlocal size, ended
        message = await receive()
        if message["type"] != "http.request" or ended:
            return message
        ended = not message.get("more_body", False)
        try:
            # No more than is taken is ever made, whatever was sent; a few bytes may
            # be thousands of times as many, which other calls need not wait for.
            packed = message.get("body", b"")
            body = await asyncio.to_thread(unpack.decompress, packed, most - size + 1)
        except zlib.error as error:
            raise ApiError(400, f"the body is no gzip: {error}") from None
        size += len(body)
        caller.body_bytes += len(body) - len(message.get("body", b""))
        if size > most:
            raise ApiError(
                413,
                f"the body is longer than {most} bytes once it is unpacked; send less, "
                "or in several calls",
                headers={"connection": "close"},
            )
        if ended and not unpack.eof:
            raise ApiError(400, "the body ends before its gzip does; send all of it")
        return {**message, "body": body}

    return unpacked
