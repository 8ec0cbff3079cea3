"""``jaxscale prune SOURCE``: prune a model and fine-tune it under the masks."""

import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from jaxscale.checks import check_least
from jaxscale.cli.devices import announce_devices, simulate_devices
from jaxscale.cli.errors import training_errors, usage_errors
from jaxscale.cli.notices import notice
from jaxscale.cli.option_names import check_names
from jaxscale.cli.options import parse
from jaxscale.cli.sources import source_first
from jaxscale.nn import LoraConfig
from jaxscale.pruning import PruneConfig, layer_reports, lost_layers
from jaxscale.recipes import from_source
from jaxscale.recipes.prune import (
    Pruned,
    TuneConfig,
    make_stages,
    open_source,
    prune_and_tune,
    tuning_config,
)
from jaxscale.recipes.prune_report import finish
from jaxscale.sharding import MeshConfig
from jaxscale.training import DataConfig, TrainConfig
from jaxscale.training import run as run_directory
from jaxscale.training.lock import locked


@dataclasses.dataclass(frozen=True, kw_only=True)
class PruneCommand:
    """The options of ``jaxscale prune``."""

    source: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="SOURCE")]
    """The output directory of a run, a Hugging Face directory, or the name of a model
    on its hub; also --from SOURCE."""
    data: DataConfig = DataConfig()
    """Text for fine-tuning and evaluation: by default that of the run, or for another
    model the documentation and library source of the running Python."""
    prune: Annotated[PruneConfig, tyro.conf.arg(name="")] = PruneConfig()
    """Pattern, sparsity and layers of the pruning."""
    tune: Annotated[TuneConfig, tyro.conf.arg(name="")] = TuneConfig(control=True)
    """Importance scores, and the schedule of the pruning stages."""
    steps: int = 200
    """Fine-tuning steps under the masks."""
    eval_batches: int | None = None
    """Maximum number of batches per evaluation, drawn evenly from the held-out text; by
    default that of the run, or 32."""
    learning_rate: float | None = None
    """Peak learning rate of the fine-tuning; by default half that of the run, or 3e-5
    for a model without a run."""
    output_dir: Path = Path("runs/pruned")
    """Directory for the pruned run: checkpoints, masks.safetensors, metrics and
    report.html."""
    step: int | None = None
    """Step of the checkpoint of a run; the newest by default."""
    mesh: MeshConfig = MeshConfig(fsdp=-1)
    """Device mesh; the sharding rules are those of the run."""
    devices: int | None = None
    """Simulate this many CPU devices instead of using those of the machine."""

    def __post_init__(self) -> None:
        """Check what needs no files."""
        check_least(self, 1, "steps")
        make_stages(self.prune, self.tune, self.steps)  # raises if they do not fit


def main(arguments: Sequence[str]) -> int:
    """Run the command.

    Raises:
        UsageError: the model cannot be pruned as asked; nothing has been written.
    """
    words = source_first(arguments)
    check_names(PruneCommand, words)  # before a source is read
    first = words[0] if words and not words[0].startswith("-") else None
    source = _parse(words).source if first is None else first
    with usage_errors():  # the text of its run is what options change
        default = PruneCommand(source=source, data=_run_of(source).data)
    command = _parse(words, default)
    simulate_devices(command.devices)
    with usage_errors():
        announce_devices()
    pruned = run(command)
    if gone := lost_layers(layer_reports(pruned.masks, pruned.scores)):
        print(f"layers that lost everything: {', '.join(gone)}")
    if dense := pruned.dense_layers():
        print(f"layers that keep most of their weights run dense: {', '.join(dense)}")
    beside = ""
    if pruned.control is not None:
        beside = f", dense trained as long {pruned.control.loss:.3f}"
    print(
        f"held-out loss: dense {pruned.before.loss:.3f}, pruned "
        f"{pruned.after.loss:.3f}, trained under the masks {pruned.tuned.loss:.3f}"
        f"{beside}; report: {command.output_dir / 'report.html'}; try: "
        f'jaxscale generate --from {command.output_dir} --prompt "..."'
    )
    return 0


def _parse(words: Sequence[str], default: PruneCommand | None = None) -> PruneCommand:
    return parse(
        PruneCommand,
        words,
        prog="jaxscale prune",
        description="Prune a trained model and fine-tune it under the masks.",
        default=default,
    )


def _run_of(source: str) -> TrainConfig:
    """The settings to continue training with: those of the model's run, if any."""
    directory = Path(source)
    if not run_directory.is_run(directory):
        return from_source(source)
    run = run_directory.read_config(directory)
    # Adapters are merged when the model is loaded.
    source = str(directory.resolve())  # found from elsewhere too
    return dataclasses.replace(run, source=source, lora=LoraConfig(), step=None)


def run(command: PruneCommand) -> Pruned:
    """Prune, fine-tune, and write masks and report.

    Raises:
        UsageError: the model cannot be pruned as asked; nothing has been written.
        RunFailed: the training under the masks diverged.
    """
    with contextlib.ExitStack() as stack:
        with usage_errors():
            stack.enter_context(locked(command.output_dir))
        return _run(command, command.output_dir)


def _run(command: PruneCommand, directory: Path) -> Pruned:
    with usage_errors():
        run = _run_of(command.source)
        rate = command.learning_rate
        if rate is None and not run_directory.is_run(Path(command.source)):
            rate = (
                run.optimizer.learning_rate
            )  # meant for weights that are good already
        config = tuning_config(
            dataclasses.replace(
                run,
                data=command.data,
                eval_batches=command.eval_batches or run.eval_batches,
            ),
            steps=command.steps,
            learning_rate=rate,
            mesh=command.mesh,
            output_dir=directory,
        )
        notice(f"reading {command.source}")
        model, text = open_source(config, command.prune, step=command.step)
    print(
        f"prune {command.source} to {command.prune.sparsity:.1%}, pattern "
        f"{command.prune.pattern}"
    )
    with training_errors(), run_directory.given_up_on_failure(directory):
        pruned = prune_and_tune(config, model, text, command.prune, command.tune)
    finish(directory, pruned, text)
    return pruned
