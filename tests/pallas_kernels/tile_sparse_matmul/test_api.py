"""The public product on a CPU: values, gradients, transformations, messages."""

# Wrong types are passed on purpose.

import contextlib
import functools
import logging
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch as dispatch_module
from pallas_kernels.matmul import ACTIVATIONS
from pallas_kernels.mosaic import H200, use_device
from pallas_kernels.tile_sparse_matmul import (
    TileSparse,
    reference,
    tile_sparse_matmul,
    xla,
)
from tests.pallas_kernels.tile_sparse_matmul.cases import random_weight
from tests.tolerances import RELATIVE, relative_error


P = jax.sharding.PartitionSpec
CASES = {
    "uneven": {"inputs": 96, "outputs": 48, "tile": 16, "counts": [7, 0, 96]},
    "groups": {
        "inputs": 64,
        "outputs": 40,
        "tile": 8,
        "counts": [8] * 5,
        "granularity": 8,
    },
    "last tile not full": {
        "inputs": 32,
        "outputs": 27,
        "tile": 8,
        "counts": [5, 9, 1, 32],
    },
    "columns": {
        "inputs": 48,
        "outputs": 24,
        "tile": 8,
        "counts": [9, 20, 4],
        "pruned": [0, 3, 4, 9, 22],
    },
}
LAYOUTS = [(a, b) for a in (False, True) for b in (False, True)]


def normal(seed, shape, dtype=jnp.float32):
    values = np.random.default_rng(seed).normal(size=shape)
    return jax.device_put(values.astype(dtype))


def value_and_pullback(f, cotangent, *args):
    """Of one program; one by one, its operations would be hundreds."""

    def both(*args):
        y, pullback = jax.vjp(f, *args)
        return y, pullback(cotangent)

    return jax.jit(both)(*args)


to_dense = jax.jit(TileSparse.to_dense)


@functools.partial(jax.jit, static_argnums=5)
def masked_dense(x, values, bias, w, mask, activation):
    """The independent definition: a dense layer whose weight is masked."""
    dense = jnp.where(mask, values, 0)
    z = jnp.matmul(x.astype(jnp.float32), dense, precision="highest")
    z = z if bias is None else z + bias.astype(jnp.float32)
    return z if activation is None else ACTIVATIONS[activation](z)


@pytest.mark.parametrize("tokens", [1, 160], ids=["gathered", "unpacked"])
@pytest.mark.parametrize(
    ("name", "layout"),
    [("uneven", a) for a in LAYOUTS]
    + [("columns", a) for a in LAYOUTS]
    + [("groups", (False, True)), ("last tile not full", (True, False))],
)
def test_values_and_gradients(name, tokens, layout):
    w, dense, mask = random_weight(**CASES[name])
    assert xla.gathers(w, tokens) == (tokens == 1)
    inputs, outputs = w.shape
    x, dy = normal(1, (tokens, inputs)), normal(2, (tokens, outputs))
    bias = normal(3, (outputs,))

    def ours(x, values, bias):
        x = x.T if layout[0] else x
        y = tile_sparse_matmul(
            x,
            w.with_values(values),
            bias=bias,
            activation="silu",
            feature_major=layout,
        )
        return y.T if layout[1] else y

    def plain(x, dense, bias):
        return masked_dense(x, dense, bias, w, mask, "silu")

    y, (dx, dvalues, dbias) = value_and_pullback(ours, dy, x, w.values, bias)
    want, (want_dx, want_dense, want_dbias) = value_and_pullback(
        plain, dy, x, dense, bias
    )
    assert relative_error(y, want) < 1e-5
    linear = reference.tile_sparse_matmul(x, w)
    assert relative_error(linear, np.asarray(x) @ dense) < 1e-5
    assert relative_error(dx, want_dx) < 1e-5
    assert relative_error(dbias, want_dbias) < 1e-5
    assert relative_error(to_dense(w.with_values(dvalues)), want_dense) < 1e-5
    past = np.arange(w.room) >= np.asarray(w.counts)[:, None]
    assert not np.any(np.asarray(dvalues)[past])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_narrow_types_and_activations(dtype, activation):
    w, dense, mask = random_weight(128, 48, 16, [50, 3, 128], dtype=dtype)
    x, bias = normal(1, (40, 128), dtype), normal(2, (48,), dtype)
    product = jax.jit(tile_sparse_matmul, static_argnames="activation")
    y = product(x, w, bias=bias, activation=activation)
    want = masked_dense(x, dense, bias, w, mask, activation)
    assert y.dtype == dtype
    assert relative_error(y, want) < RELATIVE[jnp.dtype(dtype)]
    plain = np.asarray(x, np.float32) @ np.asarray(to_dense(w), np.float32)
    assert relative_error(product(x, w), plain) < 2e-2


