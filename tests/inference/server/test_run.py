"""A server on a socket: an unchanged client of OpenAI's, slow heads, and its end."""

import asyncio
import contextlib
import http.client
import json
import socket
import time

import h11
import httpx2
import openai
import pydantic
import pytest

from jaxscale.inference.server import ServerConfig, background, serve
from tests.inference.server.conftest import WAIT, LiveServer, events
from tests.inference.server.endpoints.test_chat_completions import CALL, FORCED, USER
from tests.inference.server.fake_engine import TOKENIZER, FakeEngine, text_model
from tests.inference.server.test_app import release
from tests.inference.test_chat import TOOL


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=WAIT
    ) as client:
        yield client


@pytest.fixture(autouse=True)
def answer(request):
    if "server" in request.fixturenames:
        engine = request.getfixturevalue("server").engine
        engine.answer, engine.most, engine.error = "or not", 100, None


def test_models(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "jaxscale"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_completions(client):
    whole = client.completions.create(
        model="tiny", prompt=["a", "b"], logprobs=1, echo=True, max_tokens=40
    )
    assert [choice.text for choice in whole.choices] == ["aor not", "bor not"]
    assert whole.choices[0].logprobs.token_logprobs[0] is None
    parts = client.completions.create(
        model="tiny",
        prompt="a",
        stream=True,
        max_tokens=40,
        stream_options={"include_usage": True},
    )
    *parts, last = parts
    assert "".join(part.choices[0].text for part in parts) == "or not"
    assert last.usage.completion_tokens == len(parts)


def test_conversations(client):
    whole = client.chat.completions.create(model="tiny", messages=USER)
    assert whole.choices[0].message.content == "or not"
    with client.chat.completions.stream(model="tiny", messages=USER) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == "or not"
    assert final.choices[0].finish_reason == "stop"


NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["none", "auto", "required", NAMED])
def test_tools(client, server, choice, stream):
    server.engine.answer = FORCED if choice in ("required", NAMED) else CALL
    call = {"model": "tiny", "messages": USER, "tools": [TOOL], "tool_choice": choice}
    if stream:
        with client.chat.completions.stream(**call) as parts:
            final = parts.get_final_completion()
    else:
        final = client.chat.completions.create(**call)
    (made,) = final.choices
    if choice == "none":
        assert made.message.content == CALL and not made.message.tool_calls
        assert made.finish_reason == "stop"
        return
    (found,) = made.message.tool_calls
    assert found.function.name == "weather"
    assert json.loads(found.function.arguments) == {"city": "Bern"}
    assert made.finish_reason == "tool_calls" and not made.message.content


def test_schemas(client, server):
    class City(pydantic.BaseModel):
        name: str

    server.engine.answer = '{"name": "Bern"}'
    call = {"model": "tiny", "messages": USER, "response_format": City}
    whole = client.chat.completions.parse(**call)
    assert whole.choices[0].message.parsed == City(name="Bern")
    with client.chat.completions.stream(**call) as parts:
        final = parts.get_final_completion()
    assert final.choices[0].message.parsed == City(name="Bern")
    guide = server.engine.seen[-1].params.guided
    assert guide.kind == "json_schema" and '"name"' in guide.text


def test_errors(client, server):
    with pytest.raises(openai.BadRequestError, match="top_p 2"):
        client.completions.create(model="tiny", prompt="a", top_p=2)
    server.engine.most = 0
    with pytest.raises(openai.RateLimitError) as caught:
        client.chat.completions.create(model="tiny", messages=USER, stream=True)
    assert caught.value.response.headers["retry-after"] == "7"


def test_a_client_that_leaves(server):
    """The connection is closed in the middle of a stream."""
    engine = server.engine
    engine.answer = "to be or not " * 100
    engine.hold = asyncio.Semaphore(1)  # it cannot end before the client leaves
    body = {"prompt": "a", "max_tokens": 1000, "stream": True}
    aborted = engine.counts.aborted
    with httpx2.stream(
        "POST", f"{server.url}/v1/completions", json=body, timeout=WAIT
    ) as answer:
        next(answer.iter_raw(chunk_size=10))
    server.wait(lambda: engine.counts.aborted == aborted + 1 and not engine.live)
    engine.hold = None


