"""The harness measures, compares and merges; result files have their form."""

import dataclasses
import fcntl
import json
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.measure import clocks, command, comparison, harness, records, timing
from benchmarks.measure.harness import Benchmark, Case, Custom, Jax, Measurement, Torch


def inputs(params, key):
    x_key, w_key = jax.random.split(key)
    m, n, k = params["M"], params["N"], params["K"]
    return (
        jax.random.normal(x_key, (m, k), jnp.bfloat16),
        jax.random.normal(w_key, (k, n), jnp.bfloat16),
    )


def unsupported(x, w):
    raise NotImplementedError("needs a Hopper GPU")


def measured_elsewhere(params, seed, samples):
    return Measurement([2e-6] * samples, 1e-3, {"bytes": 5.0}, num_devices=4)


IMPLEMENTATIONS = {
    "xla": Jax(lambda params: jnp.matmul),
    "dense": Jax(lambda params: lambda x, w: jnp.einsum("mk,kn->mn", x, w)),
    "mosaic_gpu": Jax(lambda params: unsupported),
    "torch": Torch(lambda params: lambda x, w: x @ w),
    "elsewhere": Custom(measured_elsewhere),
}


def benchmark(**changes):
    options = {
        "name": "example",
        "cases": [Case("big", {"M": 64, "N": 32, "K": 16})],
        "quick_cases": [Case("tiny", {"M": 8, "N": 8, "K": 8})],
        "inputs": inputs,
        "reference": lambda params: jnp.matmul,
        "implementations": IMPLEMENTATIONS,
        "metrics": lambda p, s: {"tflops": 2 * p["M"] * p["N"] * p["K"] / s / 1e12},
        "samples": 10,
    }
    return Benchmark(**(options | changes))


@pytest.fixture
def fake_gpu(monkeypatch):
    """Write results as on a GPU, with the times of a CPU."""

    class Device:
        platform, device_kind = "gpu", "NVIDIA H200"

    monkeypatch.setattr(timing, "on_gpu", lambda: True)
    monkeypatch.setattr(timing, "jax_device_time", timing.jax_wall_time)
    monkeypatch.setattr(timing, "number_of_sets", lambda nbytes: 3)
    monkeypatch.setattr(jax, "devices", lambda *a: [Device()])


ENDED_FROM_OUTSIDE = """
import subprocess, sys
from benchmarks.measure import command
from benchmarks.measure.harness import Benchmark, Case, Custom

def measure(params, seed, samples):
    code = "import sys, time; print('here', flush=True); time.sleep(600)"
    subprocess.run([sys.executable, "-c", code], check=True)

command.run(Benchmark(
    name="example", cases=[], quick_cases=[Case("tiny", {})],
    inputs=lambda params, key: (), implementations={"ours": Custom(measure)},
), ["--quick"])
"""


