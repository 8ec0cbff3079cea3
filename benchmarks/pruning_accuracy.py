"""Held-out bits per byte of a model pruned by every pattern, and trained on alike.

For each seed a LLaMA-style model of 34 million parameters learns bytes of CPython's own
library source and documentation. Then every pattern prunes all linear layers of its
blocks at once (embedding, norms and output projection stay), by the same Taylor scores,
and trains for the same steps under its mask. `dense` is the control: the same training
without a mask, since longer training alone would flatter pruning. Names that end in a
score are pruned by it instead; `sparsegpt` and `updated` (Taylor scores) change the
kept weights before the training, and `distilled` learns half from the predictions of
the dense model.

``python -m benchmarks.pruning_accuracy --seeds 0`` is one command; what a seed needs is
made anew in each, so seeds may run side by side on one GPU, with an ``--out`` each and
``XLA_PYTHON_CLIENT_PREALLOCATE=false``. Training is short, a thousand steps and some
twenty-five times a hundred of tuning: enough to tell the patterns apart, not to say
what a model that was trained to the end would lose. ``--case bytes_200k`` is for a CPU:
about five minutes a seed on one core.

What the corpus is and does not show: `benchmarks.workloads.byte_text`. Differences
between patterns are what it is for.

Metrics: `bits_per_byte` after tuning, `bits_lost` against `dense`, `pruned_bits`
before tuning, `multiplied`, the part of the dense matmuls that tiles of `tew` take with
rows for single weights, `sparsity` of the pruned layers and of all parameters
(`sparsity_all`), the share of the Taylor score that is kept, and `recovered`: the part
of the gap between block-wise and element-wise pruning that a pattern closes.
"""

import dataclasses
import functools
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.measure import command
from benchmarks.measure.harness import (
    Case,
    Measurement,
    NoMeasurement,
    Results,
    by_seed,
)
from benchmarks.workloads import byte_text
from benchmarks.workloads.scored import (
    MORE,
    PATTERNS,
    SCORED,
    Scored,
)
from jaxscale import models, pruning, training


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """Sizes of the experiment."""

    model: models.DecoderConfig
    """Of bytes."""
    steps: int
    """Of dense training."""
    tune_steps: int
    """Under a mask, or of the dense control."""
    rows: int
    """Of a batch; each has ``model.max_seq_len`` bytes."""
    score_batches: int
    """That Taylor scores are measured on."""
    tile: int
    """Columns of a tile."""
    block: int
    """Side of a block."""
    eval_rows: int
    """Most held-out rows."""


SETUPS = {
    "bytes_34m": Setup(
        model=byte_text.decoder(512, 8, 64, 512),
        steps=1200,
        tune_steps=120,
        rows=16,
        score_batches=32,
        tile=128,
        block=32,
        eval_rows=512,
    ),
    "bytes_27m": Setup(
        model=dataclasses.replace(
            byte_text.decoder(512, 8, 64, 512), num_kv_heads=2, d_ff=1792
        ),
        steps=1200,
        tune_steps=120,
        rows=16,
        score_batches=32,
        tile=128,
        block=32,
        eval_rows=512,
    ),
    "bytes_200k": Setup(
        model=byte_text.decoder(64, 3, 16, 64),
        steps=400,
        tune_steps=40,
        rows=16,
        score_batches=16,
        tile=8,
        block=8,
        eval_rows=256,
    ),
    "tiny": Setup(
        model=byte_text.decoder(32, 2, 8, 64),
        steps=30,
        tune_steps=8,
        rows=8,
        score_batches=2,
        tile=8,
        block=8,
        eval_rows=16,
    ),
}

SPARSITIES_24 = (0.6, 0.65, 0.8, 0.85)
"""Of tiles times 2:4 alone."""

LEARNING_RATE, TUNE_RATE = 1e-3, 3e-4

DISTILLED = "_distilled"
"""Ends the names of what also learns from the dense model."""
LEARNERS = (*SCORED, *(name for name in MORE if name.endswith("_updated")))
NAMES = ("dense", *PATTERNS, *MORE, *(f"{name}{DISTILLED}" for name in LEARNERS))


