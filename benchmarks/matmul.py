"""The plain matmul: our Hopper kernel against cuBLAS by XLA (``dense``)."""

import functools

import jax
import jax.numpy as jnp

from benchmarks.measure import command
from benchmarks.measure.harness import Benchmark, Case, Jax
from pallas_kernels.matmul import matmul
from pallas_kernels.matmul.specs import SPECS


def inputs(params, key):
    """Random normal activations and weight in bfloat16."""
    x_key, w_key = jax.random.split(key)
    m, n, k = params["M"], params["N"], params["K"]
    return (
        jax.random.normal(x_key, (m, k), jnp.bfloat16),
        jax.random.normal(w_key, (k, n), jnp.bfloat16),
    )


def implementation(name):
    """The public function with one implementation."""
    return Jax(lambda params: functools.partial(matmul, implementation=name))


BENCHMARK = Benchmark(
    name="matmul",
    cases=[Case(s.name, {"M": s.m, "N": s.n, "K": s.k}) for s in SPECS],
    quick_cases=[Case("tiny", {"M": 128, "N": 192, "K": 256})],
    kernels=("matmul",),
    inputs=inputs,
    reference=lambda params: jnp.matmul,
    implementations={
        "mosaic_gpu": implementation("mosaic_gpu"),
        "dense": implementation("xla"),
    },
    metrics=lambda params, s: {
        "tflops": 2 * params["M"] * params["N"] * params["K"] / s / 1e12
    },
)

if __name__ == "__main__":
    command.run(BENCHMARK)