@pytest.mark.parametrize("name", ["uneven", "columns"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_through_activations(activation, dtype, name):
    """Of what is pruned as a column, too: there the bias is all there is."""
    w, dense, mask = random_weight(**CASES[name], dtype=dtype)
    inputs, outputs = w.shape
    x, dy = normal(1, (160, inputs), dtype), normal(2, (160, outputs), dtype)
    bias = normal(3, (outputs,), dtype)

    def ours(x, values, bias):
        w_ = w.with_values(values)
        return tile_sparse_matmul(x, w_, bias=bias, activation=activation)

    def plain(x, dense, bias):
        return masked_dense(x, dense, bias, w, mask, activation)

    wide = [np.asarray(a, np.float32) for a in (dy, x, dense, bias)]
    if dtype == jnp.bfloat16:  # as one program XLA lacks a layout of it on a CPU
        y, pullback = jax.vjp(ours, x, w.values, bias)
        found = pullback(dy)
    else:
        y, found = value_and_pullback(ours, dy, x, w.values, bias)
    want, expected = value_and_pullback(plain, *wide)
    dense_grad = to_dense(w.with_values(found[1]))
    bound = RELATIVE[jnp.dtype(dtype)]
    assert relative_error(y, want) < bound
    for got, wanted in zip((found[0], dense_grad, found[2]), expected, strict=True):
        assert got.dtype == dtype
        # What is rounded before may lie on the other side of a kink.
        assert relative_error(got, wanted) < 2 * bound


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_few_tokens_of_narrow_types(dtype, layout):
    """Gathered, values and gradients; XLA on a CPU knows no such batched product."""
    w, dense, mask = random_weight(128, 48, 16, [50, 3, 60], dtype=dtype)
    x, dy = normal(1, (8, 128), dtype), normal(2, (8, 48), dtype)
    assert xla.gathers(w, 8)

    def ours(x, values):
        stored = x.T if layout[0] else x
        y = tile_sparse_matmul(stored, w.with_values(values), feature_major=layout)
        return y.T if layout[1] else y

    y, (dx, dvalues) = value_and_pullback(ours, dy, x, w.values)
    wide = np.asarray(x, np.float32), np.asarray(dy, np.float32)
    bound = RELATIVE[jnp.dtype(dtype)]
    assert relative_error(y, wide[0] @ dense) < bound
    assert relative_error(dx, wide[1] @ dense.T) < bound
    want = np.where(mask, wide[0].T @ wide[1], 0)
    assert relative_error(to_dense(w.with_values(dvalues)), want) < bound


def test_chained_layers_need_no_transposes():
    up, dense_up, _ = random_weight(32, 48, 16, [8, 20, 3])
    down, dense_down, _ = random_weight(48, 24, 8, [11, 40, 2], seed=5)
    x = normal(0, (2, 3, 32))
    hidden = tile_sparse_matmul(x, up, feature_major=(False, True), activation="relu")
    assert hidden.shape == (48, 2, 3)
    y = tile_sparse_matmul(hidden, down, feature_major=(True, False))
    want = np.maximum(np.asarray(x) @ dense_up, 0) @ dense_down
    assert relative_error(y, want) < 1e-5


def test_a_pruned_weight_never_comes_back():
    w, _, mask = random_weight(32, 16, 8, [5, 12])
    x, target = normal(1, (20, 32)), normal(2, (20, 16))

    @jax.jit
    def step(values):
        def loss(values):
            return jnp.mean(
                (tile_sparse_matmul(x, w.with_values(values)) - target) ** 2
            )

        return values - 0.1 * jax.grad(loss)(values)

    values = w.values
    for _ in range(3):
        values = step(values)
    trained = w.with_values(values)
    assert np.any(np.asarray(trained.to_dense()) != np.asarray(w.to_dense()))
    assert not np.any(np.asarray(trained.to_dense())[~mask])
    TileSparse(values, w.rows, w.counts, shape=w.shape)  # still valid


def test_transformations_agree():
    pairs = [random_weight(16, 16, 8, [5, 9], seed=s) for s in range(3)]
    stacked = TileSparse.stack([w for w, _, _ in pairs])
    dense = jnp.stack([jnp.asarray(d) for _, d, _ in pairs])
    x = normal(1, (4, 6, 16))

    def loss(f, weights, x):
        y, _ = jax.lax.scan(lambda c, w: (jax.checkpoint(f)(c, w), None), x, weights)
        return jnp.sum(jnp.sin(y))

    def through(f, weights):
        grad = jax.grad(functools.partial(loss, f, weights))
        return jax.jit(jax.vmap(grad))(x)

    got = through(tile_sparse_matmul, stacked)
    assert relative_error(got, through(jnp.matmul, dense)) < 1e-5
    per_weight = jax.vmap(tile_sparse_matmul, (None, 0))(x[0], stacked)
    assert relative_error(per_weight, jnp.matmul(x[0], dense)) < 1e-5


def test_sharded_equals_unsharded():
    mesh = jax.make_mesh((4,), ("t",), axis_types=(jax.sharding.AxisType.Auto,))
    up, dense_up, _ = random_weight(32, 64, 8, [5, 9, 32, 0, 7, 7, 1, 30])
    down, dense_down, _ = random_weight(64, 24, 8, [33, 64, 5], seed=4)
    x, dy = normal(1, (20, 32)), normal(2, (20, 24))
    shards = up.shards(4, "columns"), down.shards(4, "rows")

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P(), P("t"), P("t")), out_specs=P()
    )
    def mlp(x, up, down):
        up, down = jax.tree.map(lambda leaf: leaf[0], (up, down))
        hidden = tile_sparse_matmul(x, up, activation="relu")
        return jax.lax.psum(tile_sparse_matmul(hidden, down), "t")

    def ours(x, values):
        parts = [w.with_values(v) for w, v in zip(shards, values, strict=True)]
        return mlp(x, *parts)

    def plain(x, weights):
        return jax.nn.relu(x @ weights[0]) @ weights[1]

    y, (dx, dvalues) = value_and_pullback(ours, dy, x, [w.values for w in shards])
    want, (want_dx, want_dense) = value_and_pullback(
        plain, dy, x, [dense_up, dense_down]
    )
    assert relative_error(y, want) < 1e-5
    assert relative_error(dx, want_dx) < 1e-5
    turned = [w.with_values(v) for w, v in zip(shards, dvalues, strict=True)]
    masks = [up.mask(), down.mask()]
    for grad, want_grad, keep, axis in zip(
        turned, want_dense, masks, (1, 0), strict=True
    ):
        parts = np.asarray(jax.jit(jax.vmap(TileSparse.to_dense))(grad))
        found = np.concatenate(parts, axis=axis)
        assert relative_error(found, np.where(keep, want_grad, 0)) < 1e-5


