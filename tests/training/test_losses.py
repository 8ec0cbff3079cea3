"""The chunked loss against the log-softmax of all logits in fp32."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxscale.sharding.rules import fsdp_tp
from jaxscale.training.losses import chunked_cross_entropy


B, T, D, V = 4, 24, 16, 64
MESH = {"data": 2, "fsdp": 2, "pipe": 1, "tensor": 2}


def inputs(dtype=jnp.float32, bias=True):
    keys = jax.random.split(jax.random.key(0), 5)
    hidden = jax.random.normal(keys[0], (B, T, D), dtype)
    kernel = jax.random.normal(keys[1], (D, V), jnp.float32) / 2
    offset = jax.random.normal(keys[2], (V,), jnp.float32) if bias else None
    targets = jax.random.randint(keys[3], (B, T), 0, V)
    mask = jax.random.bernoulli(keys[4], 0.7, (B, T))
    return (hidden, kernel, offset), targets, mask


def reference(params, targets, mask, z_loss=0.0, softcap=None):
    hidden, kernel, bias = params
    logits = jnp.einsum(
        "btd,dv->btv", hidden.astype(jnp.float32), kernel, precision="highest"
    )
    if bias is not None:
        logits += bias
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    lse = jax.nn.logsumexp(logits, axis=-1)
    nll = lse - jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
    return jnp.where(mask, nll + z_loss * lse**2, 0).sum()


def ours(params, targets, mask, **options):
    hidden, kernel, bias = params
    return chunked_cross_entropy(hidden, kernel, targets, mask, bias=bias, **options)


@pytest.mark.parametrize("chunk_size", [5, 8, 100])
@pytest.mark.parametrize(
    ("z_loss", "bias", "softcap"),
    [(0.0, True, None), (0.01, False, None), (0.01, True, None), (0.01, True, 3.0)],
)
def test_value_and_gradients(chunk_size, z_loss, bias, softcap):
    params, targets, mask = inputs(bias=bias)
    expected, expected_grads = jax.value_and_grad(reference)(
        params, targets, mask, z_loss, softcap
    )

    def three_times(params):  # the cotangent of the sum is not one
        loss, sums = ours(
            params,
            targets,
            mask,
            chunk_size=chunk_size,
            z_loss=z_loss,
            softcap=softcap,
        )
        return 3 * loss, sums

    (loss, sums), grads = jax.jit(jax.value_and_grad(three_times, has_aux=True))(params)
    np.testing.assert_allclose(loss / 3, expected, rtol=1e-5)
    np.testing.assert_allclose(sums.nll + sums.z_loss, expected, rtol=1e-5)
    assert int(sums.tokens) == int(mask.sum())
    jax.tree.map(
        lambda g, e: np.testing.assert_allclose(g / 3, e, rtol=1e-4, atol=1e-5),
        grads,
        expected_grads,
    )


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_columns_behind_the_vocabulary_do_not_exist(softcap):
    (hidden, kernel, bias), targets, mask = inputs()
    targets %= 33
    options = {"chunk_size": 7, "z_loss": 0.01, "softcap": softcap}

    def results(params, **more):
        def loss(params):
            return ours(params, targets, mask, **options, **more)

        return jax.value_and_grad(loss, has_aux=True)(params)

    expected, gradients = results((hidden, kernel[:, :33], bias[:33]))
    # They would have the largest logits of all.
    long = (hidden, kernel, bias.at[33:].set(50.0))
    found, longer = results(long, vocab_size=33)
    np.testing.assert_allclose(jax.tree.leaves(found), jax.tree.leaves(expected), 1e-6)
    for got, want in zip(longer, gradients, strict=True):
        np.testing.assert_allclose(got[..., : want.shape[-1]], want, 1e-4, 1e-5)
        assert not got[..., want.shape[-1] :].any()


def test_accuracy_counts_the_largest_logit():
    params, targets, mask = inputs()
    hidden, kernel, bias = params
    best = (hidden @ kernel + bias).argmax(-1)
    targets = targets.at[:, ::3].set(best[:, ::3])
    _, sums = ours(params, targets, mask, chunk_size=7)
    assert int(sums.correct) == int(((best == targets) & mask).sum())


def test_flat_tokens_and_targets_out_of_range_where_masked():
    params, targets, mask = inputs()
    hidden, kernel, bias = params
    expected, _ = ours(params, targets, mask, chunk_size=7)
    targets = jnp.where(mask, targets, -1)
    loss, _ = chunked_cross_entropy(
        hidden.reshape(-1, D),
        kernel,
        targets.reshape(-1),
        mask.reshape(-1),
        chunk_size=10,
        bias=bias,
    )
    np.testing.assert_allclose(loss, expected, rtol=1e-6)


def test_bf16_hidden_accumulates_in_fp32():
    params, targets, mask = inputs(jnp.bfloat16)
    grad = jax.grad(lambda p: ours(p, targets, mask, chunk_size=6)[0])(params)
    expected = jax.grad(reference)(params, targets, mask)
    assert [g.dtype for g in grad] == [jnp.bfloat16, jnp.float32, jnp.float32]
    # The gradient of a logit is rounded to bf16 (2^-8) before its two products.
    for g, e in zip(grad, expected, strict=True):
        error = np.abs(np.asarray(g, np.float32) - np.asarray(e, np.float32)).max()
        assert error < 2e-2 * jnp.abs(e.astype(jnp.float32)).max()


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sharded_equals_unsharded(kind):
    params, targets, mask = inputs()
    rules = fsdp_tp()
    mesh = jax.make_mesh(tuple(MESH.values()), tuple(MESH), (kind,) * len(MESH))

    def function(params, targets, mask, rules):
        return jax.value_and_grad(
            lambda p: ours(p, targets, mask, chunk_size=5, z_loss=0.01, rules=rules),
            has_aux=True,
        )(params)

    (expected, sums), grads = function(params, targets, mask, type(rules)())
    axes = (
        (("batch", "tokens", "act_embed"), ("embed", "vocab"), ("vocab",)),
        ("batch", None),
        ("batch", None),
    )
    arrays = jax.tree.map(
        lambda x, names: jax.device_put(x, NamedSharding(mesh, rules.spec(*names))),
        (params, targets, mask),
        axes,
    )
    with jax.set_mesh(mesh):
        step = jax.jit(function, static_argnums=3)
        (loss, sharded_sums), sharded = step(*arrays, rules)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    assert int(sharded_sums.correct) == int(sums.correct)
    assert int(sharded_sums.tokens) == int(sums.tokens)
    for got, want in zip(sharded, grads, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    assert sharded[1].sharding.spec == PartitionSpec("fsdp", "tensor")


def test_inside_a_manual_region_the_caller_sums():
    params, targets, mask = inputs()
    expected, gradients = jax.value_and_grad(
        lambda p: ours(p, targets, mask, chunk_size=8)[0]
    )(params)
    mesh = jax.make_mesh((4,), ("data",), (AxisType.Auto,))
    rows, all_ = PartitionSpec("data"), PartitionSpec()

    def local(hidden, kernel, bias, targets, mask):
        loss, _ = ours(
            (hidden, kernel, bias), targets, mask, chunk_size=8, rules=fsdp_tp()
        )
        return jax.lax.psum(loss, "data")

    sharded = jax.shard_map(
        local, mesh=mesh, in_specs=(rows, all_, all_, rows, rows), out_specs=all_
    )
    loss, grads = jax.jit(jax.value_and_grad(lambda p: sharded(*p, targets, mask)))(
        params
    )
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    for got, want in zip(grads, gradients, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_no_logits_of_all_tokens_exist():
    params, targets, mask = inputs(jnp.bfloat16)
    step = jax.jit(jax.grad(lambda p: ours(p, targets, mask, chunk_size=6)[0]))
    plain = jax.jit(jax.grad(lambda p: reference(p, targets, mask)))

    def largest(function):
        text = function.lower(params).compile().as_text()
        shapes = re.findall(r"\bf32\[([\d,]+)\]", text)
        return max(np.prod([int(n) for n in s.split(",")]) for s in shapes)

    assert largest(plain) >= B * T * V  # the check sees what it should
    assert largest(step) <= B * 6 * V


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunk_size": 0}, "chunk_size 0 must be at least 1"),
        ({"z_loss": -1.0}, "z_loss -1.0 must not be negative"),
        ({"softcap": 0.0}, "softcap 0.0 must be positive and finite"),
    ],
)
def test_impossible_settings(options, message):
    params, targets, mask = inputs()
    with pytest.raises(ValueError, match=message):
        ours(params, targets, mask, **options)
