"""The process that answers HTTP: its signals, and what its end says of the engine's."""

import logging
import os
import signal
import socket
import subprocess
import threading
import types

import pytest

from jaxscale.inference.server import EngineBackend, ServerConfig, front
from jaxscale.inference.server.backend import Load, Loading
from jaxscale.inference.server.channel import Channel
from jaxscale.inference.server.remote import RemoteBackend
from jaxscale.inference.server.run import make_server
from tests.inference.server.conftest import WAIT
from tests.inference.server.fake_engine import FakeEngine, text_model


class Backend(EngineBackend):
    """An engine that has compiled one of so many programs."""

    config = FakeEngine().config

    def __init__(self, programs):
        self.programs = programs
        self.engine = types.SimpleNamespace(after_tick=[], at_end=[])

    def load(self):
        return Load(programs=(1, self.programs))

    def observe(self, on_event, on_tick):
        pass

    def close(self):
        pass


@pytest.fixture
def other(monkeypatch):
    """Let a function of a channel stand for the other process; it gives the code."""

    def use(function):
        class Process(subprocess.Popen):
            def __init__(self, job, *, pass_fds, **_):  # and starts none
                self.channel = Channel(socket.socket(fileno=os.dup(pass_fds[1])))

            def wait(self):
                try:
                    assert self.channel.receive() is not None  # the settings
                    return function(self.channel)
                finally:
                    self.channel.close()

        monkeypatch.setattr(front.subprocess, "Popen", Process)

    return use


def serve(load):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return front.serve_in_front(load, ServerConfig(), listener)


@pytest.mark.parametrize("programs", [1, 2])
def test_the_result_says_whether_all_is_compiled(other, programs):
    code = 0

    def answer(channel):
        kind, *content = channel.receive()
        assert kind == "model", content
        channel.send(("close",))
        assert channel.receive() == ("closed",)
        return code

    def load():
        return text_model(Backend(programs), chat=False)

    other(answer)
    whole = programs == 1
    assert serve(load) is whole
    code = 7
    with pytest.raises(RuntimeError, match="ended with 7") as caught:
        serve(load)
    assert isinstance(caught.value, front.ServerLost) is not whole


def test_texts_go_before_the_model(other):
    """What needs no weights is unpickled while they are read, and once."""
    model = text_model(Backend(1))
    fields = {name: getattr(model, name) for name in ("name", "tokenizer", "chat")}
    received = []

    def answer(channel):
        received.extend(channel.receive() for _ in range(2))
        channel.send(("close",))
        assert channel.receive() == ("closed",)
        return 0

    def load(progress):
        loading.on_texts(fields)
        return model

    loading = Loading(load)
    other(answer)
    assert serve(loading)
    (kind, texts), (last, others, sizes) = received
    assert (kind, last) == ("texts", "model") and texts.keys() == fields.keys()
    assert not others.keys() & texts.keys() and others["aliases"] == model.aliases
    ours, theirs = map(Channel, socket.socketpair())
    ours.send(("texts", texts))
    ours.send(("model", others, sizes))
    ours.send(("load", Load()))
    found = front._Awaited(theirs, lambda: None)()
    assert (found.name, found.created) == (model.name, model.created)
    assert found.encode("to be") == model.encode("to be")
    ours.send(("closed",))
    found.backend.close()
    ours.close()
    theirs.close()


def test_nobody_waits_for_a_model_without_a_server(other):
    go_on = threading.Event()

    def load():
        go_on.wait(WAIT)
        raise ValueError("there are no weights")

    other(lambda channel: 7)
    try:
        with pytest.raises(front.ServerLost, match="ended with 7"):
            serve(load)
        assert not go_on.is_set()
    finally:
        go_on.set()


def test_the_second_signal_alone_says_at_once():
    sent = []

    class Process(subprocess.Popen):
        def __init__(self):
            self.send_signal = sent.append

    with front._passed_on(Process()) as numbers:
        for _ in range(3):
            signal.raise_signal(signal.SIGTERM)
    assert sent == [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR1]
    assert numbers == [signal.SIGTERM] * 3


def test_signals_to_both_processes_drain(monkeypatch):
    """The server drains at any number of SIGTERMs, and ends if the engine's says so."""
    seen, channels = [], []

    def connect(end):
        channels.append(Channel(end))
        return channels[0]

    def make(*args, **kwargs):
        server = make_server(*args, **kwargs)

        def run(sockets):
            with server.capture_signals():
                for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
                    signal.raise_signal(number)
                    seen.append((server._asked, server.should_exit))
                signal.raise_signal(signal.SIGUSR1)
                seen.append((server._asked, server.should_exit))
                server._captured_signals.clear()  # would be raised again, here

        server.run = run
        return server

    monkeypatch.setattr(front, "make_server", make)
    monkeypatch.setattr(front, "Channel", connect)
    monkeypatch.setattr(front.logging, "basicConfig", lambda **_: None)
    before = signal.getsignal(signal.SIGUSR1)
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    channel.send((ServerConfig(), False, logging.getLogger("jaxscale").level))
    listener = socket.create_server(("127.0.0.1", 0))
    try:
        front.main(listener.detach(), theirs.detach())
    finally:
        signal.signal(signal.SIGUSR1, before)
        for end in (channel, *channels):
            end.close()
    assert seen == [(True, False)] * 3 + [(True, True)]


def test_progress_that_comes_after_the_model():
    ours, theirs = map(Channel, socket.socketpair())
    ours.send(("load", Load()))
    backend = RemoteBackend(theirs, Backend.config, None)
    ours.send(("loading", {"compiled": 1, "programs": 2, "weights": "loaded"}))
    ours.send(("closed",))
    backend.close()
    assert backend.error is None
    ours.close()
    backend._thread.join(WAIT)
    assert not backend._thread.is_alive()
    theirs.close()
