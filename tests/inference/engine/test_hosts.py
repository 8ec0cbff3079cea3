"""One engine on several hosts: what processes say to each other, and two of them."""

import concurrent.futures
import contextlib
import json
import os
import queue
import signal
import socket
import struct
import subprocess
import sys
import threading

import httpx2
import jax
import numpy as np
import pytest

from jaxscale.inference import LLM, EngineDead, HostLost, Request, SamplingParams
from jaxscale.inference.engine import hosts
from jaxscale.inference.engine.engine import Engine
from jaxscale.inference.engine.runner import Runner
from jaxscale.inference.engine.scheduling.scheduler import Scheduler
from jaxscale.models import save
from tests.cli.test_serve import ready
from tests.inference.engine import hosts_worker
from tests.inference.server.fake_engine import TOKENIZER
from tests.ports import free_port


WAIT = 120.0
"""Seconds, for what comes at once where nothing else computes."""


class FakeRunner(Runner):
    """Takes calls of programs and keeps them."""

    def __init__(self):
        self.calls = []

    def inputs(self):
        shape = jax.ShapeDtypeStruct
        sample = shape((3,), np.int32), shape((2, 2), np.uint32), shape((), np.float32)
        return {("decode", 2, 1): (), ("sample", 2): sample}

    def dispatch(self, key, *inputs):
        self.calls.append((key, inputs))
        return []


class Pair:
    """Process 0 and process 1 of a job, as threads of this one."""

    def __init__(self, monkeypatch):
        said = queue.SimpleQueue()

        def broadcast(secret, port, host):
            if port:
                said.put((secret, port, host))
                return secret, port, host
            return said.get(timeout=WAIT)

        monkeypatch.setattr(hosts, "_agree", lambda wire: None)
        monkeypatch.setattr(hosts, "_broadcast", broadcast)
        monkeypatch.setattr(hosts, "_own_host", lambda: "127.0.0.1")
        monkeypatch.setattr(jax, "process_count", lambda: 2)
        monkeypatch.setattr(jax, "process_index", lambda: 1)
        self.said, self.runner = said, FakeRunner()
        self.pool = concurrent.futures.ThreadPoolExecutor(4)

    def gather(self, **options):
        return self.pool.submit(hosts.gather, FakeRunner(), **options)

    def meet(self):
        gathered = self.gather(timeout=WAIT)
        self.connection = hosts.join(self.runner, timeout=WAIT)
        return gathered.result(timeout=WAIT)

    def follow(self):
        return self.pool.submit(hosts.follow, self.runner, self.connection)


@pytest.fixture
def pair(monkeypatch):
    monkeypatch.setattr(hosts, "_GRACE_SECONDS", 600.0)  # nobody ends this process
    pair = Pair(monkeypatch)
    yield pair
    pair.pool.shutdown()


def test_calls_arrive_as_they_were(pair):
    followers, following = pair.meet(), pair.follow()
    bits = np.array([[1, 2], [3, 2**32 - 1]], np.uint32)
    calls = [
        (("decode", 2, 1), ()),
        (("sample", 2), (np.array([1, -2, 3], "i4"), bits, np.float32(np.nan) + 0)),
        (("sample", 2), (np.array([0, 0, 7], "i4"), None, None)),
        (("decode", 2, 1), ()),
    ]
    for key, inputs in calls:
        followers.send(key, [x if x is None else np.asarray(x) for x in inputs])
    with pytest.raises(ValueError, match=r"input 0 of .*sample.* is int64"):
        followers.send(("sample", 2), [np.arange(3), None, None])
    followers.close()
    assert following.result(timeout=WAIT) is None
    assert [key for key, _ in pair.runner.calls] == [key for key, _ in calls]
    for (_, found), (_, sent) in zip(pair.runner.calls, calls, strict=True):
        for x, y in zip(found, sent, strict=True):
            assert (x is None) == (y is None)
            np.testing.assert_array_equal(x, y)


