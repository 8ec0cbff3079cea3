"""The public matrix product on a CPU: values, gradients, transformations, messages."""

import contextlib
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import tuned_configs
from pallas_kernels.dispatch import Unsupported
from pallas_kernels.matmul import MatmulConfig, dense, matmul, reference
from pallas_kernels.matmul.specs import SPECS
from pallas_kernels.mosaic import H200, use_device
from pallas_kernels.tile_sparse_matmul import xla as sparse_xla
from tests.tolerances import RELATIVE, relative_error


P = jax.sharding.PartitionSpec


def operands(m, n, k, dtype, seed=0):
    keys = jax.random.split(jax.random.key(seed), 3)
    return (
        jax.random.normal(keys[0], (m, k), dtype),
        jax.random.normal(keys[1], (k, n), dtype),
        jax.random.normal(keys[2], (m, n), dtype),
    )


def gradients(f, x, w, dy):
    _, pullback = jax.vjp(f, x, w)
    return pullback(dy)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_values_and_gradients_of_every_spec(spec):
    # A hundredth of the size: XLA's algorithm does not depend on it.
    x, w, dy = operands(
        max(spec.m // 64, 3), spec.n // 64, spec.k // 64, jnp.bfloat16, spec.m
    )
    tolerance = RELATIVE[jnp.dtype(jnp.bfloat16)]
    assert relative_error(matmul(x, w), reference.matmul(x, w)) < tolerance
    wide = gradients(reference.matmul, x, w, dy.astype(jnp.float32))
    for got, want in zip(gradients(matmul, x, w, dy), wide, strict=True):
        assert got.dtype == jnp.bfloat16
        assert relative_error(got, want) < tolerance


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("rhs_transposed", [False, True])
def test_types_and_storage(dtype, rhs_transposed):
    x, w, dy = operands(24, 40, 56, dtype)
    stored = w.T if rhs_transposed else w
    f = functools.partial(matmul, rhs_transposed=rhs_transposed)
    assert f(x, stored).dtype == dtype
    assert (
        relative_error(f(x, stored), reference.matmul(x, w))
        < RELATIVE[jnp.dtype(dtype)]
    )
    dx, dw = gradients(f, x, stored, dy)
    want_dx, want_dw = gradients(reference.matmul, x, w, dy.astype(jnp.float32))
    want_dw = want_dw.T if rhs_transposed else want_dw
    assert relative_error(dx, want_dx) < RELATIVE[jnp.dtype(dtype)]
    assert relative_error(dw, want_dw) < RELATIVE[jnp.dtype(dtype)]


def test_wide_output_keeps_the_sums():
    x, w, _ = operands(16, 24, 4096, jnp.bfloat16)
    y = matmul(x, w, out_dtype=jnp.float32)
    assert y.dtype == jnp.float32
    assert relative_error(y, reference.matmul(x, w)) < 1e-5


@pytest.mark.parametrize(
    ("dtype", "out_dtype"),
    [(jnp.bfloat16, jnp.float16), (jnp.float16, jnp.bfloat16)],
)
def test_another_narrow_output_is_rounded_from_fp32(dtype, out_dtype):
    x, w, _ = operands(16, 24, 4096, dtype)
    y = matmul(x, w, out_dtype=out_dtype)
    assert y.dtype == out_dtype
    exact = reference.matmul(x, w).astype(out_dtype)
    assert np.mean(np.asarray(y) == np.asarray(exact)) > 0.98


@pytest.mark.parametrize("device", [None, H200])
def test_empty_products(device):
    def run(x, w):
        y, pullback = jax.vjp(matmul, x, w)
        return y, *pullback(jnp.ones_like(y))

    for m, k, n in ((3, 0, 4), (0, 3, 4), (3, 4, 0)):
        x, w, _ = operands(m, n, k, jnp.float32)
        with use_device(device) if device else contextlib.nullcontext():
            y, dx, dw = run(x, w)
        assert (y.shape, dx.shape, dw.shape) == ((m, n), (m, k), (k, n))
        assert not np.any(y) and not np.any(dx) and not np.any(dw)


def test_leading_axes_are_rows():
    x, w, _ = operands(24, 8, 16, jnp.float32)
    y = matmul(x.reshape(2, 3, 4, 16), w)
    assert y.shape == (2, 3, 4, 8)
    np.testing.assert_array_equal(y.reshape(24, 8), matmul(x, w))


def test_transformations_agree():
    x, w, _ = operands(24, 16, 16, jnp.float32)

    def through(f):
        def loss(x, w):
            y, _ = jax.lax.scan(lambda c, _: (f(c, w), None), x, None, length=3)
            return jnp.sum(jnp.sin(y))

        return jax.jit(jax.vmap(jax.grad(loss, (0, 1)), (0, None)))(
            x.reshape(4, 6, 16), w
        )

    got = through(jax.checkpoint(matmul))
    want = through(reference.matmul)
    for g, r in zip(got, want, strict=True):
        assert relative_error(g, r) < 1e-5


def test_gradients_under_shard_map_are_summed():
    mesh = jax.make_mesh((4,), ("t",), axis_types=(jax.sharding.AxisType.Auto,))
    x, w, _ = operands(32, 16, 24, jnp.float32)

    def loss(f, x, w):
        return jnp.sum(jnp.sin(f(x, w)))

    rows = jax.shard_map(matmul, mesh=mesh, in_specs=(P("t"), P()), out_specs=P("t"))
    got = jax.jit(jax.grad(functools.partial(loss, rows), (0, 1)))(x, w)
    want = jax.grad(functools.partial(loss, reference.matmul), (0, 1))(x, w)
    for g, r in zip(got, want, strict=True):
        assert relative_error(g, r) < 1e-5


def test_mistakes_of_the_caller_are_named():
    x, w, _ = operands(8, 16, 24, jnp.float32)
    with pytest.raises(ValueError, match=r"w has shape \(16, 24\).* expected 24 input"):
        matmul(x, w.T)
    with pytest.raises(ValueError, match=r"w has type bfloat16, expected .* float32"):
        matmul(x, w.astype(jnp.bfloat16))
    with pytest.raises(ValueError, match="'cublas' of matmul does not exist"):
        matmul(x, w, implementation="cublas")


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_sums_are_fp32_whatever_follows(dtype):
    """XLA on a CPU merges a transpose into a product, which then sums in `dtype`."""
    x, w, dy = operands(64, 96, 4096, dtype)
    want = reference.matmul(x, w)
    tolerance = 2 * float(jnp.finfo(dtype).eps)
    found = {
        "matmul": matmul,
        "dense": lambda x, w: dense(x, [w], [jnp.zeros(96, dtype)])[0],
        "tile_sparse": xla_dense,
    }
    for name, f in found.items():
        y = jax.jit(lambda x, w, f=f: f(x, w).T)(x, w).T
        assert relative_error(y, want) < tolerance, name
    # Sums over 4,096 columns.
    wide = jax.random.normal(jax.random.key(1), (96, 4096), dtype)
    dy = jax.random.normal(jax.random.key(2), (64, 4096), dtype)

    def input_gradient(x):
        return gradients(matmul, x, wide, dy)[0].T

    want = reference.matmul(dy, wide.T)
    y = jax.jit(input_gradient)(jnp.zeros((64, 96), dtype)).T
    assert relative_error(y, want) < tolerance


def xla_dense(x, w):
    majors = {"feature_major": (False, False), "out_dtype": x.dtype}
    return sparse_xla.dense_matmul(x, w, **majors)


@pytest.mark.parametrize(
    "dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int8, jnp.complex64]
)
def test_types_without_right_gradients_are_refused(no_shape_hook, dtype):
    x, w, _ = operands(8, 16, 24, jnp.float32)
    with pytest.raises(ValueError, match=r"x has type .*, expected one of .*bfloat16"):
        matmul(x.astype(dtype), w.astype(dtype))
    with pytest.raises(ValueError, match=r"out_dtype has type .*, expected one of"):
        matmul(x, w, out_dtype=dtype)
    with pytest.raises(ValueError, match=r"x has type .*, expected one of"):
        dense(x.astype(dtype), [w.astype(dtype)], [jnp.ones(16, dtype)])


def test_configs_of_another_op_are_refused(no_shape_hook):
    x, w, _ = operands(8, 16, 24, jnp.float32)
    wrong: Any = 128
    with pytest.raises(ValueError, match=r"config 128 .*expected a MatmulConfig"):
        matmul(x, w, config=wrong)


def test_operands_that_are_no_matrices(no_shape_hook):
    x, w, _ = operands(8, 16, 24, jnp.float32)
    with pytest.raises(ValueError, match=r"x has shape \(24,\).*\[\*B, M, K\]"):
        matmul(x[0], w)
    with pytest.raises(ValueError, match=r"w \(1, 24, 16\).*jax.vmap"):
        matmul(x, w[None])


def test_a_config_is_never_ignored():
    x, w, _ = operands(64, 64, 64, jnp.bfloat16)
    with pytest.raises(Unsupported, match=r"XLA takes no config, got MatmulConfig"):
        matmul(x, w, implementation="xla", config=MatmulConfig())
    with pytest.raises(ExceptionGroup, match=r"(?s)needs .* Hopper .*takes no config"):
        matmul(x, w, config=MatmulConfig())
    # A small problem, for which XLA would be preferred.
    with use_device(H200), tuned_configs.override("matmul", MatmulConfig()):
        assert "dot_general" not in str(jax.make_jaxpr(lambda *a: matmul(*a))(x, w))
    with tuned_configs.override("matmul", MatmulConfig()):
        assert relative_error(matmul(x, w), reference.matmul(x, w)) < 2e-2
    with use_device(H200):
        assert "dot_general" in str(jax.make_jaxpr(lambda *a: matmul(*a))(x, w))
        text = str(
            jax.make_jaxpr(functools.partial(matmul, config=MatmulConfig()))(x, w)
        )
    assert "dot_general" not in text


def test_the_kernel_says_what_it_needs():
    x, w, _ = operands(64, 64, 64, jnp.bfloat16)
    with pytest.raises(Unsupported, match="needs an NVIDIA Hopper GPU"):
        matmul(x, w, implementation="mosaic_gpu")
    with use_device(H200):
        with pytest.raises(Unsupported, match=r"n=40.* multiple of 64.*pad"):
            matmul(x, w[:, :40], implementation="mosaic_gpu")
        with pytest.raises(Unsupported, match="k=40"):
            matmul(x[:, :40], w[:40], implementation="mosaic_gpu")
        with pytest.raises(Unsupported, match=r"float32.*bfloat16 or float16"):
            matmul(
                x.astype(jnp.float32),
                w.astype(jnp.float32),
                implementation="mosaic_gpu",
            )
        with pytest.raises(Unsupported, match=r"bytes of shared memory.*fewer stages"):
            matmul(x, w, implementation="mosaic_gpu", config=MatmulConfig(stages=9))
        with pytest.raises(ExceptionGroup, match="no implementation of matmul"):
            matmul(x[:, :40], w[:40], implementation=["mosaic_gpu"])


def test_none_works_where_the_kernel_does_not():
    x, w, _ = operands(64, 40, 24, jnp.bfloat16)
    with use_device(H200):
        y = matmul(x, w)
    assert relative_error(y, reference.matmul(x, w)) < 2e-2


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("tile_m", 96, "tile_m 96, expected a positive multiple of 64"),
        ("tile_m", 64, "tile_m 64, expected a multiple of 128 with split='m'"),
        ("tile_n", 384, "tile_n 384, expected at most 320"),
        ("tile_m", 256, "tile_m 256 x tile_n 256.*registers"),
        ("stages", 1, "stages 1, expected at least 2"),
        ("group", 0, "group 0, expected at least 1"),
        ("tile_k", 64.0, "tile_k 64.0, expected an integer"),
        ("stages", "4", "stages '4', expected an integer"),
    ],
)
def test_impossible_configs_are_refused(no_shape_hook, field, value, message):
    with pytest.raises(ValueError, match=message):
        MatmulConfig(**{field: value})
