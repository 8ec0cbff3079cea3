"""The relative-position bias: buckets, the definition, the portable implementation."""

import functools
import itertools
import json
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.varlen_attention import (
    RelativeBias,
    RelativeBuckets,
    XlaConfig,
    position_terms,
    varlen_attention,
    varlen_attention_reference,
)
from pallas_kernels.varlen_attention.relative import tile_bias, tile_gradient
from tests.pallas_kernels.varlen_attention import cases
from tests.tiers import exhaustive
from tests.tolerances import RELATIVE, relative_error


FIXTURES = pathlib.Path(__file__).parents[2] / "fixtures"
LOGARITHMIC = RelativeBuckets(span=8, max_distance=30)
LINEAR = RelativeBuckets(span=5)
# Blocks that divide neither each other nor the lengths.
CONFIG = XlaConfig(block_q=24, block_k=32)
TOKENS = 150

# (buckets, key/value heads, which terms, options)
FEATURES = {
    "both": (LOGARITHMIC, 4, ("query", "key"), {}),
    "linear grouped": (LINEAR, 2, ("query", "key"), {}),
    "content to position": (LOGARITHMIC, 1, ("query",), {"causal": True}),
    "position to content": (LINEAR, 4, ("key",), {"window": (9, 20)}),
    "all": (
        LOGARITHMIC,
        2,
        ("query", "key"),
        {
            "causal": True,
            "window": (60, None),
            "scale": 0.4,
            "softcap": 1.5,
            "sinks": True,
            "alibi_slopes": True,
        },
    ),
}
LENGTHS = {
    "several": [1, 0, 33, 24, 7, 0, 65, 1],
    "one": [TOKENS],
    "none": [],
}


def make(feature, dtype="float32", tokens=TOKENS):
    """``(tensors, buckets, options)``; the terms are among the tensors."""
    buckets, kv_heads, terms, options = FEATURES[feature]
    options = dict(options)
    tensors = cases.random_arrays(
        tokens,
        cases.HEADS,
        kv_heads,
        sinks=options.pop("sinks", False),
        alibi=options.pop("alibi_slopes", False),
    )
    rng = np.random.default_rng(2)
    for name in terms:
        shape = tokens, cases.HEADS, buckets.num_entries
        tensors[f"{name}_terms"] = rng.normal(size=shape).astype(np.float32)
    for name in ("q", "k", "v", "query_terms", "key_terms"):
        if name in tensors:
            tensors[name] = tensors[name].astype(jnp.dtype(dtype))
    return tensors, buckets, options


def gather(tensors, buckets):
    """Tensors with the terms among them as arguments of `varlen_attention`."""
    tensors = dict(tensors)
    terms = {name: tensors.pop(name, None) for name in ("query_terms", "key_terms")}
    return tensors | {"relative_bias": RelativeBias(**terms, buckets=buckets)}


def ours(buckets, options):
    def run(tensors, cu):
        return varlen_attention(
            **gather(tensors, buckets),
            cu_seqlens_q=cu,
            **options,
            return_lse=True,
            implementation="xla",
            config=CONFIG,
        )

    return cases.value_and_gradients(run)


def definition(buckets, options):
    options = {"scale": cases.HEAD_DIM**-0.5, **options}
    left, right = options.pop("window", (None, None))
    right = 0 if options.pop("causal", False) else right

    def run(tensors, cu):
        return varlen_attention_reference(
            **gather(tensors, buckets),
            cu_seqlens_q=cu,
            cu_seqlens_k=cu,
            window=(left, right),
            **options,
        )

    return cases.value_and_gradients(run)


def poison(tensors, dout, dlse, cu, value):
    clean = cases.poison(tensors, dout, dlse, cu, cu, value)
    for name in ("query_terms", "key_terms"):
        if name in clean[0]:
            clean[0][name][cu[-1] :] = value
    return clean


def assert_matches(actual, expected, cu, tolerance):
    out, lse, grads = jax.tree.map(np.asarray, actual)
    expected_out, expected_lse, expected_grads = jax.tree.map(np.asarray, expected)
    assert relative_error(out, expected_out) < tolerance
    seen = np.isfinite(expected_lse)
    np.testing.assert_array_equal(lse[~seen], -np.inf)
    if seen.any():
        assert relative_error(lse[seen], expected_lse[seen]) < tolerance
    assert grads.keys() == expected_grads.keys()
    for name, grad in grads.items():
        assert relative_error(grad, expected_grads[name]) < tolerance, name
        if name not in ("sinks", "alibi_slopes"):
            assert not np.any(grad[cu[-1] :]), name


