"""Attention in a decoder layer's launch on a GPU: values, repeats, rows of others."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.decode_layer import mosaic_gpu
from pallas_kernels.decode_layer.config import DecodeLayerConfig
from pallas_kernels.mosaic import DeviceSpec
from tests.pallas_kernels.decode_layer.test_attend import check_attended, with_pages
from tests.pallas_kernels.decode_layer.test_decode_layer import EPS, INT8, LAST, TINY
from tests.pallas_kernels.decode_layer.test_gpu import LLAMA3_8B, poison


pytestmark = pytest.mark.gpu


def run(problem, given, pages):
    return mosaic_gpu.decode_layer(
        given,
        problem=problem,
        config=DecodeLayerConfig(),
        device=DeviceSpec.current(),
        eps=EPS,
        pages=jnp.asarray(pages.reshape(-1, *pages.shape[-2:])),
    )


@pytest.mark.parametrize(
    ("changes", "more"), [({}, {}), (LAST, {"window": 70}), (INT8, {})]
)
def test_tiny(changes, more):
    problem = dataclasses.replace(TINY, **changes)
    problem, *given = with_pages(problem, [200, 0, 63], [1, 0, 1], **more)
    check_attended(problem, *given, run(problem, *given[:2]))


@pytest.mark.parametrize(("m", "changes"), [(2, {}), (32, {}), (32, INT8)])
def test_a_real_layer_and_rows_of_others(m, changes):
    rng = np.random.default_rng(m)
    lengths, new = rng.integers(0, 1500, m), np.ones(m)
    lengths[0], new[m // 2] = 1100, 0
    problem = dataclasses.replace(LLAMA3_8B, m=m, **changes)
    sizes = {"width": 24, "split": 256, "kv_heads": 8}
    problem, given, pages, *wanted = with_pages(problem, lengths, new, **sizes)
    poison(problem)
    found = run(problem, given, pages)
    check_attended(problem, given, pages, *wanted, found)
    again = run(problem, given, pages)
    # The first row has the same bits whatever the others are.
    others = given | {"lengths": given["lengths"].at[1:].set(700)}
    others["queries"] = others["queries"].at[8:].multiply(2)
    others["residual"] = others["residual"].at[:, 1:].multiply(3)
    other = run(problem, others, pages)
    jax.block_until_ready(other)
    for one, same, row in zip(*map(results, (found, again, other)), strict=True):
        np.testing.assert_array_equal(one, same)
        np.testing.assert_array_equal(one[0], row[0])


def results(found):
    """The rows of the residual stream, and queries of those that a head has."""
    residual, q = np.asarray(found[0]).T, np.asarray(found[1])
    return residual[: len(q)], q.reshape(len(q), 8, 8, 128)[:, :, :4]
