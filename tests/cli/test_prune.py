"""Pruning from the command line: a run of it, and what is refused."""

import dataclasses
import functools
import json
import re

import jax
import numpy as np
import pytest
from flax import nnx

from jaxscale import cli, recipes, sharding, training
from jaxscale.models import Decoder, Tokenizer, load, preset, save
from jaxscale.pruning import Masks, PruneConfig, linears
from jaxscale.recipes import TuneConfig, make_stages
from jaxscale.training import run as run_directory
from jaxscale.training.pretrained import load_model


pytestmark = pytest.mark.usefixtures("compile_once")


@pytest.fixture
def call(command):
    return functools.partial(command, "prune")


@pytest.fixture(scope="module")
def trained(tmp_path_factory, compile_once):
    """The directory of a run of a few steps on a little text."""
    folder = tmp_path_factory.mktemp("text")
    for i in range(12):
        text = f"The number {i} follows {i - 1}. " * 20
        (folder / f"{i}.txt").write_text(text)
    directory = tmp_path_factory.mktemp("run") / "dense"
    options = {
        "data.paths": folder,
        "data.seq-len": 32,
        "data.held-out-fraction": 0.3,
        "optimizer.warmup-steps": 0,
        "optimizer.learning-rate": 0.01,
        "eval-batches": 1,
        "dtype": "float32",
        "steps": 12,
        "output-dir": directory,
    }
    arguments = [str(x) for n, v in options.items() for x in (f"--{n}", v)]
    assert cli.main(["train", "llama_tiny", *arguments]) == 0
    return directory


def test_prune_trains_under_masks_and_reports(trained, command, tmp_path):
    directory = tmp_path / "pruned"
    call = functools.partial(command, "prune")
    code, out, err = call(
        *("--from", trained, "--output-dir", directory, "--sparsity", 0.75),
        *("--pattern", "tw", "--tile", 8, "--steps", 8, "--score", "sparsegpt"),
        *("--update", "--distill", 0.5),
        *("--schedule", "cubic", "--stages", 2, "--dense", "blocks.attention.*"),
    )
    assert code == 0, err
    assert "step 0: pruned to 65.6%" in out and "step 2: pruned to 75.0%" in out

    masks = Masks.load(directory / "masks.safetensors")
    assert masks.sparsity == 0.75 and list(masks) == [
        "blocks.mlp.down",
        "blocks.mlp.gate",
        "blocks.mlp.up",
    ]
    mesh = sharding.make_mesh(sharding.MeshConfig(fsdp=-1))
    with jax.set_mesh(mesh):
        model = load_model(directory, mesh, sharding.fsdp())
    for name, layer in linears(model).items():
        weight = np.asarray(layer.kernel[...])
        kept = masks.kept.get(name, np.ones(weight.shape, bool))
        assert (weight[~kept] == 0).all() and (weight[kept] != 0).all()

    losses = re.search(
        r"dense ([\d.]+), pruned ([\d.]+), trained .* ([\d.]+), dense .* ([\d.]+);",
        out,
    )
    assert losses is not None
    dense, pruned, tuned, control = map(float, losses.groups())
    assert control < min(dense, tuned)  # trained further, and with all weights
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    evaluations = [r["eval_loss"] for r in map(json.loads, lines) if "eval_loss" in r]
    assert f"{evaluations[-1]:.3f}" == f"{tuned:.3f}" and tuned < pruned
    page = (directory / "report.html").read_text()
    shown = [float(x) for x in re.findall(r">(\d\.\d{4})</td>", page)]
    assert shown[:4] == pytest.approx([dense, pruned, tuned, control], abs=1e-3)
    assert "blocks.mlp.up.1" in page and "75.0%" in page
    # Histogram and two pictures; loss, rate, norm and speed.
    assert page.count("<svg") == 7
    assert "What blocks.mlp." in page and "Layers that lost everything: none." in page
    assert "of the chosen; left out by choice: blocks.attention.*" in page
    assert "dense, trained as long" in page
    assert "optimizer.learning_rate" in page and "<td>fsdp 8, rules fsdp_tp" in page

    # What is exported has the zeros of the masks.
    code, _, err = command("export", directory, tmp_path / "hf")
    assert code == 0, err
    exported = linears(load(tmp_path / "hf"))
    for name in masks:
        weight = np.asarray(exported[name].kernel[...])
        np.testing.assert_array_equal(weight != 0, masks.kept[name])

    # The directory is that of a run; its model says the same in the sparse form.
    texts = []
    for form in ("--sparse", "--no-sparse"):
        options = ["--prompt", "The number", "--temperature", 0, "--max-new-tokens", 4]
        code, out, err = command("generate", "--from", directory, form, *options)
        assert code == 0, err
        texts.append(out)
    assert texts[0] == texts[1] != ""
    code, out, err = call("--from", directory, "--tile", 8)
    assert code == 2 and "holds a model that is sparse already; prune the dense" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sparsity", "1"], "sparsity 1.0, expected at least 0 and below 1"),
        (["--sparsity", "-0.5"], "sparsity -0.5, expected at least 0 and below 1"),
        (["--pattern", "tile"], "invalid choice|expected one of|choose"),
        (["--k-granularity", "3"], "k_granularity 3, expected 1, 8 or 64"),
        (["--distill", "2"], "share 2.0, expected a part of the loss, 0 to 1"),
        (["--steps", "0"], "steps 0, expected at least 1"),
        (["--learning-rate", "0"], "learning_rate 0.0 must be > 0"),
        (
            ["--schedule", "paper", "--steps", "10"],
            "half of them are fewer than the 8 stages of the schedule paper",
        ),
        (["--tile", "24"], "tile 24 does not divide the 16 columns of layer blocks"),
        (
            ["--tile", "8", "--dense", "blocks.mlp.upp"],
            r"dense 'blocks.mlp.upp' is no layer of the model \(did you mean",
        ),
        (["--tile", "8", "--step", "5"], "there is no checkpoint of step 5"),
    ],
)
def test_mistakes_are_explained(trained, call, tmp_path, arguments, message):
    directory = tmp_path / "out"
    code, _, err = call("--from", trained, "--output-dir", directory, *arguments)
    assert code == 2
    assert re.search(message, err), err
    assert not directory.exists()