def test_entries_are_those_of_transformers():
    """`relative_buckets.json` holds, from torch, where each entry begins."""
    stored = json.loads((FIXTURES / "relative_buckets.json").read_text())
    assert "256 512" in stored  # DeBERTa-v3
    for key, starts in stored.items():
        span, far = key.split()
        far = None if far == "None" else int(far)
        buckets = RelativeBuckets(span=int(span), max_distance=far)
        distances = np.arange(-4 * (far or int(span)) + 1, 4 * (far or int(span)))
        expected = np.searchsorted(starts, distances, side="right")
        np.testing.assert_array_equal(buckets.entry(distances), expected, err_msg=key)
        np.testing.assert_array_equal(
            buckets.entry(jnp.asarray(distances)), expected, err_msg=key
        )
        if int(span) % 2 == 0:  # an odd span is reached far beyond these distances
            assert len(set(expected)) == buckets.num_entries


def one_entry(buckets, distance):
    """The formula of the paper and its code, on Python numbers."""
    if buckets.max_distance is not None:
        mid = buckets.span // 2
        if abs(distance) > mid:
            ratio = math.log(abs(distance) / mid) / math.log(
                (buckets.max_distance - 1) / mid
            )
            size = math.ceil(ratio * (mid - 1)) + mid
            distance = size if distance > 0 else -size
    return min(max(distance + buckets.span, 0), 2 * buckets.span - 1)


