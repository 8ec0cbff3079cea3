"""The server around the calls: states, keys, bodies, overload, clients that leave."""

import asyncio
import contextlib
import gc
import json
import threading
import tracemalloc

import httpx2
import pytest

from jaxscale.inference.server import ServerConfig, create_app
from jaxscale.inference.server.calls import most_bytes
from tests.calls import own_calls
from tests.inference.server.conftest import Harness, events
from tests.inference.server.fake_engine import FakeEngine, text_model


PATH = "/v1/completions"
BODY = {"prompt": "or", "max_tokens": 50}


async def settle(condition):
    """Let the event loop go on until a condition holds."""
    async with asyncio.timeout(120):
        while not condition():
            await asyncio.sleep(0.005)


def release(engine):
    """Let the engine draw what it likes."""
    for _ in range(1000):
        engine.hold.release()


# States.


def test_while_the_model_is_loaded():
    """Probes and calls are answered meanwhile, and the failure is told."""
    loaded = asyncio.Event()

    async def main():
        loop = asyncio.get_running_loop()

        def load():
            asyncio.run_coroutine_threadsafe(loaded.wait(), loop).result()
            raise ValueError("there are no weights")

        harness = Harness()
        harness.app = create_app(ServerConfig(), load)
        service = harness.service
        async with harness.app.router.lifespan_context(harness.app):
            transport = httpx2.ASGITransport(app=harness.app)
            async with httpx2.AsyncClient(
                transport=transport, base_url="http://test"
            ) as client:
                assert (await client.get("/health")).status_code == 200
                ready = await client.get("/ready")
                assert (ready.status_code, ready.json()) == (503, {"status": "loading"})
                answer = await client.post(PATH, json=BODY)
                assert answer.status_code == 503
                assert answer.headers["retry-after"] == "5"
                loaded.set()
                await settle(lambda: service.failure is not None)
                assert (await client.get("/health")).status_code == 503
                answer = await client.post(PATH, json=BODY)
                assert "there are no weights" in answer.json()["error"]["message"]

    asyncio.run(main())


def test_the_end_while_the_model_is_loaded():
    """Nobody waits for it."""
    go_on, loaded = threading.Event(), []
    app = create_app(ServerConfig(), lambda: loaded.append(go_on.wait(120)))

    async def main():
        async with app.router.lifespan_context(app):
            await asyncio.sleep(0.01)
            await app.state.service.drain()

    asyncio.run(main())
    assert not loaded
    go_on.set()


def test_a_dead_engine(harness):
    """It fails who waits, who streams, who comes, and the probes."""
    engine = FakeEngine("to be or not")

    async def test(client):
        engine.hold = asyncio.Semaphore(0)
        bodies = (BODY, {**BODY, "stream": True})
        calls = [asyncio.create_task(client.post(PATH, json=b)) for b in bodies]
        await settle(lambda: len(engine.live) == 2)
        engine.error = RuntimeError("out of memory")
        release(engine)
        for answer in await asyncio.gather(*calls):
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "engine_dead"
        for path in ("/health", "/ready"):
            answer = await client.get(path)
            assert (answer.status_code, answer.json()) == (503, {"status": "dead"})
        assert (await client.post(PATH, json=BODY)).status_code == 503
        assert (await client.get("/v1/models")).status_code == 503

    harness.run(test, engine=engine)
    assert not engine.live and engine.closed


def test_an_engine_that_dies_within_a_stream(harness):
    engine = FakeEngine("to be or not")

    async def test(client):
        engine.hold = asyncio.Semaphore(2)
        call = asyncio.create_task(client.post(PATH, json={**BODY, "stream": True}))
        await settle(lambda: engine.counts.drawn_tokens >= 2)
        engine.error = RuntimeError("out of memory")
        release(engine)
        return await call

    *_, last = events(harness.run(test, engine=engine))
    assert "out of memory" in last["error"]["message"]


