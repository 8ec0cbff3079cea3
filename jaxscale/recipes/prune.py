"""Prune a trained model and fine-tune it under the masks: ``jaxscale prune``.

Pruning and training do not import each other; this module combines them.
"""

import dataclasses
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from jaxscale.checks import check_least
from jaxscale.models import Decoder
from jaxscale.models.hf.hub import local_directory
from jaxscale.models.stack import unstacked
from jaxscale.pruning import (
    Masks,
    PruneConfig,
    Pruner,
    Scores,
    Stage,
    check_layers,
    cubic_stages,
    dense_layers,
    input_products,
    magnitude_scores,
    mask_gradients,
    one_shot,
    paper_stages,
    sparsegpt_scores,
    taylor_scores,
    update_weights,
    wanda_scores,
)
from jaxscale.recipes.runs import check_machine
from jaxscale.sharding import MeshConfig, make_mesh
from jaxscale.training import (
    DistillationLoss,
    Evaluation,
    FitResult,
    TaughtBatches,
    TextData,
    TrainConfig,
    TrainState,
    Writer,
    evaluate,
    fit,
    load_text,
    make_eval_step,
    next_token_loss,
    packed_batches,
)
from jaxscale.training import run as run_directory
from jaxscale.training.evaluation import to_rows
from jaxscale.training.lock import locked
from jaxscale.training.pretrained import load_model, pretrained


@dataclasses.dataclass(frozen=True, kw_only=True)
class TuneConfig:
    """Importance scores of the weights, and the schedule of the stages.

    Example:
        >>> TuneConfig(score="magnitude", schedule="cubic").stages
        5
    """

    score: Literal["magnitude", "taylor", "wanda", "sparsegpt"] = "taylor"
    """Importance of a weight: its square, the first-order change of the loss without
    it, its square times that of its inputs, or the error of the layer's outputs if the
    other weights make up for it (rank the last two per layer: `scope`)."""
    score_batches: int = 8
    """Batches of training text that scores and `update` are computed on."""
    update: bool = False
    """At each stage change the kept weights so that the outputs of their layers differ
    least from those before, in squares, as SparseGPT does."""
    distill: float = 0.0
    """The part of the loss under the masks that is the cross-entropy to the predictions
    of the dense model, 0 to 1; 0 trains on the text alone."""
    schedule: Literal["one_shot", "cubic", "paper"] = "one_shot"
    """Schedule: all at once before the first step, or in stages over the first half of
    the steps, by a cubic curve or the paper's list of sparsities."""
    stages: int = 5
    """Number of stages of the cubic schedule."""
    control: bool = False
    """Also train the dense model for as many steps at the same learning rate, as a
    baseline; doubles the time."""

    def __post_init__(self) -> None:
        check_least(self, 1, "score_batches", "stages")
        DistillationLoss(share=self.distill)  # raises


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pruned:
    """A pruned and fine-tuned model, with its losses."""

    result: FitResult
    """The training under masks."""
    masks: Masks
    """Masks of the last stage."""
    scores: Scores
    """Importance of the weights of the model before it was pruned."""
    before: Evaluation
    """Held-out loss of the dense model."""
    after: Evaluation
    """Held-out loss of the model pruned to the full sparsity at once, untrained."""
    control: Evaluation | None = None
    """Held-out loss of the dense model trained as long, if that is enabled."""

    measure: Callable[[Any], Evaluation]
    """Function that measures the held-out loss of any model on the mesh."""

    def dense_layers(self) -> list[str] | None:
        """The layers that stay dense where the model runs; None if all do.

        Blocks have shapes of their own, as in `jaxscale generate`.
        """
        if not self.masks.config.tiled:
            return None
        model = unstacked(self.result.state.model)
        return dense_layers(model, self.masks.separated())

    @property
    def tuned(self) -> Evaluation:
        """Held-out loss after training under the masks."""
        assert self.result.evaluation is not None  # there is held-out text
        return self.result.evaluation


