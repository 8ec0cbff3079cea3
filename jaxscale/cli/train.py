"""``jaxscale train RUN [OPTIONS]``: train a preset, or fine-tune a model."""

import contextlib
import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import jax
import numpy as np
import tyro
from jax.experimental import multihost_utils

from jaxscale import sharding, supervision
from jaxscale.cli.devices import announce_devices, simulate_devices
from jaxscale.cli.errors import UsageError, training_errors, usage_errors
from jaxscale.cli.notices import notice
from jaxscale.cli.option_names import check_names
from jaxscale.cli.options import parse
from jaxscale.cli.runs import find_run, is_source
from jaxscale.cli.sources import take_option
from jaxscale.models import ENCODER_PRESETS, PRESETS, EncoderConfig
from jaxscale.observability import write_page
from jaxscale.recipes import check_machine, from_source, prepare
from jaxscale.training import FitResult, TrainConfig, fit
from jaxscale.training import run as run_directory
from jaxscale.training.agreement import check_same_settings, of_first_or_error
from jaxscale.training.lock import locked
from jaxscale.training.monitoring import console


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainCommand:
    """The options of ``jaxscale train RUN``."""

    config: Annotated[TrainConfig, tyro.conf.arg(name="")]
    """The settings of the run."""
    resume: Literal["no", "auto"] = "no"
    """auto, or the option alone: continue the run in the output directory from its
    newest checkpoint, or start a new run if there is none."""
    devices: int | None = None
    """Simulate this many CPU devices instead of using those of the machine."""
    xla_flags: tuple[sharding.XlaPreset, ...] = ()
    """Presets of XLA flags: overlap hides more communication behind compute,
    host_kernels lets fused kernels run in several processes."""


