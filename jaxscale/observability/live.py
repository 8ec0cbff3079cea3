"""The live page of a run over HTTP, updated while files grow.

Only the page and its data are served; nothing in a request names a file. Work is
bounded: one thread at a time reads the run, at intervals proportional to the time that
it takes.
"""

import http
import http.server
import json
import re
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from jaxscale.observability.page import page, page_data
from jaxscale.observability.run import Run, RunReader


_LEAST_SECONDS = 1.0
_QUIET_SECONDS = 5.0
_REST = 4  # times as long as it took
_MOST_REQUESTS = 16
_REQUEST_SECONDS = 10.0
_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


class LiveRun:
    """The data of a run, reread when its files have changed."""

    def __init__(
        self, directory: str | Path, *, clock: Callable[[], float] = time.time
    ) -> None:
        """Set the output directory, which may still be empty."""
        self._directory, self._clock = Path(directory), clock
        self._reader, self._reading = RunReader(directory), threading.Lock()
        self._run: Run | None = None
        self._seen: dict[str, tuple[int, int]] | None = None
        self._next = 0.0
        self._data: dict[str, Any] | None = None

    def data(self) -> dict[str, Any]:
        """The newest data; the previous ones while they are being updated."""
        if self._reading.acquire(blocking=self._data is None):
            try:
                self._renew()
            finally:
                self._reading.release()
        assert self._data is not None
        return self._data

    def _renew(self) -> None:
        now = self._clock()
        if self._data is not None and now < self._next:
            return
        seen, began = self._files(), time.perf_counter()
        if seen != self._seen:
            try:
                self._run = self._reader.read()
            except FileNotFoundError as error:
                self._run, self._seen = None, seen
                self._data = {"title": str(self._directory), "time": now}
                self._data["empty"] = f"Nothing yet: {error}"
                self._next = now + _LEAST_SECONDS
                return
        changed = seen != self._seen
        self._seen = seen
        if self._run is not None:
            self._data = page_data(self._run, now=now)
        took = time.perf_counter() - began
        least = _LEAST_SECONDS if changed else _QUIET_SECONDS
        self._next = self._clock() + max(least, _REST * took)

    def _files(self) -> dict[str, tuple[int, int]]:
        """Sizes and modification times of the files."""
        patterns = ("events-*.jsonl", "metrics.jsonl", "supervisor/*.jsonl")
        found = {}
        for pattern in (*patterns, "supervisor/stacks-*-*.txt"):
            for path in self._directory.glob(pattern):
                stat = path.stat()
                found[str(path)] = stat.st_size, stat.st_mtime_ns
        return found


class ReportServer(http.server.ThreadingHTTPServer):
    """Serves the page of a run until `shutdown`.

    Example:
        >>> import tempfile, urllib.request
        >>> with ReportServer(("127.0.0.1", 0), tempfile.mkdtemp()) as server:
        ...     thread = threading.Thread(target=server.serve_forever)
        ...     thread.start()
        ...     answer = urllib.request.urlopen(server.url + "data.json")
        ...     server.shutdown()
        >>> json.load(answer)["empty"][:12]
        'Nothing yet:'
    """

    daemon_threads = True

    def __init__(self, address: tuple[str, int], directory: str | Path) -> None:
        """Listen.

        Args:
            address: Host and port; port 0 is a free one.
            directory: Output directory of the run.

        Raises:
            OSError: the address cannot be listened on.
        """
        self.live = LiveRun(directory)
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        self._room = threading.BoundedSemaphore(_MOST_REQUESTS)
        super().__init__(address, _Handler)

    @property
    def url(self) -> str:
        """URL of the page."""
        host, port = self.server_address[:2]
        name = f"[{host!s}]" if ":" in str(host) else str(host)
        return f"http://{name}:{port}/"

    @property
    def names(self) -> tuple[str, ...]:
        """Accepted hosts of a request; empty for any."""
        host = str(self.server_address[0])
        return _LOOPBACK if host in ("127.0.0.1", "::1") else ()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer on a thread, unless there are too many."""
        if self._room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer one request."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()


class _Handler(http.server.BaseHTTPRequestHandler):
    server: ReportServer  # pyright: ignore[reportIncompatibleVariableOverride]
    timeout = _REQUEST_SECONDS

    def do_GET(self) -> None:
        names = self.server.names
        host = re.sub(r":\d*$", "", self.headers.get("Host", ""))
        if names and host not in names:
            # A foreign page whose name resolves to this machine (DNS rebinding).
            self.send_error(http.HTTPStatus.FORBIDDEN)
            return
        url = urlsplit(self.path)
        if url.path == "/":
            self._send("text/html", page(self.server.live.data(), live=True))
        elif url.path == "/data.json":
            data = self.server.live.data()
            since = parse_qs(url.query).get("since", [""])[0]
            if since == json.dumps(data["time"]):
                self.send_response(http.HTTPStatus.NO_CONTENT)
                self.end_headers()
                return
            text = json.dumps(data, allow_nan=False, separators=(",", ":"))
            self._send("application/json", text)
        else:
            self.send_error(http.HTTPStatus.NOT_FOUND)

    def _send(self, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(http.HTTPStatus.OK)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("X-Frame-Options", "DENY")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: a page sends a request every two seconds."""
