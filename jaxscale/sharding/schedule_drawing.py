"""Drawings of pipeline schedules: text for a terminal, SVG for a browser."""

from collections.abc import Iterator

import numpy as np

from jaxscale.sharding.schedule_table import PipelineSchedule


_BACKWARD = 2  # in units of a forward pass
_UNIT, _ROW, _LEFT = 26, 24, 74  # pixels
_SHADES = {
    "f": ("#cfe3f7", "#9cc6ee", "#6ba6df", "#3f83c7"),
    "b": ("#d5edd2", "#a9d8a3", "#7cbf75", "#4f9d49"),
}


def draw(schedule: PipelineSchedule, *, width: int | None = None) -> str:
    """The schedule as text: a column for each tick, two lines for each stage.

    The first line of a stage has its backward passes, the second its forward passes, as
    they follow each other in a tick. ``3.1`` is microbatch 3 in chunk 1.

    Args:
        schedule: The schedule.
        width: Maximum columns of text; the rest is counted. None draws all.

    Example:
        >>> from jaxscale.sharding import pipeline_schedule
        >>> print(draw(pipeline_schedule(2, 2)))
        tick      0 1 2 3 4 5
        stage 0 b         0 1
                f 0 1
        stage 1 b       0 1
                f   0 1
        loss          0 1
        6 ticks, 3 with forward passes, ...
    """
    rows = []
    for s in range(schedule.stages):
        for kind in ("b", "f"):
            name = f"stage {s}" if kind == "b" else ""
            rows.append((name, kind, _labels(schedule, kind, s)))
    losses = ["" if mb < 0 else f"{mb}" for mb in schedule.loss_mb.tolist()]
    ticks = [f"{t}" for t in range(schedule.num_ticks)]
    rows = [("tick", "", ticks), *rows, ("loss", "", losses)]
    left = max(len(name) for name, _, _ in rows)
    cell = 1 + max(len(label) for _, _, labels in rows for label in labels)
    shown = schedule.num_ticks
    if width is not None:
        shown = max(1, min(shown, (width - left - 2) // cell))
    lines = [
        f"{name:{left}} {kind:1}"
        + "".join(f"{label:>{cell}}" for label in labels[:shown])
        for name, kind, labels in rows
    ]
    if shown < schedule.num_ticks:
        lines.append(f"... and {schedule.num_ticks - shown} more ticks")
    return "\n".join(line.rstrip() for line in [*lines, describe(schedule)])


def describe(schedule: PipelineSchedule) -> str:
    """One line on the cost of the schedule: time, bubble and memory.

    Example:
        >>> from jaxscale.sharding import pipeline_schedule
        >>> describe(pipeline_schedule(4, 8))  # doctest: +ELLIPSIS
        '16 ticks, 11 with forward passes, 11 with backward passes; bubble 27.3%; ...'
    """
    forward, backward = schedule.op_ticks
    kept = max(schedule.peak_stash)
    return (
        f"{schedule.num_ticks} ticks, {forward} with forward passes, {backward} with "
        f"backward passes; bubble {schedule.bubble:.1%}; most inputs kept by a stage: "
        f"{kept}; outputs that wait for their loss: {schedule.num_out_slots}"
    )


def svg(schedule: PipelineSchedule) -> str:
    """The schedule over time, as an SVG picture.

    A tick is as long as what runs in it; a backward pass takes two forward passes.
    Forward passes are blue, backward passes green, darker in later chunks; idle stages
    are gray and losses orange.

    Example:
        >>> from jaxscale.sharding import pipeline_schedule
        >>> svg(pipeline_schedule(2, 2))[:4]
        '<svg'
    """
    boxes, end = [], 0
    for tick, start, backward, forward in _times(schedule):
        end = start + backward + forward
        for s in range(schedule.stages):
            at = {"b": (start, backward), "f": (start + backward, forward)}
            boxes += [_box(schedule, k, tick, s, *at[k]) for k in at if at[k][1]]
        mb = int(schedule.loss_mb[tick])
        if mb >= 0:
            x, y = _x(start + backward), _y(schedule.stages)
            boxes.append(f'<circle cx="{x}" cy="{y + 8}" r="3" fill="#e08a2e"/>')
            boxes.append(f'<text x="{x}" y="{y + 22}">{mb}</text>')
    names = [*(f"stage {s}" for s in range(schedule.stages)), "loss"]
    labels = [
        f'<text x="{_LEFT - 8}" y="{_y(i) + 16}" text-anchor="end">{name}</text>'
        for i, name in enumerate(names)
    ]
    wide, high = _x(end) + 12, _y(schedule.stages + 1) + 30
    title = (
        f"{schedule.stages} stages, {schedule.microbatches} microbatches, "
        f"{schedule.chunks} chunks: {describe(schedule)}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{high}" '
        f'viewBox="0 0 {wide} {high}" font-family="system-ui, sans-serif" '
        'font-size="11" text-anchor="middle">\n'
        f"<title>{title}</title>\n"
        f'<rect width="{wide}" height="{high}" fill="#fff"/>\n'
        f'<text x="8" y="16" text-anchor="start">{title}</text>\n'
        + "\n".join([*labels, *boxes])
        + "\n</svg>\n"
    )


def _times(schedule: PipelineSchedule) -> Iterator[tuple[int, int, int, int]]:
    """Each tick with its start and the times of its backward and forward passes."""
    now = 0
    for tick in range(schedule.num_ticks):
        backward = _BACKWARD * bool((schedule.b_mb[tick] >= 0).any())
        forward = int(bool((schedule.f_mb[tick] >= 0).any()))
        yield tick, now, backward, forward
        now += backward + forward


def _labels(schedule: PipelineSchedule, kind: str, stage: int) -> list[str]:
    mbs: np.ndarray = getattr(schedule, f"{kind}_mb")[:, stage]
    chunks: np.ndarray = getattr(schedule, f"{kind}_chunk")[:, stage]
    return [
        "" if mb < 0 else f"{mb}.{chunk}" if schedule.chunks > 1 else f"{mb}"
        for mb, chunk in zip(mbs.tolist(), chunks.tolist(), strict=True)
    ]


def _box(
    schedule: PipelineSchedule, kind: str, tick: int, stage: int, start: int, long: int
) -> str:
    mb = int(getattr(schedule, f"{kind}_mb")[tick, stage])
    chunk = int(getattr(schedule, f"{kind}_chunk")[tick, stage])
    shades = _SHADES[kind]
    fill = "#eef0f3" if mb < 0 else shades[min(chunk, len(shades) - 1)]
    x, y, w = _x(start), _y(stage), _UNIT * long
    box = (
        f'<rect x="{x}" y="{y}" width="{w}" height="{_ROW - 2}" fill="{fill}" '
        'stroke="#fff"/>'
    )
    text = f'<text x="{x + w / 2:g}" y="{y + 15}">{mb}</text>' if mb >= 0 else ""
    return box + text


def _x(time: int) -> int:
    return _LEFT + _UNIT * time


def _y(row: int) -> int:
    return 28 + _ROW * row
