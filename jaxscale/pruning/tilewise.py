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
   With ``permute`` columns that would keep the same rows then share a tile
   (`cluster_columns`), wherever the order costs nothing: if columns of the matrix are
   pruned, a packed output is put in its place anyway, and the next layer of a
   feed-forward network reads its inputs in any order. Elsewhere they stay in order.
2. Rows. A piece is ``k_granularity`` rows of one tile, all of equal size. The best
   pieces are kept until the whole mask has sparsity :math:`s`, however many columns
   step 1 took. Rows of input features that step 1 has pruned are excluded, unless too
   little would remain.
3. Single weights (tew). Steps 1 and 2 keep a little less, and the best of the other
   weights fill up what is missing.

With tw24 steps 1 and 2 keep twice as much. Of each column of a tile the best two of
every four kept rows then stay, and up to two of a last four of fewer rows. Which rows
are a four is searched for each tile (`best_fours`). With ``fours_in_order`` a matrix of
which all tiles keep all rows has its fours in order, as plain 2:4 does, if a search
would keep little more (`_LITTLE`): its kernel then need not gather. It keeps all if it
would have kept 63 of 64, a little more than asked for. If a feed-forward network makes
its inputs, they come in an order of good fours.

A-priori tuning: the paper uses element-wise pruning to find important units. The
authors' code does not contain that step, so this is our definition: element-wise
pruning at the same sparsity keeps the fraction :math:`e_u` of unit :math:`u`, and the
score of the unit is multiplied by :math:`e_u^a` with ``apriori`` :math:`a`. A unit
whose score comes from a few outliers then ranks below one that is important everywhere.

Legend: K input features, N output features, G columns of a tile, T tiles.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor

import numpy as np
from jaxtyping import Bool, Float, Int

from jaxscale.pruning.clustering import tiles_of
from jaxscale.pruning.columns import bias, clustered, coming_rows, keep_columns
from jaxscale.pruning.config import PruneConfig, pruned_units
from jaxscale.pruning.fours import Fours, best_fours, two_of_four
from jaxscale.pruning.matrix import Mask, Matrix
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


