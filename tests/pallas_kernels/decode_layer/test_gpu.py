"""A decoder layer in one launch on a GPU: values, repeatability, other rows, poison.

Tiny shapes first: whatever hangs there hangs for sure.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.decode_layer import tile_sparse
from pallas_kernels.decode_layer import mosaic_gpu
from pallas_kernels.decode_layer.api import _arrays
from pallas_kernels.decode_layer.config import DecodeLayerConfig, Problem
from pallas_kernels.decode_layer.specs import DecodeLayerSpec
from pallas_kernels.mosaic import DeviceSpec
from tests.pallas_kernels.decode_layer.test_decode_layer import (
    EPS,
    FP8,
    INT8,
    LAST,
    TINY,
    check,
    operands,
)
from tests.pallas_kernels.decode_layer.test_tile_sparse import (
    EQUAL,
    UNEVEN,
    mixed,
    sparse,
)


pytestmark = pytest.mark.gpu
LLAMA3_8B = Problem(
    m=1, d_model=4096, d_ff=14336, features=4096, heads=32, kv_heads=8, head_dim=128
)


def run(problem, given):
    return mosaic_gpu.decode_layer(
        _arrays(given),
        problem=problem,
        config=DecodeLayerConfig(),
        device=DeviceSpec.current(),
        eps=EPS,
    )


def poison(problem):
    """Leaves NaN in freed memory, where outputs and sums will lie."""
    jax.block_until_ready(
        [jnp.full((2**20, 4), jnp.nan), jnp.full((problem.d_model, 64), jnp.nan)]
    )


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"m": 1, "bias": True},
        {"m": 16} | LAST,
        {
            "m": 64,
            "d_model": 512,
            "d_ff": 1408,
            "features": 512,
            "heads": 4,
            "kv_heads": 2,
        },
        {"m": 16} | INT8,
        {"m": 1, "bias": True} | FP8,
    ],
)
def test_tiny_layers(changes):
    problem = dataclasses.replace(TINY, **changes)
    given = operands(problem)
    poison(problem)
    check(problem, given, jax.block_until_ready(run(problem, given)))


@functools.cache
def real(m, weights=""):
    more = {"": {}, "int8": INT8, "fp8": FP8}[weights]
    problem = dataclasses.replace(LLAMA3_8B, m=m, **more)
    return problem, operands(problem)


def real_sparse(m, uneven):
    problem, given = real(m)
    spec = DecodeLayerSpec(
        name="", m=m, d_model=4096, d_ff=14336, heads=32, kv_heads=8, keep=0.25
    )
    spec = dataclasses.replace(spec, uneven=uneven)
    given, kept = dict(given), []
    for i, (name, (k, n)) in enumerate(spec.products.items()):
        after_norm = name in ("gate_up", "qkv")
        given[name] = tile_sparse(spec, k, n, jax.random.key(i), after_norm)
        kept.append(given[name].kept)
    given["next_out"] = given["out"]
    return dataclasses.replace(problem, kept=tuple(kept)), given


@pytest.mark.parametrize(
    ("m", "weights"),
    [
        *((m, "") for m in (1, 2, 8, 32, 64)),
        *((1, "int8"), (8, "fp8"), (24, "int8"), (32, "int8"), (32, "fp8")),
    ],
)
def test_a_real_layer_is_right_and_repeats(m, weights):
    problem, given = real(m, weights)
    poison(problem)
    first = run(problem, given)
    check(problem, given, first)
    # In turns with others, whose values lie in the same memory: what is read too early
    # is theirs.
    others = given | {"attended": given["attended"][:, ::-1]}
    for _ in range(20):
        run(problem, others)
        again = run(problem, given)
        for a, b in zip(first, again, strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize(("m", "weights"), [(64, ""), (32, "int8")])
def test_a_row_does_not_depend_on_the_others(m, weights):
    problem, given = real(m, weights)
    residual, q, kv, _ = run(problem, given)
    some = {
        "attended": given["attended"][:8],
        **{name: given[name][:, :8] for name in ("residual", "cos", "sin")},
    }
    few = run(dataclasses.replace(problem, m=8), given | some)
    for a, b in zip(few, (residual[:, :8], q[:8], kv[:8]), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize(
    ("changes", "counts", "columns"),
    [
        ({"m": 1, "bias": True}, EQUAL, None),
        ({"m": 32}, UNEVEN, 128),
        ({"m": 16} | LAST, UNEVEN, None),
    ],
)
def test_tiny_layers_of_tile_sparse_weights(changes, counts, columns):
    workers = DeviceSpec.current().num_sms
    problem = dataclasses.replace(TINY, **changes)
    problem, given = sparse(problem, counts, workers, columns)
    poison(problem)
    check(problem, given, jax.block_until_ready(run(problem, given)))


@pytest.mark.parametrize("m", [1, 32])
def test_tiny_layers_of_which_some_weights_are_dense(m):
    workers = DeviceSpec.current().num_sms
    problem, given = mixed(dataclasses.replace(TINY, m=m), workers)
    poison(problem)
    check(problem, given, jax.block_until_ready(run(problem, given)))


@pytest.mark.parametrize(("m", "uneven"), [(1, False), (8, True), (32, True)])
def test_a_real_layer_of_tile_sparse_weights(m, uneven):
    problem, given = real_sparse(m, uneven)
    poison(problem)
    first = run(problem, given)[:3]
    check(problem, given, first)
    others = given | {"attended": given["attended"][:, ::-1]}
    for _ in range(20):
        run(problem, others)
        again = run(problem, given)[:3]
        for a, b in zip(first, again, strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_a_row_of_tile_sparse_weights_does_not_depend_on_the_others():
    problem, given = real_sparse(32, True)
    residual, q, kv, *_ = run(problem, given)
    some = {
        "attended": given["attended"][:8],
        **{name: given[name][:, :8] for name in ("residual", "cos", "sin")},
    }
    few = run(dataclasses.replace(problem, m=8), given | some)[:3]
    for a, b in zip(few, (residual[:, :8], q[:8], kv[:8]), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
