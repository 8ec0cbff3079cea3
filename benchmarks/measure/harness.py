"""The harness: cases x implementations, interleaved in one process.

A benchmark module holds a :class:`Benchmark` and ends with `command.run`::

    def inputs(params, key):                        # random, never zeros
        x_key, w_key = jax.random.split(key)
        m, n, k = params["M"], params["N"], params["K"]
        return (jax.random.normal(x_key, (m, k), jnp.bfloat16),
                jax.random.normal(w_key, (k, n), jnp.bfloat16))

    BENCHMARK = Benchmark(
        name="matmul",
        cases=[Case("4096_cubed", {"M": 4096, "N": 4096, "K": 4096})],
        quick_cases=[Case("tiny", {"M": 128, "N": 128, "K": 128})],
        inputs=inputs,
        reference=lambda params: lambda x, w: x @ w,  # gets fp32 inputs
        implementations={
            "mosaic_gpu": Jax(lambda params: lambda x, w: matmul(x, w)),
            "dense": Jax(lambda params: jnp.matmul),
            "torch": Torch(lambda params: lambda x, w: x @ w),
        },
        metrics=lambda params, s: {
            "tflops": 2 * params["M"] * params["N"] * params["K"] / s / 1e12
        },
    )

    if __name__ == "__main__":
        command.run(BENCHMARK)

``python -m benchmarks.matmul --case '4096*' --impl mosaic_gpu dense`` selects;
``--quick`` runs the quick cases and writes nothing. On a machine without a GPU times
are wall times, the device says ``cpu`` and nothing is ever written.

A benchmark whose cases need more than a turn of each implementation, on several devices
for example, gives ``measure`` in place of the one here, and ``compare`` for the metrics
that set implementations of a case against each other.
"""

import contextlib
import dataclasses
import functools
import importlib.metadata
import operator
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase as fnmatch
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.measure import timing


Params = Mapping[str, Any]
Output = Any

SEED = 0
"""Of the first set of inputs."""

ROUNDS = 5
"""How often the implementations of a case take turns."""

PACKAGES: Mapping[str, Sequence[str]] = {
    "torch*": ("torch",),
    "cudnn*": ("nvidia-cudnn-cu13",),
    "tokamax": ("tokamax",),
    "flash_attn_2": ("flash-attn", "torch"),
    "flash_attn_4*": ("flash-attn-4", "nvidia-cutlass-dsl", "torch"),
    "*flash_attn_3": ("vllm", "torch"),
    "flash_deberta": ("flashdeberta", "triton", "torch"),
    "vllm*": ("vllm",),
}
"""What rivals are made of, by patterns of their names; the first that fits counts."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A named problem."""

    name: str
    params: Params


@dataclasses.dataclass
class Measurement:
    """What one implementation did on one case."""

    seconds: list[float]
    max_rel_error: float | None
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    num_devices: int = 1
    versions: dict[str, str] = dataclasses.field(default_factory=dict)
    """Of packages that this environment does not have."""

    @property
    def median(self) -> float:
        """Median time in seconds."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Distance of the quartiles over the median."""
        if len(self.seconds) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return (high - low) / self.median


@dataclasses.dataclass(frozen=True)
class NoMeasurement:
    """Why an implementation has no time: it cannot do the case, or it broke."""

    reason: str
    failed: bool = False


@dataclasses.dataclass(frozen=True)
class Jax:
    """An implementation in JAX.

    Args:
        make: Gives the function for the params of a case; it is jitted unless it
            already is or ``jit`` is off (a step that keeps state). Raise
            ``NotImplementedError`` here or in the function if the case is not
            supported: the implementation is then skipped, and said so.
    """

    make: Callable[[Params], Callable]
    jit: bool = True


@dataclasses.dataclass(frozen=True)
class Torch:
    """A baseline in torch, skipped where torch or its GPU is missing.

    Args:
        make: As for :class:`Jax`. Import torch inside. The function gets the inputs as
            tensors that share the memory of the JAX arrays: it must not write them.
    """

    make: Callable[[Params], Callable]


@dataclasses.dataclass(frozen=True)
class Custom:
    """An implementation that measures itself, in child processes for example.

    Args:
        measure: Gets the params, the seed of the inputs and the number of samples.
        takes_turns: Whether it waits for its turn on the GPU itself.
    """

    measure: Callable[[Params, int, int], Measurement]
    takes_turns: bool = False