def make_masks(matrices: Sequence[Matrix], config: PruneConfig) -> list[Mask]:
    """The masks of `matrices`, ranked together.

    Args:
        matrices: Weights with their scores.
        config: Pattern, sparsity, tile; its layers are ignored here.

    Raises:
        ValueError: tiles, blocks or vectors do not divide a matrix, scores are not
            finite, or the previous masks leave too little, or have fours already.

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
    if config.pattern == "tw24":
        whole = _tile_wise(matrices, config.whole_rows)
        if not config.sparsity:
            return [Mask(kept=mask, tiled=mask) for mask in whole]
        return _two_four_in_tiles(matrices, whole, config)
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
    tiled: Bool[np.ndarray, "K N"], tile: int, pattern: str
) -> Int[np.ndarray, " C"] | None:
    """The columns of a mask's tiles, tile by tile; None if all, in order.

    Raises:
        ValueError: the mask is not tile-wise.
    """
    if pattern == "tw_k":
        return None
    tiles = tiles_of(tiled, tile)
    if tiles is None:
        raise ValueError(
            f"the mask has no tiles of {tile} columns that keep the same rows; make it "
            "with this tile, by make_model_masks"
        )
    return tiles.ravel()


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
    columns = tile_columns(tiled, tile, pattern)
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
    densities = None
    if config.apriori:
        single = [
            dataclasses.replace(m, previous=None, previous_tiled=None) for m in matrices
        ]
        unbounded = dataclasses.replace(config, max_layer_sparsity=1.0)
        densities = _element_wise(single, unbounded)
    # The columns that the tiles are made of, tile by tile.
    if config.pattern == "tw_k":
        columns = [np.arange(m.scores.shape[1]) for m in matrices]
    else:
        columns = keep_columns(matrices, densities, config, pieces)
    find = functools.partial(_best_pieces, matrices, densities, config, pieces)
    units, scores, allowed = find(columns)
    if config.permute and config.pattern != "tw_k":
        counts = [int(unit.sum()) for unit in units]
        columns = clustered(matrices, columns, counts, config)
        units, scores, allowed = find(columns)
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


def _best_pieces(
    matrices: Sequence[Matrix],
    densities: Sequence[np.ndarray] | None,
    config: PruneConfig,
    pieces: int,
    columns: Sequence[np.ndarray],
) -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]:
    """The kept pieces of the tiles of some columns, their scores, and the allowed."""
    rows, tile = config.k_granularity, config.tile
    scores = []
    for i, matrix in enumerate(matrices):
        score = unit_means(matrix.scores[:, columns[i]], rows, tile)
        if densities is not None:
            score *= bias(unit_means(densities[i][:, columns[i]], rows, tile), config)
        scores.append(score)
    sizes = [m.scores.size // (rows * tile) for m in matrices]
    least = least_units(sizes, config.least_share, pieces)
    allowed = _allowed_pieces(matrices, columns, config, pieces, (scores, least))
    return keep_best(scores, pieces, allowed=allowed, least=least), scores, allowed


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
        comes = coming_rows(matrix, columns, place, config)
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


def _two_four_in_tiles(
    matrices: Sequence[Matrix], whole: Sequence[np.ndarray], config: PruneConfig
) -> list[Mask]:
    """Masks that keep two of every four rows of each column of the tiles of `whole`."""
    for matrix in matrices:
        before, tiled = matrix.previous, matrix.previous_tiled
        if before is not None and tiled is not None and (before != tiled).any():
            raise ValueError(
                "previous masks of pattern tw24: a row that goes later leaves other "
                "fours; leave previous out, or prune tiles (tw) before"
            )
    together: dict[str, list[np.ndarray]] = {}
    for matrix, mask in zip(matrices, whole, strict=True):
        together.setdefault(matrix.shares or matrix.name, []).append(mask)
    first = {matrix.name: matrix.shares or matrix.name for matrix in matrices}
    columns = {
        first[m.name]: _ordered(np.concatenate(together[first[m.name]]), m, config)
        for m in matrices
    }
    # Gate and up: a feature is kept by both or left out.
    comes = {
        name: np.logical_and.reduce([mask.any(0) for mask in masks])
        for name, masks in together.items()
    }
    fed = [first.get(matrix.fed_by or "") for matrix in matrices]
    least = _LITTLE * _mean_score(matrices)
    filled, in_order = [], []
    for matrix, mask, source in zip(matrices, whole, fed, strict=True):
        own = columns[first[matrix.name]]
        come = np.arange(len(mask))
        if source is not None:
            come = columns[source][comes[source][columns[source]]]
        in_order.append(False)
        full = _filled(matrix, mask, np.ix_(come, own))
        if config.fours_in_order and full[np.ix_(come, own)].all():
            # The features of a tile come in any order: in that of good fours, if
            # nothing else is to choose them.
            if source is not None and config.k_granularity == 1:
                mine = matrix.scores[:, own]
                parts = columns[source].reshape(-1, config.tile)
                ordered = [part[best_fours(mine[part])] for part in parts]
                columns[source] = np.concatenate(ordered)
                come = columns[source][comes[source][columns[source]]]
            in_order[-1] = config.k_granularity > 1 or (
                _search_gain(matrix, come, own.reshape(-1, config.tile)) < least
            )
        filled.append(full if in_order[-1] else mask)
    inputs = [
        None if source is None else columns[source][comes[source][columns[source]]]
        for source in fed
    ]
    # Numpy works outside of the interpreter's lock, but more threads wait for it.
    with ThreadPoolExecutor(8) as pool:
        return [
            _fours_of(
                matrix,
                mask,
                columns[first[matrix.name]],
                order,
                config,
                pool,
                whole=plain,
            )
            for matrix, mask, order, plain in zip(
                matrices, filled, inputs, in_order, strict=True
            )
        ]


_LITTLE = 1 / 16
"""What a search for fours must keep more of each weight, as a part of the mean score of
all, to be worth a gather. The gather adds a quarter to the time of a matrix: pruning a
fifth of its rows instead costs less than that."""
_SAMPLED = 4
"""Tiles of a matrix that say what a search gains."""


def _mean_score(matrices: Sequence[Matrix]) -> float:
    total = sum(float(m.scores.sum(dtype=np.float64)) for m in matrices)
    return total / sum(m.scores.size for m in matrices)


def _search_gain(
    matrix: Matrix, order: Int[np.ndarray, " I"], tiles: Int[np.ndarray, "T G"]
) -> float:
    """The score of each weight that fours of any rows keep more than those in order.

    Args:
        matrix: The matrix, of which all rows are kept.
        order: Its input features, in order.
        tiles: The columns of its tiles, of which some are tried.
    """
    height = len(matrix.scores) // matrix.row_shards
    gain = size = 0.0
    for tile in tiles[:: max(1, -(-len(tiles) // _SAMPLED))]:
        for shard in range(matrix.row_shards):
            mine = matrix.scores[np.ix_(order[order // height == shard], tile)]
            found = mine[best_fours(mine)]
            gain += float(found[two_of_four(found)].sum(dtype=np.float64))
            gain -= float(mine[two_of_four(mine)].sum(dtype=np.float64))
            size += mine.size
    return gain / max(size, 1)


_NEARLY_ALL = 63 / 64
"""A share of rows from which keeping the others, too, costs less than to gather."""


def _filled(
    matrix: Matrix, mask: Bool[np.ndarray, "K N"], part: tuple[np.ndarray, ...]
) -> Bool[np.ndarray, "K N"]:
    """The rows that tiles keep: all of those in `part`, if it lacks few of them."""
    kept, before = mask[part], matrix.previous_tiled
    gone = before is not None and not before[part].all()
    if gone or kept.sum() < _NEARLY_ALL * kept.size:
        return mask
    mask = mask.copy()
    mask[part] = True
    return mask


def _fours_of(
    matrix: Matrix,
    mask: Bool[np.ndarray, "K N"],
    columns: Int[np.ndarray, " C"],
    inputs: Int[np.ndarray, " I"] | None,
    config: PruneConfig,
    pool: Executor,
    *,
    whole: bool,
) -> Mask:
    """The mask of one matrix.

    Args:
        matrix: The matrix.
        mask: The rows that its tiles keep.
        columns: The columns of its tiles, tile by tile.
        inputs: The input features that come, in order, if another matrix makes them.
        config: Pattern and tile.
        pool: What tiles are computed by.
        whole: All rows are kept, with their fours in order.
    """
    height = len(mask) // matrix.row_shards
    tiles = columns.reshape(-1, config.tile)
    # Features that do not come but are kept, if too few come, are left out later.
    order = np.arange(len(mask)) if inputs is None else inputs
    comes = np.isin(np.arange(len(mask)), order)
    fours = Fours.none(mask.shape, config.tile)
    kept = np.zeros_like(mask)

    def halve(t: int) -> None:
        tile = tiles[t]
        found = []
        for shard in range(matrix.row_shards):
            mine = np.flatnonzero(mask[:, tile[0]])
            mine = mine[mine // height == shard]
            if whole:
                came = order[order // height == shard]
                mine = np.concatenate([came, mine[~comes[mine]]])
            elif config.k_granularity == 1:  # else rows stay in their groups
                parts = mine[comes[mine]], mine[~comes[mine]]
                mine = np.concatenate(
                    [p[best_fours(matrix.scores[np.ix_(p, tile)])] for p in parts]
                )
            kept[np.ix_(mine, tile)] = two_of_four(matrix.scores[np.ix_(mine, tile)])
            found.append(mine)
        rows = np.concatenate(found)
        fours.columns[t] = tile
        fours.rows[t, : len(rows)] = rows

    list(pool.map(halve, range(len(tiles))))
    return Mask(kept=kept, tiled=mask, fours=fours)


def _ordered(
    tiled: Bool[np.ndarray, "K N"], matrix: Matrix, config: PruneConfig
) -> Int[np.ndarray, " C"]:
    """The columns of the tiles of a matrix, tile by tile, one shard after the other.

    Args:
        tiled: What its tiles keep, with what shares its columns.
        matrix: The matrix.
        config: Pattern and tile.
    """
    part = tiled.shape[1] // matrix.column_shards
    found = []
    for shard, mine in enumerate(np.split(tiled, matrix.column_shards, 1)):
        columns = tile_columns(mine, config.tile, "tw")
        columns = np.arange(part) if columns is None else columns
        found.append(part * shard + columns)
    return np.concatenate(found)


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
