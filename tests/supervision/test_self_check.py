"""The self-check of a suspect host, with and without GPUs."""

import pytest

from jaxscale.supervision import self_check


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """Have the driver of the GPUs answer like this."""
    monkeypatch.setattr(self_check.importlib.util, "find_spec", lambda name: object())

    def answer(script):
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    return answer


@pytest.mark.parametrize(
    ("environ", "count"),
    [
        ({}, 3),
        ({"CUDA_VISIBLE_DEVICES": "1,2"}, 2),
        ({"CUDA_VISIBLE_DEVICES": ""}, 0),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, 0),
        ({"JAX_PLATFORMS": "cuda,cpu"}, 3),
        ({"JAX_PLATFORMS": "cpu"}, 0),
    ],
)
def test_the_gpus_that_jax_would_use(smi, environ, count):
    smi("printf '0\\n1\\n2\\n'")
    assert self_check.count_gpus(environ) == count


def test_jax_without_cuda_uses_no_gpu(smi, monkeypatch):
    smi("printf '0\\n1\\n'")
    monkeypatch.setattr(self_check.importlib.util, "find_spec", lambda name: None)
    assert self_check.count_gpus({}) == 0


def test_a_driver_that_does_not_answer_is_a_fault(smi, tmp_path, capsys, monkeypatch):
    smi("exit 9")
    assert self_check.main(str(tmp_path), 60.0) == 1
    assert capsys.readouterr().out == "nvidia-smi failed with code 9\n"
    monkeypatch.setattr(self_check, "_GPU_SECONDS", 0.1)
    smi("exec sleep 20")
    assert self_check.main(str(tmp_path), 60.0) == 1
    assert capsys.readouterr().out == "nvidia-smi did not answer within 0.1 s\n"


def test_a_host_without_gpus_is_checked_without_jax(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(self_check, "check_gpus", lambda *_: pytest.fail("it ran"))
    assert self_check.main(str(tmp_path), 60.0) == 0
    assert capsys.readouterr().out == "nothing found\n"
    assert self_check.main(str(tmp_path / "nowhere"), 60.0) == 1


def test_a_gpu_that_jax_does_not_find_excludes_the_host(tmp_path, monkeypatch, capsys):
    """`jaxscale diagnose` as a process, whose last line is the reason."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setattr(self_check, "count_gpus", lambda: 1)
    assert self_check.main(str(tmp_path), 120.0) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "JAX finds 0 GPUs, expected 1"
    assert any(line.startswith("cpu 0 (cpu, ") for line in lines)


def test_where_diagnose_cannot_run_nothing_is_known(monkeypatch):
    monkeypatch.setattr(self_check.sys, "executable", "/bin/false")
    assert self_check.check_gpus(1, 10.0) is None
