"""The product of scaled 8-bit operands, and their rounding, on a CPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.mosaic import H200, use_device
from pallas_kernels.scaled_matmul import (
    mosaic_gpu,
    quantize_fp8,
    reference,
    scaled_matmul,
    xla,
)
from tests.tolerances import RELATIVE, relative_error


E4M3, E5M2 = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2)
P = jax.sharding.PartitionSpec


def operands(m, n, k, types=(E4M3, E4M3), axes=(-1, None)):
    """Rows of very different size, rounded: a, b and their scales."""
    keys = jax.random.split(jax.random.key(m + n + k), 4)
    found = []
    for i, (rows, dtype, axis) in enumerate(zip((m, n), types, axes, strict=True)):
        size = jnp.exp(jax.random.normal(keys[2 + i], (rows, 1)))
        x = size * jax.random.normal(keys[i], (rows, k))
        found.append(quantize_fp8(x, dtype, axis=axis))
    (a, a_scale), (b, b_scale) = found
    return a, b, a_scale, b_scale


@pytest.mark.parametrize("types", [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)])
@pytest.mark.parametrize("axes", [(None, None), (-1, -1), (None, -1)])
def test_xla_equals_the_reference(types, axes):
    a, b, a_scale, b_scale = operands(6, 40, 24, types, axes)
    a = a.reshape(2, 3, 24)
    a_scale = a_scale.reshape(2, 3) if a_scale.ndim else a_scale
    want = reference.scaled_matmul(a, b, a_scale, b_scale)
    for out_dtype in (jnp.bfloat16, jnp.float32):
        y = scaled_matmul(a, b, a_scale, b_scale, out_dtype=out_dtype)
        assert y.dtype == out_dtype
        assert relative_error(y, want) < RELATIVE[y.dtype]


@pytest.mark.parametrize(("dtype", "step"), [(E4M3, 2**-4), (E5M2, 2**-3)])
@pytest.mark.parametrize("axis", [None, -1, 0])
def test_rounding_uses_the_whole_range(dtype, step, axis):
    x = jax.random.normal(jax.random.key(0), (5, 64)) * jnp.array(
        [[1e-6], [1.0], [3e4], [1.0], [1.0]]
    )
    q, scale = quantize_fp8(x, dtype, axis=axis)
    wide = np.asarray(q, np.float32)
    assert scale.shape == (() if axis is None else (5,) if axis == -1 else (64,))
    top = np.abs(wide).max(axis=axis)
    np.testing.assert_array_equal(top, np.full(top.shape, jnp.finfo(dtype).max))
    spread = scale if axis is None else jnp.expand_dims(scale, axis)
    # Half a unit in the last place, and below the least number an absolute bound.
    least = float(jnp.finfo(dtype).smallest_subnormal)
    bound = np.maximum(np.abs(x) * step, least * np.asarray(spread)) * 1.001
    assert np.all(np.abs(wide * spread - x) <= bound)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_numbers_that_are_none_are_rounded_too(dtype):
    x = jnp.array(
        [[0.0, 0.0], [jnp.inf, 2.0], [-jnp.inf, jnp.inf], [jnp.nan, 1.0], [1e-44, 0.0]]
    )
    q, scale = jax.jit(lambda x: quantize_fp8(x, dtype, axis=-1))(x)
    top = float(jnp.finfo(dtype).max)
    wide = np.asarray(q, np.float32)
    np.testing.assert_array_equal(
        wide[:4], [[0, 0], [top] * 2, [-top, top], [np.nan, top]]
    )
    assert np.isfinite(wide[4]).all() and np.isfinite(scale).all() and scale.min() > 0
    assert scale[0] == scale[2] == 1
    empty, scale = quantize_fp8(jnp.zeros((0, 3)), dtype)
    assert empty.shape == (0, 3) and scale == 1


def test_half_precision_is_rounded_from_its_own_values():
    x = jnp.array([65504.0, 1.0, -3.0], jnp.float16)
    q, scale = quantize_fp8(x, E5M2)
    np.testing.assert_allclose(q.astype(jnp.float32) * scale, x, rtol=2**-3)


def test_a_device_multiplies_its_rows_on_explicit_axes():
    mesh = jax.make_mesh((2,), ("t",), axis_types=(jax.sharding.AxisType.Explicit,))
    a, b, a_scale, b_scale = operands(4, 32, 16, axes=(None, -1))
    want = reference.scaled_matmul(a, b, a_scale, b_scale)
    with jax.set_mesh(mesh):
        b, b_scale = jax.device_put(b, P("t")), jax.device_put(b_scale, P("t"))
        a, a_scale = (jax.device_put(x, P()) for x in (a, a_scale))
        y = jax.jit(scaled_matmul)(a, b, a_scale, b_scale)
    assert y.sharding.spec == P(None, "t")
    assert relative_error(y, want) < RELATIVE[y.dtype]


@pytest.mark.parametrize("n", [192, 256])
def test_squares_may_lie_across_the_columns_of_two_devices(monkeypatch, n):
    """The kernel reads one scale of a square, and takes squares to begin at zero."""
    squares = []

    def kernel(a, b, a_scale, b_scale, *, square, out_dtype, **_):
        squares.append(square)
        if square:
            b_scale = jnp.repeat(b_scale[::128], 128, axis=0)[: len(b)]
        return xla.scaled_matmul(a, b, a_scale, b_scale, out_dtype=out_dtype)

    monkeypatch.setattr(mosaic_gpu, "scaled_matmul", kernel)
    mesh = jax.make_mesh((2,), ("t",), axis_types=(jax.sharding.AxisType.Explicit,))
    a, b, a_scale, b_scale = block_operands(8, 2 * n, 256)
    with jax.set_mesh(mesh), use_device(H200):
        b = jax.device_put(b, P("t"))
        a, a_scale, b_scale = (jax.device_put(x, P()) for x in (a, a_scale, b_scale))
        y = jax.jit(functools.partial(scaled_matmul, implementation="mosaic_gpu"))(
            a, b, a_scale, b_scale
        )
    assert set(squares) == {n == 256}
    want = reference.scaled_matmul(a, b, a_scale, b_scale)
    assert relative_error(y, want) < RELATIVE[y.dtype]


def test_errors_say_what_to_do():
    a, b, a_scale, b_scale = operands(4, 8, 16)
    with pytest.raises(ValueError, match=r"b has type bfloat16, .*quantize_fp8"):
        scaled_matmul(a, b.astype(jnp.bfloat16), a_scale, b_scale)
    with pytest.raises(ValueError, match=r"\(4, 16\) and \(16, 8\), expected"):
        scaled_matmul(a, b.T, a_scale, b_scale)
    with pytest.raises(ValueError, match=r"b_scale has .* \(4,\), expected .* \(8,\)"):
        scaled_matmul(a, b, a_scale, a_scale)
    with pytest.raises(ValueError, match="a_scale has type bfloat16"):
        scaled_matmul(a, b, a_scale.astype(jnp.bfloat16), b_scale)
    with pytest.raises(ValueError, match="out_dtype has type float8"):
        scaled_matmul(a, b, a_scale, b_scale, out_dtype=E4M3)
    with pytest.raises(NotImplementedError, match="gradient rule of its own"):
        jax.grad(lambda s: scaled_matmul(a, b, s, b_scale).sum())(a_scale)
    with pytest.raises(ValueError, match="x has type int32"):
        quantize_fp8(jnp.arange(3))
    with pytest.raises(ValueError, match="dtype has type float8_e3m4"):
        quantize_fp8(jnp.ones(3), jnp.float8_e3m4)
    with pytest.raises(ValueError, match=r"axis 1 of x of shape \(3,\)"):
        quantize_fp8(jnp.ones(3), axis=1)


def block_operands(m, n, k, types=(E4M3, E4M3), *, square=True):
    """Blocks of 128 numbers of very different size, rounded: a, b and their scales."""
    keys = jax.random.split(jax.random.key(m + n + k), 4)
    found, scales = [], []
    for i, (rows, dtype) in enumerate(zip((m, n), types, strict=True)):
        tall = 128 if i == 1 and square else 1
        shape = -(-rows // tall), -(-k // 128)
        scale = jnp.exp2(jax.random.randint(keys[2 + i], shape, -6, 7))
        scales.append(scale.astype(jnp.float32))
        found.append((8 * jax.random.normal(keys[i], (rows, k))).astype(dtype))
    return *found, *scales


@pytest.mark.parametrize("types", [(E4M3, E4M3), (E5M2, E4M3)])
@pytest.mark.parametrize("square", [True, False])
def test_xla_equals_the_reference_by_blocks(types, square):
    a, b, a_scale, b_scale = block_operands(6, 136, 200, types, square=square)
    assert b_scale.shape == ((2 if square else 136), 2)
    a, a_scale = a.reshape(2, 3, 200), a_scale.reshape(2, 3, 2)
    want = np.zeros((2, 3, 136), np.float32)
    tall = 128 if square else 1
    for k in range(200):
        left = np.float32(a[..., k]) * a_scale[..., k // 128]
        right = np.float32(b[:, k]) * b_scale[np.arange(136) // tall, k // 128]
        want += left[..., None] * np.asarray(right)
    given = reference.scaled_matmul(a, b, a_scale, b_scale)
    assert relative_error(given, want) < 1e-5
    y = scaled_matmul(a, b, a_scale, b_scale, out_dtype=jnp.float32)
    assert relative_error(y, want) < 1e-5


def test_scales_of_blocks_are_checked():
    a, b, a_scale, b_scale = block_operands(6, 256, 256)
    for scales in (
        (a_scale[:, :1], b_scale),
        (a_scale, b_scale[0]),
        (a_scale[0], b_scale),
    ):
        with pytest.raises(ValueError, match="scale has type float32 and shape"):
            scaled_matmul(a, b, *scales)
