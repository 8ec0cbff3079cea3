"""Weights in and out by command: ``jaxscale train --from`` and ``jaxscale export``."""

import dataclasses
import json
import random
import re
import shutil

import jax
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from jaxscale.inference import LLM, Encoder, EngineConfig, SamplingParams
from jaxscale.models import (
    Decoder,
    EncoderModel,
    GenerationConfig,
    Tokenizer,
    encoder_preset,
    load,
    preset,
    save,
)
from jaxscale.sharding import REPLICATED
from jaxscale.training import Checkpointer
from jaxscale.training import run as run_directory
from jaxscale.training.pretrained import load_model


pytestmark = pytest.mark.usefixtures("compile_once")

TEXTS = [f"The number {i} follows {i - 1}. " for i in range(24)]
SMALL = ["--data.seq-len", "32", "--dtype", "float32"]
HELD_OUT = ["--data.held-out-fraction", "0.3"]
NONE_HELD_OUT = ["--data.held-out-fraction", "0"]


@pytest.fixture(scope="module")
def notes(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "notes.jsonl"
    file.write_text("".join(json.dumps({"text": t * 5}) + "\n" for t in TEXTS))
    return file


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    """A Hugging Face directory of a small decoder with its tokenizer."""
    directory = tmp_path_factory.mktemp("decoder")
    config = dataclasses.replace(preset("llama_tiny"), vocab_size=300, num_layers=1)
    model = Decoder(config, rngs=nnx.Rngs(5))
    generation = GenerationConfig(eos_ids=(298, 299), do_sample=True, top_p=0.9)
    tokenizer = Tokenizer.train(TEXTS, 300)
    save(model, directory, tokenizer=tokenizer, generation=generation)
    return directory


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """A Hugging Face directory of a small encoder, without a head."""
    directory = tmp_path_factory.mktemp("encoder")
    names = ("[PAD]", "[CLS]", "[SEP]", "[MASK]")
    config = dataclasses.replace(
        encoder_preset("bert_tiny"), vocab_size=300, num_layers=1
    )
    model = EncoderModel(config, rngs=nnx.Rngs(5))
    save(model, directory, tokenizer=Tokenizer.train(TEXTS, 300, names))
    return directory


@pytest.fixture(scope="module")
def reviews(tmp_path_factory):
    """Texts whose label is decided by one of their words."""
    draw = random.Random(0)
    file = tmp_path_factory.mktemp("labels") / "reviews.jsonl"
    records = []
    for i in range(60):
        words = [draw.choice(["the", "a", "one", "film", "plot"]) for _ in range(4)]
        words.insert(draw.randrange(5), ("awful", "lovely")[i % 2])
        records.append({"body": " ".join(words), "stars": (1, 5)[i % 2]})
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def tensors(directory):
    return safetensors.numpy.load_file(directory / "model.safetensors")


def continued(directory):
    """The likeliest continuation by the model of a directory."""
    return continuations(directory)[0].tokens


def scores(directory, lora=None, **options):
    """Its log-probabilities; one each for several adapters."""
    found = continuations(directory, lora, **options)
    return np.array([[x.logprob for x in each.logprobs] for each in found])


def continuations(directory, lora=None, **options):
    config = EngineConfig.for_prompts([3], 4)
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=0)
    with LLM.from_pretrained(
        directory, dtype="float32", config=config, quiet=True, **options
    ) as llm:
        prompts = [[5, 6, 7]] * len(lora or [None])
        results = llm.generate(prompts, params, lora=lora, progress=False)
    return [result.continuations[0] for result in results]


