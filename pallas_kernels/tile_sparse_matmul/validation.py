"""Checks of a tile-sparse weight: shapes that fit, indices in range and in order.

Axes: K input features, N output features, T tiles, P row capacity of a tile, G columns
of a tile.
"""

from typing import Any

import numpy as np

from pallas_kernels.arrays import concrete


GRANULARITIES = (1, 8, 64)

_LARGEST_INDEX = 2**31 - 1

STEP = 64
"""Rows that a kernel multiplies at a time: the room in a tile is a multiple of it."""


def is_whole(value: Any) -> bool:
    """Return whether a value is an integer, of Python or numpy, and no bool."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def room_for(count: int, tile: int) -> int:
    """Capacity for rows: whole steps, small ones where no kernel runs the tile."""
    unit = STEP if tile % STEP == 0 else 8
    return max(-(-count // unit), 1) * unit


def kept_rows(mask: np.ndarray, tile: int) -> np.ndarray:
    """Mark the rows that each tile keeps, [T,K], of a mask that must be tile-wise."""
    num_rows, num_columns = mask.shape
    tiles = max(-(-num_columns // tile), 1)
    kept = np.zeros((tiles, num_rows), np.bool_)
    for t in range(tiles):
        part = mask[:, t * tile : (t + 1) * tile]
        kept[t] = part.any(1)
        odd = np.flatnonzero(kept[t] & ~part.all(1))
        if odd.size:
            raise ValueError(
                f"mask keeps only a part of row {odd[0]} in tile {t} (packed columns"
                f" {t * tile} to {t * tile + part.shape[1] - 1}), expected whole rows;"
                f" prune with tiles of {tile}, or pass the tile and the columns that"
                " the mask was made with"
            )
    return kept


def check_columns(columns: np.ndarray, outputs: int) -> None:
    """Refuses columns out of range or named twice; `outputs` itself is padding."""
    if columns.ndim != 1 or columns.dtype.kind not in "iu":
        raise ValueError(
            f"columns of shape {columns.shape} and type {columns.dtype}, expected a"
            " vector of integers"
        )
    if columns.size and not (columns.min() >= 0 and columns.max() <= outputs):
        raise ValueError(
            f"columns from {columns.min()} to {columns.max()}, expected 0 to"
            f" {outputs - 1}, or {outputs} for a column that stands for none"
        )
    real = columns[columns < outputs]
    if len(np.unique(real)) != len(real):
        raise ValueError("columns name a column twice, expected each at most once")


def check_shapes(w: Any) -> None:
    """Refuses shapes that do not fit together."""
    if not is_whole(w.granularity) or w.granularity not in GRANULARITIES:
        raise ValueError(f"granularity {w.granularity!r}, expected one of 1, 8 and 64")
    if len(w.shape) != 2 or not all(map(is_whole, w.shape)):
        raise ValueError(f"shape {w.shape}, expected two integers, K and N")
    inputs, outputs = w.shape
    if min(w.shape) < 1:
        raise ValueError(f"shape {w.shape}, expected at least one row and one column")
    if max(w.shape) > _LARGEST_INDEX:
        raise ValueError(
            f"shape {w.shape}, expected at most {_LARGEST_INDEX} rows and columns,"
            " which int32 counts"
        )
    for name in ("rows", "counts", "columns"):  # kernels read them as they are
        if (array := getattr(w, name)) is not None and array.dtype != np.int32:
            raise ValueError(f"{name} of type {array.dtype}, expected int32")
    if inputs % w.granularity:
        raise ValueError(
            f"shape {w.shape}: {inputs} rows, expected a multiple of the granularity"
            f" {w.granularity}"
        )
    leading = w.values.shape[:-1]
    if w.values.ndim < 3 or w.rows.shape != leading or w.counts.shape != leading[:-1]:
        raise ValueError(
            f"values {w.values.shape}, rows {w.rows.shape}, counts {w.counts.shape}:"
            " expected [T, P, G], [T, P] and [T]"
        )
    if w.room % room_for(1, w.tile):
        raise ValueError(
            f"room for {w.room} rows in a tile, expected a multiple of"
            f" {room_for(1, w.tile)}; see from_dense"
        )
    if not 0 <= w.tiles * w.tile - w.packed_columns < w.tile:
        raise ValueError(
            f"{w.tiles} tiles of {w.tile} columns for {w.packed_columns} packed"
            f" columns of a weight of shape {w.shape}: expected as many as hold them"
        )
    if w.columns is not None and w.packed_columns > outputs:
        raise ValueError(f"{w.packed_columns} columns, expected at most N={outputs}")


def check_values(w: Any) -> bool:
    """Refuses indices and counts that are wrong; whether the counts are equal."""
    rows, counts = concrete(w.rows), concrete(w.counts)
    if rows is None or counts is None or w.values.ndim != 3:
        return False
    if counts.size and not (counts.min() >= 0 and counts.max() <= w.room):
        raise ValueError(
            f"counts from {counts.min()} to {counts.max()}, expected 0 to the room"
            f" P={w.room}"
        )
    inputs = w.shape[0]
    if rows.size and not (rows.min() >= 0 and rows.max() < inputs):
        raise ValueError(
            f"rows from {rows.min()} to {rows.max()}, expected 0 to {inputs - 1}"
        )
    kept = np.arange(w.room) < counts[:, None]  # [T, P]
    if (falls := (np.diff(rows, axis=1) <= 0) & kept[:, 1:]).any():
        t, p = np.argwhere(falls)[0]
        raise ValueError(
            f"rows of tile {t}: {rows[t, p]} before {rows[t, p + 1]}, expected them"
            " sorted, each once"
        )
    g = w.granularity
    if g > 1:
        # Only the kept entries: those past the counts repeat the last row.
        group = np.where(kept, rows - np.arange(w.room) % g, 0)
        starts = np.repeat(group[:, ::g], g, axis=1)[:, : w.room]  # [T, P]
        if (counts % g).any() or (np.where(kept, group - starts, 0)).any():
            raise ValueError(
                f"rows are not kept in groups of granularity {g}; prune with it, or"
                " pass granularity=1"
            )
        if (starts % g).any():
            raise ValueError(f"groups of rows do not start at multiples of {g}")
    if (columns := w.columns) is not None and (known := concrete(columns)) is not None:
        check_columns(known, w.shape[1])
    values = concrete(w.values)
    if values is not None and values[~kept].any():
        raise ValueError("values past the counts are not zero, expected zeros")
    full = bool(counts.size) and w.room == room_for(int(counts.max()), w.tile)
    return full and bool((counts == counts[0]).all())
