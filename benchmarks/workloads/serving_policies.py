"""Ways to serve the same requests: `benchmarks.serving` sets them against each other.

All are ours and run the same engine on the same random weights; they differ in when a
request may join:

- `continuous`: at the next decode step.
- `static`: a batch is formed of those that wait, its shape is fixed, and the next
  begins when its longest request has ended. With a window it waits for more, as
  "dynamic batching" does.
- `concurrent`: every request has an instance of the model's state of its own, and all
  instances run side by side. It stands for the baseline of Flover's paper, instances of
  FasterTransformer. The weights are shared, which is generous, and the device takes the
  steps of the instances in turns.
"""

import concurrent.futures
import copy
import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from flax import nnx

from jaxscale.inference import (
    Engine,
    EngineConfig,
    EngineDead,
    Output,
    Request,
    SamplingParams,
    make_engine,
)
from jaxscale.inference.engine.scheduling.scheduler import Scheduler
from jaxscale.inference.load.loadgen import Outcome
from jaxscale.inference.load.workload import arrivals, lengths
from jaxscale.models import Decoder, DecoderConfig


_MANY_TOKENS, _FIRST = 500_000, 128  # of a load that is cut to warm up, and to what


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """Requests: prompts of random tokens, answers of a given length."""

    prompts: Sequence[Sequence[int]]
    """Token ids."""
    outputs: Sequence[int]
    """Tokens of each answer."""
    due: Sequence[float]
    """Seconds after the first request at which each arrives, ascending."""

    @property
    def longest(self) -> int:
        """Most tokens of prompt and answer together."""
        pairs = zip(self.prompts, self.outputs, strict=True)
        return max(len(prompt) + output for prompt, output in pairs)

    def one(self, i: int) -> "Workload":
        """Request `i` alone."""
        return Workload(prompts=[self.prompts[i]], outputs=[self.outputs[i]], due=[0.0])

    def cut(self, tokens: int) -> "Workload":
        """The same requests, with answers of at most `tokens`."""
        outputs = [min(output, tokens) for output in self.outputs]
        return dataclasses.replace(self, outputs=outputs)

    def to_warm_up(self) -> "Workload":
        """What a server answers before it is timed: the same, or its first tokens.

        Answers of half a million tokens together take a minute. Their first ones are
        enough: requests that come at once are all there by then.
        """
        return self.cut(_FIRST) if sum(self.outputs) >= _MANY_TOKENS else self