def test_the_others_learn_why_the_engine_has_stopped(pair):
    followers, following = pair.meet(), pair.follow()
    followers.close(RuntimeError("no memory"))
    with pytest.raises(HostLost, match=r"has stopped: RuntimeError\('no memory'\)"):
        following.result(timeout=WAIT)


def test_process_0_ends_without_a_word(pair):
    followers, following = pair.meet(), pair.follow()
    for connection in followers._sockets.values():
        connection.shutdown(socket.SHUT_RDWR)
    with pytest.raises(HostLost, match="process 0 has ended"):
        following.result(timeout=WAIT)


def test_process_0_falls_silent(pair):
    followers = pair.meet()
    assert pair.connection.gettimeout() == hosts.SILENT_SECONDS
    pair.connection.settimeout(0.2)
    with pytest.raises(HostLost, match="process 0 does not answer"):
        pair.follow().result(timeout=WAIT)
    followers.close()


@pytest.mark.parametrize("how", ["ends", "falls silent"])
def test_another_process_is_lost(pair, monkeypatch, how):
    monkeypatch.setattr(hosts, "ALIVE_SECONDS", 0.05)
    followers, lost = pair.meet(), queue.SimpleQueue()
    if how == "falls silent":
        monkeypatch.setattr(hosts, "SILENT_SECONDS", 0.2)
    followers.on_lost(lost.put)
    if how == "ends":
        pair.connection.close()
    said = "has ended" if how == "ends" else "says nothing"
    assert f"process 1 {said}" in str(lost.get(timeout=WAIT))
    with pytest.raises(HostLost, match=said):
        followers.send(("decode", 2, 1), ())
    # Who asks late is told, too.
    followers.on_lost(lost.put)
    assert said in str(lost.get(timeout=WAIT))
    if how == "falls silent":  # the others, too, and so is this one if it lives
        with pytest.raises(HostLost, match=r"has stopped: HostLost\('process 1 says"):
            hosts._receive(pair.connection, hosts.Wire(pair.runner))
    pair.connection.close()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ConnectionResetError("reset by peer"), "process 1 has ended; start all"),
        (TimeoutError("timed out"), "process 1 takes nothing: timed out; start all"),
    ],
)
def test_who_writes_may_notice_first(pair, error, said):
    class Socket:
        def sendall(self, frame):
            raise error

    followers = pair.meet()
    (connection,) = followers._sockets.values()
    followers._sockets[1] = Socket()
    with pytest.raises(HostLost, match=said):
        followers.send(("decode", 2, 1), ())
    followers._sockets[1] = connection
    followers.close()
    pair.connection.close()


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (struct.pack("!HBI", 9, 0, 0), "program 9"),
        (struct.pack("!HBI", 1, 1, 4) + b"1234", "too little"),
        (struct.pack("!HBI", 0, 0, 4) + b"1234", "too much"),
        (struct.pack("!HBI", 1, 1, 2**31), "2147483648 bytes"),
    ],
)
def test_what_is_no_call(pair, frame, message):
    followers, following = pair.meet(), pair.follow()
    followers._send(frame)
    with pytest.raises(HostLost, match=message):
        following.result(timeout=WAIT)
    assert pair.runner.calls == []
    followers.close()


def test_strangers(pair):
    gathered = pair.gather(timeout=WAIT)
    secret, port, host = pair.said.get(timeout=WAIT)
    # One that leaves, and one that does not know the secret.
    socket.create_connection((host, port)).close()
    pair.said.put((bytes(32), port, host))
    with pytest.raises(HostLost):
        hosts.join(pair.runner, timeout=WAIT)
    pair.said.put((secret, port, host))
    pair.connection = hosts.join(pair.runner, timeout=WAIT)
    followers, following = gathered.result(timeout=WAIT), pair.follow()
    followers.close()
    following.result(timeout=WAIT)


def test_nobody_comes(pair):
    with pytest.raises(TimeoutError, match=r"processes \[1\] did not connect"):
        pair.gather(timeout=0.1).result(timeout=WAIT)


