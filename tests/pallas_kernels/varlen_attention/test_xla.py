"""The portable implementation against the definition."""

import copy
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.varlen_attention import XlaConfig, varlen_attention
from pallas_kernels.varlen_attention.specs import SPECS
from tests.pallas_kernels.varlen_attention import cases
from tests.tiers import exhaustive, first
from tests.tolerances import RELATIVE


# Blocks that divide neither each other nor the lengths.
CONFIG = XlaConfig(block_q=32, block_k=48)


def xla(options, config=CONFIG):
    return cases.value_and_gradients(
        lambda t, cu_q, cu_k: varlen_attention(
            **t,
            cu_seqlens_q=cu_q,
            cu_seqlens_k=cu_k,
            **options,
            return_lse=True,
            implementation="xla",
            config=config,
        )
    )


def relative_error(actual, expected):
    """`tests.tolerances.relative_error` in numpy, which compiles nothing."""
    actual, expected = (np.asarray(x, np.float32) for x in (actual, expected))
    if not expected.size:
        return 0.0
    scale = np.abs(expected).max()
    return np.abs(actual - expected).max() / (scale if scale > 0 else 1.0)


def assert_matches(actual, expected, cu_q, cu_k, tolerance):
    """Outputs and gradients are near; what is past the last sequence is zero."""
    out, lse, grads = jax.tree.map(np.asarray, actual)
    expected_out, expected_lse, expected_grads = jax.tree.map(np.asarray, expected)
    assert relative_error(out, expected_out) < tolerance
    seen = np.isfinite(expected_lse)
    np.testing.assert_array_equal(lse[~seen], -np.inf)
    assert relative_error(lse[seen], expected_lse[seen]) < tolerance
    assert not np.any(out[cu_q[-1] :])
    for name, grad in grads.items():
        assert relative_error(grad, expected_grads[name]) < tolerance, name
    assert not np.any(grads["q"][cu_q[-1] :])
    for name in "kv":
        assert not np.any(grads[name][cu_k[-1] :])


@pytest.mark.parametrize(
    "feature", first(cases.FEATURES, "full", "causal grouped", "window causal", "all")
)
def test_values_and_gradients(feature):
    tensors, options = cases.arrays(feature)
    ours, definition = xla(options), cases.reference(options)
    for lengths_q, lengths_k in cases.LENGTHS.values():
        cu_q, cu_k = cases.prefix_sums(lengths_q), cases.prefix_sums(lengths_k)
        clean = cases.poison(tensors, *cases.cotangents(), cu_q, cu_k, 0.0)
        expected = definition(*clean, cu_q, cu_k)
        garbage = cases.poison(*clean, cu_q, cu_k, np.nan)
        # What arrives for a query that sees nothing is no gradient either.
        blind = ~np.isfinite(expected[1])
        garbage[1][blind] = garbage[2][blind] = np.nan
        actual = ours(*garbage, cu_q, cu_k)
        tolerance = 2 * RELATIVE[jnp.dtype("float32")]  # two sums of up to 480 terms
        assert_matches(actual, expected, cu_q, cu_k, tolerance)


@pytest.mark.parametrize(
    ("feature", "dtype"), [("causal grouped", "float16"), ("all", "bfloat16")]
)
def test_half_precision(feature, dtype):
    tensors, options = cases.arrays(feature, dtype)
    cu = cases.prefix_sums(cases.AWKWARD)
    cotangents = cases.cotangents(dtype)
    exact = {name: x.astype(np.float32) for name, x in tensors.items()}
    expected = cases.reference(options)(
        *cases.poison(exact, *cotangents, cu, cu, 0.0), cu, cu
    )
    actual = xla(options)(*cases.poison(tensors, *cotangents, cu, cu, 0.0), cu, cu)
    assert actual[0].dtype == dtype
    assert actual[1].dtype == jnp.float32
    assert all(grad.dtype == tensors[name].dtype for name, grad in actual[2].items())
    assert_matches(actual, expected, cu, cu, RELATIVE[jnp.dtype(dtype)])


def test_gradients_of_saturated_weights_are_as_good_as_in_plain_jax():
    """They are differences of nearly equal numbers, which rounding must not reach."""

    @jax.jit
    def run(q, k, v, dout):
        attend = functools.partial(
            varlen_attention, config=CONFIG, implementation="xla"
        )
        return jax.vjp(attend, q, k, v)[1](dout)

    cases.assert_gradients_of_saturated_weights(run, 96)


def test_default_blocks_are_as_good():
    tensors, options = cases.arrays("all")
    cu_q, cu_k = (cases.prefix_sums(lengths) for lengths in cases.LENGTHS["cross"])
    arguments = (*cases.poison(tensors, *cases.cotangents(), cu_q, cu_k, 0.0),)
    expected = cases.reference(options)(*arguments, cu_q, cu_k)
    actual = xla(options, config=None)(*arguments, cu_q, cu_k)
    assert_matches(actual, expected, cu_q, cu_k, 2e-5)


def test_another_sequence_changes_not_one_bit():
    tensors, options = cases.arrays("full")
    run = xla(options)
    cu = cases.prefix_sums(cases.AWKWARD)
    dout, dlse = cases.cotangents()
    before = run(tensors, dout, dlse, cu, cu)
    changed = slice(cu[5], cu[6])
    other, other_dout, other_dlse = copy.deepcopy((tensors, dout, dlse))
    for x in (*other.values(), other_dout, other_dlse):
        x[changed] *= -3.0
    after = run(other, other_dout, other_dlse, cu, cu)
    same = np.ones(cases.TOKENS, bool)
    same[changed] = False
    for x, y in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        np.testing.assert_array_equal(x[same], y[same])
        assert not np.array_equal(x[changed], y[changed])


