"""Draws the five systems, and packing: ``python -m docs.front_pictures``."""

from pathlib import Path

from docs import svg
from docs.svg import GRAY, INK, PALE


STATIC = Path(__file__).parent / "_static"
BLUE, ORANGE, GREEN, PURPLE, RED = "#1f77b4", "#ff7f0e", "#2ca02c", "#9467bd", "#d62728"
_COLORS = (BLUE, ORANGE, GREEN, PURPLE)
_LENGTHS = (5, 12, 3, 8)


def _box(x: float, y: float, width: float, height: float, color: str) -> str:
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" '
        f'fill="{color}"/>'
    )


def _text(x: float, y: float, text: str, color: str = INK, size: int = 13) -> str:
    return f'<text x="{x:g}" y="{y:g}" fill="{color}" font-size="{size}">{text}</text>'


def packing() -> str:
    """Four sequences in a padded batch, and packed."""
    cell, row, longest = 14, 20, max(_LENGTHS)
    right = longest * cell + 90
    padded, packed = [], []
    start = 0
    for i, (length, color) in enumerate(zip(_LENGTHS, _COLORS, strict=True)):
        y = 40 + i * (row + 4)
        padded += [_box(10, y, longest * cell, row, PALE)]
        for token in range(length):
            padded.append(_box(10 + token * cell, y, cell - 1, row, color))
            x = right + (start + token) % 14 * cell
            y_packed = 40 + (start + token) // 14 * (row + 4)
            packed.append(_box(x, y_packed, cell - 1, row, color))
        start += length
    whole = longest * len(_LENGTHS)
    parts = [
        _text(10, 24, f"Padded: {whole} slots for {start} tokens"),
        _text(right, 24, f"Packed: {start} slots"),
        *padded,
        *packed,
    ]
    return svg.document(right + 14 * cell + 10, 40 + 4 * (row + 4) + 6, parts)


def _flux() -> list[str]:
    """A transfer, then a matmul; and both in tiles."""
    parts = [_box(0, 0, 76, 12, ORANGE), _box(76, 14, 84, 12, BLUE)]
    for i in range(6):
        parts.append(_box(i * 13, 40, 12, 12, ORANGE))
        parts.append(_box(13 + i * 14, 54, 13, 12, BLUE))
    return [
        *parts,
        _text(0, 86, "transfer", ORANGE),
        _text(64, 86, "matmul", BLUE),
    ]


def _bytetransformer() -> list[str]:
    parts, x = [], 0
    for i, (length, color) in enumerate(zip(_LENGTHS, _COLORS, strict=True)):
        parts += [
            _box(0, i * 12, 84, 10, PALE),
            _box(0, i * 12, length * 7, 10, color),
        ]
        parts.append(_box(x, 56, length * 5.6 - 1, 12, color))
        x += length * 5.6
    return [*parts, _text(0, 86, "packed sequences", GRAY)]


def _flover() -> list[str]:
    """Three slots; a request begins where one has ended."""
    lanes = ((60, 95), (24, 70, 60), (110, 44))
    parts, n = [_box(0, 0, 160, 64, PALE)], 0
    for lane, widths in enumerate(lanes):
        x = 0
        for width in widths:
            color = _COLORS[n % len(_COLORS)]
            parts.append(_box(x, lane * 22 + 1, width - 1, 18, color))
            x, n = x + width, n + 1
    return [*parts, _text(0, 86, "requests join and leave", GRAY)]


def _megascale() -> list[str]:
    """A pipeline: four stages, one forward and one backward."""
    parts = []
    for stage in range(4):
        y = stage * 16
        forward = [stage * 10 + i * 10 for i in range(4 - stage)]
        for i in range(4):
            x = 70 - stage * 10 + i * 24
            parts.append(_box(x, y, 12, 13, GREEN))
            if i + 4 - stage < 4:
                forward.append(x + 14)
        parts += [_box(x, y, 9, 13, BLUE) for x in forward[:4]]
    return [*parts, _text(0, 86, "a pipeline of four stages", GRAY)]


def _tilewise() -> list[str]:
    """Four tiles of columns, each with its own rows."""
    kept = ((0, 3, 5, 9), (1, 2, 6, 8, 10), (0, 4, 7), (2, 3, 5, 9, 10, 11))
    parts = []
    for tile, rows in enumerate(kept):
        parts.append(_box(tile * 38, 0, 34, 66, PALE))
        parts += [_box(tile * 38, row * 5.5, 34, 5, PURPLE) for row in rows]
    return [*parts, _text(0, 86, "tiles keep their own rows", GRAY)]


PANELS = (
    ("Flux", "Tensor parallelism", _flux),
    ("ByteTransformer", "Encoders", _bytetransformer),
    ("Flover", "Serving", _flover),
    ("MegaScale", "Pretraining", _megascale),
    ("Tile-wise sparsity", "Pruning", _tilewise),
)


def systems() -> str:
    """The idea of each system, two beside each other: a telephone is narrow."""
    step, height = 190, 166
    parts = []
    for i, (name, what, draw) in enumerate(PANELS):
        x, y = 14 + i % 2 * step, 64 + i // 2 * height
        parts += [
            f'<g transform="translate({x},{y})">',
            _text(0, -40, f"{i + 1}. {name}", size=16),
            _text(0, -20, what, GRAY, 14),
            *draw(),
            "</g>",
        ]
    return svg.document(2 * step, 3 * height, parts)


PICTURES = {
    STATIC / "systems.svg": systems,
    STATIC / "bytetransformer_packing.svg": packing,
}


if __name__ == "__main__":
    for path, draw in PICTURES.items():
        path.write_text(draw())
