"""Metrics for Prometheus: the load of the engine, and latencies."""

import bisect
import itertools
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from jaxscale import __version__
from jaxscale.inference.server.backend import Load


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Media type of the text."""

_WAITS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_STEPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)
_WHOLE = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)

_GAUGES = {
    "requests_waiting": "Continuations that wait for their turn.",
    "requests_running": "Continuations that hold pages of the cache.",
    "waiting_tokens": "Tokens of the prompts that wait.",
    "kv_cache_usage": "Share of the pages of keys and values in use, 0 to 1.",
    "kv_pages": "Pages of keys and values.",
    "programs": "Programs of the model.",
    "programs_compiled": "Those that are compiled; until then larger ones stand in.",
}
_COUNTERS = {
    "requests_received": "Requests, those that were refused among them.",
    "preemptions": "Times that a continuation lost its pages and started again.",
    "prompt_tokens": "Tokens of prompts that were computed.",
    "cached_prompt_tokens": "Tokens of prompts that were found in the cache.",
    "generated_tokens": "Tokens that were drawn.",
    "drafted_tokens": "Tokens that were guessed before they were drawn.",
    "accepted_tokens": "Guessed tokens that were right.",
    "compactions": "Times that rows of the batch moved.",
}
_TEXTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_TOKENS = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_OF_ENCODERS = (
    "requests_waiting",
    "requests_running",
    "requests_received",
    "prompt_tokens",
    "programs",
    "programs_compiled",
)


class Metrics:
    """Counts and times since the start.

    Example:
        >>> metrics = Metrics()
        >>> metrics.first_token(0.02)
        >>> 'jaxscale_time_to_first_token_seconds_count 1.0' in metrics.text().decode()
        True
    """

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.listeners: list[Callable[[str, float], None]] = []
        """Called with the name and the value of each time that is measured."""

        def numbers(name: str, about: str, bounds: tuple[float, ...]) -> _Numbers:
            made = _Numbers(f"jaxscale_{name}", about, bounds)
            self._registry.register(made)
            return made

        def times(name: str, about: str, bounds: tuple[float, ...]) -> _Numbers:
            return numbers(f"{name}_seconds", about, bounds)

        self._times = {
            "ttft": times(
                "time_to_first_token", "From the request to its first token.", _WAITS
            ),
            "gap": times(
                "time_between_tokens", "Between tokens of a continuation.", _STEPS
            ),
            "queue": times(
                "request_queue",
                "From a call of an encoder to the beginning of its computation.",
                _WAITS,
            ),
            "request": times("request", "From a request to its end.", _WHOLE),
            "step": times("step", "Of the engine's loop while it is busy.", _STEPS),
        }
        self._passes = (
            times("pass", "Of an encoder, from its launch to its results.", _STEPS),
            numbers("pass_texts", "Texts of a pass of an encoder.", _TEXTS),
            numbers("pass_tokens", "Tokens of a pass of an encoder.", _TOKENS),
        )
        self._calls = Counter(
            "jaxscale_http_requests",
            "Answers by path and status.",
            ("path", "status"),
            registry=self._registry,
        )

    def watch(self, load: Callable[[], Load], *, generates: bool = True) -> None:
        """Ask a model how busy it is, each time that the text is read.

        Args:
            load: Says it.
            generates: False for encoders, which have no pages and draw no tokens.
        """
        self._registry.register(_LoadCollector(load, generates))

    def first_token(self, seconds: float) -> None:
        """Record the time from a request to its first token."""
        self._measure("ttft", seconds)

    def gaps(self, seconds: float, count: int) -> None:
        """Record `count` more tokens of a sequence, and the time between them."""
        self._measure("gap", seconds, count)

    def queued(self, seconds: float) -> None:
        """Record the time from an encoder's request to its computation."""
        self._measure("queue", seconds)

    def finished(self, seconds: float) -> None:
        """Record the time from a request to its end."""
        self._measure("request", seconds)

    def step(self, seconds: float) -> None:
        """Record an engine step."""
        self._measure("step", seconds)

    def passed(self, seconds: float, texts: int, tokens: int) -> None:
        """Record a pass of an encoder."""
        for each, value in zip(self._passes, (seconds, texts, tokens), strict=True):
            each.add(value, 1)

    def answered(self, path: str, status: int) -> None:
        """Count a finished HTTP request."""
        self._calls.labels(path, str(status)).inc()

    def text(self) -> bytes:
        """Everything, in the format of Prometheus."""
        return generate_latest(self._registry)

    def _measure(self, name: str, seconds: float, count: int = 1) -> None:
        self._times[name].add(seconds, count)
        for listener in self.listeners:
            listener(name, seconds)


class _Numbers(Collector):
    """A histogram that takes many equal numbers at once; one thread adds to it."""

    def __init__(self, name: str, about: str, bounds: tuple[float, ...]) -> None:
        self._name, self._about, self._bounds = name, about, bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float, count: int) -> None:
        self._counts[bisect.bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def collect(self) -> Iterator[Metric]:
        totals = itertools.accumulate(self._counts)
        bounds = [*(f"{float(bound)}" for bound in self._bounds), "+Inf"]
        yield HistogramMetricFamily(
            self._name,
            self._about,
            buckets=list(zip(bounds, totals, strict=True)),
            sum_value=self._sum,
        )


class _LoadCollector(Collector):
    """Reads an engine when Prometheus reads the server."""

    def __init__(self, load: Callable[[], Load], generates: bool) -> None:
        self._load = load
        names = [*_GAUGES, *_COUNTERS]
        self._shown = names if generates else _OF_ENCODERS

    def collect(self) -> Iterator[Metric]:
        load = self._load()
        counts = load.counts
        gauges = {
            "requests_waiting": load.waiting,
            "requests_running": load.running,
            "waiting_tokens": load.waiting_tokens,
            "kv_cache_usage": load.kv_usage,
            "kv_pages": load.pages,
            "programs": load.programs[1],
            "programs_compiled": load.programs[0],
        }
        counters = {
            "requests_received": counts.received,
            "preemptions": counts.preempted,
            "prompt_tokens": counts.prompt_tokens,
            "cached_prompt_tokens": counts.cached_tokens,
            "generated_tokens": counts.drawn_tokens,
            "drafted_tokens": counts.drafted_tokens,
            "accepted_tokens": counts.accepted_tokens,
            "compactions": counts.compactions,
        }
        for name, about in _GAUGES.items():
            if name not in self._shown:
                continue
            yield GaugeMetricFamily(f"jaxscale_{name}", about, value=gauges[name])
        for name, about in _COUNTERS.items():
            if name not in self._shown:
                continue
            yield CounterMetricFamily(f"jaxscale_{name}", about, value=counters[name])
        ended = CounterMetricFamily(
            "jaxscale_requests_ended", "Requests by how they ended.", labels=["outcome"]
        )
        for outcome in ("finished", "aborted", "rejected", "timeout", "failed"):
            ended.add_metric([outcome], getattr(counts, outcome))
        yield ended
        build = GaugeMetricFamily("jaxscale_build", "The version.", labels=["version"])
        build.add_metric([__version__], 1)
        yield build
