"""An encoder as a service: texts of many clients, one a call, that arrive over time.

``python -m benchmarks.encoder_service --max_len 256 --case saturated`` selects. All
implementations stand behind `DynamicBatching`, the queue of ``jaxscale serve``, and get
the same texts at the same moments (open loop); HTTP is left out, and so is tokenizing,
which is the same for all. A pass takes what waits, up to ``budget`` tokens, and the
next one is launched while the GPU computes. Lengths are those of `benchmarks.encode`,
uniform in [0.2 L, L]; parameters are random, in bf16. The error is that of the vectors
of the first texts.

- ``saturated``: all texts arrive at once. The time is that until the last is answered.
- ``half_load``, ``light``: Poisson arrivals, ``rate`` texts a second. The time is the
  median latency, counted from the moment at which a text was to arrive. The rate of
  ``half_load`` is half of what PyTorch's graphs may reach, estimated from the results
  of `benchmarks.encode`; ``saturated`` tells what they do reach.

``texts_per_pass`` says how many calls shared a pass. ``ready_seconds`` passed until an
implementation could answer, with its largest program or graph, which does what smaller
ones do; ``compile_seconds`` until it had all. Parameters are on the GPU before; PyTorch
reads its own from a file.

- ``jaxscale``: `Encoder`, which packs a pass into one row.
- ``torch_cuda_graph``, ``torch_compile_graphs``: transformers in CUDA graphs of padded
  batches, as it is and compiled for any shape; see `torch_encoder_service`.

Implementations take turns, run after run, after one that does not count.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import gc
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from benchmarks import encode, encoder
from benchmarks.measure import command, timing
from benchmarks.measure.harness import (
    SEED,
    Benchmark,
    Case,
    Custom,
    Measurement,
    NoMeasurement,
    Params,
    Results,
    attempt,
    max_rel_error,
    to_fp32,
)
from benchmarks.rivals import torch_encoder_service
from benchmarks.workloads.serving_policies import moments
from jaxscale.inference import Encoder
from jaxscale.inference.encoder.batching import Call, DynamicBatching, Passes
from jaxscale.inference.encoder.encode_plan import plan_rows
from jaxscale.inference.encoder.texts import as_encoded
from jaxscale.inference.gc_heap import FrozenHeap
from jaxscale.models.tokenizer import EncodedText
from pallas_kernels.varlen_attention.specs import bytetransformer


NAMES = ("jaxscale", "torch_cuda_graph", "torch_compile_graphs")
RATES = {256: {"light": 500, "half_load": 3500}, 512: {"light": 250, "half_load": 1750}}
"""Texts a second, by the longest text."""
BUDGET = 4096
"""Tokens of a pass, the default of the server."""
CLIENTS = 16
CHECKED = 16
"""Texts whose vectors are compared with the definition."""
PATIENCE = 30.0
"""Seconds that a run is given after the last arrival."""
_SECONDS = 2  # of arrivals in a run
_STARTS = 64  # of passes whose sizes are compiled before


def case(
    name: str, model: str, max_len: int, rate: int, requests: int, budget: int = BUDGET
) -> Case:
    """Texts that arrive at a rate; 0 is all at once."""
    params = {
        "model": model,
        "max_len": max_len,
        "rate": rate,
        "requests": requests,
        "budget": budget,
        "clients": CLIENTS,
    }
    params["tokens"] = sum(lengths_of(params))
    return Case(f"{name}_l{max_len}", params)


def lengths_of(params: Params) -> list[int]:
    """Tokens of each text."""
    return bytetransformer(params["requests"], params["max_len"]).tolist()


def texts_of(params: Params, seed: int = SEED) -> list[EncodedText]:
    """The texts, tokenized: the same for all implementations."""
    vocab = encoder.config_of(params).vocab_size
    rng = np.random.default_rng(seed)
    return [as_encoded(rng.integers(5, vocab, n).tolist()) for n in lengths_of(params)]


def arrivals_of(params: Params, seed: int = SEED) -> list[float]:
    """Seconds at which they arrive: the same for all implementations."""
    rate = params["rate"]
    return moments(params["requests"], 1e3 / rate if rate else 0, "poisson", seed)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """What came of a load."""

    latencies: np.ndarray
    """Seconds from the arrival of each text to its vector."""
    seconds: float
    """Until the last was there."""
    passes: int
    """That were computed."""
    vectors: np.ndarray
    """[`CHECKED`, D] of the first texts."""

    def figures(self) -> dict[str, float]:
        """Metrics."""
        p50, p99 = np.percentile(self.latencies, (50, 99))
        count = len(self.latencies)
        return {
            "texts_per_second": count / self.seconds,
            "p50_ms": 1e3 * p50,
            "p99_ms": 1e3 * p99,
            "texts_per_pass": count / self.passes,
        }


def served(
    passes: Passes[Any],
    texts: Sequence[EncodedText],
    due: Sequence[float],
    budget: int = BUDGET,
) -> Run:
    """Have texts computed that arrive at given moments, each a call of its own.

    Raises:
        TimeoutError: some were not answered `PATIENCE` seconds after the last arrival.
    """
    ended, count = np.zeros(len(texts)), 0

    def passed(*_: Any) -> None:
        nonlocal count
        count += 1

    def note(place: int, _: Any) -> None:
        ended[place] = time.perf_counter()

    batching = DynamicBatching(passes, budget, on_pass=passed)
    results = []
    start = time.perf_counter()
    for place, (text, moment) in enumerate(zip(texts, due, strict=True)):
        if (wait := start + moment - time.perf_counter()) > 0:
            time.sleep(wait)
        client = f"client {place % CLIENTS}"
        call = Call(method="encode", texts=[text], client=client, name=str(place))
        call.result.add_done_callback(functools.partial(note, place))
        batching.submit(call)
        results.append(call.result)
    _, late = concurrent.futures.wait(results, PATIENCE)
    if late:
        raise TimeoutError(f"{len(late)} of {len(texts)} texts were not answered")
    batching.close()
    return Run(
        latencies=ended - start - np.asarray(due),
        seconds=ended.max() - start,
        passes=count,
        vectors=np.concatenate([result.result() for result in results[:CHECKED]]),
    )


def ours(params: Params) -> Encoder:
    """The encoder, with the largest program, as the server begins."""
    model = encoder.model_of(params, encoder.leaves_of(params))
    tokenizer = encode.Prepared([], model.config.vocab_size)
    made = Encoder(model, tokenizer, max_length=params["max_len"])
    made.compile("encode", token_budget=params["budget"], sizes="largest")
    return made


def sizes_of(params: Params) -> list[list[EncodedText]]:
    """Passes of all sizes that rows of these texts have, the largest first."""
    texts, budget = texts_of(params), params["budget"]
    shortest = sorted(texts, key=lambda text: len(text.ids))
    found = {}
    for some in (shortest, *(texts[i:] for i in range(min(_STARTS, len(texts))))):
        room = itertools.accumulate(len(text.ids) for text in some)
        for count, _ in enumerate(itertools.takewhile(budget.__ge__, room), 1):
            plan = plan_rows([len(text.ids) for text in some[:count]], budget)
            found[plan.budgets, plan.capacities] = some[:count]
    return [found[key] for key in sorted(found, reverse=True)]


def settle(passes: Passes[Any]) -> None:
    """Wait for programs that a run has begun to compile beside it."""
    end = time.monotonic() + PATIENCE
    while isinstance(passes, Encoder) and len({*passes.num_compiled}) > 1:
        if time.monotonic() > end:
            raise TimeoutError(f"{passes.num_compiled} programs are compiled")
        time.sleep(0.1)


def passes_of(name: str, params: Params) -> Passes[Any]:
    """An implementation that can answer: with its largest program or graph.

    Raises:
        NotImplementedError: it is not there.
    """
    if name == "jaxscale":
        return ours(params)
    if not timing.torch_is_there():
        raise NotImplementedError("torch with a GPU is not there")
    model = encoder.random_model(encoder.config_of(params))
    return torch_encoder_service.CapturedGraphs(name, model, params["max_len"])


def complete(passes: Passes[Any], params: Params) -> Passes[Any]:
    """Compile and capture what is left for the lengths of a case."""
    if isinstance(passes, torch_encoder_service.CapturedGraphs):
        passes.capture_all()
    if isinstance(passes, Encoder):
        # In threads, as the server does; not what is for shorter texts than these.
        run = functools.partial(passes.encode, token_budget=params["budget"])
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            list(pool.map(run, sizes_of(params)))
    return passes


def definition(params: Params) -> Callable[[Sequence[EncodedText]], np.ndarray]:
    """The vectors of `CHECKED` texts in fp32."""
    leaves = to_fp32(encoder.leaves_of(params))
    options = {"xla_gpu_autotune_level": "0"} if timing.on_gpu() else None
    compute = jax.jit(encode.reference(params), compiler_options=options)

    def run(texts: Sequence[EncodedText]) -> np.ndarray:
        tokens = np.zeros((len(texts), params["max_len"]), np.int32)
        for row, text in zip(tokens, texts, strict=True):
            row[: len(text.ids)] = text.ids
        lengths = np.array([len(text.ids) for text in texts], np.int32)
        with jax.default_matmul_precision("highest"):
            return np.asarray(compute(leaves, tokens, lengths))

    return run


def summary(params: Params, runs: Sequence[Run], error: float) -> Measurement:
    """Medians over the runs."""
    found = [run.figures() for run in runs]
    metrics = {key: statistics.median(one[key] for one in found) for key in found[0]}
    if params["rate"]:
        seconds = [one["p50_ms"] / 1e3 for one in found]
    else:  # they all wait, the last as long as the whole takes
        seconds = [run.seconds for run in runs]
        del metrics["p50_ms"], metrics["p99_ms"]
    return Measurement(seconds, error, metrics)


def _measured(
    params: Params,
    made: Mapping[str, Passes[Any] | NoMeasurement],
    define: Callable[[Sequence[EncodedText]], np.ndarray],
    samples: int,
) -> Results:
    """One case of all implementations."""
    texts, due = texts_of(params), arrivals_of(params)
    want = define(texts[:CHECKED])
    results: Results = {k: x for k, x in made.items() if isinstance(x, NoMeasurement)}
    able = {k: x for k, x in made.items() if not isinstance(x, NoMeasurement)}
    runs: dict[str, list[Run]] = {name: [] for name in able}
    for turn in range(1 + samples):
        for name in [x for x in able if x not in results]:
            passes = able[name]
            gc.collect()
            run = attempt(lambda p=passes: served(p, texts, due, params["budget"]))
            if isinstance(run, NoMeasurement):
                results[name] = run
                continue
            runs[name].append(run)
            if not turn:
                settle(passes)
    for name in [x for x in able if x not in results]:
        error = max(max_rel_error(run.vectors, want) for run in runs[name])
        results[name] = summary(params, runs[name][1:], error)
    return {name: results[name] for name in made}


def prepared(
    name: str, params: Params
) -> tuple[Passes[Any] | NoMeasurement, dict[str, float]]:
    """An implementation that has all it needs, and the seconds that this took."""
    start = time.monotonic()
    made, costs = attempt(functools.partial(passes_of, name, params)), {}
    for key, what in (("ready", "can answer"), ("compile", "is complete")):
        if key == "compile" and not isinstance(made, NoMeasurement):
            made = attempt(functools.partial(complete, made, params))
        if isinstance(made, NoMeasurement):
            break
        costs[f"{key}_seconds"] = seconds = time.monotonic() - start
        print(f"-- {name} {what} after {seconds:.1f} s", flush=True)
    return made, costs


def measure(
    cases: Sequence[Case], names: Sequence[str], samples: int
) -> Iterator[tuple[Case, Results]]:
    """All cases; those of a model and length share what is compiled for them."""

    def kind(one: Case) -> tuple[str, int]:
        return one.params["model"], one.params["max_len"]

    for _, alike in itertools.groupby(sorted(cases, key=kind), kind):
        group = list(alike)
        params = group[0].params
        made, costs = {}, {}
        with timing.preparing():
            jax.block_until_ready(encoder.leaves_of(params))
            for name in names:
                made[name], costs[name] = prepared(name, params)
        with frozen_heap(), timing.turn():
            define = definition(params)
            for one in group:
                results = _measured(one.params, made, define, samples)
                for name, result in results.items():
                    if isinstance(result, Measurement):
                        result.metrics |= costs[name]
                yield one, results


@contextlib.contextmanager
def frozen_heap() -> Iterator[None]:
    """Keep Python's garbage collector from what compiling left, as a server does."""
    FrozenHeap(lambda: True)
    try:
        yield
    finally:
        gc.unfreeze()


def _alone(params: Params, seed: int, samples: int) -> Measurement:
    raise NotImplementedError("`measure` times all implementations")


BENCHMARK = Benchmark(
    name="encoder_service",
    cases=[
        each
        for length, rates in RATES.items()
        for each in (
            case("saturated", "bert_base", length, 0, 2_097_152 // length),
            *(
                case(name, "bert_base", length, rate, _SECONDS * rate)
                for name, rate in rates.items()
            ),
        )
    ],
    quick_cases=[
        case("saturated", "bert_tiny", 32, 0, 24, 128),
        case("light", "bert_tiny", 32, 200, 24, 128),
    ],
    kernels=encode.BENCHMARK.kernels,
    trains=lambda case: False,
    inputs=lambda params, key: (),
    implementations={name: Custom(_alone) for name in NAMES},
    measure=measure,
    compare=encode.compare,
    time="wall",
    timing="wall time of a service, runs in turns",
    packages=encoder.BENCHMARK.packages,
    samples=5,
    max_rel_error=encode.BENCHMARK.max_rel_error,
    selectors={"model": "model", "max_len": "max_len"},
)

if __name__ == "__main__":
    command.run(BENCHMARK)
