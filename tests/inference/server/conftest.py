"""The application in this process, with an engine that the test directs."""

import asyncio
import contextlib
import json
import socket
import threading
import time

import httpx2
import pytest

from jaxscale.inference.server import ServerConfig, create_app
from jaxscale.inference.server.run import make_server
from tests.inference.server.fake_engine import FakeEngine, text_model


WAIT = 120.0
"""Seconds, for what comes at once where nothing else computes."""


class Harness:
    """An application, which serves another model for each test."""

    def __init__(self, **settings):
        self.model = None
        self.app = create_app(ServerConfig(**settings), lambda: self.model)

    def run(self, test, model=None, *, engine=None, headers=None):
        """Let a coroutine function use a client, on a server that is ready."""

        async def main():
            self.model = model or text_model(engine or FakeEngine())
            async with self.client(headers=headers) as client:
                return await test(client)

        return asyncio.run(main())

    @property
    def service(self):
        return self.app.state.service

    @contextlib.asynccontextmanager
    async def client(self, *, headers=None):
        service, app = self.service, self.app
        service.model = service.failure = service.recorder = None
        service.draining = False
        async with app.router.lifespan_context(app):
            while service.state == "loading":
                await asyncio.sleep(0)
            transport = httpx2.ASGITransport(app=app, raise_app_exceptions=False)
            async with httpx2.AsyncClient(
                transport=transport, base_url="http://test", headers=headers
            ) as client:
                yield client

    def post(self, path, body=None, *, engine=None, **options):
        """One call."""

        async def test(client):
            if body is not None:
                options["json"] = body
            return await client.post(path, **options)

        return self.run(test, engine=engine)


@pytest.fixture(scope="session")
def harness():
    return Harness()


def events(answer):
    """The parts of a streamed answer; it has to end as it should."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    *parts, last, empty = answer.text.split("\n\n")
    assert (last, empty) == ("data: [DONE]", "")
    return [json.loads(part.removeprefix("data: ")) for part in parts]


class LiveServer:
    """A server on a thread of its own, at a free port of this machine."""

    def __init__(self, engine, **settings):
        self.engine = engine
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        config = ServerConfig(**settings)
        self.server = make_server(lambda: text_model(engine), config)
        run = self.server.run
        self._thread = threading.Thread(target=run, args=([self._listener],))

    def __enter__(self):
        self._thread.start()
        self.wait(lambda: self.server.service.state == "ready")
        return self

    def __exit__(self, *_):
        self.server.stop()
        self._thread.join(WAIT)
        assert not self._thread.is_alive()

    def wait(self, condition):
        end = time.monotonic() + WAIT
        while not condition():
            assert time.monotonic() < end
            time.sleep(0.01)

    def post(self, path, body, **options):
        return httpx2.post(f"{self.url}{path}", json=body, timeout=WAIT, **options)


@pytest.fixture(scope="module")
def server():
    with LiveServer(FakeEngine()) as running:
        yield running