def test_mistakes_of_the_caller_are_named(no_shape_hook):
    w, _, _ = random_weight(16, 8, 4, [3, 9])
    x = normal(0, (5, 16))
    with pytest.raises(ValueError, match=r"x has shape \(5, 16\) \(feature-major\)"):
        tile_sparse_matmul(x, w, feature_major=True)
    with pytest.raises(ValueError, match="w has type float32, expected that of x"):
        tile_sparse_matmul(x.astype(jnp.bfloat16), w)
    with pytest.raises(ValueError, match=r"bias has shape \(16,\), expected \(8,\)"):
        tile_sparse_matmul(x, w, bias=jnp.zeros(16))
    with pytest.raises(ValueError, match="activation 'swish', expected None or one"):
        tile_sparse_matmul(x, w, activation="swish")
    with pytest.raises(ValueError, match=r"expected \[T, P, G\]; scan or vmap"):
        tile_sparse_matmul(x, TileSparse.stack([w, w]))
    with pytest.raises(ValueError, match="'cusparse' of tile_sparse_matmul does not"):
        tile_sparse_matmul(x, w, implementation="cusparse")
    with pytest.raises(ValueError, match="expected at least one name"):
        tile_sparse_matmul(x, w, implementation=())
    untyped: Any = tile_sparse_matmul
    with pytest.raises(TypeError, match=r"w is a .*, expected a TileSparse; pack a"):
        untyped(x, w.to_dense())
    with pytest.raises(ValueError, match=r"bias has shape \(\), expected \(8,\)"):
        untyped(x, w, bias=1.0)
    for odd in ((True, False, True), "tf!", 1):
        with pytest.raises(ValueError, match=r"feature_major .*, expected a bool, or"):
            untyped(x, w, feature_major=odd)
    with pytest.raises(ValueError, match=r"shape \(2, 1, 4\) for rows of shape \(2, "):
        tile_sparse_matmul(x, w.with_values(w.values[:, :1]))


