"""The training benchmark on simulated devices: equal losses from equal weights."""

import functools
import json
import signal

import numpy as np
import pytest

from benchmarks import training
from benchmarks.measure import command
from benchmarks.measure.harness import Case, Measurement, NoMeasurement
from benchmarks.rivals import torch_llama
from benchmarks.workloads import equal_llama
from jaxscale.models import preset
from jaxscale.sharding import MeshConfig
from jaxscale.training import DataConfig, TrainConfig


TINY = {"model": "llama_tiny", "batch": 4, "seq_len": 32}


def losses(name, **params):
    found = training.train(name, training.job_of(TINY | params, seed=0, samples=2))
    assert len(found["seconds"]) == 2 and len(found["losses"]) == training.WARM_UP + 2
    return found["losses"]


@pytest.fixture(scope="module")
def plain():
    return losses("plain_jax")


def test_a_pipeline_over_tensor_parallel_devices_has_the_losses_of_plain_jax(plain):
    found = losses("jaxscale", pipe=2, tensor=2, microbatches=2)
    np.testing.assert_allclose(found, plain, rtol=1e-5)


@pytest.mark.exhaustive  # another workload of the test above
def test_parallel_blocks_and_windows_have_those_of_plain_jax(plain):
    change = {"parallel": True, "window": 8}
    layout = {"fsdp": 2, "context": 2}
    ours = losses("jaxscale", scan_layers=True, remat="attention", **layout, **change)
    theirs = losses("plain_jax", fsdp=2, tensor=2, **change)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    # The comparison can tell: without the two the losses are others.
    assert np.abs(np.subtract(theirs, plain)).max() > 1e-3


def test_fp8_has_almost_those_of_plain_jax():
    plain = losses("plain_jax", seq_len=128)
    found = losses("jaxscale_fp8", quantization="fp8", scan_layers=True, seq_len=128)
    assert 1e-6 < training.parity("jaxscale", found, {("", "plain_jax"): plain}) < 2e-3


def test_fp8_is_held_against_the_peak_of_each_product(monkeypatch):
    monkeypatch.setattr(training.training, "peak_flops", lambda kind: 1e15)
    case = {"model": "llama_1b", "batch": 2, "seq_len": 128, "tensor": 2}
    config = preset("llama_1b")
    found = training.fp8_utilization(case, [0.25, 0.5, 9.0])
    layers = 6 * config.num_layers * config._block_matmul_parameters()
    for name, causal in (("causal", True), ("full", False)):
        flops = config.flops_per_token(128, causal) - layers / 2
        assert found[f"mfu_fp8_{name}"] == pytest.approx(128 * flops / 1e15 / 0.5)


def test_the_window_alone_is_seen(plain):
    assert np.abs(np.subtract(losses("plain_jax", window=8), plain)).max() > 1e-4


def test_the_command_trains_in_children(capsys):
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as end:
        command.run(
            training.BENCHMARK,
            ["--quick", "--case", "tiny_fsdp2", "--impl", "plain_jax", "torch_compile"],
        )
    assert end.value.code == 0
    assert signal.getsignal(signal.SIGTERM) == before
    out = capsys.readouterr().out
    assert "tiny_fsdp2 torch_compile: not supported" in out
    assert "tokens_per_second_per_device" in out and "cpu x 2" in out


def trained(*losses):
    return training.Trained([1.0], None, losses=losses)


def test_losses_are_compared_with_the_best_reference_of_the_workload(monkeypatch):
    cases = [
        Case("fsdp4", TINY | {"fsdp": 4}),
        Case("pp4", TINY | {"pipe": 4}),
        Case("other", TINY | {"parallel": True}),
    ]
    found = {
        "fsdp4": {
            "jaxscale": trained(4.0, 3.0),
            "plain_jax": trained(4.0, 2.0),
            "torch_compile": trained(4.0, 2.5),
        },
        "pp4": {"jaxscale": trained(4.0, 2.2), "plain_jax": NoMeasurement("no")},
        "other": {"jaxscale": trained(5.0, 5.0)},
    }
    monkeypatch.setattr(training, "run_case", lambda b, case, n, s: found[case.name])
    errors = {
        (case.name, name): result.max_rel_error
        for case, results in training.measure(cases, [], 1)
        for name, result in results.items()
        if isinstance(result, Measurement)
    }
    assert errors == {
        ("fsdp4", "jaxscale"): 0.5,
        ("fsdp4", "plain_jax"): pytest.approx(0.2),  # with torch
        ("fsdp4", "torch_compile"): 0.25,
        ("pp4", "jaxscale"): pytest.approx(0.1),
        ("other", "jaxscale"): None,
    }


def test_a_loss_that_is_not_a_number_is_wrong():
    reference = {("a", "plain_jax"): [1.0, 1.0]}
    compare = functools.partial(training.parity, "jaxscale")
    assert compare([1.0, float("nan")], reference) == float("inf")
    late = [1.0] * training.PARITY_STEPS
    reference = {("a", "plain_jax"): [*late, 1.0]}
    assert compare([*late, 9.0], reference) == 0  # chaos, by then


@pytest.mark.parametrize("names", [("jaxscale_fp8", "jaxscale"), ("a", "torch_float8")])
def test_8_bits_are_compared_before_a_batch_comes_again(names):
    """Whichever of the two is in 8 bits."""
    reference = {("a", names[1]): [1.0, 1.0, 1.0, 1.0]}
    assert training.parity(names[0], [1.0, 1.0, 1.0, 9.0], reference) == 0
    assert training.parity(names[0], [1.0, 1.0, 2.0, 9.0], reference) == 1


def test_every_case_fits_its_devices():
    """What `fit` would refuse is seen here, not on four GPUs."""
    names = [case.name for case in training.BENCHMARK.cases]
    assert {"llama3_8b_fsdp4", "llama3_8b_tp4", "llama_1b_pp4_gpipe"} <= {*names}
    assert len(names) == len({*names})
    for case in [*training.BENCHMARK.cases, *training.BENCHMARK.quick_cases]:
        job = training.job_of(case.params, seed=0, samples=1)
        sizes = {axis: job[axis] for axis in ("pipe", "fsdp", "context", "tensor")}
        config = training.config_of(case.params)
        TrainConfig(
            model=config,
            data=DataConfig(
                vocab_size=config.vocab_size,
                seq_len=job["seq_len"],
                batch_size=job["batch"],
            ),
            mesh=MeshConfig(**sizes),
            rules="megascale_3d" if job["pipe"] > 1 else "fsdp_tp",
            microbatches=job["microbatches"],
            chunks=job["chunks"],
        )
        assert job["size"] <= 4
        assert json.loads(json.dumps(job)) == job
        assert not set(case.params) - {*training.DEFAULTS, *training.WORKLOAD}


def test_joined_kernels_of_torch_give_each_device_its_heads():
    shape = equal_llama.Shape.of(preset("llama_tiny"))
    name = "blocks.1.attention.qkv.weight"
    rows = torch_llama._value(shape, name, 3, tensor=2)  # [q + k + v, D]
    second = rows[len(rows) // 2 :]
    parts = [
        equal_llama.weight(shape, f"blocks.attention.{x}.kernel", 3, 1)
        for x in ("query", "key", "value")
    ]
    halves = [part[:, part.shape[1] // 2 :].T for part in parts]
    np.testing.assert_array_equal(second, np.concatenate(halves))
    stacked = equal_llama.weight(shape, "blocks.attention.query.kernel", 3)
    np.testing.assert_array_equal(stacked[1], parts[0])
    assert np.abs(stacked[0] - stacked[1]).max() > 0.1
