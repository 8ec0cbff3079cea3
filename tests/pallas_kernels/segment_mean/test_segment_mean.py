"""Means of packed sequences: in the interpreter, and by XLA."""

import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dispatch import Unsupported
from pallas_kernels.mosaic import H200, use_device
from pallas_kernels.segment_mean import segment_mean
from tests.interpreter import interpret_mosaic_gpu


def operands(t, d, *bounds, dtype=jnp.bfloat16):
    """Random; past the last sequence of a row it is NaN."""
    cu = jnp.array(bounds, jnp.int32)
    x = jax.random.normal(jax.random.key(t + d), (len(bounds), t, d)).astype(dtype)
    past = jnp.arange(t) >= cu[:, -1:]
    return jnp.where(past[..., None], jnp.nan, x), cu


def expected(x, cu):
    """By the definition, in fp64."""
    wide = np.float64(np.float32(x))
    means = np.zeros((*cu.shape[:1], cu.shape[1] - 1, x.shape[2]))
    for row, ends in enumerate(np.asarray(cu)):
        for i, (start, end) in enumerate(itertools.pairwise(ends)):
            if start < end:
                means[row, i] = wide[row, start:end].mean(0)
    return means


CASES = [
    # Sequences of more than a tile, of one token, of none; the row's end is no tile's.
    (300, 256, (0, 131, 132, 299, 299), (0, 1, 140, 140, 300)),
    (24, 128, (0, 5, 24)),
    (16, 128, (0, 16), (0, 0)),
]


def interpreted(x, cu):
    with use_device(H200), interpret_mosaic_gpu(detect_races=True):
        return np.array(segment_mean(x, cu, implementation="mosaic_gpu"))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_interpreted_kernel(case, dtype):
    x, cu = operands(*case, dtype=dtype)
    found = interpreted(x, cu)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected(x, cu), atol=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_xla(case):
    x, cu = operands(*case)
    found = segment_mean(x, cu)  # no GPU
    np.testing.assert_allclose(found, expected(x, cu), atol=1e-6)


def test_nan_stays_in_its_sequence():
    x, cu = operands(*CASES[0])
    x = x.at[0, 5].set(jnp.nan).at[0, 200, 3].set(jnp.inf)
    for found in (interpreted(x, cu), np.array(segment_mean(x, cu))):
        assert np.isnan(found[0, 0]).all() and not np.isfinite(found[0, 2, 3])
        found[0, 2] = 0
        assert np.isfinite(found[0, 1:]).all() and np.isfinite(found[1]).all()


def test_rows_of_several_devices():
    """What varies over a mesh axis is said to, and each device has a kernel."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.P("data")
    x, cu = operands(*CASES[2])
    with use_device(H200), jax.set_mesh(mesh):
        each = jax.shard_map(segment_mean, in_specs=(spec, spec), out_specs=spec)
        program = jax.jit(each).trace(x, cu).lower(lowering_platforms=("cuda",))
        with pytest.raises(Unsupported, match="partition"):
            jax.eval_shape(lambda: segment_mean(x, cu, implementation="mosaic_gpu"))
    assert "mosaic_gpu" in program.as_text()


@pytest.mark.parametrize("case", CASES)
def test_gradients(case):
    """Those of the sums by their definition; zeros where there is no sequence."""
    x, cu = operands(*case)
    g = jax.random.normal(jax.random.key(1), (*cu.shape[:1], cu.shape[1] - 1, case[1]))
    found = jax.vjp(lambda x: segment_mean(x, cu), x)[1](g)[0]
    want = np.zeros(x.shape, np.float32)
    for row, ends in enumerate(np.asarray(cu)):
        for i, (start, end) in enumerate(itertools.pairwise(ends)):
            want[row, start:end] = g[row, i] / float(max(1, end - start))
    assert found.dtype == x.dtype
    np.testing.assert_allclose(np.float32(found), want, rtol=2**-8)


def test_the_kernel_has_gradients():
    x, cu = operands(*CASES[2])
    grad = jax.jit(jax.value_and_grad(lambda x: segment_mean(x, cu).sum()))
    with use_device(H200):
        program = grad.trace(x).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in program.as_text()


def test_other_integers_and_no_sequences():
    x, cu = operands(*CASES[1])
    want = segment_mean(x, cu)
    for dtype in (jnp.int8, jnp.uint32):
        np.testing.assert_array_equal(segment_mean(x, cu.astype(dtype)), want)
    with use_device(H200):
        wider = jax.jit(segment_mean).trace(x, cu.astype(jnp.int16))
        wider.lower(lowering_platforms=("cuda",))
        for few in ((x[:0], cu[:0]), (x, cu[:, :1])):
            assert segment_mean(*few).shape == (len(few[0]), few[1].shape[1] - 1, 128)
            with pytest.raises(Unsupported, match="at least one of each"):
                segment_mean(*few, implementation="mosaic_gpu")
            grad = jax.grad(lambda x, cu: segment_mean(x, cu).sum())(*few)
            assert grad.shape == few[0].shape and not grad.any()


def test_mistakes_and_what_the_kernel_cannot_serve():
    x, cu = operands(*CASES[1])
    with pytest.raises(ValueError, match="cu_seqlens have shapes"):
        segment_mean(x, cu[0])
    for wrong in (x.astype(jnp.float32), x[..., :64], x[:, :4]):
        with use_device(H200), pytest.raises(Unsupported, match="segment_mean"):
            segment_mean(wrong, cu, implementation="mosaic_gpu")
    with pytest.raises(ValueError, match="cu_seqlens has type float32"):
        inspect.unwrap(segment_mean)(x, cu.astype(jnp.float32))
