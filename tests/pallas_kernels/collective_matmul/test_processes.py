"""Fused products in two processes: lowered for the GPUs of each, run in XLA's form."""

import pytest

from tests.training.layouts import one_device
from tests.training.processes import run_two


def test_kernels_reach_the_devices_of_their_own_process():
    found = run_two("tests.pallas_kernels.collective_matmul.process_worker")
    sums, _ = one_device("llama_tiny", 4, packed=False)
    for (answer, _), places in zip(found, ("0,1,2,3", "4,5,6,7"), strict=True):
        assert answer["inside"] == [places]
        assert answer["across"] == [] and answer["untuned"] == [[], []]
        # Each reason once.
        flag, across = (x for x in answer["said"] if "runs without" in x)
        assert "XLA_FLAGS) need --xla_gpu_shard_autotuning=false" in flag
        assert "the axis 'tensor' has devices of several processes" in across
        assert "reach the 4 of one; start one process on each host" in across
        for flags in ("--ntasks-per-node=1", "--map-by ppr:1:node", "XLA_FLAGS=--xla"):
            assert flags in across and flags in answer["refused"]
        assert answer["refused"].endswith("; use implementation='xla'")
        assert answer["loss"] == pytest.approx(float(sums.nll), rel=1e-5)
