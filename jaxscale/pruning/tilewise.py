r"""Masks of every pattern, from scores.

A unit is what a pattern keeps or prunes as a whole. Its score is the mean of its
elements' scores. With :math:`U` equal units, sparsity :math:`s` prunes exactly
:math:`\lfloor U s + 1/2 \rfloor` of them, the worst; ties keep the earlier one.
The units of all matrices are ranked together, unless ``scope`` is ``"layer"``. Each
matrix first keeps as many of its own best units as ``max_layer_sparsity`` guarantees
it, so that no layer loses everything.

The patterns with tiles, after Guo et al. (SC 2020, arXiv 2008.13006), in steps:

1. Columns (tw, tew). The columns that stay hold the fraction :math:`\sqrt{1 - s}` of
   the weights. The columns of a matrix are ranked and cut into groups of G; the groups
   of all matrices are ranked by their means. So each matrix keeps a multiple of G
   columns, at least one group: they become its tiles, in increasing order. Matrices
   that share their columns (gate and up of a feed-forward network) are ranked as one.
2. Rows. A piece is ``k_granularity`` rows of one tile, all of equal size. The best
   pieces are kept until the whole mask has sparsity :math:`s`, however many columns
   step 1 took. Rows of input features that step 1 has pruned are excluded, unless too
   little would remain.
3. Single weights (tew). Steps 1 and 2 keep a little less, and the best of the other
   weights fill up what is missing.

A-priori tuning: the paper uses element-wise pruning to find important units. The
authors' code does not contain that step, so this is our definition: element-wise
pruning at the same sparsity keeps the fraction :math:`e_u` of unit :math:`u`, and the
score of the unit is multiplied by :math:`e_u^a` with ``apriori`` :math:`a`. A unit
whose score comes from a few outliers then ranks below one that is important everywhere.

Legend: K input features, N output features, G columns of a tile, T tiles.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float, Int

from jaxscale.pruning.config import PruneConfig, pruned_units
from jaxscale.pruning.ranking import (
    best,
    keep_best,
    keep_share,
    least_units,
    share_out,
    spread,
    unit_all,
    unit_means,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Matrix:
    """A weight to prune, or one of a stack.

    Example:
        >>> Matrix(name="mlp.up", scores=np.ones((4, 8), np.float32)).scores.shape
        (4, 8)
    """

    name: str
    """Name of the layer, for messages."""
    scores: Float[np.ndarray, "K N"]
    """Importance of each element, at least 0."""
    previous: Bool[np.ndarray, "K N"] | None = None
    """Units that the previous stage kept; None for the first stage."""
    previous_tiled: Bool[np.ndarray, "K N"] | None = None
    """The part of it in tiles."""
    row_shards: int = 1
    """Devices that K is split over."""
    column_shards: int = 1
    """Devices that N is split over."""
    shares: str | None = None
    """An earlier matrix that must keep the same columns."""
    fed_by: str | None = None
    """An earlier matrix whose columns are this one's input features: rows of its pruned
    columns are pruned."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mask:
    """The elements that one matrix keeps."""

    kept: Bool[np.ndarray, "K N"]
    """All kept elements."""
    tiled: Bool[np.ndarray, "K N"]
    """The part in tiles: all but the single weights of tew."""


def make_masks(matrices: Sequence[Matrix], config: PruneConfig) -> list[Mask]:
    """The masks of `matrices`, ranked together.

    Args:
        matrices: Weights with their scores.
        config: Pattern, sparsity, tile; its layers are ignored here.

    Raises:
        ValueError: tiles, blocks or vectors do not divide a matrix, scores are not
            finite, or the previous masks leave too little.

    Example:
        >>> scores = np.array([[9.0, 1.0], [1.0, 3.0], [2.0, 8.0], [7.0, 1.0]])
        >>> config = PruneConfig(pattern="tw_k", tile=1, sparsity=0.5)
        >>> (mask,) = make_masks([Matrix(name="w", scores=scores)], config)
        >>> mask.kept.astype(int)
        array([[1, 0],
               [0, 1],
               [0, 1],
               [1, 0]])
    """
    if not matrices:
        raise ValueError(
            "no layer is left to prune; leave fewer of them dense, or use a model "
            "with linear layers"
        )
    for matrix in matrices:
        _check(matrix, config)
    if config.scope == "layer":
        masks = [_make_masks([matrix], config)[0] for matrix in matrices]
    else:
        masks = _make_masks(matrices, config)
    for matrix, mask in zip(matrices, masks, strict=True):
        if matrix.previous is not None and (mask.kept & ~matrix.previous).any():
            raise ValueError(
                f"sparsity {config.sparsity} prunes less of layer {matrix.name} than "
                "the mask before; sparsity must not fall from stage to stage"
            )
    return masks


