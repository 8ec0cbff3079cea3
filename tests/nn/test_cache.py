"""Prompts in chunks and tokens one by one, through pages, against whole sequences."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxscale.models import Decoder, preset
from jaxscale.nn import (
    PagedChunks,
    PagedRows,
    append_rows,
    clear_tails,
    empty_pages,
)
from jaxscale.sharding import REPLICATED, create, fsdp_tp, make_mesh
from tests.decoding import nan_pages
from tests.models.test_serving import perturbed
from tests.tolerances import relative_error


RNG = np.random.default_rng(0)
PAGE, PAGES, WIDTH, TOKENS = 4, 16, 5, 16
LENGTHS = (9, 4, 14)
PROMPTS = [RNG.integers(0, 250, n).astype(np.int32) for n in LENGTHS]
TABLES = RNG.permutation(PAGES)[: 3 * WIDTH].reshape(3, WIDTH)
PAST = PAGES * PAGE

run = jax.jit(Decoder.run)


def rows(i, positions):
    return [int(TABLES[i][p // PAGE]) * PAGE + p % PAGE for p in positions]


def padded(values, size, fill):
    return jnp.array([*values, *[fill] * (size - len(values))], jnp.int32)


def chunks(pages, parts):
    """The tokens and the state of `parts`, (sequence, from, to)."""
    tokens, positions, own, q = [], [], [], [0]
    for i, start, stop in parts:
        tokens += PROMPTS[i][start:stop].tolist()
        positions += range(start, stop)
        own += rows(i, range(start, stop))
        q.append(len(tokens))
    state = PagedChunks(
        positions=padded(positions, TOKENS, 0)[None],
        pages=pages,
        layer=jnp.int32(0),
        rows=padded(own, TOKENS, PAST),
        cu_q=padded(q, 4, q[-1]),
        prompt_table=jnp.array([*(TABLES[i] for i, *_ in parts), *TABLES])[:3],
        ends=padded([stop for *_, stop in parts], 3, 0),
    )
    return padded(tokens, TOKENS, 0)[None], state


def make(config, rules=REPLICATED):
    return perturbed(Decoder(config, rules=rules, rngs=nnx.Rngs(0)))


def through_pages(model, pages, batch=4):
    """Activations of all prompts: some tokens in chunks, the rest one by one."""
    found = [[] for _ in PROMPTS]
    done = [0, 0, 0]
    for parts in ([(0, 0, 5), (1, 0, 3)], [(0, 5, 6), (2, 0, 7)], [(2, 7, 9)]):
        tokens, state = chunks(pages, parts)
        hidden, state = run(model, tokens, state)
        pages, at = state.pages, 0
        for i, start, stop in parts:
            found[i].append(hidden[0, at : at + stop - start])
            at, done[i] = at + stop - start, stop
    while any(d < n for d, n in zip(done, LENGTHS, strict=True)):
        table = np.full((batch, WIDTH), PAGES)
        table[:3] = TABLES
        new = [int(d < n) for d, n in zip(done, LENGTHS, strict=True)]
        tokens = [[p[min(d, len(p) - 1)]] for p, d in zip(PROMPTS, done, strict=True)]
        state = PagedRows.of(
            pages, jnp.array(table, jnp.int32), padded(done, batch, 0),
            padded(new, batch, 0),
        )  # fmt: skip
        tokens = jnp.array(tokens + [[0]] * (batch - 3), jnp.int32)
        hidden, state = run(model, tokens, state)
        pages = state.pages
        for i in range(3):
            if new[i]:
                found[i].append(hidden[i])
                done[i] += 1
    return [jnp.concatenate(parts) for parts in found], pages


def whole(model):
    tokens = np.zeros((3, max(LENGTHS)), np.int32)
    for row, prompt in zip(tokens, PROMPTS, strict=True):
        row[: len(prompt)] = prompt
    hidden = jax.jit(Decoder.hidden)(model, tokens)
    return [row[:n] for row, n in zip(hidden, LENGTHS, strict=True)]


# The others differ from these in nothing that a page could see.
@pytest.mark.parametrize("name", ["gpt2", "neox", "llama", "gemma2", "gemma3"])
def test_pages_give_what_the_whole_sequence_gives(name):
    model = make(preset(f"{name}_tiny"))
    found, pages = through_pages(model.for_inference(), nan_pages(model, PAGES, PAGE))
    for got, expected in zip(found, whole(model), strict=True):
        assert relative_error(got, expected) < 1e-5
    # What belongs to nobody is as it was.
    free = np.setdiff1d(np.arange(PAGES), TABLES)
    assert np.isnan(pages[:, free]).all()
    last = TABLES[1][1:]  # of the second sequence, which has four tokens
    assert np.isnan(pages[:, last]).all()


def test_tensor_parallel():
    config = dataclasses.replace(
        preset("llama_tiny"), num_heads=8, num_kv_heads=4, head_dim=4
    )
    mesh = make_mesh({"tensor": 4}, jax.devices()[:4])
    model = create(lambda: make(config, fsdp_tp()), mesh, fsdp_tp()).for_inference()
    with jax.set_mesh(mesh):
        pages = nan_pages(model, PAGES, PAGE)
        assert pages.addressable_shards[0].data.shape[3] == 1
        found, pages = through_pages(model, pages)
    assert pages.sharding.spec[3] == "tensor"
    for got, expected in zip(found, whole(make(config)), strict=True):
        assert relative_error(got, expected) < 1e-5


@pytest.mark.parametrize("fault", ["keys", "token"])
def test_what_is_not_finite_stays_with_its_sequence(fault):
    """In pages of the sequence before, and in the chunk itself."""
    model = make(preset("llama_tiny")).for_inference()
    pages = nan_pages(model, PAGES, PAGE)
    for i in (0, 2):
        tokens, state = chunks(pages, [(i, 0, 4)])
        pages = run(model, tokens, state)[1].pages
    parts = [(0, 4, 6), (2, 4, 9)]
    tokens, state = chunks(pages, parts)
    expected = run(model, tokens, state)[0]
    if fault == "keys":
        at = divmod(rows(0, [2])[0], PAGE)
        bad = pages.at[1, at[0], 1, :, at[1]].set(jnp.inf)
        state = dataclasses.replace(state, pages=bad)
    else:
        tokens = tokens.at[0, 0].set(-1)  # is in no table: its activations are NaN
    found = run(model, tokens, state)[0]
    assert np.isnan(found[0, :2]).all()
    np.testing.assert_array_equal(found[0, 2:7], expected[0, 2:7])


def read_rows(pages, layer, at, scales=None):
    """Keys and values, zeros past the pool."""
    place = layer, at // pages.shape[4]
    held = pages.at[*place, :, :, at % pages.shape[4]].get(mode="fill", fill_value=0)
    if scales is None:
        return held
    scales = scales.at[place].get(mode="fill", fill_value=0.0)
    return held.astype(jnp.float32) * scales[..., None]


def test_values_past_the_end_of_a_chunk_are_cleared():
    pages = jnp.full((2, PAGES, 2, 1, PAGE, 3), jnp.nan)
    table = jnp.asarray(TABLES)
    found = np.isnan(clear_tails(pages, table, jnp.array([6, 0, 4])))
    want = np.ones(found.shape, bool)
    want[:, TABLES[0][1], 1, :, 2:] = False  # the third sequence fills its page
    np.testing.assert_array_equal(found, want)


def test_rows_past_the_pool_are_dropped():
    pages = empty_pages(
        num_layers=2, num_pages=3, page_size=4, num_kv_heads=2, head_dim=3
    )
    kv = jnp.asarray(RNG.standard_normal((3, 2, 2, 3)), jnp.float32)
    at = jnp.array([7, 12, 2])
    pages = append_rows(pages, 1, at, kv)
    assert jnp.count_nonzero(pages) == 2 * kv[0].size
    np.testing.assert_array_equal(read_rows(pages, 1, at)[::2], kv[::2])
    assert not read_rows(pages, 1, at)[1].any()
    assert not read_rows(pages, 0, at).any()


def test_fp8_rows_are_scaled_and_clipped():
    scales = jnp.asarray(RNG.uniform(0.1, 2.0, (2, 3, 2, 2)), jnp.float32)
    pages = empty_pages(
        num_layers=2, num_pages=3, page_size=4, num_kv_heads=2, head_dim=3,
        dtype=jnp.float8_e4m3fn,
    )  # fmt: skip
    kv = jnp.asarray(10 * RNG.standard_normal((3, 2, 2, 3)), jnp.float32)
    kv = kv.at[0, 1, 0, :2].set(jnp.array([1e9, -jnp.inf])).at[2, 0, 1, 0].set(jnp.nan)
    at = jnp.array([7, 12, 2])
    pages = append_rows(pages, 1, at, kv, scales)
    found = read_rows(pages, 1, at, scales)
    limit = 448 * scales[1, 1, 1, 0]
    np.testing.assert_array_equal(found[0, 1, 0, :2], [limit, -limit])
    assert np.isnan(found[2, 0, 1, 0]) and jnp.isnan(found).sum() == 1
    assert not found[1].any()
    usual = np.isfinite(kv) & (abs(kv) < 1e9) & (at < 12)[:, None, None, None]
    np.testing.assert_allclose(found[usual], kv[usual], rtol=2**-4, atol=1e-2)


def test_attention_that_is_not_causal_is_refused():
    model = make(preset("llama_tiny"))
    attention = model.for_inference().blocks[0].attention
    attention.config = dataclasses.replace(attention.config, causal=False)
    tokens, state = chunks(nan_pages(model, PAGES, PAGE), [(0, 0, 4)])
    with pytest.raises(ValueError, match="causal False"):
        attention(jnp.zeros((*tokens.shape, 32)), state)
