"""Runs that presets name, and whether this machine can carry a run out."""

import dataclasses
import importlib.util

import jax

from jaxscale.models import preset
from jaxscale.sharding import MeshConfig
from jaxscale.training import DataConfig, TrainConfig, load_tokenizer


# Byte-level BPE needs 256 bytes and a control token; presets for tests know fewer.
_SMALLEST_VOCABULARY = 512
_LONGEST_ROW = 4096


def from_preset(name: str) -> TrainConfig:
    """A run that trains a model preset from scratch on the Python corpus.

    Rows are as long as the model allows, 4,096 tokens at most. The mesh shards the
    parameters over all devices.

    Raises:
        ValueError: no preset has this name.

    Example:
        >>> from_preset("llama_1b").data.seq_len
        4096
    """
    model = preset(name)
    vocab_size = max(model.vocab_size, _SMALLEST_VOCABULARY)
    return TrainConfig(
        model=dataclasses.replace(model, vocab_size=vocab_size),
        data=DataConfig(
            vocab_size=vocab_size, seq_len=min(model.max_seq_len, _LONGEST_ROW)
        ),
        mesh=MeshConfig(fsdp=-1),
        output_dir=f"runs/{name}",
    )


def check_machine(config: TrainConfig) -> None:
    """Check what depends on this machine's devices and files, before any work.

    Raises:
        ValueError: the mesh does not fit the devices, the model or the batch does not
            fit the mesh, or the tokenizer does not fit the vocabulary.
        FileNotFoundError: there is no tokenizer where the settings say.
        ImportError: a package that training needs is not installed.
    """
    config.check_mesh(config.mesh.sizes(jax.device_count()))
    for package in ("grain", "orbax", "rich", "tensorboardX", "tokenizers"):
        if importlib.util.find_spec(package) is None:
            raise ImportError(
                f"train needs {package}, which is not installed; "
                "pip install 'jaxscale[train]'"
            )
    if config.data.tokenizer is not None:
        load_tokenizer(config.data)
