"""Which stored rows are of kernels that have changed since.

A row of ours is stale if a kernel of it may have changed since the commit of the row.
That is settled by what is cheapest and still sound: no file of its ops changed, or else
`tests/manifest.json` held the same hashes of Mosaic modules then as now. Benchmarks of
whole models run kernels at shapes that the manifest does not have; there all cases of
their ops must agree, of those that run in the case. A row without gradients is no older
for their kernels. What cannot be shown, as before there was a manifest, counts as
stale.
"""

import functools
import importlib
import json
import pathlib
import re
import subprocess
from typing import Any

import jax

from benchmarks.measure import comparison, records
from benchmarks.measure.harness import Benchmark, Case
from benchmarks.publish import kernel_code


ROOT = pathlib.Path(__file__).parents[2]


def load_benchmark(name: str) -> Benchmark:
    """The benchmark of a module."""
    return importlib.import_module(f"benchmarks.{name}").BENCHMARK


class History:
    """What git says of the kernels of a commit."""

    def __init__(self, root: pathlib.Path = ROOT):
        self.root = root
        self.now = json.loads((root / kernel_code.MANIFEST).read_text())
        self.manifest = functools.cache(self._manifest)
        self.unchanged = functools.cache(self._unchanged)

    def _git(self, *arguments: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            ["git", *arguments],
            cwd=self.root,
            capture_output=True,
            text=True,
            check=False,
        )

    def _manifest(self, commit: str) -> dict[str, Any] | None:
        """The manifest of a commit, if it is known and has one."""
        found = self._git("show", f"{commit}:{kernel_code.MANIFEST}")
        return None if found.returncode else json.loads(found.stdout)

    def _unchanged(self, commit: str, op: str) -> bool:
        """Whether the files that an op is made of are still those of a commit."""
        files = map(str, kernel_code.sources(op))
        return self._git("diff", "--quiet", commit, "--", *files).returncode == 0

    def stale(
        self, benchmark: Benchmark, case: Case, name: str, commit: str
    ) -> str | None:
        """Why the kernels of a row may not be those of a commit; None if they are.

        Args:
            benchmark: What has the row.
            case: Of the row.
            name: Of the implementation.
            commit: At which it was measured.
        """
        ops = [op for op in benchmark.kernels if benchmark.runs(case, name, op)]
        for op in ops:
            if self.unchanged(commit, op):
                continue
            then = self.manifest(commit)
            if then is None or op not in then["kernels"]:
                return f"{op} changed since {commit}, which has no manifest of it"
            before, now = then["kernels"][op], self.now["kernels"][op]
            spec = benchmark.spec(case)
            alone = len(ops) == 1 and spec in before and spec in now
            names = [spec] if alone else sorted(before.keys() & now.keys())
            if then["jax"] != self.now["jax"]:
                return f"{op} changed since {commit}, and JAX did"
            run = str if benchmark.trains(case) else _forward
            if not names or any(run(before[n]) != run(now[n]) for n in names):
                return f"kernels of {op} changed since {commit}"
        return None

    def is_stale(self, row: records.Record) -> bool:
        """Whether a row, with all that it inherits, is one of ours that is stale."""
        benchmark, name = load_benchmark(row["benchmark"]), row["implementation"]
        if name not in ours(benchmark):
            return False
        case = Case(row["case"], row["params"])
        return (
            row["jax"] != jax.__version__
            or self.stale(benchmark, case, name, row["commit"]) is not None
        )

    def mark(self, record: records.Record) -> records.Record:
        """The same with ``stale`` on each such row, as tables read it."""
        rows = [
            row | {"stale": self.is_stale(row)} for row in records.full_rows(record)
        ]
        return record | {"rows": rows}


def _forward(modules: str) -> list[str]:
    """The modules of a case, without those of its gradients."""
    return [m for m in modules.split(", ") if not re.search("backward|_grad", m)]


def ours(benchmark: Benchmark) -> list[str]:
    """Implementations that run our kernels.

    Where none is called ours, as in a sequence of steps, each may.
    """
    named = [n for n in benchmark.implementations if n in comparison.OURS]
    return named or [*benchmark.implementations]


def history(root: pathlib.Path = ROOT) -> History | None:
    """The history of a clone; None where git does not have the commits of all rows."""
    if not (root / ".git").exists():
        return None
    shallow = subprocess.run(
        ["git", "rev-parse", "--is-shallow-repository"],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    return History(root) if shallow.stdout.strip() == "false" else None