def test_a_pretrained_decoder_is_pruned_on_text_of_ones_own(trained, command, tmp_path):
    weights, directory = tmp_path / "hf", tmp_path / "pruned"
    config = dataclasses.replace(preset("llama_tiny"), vocab_size=300, num_layers=1)
    tokenizer = Tokenizer.train(["The number 1 follows 0. "], 300)
    save(Decoder(config, rngs=nnx.Rngs(5)), weights, tokenizer=tokenizer)
    text = run_directory.read_config(trained).data.paths[0]
    options = [
        *("--from", weights, "--output-dir", directory, "--steps", 2),
        *("--data.paths", text, "--data.seq-len", 32, "--data.held-out-fraction", 0.3),
        *("--score", "magnitude", "--pattern", "tw"),
    ]
    code, _, err = command("prune", *options, "--step", 5)
    assert code == 2 and "step 5 is that of a checkpoint, and --from" in err
    code, out, err = command("prune", *options)
    assert code == 0, err
    assert "dense trained as long" in out
    assert "tiles of 16 columns: those of 128 do not divide the layers" in out
    assert re.search(r"pruned \d\.\d+; both on \d+ of \d+ held-out batches", out)
    run = run_directory.read_config(directory)
    assert run.source == str(weights) and run.optimizer.learning_rate == 3e-5
    # The weights are those of the source: training at this rate hardly moves them.
    mesh = sharding.make_mesh(sharding.MeshConfig(fsdp=-1))
    with jax.set_mesh(mesh):
        model = load_model(directory, mesh, sharding.fsdp())
    masks = Masks.load(directory / "masks.safetensors")
    before = linears(load(weights))
    for name, layer in linears(model).items():
        kept = masks.kept[name]
        weight = np.asarray(layer.kernel[...])
        assert (weight[~kept] == 0).all() and (weight[kept] != 0).all()
        difference = weight[kept] - np.asarray(before[name].kernel[...])[kept]
        assert 0 < np.abs(difference).max() < 1e-3


def test_what_is_no_model_is_refused(call, tmp_path):
    code, _, err = call("--from", tmp_path)
    assert code == 2 and "config.json" in err
    code, _, err = call("--from", tmp_path / "absent")
    assert code == 2 and "is no directory, and no name of a model" in err
    code, _, err = call("--steps", 5)
    assert code == 2 and "--from" in err


def test_a_directory_in_use_is_refused(trained, call):
    code, _, err = call("--from", trained, "--output-dir", trained, "--tile", 8)
    assert code == 2 and "already holds a run" in err


def test_stages_fit_into_half_of_the_steps():
    prune = PruneConfig(sparsity=0.75)
    cubic = TuneConfig(schedule="cubic", stages=4)
    stages = make_stages(prune, cubic, 80)
    assert [stage.step for stage in stages] == [0, 10, 20, 30]
    assert stages[-1].sparsity == 0.75


def test_the_schedule_of_the_tuning_is_not_that_of_the_dense_run(tmp_path):
    optimizer = training.OptimizerConfig(schedule_steps=4000)
    dense = dataclasses.replace(recipes.from_preset("llama_tiny"), optimizer=optimizer)
    tuned = recipes.tuning_config(
        dense,
        steps=100,
        learning_rate=2.0,
        mesh=sharding.MeshConfig(),
        output_dir=tmp_path,
    )
    schedule = training.make_schedule(tuned.optimizer, tuned.steps)
    np.testing.assert_allclose(float(schedule(100)), 0.2, rtol=1e-5)


def test_a_resumed_run_does_not_stretch_its_schedule(trained, command):
    """Refused in a line before anything is written: the learning rate makes no jump."""
    config = run_directory.read_config(trained)
    assert config.optimizer.schedule != "constant"
    settings = (trained / "run.json").read_bytes()
    code, _, err = command(
        *("train", "llama_tiny", "--data.paths", config.data.paths[0]),
        *("--data.seq-len", 32, "--data.held-out-fraction", 0.3, "--eval-batches", 1),
        *("--optimizer.warmup-steps", 0, "--optimizer.learning-rate", 0.01),
        *("--dtype", "float32", "--output-dir", trained, "--steps", 24, "--resume"),
    )
    assert code == 2
    assert "set optimizer.schedule_steps to 12 to keep the old one" in err
    assert (trained / "run.json").read_bytes() == settings
