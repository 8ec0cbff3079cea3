"""Made-up series of ranks at work, some of them slow, and how well these are found.

    python -m tests.supervision.slow_runs [--first-seed 0]

prints precision and recall over 20 seeds for each number of ranks and each kind. The
rule was made with seeds 0 to 19 in view; others tell how well it does on new ones.
"""

import argparse
import math
import random
from pathlib import Path

from jaxscale.supervision.pauses import Pauses
from jaxscale.supervision.slow import slow_ranks


SEEDS, SAMPLES = 20, 64
KINDS = ("none", "one, 1.1x", "one, 1.2x", "one, 1.5x", "one, 2x")
KINDS += (
    "three, 1.1x to 2x",
    "a host of 8, 1.15x",
    "for a time, now",
    "for a time, over",
)


def simulate(ranks, kind, seed):
    """Series by rank, and the ranks that are slow at the end."""
    rng = random.Random(f"{ranks} {kind} {seed}")
    factors = {}  # rank: factor, first and last sample
    if kind.startswith("one"):
        factors[rng.randrange(ranks)] = (float(kind[5:-1]), 0, SAMPLES)
    elif kind.startswith("three"):
        for rank in rng.sample(range(ranks), 3):
            factors[rank] = (rng.uniform(1.1, 2.0), 0, SAMPLES)
    elif kind.startswith("a host"):
        host = rng.randrange(ranks // 8)
        factors |= {8 * host + i: (1.15, 0, SAMPLES) for i in range(8)}
    elif kind.endswith("now"):
        factors[rng.randrange(ranks)] = (1.3, SAMPLES - 36, SAMPLES)
    elif kind.endswith("over"):
        factors[rng.randrange(ranks)] = (1.3, 0, 30)
    # Devices that are well differ a little for good, and jitter.
    own = [rng.lognormvariate(0, 0.01) for _ in range(ranks)]
    series = {rank: [] for rank in range(ranks)}
    for sample in range(SAMPLES):
        everyone = rng.lognormvariate(0, 0.05)
        everyone *= 3 if rng.random() < 0.03 else 1  # the network, or storage
        for rank in range(ranks):
            seconds = 0.1 * own[rank] * everyone * rng.lognormvariate(0, 0.05)
            seconds *= 1 + 4 * rng.random() if sample < 2 else 1  # warm-up
            seconds *= 1 + rng.random() if rng.random() < 0.02 else 1  # garbage
            seconds *= 1.4 if rank == 0 and sample % 8 == 0 else 1  # it saves
            factor, first, last = factors.get(rank, (1.0, 0, 0))
            series[rank].append(seconds * (factor if first <= sample < last else 1.0))
    return series, {rank for rank, (_, _, last) in factors.items() if last == SAMPLES}


PAUSES = ("none", "garbage", "10 ms", "0.1 s", "1 s", "3 s", "10 s")
"""Periods of which a rank is stopped for 70%."""
STEP, STEPS, EVERY = 0.05, 420, 4


def simulate_pauses(ranks, kind, seed):
    """Factors by which ranks say that they are not run, and those that are stopped."""
    rng = random.Random(f"{ranks} {kind} {seed}")
    stopped = {rng.randrange(ranks)} if kind[0] in "013" else set()
    number, _, unit = kind.partition(" ")
    period = float(number) * (1e-3 if unit == "ms" else 1) if stopped else 0.0
    step = STEP / 0.3 if stopped else STEP  # all wait for it
    series = {}
    for rank in range(ranks):
        pauses, at, phase = Pauses(), 0.0, rng.random() * period
        samples, halt = [], rng.uniform(0, STEPS * step)
        for number in range(EVERY, STEPS + 1, EVERY):
            while at < number * step:
                until = at + 0.01 + rng.expovariate(2000)  # the scheduler
                until += 0.005 * (rng.random() < 0.05)  # the interpreter's lock
                if kind == "garbage" and at < halt <= until:
                    until += 3.0
                if rank in stopped and (until + phase) % period < 0.7 * period:
                    until += 0.7 * period - (until + phase) % period
                pauses.woke(at, until)
                at = until
            samples.append(pauses.factor() or math.nan)
        series[rank] = samples
    return series, stopped


def score(ranks, kind, seeds=range(SEEDS), simulate=simulate):
    """Slow ranks that were named, others that were, and slow ones that were not."""
    hits = alarms = missed = 0
    for seed in seeds:
        series, slow = simulate(ranks, kind, seed)
        named = {found.rank for found in slow_ranks(series)}
        hits, missed = hits + len(named & slow), missed + len(slow - named)
        alarms += len(named - slow)
    return hits, alarms, missed


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first-seed", type=int, default=0)
    first = parser.parse_args().first_seed
    seeds = range(first, first + SEEDS)
    print(f"{Path(__file__).stem}: {SEEDS} seeds, {SAMPLES} samples each")
    print(f"{'ranks':>5} {'slow':20} {'named':>6} {'false':>6} {'missed':>6}", end="")
    print("  precision  recall")
    for ranks in (8, 64, 512):
        for kind in KINDS:
            if kind.startswith("a host") and ranks == 8:
                continue  # then all are slow
            hits, alarms, missed = score(ranks, kind, seeds)
            shares = ""
            if hits + missed:
                precision = hits / (hits + alarms) if hits + alarms else 0.0
                shares = f"{precision:11.3f} {hits / (hits + missed):7.3f}"
            row = f"{ranks:5} {kind:20} {hits:6} {alarms:6} {missed:6}"
            print(row + shares, flush=True)


if __name__ == "__main__":
    main()