@pytest.mark.parametrize(
    ("options", "lengths", "poisoned", "clean"),
    [
        # Rows of q and k are cut at multiples of 32.
        ({"window": (31, 0)}, [192], slice(0, 32), [slice(64, 192)]),
        *exhaustive(
            ({}, [64, 64, 64], slice(64, 128), [slice(0, 64), slice(128, 192)]),
            ({"causal": True}, [192], slice(96, 192), [slice(0, 96)]),
        ),
    ],
)
def test_blocks_outside_the_mask_are_skipped(options, lengths, poisoned, clean):
    # A masked weight times NaN is NaN: clean rows were never multiplied with these.
    tensors, _ = cases.arrays("full", tokens=192)
    for x in tensors.values():
        x[poisoned] = np.nan
    cu = np.cumsum([0, *lengths])
    run = xla(options, XlaConfig(block_q=32, block_k=32))
    out, _, grads = jax.tree.map(
        np.asarray, run(tensors, *cases.cotangents(tokens=192), cu, cu)
    )
    for rows in clean:
        assert np.isfinite(out[rows]).all()
        assert np.isfinite(grads["q"][rows]).all()
        if len(lengths) > 1:  # in one sequence, poisoned queries do look at clean keys
            assert np.isfinite(grads["k"][rows]).all()
            assert np.isfinite(grads["v"][rows]).all()


def test_memory_is_linear_in_the_tokens():
    def peak(tokens):
        x = jax.ShapeDtypeStruct((tokens, 2, 16), jnp.float32)
        cu = jax.ShapeDtypeStruct((5,), jnp.int32)
        run = jax.jit(
            jax.grad(lambda q, k, v, cu: varlen_attention(q, k, v, cu).sum(), (0, 1, 2))
        )
        stats = run.lower(x, x, x, cu).compile().memory_analysis()
        return stats.temp_size_in_bytes

    small, large = peak(2048), peak(8192)
    assert large < 6 * small
    assert large < 8192 * 8192 * 4 / 8  # an eighth of one head's scores


@pytest.mark.exhaustive  # the reference's gradient is what others compare with
def test_finite_differences():
    rng = np.random.default_rng(0)
    shapes = {"q": (6, 2, 4), "k": (7, 1, 4), "v": (7, 1, 3), "sinks": 2}
    point = {n: jnp.asarray(rng.normal(size=s), jnp.float32) for n, s in shapes.items()}
    point["alibi_slopes"] = jnp.asarray([0.5, 0.2], jnp.float32)
    weights = rng.normal(size=(6, 2, 4)).astype(np.float32)

    @jax.jit
    def loss(tensors):
        out, lse = varlen_attention(
            **tensors,
            cu_seqlens_q=np.array([0, 2, 6]),
            cu_seqlens_k=np.array([0, 3, 7]),
            causal=True,
            window=(2, None),
            softcap=1.5,
            return_lse=True,
        )
        return jnp.sum(out * weights[..., :3]) + jnp.sum(lse * weights[..., 3])

    grads = jax.grad(loss)(point)
    step = 1e-2
    for name, x in point.items():
        direction = jnp.asarray(rng.normal(size=x.shape), jnp.float32)
        ahead, behind = (
            loss(point | {name: x + sign * step * direction}) for sign in (1, -1)
        )
        expected = (ahead - behind) / (2 * step)
        np.testing.assert_allclose(
            jnp.vdot(grads[name], direction), expected, rtol=2e-3, atol=2e-3
        )


@pytest.mark.exhaustive
def test_every_spec():
    tokens, max_seqs = 160, 64
    runs = {}
    for spec in SPECS:
        spec = spec.scaled(tokens=tokens)
        options = {"causal": spec.causal, "window": spec.window}
        if spec.softcap is not None:
            options["softcap"] = spec.softcap
        heads = spec.num_heads, spec.num_kv_heads
        key = (*heads, *options.values(), spec.sinks, spec.alibi)
        if key not in runs:
            tensors = cases.random_arrays(
                tokens, *heads, sinks=spec.sinks, alibi=spec.alibi
            )
            runs[key] = tensors, xla(options), cases.reference(options), set()
        tensors, ours, definition, done = runs[key]
        cu_q, cu_k = (
            np.pad(cu, (0, max_seqs + 1 - len(cu)), "edge") for cu in spec.cu_seqlens()
        )
        if (lengths := (*cu_q, *cu_k)) in done:
            continue
        done.add(lengths)
        cotangents = cases.cotangents(tokens=tokens, heads=heads[0])
        arguments = cases.poison(tensors, *cotangents, cu_q, cu_k, 0.0)
        expected = definition(*arguments, cu_q, cu_k)
        assert_matches(ours(*arguments, cu_q, cu_k), expected, cu_q, cu_k, 2e-5)


def test_flops_count_visible_pairs():
    spec = next(s for s in SPECS if s.name == "bert_base_b8_l64")
    each_pair = 4 * spec.num_heads * spec.head_dim
    assert spec.flops() == each_pair * sum(n * n for n in spec.lengths_q)
    spec = dataclasses.replace(spec, lengths_q=(3,), lengths_k=(5,), causal=True)
    assert spec.flops() == each_pair * (3 + 4 + 5)
    assert dataclasses.replace(spec, window=(1, None)).flops() == each_pair * 6
