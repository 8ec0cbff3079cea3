"""How blocks share a tile-sparse weight: equally, whatever its tiles keep.

Tiles are taken in pairs by falling count, so that the two of a pair have about as many
steps of 64 rows. The steps of all pairs stand in one row, and each block has a stretch
of it, as long as that of any other: the last steps of one pair, whole pairs, the first
steps of another. Its sums of each pair are a *part*; whoever finishes a feature adds
the parts of its pair. All of this follows from the counts alone and is written down
once, when a model is prepared: a launch reads it.

Only the last blocks, which compute the factors of a norm before they multiply, have
less of what comes after one: all would wait for them.

Axes: T tiles, C pairs of tiles, N output features, W blocks.
"""

import dataclasses
import typing
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy
from jax.core import Tracer
from jaxtyping import Array, Int, Shaped

from pallas_kernels.decode_layer.config import GROUP, UNIT, WARPGROUPS, Kept
from pallas_kernels.mosaic import DeviceSpec
from pallas_kernels.tile_sparse_matmul import TileSparse


SHARED_TILE = UNIT * GROUP
"""Columns of a tile: those of a warpgroup."""


@dataclasses.dataclass(frozen=True)
class Shares:
    """Where what lies in the plan of a weight, an int32 vector.

    First are eight numbers of each block: how many pairs it has, the first one, the
    step of it that it begins with, how many of these it takes, the two tiles, and the
    steps before and after its stretch, of all.
    """

    tiles: int
    n: int
    workers: int
    depth: int
    """Most steps of a tile."""

    @property
    def pairs(self) -> int:
        """C; of an odd number the last tile is taken twice."""
        return -(-self.tiles // 2)

    @property
    def of_pair(self) -> int:
        """Four numbers of each pair: its tiles, and the steps before and after it."""
        return 8 * self.workers

    @property
    def of_feature(self) -> int:
        """Two numbers of each output feature: where its first part lies, and how many
        there are.
        """
        return self.of_pair + 4 * self.pairs

    @property
    def of_step(self) -> int:
        """Two numbers of each step: where `rows` has those of each tile."""
        return self.of_feature + 2 * self.n

    @property
    def most_steps(self) -> int:
        """Steps of all pairs, if each had a full tile."""
        return self.pairs * self.depth

    @property
    def size(self) -> int:
        """Numbers of a plan."""
        return self.of_step + 2 * self.most_steps

    @property
    def parts(self) -> int:
        """Places for parts: no two have the same sum of block and pair."""
        return self.pairs + self.workers


_LATE, _LESS = 4, 6
"""Blocks that compute factors, of up to 32 requests, and the steps that they have less:
meanwhile a block reads about three, and six are in shared memory.
"""


def _stretches(np: Any, steps: Any, workers: int, after_norm: bool) -> Any:
    """Where the stretch of each block begins and ends, [W] each."""
    number = np.arange(workers)
    busy, less = workers, 0
    if after_norm and workers > _LATE:
        # As many steps as if the last blocks had theirs.
        size = (steps + _LATE * _LESS) // workers
        busy, less = workers - _LATE, np.maximum(size - _LESS, 0)
    others = steps - (workers - busy) * less
    size, more = others // busy, others % busy
    own = np.where(number < more, size + 1, size)
    end = np.cumsum(np.where(number < busy, own, less))
    return np.concatenate([0 * end[:1], end[:-1]]), end


def make_plan(
    counts: Int[Any, "T"],
    places: Int[Any, "N"] | None,
    shares: Shares,
    begins: Int[Any, "T"] | None = None,
    *,
    after_norm: bool = False,
) -> Int[Any, " size"]:
    """The plan of a weight: a NumPy array, unless its sizes are traced.

    Args:
        counts: rows that each tile keeps.
        places: the packed column of each output feature, T times 128 or more of one
            that is pruned; None where all are kept, in order.
        shares: sizes.
        begins: where the rows of each tile begin among those of all; None where tiles
            have equal room.
        after_norm: as in `share`.
    """
    # On the host no programs are compiled.
    traced = isinstance(counts, Tracer) or isinstance(places, Tracer)
    np: Any = jnp if traced else numpy
    if not traced:
        counts = numpy.asarray(counts)
        places = None if places is None else numpy.asarray(places)
    pairs, workers = shares.pairs, shares.workers
    order = np.argsort(-counts, stable=True)
    order = np.concatenate([order, order[-1:]])[: 2 * pairs].reshape(pairs, 2)
    depths = -(-np.max(counts[order], axis=1) // GROUP)
    after = np.cumsum(depths)
    before, steps = after - depths, after[-1]
    begin, end = _stretches(np, steps, workers, after_norm)

    def pair_of(step: Any) -> Any:
        return np.minimum(np.searchsorted(after, step, side="right"), pairs - 1)

    def worker_of(step: Any) -> Any:
        return np.searchsorted(end, step, side="right")

    first, last = pair_of(begin), pair_of(end - 1)
    number = np.where(end > begin, last - first + 1, 0)
    skip = begin - before[first]
    taken = np.minimum(end, after[first]) - begin
    of_worker = [number, first, skip, taken, *order[first].T, begin, end]
    of_pair = [*order.T, before, after]
    # Where the sums of packed columns lie.
    owner = worker_of(before)
    parts = np.where(depths > 0, worker_of(after - 1) - owner + 1, 0)
    packed = np.arange(shares.n) if places is None else places
    tile, column = packed // SHARED_TILE, packed % SHARED_TILE
    is_there = tile < shares.tiles
    # The order holds every tile before the one that is taken twice.
    place = np.argsort(order.ravel()[: shares.tiles])[np.where(is_there, tile, 0)]
    pair, half = place // 2, place % 2
    group = ((pair + owner[pair]) * WARPGROUPS + half) * UNIT + column // GROUP
    of_feature = [
        group * GROUP + column % GROUP,
        np.where(is_there, parts[pair], 0),
    ]
    # Whose rows are whose.
    starts: Any = begins
    if begins is None:
        starts = np.arange(shares.tiles) * (shares.depth * GROUP)
    step = np.arange(shares.most_steps)
    pair = pair_of(step)
    of_step = (starts[order[pair]] + (step - before[pair])[:, None] * GROUP).T
    tables = (of_worker, of_pair, of_feature, of_step)
    return np.concatenate([np.stack(table, axis=1).ravel() for table in tables]).astype(
        np.int32
    )


@typing.no_type_check  # transformations rebuild it around shapes
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedTileSparse:
    """A tile-sparse weight, and how the blocks of a GPU share it; see `share`."""

    parts: tuple[TileSparse | Shaped[Array, "K _"], ...]
    """Their output features lie one behind the other; an array is dense."""
    rows: Int[Array, " R"] | None
    """For the kernel, the input features that all tiles keep; None of one sparse part,
    which has them."""
    plan: Int[Array, " size"] | None
    """For the kernel; XLA needs none."""

    @property
    def shape(self) -> tuple[int, int]:
        """Input and output features."""
        return self.parts[0].shape[0], sum(part.shape[1] for part in self.parts)

    @property
    def dtype(self) -> jnp.dtype:
        """Type of the values."""
        return self.parts[0].dtype

    @property
    def kept(self) -> tuple[Kept, ...]:
        """Sizes of the parts.

        Raises:
            ValueError: one is stacked or has other tiles than the kernel.
        """
        return tuple(map(_sizes, self.parts))

    @property
    def workers(self) -> int | None:
        """The blocks that share it, if there is a plan."""
        if self.plan is None:
            return None
        return (self.plan.size - _shares(self.kept, self.shape[1], 0).size) // 8


def _shares(kept: Sequence[Kept], n: int, workers: int) -> Shares:
    tiles, rooms = sum(part.tiles for part in kept), [part.room for part in kept]
    return Shares(tiles, n, workers, max(rooms) // GROUP)


def _sizes(part: Any) -> Kept:
    if not isinstance(part, TileSparse):
        k, n = part.shape
        return Kept(n // SHARED_TILE, k, dense=True)
    if len(part.values.shape) != 3 or part.tile != SHARED_TILE:
        raise ValueError(
            f"a tile-sparse weight has values of shape {part.values.shape}, expected"
            f" [T,P,{SHARED_TILE}]; prune with such tiles"
        )
    return Kept(part.tiles, part.room)


def plan_shares(
    parts: Sequence[Any], device: DeviceSpec, *, after_norm: bool = False
) -> tuple[Int[Any, " R"] | None, Int[Any, " size"]]:
    """The rows and the plan of `share`: NumPy arrays, unless a weight is traced.

    Args:
        parts: as there, of which the values are not read.
        device: the GPU.
        after_norm: as in `share`.
    """
    traced = any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(list(parts)))
    np: Any = jnp if traced else numpy
    kept = [_sizes(part) for part in parts]
    counts, places, rows, begins = [], [], [], []
    tiles, before, begin = sum(size.tiles for size in kept), 0, 0
    behind = sum(size.tiles * size.room for size in kept if not size.dense)
    for part, size in zip(parts, kept, strict=True):
        number = np.arange(size.tiles)
        if isinstance(part, TileSparse):
            counts.append(part.counts)
            rows.append(part.rows.ravel())
            begins.append(begin + number * size.room)
            begin += size.tiles * size.room
            found = part.places_of_columns()
        else:  # all have the same rows, which stand behind the others
            counts.append(np.full(size.tiles, size.room, np.int32))
            begins.append(np.full(size.tiles, behind))
            found = None
        if found is None:
            found = np.arange(part.shape[1], dtype=np.int32)
        else:  # the last tile may not be whole
            found = np.where(found < part.packed_columns, found, tiles * SHARED_TILE)
        places.append(np.minimum(found + before * SHARED_TILE, tiles * SHARED_TILE))
        before += size.tiles
    depths = [size.room for size in kept if size.dense]
    if depths:
        rows.append(np.arange(depths[0], dtype=np.int32))
    shares = _shares(kept, sum(map(len, places)), device.num_sms)
    given = (np.concatenate(several) for several in (counts, places, begins))
    counts, places, begins = given
    plan = make_plan(counts, places, shares, begins, after_norm=after_norm)
    return np.concatenate(rows) if depths or len(parts) > 1 else None, plan


def share(
    weight: TileSparse | Sequence[TileSparse | Shaped[Array, "K _"]],
    device: DeviceSpec,
    *,
    after_norm: bool = False,
) -> SharedTileSparse:
    """Plans how the blocks of a GPU share a weight, once for all calls.

    Args:
        weight: tiles of 128 columns; or several such weights of the same input features
            whose output features lie one behind the other, of which some may be dense.
        device: the GPU.
        after_norm: it multiplies what is normalized in the same launch, as `gate_up`
            and `qkv`: blocks that compute factors of the norm have less of it.

    Example:
        >>> import jax.numpy as jnp
        >>> from pallas_kernels.mosaic import H200
        >>> kept = jnp.ones((256, 256), bool)
        >>> w = TileSparse.from_dense(jnp.ones((256, 256)), kept, tile=128)
        >>> share(w, H200).workers, share([w, jnp.ones((256, 128))], H200).shape
        (132, (256, 384))
    """
    parts = (weight,) if isinstance(weight, TileSparse) else tuple(weight)
    made = plan_shares(parts, device, after_norm=after_norm)
    rows, plan = jax.tree.map(jnp.asarray, made)
    return SharedTileSparse(parts=parts, rows=rows, plan=plan)
