"""The overhead of `training.fit` over its step: monitor, records, checkpoints.

All take the same steps of the same model on the same random rows, on as many devices as
a case says:

- ``by_hand``: the step that `fit` makes, called in a loop that does nothing else.
- ``fit``: `fit`, with the files it writes, and a record of every step.
- ``fit_saves``: the same, with checkpoints on the way. ``stall_seconds`` is what each
  adds to the steps that follow it, while it is written in the background;
  ``first_stall_seconds`` that of the first, which also compiles and sets up memory.
  ``save_seconds`` is how long one takes on devices that do nothing else, until it is
  whole, and ``copy_seconds`` how long its arrays alone take to the host.

``beside_step`` is the time of a step over that by hand, less one. The time of a step is
that between the ends of two; of ``fit_saves`` it is the mean over all. ``loss`` is that
of the last step: as many steps have the same.
"""

import dataclasses
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.measure import command, timing
from benchmarks.measure.harness import Benchmark, Case, Custom, Measurement, Params
from jaxscale import models, training
from jaxscale.nn.packing import PackedBatch
from jaxscale.sharding import MeshConfig, make_mesh
from jaxscale.training.assemble import abstract_step, new_state


_FIRST = 4
"""Steps that do not count: one compiles, and the others fill what runs ahead."""


class Rows:
    """Random rows for every step, as `fit` takes them."""

    def __init__(self, config: training.TrainConfig, seed: int) -> None:
        """Draw them."""
        shape = (config.data.batch_size, config.data.seq_len)
        random = np.random.default_rng(seed)
        tokens = random.integers(0, config.model.vocab_size, shape, dtype=np.int32)
        targets = np.roll(tokens, -1, axis=1)
        mask = np.ones(shape, np.bool_)
        self.batch = PackedBatch(
            tokens=tokens, targets=targets, loss_mask=mask, cu_seqlens=None
        )

    def __iter__(self) -> Iterator[PackedBatch]:
        return self

    def __next__(self) -> PackedBatch:
        return self.batch

    def get_state(self) -> dict[str, Any]:
        """It has none."""
        return {}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """It has none."""


class Ends(training.Writer):
    """When the metrics of each step were there, and the loss of the last."""

    def __init__(self) -> None:
        """Begin without any."""
        self.times: list[float] = []
        self.loss = float("nan")

    def write(self, record: Mapping[str, Any]) -> None:
        """Note the moment."""
        self.times.append(time.perf_counter())
        self.loss = float(record["loss"])

    @property
    def seconds(self) -> list[float]:
        """Of each step that counts."""
        return np.diff(self.times[_FIRST - 1 :]).tolist()


def config_of(params: Params, folder: str, steps: int) -> training.TrainConfig:
    """The settings of a run into `folder`; it saves at its end, if not before."""
    model = models.preset(params["model"])
    return training.TrainConfig(
        model=model,
        data=training.DataConfig(
            vocab_size=model.vocab_size,
            batch_size=params["batch"],
            seq_len=params["seq_len"],
            max_sequences=1,
        ),
        mesh=MeshConfig(fsdp=params["fsdp"]),
        steps=steps,
        keep=1,
        dtype="bfloat16" if timing.on_gpu() else "float32",
        checkpoint_every=steps,
        output_dir=folder,
    )


def by_hand(params: Params, seed: int, samples: int) -> Measurement:
    """The step, and no more than one that runs ahead."""
    config = config_of(params, "", _FIRST + samples)
    mesh = make_mesh(config.mesh, jax.devices()[: params["fsdp"]])
    optimizer = training.make_optimizer(config.optimizer, config.steps)
    with jax.set_mesh(mesh):
        step, (state, rows) = abstract_step(config, mesh)
        places = jax.tree.map(lambda x: x.sharding, state)
        create = jax.jit(
            lambda: new_state(config, mesh, optimizer), out_shardings=places
        )
        state = create()
        places = jax.tree.map(lambda x: x.sharding, rows)
        batch = jax.device_put(Rows(config, seed).batch, places)
        ends, before = Ends(), None
        for _ in range(config.steps):
            state, metrics = step(state, batch)
            if before is not None:
                ends.write(jax.device_get(before))
            before = metrics
        ends.write(jax.device_get(before))
    return _measured(ends, params)


