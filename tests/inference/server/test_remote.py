"""An engine whose server is another process: what clients see is the same."""

import asyncio
import contextlib
import dataclasses
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx2
import pytest

from jaxscale.inference.output import Output
from jaxscale.inference.request import Overloaded, Request, SamplingParams
from jaxscale.inference.server import ServerConfig, front, serve
from jaxscale.inference.server.channel import Channel
from jaxscale.inference.server.remote import EngineHost, RemoteBackend
from tests.inference.server import test_engine
from tests.inference.server.conftest import WAIT
from tests.inference.server.fake_engine import FakeEngine, text_model
from tests.inference.server.test_app import PATH, settle


# With the fixture below.
test_many_at_a_time = test_engine.test_many_at_a_time
test_scores_of_a_prompt = test_engine.test_scores_of_a_prompt
test_guided_texts = test_engine.test_guided_texts
test_deadlines = test_engine.test_deadlines
test_a_client_that_leaves = test_engine.test_a_client_that_leaves
test_a_dead_engine = test_engine.test_a_dead_engine
test_the_batch_is_seen = test_engine.test_the_batch_is_seen


@pytest.fixture
def made(llama):
    """The model with its engine, and both ends of the channel to it."""
    model = test_engine.make(llama)
    ends = [Channel(end) for end in socket.socketpair()]
    host = EngineHost(model.backend, ends[0])
    thread = threading.Thread(target=host.run)
    thread.start()
    yield model, ends[1]
    for end in ends:
        end.close()
    thread.join(WAIT)
    assert not thread.is_alive() and not model.backend.engine._thread.is_alive()


@pytest.fixture
def model(made):
    here, channel = made
    tokenizer = here.tokenizer
    backend = RemoteBackend(channel, here.backend.config, tokenizer)
    backend.engine = here.backend.engine
    return dataclasses.replace(here, backend=backend)


def request(**params):
    return Request(prompt=[5, 6], params=SamplingParams(temperature=0.0, **params))


async def outputs(backend, asked):
    return [output async for output in backend.generate(asked)]


def test_errors_of_admission_keep_what_they_say(harness, model):
    engine = model.backend.engine

    def full(*_, **__):
        raise Overloaded("too many wait", 7)

    async def test(client):
        engine.scheduler.add = full
        answer = await client.post(PATH, json={"prompt": "to"})
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "7")
        del engine.scheduler.add
        # One that waits for its guide is gone, too.
        run = asyncio.create_task(outputs(model.backend, request(max_tokens=3)))
        await asyncio.sleep(0)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        await settle(lambda: test_engine.at_rest(model))

    harness.run(test, model)


def test_outputs_may_come_before_the_word_that_a_request_was_admitted(model):
    """The engine's thread may be faster than the one that asked it."""
    ours, theirs = map(Channel, socket.socketpair())
    with contextlib.closing(ours), contextlib.closing(theirs):
        theirs.send(("load", model.backend.load()))
        backend = RemoteBackend(ours, model.backend.config, model.tokenizer)
        assert backend.load() == model.backend.load()

        async def test():
            task = asyncio.create_task(outputs(backend, request(max_tokens=1)))
            while (message := await asyncio.to_thread(theirs.receive))[0] != "enter":
                pass
            number, asked = message[1:3]
            end = Output(request=asked.id, index=0, tokens=(7,), finish="length")
            theirs.send(("news", [(number, [end])], [], [], 1, None))
            theirs.send(("entered", number, None, None))
            return await asyncio.wait_for(task, WAIT)

        (got,) = asyncio.run(test())
        assert list(got.tokens) == [7] and got.finish == "length"


def test_a_recording(harness, model):
    def record():
        with model.backend.recorded() as timeline:
            asyncio.run(outputs(model.backend, request(max_tokens=4)))
        return timeline

    async def test(client):
        timeline = await asyncio.to_thread(record)
        assert "host schedule" in str(timeline.shares())
        assert {"name": "engine"} in [e["args"] for e in timeline.events()]

    harness.run(test, model)


def test_a_reader_that_is_late_holds_up_nobody():
    left, right = map(Channel, socket.socketpair())
    sent = [bytes([i]) * 2**20 for i in range(16)]  # more than the system buffers
    for data in sent:
        left.send(data)
    assert [right.receive() for _ in sent] == sent
    left.send("after")
    assert right.receive() == "after"
    left.close()
    assert right.receive() is None
    right.send("nobody is there")
    right.close()


def test_only_real_engines_have_a_server_in_another_process():
    def load():
        return text_model(FakeEngine())

    with pytest.raises(TypeError, match="must be an EngineBackend"):
        serve(load, ServerConfig(), port=0, own_process=True)


def test_processes_that_end(llama, monkeypatch):
    """Without the server's the engine ends; without the engine's the server does."""
    children = []

    class Popen(subprocess.Popen):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            children.append(self)

    monkeypatch.setattr(front.subprocess, "Popen", Popen)
    model, ports, failed = test_engine.make(llama), [], []

    def run():
        try:
            serve(
                lambda: model,
                ServerConfig(),
                port=0,
                on_bound=ports.append,
                own_process=True,
            )
        except RuntimeError as error:
            failed.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    with httpx2.Client(timeout=WAIT) as client:
        url, end = None, time.monotonic() + WAIT
        while url is None or client.get(f"{url}/ready").status_code != 200:
            assert thread.is_alive() and time.monotonic() < end
            time.sleep(0.02)
            url = f"http://127.0.0.1:{ports[0]}" if ports else None
        body = {"prompt": "to be", "max_tokens": 4, "ignore_eos": True}
        answer = client.post(f"{url}{PATH}", json=body)
        assert answer.json()["usage"]["completion_tokens"] == 4
        assert (
            b"jaxscale_generated_tokens_total 4" in client.get(f"{url}/metrics").content
        )
    children[0].send_signal(signal.SIGKILL)
    thread.join(WAIT)
    assert failed == ["the process of the HTTP server has ended with -9"]
    assert not model.backend.engine._thread.is_alive()
    orphan()


def orphan():
    """The process of a server ends when its engine's does."""
    ours, theirs = socket.socketpair()
    listener = socket.create_server(("127.0.0.1", 0))
    with ours, contextlib.closing(listener), theirs:
        fds = listener.fileno(), theirs.fileno()
        job = [sys.executable, "-m", front.__name__, *map(str, fds)]
        child = subprocess.Popen(job, pass_fds=fds, stderr=subprocess.DEVNULL)
        channel = Channel(ours.dup())
        channel.send((ServerConfig(), False, 20))
        channel.close()
    assert child.wait(WAIT) is not None
