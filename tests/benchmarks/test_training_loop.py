"""The benchmark of the training loop: equal steps, and what a checkpoint costs them."""

from types import SimpleNamespace

import jax
import pytest

from benchmarks import training_loop
from benchmarks.measure import command
from jaxscale import models, training


pytestmark = pytest.mark.usefixtures("compile_once")

PARAMS = training_loop.BENCHMARK.quick_cases[0].params


def test_steps_by_hand_are_those_of_fit():
    by_hand = training_loop.by_hand(PARAMS, seed=0, samples=3)
    fit = training_loop.fit(PARAMS, seed=0, samples=3)
    assert by_hand.metrics == fit.metrics  # the loss after as many steps, bit for bit
    assert len(by_hand.seconds) == len(fit.seconds) == 3
    other = training_loop.by_hand(PARAMS, seed=1, samples=3)
    assert other.metrics != by_hand.metrics


def test_a_stall_is_found(monkeypatch):
    """A second and a half that saves hold up the loop, the first one longer.

    By a clock that a step moves on by a tenth of a second.
    """
    save, alone, now = training.Checkpointer.save, [], [0.0]

    def clock():
        now[0] += 0.1
        return now[0]

    def slow(self, step, *rest, **base):
        save(self, step, *rest, **base)
        now[0] += 3 if step == PARAMS["save_every"] else 1.5

    monkeypatch.setattr(training_loop, "time", SimpleNamespace(perf_counter=clock))
    monkeypatch.setattr(training.Checkpointer, "save", slow)
    monkeypatch.setattr(
        training_loop, "_alone", lambda state, folder: alone.append(state) or (1.0, 2.0)
    )
    found = training_loop.fit_saves(PARAMS, seed=0, samples=3)
    assert found.metrics["stall_seconds"] == pytest.approx(1.5)
    assert found.metrics["first_stall_seconds"] == pytest.approx(3)
    assert found.metrics["copy_seconds"] == 1 and found.metrics["save_seconds"] == 2
    # Weights and two moments in fp32.
    numbers = models.preset(PARAMS["model"]).num_parameters()
    assert found.metrics["gigabytes"] == pytest.approx(12e-9 * numbers, rel=1e-3)
    assert int(alone[0].step) == 3 * PARAMS["save_every"] - 1
    assert len(found.seconds) == 1 and found.median > 0.05


def test_a_save_alone_is_whole(tmp_path):
    state = {"w": jax.numpy.arange(1000.0)}
    copy, save = training_loop._alone(state, tmp_path)
    assert 0 < copy < save
    with training.Checkpointer(tmp_path, read_only=True) as checkpoints:
        assert checkpoints.steps == [1, 2]


def test_what_is_beside_a_step():
    found = training_loop.compare(PARAMS, {"by_hand": 2.0, "fit": 2.5})
    assert found["fit"] == {"beside_step": 0.25}
    assert training_loop.compare(PARAMS, {"fit": 2.5}) == {}


def test_the_command_writes_nothing_without_a_gpu(tmp_path, capsys):
    arguments = ["--quick", "--out", str(tmp_path), "--samples", "3"]
    arguments += ["--impl", "by_hand", "fit"]
    assert command.main(training_loop.BENCHMARK, arguments) == 0
    assert "beside_step" in capsys.readouterr().out
    assert not [*tmp_path.rglob("*")]
