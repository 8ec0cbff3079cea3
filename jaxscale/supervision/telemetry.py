"""Telemetry of a job: slow ranks, and Prometheus metrics."""

import asyncio
import collections
import contextlib
import dataclasses
import heapq
import json
import math
import os
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxscale.supervision import phases
from jaxscale.supervision.protocol import Exited, Measured, Moved, split_address
from jaxscale.supervision.slow import Measurements


PARTS: tuple[str, ...] = (
    "productive",
    "lost",
    "checkpoint",
    "evaluation",
    "start",
    "restart",
)
"""Parts of the time of a job, as seen by its driver."""

_CONTENT = "text/plain; version=0.0.4; charset=utf-8"
_REQUEST_SECONDS, _LONGEST_REQUEST = 5.0, 2**14
_LOOK_SECONDS, _TAIL = 1.0, 2**14
_REST = 20  # times as long as the search for slow ranks took


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlowNews:
    """A change in which ranks are slow."""

    line: str
    """A sentence for the user."""
    ranks: list[int]
    """Ranks that are slow now, the slowest first."""
    factors: list[float]
    """Factor by which each works longer than the others."""
    names: list[str]
    """The quantity that shows it: computing or host."""
    hosts: list[str]
    """Hosts of these ranks."""

    @property
    def args(self) -> dict[str, Any]:
        """Arguments of its event."""
        return {k: v for k, v in vars(self).items() if k != "line"}


