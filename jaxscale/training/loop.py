"""The training loop."""

import contextlib
import dataclasses
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import optax
from jax.sharding import Mesh, NamedSharding

from jaxscale.models.decoder import Decoder
from jaxscale.models.encoder import EncoderModel
from jaxscale.models.encoder_config import EncoderConfig
from jaxscale.models.vocabulary import fitted
from jaxscale.observability.layout import layout_args
from jaxscale.sharding.mesh import make_mesh
from jaxscale.sharding.parameters import place
from jaxscale.sharding.state_rules import StateRules
from jaxscale.supervision import EventLog, current, phases
from jaxscale.training.agreement import check_same_settings, of_first_or_error
from jaxscale.training.assemble import adapted, loss_functions, make_loss, new_state
from jaxscale.training.checkpoint.reader import SCHEDULE_STEPS
from jaxscale.training.checkpoint.store import Checkpointer
from jaxscale.training.compilation_cache import programs_in
from jaxscale.training.config import TrainConfig
from jaxscale.training.data.packed import PackedBatches, TextData
from jaxscale.training.evaluation import Evaluation, closing, evaluate, to_rows
from jaxscale.training.gradients import LossFunction
from jaxscale.training.hardware import peak_flops
from jaxscale.training.lock import locked
from jaxscale.training.monitoring.console import console_writer, describe, peak_memory
from jaxscale.training.monitoring.device_events import device_events
from jaxscale.training.monitoring.divergence import DivergenceGuard
from jaxscale.training.monitoring.monitor import (
    JsonlWriter,
    Monitor,
    TensorBoardWriter,
    Writer,
)
from jaxscale.training.monitoring.trackers import trackers
from jaxscale.training.optimizer import (
    check_same_schedule,
    make_optimizer,
    make_schedule,
)
from jaxscale.training.preemption_signal import stop_on_signal
from jaxscale.training.pretrained import pretrained
from jaxscale.training.run import checkpoint_settings
from jaxscale.training.step import (
    Metrics,
    TrainState,
    frozen_part,
    has_frozen,
    make_train_step,
    state_shardings,
    trained_part,
    with_frozen,
)
from pallas_kernels.mosaic import compile_ahead, keep_modules


logger = logging.getLogger("jaxscale.training")

