"""`TileSparse24`: a tile-wise sparse weight with two of four inside its kept rows.

A column of a tile keeps at most two of every four kept rows that follow each other.
Stored are those two, and two bits each that say which: the operand of sparse tensor
cores, which multiply in half the time and read 9/16 of the weight's bytes::

    values of a tile, by column    a 0 0 b | 0 0 c d      compressed    a b | c d
    positions among four                                  metadata      0 3 | 2 3

The metadata are in the order of Hopper's ``wgmma.mma_async.sp``: for every 64 columns
by 64 kept rows a word of 32 bits for each of the 128 threads of a warpgroup. Four bits
describe four rows: the position of the first that is stored, then of the second. The
lower half of the word of thread ``32 w + 4 r + l`` describes 16 rows of column ``16 w +
r`` from row ``16 l``, its upper half the same of column ``16 w + r + 8``.

Axes: K input features, N output features, T tiles, P row capacity of a tile, G columns
of a tile, B blocks of 64 columns in a tile, S steps of 64 rows.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.tile_sparse_matmul.format import STEP, TileSparse


BLOCK = 64
"""Columns that one word of metadata of each thread describes."""

# The two positions that are stored for each set of nonzeros among four; -1 for more
# than two. Zeros fill up: any two positions will do.
_PAIRS = np.full((16, 2), -1)
for _i, _j in ((0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)):
    for _code in (1 << _i | 1 << _j, 1 << _j, 1 << _i, 0):
        if (_PAIRS[_code] < 0).any():
            _PAIRS[_code] = _i, _j


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TileSparse24:
    """A tile-wise sparse weight [K,N] with 2:4 sparsity inside its kept rows; a pytree.

    Make one with `TileSparse24.from_dense` or `compress`. It is for inference: it has
    no gradient.

    Example:
        >>> import jax.numpy as jnp
        >>> places = jnp.arange(8)[:, None] + jnp.arange(64)
        >>> mask = places % 4 < 2  # two of each four rows, others in each column
        >>> w = TileSparse24.from_dense(jnp.ones((8, 64)), mask, tile=64)
        >>> w.to_dense()[:, 0]
        Array([1., 1., 0., 0., 1., 1., 0., 0.], dtype=float32)

    References:
        Guo et al., "Accelerating Sparse DNNs Based on Tiled GEMM", 2024 (arXiv
        2402.10876).
    """

    values: Float[Array, "*layers T G H"]
    """Two of every four kept rows of each column, next to each other."""
    metadata: Int[Array, "*layers T B S 128"]
    """Which two, int32; see the file."""
    pattern: TileSparse
    """The kept rows of each tile, in any order. Its `values` are None."""

    def __post_init__(self) -> None:
        values, metadata = self.values.shape, self.metadata.shape
        *lead, room = np.shape(self.pattern.rows)
        columns = values[-2] if len(values) > 1 else 0
        wanted = (*lead, columns // BLOCK, room // STEP, 128)
        if (
            columns % BLOCK
            or room % STEP
            or values != (*lead, columns, room // 2)
            or metadata != wanted
            or self.metadata.dtype != jnp.int32
        ):
            raise ValueError(
                f"values {values}, metadata {metadata} of type {self.metadata.dtype}"
                f" for rows {(*lead, room)}: expected [T, G, P/2], int32 [T, G/64,"
                " P/64, 128] and [T, P], of G and P that are multiples of 64"
            )

    def tree_flatten_with_keys(self) -> tuple[Any, None]:
        """Leaves by field."""
        names = [field.name for field in dataclasses.fields(self)]
        return [(jax.tree_util.GetAttrKey(n), getattr(self, n)) for n in names], None

    @classmethod
    def tree_unflatten(cls, static: None, leaves: Any) -> "TileSparse24":
        """Puts leaves back, whatever they are: nothing is validated."""
        del static
        w = object.__new__(cls)
        for field, leaf in zip(dataclasses.fields(cls), leaves, strict=True):
            object.__setattr__(w, field.name, leaf)
        return w

    @classmethod
    def compress(
        cls, w: TileSparse, rows: Int[np.ndarray, "*layers T R"] | None = None
    ) -> "TileSparse24":
        """Compresses a weight, stacked ones too; runs on the host.

        Where all tiles keep their rows in aligned groups of 64, in order, as where they
        keep all, the granularity becomes 64: the kernel then gathers nothing.

        Args:
            w: weight of tiles whose columns are a multiple of 64. Each column has at
                most two nonzeros among the kept rows 4 i to 4 i + 3 of its tile.
            rows: the kept rows of each tile in the order in which they are counted, -1
                past them; None is rising. A kernel gathers them in any order.

        Raises:
            ValueError: the tile is no multiple of 64, `rows` are others than those of
                the weight, or a column has more nonzeros.
        """
        if w.tile % BLOCK:
            raise ValueError(
                f"tile {w.tile}, expected a multiple of {BLOCK} columns, for which"
                " there are metadata; prune with such tiles"
            )
        if rows is not None:
            w = _reordered(w, rows)
        w = _in_groups(w)
        values = np.asarray(w.values)
        *lead, room, columns = values.shape
        fours = np.swapaxes(values, -1, -2).reshape(-1, columns, room // 4, 4)
        nonzero = (fours != 0).astype(np.int64)
        code = nonzero @ (1 << np.arange(4))  # [T, G, P/4]
        pairs = _PAIRS[code]  # [T, G, P/4, 2]
        if (pairs < 0).any():
            tile, column, four = np.argwhere(pairs[..., 0] < 0)[0]
            number = nonzero[tile, column, four].sum()
            raise ValueError(
                f"column {column} of tile {tile} has {number} nonzeros in its kept rows"
                f" {4 * four} to {4 * four + 3}, expected at most two; prune with"
                " pattern='tw24'"
            )
        compressed = np.take_along_axis(fours, pairs, -1).reshape(
            *lead, columns, room // 2
        )
        bits = (pairs[..., 0] | pairs[..., 1] << 2).astype(np.uint32)
        halves = bits.reshape(-1, columns, room // 16, 4) << np.arange(
            0, 16, 4, dtype=np.uint32
        )
        halves = halves.sum(-1, dtype=np.uint32)
        # [T, B, warp, upper, row, S, sixteen] to [T, B, S, warp, row, sixteen]
        blocks, steps = columns // BLOCK, room // STEP
        halves = halves.reshape(-1, blocks, 4, 2, 8, steps, 4)
        words = halves[:, :, :, 0] | halves[:, :, :, 1] << 16
        words = words.transpose(0, 1, 4, 2, 3, 5).reshape(*lead, blocks, steps, 128)
        return cls(
            values=jnp.asarray(compressed),
            metadata=jnp.asarray(words.view(np.int32)),
            pattern=replace_values(w, None),
        )

    @classmethod
    def from_dense(
        cls,
        weight: Float[Array, "K N"] | Float[np.ndarray, "K N"],
        mask: Bool[Array, "K N"] | Bool[np.ndarray, "K N"],
        *,
        tile: int = 128,
        granularity: Literal[1, 8, 64] = 1,
        columns: Int[Array, " C"] | Int[np.ndarray, " C"] | None = None,
    ) -> "TileSparse24":
        """Packs a weight and the mask of what it keeps; runs on the host.

        Args:
            weight: [K,N] dense weight.
            mask: [K,N], true where the weight is kept. A tile keeps the rows of which
                any of its columns keeps something; each column keeps at most two of
                every four of these.
            tile: G, columns of a tile; the kernel takes 64, 128 and 256.
            granularity: as for `TileSparse.from_dense`.
            columns: as for `TileSparse.from_dense`.

        Raises:
            ValueError: as `TileSparse.from_dense` and `compress`.
        """
        weight, mask = np.asarray(weight), np.asarray(mask)
        if mask.shape != weight.shape or mask.dtype != np.bool_ or mask.ndim != 2:
            raise ValueError(
                f"mask has shape {mask.shape} and type {mask.dtype}, expected booleans"
                f" of shape {weight.shape} as the weight has"
            )
        outputs = mask.shape[1]
        order = np.arange(outputs) if columns is None else np.asarray(columns)
        whole = mask.copy()
        for first in range(0, len(order), tile):
            mine = order[first : first + tile]
            mine = mine[mine < outputs]
            rows = mask[:, mine].any(1)
            if granularity > 1:
                rows = rows.reshape(-1, granularity).any(1).repeat(granularity)
            whole[:, mine] = rows[:, None]
        kept = np.where(mask, weight, np.zeros_like(weight))
        return cls.compress(
            TileSparse.from_dense(
                kept, whole, tile=tile, granularity=granularity, columns=columns
            )
        )

    @property
    def shape(self) -> tuple[int, int]:
        """K and N."""
        return self.pattern.shape

    @property
    def dtype(self) -> np.dtype:
        """Type of the values."""
        return np.dtype(self.values.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, unused room included."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self))

    @property
    def abstract(self) -> TileSparse:
        """The pattern with the shape and type of the values that were compressed."""
        *lead, columns, half = self.values.shape
        values = jax.ShapeDtypeStruct((*lead, 2 * half, columns), self.dtype)
        return replace_values(self.pattern, values)

    def decompress(self) -> TileSparse:
        """The weight as a `TileSparse`; exact, also under `jax.jit`.

        Its granularity is 64 where `compress` found it so.
        """
        *lead, columns, half = self.values.shape
        blocks, steps = columns // BLOCK, 2 * half // STEP
        words = self.metadata.reshape(*lead, blocks, steps, 4, 8, 4)
        shifts = jnp.array([0, 16], jnp.int32)
        halves = words[..., None, :, :, :, :] >> shifts.reshape(2, 1, 1, 1, 1)
        # [.., B, upper, S, warp, row, sixteen] to [.., B, warp, upper, row, S, sixteen]
        n = len(lead)
        order = (0, 3, 1, 4, 2, 5)
        halves = halves.transpose(*range(n), *(n + i for i in order))
        halves = halves.reshape(*lead, columns, half // 8)  # 16 rows each
        bits = halves[..., None] >> jnp.arange(0, 16, 4, dtype=jnp.int32)
        bits = bits.reshape(*lead, columns, half // 2)  # four rows each
        pairs = jnp.stack([bits & 3, bits >> 2 & 3], -1)  # [.., G, P/4, 2]
        values = self.values.reshape(*pairs.shape)
        here = pairs[..., None] == jnp.arange(4, dtype=jnp.int32)
        # Of the two one at most is in a place.
        fours = jnp.where(here, values[..., None], 0).sum(-2, dtype=values.dtype)
        values = fours.reshape(*lead, columns, 2 * half)
        return replace_values(self.pattern, jnp.swapaxes(values, -1, -2))

    def to_dense(self) -> Float[Array, "K N"]:
        """The weight with zeros where it was pruned; exact, also under `jax.jit`."""
        return self.decompress().to_dense()

    def packed(self) -> "TileSparse24":
        """The weight without `columns`, as `TileSparse.packed`."""
        return dataclasses.replace(self, pattern=self.pattern.packed())


def metadata_shape(tiles: int, tile: int, room: int) -> tuple[int, int, int, int]:
    """The shape of the metadata of tiles: [T, B, S, 128]."""
    return tiles, tile // BLOCK, room // STEP, 128


def random_24(w: TileSparse, key: jax.Array) -> TileSparse24:
    """Random values and positions in the kept rows of a weight, whole fours of them."""
    pairs = jnp.array([4, 8, 12, 9, 13, 14], jnp.int32)  # first | second << 2
    values_key, bits_key = jax.random.split(key)
    shape = *metadata_shape(w.tiles, w.tile, w.room), 8
    bits = jax.random.choice(bits_key, pairs, shape)
    bits = bits << jnp.arange(0, 32, 4, dtype=jnp.int32)
    half = w.tiles, w.tile, w.room // 2
    kept = jnp.arange(w.room // 2) // 2 < (w.counts // 4)[:, None]  # [T, P/2]
    values = jax.random.normal(values_key, half, w.dtype)
    return TileSparse24(
        values=jnp.where(kept[:, None], values, 0),
        metadata=bits.sum(-1, dtype=jnp.int32),
        pattern=replace_values(w, None),
    )


def _reordered(w: TileSparse, rows: Int[np.ndarray, "*layers T R"]) -> TileSparse:
    """A weight whose tiles have their rows in another order."""
    before, counts = np.asarray(w.rows), np.asarray(w.counts)
    kept = np.arange(w.room) < counts[..., None]
    order = np.full(before.shape, -1, np.int64)
    width = min(w.room, rows.shape[-1])
    order[..., :width] = rows[..., :width]
    if (rows[..., width:] >= 0).any() or ((order >= 0) != kept).any():
        raise ValueError("rows are not as many as the tiles of the weight keep")
    # Past the counts the places stay: they come last in both.
    end = w.shape[0] + np.arange(w.room)
    was, now = np.where(kept, before, end), np.where(kept, order, end)
    if w.granularity > 1 and (was != now).any():
        raise ValueError(
            f"rows in another order with granularity {w.granularity}: groups of rows"
            " stay together; leave rows out, or pack with granularity=1"
        )
    place = np.argsort(np.argsort(now, -1), -1)  # rank of each row, as `was` rises
    sorted_now = np.sort(now, -1)
    if (sorted_now != was).any():
        raise ValueError("rows are not those that the tiles of the weight keep")
    values = np.take_along_axis(np.asarray(w.values), place[..., None], axis=-2)
    found = np.take_along_axis(before, place, axis=-1)
    last = np.take_along_axis(found, np.maximum(counts - 1, 0)[..., None], axis=-1)
    (_, _, *others), static = w.tree_flatten_with_keys()
    leaves = jnp.asarray(values), jnp.asarray(np.where(kept, found, last))
    return TileSparse.tree_unflatten(static, (*leaves, *(leaf for _, leaf in others)))


def _in_groups(w: TileSparse) -> TileSparse:
    """The weight with granularity 64, if its rows allow it."""
    rows, counts = np.asarray(w.rows), np.asarray(w.counts)
    places = np.arange(w.room)
    starts = rows[..., places // STEP * STEP]
    aligned = (rows == starts + places % STEP) & (starts % STEP == 0)
    aligned[..., 1:] &= np.diff(rows, axis=-1) > 0  # a tile with all rows has them so
    whole = (counts % STEP == 0).all() and w.shape[0] % STEP == 0
    if not whole or not (aligned | (places >= counts[..., None])).all():
        return w
    leaves, (shape, _, *static) = w.tree_flatten_with_keys()
    kept = [leaf for _, leaf in leaves]
    return TileSparse.tree_unflatten((shape, STEP, *static), kept)


def replace_values(w: TileSparse, values: Any) -> TileSparse:
    """The same pattern with other values, or what stands for them.

    Args:
        w: a weight.
        values: an array, its shape, or None, as a `TileSparse24` has it.
    """
    (_, *others), static = w.tree_flatten_with_keys()
    return TileSparse.tree_unflatten(static, (values, *(leaf for _, leaf in others)))
