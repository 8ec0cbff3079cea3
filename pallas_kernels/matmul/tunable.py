"""The matmul, for the tuner."""

import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from pallas_kernels.matmul import mosaic_gpu, xla
from pallas_kernels.matmul.config import MatmulConfig, Problem
from pallas_kernels.matmul.config import candidates as candidates
from pallas_kernels.matmul.specs import SPECS
from pallas_kernels.mosaic import DeviceSpec


def problems() -> Mapping[str, Problem]:
    """The problems of `SPECS`, in bfloat16."""
    dtype = jnp.dtype(jnp.bfloat16)
    found = [Problem(m=s.m, n=s.n, k=s.k, dtype=dtype, out_dtype=dtype) for s in SPECS]
    return {problem.key: problem for problem in found}


def arguments(problem: Problem) -> tuple[jax.Array, jax.Array]:
    """Random normal operands."""
    x, w = (problem.m, problem.k), (problem.k, problem.n)
    x = x[::-1] if problem.lhs_transposed else x
    w = w[::-1] if problem.rhs_transposed else w
    return (
        jax.random.normal(jax.random.key(0), x, problem.dtype),
        jax.random.normal(jax.random.key(1), w, problem.dtype),
    )


def _storage(problem: Problem) -> dict:
    return {
        "out_dtype": problem.out_dtype,
        "lhs_transposed": problem.lhs_transposed,
        "rhs_transposed": problem.rhs_transposed,
    }


def kernel(
    problem: Problem, config: MatmulConfig, device: DeviceSpec
) -> Callable[..., jax.Array]:
    """The kernel with a config."""
    return functools.partial(
        mosaic_gpu.matmul, config=config, device=device, **_storage(problem)
    )


def baseline(problem: Problem) -> Callable[..., jax.Array]:
    """CuBLAS through XLA."""
    return functools.partial(xla.matmul, **_storage(problem))
