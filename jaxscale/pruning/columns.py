"""The columns that tiles are made of, and which of them share a tile.

Legend: K input features, N output features, G columns of a tile, T tiles, C columns in
tiles, R groups of rows.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Bool, Float, Int

from jaxscale.pruning.clustering import cluster_columns, tiles_of
from jaxscale.pruning.config import PruneConfig
from jaxscale.pruning.matrix import Matrix
from jaxscale.pruning.ranking import unit_means


def keep_columns(
    matrices: Sequence[Matrix],
    densities: Sequence[np.ndarray] | None,
    config: PruneConfig,
    pieces: int,
) -> list[np.ndarray]:
    """The columns of each matrix that stay, a multiple of the tile in each shard."""
    groups: list[tuple[float, list[int], np.ndarray, int]] = []
    for bundle in _bundles(matrices, config):
        score = np.zeros(matrices[bundle[0]].scores.shape[1])
        for i in bundle:
            own = matrices[i].scores.mean(axis=0, dtype=np.float64)
            if densities is not None:
                own = own * bias(densities[i].mean(axis=0), config)
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
    chosen = [np.concatenate([none, *columns]) for columns in kept]
    return [
        np.sort(own) if matrix.previous_tiled is None else _by_first(own, config.tile)
        for own, matrix in zip(chosen, matrices, strict=True)
    ]


def clustered(
    matrices: Sequence[Matrix],
    columns: Sequence[np.ndarray],
    counts: Sequence[int],
    config: PruneConfig,
) -> list[np.ndarray]:
    """The kept columns of each matrix, those of similar rows in one tile.

    A matrix that keeps all its columns stays in order, for which it needs no gather,
    unless the next layer reads its outputs in any order.

    Args:
        matrices: The matrices.
        columns: The columns that each keeps, in order.
        counts: Pieces that each keeps.
        config: Pattern, tile and rows of a piece.
    """
    place = {matrix.name: i for i, matrix in enumerate(matrices)}
    feeds = {m.fed_by for m in matrices} if config.k_granularity == 1 else set()
    found = list(columns)
    for bundle in _bundles(matrices, config):
        first, own = matrices[bundle[0]], columns[bundle[0]]
        whole = own.size == first.scores.shape[1] and first.name not in feeds
        if whole or first.previous_tiled is not None:
            continue
        stacked = np.concatenate(
            [
                unit_means(matrices[i].scores[:, own], config.k_granularity, 1)
                * coming_rows(matrices[i], columns, place, config)[:, None]
                for i in bundle
            ]
        )
        keep = sum(counts[i] for i in bundle) // first.column_shards
        parts = np.split(np.arange(own.size), first.column_shards)
        orders = [p[cluster_columns(stacked[:, p], config.tile, keep)] for p in parts]
        for i in bundle:
            found[i] = own[np.concatenate(orders)]
    return found


def coming_rows(
    matrix: Matrix,
    columns: Sequence[np.ndarray],
    place: Mapping[str, int],
    config: PruneConfig,
) -> Bool[np.ndarray, " R"]:
    """The groups of rows with an input feature that is not pruned."""
    height = matrix.scores.shape[0]
    comes = np.ones(height, np.bool_)
    feeder = place.get(matrix.fed_by or "")
    if _together(config) and feeder is not None:
        comes = np.isin(np.arange(height), columns[feeder])
    return comes.reshape(-1, config.k_granularity).any(1)  # [K] to [K / rows]


def _together(config: PruneConfig) -> bool:
    """Whether related matrices have hidden features in common."""
    return config.pattern == "tw" or config.permute


def bias(
    density: Float[np.ndarray, "..."], config: PruneConfig
) -> Float[np.ndarray, "..."]:
    """The factor of the score of units of which single weights are kept so densely."""
    return density**config.apriori


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
        if bundle is None or not _together(config):
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
    return _tiles_before(matrices, config.tile) is not None


def _tiles_before(
    matrices: Sequence[Matrix], tile: int
) -> list[Int[np.ndarray, "T G"]] | None:
    """The tiles that matrices have in common after earlier stages, in each shard."""
    masks = [m.previous_tiled for m in matrices if m.previous_tiled is not None]
    before = np.concatenate(masks)
    found = []
    for shard in np.split(np.arange(before.shape[1]), matrices[0].column_shards):
        tiles = tiles_of(before[:, shard], tile)
        if tiles is None:
            return None
        found.append(shard[tiles])
    return found


def _column_groups(
    matrices: Sequence[Matrix], score: Float[np.ndarray, " N"], tile: int
) -> list[Int[np.ndarray, " G"]]:
    """The columns of matrices in groups, best first: one tile per shard.

    After the first stage the tiles stay the same, so that no weight comes back.
    """
    parts = []
    if matrices[0].previous_tiled is None:
        for shard in np.split(np.arange(score.size), matrices[0].column_shards):
            order = shard[np.argsort(-score[shard], kind="stable")]
            parts.append(order.reshape(-1, tile))  # [T / shards, G]
    else:
        before = _tiles_before(matrices, tile)
        if before is None:
            raise ValueError(
                f"the mask before of layer {matrices[0].name} has no tiles of {tile} "
                "columns; keep pattern and tile from stage to stage"
            )
        for tiles in before:
            order = np.argsort(-score[tiles].mean(axis=1), kind="stable")
            parts.append(tiles[order])
    count = max(len(part) for part in parts)
    groups = [
        np.concatenate([part[i] for part in parts if i < len(part)])
        for i in range(count)
    ]
    return groups


def _by_first(columns: Int[np.ndarray, " C"], tile: int) -> Int[np.ndarray, " C"]:
    """The same tiles, in the order of their first columns."""
    tiles = columns.reshape(-1, tile)
    return tiles[np.argsort(tiles.min(axis=1))].ravel()