type Hook = Callable[[int, TrainState, Metrics], TrainState | None]
"""``hook(step, state, metrics)`` after each step; a state that it returns is used
next."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FitResult:
    """The in-memory results of `fit`."""

    state: TrainState
    """The state after the last step, on the mesh."""
    evaluation: Evaluation | None
    """The last evaluation; None if there was none."""
    interrupted: bool
    """True if a signal ended the run early, after saving a checkpoint."""


def fit(
    config: TrainConfig,
    *,
    train_data: Iterable[Any],
    eval_data: Iterable[Any] | None = None,
    model: Any = None,
    loss: LossFunction | None = None,
    hooks: Sequence[Hook] = (),
    gradient_transforms: Sequence[optax.GradientTransformation] = (),
    transforms: Sequence[optax.GradientTransformation] = (),
    writers: Sequence[Writer] | None = None,
    devices: Sequence[Any] | None = None,
) -> FitResult:
    """Train a model, resuming from the newest checkpoint in the output directory.

    The same call starts a run, resumes an interrupted one exactly, on the same or
    another mesh, and evaluates a finished one. On GPUs the output directory caches the
    compiled programs for that, unless JAX has a compilation cache. SIGTERM or SIGINT
    (Ctrl-C) ends the run after the current step, and its evaluation if one is due, with
    a checkpoint; a second one ends it at once. With several processes any of them may
    get the SIGTERM.

    Args:
        config: The settings of the run.
        train_data: Batches (`PackedBatch`) for all steps. Its iterator has
            ``get_state()`` and ``set_state(state)``, as that of `PackedBatches`, and
            may have ``progress()``: numbers for the metrics.
        eval_data: Held-out batches, of which ``config.eval_batches`` are evaluated; see
            `evaluate`.
        model: A model to start from, for example pretrained; its arrays are donated.
            Its types, `remat`, `scan_layers`, `tensor_parallel` and `quantization`
            override those of `config`, and are recorded in the checkpoints. None makes
            the model of `config`, with the weights of ``config.source`` if that is
            given.
        loss: The objective, a function of a model and a batch. None is the loss of an
            encoder's head, `masked_lm_loss` or `classification_loss`, and
            `next_token_loss` for decoders.
        hooks: Called after each step.
        gradient_transforms: Optax transforms of the gradients before they are clipped,
            such as the masks of a pruned model.
        transforms: More optax transforms before the learning rate.
        writers: Writers of the metric records; None is a progress bar in a terminal or
            log lines elsewhere, ``metrics.jsonl`` and TensorBoard in the output
            directory, and ``config.trackers``.
        devices: Devices of the mesh; None is all.

    Returns:
        The final state and the last evaluation.

    Raises:
        ValueError: the settings do not fit the devices, ``config.model`` differs from
            `model`, on several devices ``config.rules`` are not its rules,
            ``config.z_loss`` is given together with `loss`, the checkpoint in the
            output directory belongs to another run or had a schedule for another number
            of steps, `eval_data` has no end, or `train_data` ends before the last step.
        FileNotFoundError: there is no checkpoint of ``config.step``.
        DamagedCheckpoint: that checkpoint, or every one there, cannot be read.
        CheckpointNotWritten: a checkpoint could not be written; raised after the next
            step.
        Diverged: ``config.max_skipped`` consecutive updates were not finite, or the
            final parameters are not. The last good checkpoint is kept: none is written
            while updates are skipped.
        ReplicasDiffer: with ``config.check_replicas_every``, a device's replica of an
            array differs from the others.
        TypeError: the position of `train_data` cannot be saved, or `eval_data` can be
            iterated over only once.
    """
    config = _checked(config, model, loss)
    check_same_settings(config)
    if model is not None and not has_frozen(model):
        model = adapted(config, model)
    mesh = make_mesh(config.mesh, devices)
    config.check_mesh(mesh.shape)
    if mesh.size > 1:
        config.check_rules(model)
    _check_data(train_data, eval_data)
    optimizer = make_optimizer(
        config.optimizer,
        config.steps,
        gradient_transforms=gradient_transforms,
        transforms=transforms,
    )
    if loss is None:
        loss = make_loss(config)
    gradients, eval_step = loss_functions(config, mesh, loss)
    evaluation, events = None, current()

    with contextlib.ExitStack() as stack:
        directory = Path(config.output_dir)
        of_first_or_error(lambda: stack.enter_context(locked(directory)))
        stack.enter_context(jax.set_mesh(mesh))
        file = directory / f"events-{jax.process_index()}.jsonl"
        stack.enter_context(events.written_to(file))
        events.emit(phases.LAYOUT, 0, **layout_args(mesh, jax.process_index(), config))
        ahead = stack.enter_context(contextlib.ExitStack())
        if mesh.devices.flat[0].platform == "gpu":
            cached = stack.enter_context(programs_in(directory / "programs"))
            stack.enter_context(keep_modules())
            if not cached:
                ahead.enter_context(compile_ahead(mesh.local_devices[0]))
        # Before the checkpointer, which is closed when the last checkpoint is written.
        asked_to_stop = stack.enter_context(stop_on_signal())
        checkpoints = stack.enter_context(_checkpointer(config))
        monitor = stack.enter_context(_monitor(config, mesh, writers, events))
        batches: Any = stack.enter_context(closing(iter(train_data)))
        # Before the above are closed, which may wait for dead processes.
        stack.enter_context(events.reported())

        # 1. The state, new or restored, on the mesh.
        events.emit(phases.RESTORE, 0)
        config = dataclasses.replace(config, step=events.at_first(config.step))
        if events.resume_before and config.step is None:
            checkpoints.set_aside_after(events.resume_before - 1)
        state, layout = _start(config, mesh, optimizer, model, checkpoints, batches)
        del model  # its arrays belong to the state
        train_step = make_train_step(
            gradients,
            optimizer,
            schedule=make_schedule(config.optimizer, config.steps),
            shardings=layout,
        )

        # 2. Steps. None of these lines waits for the previous step.
        first = step = int(state.step)
        for line in describe(config, mesh, state):
            monitor.note(line)
        monitor.start(first)
        guard = DivergenceGuard(config, checkpoints, events)
        events.emit(phases.COMPILE, first, kind="compile")
        if first < config.steps:
            monitor.note("compile the step, before the first one")
        for step in range(first + 1, config.steps + 1):
            with monitor.data_wait(step):
                batch = _next(batches, step, config, events.skips.get(step, 0))
                batch = to_rows(batch, config, mesh)
            state, metrics = train_step(state, batch)
            ahead.close()  # the step is compiled
            monitor.log(step, metrics, _progress(batches))
            guard.check(step, state, metrics)
            checkpoints.check()
            for hook in hooks:
                state = hook(step, state, metrics) or state

            # 3. Periodically: save, in the background, and evaluate.
            last, stop = step == config.steps, asked_to_stop(step)
            if last or stop or step % config.checkpoint_every == 0:
                with monitor.pause(phases.SAVE, step):
                    monitor.note(f"step {step}: save, while the next steps go on")
                    guard.save(step, state, batches, final=last or stop)
            if eval_data is not None and (last or step % config.eval_every == 0):
                with monitor.pause(phases.EVAL, step):
                    evaluation = evaluate(config, mesh, eval_step, state, eval_data)
                    monitor.log_evaluation(step, **dataclasses.asdict(evaluation))
            # After the evaluation, which the resumed run would not repeat.
            if stop and not last:
                logger.warning("stopped by a signal after step %d", step)
                events.emit(phases.STOPPED, step)
                break
        if eval_data is not None and first == config.steps:
            with monitor.pause(phases.EVAL, first):
                evaluation = evaluate(config, mesh, eval_step, state, eval_data)
        state = _flattened(state, config, mesh)
        peak = peak_memory(mesh)
        memory = f"; at most {peak} were in use" if peak else ""
        monitor.note(f"end after step {step} of {config.steps}{memory}")
    return FitResult(
        state=state, evaluation=evaluation, interrupted=step < config.steps
    )


def packed_batches(
    config: TrainConfig, text: TextData, devices: Sequence[Any] | None = None
) -> tuple[PackedBatches, PackedBatches | None]:
    """Batches for `fit` on the mesh of `config`: unlimited training, one held-out
    epoch.

    Args:
        config: The settings of the run.
        text: The result of `load_text`.
        devices: Devices of the mesh; None is all.
    """
    mesh = make_mesh(config.mesh, devices)
    rows = NamedSharding(mesh, config.axis_rules.spec("batch"))
    train = PackedBatches(text.train, config.data, sharding=rows)
    if text.held_out is None:
        return train, None
    return train, PackedBatches(
        text.held_out, config.data, sharding=rows, epochs=1, shuffle=False
    )


def _check_data(train_data: Any, eval_data: Any) -> None:
    """Raise now, not at the first checkpoint or the second evaluation."""
    with closing(iter(train_data)) as batches:
        if not (hasattr(batches, "get_state") and hasattr(batches, "set_state")):
            raise TypeError(
                f"train_data gives a {type(batches).__name__} without get_state() and "
                "set_state(), so no checkpoint could hold its position; give "
                "PackedBatches, or an iterator that has both"
            )
    if eval_data is not None and getattr(eval_data, "is_endless", False):
        raise ValueError(
            f"eval_data is a {type(eval_data).__name__} without end (epochs None), so "
            "an evaluation would count texts again; make it with epochs=1"
        )
    if eval_data is not None and iter(eval_data) is eval_data:
        raise TypeError(
            f"eval_data is a {type(eval_data).__name__}, which ends after the first "
            "evaluation; give a list, or an object that begins anew at each iter()"
        )


def _checked(config: TrainConfig, model: Any, loss: LossFunction | None) -> TrainConfig:
    """The settings, completed by the model's, if they and the loss fit together."""
    if model is not None:
        config = config.of_model(model)
    if loss is not None and config.z_loss:
        raise ValueError(
            f"z_loss {config.z_loss} is that of the loss that fit makes; give it to "
            "your own, as in next_token_loss(z_loss=...), and leave it 0 here"
        )
    if isinstance(config.model, EncoderConfig):
        kind = None if config.head is None else config.head.kind
        if loss is None and kind not in ("masked_lm", "sequence", "token"):
            raise ValueError(
                f"head {kind!r} of the encoder has no loss of its own; set one for the "
                "task in the settings, for example head=encoder_head(config.model, "
                "'masked_lm'), or give model and loss"
            )
    if config.lora.rank and model is None and config.source is None:
        raise ValueError(
            f"lora.rank {config.lora.rank} adapts a model that has weights; name them "
            "in source (jaxscale train --from), or give model"
        )
    return config


