"""What is to be measured: rows that are missing, and those of other kernels.

What is stale `benchmarks.publish.stale` says; any row is once JAX is another version,
since XLA is then another too.

A case is measured whole: its implementations take turns on one chip, so that one of
them alone would be compared with times of another day.
"""

import dataclasses
import functools
import pathlib
import shlex
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from benchmarks.measure import command, comparison, records
from benchmarks.measure.harness import Benchmark, Case, installed_version
from benchmarks.publish import headlines, pruned_speed, tables
from benchmarks.publish.stale import History, load_benchmark, ours


ROOT = tables.ROOT

FRESH, MISSING = "fresh", "missing"
"""States of a row; every other says why it is stale."""

SECONDS = {
    "encoder_service": 25.0,
    "training": 90.0,
    "training_loop": 60.0,
    "fine_tuning": 30.0,
    "serving": 60.0,
    "convergence": 8.0,
}
OTHER_SECONDS = 6.0
"""What a row is taken to need where none like it says what it took."""

START = 15.0
"""Seconds until a process of a benchmark measures."""

LONGEST = 300.0
"""Seconds that one process is given, or else one case."""

Key = tuple[str, str, str]
"""Case, params and implementation of a row."""


@dataclasses.dataclass(frozen=True)
class Due:
    """A case and the state of each row that is wanted of it."""

    benchmark: Benchmark
    case: Case
    states: Mapping[str, str]
    """By implementation."""
    samples: int | None
    """As on the line of the suite that wants it."""
    topic: str
    seconds: float
    """Estimate for all implementations, which run together."""
    cited: int
    """0: in a table of the README; 1: in one of the docs; 2: in none."""

    @property
    def gpus(self) -> int:
        """How many it needs."""
        return self.benchmark.devices(self.case.params)

    @property
    def rows(self) -> list[str]:
        """Implementations whose rows are missing or stale."""
        return [name for name, state in self.states.items() if state != FRESH]

    def __str__(self) -> str:
        selected = "".join(
            f" {p}={self.case.params[p]}" for p in self.benchmark.selectors.values()
        )
        by_state: dict[str, list[str]] = {}
        for name in self.rows:
            by_state.setdefault(self.states[name], []).append(name)
        states = "; ".join(f"{s}: {', '.join(n)}" for s, n in by_state.items())
        return f"{self.benchmark.name} {self.case.name}{selected}  {states}"


# --- The plan -------------------------------------------------------------------------


def plan(
    lines: Sequence[tuple[str, str]],
    folders: Sequence[pathlib.Path],
    history: History,
    *,
    stored_only: bool = False,
) -> list[Due]:
    """Every wanted case with its states, the fresh ones too, in the order of worth.

    First what tables of the README show, then those of the docs, then the rest; among
    these in the order of `lines`, then of the stored rows that no line asks for.

    Args:
        lines: Topic and command line of each benchmark, the most important first.
        folders: Of a device's result files; where two have a row, the last counts.
        history: Decides what is stale.
        stored_only: Leaves out what has no row yet: a device beside the one that all
            rows are wanted of.

    Raises:
        ValueError: a result file is damaged.
    """
    shown = citations(folders[-1].name if folders else tables.DEFAULT_DEVICE)
    found: list[Due] = []
    stored = {name: _stored(name, folders) for name in _names(lines)}
    for name, case, wanted, samples, topic in _wanted(lines, stored):
        benchmark, rows = load_benchmark(name), stored[name]
        if stored_only:
            wanted = [n for n in wanted if (*_identity(case), n) in rows]
        if not wanted:
            continue
        states, seconds = {}, 0.0
        for implementation in wanted:
            key = (*_identity(case), implementation)
            row = rows.get(key)
            states[implementation] = _state(benchmark, case, row, history)
            seconds += _seconds(benchmark, key, rows)
        ranks = [rank for rank, shows in shown if shows(benchmark, case)]
        found.append(
            Due(
                benchmark=benchmark,
                case=case,
                states=states,
                samples=samples,
                topic=topic,
                seconds=seconds,
                cited=min(ranks, default=2),
            )
        )
    return sorted(found, key=lambda due: due.cited)


def _names(lines: Sequence[tuple[str, str]]) -> list[str]:
    return records.ordered(line.split()[0] for _, line in lines)


def _identity(case: Case) -> tuple[str, str]:
    return records.key(case.name, case.params)


def _stored(name: str, folders: Sequence[pathlib.Path]) -> Mapping[Key, records.Record]:
    rows = {}
    benchmark = load_benchmark(name)
    for folder in folders:
        path = records.path_for(folder.parent, folder.name, name, benchmark.part)
        if path.exists():
            for row in records.full_rows(records.load(path)):
                rows[*records.identity(row), row["implementation"]] = row
    return rows


def _wanted(
    lines: Sequence[tuple[str, str]], stored: Mapping[str, Mapping[Key, Any]]
) -> Iterator[tuple[str, Case, list[str], int | None, str]]:
    """Benchmark, case, implementations, samples and topic of each case, once."""
    found: dict[tuple[str, str, str], tuple] = {}
    topics = {}
    for topic, line in lines:
        name, *arguments = shlex.split(line)
        benchmark = load_benchmark(name)
        topics.setdefault(name, topic)
        cases, names, samples = command.selected(benchmark, arguments)
        for case in cases:
            key = (name, *_identity(case))
            _, _, wanted, *_ = found.setdefault(key, (name, case, [], samples, topic))
            new = [n for n in names if n not in wanted]
            wanted += [n for n in new if benchmark.offers(case, n)]
    for name, rows in stored.items():
        benchmark = load_benchmark(name)
        cases = {_identity(case): case for case in benchmark.cases}
        for case_name, params, implementation in rows:
            case = cases.get((case_name, params))
            if case is None or implementation not in benchmark.implementations:
                continue
            key = (name, case_name, params)
            other = name, case, [], None, topics[name]
            _, _, wanted, *_ = found.setdefault(key, other)
            if implementation not in wanted:
                wanted.append(implementation)
    for name, case, wanted, samples, topic in found.values():
        order = [n for n in load_benchmark(name).implementations if n in wanted]
        yield name, case, order, samples, topic


