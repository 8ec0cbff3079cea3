"""Times forms of a computation on several devices: many calls in one program.

Dispatching a call to four GPUs costs the host about 180 us, more than many calls take,
so no call is timed alone. A form becomes a program that calls it many times in a loop
of fixed length, and the time of a call is the wall time of the program over the number
of calls. An optimization barrier after each call makes the next one wait for it, and
all results of the last turn are outputs, so that nothing is hoisted, shared or left
out. A call takes the next of several sets of operands, which together exceed the L2.

Once `loop_programs` has compiled them, the forms of a problem are timed in turns, each
turn in another random order: the power and heat of a form slow the one after it, and
with the same neighbor in every turn one form would look some percent slower than
another. Forms of one program are timed once and share the times.
"""

import dataclasses
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from benchmarks.measure import timing
from benchmarks.measure.harness import (
    Measurement,
    NoMeasurement,
    Results,
    failed,
    max_rel_error,
)
from benchmarks.measure.loop_programs import (
    SECONDS,
    Prepared,
    Problem,
    Ready,
    prepare,
)


COMPILE_SECONDS = 180.0
"""Longest time to wait for one compilation."""

KERNEL = "@mosaic_gpu_v2"
"""What a program that holds one of our kernels says."""


def _operands(prepared: Prepared) -> dict[str, list[Any]]:
    """The sets of operands of a problem, by name."""
    problem = prepared.problem
    turning = {name for r in prepared.forms for name in r.form.operands[1:]}
    arrays: dict[str, list[Any]] = {}
    for index, name in enumerate(problem.operands):
        program = prepared.helpers[f"draw {name}"].result()
        count = problem.num_sets if name in turning else 1
        arrays[name] = [program(np.int32(100 * index + i)) for i in range(count)]
    first = {name: values[0] for name, values in arrays.items()}
    for name in problem.derived:
        arrays[name] = [prepared.helpers[f"derive {name}"].result()(first)]
    return arrays


def _alike(forms: Sequence[Ready]) -> list[list[Ready]]:
    """Groups of forms that one measurement serves."""
    groups: dict[tuple, list[Ready]] = {}
    for ready in forms:
        same = (ready.program, ready.form.operands, ready.form.check)
        groups.setdefault(same, []).append(ready)
    return list(groups.values())


@dataclasses.dataclass
class _Timed:
    """A program that ran and gave a result."""

    alike: list[Ready]
    """The forms whose program it is."""
    arguments: tuple
    program: Any
    costs: Mapping[str, float]
    error: float = float("inf")
    seconds: list[float] = dataclasses.field(default_factory=list)

    @property
    def name(self) -> str:
        return self.alike[0].form.name

    def take(self) -> float:
        start = time.perf_counter()
        jax.block_until_ready(self.program(*self.arguments))
        taken = time.perf_counter() - start
        # As long a rest: less of the power and the heat is left for the next form.
        time.sleep(min(taken, SECONDS))
        return taken / self.alike[0].calls


def run(prepared: Prepared, samples: int) -> Results:
    """Time the forms of a problem in turns; one that breaks leaves the others alone.

    Returns:
        For each name the fastest of its forms.
    """
    problem, helpers = prepared.problem, prepared.helpers
    results: Results = dict(prepared.refused)
    arrays = _operands(prepared)
    drawn = {name: arrays[name][0] for name in problem.operands}
    expected = {
        name: _host(helpers[f"expected {name}"].result()(drawn))
        for name in {ready.form.check for ready in prepared.forms}
    }
    timed: list[_Timed] = []
    for alike in _alike(prepared.forms):
        check = alike[0].form.check
        with _caught(results, alike):
            found = helpers[f"found {check}"].result()
            one, result = _first_run(problem, alike, arrays)
            one.error = max_rel_error(_host(found(result)), expected[check])
            timed.append(one)
    random = np.random.default_rng(0)
    for turn in range(samples):
        for place in random.permutation(len(timed)):
            one = timed[place]
            with (
                _caught(results, one.alike),
                timing.bounded(f"{problem.label} {one.name}"),
            ):
                one.seconds.append(one.take())
        timed = [one for one in timed if len(one.seconds) == turn + 1]
        if turn == 0:
            timed = _worth_timing(timed)
    return results | _fastest(timed, problem)


@contextmanager
def _caught(results: Results, alike: Sequence[Ready]) -> Iterator[None]:
    """Note that implementations broke, and go on."""
    names = [ready.form.name for ready in alike]
    try:
        yield
    except TimeoutError:
        reason = f"failed: no program after {COMPILE_SECONDS:.0f} s"
        results.update(dict.fromkeys(names, NoMeasurement(reason, failed=True)))
    except Exception as error:
        results.update(dict.fromkeys(names, failed(error)))


