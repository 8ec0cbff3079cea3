"""Layer normalization: portable, interpreted and lowered."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dispatch import Unsupported
from pallas_kernels.layer_norm import (
    LayerNormConfig,
    layer_norm,
    reference,
)
from pallas_kernels.layer_norm.mosaic_gpu import heuristic
from pallas_kernels.layer_norm.specs import SPECS
from pallas_kernels.mosaic import H200, use_device
from tests.interpreter import interpret_mosaic_gpu
from tests.lowering import lower_for_cuda
from tests.tolerances import RELATIVE, relative_error


BF16 = jnp.dtype(jnp.bfloat16)
EPS = 1e-5
CONFIGS = {
    "direct": LayerNormConfig(),
    "two_rows": LayerNormConfig(rows=8),
}
SMALL = dataclasses.replace(H200, num_sms=2)


def operands(t, d, dtype=BF16, *, mean=0.0, bias=True, residual=True, x_bias=True):
    """x, scale, bias, residual and x_bias; the sum has this mean."""
    keys = jax.random.split(jax.random.key(t + d), 5)
    x, other = (jax.random.normal(k, (t, d)) + mean / 2 for k in keys[:2])
    scale, shift, first = (jax.random.normal(k, (d,)) for k in keys[2:])
    arrays = {
        "x": x,
        "scale": scale,
        "bias": shift if bias else None,
        "residual": other if residual else None,
        "x_bias": first if x_bias else None,
    }
    return jax.tree.map(lambda a: a.astype(dtype), arrays)


def expected(arrays):
    return reference.layer_norm(**arrays, eps=EPS)


def run(arrays, **options):
    return layer_norm(**arrays, eps=EPS, **options)


def interpreted(arrays, num_sms=2, **options):
    device = dataclasses.replace(H200, num_sms=num_sms)
    with use_device(device), interpret_mosaic_gpu(detect_races=True):
        return np.asarray(run(arrays, implementation="mosaic_gpu", **options))


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
@pytest.mark.parametrize(("bias", "residual"), [(True, True), (False, False)])
def test_portable_values_and_gradients(spec, bias, residual):
    arrays = operands(
        min(spec.t, 64), spec.d, jnp.float32, bias=bias, residual=residual
    )
    dy = jax.random.normal(jax.random.key(1), arrays["x"].shape)
    y, pullback = jax.vjp(functools.partial(run, implementation="xla"), arrays)
    want, pullback_of_definition = jax.vjp(expected, arrays)
    assert relative_error(y, want) < 1e-5
    found, wanted = pullback(dy), pullback_of_definition(dy)
    for g, w in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert relative_error(g, w) < 1e-5


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize(
    ("t", "d", "dtype", "bias", "residual"),
    [
        (4, 256, jnp.bfloat16, True, True),
        (7, 768, jnp.bfloat16, True, True),  # rows that two groups share
        (130, 384, jnp.bfloat16, False, True),  # pieces of 8 bytes
        (33, 64, jnp.float16, True, False),  # of 4
        (9, 512, jnp.float16, False, False),
        (10, 256, jnp.float32, True, True),
        (12, 1024, jnp.bfloat16, False, False),
        (4, 5120, jnp.bfloat16, True, True),  # the most columns
    ],
)
def test_interpreted_kernel(t, d, dtype, bias, residual, config):
    arrays = operands(
        t, d, dtype, bias=bias, residual=residual, x_bias=bias == residual
    )
    y = interpreted(arrays, config=config)
    assert y.shape == (t, d) and y.dtype == arrays["x"].dtype
    assert relative_error(y, expected(arrays)) < RELATIVE[jnp.dtype(dtype)]


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_rows_do_not_mix(config):
    arrays = operands(13, 256)
    bad = jnp.array([0, 5, 12])
    y = interpreted(arrays | {"x": arrays["x"].at[bad].set(jnp.nan)}, config=config)
    good = np.setdiff1d(np.arange(13), bad)
    assert np.isnan(y[bad]).all()
    np.testing.assert_array_equal(y[good], interpreted(arrays, config=config)[good])


@pytest.mark.parametrize("implementation", ["xla", "mosaic_gpu"])
def test_variance_where_the_mean_is_large(implementation):
    """A difference of mean squares would leave nothing of it in fp32."""
    arrays = operands(8, 256, jnp.float32, mean=4096.0)
    f = functools.partial(run, implementation="xla")
    y = (f if implementation == "xla" else interpreted)(arrays)
    wide = {name: np.asarray(a, np.float64) for name, a in arrays.items()}
    h = wide["x"] + wide["x_bias"] + wide["residual"]
    h = (h - h.mean(1, keepdims=True)) / np.sqrt(h.var(1, keepdims=True) + EPS)
    assert relative_error(y, h * wide["scale"] + wide["bias"]) < 1e-3


def test_the_sum_is_not_rounded():
    alone = operands(8, 256, residual=False, x_bias=False)
    x, scale = alone["x"], alone["scale"]
    arrays = alone | {
        "residual": jnp.full_like(x, 512),
        "x_bias": jnp.full_like(scale, 256),
    }
    wanted = expected(alone)  # a constant changes nothing
    assert relative_error(interpreted(arrays), wanted) < RELATIVE[BF16]
    assert relative_error(run(arrays, implementation="xla"), wanted) < RELATIVE[BF16]


@pytest.mark.parametrize("implementation", ["xla", "mosaic_gpu"])
def test_types_of_parameters_and_output_are_free(implementation):
    wide = operands(6, 256)
    wide |= {n: wide[n].astype(jnp.float32) for n in ("scale", "bias", "x_bias")}
    f = functools.partial(run, implementation="xla")
    y = (f if implementation == "xla" else interpreted)(wide, dtype=jnp.float32)
    assert y.dtype == jnp.float32
    assert relative_error(y, expected(wide)) < 1e-5


@pytest.mark.parametrize(
    ("bias", "residual"), [(True, True), (False, True), (True, False)]
)
def test_gradients_of_the_kernel(bias, residual):
    arrays = operands(6, 256, bias=bias, residual=residual, x_bias=bias)
    dy = jax.random.normal(jax.random.key(1), arrays["x"].shape)

    def loss(f, arrays):
        return jnp.vdot(f(arrays).astype(jnp.float32), dy)

    kernel = functools.partial(run, implementation="mosaic_gpu")
    with use_device(SMALL), interpret_mosaic_gpu():
        found = jax.tree.map(np.asarray, jax.grad(loss, argnums=1)(kernel, arrays))
    wide = jax.tree.map(lambda a: a.astype(jnp.float32), arrays)
    wanted = jax.grad(loss, argnums=1)(expected, wide)
    assert jax.tree.structure(found) == jax.tree.structure(arrays)
    for g, w in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert relative_error(g, w) < RELATIVE[BF16]


def test_leading_axes_and_batches_of_the_kernel():
    arrays = operands(12, 256)
    wanted = expected(arrays).reshape(2, 6, 256)
    rows = ("x", "residual")
    cut = arrays | {name: arrays[name].reshape(2, 6, 256) for name in rows}
    assert relative_error(interpreted(cut), wanted) < RELATIVE[BF16]
    kernel = functools.partial(run, implementation="mosaic_gpu")
    axes = {name: 0 if name in rows else None for name in cut}
    with use_device(SMALL), interpret_mosaic_gpu():
        y = np.asarray(jax.vmap(kernel, in_axes=(axes,))(cut))
    assert relative_error(y, wanted) < RELATIVE[BF16]


def test_kernel_in_a_checked_shard_map():
    arrays = operands(16, 256)
    dy = jax.random.normal(jax.random.key(1), arrays["x"].shape)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, whole = jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec()
    specs = {name: rows if a.ndim == 2 else whole for name, a in arrays.items()}

    def loss(arrays):
        kernel = functools.partial(run, implementation="mosaic_gpu")
        sharded = jax.shard_map(kernel, mesh=mesh, in_specs=(specs,), out_specs=rows)
        return jnp.vdot(sharded(arrays).astype(jnp.float32), dy)

    with use_device(H200):
        gradients = jax.eval_shape(jax.grad(loss), arrays)
    assert jax.tree.map(jnp.shape, gradients) == jax.tree.map(jnp.shape, arrays)


def test_two_rows_a_warp_lower():
    f = functools.partial(run, implementation="mosaic_gpu", config=CONFIGS["two_rows"])
    with use_device(H200):
        for d in (384, 768, 4096):
            arrays = jax.eval_shape(lambda d=d: operands(9984, d))
            lower_for_cuda(f, arrays, kernels=1)


def test_what_the_kernel_cannot_do_goes_to_xla():
    with use_device(H200):
        for t, d in ((3, 256), (0, 256), (8, 96), (8, 5184), (1, 768)):
            arrays = operands(t, d)
            with pytest.raises(Unsupported):
                run(arrays, implementation="mosaic_gpu")
            y = run(arrays)
            assert y.shape == (t, d)
            if t:
                assert relative_error(y, expected(arrays)) < RELATIVE[BF16]
    with pytest.raises(Unsupported, match="layer_norm"):
        run(operands(8, 256), implementation="mosaic_gpu")


def test_mistakes():
    arrays = operands(8, 4, jnp.float32)
    for name in ("scale", "bias", "residual", "x_bias"):
        with pytest.raises(ValueError, match=r"expected \[\*B, D\], \[D\]"):
            run(arrays | {name: arrays[name][:3]})
    with pytest.raises(ValueError, match="expected one type"):
        run(arrays | {"residual": arrays["residual"].astype(BF16)})
    with pytest.raises(ValueError, match="rows 6"):
        LayerNormConfig(rows=6)
    for eps in (-1e-5, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"eps .* expected zero or a positive"):
            layer_norm(**arrays, eps=eps)
    with pytest.raises(Unsupported, match="XLA takes no config"):
        run(arrays, implementation="xla", config=LayerNormConfig())


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.bool_, jnp.float8_e4m3fn])
def test_types_whose_results_would_be_truncated_are_refused(no_shape_hook, dtype):
    arrays = operands(8, 4, jnp.float32)
    for name in ("scale", "bias", "x_bias"):
        with pytest.raises(ValueError, match=f"{name} has type .* expected one of"):
            run(arrays | {name: arrays[name].astype(dtype)})
    with pytest.raises(ValueError, match=r"config 4 .*expected a LayerNormConfig"):
        run(arrays, config=4)
    rows = {name: arrays[name].astype(dtype) for name in ("x", "residual")}
    with pytest.raises(ValueError, match=r"x has type .* expected one of"):
        run(arrays | rows)
    with pytest.raises(ValueError, match=r"dtype has type .* expected one of"):
        run(arrays, dtype=dtype)


@pytest.mark.parametrize("implementation", ["xla", "mosaic_gpu"])
def test_sums_beyond_fp16(implementation):
    arrays = operands(8, 256, jnp.float16)
    arrays |= {name: arrays[name] * 15_000 for name in ("x", "residual")}
    assert float(jnp.abs(arrays["x"] + arrays["residual"]).max()) == jnp.inf
    f = functools.partial(run, implementation="xla")
    y = (f if implementation == "xla" else interpreted)(arrays)
    assert relative_error(y, expected(arrays)) < RELATIVE[jnp.dtype(jnp.float16)]


def test_the_heuristic_avoids_a_second_wave():
    rows = {t: heuristic(t, 768, H200).rows for t in (4, 4752, 4939, 5280, 9984)}
    assert rows == {4: 4, 4752: 4, 4939: 8, 5280: 8, 9984: 4}
    assert heuristic(4096, 4096, H200).rows == 4
