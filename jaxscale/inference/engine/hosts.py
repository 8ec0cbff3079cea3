"""Multi-node inference: process 0 schedules, and tells the others what to run.

Each process has its shard of the model and compiles all programs; a multi-host program
starts when every process has called it. Process 0 therefore sends each of the others,
over one TCP connection, which program it calls next, and the bytes of the inputs, whose
types and shapes both sides know, so nothing is unpickled. The others call the same
programs, in the same order, on their own state.

A connecting process must know a secret that process 0 broadcasts over the devices. Both
sides send a heartbeat every few seconds. Nothing is encrypted, nor is the traffic of
the devices: the network must be trusted.
"""

import collections
import contextlib
import hashlib
import logging
import math
import os
import queue
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxscale.inference.engine.runner import Key, Runner
from jaxscale.sharding.distributed import initialize
from jaxscale.supervision import handshake


ALIVE_SECONDS = 5.0
"""Seconds between heartbeats."""

SILENT_SECONDS = 60.0
"""Seconds of silence, or of not receiving, after which a peer counts as lost."""

_GRACE_SECONDS = 10.0
_HEAD = struct.Struct("!HBI")  # the program, a bit for each input, bytes that follow
_ALIVE, _END = 2**16 - 1, 2**16 - 2
_SECRET, _HOST = 32, 256
_IN_FLIGHT = 2

_log = logging.getLogger(__name__)


class HostLost(RuntimeError):
    """Another process of the job has ended, or does not respond."""


def spans_hosts(device_set: Any) -> bool:
    """Whether devices belong to several processes."""
    return len({device.process_index for device in device_set}) > 1


class Wire:
    """The wire format of program calls."""

    def __init__(self, runner: Runner) -> None:
        """Number the programs of a runner, which are the same on all hosts."""
        self._inputs = {
            key: [(x.shape, np.dtype(x.dtype)) for x in inputs]
            for key, inputs in runner.inputs().items()
        }
        self._keys = list(self._inputs)
        self._numbers = {key: number for number, key in enumerate(self._keys)}
        sizes = (sum(map(_bytes, inputs)) for inputs in self._inputs.values())
        self.longest = max(1024, *sizes)
        """Maximum bytes after a header."""

    def digest(self) -> bytes:
        """Equal if the programs are equal."""
        return hashlib.sha256(repr(self._inputs).encode()).digest()

    def pack(self, key: Key, inputs: Sequence[np.ndarray | None]) -> bytes:
        """Encode a call."""
        shapes = self._inputs[key]
        mask, parts = 0, []
        for i, (x, (shape, dtype)) in enumerate(zip(inputs, shapes, strict=True)):
            if x is not None:
                if (x.shape, x.dtype) != (shape, dtype):
                    raise ValueError(f"input {i} of {key} is {x.dtype}{x.shape}")
                mask |= 1 << i
                parts.append(x.tobytes())
        body = b"".join(parts)
        return _HEAD.pack(self._numbers[key], mask, len(body)) + body

    def unpack(
        self, number: int, mask: int, body: bytes
    ) -> tuple[Key, list[np.ndarray | None]]:
        """The program and inputs of a call.

        Raises:
            HostLost: the message is invalid.
        """
        if number >= len(self._keys):
            raise HostLost(f"process 0 calls program {number}, which there is not")
        key, at, inputs = self._keys[number], 0, []
        for i, (shape, dtype) in enumerate(self._inputs[key]):
            if not mask & 1 << i:
                inputs.append(None)
                continue
            end = at + _bytes((shape, dtype))
            if end > len(body):
                raise HostLost(f"process 0 sends too little for {key}")
            inputs.append(np.frombuffer(body[at:end], dtype).reshape(shape))
            at = end
        if at != len(body):
            raise HostLost(f"process 0 sends too much for {key}")
        return key, inputs


