"""A run of `fit` on the first devices of this machine, which a test kills.

    python -m tests.training.killed_run DIRECTORY DEVICES

It reads the source of the running CPython as bytes. On GPUs it trains four layers of
LLaMA 1B in bf16, with our kernels.
"""

import dataclasses
import os
import sys
from pathlib import Path

import jax
import numpy as np

from jaxscale import models, training
from jaxscale.sharding import MeshConfig


STEPS, EVERY = 24, 8
"""Of the run, and between checkpoints."""


def settings(directory: str, count: int) -> training.TrainConfig:
    """Of a run on `count` devices."""
    on_gpu = jax.devices()[0].platform == "gpu"
    model = models.preset("llama_1b" if on_gpu else "llama_tiny")
    model = dataclasses.replace(model, num_layers=4, vocab_size=256)
    return training.TrainConfig(
        model=model,
        data=training.DataConfig(
            vocab_size=256,
            batch_size=2 * count,
            seq_len=2048 if on_gpu else 64,
            prefetch=0,
        ),
        mesh=MeshConfig(fsdp=count),
        steps=STEPS,
        checkpoint_every=EVERY,
        dtype="bfloat16" if on_gpu else "float32",
        output_dir=directory,
    )


def source() -> training.TokenCorpus:
    """Modules of the standard library, each a document of bytes."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    documents = [np.frombuffer(path.read_bytes(), np.uint8) for path in files]
    return training.TokenCorpus.from_ids(
        [document.astype(np.int32) for document in documents if len(document)]
    )


def main(directory: str, count: str) -> None:
    """Train, from the newest checkpoint on."""
    config = settings(directory, int(count))
    training.fit(
        config,
        train_data=training.PackedBatches(source(), config.data),
        writers=[training.JsonlWriter(Path(directory) / "metrics.jsonl")],
        devices=jax.devices()[: int(count)],
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
