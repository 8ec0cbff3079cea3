"""A connection between two processes of this machine that carries Python objects."""

import collections
import contextlib
import pickle
import socket
import struct
import threading
from typing import Any


_LENGTH = struct.Struct("<I")
_BUFFERED = 2**20  # bytes that the system holds for a reader that is late


class Channel:
    """One end of a pair of sockets; both belong to this library alone.

    Sending never waits: what the system does not take at once is sent by a thread, so
    that an engine goes on while the other process is busy.

    Example:
        >>> left, right = map(Channel, socket.socketpair())
        >>> left.send(("tokens", [1, 2]))
        >>> right.receive()
        ('tokens', [1, 2])
        >>> left.close()
        >>> right.receive() is None
        True
        >>> right.close()
    """

    def __init__(self, end: socket.socket) -> None:
        """Take over a connected socket."""
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            end.setsockopt(socket.SOL_SOCKET, option, _BUFFERED)
        self._socket, self._reader = end, end.makefile("rb")
        self._changed = threading.Condition()
        self._backlog: collections.deque[bytes] = collections.deque()
        self._writer: threading.Thread | None = None

    def send(self, message: Any) -> None:
        """Send a message after those before it; nothing happens if nobody is there.

        Args:
            message: What can be pickled, and is not None.
        """
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        data = _LENGTH.pack(len(data)) + data
        with self._changed:
            if not self._backlog:
                try:
                    data = data[self._socket.send(data, socket.MSG_DONTWAIT) :]
                except BlockingIOError:
                    pass
                except OSError:  # `receive` says so
                    return
            if data:
                self._backlog.append(data)
                self._changed.notify()
                if self._writer is None:
                    self._writer = threading.Thread(
                        target=self._write, name="channel", daemon=True
                    )
                    self._writer.start()

    def receive(self) -> Any:
        """Wait for the next message; None once the other end is closed."""
        with contextlib.suppress(OSError, ValueError):  # it was closed here
            head = self._reader.read(_LENGTH.size)
            if len(head) == _LENGTH.size:
                (size,) = _LENGTH.unpack(head)
                data = self._reader.read(size)
                if len(data) == size:
                    return pickle.loads(data)
        return None

    def close(self) -> None:
        """Close this end, also for a thread that receives."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # a thread that receives goes on
        self._reader.close()
        self._socket.close()

    def _write(self) -> None:
        """Send what had to wait."""
        while True:
            with self._changed:
                while not self._backlog:
                    self._changed.wait()
            try:
                self._socket.sendall(self._backlog[0])
            except OSError:
                return  # and the rest, which nobody reads
            with self._changed:
                self._backlog.popleft()