def _make_masks(matrices: Sequence[Matrix], config: PruneConfig) -> list[Mask]:
    if config.pattern == "tew":
        return _tile_element_wise(matrices, config)
    pattern = {
        "ew": _element_wise,
        "vw": _vector_wise,
        "bw": _block_wise,
        "2:4": _two_four,
        "tw_k": _tile_wise,
        "tw": _tile_wise,
    }[config.pattern]
    return [Mask(kept=mask, tiled=mask) for mask in pattern(matrices, config)]


def tile_columns(
    tiled: Bool[np.ndarray, "K N"], pattern: str
) -> Int[np.ndarray, " C"] | None:
    """The columns of a mask's tiles, in order; None if all."""
    return None if pattern == "tw_k" else np.flatnonzero(tiled.any(axis=0))


def tile_counts(
    tiled: Bool[np.ndarray, "K N"], tile: int, pattern: str
) -> Int[np.ndarray, " T"]:
    """Rows that each tile keeps, its work.

    Args:
        tiled: Elements in tiles: ``Mask.tiled``.
        tile: Columns of a tile.
        pattern: One of `TILE_WISE`; all but ``tw_k`` leave out empty columns first.

    Example:
        >>> tiled = np.array([[True, True, False, False], [True, True, True, True]])
        >>> tile_counts(tiled, 2, "tw")
        array([2, 1])
    """
    columns = tile_columns(tiled, pattern)
    packed = tiled if columns is None else tiled[:, columns]
    return packed[:, ::tile].sum(axis=0)


def _element_wise(matrices: Sequence[Matrix], config: PruneConfig) -> list[np.ndarray]:
    return keep_share(
        [m.scores for m in matrices],
        config.sparsity,
        allowed=_allowed(matrices),
        least_share=config.least_share,
    )


def _vector_wise(matrices: Sequence[Matrix], config: PruneConfig) -> list[np.ndarray]:
    """Vectors along K keep equally many weights; the remainder goes to the best of
    them.

    Where ``(1 - s) * vector`` is no whole number, some vectors keep one more.
    """

    def by_vector(x: np.ndarray) -> np.ndarray:
        return x.T.reshape(-1, config.vector)  # [K, N] to [N K / vector, vector]

    scores = [by_vector(m.scores) for m in matrices]
    for i, matrix in enumerate(matrices):
        if matrix.previous is not None:
            scores[i] = np.where(by_vector(matrix.previous), scores[i], -np.inf)
    total = sum(score.size for score in scores)
    vectors = sum(len(score) for score in scores)
    each, rest = divmod(total - pruned_units(total, config.sparsity), vectors)
    orders = [np.argsort(-score, axis=1, kind="stable") for score in scores]
    # The next weight of each vector competes for the remainder.
    place = min(each, config.vector - 1)
    following = [
        np.take_along_axis(score, order[:, [place]], axis=1)
        for score, order in zip(scores, orders, strict=True)
    ]
    more = keep_best(following, rest)
    kept = []
    for matrix, order, extra in zip(matrices, orders, more, strict=True):
        mask = np.argsort(order, axis=1, kind="stable") < each + extra
        kept.append(mask.reshape(matrix.scores.T.shape).T)  # back to [K, N]
    return kept


def _two_four(matrices: Sequence[Matrix], config: PruneConfig) -> list[np.ndarray]:
    four = dataclasses.replace(config, pattern="vw", vector=4)
    return _vector_wise(matrices, four)


def _block_wise(matrices: Sequence[Matrix], config: PruneConfig) -> list[np.ndarray]:
    side = config.block
    allowed = _allowed(matrices)
    units = keep_share(
        [unit_means(m.scores, side, side) for m in matrices],
        config.sparsity,
        allowed=None if allowed is None else [unit_all(a, side, side) for a in allowed],
        least_share=config.least_share,
    )
    return [spread(unit, side, side) for unit in units]


def _tile_wise(matrices: Sequence[Matrix], config: PruneConfig) -> list[np.ndarray]:
    units = sum(m.scores.size for m in matrices) // (config.k_granularity * config.tile)
    return _tiles(matrices, config, units - pruned_units(units, config.sparsity))