def test_an_engine_that_waits_for_a_device_for_ever(llama, monkeypatch):
    """It fails all the same, and its clients with it."""
    llama.runner.reset()
    stuck, release, released = threading.Event(), threading.Event(), []

    def decode(**_):
        stuck.set()
        release.wait(2 * WAIT)
        released.append(True)
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(llama.runner, "decode", decode)
    engine = Engine(llama.runner, Scheduler(llama.sizes, seed=0)).start()
    news, ended = queue.SimpleQueue(), []
    engine.at_end.append(ended.append)
    request = Request(prompt=[1, 2], params=SamplingParams(max_tokens=9))
    engine.submit(request, news.put)
    assert stuck.wait(WAIT)
    lost = HostLost("process 1 has ended")
    engine.fail(lost)
    while not isinstance(told := news.get(timeout=WAIT), EngineDead):
        pass
    assert "process 1 has ended" in str(told)
    with pytest.raises(EngineDead, match="process 1 has ended"):
        engine.submit(request, news.put)
    engine.close()
    assert not released
    release.set()
    engine._thread.join(WAIT)
    assert engine.error is lost and ended == [lost]


def start(*commands, **variables):
    """Processes of a job on this machine, with nothing of this one's environment."""
    environ = {k: v for k, v in os.environ.items() if not k.endswith("_proxy")}
    environ |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.getcwd(), "NPROC": "2"}
    return [
        subprocess.Popen(
            [sys.executable, *command],
            env=environ | variables | {"JAX_PROCESS_ID": str(index)},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for index, command in enumerate(commands)
    ]


def results(lines):
    """What a worker prints in JSON, a line each; Gloo writes others, in pieces."""
    for line in lines:
        with contextlib.suppress(json.JSONDecodeError):
            if isinstance(found := json.loads(line), list):
                yield found


@pytest.mark.slow
def test_two_processes():
    """Tokens are those of one device; clients know at once that a process is dead."""
    command = ["-m", "tests.inference.engine.hosts_worker", str(free_port())]
    leader, follower = start([*command, "0"], [*command, "1"])
    try:
        with LLM(hosts_worker.make(), config=hosts_worker.SIZES, quiet=True) as llm:
            expected = hosts_worker.tokens(llm)
        lines = results(leader.stdout)
        assert next(lines) == expected
        follower.kill()
        (message,) = next(lines)  # at once: "says nothing" comes after a minute
        assert "HostLost('process 1 has ended" in message or "Gloo" in message
        assert leader.wait(WAIT) == 0
    finally:
        for process in (leader, follower):
            with process:
                process.kill()


@pytest.mark.exhaustive  # as the one above, through a server
def test_the_example_serves(llama, tmp_path):
    """Two processes with a device each, through HTTP until SIGTERM."""
    save(llama.model, tmp_path / "tiny", tokenizer=TOKENIZER)
    port, example = free_port(), "examples/multihost/serve_llama.py"
    sizes = ["--port", str(port), "--max-len", "64", "--slots", "2", "--devices", "1"]
    address = f"127.0.0.1:{free_port()}"
    processes = start(
        *[[example, str(tmp_path / "tiny"), *sizes]] * 2,
        JAX_COORDINATOR_ADDRESS=address,
        JAX_NUM_PROCESSES="2",
    )
    try:
        base = f"http://127.0.0.1:{port}"
        with httpx2.Client(base_url=base, timeout=WAIT) as client:
            ready(client, processes[0])
            tokens = TOKENIZER.encode("to be or")
            body = {"prompt": tokens, "max_tokens": 8, "temperature": 0, "logprobs": 0}
            (choice,) = client.post("/v1/completions", json=body).json()["choices"]
        for logprob in choice["logprobs"]["token_logprobs"]:
            expected = llama.logprobs(tokens)[-1]
            tokens.append(int(expected.argmax()))
            np.testing.assert_allclose(logprob, expected.max(), atol=1e-4)
        for process in processes:
            process.send_signal(signal.SIGTERM)
        assert [process.wait(WAIT) for process in processes] == [0, 0]
    finally:
        for process in processes:
            with process:
                process.kill()
