"""A plan as the settings of a run, and as what XLA compiles of it."""

import dataclasses
from typing import Any

from jaxscale.sharding.mesh import MESH_AXES
from jaxscale.training.config import TrainConfig
from jaxscale.training.planning.compiled import CompiledStep
from jaxscale.training.planning.config import PlanConfig
from jaxscale.training.planning.hlo import Transfer
from jaxscale.training.planning.search import Estimate, train_settings


def planned_run(run: TrainConfig, found: Estimate, config: PlanConfig) -> TrainConfig:
    """The settings of a run in a layout, which are checked as `fit` checks them.

    Args:
        run: The run.
        found: The layout.
        config: What was planned for.

    Raises:
        ValueError: the run cannot be trained so.
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
    """Equal collectives of a compiled step."""

    operation: str
    """``"all-gather"``, ``"collective-permute"``."""
    axes: tuple[str, ...]
    """Mesh axes that it runs over."""
    gpus: int
    """GPUs that take part in one."""
    bytes: int
    """Bytes of the result on a GPU."""
    loops: tuple[int | None, ...]
    """Rounds of the loops that it stands in, outermost first; None is unknown."""
    count: int
    """How often it runs in a step; a loop of unknown length counts once."""
    sent: float
    """Bytes that a GPU sends in a step, along a ring."""
    asynchronous: bool
    """Whether it is started and waited for apart."""
    hidden: bool
    """Whether a product or a kernel runs meanwhile."""


def collectives(step: CompiledStep) -> list[Collective]:
    """The collectives of a step, those that send most first."""
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
    """What was compiled, beside the estimate, for a terminal.

    Args:
        found: The layout.
        step: What XLA made of it.
        top: How many kinds of collectives are shown.
    """
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
        "products\n  or kernels run meanwhile; overlaps: started early, with none of "
        "these; waits:\n  not started early"
    )
    return "\n".join(lines)
