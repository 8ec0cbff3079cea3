"""Detection of slow ranks (stragglers), from each rank's own measurements.

All ranks of a synchronous job end a step together, so the duration of a step identifies
nobody. What differs is how long a rank works by itself: it computes for longer and
waits less in collectives, or dispatches a step late.
"""

import collections
import dataclasses
import math
import statistics
from collections.abc import Collection, Hashable, Mapping, Sequence

from jaxscale.supervision.protocol import Measured


_WINDOW, _NOW, _FEWEST = 48, 16, 12
_LEAST = 0.05
_ENOUGH = 512  # ranks; more would only take longer
_ERRORS, _SPREADS = 5.0, 4.75
_SIGMA = 1.4826  # of a normal distribution, by its median absolute deviation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slow:
    """A rank that is slower than the others."""

    rank: int
    """Number of the process."""
    factor: float
    """Factor by which it works longer than the others in its group."""


def slow_ranks(
    series: Mapping[int, Sequence[float]],
    *,
    groups: Mapping[int, Hashable] | None = None,
    known: Collection[int] = (),
) -> list[Slow]:
    r"""Find the ranks that take longer than the others, the slowest first.

    A sample of a rank is divided by the (lower) median of the ranks at the same time,
    which removes what affects all, and the mean of the middle half of its last 48
    ratios removes what affects one for a moment: garbage collection, a checkpoint. A
    rank is slow if this mean is more than

    $$1 + \max(0.05,\; 5 e,\; 4.75 s)$$

    times that of most, where e is the standard error of a mean, from the scatter of
    each rank's ratios, and s the spread of the means: healthy GPUs differ by a per cent
    or two. For the last 16 ratios it must be half as much. Slow ranks are removed, and
    the others compared again.

    Args:
        series: For each rank, seconds of its own work, in samples taken at the same
            times; the newest are last. NaN is a missing sample.
        groups: The role of each rank, if they differ, such as its pipeline stage: ranks
            are compared within a group. None is one group.
        known: Ranks that were slow before: half the threshold applies to them, so that
            one at the limit does not flap.

    Returns:
        Ranks that are slow now. In a group of one, and before there are 12 samples,
        there are none.

    Example:
        >>> well = [1.0, 1.01, 0.99, 1.0] * 3
        >>> slow = [1.3, 1.31, 1.29, 1.3] * 3
        >>> (found,) = slow_ranks({0: well, 1: slow, 2: well})
        >>> found.rank, round(found.factor, 2)
        (1, 1.3)
    """
    members = collections.defaultdict(list)
    for rank in series:
        members[groups[rank] if groups else None].append(rank)
    found = [
        slow
        for ranks in members.values()
        if len(ranks) > 1
        for slow in _slow_of({rank: series[rank] for rank in ranks}, known)
    ]
    return sorted(found, key=lambda slow: -slow.factor)


def _slow_of(
    series: Mapping[int, Sequence[float]], known: Collection[int]
) -> list[Slow]:
    """The slow ranks of one group."""
    count = min(_WINDOW, *(len(samples) for samples in series.values()))
    if count < _FEWEST:
        return []
    recent = {rank: samples[-count:] for rank, samples in series.items()}
    found: dict[int, float] = {}
    while True:  # without slow ranks the estimate of the others improves
        factors = _above_limit(recent, recent.keys() - found, known)
        if factors.keys() <= found.keys():
            return [Slow(rank=rank, factor=f) for rank, f in found.items()]
        found |= factors


def _above_limit(
    recent: Mapping[int, Sequence[float]],
    well: Collection[int],
    known: Collection[int],
) -> dict[int, float]:
    """The ranks above the limit set by the `well` ones, and their factors."""
    some = _some(well)
    usual = []  # by sample
    for column in zip(*(recent[rank] for rank in some), strict=True):
        values = [x for x in column if x == x]
        usual.append(statistics.median_low(values) if values else math.nan)
    ratios = {
        rank: [x / u for x, u in zip(samples, usual, strict=True) if u > 0 and x == x]
        for rank, samples in recent.items()
    }
    centers = {n: _center(x) for n, x in ratios.items() if len(x) >= _FEWEST}
    well, some = ([n for n in of if n in centers] for of in (well, some))
    if not some or len(well) < 1 or len(centers) < 2:
        return {}
    middle = statistics.median_low(centers[rank] for rank in well)
    spread = statistics.median_low(abs(centers[rank] - middle) for rank in well)
    scatter = statistics.median(
        abs(x / centers[rank] - 1) for rank in some for x in ratios[rank]
    )
    error = scatter / math.sqrt(min(len(ratios[rank]) for rank in well))
    error *= math.sqrt(1 + 2 / len(well))  # few ranks give an uncertain baseline
    errors = max(_ERRORS * _SIGMA * error, _SPREADS * _SIGMA * spread / middle)
    excess = max(_LEAST, errors)
    return {
        rank: c / middle
        for rank, c in centers.items()
        if c > middle * (1 + (excess / 2 if rank in known else excess))
        # It still is: a rank that was slow for a time leaves the list sooner.
        and _center(ratios[rank][-_NOW:]) > middle * (1 + excess / 2)
    }


def _some(ranks: Collection[int]) -> Collection[int]:
    """An even sample of them, large enough for a baseline."""
    stride = -(-len(ranks) // _ENOUGH)
    return ranks if stride <= 1 else sorted(ranks)[::stride]


def _center(values: Sequence[float]) -> float:
    """The mean without the lowest and the highest quarter."""
    quarter = len(values) // 4
    return statistics.fmean(sorted(values)[quarter : len(values) - quarter])


class Measurements:
    """The measurements of the ranks of a cycle, and which ranks are slow.

    Example:
        >>> measured = Measurements()
        >>> for step in range(12):
        ...     for rank, seconds in enumerate([1.0, 1.0, 1.5]):
        ...         measured.add(Measured(ranks=[rank], seconds=[seconds], cycle=1,
        ...                               step=step, name="computing"))
        >>> [(name, slow.rank) for name, slow in measured.slow()]
        [('computing', 2)]
    """

    def __init__(self) -> None:
        """Start without any."""
        self._series: dict[str, dict[int, dict[int, float]]] = {}
        self._groups: dict[int, str] = {}
        self._known: dict[str, set[int]] = {}
        self.is_new = False
        """Whether there are measurements that `slow` has not seen."""

    def add(self, said: Measured) -> None:
        """Store measurements of ranks at a step that all measure."""
        steps = self._series.setdefault(said.name, {})
        sample = steps.setdefault(said.step, {})
        sample |= zip(said.ranks, said.seconds, strict=True)
        self._groups |= dict.fromkeys(said.ranks, said.group)
        while len(steps) > _WINDOW + 1:
            del steps[min(steps)]
        self.is_new = True

    def slow(self) -> list[tuple[str, Slow]]:
        """The ranks that are slow now, each with the quantity that shows it."""
        self.is_new = False
        found = []
        for name, steps in self._series.items():
            # The newest step may not be reported by all ranks yet.
            recent = [steps[step] for step in sorted(steps)[-_WINDOW:]]
            ranks = sorted({rank for sample in recent for rank in sample})
            series = {n: [s.get(n, math.nan) for s in recent] for n in ranks}
            groups = {rank: self._groups[rank] for rank in ranks}
            known = self._known.get(name, set())
            slow = slow_ranks(series, groups=groups, known=known)
            self._known[name] = {x.rank for x in slow}
            found += [(name, x) for x in slow]
        return found
