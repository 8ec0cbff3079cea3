"""``jaxscale train RUN [OPTIONS]``: train a decoder from a named run."""

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
from jaxscale.cli.devices import simulate_devices
from jaxscale.cli.errors import UsageError, training_errors, usage_errors
from jaxscale.cli.options import parse
from jaxscale.cli.runs import find_run
from jaxscale.models import PRESETS
from jaxscale.recipes.runs import check_machine
from jaxscale.training import (
    FitResult,
    TextData,
    TrainConfig,
    console,
    fit,
    load_text,
    packed_batches,
)
from jaxscale.training import run as run_directory


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainCommand:
    """The options of ``jaxscale train RUN``."""

    config: Annotated[TrainConfig, tyro.conf.arg(name="")]
    """The run."""
    resume: Literal["no", "auto"] = "no"
    """auto, or the option alone: continue the run in the output directory from its
    newest checkpoint; a directory that is free gets a new run."""
    devices: int | None = None
    """Simulate this many CPU devices instead of using those of the machine."""
    xla_flags: tuple[sharding.XlaPreset, ...] = ()
    """Presets of XLA's flags: overlap hides more communication, host_kernels lets fused
    kernels run in several processes."""


def main(arguments: Sequence[str]) -> int:
    """Run the command.

    Raises:
        UsageError: the settings cannot work; nothing has been compiled or written.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_help())
        return 0
    supervision.current()  # under a supervisor, say that this process lives
    name, *options = arguments
    if name.startswith("-"):
        raise UsageError(f"the run comes first: jaxscale train RUN {name} ...")
    with usage_errors():
        run = find_run(name)
    command = parse(
        TrainCommand,
        _with_resume(options),
        prog=f"jaxscale train {name}",
        description=f"Train {name}. Options change the settings of the named run.",
        default=TrainCommand(config=run),
    )
    with usage_errors():
        sharding.use_xla_flags(*command.xla_flags)
    simulate_devices(command.devices)
    if command.config.tensor_parallel == "fused":
        sharding.launch_in_order()
    with usage_errors():
        sharding.initialize()
    resume = command.resume == "auto"
    result = train(command.config, resume=resume)
    if jax.process_index() == 0:
        print(_report(command.config, result))
    return 1 if result.interrupted else 0


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
        UsageError: the settings cannot work; nothing has been compiled or written. Or
            no checkpoint of the run can be read, or not that of ``config.step``.
        RunFailed: the run diverged, or could not write a checkpoint.
    """
    step = supervision.current().at_first(config.step)
    config = dataclasses.replace(config, step=step)
    directory = Path(config.output_dir)
    with usage_errors():
        check_machine(config)
        run_directory.check_free(directory, config, resume=resume)
        text = load_text(config.data)
        run_directory.check_text(directory, text)
        train_data, eval_data = packed_batches(config, text)
        # A meeting too: nobody writes before everybody has found the directory free.
        _check_same_text(text)
        if jax.process_index() == 0:
            run_directory.write(directory, config, text)
            if not console.shows_bar():
                console.say(_told(text))
    with training_errors(), run_directory.given_up_on_failure(directory):
        return fit(config, train_data=train_data, eval_data=eval_data)


def _told(text: TextData) -> str:
    """How much text there is, in words."""
    train, held_out = text.train, text.held_out
    told = f"text: {len(train):,} documents of {train.num_tokens:,} tokens to train on"
    if held_out is None:
        return f"{told}, none held out"
    return f"{told}, {len(held_out):,} of {held_out.num_tokens:,} held out"


def _check_same_text(text: TextData) -> None:
    """Compare the text of all processes."""
    if jax.process_count() == 1:
        return
    mine = np.frombuffer(bytes.fromhex(text.train.fingerprint), np.uint32)
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
    if skipped := int(result.state.skipped):
        quality += f", {skipped} updates skipped because they were not finite"
    return (
        f"{step} steps{quality}; try: jaxscale generate --from {directory} "
        '--prompt "..."'
    )


def _help() -> str:
    runs = "\n".join(f"  {name}" for name in PRESETS)
    return f"""usage: jaxscale train RUN [OPTIONS]

Train a decoder. RUN names the settings to start from, each of which is an option:
`jaxscale train RUN --help` describes them. Without other text in --data.paths, the
model learns from the documentation and library source of the running Python.

runs:
{runs}
  module:function  your own function without arguments that returns a TrainConfig

examples:
  jaxscale train llama_tiny --steps 100 --output-dir runs/tiny
  jaxscale train llama_tiny --devices 4 --mesh.fsdp 2 --mesh.tensor 2
  jaxscale train llama_1b --data.paths corpus/ --data.tokenizer tokenizer.json
  jaxscale train llama_tiny --steps 200 --output-dir runs/tiny --resume
  jaxscale train llama_tiny --output-dir runs/tiny --supervise --supervise.processes 2
  jaxscale generate --from runs/tiny --prompt "import "
"""
