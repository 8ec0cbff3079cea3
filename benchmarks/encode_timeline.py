"""Where the time of a request to `Encoder.encode` goes: host and GPU, piece by piece.

``python -m benchmarks.encode_timeline --case bert_base_b1_l64`` selects. Requests,
tokens and parameters are those of `benchmarks.encode`. The pieces of the public call
follow each other, so that they add up to its time; ``NAME_us`` is the median over the
calls, and a tenth of them take less than ``NAME_p10_us``.

- ``plan``: texts to token ids, which are there, and the row that they are packed into.
- ``write``: the tokens into memory that the GPU reads.
- ``call``: the program, until JAX returns.
- ``wait``: until the result is there.
- ``read``: the vectors as an array of numpy.

A profile of more calls, taken after all times, gives the other metrics, those of
`benchmarks.measure.profiles`: the GPU's share, and the host's by XLA's names.

``--what-if`` prints instead what a call of a small program takes, by the number of its
arguments, and of its launches of each kind. Nothing is written.
"""

import concurrent.futures
import functools
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from benchmarks import encode, encoder
from benchmarks.measure import command, profiles, timing
from benchmarks.measure.harness import (
    ROUNDS,
    SEED,
    Benchmark,
    Case,
    Measurement,
    NoMeasurement,
    Results,
    attempt,
)
from benchmarks.measure.loop_programs import CUBLAS_CHOOSES
from jaxscale.inference import Encoder
from pallas_kernels.layer_norm import layer_norm
from pallas_kernels.mosaic import keep_modules


PIECES = ("plan", "write", "call", "wait", "read")
REQUESTS = ((1, 64), (1, 256), (4, 256), (16, 256), (64, 256))
"""Texts, and tokens that the longest may have."""
_WARM_UP = 20  # calls


class MarkedEncoder(Encoder):
    """Notes how long each of `PIECES` of a call takes, of one packed row."""

    taken: Mapping[str, float]
    """Seconds of the last call."""

    def encode(self, texts: Sequence[Any], **options: Any) -> np.ndarray:
        """The public call."""
        self.taken, self._at = {}, time.perf_counter()
        vectors = super().encode(texts, **options)
        self._mark("read")
        return vectors

    def _mark(self, piece: str) -> None:
        now = time.perf_counter()
        self.taken, self._at = {**self.taken, piece: now - self._at}, now

    def _plan(self, *args: Any) -> Any:
        plan = super()._plan(*args)
        self._mark("plan")
        return plan

    def _batch(self, *args: Any) -> Any:
        batch = super()._batch(*args)
        self._mark("write")
        return batch

    def _launch(self, *args: Any) -> Any:
        launched = super()._launch(*args)
        self._mark("call")
        launched.result.read([len(row) for row in launched.rows])
        self._mark("wait")
        return launched


def request(case: Case) -> Callable[[], Mapping[str, float]]:
    """A call that says how long its pieces took; its program is compiled."""
    params, start = case.params, time.monotonic()
    leaves, *texts = encoder.inputs(params, jax.random.key(SEED))
    made = encode.encoder_of(params, leaves, *texts, kind=MarkedEncoder)

    def run() -> Mapping[str, float]:
        made.encode(["text"] * params["batch"], progress=False)
        return made.taken

    run()
    print(f"-- {case.name} compiled in {time.monotonic() - start:.1f} s", flush=True)
    return run


def in_pieces(run: Callable[[], Mapping[str, float]], calls: int) -> Measurement:
    """Times of a request and of its pieces."""
    taken = [run() for _ in range(_WARM_UP + calls)][_WARM_UP:]
    metrics = {}
    for piece in PIECES:
        us = [1e6 * one[piece] for one in taken]
        metrics[f"{piece}_us"] = float(np.median(us))
        metrics[f"{piece}_p10_us"] = float(np.quantile(us, 0.1))
    return Measurement([sum(one.values()) for one in taken], None, metrics)


def measure(
    cases: Sequence[Case], names: Sequence[str], samples: int
) -> Iterator[tuple[Case, Results]]:
    """All cases: they are compiled, then timed, then profiled."""
    with timing.preparing():
        for case in cases:  # kept by a cache that threads would fill several times
            jax.block_until_ready(encoder.leaves_of(case.params))
        print("-- the parameters are there", flush=True)
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            runs = list(pool.map(lambda case: attempt(lambda: request(case)), cases))
    timed: list[Measurement | NoMeasurement] = []
    with timing.turn():
        for case, run in zip(cases, runs, strict=True):
            broken = isinstance(run, NoMeasurement)
            found = run if broken else attempt(lambda r=run: in_pieces(r, samples))
            if isinstance(found, Measurement):
                us = ", ".join(f"{p} {found.metrics[f'{p}_us']:.0f}" for p in PIECES)
                print(f"{case.name}: {1e6 * found.median:.0f} us: {us}", flush=True)
            timed.append(found)
        for case, run, found in zip(cases, runs, timed, strict=True):
            if isinstance(found, Measurement) and not isinstance(run, NoMeasurement):
                seen = attempt(functools.partial(profiles.profiled, run))
                if isinstance(seen, NoMeasurement):
                    found = seen
                else:
                    found.metrics |= seen
            yield case, dict.fromkeys(names, found)


