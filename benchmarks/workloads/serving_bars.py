"""What continuous batching must gain, on a model that a CPU serves.

``python -m benchmarks.serving bars`` runs it.
"""

import dataclasses
import statistics
from typing import Any

from benchmarks.workloads import serving_policies as policies


@dataclasses.dataclass(frozen=True)
class Bars:
    """Figures of `bars`."""

    throughput: float
    """Tokens per second over those of static batching, where requests always wait."""
    latency: float
    """Mean latency at half that load over that of the same requests alone."""

    @property
    def held(self) -> bool:
        """Whether both are as good as they must be."""
        return self.throughput >= 2 and self.latency <= 1.3


def bars(
    model: Any, *, requests: int, slots: int, shrink: int, rounds: int, seed: int = 0
) -> Bars:
    """Continuous against static batching, and a request at half load against alone.

    All run in turns on one engine that computes `slots` rows in every step, and a step
    in every call: both policies pay for a step the same, on the host too. (Where no
    request waits, as in a batch that runs, the engine otherwise computes four in a
    call, which on a CPU hides what small models cost the host.)
    Lengths are like those of ShareGPT, divided by `shrink`; arrivals are Poisson, at
    first far above what can be served, then at half of the rate that continuous
    batching has reached. The best of all rounds counts, of each: others may use the
    machine meanwhile.

    Args:
        model: A decoder.
        requests: Number of them.
        slots: Rows.
        shrink: Divides lengths.
        rounds: How often each is measured.
        seed: Of everything.
    """
    case = {"workload": "sharegpt", "requests": requests, "shrink": shrink}
    load = policies.make_load(
        case | {"gap_ms": 0.1, "arrivals": "poisson"}, model.config.vocab_size, seed
    )
    full, static, alone, half = [], [], [], []
    with policies.engine_for(model, load, slots, [slots], steps=1) as engine:
        policies.alone(engine, load, [0, 1])
        for _ in range(rounds):
            full.append(policies.figures(policies.continuous(engine, load)))
            static.append(policies.figures(policies.static(engine, load, slots)))
            print(f"full {_shown(full[-1])}\nstatic {_shown(static[-1])}", flush=True)
        speed = max(found["tokens_per_second"] for found in full)
        gap_ms = 2e3 * sum(load.outputs) / speed / requests
        due = policies.moments(requests, gap_ms, "poisson", seed + 1)
        later = dataclasses.replace(load, due=due)
        for _ in range(rounds):
            seconds = policies.alone(engine, load, range(requests))
            alone.append(1e3 * statistics.mean(seconds))
            half.append(policies.figures(policies.continuous(engine, later)))
            print(f"alone {alone[-1]:.4g} ms\nhalf load {_shown(half[-1])}", flush=True)
    found = Bars(
        speed / max(each["tokens_per_second"] for each in static),
        min(each["mean_latency_ms"] for each in half) / min(alone),
    )
    print(
        f"{found.throughput:.2f} times the throughput of static batching (at least 2), "
        f"{found.latency:.2f} times the latency alone (at most 1.3)"
    )
    return found


def _shown(found: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in found.items())
