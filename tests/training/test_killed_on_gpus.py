"""A run on GPUs that is killed and started again has the losses of one that was not.

Faults of every kind are in `faults.py`, on CPUs; this is the hard one with kernels, the
autotuner and collectives of GPUs.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest

from tests.training.killed_run import EVERY, STEPS


SECONDS = 240  # a process that takes longer hangs


class Run:
    """A process that trains into a directory."""

    def __init__(self, directory: Path, count: int):
        self.metrics = directory / "metrics.jsonl"
        environment = os.environ | {
            "XLA_FLAGS": "",  # as users have them, with the autotuner
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        }
        self.log = (directory / "log").open("ab")
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.training.killed_run"),
                *(str(directory), str(count)),
            ],
            env=environment,
            stdout=self.log,
            stderr=subprocess.STDOUT,
        )
        self.deadline = time.monotonic() + SECONDS

    def steps(self) -> dict[int, tuple[float, float]]:
        """Loss and norm of the gradient of each step that is on disk, exactly."""
        if not self.metrics.exists():
            return {}
        lines = self.metrics.read_text().splitlines(keepends=True)
        records = [json.loads(line) for line in lines if line.endswith("\n")]
        steps = [record for record in records if "loss" in record]
        return {r["step"]: (r["loss"], r["grad_norm"]) for r in steps}

    def kill_after(self, step: int) -> None:
        """SIGKILL once that step is done."""
        while max(self.steps(), default=0) < step:
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < self.deadline, self.said()
            time.sleep(0.01)
        self.process.send_signal(signal.SIGKILL)
        assert self.process.wait() == -signal.SIGKILL
        self.log.close()

    def finish(self) -> dict[int, tuple[float, float]]:
        """Wait for its end."""
        code = self.process.wait(self.deadline - time.monotonic())
        self.log.close()
        assert code == 0, self.said()
        return self.steps()

    def said(self) -> str:
        """The end of what it printed."""
        return Path(self.log.name).read_text(errors="replace")[-4000:]


def check(directory: Path, count: int) -> None:
    whole, broken = directory / "whole", directory / "broken"
    whole.mkdir()
    broken.mkdir()
    expected = Run(whole, count).finish()
    assert sorted(expected) == [*range(1, STEPS + 1)]
    # Both runs have one set of programs: of two that compile apart, the autotuner may
    # pick products that round otherwise.
    shutil.copytree(whole / "programs", broken / "programs")
    # Between two checkpoints, the first of which is whole or still being written.
    first = Run(broken, count)
    first.kill_after(EVERY + EVERY // 2)
    before = first.steps()
    found = Run(broken, count).finish()
    differ = {step: (found[step], expected[step]) for step in expected}
    differ = {step: pair for step, pair in differ.items() if pair[0] != pair[1]}
    print(f"killed after step {max(before)}; {len(differ)} of {STEPS} steps differ")
    assert sorted(found) == sorted(expected)
    assert not differ, differ


@pytest.mark.gpu
def test_one_gpu(tmp_path):
    check(tmp_path, 1)


@pytest.mark.multigpu
def test_all_gpus(tmp_path):
    check(tmp_path, jax.device_count())
