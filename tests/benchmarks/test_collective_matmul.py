"""The benchmark of collective products: cases, metrics, checks, the whole command."""

import contextlib
import functools
import types
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from benchmarks import collective_matmul as benchmark
from benchmarks.measure import command, loop_programs, loops, records, timing
from benchmarks.rivals import collective_baselines as baselines
from benchmarks.rivals.collective_baselines import AXIS
from pallas_kernels.mosaic import H200, use_device
from tests.compiled import compile_for_h200
from tests.lowering import CUSTOM_CALL, MULTICAST_MARK
from tests.tiers import exhaustive, first


def params(kind="all_gather", tp=4, m=32, n=256, k=256):
    return {"kind": kind, "tp": tp, "M": m, "N": n, "K": k}


KINDS = ("all_gather", "reduce_scatter", "all_reduce")


def test_cases_are_those_of_the_design():
    found = list(benchmark.cases())
    assert len(found) == 2 * (10 * 8 + 5 * 5)
    assert {case.params["kind"] for case in found} == set(KINDS)
    split = [case.params for case in found if case.params["kind"] != "all_reduce"]
    assert all(params["M"] % params["tp"] == 0 for params in split)
    qkv = [c for c in found if c.name == "llama70b_qkv" and c.params["tp"] == 4]
    assert [c.params["M"] for c in qkv] == [16, 64, 512, 1024, 2048, 4096, 8192, 16384]
    assert qkv[0].params == params("all_gather", 4, 16, 10240, 8192)


def test_bytes_of_a_device():
    """At 300 GB/s these take the times that were measured by hand: 336 and 84 us."""
    big = params("all_gather", 4, 8192, 10240, 8192)
    assert benchmark.bytes_sent(big) == 3 * 2048 * 8192 * 2
    down = params("reduce_scatter", 4, 2048, 8192, 28672)
    assert benchmark.bytes_sent(down) == 3 * 512 * 8192 * 2
    decode = down | {"kind": "all_reduce"}
    assert benchmark.bytes_sent(decode) == 2 * benchmark.bytes_sent(down)
    names = ("mosaic_gpu", "matmul_only", "comm_only")
    rates = benchmark.compare(big, dict.fromkeys(names, 1e-3))
    tflops = {"tflops": pytest.approx(2 * 8192 * 2560 * 8192 / 1e-3 / 1e12)}
    link = {"nvlink_gb_per_s": pytest.approx(100.66, abs=0.01)}
    assert rates["mosaic_gpu"] == tflops | link
    assert rates["matmul_only"] == tflops and rates["comm_only"] == link


def test_efficiencies():
    seconds = {
        "mosaic_gpu": 3.4,
        "auto": 5.5,
        "matmul_only": 3.0,
        "comm_only": 2.0,
        "xla_nccl": 5.0,
        "torch_nccl": 5.0,
    }
    found = efficiencies(seconds)
    assert found["mosaic_gpu"] == pytest.approx(
        {
            "speedup": 5 / 3.4,
            "overlap_efficiency": 0.8,
            "overlap_efficiency_star": 0.8,
        }
    )
    assert found["auto"]["overlap_efficiency"] == pytest.approx(-0.25)
    assert found["matmul_only"] == found["comm_only"] == {}
    assert found["torch_nccl"]["speedup"] == 1

    # Where more is moved than computed, only E* can reach 1.
    found = efficiencies(seconds | {"comm_only": 3.4})["mosaic_gpu"]
    assert found["overlap_efficiency"] == pytest.approx(0.8)
    assert found["overlap_efficiency_star"] == pytest.approx(1.0)

    # No bound below the baseline, or no baseline: no efficiency.
    assert set(efficiencies(seconds | {"matmul_only": 6.0})["auto"]) == {"speedup"}
    assert efficiencies({"auto": 1.0}) == {"auto": {}}