Implementation = Jax | Torch | Custom
Results = dict[str, Measurement | NoMeasurement]


@dataclasses.dataclass(kw_only=True)
class Benchmark:
    """Cases x implementations; see the head of the module."""

    name: str
    """Name of the module and of the result file."""
    cases: Sequence[Case]
    """All that a full run measures."""
    quick_cases: Sequence[Case]
    """Small ones that a CPU finishes in seconds; never written."""
    inputs: Callable[[Params, jax.Array], tuple]
    """Random inputs from a key: a tuple of arrays (or pytrees)."""
    implementations: Mapping[str, Implementation]
    """By the names that the tables show; those of `comparison.OURS` are ours."""
    reference: Callable[[Params], Callable] | None = None
    """Gives the fp32 definition, called with floating inputs cast to fp32."""
    metrics: Callable[[Params, float], dict[str, float]] | None = None
    """Metrics from the params and the median time in seconds."""
    time: Literal["device", "wall"] = "device"
    """Device time for kernels, wall time end to end."""
    max_rel_error: float = 3e-2
    """An implementation that is off by more is wrong: not written, exit status 1."""
    errors_of: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """The same of implementations that round more than the others."""
    samples: int = 30
    """Times taken of each implementation, over ``ROUNDS`` rounds."""
    burst: int = 1
    """With wall time, how many calls are dispatched before they are awaited."""
    rotate: bool = True
    """Whether small inputs take turns; off where the inputs are state."""
    read_bytes: Callable[[Params], float] | None = None
    """What the implementation that reads least of the inputs reads, on one device: so
    much decides how many take turns. By default all of the inputs."""
    count_kernels: bool = False
    """Whether to record how many kernels a call in JAX launches, as ``kernels``, and
    how long they take together, without the gaps, as ``kernel_us``."""
    part: str = ""
    """Suffix of the result file."""
    measure: (
        Callable[[Sequence[Case], Sequence[str], int], Iterable[tuple[Case, Results]]]
        | None
    ) = None
    """Measures cases, given names and samples, in place of `run_case` on each."""
    compare: Callable[[Params, Mapping[str, float]], Mapping[str, dict]] | None = None
    """Metrics of each implementation, from the params and the median of all."""
    selectors: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Flag to param: ``{"rows": "M"}`` makes ``--rows 16 64`` select cases."""
    timing: str | None = None
    """What the times are, if `measure` takes them; begins with ``wall time``."""
    kernels: Sequence[str] = ()
    """Packages of `pallas_kernels` that ours run; their changes make rows stale."""
    runs: Callable[[Case, str, str], bool] = lambda case, name, op: True
    """Whether an implementation runs those of a package in a case; by default all."""
    trains: Callable[[Case], bool] = lambda case: case.params.get("pass") != "fwd"
    """Whether a case runs the kernels of gradients."""
    spec: Callable[[Case], str] = operator.attrgetter("name")
    """The name of a case among those of its kernels in ``tests/manifest.json``."""
    devices: Callable[[Params], int] = lambda params: 1
    """How many devices a case needs."""
    offers: Callable[[Case, str], bool] = lambda case, name: True
    """Whether an implementation may give a row of a case; what is not offered is not
    due. Most find out when they are made, and raise ``NotImplementedError``."""
    packages: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    """Packages whose versions rows carry, by implementation; else `PACKAGES` says."""
    anywhere: bool = False
    """Whether results of a CPU are written too, since times are not what counts."""

    def packages_of(self, name: str) -> Sequence[str]:
        """The packages that an implementation is made of."""
        patterns = {**self.packages, **PACKAGES}
        fits = (made for pattern, made in patterns.items() if fnmatch(name, pattern))
        return next(fits, ())

    def versions(self, name: str) -> dict[str, str]:
        """Their versions, as far as they are installed."""
        found = {p: installed_version(p) for p in self.packages_of(name)}
        return {package: version for package, version in found.items() if version}

    def timing_text(self, on_gpu: bool, samples: int) -> str:
        """What the result file says of the times."""
        if self.timing is not None:
            return f"{self.timing}, median of {samples}"
        device = self.time == "device" and on_gpu
        return f"{'device' if device else 'wall'} time, median of {samples}"


def by_seed(names: Sequence[str], **fields: Any) -> Benchmark:
    """A benchmark of what is trained or pruned, on any device.

    Args:
        names: Of its implementations.
        fields: Others of `Benchmark`, of which ``measure`` takes the cases of a seed
            together.
    """

    def together(*_: Any) -> Measurement:
        raise NotImplementedError("a seed is measured as a whole")

    return Benchmark(
        inputs=lambda params, key: (),
        implementations={name: Custom(together) for name in names},
        time="wall",
        anywhere=True,
        samples=1,
        **fields,
    )


@functools.cache
def installed_version(package: str) -> str | None:
    """Version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


