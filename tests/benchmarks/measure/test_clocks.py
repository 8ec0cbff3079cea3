"""How long a host held back the clocks of its GPUs."""

import os

import pytest

from benchmarks.measure import clocks, timing


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """An `nvidia-smi` that prints what the test writes, and notes its arguments."""
    monkeypatch.setattr(timing, "on_gpu", lambda: True)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    program, said = tmp_path / "nvidia-smi", tmp_path / "said"
    program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\ncat {said}\n')
    program.chmod(0o755)
    return said


def test_the_gpu_that_was_held_back_most(driver, monkeypatch):
    now = iter([0.0, 10.0, 20.0])
    monkeypatch.setattr(clocks.time, "monotonic", lambda: next(now))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    driver.write_text("0, 0, 5000000\n0, 1000000, [N/A]\n")
    found = clocks.Clocks()
    assert (driver.parent / "asked").read_text().endswith("-i 2,3\n")
    driver.write_text("0, 0, 5000000\n1500000, 1500000, [N/A]\n")
    assert found.held_back() == pytest.approx(0.2)
    assert found.held_back() == 0.0  # since the last call


def test_a_driver_that_does_not_count(driver):
    assert not driver.exists()  # so that the command fails
    assert clocks.Clocks().held_back() == 0.0
