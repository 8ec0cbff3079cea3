"""``jaxscale prune --from RUN``: prune a trained model and train it under the masks."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import jax
import tyro

from jaxscale.cli import run_directory
from jaxscale.cli.devices import simulate_devices
from jaxscale.cli.errors import training_errors, usage_errors
from jaxscale.cli.options import parse
from jaxscale.cli.pruning import (
    Pruned,
    TuneConfig,
    add_to_report,
    bytes_per_token,
    make_stages,
    prune_and_tune,
)
from jaxscale.cli.train import check
from jaxscale.pruning import PruneConfig, check_layers
from jaxscale.sharding import MeshConfig, make_mesh
from jaxscale.training import TextData, TrainConfig, load_text
from jaxscale.training.report import Report


@dataclasses.dataclass(frozen=True, kw_only=True)
class PruneCommand:
    """What the options of ``jaxscale prune`` describe."""

    source: Annotated[str, tyro.conf.arg(name="from", metavar="DIR")]
    """The output directory of a run of this command line."""
    prune: Annotated[PruneConfig, tyro.conf.arg(name="")] = PruneConfig()
    """What to prune."""
    tune: Annotated[TuneConfig, tyro.conf.arg(name="")] = TuneConfig()
    """How to score, and when to prune."""
    steps: int = 200
    """Training steps under the masks, with the batches of the run."""
    learning_rate: float | None = None
    """Peak of the training under the masks; by default half that of the run."""
    output_dir: Path = Path("runs/pruned")
    """The pruned run: checkpoints, masks.safetensors, metrics and report.html."""
    step: int | None = None
    """Which checkpoint to prune; the newest by default."""
    mesh: MeshConfig = MeshConfig(fsdp=-1)
    """Devices; what they split is as in the run."""
    devices: int | None = None
    """Simulate this many CPU devices instead of using those of the machine."""

    def __post_init__(self) -> None:
        """Check what needs no files."""
        if self.steps < 1:
            raise ValueError(f"steps {self.steps}, expected at least 1")
        make_stages(self.prune, self.tune, self.steps)  # raises if they do not fit


def main(arguments: Sequence[str]) -> int:
    """Run the command.

    Raises:
        UsageError: the model cannot be pruned as asked; nothing has been written.
    """
    command = parse(
        PruneCommand,
        arguments,
        prog="jaxscale prune",
        description="Prune a trained model and train it under the masks.",
    )
    simulate_devices(command.devices)
    pruned = run(command)
    print(
        f"held-out loss: dense {pruned.before.loss:.3f}, pruned "
        f"{pruned.after.loss:.3f}, trained under the masks {pruned.tuned.loss:.3f}; "
        f"report: {command.output_dir / 'report.html'}; try: jaxscale generate --from "
        f'{command.output_dir} --prompt "..."'
    )
    return 0


def run(command: PruneCommand) -> Pruned:
    """Prune, train, and write masks and report.

    Raises:
        UsageError: the model cannot be pruned as asked; nothing has been written.
    """
    source, directory = Path(command.source), command.output_dir
    with usage_errors():
        if not run_directory.is_run(source):
            raise ValueError(
                f"--from {source} is no directory of a run; give the output directory "
                "of jaxscale train"
            )
        if (source / run_directory.MASKS_FILE).exists():
            raise ValueError(
                f"--from {source} holds a model that is sparse already; prune the "
                "dense run that it was made from"
            )
        config = tuning_config(
            run_directory.read_config(source),
            steps=command.steps,
            learning_rate=command.learning_rate,
            mesh=command.mesh,
            output_dir=directory,
        )
        check(config)
        run_directory.check_free(directory, config, resume=False)
        mesh = make_mesh(config.mesh)
        with jax.set_mesh(mesh):
            model = run_directory.load_model(
                source, mesh, config.axis_rules, step=command.step, training=True
            )
        check_layers(model, command.prune)
        text = _text(config, source)
        run_directory.write(directory, config, text)
    print(
        f"prune {source} to {command.prune.sparsity:.1%}, pattern "
        f"{command.prune.pattern}"
    )
    with training_errors(), run_directory.given_up_on_failure(directory):
        pruned = prune_and_tune(config, model, text, command.prune, command.tune)
    finish(directory, pruned, text)
    return pruned


def tuning_config(
    run: TrainConfig,
    *,
    steps: int,
    learning_rate: float | None,
    mesh: MeshConfig,
    output_dir: Path,
) -> TrainConfig:
    """The settings of a run under masks, from those of the dense run."""
    rate = run.optimizer.learning_rate / 2 if learning_rate is None else learning_rate
    optimizer = dataclasses.replace(
        run.optimizer, learning_rate=rate, warmup_steps=min(10, steps // 10)
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


def finish(directory: Path, pruned: Pruned, text: TextData) -> Path:
    """Write the masks and the report of a pruned run; returns the report."""
    pruned.masks.save(directory / run_directory.MASKS_FILE)
    report = Report("jaxscale prune")
    add_to_report(report, pruned, bytes_per_token(text))
    report.heading("Training under the masks")
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    report.table(
        ["step", "held-out loss"],
        [[r["step"], f"{r['eval_loss']:.4f}"] for r in records if "eval_loss" in r],
    )
    return report.write(directory / "report.html")


def _text(config: TrainConfig, source: Path) -> TextData:
    """The text of the run, which must be what it was."""
    text = load_text(config.data)
    run_directory.check_text(source, text)
    if text.held_out is None:
        raise ValueError(
            f"--from {source}: the run holds no text out, so nothing can be measured; "
            "train with data.held_out_fraction above 0"
        )
    return text
