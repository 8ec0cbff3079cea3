"""Linear layers behind a norm: portable, interpreted, lowered and compiled."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from pallas_kernels.dispatch import Unsupported, recorded
from pallas_kernels.layer_norm.reference import layer_norm
from pallas_kernels.matmul import norm_dense
from pallas_kernels.mosaic import H200, use_device
from tests.compiled import compile_for_h200
from tests.interpreter import interpret_mosaic_gpu
from tests.pallas_kernels.matmul import test_dense
from tests.pallas_kernels.matmul.test_dense import BF16, assert_close


by_kernel = functools.partial(norm_dense, eps=1e-6, implementation="mosaic_gpu")


def operands(m, widths, k, dtype=BF16):
    x, ws, biases = test_dense.operands(m, widths, k, dtype)
    keys = jax.random.split(jax.random.key(1), 2)
    scale, shift = (jax.random.normal(key, (k,), dtype) for key in keys)
    return 3 * x + 20, 1 + scale, shift, ws, biases  # a mean beside which they differ


def expected(x, scale, shift, ws, biases, activation):
    """By the definitions, in fp32."""
    y = layer_norm(x, scale, shift, eps=1e-6)
    return [y, *test_dense.expected(y, ws, biases, activation)]


@pytest.mark.parametrize(
    ("m", "widths", "k", "activation"),
    [
        (72, (64, 128), 192, "gelu"),  # rows past the end of a tile
        (8, (64,), 64, None),
        (128, (64, 64, 64), 128, "relu"),
    ],
)
def test_interpreted_kernel(m, widths, k, activation):
    arrays = operands(m, widths, k)
    with use_device(H200), interpret_mosaic_gpu(detect_races=True):
        y, zs = by_kernel(*arrays, activation=activation)
        found = [np.asarray(a) for a in (y, *zs)]
    assert [a.shape for a in found] == [(m, n) for n in (k, *widths)]
    assert_close(found, expected(*arrays, activation))


def test_leading_axes():
    x, *others = operands(16, (64,), 64)
    with use_device(H200), interpret_mosaic_gpu():
        y, (z,) = by_kernel(x.reshape(2, 8, 64), *others)
        found = [np.asarray(a) for a in (y, z)]
    assert [a.shape for a in found] == 2 * [(2, 8, 64)]
    assert_close([a.reshape(16, 64) for a in found], expected(x, *others, None))


def test_portable_layers():
    x, *others = operands(6, (5, 7), 4, jnp.float32)
    y, zs = norm_dense(x.reshape(2, 3, 4), *others, eps=1e-6, activation="gelu")
    flat = [a.reshape(6, -1) for a in (y, *zs)]
    assert_close(flat, expected(x, *others, "gelu"))


@pytest.mark.parametrize(
    ("m", "k", "by"),
    [(256, 768, "mosaic_gpu"), (688, 768, "apart"), (128, 1024, "apart")],
)
def test_many_rows_and_long_ones_have_a_norm_of_their_own(m, k, by):
    arrays = jax.eval_shape(functools.partial(operands, m, (768,) * 3, k))
    with use_device(H200), recorded() as choices:
        jax.eval_shape(functools.partial(norm_dense, eps=1e-6), *arrays)
    assert ("norm_dense", by) in choices


def test_what_the_kernel_cannot_do():
    with use_device(H200):
        for args, message in (
            (operands(8, (64,), 64, jnp.float32), "float32"),
            (operands(12, (64,), 64), "multiples of 8, 64 and 64"),
            (operands(8, (96,), 64), "n=96"),
            (operands(8, (64,), 1024), "shared memory"),
            (operands(1024, (64 * 17,), 64), "272 tiles on 132 multiprocessors"),
        ):
            with pytest.raises(Unsupported, match=message):
                by_kernel(*args)
    with pytest.raises(Unsupported, match="norm_dense"):
        by_kernel(*operands(8, (64,), 64))


def test_mistakes():
    x, scale, *others = operands(8, (4,), 4)
    with pytest.raises(ValueError, match=r"scale and shift have shapes \(3,\) and"):
        norm_dense(x, scale[:3], *others, eps=1e-6)
    with pytest.raises(ValueError, match="activation 'tanh'"):
        norm_dense(x, scale, *others, eps=1e-6, activation="tanh")
    with pytest.raises(NotImplementedError, match="norm_dense has no derivatives"):
        jax.grad(lambda x: norm_dense(x, scale, *others, eps=1.0)[0].sum())(x)


def program(devices, m, widths, activation):
    where = SingleDeviceSharding(devices[0])
    arrays = jax.eval_shape(functools.partial(operands, m, widths, 768))
    arrays = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=where), arrays
    )
    return jax.jit(functools.partial(by_kernel, activation=activation)), arrays


@pytest.mark.skipif(
    sys.platform != "linux", reason="the plugin that compiles is for Linux"
)
@pytest.mark.parametrize(
    ("widths", "activation"), [((768, 768, 768), None), ((3072,), "gelu")]
)
def test_one_launch_that_spills_nothing(widths, activation):
    compiled = compile_for_h200(program, 128, widths, activation)
    assert len(compiled.thunks) == 1
    (kernel,) = compiled.kernels
    assert kernel.spilled == 0 and kernel.registers < 128