def _measured(ends: Ends, params: Params) -> Measurement:
    found = {"loss": ends.loss}
    return Measurement(ends.seconds, None, metrics=found, num_devices=params["fsdp"])


def _fitted(
    config: training.TrainConfig, params: Params, seed: int
) -> tuple[Ends, Any]:
    """The steps of a run with all its files, and its last state."""
    ends, folder = Ends(), Path(config.output_dir)
    writers = [
        ends,
        training.JsonlWriter(folder / "metrics.jsonl"),
        training.TensorBoardWriter(folder / "tensorboard"),
    ]
    result = training.fit(
        config,
        train_data=Rows(config, seed),
        writers=writers,
        devices=jax.devices()[: params["fsdp"]],
    )
    return ends, result.state


def fit(params: Params, seed: int, samples: int) -> Measurement:
    """The loop without checkpoints, but for one after the last step."""
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(params, folder, _FIRST + samples)
        ends, _ = _fitted(config, params, seed)
    return _measured(ends, params)


def fit_saves(params: Params, seed: int, samples: int) -> Measurement:
    """The loop with checkpoints on the way."""
    saves, every = params["saves"], params["save_every"]
    with tempfile.TemporaryDirectory() as folder:
        # The first save is after the first steps; the one of the end does not count.
        config = config_of(params, folder, (saves + 1) * every - 1)
        config = dataclasses.replace(config, checkpoint_every=every)
        ends, state = _fitted(config, params, seed)
        copy, save = _alone(state, Path(folder) / "alone")
    found, seconds = _measured(ends, params), ends.seconds
    # Each save is in the first of the steps that it counts for.
    kept = [seconds[i * every - _FIRST - 1 :][:every] for i in range(1, saves + 1)]
    first, *later = (sum(part) - found.median * len(part) for part in kept)
    found.metrics |= {
        "first_stall_seconds": first,
        "stall_seconds": statistics.mean(later),
        "copy_seconds": copy,
        "save_seconds": save,
        "gigabytes": sum(x.nbytes for x in jax.tree.leaves(state)) / 1e9,
    }
    found.seconds = [statistics.mean(seconds)]
    return found


def _alone(state: Any, folder: Path) -> tuple[float, float]:
    """Seconds of the copy of a state to the host, and of a checkpoint of it."""
    with training.Checkpointer(folder) as checkpoints:
        checkpoints.save(1, state, {})  # compiles the digests
        checkpoints.wait()
        start = time.perf_counter()
        checkpoints.save(2, state, {})
        checkpoints.wait()
        save = time.perf_counter() - start
    fresh = jax.tree.map(lambda x: x + 0 * x, state)  # JAX keeps copies it has made
    jax.block_until_ready(fresh)
    start = time.perf_counter()
    jax.device_get(fresh)
    return time.perf_counter() - start, save


def compare(params: Params, medians: Mapping[str, float]) -> Mapping[str, dict]:
    """What is beside the step."""
    if "by_hand" not in medians:
        return {}
    hand = medians["by_hand"]
    return {name: {"beside_step": t / hand - 1} for name, t in medians.items()}


def _case(name: str, **params: Any) -> Case:
    # So many steps apart that the one before is on disk, which a save waits for.
    return Case(name, {"fsdp": 1, "save_every": 60, "saves": 3, **params})


BENCHMARK = Benchmark(
    name="training_loop",
    cases=[
        _case("llama_1b", model="llama_1b", batch=8, seq_len=2048),
        _case("llama_1b_fsdp4", model="llama_1b", batch=32, seq_len=2048, fsdp=4),
    ],
    quick_cases=[
        _case("tiny", model="llama_tiny", batch=2, seq_len=32, save_every=6, saves=2)
    ],
    inputs=lambda params, key: (),
    implementations={
        "by_hand": Custom(by_hand),
        "fit": Custom(fit),
        "fit_saves": Custom(fit_saves),
    },
    compare=compare,
    time="wall",
    samples=40,
    kernels=("varlen_attention",),
    devices=lambda params: params["fsdp"],
    timing="wall time between the ends of steps",
)

if __name__ == "__main__":
    command.run(BENCHMARK)
