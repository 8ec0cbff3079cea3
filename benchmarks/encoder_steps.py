"""From a padded encoder to a packed one in the steps of ByteTransformer's paper.

``python -m benchmarks.encoder_steps --max_len 1024``. All steps are `plain_encoder`
with other switches, timed as `benchmarks.encoder` times; `gain` is the factor over the
step before, `total` that over the first.

- ``padded``: a kernel for every bias, activation, sum and norm; scores are stored.
- ``fusions``: the same with the fusions that XLA makes.
- ``packing``: linear layers, norms and activations on packed tokens; attention on
  padded ones, unpacked and packed again in every layer.
- ``attention``: our attention on packed tokens.
- ``epilogues``: our model, of which one kernel computes linear layers with bias and
  GELU.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks import encoder
from benchmarks.measure import command
from benchmarks.measure.harness import Benchmark, Jax, Params


def _step(packed: bool, switches: Mapping[str, Any], params: Params) -> Callable:
    budget = encoder.token_budget(params) if packed else None
    return encoder.plain(params, token_budget=budget, **switches)


MAKERS: encoder.Makers = {
    "padded": functools.partial(_step, False, {"attention": "xla", "separate": True}),
    "fusions": functools.partial(_step, False, {"attention": "xla"}),
    "packing": functools.partial(_step, True, {"attention": "xla"}),
    "attention": functools.partial(_step, True, {"attention": "varlen"}),
    "epilogues": encoder.ours,
}


def compare(params: Params, medians: Mapping[str, float]) -> Mapping[str, dict]:
    """Factors over the step before and over the first."""
    found: dict[str, dict] = {}
    names = list(MAKERS)
    for name, seconds in medians.items():
        found[name] = {}
        if names[0] in medians:
            found[name]["total"] = medians[names[0]] / seconds
        before = names.index(name) - 1
        if before >= 0 and names[before] in medians:
            found[name]["gain"] = medians[names[before]] / seconds
    return found


BENCHMARK = Benchmark(
    name="encoder_steps",
    cases=[encoder.case("bert_base", 16, n) for n in (1024, 512, 256, 128)],
    quick_cases=[encoder.case("bert_tiny", 3, 24)],
    kernels=("varlen_attention", "matmul", "layer_norm"),
    trains=lambda case: False,
    inputs=encoder.inputs,
    reference=encoder.reference,
    implementations={name: Jax(make) for name, make in MAKERS.items()},
    metrics=encoder.metrics,
    compare=compare,
    time="wall",
    burst=10,
    samples=20,
    max_rel_error=5e-2,
    selectors={"max_len": "max_len"},
)
BENCHMARK.measure = encoder.measure_with(MAKERS, BENCHMARK)

if __name__ == "__main__":
    command.run(BENCHMARK)
