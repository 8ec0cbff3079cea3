"""The tuner on simulated devices: what it runs is right, and losers are left out."""

# Stand-ins take the place of modules.

import concurrent.futures
import fcntl
import json
import types
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import tuned_configs, tuning
from pallas_kernels.collective_matmul import CollectiveConfig, tunable
from pallas_kernels.collective_matmul.config import CollectiveProblem, heuristic
from pallas_kernels.collective_matmul.specs import ROWS, SPECS
from pallas_kernels.dispatch import Unsupported
from pallas_kernels.mosaic import H200
from tests.pallas_kernels.collective_matmul.cases import check


BF16 = jnp.dtype(jnp.bfloat16)


def problem_of(kind, **options):
    sizes = {"m": 64, "n": (64,), "k": (32,), "devices": 4} | options
    return CollectiveProblem(kind=kind, dtype=BF16, **sizes)


@pytest.mark.parametrize("rhs_transposed", [False, True])
@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce"])
def test_the_loop_computes_the_product(kind, rhs_transposed):
    problem = problem_of(kind, rhs_transposed=rhs_transposed)
    turns, (x,), (w,) = arguments = tunable.arguments(problem)
    assert turns.shape == (2,)
    program = jax.jit(tunable.baseline(problem))
    w_32 = np.asarray(w.mT if rhs_transposed else w).astype(np.float32)
    want = np.asarray(x).astype(np.float32) @ w_32
    check(program(*arguments), want, BF16)
    assert not np.any(program(turns[:0], (x,), (w,)))


def test_problems_are_those_of_the_layers():
    found = tunable.problems()
    assert len(found) == 2 * (len(SPECS) * len(ROWS) + 5 * 3)
    problem = found["llama70b_down reduce_scatter tp=4 m=2048 n=8192 k=7168 bf16"]
    assert (problem.m, problem.n, problem.k) == (2048, (8192,), (7168,))
    for problem in found.values():
        candidates = tunable.candidates(problem, H200)
        assert heuristic(problem, H200) in candidates
        assert len(candidates) <= 28


def tuned(tunable, problem, **options) -> Any:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        prepared = tuning.prepare(tunable, problem, H200, pool)
    return tuning.measure(prepared, rounds=1, **options)


def test_the_fastest_that_works_wins():
    """Of candidates that fail to lower, that are wrong, that are slow."""
    problem = problem_of("reduce_scatter")
    unsupported, wrong, slow, fast = (
        CollectiveConfig(stages=stages) for stages in (2, 3, 4, 5)
    )

    def kernel(problem, config, device):
        plain = tunable._program(problem, "xla", None)
        ring = tunable._program(problem, "xla_ring", None)
        return {
            unsupported: tunable.kernel(problem, config, device),
            wrong: lambda *args: 1.1 * plain(*args),
            slow: jax.named_call(lambda *args: ring(*args), name="slow"),
            fast: ring,
        }[config]

    fake = types.SimpleNamespace(**vars(tunable))
    fake.kernel = kernel
    fake.time_us = lambda fn, *_, iterations: [1.0 + ("slow" in fn.as_text())]
    fake.candidates = lambda *_: [unsupported, wrong, slow, fast]
    said = []
    entry = tuned(fake, problem, report=said.append)
    assert entry.config["stages"] == 5
    assert entry.time_us == 1
    assert "Unsupported: collective_matmul: 64 columns" in said[0]
    assert "rejected" in said[1] and "against XLA" in said[1]
    assert len(said) == 3


def test_pauses_are_those_of_the_op(monkeypatch):
    pauses = []
    monkeypatch.setattr(tuning.time, "sleep", pauses.append)
    problem = problem_of("reduce_scatter")
    fake = types.SimpleNamespace(**vars(tunable))
    fake.kernel = lambda *_: tunable._program(problem, "xla_ring", None)
    fake.time_us = lambda *_, iterations: [1e6, 2e6]
    fake.candidates = lambda *_: [CollectiveConfig()]
    tuned(fake, problem)
    fake.IDLE_SHARE = 6
    tuned(fake, problem)
    assert pauses == pytest.approx([3.0] * 3 + [18.0] * 3)


def test_each_call_of_a_loop_has_its_time():
    runs = []
    turns = np.zeros(3, np.int8)
    times = tunable.time_us(
        lambda turns, x: runs.append((len(turns), x)), turns, 1, iterations=7
    )
    assert runs == [(3, 1)] * 3
    assert len(times) == 9
    assert min(times) > 0


def test_problems_that_need_more_devices_are_skipped():
    with pytest.raises(Unsupported, match="16 devices are needed, 8 are there"):
        tunable.arguments(problem_of("all_gather", devices=16))


