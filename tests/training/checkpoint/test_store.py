"""Checkpoints: exact, on another mesh, and errors that name what does not fit."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxscale.sharding import MeshConfig, create, fsdp, make_mesh, shardings
from jaxscale.training.checkpoint.store import (
    Checkpointer,
    DamagedCheckpoint,
    named_leaves,
)
from jaxscale.training.optimizer import OptimizerConfig, make_optimizer
from jaxscale.training.step import TrainState
from tests.training import processes, toy
from tests.training.checkpoint.damage import READS_GO_ON, damage


pytestmark = READS_GO_ON
OPTIMIZER = make_optimizer(OptimizerConfig(mu_dtype="bfloat16"), 100)


def state_on(mesh, seed=0):
    """A state with different numbers everywhere, split over the mesh."""

    def init():
        state = TrainState.create(toy.Toy(seed=seed), OPTIMIZER)
        leaves, structure = jax.tree.flatten(state)
        leaves = [(x + (i + seed)).astype(x.dtype) for i, x in enumerate(leaves)]
        return jax.tree.unflatten(structure, leaves)

    return create(init, mesh, fsdp())


def mesh_of(**axes):
    return make_mesh(MeshConfig(**axes), jax.devices()[:4])


@pytest.fixture(scope="module")
def square():
    return mesh_of(data=2, fsdp=2)


@pytest.fixture(scope="module")
def state(square):
    return state_on(square)


def assert_equal(tree, other):
    a, b = named_leaves(tree), named_leaves(other)
    assert list(a) == list(b)
    for name in a:
        assert a[name].dtype == b[name].dtype
        np.testing.assert_array_equal(
            np.asarray(a[name], np.float32), np.asarray(b[name], np.float32), name
        )


def test_names_are_the_paths_of_parameters(state):
    names = named_leaves(state)
    assert {"step", "skipped", "model.up", "opt_state.1.mu.up"} <= set(names)


def test_restores_on_another_mesh(tmp_path, state):
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(7, state, {"row": 5})
    tall = mesh_of(fsdp=4)
    target = jax.eval_shape(lambda: TrainState.create(toy.Toy(), OPTIMIZER))
    layout = shardings(target, tall, fsdp())
    target = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), target, layout
    )
    with Checkpointer(tmp_path) as checkpointer:
        restored, data = checkpointer.restore(target)
        model = checkpointer.restore_model(target.model)
    assert data == {"row": 5}
    assert_equal(restored, state)
    assert_equal(model, state.model)
    assert [x.sharding for x in jax.tree.leaves(restored)] == jax.tree.leaves(layout)
    assert isinstance(restored.model, toy.Toy)


def test_donation_after_save_does_not_reach_the_checkpoint(tmp_path, square):
    state = state_on(square, seed=1)
    expected = {name: np.asarray(x).copy() for name, x in named_leaves(state).items()}
    bump = jax.jit(
        lambda s: jax.tree.map(lambda x: x + jnp.ones((), x.dtype), s), donate_argnums=0
    )
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(0, state, {})
        for _ in range(3):
            state = bump(state)
        jax.block_until_ready(state)
        restored, _ = checkpointer.restore(state, 0)
    for name, x in named_leaves(restored).items():
        np.testing.assert_array_equal(np.asarray(x), expected[name])


def test_keeps_the_newest_and_every_tenth(tmp_path):
    tree = {"w": jnp.ones(2)}
    with Checkpointer(tmp_path, keep=2, keep_every=10) as checkpointer:
        for step in (1, 10, 15, 20, 21, 22):
            checkpointer.save(step, tree, {})
        checkpointer.wait()
        assert checkpointer.steps == [10, 20, 21, 22]
        checkpointer.save(22, {"w": jnp.zeros(2)}, {})  # left as it is
        restored, _ = checkpointer.restore(tree)
    np.testing.assert_array_equal(restored["w"], 1)


def test_an_interrupted_save_is_ignored(tmp_path):
    tree = {"w": jnp.ones(2)}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, tree, {})
        checkpointer.save(2, tree, {})
    # What a process killed in the middle of a save leaves behind.
    (tmp_path / "2").rename(tmp_path / "2.orbax-checkpoint-tmp")
    (tmp_path / "2.orbax-checkpoint-tmp" / "commit_success.txt").unlink(missing_ok=True)
    with Checkpointer(tmp_path, read_only=True) as checkpointer:
        assert checkpointer.steps == [1]
    assert (tmp_path / "2.orbax-checkpoint-tmp").exists()
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.steps == [1]
        checkpointer.save(2, tree, {"row": 2})
        checkpointer.wait()
        assert checkpointer.restore(tree)[1] == {"row": 2}
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_dir()) == ["1", "2"]


def test_read_only_is_silent_and_changes_nothing(tmp_path, caplog):
    tree = {"w": jnp.ones(2)}
    with Checkpointer(tmp_path, keep=1) as checkpointer:
        checkpointer.save(1, tree, {})
    before = sorted(tmp_path.rglob("*"))
    with Checkpointer(tmp_path, read_only=True) as checkpointer:
        checkpointer.restore(tree)
        with pytest.raises(ValueError, match="opened with read_only=True; open them"):
            checkpointer.save(2, tree, {})
    assert sorted(tmp_path.rglob("*")) == before
    assert [r for r in caplog.records if r.levelname == "WARNING"] == []


def test_no_checkpoint(tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(FileNotFoundError, match="there is no checkpoint in"):
            checkpointer.restore({"w": jnp.ones(2)})
        checkpointer.save(1, {"w": jnp.ones(2)}, {})
        checkpointer.wait()
        with pytest.raises(FileNotFoundError, match=r"of step 5 .* only of \[1\]"):
            checkpointer.restore({"w": jnp.ones(2)}, 5)


def test_settings_of_another_run(tmp_path):
    tree = {"w": jnp.ones(2)}
    config = {"model": {"d_model": 8, "num_layers": 2}, "seed": 0}
    with Checkpointer(tmp_path, config=config) as checkpointer:
        checkpointer.save(1, tree, {})
        checkpointer.wait()
        assert checkpointer.config() == config
    other = {"model": {"d_model": 16, "num_layers": 2}, "seed": 0}
    with (
        Checkpointer(tmp_path, config=other) as checkpointer,
        pytest.raises(ValueError, match=r"with model.d_model 8 \(now 16\); set these"),
    ):
        checkpointer.restore(tree)


def test_parameters_that_do_not_fit(tmp_path, state):
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state, {})
        checkpointer.wait()
        model: Any = toy.Toy()
        model.gate = nnx.Param(jnp.ones(3))
        model.up = nnx.Param(jnp.ones((2, 16, 48)))
        del model.scale
        target = dataclasses.replace(state, model=model)
        with pytest.raises(ValueError) as error:
            checkpointer.restore(target)
    message = str(error.value)
    assert "lacks model.gate" in message
    assert "has model.scale too" in message
    assert "has model.up of shape (2, 16, 32) instead of (2, 16, 48)" in message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": 0}, "keep 0 must be at least 1 checkpoint"),
        ({"keep_every": 0}, "keep_every 0 must be at least 1 step, or None"),
    ],
)
def test_impossible_settings(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        Checkpointer(tmp_path, **options)


@pytest.fixture
def three(tmp_path):
    """Checkpoints of the steps 1 to 3, whose array is their step."""
    with Checkpointer(tmp_path) as checkpointer:
        for step in (1, 2, 3):
            tree = {"model": {"w": jnp.full(3000, step)}}
            checkpointer.save(step, tree, {"row": step})
    return tmp_path


@pytest.mark.parametrize(
    "how", ["cut off", "no metadata", "empty metadata", "no position"]
)
def test_a_damaged_checkpoint_is_passed_over_with_a_line(three, how, caplog):
    damage(three / "3", how)
    target = {"model": {"w": jnp.zeros(3000, jnp.int32)}}
    with Checkpointer(three, read_only=True) as checkpointer:
        restored, data = checkpointer.restore(target)
        with pytest.raises(DamagedCheckpoint, match=r"checkpoint 3 in .* is damaged"):
            checkpointer.restore(target, 3)
    np.testing.assert_array_equal(restored["model"]["w"], 2)
    assert data == {"row": 2}
    (line,) = [r.getMessage() for r in caplog.records if r.name != "absl"]
    assert line.startswith(f"checkpoint 3 in {three} is damaged and not used (")
    assert len(line.splitlines()) == 1 and len(line) < 400


@pytest.mark.slow
def test_processes_agree_on_a_checkpoint_that_all_can_read(tmp_path):
    """Each has its own disk: 3 to 5 are damaged on one, 2 on the other."""
    worker = "tests.training.restoring_worker"
    (first, lines), (second, silence) = processes.run_two(worker, str(tmp_path))
    for found in (first, second):
        assert found["state"] == [[1], {"row": 1}]
        assert found["none"] is None
        # Positions are no part of the model.
        assert found["model"] == 2
        assert "checkpoint 3 in" in found["3"] and found["3"].endswith("[process 1]")
        assert "checkpoint 2 in" in found["2"] and found["2"].endswith("[process 0]")
        assert found["same"] and 0.3 < found["read"] < 0.7  # what both hold, in turns
    assert first["read"] + second["read"] < 1.1
    said = [line for line in lines.splitlines() if "is damaged and not used" in line]
    assert [line.split()[1] for line in said] == ["5", "4", "3", "2", "5", "4", "3"]
    assert [line[-11:] for line in said[:4]] == 3 * ["[process 1]"] + ["[process 0]"]
    assert "is damaged" not in silence


def test_a_model_comes_from_the_newest_checkpoint_that_can_be_read(three):
    damage(three / "3", "cut off")
    with Checkpointer(three, read_only=True) as checkpointer:
        model = checkpointer.restore_model({"w": jnp.zeros(3000, jnp.int32)})
        np.testing.assert_array_equal(model["w"], 2)
        for step in (1, 2):
            damage(three / str(step), "cut off")
        with pytest.raises(DamagedCheckpoint, match=r"no checkpoint in .* can be read"):
            checkpointer.restore_model({"w": jnp.zeros(3000, jnp.int32)})


def test_a_directory_without_items_is_no_checkpoint(three):
    (three / "999").mkdir()
    with Checkpointer(three, read_only=True) as checkpointer:
        assert checkpointer.steps == [1, 2, 3]
    with Checkpointer(three, keep=1) as checkpointer:
        checkpointer.save(4, {"w": jnp.ones(2)}, {"row": 4})
        checkpointer.wait()
        assert checkpointer.steps == [4]  # and not 999 alone
    assert not (three / "999").exists() and (three / "999.aside").is_dir()


def test_checkpoints_of_later_steps_make_room(three):
    with Checkpointer(three) as checkpointer:
        checkpointer.set_aside_after(1)
        assert checkpointer.steps == [1]
        checkpointer.save(3, {"w": jnp.ones(2)}, {"row": 30})
        checkpointer.wait()
        assert checkpointer.restore({"w": jnp.ones(2)})[1] == {"row": 30}
    assert (three / "2.aside").is_dir() and (three / "3.aside").is_dir()


def test_a_script_that_ends_without_close_has_saved(tmp_path):
    script = (
        "import sys, jax.numpy as jnp\n"
        "from jaxscale.training import Checkpointer\n"
        "checkpointer = Checkpointer(sys.argv[1])\n"
        "checkpointer.save(3, {'x': jnp.arange(1 << 20)}, {'row': 1})\n"
    )
    root = Path(__file__).parents[3]
    ended = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr
    with Checkpointer(tmp_path, read_only=True) as checkpointer:
        restored, data = checkpointer.restore({"x": jnp.zeros(1 << 20, jnp.int32)})
    np.testing.assert_array_equal(restored["x"], np.arange(1 << 20))
    assert data == {"row": 1}
