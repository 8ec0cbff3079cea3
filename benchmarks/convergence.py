"""Held-out loss of changes to algorithm and precision, on the same bytes of text.

Small LLaMA-style models learn bytes of CPython's own library source and documentation
(`benchmarks.workloads.byte_text`). All begin with the same seeds and read the same
sequences in the same order; what differs is

- ``serial``: serial blocks, full attention, AdamW: the baseline;
- ``parallel``: attention and feed-forward network side by side, under one norm;
- ``window``: a sliding window of a quarter of the row;
- ``parallel_window``: both, as in the paper;
- ``lamb_4x``: `serial` with LAMB at 4 times the batch and a quarter of the steps;
- ``adamw_4x``: the same with AdamW, the control.

of what MegaScale changes in the algorithm, and

- ``bf16``, ``fp8``, ``fp8_blockwise``, ``fp8_tensorwise``: `serial` with matmuls in
  bf16, and in fp8 with a scale for each row, each block or each operand;
- ``fp32``: the control, by which bf16 is as far off as trainings are that differ in
  roundings alone

of what fp8 changes in the numbers: these have one learning rate, and ``against_bf16``
is by how much of bf16's loss theirs is above it. The rate is low: at two to
eight times as much trainings of such small models drift apart, by up to 2% either way.

Each of the former has a learning rate of its own, found with a seed of its own: from
the same guess for all that share an optimizer it is doubled and halved until neither
neighbor is better on held-out rows that are not those of the results. All rates that
were tried are rows of the case ``..._rates``. Results are points of curves: the param
`tokens` says how many bytes were read, and only at the end of its cosine is a rate
done.

``python -m benchmarks.convergence --case bytes_600k`` takes most of an hour on one core
of a CPU; ``fp8_500k`` takes a quarter of an hour; ``bytes_34m``, ``fp8_10m`` and
``fp8_300m`` are for a GPU.
"""

import dataclasses
import time
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from benchmarks.measure import command
from benchmarks.measure.harness import Case, Measurement, Results, by_seed
from benchmarks.workloads import byte_text
from jaxscale import models, sharding, training


ALGORITHMS = (
    "serial",
    "parallel",
    "window",
    "parallel_window",
    "lamb_4x",
    "adamw_4x",
)
PRECISIONS = ("bf16", "fp32", "fp8", "fp8_blockwise", "fp8_tensorwise")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """Sizes of the experiment."""

    model: models.DecoderConfig
    """Of bytes; a row has ``model.max_seq_len``."""
    rows: int
    """Of the base batch."""
    steps: int
    """Of the base batch; a multiple of 4 times `POINTS`."""
    eval_rows: int
    """Held out, half of them to choose rates."""
    guesses: Mapping[str, float] = types.MappingProxyType({"adamw": 4e-3, "lamb": 4e-2})
    """Learning rate of each optimizer that the search begins with."""
    arms: Sequence[str] = ALGORITHMS
    """What is compared."""
    rate: float | None = None
    """Learning rate of all; None searches that of each."""


SETUPS = {
    "bytes_600k": Setup(
        model=byte_text.decoder(96, 4, 24, 256), rows=2, steps=800, eval_rows=256
    ),
    "bytes_34m": Setup(
        model=byte_text.decoder(512, 8, 64, 512),
        rows=8,
        steps=2400,
        eval_rows=512,
        guesses={"adamw": 5e-4, "lamb": 1e-2},
    ),
    "fp8_500k": Setup(
        model=byte_text.decoder(64, 2, 16, 128),
        rows=8,
        steps=512,
        eval_rows=256,
        arms=PRECISIONS,
        rate=5e-4,
    ),
    "fp8_10m": Setup(
        model=byte_text.decoder(512, 8, 64, 512),
        rows=8,
        steps=2400,
        eval_rows=512,
        arms=PRECISIONS,
        rate=5e-4,
    ),
    "fp8_300m": Setup(
        model=byte_text.decoder(1024, 24, 64, 512),
        rows=32,
        steps=400,
        eval_rows=512,
        arms=PRECISIONS,
        rate=5e-4,
    ),
    "tiny": Setup(
        model=byte_text.decoder(32, 2, 8, 64), rows=2, steps=32, eval_rows=16
    ),
}

