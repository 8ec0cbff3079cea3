"""Reports of a plan, as text for a terminal and as an HTML page."""

import html
import math
from collections.abc import Sequence
from pathlib import Path

from jaxscale.observability.html_report import Report
from jaxscale.sharding.schedule import pipeline_schedule
from jaxscale.sharding.schedule_drawing import svg as schedule_svg
from jaxscale.training.planning.config import CHOICES
from jaxscale.training.planning.cost_model import Layout
from jaxscale.training.planning.search import (
    COMMUNICATION,
    Estimate,
    Plan,
    describe,
)


_COLUMNS = ("layout", "s a step", "MFU", "tok/s/GPU", "GB", "bubble", "exposed")
# A letter and a color for each part of the time.
_PARTS = {
    "matmuls": ("m", "#3f83c7"),
    "attention": ("a", "#6ba6df"),
    "elementwise": ("e", "#b7d3ee"),
    "tensor": ("t", "#d9822b"),
    "context": ("c", "#e8a765"),
    "pipe": ("s", "#f2cfa6"),
    "data": ("d", "#c0504d"),
    "bubble": ("b", "#b9c0c9"),
    "optimizer": ("o", "#4f9d49"),
}
_BAR = 60
_OTHERS = 3
_MOST_CELLS = 20_000  # of a schedule drawing