def test_weights_go_in_and_come_out(decoder, notes, command, tmp_path):
    """Steps that change nothing leave the file as it was; steps that do continue it."""
    run, out = tmp_path / "run", tmp_path / "out"
    options = [*SMALL, *NONE_HELD_OUT, "--data.paths", notes]
    options += ["--optimizer.weight-decay", "0"]
    still = ["--optimizer.learning-rate", "1e-30", "--steps", "1"]
    code, _, err = command(
        "train", "--from", decoder, *options, *still, "--output-dir", run
    )
    assert code == 0, err
    assert json.loads((run / "run.json").read_text())["config"]["source"] == str(
        decoder
    )
    code, told, err = command("export", run, out)
    assert code == 0, err
    assert "read back and compared" in told
    before, after = tensors(decoder), tensors(out)
    assert before.keys() == after.keys()
    for name, value in before.items():
        np.testing.assert_array_equal(after[name], value)
    for name in ("tokenizer.json", "generation_config.json", "config.json"):
        wrote, had = ((x / name).read_text() for x in (out, decoder))
        assert json.loads(wrote) == json.loads(had)

    assert continued(run) == continued(out)

    # On from the run itself, and once more from its own checkpoint.
    second = tmp_path / "second"
    for steps, resume in ((2, []), (3, ["--resume"])):
        arguments = [*options, "--steps", steps, "--optimizer.schedule", "constant"]
        code, told, err = command(
            *("train", f"--from={run}", *arguments, *resume, "--output-dir", second)
        )
        assert code == 0, err
    assert "start after step 2 of 3" in told
    mesh = jax.make_mesh((1,), ("data",))
    moved = load_model(second, mesh, REPLICATED)
    original = load(decoder)
    change = abs(moved.embed.table[...] - original.embed.table[...])
    assert 0 < change.max() < 1e-3  # three steps of 3e-5, from the weights of the file

    code, _, err = command("export", run, out)
    assert code == 2 and "is in use; choose a new directory" in err
    code, _, err = command("export", decoder, tmp_path / "other")
    assert code == 2 and "is no directory of a run" in err
    code, _, err = command("export", run, tmp_path / "other", "--step", 9)
    assert code == 2 and "no checkpoint of step 9" in err


def test_a_type_is_chosen_and_files_are_split(decoder, notes, command, tmp_path):
    run, out = tmp_path / "run", tmp_path / "out"
    code, _, err = command(
        *("train", "--from", decoder, *SMALL, *NONE_HELD_OUT, "--data.paths", notes),
        *("--steps", 1, "--output-dir", run),
    )
    assert code == 0, err
    options = ["--param-dtype", "bfloat16", "--max-shard-gb", 3e-5]
    code, _, err = command("export", run, out, *options)
    assert code == 0, err
    assert len(list(out.glob("model-*.safetensors"))) > 1
    assert load(out).embed.table[...].dtype == "bfloat16"