class Telemetry:
    """Collects the metrics of a job."""

    def __init__(self, output: Path, ranks: int) -> None:
        self._output, self._count = output, ranks
        self.starts = 0
        """Starts of the job until now."""
        self._phases: dict[int, str] = {}
        self._lowest: list[int] = []
        """A heap of the ranks above, and of some that have exited."""
        self._step, self._loss, self._step_at = -1, math.nan, math.nan
        self._faults = collections.Counter[str]()
        self._times: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        self._unsaved, self._at = 0.0, time.monotonic()
        self._is_down = False
        self._host_of: dict[int, str] = {}
        self._begin_cycle()

    def _begin_cycle(self) -> None:
        self._phases, self._lowest, self._runs = {}, [], False
        self._measured, self._slow, self._next_look = Measurements(), [], 0.0

    def started(self, cycle: int) -> None:
        """The ranks were started."""
        self._tick()
        self.starts = cycle
        self._begin_cycle()

    def heard(self, message: Any) -> None:
        """Process a message of a rank in the current cycle."""
        match message:
            case Measured():
                self._measured.add(message)
            case Exited():
                self._phases.pop(message.rank, None)
            case Moved(phase=phases.DONE):
                self._tick()
                self._runs, self._is_down = True, False
                if message.step > self._step:
                    self._step, self._step_at = message.step, time.time()
                self._loss = message.loss or self._loss
            case Moved():
                self._tick()
                for rank in message.ranks:
                    if rank not in self._phases:
                        heapq.heappush(self._lowest, rank)
                    self._phases[rank] = message.phase
                if message.phase == phases.SAVED:
                    self._unsaved = 0.0

    def failed(self, kind: str) -> None:
        """A cycle has ended by a fault."""
        self._tick()
        self._faults[kind] += 1
        self._times["lost"] += self._unsaved
        self._times["productive"] -= self._unsaved
        self._unsaved, self._is_down = 0.0, True
        self._begin_cycle()

    def _tick(self) -> None:
        """Add the time until now to the part that the job is in."""
        now = time.monotonic()
        seconds, self._at = now - self._at, now
        while self._lowest and self._lowest[0] not in self._phases:
            heapq.heappop(self._lowest)
        phase = self._phases[self._lowest[0]] if self._lowest else ""
        part = phases.PAUSES.get(phase, "productive")
        if not self._runs and phase not in phases.PAUSES:
            part = "restart" if self._is_down else "start"
        self._times[part] += seconds
        if part == "productive":
            self._unsaved += seconds

    def slow_news(
        self, ranks_of: Iterable[tuple[str, Iterable[int]]]
    ) -> SlowNews | None:
        """The change in slow ranks, if any.

        They are searched once a second, or less often if that takes long.
        """
        now = time.monotonic()
        if not self._measured.is_new or now < self._next_look:
            return None
        begun = time.perf_counter()
        before = {(name, slow.rank) for name, slow in self._slow}
        self._slow = self._measured.slow()
        took = time.perf_counter() - begun
        self._next_look = now + max(_LOOK_SECONDS, _REST * took)
        if {(name, slow.rank) for name, slow in self._slow} == before:
            return None
        host_of = {rank: host for host, ranks in ranks_of for rank in ranks}
        self._host_of = host_of
        hosts = dict.fromkeys(host_of.get(slow.rank, "?") for _, slow in self._slow)
        texts = [
            f"rank {slow.rank} on {host_of.get(slow.rank, '?')} takes "
            f"{slow.factor:.2f} times as long as the others ({name})"
            for name, slow in self._slow[:8]
        ]
        more = f", and {len(self._slow) - 8} more" if len(self._slow) > 8 else ""
        return SlowNews(
            line="slow: " + "; ".join(texts) + more if texts else "no rank is slow now",
            ranks=[slow.rank for _, slow in self._slow],
            factors=[round(slow.factor, 3) for _, slow in self._slow],
            names=[name for name, _ in self._slow],
            hosts=list(hosts),
        )

    @contextlib.asynccontextmanager
    async def served(self, address: str) -> AsyncIterator[None]:
        """Context that serves ``GET /metrics`` on ``host:port``; nothing for "".

        Raises:
            ValueError: the address cannot be listened on.
        """
        if not address:
            yield
            return
        host, port = split_address(address)
        try:
            server = await asyncio.start_server(
                self._answer, host, port, limit=_LONGEST_REQUEST
            )
        except OSError as error:
            raise ValueError(
                f"metrics_address {address} cannot be listened at ({error}); choose "
                "another one"
            ) from error
        try:
            yield
        finally:
            server.close()

    async def _answer(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with contextlib.closing(writer), contextlib.suppress(OSError, ValueError):
            try:
                async with asyncio.timeout(_REQUEST_SECONDS):
                    head = await reader.readuntil(b"\r\n\r\n")
            except (
                TimeoutError,
                asyncio.IncompleteReadError,
                asyncio.LimitOverrunError,
            ):
                return
            method, path, *_ = [*head.split(b"\r\n")[0].split(), b"", b""]
            status, body = "200 OK", self.exposition().encode()
            if path.partition(b"?")[0] != b"/metrics":
                status, body = "404 Not Found", b"metrics are at /metrics\n"
            elif method not in (b"GET", b"HEAD"):
                status, body = "405 Method Not Allowed", b"only GET\n"
            fields = f"Content-Type: {_CONTENT}\r\nContent-Length: {len(body)}\r\n"
            answer = f"HTTP/1.1 {status}\r\n{fields}Connection: close\r\n\r\n".encode()
            writer.write(answer if method == b"HEAD" else answer + body)
            async with asyncio.timeout(_REQUEST_SECONDS):
                await writer.drain()

    def exposition(self) -> str:
        """All metrics, in the text format of Prometheus."""
        self._tick()
        newest = _last_record(self._output / "metrics.jsonl")
        slow = [
            (
                {
                    "rank": str(x.rank),
                    "host": self._host_of.get(x.rank, ""),
                    "by": name,
                },
                x.factor,
            )
            for name, x in self._slow
        ]
        rate = newest.get("tokens_per_second_per_device")
        since = time.time() - self._step_at
        one = dict[str, str]()
        families = [
            ("step", "gauge", "Newest step that is done.", [(one, self._step)]),
            ("loss", "gauge", "Loss of the newest step.", [(one, self._loss)]),
            (
                "tokens_per_second_per_device",
                "gauge",
                "Predicted tokens, of the newest record of the metrics.",
                [(one, rate)],
            ),
            (
                "step_seconds",
                "gauge",
                "Time of a step, of the newest record of the metrics.",
                [(one, newest.get("step_seconds"))],
            ),
            (
                "seconds_since_last_step",
                "gauge",
                "Time since a new step was done.",
                [(one, since)],
            ),
            (
                "time_seconds",
                "gauge",
                "Time by what the job did; lost is what was computed again.",
                [({"part": part}, seconds) for part, seconds in self._times.items()],
            ),
            (
                "faults_total",
                "counter",
                "Faults since the driver was started, by kind.",
                [({"kind": kind}, n) for kind, n in sorted(self._faults.items())],
            ),
            (
                "restarts_total",
                "counter",
                "Starts of the job after the first.",
                [(one, max(self.starts - 1, 0))],
            ),
            ("ranks", "gauge", "Processes of the job.", [(one, self._count)]),
            (
                "ranks_alive",
                "gauge",
                "Processes that have spoken in this start, and not left.",
                [(one, len(self._phases))],
            ),
            (
                "slow_ranks",
                "gauge",
                "Processes that are slow.",
                [(one, len({x.rank for _, x in self._slow}))],
            ),
            (
                "slow_rank_factor",
                "gauge",
                "How many times as long a slow rank is at work as the others.",
                slow,
            ),
        ]
        return "".join(family(f"jaxscale_{name}", *rest) for name, *rest in families)


def family(
    name: str,
    kind: str,
    text: str,
    samples: Iterable[tuple[Mapping[str, str], float | None]],
) -> str:
    r"""A metric in the text format of Prometheus; None is no sample.

    Example:
        >>> print(family("x", "gauge", "A thing.", [({"a": 'say "y"'}, 2)]), end="")
        # HELP x A thing.
        # TYPE x gauge
        x{a="say \"y\""} 2
    """
    lines = [f"# HELP {name} {_escape(text)}", f"# TYPE {name} {kind}"]
    for labels, value in samples:
        if value is not None:
            pairs = [f'{k}="{_quote(v)}"' for k, v in labels.items()]
            shown = "{" + ",".join(pairs) + "}" if pairs else ""
            lines.append(f"{name}{shown} {_number(value)}")
    return "\n".join(lines) + "\n"


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")


def _quote(text: str) -> str:
    return _escape(text).replace('"', r"\"")


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value)


def _last_record(path: Path) -> dict[str, Any]:
    """The newest complete line of step metrics."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
            lines = file.read().splitlines()
    except OSError:
        return {}
    for line in reversed(lines):
        with contextlib.suppress(ValueError):
            record = json.loads(line)
            if isinstance(record, dict) and "step_seconds" in record:
                return {k: v for k, v in record.items() if isinstance(v, int | float)}
    return {}
