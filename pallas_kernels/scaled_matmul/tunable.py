"""The matmul of scaled 8-bit operands, for the tuner."""

import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from pallas_kernels.mosaic import DeviceSpec
from pallas_kernels.scaled_matmul import mosaic_gpu, xla
from pallas_kernels.scaled_matmul.config import (
    ScaledMatmulConfig,
    ScaledProblem,
)
from pallas_kernels.scaled_matmul.config import (
    candidates as candidates,
)
from pallas_kernels.scaled_matmul.quantize import quantize_fp8
from pallas_kernels.scaled_matmul.specs import SPECS


def problems() -> Mapping[str, ScaledProblem]:
    """The problems of `SPECS`, to bfloat16; how they are scaled is none of them."""
    found = {}
    for spec in SPECS:
        a, b = (
            jax.ShapeDtypeStruct((rows, spec.k), dtype)
            for rows, dtype in zip((spec.m, spec.n), spec.types, strict=True)
        )
        problem = ScaledProblem.of(a, b, jnp.bfloat16, rhs_transposed=True)
        found[problem.key] = problem
    return found


def arguments(problem: ScaledProblem) -> tuple[jax.Array, ...]:
    """Random normal operands, rounded with a scale for each row."""
    types = problem.dtype, problem.rhs_dtype or problem.dtype
    found = [
        quantize_fp8(
            jax.random.normal(jax.random.key(i), (rows, problem.k)), dtype, axis=-1
        )
        for i, (rows, dtype) in enumerate(
            zip((problem.m, problem.n), types, strict=True)
        )
    ]
    (a, a_scale), (b, b_scale) = found
    return a, b, a_scale, b_scale


def kernel(
    problem: ScaledProblem, config: ScaledMatmulConfig, device: DeviceSpec
) -> Callable[..., jax.Array]:
    """The kernel with a config."""
    return functools.partial(
        mosaic_gpu.scaled_matmul,
        config=config,
        device=device,
        out_dtype=problem.out_dtype,
    )


def baseline(problem: ScaledProblem) -> Callable[..., jax.Array]:
    """CuBLASLt through XLA."""
    return functools.partial(xla.scaled_matmul, out_dtype=problem.out_dtype)