# --- One case -------------------------------------------------------------------------


def max_rel_error(actual: Output, reference: Output) -> float:
    """The largest ``max|a - r| / max|r|`` over the leaves; NaN counts as infinite."""
    worst = 0.0
    for a, r in zip(jax.tree.leaves(actual), jax.tree.leaves(reference), strict=True):
        a, r = np.asarray(a, np.float32), np.asarray(r, np.float32)
        if a.shape != r.shape:
            raise ValueError(f"output shape {a.shape}, the reference has {r.shape}")
        scale = float(np.max(np.abs(r), initial=0.0))
        error = float(np.max(np.abs(a - r), initial=0.0)) / (scale or 1.0)
        worst = max(worst, error if np.isfinite(error) else float("inf"))
    return worst


def _checked_inputs(benchmark: Benchmark, params: Params, seed: int) -> tuple:
    inputs = benchmark.inputs(params, jax.random.key(seed))
    for leaf in jax.tree.leaves(inputs):
        if (
            isinstance(leaf, jax.Array)
            and jnp.issubdtype(leaf.dtype, jnp.floating)
            and leaf.size > 1
            and float(jnp.max(leaf)) == float(jnp.min(leaf))
        ):
            raise ValueError(
                f"an input of shape {leaf.shape} is constant; constant inputs make "
                "kernels look faster than they are: draw random ones"
            )
    return inputs


def to_fp32(tree: Any) -> Any:
    """The same with all floating arrays in fp32."""

    def cast(leaf):
        is_float = isinstance(leaf, jax.Array) and jnp.issubdtype(
            leaf.dtype, jnp.floating
        )
        return leaf.astype(jnp.float32) if is_float else leaf

    return jax.tree.map(cast, tree)


def to_torch(tree: Any) -> Any:
    """Tensors that share the memory of arrays."""
    import torch

    def convert(leaf):
        return torch.from_dlpack(leaf) if isinstance(leaf, jax.Array) else leaf

    return jax.tree.map(convert, tree)


def from_torch(tree: Any) -> Any:
    """Tensors as fp32 arrays on the host."""
    import torch

    def convert(leaf):
        if isinstance(leaf, torch.Tensor):
            return leaf.detach().float().cpu().numpy()
        return leaf

    return jax.tree.map(convert, tree)


@dataclasses.dataclass
class _Candidate:
    """An implementation made ready for one case."""

    take: Callable[[int], list[float]]
    """Takes at least so many times, in seconds."""
    max_rel_error: float | None
    metrics: dict[str, float]
    seconds: list[float] = dataclasses.field(default_factory=list)


def _prepare(
    benchmark: Benchmark,
    implementation: Jax | Torch,
    params: Params,
    sets: Sequence[tuple],
    expected: Output | None,
) -> _Candidate:
    """Compile and warm up an implementation, and compare it with the reference."""
    device_time = benchmark.time == "device" and timing.on_gpu()
    wall = {} if device_time else {"burst": benchmark.burst}
    function = implementation.make(params)
    metrics = {}
    if isinstance(implementation, Torch):
        timer = timing.torch_device_time if device_time else timing.torch_wall_time
        sets = to_torch(sets)
        output, costs = timing.torch_first_calls(function, sets[0])
        found = from_torch(output)
    else:
        timer = timing.jax_device_time if device_time else timing.jax_wall_time
        if implementation.jit and not hasattr(function, "lower"):
            function = jax.jit(function)
        function, costs = _compile(function, sets[0])
        found = output = jax.block_until_ready(function(*sets[0]))
        if benchmark.count_kernels and timing.on_gpu():
            kernels = timing.jax_kernels(function, sets[0])
            metrics["kernels"] = float(len(kernels))
            metrics["kernel_us"] = 1e6 * sum(seconds for _, seconds in kernels)
    error = None if expected is None else max_rel_error(found, expected)
    del found, output
    return _Candidate(
        lambda calls: timer(function, sets, calls, **wall), error, metrics | costs
    )