def test_draining(harness):
    """What runs ends; what comes is sent elsewhere."""
    engine = FakeEngine(" to be")

    async def test(client):
        engine.hold = asyncio.Semaphore(0)
        call = asyncio.create_task(client.post(PATH, json=BODY))
        await settle(lambda: engine.live)
        drain = asyncio.create_task(harness.service.drain())
        await asyncio.sleep(0)
        assert engine.draining and not drain.done()
        assert (await client.get("/health")).status_code == 200
        ready = await client.get("/ready")
        assert (ready.status_code, ready.json()) == (503, {"status": "draining"})
        answer = await client.post(PATH, json=BODY)
        assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
        release(engine)
        assert (await call).json()["choices"][0]["text"] == " to be"
        await drain

    harness.run(test, engine=engine)


def test_overload(harness):
    """Refused with the time to come back, streamed or not, and nothing is left."""
    engine = FakeEngine(most=1)

    async def test(client):
        # Of two prompts one finds room; the call fails as a whole.
        for stream in (False, True):
            body = {**BODY, "prompt": ["or", "not"], "stream": stream}
            answer = await client.post(PATH, json=body)
            assert answer.status_code == 429
            assert answer.headers["retry-after"] == "7"
            error = answer.json()["error"]
            assert error["type"] == "rate_limit_error"
            assert error["code"] == "overloaded"
            assert not engine.live

    harness.run(test, engine=engine)


def test_memory_under_overload(harness):
    """Calls that are refused leave nothing behind."""
    engine = FakeEngine(most=0)

    async def refused(count, stream):
        for _ in range(count):
            client = Client(harness.app, {**BODY, "stream": stream})
            await client.task
            assert client.sent[0]["status"] == 429

    async def test(_):
        for stream in (False, True):
            await refused(50, stream)
            engine.seen.clear()
            gc.collect()
            tracemalloc.start()
            await refused(200, stream)
            engine.seen.clear()
            gc.collect()
            kept, _peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert kept < 100_000  # 500 bytes a call

    harness.run(test, engine=engine)


def test_defects_are_not_told(harness):
    engine = FakeEngine()

    def broken(request, index):
        raise KeyError("secret")

    engine.text_of = broken
    for stream in (False, True):
        answer = harness.post(PATH, {**BODY, "stream": stream}, engine=engine)
        assert answer.status_code == 500
        assert answer.json()["error"]["type"] == "server_error"
        assert "secret" not in answer.text


# Clients that leave. The transport of the other tests cannot.


class Client:
    """Calls the application as a server would, and leaves when told."""

    def __init__(self, app, body, *, path=PATH):
        self.left, self.sent = asyncio.Event(), []
        self.reads = asyncio.Event()
        self.reads.set()
        data = json.dumps(body).encode()
        headers = [(b"content-type", b"application/json")]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST" if body is not None else "GET",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": headers,
            "client": ("1.2.3.4", 5),
        }
        self._parts = [{"type": "http.request", "body": data, "more_body": False}]
        self.task = asyncio.create_task(app(scope, self._receive, self._send))

    async def _receive(self):
        if self._parts:
            return self._parts.pop()
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message):
        await self.reads.wait()
        self.sent.append(message)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["or", ["or", "not"]])
def test_a_client_that_leaves(harness, stream, prompt):
    engine = FakeEngine("to be or not " * 20)

    async def test(_):
        engine.hold = asyncio.Semaphore(0)
        body = {**BODY, "prompt": prompt, "stream": stream}
        client = Client(harness.app, body)
        await settle(lambda: engine.live)
        if stream:  # until after the headers
            await settle(lambda: client.sent)
        client.left.set()
        await client.task
        assert not engine.live and engine.counts.aborted == len(engine.seen)
        assert harness.service.active == 0

    harness.run(test, engine=engine)


def test_a_client_that_does_not_read():
    """It holds nobody back, and is given up."""
    harness = Harness(stall_seconds=0.1)
    engine = FakeEngine("to be or not " * 20)

    async def test(client):
        stuck = Client(harness.app, {**BODY, "stream": True})
        stuck.reads.clear()
        answer = await client.post(PATH, json=BODY)
        assert answer.status_code == 200
        await stuck.task
        assert not engine.live and engine.counts.aborted == 1
        assert engine.counts.finished == 1

    harness.run(test, engine=engine)


