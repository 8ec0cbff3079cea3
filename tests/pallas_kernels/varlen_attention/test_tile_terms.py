"""The reads of a relative-position bias by a Hopper kernel, without that kernel."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.varlen_attention import RelativeBuckets
from pallas_kernels.varlen_attention.relative import tile_bias
from pallas_kernels.varlen_attention.relative_mosaic_gpu import TileTerms
from tests.interpreter import interpret_mosaic_gpu
from tests.lowering import lower_for_cuda
from tests.pallas_kernels.varlen_attention import stand_ins  # noqa: F401


ROWS = 64
BUCKETS = {
    "v3": RelativeBuckets(span=256, max_distance=512),
    "small": RelativeBuckets(span=12, max_distance=40),
    "linear": RelativeBuckets(span=30),
}


STEPS, STAGES, HEAD = 3, 2, 1


def kernel(terms, first_query, first_key, *arrays):
    """Adds the terms to zeros: a block of queries, a few steps of keys."""

    def body(*refs, **scratch):
        *sources, out = refs
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == terms.parts)
        def _():
            plgpu.copy_gmem_to_smem(
                sources[0], scratch["entries_smem"], scratch["entries_full"]
            )
            for step in range(STEPS):
                place, key = (0, HEAD), first_key + step * terms.keys
                stage = step % STAGES
                terms.load(scratch, stage, tuple(sources), place, first_query, key)
            for step in range(STEPS, STEPS + STAGES):
                plgpu.barrier_wait(scratch["terms_empty"].at[step % STAGES])

        @pl.when(warpgroup < terms.parts)
        def _():
            for stage in range(STAGES):
                plgpu.barrier_arrive(scratch["terms_empty"].at[stage])
            plgpu.barrier_wait(scratch["entries_full"])
            for step in range(STEPS):
                zeros = jnp.zeros((ROWS, terms.keys), jnp.float32)
                zeros = plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)
                key, stage = first_key + step * terms.keys, step % STAGES
                sums = terms.add_step(
                    zeros, scratch, stage, warpgroup, first_query, key
                )
                columns = pl.ds(step * terms.keys, terms.keys)
                out[pl.ds(warpgroup * ROWS, ROWS), columns] = sums

    shape = terms.parts * ROWS, STEPS * terms.keys
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(shape, jnp.float32),
        scratch_types=terms.scratch(STAGES, arrays[-1].dtype),
        grid=(1,),
        grid_names=("block",),
        num_threads=terms.parts + 1,
        thread_name="warpgroup",
    )(jnp.asarray(terms.table()), *arrays)


def make(name, parts, keys, first_query, first_key, *, by_query=True, by_key=True):
    """The terms, and arrays [1, tokens, 2, P] of which one head is read."""
    terms = TileTerms(BUCKETS[name], by_query, by_key, ROWS, parts, keys)
    rng = np.random.default_rng(0)
    rows = [first_query + parts * ROWS] * by_query
    rows += [first_key + STEPS * keys] * by_key
    shapes = [(1, n, 2, terms.num_entries) for n in rows]
    arrays = [rng.normal(size=s).astype(np.float32) for s in shapes]
    return terms, [jnp.asarray(a).astype(jnp.bfloat16) for a in arrays]


def expected(terms, first_query, first_key, arrays):
    """The same without a kernel."""
    arrays = [a[0, :, HEAD, : terms.buckets.num_entries] for a in arrays]
    by_query = arrays.pop(0)[first_query:] if terms.by_query else None
    by_key = arrays.pop(0)[first_key:] if terms.by_key else None
    shape = terms.parts * ROWS, STEPS * terms.keys
    first = jnp.int32(first_query - first_key)
    return tile_bias(terms.buckets, by_query, by_key, first, shape)


@pytest.mark.parametrize(
    ("name", "parts", "keys", "first_query", "first_key"),
    [
        ("v3", 2, 64, 0, 0),
        ("v3", 2, 64, 3, 301),
        ("v3", 1, 128, 700, 5),
        ("small", 1, 64, 0, 5),
        ("linear", 1, 64, 17, 3000),
        ("linear", 2, 64, 2000, 1900),
    ],
)
def test_diagonals(name, parts, keys, first_query, first_key):
    terms, arrays = make(name, parts, keys, first_query, first_key)
    with interpret_mosaic_gpu(detect_races=True):
        got = kernel(terms, first_query, first_key, *arrays)
    wanted = expected(terms, first_query, first_key, arrays)
    np.testing.assert_allclose(got, wanted, atol=1e-5)


@pytest.mark.parametrize("missing", ["by_query", "by_key"])
def test_one_of_two_terms(missing):
    terms, arrays = make("small", 1, 64, 40, 3, **{missing: False})
    with interpret_mosaic_gpu(detect_races=True):
        got = kernel(terms, 40, 3, *arrays)
    np.testing.assert_allclose(got, expected(terms, 40, 3, arrays), atol=1e-5)


@pytest.mark.parametrize("which", [{}, {"by_query": False}, {"by_key": False}])
@pytest.mark.parametrize("name", ["v3", "small"])
def test_lowers(name, which):
    terms, arrays = make(name, 2, 64, 20, 0, **which)
    run = functools.partial(kernel, terms, 20, 0)
    lower_for_cuda(run, *arrays, kernels=1)


def test_boxes_hold_what_a_tile_reads():
    terms = TileTerms(BUCKETS["v3"], True, True, ROWS, 2, 64)
    assert (terms.query_width, terms.key_width) == (136, 200)
    table = terms.table()
    flat = table.reshape(-1)
    for first_key in range(-1200, 1200, 7):
        base = int(terms.base(0, first_key))
        for part, width in ((0, terms.query_width), (1, terms.query_width)):
            first = int(terms.first_entry(table, base + part * ROWS, width))
            distances = part * ROWS + np.arange(ROWS)[:, None] - np.arange(64)
            entries = terms.buckets.entry(distances - first_key)
            read = flat[base + distances + terms.reach]
            np.testing.assert_array_equal(read, entries)
            assert entries.min() >= first
            assert entries.max() < first + width
    assert dataclasses.replace(terms, parts=1, keys=128).key_width == 200
    # Two stages beside queries, keys and values of head dim 64.
    assert terms.smem(2, 2) < 130_000
