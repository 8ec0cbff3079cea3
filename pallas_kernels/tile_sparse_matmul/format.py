"""`TileSparse`: a weight of which every tile of columns keeps its own rows.

The columns of a weight [K,N] are cut into tiles of G. A tile keeps some of the K rows,
whole: regular inside a tile, irregular across the matrix. Stored are the kept rows of
each tile one after another, and which rows they are::

    weight          tile 0   tile 1        values[0]  values[1]      rows     counts
    row 0           a a a    . . .         a a a      d d d          0 2 -    2
    row 1           . . .    d d d         b b b      e e e          1 2 3    3
    row 2           b b b    e e e         0 0 0      f f f
    row 3           . . .    f f f

Every tile has the same capacity P in rows, so shapes are static: weights stack
for `jax.lax.scan` and `jax.vmap`, and shards of a mesh have equal shapes. The kernels
run ``ceil(count / 64)`` steps in a tile, so room that is not used costs memory but
neither time nor traffic. Where tiles differ much in their counts the room is wasted:
`TileSparse.nbytes` tells, and the equal-work option of the pruner avoids it.

Whole pruned columns are left out before the tiles are cut: `columns` names the column
of each packed one, in any order.

Axes: K input features, N output features, T tiles, P row capacity of a tile, G columns
of a tile, C packed columns (at most T * G).
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.arrays import concrete
from pallas_kernels.tile_sparse_matmul.validation import (
    STEP,
    check_columns,
    check_shapes,
    check_values,
    is_whole,
    kept_rows,
    room_for,
)


_LEAVES = ("values", "rows", "counts", "columns", "places", "order")
_STATIC = ("shape", "granularity", "equal_counts", "steps")


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
    """True if all tiles are known to keep the same number of rows, with no more
    capacity than these need: kernels then need not read the counts."""
    steps: int | None = dataclasses.field(init=False, default=None)
    """Steps of 64 rows that all tiles together take, of stacked weights the most; None
    where the counts are not known. It tells whether a kernel pays: where tiles are
    uneven their room does not."""
    places: Int[Array, "*layers N"] | None = dataclasses.field(init=False, default=None)
    """The inverse of `columns`: the packed column of each of the N, C where it was
    pruned. A gather then puts products in their places. None where there are no
    `columns` or they are not known."""
    order: Int[Array, "*layers T"] | None = dataclasses.field(init=False, default=None)
    """The tiles by falling count, in which kernels take them; None where they keep
    equally many rows or their counts are not known."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))  # static: hashable
        check_shapes(self)
        equal = check_values(self)
        object.__setattr__(self, "equal_counts", equal)
        if self.values.ndim != 3:
            return
        columns = None if self.columns is None else concrete(self.columns)
        if columns is not None:
            places = np.full(self.shape[1] + 1, len(columns), np.int32)
            places[columns] = np.arange(len(columns))
            object.__setattr__(self, "places", jnp.asarray(places[:-1]))  # N is none
        counts = concrete(self.counts)
        if counts is None:
            return
        object.__setattr__(self, "steps", int(-(-counts // STEP).sum()))
        if not equal:
            order = np.argsort(-counts, kind="stable").astype(np.int32)
            object.__setattr__(self, "order", jnp.asarray(order))

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        """The leaves with their names, and what is static."""
        leaves = [(jax.tree_util.GetAttrKey(n), getattr(self, n)) for n in _LEAVES]
        return leaves, (self.shape, self.granularity, self.equal_counts, self.steps)

    @classmethod
    def tree_unflatten(cls, static: Any, leaves: Any) -> "TileSparse":
        """Puts leaves back, whatever they are: nothing is validated."""
        w = object.__new__(cls)
        parts = dict(zip(_LEAVES, leaves, strict=True))
        for name, value in (parts | dict(zip(_STATIC, static, strict=True))).items():
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
        if not is_whole(tile) or tile < 1:
            raise ValueError(f"tile {tile!r}, expected a positive number of columns")
        num_rows, num_columns = weight.shape
        chosen = None if columns is None else np.asarray(columns)
        if chosen is not None:
            check_columns(chosen, num_columns)
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
        kept = kept_rows(mask, tile)  # [T, K]
        counts = kept.sum(1).astype(np.int32)
        needed = room_for(int(counts.max(initial=0)), tile)
        room = needed if room is None else room
        unit = room_for(1, tile)
        if not is_whole(room) or room < needed or room % unit:
            raise ValueError(
                f"room {room!r}, expected a multiple of {unit} that holds the"
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
        """C: columns of the matmul before they are put in their places."""
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
        dense = jnp.swapaxes(dense, 0, 1)  # [K, T, G]
        dense = dense.reshape(inputs, self.tiles * self.tile)  # [K, T G]
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
        places: Any = self.places_of_columns()
        return jnp.take(packed, places, axis=axis, mode="fill", fill_value=0)

    def places_of_columns(self) -> Int[Any, " N"] | None:
        """The packed column of each of the N, C of a pruned one; None: all in order.

        On the host if `columns` are known.
        """
        if self.columns is None or self.places is not None:
            return self.places
        n, packed = self.shape[1], self.packed_columns
        if (columns := concrete(self.columns)) is not None:
            places = np.full(n + 1, packed, np.int32)
            places[columns] = np.arange(packed)  # n stands for none
            return places[:n]
        places = jnp.full((n,), packed, jnp.int32)
        numbers = jnp.arange(packed, dtype=jnp.int32)
        return places.at[self.columns].set(numbers, mode="drop")

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
        parts = {key.name: leaf for key, leaf in leaves}
        parts |= {"columns": None, "places": None}
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
        check_columns(order, self.shape[0])
        real = order < self.shape[0]  # [C]
        at = np.where(real, order, 0)
        return TileSparse.from_dense(
            np.where(real[:, None], np.asarray(self.to_dense())[at], 0),  # [C, N]
            np.asarray(self.mask())[at] & real[:, None],  # [C, N]
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
            np.asarray(self.to_dense()).T,  # [N, K]
            np.asarray(self.mask()).T,  # [N, K]
            tile=self.granularity if tile is None else tile,
            granularity=granularity,
        )

    def with_room(self, room: int) -> "TileSparse":
        """The weight with a larger capacity of each tile, so that shapes agree.

        Raises:
            ValueError: the capacity is larger already.
        """
        extra, unit = room - self.room, room_for(1, self.tile)
        if extra < 0 or room % unit:
            raise ValueError(
                f"room {room}, expected a multiple of {unit} of at least {self.room}"
            )
        lead = [(0, 0)] * (self.values.ndim - 2)
        (_, _, *others), (*static, equal, steps) = self.tree_flatten_with_keys()
        # Kernels take equal tiles for full ones.
        static = (*static, equal and not extra, steps)
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
        steps = [w.steps for w in weights if w.steps is not None]
        most = max(steps) if len(steps) == len(weights) else None
        static = (weights[0].shape, weights[0].granularity, equal, most)
        stacked = []
        for name in _LEAVES:
            leaves = [getattr(w, name) for w in weights]
            if name == "order" and any(leaf is not None for leaf in leaves):
                as_it_is = jnp.arange(weights[0].tiles, dtype=jnp.int32)
                leaves = [as_it_is if leaf is None else leaf for leaf in leaves]
            missing = any(leaf is None for leaf in leaves)
            stacked.append(None if missing else jnp.stack(leaves))
        return cls.tree_unflatten(static, stacked)

    @classmethod
    def side_by_side(cls, weights: "Sequence[TileSparse]") -> "TileSparse":
        """The weights [K,N] of several matmuls of one input as one, [K,sum of N].

        One matmul of few tokens reads faster than several. All tiles get room for the
        fullest; what is not used takes no time.

        Args:
            weights: weights of one K, tile and granularity, of whole tiles and without
                `columns`.

        Raises:
            ValueError: they disagree, or have `columns` or a tile that is not whole.
        """
        if not can_lie_side_by_side(weights):
            raise ValueError(
                "weights differ in inputs, tile or granularity, or have columns or a"
                f" tile that is not whole: shapes {[w.shape for w in weights]}"
            )
        first, rooms = weights[0], {w.room for w in weights}
        wide = [w.with_room(max(rooms)) for w in weights]
        values = jnp.concatenate([w.values for w in wide], -3)
        rows = jnp.concatenate([w.rows for w in wide], -2)
        counts = jnp.concatenate([w.counts for w in wide], -1)
        steps = [w.steps for w in weights if w.steps is not None]
        equal = all(w.equal_counts for w in wide)
        shape = first.shape[0], sum(w.shape[1] for w in weights)
        known = sum(steps) if len(steps) == len(weights) else None
        order = None if equal else jnp.argsort(-counts, stable=True)  # by falling count
        static = (shape, first.granularity, equal, known)
        return cls.tree_unflatten(static, (values, rows, counts, None, None, order))

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
        if not is_whole(number) or number < 1 or size % (number * unit):
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


def can_lie_side_by_side(weights: Sequence[TileSparse]) -> bool:
    """True if `TileSparse.side_by_side` takes the weights."""
    kinds = {(w.shape[0], w.tile, w.granularity, w.dtype) for w in weights}
    whole = all(w.columns is None and w.tiles * w.tile == w.shape[1] for w in weights)
    return len(kinds) == 1 and whole