def test_a_stream_without_news_is_kept_open():
    harness = Harness(heartbeat_seconds=0.02)
    engine = FakeEngine()

    async def test(_):
        engine.hold = asyncio.Semaphore(0)
        client = Client(harness.app, {**BODY, "stream": True})
        await settle(lambda: len(client.sent) > 2)
        assert client.sent[1]["body"] == b": still here\n\n"
        release(engine)
        await client.task
        assert client.sent[-2]["body"] == b"data: [DONE]\n\n"

    harness.run(test, engine=engine)


# Keys.


@pytest.fixture(scope="module")
def locked():
    return Harness(api_keys=("first", "second"), isolate_clients=True)


@pytest.mark.parametrize(
    "header",
    [None, "", "Bearer", "Bearer wrong", "Bearer firs", "Basic first", "first"],
)
def test_without_a_key(locked, header):
    async def test(client):
        headers = {} if header is None else {"authorization": header}
        for method, path in (
            ("POST", PATH),
            ("GET", "/v1/models"),
            ("POST", "/tokenize"),
            ("GET", "/live/events"),
            ("GET", "/openapi.json"),
            ("GET", "/nowhere"),
        ):
            answer = await client.request(method, path, headers=headers)
            assert answer.status_code == 401, path
            assert answer.headers["www-authenticate"] == "Bearer"
            assert answer.json()["error"]["code"] == "invalid_api_key"
        for path in ("/health", "/ready", "/metrics", "/version", "/live"):
            assert (await client.get(path, headers=headers)).status_code == 200, path

    locked.run(test)


def test_with_a_key(locked):
    """Keys tell clients apart, for their shares and for their caches."""
    engine = FakeEngine()

    async def test(client):
        for key in ("first", "second"):
            headers = {"authorization": f"bearer {key}"}
            answer = await client.post(PATH, json=BODY, headers=headers)
            assert answer.status_code == 200

    locked.run(test, engine=engine)
    assert len({request.client for request in engine.seen}) == 2
    assert len({request.salt for request in engine.seen}) == 2
    told = [value for r in engine.seen for value in (r.client, r.salt)]
    assert not any("first" in value or "second" in value for value in told)


# Bodies.


@pytest.fixture(scope="module")
def small():
    return Harness(max_body_bytes=100)


def test_bodies_that_are_too_long(small):
    """With their length said, and without."""
    engine = FakeEngine()

    async def parts():
        for _ in range(100):
            yield b"x" * 50

    headers = {"content-type": "application/json"}
    for content in (b"x" * 101, parts()):
        answer = small.post(PATH, content=content, headers=headers, engine=engine)
        assert answer.status_code == 413
        assert "longer than 100 bytes" in answer.json()["error"]["message"]
        assert answer.headers["connection"] == "close"
    fits = json.dumps({"prompt": "o" * 86}).encode()
    assert len(fits) == 100
    assert small.post(PATH, content=fits, headers=headers).status_code == 200
    assert not engine.seen


def test_bodies_that_no_prompt_of_the_model_needs_are_not_read(harness):
    """A batch of full prompts is; the bound is the operator's where that is lower."""
    engine = FakeEngine()
    config, longest = harness.service.config, engine.config.longest
    model = text_model(engine)
    most = most_bytes(model, config)
    assert most < config.max_body_bytes == most_bytes(None, config)
    assert most > 4 * longest * config.max_prompts
    assert most_bytes(model, ServerConfig(max_body_bytes=99)) == 99
    body = json.dumps({"prompt": "o" * most}).encode()
    headers = {"content-type": "application/json"}
    answer = harness.post(PATH, content=body, headers=headers, engine=engine)
    assert answer.status_code == 413
    assert f"longer than {most} bytes" in answer.json()["error"]["message"]
    shorter = harness.post(PATH, {"prompt": "o" * (most - 99)}, engine=engine)
    assert shorter.status_code == 400 and not engine.seen


