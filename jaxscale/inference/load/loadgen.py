"""A load generator for OpenAI-compatible servers, which streams its requests.

Times are measured at the client, by one monotonic clock. The definitions are those of
``vllm bench serve``:

- TTFT: from sending a request to its first token;
- TPOT: (latency - TTFT) / (tokens - 1), of requests of several tokens;
- ITL: the gaps between the events of a stream;
- goodput: requests per second that met every objective; rejected and failed ones did
  not.
"""

import asyncio
import dataclasses
import itertools
import json
import math
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from types import ModuleType
from typing import Any, Literal

import numpy as np

from jaxscale.checks import check_choice, check_integers, check_positive, pip_install
from jaxscale.inference.load.workload import arrivals, lengths


type Endpoint = Literal["completions", "chat"]
"""Prompts of token ids or random words, or conversations of one message."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadConfig:
    """A benchmark workload: requests, their arrivals, and objectives (SLOs)."""

    url: str = "http://127.0.0.1:8000"
    """Address of the server; ``/v1/...`` is added."""
    model: str | None = None
    """Model name in requests; by default the first that ``/v1/models`` lists."""
    endpoint: Endpoint = "completions"
    """Endpoint that the requests are sent to."""
    workload: str = "sharegpt"
    """Prompt and output lengths: sharegpt, sharegpt:8000, alpaca, flover, flover:2048,
    or 128/2048."""
    requests: int = 100
    """Number of requests."""
    rate: float = math.inf
    """Request rate per second; inf sends all at once."""
    burstiness: float = 1.0
    """Burstiness of arrivals: 1 is a Poisson process, below 1 is burstier, inf is
    constant."""
    max_concurrency: int | None = None
    """Maximum number of concurrent requests; the wait of further ones is not
    counted."""
    vocab_size: int = 1000
    """Prompts are random tokens below this; 0 sends words instead of tokens."""
    seed: int = 0
    """Random seed of arrivals, lengths and prompts."""
    temperature: float = 0.0
    """Sampling temperature of the requests."""
    ignore_eos: bool = True
    """Ask for exactly the wanted output length, by ignoring end-of-sequence tokens."""
    timeout: float = 600.0
    """Seconds after which a request counts as failed."""
    warmup: int = 1
    """Warm-up requests, sent one by one and not counted."""
    ttft_ms: float | None = None
    """Goodput objective: maximum time to first token (TTFT), in milliseconds."""
    tpot_ms: float | None = None
    """Goodput objective: maximum time per output token (TPOT), in milliseconds."""
    e2el_ms: float | None = None
    """Goodput objective: maximum end-to-end latency, in milliseconds."""

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url {self.url!r} must begin with http:// or https://")
        check_choice("endpoint", self.endpoint, Endpoint)
        check_integers(self, 1, "requests")
        check_integers(self, 0, "vocab_size", "warmup", "seed")
        check_positive(self, "timeout")
        if self.max_concurrency is not None:
            check_integers(self, 1, "max_concurrency")
        for name in ("ttft_ms", "tpot_ms", "e2el_ms"):
            if getattr(self, name) is not None:
                check_positive(self, name)
        arrivals(1, rate=self.rate, burstiness=self.burstiness)
        lengths(self.workload, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """The record of one request; times in seconds since the start."""

    prompt_tokens: int
    """Tokens of the prompt, as counted by the server if it reports them."""
    output_tokens: int = 0
    """Tokens of the output, likewise; otherwise events of the stream."""
    due: float
    """Time at which the request was due."""
    sent: float
    """Time at which the request was sent."""
    events: tuple[float, ...] = ()
    """Times at which the pieces of the output arrived."""
    ended: float
    """Time at which the request ended, successfully or not."""
    status: int | None = None
    """HTTP status."""
    error: str | None = None
    """Message of the failure; None if the output is complete."""

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.events[0] - self.sent

    @property
    def latency(self) -> float:
        """Seconds to the last token."""
        return self.events[-1] - self.sent

    @property
    def tpot(self) -> float:
        """Seconds per token after the first; 0 if there is none."""
        return (self.latency - self.ttft) / max(self.output_tokens - 1, 1)

    @property
    def gaps(self) -> list[float]:
        """Seconds between events."""
        return [b - a for a, b in itertools.pairwise(self.events)]


def run(config: LoadConfig, *, api_key: str | None = None) -> list[Outcome]:
    """Send the requests of `config`, and wait for all answers.

    Raises:
        ImportError: no HTTP client is installed.
        ConnectionError: the server does not answer at all.
        ValueError: the server names no model, or refuses the warm-up requests.
    """
    return asyncio.run(_run(config, api_key))


def summarize(
    outcomes: Sequence[Outcome], config: LoadConfig
) -> dict[str, float | int]:
    """The summary metrics of a run, under the names of ``vllm bench serve``.

    Example:
        >>> outcome = Outcome(prompt_tokens=4, output_tokens=3, due=0.0, sent=0.0,
        ...                   events=(0.5, 0.75, 1.0), ended=1.0)
        >>> found = summarize([outcome], LoadConfig(ttft_ms=400))
        >>> found["mean_tpot_ms"], found["output_throughput"], found["request_goodput"]
        (250.0, 3.0, 0.0)
    """
    done = [o for o in outcomes if o.error is None]
    duration = max((o.ended for o in outcomes), default=0.0)
    per_second = 1 / duration if duration > 0 else 0.0
    read = sum(o.prompt_tokens for o in done)
    drawn = sum(o.output_tokens for o in done)
    good = sum(_met(o, config) for o in done)
    figures: dict[str, float | int] = {
        "duration": duration,
        "completed": len(done),
        "failed": len(outcomes) - len(done),
        "rejected": sum(o.status == 429 for o in outcomes),
        "total_input_tokens": read,
        "total_output_tokens": drawn,
        "request_throughput": len(done) * per_second,
        "request_goodput": good * per_second,
        "output_throughput": drawn * per_second,
        "total_token_throughput": (read + drawn) * per_second,
        "max_concurrent_requests": _most_at_once(outcomes),
        "max_lateness_ms": 1e3 * max((o.sent - o.due for o in outcomes), default=0.0),
    }
    several = [o for o in done if o.output_tokens > 1]
    for name, values in (
        ("ttft", [o.ttft for o in done]),
        ("tpot", [o.tpot for o in several]),
        ("itl", [gap for o in done for gap in o.gaps]),
        ("e2el", [o.latency for o in done]),
    ):
        figures |= _spread(name, values)
    return figures


def _met(outcome: Outcome, config: LoadConfig) -> bool:
    """True if the request completed and met all objectives."""
    limits = (
        (outcome.ttft, config.ttft_ms),
        (outcome.tpot, config.tpot_ms),
        (outcome.latency, config.e2el_ms),
    )
    return all(limit is None or 1e3 * value <= limit for value, limit in limits)


def _spread(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """Mean, median and percentiles in milliseconds; NaN if there are no values."""
    values = 1e3 * np.array(seconds or [math.nan])
    figures = {
        "mean": values.mean(),
        "median": np.median(values),
        "std": values.std(),
        **{f"p{p}": np.percentile(values, p) for p in (50, 90, 99)},
    }
    return {f"{kind}_{name}_ms": float(value) for kind, value in figures.items()}


def _most_at_once(outcomes: Sequence[Outcome]) -> int:
    steps = [(o.sent, 1) for o in outcomes] + [(o.ended, -1) for o in outcomes]
    return max(itertools.accumulate(step for _, step in sorted(steps)), default=0)


async def _run(config: LoadConfig, api_key: str | None) -> list[Outcome]:
    http = require_client()
    sizes = lengths(config.workload, config.requests, seed=config.seed)
    due = arrivals(
        config.requests,
        rate=config.rate,
        burstiness=config.burstiness,
        seed=config.seed,
    )
    rng = np.random.default_rng([config.seed, 3])
    prompts = [_prompt(config, length, rng) for length in sizes.prompts]
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    # Without a limit of its own the client would hold requests back.
    limits = http.Limits(max_connections=None, max_keepalive_connections=None)
    async with http.AsyncClient(
        base_url=config.url, headers=headers, limits=limits, timeout=config.timeout
    ) as client:
        model = config.model or await _first_model(client, http)
        bodies = [
            _body(config, model, prompt, output)
            for prompt, output in zip(prompts, sizes.outputs, strict=True)
        ]
        for i in range(config.warmup):
            warm = await _send(
                client, http, config, bodies[i % len(bodies)], 1, 0.0, 0.0
            )
            if warm.error is not None:
                raise ValueError(f"the server refuses the first request: {warm.error}")
        gate = asyncio.Semaphore(config.max_concurrency or config.requests)
        start = time.perf_counter()

        async def send(i: int) -> Outcome:
            await asyncio.sleep(start + due[i] - time.perf_counter())
            async with gate:
                return await _send(
                    client, http, config, bodies[i], sizes.prompts[i], due[i], start
                )

        return await asyncio.gather(*map(send, range(config.requests)))


async def _send(
    client: Any,
    http: ModuleType,
    config: LoadConfig,
    body: Mapping[str, Any],
    prompt_tokens: int,
    due: float,
    start: float,
) -> Outcome:
    path = "/v1/chat/completions" if config.endpoint == "chat" else "/v1/completions"
    events: list[float] = []
    usage: dict[str, Any] = {}
    status, error, done = None, None, False
    sent = time.perf_counter() - start
    try:
        async with (
            asyncio.timeout(config.timeout),
            client.stream("POST", path, json=body) as response,
        ):
            status = response.status_code
            if status != 200:
                text = (await response.aread()).decode("utf-8", "replace")
                error = f"HTTP {status}: {text:.200}"
            async for event in _events(response) if error is None else _nothing():
                now = time.perf_counter() - start
                if event == "[DONE]":
                    done = True
                    continue
                data = json.loads(event)
                if "error" in data:
                    error = f"the stream ended with an error: {data['error']!s:.200}"
                    break
                usage = data.get("usage") or usage
                if data.get("choices"):
                    events.append(now)
    except TimeoutError:
        error = f"no complete answer within {config.timeout} seconds"
    except (http.HTTPError, ValueError) as problem:
        error = f"{type(problem).__name__}: {problem}"
    if error is None and not (done and events):
        error = "the stream ended early"
    return Outcome(
        prompt_tokens=usage.get("prompt_tokens", prompt_tokens),
        output_tokens=usage.get("completion_tokens", len(events)),
        due=due,
        sent=sent,
        events=tuple(events),
        ended=time.perf_counter() - start,
        status=status,
        error=error,
    )


async def _events(response: Any) -> AsyncIterator[str]:
    """The data of server-sent events, each of which ends with an empty line."""
    rest = b""
    async for piece in response.aiter_bytes():
        *whole, rest = (rest + piece).replace(b"\r\n", b"\n").split(b"\n\n")
        for block in whole:
            lines = block.decode("utf-8", "replace").split("\n")
            data = [line[5:].strip() for line in lines if line.startswith("data:")]
            if data:
                yield "\n".join(data)


async def _nothing() -> AsyncIterator[str]:
    for event in ():
        yield event


async def _first_model(client: Any, http: ModuleType) -> str:
    try:
        response = await client.get("/v1/models")
        response.raise_for_status()
        return response.json()["data"][0]["id"]
    except http.TransportError as error:
        raise ConnectionError(f"{client.base_url} does not answer: {error}") from error
    except (http.HTTPError, ValueError, LookupError, TypeError) as error:
        raise ValueError(
            f"{client.base_url} names no model ({error}); set the name of one"
        ) from error


def _prompt(config: LoadConfig, length: int, rng: np.random.Generator) -> Any:
    """Random tokens; or words, of which most tokenizers make about as many tokens."""
    if config.vocab_size and config.endpoint == "completions":
        return rng.integers(0, config.vocab_size, length).tolist()
    words = ("to", "be", "or", "not", "that", "is", "the", "question")
    return " ".join(words[i] for i in rng.integers(0, len(words), length).tolist())


def _body(config: LoadConfig, model: str, prompt: Any, output: int) -> dict[str, Any]:
    body = {
        "model": model,
        "max_tokens": output,
        "temperature": config.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if config.ignore_eos:
        body["ignore_eos"] = True
    if config.endpoint == "chat":
        return body | {"messages": [{"role": "user", "content": prompt}]}
    return body | {"prompt": prompt}


def require_client() -> ModuleType:
    """httpx2, or httpx, which has the same interface."""
    try:
        import httpx2

        return httpx2
    except ImportError:
        pass
    try:
        import httpx  # type: ignore[import-not-found]

        return httpx
    except ImportError as error:
        raise ImportError(
            f"the load generator needs httpx2: {pip_install('serve')}"
        ) from error
