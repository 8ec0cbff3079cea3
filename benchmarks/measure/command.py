"""The command line of a benchmark: choose cases, measure, print and write rows."""

import argparse
import datetime
import fnmatch
import pathlib
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import jax

from benchmarks.measure import comparison, records, timing
from benchmarks.measure.clocks import HELD_BACK, Clocks
from benchmarks.measure.harness import (
    ROUNDS,
    Benchmark,
    Case,
    Measurement,
    NoMeasurement,
    Results,
    run_case,
)


PAUSE = 10.0
"""Seconds at least between two lines that say what is left."""


def run(benchmark: Benchmark, argv: Sequence[str] | None = None) -> NoReturn:
    """Run a benchmark as the process that it is."""
    # As an exception, which ends the processes that measure, too: one that is left
    # keeps a GPU busy and its memory taken.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        sys.exit(main(benchmark, argv))
    finally:
        signal.signal(signal.SIGTERM, before)


def main(benchmark: Benchmark, argv: Sequence[str] | None) -> int:
    """Run a benchmark; the exit status is 1 if something was wrong."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = _parser(benchmark)
    args = parser.parse_args(argv)
    if args.samples is not None and args.samples < 1:
        parser.error(f"--samples {args.samples}, expected at least 1")
    chosen, names = _chosen_cases(benchmark, args), _chosen_names(benchmark, args)
    write = not args.quick and (benchmark.anywhere or timing.on_gpu())
    samples = args.samples or (ROUNDS if args.quick else benchmark.samples)
    head = commit(args.commit) if write else args.commit or "none"
    progress, clocks = _Progress(chosen), Clocks()
    shown, wrong = [], []
    for case, results in _measured(benchmark, chosen, names, samples):
        if (share := clocks.held_back()) > HELD_BACK:
            results = _held_back(results, share)
        each = progress.passed(case) / max(len(results), 1)
        rows, bad = _report(benchmark, case, results, each)
        wrong += bad
        if write and rows:  # after each case: a later one may run out of time
            new = _record(benchmark, rows, samples, head, argv)
            selects = args.impl or args.skip
            _write(benchmark, new, args.out, names if selects else None)
        shown += rows
        progress.show()
    if shown:
        print(
            "\n" + comparison.markdown(_record(benchmark, shown, samples, head, argv))
        )
    for line in wrong:
        print(f"WRONG {line}", file=sys.stderr)
    if not write and not args.quick:
        print(f"not written: the device is {jax.devices()[0].device_kind}")
    return 1 if wrong else 0


def _held_back(results: Results, share: float) -> Results:
    """No measurements, for those that a host with lowered clocks gave."""
    reason = f"heat or the power supply lowered the clock {share:.0%} of the time"
    none = NoMeasurement(f"failed: {reason}", failed=True)
    return {
        name: none if isinstance(result, Measurement) else result
        for name, result in results.items()
    }


class _Progress:
    """Seconds that cases take, and how long those that are left will."""

    def __init__(self, cases: Sequence[Case]):
        self.left = {records.key(case.name, case.params) for case in cases}
        self.all = len(self.left)
        self.start = self.last = self.said = time.monotonic()

    def passed(self, case: Case) -> float:
        """Seconds since the case before; this one is done."""
        self.left.discard(records.key(case.name, case.params))
        now = time.monotonic()
        taken, self.last = now - self.last, now
        return taken

    def show(self) -> None:
        """Print what is left, now and then."""
        if not self.left or self.last - self.said < PAUSE or len(self.left) == self.all:
            return
        self.said, taken = self.last, self.last - self.start
        left = len(self.left) * taken / (self.all - len(self.left))
        print(
            f"-- {taken:.0f} s, {len(self.left)} cases left, about {left:.0f} s",
            flush=True,
        )


def selected(
    benchmark: Benchmark, argv: Sequence[str]
) -> tuple[list[Case], list[str], int | None]:
    """Cases, implementations and samples that a command line asks for."""
    args = _parser(benchmark).parse_args(argv)
    return (
        _chosen_cases(benchmark, args),
        _chosen_names(benchmark, args),
        args.samples,
    )


def _row(
    benchmark: Benchmark, case: Case, name: str, m: Measurement, compared: dict
) -> dict:
    metrics = dict(
        benchmark.metrics(case.params, m.median) if benchmark.metrics else {}
    )
    metrics |= compared | m.metrics
    metrics["spread"] = m.spread
    return {
        "case": case.name,
        "params": dict(case.params),
        "implementation": name,
        "time_us": _rounded(m.median * 1e6),
        "metrics": {key: _rounded(value) for key, value in metrics.items()},
        "max_rel_error": None if m.max_rel_error is None else _rounded(m.max_rel_error),
        "num_devices": m.num_devices,
        "versions": benchmark.versions(name) | m.versions,
    }


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")


def commit(given: str | None) -> str:
    """The commit given, or else that of the files here."""
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


def _chosen_cases(benchmark: Benchmark, args: argparse.Namespace) -> list[Case]:
    cases = list(benchmark.quick_cases if args.quick else benchmark.cases)
    names = set(_selected(_ordered(c.name for c in cases), args.case, "case"))
    cases = [case for case in cases if case.name in names]
    for flag, param in benchmark.selectors.items():
        known = _ordered(str(case.params[param]) for case in cases)
        values = set(_selected(known, getattr(args, flag), param))
        cases = [case for case in cases if str(case.params[param]) in values]
    return cases


def _chosen_names(benchmark: Benchmark, args: argparse.Namespace) -> list[str]:
    names = _selected(list(benchmark.implementations), args.impl, "implementation")
    skipped = _selected(names, args.skip, "implementation") if args.skip else []
    return [name for name in names if name not in skipped]


def _ordered(values: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(values))


def _parser(benchmark: Benchmark) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{benchmark.name}",
        description="Cases: "
        + ", ".join(_ordered(case.name for case in benchmark.cases))
        + ". Implementations: "
        + ", ".join(benchmark.implementations)
        + ".",
    )
    add = parser.add_argument
    several: Any = {"action": "extend", "nargs": "+"}
    add("--case", "--only", **several, help="cases by name or pattern")
    for flag, param in benchmark.selectors.items():
        add(f"--{flag}", **several, help=f"cases by {param}")
    add("--impl", "--implementations", **several, help="implementations, likewise")
    add("--skip", **several, help="implementations to leave out")
    add("--quick", action="store_true", help="small cases; writes nothing")
    add("--samples", type=int, help=f"times per implementation ({benchmark.samples})")
    add("--commit", help="the commit measured, where there is no git")
    add("--out", type=pathlib.Path, default=records.RESULTS, help="folder of results")
    return parser


def _measured(
    benchmark: Benchmark, cases: Sequence[Case], names: Sequence[str], samples: int
) -> Iterator[tuple[Case, Results]]:
    if benchmark.measure is not None:
        yield from benchmark.measure(cases, names, samples)
        return
    for case in cases:
        yield case, run_case(benchmark, case, names, samples)


def _report(
    benchmark: Benchmark, case: Case, results: Results, seconds: float
) -> tuple[list[dict], list[str]]:
    """Print the results of a case: its rows, and what is wrong with the others.

    Each row says the `seconds` that its measurement took, compiling and all.
    """
    where = " ".join(
        [case.name, *(f"{p}={case.params[p]}" for p in benchmark.selectors.values())]
    )
    right: dict[str, Measurement] = {}
    wrong = []
    for name, result in results.items():
        label = f"{where} {name}"
        if isinstance(result, NoMeasurement):
            print(f"{label}: {result.reason}", flush=True)
            wrong += [f"{label}: {result.reason}"] if result.failed else []
            continue
        error = result.max_rel_error
        allowed = benchmark.errors_of.get(name, benchmark.max_rel_error)
        if error is not None and not error <= allowed:
            wrong.append(f"{label}: error {error:.2g}, allowed {allowed:g}")
        else:
            right[name] = result
    medians = {name: result.median for name, result in right.items()}
    compared = benchmark.compare(case.params, medians) if benchmark.compare else {}
    rows = [
        _row(benchmark, case, name, result, compared.get(name, {}))
        for name, result in right.items()
    ]
    for row in rows:
        print(_line(row, where), flush=True)
        row["metrics"]["run_seconds"] = _rounded(seconds)
    return rows, wrong


def _write(
    benchmark: Benchmark, new: dict, out: pathlib.Path, replaced: Sequence[str] | None
) -> None:
    path = records.path_for(out, new["device"], benchmark.name, benchmark.part)
    records.add(new, path, replaced)
    print(f"wrote {path}", flush=True)


def _record(
    benchmark: Benchmark, rows: list, samples: int, commit: str, argv: Sequence[str]
) -> dict:
    """The file that this run alone would write."""
    num_devices = max(row.get("num_devices", 1) for row in rows)
    unsaid = ("num_devices", num_devices), ("versions", {})
    rows = [{k: v for k, v in row.items() if (k, v) not in unsaid} for row in rows]
    command = ["python", "-m", f"benchmarks.{benchmark.name}", *_without_paths(argv)]
    return {
        "benchmark": benchmark.name,
        "device": jax.devices()[0].device_kind,
        "num_devices": num_devices,
        "jax": jax.__version__,
        "commit": commit,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": shlex.join(command),
        "timing": benchmark.timing_text(timing.on_gpu(), samples),
        "rows": rows,
    }


def _without_paths(argv: Sequence[str]) -> list[str]:
    """The arguments that say what was measured, without files and the commit."""
    kept, skip = [], False
    for argument in argv:
        name = argument.split("=")[0]
        if skip or name in ("--out", "--commit"):
            skip = not skip and argument == name
        else:
            kept.append(argument)
    return kept


def _line(row: Mapping[str, Any], where: str) -> str:
    metrics = ", ".join(f"{key} {value:g}" for key, value in row["metrics"].items())
    error = row["max_rel_error"]
    shown = "" if error is None else f", error {error:.1e}"
    return (
        f"{where:24s} {row['implementation']:16s} {row['time_us']:12.1f} us  "
        f"{metrics}{shown}"
    )
