"""Two processes of which one is preempted stop together; one process continues."""

import jax
import numpy as np
import pytest

from jaxscale.models.families.llama import llama_tiny
from jaxscale.models.tokenizer import Tokenizer
from jaxscale.sharding import MeshConfig, create, make_mesh
from jaxscale.training import (
    DataConfig,
    Mixture,
    OptimizerConfig,
    TextData,
    TokenCorpus,
    TrainConfig,
    Writer,
    fit,
    packed_batches,
)
from tests.training import processes, toy


STEPS = 40


def config(directory):
    return TrainConfig(
        model=llama_tiny(),
        data=DataConfig(
            vocab_size=toy.VOCAB, seq_len=8, batch_size=8, max_sequences=4, prefetch=2
        ),
        optimizer=OptimizerConfig(learning_rate=0.01, warmup_steps=2),
        mesh=MeshConfig(data=2, fsdp=2),
        steps=STEPS,
        output_dir=str(directory),
    )


class Losses(Writer):
    def __init__(self):
        self.by_step = {}

    def write(self, record):
        self.by_step[str(record["step"])] = record["loss"]


def run(config, devices, hooks=()):
    rng = np.random.default_rng(0)
    documents = [rng.integers(1, toy.VOCAB, 12) for _ in range(40)]
    corpora = (TokenCorpus.from_ids(documents[:30]), TokenCorpus.from_ids(documents))
    mixture = Mixture(corpora=corpora, weights=(2, 1))
    text = TextData(
        tokenizer=Tokenizer.train(["abc"], 300), train=mixture, held_out=None
    )
    train, _ = packed_batches(config, text, devices)
    rules = config.axis_rules
    mesh = make_mesh(config.mesh, devices)
    writer = Losses()
    result = fit(
        config,
        train_data=train,
        model=create(lambda: toy.Toy(rules=rules), mesh, rules),
        writers=[writer],
        devices=devices,
        hooks=hooks,
    )
    return result, writer.by_step


@pytest.mark.slow
def test_stop_together_and_continue_in_one_process(tmp_path):
    worker = "tests.training.preempted_worker"
    (first, _), (second, _) = processes.run_two(worker, str(tmp_path / "pair"))
    assert first["stopped"]
    assert second["stopped"]
    assert second["losses"] == {}  # one process writes for both
    stopped_after = len(first["losses"])
    assert 2 < stopped_after < STEPS

    devices = jax.devices()[:4]
    _, continued = run(config(tmp_path / "pair"), devices)
    assert next(iter(continued)) == str(stopped_after + 1)
    _, unbroken = run(config(tmp_path / "alone"), devices)
    together = first["losses"] | continued
    assert list(together) == list(unbroken)
    np.testing.assert_allclose(
        list(together.values()), list(unbroken.values()), rtol=1e-5
    )
