"""The order in which multiprocessors take the blocks of uneven tiles.

Tiles come by falling count. Blocks are numbered band by band: a band is all tiles of
some clusters of tokens, tile after tile. Every multiprocessor takes one block of each
round, so that whoever comes first gets the fullest tile of the round. To make up for it
every other band may go backwards, and every other round. What is best depends on how
bands and rounds meet; counts are not known while a kernel is traced, so it is found for
counts that fall evenly.
"""

import dataclasses
import functools

import numpy as np
from jaxtyping import Float, Int


RESIDENT = 32 * 2**20
"""Bytes of activations that the L2 cache of a Hopper GPU (50 MB) keeps beside weights:
every round may then read all of them, and one band is enough."""

_EMPTIEST = 0.3
"""Of the rows of the fullest tile: what the pruner leaves the emptiest of a layer."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turns:
    """How the blocks are dealt out."""

    group: int
    """Clusters of tokens in a band."""
    bands: bool = False
    """Every other band goes backwards."""
    rounds: bool = False
    """Every other round goes backwards."""


@functools.cache
def balanced_turns(
    tiles: int, clusters: int, workers: int, group: int, resident: bool
) -> Turns:
    """Find how blocks are dealt out most equally.

    Args:
        tiles: Number of tiles.
        clusters: Clusters of tokens, blocks of each tile.
        workers: Multiprocessors, or clusters of them.
        group: Clusters of a band that the config asks for.
        resident: All activations stay in the L2 cache. Else bands have at most twice as
            many clusters as asked for.

    Example:
        >>> balanced_turns(16, 16, 132, 4, resident=True)
        Turns(group=16, bands=False, rounds=True)
    """
    most = clusters if resident else min(2 * group, clusters)
    groups = sorted(range(1, most + 1), key=lambda n: (abs(n - group), n))
    if resident:
        groups = [*groups[:4], clusters]
    counts = np.linspace(1, _EMPTIEST, tiles)
    found = [
        Turns(group=each, bands=bands, rounds=rounds)
        for each in dict.fromkeys(groups)
        for bands, rounds in ((True, False), (False, True), (True, True))
    ]

    def worst(turns: Turns) -> float:
        return round(shares(turns, counts, clusters, workers).max(), 2)

    return min(found, key=worst)


def shares(
    turns: Turns, counts: Float[np.ndarray, " T"], clusters: int, workers: int
) -> Float[np.ndarray, " W"]:
    """The work of each multiprocessor over their mean.

    Args:
        turns: How the blocks are dealt out.
        counts: Work of a block of each tile, falling.
        clusters: Blocks of each tile.
        workers: Multiprocessors.
    """
    places, worker = deal(turns, len(counts), clusters, workers)
    work = np.bincount(worker, weights=counts[places], minlength=workers)
    return work / work.mean()


def deal(
    turns: Turns, tiles: int, clusters: int, workers: int
) -> tuple[Int[np.ndarray, " B"], Int[np.ndarray, " B"]]:
    """Place of its tile in the order, and multiprocessor, of every block."""
    index = np.arange(tiles * clusters)
    turn, place = np.divmod(index, workers)
    back = (turn % 2 == 1) & turns.rounds
    worker = np.where(back, workers - 1 - place, place)
    band, within = np.divmod(index, turns.group * tiles)
    places = within // np.minimum(turns.group, clusters - band * turns.group)
    turned = (band % 2 == 1) & turns.bands
    return np.where(turned, tiles - 1 - places, places), worker