def _state(
    benchmark: Benchmark, case: Case, row: records.Record | None, history: History
) -> str:
    if row is None:
        return MISSING
    if row["jax"] != jax.__version__:
        return f"of JAX {row['jax']}"
    for package, version in row.get("versions", {}).items():
        if installed_version(package) not in (None, version):
            return f"of {package} {version}"
    if row["implementation"] not in ours(benchmark):
        return FRESH
    return history.stale(benchmark, case, row["implementation"], row["commit"]) or FRESH


def _seconds(
    benchmark: Benchmark, key: Key, rows: Mapping[Key, records.Record]
) -> float:
    """What the row took, or what rows of its implementation did, or any, or a guess."""
    taken = {k: r["metrics"]["run_seconds"] for k, r in rows.items() if _says(r)}
    if key in taken:
        return taken[key]
    alike = [seconds for k, seconds in taken.items() if k[2] == key[2]]
    if known := alike or list(taken.values()):
        return statistics.median(known)
    return SECONDS.get(benchmark.name, OTHER_SECONDS)


def _says(row: records.Record) -> bool:
    return "run_seconds" in row["metrics"]


def citations(device: str, root: pathlib.Path = ROOT) -> list[tuple[int, Any]]:
    """For each table of the README (0) and of the docs (1), whether it has a case.

    Args:
        device: The folder of results whose tables count.
        root: Of the documents.
    """
    found = []
    for path in tables.documents(root):
        rank = 0 if path.name == "README.md" else 1
        for marker in tables.MARKER.finditer(path.read_text(encoding="utf-8")):
            options = dict(item.split("=", 1) for item in marker["options"].split())
            default = tables.DEFAULT_DEVICE
            shown = [(marker["name"], options)]
            if marker["name"] == "headlines":
                own = [
                    h for h in headlines.HEADLINES if (h.device or default) == device
                ]
                shown = [_of_headline(h) for h in own]
            elif options.get("device", default) != device:
                continue
            found += [(rank, functools.partial(_shows, *one)) for one in shown]
    return found


def _of_headline(headline: headlines.Headline) -> tuple[str, dict[str, str]]:
    """What a row of the README's table shows, as the options of a table say it."""
    params = {name: str(value) for name, value in headline.params.items()}
    return headline.file, {"cases": ",".join(headline.cases) or "*", **params}


def _shows(
    name: str, options: dict[str, str], benchmark: Benchmark, case: Case
) -> bool:
    joined = pruned_speed.SOURCES if name == pruned_speed.NAME else ()
    if benchmark.name not in (name, *joined) or not comparison.matches(
        case.name, options.get("cases", "*")
    ):
        return False
    return all(
        comparison.matches(str(case.params[param]), values)
        for param, values in options.items()
        if param in case.params
    )


# --- Commands -------------------------------------------------------------------------


def selection(benchmark: Benchmark, cases: Sequence[Case]) -> list[str]:
    """Arguments of the command line that select these cases, and maybe more."""
    found = ["--case", *records.ordered(case.name for case in cases)]
    for flag, param in benchmark.selectors.items():
        values = records.ordered(str(case.params[param]) for case in cases)
        found += [f"--{flag}", *values]
    return found


def processes(found: Sequence[Due]) -> Iterator[tuple[list[str], list[Due]]]:
    """Arguments and cases of each process: what is alike runs together.

    Only cases that follow each other are joined, so that the order stays that of worth,
    and only where the command line selects nothing else. Cases that no command line
    tells apart, as the seeds of an experiment, are one process however long it takes.
    """

    def kind(due: Due) -> tuple:
        return due.benchmark.name, [*due.states], due.samples, due.gpus

    todo = list(found)
    while todo:
        first = todo[0]
        alike = []
        for due in todo:
            if kind(due) != kind(first):
                break
            alike.append(due)
        by_identity = {_identity(due.case): due for due in alike}
        chosen = [due for due in _brought([first], by_identity) if due]
        for due in alike:
            if due in chosen:
                continue
            trial = _brought([*chosen, due], by_identity)
            whole = [due for due in trial if due]
            if len(whole) == len(trial) and _total(whole) <= LONGEST:
                chosen = whole
        arguments = selection(first.benchmark, [due.case for due in chosen])
        arguments += ["--impl", *first.states]
        arguments += ["--samples", str(first.samples)] if first.samples else []
        yield arguments, chosen
        todo = [due for due in todo if due not in chosen]


def _brought(
    chosen: Sequence[Due], known: Mapping[tuple[str, str], Due]
) -> list[Due | None]:
    """What the command line for these cases selects; None for what is not known."""
    benchmark = chosen[0].benchmark
    cases, *_ = command.selected(
        benchmark, selection(benchmark, [due.case for due in chosen])
    )
    return [known.get(_identity(case)) for case in cases]


def _total(chosen: Sequence[Due]) -> float:
    return sum(due.seconds for due in chosen)
