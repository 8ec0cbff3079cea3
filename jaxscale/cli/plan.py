"""``jaxscale plan --model MODEL --gpus N``: how to share a training step."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from jaxscale.checks import check_integers
from jaxscale.cli.errors import UsageError, usage_errors
from jaxscale.cli.options import parse
from jaxscale.cli.runs import find_run
from jaxscale.models import DecoderConfig
from jaxscale.training.plan import Plan, plan_layouts, train_command
from jaxscale.training.plan_config import PlanConfig
from jaxscale.training.plan_report import text, write_report


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanCommand(PlanConfig):
    """The options of ``jaxscale plan``."""

    model: str
    """What `jaxscale train` is to train: a preset, for example llama3_70b, or
    module:function for a run of your own."""
    top: int = 10
    """Layouts that are shown."""
    report: Path | None = None
    """An HTML file for table, bars, reasons and the schedule of the best."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integers(self, 1, "top")


def main(arguments: Sequence[str]) -> int:
    """Run the command.

    Raises:
        UsageError: there is no such model, or no layout fits.
    """
    command = parse(
        PlanCommand,
        arguments,
        prog="jaxscale plan",
        description="Estimate time and memory of training steps under all layouts of "
        "the GPUs, and rank those that fit. Every choice may be given instead.",
    )
    shape = find_run(command.model).model
    if not isinstance(shape, DecoderConfig):
        raise UsageError(f"{command.model} trains an encoder; plans are for decoders")
    with usage_errors():
        found = plan_layouts(shape, command)
    print(text(found, command.model, top=command.top))
    print(_commands(found, command))
    if command.report is not None:
        with usage_errors():
            write_report(found, command.model, command.report)
        print(f"report: {command.report}")
    return 0


def _commands(found: Plan, command: PlanCommand) -> str:
    """The command that trains with the best layout, and one that shows its schedule."""
    layout = found.best.layout
    lines = ["", train_command(command.model, found.best, found.config)]
    if layout.pipe > 1:
        lines.append(
            f"its schedule: jaxscale schedule --stages {layout.pipe} "
            f"--microbatches {layout.microbatches} --chunks {layout.chunks}"
        )
    return "\n".join(lines)
