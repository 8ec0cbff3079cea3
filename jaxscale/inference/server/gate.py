"""What every call passes first: keys, sizes, times, and counting."""

import asyncio

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxscale.inference.server.config import ServerConfig
from jaxscale.inference.server.errors import ApiError
from jaxscale.inference.server.service import Service
from jaxscale.inference.server.stream import ClientGone


PUBLIC = frozenset({"/health", "/ready", "/metrics", "/version", "/live"})
"""Paths for which no key is needed: they say nothing of what anyone has asked."""

_GONE = 499  # as nginx calls a client that has left


class Gate:
    """Middleware around all calls; it looks at a body only as far as its length."""

    def __init__(self, app: ASGIApp, service: Service, paths: frozenset[str]) -> None:
        """Stand before an application.

        Args:
            app: What comes after.
            service: Knows the keys, and is told how many calls there are.
            paths: Known paths; others are counted as one.
        """
        self._app, self._service, self._paths = app, service, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a call through, or answer it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        service, path, status = self._service, scope["path"], _GONE

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        counted = path not in PUBLIC and not path.startswith("/live")
        service.active += counted
        try:
            caller = service.caller(scope, public=path in PUBLIC)
            scope.setdefault("state", {})["caller"] = caller
            limited = _limited(scope, receive, service.config)
            await self._app(scope, limited, watched)
        except ApiError as error:
            if status != _GONE:
                raise
            await error.response()(scope, receive, watched)
        except ClientGone:
            status = _GONE
        finally:
            service.active -= counted
            service.metrics.answered(path if path in self._paths else "other", status)


def _limited(scope: Scope, receive: Receive, config: ServerConfig) -> Receive:
    """`receive` for a body of bounded length that is here in time.

    Raises:
        ApiError: the call says itself that it is too long; `receive` raises it later.
    """
    most = config.max_body_bytes
    too_long = ApiError(
        413,
        f"the body is longer than {most} bytes; send less, or in several calls",
        headers={"connection": "close"},
    )
    length = Headers(scope=scope).get("content-length", "")
    if length.isdigit() and (len(length) > 18 or int(length) > most):
        raise too_long
    read, more = 0, True
    deadline = asyncio.get_running_loop().time() + config.body_seconds

    async def limited() -> Message:
        nonlocal read, more
        if not more:
            return await receive()
        try:
            async with asyncio.timeout_at(deadline):
                message = await receive()
        except TimeoutError:
            raise ApiError(
                408,
                f"the body was not here after {config.body_seconds} seconds",
                headers={"connection": "close"},
            ) from None
        read += len(message.get("body", b""))
        more = message.get("more_body", False)
        if read > most:
            raise too_long
        return message

    return limited