def _start(
    config: TrainConfig,
    mesh: Mesh,
    optimizer: optax.GradientTransformation,
    model: Any,
    checkpoints: Checkpointer,
    batches: Any,
) -> tuple[TrainState, TrainState]:
    """The new or restored state, and its shardings."""
    stack = config.stack_layout(mesh.shape)
    if isinstance(model, Decoder | EncoderModel):
        model = fitted(model, mesh.shape, config.axis_rules)

    def create() -> TrainState:
        return new_state(config, mesh, optimizer)

    def adopt(model: Any) -> TrainState:
        return TrainState.create(stack.arrange(model), optimizer)

    abstract = jax.eval_shape(create) if model is None else jax.eval_shape(adopt, model)
    layout = state_shardings(abstract, mesh, config.state_rules)
    resumed = config.step is not None or checkpoints.newest() is not None
    frozen = has_frozen(abstract.model)  # which checkpoints leave out
    flat = _flat_rules(config, mesh).parameters
    if model is None and config.source is not None and (frozen or not resumed):
        model = pretrained(config, mesh, places=flat)
    if model is not None:
        model = place(model, mesh, flat)
    if resumed:
        planned = checkpoints.config(config.step).get(SCHEDULE_STEPS)
        target = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
            abstract,
            layout,
        )
        base = frozen_part(model) if frozen else None
        state, position = checkpoints.restore(
            trained_part(target), config.step, base=base
        )
        if frozen:
            whole = with_frozen(state.model, model)
            state = dataclasses.replace(state, model=whole)
        _check_steps(config, int(state.step))
        check_same_schedule(config.optimizer, config.steps, planned)
        batches.set_state(position)
        checkpoints.set_aside_after(int(state.step))  # not to be read
        logger.info("continue after step %d", int(state.step))
    elif model is None:
        state = jax.jit(create, out_shardings=layout)()
    else:
        # Layers that are rearranged for stages cannot reuse the memory of the given
        # ones.
        donated = 0 if stack.is_flat else ()
        adopt = jax.jit(adopt, out_shardings=layout, donate_argnums=donated)
        state = adopt(model)
    return state, layout