class Experiment:
    """One seed: the dense model, and what becomes of it under a mask."""

    def __init__(self, setup: Setup, seed: int) -> None:
        """Train the dense model and score its weights."""
        self.setup, self.seed = setup, seed
        self._loss = training.next_token_loss(chunk_size=setup.model.max_seq_len)
        self._eval = training.make_eval_step(self._loss)
        self._held_out = byte_text.held_out(
            setup.model.max_seq_len, setup.eval_rows, 4 * setup.rows
        )
        dense = models.Decoder(
            setup.model, dtype=byte_text.dtype(), scan_layers=True, rngs=nnx.Rngs(seed)
        )
        self.whole = pruning.make_model_masks(
            dense,
            pruning.magnitude_scores(dense),
            pruning.PruneConfig(pattern="ew", sparsity=0.0),
        )
        self._tune_step = self._make_step(TUNE_RATE, setup.tune_steps)
        self._distill_step = self._make_step(TUNE_RATE, setup.tune_steps, distill=True)
        step = self._make_step(LEARNING_RATE, setup.steps)
        self.dense, _ = self._train(step, dense, setup.steps, self.whole, seed)
        del dense

        def mean_loss(model: Any, batch: Any) -> jax.Array:
            total, sums = self._loss(model, batch)
            return total / sums.tokens.astype(jnp.float32)

        data = byte_text.batches(setup.model.max_seq_len, setup.rows, seed + 10_000, 1)
        some = [byte_text.packed(next(data)[0]) for _ in range(setup.score_batches)]
        self.scored = Scored(
            self.dense, mean_loss, some, tile=setup.tile, block=setup.block
        )

    def bits(self, model: Any) -> float:
        """Held-out bits per byte."""
        return byte_text.bits(self._eval, model, self._held_out)

    def tuned(
        self, masks: pruning.Masks, name: str = "", pruned: Any = None
    ) -> tuple[Any, list[float]]:
        """The model after training under masks, and the seconds of its steps.

        Args:
            masks: What it keeps.
            name: How it is pruned and trained, an implementation.
            pruned: The model before; None makes it.
        """
        if pruned is None:
            pruned = self.scored.pruned(name.removesuffix(DISTILLED), masks)
        step = self._distill_step if name.endswith(DISTILLED) else self._tune_step
        return self._train(
            step, pruned, self.setup.tune_steps, masks, self.seed + 20_000
        )

    def masks(self, name: str, sparsity: float) -> pruning.Masks:
        """What an implementation keeps.

        All else that the host computes for its `run` is made here, too: it takes longer
        than the steps, and threads do it while the GPU trains.
        """
        name = name.removesuffix(DISTILLED)
        masks = self.scored.masks(name, sparsity)
        self.scored.updated(name, masks)
        if masks.config.pattern == "tew":
            self.scored.multiplied(masks)
        return masks

    def run(self, name: str, masks: pruning.Masks) -> Measurement:
        """Prune, and train on."""
        pruned = self.scored.pruned(name.removesuffix(DISTILLED), masks)
        before = self.bits(pruned)
        tuned, seconds = self.tuned(masks, name, pruned)
        cost = pruning.work(masks)
        scores = self.scored.scores("taylor")
        total = sum(float(scores[n].sum(dtype=np.float64)) for n in masks)
        kept = sum(float(scores[n][masks[n]].sum(dtype=np.float64)) for n in masks)
        parameters = sum(x.size for x in jax.tree.leaves(self.dense))
        metrics = {
            "bits_per_byte": self.bits(tuned),
            "pruned_bits": before,
            "sparsity": masks.sparsity,
            "sparsity_all": masks.sparsity * cost.dense / parameters,
            "kept_score": kept / total,
            "single_weights": cost.single,
        }
        if masks.config.pattern == "tew":
            metrics["multiplied"] = self.scored.multiplied(masks)
        return Measurement(seconds, None, metrics=metrics)

    def _make_step(
        self, rate: float, steps: int, *, distill: bool = False
    ) -> tuple[Any, Any]:
        settings = training.OptimizerConfig(
            learning_rate=rate, warmup_steps=min(100, steps // 10)
        )
        # The masks are part of the state: one compiled step serves all patterns.
        optimizer = training.make_optimizer(
            settings,
            steps,
            gradient_transforms=[pruning.mask_gradients(self.whole)],
        )
        schedule, chunk = training.make_schedule(settings, steps), self._loss.chunk_size
        loss = training.DistillationLoss(chunk_size=chunk) if distill else self._loss
        step = training.make_train_step(
            training.accumulated(loss), optimizer, schedule=schedule
        )

        # Many steps in one program: at this size calling each would cost as much.
        @functools.partial(jax.jit, donate_argnums=0)
        def some_steps(
            state: Any, text: jax.Array, teacher: Any
        ) -> tuple[Any, jax.Array]:
            def one(state: Any, rows: jax.Array) -> tuple[Any, jax.Array]:
                batch: Any = byte_text.packed(rows)
                if distill:
                    batch = training.taught(teacher, batch, chunk_size=chunk)
                state, metrics = step(state, batch)
                return state, metrics["loss"]

            return jax.lax.scan(one, state, text)

        return some_steps, optimizer

    def _train(
        self, maker: tuple[Any, Any], model: Any, steps: int, masks: Any, seed: int
    ) -> tuple[Any, list[float]]:
        some_steps, optimizer = maker
        teacher = self.dense if maker is self._distill_step else None
        state = training.TrainState.create(model, optimizer)
        state = pruning.set_masks(state, masks)
        together = max(1, steps // 10)
        length, rows = self.setup.model.max_seq_len, self.setup.rows
        data, seconds = byte_text.batches(length, rows, seed, together), []
        for _ in range(steps // together):
            start = time.perf_counter()
            state, losses = some_steps(state, jnp.asarray(next(data)), teacher)
            losses.block_until_ready()
            seconds.append((time.perf_counter() - start) / together)
        return state.model, seconds[1:] or seconds


def measure(
    cases: Sequence[Case], names: Sequence[str], samples: int
) -> Iterable[tuple[Case, Results]]:
    """Each case, those of a seed together, from one dense model."""
    del samples  # a training is one sample
    seeds = dict.fromkeys((case.name, case.params["seed"]) for case in cases)
    for setup, seed in seeds:
        start = time.perf_counter()
        experiment = Experiment(SETUPS[setup], seed)
        dense = experiment.bits(experiment.dense)
        print(
            f"-- seed {seed}: dense {dense:.4f} bits a byte after "
            f"{SETUPS[setup].steps} steps, {time.perf_counter() - start:.0f} s",
            flush=True,
        )
        own = [c for c in cases if (c.name, c.params["seed"]) == (setup, seed)]
        wanted = {
            (name, case.params["sparsity"]): None
            for case in own
            for name in names
            if name != "dense" and _has(name, case.params["sparsity"])
        }
        # The host ranks and updates weights for the next runs while the GPU trains.
        with ThreadPoolExecutor(4) as pool:
            masks = {run: pool.submit(experiment.masks, *run) for run in wanted}
            whole = experiment.whole
            control = experiment.run("dense", whole) if "dense" in names else None
            for case in own:
                results: Results = {}
                for name in names:
                    run = name, case.params["sparsity"]
                    if name == "dense" and control is not None:
                        results[name] = dataclasses.replace(control)
                    elif run in masks:
                        results[name] = experiment.run(name, masks.pop(run).result())
                    else:
                        results[name] = NoMeasurement("not of this sparsity")
                _add_compared(results)
                taken = time.perf_counter() - start
                print(f"-- seed {seed}, {run[1]:.0%}: {taken:.0f} s", flush=True)
                yield case, results


def _has(name: str, sparsity: float) -> bool:
    """Whether a pattern is compared at a sparsity."""
    if name.startswith("two_four"):
        return sparsity == 0.5  # there is no other
    return sparsity not in SPARSITIES_24 or name.startswith("tile_24")


def _add_compared(results: Results) -> None:
    """Bits lost against `dense`, and the part of the gap from block-wise to
    element-wise pruning that each pattern closes.
    """
    measured = {n: r for n, r in results.items() if isinstance(r, Measurement)}
    bits = {name: result.metrics["bits_per_byte"] for name, result in measured.items()}
    gap = 0.0
    if {"block_wise", "element_wise"} <= set(bits):
        gap = bits["block_wise"] - bits["element_wise"]
    for name, result in measured.items():
        if gap:
            recovered = (bits["block_wise"] - bits[name]) / gap
            result.metrics = {**result.metrics, "recovered": recovered}
        if "dense" in bits:
            lost = bits[name] - bits["dense"]
            result.metrics = {**result.metrics, "bits_lost": lost}


BENCHMARK = by_seed(
    NAMES,
    name="pruning_accuracy",
    cases=[
        *(
            Case("bytes_34m", {"sparsity": sparsity, "seed": seed})
            for seed in range(3)
            for sparsity in (0.75, 0.5, *SPARSITIES_24, 0.9)
        ),
        *(
            Case("bytes_200k", {"sparsity": sparsity, "seed": seed})
            for seed in range(3)
            for sparsity in (0.5, 0.75)
        ),
    ],
    quick_cases=[Case("tiny", {"sparsity": 0.5, "seed": 0})],
    measure=measure,
    selectors={"seeds": "seed", "sparsities": "sparsity"},
    timing="wall time of a step under masks",
)


if __name__ == "__main__":
    command.run(BENCHMARK)
