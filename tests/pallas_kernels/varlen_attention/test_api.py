"""The public functions: transformations, meshes, the other entrance, and errors."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.dispatch import Unsupported
from pallas_kernels.mosaic import H200, use_device
from pallas_kernels.varlen_attention import (
    XlaConfig,
    segment_ids_from_cu_seqlens,
    varlen_attention,
    varlen_attention_segment_ids,
)
from tests.tiers import exhaustive


CONFIG = XlaConfig(block_q=16, block_k=16)
CU_SEQLENS = np.array(
    [[0, 20, 20, 33, 33], [0, 1, 2, 48, 48], [0, 0, 0, 0, 0], [0, 7, 30, 31, 40]],
    np.int32,
)
ROWS, TOKENS = 4, 48


def batch(heads=4, kv_heads=2, head_dim=8, seed=0):
    rng = np.random.default_rng(seed)
    shapes = [(heads, head_dim), (kv_heads, head_dim), (kv_heads, head_dim)]
    return tuple(
        jnp.asarray(rng.normal(size=(ROWS, TOKENS, *shape)), jnp.float32)
        for shape in shapes
    )


def assert_trees_close(actual, expected, atol=2e-6):
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=atol)


def loss_of_batch(q, k, v, sinks, cu_seqlens):
    """A loss that reads both results, and both results."""
    attend = functools.partial(
        varlen_attention, causal=True, return_lse=True, config=CONFIG
    )
    out, lse = jax.vmap(lambda q, k, v, cu: attend(q, k, v, cu, sinks=sinks))(
        q, k, v, cu_seqlens
    )
    weights = jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)
    used = jnp.where(lse > -jnp.inf, lse, 0.0)
    return jnp.sum(out * weights) + jnp.sum(used * weights[..., 0]), (out, lse)


gradients = jax.value_and_grad(loss_of_batch, argnums=(0, 1, 2, 3), has_aux=True)


def loss_of_rows(q, k, v, sinks, cu_seqlens):
    """The same without `jax.vmap`."""
    out, lse = varlen_attention(
        q, k, v, cu_seqlens, sinks=sinks, causal=True, return_lse=True, config=CONFIG
    )
    weights = jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)
    used = jnp.where(lse > -jnp.inf, lse, 0.0)
    return jnp.sum(out * weights) + jnp.sum(used * weights[..., 0]), (out, lse)


@functools.cache
def expected_gradients(heads, kv_heads):
    """Row by row, without vmap."""
    q, k, v = batch(heads, kv_heads)
    sinks = jnp.linspace(-1, 1, heads, dtype=jnp.float32)

    def loss(q, k, v, sinks):
        rows = [
            varlen_attention(
                q[b], k[b], v[b], jnp.asarray(CU_SEQLENS)[b],
                sinks=sinks, causal=True, return_lse=True, config=CONFIG,
            )
            for b in range(ROWS)
        ]  # fmt: skip
        out, lse = (jnp.stack(x) for x in zip(*rows, strict=True))
        weights = jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)
        used = jnp.where(lse > -jnp.inf, lse, 0.0)
        return jnp.sum(out * weights) + jnp.sum(used * weights[..., 0]), (out, lse)

    run = jax.value_and_grad(loss, argnums=(0, 1, 2, 3), has_aux=True)
    return jax.jit(run)(q, k, v, sinks), (q, k, v, sinks, CU_SEQLENS)


def test_vmap_is_row_by_row():
    expected, arguments = expected_gradients(4, 2)
    assert_trees_close(jax.jit(gradients)(*arguments), expected)


def test_a_batch_of_rows_is_row_by_row():
    expected, arguments = expected_gradients(4, 2)
    run = jax.value_and_grad(loss_of_rows, argnums=(0, 1, 2, 3), has_aux=True)
    assert_trees_close(jax.jit(run)(*arguments), expected)


@pytest.mark.parametrize("num_keys", [TOKENS, 29])
def test_rows_without_bounds_are_one_sequence(num_keys):
    q, k, v = batch()
    k, v = k[:, :num_keys], v[:, :num_keys]
    attend = functools.partial(varlen_attention, causal=True, window=(30, None))
    bounds = [np.array([0, n], np.int32) for n in (TOKENS, num_keys)]
    want = [attend(q[0], k[0], v[0], *bounds), attend(q[1], k[1], v[1], *bounds)]
    np.testing.assert_array_equal(attend(q[0], k[0], v[0]), want[0])
    np.testing.assert_allclose(attend(q[:2], k[:2], v[:2]), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("num_keys", [TOKENS, TOKENS // 2])
def test_one_array_of_bounds_for_both_is_self_attention(num_keys):
    q, k, v = (x[0] for x in batch())

    def program(*more):
        def run(q, k, v, cu):
            return varlen_attention(q, k, v, cu, *(cu for _ in more), config=CONFIG)

        return str(jax.make_jaxpr(run)(q, k[:num_keys], v[:num_keys], CU_SEQLENS[3]))

    if num_keys == TOKENS:
        assert program("keys") == program()
    else:  # buffers of two sizes have no one packing unless it is said
        with pytest.raises(ValueError, match="cu_seqlens_k is None"):
            program()
        assert program("keys")


def test_vmap_over_one_argument():
    q, k, v = batch()
    attend = jax.jit(
        functools.partial(varlen_attention, config=CONFIG, window=(5, None))
    )
    out = jax.jit(jax.vmap(attend, in_axes=(0, None, None, None)))(
        q, k[0], v[0], CU_SEQLENS[0]
    )
    other = jax.jit(jax.vmap(attend, in_axes=(None, None, None, 0)))(
        q[0], k[0], v[0], CU_SEQLENS
    )
    for row in range(ROWS):
        one = attend(q[row], k[0], v[0], CU_SEQLENS[0])
        np.testing.assert_allclose(out[row], one, rtol=1e-5, atol=1e-6)
        one = attend(q[0], k[0], v[0], CU_SEQLENS[row])
        np.testing.assert_allclose(other[row], one, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kv_heads", [4, *exhaustive(1)])
def test_shard_map_over_heads_and_data(kv_heads):
    expected, arguments = expected_gradients(4, kv_heads)
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    heads = P("data", None, "tensor")
    # One key/value head is on every device: its gradient is summed over them.
    kv = heads if kv_heads == 4 else P("data")

    def local(q, k, v, sinks, cu):
        out, lse = jax.vmap(
            lambda q, k, v, cu: varlen_attention(
                q, k, v, cu, sinks=sinks, causal=True, return_lse=True, config=CONFIG
            )
        )(q, k, v, cu)
        return out, lse

    attend = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(heads, kv, kv, P("tensor"), P("data")),
        out_specs=(heads, heads),
    )

    def loss(q, k, v, sinks, cu):
        out, lse = attend(q, k, v, sinks, cu)
        weights = jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)
        used = jnp.where(lse > -jnp.inf, lse, 0.0)
        return jnp.sum(out * weights) + jnp.sum(used * weights[..., 0]), (out, lse)

    run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3), has_aux=True))
    assert_trees_close(run(*arguments), expected, atol=5e-6)


@pytest.mark.parametrize("axis_type", [AxisType.Explicit, *exhaustive(AxisType.Auto)])
def test_compiler_partitioned(axis_type):
    expected, arguments = expected_gradients(4, 4)
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(axis_type,) * 2)
    heads = P("data", None, "tensor")
    specs = (heads, heads, heads, P("tensor"), P("data"))
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(x, NamedSharding(mesh, spec))
            for x, spec in zip(arguments, specs, strict=True)
        ]
        actual = jax.jit(gradients)(*placed)
        compiled = jax.jit(gradients).lower(*placed).compile().as_text()
    assert_trees_close(actual, expected, atol=5e-6)
    # Rows and heads stay where they are.
    assert "all-gather" not in compiled


def test_scan_and_remat():
    q, k, v = (x[1] for x in batch(4, 4))
    cu = CU_SEQLENS[1]

    def layer(x, scale):
        return x + varlen_attention(
            x * scale, k, v, cu, causal=True, window=(9, None), config=CONFIG
        )

    def unrolled(x, scales):
        for scale in scales:
            x = layer(x, scale)
        return jnp.sum(x**2)

    def scanned(policy, x, scales):
        body = jax.checkpoint(lambda x, s: (layer(x, s), None), policy=policy)
        return jnp.sum(jax.lax.scan(body, x, scales)[0] ** 2)

    scales = jnp.linspace(0.5, 1.5, 3)
    expected = jax.jit(jax.grad(unrolled, argnums=(0, 1)))(q, scales)
    policies = jax.checkpoint_policies
    names = ("varlen_attention_out", "varlen_attention_lse")
    loops = {}
    for name, policy in {
        "recompute": None,
        "keep": policies.save_only_these_names(*names),
    }.items():
        run = jax.jit(jax.grad(functools.partial(scanned, policy), argnums=(0, 1)))
        assert_trees_close(run(q, scales), expected, atol=2e-5)
        loops[name] = str(jax.make_jaxpr(run)(q, scales)).count("while[")
    # With the residuals kept by name the forward pass does not run again.
    assert loops["keep"] < loops["recompute"]


def test_segment_ids():
    q, k, v = (x[0] for x in batch())
    cu_q, cu_k = CU_SEQLENS[0], np.array([0, 5, 9, 30, 41])
    options = {"causal": True, "sinks": jnp.ones(4), "return_lse": True}
    expected = varlen_attention(q, k, v, cu_q, cu_k, **options)
    ids = [segment_ids_from_cu_seqlens(cu, TOKENS) for cu in (cu_q, cu_k)]
    actual = jax.jit(
        lambda *ids: varlen_attention_segment_ids(q, k, v, *ids, max_seqs=4, **options)
    )(*ids)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)
    with pytest.raises(ValueError, match=r"segment ids must be below max_seqs=2"):
        varlen_attention_segment_ids(q, k, v, *ids, max_seqs=2)


def test_queries_without_keys_see_the_sink_alone():
    q, k, v = (x[0] for x in batch())
    cu_q, cu_k = np.array([0, 4, 8]), np.array([0, 0, 2])
    sinks = jnp.arange(4.0)
    out, lse = varlen_attention(
        q, k, v, cu_q, cu_k, causal=True, sinks=sinks, return_lse=True
    )
    # Two keys for four queries: causal from the bottom right hides both from the
    # first two.
    np.testing.assert_array_equal(out[:6], 0.0)
    np.testing.assert_array_equal(lse[:6], np.tile(sinks, (6, 1)))
    assert (lse[6:8] > sinks).all()
    np.testing.assert_array_equal(lse[8:], -np.inf)


def call(**changes):
    q, k, v = (x[0] for x in batch())
    arguments = {"q": q, "k": k, "v": v, "cu_seqlens_q": CU_SEQLENS[0]}
    return varlen_attention(**(arguments | changes))


X = jnp.zeros((TOKENS, 2, 8))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"cu_seqlens_q": np.array([0, 20, 50])},
            ValueError,
            r"cu_seqlens_q must end at most at num_tokens=48, got "
            r"cu_seqlens_q\[-1\]=50; raise token_budget or drop sequences",
        ),
        ({"cu_seqlens_q": np.array([1, 20])}, ValueError, r"must start at 0, .*=1"),
        (
            {"cu_seqlens_q": jnp.array([0, 20, 9])},
            ValueError,
            r"must not decrease, got cu_seqlens_q\[1\]=20 before cu_seqlens_q\[2\]=9",
        ),
        ({"cu_seqlens_q": np.array([0])}, ValueError, r"B \+ 1 >= 2 prefix sums"),
        ({"cu_seqlens_q": CU_SEQLENS}, ValueError, r"got shape \(4, 5\); batches of"),
        (
            {"cu_seqlens_q": None, "cu_seqlens_k": CU_SEQLENS[0]},
            ValueError,
            "pass both",
        ),
        ({"cu_seqlens_q": np.ones(3, np.float32)}, TypeError, r"integers, got float"),
        ({"cu_seqlens_k": np.array([0, 9])}, ValueError, r"one length, got 5 and 2"),
        ({"k": X[:9], "v": X[:9]}, ValueError, r"k has S=9 rows and q T=48"),
        ({"k": X[:, :, :4]}, ValueError, r"one head dim, got 8 and 4"),
        ({"v": X[:9]}, ValueError, r"S, K = \(48, 2\) of k .*\(9, 2, 8\) and"),
        (
            {"q": X[None]},
            ValueError,
            r"q and k must have the same leading axis or none",
        ),
        (
            {"q": X[0]},
            ValueError,
            r"q must be \[T, N, H\] or \[R, T, N, H\], got .*\(2",
        ),
        (
            {"q": jnp.zeros((TOKENS, 3, 8))},
            ValueError,
            r"N=3 must be a multiple of the number of key/value heads K=2",
        ),
        (
            {"v": X.astype(jnp.float16)},
            TypeError,
            r"one type of .*, float8_e4m3fn, got float32, float32, float16",
        ),
        ({"sinks": jnp.ones(2)}, ValueError, r"sinks .* N=4 query heads, got .*\(2,\)"),
        (
            {"alibi_slopes": jnp.ones(4, jnp.int32)},
            TypeError,
            r"alibi_slopes must be floating, got int32",
        ),
        ({"window": (-1, 0)}, ValueError, r"got left=-1; None is no limit"),
        ({"window": (0, 1.5)}, ValueError, r"got right=1.5"),
        ({"window": (1,)}, ValueError, r"must be \(left, right\), got \(1,\)"),
        ({"window": 4}, ValueError, r"must be \(left, right\), got 4"),
        ({"window": True}, ValueError, r"must be \(left, right\), got True"),
        ({"window": (True, None)}, ValueError, r"got left=True; None is no limit"),
        ({"window": (float("inf"), 0)}, ValueError, r"got left=inf; None is no limit"),
        (
            {"cu_seqlens_q": np.array([0, 20, 9], np.uint32)},
            ValueError,
            r"must not decrease, got cu_seqlens_q\[1\]=20",
        ),
        ({"q": X[..., :0], "k": X[..., :0]}, ValueError, r"got 0 and 0; expected at"),
        ({"softcap": 0.0}, ValueError, r"softcap must be positive, got 0.0"),
        ({"softcap": -1.0}, ValueError, r"softcap must be positive, got -1.0"),
        ({"softcap": float("nan")}, ValueError, r"softcap must be positive, got nan"),
        ({"softcap": True}, TypeError, r"softcap must be a number, got True"),
        ({"softcap": "1x"}, TypeError, r"softcap must be a number, got '1x'"),
        ({"scale": float("nan")}, ValueError, r"scale must be finite, got nan"),
        ({"scale": jnp.ones(2)}, TypeError, r"scale must be a number, got Array"),
        ({"implementation": "cudnn"}, ValueError, r"'cudnn' of varlen_attention"),
        ({"implementation": 3}, ValueError, r"3 of varlen_attention: expected None or"),
        (
            {"implementation": "xla", "config": "fast"},
            Unsupported,
            r"takes an XlaConfig, got config='fast'",
        ),
    ],
)
def test_errors(no_shape_hook, changes, error, message):
    with pytest.raises(error, match=message):
        call(**changes)


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        (
            [[0, 20, 48], [0, 20, 9]],
            r"decrease, got cu_seqlens_q\[1, 1\]=20 before .*=9",
        ),
        ([[0, 20, 50], [0, 20, 48]], r"num_tokens=48, got cu_seqlens_q\[0, -1\]=50"),
        ([[0, 20, 48], [3, 20, 48]], r"start at 0, got cu_seqlens_q\[1, 0\]=3"),
        ([0, 20, 48], r"for each of 2 rows, \[2, B \+ 1\], got shape \(3,\)"),
    ],
)
def test_bounds_of_a_batch_are_checked_row_by_row(no_shape_hook, bounds, message):
    q, k, v = (x[:2] for x in batch())
    with pytest.raises(ValueError, match=message):
        varlen_attention(q, k, v, np.array(bounds))


@pytest.mark.parametrize("name", ["scale", "softcap"])
def test_traced_numbers_are_named(no_shape_hook, name):
    with pytest.raises(TypeError, match=f"{name} must be known when .* is traced"):
        jax.jit(lambda value: call(**{name: value}))(0.5)


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        (np.zeros(TOKENS, np.float32), TypeError, r"must be integers, got float32"),
        (np.arange(TOKENS)[::-1].astype(np.uint8), ValueError, r"got 47 before 46"),
        (np.zeros((1, TOKENS), np.int32), ValueError, r"got shape \(1, 48\)"),
    ],
)
def test_segment_id_errors(no_shape_hook, ids, error, message):
    q, k, v = (x[0] for x in batch())
    with pytest.raises(error, match=message):
        varlen_attention_segment_ids(q, k, v, ids, max_seqs=TOKENS)
    with pytest.raises(ValueError, match=r"segment_ids_k is None but k has S=9 rows"):
        varlen_attention_segment_ids(q, k[:9], v[:9], ids, max_seqs=TOKENS)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"max_seqs": 2.5}, TypeError, r"max_seqs must be an integer, got 2.5"),
        ({"max_seqs": 0}, ValueError, r"max_seqs must be at least 1, got 0"),
        ({"q": jnp.float32(1)}, ValueError, r"q must be \[T, N, H\] .*shape \(\)"),
    ],
)
def test_errors_of_the_other_entrance(no_shape_hook, changes, error, message):
    q, k, v = (x[0] for x in batch())
    ids = np.zeros(TOKENS, np.int32)
    arguments = {"q": q, "k": k, "v": v, "segment_ids_q": ids, "max_seqs": 1}
    with pytest.raises(error, match=message):
        varlen_attention_segment_ids(**(arguments | changes))


@pytest.mark.parametrize("size", [TOKENS + 9, 2**31 - 1, 2**40])
def test_a_window_wider_than_the_buffers_is_no_limit(size):
    q, k, v = (x[0] for x in batch())
    cu_q, cu_k = np.array([0, 20, 48]), np.array([0, 2, 9])
    attend = functools.partial(varlen_attention, q, k[:9], v[:9], cu_q, cu_k)
    for wide, none in [
        ((size, 3), (None, 3)),
        ((3, size), (3, None)),
        ((size, size), (None, None)),
    ]:
        np.testing.assert_array_equal(attend(window=wide), attend(window=none))


@pytest.mark.parametrize("beyond", [[0, 20, 55], [0, 50, 90], [0, 20, 40, 100, 100]])
def test_traced_bounds_past_the_buffers_are_cut(beyond):
    q, k, v = (x[0] for x in batch())

    def loss(q, k, v, cu):
        # Blocks that do not divide the tokens, so that the last one has padding.
        config = XlaConfig(block_q=40, block_k=40)
        out, lse = varlen_attention(q, k, v, cu, return_lse=True, config=config)
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.where(lse > -jnp.inf, lse, 0.0))

    run = jax.value_and_grad(loss, (0, 1, 2))
    cut = np.minimum(beyond, TOKENS)
    assert_trees_close(jax.jit(run)(q, k, v, np.array(beyond)), run(q, k, v, cut))


def test_config_errors(no_shape_hook):
    with pytest.raises(ValueError, match="block_q must be at least 1, got 0"):
        dataclasses.replace(CONFIG, block_q=0)
    with pytest.raises(ValueError, match=r"block_k must be an integer, got 16\.0"):
        dataclasses.replace(CONFIG, block_k=16.0)


def test_blocks_suit_the_device():
    q, k, v = (jnp.zeros((2048, 1, 8)) for _ in range(3))
    cu = np.array([0, 2048])

    def largest_scores():
        def traced_anew(*args):
            return varlen_attention(*args)

        text = str(jax.make_jaxpr(traced_anew)(q, k, v, cu))
        return max(n for n in (128, 512) if f"f32[1,1,1,{n},{n}]" in text)

    assert largest_scores() == 128
    with use_device(H200):
        assert largest_scores() == 512
