"""Draws the pictures of docs/megascale.md: ``python -m docs.megascale_pictures``.

Figures are those of MegaScale's paper and of ``python -m tests.training.faults``; no
device takes part.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

from docs import svg


_STATIC = Path(__file__).parent / "_static"
_INK, _PALE, _GRAY = svg.INK, svg.PALE, "#b9c0c9"
_BLUE, _GREEN, _ORANGE, _RED = "#6ba6df", "#7cbf75", "#f2a95c", "#c0504d"

ABLATION = {
    "Megatron-LM": 47.7,
    "parallel block": 52.3,
    "sliding window": 53.3,
    "overlap: tensor": 55.5,
    "overlap: pipeline": 58.0,
    "overlap: data": 59.5,
    "operators": 61.2,
    "the rest": 62.3,
    "LAMB, batch x 3": 65.3,
}
"""MFU in %, 175 billion parameters on 256 A100s: table 3 of the paper."""

FAULT = {"struck": 25.0, "noticed": 28.1, "running": 33.6}
"""Seconds of a SIGSTOP of process 1, from the table of docs/supervision.md."""


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", ink: str = _INK
) -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{ink}">{text}</text>'
    )


def _box(x: float, y: float, width: float, height: float, color: str) -> str:
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" '
        f'fill="{color}"/>'
    )


def _bar(x: float, y: float, width: float, color: str, text: str) -> str:
    """A box with a word in its middle."""
    return _box(x, y, width, 24, color) + _text(
        x + width / 2, y + 17, text, anchor="middle"
    )


def _arrow(x: float, y: float, to_x: float, to_y: float, color: str = _INK) -> str:
    return (
        f'<path d="M{x:g} {y:g}L{to_x:g} {to_y:g}" stroke="{color}" '
        'stroke-width="1.5" marker-end="url(#tip)"/>'
    )


def _picture(width: int, height: int, parts: Iterator[str]) -> str:
    return svg.document(
        width,
        height,
        [
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" '
            'markerWidth="7" markerHeight="7" orient="auto">'
            f'<path d="M0 0L8 4L0 8z" fill="{_INK}"/></marker></defs>',
            *parts,
        ],
    )


def ablation() -> str:
    """What each step of the paper adds to the use of the GPUs."""

    def parts() -> Iterator[str]:
        before = 0.0
        for row, (name, value) in enumerate(ABLATION.items()):
            y, scale = 10 + 27 * row, 7.0
            yield _text(140, y + 17, name, anchor="end")
            yield _box(150, y, before * scale, 22, _PALE if row else _GRAY)
            yield _box(150 + before * scale, y, (value - before) * scale, 22, _BLUE)
            gain = f" (+{value - before:.1f})" if row else ""
            yield _text(158 + value * scale, y + 16, f"{value:.1f}%{gain}")
            before = value

    return _picture(720, 260, parts())


def overlap() -> str:
    """A tick of a stage: what travels while it computes."""

    def parts() -> Iterator[str]:
        yield _text(8, 39, "computes")
        yield _text(8, 109, "sends")
        lanes = [(90, 260, _GREEN, "backward pass"), (352, 70, _GRAY, "loss")]
        lanes += [(424, 150, _BLUE, "forward pass"), (582, 150, _GREEN, "backward ...")]
        for x, width, color, name in lanes:
            yield _bar(x, 22, width, color, name)
        yield _bar(90, 92, 190, _ORANGE, "activation of the last tick")
        yield _bar(352, 92, 200, _ORANGE, "gradient to the previous stage")
        yield _bar(582, 92, 150, _ORANGE, "activation ...")
        yield _arrow(350, 48, 356, 90)
        yield _arrow(574, 48, 584, 90)
        for x in (90, 582):
            yield f'<path d="M{x - 4} 8V126" stroke="{_GRAY}" stroke-dasharray="4 3"/>'
        yield _text(90, 140, "a tick begins")
        yield _text(582, 140, "the next one")

    return _picture(760, 150, parts())


def fault() -> str:
    """The life of a fault, on the clock."""
    scale, left = 30.0, 96

    def at(second: float) -> float:
        return left + (second - 18) * scale

    struck, noticed, running = FAULT.values()
    start = noticed + 0.5  # of what the driver does in between, for the eye

    def parts() -> Iterator[str]:
        for row, rank in enumerate(("process 0", "process 1")):
            y = 44 + 34 * row
            yield _text(8, y + 17, rank)
            yield _bar(at(18), y, at(struck) - at(18), _BLUE, "to step 25")
            color, doing = (_GRAY, "waits") if row == 0 else (_RED, "halts")
            yield _bar(at(struck), y, at(noticed) - at(struck), color, doing)
            again = at(running) - at(start)
            yield _bar(at(start), y, again, _ORANGE, "start, restore step 20")
            yield _bar(at(running), y, 130, _BLUE, "21, 22, 23, ...")
        yield _text(8, 129, "driver")
        yield _bar(at(noticed), 112, at(start) - at(noticed), _GREEN, "")
        doing = "stacks: it is process 1; ends both, starts both"
        yield _text(at(start) + 6, 129, doing)
        marks = [(struck, "SIGSTOP"), (noticed, f"+{noticed - struck:.1f} s: noticed")]
        marks += [(running, f"+{running - struck:.0f} s: steps again")]
        for row, (second, name) in enumerate(marks):
            yield (
                f'<path d="M{at(second):g} 30V106" stroke="{_INK}" '
                'stroke-dasharray="3 3"/>'
            )
            yield _text(at(second) + 3, 12 + 14 * (row % 2), name)

    return _picture(760, 146, parts())


def digests() -> str:
    """Where what a checkpoint holds is checked."""
    places = ["devices", "memory of the host", "disk", "memory of the host", "devices"]

    def parts() -> Iterator[str]:
        for i, place in enumerate(places):
            x = 10 + 156 * i
            yield _bar(x, 50, 136, _BLUE if place == "devices" else _PALE, place)
            if i:
                yield _arrow(x - 18, 62, x - 2, 62)
        yield _text(78, 30, "digest made", anchor="middle")
        yield _text(702, 30, "digest made again", anchor="middle")
        yield f'<path d="M78 78V104H702" fill="none" stroke="{_INK}"/>'
        yield _arrow(702, 104, 702, 78)
        kept = "kept with the checkpoint; where they differ, an older one is taken"
        yield _text(390, 122, kept, anchor="middle")
        yield _text(234, 30, "save", anchor="middle", ink=svg.GRAY)
        yield _text(546, 30, "restore, on any mesh", anchor="middle", ink=svg.GRAY)

    return _picture(790, 134, parts())


def events() -> str:
    """What three kinds of steps look like in the events."""
    kinds = [
        ("well", 20, 150, "the host is ahead: the device never waits"),
        ("late data", 150, 110, "the device waits for its batch"),
        ("slow rank", 20, 230, "steps take longer, on all ranks alike"),
    ]

    def parts() -> Iterator[str]:
        legend = [(_ORANGE, "begin to data"), (_GREEN, "data to dispatched")]
        for i, (color, name) in enumerate([*legend, (_BLUE, "until done")]):
            yield _box(140 + 160 * i, 6, 14, 14, color) + _text(160 + 160 * i, 18, name)
        for row, (name, data, step, says) in enumerate(kinds):
            y = 34 + 78 * row
            for x, text, down in ((8, name, 17), (84, "host", 17), (84, "device", 46)):
                yield _text(x, y + down, text)
            begun = free = 140.0
            for _ in range(3):
                ready = begun + data + 14
                yield _box(begun, y, data, 24, _ORANGE)
                yield _box(begun + data, y, 14, 24, _GREEN)
                start = max(free, ready)
                yield _box(start, y + 29, step - 3, 24, _BLUE)
                free = start + step
                # It hands over the next step while the device computes this one.
                begun = max(ready, start) + 4
            yield _text(140, y + 69, says, ink=svg.GRAY)

    return _picture(900, 266, parts())


PICTURES: dict[Path, Callable[[], str]] = {
    _STATIC / f"megascale_{draw.__name__}.svg": draw
    for draw in (ablation, overlap, fault, digests, events)
}
"""The drawing of each file."""


if __name__ == "__main__":
    for path, draw in PICTURES.items():
        path.write_text(draw())
