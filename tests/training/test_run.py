"""Output directories come back as written, and those of others are refused."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
from flax import nnx

from jaxscale.models import Decoder, DecoderConfig, Tokenizer, preset
from jaxscale.sharding import REPLICATED, MeshConfig, fsdp, make_mesh
from jaxscale.training import (
    Checkpointer,
    DataConfig,
    TextData,
    TokenCorpus,
    TrainConfig,
)
from jaxscale.training import run as run_directory
from jaxscale.training.lock import LOCK_FILE, locked
from jaxscale.training.pretrained import load_model
from tests.changed_files import outcomes, replaced


RUN = TrainConfig(
    model=preset("llama3_1_8b"), data=DataConfig(paths=("a", "b"), tokenizer="t")
)


def text_of(*documents):
    return TextData(
        tokenizer=Tokenizer.train(["to be or not to be"], 260),
        train=TokenCorpus.from_ids(documents),
        held_out=None,
    )


def save(run, step):
    """A checkpoint as far as the directory tells."""
    for item in ("state", "data", "config"):
        (run / "checkpoints" / str(step) / item).mkdir(parents=True)


def test_settings_that_are_nested_too_deeply_are_an_error_in_a_line(tmp_path):
    (tmp_path / "run.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"run.json is damaged: it is nested too deep"):
        run_directory.read_config(tmp_path)


def test_a_run_that_fails_before_its_first_checkpoint_gives_its_place_up(tmp_path):
    def fail():
        with run_directory.given_up_on_failure(tmp_path):
            raise MemoryError

    run_directory.write(tmp_path, RUN, text_of([1, 2]))
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(MemoryError):
        fail()
    corrected = dataclasses.replace(RUN, model=preset("llama_1b"))
    run_directory.check_free(tmp_path, corrected, resume=False)
    run_directory.write(tmp_path, corrected, text_of([1, 2]))
    assert not (tmp_path / "run.failed.json").exists()
    save(tmp_path, 3)
    with pytest.raises(MemoryError):
        fail()
    with pytest.raises(ValueError, match="already holds a run; add --resume"):
        run_directory.check_free(tmp_path, corrected, resume=False)


def test_who_begins_a_run_holds_its_directory_until_it_has_trained(tmp_path):
    """Also a script that takes no lock itself."""
    run_directory.write(tmp_path, RUN, text_of([1, 2]))
    assert (tmp_path / LOCK_FILE).exists()
    with locked(tmp_path):  # as `fit`
        pass
    assert (tmp_path / run_directory.RUN_FILE).exists()
    assert not (tmp_path / LOCK_FILE).exists()


def test_a_model_is_loaded_as_it_was_trained_or_to_generate(tmp_path):
    config = TrainConfig(
        model=preset("llama_tiny"),
        data=DataConfig(vocab_size=256, seq_len=32),
        remat="full",
        dtype="float32",
    )
    model = Decoder(preset("llama_tiny"), rngs=nnx.Rngs(3))
    run_directory.write(tmp_path, config, text_of([1, 2]))
    with Checkpointer(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(1, {"model": model}, {})
    mesh = make_mesh(MeshConfig(fsdp=-1))
    with jax.set_mesh(mesh):
        trained = load_model(tmp_path, mesh, fsdp(), like=config)
        plain = load_model(tmp_path, mesh, fsdp())
    assert (trained.remat, trained.scan_layers) == ("full", False)
    assert (plain.remat, plain.scan_layers) == ("none", True)
    for found in (trained, plain):
        for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(model), strict=True):
            np.testing.assert_array_equal(x, y)


def test_settings_and_tokenizer_come_back_as_they_were(tmp_path):
    run = tmp_path / "runs" / "one"
    run_directory.write(run, RUN, text_of([1, 2]))
    assert run_directory.is_run(run)
    assert not run_directory.is_run(tmp_path / "runs")
    assert isinstance(RUN.model, DecoderConfig) and RUN.model.rope_scaling is not None
    assert run_directory.read_config(run) == RUN
    assert Tokenizer.from_file(run).vocab_size == 260


@pytest.fixture
def small(tmp_path):
    """The directory of a run of a small model with a checkpoint, and its settings."""
    config = TrainConfig(
        model=dataclasses.replace(preset("llama_tiny"), num_layers=1, window=16),
        data=DataConfig(vocab_size=256, seq_len=32),
        dtype="float32",
    )
    run_directory.write(tmp_path, config, text_of([1, 2]))
    settings = run_directory.checkpoint_settings(config)
    with Checkpointer(tmp_path / "checkpoints", config=settings) as checkpoints:
        checkpoints.save(1, {"model": Decoder(config.model, rngs=nnx.Rngs(3))}, {})
    return tmp_path, config


def loaded(directory):
    """What a directory gives to those who generate, comparable."""
    mesh = make_mesh({"data": 1}, jax.devices()[:1])
    with jax.set_mesh(mesh):
        model = load_model(directory, mesh, REPLICATED)
    ids = Tokenizer.from_file(directory).encode("to be or not to be")
    return model.config, [np.asarray(x).tobytes() for x in jax.tree.leaves(model)], ids


def test_no_flipped_bit_gives_another_model_or_other_ids(small):
    directory, _ = small
    found = outcomes(directory / "run.json", lambda: loaded(directory), 25, seed=1)
    assert not found["wrong"] and found["refused"] > 8
    found = outcomes(directory / "tokenizer.json", lambda: loaded(directory), 2)
    assert found == {"refused": 2}


@pytest.mark.parametrize(
    ("name", "value"), [("rope_theta", 9e9), ("window", 8), ("norm_eps", 1e-4)]
)
def test_settings_that_have_changed_since_the_checkpoint_are_named(small, name, value):
    directory, config = small
    was = getattr(config.model, name)
    model = dataclasses.replace(config.model, **{name: value})
    run_directory.write(
        directory, dataclasses.replace(config, model=model), text_of([1, 2])
    )
    with pytest.raises(
        ValueError,
        match=rf"checkpoint 1 in .* was made with model.{name} {was} \(now {value}\): "
        "the settings of its run, run.json, have changed since; bring the file back",
    ):
        loaded(directory)
    shutil.rmtree(directory / "checkpoints")
    with Checkpointer(directory / "checkpoints") as checkpoints:  # without settings
        checkpoints.save(1, {"model": Decoder(config.model, rngs=nnx.Rngs(3))}, {})
    assert loaded(directory)[0] == model


def test_the_schedule_to_keep_is_that_of_the_checkpoint(tmp_path):
    """A start with another plan that ended before it saved anything binds nobody."""
    for step, planned in ((400, 1000), (500, 2000)):
        save(tmp_path, step)
        settings = tmp_path / "checkpoints" / str(step) / "config" / "metadata"
        settings.write_text(json.dumps({"schedule_steps": planned}))
    last = dataclasses.replace(RUN, steps=3000)
    run_directory.write(tmp_path, last, text_of([1, 2]))

    def refused(steps, step=None):
        config = dataclasses.replace(RUN, steps=steps, step=step)
        try:
            run_directory.check_free(tmp_path, config, resume=True)
        except ValueError as error:
            return str(error)
        return ""

    assert not refused(2000) and not refused(1000, step=400)
    assert "schedule of this run was made for 2000" in refused(3000)
    assert "schedule of this run was made for 1000" in refused(2000, step=400)
    settings.write_text("")  # damaged: the run goes on from the one before
    assert not refused(1000)
    settings.write_text(json.dumps({"schedule_steps": ["2000"]}))
    assert not refused(1000)


def test_damaged_or_foreign_files_are_refused(tmp_path):
    file = tmp_path / "run.json"
    for damaged in ("{", "[]", '{"config": {}}'):
        file.write_text(damaged)
        with pytest.raises(ValueError, match=r"run\.json is damaged"):
            run_directory.read_config(tmp_path)
    config = run_directory.to_dict(RUN) | {"speed": 1}
    file.write_text(json.dumps({"config": config, "text": ""}))
    with pytest.raises(ValueError, match=r"TrainConfig has no field 'speed'; .* anoth"):
        run_directory.read_config(tmp_path)


@pytest.mark.parametrize(
    ("way", "other", "message"),
    [
        ((), [], "run.json is damaged: it lacks the settings"),
        (("config",), None, "run.json is damaged: it lacks the settings"),
        (("config",), {}, "run.json: model is missing, expected a value"),
        (("config", "model"), None, r"model is None, expected DecoderConfig"),
        (("config", "model"), {}, "model.vocab_size is missing, expected a value"),
        (
            ("config", "model", "num_layers"),
            "2",
            "model.num_layers is '2', expected in",
        ),
        (
            ("config", "model", "rope_theta"),
            [1.0],
            r"rope_theta is \[1.0\], expected fl",
        ),
        (("config", "model", "rope_scaling"), 8, "rope_scaling is 8, expected RopeSca"),
        (
            ("config", "model", "parallel_block"),
            1,
            "parallel_block is 1, expected bool",
        ),
        (("config", "model", "norm"), -1, "model.norm is -1, expected typing.Literal"),
        (("config", "model", "global_layers"), {"a": [1]}, "global_layers is .* tuple"),
        (("config", "data", "paths"), [None], "data.paths is None, expected str"),
        (("config", "lora"), "x", "lora is 'x', expected LoraConfig"),
        (("config", "optimizer", "b1"), True, "optimizer.b1 is True, expected float"),
        (("config", "steps"), 10.5, r"steps is 10.5, expected int"),
        (("config", "zero"), True, "zero is True, expected typing.Literal"),
    ],
)
def test_fields_of_other_types_are_named(tmp_path, way, other, message):
    run_directory.write(tmp_path, RUN, text_of([1, 2]))
    file = tmp_path / "run.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps(replaced(content, way, other)))
    with pytest.raises(ValueError, match=message):
        run_directory.read_config(tmp_path)


def test_a_directory_is_free_or_resumed_or_refused(tmp_path):
    check = run_directory.check_free
    for resume in (False, True):
        check(tmp_path / "new", RUN, resume=resume)
    (tmp_path / "empty").mkdir()
    check(tmp_path / "empty", RUN, resume=False)

    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("")
    for resume in (False, True):
        with pytest.raises(ValueError, match="other holds files that are no run"):
            check(tmp_path / "other", RUN, resume=resume)

    with pytest.raises(ValueError, match=r"thesis\.tex is a file; choose a directory"):
        check(tmp_path / "other" / "thesis.tex", RUN, resume=False)

    with pytest.raises(ValueError, match="run cannot be made: Not a directory; choose"):
        below = tmp_path / "other" / "thesis.tex" / "run"
        run_directory.write(below, RUN, text_of([1, 2]))

    run = tmp_path / "run"
    run_directory.write(run, RUN, text_of([1, 2]))
    with pytest.raises(ValueError, match="already holds a run; add --resume"):
        check(run, RUN, resume=False)
    wider = dataclasses.replace(RUN, model=preset("llama3_8b"))
    check(run, wider, resume=True)  # nothing is saved yet
    save(run, 500)
    check(run, RUN, resume=True)
    moved = dataclasses.replace(RUN.data, paths=("./a", "b/../b"), tokenizer="x/../t")
    check(run, dataclasses.replace(RUN, data=moved), resume=True)
    longer = dataclasses.replace(RUN, steps=2000, mesh=MeshConfig(fsdp=2))
    with pytest.raises(ValueError, match=r"optimizer\.schedule_steps to 1000"):
        check(run, longer, resume=True)
    kept = dataclasses.replace(RUN.optimizer, schedule_steps=1000)
    check(run, dataclasses.replace(longer, optimizer=kept), resume=True)
    other = dataclasses.replace(RUN, data=dataclasses.replace(RUN.data, seed=5))
    with pytest.raises(ValueError, match=r"its data\.seed is 0, this one's 5; use"):
        check(run, other, resume=True)
    plain = dataclasses.replace(RUN, model=preset("llama3_8b"))
    with pytest.raises(ValueError, match=r"its model\.max_seq_len is 131072"):
        check(run, plain, resume=True)
    (run / "checkpoints" / "9999").mkdir()  # no item in it: no checkpoint
    with pytest.raises(ValueError, match=r"step 400 must be a checkpoint .* \[500\]"):
        check(run, dataclasses.replace(RUN, step=400), resume=True)
    with pytest.raises(
        ValueError, match=r"step 500 must be .* that --resume continues"
    ):
        check(run, dataclasses.replace(RUN, step=500), resume=False)
    save(run, 1500)
    check(run, dataclasses.replace(RUN, step=500), resume=True)
    with pytest.raises(ValueError, match=r"steps 1000, but .* has done 1500 already"):
        check(run, RUN, resume=True)


def test_a_continued_run_needs_its_text(tmp_path):
    run_directory.check_text(tmp_path, text_of([1, 2]))
    run_directory.write(tmp_path, RUN, text_of([1, 2]))
    run_directory.check_text(tmp_path, text_of([1, 3]))  # nothing is saved yet
    save(tmp_path, 3)
    run_directory.check_text(tmp_path, text_of([1, 2]))
    with pytest.raises(ValueError, match="belongs to a run on other text: the files"):
        run_directory.check_text(tmp_path, text_of([1, 3]))