def _flat_rules(config: TrainConfig, mesh: Mesh) -> StateRules:
    """The sharding rules of a state whose layers are in model order."""
    is_flat = config.stack_layout(mesh.shape).is_flat
    return config.state_rules if is_flat else config.state_rules.with_flat_layers()


def _flattened(state: TrainState, config: TrainConfig, mesh: Mesh) -> TrainState:
    """`state` with its layers in model order, as other programs expect it."""
    stack = config.stack_layout(mesh.shape)
    if stack.is_flat:
        return state
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
    abstract = jax.eval_shape(stack.flatten, shapes)
    places = state_shardings(abstract, mesh, _flat_rules(config, mesh))

    def flatten(x: jax.Array) -> jax.Array:
        return stack.flatten_array(jax.device_put(x, jax.memory.Space.Device))

    def moved(x: Any, wanted: Any, place: NamedSharding) -> Any:
        if x.shape == wanted.shape:
            return jax.device_put(x, place)
        flat = jax.jit(flatten, out_shardings=place)(x)
        x.delete()  # one by one: two copies of all do not fit
        return flat

    leaves, wanted = jax.tree.leaves(state), jax.tree.leaves(abstract)
    leaves = map(moved, leaves, wanted, jax.tree.leaves(places))
    return jax.tree.unflatten(jax.tree.structure(abstract), leaves)


def _check_steps(config: TrainConfig, done: int) -> None:
    if done > config.steps:
        raise ValueError(
            f"steps {config.steps}, but the run in output_dir {config.output_dir} "
            f"has done {done} already; raise steps, or choose another directory"
        )


def _checkpointer(config: TrainConfig) -> Checkpointer:
    return Checkpointer(
        Path(config.output_dir) / "checkpoints",
        keep=config.keep,
        keep_every=config.keep_every,
        config=checkpoint_settings(config),
        source=config.source,
    )


def _monitor(
    config: TrainConfig,
    mesh: Mesh,
    writers: Sequence[Writer] | None,
    events: EventLog,
) -> Monitor:
    if writers is None:
        directory = Path(config.output_dir)
        writers = [
            console_writer(),
            JsonlWriter(directory / "metrics.jsonl"),
            TensorBoardWriter(directory / "tensorboard"),
            *trackers(config),
        ]
    length = config.data.seq_len
    return Monitor(
        writers if jax.process_index() == 0 else (),
        num_devices=mesh.size,
        total_steps=config.steps,
        log_every=config.log_every,
        flops_per_token={
            "causal": config.model.flops_per_token(length, causal=True),
            "full": config.model.flops_per_token(length, causal=False),
        },
        peak_flops=peak_flops(mesh.devices.flat[0].device_kind),
        events=events,
        devices=device_events(config, mesh, events),
    )


def _progress(batches: Any) -> dict[str, float]:
    """Metrics that the batches report, if any."""
    return getattr(batches, "progress", dict)()


def _next(
    batches: Iterator[Any], step: int, config: TrainConfig, left_out: int = 0
) -> Any:
    """The batch after the skipped ones."""
    for batch in itertools.islice(batches, left_out, None):
        return batch
    raise ValueError(
        f"train_data ended before step {step} of {config.steps}; give more data, more "
        "epochs, or lower steps"
    )
