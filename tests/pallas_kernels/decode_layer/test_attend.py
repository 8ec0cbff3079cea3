"""Attention over pages as a stage of a decoder layer's launch, interpreted."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import tests.pallas_kernels.paged_attention.stand_ins  # noqa: F401  splits, operands
from pallas_kernels.decode_layer import mosaic_gpu
from pallas_kernels.decode_layer.config import Cached, DecodeLayerConfig
from pallas_kernels.mosaic import H200
from pallas_kernels.paged_attention.problem import Cut
from tests.interpreter import interpret_mosaic_gpu, register_inline
from tests.pallas_kernels.decode_layer.test_decode_layer import (
    BF16,
    EPS,
    FEW,
    LAST,
    TINY,
    operands,
    reference_of,
)
from tests.tolerances import RELATIVE, relative_error


def store_new_tokens(pages, places, first, feature, values):
    rows = pages.reshape(-1, pages.shape[-1])
    for token, place in enumerate(places):
        if place >= 0:
            rows[place + first, feature : feature + 64] = values[:, token]


register_inline("store_new_tokens", store_new_tokens, writes=(0,), flags=(0,))


def with_pages(
    problem, lengths, new, page=64, width=4, split=64, window=None, kv_heads=1
):
    """A problem, its operands, pages of two layers and what they attend to."""
    p = problem
    heads, head_dim = p.features // TINY.head_dim, TINY.head_dim
    cut = Cut(split, 1, width * page, window)
    num_pages = p.m * width + 1
    cached = Cached(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page=page,
        width=width,
        num_pages=num_pages,
        cut=cut,
        scale=head_dim**-0.5,
    )
    problem = dataclasses.replace(p, cached=cached)
    rng = np.random.default_rng(0)
    shape = 2, num_pages, 2, kv_heads, page, head_dim
    pages = rng.standard_normal(shape).astype(BF16)
    table = rng.permutation(num_pages)[: p.m * width].reshape(p.m, width)
    lengths, new = (np.asarray(x, np.int32) for x in (lengths, new))
    queries = rng.standard_normal((p.m, heads, head_dim)).astype(BF16)
    attended = np.zeros((p.m, heads, head_dim), np.float32)
    for row in range(p.m):
        stop = lengths[row] + 1 if new[row] else 0
        first = 0 if window is None else max(0, stop - window)
        of_row = pages[0, table[row]].astype(np.float32)
        keys, values = of_row.transpose(1, 2, 0, 3, 4).reshape(
            2, kv_heads, -1, head_dim
        )
        for head in range(heads if new[row] else 0):
            k, v = (x[head // (heads // kv_heads), first:stop] for x in (keys, values))
            s = k @ queries[row, head].astype(np.float32) * cached.scale
            w = np.exp(s - s.max())
            attended[row, head] = w @ v / w.sum()
        # What nobody attends to.
        for i, token in enumerate(range(stop, width * page)):
            at = pages[0, table[row, token // page], :, :, token % page]
            at[...] = np.nan if i % 3 else np.inf
        for token in range(first):
            pages[0, table[row, token // page], :, :, token % page] = np.nan
    padded = np.full((p.m, kv_heads, 8, head_dim), np.nan, BF16)
    group = heads // kv_heads
    padded[:, :, :group] = queries.reshape(p.m, kv_heads, group, head_dim)
    places = np.full(p.rows, -1, np.int32)
    for row in range(p.m):
        if new[row]:
            at = table[row, lengths[row] // page] * 2 * kv_heads * page
            places[row] = at + lengths[row] % page
    given = operands(problem)
    given.pop("attended")
    given |= {
        "queries": jnp.asarray(padded.reshape(-1, 8, head_dim)),
        "places": jnp.asarray(places),
        "lengths": jnp.asarray(lengths),
        "num_new": jnp.asarray(new),
        "table": jnp.asarray(table.reshape(-1), jnp.int32),
        "layer": jnp.zeros((1,), jnp.int32),
    }
    return problem, given, pages, attended.reshape(p.m, -1), table


def interpreted(problem, given, pages, num_sms, **config):
    device = dataclasses.replace(H200, num_sms=num_sms)
    # Of memory with two types the interpreter sees races of all slots.
    races = not problem.narrow
    with interpret_mosaic_gpu(detect_races=races, concurrent_blocks=num_sms > 1):
        found = mosaic_gpu.decode_layer(
            given,
            problem=problem,
            config=DecodeLayerConfig(**config),
            device=device,
            eps=EPS,
            pages=jnp.asarray(pages.reshape(-1, *pages.shape[-2:])),
        )
        return [None if a is None else np.asarray(a) for a in found]


@pytest.mark.parametrize(
    ("changes", "lengths", "new", "num_sms", "more"),
    [
        # Several splits; of one tile each, beside which is an empty one.
        ({}, [5, 0, 250], [1, 0, 1], 1, {}),
        (LAST, [200, 0, 63], [1, 1, 1], 2, {"window": 70}),
        ({"weights": "int8"}, [5, 0, 100], [1, 0, 1], 1, {}),
    ],
)
def test_interpreted_attention_equals_the_reference(
    changes, lengths, new, num_sms, more
):
    problem = dataclasses.replace(TINY, **changes)
    problem, given, pages, attended, table = with_pages(problem, lengths, new, **more)
    check_attended(
        problem,
        given,
        pages,
        attended,
        table,
        interpreted(problem, given, pages, num_sms, **FEW),
    )


def check_attended(problem, given, pages, attended, table, found):
    residual, q, after, _ = found
    m, c, lengths = problem.m, problem.cached, np.asarray(given["lengths"])
    attended = jnp.asarray(attended.astype(BF16))
    want, qkv = reference_of(problem, given | {"attended": attended})
    assert relative_error(residual[:, :m], want[:, :m]) < RELATIVE[BF16]
    expected = pages.copy()
    if problem.projects:
        queries = c.heads * 128
        q = np.asarray(q).reshape(m, c.kv_heads, 8, 128)[:, :, : c.group]
        q = q.reshape(m, -1)
        assert relative_error(q, qkv[:, :queries]) < 2 * RELATIVE[BF16]
        kv = np.asarray(qkv[:, queries:], np.float32).reshape(m, 2, c.kv_heads, 128)
        after = np.asarray(after).reshape(pages.shape)
        for row in np.flatnonzero(given["num_new"]):
            at = 1, table[row, lengths[row] // 64], slice(None), slice(None)
            at += (lengths[row] % 64,)
            got = after[at].astype(np.float32)
            assert relative_error(got, kv[row]) < 2 * RELATIVE[BF16]
            expected[at] = after[at]
    np.testing.assert_array_equal(
        np.asarray(after).reshape(pages.shape).view(np.uint16),
        expected.view(np.uint16),
    )
