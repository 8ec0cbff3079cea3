"""Runs the application on a socket until a signal, then drains running requests."""

import asyncio
import contextlib
import dataclasses
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.config import LOGGING_CONFIG
from uvicorn.protocols.http.h11_impl import H11Protocol

from jaxscale.inference.server.app import create_app
from jaxscale.inference.server.config import ServerConfig
from jaxscale.inference.server.service import Served, Service
from jaxscale.inference.server.stream import CHUNKS
from jaxscale.inference.switch_interval import short_switch_interval


LOOPBACK = ("127.0.0.1", "localhost", "::1", "[::1]")
"""Names of this machine that no other can have."""
_CUT_OFF_SECONDS = 5
_POLL_SECONDS = 0.01


class Server(uvicorn.Server):
    """A server that drains at the first signal, and ends at once at the second.

    It ends by itself where the model cannot be loaded.
    """

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self.service = service
        self.patient = False
        """Whether a second signal changes nothing."""
        self._asked = False
        self._ending: asyncio.Task[None] | None = None

    def stop(self) -> None:
        """Drain, then end; may be called on any thread."""
        self._asked = True

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until a signal or `stop`."""
        # The loop, which has work all the time at hundreds of streams, has to let the
        # engine's thread go on.
        with short_switch_interval():
            super().run(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Take a signal."""
        if self._asked and not self.patient:
            super().handle_exit(sig, frame)
        self._asked = True

    async def on_tick(self, counter: int) -> bool:
        """Look, ten times a second, whether to end."""
        if self.service.failure is not None:
            self.should_exit = True
        if self._asked and self._ending is None:
            self._ending = asyncio.create_task(self._end())
        return await super().on_tick(counter)

    async def _end(self) -> None:
        await self.service.drain()
        self.should_exit = True


def make_server(
    load: Callable[[], Served], config: ServerConfig, *, access_log: bool = False
) -> Server:
    """A server that can be run on sockets.

    While it runs, threads of this process take turns more often: the engine's must not
    wait for the loop.

    Args:
        load: Loads the model, while the server already answers.
        config: Settings.
        access_log: Log one line per request.
    """
    app = create_app(config, load)
    settings = uvicorn.Config(
        app,
        http=_bounded(config.header_seconds),
        ws="none",
        lifespan="on",
        access_log=access_log,
        # Without lines for calls, logging is left as its user has set it up.
        log_config=LOGGING_CONFIG if access_log else None,
        ssl_certfile=config.tls_certificate,
        ssl_keyfile=config.tls_key,
        proxy_headers=False,  # anyone could write them
        server_header=False,
        limit_concurrency=config.max_connections,
        timeout_graceful_shutdown=_CUT_OFF_SECONDS,
    )
    return Server(settings, app.state.service)


def serve(
    load: Callable[[], Served],
    config: ServerConfig,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    access_log: bool = False,
    on_bound: Callable[[int], None] = lambda port: None,
    own_process: bool = False,
) -> bool:
    """Serve a model until SIGTERM or Ctrl-C.

    Args:
        load: Loads the model, while the server already answers.
        config: Settings.
        host: Address to listen at.
        port: Port to listen at.
        access_log: Log one line per request.
        on_bound: Called with the port once it is listened at.
        own_process: Answer HTTP in another process, so that the engine's thread does
            not share Python with it; the model's backend is an `EngineBackend` then.

    Returns:
        Whether the model was loaded and all its programs compiled. False: a thread is
        at it, and a process that does not wait for it has to leave by `os._exit`.

    Raises:
        OSError: the address cannot be listened at.
        ServerLost: the other process has failed while the model was loaded or compiled,
            at which a thread is, as above.
        RuntimeError: it has failed after that.
        Exception: what `load` raises.
    """
    config = _named(config, host)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=2048)
    if own_process:
        from jaxscale.inference.server.front import serve_in_front

        with listener:
            on_bound(listener.getsockname()[1])
            return serve_in_front(load, config, listener, access_log=access_log)
    with listener:
        server = make_server(load, config, access_log=access_log)
        on_bound(listener.getsockname()[1])
        server.run([listener])
    if server.service.failure is not None:
        raise server.service.failure
    compiled, programs = server.service.load().programs
    return server.service.model is not None and compiled == programs


@contextlib.contextmanager
def background(
    load: Callable[[], Served], config: ServerConfig | None = None
) -> Iterator[str]:
    """A server on a thread of this process, at a free port of this machine.

    Args:
        load: Loads the model.
        config: Settings.

    Yields:
        The address of the server, which is ready; at the end of the block it drains.

    Raises:
        Exception: what `load` raises.
    """
    server = make_server(load, _named(config or ServerConfig(), "127.0.0.1"))
    with socket.create_server(("127.0.0.1", 0), backlog=2048) as listener:
        thread = threading.Thread(target=server.run, args=([listener],), name="server")
        thread.start()
        try:
            while thread.is_alive() and server.service.state == "loading":
                time.sleep(_POLL_SECONDS)
            if server.service.failure is not None:
                raise server.service.failure
            scheme = "http" if server.config.ssl_certfile is None else "https"
            yield f"{scheme}://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.stop()
            thread.join()


def _named(config: ServerConfig, host: str) -> ServerConfig:
    """Settings with the names that a server has which listens at `host`."""
    if config.allowed_hosts is not None or host not in LOOPBACK:
        return config
    return dataclasses.replace(config, allowed_hosts=LOOPBACK)


def _bounded(seconds: float) -> type[asyncio.Protocol]:
    """HTTP with a timeout for the headers of a request."""

    class Bounded(H11Protocol):
        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._expect()

        def connection_lost(self, exc: Exception | None) -> None:
            self._expect_no_more()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            before = self.cycle
            super().data_received(data)
            if self.cycle is not before:
                self._expect_no_more()
                # Its task has not begun yet.
                extensions: Any = self.scope.setdefault("extensions", {})
                extensions[CHUNKS] = self._write
            elif self._timer is None and (before is None or before.response_complete):
                self._expect()

        def _write(self, chunk: bytes) -> bool:
            """Write a chunk of an answer, past what checks its order; False where that
            has to wait, or where there are no chunks.
            """
            cycle = self.cycle
            if (
                not chunk  # which would be the end
                or self.flow.write_paused
                or cycle.disconnected
                or cycle.response_complete
                or cycle.scope["http_version"] != "1.1"
            ):
                return False
            self.transport.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
            return True

        def _expect(self) -> None:
            self._timer = self.loop.call_later(seconds, self.timeout_keep_alive_handler)

        def _expect_no_more(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    return Bounded
