"""Arrivals and lengths of a load generator's requests, from a seed."""

import dataclasses
import functools
import math
import re
import statistics

import numpy as np


SHAREGPT = (161.31, 337.99)
"""Mean tokens of prompts and outputs of ShareGPT, as measured in the vLLM paper."""
ALPACA = (19.31, 58.45)
"""The same of Alpaca."""
GRID = ("128/128", "128/2048", "1000/1000", "2048/128", "2048/2048")
"""The lengths of TensorRT-LLM's published benchmarks, prompt/output."""

_SPREAD = 1.0  # of the logarithm of a length
_LONGEST = 1024
_FLOVER_PROMPT = 8


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Tokens of the prompts and outputs of requests."""

    prompts: tuple[int, ...]
    outputs: tuple[int, ...]


def arrivals(
    count: int, *, rate: float, burstiness: float = 1.0, seed: int = 0
) -> list[float]:
    r"""Times at which requests are sent.

    Gaps follow a gamma distribution of shape `burstiness`, and are then scaled so that
    the last request is sent after exactly count / rate seconds:

    .. math:: g \sim \Gamma(b, \tfrac{1}{r b})

    Args:
        count: Number of requests.
        rate: Requests per second; infinity sends all at once.
        burstiness: 1 is a Poisson process, below 1 is burstier, infinity is constant.
        seed: Random seed of the gaps.

    Returns:
        Seconds after the start, ascending.

    Raises:
        ValueError: `rate` or `burstiness` is not positive.

    Example:
        >>> arrivals(4, rate=2.0, burstiness=math.inf)
        [0.5, 1.0, 1.5, 2.0]

    References:
        The same definition as ``vllm bench serve``.
    """
    if count < 1:
        raise ValueError(f"count {count} must be at least 1")
    if not rate > 0 or not burstiness > 0:
        raise ValueError(f"rate {rate} and burstiness {burstiness} must be positive")
    if rate == math.inf:
        return [0.0] * count
    if burstiness == math.inf:
        gaps = np.ones(count)
    else:
        rng = np.random.default_rng([seed, 1])
        gaps = rng.gamma(burstiness, 1 / (rate * burstiness), count)
    times = np.cumsum(gaps)
    if times[-1] == 0:  # bursts so sharp that fp64 has no gaps left
        return [0.0] * count
    return (times * (count / rate / times[-1])).tolist()


def lengths(name: str, count: int, *, seed: int = 0) -> Lengths:
    """Lengths by the name of a workload.

    Args:
        name: ``"sharegpt"`` or ``"alpaca"``: lognormal lengths with the means of the
            data sets, at most 1,024 (synthetic: the texts are not used).
            ``"sharegpt:8000"``: the same, and each tenth prompt has 8,000 tokens.
            ``"128/2048"``: prompts and outputs of exactly these lengths, see `GRID`.
            ``"flover"``: prompts of 8 and outputs of 504 tokens; ``"flover:2048"``:
            prompts of 8 and totals uniform from 128 to 2,048.
        count: Number of requests.
        seed: Random seed of the lengths.

    Raises:
        ValueError: there is no such workload.

    Example:
        >>> lengths("128/2048", 2)
        Lengths(prompts=(128, 128), outputs=(2048, 2048))
    """
    rng = np.random.default_rng([seed, 2])
    if name in ("sharegpt", "alpaca"):
        means = SHAREGPT if name == "sharegpt" else ALPACA
        drawn = (_lognormal(rng, mean, count) for mean in means)
        return Lengths(*drawn)
    if found := re.fullmatch(r"sharegpt:([1-9]\d*)", name):
        usual, long = lengths("sharegpt", count, seed=seed), int(found[1])
        prompts = [long if i % 10 == 5 else n for i, n in enumerate(usual.prompts)]
        return Lengths(tuple(prompts), usual.outputs)
    if name == "flover":
        return Lengths((_FLOVER_PROMPT,) * count, (504,) * count)
    if found := re.fullmatch(r"flover:(\d+)", name):
        longest = int(found[1])
        if longest < 128:
            raise ValueError(f"workload {name!r} must go to 128 tokens at least")
        totals = rng.integers(128, longest, count, endpoint=True)
        return Lengths((_FLOVER_PROMPT,) * count, tuple((totals - 8).tolist()))
    if found := re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", name):
        return Lengths((int(found[1]),) * count, (int(found[2]),) * count)
    raise ValueError(
        f"workload {name!r} is unknown; use 'sharegpt', 'sharegpt:8000', "
        "'alpaca', 'flover', 'flover:2048', or lengths such as '128/2048'"
    )


def _lognormal(rng: np.random.Generator, mean: float, count: int) -> tuple[int, ...]:
    drawn = np.exp(_center(mean) + _SPREAD * rng.standard_normal(count))
    return tuple(np.clip(np.rint(drawn), 1, _LONGEST).astype(int).tolist())


@functools.cache
def _center(mean: float) -> float:
    """The center that gives the mean after truncation, by bisection."""
    normal = statistics.NormalDist()
    places = (np.arange(4096) + 0.5) / 4096
    quantiles = np.array([normal.inv_cdf(place) for place in places.tolist()])
    low, high = -10.0, math.log(_LONGEST)
    for _ in range(60):
        middle = (low + high) / 2
        drawn = np.clip(np.exp(middle + _SPREAD * quantiles), 1, _LONGEST)
        low, high = (middle, high) if drawn.mean() < mean else (low, middle)
    return low