def test_the_command_saves_each_problem_at_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PALLAS_KERNELS_TUNED_DIR", str(tmp_path))
    monkeypatch.setattr(tuning.DeviceSpec, "current", lambda: H200)
    tuned = []

    def prepare(_, problem, device, pool):
        if problem.m == 64:
            raise Unsupported("no such devices")
        return tuning._Prepared(
            tunable=tunable, args=(problem,), baseline=None, candidates={}, skipped=[]
        )

    def measure(prepared):
        tuned.append(prepared.args[0])
        return tuned_configs.TunedEntry(
            config={}, time_us=1.0, xla_us=2.0, jax="0.11.2", date="2026-11-21"
        )

    monkeypatch.setattr(tuning, "prepare", prepare)
    monkeypatch.setattr(tuning, "measure", measure)
    arguments = ["collective_matmul", "--only", "llama70b_qkv", "tp=4", "m=16 "]
    tuning.main(arguments)
    assert [(p.m, p.n) for p in tuned] == [(16, (2560,))]
    table = json.loads((tmp_path / "nvidia_h200.json").read_text())
    assert list(table["collective_matmul"]) == [
        "all_gather tp=4 m=16 n=2560 k=8192 bf16"
    ]
    tuning.main(["collective_matmul", "--only", "llama70b_qkv", "m=64 "])
    assert "skipped: no such devices" in capsys.readouterr().out
    tuning.main([*arguments, "--seconds", "-1"])
    assert "stopped before llama70b_qkv" in capsys.readouterr().out
    assert len(tuned) == 1


@pytest.fixture
def three_problems(tmp_path, monkeypatch):
    """Small ones for the command, whose config is a ring in place of the kernel."""
    monkeypatch.setenv("PALLAS_KERNELS_TUNED_DIR", str(tmp_path))
    monkeypatch.setattr(tuning.DeviceSpec, "current", lambda: H200)
    found = {f"m={m}": problem_of("reduce_scatter", m=m) for m in (16, 32, 64)}
    monkeypatch.setattr(tunable, "problems", lambda: found)
    monkeypatch.setattr(tunable, "candidates", lambda *_: [CollectiveConfig()])
    monkeypatch.setattr(
        tunable,
        "kernel",
        lambda problem, *_: tunable._program(problem, "xla_ring", None),
    )
    monkeypatch.setattr(tunable, "IDLE_SHARE", 0)
    return found


def test_the_next_problem_is_prepared_while_one_is_measured(
    three_problems, monkeypatch, capsys
):
    prepared, measured, alive = [], [], []
    real = tuning.prepare

    def prepare(*args):
        assert len([ref for ref in alive if ref() is not None]) <= 1
        ready = real(*args)
        alive.append(weakref.ref(ready))
        prepared.append(ready)
        return alive[-1]()

    def time_us(fn, *args, iterations):
        rows = args[1][0].shape[1]
        if rows not in measured:
            measured.append(rows)
            following = prepared.pop() if len(measured) < 3 else None
            prepared.clear()  # or they would live on here
            if following is not None:
                assert following.args[1][0].shape[1] == 2 * rows
                (program,) = following.candidates.values()
                program.result(timeout=600)  # it is compiled though this one waits
        return [1.0]

    monkeypatch.setattr(tuning, "prepare", prepare)
    monkeypatch.setattr(tunable, "time_us", time_us)
    tuning.main(["collective_matmul"])
    assert measured == [16, 32, 64]
    assert len(alive) == 3 and capsys.readouterr().out.count("  wrote") == 3


@pytest.mark.parametrize("where", ["arguments", "baseline"])
def test_a_problem_that_cannot_be_prepared_is_reported_alone(
    where, three_problems, monkeypatch, tmp_path, capsys
):
    real = getattr(tunable, where)

    def breaks(problem):
        if problem.m == 32:
            raise MemoryError("too big")
        return real(problem)

    monkeypatch.setattr(tunable, where, breaks)
    tuning.main(["collective_matmul"])
    out = capsys.readouterr().out
    assert "m=32\n  skipped: MemoryError: too big\nm=64\n" in out
    table = json.loads((tmp_path / "nvidia_h200.json").read_text())
    assert list(table["collective_matmul"]) == [
        three_problems[name].key for name in ("m=16", "m=64")
    ]


def test_no_problem_is_begun_after_the_given_seconds(
    three_problems, monkeypatch, capsys
):
    now = [0.0]
    monkeypatch.setattr(tuning.time, "monotonic", lambda: now[0])

    def time_us(fn, *args, iterations):
        now[0] = 11.0
        return [1.0]

    monkeypatch.setattr(tunable, "time_us", time_us)
    tuning.main(["collective_matmul", "--seconds", "10"])
    out = capsys.readouterr().out
    assert out.count("  wrote") == 1 and out.endswith("stopped before m=32\n")


def test_tuners_that_share_gpus_prepare_together_and_measure_alone(
    three_problems, monkeypatch, tmp_path
):
    lock, found = tmp_path / "lock", {"arguments": set(), "time_us": set()}
    monkeypatch.setenv("PALLAS_KERNELS_TUNING_LOCK", str(lock))

    def free(kind):
        with open(lock, "w") as other:
            try:
                fcntl.flock(other, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

    def note(name):
        found[name].add((free(fcntl.LOCK_SH), free(fcntl.LOCK_EX)))

    real = tunable.arguments
    monkeypatch.setattr(tunable, "arguments", lambda p: (note("arguments"), real(p))[1])
    monkeypatch.setattr(
        tunable, "time_us", lambda *_, iterations: (note("time_us"), [1.0])[1]
    )
    tuning.main(["collective_matmul"])
    assert found == {"arguments": {(True, False)}, "time_us": {(False, False)}}
