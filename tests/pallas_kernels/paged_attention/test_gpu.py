"""Paged attention on a GPU: values, repeatability, independence of rows, poison."""

import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.mosaic import DeviceSpec
from pallas_kernels.paged_attention import PagedAttentionConfig, paged_attention
from pallas_kernels.paged_attention.config import default_split
from pallas_kernels.paged_attention.inputs import FP8
from pallas_kernels.paged_attention.specs import SPECS
from tests.pallas_kernels.paged_attention.cases import (
    Case,
    bits,
    check,
    check_lost_pages,
)
from tests.tolerances import RELATIVE, relative_error


pytestmark = pytest.mark.gpu
OPTIONS = ("window", "softcap", "scale", "config")
kernel, portable = (
    jax.jit(
        functools.partial(paged_attention, implementation=name), static_argnames=OPTIONS
    )
    for name in ("mosaic_gpu", "xla")
)
BF16_SPECS = [spec for spec in SPECS if spec.dtype == "bfloat16"]


def operands(spec, *, ragged, seed=0):
    """A step of a spec in a pool that holds NaN wherever no row has a token."""
    rng, rows = np.random.default_rng(seed), spec.batch
    lengths = np.full(rows, spec.context)
    if ragged:
        lengths = rng.integers(0, spec.context + 1, rows)
    num_pages = rows * spec.width + 5
    table = rng.permutation(num_pages)[: rows * spec.width].reshape(rows, -1)
    held = np.zeros((num_pages, spec.page), bool)
    for b in range(rows):
        first = 0 if spec.window is None else max(0, lengths[b] - spec.window + 1)
        at = np.arange(first, lengths[b])
        held[table[b, at // spec.page], at % spec.page] = True
    keys = jax.random.split(jax.random.key(seed), 3)
    shape = (1, num_pages, 2, spec.num_kv_heads, spec.page, spec.head_dim)

    @jax.jit
    def pool(key, held):
        pages = jax.random.normal(key, shape, jnp.bfloat16)
        return jnp.where(held[None, :, None, None, :, None], pages, jnp.nan)

    new = rows, spec.queries
    return {
        "q": jax.random.normal(
            keys[0], (*new, spec.num_heads, spec.head_dim), jnp.bfloat16
        ),
        "kv": jax.random.normal(
            keys[1], (*new, 2, spec.num_kv_heads, spec.head_dim), jnp.bfloat16
        ),
        "pages": pool(keys[2], held),
        "layer": 0,
        "table": table.astype(np.int32),
        "lengths": lengths.astype(np.int32),
    }


@jax.jit
def same(a, b):
    """Whether two pools are equal, NaN included."""
    return jnp.all((a == b) | (jnp.isnan(a) & jnp.isnan(b)))


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("spec", BF16_SPECS, ids=lambda spec: spec.name)
def test_values_repeat_and_rows_do_not_mix(spec, ragged):
    arrays = operands(spec, ragged=ragged)
    out, pages = kernel(**arrays, window=spec.window)
    with jax.default_matmul_precision("highest"):
        wanted, wanted_pages = portable(**arrays, window=spec.window)
    assert relative_error(out, wanted) < RELATIVE[out.dtype]
    assert same(pages, wanted_pages)
    del pages, wanted_pages  # up to 1 GB each
    for _ in range(5):
        again, _ = kernel(**arrays, window=spec.window)
        np.testing.assert_array_equal(bits(again), bits(out))
    some = max(1, spec.batch // 3)
    fewer = {name: arrays[name][-some:] for name in ("q", "kv", "table", "lengths")}
    # Of fewer rows splits would be shorter.
    split = default_split(
        spec.batch, spec.num_kv_heads, spec.page, DeviceSpec.current().num_sms
    )
    config = PagedAttentionConfig(split=split)
    alone, _ = kernel(**arrays | fewer, window=spec.window, config=config)
    np.testing.assert_array_equal(bits(alone), bits(out[-some:]))


def random_steps():
    numbers = random.Random(0)
    for seed in range(24):
        head_dim = numbers.choice([64, 128, 256])
        kv_heads, queries = numbers.randint(1, 5), numbers.randint(1, 4)
        group = numbers.randint(1, 64 // queries) if seed % 2 else numbers.randint(1, 4)
        rows = numbers.randint(1, 40)
        most = numbers.choice([70, 600, 3000])
        step = Case(
            lengths=tuple(numbers.randint(0, most) for _ in range(rows)),
            num_new=tuple(numbers.randint(0, queries) for _ in range(rows)),
            queries=queries,
            heads=(kv_heads * group, kv_heads),
            head_dim=head_dim,
            page=numbers.choice([8, 16, 32, 64, 128]),
            window=numbers.choice([None, None, numbers.randint(1, most)]),
            softcap=numbers.choice([None, None, 2.0]),
            dtype=numbers.choice([jnp.bfloat16, jnp.float16]),
            layers=1,
            layer=0,
            seed=seed,
        )
        yield step, numbers.choice([None, PagedAttentionConfig(split=128, teams=1)])


# Tests by themselves, as Pallas takes ten seconds to lower the kernel for each.
@pytest.mark.parametrize(("step", "config"), [*random_steps()], ids=map(str, range(24)))
def test_random_steps(step, config):
    check(step, functools.partial(kernel, config=config))


def test_tokens_without_a_page():
    check_lost_pages(kernel)


@pytest.mark.parametrize("head_dim", [128, 256])
def test_fp8(head_dim):
    for page, queries in ((64, 1), (128, 3)):
        step = Case(
            lengths=(1500, 0, 700, 63, 2047),
            queries=queries,
            heads=(8, 2),
            head_dim=head_dim,
            page=page,
            window=None if queries > 1 else 900,
            dtype=jnp.bfloat16,
            pages_dtype=FP8,
        )
        check(step, kernel)


@pytest.mark.parametrize("teams", [2, 3])
def test_fp8_teams(teams):
    """Bits do not depend on who computes a split, nor on the run."""
    step = Case(
        lengths=tuple(range(3, 4000, 130)),
        heads=(8, 2),
        head_dim=128,
        page=64,
        dtype=jnp.bfloat16,
        pages_dtype=FP8,
    )
    run = functools.partial(kernel, config=PagedAttentionConfig(teams=teams))
    check(step, run)
    out, _ = kernel(**step.arrays(), **step.options())
    for _ in range(5):
        again, _ = run(**step.arrays(), **step.options())
        np.testing.assert_array_equal(bits(again), bits(out))


def test_steps_in_a_scan_change_donated_pages():
    step = Case(
        lengths=(500, 20), heads=(8, 2), head_dim=128, page=64, dtype=jnp.bfloat16
    )
    arrays = jax.tree.map(jnp.asarray, step.arrays())
    arrays["pages"] = jnp.nan_to_num(arrays["pages"], nan=0.5)

    def run(op, pages, arrays):
        def one(carry, number):
            q, pages, lengths = carry
            changed = {"q": q, "pages": pages, "lengths": lengths, "layer": number % 2}
            out, pages = op(**arrays | changed)
            return (out, pages, lengths + number % 2), None

        carry = arrays["q"], pages, arrays["lengths"]
        return jax.lax.scan(one, carry, jnp.arange(8, dtype=jnp.int32))[0]

    with jax.default_matmul_precision("highest"):
        wanted = jax.jit(functools.partial(run, portable))(arrays["pages"], arrays)
    f = jax.jit(functools.partial(run, kernel), donate_argnums=0)
    found = f(arrays.pop("pages"), arrays)
    assert relative_error(found[0], wanted[0]) < RELATIVE[found[0].dtype]
    np.testing.assert_array_equal(bits(found[1]), bits(wanted[1]))