def efficiencies(seconds):
    rates = ("tflops", "nvlink_gb_per_s")
    return {
        name: {key: value for key, value in found.items() if key not in rates}
        for name, found in benchmark.compare(params(), seconds).items()
    }


def run(kind, names, tp=4, **changes):
    problem = benchmark.problem(params(kind, tp), names)
    forms = [
        form
        if form.name not in changes
        else loop_programs.Form(
            **{**form.__dict__, "function": changes[form.name](form.function)}
        )
        for form in problem.forms
    ]
    problem = loop_programs.Problem(**{**problem.__dict__, "forms": forms})
    ((_, results),) = loops.measure([problem], samples=1)
    return {
        name: result.max_rel_error
        for name, result in results.items()
        if hasattr(result, "max_rel_error")
    }


@pytest.mark.parametrize(
    ("kind", "tp"), [*((kind, 4) for kind in KINDS), ("reduce_scatter", 2)]
)
def test_right_results_pass(kind, tp):
    names = {"auto", "matmul_only", "xla_nccl", "xla_ring", "xla_windowed"}
    if kind == "all_reduce":
        names.remove("xla_windowed")
    else:
        names.add("fp8_xla")
    errors = run(kind, [*names], tp)
    assert set(errors) == names
    assert all(0 < error < 1e-2 for error in errors.values()), errors


def windowed_program(devices, kind):
    """For H200s: the program that times XLA's windowed einsum."""
    mesh = jax.sharding.Mesh(np.array(devices), (AXIS,))
    benchmark_devices = mock.patch.object(jax, "devices", lambda: devices)
    with benchmark_devices, mock.patch.object(jax, "make_mesh", lambda *a, **k: mesh):
        sizes = params(kind, len(devices), 1024, 2048, 2048)
        one = benchmark.problem(sizes, ["xla_windowed"])
        jitted, arguments, _ = loop_programs.program(one, one.forms[0])
    return jitted, arguments


@pytest.mark.parametrize(
    ("kind", "tp"),
    [
        ("all_gather", 2),
        *exhaustive(("reduce_scatter", 4), ("all_gather", 4), ("reduce_scatter", 2)),
    ],
)
def test_xla_windows_what_is_called_so(kind, tp):
    """Parts go around while others are multiplied, and no collective is left.

    Over four devices the loop is not the one that XLA unrolls, which writes parts over
    each other.
    """
    for options in baselines.windowed(tp):
        given = {name: str(value).lower() for name, value in options.items()}
        flags = tuple(f"--{name}={value}" for name, value in given.items())
        made = compile_for_h200(windowed_program, kind, count=tp, flags=flags)
        assert made.count("collective-permute") >= 2 and made.count("while") >= 2
        assert not made.count("all-gather") and not made.count("reduce-scatter")
        assert ("unrolled_windowed" in made.hlo) == (tp == 2)
    plain = compile_for_h200(windowed_program, kind, count=tp)
    assert plain.count(kind.replace("_", "-")) and not plain.count("collective-permute")


def shifted(function):
    """Rows of the next device: right values in wrong places."""

    def wrong(*operands):
        y = function(*operands)
        return lax.ppermute(y, AXIS, [(i, (i + 1) % 4) for i in range(4)])

    return wrong


def one_device_short(function):
    def wrong(x, w):
        return function(jnp.where(lax.axis_index(AXIS) == 3, 0, x).astype(x.dtype), w)

    return wrong


