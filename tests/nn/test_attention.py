"""Attention against a loop over heads and queries in fp64."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxscale import sharding
from jaxscale.nn import (
    Attention,
    AttentionConfig,
    RopeConfig,
    attention,
    attention_state,
)
from pallas_kernels.dispatch import Unsupported
from tests.tolerances import RELATIVE, relative_error


RNG = np.random.default_rng(0)


def reference(q, k, v, *, causal, window=(None, None), scale=None, softcap=None):
    """Head by head and query by query, in fp64, keys of a group repeated."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    batch, num_q, heads, dim = q.shape
    num_k, groups = k.shape[1], heads // k.shape[2]
    scale = dim**-0.5 if scale is None else scale
    out = np.zeros((batch, num_q, heads, dim))
    for b, i, n in np.ndindex(batch, num_q, heads):
        position = i + num_k - num_q
        keys = [
            j
            for j in range(num_k)
            if not (causal and j > position)
            and (window[0] is None or position - j <= window[0])
            and (window[1] is None or j - position <= window[1])
        ]
        scores = k[b, keys, n // groups] @ q[b, i, n] * scale
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        weights = np.exp(scores - scores.max())
        out[b, i, n] = weights / weights.sum() @ v[b, keys, n // groups]
    return out


def inputs(num_q=12, num_k=12, dtype=jnp.float32, batch=2):
    shapes = [(batch, num_q, 4, 8), (batch, num_k, 2, 8), (batch, num_k, 2, 8)]
    return [jnp.asarray(2 * RNG.normal(size=shape), dtype) for shape in shapes]


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"causal": False},
        {"causal": True, "window": (3, 0)},
        {"causal": False, "window": (3, 1)},
        {"causal": True, "window": (0, None)},
        {"causal": True, "scale": 0.7},
        {"causal": True, "softcap": 1.5},
        {"causal": False, "window": (None, 2), "softcap": 1.5},
    ],
)
def test_dense_attention(options):
    q, k, v = inputs()
    error = relative_error(attention(q, k, v, **options), reference(q, k, v, **options))
    assert error < RELATIVE[jnp.dtype("float32")]


def test_the_last_query_sees_the_last_key_when_there_are_more_keys():
    q, k, v = inputs(num_q=5)
    actual = attention(q, k, v, causal=True, window=(4, 0))
    expected = reference(q, k, v, causal=True, window=(4, 0))
    assert relative_error(actual, expected) < RELATIVE[jnp.dtype("float32")]


def test_bf16():
    q, k, v = inputs(dtype=jnp.bfloat16)
    actual = attention(q, k, v, causal=True)
    assert actual.dtype == jnp.bfloat16
    expected = reference(*(x.astype(jnp.float32) for x in (q, k, v)), causal=True)
    assert relative_error(actual, expected) < RELATIVE[jnp.dtype("bfloat16")]


@pytest.mark.parametrize("softcap", [None, 1.5])
def test_packed_sequences_attend_to_themselves(softcap):
    q, k, v = inputs()
    bounds = jnp.array([[0, 5, 5, 11], [0, 1, 12, 12]])
    options = {"causal": True, "window": (3, 0), "softcap": softcap}

    def packed(q, k, v):
        return attention(q, k, v, cu_seqlens=bounds, **options)

    def apart(q, k, v):
        out = jnp.zeros_like(q)
        for b, row in enumerate(np.asarray(bounds)):
            for begin, end in itertools.pairwise(row):
                if end > begin:
                    at = slice(begin, end)
                    one = [x[b : b + 1, at] for x in (q, k, v)]
                    out = out.at[b, at].set(attention(*one, **options)[0])
        return out

    weights = jnp.asarray(RNG.normal(size=q.shape), jnp.float32)
    actual, pull = jax.vjp(jax.jit(packed), q, k, v)
    expected, pull_apart = jax.vjp(jax.jit(apart), q, k, v)
    assert relative_error(actual, expected) < 1e-5
    assert (actual[0, 11:] == 0).all()
    for grad, grad_apart in zip(pull(weights), pull_apart(weights), strict=True):
        assert relative_error(grad, grad_apart) < 1e-5


def test_chunks_attend_to_what_lies_before_them():
    # Queries of 2 and 3 tokens at the ends of sequences of 7 and 3 keys, one row; in
    # the other one sequence, whose chunk is all of it.
    q, k, v = inputs(num_q=6, num_k=12)
    cu_q, cu_k = jnp.array([[0, 2, 5], [0, 0, 6]]), jnp.array([[0, 7, 10], [0, 0, 6]])
    options = {"causal": True, "window": (3, 0)}
    actual = jax.jit(
        lambda *a: attention(*a[:3], cu_seqlens=a[3], cu_seqlens_k=a[4], **options)
    )(q, k, v, cu_q, cu_k)
    expected = np.zeros(q.shape)
    for b in range(2):
        spans = zip(*(itertools.pairwise(cu[b]) for cu in (cu_q, cu_k)), strict=True)
        for at_q, at_k in spans:
            at_q, at_k = slice(*map(int, at_q)), slice(*map(int, at_k))
            parts = q[b : b + 1, at_q], k[b : b + 1, at_k], v[b : b + 1, at_k]
            expected[b, at_q] = reference(*parts, **options)[0]
    assert relative_error(actual, expected) < 1e-5