def test_bodies_that_do_not_come():
    async def slow():
        yield b'{"prompt": '
        await asyncio.sleep(600)
        yield b'"or"}'

    headers = {"content-type": "application/json"}
    harness = Harness(body_seconds=0.2)
    answer = harness.post(PATH, content=slow(), headers=headers)
    assert answer.status_code == 408
    assert answer.json()["error"]["type"] == "timeout_error"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the body"),
        (b"{", "the body is not JSON"),
        (b"[1]", "the body"),
        (b"null", "the body"),
        (b'{"prompt": "a"} x', "the body is not JSON"),
        (b"\xff\xfe", "body"),
        (b"[" * 50_000, "body"),
        (b'{"prompt": "a", "temperature": NaN}', "temperature"),
        (b'{"prompt": "a", "temperature": Infinity}', "temperature"),
        (b'{"prompt": "a", "temperature": 1e999}', "temperature"),
        (b'{"prompt": "a", "logit_bias": {"1": NaN}}', "logit_bias"),
        (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "body"),
        (b'{"prompt": "\\ud800"}', "surrogate"),
        (b'{"prompt": "a", "stop": ["\\ud800"]}', "surrogate"),
        (b'{"prompt": "a", "metadata": {"x": "\\ud800"}, "n": 0}', "surrogate"),
        (
            b'{"prompt": "a", "guided_json": {"x": "\\ud800", "y": NaN}, "n": 0}',
            "surrogate",
        ),
    ],
)
def test_malformed_bodies(harness, content, message):
    headers = {"content-type": "application/json"}
    answer = harness.post(PATH, content=content, headers=headers)
    assert answer.status_code == 400, answer.text
    assert message in answer.json()["error"]["message"]


def test_surrogates_in_messages(harness):
    """In text that goes to the template, and in what only it may ask for."""
    headers = {"content-type": "application/json"}
    for message in (b'"content": "\\ud800"', b'"content": "a", "name": "\\ud800"'):
        content = b'{"messages": [{"role": "user", ' + message + b"}]}"
        answer = harness.post("/v1/chat/completions", content=content, headers=headers)
        assert answer.status_code == 400
        assert "surrogate" in answer.json()["error"]["message"]


def test_other_forms_of_bodies(harness):
    """A page of another site can send these without being asked whether it may."""
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        content = json.dumps(BODY).encode()
        answer = harness.post(PATH, content=content, headers={"content-type": kind})
        assert answer.status_code == 400
        assert "application/json" in answer.json()["error"]["message"]


def test_paths_and_methods(harness):
    async def test(client):
        assert (await client.get("/v1/models/tiny")).json()["id"] == "tiny"
        (card,) = (await client.get("/v1/models")).json()["data"]
        assert card["max_model_len"] == 2048 and card["object"] == "model"
        assert (await client.get("/version")).json()["version"]
        for method, path, status in (
            ("GET", "/nowhere", 404),
            ("GET", "/v1/models/other", 404),
            ("GET", PATH, 405),
            ("POST", "/v1/embeddings", 404),
        ):
            options = {"json": {"input": "a"}} if method == "POST" else {}
            answer = await client.request(method, path, **options)
            assert answer.status_code == status
            assert answer.json()["error"]["message"]

    harness.run(test)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_prompts": 0}, "max_prompts 0"),
        ({"drain_seconds": float("nan")}, "drain_seconds nan"),
        ({"api_keys": ("",)}, "api_keys holds one that is empty"),
        ({"api_keys": ("schlüssel",)}, "outside of printable ASCII"),
    ],
)
def test_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        ServerConfig(**settings)


def test_nothing_is_left_of_a_call_that_is_canceled(harness):
    engine = FakeEngine("to be or not")

    async def test(_):
        engine.hold = asyncio.Semaphore(0)
        client = Client(harness.app, {**BODY, "stream": True})
        await settle(lambda: engine.live)
        client.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await client.task
        assert not engine.live

    harness.run(test, engine=engine)


def test_models_are_text_models():
    assert text_model(FakeEngine()).token_text(287) == ""


def test_calls_of_a_part():
    """What a token of a stream costs the event loop, with that of the fake engine."""

    def calls(words):
        body = {"prompt": "to", "max_tokens": 999, "stream": True}
        engine = FakeEngine(" to be" * words)
        found = own_calls(lambda: Harness().post(PATH, body, engine=engine))
        return found, engine.counts.drawn_tokens

    (few, first), (many, last) = calls(10), calls(60)
    assert last - first >= 100
    assert (many - few) / (last - first) < 30
