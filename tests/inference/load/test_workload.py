"""Arrivals and lengths: their distributions, and that a seed decides all."""

import math

import numpy as np
import pytest

from jaxscale.inference.load.workload import ALPACA, SHAREGPT, arrivals, lengths


@pytest.mark.parametrize("burstiness", [0.1, 1.0, 10.0, math.inf])
def test_arrivals(burstiness):
    times = np.array(arrivals(2000, rate=4.0, burstiness=burstiness, seed=3))
    assert times[-1] == pytest.approx(500) and (np.diff(times, prepend=0) >= 0).all()
    gaps = np.diff(times, prepend=0)
    # The variation of a gamma distribution's draws.
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.2)
    again = arrivals(2000, rate=4.0, burstiness=burstiness, seed=3)
    assert again == times.tolist()
    if burstiness < math.inf:
        assert arrivals(2000, rate=4.0, burstiness=burstiness, seed=4) != again


def test_all_at_once():
    assert arrivals(3, rate=math.inf) == [0.0] * 3
    assert arrivals(1, rate=5.0, burstiness=1e-9) in ([0.0], [0.2])


@pytest.mark.parametrize("values", [(0, 1), (-1, 1), (math.nan, 1), (1, 0), (1, -1)])
def test_rates_that_mean_nothing(values):
    with pytest.raises(ValueError, match="must be positive"):
        arrivals(1, rate=float(values[0]), burstiness=float(values[1]))
    with pytest.raises(ValueError, match="count 0"):
        arrivals(0, rate=1.0)


@pytest.mark.parametrize(
    ("name", "means"), [("sharegpt", SHAREGPT), ("alpaca", ALPACA)]
)
def test_lengths_have_the_means_of_the_data(name, means):
    drawn = lengths(name, 20_000, seed=1)
    for values, mean in zip((drawn.prompts, drawn.outputs), means, strict=True):
        assert np.mean(values) == pytest.approx(mean, rel=0.03)
        assert min(values) >= 1 and max(values) <= 1024
        assert np.median(values) < mean  # a long tail
    assert lengths(name, 5, seed=2) == lengths(name, 5, seed=2) != lengths(name, 5)


def test_other_lengths():
    assert lengths("flover", 2).outputs == (504, 504)
    drawn = lengths("flover:512", 3000)
    totals = np.array(drawn.prompts) + drawn.outputs
    assert set(drawn.prompts) == {8} and totals.min() == 128 and totals.max() == 512
    for name in ("", "0/5", "5/", "sharegpt2", "flover:"):
        with pytest.raises(ValueError, match="unknown"):
            lengths(name, 1)
    with pytest.raises(ValueError, match="to 128 tokens at least"):
        lengths("flover:100", 1)