class Followers:
    """The other processes, on process 0."""

    def __init__(self, wire: Wire, sockets: dict[int, socket.socket]) -> None:
        self.error: HostLost | None = None
        """The error of a lost process, if any."""
        self._wire, self._sockets = wire, sockets
        self._lock = threading.Lock()
        self._closed = False
        self._on_lost: Callable[[HostLost], None] | None = None
        threading.Thread(target=self._watch, name="followers", daemon=True).start()

    def send(self, key: Key, inputs: Sequence[np.ndarray | None]) -> None:
        """Send the call of a program to all.

        Raises:
            HostLost: a process is lost.
        """
        self._send(self._wire.pack(key, inputs))

    def on_lost(self, call: Callable[[HostLost], None]) -> None:
        """Call `call`, on another thread, when a process is lost."""
        with self._lock:
            self._on_lost = call
        if self.error is not None:
            call(self.error)

    def close(self, error: BaseException | None = None) -> None:
        """End the others; with `error`, tell them why."""
        with self._lock:
            self._closed = True
            self._end(error)

    def _end(self, error: BaseException | None) -> None:
        """Send the last message, under the lock."""
        why = b"" if error is None else repr(error).encode()[:1000]
        for connection in self._sockets.values():
            with contextlib.suppress(OSError):
                connection.sendall(_HEAD.pack(_END, 0, len(why)) + why)
                connection.shutdown(socket.SHUT_WR)

    def _send(self, frame: bytes) -> None:
        with self._lock:
            if self.error is not None:
                raise self.error
            if self._closed:
                return
            for index, connection in self._sockets.items():
                try:
                    connection.sendall(frame)
                except OSError as error:
                    ended = isinstance(error, ConnectionError)
                    problem = "has ended" if ended else f"takes nothing: {error}"
                    self.error = HostLost(
                        f"process {index} {problem}; start all processes again"
                    )
                    raise self.error from error

    def _watch(self) -> None:
        selector = selectors.DefaultSelector()
        for index, connection in self._sockets.items():
            selector.register(connection, selectors.EVENT_READ, index)
        now = said = time.monotonic()
        heard = dict.fromkeys(self._sockets, now)
        with selector:
            while heard:
                for key, _ in selector.select(ALIVE_SECONDS / 4):
                    if _gone(key.fileobj):
                        selector.unregister(key.fileobj)
                        del heard[key.data]
                        self._lose(f"process {key.data} has ended")
                    else:
                        heard[key.data] = time.monotonic()
                now = time.monotonic()
                for index, at in heard.items():
                    if now - at > SILENT_SECONDS:
                        self._lose(f"process {index} says nothing for {now - at:.0f} s")
                if (self._closed and now - said > SILENT_SECONDS) or self.error:
                    break
                if not self._closed and now - said > ALIVE_SECONDS:
                    said = now
                    with contextlib.suppress(HostLost):
                        self._send(_HEAD.pack(_ALIVE, 0, 0))
        # The others hear which process is lost, unless one blocks who is sending.
        if self.error is not None and self._lock.acquire(timeout=1.0):
            self._end(self.error)
            self._lock.release()
        for connection in self._sockets.values():
            connection.close()

    def _lose(self, problem: str) -> None:
        if self._closed:
            return
        error = self.error or HostLost(f"{problem}; start all processes again")
        # Not under the lock, which a process that does not receive may block.
        self.error = error
        if self._on_lost is not None:
            self._on_lost(error)


def gather(runner: Runner, *, timeout: float = 120.0) -> Followers:
    """Wait for the other processes of the job, on process 0; they call `follow`.

    Args:
        runner: The runner, which need not be compiled.
        timeout: Time limit in seconds.

    Raises:
        TimeoutError: not all have connected.
        ValueError: they have other programs.
    """
    wire, secret = Wire(runner), secrets.token_bytes(_SECRET)
    dual = socket.has_dualstack_ipv6()
    server = socket.create_server(
        ("", 0),
        family=socket.AF_INET6 if dual else socket.AF_INET,
        dualstack_ipv6=dual,
        backlog=1024,
    )
    found: dict[int, socket.socket] = {}
    with contextlib.ExitStack() as open_sockets, server:
        _agree(wire)
        _broadcast(secret, server.getsockname()[1], _own_host())
        deadline = time.monotonic() + timeout
        while len(found) < jax.process_count() - 1:
            server.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                connection, _ = server.accept()
            except TimeoutError:
                missing = set(range(1, jax.process_count())) - set(found)
                raise TimeoutError(
                    f"processes {sorted(missing)} did not connect to process 0 at "
                    f"{_own_host()} within {timeout:g} s; check that no firewall "
                    "closes its ports"
                ) from None
            index = None
            with contextlib.suppress(OSError, HostLost):
                index = _welcome(connection, secret)
            if index is None:  # a stranger
                connection.close()
                continue
            found[index] = open_sockets.enter_context(connection)
        open_sockets.pop_all()
    return Followers(wire, found)


def follow(runner: Runner, connection: socket.socket) -> None:
    """Execute the calls of process 0, until it ends.

    Args:
        runner: A compiled runner.
        connection: The result of `join`.

    Raises:
        HostLost: process 0 is lost, or its engine has failed.
    """
    wire = Wire(runner)
    calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
    over = threading.Event()

    def receive() -> None:
        try:
            while (call := _receive(connection, wire)) is not None:
                calls.put(call)
            calls.put(None)
        except (HostLost, OSError) as error:
            lost = error if isinstance(error, HostLost) else _silent(error)
            # At once: JAX ends the process when process 0 has ended.
            _log.error("%s", lost)
            calls.put(lost)
            if not over.wait(_GRACE_SECONDS):
                # A device waits for those of process 0, which never arrive.
                os._exit(1)

    def live() -> None:
        while not over.wait(ALIVE_SECONDS):
            with contextlib.suppress(OSError):
                connection.sendall(b".")

    for target in (receive, live):
        threading.Thread(target=target, name=target.__name__, daemon=True).start()
    flying: collections.deque[Any] = collections.deque()
    try:
        while (call := calls.get()) is not None:
            if isinstance(call, HostLost):
                raise call
            key, inputs = call
            flying.append(runner.dispatch(key, *inputs))
            # Errors on a device are raised here.
            while len(flying) > _IN_FLIGHT:
                jax.block_until_ready(flying.popleft())
        jax.block_until_ready(list(flying))
    finally:
        over.set()
        connection.close()


