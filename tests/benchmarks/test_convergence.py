"""The convergence benchmark at a tiny size: same rows, fair rates, real learning."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import convergence
from benchmarks.measure.harness import Case, Measurement
from benchmarks.workloads import byte_text


def trainer(name):
    return convergence.Trainer(convergence.SETUPS["tiny"], convergence.ARMS[name])


def rows_of(name, seed):
    """All rows that an arm trains on, and how many steps they make."""
    arm, seen = trainer(name), []

    def record(state, rate, text):
        seen.append(np.asarray(text))
        return dataclasses.replace(state, step=state.step + len(text)), jnp.zeros(1)

    arm._run = record
    assert len([*arm.curve(seed, 1e-3)]) == convergence.POINTS
    return np.concatenate([x.reshape(-1, x.shape[-1]) for x in seen]), arm.steps


def test_larger_batches_read_the_same_rows_in_the_same_order():
    base, steps = rows_of("serial", 0)
    large, quarter = rows_of("lamb_4x", 0)
    assert steps == 4 * quarter == 32
    np.testing.assert_array_equal(base, large)
    assert np.any(base != rows_of("serial", 1)[0])
    whole = convergence.points(convergence.SETUPS["tiny"])[-1]
    assert base[:, 1:].size == whole


@pytest.mark.parametrize("best", [1e-3, 4e-3, 3.2e-2])
def test_the_best_rate_has_worse_neighbors(best):
    arm = trainer("serial")
    for power in range(-6, 7):
        rate = arm.setup.guesses["adamw"] * 2.0**power
        bits = {"bits_per_byte": abs(np.log(rate / best))}
        arm.tried[rate] = Measurement([1.0], None, metrics=bits)
    assert arm.best_rate() == pytest.approx(best)


def test_a_model_learns_by_its_rate_and_is_judged_on_other_rows(monkeypatch):
    arm = trainer("parallel_window")
    choice, result = arm._rows["choice"], arm._rows["result"]
    seen = {bytes(np.asarray(x).astype(np.uint8)) for b in choice for x in b.tokens}
    assert not any(
        bytes(np.asarray(x).astype(np.uint8)) in seen for b in result for x in b.tokens
    )
    still = [arm.bits(model, "result") for model, _ in arm.curve(0, 0.0)]
    assert still[0] == still[-1] > 6
    monkeypatch.setattr(convergence, "Trainer", lambda setup, given: arm)
    monkeypatch.setattr(arm, "best_rate", lambda: 8e-3)
    arm.tried[4e-3] = Measurement([1.0], None, metrics={"bits_per_byte": 9.0})
    cases = convergence.BENCHMARK.quick_cases
    found = [*convergence.measure(cases, ["parallel_window"], 1)]
    assert found[0][0] == Case("tiny_rates", {"rate": 4e-3})
    assert [case for case, _ in found[1:]] == list(cases)
    bits = [r["parallel_window"].metrics["bits_per_byte"] for _, r in found[1:]]
    assert bits[-1] < bits[0] - 0.5 < still[0]
    assert found[1][1]["parallel_window"].metrics["rate"] == 8e-3


def test_windows_and_parallel_blocks_are_what_they_say():
    config = trainer("parallel_window")._config
    assert config.parallel_block and config.window == config.max_seq_len // 4
    base = trainer("serial")._config
    assert not base.parallel_block and base.window is None
    assert trainer("lamb_4x")._settings.kind == "lamb"
    assert byte_text.decoder(32, 2, 8, 64) == base


@pytest.mark.exhaustive  # another arm of what the test above trains
def test_fp8_learns_as_bf16_does():
    setup = dataclasses.replace(
        convergence.SETUPS["tiny"], steps=64, arms=("bf16", "fp8"), rate=8e-3
    )
    found = {}
    for name in setup.arms:
        arm = convergence.Trainer(setup, convergence.ARMS[name])
        assert arm.best_rate() == 8e-3
        curve = [arm.bits(model, "result") for model, _ in arm.curve(0, 8e-3)]
        assert curve[-1] < curve[0] - 1.0
        found[name] = Measurement([1.0], None, metrics={"bits_per_byte": curve[-1]})
    gap = convergence._compared(found)["fp8"].metrics["against_bf16"]
    # Bits above those of bf16; below them is chance, and no fault.
    assert gap != 0 and gap < 0.01
