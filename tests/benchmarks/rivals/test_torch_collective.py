"""What the processes of PyTorch print is read, whatever happens to them."""

import json
import stat
import sys
import textwrap

import pytest

from benchmarks.measure import loops
from benchmarks.measure.harness import Measurement, NoMeasurement
from benchmarks.rivals import torch_collective


PROBLEMS = [{"kind": "all_gather", "tp": 2, "M": m, "N": 8, "K": 8} for m in (16, 64)]


def test_pieces_are_as_long_as_those_of_jax():
    """GPUs at the power cap slow down with the length of what is timed."""
    assert torch_collective.SECONDS == loops.SECONDS


@pytest.fixture
def stand_in(tmp_path):
    """Makes a python whose first process prints lines and then does something."""

    def make(lines, then=""):
        path = tmp_path / "python"
        script = f"""\
            #!{sys.executable}
            import json, os, sys, time
            job = json.load(open(sys.argv[3]))
            assert sys.argv[1:3] == ["-m", "benchmarks.rivals.torch_collective"]
            assert os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"
            assert os.environ["NCCL_NVLS_ENABLE"] == "0"
            assert job["size"] == 2 and job["samples"] == 3 and job["port"] > 0
            if sys.argv[4] == "0":
                print("a line of a library")
                for line in {lines!r}:
                    print(json.dumps(line), flush=True)
                {then}
            else:
                time.sleep(3600)
        """
        path.write_text(textwrap.dedent(script))
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return str(path)

    return make


def timed(problem, name, seconds, graph=False):
    return {
        "problem": problem,
        "name": name,
        "seconds": seconds,
        "error": 1e-3,
        "costs": {"compile_seconds": 0.5},
        "cuda_graph": graph,
    }


def run(python, names=("torch_nccl", "torch_async_tp")):
    return torch_collective.run_children(PROBLEMS, names, 3, 2, python=python)


def test_the_faster_of_calls_and_graph_counts(stand_in, capsys):
    lines = [
        timed(0, "torch_nccl", [3e-6, 3e-6, 4e-6]),
        timed(0, "torch_nccl", [2e-6, 2e-6, 9e-6], graph=True),
        timed(0, "torch_async_tp", [1e-6] * 3),
        timed(0, "torch_async_tp", [5e-6] * 3, graph=True),
        timed(1, "torch_nccl", [7e-6] * 3),
        {
            "problem": 1,
            "name": "torch_nccl",
            "reason": "no graph",
            "failed": True,
        },
        {
            "problem": 1,
            "name": "torch_async_tp",
            "reason": "not supported: no",
            "failed": False,
        },
    ]
    first, second = run(stand_in([*lines, {"done": True}], "time.sleep(3600)"))
    assert first["torch_nccl"] == Measurement(
        [2e-6, 2e-6, 9e-6], 1e-3, {"cuda_graph": 1.0, "compile_seconds": 0.5}, 2
    )
    assert first["torch_async_tp"].metrics["cuda_graph"] == 0.0
    assert second["torch_nccl"].median == 7e-6
    assert second["torch_async_tp"] == NoMeasurement("not supported: no")
    assert "a line of a library" in capsys.readouterr().out


@pytest.mark.parametrize("then", ["sys.exit(1)", "time.sleep(3600)"])
def test_what_ends_or_hangs_keeps_its_first_results(stand_in, monkeypatch, then):
    monkeypatch.setattr(torch_collective, "RESULT_SECONDS", 1.0)
    first, second = run(  # returns, since the other process is ended too
        stand_in([timed(0, "torch_nccl", [1e-6])], then), ["torch_nccl"]
    )
    assert first["torch_nccl"].median == 1e-6
    assert second["torch_nccl"] == NoMeasurement(
        "failed: the processes ended or hung", failed=True
    )


def test_without_a_gpu_there_is_a_reason():
    found = torch_collective.measure(PROBLEMS, ["torch_nccl"], 3)
    reason = {"torch_nccl": NoMeasurement("torch with a GPU is not there")}
    assert found == [reason, reason]
    assert torch_collective.measure(PROBLEMS, [], 3) == [{}, {}]


def test_each_number_of_devices_has_its_own_processes(monkeypatch):
    started = []

    def children(problems, names, samples, size):
        started.append((size, [p["M"] for p in problems]))
        return [{"torch_nccl": (size, p["M"])} for p in problems]

    monkeypatch.setattr(torch_collective, "run_children", children)
    monkeypatch.setattr("benchmarks.measure.timing.on_gpu", lambda: True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: json)
    mixed = [PROBLEMS[0] | {"tp": 4}, *PROBLEMS]
    found = torch_collective.measure(mixed, ["torch_nccl"], 3)
    assert started == [(2, [16, 64]), (4, [16])]
    assert [f["torch_nccl"] for f in found] == [(4, 16), (2, 16), (2, 64)]
