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
from jaxscale.nn.packing import PackedBatch
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
            max_sequences=1,
        ),
        mesh=MeshConfig(fsdp=count),
        steps=STEPS,
        checkpoint_every=EVERY,
        dtype="bfloat16" if on_gpu else "float32",
        scan_layers=True,  # less to compile
        output_dir=directory,
    )


class Rows:
    """Rows of the bytes of the standard library's modules, one after the other.

    It is not `PackedBatches`, which needs Grain, so that the test runs without.
    """

    def __init__(self, batch: int, length: int):
        files = sorted(Path(os.__file__).parent.glob("*.py"))
        data = b"".join(path.read_bytes() for path in files)
        self._bytes = np.frombuffer(data, np.uint8)
        self._shape = (batch, length)
        self._given = 0  # batches so far

    def __iter__(self):
        return self

    def __next__(self):
        batch, length = self._shape
        start = self._given * batch * length
        self._given += 1
        rows = self._bytes[start : start + batch * length + 1].astype(np.int32)
        return PackedBatch(
            tokens=rows[:-1].reshape(batch, length),
            targets=rows[1:].reshape(batch, length),
            loss_mask=np.ones((batch, length), np.bool_),
            cu_seqlens=None,
        )

    def get_state(self):
        return {"given": self._given}

    def set_state(self, state):
        self._given = state["given"]


def main(directory: str, count: str) -> None:
    """Train, from the newest checkpoint on."""
    config = settings(directory, int(count))
    training.fit(
        config,
        train_data=Rows(config.data.batch_size, config.data.seq_len),
        writers=[training.JsonlWriter(Path(directory) / "metrics.jsonl")],
        devices=jax.devices()[: int(count)],
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
