"""Paged attention: the portable implementation, mistakes, meshes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dispatch import Unsupported
from pallas_kernels.paged_attention import PagedAttentionConfig, paged_attention
from pallas_kernels.paged_attention.inputs import FP8
from pallas_kernels.paged_attention.specs import SPECS
from tests.pallas_kernels.paged_attention.cases import (
    Case,
    bits,
    check,
    check_lost_pages,
)
from tests.tolerances import relative_error


AxisType, P = jax.sharding.AxisType, jax.sharding.PartitionSpec
portable = functools.partial(paged_attention, implementation="xla")
jitted = jax.jit(portable, static_argnames=("window", "softcap", "scale"))

CASES = {
    "plain": Case(),
    "one_row": Case(lengths=(9,)),
    "mha": Case(heads=(3, 3)),
    "drafts": Case(queries=3, lengths=(20, 0, 37, 2)),
    "some_drafts": Case(queries=3, num_new=(1, 3, 0, 2), lengths=(20, 0, 37, 6)),
    "dead": Case(num_new=(0, 1, 0)),
    "all_dead": Case(num_new=(0, 0, 0)),
    "window": Case(window=7),
    "window_one": Case(window=1, lengths=(16, 0, 37)),
    "window_drafts": Case(window=6, queries=4, lengths=(20, 0, 37)),
    "softcap": Case(softcap=1.5, scale=2.0),
    "past_the_table": Case(lengths=(16, 14, 5), queries=4, width=4),
    "longer_than_a_chunk": Case(lengths=(530, 3), page=16),
    "fp16": Case(dtype=jnp.float16),
    "bf16": Case(dtype=jnp.bfloat16),
    "bf16_pages": Case(pages_dtype=jnp.bfloat16),
    "fp8": Case(pages_dtype=FP8, queries=2),
    "fp8_bf16": Case(pages_dtype=FP8, dtype=jnp.bfloat16, num_new=(1, 0, 1)),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_portable_values(case):
    check(case, jitted)


KINDS = {
    (s.num_heads, s.num_kv_heads, s.head_dim, s.page, s.queries, s.dtype, s.window): s
    for s in SPECS
}
"""One spec each of those that differ in more than the batch and the context."""


@pytest.mark.parametrize("spec", KINDS.values(), ids=lambda spec: spec.name)
def test_portable_specs(spec):
    """Heads, types and pages of the models, with fewer and shorter rows."""
    rng = np.random.default_rng(0)
    context = min(spec.context, 150)
    lengths = rng.integers(0, context + 1, min(spec.batch, 2))
    check(
        Case(
            lengths=(context, *map(int, lengths[1:])),
            queries=spec.queries,
            heads=(spec.num_heads, spec.num_kv_heads),
            head_dim=spec.head_dim,
            page=spec.page,
            layers=1,
            layer=0,
            dtype=jnp.bfloat16,
            pages_dtype=jnp.dtype(spec.dtype),
            window=spec.window and 64,
        ),
        jitted,
    )


def test_random_steps():
    rng = np.random.default_rng(0)
    for seed in range(12):
        kv_heads, queries, rows = (int(n) for n in rng.integers(1, 4, 3))
        case = Case(
            lengths=tuple(int(n) for n in rng.integers(0, 40, rows)),
            queries=queries,
            num_new=tuple(int(n) for n in rng.integers(0, queries + 1, rows)),
            heads=(kv_heads * int(rng.integers(1, 4)), kv_heads),
            page=int(rng.choice([1, 4, 16])),
            window=int(rng.integers(1, 20)) if seed % 2 else None,
            softcap=2.0 if seed % 3 == 0 else None,
            pages_dtype=FP8 if seed % 4 == 3 else None,
            seed=seed,
        )
        check(case, jitted)


def test_poison_of_any_kind_changes_nothing():
    case = dataclasses.replace(CASES["some_drafts"], window=9)
    for poison in (0.0, float("inf"), -3e38):
        other = dataclasses.replace(case, poison=poison)
        np.testing.assert_array_equal(check(case, portable), check(other, portable))


def test_steps_go_on_where_the_last_one_ended():
    """Tokens one by one, and all at once, are one row."""
    case = Case(lengths=(0, 0), queries=11)
    arrays = case.arrays()
    whole, pages = portable(**arrays)
    at = 0
    cache = arrays.pop("pages")
    for count in (1, 3, 2, 5):
        part = slice(at, at + count)
        step = arrays | {n: arrays[n][:, part] for n in ("q", "kv")}
        step["lengths"] = np.array([at, at], np.int32)
        out, cache = portable(**step, pages=cache)
        assert relative_error(out, whole[:, part]) < 1e-5
        at += count
    np.testing.assert_array_equal(bits(cache), bits(pages))


def test_fp8_clips_and_rounds_what_is_stored():
    case = Case(lengths=(0,), pages_dtype=FP8, page=4, layers=1, layer=0)
    arrays = case.arrays()
    arrays["kv"] = arrays["kv"].at[0, 0, 1].set(1e6)
    out, pages = portable(**arrays)
    page = int(arrays["table"][0, 0])
    stored = np.asarray(pages[0, page, 1, :, 0], np.float32)
    np.testing.assert_array_equal(stored, 448.0)
    scales = np.asarray(arrays["kv_scales"])[0, page, 1]
    want = np.repeat(448.0 * scales, 2)[:, None]
    np.testing.assert_allclose(out[0, 0], np.broadcast_to(want, (4, 8)), rtol=1e-6)


def test_tokens_without_a_page():
    check_lost_pages(jitted)


def test_a_shared_prefix():
    case = Case(lengths=(8, 8), page=4)
    arrays = case.arrays()
    q, table = arrays["q"], arrays["table"].copy()
    table[1, :2] = table[0, :2]
    arrays |= {"q": q.at[1].set(q[0]), "table": table}
    arrays["kv"] = arrays["kv"].at[1].set(arrays["kv"][0])
    out, _ = portable(**arrays)
    np.testing.assert_array_equal(out[0], out[1])


@pytest.mark.parametrize("kind", ["Auto", "Explicit", "Manual", "Checked"])
def test_heads_on_several_devices(kind):
    case = Case(heads=(8, 4), queries=2, num_new=(2, 0, 1), pages_dtype=FP8)
    arrays = case.arrays()
    out, pages = portable(**arrays)
    explicit = kind == "Explicit"
    axis = AxisType.Explicit if explicit else AxisType.Auto
    mesh = jax.make_mesh((4,), ("tensor",), axis_types=(axis,))
    specs = {
        "q": P(None, None, "tensor"),
        "kv": P(None, None, None, "tensor"),
        "pages": P(None, None, None, "tensor"),
        "kv_scales": P(None, None, None, "tensor"),
    }
    specs = {name: specs.get(name, P()) for name in arrays}
    arrays = jax.tree.map(jnp.asarray, arrays)

    def run(arrays):
        return portable(**arrays)

    f = jax.jit(run)
    if kind in ("Manual", "Checked"):
        f = jax.shard_map(
            run,
            mesh=mesh,
            in_specs=(specs,),
            out_specs=(specs["q"], specs["pages"]),
            check_vma=kind == "Checked",
        )
    with jax.set_mesh(mesh):
        placed = {
            name: jax.device_put(x, jax.NamedSharding(mesh, specs[name]))
            for name, x in arrays.items()
        }
        found = f(placed)
    assert found[1].sharding.spec[3] == "tensor"
    assert relative_error(found[0], out) < 1e-5
    np.testing.assert_array_equal(bits(found[1]), bits(pages))


def test_batches_of_the_portable_implementation():
    cases = [Case(seed=seed) for seed in range(2)]
    arrays = [jax.tree.map(jnp.asarray, case.arrays()) for case in cases]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *arrays)
    out, pages = jax.vmap(lambda arrays: portable(**arrays))(stacked)
    for i, one in enumerate(arrays):
        want, want_pages = portable(**one)
        assert relative_error(out[i], want) < 1e-5
        np.testing.assert_array_equal(bits(pages[i]), bits(want_pages))


def test_it_has_no_derivative():
    arrays = Case().arrays()
    q = arrays.pop("q")

    def loss(q):
        return paged_attention(q, **arrays)[0].sum()

    with pytest.raises(TypeError, match="has no derivative; train with varlen"):
        jax.grad(loss)(q)
    loss(jax.lax.stop_gradient(q))


def test_mistakes(no_shape_hook):
    arrays = Case(queries=2).arrays()
    q, kv, pages = (arrays[name] for name in ("q", "kv", "pages"))
    wrong: list[tuple[type[Exception], str, dict]] = [
        (TypeError, "q has type int32", {"q": q.astype(jnp.int32)}),
        (TypeError, "pages has type int8", {"pages": pages.astype(jnp.int8)}),
        (ValueError, "do not fit", {"kv": kv[:, :1]}),
        (ValueError, "do not fit", {"pages": pages[..., :4]}),
        (ValueError, r"expected \[B, R, N, H\]", {"q": q[0]}),
        (ValueError, "multiple of the number", {"q": q[:, :, :3]}),
        (ValueError, "at least 1", {"pages": pages[:, :0]}),
        (ValueError, "kv_scales are missing", {"pages": pages.astype(FP8)}),
        (ValueError, "others take none", {"kv_scales": jnp.ones(pages.shape[:4])}),
        (TypeError, "table must hold integers", {"table": np.ones((3, 4))}),
        (ValueError, r"table has shape \(4, 4\)", {"table": np.ones((4, 4), int)}),
        (ValueError, r"lengths has shape", {"lengths": np.zeros(4, int)}),
        (ValueError, r"lengths must lie in \[0,", {"lengths": np.array([0, -1, 2])}),
        (ValueError, r"lengths must lie in", {"lengths": np.array([0, 999, 2])}),
        (ValueError, r"num_new must lie in \[0, 2\]", {"num_new": np.array([0, 3, 0])}),
        (ValueError, r"layer must lie in \[0, 1\], got 2", {"layer": 2}),
        (TypeError, "layer must hold integers", {"layer": 0.5}),
        (ValueError, "window must be None or an integer", {"window": 0}),
        (ValueError, "softcap must be positive", {"softcap": 0.0}),
        (ValueError, "scale must be finite", {"scale": float("nan")}),
        (ValueError, "expected a PagedAttentionConfig", {"config": 4}),
        (ValueError, "implementation 'cuda'", {"implementation": "cuda"}),
    ]  # fmt: skip
    for error, message, changed in wrong:
        with pytest.raises(error, match=message):
            paged_attention(**arrays | changed)
    scales = jnp.ones((*pages.shape[:3], 1))
    with pytest.raises(ValueError, match=r"kv_scales has shape .* expected \[L, P"):
        paged_attention(**arrays | {"pages": pages.astype(FP8), "kv_scales": scales})
    with pytest.raises(Unsupported, match="XLA takes no config"):
        portable(**arrays, config=PagedAttentionConfig())
    for options in (
        {"split": 100},
        {"split": 0},
        {"teams": 4},
        {"slots": 1},
    ):
        with pytest.raises(ValueError, match=next(iter(options))):
            PagedAttentionConfig(**options)
