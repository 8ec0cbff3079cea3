"""The harness: cases x implementations, interleaved in one process.

A benchmark module holds a :class:`Benchmark` and ends with ``BENCHMARK.main()``::

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
        BENCHMARK.main()

``python -m benchmarks.matmul --case '4096*' --impl mosaic_gpu --impl dense`` selects;
``--quick`` runs the quick cases and writes nothing. On a machine without a GPU times
are wall times, the device says ``cpu`` and nothing is ever written.
"""

import argparse
import dataclasses
import datetime
import fnmatch
import pathlib
import shlex
import statistics
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import records, timing


Params = Mapping[str, Any]
Output = Any

ROUNDS = 5
"""How often the implementations of a case take turns."""


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
    """

    measure: Callable[[Params, int, int], Measurement]


Implementation = Jax | Torch | Custom


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
    """By the names that the tables show; those of `tables.OURS` are ours."""
    reference: Callable[[Params], Callable] | None = None
    """Gives the fp32 definition, called with floating inputs cast to fp32."""
    metrics: Callable[[Params, float], dict[str, float]] | None = None
    """Metrics from the params and the median time in seconds."""
    time: Literal["device", "wall"] = "device"
    """Device time for kernels, wall time end to end."""
    max_rel_error: float = 3e-2
    """An implementation that is off by more is wrong: not written, exit status 1."""
    samples: int = 30
    """Times taken of each implementation, over ``ROUNDS`` rounds."""
    burst: int = 1
    """With wall time, how many calls are dispatched before they are awaited."""
    rotate: bool = True
    """Whether small inputs take turns; off where the inputs are state."""
    memory: bool = False
    """Whether to record what a call takes beyond its inputs, as ``memory_mb``."""
    part: str = ""
    """Suffix of the result file."""

    def main(self, argv: Sequence[str] | None = None) -> None:
        """Run from the command line."""
        sys.exit(_main(self, argv))

    def timing_text(self, on_gpu: bool, samples: int) -> str:
        """What the result file says of the times."""
        device = self.time == "device" and on_gpu
        return f"{'device' if device else 'wall'} time, median of {samples}"


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


def _to_fp32(tree: Any) -> Any:
    def cast(leaf):
        is_float = isinstance(leaf, jax.Array) and jnp.issubdtype(
            leaf.dtype, jnp.floating
        )
        return leaf.astype(jnp.float32) if is_float else leaf

    return jax.tree.map(cast, tree)


def _to_torch(tree: Any) -> Any:
    import torch

    def convert(leaf):
        return torch.from_dlpack(leaf) if isinstance(leaf, jax.Array) else leaf

    return jax.tree.map(convert, tree)


def _from_torch(tree: Any) -> Any:
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
    device_time = benchmark.time == "device" and _on_gpu()
    wall = {} if device_time else {"burst": benchmark.burst}
    function = implementation.make(params)
    metrics = {}
    if isinstance(implementation, Torch):
        timer = timing.torch_device_time if device_time else timing.torch_wall_time
        sets = _to_torch(sets)
        if benchmark.memory:
            metrics["memory_mb"] = timing.torch_memory(function, sets[0]) / 1e6
        output = function(*sets[0])
        found = _from_torch(output)
    else:
        timer = timing.jax_device_time if device_time else timing.jax_wall_time
        if implementation.jit and not hasattr(function, "lower"):
            function = jax.jit(function)
        if benchmark.memory:
            metrics["memory_mb"] = timing.jax_memory(function, sets[0]) / 1e6
        found = output = jax.block_until_ready(function(*sets[0]))
    error = None if expected is None else max_rel_error(found, expected)
    del found, output
    return _Candidate(
        lambda calls: timer(function, sets, calls, **wall), error, metrics
    )


def run_case(
    benchmark: Benchmark, case: Case, names: Sequence[str], samples: int
) -> dict[str, Measurement | NoMeasurement]:
    """Measure implementations on one case, in turns.

    One that breaks does not take the others with it.
    """
    seed = 0
    sets = [_checked_inputs(benchmark, case.params, seed)]
    arrays = [a for a in jax.tree.leaves(sets) if isinstance(a, jax.Array)]
    num_devices = max((len(a.devices()) for a in arrays), default=1)
    nbytes = sum(a.nbytes for a in arrays) / num_devices
    if benchmark.rotate and benchmark.time == "device":
        count = timing.number_of_sets(nbytes) if _on_gpu() else 2
        sets += [
            _checked_inputs(benchmark, case.params, seed + i) for i in range(1, count)
        ]
    expected = None
    if benchmark.reference is not None:
        with jax.default_matmul_precision("highest"):
            expected = jax.jit(benchmark.reference(case.params))(*_to_fp32(sets[0]))
        expected = jax.tree.map(np.asarray, expected)

    results: dict[str, Measurement | NoMeasurement] = {}
    candidates: dict[str, _Candidate] = {}
    for name in names:
        implementation = benchmark.implementations[name]
        try:
            if isinstance(implementation, Custom):
                results[name] = implementation.measure(case.params, seed, samples)
            elif isinstance(implementation, Torch) and not timing.torch_is_there():
                results[name] = NoMeasurement("torch with a GPU is not there")
            else:
                candidates[name] = _prepare(
                    benchmark, implementation, case.params, sets, expected
                )
        except NotImplementedError as error:
            results[name] = NoMeasurement(f"not supported: {error}")
        except Exception as error:
            results[name] = _failed(error)
    for _ in range(ROUNDS):
        for name in list(candidates):
            try:
                candidates[name].seconds += candidates[name].take(-(-samples // ROUNDS))
            except Exception as error:
                results[name] = _failed(error)
                del candidates[name]
    for name, candidate in candidates.items():
        results[name] = Measurement(
            candidate.seconds, candidate.max_rel_error, candidate.metrics, num_devices
        )
    return {name: results[name] for name in names}


def _failed(error: Exception) -> NoMeasurement:
    traceback.print_exception(error)
    return NoMeasurement(f"failed: {type(error).__name__}", failed=True)


def _row(benchmark: Benchmark, case: Case, name: str, m: Measurement) -> dict:
    metrics = dict(
        benchmark.metrics(case.params, m.median) if benchmark.metrics else {}
    )
    metrics |= m.metrics
    metrics["spread"] = m.spread
    return {
        "case": case.name,
        "params": dict(case.params),
        "implementation": name,
        "time_us": _rounded(m.median * 1e6),
        "metrics": {key: _rounded(value) for key, value in metrics.items()},
        "max_rel_error": None if m.max_rel_error is None else _rounded(m.max_rel_error),
        "num_devices": m.num_devices,
    }


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")


# --- The command line -----------------------------------------------------------------


def _on_gpu() -> bool:
    return jax.devices()[0].platform == "gpu"


def _commit(given: str | None) -> str:
    if given:
        return given
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=pathlib.Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    if found.returncode:
        raise SystemExit("there is no git here: name the commit with --commit")
    return found.stdout.strip()


def _selected(
    names: Sequence[str], patterns: Sequence[str] | None, what: str
) -> list[str]:
    for pattern in patterns or ():
        if not fnmatch.filter(names, pattern):
            raise SystemExit(f"no {what} matches {pattern!r}; there are: {list(names)}")
    return [
        name
        for name in names
        if not patterns or any(fnmatch.fnmatch(name, p) for p in patterns)
    ]


def _parser(benchmark: Benchmark) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{benchmark.name}",
        description="Cases: "
        + ", ".join(case.name for case in benchmark.cases)
        + ". Implementations: "
        + ", ".join(benchmark.implementations)
        + ".",
    )
    add = parser.add_argument
    add("--case", action="append", help="cases by name or pattern; may be repeated")
    add("--impl", action="append", help="implementations by name or pattern")
    add("--quick", action="store_true", help="small cases; writes nothing")
    add("--samples", type=int, help=f"times per implementation ({benchmark.samples})")
    add("--commit", help="the commit measured, where there is no git")
    add("--out", type=pathlib.Path, default=records.RESULTS, help="folder of results")
    return parser


def _main(benchmark: Benchmark, argv: Sequence[str] | None) -> int:
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = _parser(benchmark)
    args = parser.parse_args(argv)
    if args.samples is not None and args.samples < 1:
        parser.error(f"--samples {args.samples}, expected at least 1")
    cases = {
        case.name: case
        for case in (benchmark.quick_cases if args.quick else benchmark.cases)
    }
    chosen = _selected(list(cases), args.case, "case")
    names = _selected(list(benchmark.implementations), args.impl, "implementation")
    write = not args.quick and _on_gpu()
    samples = args.samples or (ROUNDS if args.quick else benchmark.samples)
    commit = _commit(args.commit) if write else args.commit or "none"
    shown, wrong = [], []
    for case_name in chosen:
        case = cases[case_name]
        rows = []
        for name, result in run_case(benchmark, case, names, samples).items():
            label = f"{case.name} {name}"
            if isinstance(result, NoMeasurement):
                print(f"{label}: {result.reason}", flush=True)
                wrong += [f"{label}: {result.reason}"] if result.failed else []
                continue
            row = _row(benchmark, case, name, result)
            print(_line(row), flush=True)
            error = result.max_rel_error
            if error is not None and not error <= benchmark.max_rel_error:
                allowed = benchmark.max_rel_error
                wrong.append(f"{label}: error {error:.2g}, allowed {allowed:g}")
            else:
                rows.append(row)
        if rows and write:  # after each case: a later one may run out of time
            new = _record(benchmark, rows, samples, commit, argv)
            _write(benchmark, new, args.out, names if args.impl else None)
        shown += rows
    if shown:
        from benchmarks import tables

        print("\n" + tables.markdown(_record(benchmark, shown, samples, commit, argv)))
    for line in wrong:
        print(f"WRONG {line}", file=sys.stderr)
    if not write and not args.quick:
        print(f"not written: the device is {jax.devices()[0].device_kind}")
    return 1 if wrong else 0


def _write(
    benchmark: Benchmark, new: dict, out: pathlib.Path, replaced: Sequence[str] | None
) -> None:
    path = records.path_for(out, new["device"], benchmark.name, benchmark.part)
    old = records.load(path) if path.exists() else None
    records.dump(records.merge(old, new, replaced), path)
    print(f"wrote {path}", flush=True)


def _record(
    benchmark: Benchmark, rows: list, samples: int, commit: str, argv: Sequence[str]
) -> dict:
    """The file that this run alone would write."""
    num_devices = max(row.get("num_devices", 1) for row in rows)
    rows = [
        {k: v for k, v in row.items() if k != "num_devices" or v != num_devices}
        for row in rows
    ]
    command = ["python", "-m", f"benchmarks.{benchmark.name}", *_without_paths(argv)]
    return {
        "benchmark": benchmark.name,
        "device": jax.devices()[0].device_kind,
        "num_devices": num_devices,
        "jax": jax.__version__,
        "commit": commit,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": shlex.join(command),
        "timing": benchmark.timing_text(_on_gpu(), samples),
        "rows": rows,
    }


def _without_paths(argv: Sequence[str]) -> list[str]:
    """The arguments that say what was measured, without ``--out`` and ``--commit``."""
    kept, skip = [], False
    for argument in argv:
        name = argument.split("=")[0]
        if skip or name in ("--out", "--commit"):
            skip = not skip and argument == name
        else:
            kept.append(argument)
    return kept


def _line(row: Mapping[str, Any]) -> str:
    metrics = ", ".join(f"{key} {value:g}" for key, value in row["metrics"].items())
    error = row["max_rel_error"]
    shown = "" if error is None else f", error {error:.1e}"
    return (
        f"{row['case']:24s} {row['implementation']:16s} {row['time_us']:12.1f} us  "
        f"{metrics}{shown}"
    )