def make_stages(prune: PruneConfig, tune: TuneConfig, steps: int) -> tuple[Stage, ...]:
    """The stages of a schedule within the first half of `steps`.

    Args:
        prune: Has the sparsity of the last stage.
        tune: Has the schedule.
        steps: Training steps of the whole run.

    Raises:
        ValueError: there are more stages than steps in that half.

    Example:
        >>> prune = PruneConfig(sparsity=0.5)
        >>> stages = make_stages(prune, TuneConfig(schedule="paper"), 60)
        >>> [(stage.step, stage.sparsity) for stage in stages]
        [(0, 0.25), (10, 0.35), (20, 0.5)]
    """
    if tune.schedule == "one_shot":
        return one_shot(prune.sparsity)
    if tune.schedule == "cubic":
        count = tune.stages
    else:
        count = len(paper_stages(prune.sparsity, 1))
    each = (steps // 2) // count
    if each < 1:
        raise ValueError(
            f"steps {steps}: half of them are fewer than the {count} stages of the "
            f"schedule {tune.schedule}; raise steps or use one_shot"
        )
    if tune.schedule == "cubic":
        return cubic_stages(prune.sparsity, tune.stages, each)
    return paper_stages(prune.sparsity, each)


def tuning_config(
    run: TrainConfig,
    *,
    steps: int,
    learning_rate: float | None,
    mesh: MeshConfig,
    output_dir: Path,
) -> TrainConfig:
    """The settings of a run under masks, from those of the dense run.

    Args:
        run: Settings of the dense run.
        steps: Training steps under the masks.
        learning_rate: Peak of the learning rate; None is half that of the run.
        mesh: Devices.
        output_dir: Directory of the pruned run.
    """
    rate = run.optimizer.learning_rate / 2 if learning_rate is None else learning_rate
    optimizer = dataclasses.replace(
        run.optimizer,
        learning_rate=rate,
        warmup_steps=min(10, steps // 10),
        schedule_steps=None,  # those of the dense run
    )
    return dataclasses.replace(
        run,
        steps=steps,
        optimizer=optimizer,
        mesh=mesh,
        eval_every=max(1, steps // 4),
        checkpoint_every=steps,
        output_dir=str(output_dir),
    )


def open_source(
    config: TrainConfig, prune: PruneConfig, *, step: int | None = None
) -> tuple[Decoder, TextData]:
    """The dense model of ``config.source`` on the mesh, and the text of `config`.

    Makes the directory of the new run.

    Args:
        config: Settings of the training under masks. Their source is the directory of a
            run, a Hugging Face directory, or the name of a model on its hub.
        prune: Settings of the pruning.
        step: Step of the checkpoint of a run; None is the newest that can be read.

    Raises:
        ValueError: the model cannot be pruned as asked, the text of a run has changed,
            or the new directory is in use; nothing has been written.
        FileNotFoundError: there is no such source, or no such checkpoint.
    """
    assert config.source is not None
    source = local_directory(config.source)
    is_run = run_directory.is_run(source)
    if (source / run_directory.MASKS_FILE).exists():
        raise ValueError(
            f"--from {source} holds a model that is sparse already; prune the dense "
            "run that it was made from"
        )
    if step is not None and not is_run:
        raise ValueError(
            f"step {step} is that of a checkpoint, and --from {source} is no directory "
            "of a run; leave it out"
        )
    check_machine(config)
    directory = Path(config.output_dir)
    run_directory.check_free(directory, config, resume=False)
    mesh = make_mesh(config.mesh)
    with jax.set_mesh(mesh):
        if is_run:
            model = load_model(source, mesh, config.axis_rules, step=step, like=config)
        else:
            model = pretrained(config, mesh)
    if not isinstance(model, Decoder):
        raise ValueError(f"--from {source} is an encoder, expected a decoder")
    check_layers(model, with_fitting_tile(model, prune))
    text = load_text(config.data)
    if is_run:
        run_directory.check_text(source, text)
    if text.held_out is None:
        raise ValueError(
            f"--from {source}: no text is held out, so nothing can be measured; "
            "set data.held_out_fraction above 0"
        )
    run_directory.write(directory, config, text)
    return model, text


def with_fitting_tile(model: Any, prune: PruneConfig) -> PruneConfig:
    """Settings whose tile divides the layers of `model`, where theirs is the default.

    Args:
        model: The dense model.
        prune: The settings. A tile that was chosen, any but the default, stays.

    Returns:
        The settings with the largest power of two that fits, from the default down to
        8; as they are where none does.
    """
    if not prune.tiled or prune.tile != PruneConfig.tile:
        return prune
    for tile in (128, 64, 32, 16, 8):
        fitting = dataclasses.replace(prune, tile=tile)
        try:
            check_layers(model, fitting)
        except ValueError:
            continue
        return fitting
    return prune


def prune_and_tune(
    config: TrainConfig,
    model: Any,
    text: TextData,
    prune: PruneConfig,
    tune: TuneConfig,
    *,
    say: Callable[[str], None] = print,
    writers: list[Writer] | None = None,
) -> Pruned:
    """Prune `model`, train it under the masks, and measure it before and after.

    Args:
        config: Training under the masks: steps, learning rate, mesh, directory.
        model: The dense model on the mesh of `config`; it is left as it is.
        text: Text to train and to measure on.
        prune: Pattern and sparsity. A tile of the default size that does not divide the
            layers becomes the largest that does, which `say` tells.
        tune: Scores and schedule.
        say: Called with a line on each thing that was done.
        writers: Writers of the records, as in `fit`.

    Raises:
        ValueError: the masks cannot be made, or ``tune.distill`` is set on a mesh with
            pipeline stages.
        KeyboardInterrupt: a signal ended the training.
    """
    mesh = make_mesh(config.mesh)
    fitting = with_fitting_tile(model, prune)
    if fitting != prune:
        say(
            f"tiles of {fitting.tile} columns: those of {prune.tile} do not divide the "
            "layers (kernels of GPUs take 64, 128 and 256)"
        )
        prune = fitting
    train_data, eval_data = packed_batches(config, text)
    assert eval_data is not None
    lessons = _lessons(config, train_data, model, tune)
    loss = next_token_loss(chunk_size=config.loss_chunk)
    eval_step = make_eval_step(loss, rules=config.axis_rules)

    def measure(model: Any) -> Evaluation:
        with jax.set_mesh(mesh):
            state = TrainState.create(model, optax.identity())
            return evaluate(config, mesh, eval_step, state, eval_data)

    scores = _scores(config, mesh, text, tune)
    update = _update(config, mesh, text, tune) if tune.update else None
    first: Scores = {}

    def score(model: Any) -> Scores:
        with jax.set_mesh(mesh):
            found = scores(model)
        first.update({} if first else found)
        return found

    def on_stage(step: int, masks: Masks) -> None:
        say(f"step {step}: pruned to {masks.sparsity:.1%}")

    stages = make_stages(prune, tune, config.steps)
    changes: Any = {"scores": score, "update": update}
    pruner = Pruner(prune, stages, on_stage=on_stage, **changes)
    start = at_once = pruner.start(model)
    if len(stages) > 1:
        at_once = Pruner(prune, one_shot(prune.sparsity), **changes).start(model)
    before, after = measure(model), measure(at_once)
    say(
        f"held-out loss {before.loss:.3f}, pruned {after.loss:.3f}; both on "
        f"{before.extent}"
    )
    with locked(Path(config.output_dir)):  # also while the control is trained
        result = fit(
            **lessons,
            eval_data=eval_data,
            model=start,
            hooks=[pruner],
            gradient_transforms=[pruner.transform],
            writers=writers,
        )
        if result.interrupted:
            raise KeyboardInterrupt
        masks = pruner.masks_of(result.state)
        control = _control(config, model, text, masks) if tune.control else None
    if control is not None:
        say(f"held-out loss of the dense model trained as long {control.loss:.3f}")
    return Pruned(
        control=control,
        result=result,
        masks=masks,
        scores=first,
        before=before,
        after=after,
        measure=measure,
    )


def _lessons(
    config: TrainConfig, train_data: Any, teacher: Any, tune: TuneConfig
) -> dict[str, Any]:
    """Settings, batches and loss of the training under masks, arguments of `fit`."""
    if not tune.distill:
        return {"config": config, "train_data": train_data}
    if config.is_pipelined(make_mesh(config.mesh).shape):
        raise ValueError(
            f"distill {tune.distill} on a mesh with pipeline stages, whose last one "
            "alone has a loss; set mesh.pipe to 1, or distill to 0"
        )
    loss = DistillationLoss(
        share=tune.distill, chunk_size=config.loss_chunk, z_loss=config.z_loss
    )
    return {
        "config": dataclasses.replace(config, z_loss=0.0),  # it is in the loss
        "train_data": TaughtBatches(train_data, teacher, chunk_size=config.loss_chunk),
        "loss": loss,
    }


def _control(
    config: TrainConfig, model: Any, text: TextData, masks: Masks
) -> Evaluation | None:
    """The dense model after as many steps on the same batches, which is then gone.

    Its masks keep everything: so its step is the program that a compilation cache has
    from the training under `masks`.
    """
    train_data, eval_data = packed_batches(config, text)
    every = {name: np.ones_like(kept) for name, kept in masks.kept.items()}
    whole = dataclasses.replace(masks, kept=every, tiled=every)
    with tempfile.TemporaryDirectory(prefix="jaxscale-control-") as directory:
        result = fit(
            dataclasses.replace(config, output_dir=directory),
            train_data=train_data,
            eval_data=eval_data,
            model=jax.tree.map(jnp.copy, model),  # fit takes what it is given
            gradient_transforms=[mask_gradients(whole)],
            writers=(),
        )
    if result.interrupted:
        raise KeyboardInterrupt
    return result.evaluation


def _scores(
    config: TrainConfig, mesh: Mesh, text: TextData, tune: TuneConfig
) -> Callable[[Any], Scores]:
    if tune.score == "magnitude":
        return magnitude_scores
    loss = mean_loss(config.loss_chunk)

    def scores(model: Any) -> Scores:
        some = _score_batches(config, mesh, text, tune)
        if tune.score == "sparsegpt":
            return sparsegpt_scores(model, input_products(model, loss, some))
        measure = {"taylor": taylor_scores, "wanda": wanda_scores}[tune.score]
        return measure(model, loss, some)

    return scores


def _update(
    config: TrainConfig, mesh: Mesh, text: TextData, tune: TuneConfig
) -> Callable[[Any, Masks], Any]:
    def update(model: Any, masks: Masks) -> Any:
        some = _score_batches(config, mesh, text, tune)
        with jax.set_mesh(mesh):
            products = input_products(model, mean_loss(config.loss_chunk), some)
        return update_weights(model, masks, products)

    return update


def _score_batches(
    config: TrainConfig, mesh: Mesh, text: TextData, tune: TuneConfig
) -> list[Any]:
    """The first batches of the training text, each time the same."""
    train_data, _ = packed_batches(config, text)
    batches = iter(train_data)
    try:
        return [to_rows(next(batches), config, mesh) for _ in range(tune.score_batches)]
    finally:
        getattr(batches, "close", lambda: None)()


def mean_loss(chunk_size: int = 1024) -> Callable[[Any, Any], Any]:
    """``loss(model, batch)`` by token, as scores want it; steps add sums.

    Args:
        chunk_size: Positions of each row whose logits exist at one time.
    """
    loss = next_token_loss(chunk_size=chunk_size)

    def mean(model: Any, batch: Any) -> Any:
        total, sums = loss(model, batch)
        return total / jnp.maximum(sums.tokens, 1).astype(jnp.float32)

    return mean


def bytes_per_token(text: TextData) -> float:
    """The bytes per token of the held-out text; NaN where none is held out.

    They make the losses of different tokenizers comparable.
    """
    if text.held_out is None:
        return math.nan
    tokens = text.held_out.tokens
    return len(text.tokenizer.decode(tokens.tolist()).encode()) / len(tokens)