def _tiles(
    matrices: Sequence[Matrix], config: PruneConfig, pieces: int
) -> list[np.ndarray]:
    """Tile-wise masks that keep a given number of pieces of rows."""
    rows, tile = config.k_granularity, config.tile
    ranked = [m.scores.astype(np.float64) for m in matrices]
    densities = None
    if config.apriori:
        single = [
            dataclasses.replace(m, previous=None, previous_tiled=None) for m in matrices
        ]
        unbounded = dataclasses.replace(config, max_layer_sparsity=1.0)
        densities = _element_wise(single, unbounded)
    # The columns that the tiles are made of, in order.
    if config.pattern == "tw_k":
        columns = [np.arange(m.scores.shape[1]) for m in matrices]
    else:
        columns = _keep_columns(matrices, ranked, densities, config, pieces)
    scores = []
    for i in range(len(matrices)):
        score = unit_means(ranked[i][:, columns[i]], rows, tile)
        if densities is not None:
            score *= _bias(unit_means(densities[i][:, columns[i]], rows, tile), config)
        scores.append(score)
    sizes = [m.scores.size // (rows * tile) for m in matrices]
    least = least_units(sizes, config.least_share, pieces)
    allowed = _allowed_pieces(matrices, columns, config, pieces, (scores, least))
    units = keep_best(scores, pieces, allowed=allowed, least=least)
    if config.equal_work:
        units = [
            _balance(score, unit, matrix.row_shards, allowed[i])
            for i, (score, unit, matrix) in enumerate(
                zip(scores, units, matrices, strict=True)
            )
        ]
    kept = []
    for matrix, chosen, unit in zip(matrices, columns, units, strict=True):
        mask = np.zeros(matrix.scores.shape, np.bool_)
        mask[:, chosen] = spread(unit, rows, tile)
        kept.append(mask)
    return kept


def _allowed_pieces(
    matrices: Sequence[Matrix],
    columns: Sequence[np.ndarray],
    config: PruneConfig,
    pieces: int,
    needed: tuple[Sequence[np.ndarray], Sequence[int]],
) -> list[np.ndarray]:
    """Mark the pieces that may be kept.

    Args:
        matrices: The matrices.
        columns: Those that each keeps.
        config: Pattern, tile and rows of a piece.
        pieces: How many are kept, over all matrices.
        needed: Scores of the pieces of each matrix, and how many it keeps at least: the
            best, where those of features that are left are fewer.
    """
    rows, tile = config.k_granularity, config.tile
    place = {matrix.name: i for i, matrix in enumerate(matrices)}
    before, fed = [], []
    for matrix, chosen in zip(matrices, columns, strict=True):
        height = matrix.scores.shape[0]
        units = np.ones((height // rows, chosen.size // tile), np.bool_)
        if matrix.previous_tiled is not None:
            units &= unit_all(matrix.previous_tiled[:, chosen], rows, tile)
        before.append(units)
        comes = np.ones(height, np.bool_)
        if config.pattern == "tw" and matrix.fed_by in place:
            comes = np.isin(np.arange(height), columns[place[matrix.fed_by]])
        comes = comes.reshape(-1, rows).any(1)  # [K] to [K / rows]
        fed.append(units & comes[:, None])
    for own, all_own, score, count in zip(fed, before, *needed, strict=True):
        missing = min(count - int(own.sum()), int((all_own & ~own).sum()))
        rest = np.where(all_own & ~own, score, -np.inf)
        own |= best(rest.ravel(), missing).reshape(own.shape)
    if sum(int(units.sum()) for units in fed) >= pieces:
        return fed
    return before  # else too little is left


def _tile_element_wise(matrices: Sequence[Matrix], config: PruneConfig) -> list[Mask]:
    total = sum(m.scores.size for m in matrices)
    kept = total - pruned_units(total, config.sparsity)
    singles = math.ceil(kept * config.single_fraction)
    pieces = (kept - singles) // (config.k_granularity * config.tile)
    tiled = _tiles(matrices, config, pieces)
    singles = kept - sum(int(mask.sum()) for mask in tiled)
    free = [
        ~mask if m.previous is None else m.previous & ~mask
        for m, mask in zip(matrices, tiled, strict=True)
    ]
    single = keep_best([m.scores for m in matrices], singles, allowed=free)
    return [
        Mask(kept=mask | extra, tiled=mask)
        for mask, extra in zip(tiled, single, strict=True)
    ]


def _keep_columns(
    matrices: Sequence[Matrix],
    ranked: Sequence[np.ndarray],
    densities: Sequence[np.ndarray] | None,
    config: PruneConfig,
    pieces: int,
) -> list[np.ndarray]:
    """The columns of each matrix that stay, a multiple of the tile in each shard."""
    groups: list[tuple[float, list[int], np.ndarray, int]] = []
    for bundle in _bundles(matrices, config):
        score = np.zeros(matrices[bundle[0]].scores.shape[1])
        for i in bundle:
            own = ranked[i].mean(axis=0)
            if densities is not None:
                own = own * _bias(densities[i].mean(axis=0), config)
            score += own / len(bundle)
        candidates = _column_groups([matrices[i] for i in bundle], score, config.tile)
        taken, room = 0, 0.0
        for columns in candidates:
            capacity = [_capacity(matrices[i], columns) for i in bundle]
            # The first group of each matrix stays, and as many more as hold what it
            # keeps at least, in a layer that it feeds too.
            must = taken < math.sqrt(config.least_share) * score.size
            must |= taken == 0 or room < config.least_share
            mean = math.inf if must else float(score[columns].mean())
            groups.append((mean, bundle, columns, sum(capacity)))
            taken += columns.size
            room += min(
                part / matrices[i].scores.size
                for i, part in zip(bundle, capacity, strict=True)
            )
    groups.sort(key=lambda group: -group[0])
    total = sum(m.scores.size for m in matrices)
    wanted = total * math.sqrt(1 - config.sparsity)
    needed = pieces * config.k_granularity * config.tile
    kept: list[list[np.ndarray]] = [[] for _ in matrices]
    size = space = 0
    for mean, bundle, columns, capacity in groups:
        width = sum(columns.size * matrices[i].scores.shape[0] for i in bundle)
        # The group that crosses the wanted fraction stays if that is closer to it.
        closer = size + width / 2 <= wanted
        if mean < math.inf and not closer and space >= needed:
            continue
        for i in bundle:
            kept[i].append(columns)
        size, space = size + width, space + capacity
    # In a later stage a matrix may have no columns left.
    none = np.zeros(0, np.int64)
    return [np.sort(np.concatenate([none, *columns])) for columns in kept]


def _capacity(matrix: Matrix, columns: np.ndarray) -> int:
    """Weights of some columns that may be kept."""
    if matrix.previous_tiled is None:
        return columns.size * matrix.scores.shape[0]
    return int(matrix.previous_tiled[:, columns].sum())


def _bundles(matrices: Sequence[Matrix], config: PruneConfig) -> list[list[int]]:
    """The indices of matrices, grouped by those that keep the same columns."""
    bundles: dict[str, list[int]] = {}
    for i, matrix in enumerate(matrices):
        bundle = bundles.get(matrix.shares or "")
        if bundle is None or config.pattern != "tw":
            bundles[matrix.name] = [i]
        elif _same_tiles([*(matrices[j] for j in bundle), matrix], config):
            bundle.append(i)
        else:
            bundles[matrix.name] = [i]
    return list(bundles.values())


def _same_tiles(matrices: Sequence[Matrix], config: PruneConfig) -> bool:
    """Return whether the matrices have the same tiles after earlier stages."""
    if all(matrix.previous_tiled is None for matrix in matrices):
        return True
    kept = [_alive([matrix]) for matrix in matrices]
    some = np.logical_or.reduce(kept)
    for shard in np.split(np.arange(some.size), matrices[0].column_shards):
        alive = shard[some[shard]]
        if alive.size % config.tile:
            return False
        tiles = [each[alive].reshape(-1, config.tile) for each in kept]  # [T, G] each
        if any((tile.any(1) != tile.all(1)).any() for tile in tiles):
            return False
    return True


def _alive(matrices: Sequence[Matrix]) -> Bool[np.ndarray, " N"]:
    """The columns that an earlier stage kept in some matrix."""
    return np.logical_or.reduce(
        [
            np.ones(m.scores.shape[1], np.bool_)
            if m.previous_tiled is None
            else m.previous_tiled.any(axis=0)
            for m in matrices
        ]
    )


def _column_groups(
    matrices: Sequence[Matrix], score: Float[np.ndarray, " N"], tile: int
) -> list[Int[np.ndarray, " G"]]:
    """The columns of matrices in groups, best first: one tile per shard.

    After the first stage the tiles stay the same, so that no weight comes back.
    """
    first, alive = matrices[0], _alive(matrices)
    shards = np.split(np.arange(score.size), first.column_shards)
    parts = []
    for shard in shards:
        if first.previous_tiled is None:
            order = shard[np.argsort(-score[shard], kind="stable")]
            parts.append(order.reshape(-1, tile))  # [T / shards, G]
            continue
        left = shard[alive[shard]].reshape(-1, tile)  # [T / shards, G]
        order = np.argsort(-score[left].mean(axis=1), kind="stable")
        parts.append(left[order])
    count = max(len(part) for part in parts)
    groups = [
        np.concatenate([part[i] for part in parts if i < len(part)])
        for i in range(count)
    ]
    return groups


def _balance(
    score: Float[np.ndarray, "R T"],
    kept: Bool[np.ndarray, "R T"],
    row_shards: int,
    allowed: Bool[np.ndarray, "R T"] | None,
) -> Bool[np.ndarray, "R T"]:
    """Distribute as many pieces as `kept` has equally over tiles and row shards."""
    rows, tiles = score.shape
    if not tiles:
        return kept
    if allowed is not None:
        score = np.where(allowed, score, -np.inf)
    # [shards, rows of a shard, T] as one list: each entry is a tile in a shard.
    by_shard = score.reshape(row_shards, rows // row_shards, tiles)
    lots = [by_shard[s, :, t] for s in range(row_shards) for t in range(tiles)]
    finite = [np.where(np.isfinite(lot), lot, 0) for lot in lots]
    capacity = [int(np.isfinite(lot).sum()) for lot in lots]
    counts = share_out(int(kept.sum()), finite, capacity)
    out = np.zeros_like(by_shard, dtype=np.bool_)
    for i, (lot, count) in enumerate(zip(lots, counts, strict=True)):
        may = None if allowed is None else [np.isfinite(lot)]
        (out[i // tiles, :, i % tiles],) = keep_best([lot], count, allowed=may)
    return out.reshape(score.shape)  # [R, T]


def _bias(density: np.ndarray, config: PruneConfig) -> np.ndarray:
    return density**config.apriori


def _allowed(matrices: Sequence[Matrix]) -> list[np.ndarray] | None:
    previous = [m.previous for m in matrices if m.previous is not None]
    return previous if len(previous) == len(matrices) else None


def _check(matrix: Matrix, config: PruneConfig) -> None:
    """Check that the scores are numbers and that the units divide the matrix."""
    check_units(matrix, config)
    name, scores = matrix.name, matrix.scores
    if not np.isfinite(scores).all() or scores.min(initial=0) < 0:
        raise ValueError(
            f"scores of layer {name} are not all finite and at least 0; check the "
            "weights and the batches that they were made from"
        )
    if matrix.previous is not None and matrix.previous.shape != scores.shape:
        raise ValueError(
            f"the mask of layer {name} has shape {matrix.previous.shape}, expected "
            f"{scores.shape} as its weight has"
        )


def check_units(matrix: Matrix, config: PruneConfig) -> None:
    """Raise if the units of a pattern do not divide a matrix or its shards."""
    height, width = matrix.scores.shape
    shards = matrix.row_shards, matrix.column_shards
    in_a_shard = " in a shard" if max(shards) > 1 else ""
    row_unit, column_unit = _unit(config)
    for size, count, kind, (what, length) in (
        (height, shards[0], "rows", row_unit),
        (width, shards[1], "columns", column_unit),
    ):
        if size % (count * length):
            raise ValueError(
                f"{what} {length} does not divide the {size / count:g} {kind}"
                f"{in_a_shard} of layer {matrix.name}; choose a divisor, or leave the "
                f"layer dense: dense=({matrix.name!r},)"
            )


def _unit(config: PruneConfig) -> tuple[tuple[str, int], tuple[str, int]]:
    """Height and width of a unit, each with the setting that it comes from."""
    if config.tiled:
        return ("k_granularity", config.k_granularity), ("tile", config.tile)
    heights = {"vw": ("vector", config.vector), "2:4": ("the four of 2:4,", 4)}
    if config.pattern == "bw":
        return ("block", config.block), ("block", config.block)
    return heights.get(config.pattern, ("unit", 1)), ("unit", 1)