def rolled(function):
    """Rows of all devices, by one device too far."""

    def wrong(*operands):
        y = function(*operands)
        return jnp.roll(y, y.shape[0] // 4, axis=0)

    return wrong


@pytest.mark.parametrize(
    ("kind", "mistake"),
    [
        ("all_gather", rolled),
        ("all_gather", one_device_short),
        ("all_gather", shifted),
        ("reduce_scatter", shifted),
        ("reduce_scatter", one_device_short),
        ("all_reduce", one_device_short),
        ("all_reduce", rolled),
    ],
)
def test_wrong_results_do_not_pass(kind, mistake):
    assert run(kind, ["xla_nccl"], xla_nccl=mistake)["xla_nccl"] > 0.3


def pushed_by_xla(kind):
    """What the push kernels do, in collectives."""

    def all_gather(x, *, size, **_):
        return lax.all_gather(x, AXIS, tiled=True)

    def reduce_scatter(x, *, size, **_):
        parts = x.reshape(size, -1, x.shape[1])
        me = lax.axis_index(AXIS)
        return jnp.stack(
            [
                lax.ppermute(
                    jnp.take(parts, (me + r) % size, axis=0),
                    AXIS,
                    [(i, (i + r) % size) for i in range(size)],
                )
                for r in range(1, size)
            ]
        )

    def all_reduce(x, **options):
        return all_gather(reduce_scatter(x, **options)[0], **options)

    return {
        "all_gather": all_gather,
        "reduce_scatter": reduce_scatter,
        "all_reduce": all_reduce,
    }[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_copies_are_checked_exactly(kind, monkeypatch):
    monkeypatch.setattr(baselines, f"push_{kind}", pushed_by_xla(kind))
    assert run(kind, ["comm_only"]) == {"comm_only": 0.0}
    # After an all-gather all devices hold the same.
    mistake = shifted if kind == "reduce_scatter" else rolled
    assert run(kind, ["comm_only"], comm_only=mistake)["comm_only"] > 0.3


REAL = [
    params("all_gather", 4, 2048, 10240, 8192),
    params("reduce_scatter", 4, 2048, 4096, 4096),
    params("all_reduce", 2, 64, 8192, 8192),
    params("all_reduce", 2, 1, 4096, 4096),
]


@pytest.mark.parametrize(
    "case", first(REAL, REAL[0], REAL[2]), ids=lambda c: f"{c['kind']}-{c['M']}"
)
def test_loops_of_every_form_lower_for_cuda(case, monkeypatch):
    """The programs that the GPUs will run, but for XLA's part."""
    from jax.experimental.pallas.ops.gpu import collective_matmul_mgpu as sample

    class Machine(types.ModuleType):
        def __getattr__(self, name):
            return getattr(jax, name)

        device_count = local_device_count = staticmethod(lambda: case["tp"])
        devices = staticmethod(lambda: [types.SimpleNamespace(core_count=132)])

    monkeypatch.setattr(sample, "jax", Machine("jax"))
    monkeypatch.setattr(baselines, "SAMPLE_CONFIGS", baselines.SAMPLE_CONFIGS[:1])
    monkeypatch.setattr(baselines, "PUSH_BLOCKS", baselines.PUSH_BLOCKS[:1])
    kernels = {}
    with use_device(H200):
        problem = benchmark.problem(case, benchmark.NAMES)
        for form in problem.forms:
            program, arguments, calls = loop_programs.program(problem, form)
            try:
                lowered = program.trace(*arguments).lower(lowering_platforms=("cuda",))
            except NotImplementedError as error:
                assert case["M"] <= 16, error
                continue
            text = lowered.as_text()
            assert MULTICAST_MARK not in text and calls >= 4
            kernels.setdefault(form.name, []).append(text.count(f"@{CUSTOM_CALL}"))
    assert kernels["xla_nccl"] == kernels["xla_lhs"] == [0]
    assert kernels["matmul_only"][0] == 0
    if case["M"] > 1:  # one row cannot be split
        assert kernels["xla_ring"] == [0]
        assert kernels["comm_only"] == [2 if case["kind"] == "all_reduce" else 1]
    assert kernels["mosaic_gpu"] == [1]
    # The workspace is made by a kernel too, once in a program.
    assert kernels.get("low_latency", [2]) == [2]
    assert ("low_latency" in kernels) == (case["kind"] != "reduce_scatter")
    if case["M"] > 16:
        assert kernels["matmul_only"][1:] == [1, 1]
        assert ("jax_sample" in kernels) == (case["kind"] == "all_gather")


def test_the_command_runs_anywhere_and_writes_nothing(tmp_path, capsys):
    assert command.main(benchmark.BENCHMARK, ["--quick", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    for kind in KINDS:
        assert f"tiny kind={kind} tp=4 M=32 xla_ring" in out
    assert "comm_only: not supported: push: the Mosaic GPU kernel needs" in out
    assert "torch_nccl: torch with a GPU is not there" in out
    assert "| tiny | all_gather |" in out and "; tp 4, M 32, N 256, K 256. cpu" in out
    assert not [*tmp_path.rglob("*")]


def test_rows_of_a_gpu_are_written(tmp_path, monkeypatch, capsys):
    class Device:
        platform, device_kind = "gpu", "NVIDIA H200"

    real = jax.devices()
    monkeypatch.setattr(timing, "on_gpu", lambda: True)
    monkeypatch.setattr(timing, "number_of_sets", lambda *_: 2)
    small = benchmark.BENCHMARK
    tiny = [*benchmark.quick_cases()]
    monkeypatch.setattr(small, "cases", tiny)
    monkeypatch.setattr(
        command,
        "jax",
        types.SimpleNamespace(devices=lambda: [Device()], __version__="0"),
    )
    assert jax.devices() == real
    arguments = ["--out", str(tmp_path), "--commit", "abc", "--kind", "all_gather"]
    names = ["xla_nccl", "xla_ring", "matmul_only", "auto"]
    assert command.main(small, [*arguments, "--implementations", *names]) == 0
    record = records.load(tmp_path / "nvidia_h200" / "collective_matmul.json")
    assert record["timing"].startswith("wall time a call in loops inside one program")
    assert record["num_devices"] == 4
    rows = {row["implementation"]: row for row in record["rows"]}
    assert set(rows) == set(names)
    assert rows["xla_nccl"]["metrics"]["speedup"] == 1
    assert rows["xla_nccl"]["metrics"].get("overlap_efficiency", 0) == 0
    assert "speedup" not in rows["matmul_only"]["metrics"]
    assert rows["xla_ring"]["params"] == params()


@pytest.mark.parametrize("names", [["torch_nccl"], ["xla_nccl"]])
def test_processes_of_pytorch_have_a_turn(names, monkeypatch):
    turns, during = [], []

    @contextlib.contextmanager
    def turn():
        turns.append("begins")
        yield
        turns.append("ends")

    def elsewhere(problems, names, samples):
        during.extend(turns)
        return [dict.fromkeys(names) for _ in problems]

    monkeypatch.setattr(timing, "turn", turn)
    monkeypatch.setattr(benchmark.torch_collective, "measure", elsewhere)
    monkeypatch.setattr(loops, "measure", lambda problems, _: [(problems[0], {})])
    case = next(benchmark.quick_cases())
    for _ in benchmark.measure([case], names, samples=1):
        # Whoever takes a result holds no lock, and nobody waits for nothing to do.
        assert turns == (["begins", "ends"] if names == ["torch_nccl"] else [])
    assert during == turns[:1]


def test_only_the_devices_that_are_needed_are_seen(monkeypatch):
    monkeypatch.setattr(benchmark.jax.config, "update", lambda *a: None)
    seen = functools.partial(benchmark.os.environ.get, "CUDA_VISIBLE_DEVICES")
    for name in ("CUDA_VISIBLE_DEVICES", "NCCL_NVLS_ENABLE"):
        monkeypatch.setenv(name, "0")  # comes back at the end
        monkeypatch.delenv(name)
    benchmark.prepare_devices(["--rows", "16"])
    assert seen() is None and benchmark.os.environ["NCCL_NVLS_ENABLE"] == "0"
    benchmark.prepare_devices(["--tp", "2", "--rows", "16"])
    assert seen() == "0,1"
