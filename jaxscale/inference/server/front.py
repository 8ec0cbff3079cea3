"""The HTTP server in a process of its own, for an engine in this one.

Python runs one thread of a process at a time. With hundreds of streams the server has
work all the time, and the engine's thread would wait for its turn at each of its steps.
"""

import contextlib
import dataclasses
import gc
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from jaxscale.inference.server.backend import EngineBackend, Loading, TextModel
from jaxscale.inference.server.channel import Channel
from jaxscale.inference.server.config import ServerConfig
from jaxscale.inference.server.remote import EngineHost, RemoteBackend, sendable
from jaxscale.inference.server.run import make_server
from jaxscale.inference.server.service import Served


_AT_ONCE = signal.SIGUSR1  # ends the other process without a drain


class ServerLost(RuntimeError):
    """The process of the HTTP server has failed while the model was loaded or compiled.

    A thread is at that; a process that does not wait for it has to leave by `os._exit`.
    """


def serve_in_front(
    load: Callable[[], Served],
    config: ServerConfig,
    listener: socket.socket,
    *,
    access_log: bool = False,
) -> bool:
    """Serve a model from another process, until SIGTERM or Ctrl-C.

    Args:
        load: Loads the model, whose backend is an `EngineBackend`.
        config: Settings.
        listener: The other process accepts connections at it.
        access_log: Log one line per request.

    Returns:
        Whether the model was loaded and all its programs compiled.

    Raises:
        ServerLost: the other process has failed, before this is true.
        RuntimeError: it has failed after that.
        Exception: what `load` raises.
    """
    ours, theirs = socket.socketpair()
    inherited = listener.fileno(), theirs.fileno()
    # It computes nothing, and must not take memory of the device.
    paths = os.pathsep.join(sys.path)
    env = {**os.environ, "PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"}
    job = [sys.executable, "-m", "jaxscale.inference.server.front"]
    process = subprocess.Popen(
        [*job, *map(str, inherited)],
        pass_fds=inherited,
        env=env,
        start_new_session=True,  # this process passes signals on, each once
    )
    theirs.close()
    channel = Channel(ours)
    level = logging.getLogger("jaxscale").level
    channel.send((config, access_log, level))
    host = _Host(load, channel)
    with _passed_on(process) as sent:
        code = process.wait()
    channel.close()
    if host.backend is not None or host.failure is not None:
        host.join()
    if host.failure is not None:
        raise host.failure
    whole = False
    if host.backend is not None:
        compiled, programs = host.backend.load().programs
        whole = compiled == programs
    if code and not sent:
        lost = RuntimeError if whole else ServerLost
        raise lost(f"the process of the HTTP server has ended with {code}")
    return whole


class _Host(threading.Thread):
    """Loads the model and lets the other process use it."""

    def __init__(self, load: Callable[[], Served], channel: Channel) -> None:
        super().__init__(name="front", daemon=True)
        self._load, self._channel = load, channel
        if isinstance(load, Loading):
            load.on_change = lambda state: channel.send(("loading", state))
            load.on_texts = self._send_texts
        self._sent: dict[str, Any] = {}
        self.failure: BaseException | None = None
        self.backend: EngineBackend | None = None
        """Its engine, once it is loaded."""
        self.start()

    def run(self) -> None:
        try:
            model = self._load()
            backend = model.backend if isinstance(model, TextModel) else None
            if not isinstance(model, TextModel) or not isinstance(
                backend, EngineBackend
            ):
                raise TypeError(
                    f"backend {backend!r} must be an EngineBackend for a server in a "
                    "process of its own"
                )
        except BaseException as error:  # it is raised where the thread is awaited
            self.failure = error
            self._channel.send(("failed", sendable(error)))
            return
        self.backend = backend
        host = EngineHost(backend, self._channel)
        others = {f.name: getattr(model, f.name) for f in dataclasses.fields(model)}
        del others["backend"], others["_texts"]
        for name, value in self._sent.items():
            if others[name] is value:
                del others[name]
        self._channel.send(("model", others, backend.config))
        host.run()

    def _send_texts(self, fields: dict[str, Any]) -> None:
        """A tokenizer takes the other process a second: while weights are read here."""
        self._sent = fields
        self._channel.send(("texts", fields))


@contextlib.contextmanager
def _passed_on(process: subprocess.Popen[bytes]) -> Iterator[list[int]]:
    """Pass on the signals that end a server, which are listed."""
    sent: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        # Whoever sends SIGTERM may send it to both processes: it cannot say "at once".
        process.send_signal(_AT_ONCE if sent else signal.SIGTERM)
        sent.append(number)

    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            before[number] = signal.signal(number, pass_on)
    try:
        yield sent
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Awaited(Loading):
    """The model, once the other process has loaded it."""

    def __init__(self, channel: Channel, gone: Callable[[], None]) -> None:
        super().__init__(lambda progress: self._await(channel, gone))

    def _await(self, channel: Channel, gone: Callable[[], None]) -> TextModel:
        kind, texts = "loading", {}
        while kind in ("loading", "texts"):
            message = channel.receive()
            if message is None:
                raise RuntimeError("the process of the engine has ended")
            kind, *content = message
            if kind == "loading":
                (self.state,) = content
            elif kind == "texts":
                (texts,) = content
        if kind == "failed":
            raise content[0]
        fields, sizes = content
        return _model(channel, gone, texts | fields, sizes)


def _model(
    channel: Channel, gone: Callable[[], None], fields: dict[str, Any], sizes: Any
) -> TextModel:
    """The model of the other process."""
    backend = RemoteBackend(channel, sizes, fields["tokenizer"], gone=gone)
    gc.collect()
    gc.freeze()  # what is there now stays
    return TextModel(backend=backend, **fields)


def main(listener: int, connection: int) -> None:
    """Answer calls at a listening socket, for the engine behind another."""
    gc.collect()
    gc.freeze()  # what was imported stays
    channel = Channel(socket.socket(fileno=connection))
    settings: Any = channel.receive()
    if settings is None:
        return
    config, access_log, level = settings
    logging.basicConfig(format="%(levelname)s: %(message)s")
    logging.getLogger("jaxscale").setLevel(level)
    load = _Awaited(channel, lambda: server.stop())
    server = make_server(load, config, access_log=access_log)
    server.patient = True

    def at_once(number: int, frame: FrameType | None) -> None:
        server.should_exit = True

    signal.signal(_AT_ONCE, at_once)
    with socket.socket(fileno=listener) as sock:
        server.run([sock])


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