def test_a_client_that_does_not_read():
    """What is held for it is bounded, others are answered, and it is given up."""
    engine = FakeEngine("to be or not " * 100)
    with LiveServer(engine, stall_seconds=1.0) as server, socket.socket() as stuck:
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        server._listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        stuck.connect(("127.0.0.1", server.port))
        # Parts of about 1 KiB, many times what connections hold.
        body = {"prompt": "a", "n": 4, "logprobs": 20, "max_tokens": 500}
        data = json.dumps({**body, "stream": True}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: "
        head += f"{len(data)}\r\ncontent-type: application/json\r\n\r\n"
        stuck.sendall(head.encode() + data)
        server.wait(lambda: engine.live or engine.counts.aborted)
        answer = server.post("/v1/completions", {"prompt": "a"})
        assert answer.status_code == 200
        server.wait(lambda: engine.counts.aborted == 1)
        whole = 4 * len(TOKENIZER.encode(engine.answer))
        assert engine.counts.drawn_tokens < 0.5 * whole
        assert not engine.live


def test_heads_that_do_not_come():
    """With more time where a busy host does not send a head within the least."""
    for seconds in (0.3, 3.0):
        with contextlib.suppress(AssertionError, ConnectionError):
            return heads(seconds)
    heads(30.0)


def heads(header_seconds):
    """Nothing, half a head, and half a second head: the connection is closed."""
    with LiveServer(FakeEngine(), header_seconds=header_seconds) as server:
        head = b"GET /version HTTP/1.1\r\nhost: a\r\n"
        for whole, begun in ((b"", b""), (b"", head), (head + b"\r\n", head)):
            start = time.monotonic()
            with socket.create_connection(("127.0.0.1", server.port)) as connection:
                connection.settimeout(WAIT)
                connection.sendall(whole)
                data = connection.recv(4096) if whole else b""
                assert data.startswith(b"HTTP/1.1 200 OK" if whole else b"")
                start = time.monotonic() if whole else start
                connection.sendall(begun)
                while part := connection.recv(4096):
                    assert b"HTTP/1.1" not in part
                assert time.monotonic() - start > 0.9 * header_seconds
        # Who takes time over a body is not meant.
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT)
        connection.putrequest("POST", "/v1/completions")
        body = b'{"prompt": "a"}'
        connection.putheader("content-type", "application/json")
        connection.putheader("content-length", str(len(body)))
        connection.endheaders()
        time.sleep(1.5 * header_seconds)
        connection.send(body)
        assert connection.getresponse().status == 200
        connection.close()


def test_the_end():
    """What runs is answered, what comes is refused, then the port is closed."""
    engine = FakeEngine("to be or not")
    with LiveServer(engine) as server, contextlib.ExitStack() as stack:
        engine.hold = asyncio.Semaphore(1)
        body = {"prompt": "a", "stream": True}
        answer = stack.enter_context(
            httpx2.stream(
                "POST", f"{server.url}/v1/completions", json=body, timeout=WAIT
            )
        )
        server.server.stop()
        server.wait(lambda: engine.draining)
        late = server.post("/v1/completions", body)
        assert late.status_code == 503
        assert httpx2.get(f"{server.url}/ready", timeout=WAIT).status_code == 503
        engine.loop.call_soon_threadsafe(release, engine)
        text = answer.read().decode()
        assert text.endswith("data: [DONE]\n\n")
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(f"{server.url}/health")
    assert engine.closed


def test_a_model_that_cannot_be_loaded():
    def load():
        raise ValueError("there are no weights")

    with pytest.raises(ValueError, match="there are no weights"):
        serve(load, ServerConfig(), port=0)


def test_in_the_background():
    """Ready when the block begins, and gone after it."""
    engine = FakeEngine("or not")
    with background(lambda: text_model(engine)) as url:
        answer = httpx2.post(
            f"{url}/v1/completions", json={"prompt": "to be"}, timeout=WAIT
        )
        assert answer.json()["choices"][0]["text"] == "or not"
    assert engine.closed
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(f"{url}/health")

    def load():
        raise ValueError("there are no weights")

    with pytest.raises(ValueError, match="there are no weights"), background(load):
        pytest.fail("it serves")


def test_a_port_that_is_taken(server):
    with pytest.raises(OSError, match="in use"):
        serve(lambda: None, ServerConfig(), port=server.port)


def test_parts_are_written_past_the_state_machine_of_http(server, monkeypatch):
    """It and four layers before it cost as much as the rest of a part."""
    sent = []
    send = h11.Connection.send

    def counted(self, event):
        if self.our_role is h11.SERVER:
            sent.append(type(event))
        return send(self, event)

    monkeypatch.setattr(h11.Connection, "send", counted)
    body = {"prompt": "to", "max_tokens": 99, "stream": True}
    monkeypatch.setattr(server.engine, "answer", " to be" * 20)
    answer = server.post("/v1/completions", body)
    parts = events(answer)
    assert "".join(part["choices"][0]["text"] for part in parts) == " to be" * 20
    assert len(parts) > 20 and sent.count(h11.Data) == 1  # the last, which is empty
