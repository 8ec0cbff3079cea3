"""Generation from the command line: of a run, of a download, and what is refused."""

import dataclasses
import functools
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from jaxscale.models import (
    Decoder,
    GenerationConfig,
    Tokenizer,
    load,
    preset,
    save,
)


pytestmark = pytest.mark.usefixtures("compile_once")


@pytest.fixture
def call(command):
    return functools.partial(command, "generate")


def test_help_describes_each_setting(call):
    code, out, _ = call("--help")
    assert code == 0
    for option in ("SOURCE", "--from SOURCE", "--prompt STR", "--temperature"):
        assert option in out
    assert "Hugging Face directory" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "[Rr]equired .*SOURCE.*--prompt"),
        (["--from", "x", "--prompt", ""], "prompt is empty; give the model something"),
        (["y", "--from", "x", "--prompt", "a"], "--from x and y are two sources"),
        (
            ["--from", "x", "--prompt", "a", "--max-new-tokens", "0"],
            "max_new_tokens 0, expected at least 1",
        ),
        (
            ["--from", "nowhere", "--prompt", "a"],
            "'nowhere' is no directory, and no name of",
        ),
    ],
)
def test_mistakes_are_explained(call, arguments, message):
    code, out, err = call(*arguments)
    assert code == 2
    assert re.search(message, err), err
    assert out == ""


@pytest.fixture(scope="module")
def hugging_face(tmp_path_factory):
    """What a download holds: model, configuration, tokenizer."""
    directory = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer.train(["to be or not to be"], 300)
    config = dataclasses.replace(preset("llama_tiny"), vocab_size=300)
    save(Decoder(config, rngs=nnx.Rngs(0)), directory, tokenizer=tokenizer)
    return directory


def test_from_a_hugging_face_directory(call, hugging_face):
    common = ("--from", hugging_face, "--prompt", "to be", "--max-new-tokens", "6")
    code, likeliest, _ = call(*common, "--temperature", "0")
    assert code == 0
    model = load(hugging_face)
    tokenizer = Tokenizer.from_file(hugging_face)
    tokens = tokenizer.encode("to be")
    logits = jax.jit(lambda row: model(row)[0])
    for _ in range(6):
        row = jnp.array([tokens + [0] * (16 - len(tokens))])  # one shape, one program
        tokens.append(int(logits(row)[len(tokens) - 1].argmax()))
    # Rows of the table past the tokenizer's last token have no text.
    tokens = [token for token in tokens if token < tokenizer.vocab_size]
    assert likeliest.split() == tokenizer.decode(tokens).split()

    # generation_config.json names another token that ends the text: the third drawn.
    start = len(tokenizer.encode("to be"))
    GenerationConfig(eos_ids=(tokens[start + 2],)).save(hugging_face)
    cut = tokens[: tokens.index(tokens[start + 2], start)]
    _, shorter, _ = call(*common, "--temperature", "0")
    assert shorter.split() == tokenizer.decode(cut).split()
    GenerationConfig(eos_ids=(300,)).save(hugging_face)
    code, _, err = call(*common)
    assert code == 2 and "eos_token_id 300 of the files in" in err
    (hugging_face / "generation_config.json").unlink()

    code, one, _ = call(*common, "--temperature", "1.5", "--seed", "1")
    assert code == 0
    common = (hugging_face, *common[2:])  # the other way to name it
    code, again, told = call(*common, "--temperature", "1.5", "--seed", "1")
    assert (code, again) == (0, one)  # and no notice is among the text
    assert re.search(
        rf"devices: 8 x cpu .*reading {hugging_face} .*model: [\d,]+ parameters; "
        r"compiling for a prompt of \d+ tokens and 6 more",
        told,
    )
    assert call(*common, "--temperature", "1.5", "--seed", "2")[1] != one


def test_weights_of_8_bits(call, hugging_face):
    common = ("--from", hugging_face, "--prompt", "to be", "--max-new-tokens", "2")
    code, text, _ = call(*common, "--temperature", "0", "--quantization", "fp8")
    assert code == 0
    model = load(hugging_face, quantization="fp8")
    tokenizer = Tokenizer.from_file(hugging_face)
    tokens = tokenizer.encode("to be")
    logits = jax.jit(lambda row: model(row)[0])
    for _ in range(2):
        row = jnp.array([tokens + [0] * (16 - len(tokens))])
        tokens.append(int(logits(row)[len(tokens) - 1].argmax()))
    tokens = [token for token in tokens if token < tokenizer.vocab_size]
    assert text.split() == tokenizer.decode(tokens).split()
    code, _, err = call(*common, "--quantization", "int4")
    assert code == 2 and "int4" in err


def test_what_the_model_cannot_do(call, hugging_face):
    source = ("--from", hugging_face, "--prompt", "to be")
    code, _, err = call(*source, "--max-new-tokens", "128")
    assert code == 2
    assert re.search(r"has \d+ tokens, which with max_new_tokens 128 makes \d+,", err)
    code, _, err = call(*source, "--step", "3")
    assert code == 2 and "step 3 chooses a checkpoint of a run, but" in err
    code, _, err = call(*source, "--mesh.tensor", "8")
    assert code == 2 and "num_heads 4 is not divisible by 8" in err
    code, _, err = call(*source, "--mesh.tensor", "4")
    assert code == 2 and "num_kv_heads 2 is not divisible by 4" in err
    code, _, err = call(*source, "--mesh.tensor", "9")
    assert code == 2 and "needs 9 devices, but there are 8" in err
    code, _, err = call(*source, "--top-p", "2")
    assert code == 2 and "top_p" in err
    code, _, err = call(*source, "--top-k", "301")
    assert code == 2 and "top_k 301 exceeds the vocabulary of 300; lower it" in err


def test_a_model_whose_logits_are_not_finite(call, hugging_face, tmp_path):
    shutil.copytree(hugging_face, tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    weights = load_file(file)
    save_file({k: np.full_like(v, np.nan) for k, v in weights.items()}, file)
    code, _, err = call("--from", tmp_path / "model", "--prompt", "to be")
    assert code == 2 and "logits were not finite" in err


def test_a_tokenizer_of_another_model(call, tmp_path):
    shutil.copytree("tests/fixtures/models/llama3_gqa", tmp_path / "model")
    Tokenizer.train(["to be or not to be"], 270).save(tmp_path / "model")
    code, _, err = call("--from", tmp_path / "model", "--prompt", "to be")
    assert code == 2
    assert re.search(r"has \d+ tokens, the model knows 128; they do not belong", err)