def text(plan: Plan, name: str, *, top: int = 10) -> str:
    """The plan for a terminal: a table, bars, reasons and a command.

    Args:
        plan: The plan.
        name: Name of the model, as for `jaxscale train`.
        top: Number of layouts to show.
    """
    shown = plan.ranked[:top]
    rows = [_COLUMNS, *(tuple(_row(found)) for found in shown)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
    lines = [
        f"{n or '':>3}  {row[0]:{widths[0]}}"
        + "".join(f"  {c:>{w}}" for c, w in zip(row[1:], widths[1:], strict=True))
        for n, row in enumerate(rows)
    ]
    return "\n".join(
        [_asked(plan, name), "", *lines, "", *_bars(shown), "", *why(plan)]
    )


def why(plan: Plan) -> list[str]:
    """Why the best layout is the best, and what excludes the others, one line each."""
    best = plan.best
    parts = sorted(best.time, key=lambda part: -best.time[part])
    shares = ", ".join(
        f"{part} {best.time[part] / best.seconds:.1%}"
        for part in parts
        if best.time[part] / best.seconds >= 5e-3
    )
    memory = ", ".join(f"{n} {b / 1e9:,.1f}" for n, b in best.memory.items())
    lines = [
        f"The first: {describe(best.layout)}.",
        f"  mesh:   {_mesh(best.layout, plan.config.hardware.host_gpus)}",
        f"  time:   {shares}",
        f"  memory: at least {memory} GB; {plan.limit / 1e9:,.0f} GB may be taken, and "
        "--compile says what is",
    ]
    if len(plan.ranked) > 1:
        lines.append(f"  second: {_slower(plan)}")
    lines.append(
        "Other choices, everything else chosen anew: the step, and what grows most"
    )
    found = list(plan.alternatives())
    for choice in CHOICES:
        others = [(value, other) for name, value, other in found if name == choice]
        # The nearest in time, then those that do not fit, the nearest in memory first.
        others.sort(key=lambda x: (max(x[1].bytes, plan.limit), x[1].seconds))
        shown = [f"{value}: {plan.verdict(other)}" for value, other in others[:_OTHERS]]
        if len(others) > _OTHERS:
            shown.append(f"{len(others) - _OTHERS} more")
        if shown:
            lines.append(
                f"  {choice} {getattr(best.layout, choice)}, not " + "; ".join(shown)
            )
    excluded = sorted(plan.refused.items(), key=lambda item: -item[1])
    lines.append(
        f"{plan.num_fitting:,} layouts fit, {plan.num_too_large:,} need more memory, "
        f"{sum(plan.refused.values()):,} do not divide"
        + (f", most often: {excluded[0][0]}" if excluded else "")
    )
    return lines


def _mesh(layout: Layout, host_gpus: int) -> str:
    """Which axes use the links within a host, and which go between hosts."""
    inside, across, room = [], [], host_gpus
    for axis in ("tensor", "context", "fsdp", "data", "pipe"):  # neighbors first
        size = getattr(layout, axis)
        near = math.gcd(size, room)
        room //= near if near == size else room  # what comes next goes further
        inside += [f"{axis} {near}"] * (near > 1)
        across += [f"{axis} {size // near}"] * (size > near)
    hosts = -(-layout.gpus // host_gpus)
    words = [f"in a host {' x '.join(inside)}"] if inside else []
    words += [f"between {hosts:,} hosts {' x '.join(across)}"] if across else []
    return ", ".join(words) or "one GPU"


def _slower(plan: Plan) -> str:
    """Why the second layout is not the best, as a sentence."""
    best, other = plan.best, plan.ranked[1]
    share = other.seconds / best.seconds - 1
    growth = {part: other.time[part] - best.time[part] for part in best.time}
    more, less = (
        max(growth, key=growth.__getitem__),
        min(growth, key=growth.__getitem__),
    )
    if share < 5e-4:
        return f"{describe(other.layout)} is as fast"
    words = (
        f"{describe(other.layout)} takes {share:.1%} longer: {_title(more)} costs "
        f"{growth[more] / best.seconds:.1%} of the step more"
    )
    if growth[less] < -5e-4 * best.seconds:
        words += f", {_title(less)} {-growth[less] / best.seconds:.1%} less"
    return words


def write_report(
    plan: Plan, name: str, command: str, path: str | Path, *, top: int = 30
) -> Path:
    """Write an HTML page with table, bars, reasons and the best schedule."""
    shown = plan.ranked[:top]
    report = Report(f"{name} on {plan.config.gpus:,} {plan.config.hardware.name}")
    report.text(_asked(plan, name))
    report.text(_disclaimer(plan))
    report.heading("Layouts")
    report.table(
        ["", *_COLUMNS],
        [[f"{n}", *_row(found)] for n, found in enumerate(shown, start=1)],
    )
    report.heading("Where the time goes")
    report.drawing(_bars_svg(shown))
    report.heading("Why the first is first")
    for line in why(plan)[:5]:
        report.text(line)
    report.table(
        ["choice", "value", "everything else chosen anew"],
        [
            [choice, f"{value}", plan.verdict(other)]
            for choice, value, other in plan.alternatives()
        ],
    )
    report.heading("What excludes others")
    report.table(
        ["layouts", "reason"],
        [
            [plan.num_too_large, f"more than {plan.limit / 1e9:,.0f} GB of a GPU"],
            *(
                [n, reason]
                for reason, n in sorted(plan.refused.items(), key=_most)[:20]
            ),
        ],
    )
    report.heading("Command")
    report.sample(command)
    layout = plan.best.layout
    if layout.pipe > 1 and layout.pipe * layout.microbatches < _MOST_CELLS:
        report.heading("The schedule of the first")
        report.drawing(
            schedule_svg(
                pipeline_schedule(layout.pipe, layout.microbatches, layout.chunks)
            )
        )
    return report.write(path)


def _most(item: tuple[str, int]) -> int:
    return -item[1]


def _asked(plan: Plan, name: str) -> str:
    config, hardware = plan.config, plan.config.hardware
    communication = {"fused": "fused kernels", "xla": "collectives by XLA"}
    return (
        f"{name} on {config.gpus:,} {hardware.name} ({hardware.host_gpus} a host, "
        f"{hardware.nic / 1e9:g} GB/s each between hosts), batches of "
        f"{config.batch_size:,} rows of {config.seq_len:,} tokens, "
        f"{config.quantization or 'bf16'}, {communication[config.communication]}. "
        "Estimates for jaxscale train: see docs/layout.md"
    )


def _disclaimer(plan: Plan) -> str:
    hardware = plan.config.hardware
    return f"All numbers are estimates of a model. {hardware.name}: {hardware.origin}."


def _row(found: Estimate) -> list[str]:
    rate = found.tokens / found.seconds / found.layout.gpus
    return [
        describe(found.layout),
        f"{found.seconds:.3g}",
        f"{found.mfu:.1%}",
        f"{rate:,.0f}",
        f"{found.bytes / 1e9:,.1f}",
        f"{found.bubble:.1%}",
        f"{found.communication:.1%}",
    ]


def _bars(shown: Sequence[Estimate]) -> list[str]:
    """A bar for each layout, as long as its step, with a letter for each part."""
    longest = max(found.seconds for found in shown)
    lines = []
    for n, found in enumerate(shown, start=1):
        bar, end = "", 0.0
        for part, (letter, _) in _PARTS.items():
            end += found.time[part] / longest * _BAR
            bar += letter * (round(end) - len(bar))
        lines.append(f"{n:>3}  {bar}")
    used = [part for part in _PARTS if any(found.time[part] for found in shown)]
    names = ", ".join(f"{_PARTS[part][0]} {_title(part)}" for part in used)
    return [*lines, f"     {names}"]


def _title(part: str) -> str:
    return f"{part} communication" if part in COMMUNICATION else part


def _bars_svg(shown: Sequence[Estimate]) -> str:
    longest = max(found.seconds for found in shown)
    left, wide, row = 30, 820, 22
    used = [part for part in _PARTS if any(found.time[part] for found in shown)]
    pieces = []
    for i, part in enumerate(used):
        x, y = left + 160 * (i % 5), 8 + 18 * (i // 5)
        pieces.append(
            f'<rect x="{x}" y="{y}" width="12" height="12" fill="{_PARTS[part][1]}"/>'
        )
        pieces.append(
            f'<text x="{x + 17}" y="{y + 11}">{html.escape(_title(part))}</text>'
        )
    top = 30 + 18 * (len(used) // 5)
    for n, found in enumerate(shown):
        x, y = float(left), top + row * n
        pieces.append(f'<text x="6" y="{y + 14}">{n + 1}</text>')
        for part in used:
            w = found.time[part] / longest * (wide - 80)
            title = f"{_title(part)}: {found.time[part]:.3g} s"
            pieces.append(
                f'<rect x="{x:.1f}" y="{y}" width="{w:.1f}" height="{row - 4}" '
                f'fill="{_PARTS[part][1]}"><title>{html.escape(title)}</title></rect>'
            )
            x += w
        pieces.append(
            f'<text x="{x + 5:.1f}" y="{y + 14}">{found.seconds:.3g} s</text>'
        )
    high = top + row * len(shown) + 8
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + wide}" '
        f'height="{high}" font-family="system-ui, sans-serif" font-size="12">\n'
        + "\n".join(pieces)
        + "\n</svg>\n"
    )