def test_adapters_are_trained_saved_and_merged(decoder, notes, command, tmp_path):
    run, out = tmp_path / "run", tmp_path / "out"
    arguments = [
        *("train", "--from", decoder, *SMALL, *NONE_HELD_OUT, "--data.paths", notes),
        *("--lora.rank", 2, "--lora.alpha", 6, "--lora.layers", "query", "mlp.*up"),
        *("--optimizer.learning-rate", 0.01, "--optimizer.schedule", "constant"),
    ]
    code, _, err = command(*arguments, "--output-dir", run, "--steps", 2)
    assert code == 2 and "lora.layers 'mlp.*up' is no linear layer" in err
    arguments[arguments.index("mlp.*up")] = "*.up"
    here = ["--output-dir", run]
    split = ["--mesh.fsdp", 4, "--mesh.tensor", 2]
    for steps, layout in (
        (2, split),
        (4, ["--mesh.fsdp", 4, "--mesh.data", 2, "--data.batch-size", 8, "--resume"]),
    ):
        code, _, err = command(*arguments, *here, "--steps", steps, *layout)
        assert code == 0, err
    whole = tmp_path / "whole"
    code, _, err = command(*arguments, *split, "--steps", 4, "--output-dir", whole)
    assert code == 0, err
    losses = [
        {r["step"]: r["loss"] for r in map(json.loads, lines) if "loss" in r}
        for lines in (
            (path / "metrics.jsonl").read_text().splitlines() for path in (run, whole)
        )
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)

    # Checkpoints hold the adapters, two arrays for each of two layers, and no more.
    with Checkpointer(run / "checkpoints", read_only=True) as checkpoints:
        text = (checkpoints.directory / "4" / "digests" / "metadata").read_text()
    names = {name for name in json.loads(text)["arrays"] if name.startswith("model.")}
    layers = ("attention.query", "mlp.up")
    assert names == {f"model.blocks.{x}.low_rank.{y}" for x in layers for y in "ab"}

    code, _, err = command("export", run, out)
    assert code == 0, err
    before, after = tensors(decoder), tensors(out)
    changed = {n for n in before if (before[n] != after[n]).any()}
    assert changed == {
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.mlp.up_proj.weight",
    }
    for name in changed:  # rank 2
        values = np.linalg.svd(after[name] - before[name], compute_uv=False)
        assert values[1] > 1e-4 and values[2] < 1e-6

    # Beside the model that they were trained on, and merged into it.
    served = {"lora": ["notes", None], "lora_modules": {"notes": run}}
    found, without = scores(decoder, **served)
    np.testing.assert_allclose(found, scores(out)[0], atol=1e-5)
    assert np.abs(found - without).max() > 1e-4

    # Files that hold the same weights otherwise will do; other weights will not.
    settings = json.loads((run / "run.json").read_text())
    moved = shutil.copytree(decoder, tmp_path / "moved")
    save(load(decoder), moved, max_shard_bytes=30_000)
    settings["config"]["source"] = str(moved)
    (run / "run.json").write_text(json.dumps(settings))
    code, _, err = command("export", run, tmp_path / "again")
    assert code == 0, err
    other = load(decoder)
    other.norm.scale[...] = other.norm.scale[...].at[3].add(1e-3)
    save(other, moved)
    told = (
        rf"has adapters of other weights than source {moved} holds now \(norm"
        r"\.scale differ\); bring back the weights that they were trained on, or"
    )
    arguments[2] = moved
    resumed = [*arguments, *here, "--steps", 5, "--resume"]
    for words in (["export", run, tmp_path / "wrong"], resumed):
        code, _, err = command(*words)
        assert code == 2 and re.search(told, err.replace("\n", " ")), err
    message = f"adapter 'notes': .* other weights than source {moved} holds"
    with pytest.raises(ValueError, match=message):
        continuations(moved, **served)
    with pytest.raises(ValueError, match=r"use LLM\.from_pretrained"):
        LLM(load(decoder), lora_modules={"notes": run})
    settings["config"]["lora"]["rank"] = 0
    (run / "run.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match="is of a run without adapters"):
        continuations(decoder, **served)


def test_adapters_need_weights(command, tmp_path):
    code, _, err = command(
        "train", "llama_tiny", "--lora.rank", 2, "--output-dir", tmp_path / "run"
    )
    assert code == 2 and "lora.rank 2 adapts a model that has weights; name them" in err
    code, _, err = command(
        *("train", "llama_tiny", "--lora.rank", 2, "--mesh.axis-type", "explicit")
    )
    assert code == 2 and "run neither in a pipeline nor on explicit meshes" in err


def test_an_encoder_learns_to_classify(encoder, reviews, command, tmp_path):
    run, out = tmp_path / "run", tmp_path / "out"
    arguments = [
        *("train", "--from", encoder, *SMALL, *HELD_OUT, "--data.paths", reviews),
        *("--data.text-field", "body", "--data.label-field", "stars"),
        *("--data.batch-size", 8, "--optimizer.learning-rate", 0.01),
        *("--optimizer.schedule", "constant", "--output-dir", run),
    ]
    code, told, err = command(*arguments, "--steps", 15)
    assert code == 0, err
    assert "with the labels 1, 5" in told and f"jaxscale export {run}" in told
    code, told, err = command(*arguments, "--steps", 60, "--resume")
    assert code == 0, err
    assert "start after step 15 of 60" in told and "2 of 2 held-out batches" in told
    found = re.search(r"held-out accuracy ([\d.]+)%", told)
    assert found is not None and float(found[1]) > 75  # 10 of 13 texts
    code, _, err = command("export", run, out)
    assert code == 0, err
    config = json.loads((out / "config.json").read_text())
    assert config["id2label"] == {"0": "1", "1": "5"}
    texts = ["an awful plot", "lovely film"]
    answers = Encoder.from_pretrained(out).predict(texts)
    assert np.argmax(answers, axis=-1).tolist() == [0, 1]
    np.testing.assert_allclose(
        Encoder.from_pretrained(run).predict(texts), answers, rtol=1e-5, atol=1e-6
    )
    with pytest.raises(ValueError, match=r"holds an encoder, .* Encoder"):
        LLM.from_pretrained(run)
    code, _, err = command("generate", "--from", run, "--prompt", "x")
    assert code == 2 and "trained an encoder, which does not generate" in err


@pytest.mark.exhaustive  # as labels by command, and hidden tokens through fit
def test_an_encoder_learns_hidden_tokens(encoder, notes, command, tmp_path):
    run = tmp_path / "run"
    code, told, err = command(
        *("train", "--from", encoder, *SMALL, *HELD_OUT, "--data.paths", notes),
        *("--steps", 2, "--output-dir", run),
    )
    assert code == 0, err
    assert "2 steps, held-out loss" in told
    head = run_directory.read_config(run).head
    assert head is not None and head.kind == "masked_lm"
    code, _, err = command("export", run, tmp_path / "out")
    assert code == 0, err
    assert load(tmp_path / "out").head.config.kind == "masked_lm"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--from"], "--from needs the directory of a model"),
        (["--from", "--steps", 3], "--from needs the directory of a model"),
        (["--from", "nowhere"], "'nowhere' is no directory, and no name of a model"),
        (["--from", "some/one"], "'some/one' is no directory here, and could not be"),
        (["llama_tiny", "--from", "{decoder}"], "takes the place of the run 'llama_"),
        (
            ["--from", "{decoder}", "--model.d-model", 64],
            "model.d_model is 64, but the weights of source .* made with 32; leave",
        ),
        (
            ["--from", "{decoder}", "--data.label-field", "stars"],
            "data.label_field 'stars' is for encoders",
        ),
        (
            ["--from", "{encoder}", "--data.label-field", "stars"],
            "data.label_field is given without data.paths",
        ),
        (
            ["--from", "{encoder}", "--data.pair-field", "other"],
            "pair_field 'other' is for texts with labels",
        ),
        (
            [
                *("--from", "{encoder}", "--data.label-field", "star"),
                *("--data.paths", "{reviews}", "--data.text-field", "body"),
            ],
            r"reviews.jsonl:1 has no field 'star', only \['body', 'stars'\]",
        ),
    ],
)
def test_mistakes_are_explained(
    command, tmp_path, monkeypatch, decoder, encoder, reviews, arguments, message
):
    monkeypatch.chdir(tmp_path)
    places = {"decoder": decoder, "encoder": encoder, "reviews": reviews}
    code, _, err = command("train", *(str(a).format(**places) for a in arguments))
    assert code == 2
    assert re.search(message, err), err
    assert list(tmp_path.iterdir()) == []


