"""Slow ranks are found, and no others; see slow_runs.py for all that is simulated."""

import math
import random

import pytest

from jaxscale.supervision.slow import slow_ranks
from tests.supervision.slow_runs import KINDS, PAUSES, score, simulate_pauses


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [8, 64])
def test_precision_and_recall_over_20_seeds(ranks, kind):
    if kind.startswith("a host") and ranks == 8:
        ranks = 24
    hits, alarms, missed = score(ranks, kind)
    if hits + missed:
        assert hits >= 0.95 * (hits + missed)
        assert hits >= 0.95 * (hits + alarms)
    else:  # one that was slow until a moment ago may still be named
        assert alarms <= kind.endswith("over")


@pytest.mark.parametrize("kind", ["none", "one, 1.1x"])
def test_one_of_many_ranks(kind):
    hits, alarms, missed = score(512, kind, seeds=range(5))
    assert (hits, alarms, missed) == (0 if kind == "none" else 5, 0, 0)


@pytest.mark.parametrize("kind", PAUSES)
def test_a_rank_that_is_stopped_for_most_of_the_time_is_named(kind):
    """420 steps of which one of eight ranks is run for 30% of the time."""
    hits, alarms, missed = score(8, kind, range(1), simulate_pauses)
    assert (hits, alarms, missed) == (kind[0].isdecimal(), 0, 0)


def series(factors, count=20, seed=0):
    rng = random.Random(seed)
    return {
        rank: [factor * rng.lognormvariate(0, 0.02) for _ in range(count)]
        for rank, factor in enumerate(factors)
    }


def named(*arguments, **options):
    return [found.rank for found in slow_ranks(*arguments, **options)]


def test_the_slower_of_two_is_named_by_its_factor():
    (found,) = slow_ranks(series([1.0, 1.5]))
    assert found.rank == 1 and found.factor == pytest.approx(1.5, rel=0.03)


def test_stages_that_do_different_work_are_compared_within():
    values = series([1.0, 1.0, 1.0, 2.0, 2.0, 2.6])
    stages = dict(enumerate([0, 0, 0, 1, 1, 1]))
    assert 3 in named(values)
    assert named(values, groups=stages) == [5]
    assert named(values, groups=dict(enumerate(range(6)))) == []  # nothing to compare


def test_too_little_says_nothing():
    assert named(series([1.0, 3.0], count=11)) == []
    assert named(series([1.0, 3.0], count=12)) == [1]
    assert named(series([3.0])) == [] == named({})


def test_samples_that_are_missing_are_left_out():
    values = series([1.0, 1.0, 1.4, 1.0], count=30)
    values[2][::3] = [math.nan] * 10
    values[1][:25] = [math.nan] * 25  # too few are left
    values[0][4] = values[1][4] = values[2][4] = values[3][4] = math.nan
    assert named(values) == [2]
    assert named({rank: [math.nan] * 30 for rank in range(3)}) == []
    assert named({rank: [0.0] * 30 for rank in range(3)}) == []


def test_one_at_the_limit_does_not_come_and_go():
    values = series([1.0, 1.0, 1.0, 1.0, 1.04], count=40)
    assert named(values) == []
    assert named(values, known={4}) == [4]
    assert named(series([1.0] * 5, count=40), known={4}) == []
