"""``jaxscale plan MODEL --gpus N``: rank parallelism layouts."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxscale.checks import check_integers
from jaxscale.cli.errors import RunFailed, UsageError, usage_errors
from jaxscale.cli.notices import notice
from jaxscale.cli.options import parse
from jaxscale.cli.runs import find_run, is_source
from jaxscale.cli.sources import source_first
from jaxscale.models import DecoderConfig
from jaxscale.recipes import from_source
from jaxscale.training import TrainConfig
from jaxscale.training.planning.compiled import (
    CompiledStep,
    check_compiler,
    compile_step,
)
from jaxscale.training.planning.config import PlanConfig
from jaxscale.training.planning.cost_model import Layout
from jaxscale.training.planning.plan_report import text, write_report
from jaxscale.training.planning.search import (
    Estimate,
    Plan,
    plan_layouts,
    train_command,
    xla_flags,
)
from jaxscale.training.planning.verify import collectives, compiled_text, planned_run


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanCommand(PlanConfig):
    """The options of ``jaxscale plan``."""

    model: str
    """Model to plan for, as in `jaxscale train`: a preset, for example llama3_70b,
    module:function for a run of your own, a Hugging Face directory or name, or the
    output directory of a run. It may also be the first word, or --from MODEL."""
    top: int = 10
    """Number of layouts to show."""
    report: Path | None = None
    """HTML file for table, charts, reasons and the schedule of the best layout."""
    compile: bool = False
    """Compile the training step of the best layout for that many H200s (no GPU is
    needed) and report its memory and collectives. This takes a minute or two, whatever
    the number of GPUs."""
    compile_seconds: int = 900
    """Time limit of the compilation, in seconds."""
    json: bool = False
    """Print JSON instead of text."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integers(self, 1, "top", "compile_seconds")
        if self.compile and self.gpu != "h200":
            raise ValueError(
                f"gpu {self.gpu!r}: programs are compiled for h200 alone; leave out "
                "compile"
            )


def main(arguments: Sequence[str]) -> int:
    """Run the command.

    Raises:
        UsageError: there is no such model, no layout fits, or nothing is there that
            compiles.
    """
    words = source_first(arguments)
    if words and not words[0].startswith("-"):
        words = ["--model", *words]
    command = parse(
        PlanCommand,
        words,
        prog="jaxscale plan",
        description="Estimate the step time of every parallelism layout on these GPUs, "
        "and rank those whose minimum memory fits. Any choice can be fixed by an "
        "option.",
    )
    run = _run_of(command.model)
    shape = run.model
    if not isinstance(shape, DecoderConfig):
        raise UsageError(f"{command.model} trains an encoder; plans are for decoders")
    notice(f"estimating the layouts of {command.gpus} GPUs for {command.model}")
    with usage_errors():
        if command.compile:
            check_compiler()  # before a search that may take a while
        found = plan_layouts(shape, command)
        planned = planned_run(run, found.best, found.config)
    line = train_command(command.model, run, found.best, found.config)
    if command.report is not None:
        with usage_errors():
            write_report(found, command.model, line, command.report)
    if not command.json:
        print(text(found, command.model, top=command.top))
        print("\n".join(["", line, *_schedule(found.best.layout)]), flush=True)
        if command.report is not None:
            print(f"report: {command.report}")
    step = _compile(planned, found.best, command) if command.compile else None
    if command.json:
        print(json.dumps(_as_json(found, line, step, command.top), indent=2))
    elif step is not None:
        print("\n" + compiled_text(found.best, step))
    return 0


def _run_of(name: str) -> TrainConfig:
    """The settings that are planned: those of a run, or of a model with weights."""
    if not is_source(name):
        return find_run(name)
    with usage_errors():
        return from_source(name, weights=False)


def _schedule(layout: Layout) -> list[str]:
    """The command that shows the schedule of a pipeline."""
    if layout.pipe == 1:
        return []
    return [
        f"its schedule: jaxscale schedule --stages {layout.pipe} "
        f"--microbatches {layout.microbatches} --chunks {layout.chunks}"
    ]


def _compile(
    planned: TrainConfig, best: Estimate, command: PlanCommand
) -> CompiledStep:
    try:
        return compile_step(
            planned,
            command.gpus,
            xla_flags=xla_flags(best.layout),
            timeout=command.compile_seconds,
        )
    except TimeoutError as error:
        raise RunFailed(str(error), 1) from None


def _as_json(
    found: Plan, line: str, step: CompiledStep | None, top: int
) -> dict[str, Any]:
    """The plan in types of JSON; seconds and bytes."""
    config = dataclasses.asdict(found.config)
    asked = {f.name: config[f.name] for f in dataclasses.fields(PlanConfig)}
    result: dict[str, Any] = {
        "asked": asked,
        "limit": found.limit,
        "fitting": found.num_fitting,
        "too_large": found.num_too_large,
        "refused": dict(found.refused),
        "layouts": [
            {
                "layout": dataclasses.asdict(x.layout),
                "seconds": x.seconds,
                "time": dict(x.time),
                "bytes": x.bytes,
                "memory": dict(x.memory),
                "mfu": x.mfu,
            }
            for x in found.ranked[:top]
        ],
        "command": line,
    }
    if step is not None:
        rows = collectives(step)
        sizes = {n: v for n, v in vars(step).items() if n != "collectives"}
        result["compiled"] = {
            **sizes,
            "bytes": step.bytes,
            "planned_bytes": found.best.bytes,
            "collectives": [dataclasses.asdict(row) for row in rows],
        }
    return result
