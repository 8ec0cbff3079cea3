"""Runs by preset name, and checks that this machine can execute a run."""

import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

import jax

from jaxscale.checks import pip_install
from jaxscale.models import (
    ENCODER_PRESETS,
    DecoderConfig,
    EncoderConfig,
    config_from_hf,
    encoder_preset,
    preset,
)
from jaxscale.models.hf.files import Checkpoint
from jaxscale.models.hf.hub import local_directory
from jaxscale.sharding import MeshConfig
from jaxscale.training import DataConfig, OptimizerConfig, TrainConfig, load_tokenizer
from jaxscale.training import run as run_directory
from jaxscale.training.pretrained import check_source


# Byte-level BPE needs 256 bytes and a control token; presets for tests know fewer.
_SMALLEST_VOCABULARY = 512
_LONGEST_ROW = 4096
_ENCODER_TOKENS = ("[PAD]", "[CLS]", "[SEP]", "[MASK]")
_TUNING_RATE = 3e-5


def from_preset(name: str) -> TrainConfig:
    """A run that trains a model preset from scratch on the Python corpus.

    Rows are as long as the model allows, 4,096 tokens at most. The mesh shards the
    parameters over all devices. An encoder learns to guess hidden tokens. The learning
    rate is that of `usual_learning_rate`.

    Raises:
        ValueError: no preset has this name.

    Example:
        >>> from_preset("llama_1b").data.seq_len
        4096
    """
    is_encoder = name in ENCODER_PRESETS
    model: Any = encoder_preset(name) if is_encoder else preset(name)
    vocab_size = max(model.vocab_size, _SMALLEST_VOCABULARY)
    data = DataConfig(
        vocab_size=vocab_size, seq_len=min(model.max_seq_len, _LONGEST_ROW)
    )
    if is_encoder:
        data = dataclasses.replace(data, control_tokens=_ENCODER_TOKENS)
    return TrainConfig(
        model=dataclasses.replace(model, vocab_size=vocab_size),
        data=data,
        optimizer=OptimizerConfig(learning_rate=usual_learning_rate(model)),
        mesh=MeshConfig(fsdp=-1),
        output_dir=f"runs/{name}",
    )


def usual_learning_rate(model: DecoderConfig | EncoderConfig) -> float:
    """The peak learning rate of AdamW that a new model of this width begins with.

    Narrow models take larger steps: the rate falls as one over the width, from 0.01 at
    50 to the usual 3e-4 from 1,667 on, encoders from 667 on.

    Args:
        model: Shape of the model.

    Example:
        >>> from jaxscale.models import preset
        >>> names = ("llama_tiny", "gpt2_small", "llama3_8b")
        >>> [usual_learning_rate(preset(name)) for name in names]
        [0.01, 0.00065, 0.0003]
    """
    share = 0.5 if isinstance(model, DecoderConfig) else 0.2
    return float(f"{min(max(share / model.d_model, 3e-4), 1e-2):.2g}")


def from_source(source: str, *, weights: bool = True) -> TrainConfig:
    """A run that fine-tunes a model from its weights.

    It starts from the weights and the tokenizer of the source, at a tenth of the usual
    learning rate. Model and rows are as large as the source says; rows have at most
    4,096 tokens.

    Args:
        source: A Hugging Face directory, the name of a model on its hub, or the output
            directory of a run, whose settings of text and types stay.
        weights: False leaves out the weights of a download.

    Raises:
        FileNotFoundError: there is no such source, or a file of it is missing.
        ValueError: the model is of a kind that is not supported.

    Example:
        >>> from_source("tests/fixtures/models/gpt2").model.d_model
        32
    """
    directory = local_directory(source, weights=weights)
    name = Path(source).resolve().name
    started = {
        # A name on the hub stays; a directory is found from elsewhere too.
        "source": str(directory.resolve()) if Path(source).is_dir() else source,
        "optimizer": OptimizerConfig(learning_rate=_TUNING_RATE, weight_decay=0.01),
        "mesh": MeshConfig(fsdp=-1),
        "output_dir": f"runs/{name}-tuned",
    }
    if run_directory.is_run(directory):
        run = run_directory.read_config(directory)
        data = dataclasses.replace(run.data, tokenizer=str(directory))
        return dataclasses.replace(run, data=data, step=None, **started)
    model = config_from_hf(Checkpoint(directory).config)
    data = DataConfig(
        tokenizer=str(directory),
        vocab_size=model.vocab_size,
        seq_len=min(model.max_seq_len, _LONGEST_ROW),
    )
    return TrainConfig(model=model, data=data, **started)


def check_machine(config: TrainConfig) -> None:
    """Check what depends on this machine's devices and files, before any work.

    Raises:
        ValueError: the mesh does not fit the devices, the model or the batch does not
            fit the mesh, the tokenizer does not fit the vocabulary, or the weights to
            begin with do not fit the model.
        FileNotFoundError: there is no tokenizer or no source where the settings say.
        ImportError: a package that training needs is not installed.
    """
    config.check_mesh(config.mesh.sizes(jax.device_count()))
    for package in ("grain", "orbax", "rich", "tensorboardX", "tokenizers"):
        if importlib.util.find_spec(package) is None:
            raise ImportError(
                f"train needs {package}, which is not installed; {pip_install('train')}"
            )
    for package in config.trackers:
        if importlib.util.find_spec(package) is None:
            raise ImportError(
                f"trackers names {package}, which is not installed; pip install "
                f"{package}, or leave it out"
            )
    check_source(config)
    if config.data.tokenizer is not None:
        load_tokenizer(config.data)
