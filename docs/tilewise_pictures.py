"""Draws the patterns of `jaxscale.pruning`: ``python -m docs.tilewise_pictures``.

All prune the same scores of one matrix, whose rows and columns differ in importance as
those of trained models do.
"""

from pathlib import Path

import numpy as np

from docs.svg import INK, PALE, document
from jaxscale.pruning import Mask, Matrix, PruneConfig, make_masks


PATH = Path(__file__).parent / "_static" / "tilewise_patterns.svg"
SIZE = 48
_CELL, _GAP, _TITLE = 4, 24, 34
_PANELS = [
    ("ew", "ew: single weights"),
    ("bw", "bw: blocks of 8 x 8"),
    ("2:4", "2:4 (50%)"),
    ("tw_k", "tw_k: rows of each tile"),
    ("tw", "tw: columns, then rows"),
    ("tew", "tew: tw and single weights"),
]


def masks() -> dict[str, Mask]:
    """The mask of each pattern at 75%."""
    random = np.random.default_rng(3)
    rows, columns = random.lognormal(sigma=0.7, size=(2, SIZE))
    noise = random.lognormal(sigma=1.2, size=(SIZE, SIZE))
    scores = (rows[:, None] * columns * noise).astype(np.float32)
    matrix = Matrix(name="w", scores=scores)
    found = {}
    for pattern, _ in _PANELS:
        config = PruneConfig(
            pattern=pattern,  # pyright: ignore[reportArgumentType]
            sparsity=0.5 if pattern == "2:4" else 0.75,
            tile=8,
            block=8,
            single_fraction=0.15,
        )
        (found[pattern],) = make_masks([matrix], config)
    return found


def svg() -> str:
    """The picture."""
    side = SIZE * _CELL
    width, height = 3 * (side + _GAP) - _GAP, 2 * (side + _TITLE)
    parts = []
    found = masks()
    for i, (pattern, title) in enumerate(_PANELS):
        x, y = i % 3 * (side + _GAP), i // 3 * (side + _TITLE) + _TITLE - 10
        mask = found[pattern]
        parts += [
            f'<g transform="translate({x},{y})">',
            f'<text y="-6" fill="{INK}">{title}</text>',
            f'<rect width="{side}" height="{side}" fill="{PALE}"/>',
            f'<path fill="#1f77b4" d="{_runs(mask.tiled)}"/>',
            f'<path fill="#d62728" d="{_runs(mask.kept & ~mask.tiled)}"/>',
            "</g>",
        ]
    return document(width, height, parts)


def _runs(mask: np.ndarray) -> str:
    """The kept cells of a mask, each run of a row as one rectangle."""
    found = []
    for row, line in enumerate(mask):
        edges = np.flatnonzero(np.diff(np.pad(line.astype(np.int8), 1)))
        for start, end in edges.reshape(-1, 2) * _CELL:
            found.append(f"M{start} {row * _CELL}h{end - start}v{_CELL}H{start}z")
    return "".join(found)


if __name__ == "__main__":
    PATH.write_text(svg())
