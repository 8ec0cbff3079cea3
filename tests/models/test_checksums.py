"""Files beside checksums are read as they were written, or refused by name."""

import dataclasses
import subprocess

import jax
import numpy as np
import pytest
from flax import nnx

from jaxscale.models import Decoder, GenerationConfig, Tokenizer, load, preset, save
from jaxscale.models.hf.checksums import write_checksums
from tests.changed_files import outcomes


TEXT = "To be, or not to be: that is the question. " * 3
CONFIG = dataclasses.replace(
    preset("llama_tiny"), vocab_size=300, num_layers=1, d_model=16, d_ff=16
)


@pytest.fixture
def exported(tmp_path):
    """A directory of several shards, a tokenizer with a template, and checksums."""
    tokenizer = Tokenizer.train([TEXT], 300)
    template = {"chat_template": "{{ messages }}"}
    tokenizer = Tokenizer(
        tokenizer._backend, eos_token="<|endoftext|>", settings=template
    )
    model = Decoder(CONFIG, rngs=nnx.Rngs(0))
    generation = GenerationConfig(eos_ids=(298, 299), temperature=0.5)
    options = {"tokenizer": tokenizer, "generation": generation}
    save(model, tmp_path, max_shard_bytes=20_000, **options)
    write_checksums(tmp_path)
    return tmp_path


def reading(path):
    """All that reading gives, comparable."""
    model, tokenizer = load(path), Tokenizer.from_file(path)
    weights = [np.asarray(x).tobytes() for x in jax.tree.leaves(model)]
    ids = tokenizer.encode(TEXT), tokenizer.eos_id, tokenizer.chat_template
    return weights, model.config, ids, GenerationConfig.from_file(path)


def test_flipped_bits_are_refused(exported):
    files = sorted(exported.iterdir())
    assert len(files) == 10  # three shards and their index among them
    for file in files:
        found = outcomes(file, lambda: reading(exported), 4, seed=len(file.name))
        assert not found["wrong"], file
        if file.name != "checksums.sha256":
            assert found == {"refused": 4}, file


@pytest.mark.parametrize(
    "name", ["model-00001-of-00003.safetensors", "config.json", "tokenizer.json"]
)
def test_a_changed_file_is_named(exported, name):
    file = exported / name
    raw = file.read_bytes()
    file.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    with pytest.raises(ValueError, match=rf"{name} is not what was written, by its ch"):
        reading(exported)
    with pytest.raises(
        ValueError, match=r"or delete checksums\.sha256 if the change wa"
    ):
        reading(exported)


def test_the_list_is_checked_too_and_those_who_write_remove_it(exported):
    file = exported / "checksums.sha256"
    checked = ["sha256sum", "-c", "--strict", file.name]
    subprocess.run(checked, cwd=exported, check=True, capture_output=True)
    text = file.read_text()
    file.write_text(text[:-50])
    with pytest.raises(ValueError, match=r"sha256 is damaged: line 9 is no checksum; "):
        reading(exported)
    file.write_text(text)
    (exported / "chat_template.jinja").unlink()
    with pytest.raises(
        ValueError, match=r"lacks 'chat_template.jinja', which checksum"
    ):
        reading(exported)
    file.unlink()
    model, tokenizer = load(exported), Tokenizer.from_file(exported)
    for write in (
        lambda: save(model, exported),
        lambda: tokenizer.save(exported),
        lambda: GenerationConfig().save(exported),
    ):
        write_checksums(exported)
        write()
        assert not file.exists()
        reading(exported)