def test_weights_of_another_shape_leave_nothing_behind(decoder, command, tmp_path):
    wrong = shutil.copytree(decoder, tmp_path / "wrong")
    values = json.loads((wrong / "config.json").read_text())
    values["intermediate_size"] *= 2
    (wrong / "config.json").write_text(json.dumps(values))
    code, _, err = command("train", "--from", wrong, "--output-dir", tmp_path / "run")
    assert code == 2
    assert "mlp.gate_proj.weight' of" in err and "config.json is of another" in err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            '{"text": "a", "label": null}\n',
            r"a\.jsonl:1: field 'label' is None, expected a name, a number, or a list",
        ),
        ('{"text": "a", "label": 1}\n', r"all labels are \{1\}, which leaves nothing"),
        (
            '{"text": "a", "label": 1}\n{"text": "b", "label": "x"}\n',
            r"labels are of the types \['int', 'str'\]; write all of them alike",
        ),
    ],
)
def test_unusable_labels_are_named(encoder, command, tmp_path, content, message):
    file = tmp_path / "a.jsonl"
    file.write_text(content)
    code, _, err = command(
        *("train", "--from", encoder, "--data.paths", file),
        *("--data.label-field", "label", "--output-dir", tmp_path / "run"),
    )
    assert code == 2
    assert re.search(message, err), err
    assert not (tmp_path / "run").exists()
