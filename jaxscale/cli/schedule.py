"""``jaxscale schedule``: verify and draw a pipeline schedule."""

import dataclasses
import shutil
from collections.abc import Sequence
from pathlib import Path

from jaxscale.cli.errors import usage_errors
from jaxscale.cli.options import parse
from jaxscale.observability.step_view import span
from jaxscale.sharding.schedule import Kind, pipeline_schedule, place_layers
from jaxscale.sharding.schedule_drawing import draw, svg


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScheduleCommand:
    """The options of ``jaxscale schedule``."""

    stages: int
    """Pipeline stages: the size of the mesh axis `pipe`."""
    microbatches: int
    """Microbatches per batch."""
    chunks: int = 1
    """Model chunks per stage (virtual pipeline stages); above 1 the schedule
    interleaves."""
    kind: Kind = "1f1b"
    """1f1b, gpipe (all forward passes first) or forward (evaluation)."""
    num_layers: int | None = None
    """Layers of the model; shows which stage holds which layers."""
    svg: Path | None = None
    """SVG file for a picture of the schedule over time."""


def main(arguments: Sequence[str]) -> int:
    """Run the command.

    Raises:
        UsageError: there is no such schedule.
    """
    command = parse(
        ScheduleCommand,
        arguments,
        prog="jaxscale schedule",
        description="Make a pipeline schedule, simulate it to verify its dependencies, "
        "and draw it: b backward passes, f forward passes.",
    )
    with usage_errors():
        schedule = pipeline_schedule(
            command.stages, command.microbatches, command.chunks, command.kind
        )
        layers = None
        if command.num_layers is not None:
            layers = place_layers(command.num_layers, command.stages, command.chunks)
        if command.svg is not None:
            command.svg.parent.mkdir(parents=True, exist_ok=True)
            command.svg.write_text(svg(schedule), encoding="utf-8")
    print(draw(schedule, width=shutil.get_terminal_size((120, 24)).columns))
    if layers is not None:
        for s in range(command.stages):
            held = [[int(i) for i in chunk if i >= 0] for chunk in layers[:, s]]
            print(f"stage {s} holds layers " + ", ".join(map(span, held)))
    if command.svg is not None:
        print(f"drawn in {command.svg}")
    return 0