def _compile(function: Callable, inputs: tuple) -> tuple[Callable, dict[str, float]]:
    """The function, compiled for these inputs, and what that costs."""
    if isinstance(function, timing.Program):
        return function, function.lower(*inputs).compile().costs
    if hasattr(function, "lower"):  # jit finds what was compiled
        return function, timing.Program(function).lower(*inputs).compile().costs
    start = time.perf_counter()
    jax.block_until_ready(function(*inputs))
    seconds = time.perf_counter() - start
    memory = getattr(function, "memory", None)
    return function, timing.costs(seconds, memory and memory(*inputs))


def run_case(
    benchmark: Benchmark, case: Case, names: Sequence[str], samples: int
) -> Results:
    """Measure implementations on one case, in turns.

    One that breaks does not take the others with it.
    """
    with timing.preparing():
        results, candidates, num_devices = _candidates(benchmark, case, names)
    for name in names:
        custom = benchmark.implementations[name]
        if isinstance(custom, Custom):
            with contextlib.nullcontext() if custom.takes_turns else timing.turn():
                results[name] = attempt(
                    lambda c=custom: c.measure(case.params, SEED, samples)
                )
            _tell(f"{case.name} {name}", results[name])
    with timing.turn():
        for _ in range(ROUNDS):
            for name in list(candidates):
                candidate = candidates[name]
                try:
                    candidate.seconds += candidate.take(-(-samples // ROUNDS))
                except Exception as error:
                    results[name] = failed(error)
                    del candidates[name]
    for name, candidate in candidates.items():
        results[name] = Measurement(
            candidate.seconds, candidate.max_rel_error, candidate.metrics, num_devices
        )
    return {name: results[name] for name in names}


def _tell(label: str, result: Measurement | NoMeasurement) -> None:
    """Says what was measured; the next may take minutes, and the run may be cut."""
    if isinstance(result, Measurement):
        metrics = (f", {name} {value:.6g}" for name, value in result.metrics.items())
        print(f"{label}: {result.median:.6g} s{''.join(metrics)}", file=sys.stderr)


def _candidates(
    benchmark: Benchmark, case: Case, names: Sequence[str]
) -> tuple[Results, dict[str, _Candidate], int]:
    """What is to be timed, checked; what is not; and the number of devices."""
    sets = [_checked_inputs(benchmark, case.params, SEED)]
    arrays = [a for a in jax.tree.leaves(sets) if isinstance(a, jax.Array)]
    num_devices = max((len(a.devices()) for a in arrays), default=1)
    nbytes = sum(a.nbytes for a in arrays) / num_devices
    if benchmark.read_bytes is not None:
        nbytes = benchmark.read_bytes(case.params)
    if benchmark.rotate and benchmark.time == "device":
        count = timing.number_of_sets(nbytes)
        sets += [
            _checked_inputs(benchmark, case.params, SEED + i) for i in range(1, count)
        ]
    expected = None
    if benchmark.reference is not None:
        # To try out its matmuls would take longer than to run it once.
        options = {"xla_gpu_autotune_level": "0"} if timing.on_gpu() else None
        definition = jax.jit(benchmark.reference(case.params), compiler_options=options)
        with jax.default_matmul_precision("highest"):
            expected = definition(*to_fp32(sets[0]))
        expected = jax.tree.map(np.asarray, expected)

    results: Results = {}
    candidates: dict[str, _Candidate] = {}
    for name in names:
        implementation = benchmark.implementations[name]
        if isinstance(implementation, Custom):
            continue
        if isinstance(implementation, Torch) and not timing.torch_is_there():
            results[name] = NoMeasurement("torch with a GPU is not there")
            continue
        made = attempt(
            lambda i=implementation: _prepare(benchmark, i, case.params, sets, expected)
        )
        if isinstance(made, NoMeasurement):
            results[name] = made
        else:
            candidates[name] = made
    return results, candidates, num_devices


def attempt[T](make: Callable[[], T]) -> T | NoMeasurement:
    """What it makes, or why it does not."""
    try:
        return make()
    except NotImplementedError as error:
        return NoMeasurement(f"not supported: {error}")
    except Exception as error:
        return failed(error)


def failed(error: Exception) -> NoMeasurement:
    """What is left of an implementation that broke; prints where it did."""
    traceback.print_exception(error)
    return NoMeasurement(f"failed: {type(error).__name__}", failed=True)