POINTS = 8
"""Of a curve."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arm:
    """What an implementation changes."""

    parallel: bool = False
    window: bool = False
    optimizer: Any = "adamw"
    batches: int = 1
    """Base batches of a step."""
    dtype: Any = None
    """Of the computation; None is bf16 where that is fast."""
    quantization: sharding.Fp8 = None
    """Matmuls in fp8."""


ARMS = {
    "serial": Arm(),
    "parallel": Arm(parallel=True),
    "window": Arm(window=True),
    "parallel_window": Arm(parallel=True, window=True),
    "lamb_4x": Arm(optimizer="lamb", batches=4),
    "adamw_4x": Arm(batches=4),
    "bf16": Arm(dtype=jnp.bfloat16),
    "fp32": Arm(dtype=jnp.float32),
    "fp8": Arm(dtype=jnp.bfloat16, quantization="fp8"),
    "fp8_blockwise": Arm(dtype=jnp.bfloat16, quantization="fp8_blockwise"),
    "fp8_tensorwise": Arm(dtype=jnp.bfloat16, quantization="fp8_tensorwise"),
}

RATE_SEED = 1000
"""Of the search."""


class Trainer:
    """Trains one arm of a setup; compiled once for all seeds and rates."""

    def __init__(self, setup: Setup, arm: Arm) -> None:
        """Make the functions; nothing is compiled yet."""
        self.setup, self.arm = setup, arm
        length = setup.model.max_seq_len
        self.steps = setup.steps // arm.batches
        self._config = dataclasses.replace(
            setup.model,
            parallel_block=arm.parallel,
            window=length // 4 if arm.window else None,
        )
        self._settings = training.OptimizerConfig(
            kind=arm.optimizer, learning_rate=1.0, warmup_steps=self.steps // 10
        )
        self._loss = training.next_token_loss(chunk_size=length)
        self._eval = training.make_eval_step(self._loss)
        rows = byte_text.held_out(length, setup.eval_rows, setup.eval_rows // 4)
        self._rows = {"choice": rows[::2], "result": rows[1::2]}
        self._run = jax.jit(self._some_steps, donate_argnums=0)
        self.tried: dict[float, Measurement] = {}

    def _optimizer(self, rate: Any) -> optax.GradientTransformation:
        return training.make_optimizer(
            self._settings, self.steps, transforms=[optax.scale(rate)]
        )

    def _some_steps(self, state: Any, rate: jax.Array, text: jax.Array) -> Any:
        """Many steps in one program: at this size calling each would cost as much."""
        step = training.make_train_step(
            training.accumulated(self._loss),
            self._optimizer(rate),
            schedule=training.make_schedule(self._settings, self.steps),
        )

        def one(state: Any, rows: jax.Array) -> tuple[Any, jax.Array]:
            state, metrics = step(state, byte_text.packed(rows))
            return state, metrics["loss"]

        return jax.lax.scan(one, state, text)

    def curve(self, seed: int, rate: float) -> Iterator[tuple[Any, float]]:
        """The model and the seconds of a step at each of `POINTS` points."""
        model = models.Decoder(
            self._config,
            dtype=self.arm.dtype or byte_text.dtype(),
            quantization=self.arm.quantization,
            scan_layers=True,
            rngs=nnx.Rngs(seed),
        )
        state = training.TrainState.create(model, self._optimizer(rate))
        length, steps = self.setup.model.max_seq_len, self.steps // POINTS
        count = steps * self.arm.batches
        for text in byte_text.batches(length, self.setup.rows, seed, count):
            if int(state.step) == self.steps:
                return
            start = time.perf_counter()
            rows = text.reshape(steps, -1, length + 1)  # [steps, rows of a step, T + 1]
            state, losses = self._run(state, jnp.float32(rate), jnp.asarray(rows))
            losses.block_until_ready()
            yield state.model, (time.perf_counter() - start) / steps

    def bits(self, model: Any, rows: str) -> float:
        """Bits per byte of the held-out `rows`: of the ``choice`` or the ``result``."""
        return byte_text.bits(self._eval, model, self._rows[rows])

    def best_rate(self) -> float:
        """The rate, doubled and halved from a guess, whose neighbors are no better.

        It is that of the setup if that has one.
        """
        if self.setup.rate is not None:
            return self.setup.rate

        def bits(rate: float) -> float:
            if rate not in self.tried:
                *_, (model, seconds) = self.curve(RATE_SEED, rate)
                found = {"bits_per_byte": self.bits(model, "choice")}
                self.tried[rate] = Measurement([seconds], None, metrics=found)
            return self.tried[rate].metrics["bits_per_byte"]

        best = self.setup.guesses[self.arm.optimizer]
        while (better := min((best, 2 * best, best / 2), key=bits)) != best:
            best = better
        return best


def measure(
    cases: Sequence[Case], names: Sequence[str], samples: int
) -> Iterable[tuple[Case, Results]]:
    """The rates that were tried, then for each seed the points of its curves."""
    del samples  # a training is one sample
    for setup in dict.fromkeys(case.name for case in cases):
        start = time.perf_counter()
        arms = [name for name in names if name in SETUPS[setup].arms]
        trainers = {name: Trainer(SETUPS[setup], ARMS[name]) for name in arms}
        rates = {}
        for name, trainer in trainers.items():
            rates[name] = trainer.best_rate()
            taken = time.perf_counter() - start
            print(f"-- {name}: rate {rates[name]:g}, {taken:.0f} s", flush=True)
        yield from _tried(setup, trainers)
        wanted = [case for case in cases if case.name == setup]
        for seed in dict.fromkeys(case.params["seed"] for case in wanted):
            found = {n: _points(t, seed, rates[n]) for n, t in trainers.items()}
            taken = time.perf_counter() - start
            print(f"-- seed {seed}: {taken:.0f} s", flush=True)
            for case in wanted:
                if case.params["seed"] == seed:
                    read = case.params["tokens"]
                    yield case, _compared({n: at[read] for n, at in found.items()})


def _tried(
    setup: str, trainers: dict[str, Trainer]
) -> Iterator[tuple[Case, dict[str, Any]]]:
    for rate in sorted({rate for t in trainers.values() for rate in t.tried}):
        found = {n: t.tried[rate] for n, t in trainers.items() if rate in t.tried}
        yield Case(f"{setup}_rates", {"rate": rate}), found


def _points(trainer: Trainer, seed: int, rate: float) -> dict[int, Measurement]:
    """What is measured at each point of a curve, by the bytes read."""
    places = points(trainer.setup)
    return {
        read: Measurement(
            [seconds],
            None,
            metrics={"bits_per_byte": trainer.bits(model, "result"), "rate": rate},
        )
        for read, (model, seconds) in zip(
            places, trainer.curve(seed, rate), strict=True
        )
    }


def _compared(results: dict[str, Any]) -> dict[str, Any]:
    """The results of one point, with what bf16 says of those that differ in numbers."""
    if (bf16 := results.get("bf16")) is not None:
        for result in results.values():
            ratio = result.metrics["bits_per_byte"] / bf16.metrics["bits_per_byte"]
            result.metrics["against_bf16"] = ratio - 1
    return results


def points(setup: Setup) -> list[int]:
    """Bytes read until each point of a curve."""
    whole = setup.steps * setup.rows * setup.model.max_seq_len
    return [whole * (i + 1) // POINTS for i in range(POINTS)]


def _cases(name: str, seeds: int) -> list[Case]:
    return [
        Case(name, {"seed": seed, "tokens": read})
        for seed in range(seeds)
        for read in points(SETUPS[name])
    ]


BENCHMARK = by_seed(
    ARMS,
    name="convergence",
    cases=[
        *_cases("bytes_600k", 3),
        *_cases("bytes_34m", 3),
        *_cases("fp8_500k", 3),
        *_cases("fp8_10m", 3),
        *_cases("fp8_300m", 3),
    ],
    quick_cases=_cases("tiny", 1),
    measure=measure,
    offers=lambda case, name: name in SETUPS[case.name].arms,
    timing="wall time of a step",
)


if __name__ == "__main__":
    command.run(BENCHMARK)
