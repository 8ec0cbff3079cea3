"""The tile-sparse matmul, for the tuner."""

import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from pallas_kernels.mosaic import DeviceSpec
from pallas_kernels.tile_sparse_matmul import mosaic_gpu, xla
from pallas_kernels.tile_sparse_matmul.config import (
    Problem,
    TileSparseConfig,
)
from pallas_kernels.tile_sparse_matmul.config import (
    candidates as candidates,
)
from pallas_kernels.tile_sparse_matmul.format import TileSparse
from pallas_kernels.tile_sparse_matmul.format_24 import TileSparse24, random_24
from pallas_kernels.tile_sparse_matmul.specs import SPECS


def problems() -> Mapping[str, Problem]:
    """The problems of `SPECS`, in bfloat16."""
    found = []
    for spec in SPECS:
        shape = (spec.m, spec.k)
        x = jax.ShapeDtypeStruct(
            shape[::-1] if spec.feature_major[0] else shape, jnp.bfloat16
        )
        found.append(Problem.of(x, spec.weight_shape(), spec.feature_major))
    return {problem.key: problem for problem in found}


def random_weight(problem: Problem, key: jax.Array) -> TileSparse | TileSparse24:
    """A weight with full tiles of random rows, made on the device."""
    values_key, rows_key = jax.random.split(key)
    groups = problem.k // problem.granularity
    kept = problem.room // problem.granularity
    scores = jax.random.uniform(rows_key, (problem.tiles, groups))
    chosen = jnp.sort(jnp.argsort(scores, axis=1)[:, :kept], axis=1)  # [T, kept]
    within = jnp.arange(problem.granularity)
    rows = chosen[:, :, None] * problem.granularity + within  # [T, kept, granularity]
    shape = (problem.tiles, problem.room, problem.tile)
    w = TileSparse(
        jax.random.normal(values_key, shape, problem.dtype),
        rows.reshape(problem.tiles, problem.room).astype(jnp.int32),  # [T, P]
        jnp.full((problem.tiles,), problem.room, jnp.int32),
        shape=(problem.k, problem.n),
        granularity=problem.granularity,
    )
    return random_24(w, values_key) if problem.two_of_four else w


def arguments(problem: Problem) -> tuple[jax.Array, TileSparse | TileSparse24]:
    """Random activations and weight."""
    x_key, w_key = jax.random.split(jax.random.key(0))
    shape = (problem.k, problem.m) if problem.x_major else (problem.m, problem.k)
    return (
        jax.random.normal(x_key, shape, problem.dtype),
        random_weight(problem, w_key),
    )


def kernel(
    problem: Problem, config: TileSparseConfig, device: DeviceSpec
) -> Callable[..., jax.Array]:
    """The kernel with a config."""
    return functools.partial(
        mosaic_gpu.tile_sparse_matmul,
        feature_major=(problem.x_major, problem.y_major),
        config=config,
        device=device,
    )


def baseline(problem: Problem) -> Callable[..., jax.Array]:
    """The unpacked weight multiplied by XLA."""
    layout = problem.x_major, problem.y_major

    def unpacked(x: jax.Array, w: TileSparse | TileSparse24) -> jax.Array:
        w = w.decompress() if isinstance(w, TileSparse24) else w
        return xla.tile_sparse_matmul(x, w, feature_major=layout)

    return unpacked
