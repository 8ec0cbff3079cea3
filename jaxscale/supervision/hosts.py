"""The executors of a job, on the side of the driver."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jaxscale.supervision import handshake, protocol


_TICK_SECONDS = 0.05
_SHORT_SECONDS = 0.02
_LEAVE_SECONDS = 10.0
# Executors reconnect to a restarted driver at the same moment. The kernel may allow
# fewer (net.core.somaxconn); those that are refused try again.
_BACKLOG = 4096


class ConnectedHost:
    """A connected executor."""

    def __init__(self, host: protocol.Host, channel: protocol.Channel) -> None:
        """Store its description of itself."""
        self.name, self.address, self._channel = host.name, host.address, channel
        self.cycle, self.ranks = host.cycle, list(host.ranks)
        self.heard = 0.0
        """Time of its last message, by the driver's clock."""
        self.port: int | None = None
        """A free port, while no rank runs there."""
        self.stacks: dict[int, str] = {}
        self.diagnosis: protocol.Diagnosed | None = None

    def send(self, message: protocol.Message) -> None:
        """Send without waiting."""
        self._channel.send(message)

    def close(self) -> None:
        """End the connection."""
        self._channel.close()


class Hosts:
    """Serves executors, and keeps one running on this machine if asked to."""

    def __init__(
        self, secret: str, directory: Path, *, report: Callable[[str], None]
    ) -> None:
        """Start without any.

        Args:
            secret: Secret of the job.
            directory: Where the executor of this machine writes its log.
            report: Called with lines for the user.
        """
        self._secret, self._directory, self._report = secret, directory, report
        self._connected: dict[str, ConnectedHost] = {}
        self._ordered: list[ConnectedHost] | None = None
        """The hosts by name, until one connects or disconnects."""
        self._inbox: asyncio.Queue[tuple[ConnectedHost, Any]] = asyncio.Queue()
        self._taken = 0.0
        self._doubles: set[str] = set()
        self._server: asyncio.Server | None = None
        self._local: subprocess.Popen[bytes] | None = None
        self.address = ""
        """``host:port`` of the driver."""

    def __iter__(self) -> Iterator[ConnectedHost]:
        if self._ordered is None:
            hosts = self._connected.values()
            self._ordered = sorted(hosts, key=lambda host: host.name)
        return iter(self._ordered)

    def __len__(self) -> int:
        return len(self._connected)

    def get(self, name: str) -> ConnectedHost | None:
        """The host of this name, if it is connected."""
        return self._connected.get(name)

    async def listen(self, address: str, port: int) -> int:
        """Listen on `address`, or on `port` if it names none; returns the port.

        Raises:
            ValueError: the port is taken, or the address is not of this machine.
        """
        host, wanted = protocol.split_address(address)
        try:
            self._server = await asyncio.start_server(
                self._hear,
                host,
                wanted or port,
                limit=protocol.LONGEST_LINE,
                backlog=_BACKLOG,
            )
        except OSError as error:
            raise ValueError(
                f"address {host}:{wanted or port} cannot be listened at ({error}); end "
                "the process that uses the port, or choose another address"
            ) from error
        found = self._server.sockets[0].getsockname()[1]
        self.address = f"[{host}]:{found}" if ":" in host else f"{host}:{found}"
        return found

    async def take(self, understand: Callable[[ConnectedHost, Any], None]) -> None:
        """Pass on the executors' messages, for a moment."""
        # Messages of a moment are batched: looking at the whole job after each message
        # would leave no time for anything else.
        await asyncio.sleep(self._taken + _SHORT_SECONDS - time.monotonic())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_TICK_SECONDS):
                first = await self._inbox.get()
            understand(*first)
        self._taken = time.monotonic()
        while not self._inbox.empty():
            understand(*self._inbox.get_nowait())

    def broadcast(self, message: protocol.Message) -> None:
        """Send to all."""
        for host in self._connected.values():
            host.send(message)

    def drop(self, host: ConnectedHost) -> None:
        """Close the connection to a host that does not answer."""
        host.close()
        self._connected.pop(host.name, None)
        self._ordered = None

    def start_local(self, before: int) -> int:
        """Start the executor of this machine if none is there; its process.

        Args:
            before: Process id of a previous driver's executor, which has not
                reconnected; 0 if there was none.
        """
        if self._local is not None and self._local.poll() is None:
            return self._local.pid
        if before:
            self.end_local(before)
        module = "jaxscale.supervision.executor"
        with (self._directory / "executor.txt").open("ab") as log:
            self._local = subprocess.Popen(
                [sys.executable, "-m", module, self.address, socket.gethostname()],
                env=os.environ | {protocol.SECRET: self._secret},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # it continues when the driver is killed
            )
        return self._local.pid

    def end_local(self, process: int) -> None:
        """Kill an executor of this job; the kernel then kills its ranks."""
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{process}/cmdline").read_bytes().decode().split("\0")
            if self.address in words:  # not another process that has its number
                os.kill(process, signal.SIGKILL)

    async def close(self) -> None:
        """Tell all that the job is over, and wait a while until they disconnect."""
        self.broadcast(protocol.Quit())
        until = time.monotonic() + _LEAVE_SECONDS
        while self._connected and time.monotonic() < until:
            await asyncio.sleep(_TICK_SECONDS)
        for host in self:
            self.drop(host)
        await asyncio.sleep(_TICK_SECONDS)
        if self._server is not None:
            self._server.close()
        if self._local is not None:
            try:
                await asyncio.to_thread(self._local.wait, _LEAVE_SECONDS)
            except subprocess.TimeoutExpired:
                self._local.kill()
                self._local.wait()

    async def _hear(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Serve the connection of an executor."""
        channel, host = protocol.Channel(reader, writer), None
        with contextlib.closing(channel), contextlib.suppress(OSError):
            await channel.shake_hands(handshake.welcome(self._secret))
            first = await channel.receive()
            if not isinstance(first, protocol.Host):
                raise protocol.ProtocolError(f"an executor begins with {first}")
            if first.name in self._connected:
                if first.name not in self._doubles:  # it will try again
                    self._report(f"a second executor called {first.name} is sent away")
                self._doubles.add(first.name)
                return
            host = self._connected[first.name] = ConnectedHost(first, channel)
            self._ordered = None
            self._inbox.put_nowait((host, first))
            while True:
                self._inbox.put_nowait((host, await channel.receive()))
        if host is not None and self._connected.get(host.name) is host:
            del self._connected[host.name]
            self._ordered = None
