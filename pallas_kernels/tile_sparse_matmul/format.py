"""`TileSparse`: a weight of which every tile of columns keeps its own rows.

The columns of a weight [K,N] are cut into tiles of G. A tile keeps some of the K rows,
whole: regular inside a tile, irregular across the matrix. Stored are the kept rows of
each tile one after another, and which rows they are::

    weight          tile 0   tile 1        values[0]  values[1]      rows     counts
    row 0           a a a    . . .         a a a      d d d          0 2 -    2
    row 1           . . .    d d d         b b b      e e e          1 2 3    3
    row 2           b b b    e e e         0 0 0      f f f
    row 3           . . .    f f f

Every tile has room for the same number P of rows, so shapes are static: weights stack
for `jax.lax.scan` and `jax.vmap`, and shards of a mesh have equal shapes. The kernels
run ``ceil(count / 64)`` steps in a tile, so room that is not used costs memory but
neither time nor traffic. Where tiles differ much in their counts the room is wasted:
`TileSparse.nbytes` tells, and the equal-work option of the pruner avoids it.

Whole pruned columns are left out before the tiles are cut: `columns` names the column
of each packed one, in any order.

Axes: K input features, N output features, T tiles, P room for rows in a tile, G columns
of a tile, C packed columns (at most T * G).
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.varlen_attention.segments import concrete


__all__ = ["FORMAT_VERSION", "TileSparse", "load_tile_sparse", "save_tile_sparse"]

FORMAT_VERSION = 1
"""Version of the files that `save_tile_sparse` writes."""

GRANULARITIES = (1, 8, 64)

_LEAVES = ("values", "rows", "counts", "columns", "order")

STEP = 64
"""Rows that a kernel multiplies at a time: the room in a tile is a multiple of it."""


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, eq=False)
class TileSparse:
    """A tile-wise sparse weight [K,N]; a pytree.

    ``weight[rows[t, p], column(t, g)] = values[t, p, g]`` for ``p < counts[t]``, where
    ``column(t, g) = t G + g``, or ``columns[t G + g]`` if there are `columns`; all
    other elements are zero. Make one with `TileSparse.from_dense`.

    What is known is validated when it is constructed; under a transformation only the
    shapes are. `values` is the only leaf that has a gradient: differentiate with
    respect to it and put it back with `with_values`.

    Example:
        >>> import jax.numpy as jnp
        >>> dense = jnp.arange(1.0, 17.0).reshape(8, 2)
        >>> kept = jnp.array([True, False, True, False, False, False, False, True])
        >>> w = TileSparse.from_dense(dense, jnp.stack([kept, ~kept], 1), tile=1)
        >>> w.counts
        Array([3, 5], dtype=int32)
        >>> w.to_dense()[:3]
        Array([[1., 0.],
               [0., 4.],
               [5., 0.]], dtype=float32)

    References:
        Guo et al., "Accelerating Sparse DNN Models without Hardware-Support via
        Tile-Wise Sparsity", SC 2020 (arXiv 2008.13006). It stores differences of
        indices and launches a kernel for each tile; here are plain indices and one
        kernel.
    """

    values: Float[Array, "*layers T P G"]
    """Kept rows of each tile; zero from ``counts[t]`` on."""
    rows: Int[Array, "*layers T P"]
    """Row of each, rising; from ``counts[t]`` on the last one again."""
    counts: Int[Array, "*layers T"]
    """Rows that each tile keeps."""
    columns: Int[Array, "*layers C"] | None = None
    """Column of each packed column; None where all are kept, in order. N marks a packed
    column that stands for none."""
    shape: tuple[int, int] = dataclasses.field(kw_only=True)
    """K and N."""
    granularity: int = dataclasses.field(default=1, kw_only=True)
    """Rows are kept in aligned groups of so many: 1, 8 or 64."""
    equal_counts: bool = dataclasses.field(init=False, default=False)
    """Whether all tiles are known to keep the same number of rows, with no more room
    than these need: kernels then need not read the counts."""
    order: Int[Array, "*layers T"] | None = dataclasses.field(init=False, default=None)
    """The tiles by falling count, in which kernels take them; None where they keep
    equally many rows or their counts are not known."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))  # static: hashable
        _check_static(self)
        equal = _check_values(self)
        object.__setattr__(self, "equal_counts", equal)
        counts = concrete(self.counts)
        if counts is not None and self.values.ndim == 3 and not equal:
            order = np.argsort(-counts, kind="stable").astype(np.int32)
            object.__setattr__(self, "order", jnp.asarray(order))

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        """The leaves with their names, and what is static."""
        leaves = [(jax.tree_util.GetAttrKey(n), getattr(self, n)) for n in _LEAVES]
        return leaves, (self.shape, self.granularity, self.equal_counts)

    @classmethod
    def tree_unflatten(cls, static: Any, leaves: Any) -> "TileSparse":
        """Puts leaves back, whatever they are: nothing is validated."""
        w = object.__new__(cls)
        parts = dict(zip(_LEAVES, leaves, strict=True))
        static = zip(("shape", "granularity", "equal_counts"), static, strict=True)
        for name, value in (parts | dict(static)).items():
            object.__setattr__(w, name, value)
        return w

    @classmethod
    def from_dense(
        cls,
        weight: Float[Array, "K N"] | Float[np.ndarray, "K N"],
        mask: Bool[Array, "K N"] | Bool[np.ndarray, "K N"],
        *,
        tile: int = 128,
        granularity: Literal[1, 8, 64] = 1,
        columns: Int[Array, " C"] | Int[np.ndarray, " C"] | None = None,
        room: int | None = None,
    ) -> "TileSparse":
        """Packs a weight and the mask of what it keeps; runs on the host.

        Args:
            weight: [K,N] dense weight.
            mask: [K,N], true where the weight is kept. Within a tile all columns must
                keep the same rows.
            tile: G, columns of a tile. The kernels take 64, 128 and 256.
            granularity: rows are kept in aligned groups of so many.
            columns: [C], the columns that are kept, in the order in which the tiles
                take them; None keeps all, in order. A mask from which whole columns are
                pruned wants ``numpy.flatnonzero(mask.any(0))``. N stands for none.
            room: P, if it must be more than the fullest tile needs, for stacking.

        Returns:
            The packed weight; ``to_dense()`` gives ``where(mask, weight, 0)``.

        Raises:
            ValueError: the shapes differ, the mask is no tile-wise one, or `columns`
                leaves out kept weights.
        """
        weight, mask = np.asarray(weight), np.asarray(mask)
        if mask.shape != weight.shape or mask.dtype != np.bool_ or mask.ndim != 2:
            raise ValueError(
                f"mask has shape {mask.shape} and type {mask.dtype}, expected booleans"
                f" of shape {weight.shape} as the weight has"
            )
        if not _is_whole(tile) or tile < 1:
            raise ValueError(f"tile {tile!r}, expected a positive number of columns")
        num_rows, num_columns = weight.shape
        chosen = None if columns is None else np.asarray(columns)
        if chosen is not None:
            _check_columns(chosen, num_columns)
            if (lost := np.setdiff1d(np.flatnonzero(mask.any(0)), chosen)).size:
                raise ValueError(
                    f"mask keeps weights of column {lost[0]}, which columns leaves out;"
                    " pass columns=numpy.flatnonzero(mask.any(0))"
                )
            real = chosen < num_columns
            at = np.where(real, chosen, 0)
            weight = np.where(real, weight[:, at], 0)
            mask = np.logical_and(mask[:, at], real)
            for place in np.flatnonzero(~real):  # keeps the rows of its tile
                first = place // tile * tile
                mask[:, place] = mask[:, first : first + tile].any(1)
        kept = _kept_rows(mask, tile)  # [T, K]
        counts = kept.sum(1).astype(np.int32)
        needed = _room(int(counts.max(initial=0)), tile)
        room = needed if room is None else room
        if not _is_whole(room) or room < needed or room % _room(1, tile):
            raise ValueError(
                f"room {room!r}, expected a multiple of {_room(1, tile)} that holds the"
                f" {counts.max(initial=0)} rows of the fullest tile"
            )
        values = np.zeros((len(counts), room, tile), weight.dtype)
        rows = np.zeros((len(counts), room), np.int32)
        for t, keeps in enumerate(kept):
            found = np.flatnonzero(keeps)
            part = weight[found, t * tile : (t + 1) * tile]
            values[t, : len(found), : part.shape[1]] = part
            rows[t, : len(found)] = found
            if len(found):
                rows[t, len(found) :] = found[-1]
        return cls(
            jnp.asarray(values),
            jnp.asarray(rows),
            jnp.asarray(counts),
            None if chosen is None else jnp.asarray(chosen, jnp.int32),
            shape=(num_rows, num_columns),
            granularity=granularity,
        )

    @property
    def tile(self) -> int:
        """G, columns of a tile."""
        return self.values.shape[-1]

    @property
    def tiles(self) -> int:
        """T, number of tiles."""
        return self.values.shape[-3]

    @property
    def room(self) -> int:
        """P, rows that fit into a tile."""
        return self.values.shape[-2]

    @property
    def dtype(self) -> np.dtype:
        """Type of the values."""
        return np.dtype(self.values.dtype)

    @property
    def packed_columns(self) -> int:
        """C: columns of the product before they are put in their places."""
        return self.shape[1] if self.columns is None else self.columns.shape[-1]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, unused room included."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self))

    @property
    def sparsity(self) -> float:
        """Share of the elements of the [K,N] weight that are pruned, 0 to 1.

        Raises:
            ValueError: the counts are not known, under a transformation.
        """
        counts = concrete(self.counts)
        if counts is None or self.values.ndim != 3:
            raise ValueError("sparsity of a traced or stacked weight is not known")
        last = self.packed_columns - (self.tiles - 1) * self.tile
        if (columns := self.columns) is not None:
            last -= int(np.sum(np.asarray(columns) == self.shape[1]))
        kept = int(counts[:-1].sum()) * self.tile + int(counts[-1]) * last
        return 1 - kept / (self.shape[0] * self.shape[1])

    def to_dense(self) -> Float[Array, "K N"]:
        """The weight with zeros where it was pruned; exact, also under `jax.jit`."""
        inputs, _ = self.shape
        kept = jnp.arange(self.room) < self.counts[:, None]  # [T, P]
        # Where each row of the weight lies in a tile; past the end if it was pruned.
        place = jnp.full((self.tiles, inputs), self.room, jnp.int32)
        place = place.at[
            jnp.arange(self.tiles)[:, None], jnp.where(kept, self.rows, inputs)
        ].set(jnp.arange(self.room, dtype=jnp.int32), mode="drop")
        dense = jnp.take_along_axis(
            self.values, place[:, :, None], axis=1, mode="fill", fill_value=0
        )  # [T, K, G]
        dense = jnp.swapaxes(dense, 0, 1).reshape(inputs, self.tiles * self.tile)
        return self.place_columns(dense[:, : self.packed_columns])

    def mask(self) -> Bool[Array, "K N"]:
        """True where the weight is kept, be it zero or not."""
        return self.with_values(jnp.ones_like(self.values)).to_dense() != 0

    def place_columns(self, packed: jax.Array, axis: int = -1) -> jax.Array:
        """Puts packed columns in their places among the N, zeros into the others.

        Args:
            packed: an array of which `axis` counts the C packed columns.
            axis: that axis.

        Returns:
            The array with N entries along `axis`.
        """
        if self.columns is None:
            return packed
        outputs = self.shape[1]
        place = jnp.full((outputs,), packed.shape[axis], jnp.int32)
        place = place.at[self.columns].set(
            jnp.arange(len(self.columns), dtype=jnp.int32), mode="drop"
        )
        return jnp.take(packed, place, axis=axis, mode="fill", fill_value=0)

    def with_values(self, values: Float[Array, "*layers T P G"]) -> "TileSparse":
        """The same pattern with other values, which are not validated.

        Values past the counts must stay zero: the gradients of `tile_sparse_matmul` are
        zero there.
        """
        (_, *others), static = self.tree_flatten_with_keys()
        return self.tree_unflatten(static, (values, *(leaf for _, leaf in others)))

    def packed(self) -> "TileSparse":
        """The weight without `columns`: its C outputs are the packed ones.

        The other half of `fold_rows`: between the two layers the activations stay
        packed.
        """
        leaves, (shape, *others) = self.tree_flatten_with_keys()
        shape = (shape[0], self.packed_columns)
        parts = {key.name: leaf for key, leaf in leaves} | {"columns": None}
        return self.tree_unflatten((shape, *others), parts.values())

    def fold_rows(self, columns: Int[Array, " C"]) -> "TileSparse":
        """The weight for inputs of which only some features come, in another order.

        A layer with pruned output columns gives its packed outputs to the next layer,
        whose row indices absorb where they belong: ``next.fold_rows(w.columns)`` after
        ``w.packed()``. Rows of features that do not come are dropped, which is right
        where those features are zero: no bias, and an activation that keeps zero.

        Args:
            columns: [C], the input feature that each packed one is.

        Returns:
            A weight [C,N].

        Raises:
            ValueError: the kept rows do not lie in aligned groups of `granularity` in
                the new order.
        """
        order = np.asarray(columns)
        _check_columns(order, self.shape[0])
        real = order < self.shape[0]
        at = np.where(real, order, 0)
        return TileSparse.from_dense(
            np.where(real[:, None], np.asarray(self.to_dense())[at], 0),
            np.asarray(self.mask())[at] & real[:, None],
            tile=self.tile,
            granularity=self.granularity,  # pyright: ignore[reportArgumentType]
            columns=None if self.columns is None else np.asarray(self.columns),
        )

    def transpose(
        self, tile: int | None = None, granularity: Literal[1, 8, 64] = 1
    ) -> "TileSparse":
        """The weight [N,K], packed again; runs on the host.

        Rows that come in groups become tiles of columns: groups of 64 give tiles of 64.
        A tile-wise mask of granularity 1 has a transpose with tiles of 1, which no
        kernel runs.

        Args:
            tile: G of the transpose; the granularity of this weight by default.
            granularity: that of the transpose; 64 is possible where the tile of this
                weight is a multiple of 64.

        Raises:
            ValueError: the transposed mask is not tile-wise with this tile.
        """
        return TileSparse.from_dense(
            np.asarray(self.to_dense()).T,
            np.asarray(self.mask()).T,
            tile=self.granularity if tile is None else tile,
            granularity=granularity,
        )

    def with_room(self, room: int) -> "TileSparse":
        """The weight with room for more rows in each tile, so that shapes agree.

        Raises:
            ValueError: it has more room already.
        """
        extra = room - self.room
        if extra < 0 or room % _room(1, self.tile):
            raise ValueError(
                f"room {room}, expected a multiple of {_room(1, self.tile)} of at least"
                f" {self.room}"
            )
        lead = [(0, 0)] * (self.values.ndim - 2)
        (_, _, *others), (shape, granularity, equal) = self.tree_flatten_with_keys()
        # Kernels take equal tiles for full ones.
        static = (shape, granularity, equal and not extra)
        values = jnp.pad(self.values, [*lead, (0, extra), (0, 0)])
        rows = jnp.pad(self.rows, [*lead, (0, extra)], mode="edge")
        return self.tree_unflatten(static, (values, rows, *(x for _, x in others)))

    @classmethod
    def stack(cls, weights: "list[TileSparse] | tuple[TileSparse, ...]") -> Any:
        """Stacks weights of one shape, for `jax.lax.scan` and `jax.vmap`.

        Args:
            weights: weights that agree but for their values, rows and counts.

        Returns:
            A `TileSparse` whose leaves have a leading axis.

        Raises:
            ValueError: they disagree in shape, tile, granularity or columns.
        """
        if not weights:
            raise ValueError("no weights to stack, expected at least one")
        kinds = {(w.shape, w.tile, w.granularity, w.packed_columns) for w in weights}
        if len(kinds) > 1 or len({w.columns is None for w in weights}) > 1:
            raise ValueError(
                "weights differ in shape, tile, granularity or number of columns:"
                f" {sorted(kinds)}; only equal ones stack"
            )
        room = max(w.room for w in weights)
        weights = [w.with_room(room) for w in weights]
        equal = all(w.equal_counts for w in weights)
        static = (weights[0].shape, weights[0].granularity, equal)
        stacked = []
        for name in _LEAVES:
            leaves = [getattr(w, name) for w in weights]
            if name == "order" and any(leaf is not None for leaf in leaves):
                as_it_is = jnp.arange(weights[0].tiles, dtype=jnp.int32)
                leaves = [as_it_is if leaf is None else leaf for leaf in leaves]
            stacked.append(None if leaves[0] is None else jnp.stack(leaves))
        return cls.tree_unflatten(static, stacked)

    def shards(self, number: int, axis: Literal["rows", "columns"]) -> "TileSparse":
        """Cuts the weight for tensor parallelism; runs on the host.

        Column-parallel layers share out the tiles; in row-parallel layers each shard
        has the rows of its own input features, renumbered from 0. All shards get room
        for the fullest tile of any, so their shapes are equal.

        Args:
            number: shards; must divide T (columns) or K (rows).
            axis: what is shared out.

        Returns:
            A stacked weight with a leading axis of `number`; entry s is shard s of
            shape [K,N/number] or [K/number,N]. Shard its leading axis over the mesh.

        Raises:
            ValueError: it does not divide.
        """
        inputs, outputs = self.shape
        if axis not in ("rows", "columns"):
            raise ValueError(f"axis {axis!r}, expected 'rows' or 'columns'")
        size = inputs if axis == "rows" else outputs
        unit = self.granularity if axis == "rows" else self.tile
        if not _is_whole(number) or number < 1 or size % (number * unit):
            raise ValueError(
                f"{number!r} shards of {axis}: expected a number that cuts {size} into"
                f" multiples of {unit}"
            )
        if axis == "columns" and self.columns is not None:
            raise ValueError("columns were pruned: take packed() before shards()")
        dense, mask = np.asarray(self.to_dense()), np.asarray(self.mask())
        along = 0 if axis == "rows" else 1
        columns = None if self.columns is None else np.asarray(self.columns)
        parts = [
            TileSparse.from_dense(
                part,
                keeps,
                tile=self.tile,
                granularity=self.granularity,  # pyright: ignore[reportArgumentType]
                columns=columns,
            )
            for part, keeps in zip(
                np.split(dense, number, along),
                np.split(mask, number, along),
                strict=True,
            )
        ]
        return TileSparse.stack(parts)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _room(count: int, tile: int) -> int:
    """Rows to make room for: whole steps, small ones where no kernel runs the tile."""
    unit = STEP if tile % STEP == 0 else 8
    return max(-(-count // unit), 1) * unit


def _kept_rows(mask: np.ndarray, tile: int) -> np.ndarray:
    """Which rows each tile keeps, [T,K], of a mask that must be tile-wise."""
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


def _check_columns(columns: np.ndarray, outputs: int) -> None:
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


def _check_static(w: TileSparse) -> None:
    """Refuses shapes that do not fit together."""
    if not _is_whole(w.granularity) or w.granularity not in GRANULARITIES:
        raise ValueError(f"granularity {w.granularity!r}, expected one of 1, 8 and 64")
    if len(w.shape) != 2 or not all(map(_is_whole, w.shape)):
        raise ValueError(f"shape {w.shape}, expected two integers, K and N")
    inputs, outputs = w.shape
    if min(w.shape) < 1:
        raise ValueError(f"shape {w.shape}, expected at least one row and one column")
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
    if not 0 <= w.tiles * w.tile - w.packed_columns < w.tile:
        raise ValueError(
            f"{w.tiles} tiles of {w.tile} columns for {w.packed_columns} packed"
            f" columns of a weight of shape {w.shape}: expected as many as hold them"
        )
    if w.columns is not None and w.packed_columns > outputs:
        raise ValueError(f"{w.packed_columns} columns, expected at most N={outputs}")


def _check_values(w: TileSparse) -> bool:
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
    kept = np.arange(w.room) < counts[:, None]
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
        starts = np.repeat(group[:, ::g], g, axis=1)[:, : w.room]
        if (counts % g).any() or (np.where(kept, group - starts, 0)).any():
            raise ValueError(
                f"rows are not kept in groups of granularity {g}; prune with it, or"
                " pass granularity=1"
            )
        if (starts % g).any():
            raise ValueError(f"groups of rows do not start at multiples of {g}")
    if (columns := w.columns) is not None and (known := concrete(columns)) is not None:
        _check_columns(known, w.shape[1])
    values = concrete(w.values)
    if values is not None and values[~kept].any():
        raise ValueError("values past the counts are not zero, expected zeros")
    full = bool(counts.size) and w.room == _room(int(counts.max()), w.tile)
    return full and bool((counts == counts[0]).all())


def save_tile_sparse(path: str | Path, weights: Mapping[str, TileSparse]) -> None:
    """Writes weights into a safetensors file.

    Tensors are called ``<name>.values`` and so on; what is static lies in the header,
    with the version of the format.

    Args:
        path: file to write.
        weights: name to weight.

    Example:
        >>> import jax.numpy as jnp, tempfile, pathlib
        >>> w = TileSparse.from_dense(jnp.ones((8, 8)), jnp.ones((8, 8), bool), tile=8)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = pathlib.Path(folder, "w.safetensors")
        ...     save_tile_sparse(file, {"mlp": w})
        ...     load_tile_sparse(file)["mlp"].shape
        (8, 8)
    """
    import safetensors.numpy

    tensors, static = {}, {}
    for name, w in weights.items():
        for leaf in ("values", "rows", "counts", "columns"):
            if (array := getattr(w, leaf)) is not None:
                tensors[f"{name}.{leaf}"] = np.ascontiguousarray(array)
        static[name] = {"shape": w.shape, "granularity": w.granularity}
    header = {
        "format": "tile_sparse",
        "version": str(FORMAT_VERSION),
        "weights": json.dumps(static),
    }
    safetensors.numpy.save_file(tensors, path, metadata=header)


def load_tile_sparse(path: str | Path) -> dict[str, TileSparse]:
    """Reads what `save_tile_sparse` wrote, and validates it.

    Args:
        path: the file.

    Returns:
        Name to weight.

    Raises:
        ValueError: the file is none of ours, of another version, or damaged.
    """
    import safetensors

    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} is no safetensors file: {error}") from error
    if header.get("format") != "tile_sparse":
        raise ValueError(
            f"{path} holds no tile-sparse weights (format {header.get('format')!r});"
            " write them with save_tile_sparse"
        )
    if header.get("version") != str(FORMAT_VERSION):
        raise ValueError(
            f"{path} has version {header.get('version')} of the format, expected"
            f" {FORMAT_VERSION}; pack the dense weight again"
        )
    try:
        return _read_weights(tensors, json.loads(header["weights"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def _read_weights(
    tensors: Mapping[str, np.ndarray], described: Mapping[str, Any]
) -> dict[str, TileSparse]:
    """The weights of a file, validated."""
    weights = {}
    for name, static in described.items():
        parts = {n: tensors.get(f"{name}.{n}") for n in ("values", "rows", "counts")}
        if missing := [n for n, array in parts.items() if array is None]:
            raise ValueError(f"{name} lacks {missing}")
        columns = tensors.get(f"{name}.columns")
        weights[name] = TileSparse(
            **{n: jnp.asarray(array) for n, array in parts.items()},
            columns=None if columns is None else jnp.asarray(columns),
            shape=tuple(static["shape"]),
            granularity=static["granularity"],
        )
    return weights
