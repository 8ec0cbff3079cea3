"""Several servers behind vllm-router, which `make install` puts into ``.router``."""

import asyncio
import collections
import concurrent.futures
import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx2
import openai
import pytest

from tests.inference.server.conftest import WAIT, LiveServer
from tests.inference.server.fake_engine import FakeEngine
from tests.inference.server.test_app import release
from tests.inference.test_chat import TOOL
from tests.ports import free_port


ROOT = Path(__file__).parents[3]
ROUTER = ROOT / ".router" / "bin" / "vllm-router"
PATH = "/v1/completions"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not ROUTER.exists(), reason="needs vllm-router in .router: make install"
    ),
]


def wait(condition, *processes):
    end = time.monotonic() + WAIT
    while not condition():
        assert all(process.poll() is None for process in processes), "it has ended"
        assert time.monotonic() < end
        time.sleep(0.05)


def answers(url):
    with contextlib.suppress(httpx2.TransportError):
        return httpx2.get(url).status_code == 200
    return False


@contextlib.contextmanager
def process(command, url, path):
    """A process that answers at `url` when it is ready; its output is in a file."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    with path.open("wb") as log:
        running = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT
        )
    try:
        wait(lambda: answers(url), running)
        yield running
    finally:
        running.kill()
        running.wait(WAIT)


@contextlib.contextmanager
def router(policy, urls, folder):
    """A router in front of servers; a client that calls it."""
    port, host = free_port(), "127.0.0.1"
    url = f"http://{host}:{port}"
    command = [
        *(ROUTER, "--host", host, "--port", str(port), "--policy", policy),
        *("--prometheus-port", str(free_port()), "--log-level", "warning"),
        *("--worker-startup-check-interval", "1", "--retry-initial-backoff-ms", "5"),
        *("--health-check-interval-secs", "1", "--health-check-endpoint", "/ready"),
        *("--health-check-timeout-secs", "120", "--balance-abs-threshold", "3"),
        *("--worker-urls", *urls),
    ]
    with (
        process(command, f"{url}/readiness", folder / f"{policy}.log"),
        httpx2.Client(base_url=url, timeout=WAIT) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("router")


@pytest.fixture(scope="module")
def pair():
    """Two servers in this process; the answer of each is its name."""
    with LiveServer(FakeEngine("a")) as a, LiveServer(FakeEngine("b")) as b:
        yield a, b


@pytest.fixture(scope="module")
def third(folder):
    """A server in a process of its own, which can be killed."""
    port = free_port()
    command = [sys.executable, "-m", "tests.inference.server.fake_engine", str(port)]
    url = f"http://127.0.0.1:{port}"
    with process(command, f"{url}/ready", folder / "third.log") as running:
        yield url, running


@pytest.fixture(scope="module")
def spread(pair, third, folder):
    with router("round_robin", [*(s.url for s in pair), third[0]], folder) as client:
        yield client


@pytest.fixture(scope="module")
def cached(pair, folder):
    with router("cache_aware", [server.url for server in pair], folder) as client:
        yield client


@pytest.fixture(autouse=True)
def clean(pair):
    for server, name in zip(pair, "ab", strict=True):
        engine = server.engine
        engine.answer, engine.most, engine.hold = name, 100, None
        engine.seen.clear()


def texts(client, count):
    found = []
    for i in range(count):
        answer = client.post(PATH, json={"prompt": f"to be {i}", "max_tokens": 9})
        assert answer.status_code == 200, answer.text
        found.append(answer.json()["choices"][0]["text"])
    return collections.Counter(found)


def test_calls_are_spread(spread):
    assert texts(spread, 12) == {"a": 4, "b": 4, "c": 4}


def test_calls_that_begin_alike_meet_one_server(cached, pair):
    for name in ("first", "second", "third"):
        # The prompts differ at the end only.
        prompts = [f"{name} " * 60 + str(i) for i in range(4)]
        bodies = [{"prompt": p} for p in prompts]
        found = [cached.post(PATH, json=body).json() for body in bodies]
        assert len({answer["choices"][0]["text"] for answer in found}) == 1
        # The gateway has the tokens from where they are made, and asks but once.
        calls = [s.server.service.metrics.text().decode() for s in pair]
        assert not any('path="/tokenize"' in text for text in calls)
        assert any(f'path="{PATH}/render",status="200"' in text for text in calls)


def test_a_server_that_is_busy_is_passed_over(cached, pair):
    """Though it alone knows how the calls begin."""
    body = {"prompt": "the same beginning " * 20}
    assert cached.post(PATH, json=body).status_code == 200
    for server in pair:
        server.engine.seen.clear()
        server.engine.hold = asyncio.Semaphore(0)
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        calls = [pool.submit(cached.post, PATH, json=body) for _ in range(12)]
        wait(lambda: sum(len(server.engine.live) for server in pair) == 12)
        assert min(len(server.engine.live) for server in pair) >= 2
        for server in pair:
            server.engine.loop.call_soon_threadsafe(release, server.engine)
        assert all(call.result().status_code == 200 for call in calls)


def test_a_server_that_is_full_is_passed_over(spread, pair):
    pair[0].engine.most = 0
    assert set(texts(spread, 12)) == {"b", "c"}


def test_all_servers_are_full(cached, pair):
    """The answer of the last one reaches the client."""
    for server in pair:
        server.engine.most = 0
    answer = cached.post(PATH, json={"prompt": "to be"})
    assert answer.status_code == 429 and answer.headers["retry-after"] == "7"
    assert answer.json()["error"]["code"] == "overloaded"


def test_a_server_that_drains_is_passed_over(spread, pair):
    service = pair[0].server.service
    service.draining = True
    try:
        assert set(texts(spread, 12)) == {"b", "c"}
    finally:
        service.draining = False
    wait(lambda: "a" in texts(spread, 3))


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_request(cached, pair, stream):
    for server in pair:
        server.engine.answer = "to be or not " * 50
        server.engine.hold = asyncio.Semaphore(1)
    aborted = sum(server.engine.counts.aborted for server in pair)
    body = {"prompt": "a", "max_tokens": 500, "stream": stream}
    address = httpx2.URL(cached.base_url)
    left = http.client.HTTPConnection(address.host, address.port, timeout=WAIT)
    with contextlib.closing(left):
        headers = {"content-type": "application/json"}
        left.request("POST", PATH, json.dumps(body), headers)
        if stream:
            left.getresponse().read(10)
        wait(lambda: any(server.engine.live for server in pair))
    wait(lambda: sum(s.engine.counts.aborted for s in pair) == aborted + 1)
    wait(lambda: not any(server.engine.live for server in pair))


def test_the_client_of_openai(cached, pair):
    """Streams, tools and schemas pass as they are; so do errors."""
    messages = [{"role": "user", "content": "to be?"}]
    with openai.OpenAI(
        base_url=f"{cached.base_url}/v1", api_key="any", max_retries=0, timeout=WAIT
    ) as client:
        for server in pair:
            server.engine.answer = '{"name": "weather", "arguments": {"city": "Bern"}}'
        with client.chat.completions.stream(
            model="tiny", messages=messages, tools=[TOOL], tool_choice="required"
        ) as stream:
            final = stream.get_final_completion()
        (call,) = final.choices[0].message.tool_calls
        assert call.function.name == "weather"
        form = {"name": "x", "schema": {"type": "object"}}
        client.chat.completions.create(
            model="tiny",
            messages=messages,
            response_format={"type": "json_schema", "json_schema": form},
        )
        seen = [request for server in pair for request in server.engine.seen]
        assert seen[-1].params.guided.kind == "json_schema"
        with pytest.raises(openai.BadRequestError, match="top_p 2"):
            client.completions.create(model="tiny", prompt="a", top_p=2)


def test_a_server_that_is_killed(spread, third):
    """Who streams from it is told at once; nobody else notices."""
    _, running = third
    body = {"prompt": "wait", "max_tokens": 900, "stream": True}
    with contextlib.ExitStack() as stack:
        # One of three neighboring calls is there.
        streams = [
            stack.enter_context(spread.stream("POST", PATH, json=body))
            for _ in range(3)
        ]
        running.send_signal(signal.SIGKILL)
        running.wait(WAIT)
        whole = 0
        for stream in streams:
            with contextlib.suppress(httpx2.TransportError):
                whole += stream.read().endswith(b"data: [DONE]\n\n")
        assert whole == 2
    found = texts(spread, 12)
    assert sum(found.values()) == 12 and set(found) == {"a", "b"}
