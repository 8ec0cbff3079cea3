"""A plan as the settings of a run, and its compiled program."""

import dataclasses
from typing import Any

from jaxscale.sharding.mesh import MESH_AXES
from jaxscale.training.config import TrainConfig
from jaxscale.training.planning.compiled import CompiledStep
from jaxscale.training.planning.config import PlanConfig
from jaxscale.training.planning.hlo import Transfer
from jaxscale.training.planning.search import Estimate, train_settings


def planned_run(run: TrainConfig, found: Estimate, config: PlanConfig) -> TrainConfig:
    """The settings of a run with a layout, validated as `fit` does.

    Raises:
        ValueError: the run cannot be trained with this layout.
    """
    settings: dict[str, Any] = {}
    parts: dict[str, dict[str, Any]] = {}
    for name, value in train_settings(found, config).items():
        group, _, field = name.rpartition(".")
        (parts.setdefault(group, {}) if group else settings)[field] = value
    for group, values in parts.items():
        settings[group] = dataclasses.replace(getattr(run, group), **values)
    planned = dataclasses.replace(run, **settings)
    planned.check_mesh(planned.mesh.sizes(found.layout.gpus))
    return planned


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """A group of equal collectives of a compiled step."""

    operation: str
    """``"all-gather"``, ``"collective-permute"``."""
    axes: tuple[str, ...]
    """Mesh axes that it runs over."""
    gpus: int
    """GPUs per group."""
    bytes: int
    """Bytes of the result per GPU."""
    loops: tuple[int | None, ...]
    """Trip counts of the enclosing loops, outermost first; None is unknown."""
    count: int
    """How often it runs per step; a loop with an unknown trip count counts once."""
    sent: float
    """Bytes that a GPU sends per step, along a ring."""
    asynchronous: bool
    """Whether it is asynchronous, with separate start and wait."""
    hidden: bool
    """Whether a matmul or a kernel overlaps with it."""


def collectives(step: CompiledStep) -> list[Collective]:
    """The collectives of a step, by bytes sent, the largest first."""
    groups: dict[tuple[Any, ...], list[Transfer]] = {}
    for found in step.collectives:
        how = found.behind is not None, found.hidden
        kind = found.operation, found.axes, found.group, found.size, found.trips, how
        groups.setdefault(kind, []).append(found)
    rows = [
        Collective(
            operation=found[0].operation,
            axes=tuple(axis for axis in MESH_AXES if axis in found[0].axes),
            gpus=found[0].group,
            bytes=found[0].size,
            loops=found[0].trips,
            count=sum(x.times for x in found),
            sent=sum(x.times * x.sent for x in found),
            asynchronous=found[0].behind is not None,
            hidden=found[0].hidden,
        )
        for found in groups.values()
    ]
    return sorted(rows, key=lambda row: -row.sent)


def compiled_text(found: Estimate, step: CompiledStep, *, top: int = 16) -> str:
    """The compiled step next to the estimate, for a terminal."""
    lines = [
        f"Compiled for {step.gpus:,} H200s in {step.seconds:,.0f} s: the step "
        "partitions.",
        f"  memory of a GPU: {step.bytes / 1e9:,.1f} GB, of these "
        f"{step.arguments / 1e9:,.1f} state and batch; the plan "
        f"counts at least {found.bytes / 1e9:,.1f} GB",
    ]
    rows = collectives(step)
    if not rows:
        return "\n".join([*lines, "  no collectives"])
    cells = [("collective", "over", "GPUs", "MB", "times", "GB sent", "loops", "waits")]
    for row in rows[:top]:
        waits = "hidden" if row.hidden else "overlaps" if row.asynchronous else "waits"
        cells.append(
            (
                row.operation,
                " x ".join(row.axes) or "-",
                f"{row.gpus}",
                f"{row.bytes / 1e6:,.1f}",
                f"{row.count:,}" + "+" * (None in row.loops),
                f"{row.sent / 1e9:,.2f}",
                " x ".join("?" if n is None else f"{n}" for n in row.loops) or "-",
                waits,
            )
        )
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    for row in cells:
        left = [f"{x:{w}}" for x, w in zip(row[:2], widths, strict=False)]
        right = [f"{x:>{w}}" for x, w in zip(row[2:], widths[2:], strict=True)]
        lines.append("  " + "  ".join(left + right))
    if rest := rows[top:]:
        sent = sum(row.sent for row in rest) / 1e9
        lines.append(f"  {len(rest)} smaller kinds send {sent:,.2f} GB more")
    lines.append(
        "  MB of the result on a GPU; loops: rounds of those around it. hidden: "
        "matmuls\n  or kernels run meanwhile; overlaps: started early, with none of "
        "these; waits:\n  not started early"
    )
    return "\n".join(lines)