def _first_run(
    problem: Problem, alike: list[Ready], arrays: Mapping[str, list]
) -> tuple[_Timed, Any]:
    """Runs the program of forms once; gives its result on the first set as well."""
    ready = alike[0]
    assert ready.program.compiled is not None
    compiled = ready.program.compiled.result(COMPILE_SECONDS)
    first, *others = ready.form.operands
    sets = tuple(
        tuple(arrays[name][i % len(arrays[name])] for name in others)
        for i in range(problem.num_sets if others else 1)
    )
    arguments = (arrays[first][0], sets)
    with timing.bounded(f"{problem.label} {ready.form.name}"):
        results = jax.block_until_ready(compiled.program(*arguments))
    # The program holds the results of a whole turn, a call its own.
    others = 1 - 1 / len(results)
    others *= compiled.program.memory_analysis().output_size_in_bytes
    costs = compiled.costs | {"memory_mb": compiled.costs["memory_mb"] - others / 1e6}
    return _Timed(alike, arguments, compiled.program, costs), results[0]


def _host(tree: Any) -> Any:
    return jax.tree.map(lambda x: np.asarray(x, np.float32), tree)


def _worth_timing(timed: Sequence[_Timed]) -> list[_Timed]:
    """Of the programs of one name, those that are within 5 % of the fastest."""
    best: dict[str, float] = {}
    for one in timed:
        for ready in one.alike:
            name = ready.form.name
            best[name] = min(best.get(name, np.inf), one.seconds[0])
    return [
        one
        for one in timed
        if any(one.seconds[0] <= 1.05 * best[ready.form.name] for ready in one.alike)
    ]


def _fastest(timed: Sequence[_Timed], problem: Problem) -> Results:
    results: dict[str, Measurement] = {}
    pairs = [(one, ready) for one in timed for ready in one.alike]
    for one, ready in pairs:
        form = ready.form
        metrics = {**form.metrics, **one.costs}
        if form.name == "auto":
            metrics["is_mosaic_gpu"] = float(KERNEL in ready.program.text)
        new = Measurement(one.seconds, one.error, metrics, problem.mesh.size)
        old = results.get(form.name)
        if old is None or statistics.median(new.seconds) < old.median:
            results[form.name] = new
    return dict(results)


def measure(
    problems: Sequence[Problem], samples: int, batch: int = 8
) -> Iterator[tuple[Problem, Results]]:
    """Time problems: compile a batch, run it, and so on.

    Args:
        problems: in the order in which they are wanted.
        samples: times to take of each form.
        batch: problems to compile before the first of them runs. Nothing is lowered or
            compiled while something is timed.
    """
    threads = min(32, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads) as pool:
        for i in range(0, len(problems), batch):
            ready = _compile(problems[i : i + batch], pool)
            for prepared in ready:
                with timing.turn():
                    results = _run_or_say(prepared, samples)
                yield prepared.problem, results


def _compile(problems: Sequence[Problem], pool: ThreadPoolExecutor) -> list[Prepared]:
    """Prepare problems, wait for their programs and say how long that took."""
    start = time.monotonic()
    with timing.preparing():
        ready = [prepare(problem, pool) for problem in problems]
        lowered = time.monotonic() - start
        until = time.monotonic() + COMPILE_SECONDS
        for prepared in ready:
            begun = (one.program.compiled for one in prepared.forms)
            for future in [*filter(None, begun), *prepared.helpers.values()]:
                _wait(future, until)
    compiled = time.monotonic() - start
    with timing.turn():
        for program in (one.program for prepared in ready for one in prepared.forms):
            if program.compiled is None:
                _wait(program.compile(pool), time.monotonic() + COMPILE_SECONDS)
    total = time.monotonic() - start
    print(
        f"-- {len(ready)} problems lowered in {lowered:.0f} s, compiled after "
        f"{compiled:.0f} s, where XLA times algorithms after {total:.0f} s",
        flush=True,
    )
    return ready


def _run_or_say(prepared: Prepared, samples: int) -> Results:
    try:
        return run(prepared, samples)
    except Exception as error:  # memory for the operands, for example
        broken = failed(error)
        return dict.fromkeys([form.name for form in prepared.problem.forms], broken)


def _wait(future: Future, until: float) -> None:
    try:
        future.exception(max(0.0, until - time.monotonic()))
    except TimeoutError:
        print("-- a compilation is slow; it goes on in the background", flush=True)
