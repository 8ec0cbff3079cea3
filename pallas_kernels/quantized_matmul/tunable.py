"""The matmul with a quantized weight, for the tuner."""

import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from pallas_kernels.mosaic import DeviceSpec
from pallas_kernels.quantized_matmul import mosaic_gpu, xla
from pallas_kernels.quantized_matmul.config import (
    Problem,
    QuantizedMatmulConfig,
)
from pallas_kernels.quantized_matmul.config import (
    candidates as candidates,
)
from pallas_kernels.quantized_matmul.specs import SPECS


def problems() -> Mapping[str, Problem]:
    """The problems of `SPECS`."""
    found = [
        Problem(
            m=s.m,
            n=s.n,
            k=s.k,
            dtype=jnp.dtype(jnp.bfloat16),
            weight_dtype=jnp.dtype(s.weight_dtype),
            out_dtype=jnp.dtype(s.out_dtype),
        )
        for s in SPECS
    ]
    return {problem.key: problem for problem in found}


def arguments(problem: Problem) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Random normal activations and weights, weights up to 127."""
    x_key, w_key = jax.random.split(jax.random.key(0))
    w = jnp.clip(40 * jax.random.normal(w_key, (problem.n, problem.k)), -127, 127)
    return (
        jax.random.normal(x_key, (problem.m, problem.k), problem.dtype),
        jnp.round(w).astype(problem.weight_dtype),
        jnp.full(problem.n, 0.01, jnp.float32),
    )


def kernel(
    problem: Problem, config: QuantizedMatmulConfig, device: DeviceSpec
) -> Callable[..., jax.Array]:
    """The kernel with a config."""
    return functools.partial(
        mosaic_gpu.quantized_matmul,
        config=config,
        device=device,
        out_dtype=problem.out_dtype,
    )


def baseline(problem: Problem) -> Callable[..., jax.Array]:
    """XLA's matmul, which may write the weight in bfloat16."""
    return functools.partial(xla.quantized_matmul, out_dtype=problem.out_dtype)