def join(runner: Runner, *, timeout: float = 120.0) -> socket.socket:
    """Connect to process 0, which calls `gather`.

    Args:
        runner: The runner, which need not be compiled.
        timeout: Time limit in seconds.

    Raises:
        HostLost: process 0 cannot be reached.
        ValueError: process 0 has other programs.
    """
    _agree(Wire(runner))
    secret, port, host = _broadcast(bytes(_SECRET), 0, "")
    with contextlib.ExitStack() as unless_known:
        try:
            connection = socket.create_connection((host, port), timeout=timeout)
            unless_known.enter_context(connection)
            connection.settimeout(SILENT_SECONDS)
            _introduce(connection, secret)
        except handshake.ProtocolError as error:
            raise HostLost(f"{host}:{port} is not process 0 of this job") from error
        except OSError as error:
            raise HostLost(
                f"process 0 cannot be reached at {host}:{port}: {error}; check that "
                "the name leads there and that no firewall closes its ports"
            ) from error
        unless_known.pop_all()
    return connection


def _introduce(connection: socket.socket, secret: bytes) -> None:
    """Prove to process 0 that this one knows the secret, and send its number."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    handshake.shake_hands(connection, handshake.introduce(secret.hex()))
    connection.sendall(struct.pack("!I", jax.process_index()))


def _welcome(connection: socket.socket, secret: bytes) -> int:
    """The number of a process that knows the secret."""
    connection.settimeout(SILENT_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    handshake.shake_hands(connection, handshake.welcome(secret.hex()))
    return struct.unpack("!I", _exactly(connection, 4))[0]


def _agree(wire: Wire) -> None:
    """Compare the programs of all processes."""
    mine = np.frombuffer(wire.digest(), np.uint32)
    all_of_them = np.asarray(multihost_utils.process_allgather(mine))
    others = np.flatnonzero((all_of_them != all_of_them[0]).any(axis=1))
    if others.size:
        raise ValueError(
            f"the processes {others.tolist()} have other programs than process 0; give "
            "all of them the same model, mesh and options of the engine"
        )


def _broadcast(secret: bytes, port: int, host: str) -> tuple[bytes, int, str]:
    """Broadcast a string from process 0."""
    said = secret + struct.pack("!H", port) + host.encode().ljust(_HOST, b"\0")
    heard = multihost_utils.broadcast_one_to_all(np.frombuffer(said, np.uint8))
    raw = np.asarray(heard).astype(np.uint8).tobytes()
    (port,) = struct.unpack("!H", raw[_SECRET : _SECRET + 2])
    return raw[:_SECRET], port, raw[_SECRET + 2 :].rstrip(b"\0").decode()


def _own_host() -> str:
    """The host name by which the others reach process 0."""
    coordinator = initialize().coordinator
    if coordinator is None:
        return socket.getfqdn()
    return coordinator.rpartition(":")[0].strip("[]")


def _receive(
    connection: socket.socket, wire: Wire
) -> tuple[Key, list[np.ndarray | None]] | None:
    """The next call; None at the end."""
    while True:
        number, mask, size = _HEAD.unpack(_exactly(connection, _HEAD.size))
        if size > wire.longest:
            raise HostLost(f"process 0 sends {size} bytes, more than any call has")
        body = _exactly(connection, size)
        if number == _END:
            if body:
                raise HostLost(f"the engine of process 0 has stopped: {body.decode()}")
            return None
        if number != _ALIVE:
            return wire.unpack(number, mask, body)


def _bytes(x: tuple[tuple[int, ...], np.dtype]) -> int:
    shape, dtype = x
    return math.prod(shape) * dtype.itemsize


def _exactly(connection: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = connection.recv(min(size - len(parts), 2**20))
        if not part:
            raise HostLost("process 0 has ended; start all processes again")
        parts += part
    return bytes(parts)


def _gone(connection: Any) -> bool:
    try:
        return not connection.recv(4096)
    except OSError:
        return True


def _silent(error: OSError) -> HostLost:
    return HostLost(f"process 0 does not answer ({error}); start all processes again")
