"""Plots as SVG elements: they need no script, and a page of them stays small.

Points and bars say their numbers where the pointer rests on them.
"""

import base64
import html
import itertools
import math
import struct
import zlib
from collections.abc import Callable, Sequence


_WIDTH, _HEIGHT = 860, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 72, 16, 30, 46
_INSIDE_WIDTH = _WIDTH - _LEFT - _RIGHT
_INSIDE_HEIGHT = _HEIGHT - _TOP - _BOTTOM
_COLORS = ("#3f83c7", "#d9822b", "#4f9d49", "#8b7bb5", "#c0504d", "#5b6876")
_MOST_POINTS = 1000
_MOST_TITLES = 200
_MOST_DOTS = 60

type Line = tuple[str, Sequence[float], Sequence[float]]
"""Name, horizontal positions and values."""


def lines(
    series: Sequence[Line], *, x_title: str, y_title: str, log_y: bool = False
) -> str:
    """Lines, with gaps at what is not finite, or on a logarithmic axis not positive.

    Args:
        series: The lines, of which the legend has the names where they are several.
        x_title: Title of the horizontal axis, with the unit.
        y_title: Title of the vertical axis, with the unit.
        log_y: True makes the vertical axis logarithmic.

    Example:
        >>> losses = ("loss", [1, 2], [3.0, 2.0])
        >>> "<polyline" in lines([losses], x_title="step", y_title="nats")
        True
    """

    def drawable(value: float) -> bool:
        return math.isfinite(value) and (value > 0 or not log_y)

    xs = [x for _, x, _ in series for x in x]
    ys = [y for _, _, y in series for y in y if drawable(y)]
    across = _Axis(min(xs, default=0.0), max(xs, default=1.0), _LEFT, _INSIDE_WIDTH)
    up = _Axis(
        min(ys, default=1.0),
        max(ys, default=1.0),
        _TOP + _INSIDE_HEIGHT,
        -_INSIDE_HEIGHT,
        log=log_y,
        padded=True,
    )
    parts = []
    for color, (name, x, y) in zip(_colors(len(series)), series, strict=True):
        stride = -(-len(x) // _MOST_POINTS) or 1
        places = [i for i in range(len(x)) if i % stride == 0 or i == len(x) - 1]
        run: list[str] = []
        for i in [*places, None]:
            if i is not None and drawable(y[i]):
                run.append(f"{across.at(x[i]):.1f},{up.at(y[i]):.1f}")
                continue
            if run:
                parts.append(
                    f"<polyline points='{' '.join(run)}' fill='none' stroke='{color}' "
                    "stroke-width='2'/>"
                )
            run = []
        shown = places[:: -(-len(places) // _MOST_TITLES) or 1]
        seen = "" if len(places) <= _MOST_DOTS else " fill-opacity='0'"
        parts += [
            f"<circle cx='{across.at(x[i]):.1f}' cy='{up.at(y[i]):.1f}' r='3' "
            f"fill='{color}'{seen}><title>{html.escape(name)}: {y[i]:.4g} at {x[i]:g}"
            "</title></circle>"
            for i in shown
            if drawable(y[i])
        ]
    names = [name for name, _, _ in series]
    return _drawing(parts, across, up, x_title, y_title, names)


def bars(series: Sequence[Line], *, x_title: str, y_title: str) -> str:
    """Bars from zero, those of several series beside each other.

    Args:
        series: Each with the middles of its bars and their heights.
        x_title: Title of the horizontal axis, with the unit.
        y_title: Title of the vertical axis, with the unit.
    """
    xs = sorted({x for _, x, _ in series for x in x})
    gap = min((b - a for a, b in itertools.pairwise(xs)), default=1.0)
    across = _Axis(
        min(xs, default=0.0) - gap / 2,
        max(xs, default=1.0) + gap / 2,
        _LEFT,
        _INSIDE_WIDTH,
    )
    ys = [y for _, _, y in series for y in y]
    up = _Axis(
        min(0.0, *ys, 0.0),
        max(1e-12, *ys, 0.0),
        _TOP + _INSIDE_HEIGHT,
        -_INSIDE_HEIGHT,
    )
    width = 0.9 * gap / max(len(series), 1)
    parts = []
    colors = _colors(len(series))
    for place, (color, (name, x, y)) in enumerate(zip(colors, series, strict=True)):
        for middle, height in zip(x, y, strict=True):
            left = middle - 0.45 * gap + place * width
            top, bottom = sorted((up.at(height), up.at(0.0)))
            parts.append(
                f"<rect x='{across.at(left):.1f}' y='{top:.1f}' "
                f"width='{across.at(left + width) - across.at(left):.1f}' "
                f"height='{bottom - top:.1f}' fill='{color}'>"
                f"<title>{html.escape(name)}: {height:,.4g} at {middle:.4g}</title>"
                "</rect>"
            )
    names = [name for name, _, _ in series]
    return _drawing(parts, across, up, x_title, y_title, names)


def image(
    values: Sequence[Sequence[float]],
    *,
    shape: tuple[int, int],
    x_title: str,
    y_title: str,
) -> str:
    """Shares in shades of blue, 0 white and 1 dark, the first row on top.

    Args:
        values: Rows of points.
        shape: Rows and columns of what the points stand for, which the axes count.
        x_title: Title of the columns.
        y_title: Title of the rows.
    """
    across = _Axis(0, shape[1], _LEFT, _INSIDE_WIDTH)
    down = _Axis(0, shape[0], _TOP, _INSIDE_HEIGHT)
    part = (
        f"<image x='{_LEFT}' y='{_TOP}' width='{_INSIDE_WIDTH}' "
        f"height='{_INSIDE_HEIGHT}' preserveAspectRatio='none' "
        f"style='image-rendering:pixelated' href='{_png(values)}'/>"
    )
    return _drawing([part], across, down, x_title, y_title, [])


class _Axis:
    """Maps values to pixels, and knows where its marks are."""

    def __init__(
        self,
        low: float,
        high: float,
        start: float,
        length: float,
        *,
        log: bool = False,
        padded: bool = False,
    ) -> None:
        """Span from `low` at pixel `start` to `high`, `length` pixels further.

        Args:
            low: Smallest value.
            high: Largest value.
            start: Pixel of the smallest.
            length: Pixels, negative upwards.
            log: Logarithmic.
            padded: Leave room on both sides.
        """
        self._map: Callable[[float], float] = math.log10 if log else float
        self._log = log
        low, high = self._map(low), self._map(high)
        if low == high:
            low, high = low - 0.5, high + 0.5
        room = 0.05 * (high - low) if padded else 0.0
        self.low, self.high = low - room, high + room
        self._start, self._length = start, length

    def at(self, value: float) -> float:
        """The pixel of a value."""
        share = (self._map(value) - self.low) / (self.high - self.low)
        return self._start + share * self._length

    def marks(self) -> list[float]:
        """Round values on the axis."""
        if self._log and self.high - self.low >= 1:
            powers = range(math.ceil(self.low), math.floor(self.high) + 1)
            return [10.0**power for power in powers]
        low, high = (10**x if self._log else x for x in (self.low, self.high))
        raw = (high - low) / 6
        size = 10.0 ** math.floor(math.log10(raw))
        step = next(size * k for k in (1, 2, 5, 10) if size * k >= raw)
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        return [i * step for i in range(first, last + 1) if not self._log or i > 0]


def _drawing(
    parts: Sequence[str],
    across: _Axis,
    up: _Axis,
    x_title: str,
    y_title: str,
    names: Sequence[str],
) -> str:
    """The parts between two axes, under a legend."""
    grid = []
    for value in up.marks():
        y = up.at(value)
        grid.append(
            f"<line x1='{_LEFT}' x2='{_WIDTH - _RIGHT}' y1='{y:.1f}' y2='{y:.1f}' "
            f"stroke='#e3e8ee'/><text x='{_LEFT - 6}' y='{y + 4:.1f}' "
            f"text-anchor='end'>{_number(value)}</text>"
        )
    floor = _TOP + _INSIDE_HEIGHT
    for value in across.marks():
        x = across.at(value)
        grid.append(
            f"<line x1='{x:.1f}' x2='{x:.1f}' y1='{floor}' y2='{floor + 5}' "
            f"stroke='#8894a0'/><text x='{x:.1f}' y='{floor + 18}' "
            f"text-anchor='middle'>{_number(value)}</text>"
        )
    titles = (
        f"<text x='{_LEFT + _INSIDE_WIDTH / 2:.0f}' y='{_HEIGHT - 8}' "
        f"text-anchor='middle'>{html.escape(x_title)}</text>"
        f"<text transform='translate(14 {_TOP + _INSIDE_HEIGHT / 2:.0f}) rotate(-90)' "
        f"text-anchor='middle'>{html.escape(y_title)}</text>"
    )
    legend = ""
    if len(names) > 1:
        place = _LEFT
        for color, name in zip(_colors(len(names)), names, strict=True):
            legend += (
                f"<rect x='{place}' y='8' width='12' height='12' fill='{color}'/>"
                f"<text x='{place + 17}' y='18'>{html.escape(name)}</text>"
            )
            place += 40 + 7 * len(name)
    return (
        f"<svg viewBox='0 0 {_WIDTH} {_HEIGHT}' width='{_WIDTH}' font-size='12' "
        "font-family='system-ui, sans-serif' fill='#1d2733' class='plot' role='img'>"
        f"<title>{html.escape(f'{y_title} over {x_title}')}</title>"
        f"{''.join(grid)}{''.join(parts)}{titles}{legend}</svg>"
    )


def _colors(count: int) -> list[str]:
    return [_COLORS[i % len(_COLORS)] for i in range(count)]


def _number(value: float) -> str:
    """A mark of an axis in few characters."""
    if value and not 1e-3 <= abs(value) < 1e7:
        return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")
    return f"{value:,.6g}" if abs(value) < 1e4 else f"{value:,.0f}"


def _png(values: Sequence[Sequence[float]]) -> str:
    """An image of shares, as an address that holds it."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        checked = kind + data
        return (
            struct.pack(">I", len(data))
            + checked
            + struct.pack(">I", zlib.crc32(checked))
        )

    def pixel(share: float) -> bytes:
        share = min(1.0, max(0.0, share))
        return bytes(round(255 + share * (dark - 255)) for dark in (8, 72, 140))

    rows = b"".join(b"\0" + b"".join(map(pixel, row)) for row in values)
    size = struct.pack(">IIBBBBB", len(values[0]), len(values), 8, 2, 0, 0, 0)
    data = (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", size)
        + chunk(b"IDAT", zlib.compress(rows, 9))
        + chunk(b"IEND", b"")
    )
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"
