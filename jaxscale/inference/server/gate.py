"""The middleware of every request: API keys, sizes, timeouts and metrics."""

import asyncio
import logging
import re
import uuid
from collections.abc import Mapping

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxscale.inference.server.backend import TextModel
from jaxscale.inference.server.calls import Caller, most_bytes
from jaxscale.inference.server.errors import ApiError, api_error
from jaxscale.inference.server.service import Service
from jaxscale.inference.server.stream import ClientGone


PUBLIC = frozenset({"/health", "/ready", "/metrics", "/version", "/live"})
"""Paths for which no key is needed: they say nothing of what anyone has asked."""

_LOG = logging.getLogger(__name__)
_ENDLESS = "/live/events"  # it has no head without a body
_GONE = 499  # as nginx calls a client that has left


class Gate:
    """Middleware around all requests; of a body it reads the length alone."""

    def __init__(
        self, app: ASGIApp, service: Service, paths: Mapping[str, frozenset[str]]
    ) -> None:
        """Stand before an application.

        Args:
            app: What comes after.
            service: Knows the API keys, and counts active requests.
            paths: Methods of known paths; other paths are counted as one.
        """
        self._app, self._service, self._paths = app, service, paths
        hosts = service.config.allowed_hosts or ("*",)
        self._hosts = None if "*" in hosts else frozenset(map(str.lower, hosts))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        service, path, status = self._service, scope["path"], _GONE
        name = scope.setdefault("state", {})["request_id"] = _request_id(scope)

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = name
            await send(message)

        counted = path not in PUBLIC and not path.startswith("/live")
        service.active += counted
        try:
            await self._answer(scope, receive, watched)
        except ClientGone:
            status = _GONE
        except Exception as error:
            # What nobody foresaw is logged with the name that its client was told.
            told = api_error(error)
            if told is not error:
                _LOG.exception("%s %s failed: request %s", scope["method"], path, name)
            if status == _GONE:
                await told.response()(scope, receive, watched)
            else:
                status = told.status_code  # the stream ends where it is
        finally:
            service.active -= counted
            service.metrics.answered(path if path in self._paths else "other", status)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Have a request answered by the application.

        Raises:
            ApiError: it is refused before.
        """
        service, path, method = self._service, scope["path"], scope["method"]
        if self._hosts is not None and _host(scope) not in self._hosts:
            raise ApiError(
                403,
                "this server is not called by the name that the call has in Host; "
                "start it with --allowed-hosts to give it more names",
                code="host_not_allowed",
            )
        methods = self._paths.get(path, frozenset())
        if method == "OPTIONS" and methods:
            head = {"HEAD"} if "GET" in methods else set()
            allow = ", ".join(sorted({*methods, *head, "OPTIONS"}))
            await Response(status_code=204, headers={"allow": allow})(
                scope, receive, send
            )
            return
        caller = service.caller(scope, public=path in PUBLIC)
        scope["state"]["caller"] = caller
        model = service.model if isinstance(service.model, TextModel) else None
        # Texts that do not fit are counted too, and encoders may cut them.
        most = most_bytes(model if path.startswith("/v1/") else None, service.config)
        limited = _limited(scope, receive, caller, most)
        if method == "HEAD" and "GET" in methods and path != _ENDLESS:
            scope, send = {**scope, "method": "GET"}, _without_body(send)
        await self._app(scope, limited, send)


def _request_id(scope: Scope) -> str:
    """The request id that the client has sent, or a new one."""
    given = Headers(scope=scope).get("x-request-id", "")
    return given if re.fullmatch(r"[!-~]{1,128}", given) else uuid.uuid4().hex


def _host(scope: Scope) -> str:
    """The ``Host`` header of the request, without a port."""
    return re.sub(r":\d*$", "", Headers(scope=scope).get("host", "")).lower()


def _without_body(send: Send) -> Send:
    """`send` for the headers of a response alone."""

    async def head(message: Message) -> None:
        if message["type"] == "http.response.body":
            message = {**message, "body": b""}
        await send(message)

    return head


def _limited(scope: Scope, receive: Receive, caller: Caller, most: int) -> Receive:
    """`receive` for a body of bounded length, with a timeout.

    Raises:
        ApiError: its Content-Length is too long; otherwise `receive` raises it later.
    """
    config = caller.config
    too_long = ApiError(
        413,
        f"the body is longer than {most} bytes; send less, or in several calls",
        headers={"connection": "close"},
    )
    length = Headers(scope=scope).get("content-length", "")
    if length.isdigit() and (len(length) > 18 or int(length) > most):
        raise too_long
    more = True
    deadline = asyncio.get_running_loop().time() + config.body_seconds

    async def limited() -> Message:
        nonlocal more
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
        caller.body_bytes += len(message.get("body", b""))
        more = message.get("more_body", False)
        if caller.body_bytes > most:
            raise too_long
        return message

    return limited