def test_who_is_ended_ends_the_processes_that_measure():
    started = [sys.executable, "-c", ENDED_FROM_OUTSIDE]
    with subprocess.Popen(started, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "here\n"
        process.terminate()
        # Whoever is left holds the other side.
        assert process.communicate(timeout=120) == ("", None)
        assert process.returncode == 143


def test_quick_run_prints_and_writes_nothing(tmp_path, capsys):
    assert command.main(benchmark(), ["--quick", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "mosaic_gpu: not supported: needs a Hopper GPU" in out
    assert "| tiny |" in out and "cpu x" in out and "wall time" in out
    assert "; M 8, N 8, K 8. cpu" in out
    assert not [*tmp_path.rglob("*")]


def test_cpu_never_writes(tmp_path, capsys):
    assert command.main(benchmark(), ["--out", str(tmp_path)]) == 0
    assert "not written: the device is cpu" in capsys.readouterr().out
    assert not [*tmp_path.rglob("*")]


def test_what_is_no_time_is_written_from_a_cpu_too(tmp_path):
    losses = benchmark(anywhere=True, name="losses")
    arguments = ["--out", str(tmp_path), "--commit", "abc"]
    assert command.main(losses, ["--quick", *arguments]) == 0
    assert not list(tmp_path.iterdir())
    assert command.main(losses, arguments) == 0
    written = records.load(tmp_path / "cpu" / "losses.json")
    assert written["device"] == "cpu" and written["commit"] == "abc"


def test_measurement_is_that_of_the_function():
    """The error is that of the output and the times are all there."""
    off = Jax(lambda params: lambda x, w: (x @ w).astype(jnp.float32) * 1.5)
    case = Case("c", {"M": 16, "N": 16, "K": 16})
    results = harness.run_case(
        benchmark(implementations=IMPLEMENTATIONS | {"off": off}),
        case,
        ["xla", "off", "mosaic_gpu", "elsewhere"],
        samples=10,
    )
    assert results["mosaic_gpu"] == harness.NoMeasurement(
        "not supported: needs a Hopper GPU"
    )
    assert results["off"].max_rel_error == pytest.approx(0.5, abs=0.02)
    assert 0 < results["xla"].max_rel_error < 1e-2
    assert len(results["xla"].seconds) == 10 and min(results["xla"].seconds) > 0
    assert results["elsewhere"].num_devices == 4


def test_memory_of_a_call():
    def wasteful(x, w):
        return jax.lax.optimization_barrier(jnp.tile(x, (64, 1)))[:16] @ w

    results = harness.run_case(
        benchmark(
            implementations={
                "xla": IMPLEMENTATIONS["xla"],
                "wasteful": Jax(lambda params: wasteful),
            },
        ),
        Case("c", {"M": 16, "N": 16, "K": 512}),
        ["xla", "wasteful"],
        samples=5,
    )
    more = (
        results["wasteful"].metrics["memory_mb"] - results["xla"].metrics["memory_mb"]
    )
    assert more >= 64 * 16 * 512 * 2 / 1e6


def test_what_is_compiled_says_its_seconds_once(monkeypatch):
    """Also what was compiled before, in a thread, and what is no single program."""

    class Calls:
        def __call__(self, x, w):
            return x @ w

        def memory(self, x, w):
            return 5e6

    events = []
    monkeypatch.setattr(timing, "compiled", _counted(timing.compiled, events))
    before = timing.Program(lambda x, w: x @ w)
    case = Case("c", {"M": 8, "N": 8, "K": 8})
    before.lower(*inputs(case.params, jax.random.key(0))).compile()
    known = before.compiled.costs
    results = harness.run_case(
        benchmark(
            implementations={
                "xla": IMPLEMENTATIONS["xla"],
                "before": Jax(lambda params: before),
                "calls": Jax(lambda params: Calls(), jit=False),
            },
        ),
        case,
        ["xla", "before", "calls"],
        samples=5,
    )
    assert len(events) == 2  # one each; the calls are none of its
    found = {name: result.metrics for name, result in results.items()}
    assert found["before"] == known and known["compile_seconds"] > 0
    assert found["xla"]["memory_mb"] == known["memory_mb"] == 8 * 8 * 2 / 1e6
    assert found["calls"]["memory_mb"] == 5.0 and found["calls"]["compile_seconds"] > 0


def _counted(function, events):
    def run(*arguments):
        events.append(arguments)
        return function(*arguments)

    return run


def test_donated_inputs_are_no_memory_of_a_call():
    x = jnp.ones((256, 256))
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    assert timing.program_bytes(step.lower(x).compile()) < x.nbytes
    other = jax.jit(lambda x: x + 1)
    assert timing.program_bytes(other.lower(x).compile()) >= x.nbytes


def test_rows_carry_the_versions_of_rivals(fake_gpu, tmp_path, monkeypatch):
    versions = {"rival": "1.2", "other": "3"}
    monkeypatch.setattr(harness, "installed_version", versions.get)
    monkeypatch.setattr(timing, "jax_kernels", lambda *a: [])
    run = benchmark(packages={"de*": ("rival", "missing", "other"), "x*": ("missing",)})
    arguments = ["--impl", "xla", "dense", "--out", str(tmp_path), "--commit", "abc"]
    assert command.main(run, arguments) == 0
    path = tmp_path / "nvidia_h200" / "example.json"
    rows = {row["implementation"]: row for row in records.load(path)["rows"]}
    assert rows["dense"]["versions"] == versions and "versions" not in rows["xla"]
    assert {"compile_seconds", "memory_mb"} <= {*rows["xla"]["metrics"]}
    # They stay when another implementation is measured again, and are shown.
    again = ["--impl", "xla", "--out", str(tmp_path), "--commit", "def"]
    assert command.main(run, again) == 0
    kept = {row["implementation"]: row for row in records.load(path)["rows"]}
    assert kept["dense"]["versions"] == versions
    assert "rival 1.2, other 3" in comparison.markdown(records.load(path))
    rows["dense"]["versions"] = {"rival": 1}
    with pytest.raises(ValueError, match="version 1 of rival"):
        records.validate(records.load(path) | {"rows": [rows["dense"]]})


def test_no_rows_of_a_host_that_held_back(fake_gpu, tmp_path, monkeypatch, capsys):
    shares = iter([0.02, 0.005])
    monkeypatch.setattr(clocks.Clocks, "held_back", lambda self: next(shares))
    monkeypatch.setattr(timing, "jax_kernels", lambda *a: [])
    arguments = ["--impl", "xla", "--out", str(tmp_path), "--commit", "abc"]
    command.main(benchmark(), arguments)
    path = tmp_path / "nvidia_h200" / "example.json"
    assert not path.exists()
    assert "lowered the clock 2% of the time" in capsys.readouterr().out
    command.main(benchmark(), arguments)
    assert {row["implementation"] for row in records.load(path)["rows"]} == {"xla"}


def test_looped_calls_pass_for_jitted():
    """The profiler would otherwise jit the loop over the sets."""
    loop = timing._EachSet(abs, [(-1,), (2,)])
    assert isinstance(loop, jax.stages.Wrapped) and loop() == [1, 2]


def test_implementations_take_turns(monkeypatch):
    order = []

    def timer(function, sets, calls, **wall):
        order.append(function.__wrapped__.__name__)
        return [1.0] * calls

    def named(name):
        def function(x, w):
            return x @ w

        function.__name__ = name
        return Jax(lambda params: function)

    monkeypatch.setattr(timing, "jax_wall_time", timer)
    harness.run_case(
        benchmark(implementations={"a": named("a"), "b": named("b")}),
        Case("c", {"M": 8, "N": 8, "K": 8}),
        ["a", "b"],
        samples=10,
    )
    assert order == ["a", "b"] * harness.ROUNDS


def test_a_case_is_prepared_beside_others_and_timed_alone(
    monkeypatch, tmp_path, capsys
):
    monkeypatch.setenv("BENCHMARK_LOCK", str(tmp_path / "lock"))
    seen = []

    def shared():
        """Whether others could prepare now."""
        with open(tmp_path / "lock", "w") as other:
            try:
                fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

    def timer(function, sets, calls, **wall):
        seen.append(("timed", shared()))
        return [1.0] * calls

    def make(params):
        seen.append(("made", shared()))
        return lambda x, w: x @ w

    def custom(params, seed, samples):
        seen.append(("custom", shared()))
        return harness.Measurement([1.0], None, {"rate": 2.0})

    monkeypatch.setattr(timing, "jax_wall_time", timer)

    def in_turns(params, seed, samples):
        seen.append(("in turns", shared()))
        return custom(params, seed, samples)

    implementations = {
        "a": Jax(make),
        "b": harness.Custom(custom),
        "c": harness.Custom(in_turns, takes_turns=True),
    }
    case = Case("c", {"M": 8, "N": 8, "K": 8})
    run = benchmark(implementations=implementations)
    results = harness.run_case(run, case, ["a", "b", "c"], samples=10)
    assert all(isinstance(r, harness.Measurement) for r in results.values())
    assert seen.pop() == ("timed", False)
    alone = [("made", True), ("custom", False), ("in turns", True), ("custom", True)]
    assert list(dict.fromkeys(seen)) == [*alone, ("timed", False)]
    # At once, since what follows may be cut.
    assert capsys.readouterr().err == "c b: 1 s, rate 2\nc c: 1 s, rate 2\n"


def test_inputs_take_turns(monkeypatch):
    seen = []
    sets = [(1,), (2,), (3,)]
    times = timing.jax_wall_time(lambda x: seen.append(x), sets, 3, burst=2)
    assert seen == [1, 2, 3, 1, 2, 3] and len(times) == 3
    assert timing.number_of_sets(0) == timing.number_of_sets(200e6) == 2
    monkeypatch.setattr(timing, "on_gpu", lambda: True)
    assert timing.number_of_sets(200e6) == 1
    sets_of_1mb = timing.number_of_sets(2e6)
    assert sets_of_1mb * 2e6 > 2 * timing.L2_BYTES
    assert timing.number_of_sets(0) == timing.MAX_SETS
    assert timing.number_of_sets(0, 5) == 5 and timing.number_of_sets(200e6, 5) == 1


def test_processes_that_share_a_gpu_measure_in_turns(monkeypatch, tmp_path):
    with timing.turn():  # nobody else was named
        pass
    path = tmp_path / "lock"
    monkeypatch.setenv("BENCHMARK_LOCK", str(path))
    with open(path, "w") as other:
        now = fcntl.LOCK_EX | fcntl.LOCK_NB
        with timing.turn(), pytest.raises(BlockingIOError):
            fcntl.flock(other, now)
        with timing.preparing():
            fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)
            with pytest.raises(BlockingIOError):
                fcntl.flock(other, now)
        fcntl.flock(other, now)


def test_profiler_calls_are_told_apart(monkeypatch):
    """CUPTI's kernels are split over the calls of a round, in order."""
    from jax.experimental.mosaic.gpu import profiler

    def measure(f, *, aggregate):
        assert not aggregate

        def run():
            f()
            return None, [("a", 1.0), ("b", 2.0), ("a", 3.0), ("b", 4.0)]

        return run

    monkeypatch.setattr(profiler, "measure", measure)
    called = []
    times = timing.jax_device_time(called.append, [("s0",), ("s1",)], calls=3)
    assert times == pytest.approx([3e-3, 7e-3, 3e-3, 7e-3])
    assert called == ["s0", "s1", "s0", "s1"]


def test_constant_inputs_are_refused():
    zeros = benchmark(inputs=lambda params, key: (jnp.zeros((8, 8)),) * 2)
    with pytest.raises(ValueError, match="constant"):
        harness.run_case(zeros, zeros.quick_cases[0], ["xla"], 5)


def test_wrong_results_are_not_written(tmp_path, capsys, fake_gpu):
    wrong = {"xla": Jax(lambda params: lambda x, w: x @ w * jnp.bfloat16(jnp.nan))}
    ran = command.main(
        benchmark(implementations=wrong), ["--out", str(tmp_path), "--commit", "abc"]
    )
    assert ran == 1 and "WRONG big xla: error inf" in capsys.readouterr().err
    assert not [*tmp_path.rglob("*.json")]


def test_one_that_breaks_leaves_the_others_alone(tmp_path, capsys, fake_gpu):
    def broken(x, w):
        raise MemoryError("too big")

    some = {"broken": Jax(lambda params: broken), "xla": IMPLEMENTATIONS["xla"]}
    arguments = ["--out", str(tmp_path), "--commit", "abc"]
    assert command.main(benchmark(implementations=some), arguments) == 1
    assert "WRONG big broken: failed: MemoryError" in capsys.readouterr().err
    (row,) = records.load(tmp_path / "nvidia_h200" / "example.json")["rows"]
    assert row["implementation"] == "xla"


def test_runs_merge_into_the_file(tmp_path, fake_gpu):
    two = benchmark(
        cases=[
            Case("big", {"M": 64, "N": 32, "K": 16}),
            Case("wide", {"M": 8, "N": 64, "K": 16}),
        ]
    )
    path = tmp_path / "nvidia_h200" / "example.json"

    def run(*argv, commit):
        assert (
            command.main(two, [*argv, "--out", str(tmp_path), "--commit", commit]) == 0
        )
        record = records.load(path)
        return record, {
            (row["case"], row["implementation"]): row
            for row in records.full_rows(record)
        }

    record, rows = run(commit="one")
    assert record["command"] == "python -m benchmarks.example"
    assert record["timing"] == "device time, median of 10"
    assert len(rows) == 2 * 3  # torch and mosaic_gpu cannot run
    assert all(row["commit"] == "one" for row in rows.values())
    assert rows["big", "elsewhere"]["num_devices"] == 4
    assert rows["big", "xla"]["num_devices"] == 1
    before = rows["wide", "xla"]["time_us"]

    _, rows = run("--case", "b*", "--impl", "xla", commit="two")
    assert rows["big", "xla"]["commit"] == "two"
    assert rows["big", "xla"]["command"].endswith("--case 'b*' --impl xla")
    assert rows["big", "dense"]["commit"] == rows["wide", "xla"]["commit"] == "one"
    assert rows["wide", "xla"]["time_us"] == before
    assert rows["big", "elsewhere"]["num_devices"] == 4

    # Without --impl, implementations of the case that are gone go.
    two.implementations = {"xla": IMPLEMENTATIONS["xla"]}
    _, rows = run("--case", "big", commit="three")
    assert [name for case, name in rows if case == "big"] == ["xla"]
    assert [name for case, name in rows if case == "wide"] == [
        "xla",
        "dense",
        "elsewhere",
    ]


def test_only_what_was_asked_for_is_left(capsys, monkeypatch):
    """A benchmark may yield more than that, and again."""
    monkeypatch.setattr(command, "PAUSE", 0.0)
    cases = [Case("a", {"M": m}) for m in range(3)]
    progress = command._Progress(cases)
    for case in (Case("tried", {}), cases[0], cases[0], cases[2], cases[1]):
        assert progress.passed(case) >= 0
        progress.show()
    left = [line.split(", ")[1] for line in capsys.readouterr().out.splitlines()]
    assert left == ["2 cases left", "2 cases left", "1 cases left"]


def test_cases_are_chosen_by_params_and_compared(
    tmp_path, capsys, fake_gpu, monkeypatch
):
    monkeypatch.setattr(command, "PAUSE", 0.0)

    def measure(cases, names, samples):
        for case in cases:
            seconds = {"xla": 2e-6, "dense": 1e-6, "odd": 3e-6}
            yield (
                case,
                {
                    name: Measurement([seconds[name] * case.params["M"]] * samples, 0.0)
                    for name in names
                },
            )

    def compare(params, seconds):
        return {name: {"speedup": seconds["dense"] / t} for name, t in seconds.items()}

    of_all = benchmark(
        cases=[Case("a", {"M": m, "N": 8, "K": 8}) for m in (16, 32, 64)],
        measure=measure,
        compare=compare,
        selectors={"rows": "M"},
        timing="wall time of something",
        implementations=dict.fromkeys(("xla", "dense", "odd"), IMPLEMENTATIONS["xla"]),
    )
    arguments = ["--out", str(tmp_path), "--commit", "abc", "--skip", "odd"]
    assert command.main(of_all, [*arguments, "--rows", "16", "64"]) == 0
    out = capsys.readouterr().out
    assert out.count("cases left") == 1
    assert "1 cases left" in out and "a M=64" in out
    path = tmp_path / "nvidia_h200" / "example.json"
    record = records.load(path)
    assert record["timing"] == "wall time of something, median of 10"
    assert record["command"].endswith("--skip odd --rows 16 64")
    assert [
        (row["params"]["M"], row["implementation"], row["time_us"])
        for row in record["rows"]
    ] == [(16, "xla", 32), (16, "dense", 16), (64, "xla", 128), (64, "dense", 64)]
    assert record["rows"][0]["metrics"]["speedup"] == 0.5
    with pytest.raises(SystemExit, match="no M matches '17'; there are"):
        command.main(of_all, ["--rows", "17"])

    # A file written elsewhere is merged; rows of what it did not run stay, and all keep
    # their places.
    out = tmp_path / "repository"
    records.main([str(path)], out)
    record["rows"] = record["rows"][:1]
    record["rows"][0]["time_us"] = 7.0
    records.dump(record, path)
    records.main([str(path)], out)
    merged = records.load(out / "nvidia_h200" / "example.json")
    assert [row["time_us"] for row in merged["rows"]] == [7, 16, 128, 64]


def test_unknown_selection_is_an_error():
    with pytest.raises(
        SystemExit, match=r"no case matches 'nope'; there are: \['tiny'\]"
    ):
        command.main(benchmark(), ["--quick", "--case", "nope"])


def test_max_rel_error():
    want = {"a": np.array([1.0, -4.0]), "b": np.zeros(2)}
    got = {"a": np.array([1.0, -3.0]), "b": np.array([0.0, 0.125])}
    assert harness.max_rel_error(got, want) == 0.25
    assert harness.max_rel_error({"a": got["a"], "b": got["b"] + 1}, want) == 1.125
    assert harness.max_rel_error(np.array([np.nan]), np.ones(1)) == float("inf")
    with pytest.raises(ValueError, match="reference has"):
        harness.max_rel_error(np.ones(3), np.ones(1))


VALID = {
    "benchmark": "b",
    "device": "NVIDIA H200",
    "num_devices": 1,
    "jax": "0.11.2",
    "commit": "abc",
    "date": "2026-11-20",
    "command": "python -m benchmarks.b",
    "timing": "device time, median of 30",
    "rows": [
        {
            "case": "c",
            "params": {"M": 1},
            "implementation": "mosaic_gpu",
            "time_us": 1.5,
            "metrics": {"tflops": 2.0},
            "max_rel_error": 0.0,
            "num_devices": 4,
        }
    ],
}


def changed(row=None, **head):
    record = json.loads(json.dumps(VALID))
    record.update(head)
    record["rows"][0].update(row or {})
    return record


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (changed(extra=1), r"unknown keys \['extra'\]"),
        (changed(num_devices="4"), "num_devices '4' has the wrong type"),
        (changed(date="20.11.2026"), "expected YYYY-MM-DD"),
        (changed({"time_us": 0}), "expected above 0"),
        (changed({"max_rel_error": None}), "expected a number"),
        (changed({"max_rel_error": float("nan")}), "expected at least 0"),
        (changed({"metrics": {"tflops": "2"}}), "metric tflops '2'"),
        (changed({"params": {"M": [1]}}), "expected a scalar"),
        (changed({"device": "x"}), r"unknown keys \['device'\]"),
        (changed(rows=VALID["rows"] * 2), "a second row"),
        ([], "expected an object"),
    ],
)
def test_malformed_records_are_refused(record, message):
    with pytest.raises(ValueError, match=message):
        records.validate(record)


def test_wall_time_rows_need_no_error(tmp_path):
    record = changed({"max_rel_error": None, "timing": "wall time, median of 5"})
    records.dump(record, tmp_path / "x.json")
    assert records.load(tmp_path / "x.json") == record


def test_committed_results_have_the_form():
    for path in records.RESULTS.rglob("*.json"):
        record = records.load(path)
        assert path.parent.name == records.slug(record["device"]), path
        assert re.fullmatch(rf"{record['benchmark']}(_\w+)?", path.stem), path
        assert record["rows"], path


def test_sets_are_counted_by_what_the_least_reader_reads(monkeypatch, fake_gpu):
    counted = []
    monkeypatch.setattr(
        timing, "number_of_sets", lambda nbytes: counted.append(nbytes) or 2
    )
    one = benchmark(implementations={})
    harness.run_case(one, one.cases[0], [], 1)
    one = dataclasses.replace(one, read_bytes=lambda params: 3 * params["M"])
    harness.run_case(one, one.cases[0], [], 1)
    m, n, k = (one.cases[0].params[name] for name in "MNK")
    assert counted[1] == 3 * m and counted[0] > 2 * k * (m + n) - 1