def make_load(params: Mapping[str, Any], vocab_size: int, seed: int) -> Workload:
    """The requests of a case.

    Args:
        params: ``workload`` and ``requests`` as in `jaxscale.inference.load.workload`;
            ``shrink`` divides all lengths; ``gap_ms`` is the mean time between
            arrivals, 0 for all at once, and ``arrivals`` is poisson or constant.
        vocab_size: V.
        seed: Of lengths, tokens and arrivals.
    """
    count, shrink = params["requests"], params.get("shrink", 1)
    drawn = lengths(params["workload"], count, seed=seed)
    random = np.random.default_rng([seed, 4])
    return Workload(
        prompts=[
            random.integers(0, vocab_size, max(1, length // shrink)).tolist()
            for length in drawn.prompts
        ],
        outputs=[max(1, length // shrink) for length in drawn.outputs],
        due=moments(count, params["gap_ms"], params["arrivals"], seed),
    )


def moments(count: int, gap_ms: float, how: str, seed: int) -> list[float]:
    """Seconds after the first at which requests arrive; see `make_load`."""
    burstiness = {"poisson": 1.0, "constant": math.inf}[how]
    rate = 1e3 / gap_ms if gap_ms else math.inf
    times = arrivals(count, rate=rate, burstiness=burstiness, seed=seed)
    return [moment - times[0] for moment in times]


def engine_for(
    model: Decoder,
    load: Workload,
    slots: int | None,
    buckets: Sequence[int] | None = None,
    *,
    wait: bool = True,
    **sizes: Any,
) -> Engine:
    """An engine that serves `slots` requests of `load` together.

    It is compiled, or with `wait` false as far as that a server is ready.
    """
    config = EngineConfig(
        max_len=load.longest,
        num_slots=slots,
        buckets=None if buckets is None else tuple(buckets),
        prefix_cache=False,
        **sizes,
    )
    return make_engine(model, config=config, quiet=True, wait=wait)


def instances_of(engine: Engine, count: int) -> list[Engine]:
    """Engines that share weights and compiled programs and have a state each."""
    found = []
    for _ in range(count):
        runner = copy.copy(engine.runner)
        runner.reset()
        found.append(Engine(runner, Scheduler(runner.config)))
    return found


class Clients:
    """The clients of a load: they send requests, and note when answers come."""

    def __init__(self, load: Workload) -> None:
        """Start the clock."""
        self.load = load
        self.events: list[list[float]] = [[] for _ in load.outputs]
        self.done: list[concurrent.futures.Future[None]] = [
            concurrent.futures.Future() for _ in load.outputs
        ]
        self.start = time.perf_counter()

    def sleep_until(self, seconds: float) -> None:
        """Wait for a moment of the load's clock."""
        time.sleep(max(0.0, self.start + seconds - time.perf_counter()))

    def arrived(self) -> int:
        """How many requests have arrived."""
        now = time.perf_counter() - self.start
        return sum(due <= now for due in self.load.due)

    def send(self, engine: Engine, i: int) -> None:
        """Let an engine have request `i`."""
        params = SamplingParams(
            temperature=0.0, max_tokens=self.load.outputs[i], ignore_eos=True
        )
        request = Request(prompt=self.load.prompts[i], params=params)
        admitted = engine.admit(request, lambda news: self._hear(i, news))
        admitted.add_done_callback(lambda future: self._refused(i, future))

    def _refused(self, i: int, admitted: concurrent.futures.Future[None]) -> None:
        error = admitted.exception()
        if error is not None:
            self.done[i].set_exception(error)

    def _hear(self, i: int, news: list[Output] | EngineDead) -> None:
        now = time.perf_counter() - self.start
        if isinstance(news, EngineDead):
            self.done[i].set_exception(news)
            return
        for output in news:
            self.events[i] += [now] * len(output.tokens)
            if output.finish is not None:
                self.done[i].set_result(None)

    def outcomes(self) -> list[Outcome]:
        """When each request arrived and each of its tokens came, once all are there."""
        for future in self.done:
            future.result()
        return outcomes_of(self.load, self.events)


def outcomes_of(load: Workload, events: Sequence[Sequence[float]]) -> list[Outcome]:
    """What became of each request, from the times of its tokens.

    Raises:
        RuntimeError: one got more or fewer tokens than it was to get.
    """
    found = []
    for i, times in enumerate(events):
        if len(times) != load.outputs[i]:
            raise RuntimeError(
                f"request {i} got {len(times)} tokens, expected {load.outputs[i]}"
            )
        outcome = Outcome(
            prompt_tokens=len(load.prompts[i]),
            output_tokens=len(times),
            due=load.due[i],
            sent=load.due[i],
            events=tuple(times),
            ended=times[-1],
        )
        found.append(outcome)
    return found


def continuous(engine: Engine, load: Workload) -> list[Outcome]:
    """Requests join at the next token."""
    clients = Clients(load)
    for i, due in enumerate(load.due):
        clients.sleep_until(due)
        clients.send(engine, i)
    return clients.outcomes()


def static(
    engine: Engine, load: Workload, batch: int, window: float = 0.0
) -> list[Outcome]:
    """Batches, one after another.

    Args:
        engine: With a bucket of `batch` rows alone, so that a batch keeps its shape.
        load: The requests.
        batch: Most requests of a batch.
        window: Seconds that a batch waits for more after its first request, unless it
            is full.
    """
    clients, count, i = Clients(load), len(load.due), 0
    while i < count:
        full = load.due[i + batch - 1] if i + batch <= count else math.inf
        clients.sleep_until(min(load.due[i] + window, max(load.due[i], full)))
        end = min(max(clients.arrived(), i + 1), i + batch)
        for j in range(i, end):
            clients.send(engine, j)
        for future in clients.done[i:end]:
            future.result()
        i = end
    return clients.outcomes()


def concurrent_instances(engines: Sequence[Engine], load: Workload) -> list[Outcome]:
    """Each request on an instance of its own, at once."""
    clients = Clients(load)
    for i, due in enumerate(load.due):
        clients.sleep_until(due)
        clients.send(engines[i], i)
    return clients.outcomes()


def alone(engine: Engine, load: Workload, chosen: Sequence[int]) -> list[float]:
    """Seconds of some of the requests, each with the device to itself."""
    return [continuous(engine, load.one(i))[0].latency for i in chosen]


def figures(
    outcomes: Sequence[Outcome], solo: Mapping[int, float] | None = None
) -> dict[str, float]:
    """What a row says of a run.

    Args:
        outcomes: Of all requests.
        solo: Seconds of some of them by themselves.
    """
    total = sum(outcome.output_tokens for outcome in outcomes)
    latencies = np.array([outcome.latency for outcome in outcomes])
    found = {
        "tokens_per_second": total / max(outcome.ended for outcome in outcomes),
        "mean_latency_ms": 1e3 * float(latencies.mean()),
        "p99_latency_ms": 1e3 * float(np.percentile(latencies, 99)),
        "mean_ttft_ms": 1e3 * float(np.mean([o.ttft for o in outcomes])),
    }
    if gaps := [gap for outcome in outcomes for gap in outcome.gaps]:
        found["p99_gap_ms"] = 1e3 * float(np.percentile(gaps, 99))
    if solo:
        here = sum(latencies[i] for i in solo)
        found["latency_vs_solo"] = float(here) / sum(solo.values())
    return found


def small_model(d_model: int = 128, num_layers: int = 2) -> Decoder:
    """A decoder whose steps take a CPU about a millisecond."""
    config = DecoderConfig(
        vocab_size=512,
        d_model=d_model,
        num_layers=num_layers,
        num_heads=4,
        num_kv_heads=1,
        head_dim=d_model // 4,
        d_ff=4 * d_model,
        max_seq_len=2048,
    )
    return Decoder(config, rngs=nnx.Rngs(0))