def test_gradients_of_dense_attention_equal_differences():
    q, k, v = inputs(num_q=4, num_k=4, batch=1)
    weights = RNG.normal(size=q.shape)

    def loss(q, k, v):
        return (attention(q, k, v, causal=True) * weights.astype(np.float32)).sum()

    grads = jax.grad(loss, argnums=(0, 1, 2))(q, k, v)
    for i, grad in enumerate(grads):
        direction = RNG.normal(size=grad.shape)
        ends = []
        for sign in (1, -1):
            args = [np.asarray(x, np.float64) for x in (q, k, v)]
            args[i] = args[i] + sign * 1e-5 * direction
            ends.append((reference(*args, causal=True) * weights).sum())
        difference = (ends[0] - ends[1]) / 2e-5
        np.testing.assert_allclose((grad * direction).sum(), difference, rtol=1e-4)


def test_what_cannot_be_done_is_said(no_shape_hook):
    q, k, v = inputs()
    with pytest.raises(ValueError, match="q has 3 heads, no multiple of the 2"):
        attention(q[:, :, :3], k, v)
    bounds = jnp.array([[0, 5]] * 2)
    with pytest.raises(ValueError, match="cu_seqlens_k is None but k has S=12"):
        attention(q[:, :5], k, v, cu_seqlens=bounds)
    with pytest.raises(ValueError, match="cu_seqlens None, but cu_seqlens_k is given"):
        attention(q[:, :5], k, v, cu_seqlens_k=bounds)
    with pytest.raises(Unsupported, match="cudnn attention needs bf16 or fp16"):
        attention(q, k, v, implementation="cudnn")
    with pytest.raises(ValueError, match="nonesuch"):
        attention(q, k, v, implementation="nonesuch")


def test_the_layer_rotates_projects_and_windows():
    config = AttentionConfig(
        num_heads=4, num_kv_heads=2, head_dim=8, rope=RopeConfig(), window=3
    )
    layer = Attention(16, config, rngs=nnx.Rngs(0))
    x = 20 * RNG.normal(size=(1, 9, 16)).astype(np.float32)
    kernels = [np.asarray(p.kernel[...]) for p in (layer.query, layer.key, layer.value)]
    q, k, v = ((x @ kernel).reshape(1, 9, -1, 8) for kernel in kernels)
    inv_freq = 10_000.0 ** (-np.arange(4) / 4)
    turn = np.exp(1j * np.arange(9)[:, None, None] * inv_freq)

    def rotated(x):
        z = (x[..., :4] + 1j * x[..., 4:]) * turn
        return np.concatenate([z.real, z.imag], -1)

    out = reference(rotated(q), rotated(k), v, causal=True, window=(2, 0))
    expected = out.reshape(1, 9, 32) @ np.asarray(layer.out.kernel[...])
    actual = layer(jnp.asarray(x), attention_state((1, 9)))[0]
    assert relative_error(actual, expected) < 1e-4


def test_impossible_heads_are_refused():
    with pytest.raises(ValueError, match="num_heads 4 must be a multiple of num_kv"):
        AttentionConfig(num_heads=4, num_kv_heads=3, head_dim=8)
    with pytest.raises(ValueError, match="head_dim 0 must be positive"):
        AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=0)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("head_dim", "options"),
    [
        (64, {"causal": True}),
        (128, {"causal": True}),
        (128, {"causal": True, "window": (99, 0)}),
        (128, {"causal": False}),
        (80, {"causal": True, "implementation": "cudnn"}),
    ],
)
def test_cudnn_equals_the_formula(head_dim, options):
    shapes = [(2, 300, 8, head_dim), (2, 300, 2, head_dim), (2, 300, 2, head_dim)]
    inputs = [jnp.asarray(RNG.normal(size=shape), jnp.bfloat16) for shape in shapes]
    weights = jnp.asarray(RNG.normal(size=shapes[0]), jnp.float32)

    def loss(q, k, v, **options):
        out = attention(q, k, v, **options).astype(jnp.float32)
        return (out * weights).sum(), out

    run = jax.jit(
        jax.grad(loss, argnums=(0, 1, 2), has_aux=True),
        static_argnames=("causal", "window", "implementation"),
    )
    assert "cudnn" in run.lower(*inputs, **options).as_text()
    actual = run(*inputs, **options)
    exact = [x.astype(jnp.float32) for x in inputs]
    with jax.default_matmul_precision("highest"):
        expected = run(*exact, **{**options, "implementation": "xla"})
    for ours, theirs in zip(
        jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True
    ):
        assert relative_error(ours, theirs) < RELATIVE[jnp.dtype("bfloat16")]


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_fewer_key_heads_than_devices(kind):
    # Key heads are copied, query heads split: each must still read its own key head.
    # There is no `jax.set_mesh`: the mesh is that of the parameters.
    config = AttentionConfig(num_heads=8, num_kv_heads=2, head_dim=8)
    mesh = sharding.make_mesh(sharding.MeshConfig(data=2, tensor=4, axis_type=kind))
    rules = dataclasses.replace(sharding.fsdp_tp(), act_kv_heads=None)
    x = jnp.asarray(RNG.normal(size=(2, 8, 32)), jnp.float32)
    state = attention_state((2, 8))

    def make(rules):
        init = jax.nn.initializers.normal(1.0)
        return Attention(32, config, out_init=init, rules=rules, rngs=nnx.Rngs(0))

    @jax.jit
    def value_and_grad(layer, x):
        return jax.value_and_grad(lambda m: (m(x, state)[0] ** 2).sum())(layer)

    expected, expected_gradients = value_and_grad(make(sharding.REPLICATED), x)
    layer = sharding.place(make(rules), mesh, rules)
    value, gradients = value_and_grad(layer, x)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for got, want in zip(
        jax.tree.leaves(gradients), jax.tree.leaves(expected_gradients), strict=True
    ):
        assert relative_error(got, want) < 1e-4