def loops(tensors, buckets, options, cu):
    """One query, one head, one key at a time, in float64."""
    t = {name: np.asarray(x, np.float64) for name, x in tensors.items()}
    tokens, heads, dim = t["q"].shape
    groups = heads // t["k"].shape[1]
    left, right = options.get("window", (None, None))
    right = 0 if options.get("causal") else right
    scale = options.get("scale", dim**-0.5)
    cap = options.get("softcap")
    out = np.zeros((tokens, heads, t["v"].shape[2]))
    lse = np.full((tokens, heads), -np.inf)
    for begin, end in itertools.pairwise(cu):
        for i in range(begin, end):
            for n in range(heads):
                weights = np.zeros(tokens)
                for j in range(begin, end):
                    if left is not None and i - j > left:
                        continue
                    if right is not None and j - i > right:
                        continue
                    entry = one_entry(buckets, i - j)
                    logit = scale * float(t["q"][i, n] @ t["k"][j, n // groups])
                    if "query_terms" in t:
                        logit += t["query_terms"][i, n, entry]
                    if "key_terms" in t:
                        logit += t["key_terms"][j, n, entry]
                    if cap is not None:
                        logit = cap * math.tanh(logit / cap)
                    if "alibi_slopes" in t:
                        logit -= t["alibi_slopes"][n] * abs(i - j)
                    weights[j] = math.exp(logit)
                total = weights.sum()
                if "sinks" in t:
                    total += math.exp(t["sinks"][n])
                out[i, n] = weights / total @ t["v"][:, n // groups]
                lse[i, n] = math.log(total)
    return out, lse


@pytest.mark.parametrize("feature", FEATURES)
def test_values_and_gradients(feature):
    tensors, buckets, options = make(feature)
    run, reference = ours(buckets, options), definition(buckets, options)
    for name, lengths in LENGTHS.items():
        cu = cases.prefix_sums(lengths)
        cotangents = cases.cotangents(tokens=TOKENS)
        clean = poison(tensors, *cotangents, cu, 0.0)
        expected = reference(*clean, cu)
        actual = run(*poison(*clean, cu, np.nan), cu)
        # Two sums of up to 150 terms.
        assert_matches(actual, expected, cu, 2 * RELATIVE[jnp.dtype("float32")])
        if name == "several":
            # The definition itself, against loops.
            out, lse = loops(clean[0], buckets, options, cu)
            np.testing.assert_allclose(expected[0], out, atol=5e-6)
            np.testing.assert_allclose(expected[1], lse, atol=5e-6)


def test_half_precision():
    tensors, buckets, options = make("all", "bfloat16")
    cu = cases.prefix_sums(LENGTHS["several"])
    cotangents = cases.cotangents("bfloat16", tokens=TOKENS)
    exact = {name: x.astype(np.float32) for name, x in tensors.items()}
    expected = definition(buckets, options)(*poison(exact, *cotangents, cu, 0.0), cu)
    actual = ours(buckets, options)(*poison(tensors, *cotangents, cu, 0.0), cu)
    assert actual[0].dtype == jnp.bfloat16
    assert all(grad.dtype == tensors[name].dtype for name, grad in actual[2].items())
    assert_matches(actual, expected, cu, RELATIVE[jnp.dtype("bfloat16")])


def test_other_lengths_have_the_distance_of_the_diagonal():
    """The definition also serves queries that are fewer than their keys."""
    tensors, buckets, options = make("both", tokens=20)
    zeros = np.zeros((20, cases.HEADS, cases.VALUE_DIM), np.float32)
    cu = np.array([0, 12])
    full = definition(buckets, options)(tensors, zeros, zeros[..., 0], cu)
    last = {
        name: jnp.asarray(x[7:] if name in ("q", "query_terms") else x)
        for name, x in tensors.items()
    }
    out, _ = varlen_attention_reference(
        **gather(last, buckets),
        cu_seqlens_q=jnp.array([0, 5]),
        cu_seqlens_k=jnp.asarray(cu),
        window=(None, None),
        scale=cases.HEAD_DIM**-0.5,
    )
    np.testing.assert_allclose(out[:5], full[0][7:12], atol=1e-6)


@pytest.mark.exhaustive  # the reference's gradient is what others compare with
def test_finite_differences():
    tensors, buckets, options = make("all", tokens=12)
    cu = np.array([0, 7, 12])
    rng = np.random.default_rng(3)
    weights = rng.normal(size=(12, cases.HEADS, cases.VALUE_DIM + 1))
    weights = weights.astype(np.float32)

    @jax.jit
    def loss(tensors):
        out, lse = varlen_attention(
            **gather(tensors, buckets), cu_seqlens_q=cu, return_lse=True, **options
        )
        return jnp.sum(out * weights[..., :-1]) + jnp.sum(lse * weights[..., -1])

    grads = jax.jit(jax.grad(loss))(tensors)
    step = 1e-2
    for name in ("q", "k", "query_terms", "key_terms"):
        direction = rng.normal(size=tensors[name].shape).astype(np.float32)
        ahead, behind = (
            loss(tensors | {name: tensors[name] + sign * step * direction})
            for sign in (1, -1)
        )
        np.testing.assert_allclose(
            jnp.vdot(grads[name], direction),
            (ahead - behind) / (2 * step),
            rtol=3e-3,
            atol=3e-3,
        )


@pytest.mark.parametrize("buckets", [LOGARITHMIC, LINEAR])
@pytest.mark.parametrize("shape", [(3, 7), (7, 3), (1, 1), (16, 16)])
def test_tiles(buckets, shape):
    """Any tile, also far from the diagonal, and its transpose."""
    rng = np.random.default_rng(4)
    rows, columns = shape
    by_query, by_key, gradient = (
        rng.normal(size=(2, *s)).astype(np.float32)
        for s in (
            (rows, buckets.num_entries),
            (columns, buckets.num_entries),
            (rows, columns),
        )
    )
    add = jax.jit(functools.partial(tile_bias, buckets, shape=shape))
    pull = jax.jit(lambda g, first: tile_gradient(buckets, g, first, (True, True)))
    for first in (-1000, -17, -1, 0, 5, 40, 10**6):
        entries = np.array(
            [
                [one_entry(buckets, first + r - c) for c in range(columns)]
                for r in range(rows)
            ]
        )
        expected = np.stack(
            [
                [
                    [a[r, entries[r, c]] + b[c, entries[r, c]] for c in range(columns)]
                    for r in range(rows)
                ]
                for a, b in zip(by_query, by_key, strict=True)
            ]
        )
        np.testing.assert_array_equal(add(by_query, by_key, first), expected)
        dquery, dkey = np.zeros_like(by_query), np.zeros_like(by_key)
        for r in range(rows):
            for c in range(columns):
                dquery[:, r, entries[r, c]] += gradient[:, r, c]
                dkey[:, c, entries[r, c]] += gradient[:, r, c]
        actual = pull(gradient, first)
        np.testing.assert_allclose(actual[0], dquery, atol=1e-5)
        np.testing.assert_allclose(actual[1], dkey, atol=1e-5)


ROWS = 4
CU_SEQLENS = np.array([[0, 20, 20, 33], [0, 1, 48, 48], [0, 0, 0, 0], [0, 7, 30, 40]])


def batch(kv_heads):
    """Rows of tensors for `jax.vmap`, and their bias."""
    rng = np.random.default_rng(5)
    shapes = {
        "q": (4, 8), "k": (kv_heads, 8), "v": (kv_heads, 8),
        "query_terms": (4, 16), "key_terms": (4, 16),
    }  # fmt: skip
    return {
        name: jnp.asarray(rng.normal(size=(ROWS, 48, *shape)), jnp.float32)
        for name, shape in shapes.items()
    }


def attend_rows(tensors, cu):
    return jax.vmap(
        lambda t, cu: varlen_attention(
            **gather(t, LOGARITHMIC),
            cu_seqlens_q=cu,
            window=(None, 20),
            config=XlaConfig(block_q=16, block_k=16),
        )
    )(tensors, cu)


def loss_of(attend, tensors, cu):
    out = attend(tensors, cu)
    weights = jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)
    return jnp.sum(out * weights), out


def gradients_of(attend):
    return jax.jit(jax.value_and_grad(functools.partial(loss_of, attend), has_aux=True))


@functools.cache
def row_by_row(kv_heads):
    """Values and gradients from the definition, without vmap."""

    def attend(tensors, cu):
        rows = [
            varlen_attention_reference(
                **gather(jax.tree.map(lambda x, b=b: x[b], tensors), LOGARITHMIC),
                cu_seqlens_q=cu[b],
                cu_seqlens_k=cu[b],
                window=(None, 20),
                scale=8**-0.5,
            )[0]
            for b in range(ROWS)
        ]
        return jnp.stack(rows)

    return gradients_of(attend)(batch(kv_heads), jnp.asarray(CU_SEQLENS))


def assert_trees_close(actual, expected):
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


def test_vmap_and_remat():
    expected = row_by_row(2)
    assert_trees_close(gradients_of(attend_rows)(batch(2), CU_SEQLENS), expected)
    again = jax.checkpoint(attend_rows)
    assert_trees_close(gradients_of(again)(batch(2), CU_SEQLENS), expected)


@pytest.mark.parametrize("kv_heads", [4, *exhaustive(1)])
def test_shard_map_over_heads_and_data(kv_heads):
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    specs = dict.fromkeys(batch(kv_heads), P("data", None, "tensor"))
    if kv_heads == 1:  # on every device: its gradient is summed over them
        specs |= {"k": P("data"), "v": P("data")}
    attend = jax.shard_map(
        attend_rows,
        mesh=mesh,
        in_specs=(specs, P("data")),
        out_specs=P("data", None, "tensor"),
    )
    actual = gradients_of(attend)(batch(kv_heads), CU_SEQLENS)
    assert_trees_close(actual, row_by_row(kv_heads))


@pytest.mark.parametrize("axis_type", [AxisType.Auto, *exhaustive(AxisType.Explicit)])
def test_compiler_partitioned(axis_type):
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(axis_type,) * 2)
    with jax.set_mesh(mesh):
        heads = NamedSharding(mesh, P("data", None, "tensor"))
        tensors = jax.device_put(batch(4), heads)
        cu = jax.device_put(CU_SEQLENS, NamedSharding(mesh, P("data")))
        run = gradients_of(attend_rows)
        assert_trees_close(run(tensors, cu), row_by_row(4))
        # Rows and heads stay where they are.
        assert "all-gather" not in run.lower(tensors, cu).compile().as_text()


@pytest.mark.exhaustive  # as without a bias
def test_memory_is_linear_in_the_tokens():
    def peak(tokens):
        x = jax.ShapeDtypeStruct((tokens, 2, 16), jnp.float32)
        tensors = dict.fromkeys(("q", "k", "v", "query_terms", "key_terms"), x)
        cu = jax.ShapeDtypeStruct((5,), jnp.int32)
        run = jax.jit(
            jax.grad(
                lambda t, cu: varlen_attention(
                    **gather(t, LOGARITHMIC), cu_seqlens_q=cu
                ).sum()
            )
        )
        stats = run.lower(tensors, cu).compile().memory_analysis()
        return stats.temp_size_in_bytes

    small, large = peak(2048), peak(8192)
    assert large < 6 * small
    assert large < 8192 * 8192 * 4 / 8  # an eighth of one head's scores


X = jnp.zeros((9, 2, 8))


@pytest.mark.parametrize(
    ("bias", "error", "message"),
    [
        ({}, ValueError, r"neither query_terms nor key_terms; pass None"),
        (
            {"query_terms": jnp.zeros((9, 2, 12))},
            ValueError,
            r"query_terms must have shape \(9, 2, 10\) .*, got \(9, 2, 12\)",
        ),
        (
            {"key_terms": jnp.zeros((2, 9, 2, 10))},
            ValueError,
            r"key_terms must have shape .*got \(2, 9, 2, 10\); .*leading axis of q",
        ),
        (
            {"query_terms": jnp.zeros((9, 2, 10), jnp.int32)},
            TypeError,
            r"query_terms must be floating, got int32",
        ),
    ],
)
def test_errors(no_shape_hook, bias, error, message):
    bias = RelativeBias(**bias, buckets=LINEAR)
    with pytest.raises(error, match=message):
        varlen_attention(X, X, X, np.array([0, 9]), relative_bias=bias)


def test_errors_of_the_call(no_shape_hook):
    cu = np.array([0, 9])
    bias = RelativeBias(query_terms=jnp.zeros((9, 2, 10)), buckets=LINEAR)
    with pytest.raises(ValueError, match=r"got cu_seqlens_k; leave it None"):
        varlen_attention(X, X, X, cu, cu.copy(), relative_bias=bias)
    with pytest.raises(TypeError, match=r"must be a RelativeBias, got .*Array"):
        varlen_attention(X, X, X, cu, relative_bias=X)
    bias = RelativeBias(query_terms=jnp.zeros((9, 2, 10)), buckets=5)
    with pytest.raises(TypeError, match=r"buckets must be RelativeBuckets, got int"):
        varlen_attention(X, X, X, cu, relative_bias=bias)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"span": 0}, r"span must be an integer of at least 1, got 0"),
        ({"span": 2.0}, r"span must be an integer of at least 1, got 2.0"),
        ({"span": 3, "max_distance": 9}, r"span must be at least 4 .*, got 3"),
        ({"span": 8, "max_distance": 5}, r"at least span // 2 \+ 2 = 6, got 5"),
    ],
)
def test_errors_of_buckets(no_shape_hook, fields, message):
    with pytest.raises(ValueError, match=message):
        RelativeBuckets(**fields)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_position_terms_and_their_gradients(dtype):
    tokens, heads, dim, entries, scale = 37, 3, 16, 10, 0.3
    keys = jax.random.split(jax.random.key(7), 3)
    x, positions, cotangent = (
        jax.random.normal(key, shape, jnp.dtype(dtype))
        for key, shape in zip(
            keys,
            [
                (2, tokens, heads, dim),
                (entries, heads, dim),
                (2, tokens, heads, entries),
            ],
            strict=True,
        )
    )
    out, back = jax.vjp(lambda *a: position_terms(*a, scale), x, positions)
    wide = [np.asarray(a, np.float64) for a in (x, positions, cotangent)]
    letters = ("btnh,pnh->btnp", "btnp,pnh->btnh", "btnp,btnh->pnh")
    pairs = ((wide[0], wide[1]), (wide[2], wide[1]), (wide[2], wide[0]))
    for actual, letter, pair in zip(
        (out, *back(cotangent)), letters, pairs, strict=True
    ):
        assert actual.dtype == x.dtype
        expected = scale * np.einsum(letter, *pair)
        assert relative_error(actual, expected) < RELATIVE[x.dtype]


def test_gradients_of_terms_are_products_of_the_operands_as_they_are():
    """In fp32 they would be stored at twice the size, and multiplied far slower."""
    x, positions = (
        jnp.zeros((8, 2, 16), jnp.bfloat16),
        jnp.zeros((6, 2, 16), "bfloat16"),
    )

    def gradients(x, positions, cotangent):
        return jax.vjp(lambda *a: position_terms(*a, 0.5), x, positions)[1](cotangent)

    jaxpr = jax.make_jaxpr(gradients)(x, positions, jnp.zeros((8, 2, 6), "bfloat16"))
    products = [e for e in jaxpr.eqns if e.primitive.name == "dot_general"]
    assert len(products) == 2
    for product in products:
        assert {v.aval.dtype for v in product.invars} == {jnp.dtype("bfloat16")}