def main(arguments: Sequence[str]) -> int:
    """Run the command.

    Raises:
        UsageError: the settings cannot work; nothing has been compiled or written.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_help())
        return 0
    supervision.current()  # under a supervisor, say that this process lives
    check_names(TrainCommand, arguments)  # before a source is read
    name, run, options = _run_of(arguments)
    command = parse(
        TrainCommand,
        _with_resume(options),
        prog=f"jaxscale train {name}",
        description=f"Train {name}. Options change the settings of the run.",
        default=TrainCommand(config=run),
    )
    with usage_errors():
        sharding.use_xla_flags(*command.xla_flags)
    simulate_devices(command.devices)
    if command.config.tensor_parallel == "fused":
        sharding.launch_in_order()
    with usage_errors():
        sharding.initialize()
        announce_devices()
    resume = command.resume == "auto"
    result = train(command.config, resume=resume)
    if jax.process_index() == 0:
        page = _page(command.config)
        print(f"{_report(command.config, result)}; report: {page}")
    return 1 if result.interrupted else 0


def _run_of(arguments: Sequence[str]) -> tuple[str, TrainConfig, list[str]]:
    """What is trained, in words; its settings; and the words that change them."""
    source, words = take_option(arguments)
    if words and not words[0].startswith("-"):
        name, *words = words
        if source is not None:
            raise UsageError(
                f"--from {source} takes the place of the run {name!r}; leave it out"
            )
        if not is_source(name):
            with usage_errors():
                return name, find_run(name), words
        source = name
    if source is None:
        raise UsageError(f"the run comes first: jaxscale train RUN {words[0]} ...")
    with usage_errors():
        return f"--from {source}", from_source(source), words


def _with_resume(options: Sequence[str]) -> list[str]:
    """The options with ``--resume`` alone written out."""
    words = [*options, "--"]
    return [
        "--resume=auto" if word == "--resume" and following.startswith("--") else word
        for word, following in itertools.pairwise(words)
    ]


def train(config: TrainConfig, *, resume: bool = False) -> FitResult:
    """Check `config`, prepare its output directory and text, and train.

    Args:
        config: The settings of the run.
        resume: True continues the run in the output directory.

    Raises:
        UsageError: the settings cannot work, differ between processes, or another
            process writes to the directory; nothing has been compiled or written. Or no
            checkpoint of the run can be read, or not that of ``config.step``.
        RunFailed: the run diverged, or could not write a checkpoint.
    """
    step = supervision.current().at_first(config.step)
    config = dataclasses.replace(config, step=step)
    directory = Path(config.output_dir)
    with contextlib.ExitStack() as stack:
        with usage_errors():
            check_same_settings(config)
            of_first_or_error(lambda: stack.enter_context(locked(directory)))
        result = _train(config, directory, resume=resume)
        if jax.process_index() == 0:
            write_page(directory, _page(config))
        return result


def _page(config: TrainConfig) -> Path:
    """Where the report of a run stands."""
    return Path(config.output_dir) / "report.html"


def _train(config: TrainConfig, directory: Path, *, resume: bool) -> FitResult:
    with usage_errors():
        check_machine(config)
        if jax.process_index() == 0:
            for line in _about(config):
                notice(line)
        run_directory.check_free(directory, config, resume=resume)
        task = prepare(config)
        config = task.config
        run_directory.check_text(directory, task.text)
        # A meeting too: nobody writes before everybody has found the directory free.
        _check_same_text(task.text)
        if jax.process_index() == 0:
            run_directory.write(directory, config, task.text)
            # A log has its lines; beside a bar that moves they stand above it.
            (notice if console.shows_bar() else console.say)(task.told)
    with training_errors(), run_directory.given_up_on_failure(directory):
        return fit(config, train_data=task.train_data, eval_data=task.eval_data)


def _about(config: TrainConfig) -> list[str]:
    """What is known of a run before anything is read or compiled."""
    mesh = console.facts(config, sharding.make_mesh(config.mesh))["mesh"]
    rate = config.optimizer.learning_rate
    return [
        f"mesh: {mesh}",
        f"model: {config.model.num_parameters():,} parameters, "
        f"{config.model.d_model} wide, learning rate {rate:g}",
    ]


def _check_same_text(text: run_directory.Text) -> None:
    """Compare the text of all processes."""
    if jax.process_count() == 1:
        return
    mine = np.frombuffer(bytes.fromhex(text.fingerprint), np.uint32)
    everyones = np.asarray(multihost_utils.process_allgather(mine))
    others = np.flatnonzero((everyones != everyones[0]).any(axis=1))
    if others.size:
        raise ValueError(
            f"the processes {others.tolist()} found other text than process 0: files, "
            "tokenizer or Python differ between the hosts; give all of them the same "
            "data.paths, for example on a shared file system"
        )


def _report(config: TrainConfig, result: FitResult) -> str:
    """Tell the user the result of a run, and what to do next."""
    step, directory = int(result.state.step), config.output_dir
    if result.interrupted:
        return (
            f"stopped after step {step} of {config.steps}; its checkpoint is in "
            f"{directory}: the same command with --resume continues"
        )
    held_out = result.evaluation
    quality = f", held-out loss {held_out.loss:.3f}" if held_out else ""
    if held_out and config.data.label_field and held_out.accuracy is not None:
        quality += f", accuracy {held_out.accuracy:.1%}"
    if held_out:
        quality += f" ({held_out.extent})"
    if skipped := int(result.state.skipped):
        quality += f", {skipped} updates skipped because they were not finite"
    following = f'jaxscale generate --from {directory} --prompt "..."'
    if isinstance(config.model, EncoderConfig):
        following = f"jaxscale export {directory} {directory}/hf"
    return f"{step} steps{quality}; try: {following}"


def _help() -> str:
    runs = "\n".join(f"  {name}" for name in PRESETS)
    encoders = "\n".join(f"  {name}" for name in ENCODER_PRESETS)
    return f"""usage: jaxscale train (RUN | SOURCE | --from SOURCE) [OPTIONS]

Train a model. RUN names the settings to start from, each of which is an option:
`jaxscale train RUN --help` describes them. SOURCE has weights to begin with: a Hugging
Face directory, the name of a model on its hub, or the output directory of a run.
Without other text in --data.paths, the model learns from the documentation and library
source of the running Python. A decoder learns the next token; an encoder learns to
guess hidden tokens or, with --data.label-field, to classify texts.

runs:
{runs}
{encoders}
  module:function  your own function without arguments that returns a TrainConfig

examples:
  jaxscale train llama_tiny --steps 100 --output-dir runs/tiny
  jaxscale train llama_tiny --devices 4 --mesh.fsdp 2 --mesh.tensor 2
  jaxscale train llama_1b --data.paths corpus/ --data.tokenizer tokenizer.json
  jaxscale train llama_tiny --steps 200 --output-dir runs/tiny --resume
  jaxscale train llama_tiny --output-dir runs/tiny --supervise --supervise.processes 2
  jaxscale train --from meta-llama/Llama-3.2-1B --data.paths notes.jsonl --lora.rank 8
  jaxscale train --from bert/ --data.paths reviews.jsonl --data.label-field stars
  jaxscale generate --from runs/tiny --prompt "import "
"""
