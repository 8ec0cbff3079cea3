"""Attention of chunks over pages: both implementations, and bits of a sequence."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import tests.pallas_kernels.varlen_attention.stand_ins  # noqa: F401  registers them
from pallas_kernels.dispatch import Unsupported
from pallas_kernels.mosaic import H200, use_device
from pallas_kernels.varlen_attention import (
    paged_varlen_attention,
    varlen_attention_reference,
)
from tests.interpreter import interpret_mosaic_gpu
from tests.tolerances import RELATIVE, relative_error


BF16 = jnp.dtype(jnp.bfloat16)
attend: Any = paged_varlen_attention
one_sm = dataclasses.replace(H200, num_sms=1)


def problem(chunks, page, heads=2, kv_heads=1, head_dim=64, tokens=None, seed=0):
    """Chunks of (queries, tokens) in shuffled pages, and what packed keys would be.

    Everything that nobody may see is NaN, but for values in the last page of a
    sequence, which have to be finite.
    """
    rng = np.random.default_rng(seed)
    width = max(-(-keys // page) for _, keys in chunks) + 1
    count = len(chunks) * width + 3
    pages = np.full((2, count, 2, kv_heads, page, head_dim), np.nan, np.float32)
    table = np.full((len(chunks), width), -7, np.int32)
    order = rng.permutation(count)
    packed = []
    for row, (_, keys) in enumerate(chunks):
        used = -(-keys // page)
        kv = rng.normal(size=(keys, 2, kv_heads, head_dim)).astype(BF16)
        table[row, :used] = order[row * width : row * width + used]
        for at in range(used):
            own = np.moveaxis(kv[at * page : (at + 1) * page], 0, 2)  # [2, K, G, H]
            here = pages[1, table[row, at]]
            here[1] = 0
            here[:, :, : own.shape[2]] = own
        packed.append(kv)
    lengths = np.array([keys for _, keys in chunks], np.int32)
    cu_q = np.cumsum([0, *(queries for queries, _ in chunks)], dtype=np.int32)
    q = rng.normal(size=(tokens or cu_q[-1] + 5, heads, head_dim))
    q[cu_q[-1] :] = np.nan
    arrays = q.astype(BF16), pages.astype(BF16), np.int32(1), table, cu_q, lengths
    return tuple(map(jnp.asarray, arrays)), np.concatenate(packed).astype(np.float32)


def computed(implementation, arrays, **options):
    if implementation == "xla":
        return np.asarray(attend(*arrays, implementation="xla", **options))
    with use_device(one_sm), interpret_mosaic_gpu() as run:
        out = np.asarray(attend(*arrays, implementation=implementation, **options))
        assert run.kernels == 1
    return out


def expected(arrays, kv, window=None, softcap=None):
    q, _, _, _, cu_q, lengths = arrays
    cu_k = jnp.cumsum(jnp.array([0, *lengths]), dtype=jnp.int32)
    out, _ = varlen_attention_reference(
        jnp.nan_to_num(q.astype(jnp.float32)),
        jnp.asarray(kv[:, 0]),
        jnp.asarray(kv[:, 1]),
        cu_q,
        cu_k,
        window=(None if window is None else window - 1, 0),
        scale=q.shape[-1] ** -0.5,
        softcap=softcap,
    )
    return np.asarray(out)


CASES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    # A prompt from its start, one that goes on, an empty chunk, one token.
    "pages of half a step": (
        [(140, 140), (3, 201), (0, 0), (1, 64)],
        {"page": 64},
        {},
    ),
    "small pages, window": ([(70, 300), (9, 9)], {"page": 16}, {"window": 100}),
    "pages larger than steps, softcap": (
        [(5, 270), (66, 130)],
        {"page": 256, "heads": 4, "kv_heads": 2},
        {"softcap": 5.0},
    ),
    "wide heads": ([(20, 150)], {"page": 32, "head_dim": 256}, {}),
    "heads of 128": ([(20, 150), (4, 4)], {"page": 64, "head_dim": 128}, {}),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("implementation", ["mosaic_gpu", "xla"])
def test_chunks_attend_to_their_pages(name, implementation):
    chunks, shape, options = CASES[name]
    arrays, kv = problem(chunks, **shape)
    got = computed(implementation, arrays, **options)
    assert got.dtype == arrays[0].dtype
    assert relative_error(got, expected(arrays, kv, **options)) < RELATIVE[BF16]
    end = int(arrays[4][-1])
    assert (np.asarray(got[end:], np.float32) == 0).all()


@pytest.mark.parametrize("implementation", ["mosaic_gpu", "xla"])
def test_bits_do_not_depend_on_neighbors_and_chunks(implementation):
    """The same tokens alone, between other prompts, and cut anywhere."""
    arrays, _ = problem([(7, 70), (9, 900), (60, 600)], page=64, head_dim=128)
    q, pages, layer, table, cu_q, lengths = arrays
    q = q.at[16:].multiply(20)  # of whose scores larger ones come late and often

    def run(q, table, cu_q, lengths):
        made = q, pages, layer, table, jnp.array(cu_q), jnp.array(lengths)
        return computed(implementation, made)

    together = run(q, table, cu_q, lengths)[7:16]
    alone = run(q[7:16], table[1:2], [0, 9], [900])
    np.testing.assert_array_equal(together, alone)
    if implementation == "mosaic_gpu":
        begun = run(q[7:12], table[1:2], [0, 5], [896])
        ended = run(q[12:16], table[1:2], [0, 4], [900])
        np.testing.assert_array_equal(np.concatenate([begun, ended]), alone)


def test_a_token_that_is_not_finite_reaches_its_own_sequence_alone():
    arrays, _ = problem([(7, 70), (20, 20)], page=16)
    q, pages, layer, table, cu_q, lengths = arrays
    clean = attend(*arrays)
    poisoned = pages.at[1, table[0, 1], 0, 0, 3].set(jnp.nan)
    for implementation in ("mosaic_gpu", "xla"):
        made = q, poisoned, layer, table, cu_q, lengths
        found = computed(implementation, made)
        assert np.isnan(found[:7]).all()
        assert relative_error(found[7:27], clean[7:27]) < RELATIVE[BF16]


def test_pages_of_8_bits_are_gathered():
    arrays, kv = problem([(9, 40), (4, 4)], page=16)
    q, pages, *rest = arrays
    scales = jnp.full(pages.shape[:4], 0.5).at[:, :, 1].set(2.0)
    narrow = (pages.astype(jnp.float32) / scales[..., None, None]).astype(
        "float8_e4m3fn"
    )
    got = attend(q, narrow, *rest, kv_scales=scales, max_keys=256)
    wide = kv.reshape(-1, 2, 1, 64)
    factors = np.array([0.5, 2.0], np.float32)[:, None, None]
    rounded = (wide / factors).astype("float8_e4m3fn").astype(np.float32) * factors
    assert relative_error(got, expected(arrays, rounded)) < RELATIVE[BF16]
    with (
        use_device(H200),
        pytest.raises(Unsupported, match="types bfloat16 and float8"),
    ):
        attend(q, narrow, *rest, kv_scales=scales, implementation="mosaic_gpu")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cu_seqlens_q": jnp.zeros(4, jnp.int32)}, r"\(4,\) .* table of 2 sequences"),
        ({"q": jnp.zeros((4, 3, 64), BF16)}, "N=3 must be a multiple of .* K=2"),
        ({"kv_scales": jnp.ones((2, 7, 2, 2))}, "others take none"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    arrays, _ = problem([(2, 2), (1, 1)], page=8, heads=2, kv_heads=2)
    names = ("q", "pages", "layer", "table", "cu_seqlens_q", "lengths")
    with pytest.raises(ValueError, match=message):
        attend(**(dict(zip(names, arrays, strict=True)) | change))