M, D = 128, 768
"""Rows and features of what is launched: those of one short text."""
KINDS: Mapping[str, Callable[..., jax.Array]] = {
    "fusions": lambda x, square, scale: jnp.tanh(x),
    "cublas": lambda x, square, scale: x @ square,
    "mosaic": lambda x, square, scale: layer_norm(x, scale, eps=1e-6),
}
"""Launches: fusions of XLA, matmuls of cuBLAS, and kernels of Mosaic."""


def chain(device: Any, kind: str, count: int) -> Any:
    """A program of launches that follow each other, all in one CUDA graph."""

    def run(x: jax.Array, *others: jax.Array) -> jax.Array:
        for _ in range(count):
            x = jax.lax.optimization_barrier(KINDS[kind](x, *others))
        return x[0].astype(jnp.float32)

    return _jit(device, run)


def _jit(device: Any, run: Callable[..., jax.Array]) -> Any:
    where = SingleDeviceSharding(device, memory_kind="pinned_host")
    return jax.jit(
        run, out_shardings=where, keep_unused=True, compiler_options=CUBLAS_CHOOSES
    )


def programs(
    arguments: Sequence[int] = (1, 20, 78, 200), launches: Sequence[int] = (20, 80)
) -> dict[str, Callable[[], jax.Array]]:
    """Compiled programs that differ in what they pass or launch, by name.

    Args:
        arguments: Numbers of arrays that a program gets, of which it reads one.
        launches: Lengths of a `chain` of each kind.
    """
    keys = jax.random.split(jax.random.key(SEED), 3)
    x, square, scale = (
        jax.random.normal(key, shape, jnp.bfloat16)
        for key, shape in zip(keys, ((M, D), (D, D), (D,)), strict=True)
    )
    device, square = x.device, square / D**0.5
    made: dict[str, tuple[Any, ...]] = {}
    for n in arguments:
        many = (x + i for i in range(n))
        made[f"{n} arguments"] = _jit(device, lambda *x: 2 * x[0][0]), *many
    for kind in KINDS:
        for n in launches:
            made[f"{n} {kind}"] = chain(device, kind, n), x, square, scale
    with keep_modules():
        lowered = [program.lower(*given) for program, *given in made.values()]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        list(pool.map(lambda program: program.compile(), lowered))
    return {name: functools.partial(*each) for name, each in made.items()}


def what_if(calls: Mapping[str, Callable[[], jax.Array]], samples: int = 200) -> None:
    """Print what calls of programs take, then what a profile of them says."""
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            jax.block_until_ready(call())
            for _ in range(-(-samples // ROUNDS)):
                start = time.perf_counter()
                result = call()
                returned = time.perf_counter()
                result.block_until_ready()
                ready = time.perf_counter()
                taken[name].append((1e6 * (returned - start), 1e6 * (ready - start)))
    print(f"{'us, median and p10':20s}{'until it returns':>20s}{'until ready':>20s}")
    for name, times in taken.items():
        low, middle = np.quantile(times, (0.1, 0.5), axis=0)
        cells = (f"{a:10.1f}{b:10.1f}" for a, b in zip(middle, low, strict=True))
        print(f"{name:20s}{''.join(cells)}", flush=True)
    shown = ("kernels", "kernel_us", "gap_us", "gpu_us", "graph_updates", "traced_us")
    print(f"\n{'in a profile':20s}" + "".join(f"{key:>14s}" for key in shown))
    for name, call in calls.items():
        seen = profiles.profiled(call)
        cells = (f"{seen.get(key, float('nan')):14.1f}" for key in shown)
        print(f"{name:20s}{''.join(cells)}", flush=True)


BENCHMARK = Benchmark(
    name="encode_timeline",
    cases=[encoder.case("bert_base", batch, length) for batch, length in REQUESTS],
    quick_cases=[encoder.case("bert_tiny", 1, 24), encoder.case("bert_tiny", 4, 24)],
    kernels=encode.BENCHMARK.kernels,
    trains=lambda case: False,
    inputs=lambda params, key: (),
    implementations={"jaxscale": encode.BENCHMARK.implementations["jaxscale"]},
    measure=measure,
    time="wall",
    samples=200,
    selectors={"batch": "batch", "max_len": "max_len"},
)

if __name__ == "__main__":
    profiles.keep_graphs()
    if sys.argv[1:] == ["--what-if"]:
        what_if(programs())
    else:
        command.run(BENCHMARK)
