"""A vocabulary that does not divide over the devices, pruned, compared and exported."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from jaxscale import recipes
from jaxscale.models import Decoder, Tokenizer, load, preset, save
from jaxscale.pruning import PruneConfig
from jaxscale.recipes.prune import TuneConfig, open_source
from jaxscale.recipes.prune_report import finish
from jaxscale.sharding import MeshConfig


pytestmark = pytest.mark.usefixtures("compile_once")

V = 301
TEXT = "".join(f"The number {i} follows {i - 1}. " for i in range(400))


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A Hugging Face directory, and the text that it is tuned on."""
    directory = tmp_path_factory.mktemp("source")
    config = dataclasses.replace(preset("llama_tiny"), vocab_size=V, num_layers=1)
    save(
        Decoder(config, rngs=nnx.Rngs(5)),
        directory / "model",
        tokenizer=Tokenizer.train([TEXT], V),
    )
    for i in range(4):
        (directory / f"{i}.txt").write_text(TEXT[i * 2000 : (i + 1) * 2000])
    return directory


def pruned(source, directory, tensor):
    config = recipes.from_source(str(source / "model"))
    config = dataclasses.replace(
        config,
        data=dataclasses.replace(
            config.data,
            paths=(str(source),),
            seq_len=32,
            batch_size=8,
            held_out_fraction=0.4,
        ),
        mesh=MeshConfig(fsdp=8 // tensor, tensor=tensor),
        rules="fsdp_tp",
        steps=2,
        eval_batches=2,
        dtype="float32",
        output_dir=str(directory),
    )
    prune = PruneConfig(sparsity=0.5, pattern="tw", tile=8)
    model, text = open_source(config, prune)
    rows = model.embed.table.shape[0]
    tune = TuneConfig(score="taylor", score_batches=2)
    made = recipes.prune_and_tune(config, model, text, prune, tune, say=lambda _: None)
    finish(directory, made, text)
    return rows, made


def test_pruned_and_exported_as_on_one_device(source, tmp_path):
    files = []
    found = {}
    for tensor in (1, 2):
        directory = tmp_path / str(tensor)
        rows, made = pruned(source, directory, tensor)
        assert rows == (V if tensor == 1 else 384)
        assert made.tuned is not None
        losses = [made.before.loss, made.after.loss, made.tuned.loss]
        found[tensor] = losses, {k: np.asarray(v) for k, v in made.masks.kept.items()}
        recipes.export(directory, directory / "model")
        files.append(load_file(directory / "model" / "model.safetensors"))
        again = load(directory / "model")
        assert again.embed.table.shape[0] == V == again.config.vocab_size
    np.testing.assert_allclose(found[2][0], found[1][0], rtol=1e-4)
    jax.tree.map(np.testing.assert_array_equal, found[2][1], found[1][1])
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-4), *files)