@pytest.mark.parametrize(
    ("device", "kept", "reasons"),
    [
        (None, 64, ["needs an NVIDIA Hopper GPU", "transpose .* has no tiles"]),
        (H200, 64, ["transpose of a weight of granularity 1 .* has no tiles"]),
        (H200, 2048, ["a dense product takes .* 100% of the rows kept"]),
    ],
)
def test_why_no_kernel_runs_is_logged(device, kept, reasons, caplog, monkeypatch):
    monkeypatch.setattr(dispatch_module, "_logged", set())
    weight = np.ones((2048, 64), jnp.bfloat16)
    mask = np.repeat(np.arange(2048)[:, None] < kept, 64, axis=1)
    w = TileSparse.from_dense(weight, mask, tile=64)
    x = jax.ShapeDtypeStruct((8192, 2048), jnp.bfloat16)

    def loss(x):
        return tile_sparse_matmul(x, w).sum().astype(jnp.float32)

    caplog.set_level(logging.INFO, logger="pallas_kernels")
    with use_device(device) if device else contextlib.nullcontext():
        jax.eval_shape(jax.grad(loss), x)
    said = "\n".join(record.getMessage() for record in caplog.records)
    for reason in reasons:
        assert re.search(reason, said), said


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("device", [None, H200])
def test_no_tokens(layout, device):
    """An empty batch gives an empty one, and weights that get no gradient."""
    w, _, _ = random_weight(16, 8, 4, [3, 9])

    def run(x, values, bias):
        return tile_sparse_matmul(
            x,
            w.with_values(values),
            bias=bias,
            activation="silu",
            feature_major=layout,
        )

    x = jnp.zeros((16, 0) if layout[0] else (0, 16))
    dy = jnp.zeros((8, 0) if layout[1] else (0, 8))
    with use_device(device) if device else contextlib.nullcontext():
        y, (dx, dvalues, dbias) = value_and_pullback(run, dy, x, w.values, jnp.ones(8))
    assert y.shape == ((8, 0) if layout[1] else (0, 8))
    assert dx.shape == x.shape
    assert dvalues.shape == w.values.shape and not np.any(dvalues)
    np.testing.assert_array_equal(dbias, np.zeros(8))
    with pytest.raises(ValueError, match="expected 16 features"):
        tile_sparse_matmul(jnp.zeros((0, 17)), w)
