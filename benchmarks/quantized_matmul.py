"""Matmuls with weights of 8 bits: our Hopper kernel, XLA, and the matmul in bf16.

``xla`` multiplies the same numbers, as XLA sees fit; ``dense`` (XLA, which calls
cuBLAS) multiplies weights of bf16. ``read_gb_per_second`` is how fast the weight of 8
bits is read.
"""

import functools

import jax
import jax.numpy as jnp

from benchmarks.measure import command
from benchmarks.measure.harness import Benchmark, Case, Jax
from jaxscale.nn.quantized_linear import quantize_kernel
from pallas_kernels.quantized_matmul import quantized_matmul, reference
from pallas_kernels.quantized_matmul.specs import SPECS


def case(name, m, n, k, weights, out="bfloat16"):
    """A matmul of M tokens, N output features and K input features."""
    return Case(name, {"M": m, "N": n, "K": k, "weights": weights, "out": out})


def inputs(params, key):
    """Random normal activations; a weight of 8 bits, its scale, and the one in bf16."""
    x_key, w_key = jax.random.split(key)
    m, n, k = params["M"], params["N"], params["K"]
    # Drawn in fp32: in bf16 the largest number of each feature would be the same.
    wide = jax.random.normal(w_key, (k, n)).astype(jnp.bfloat16)
    numbers, scale = jax.jit(quantize_kernel, static_argnums=1)(wide, params["weights"])
    return jax.random.normal(x_key, (m, k), jnp.bfloat16), numbers, scale, wide


def quantized(name):
    """The public function with one implementation."""

    def make(params):
        run = functools.partial(
            quantized_matmul, out_dtype=params["out"], implementation=name
        )
        return lambda x, w, scale, wide: run(x, w, scale)

    return Jax(make)


def dense(params):
    """The matmul with the weight in bf16."""
    out = jnp.dtype(params["out"])
    return lambda x, w, scale, wide: jnp.matmul(x, wide, preferred_element_type=out)


def metrics(params, seconds):
    """How fast a weight of 8 bits is read."""
    return {"read_gb_per_second": params["N"] * params["K"] / seconds / 1e9}


_KINDS = {"int8": "int8", "float8_e4m3fn": "fp8"}

BENCHMARK = Benchmark(
    name="quantized_matmul",
    cases=[
        case(s.name, s.m, s.n, s.k, _KINDS[s.weight_dtype], s.out_dtype) for s in SPECS
    ],
    quick_cases=[case("tiny", 8, 192, 128, weights) for weights in _KINDS.values()],
    kernels=("quantized_matmul",),
    inputs=inputs,
    reference=lambda params: (
        lambda x, w, scale, wide: reference.quantized_matmul(x, w, scale)
    ),
    implementations={
        "mosaic_gpu": quantized("mosaic_gpu"),
        "triton": quantized("triton"),
        "xla": quantized("xla"),
        "dense": Jax(dense),
    },
    metrics=metrics,
    # Ours does not read the weight in bf16.
    read_bytes=lambda params: params["N"] * params["K"],
    # The matmul in bf16 is that of other weights; a wrong kernel is off by more.
    max_rel_error=0.04,
    selectors={"rows": "M", "weights": "weights"},
)

if __name__ == "__main__":
    command.run(BENCHMARK)
