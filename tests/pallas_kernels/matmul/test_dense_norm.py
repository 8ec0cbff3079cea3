"""A linear layer with a residual and the norm of the sum."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dispatch import Unsupported
from pallas_kernels.matmul import ResidualNorm, dense
from pallas_kernels.matmul.mosaic_gpu_norm import NormConfig, dense_norm
from pallas_kernels.mosaic import H200, use_device
from tests.interpreter import interpret_mosaic_gpu
from tests.lowering import lower_for_cuda
from tests.tolerances import RELATIVE, num_different, relative_error


BF16 = jnp.dtype(jnp.bfloat16)
EPS = 1e-12
SMALL = NormConfig(tile_n=64, stages=2, store_slots=1)


def operands(m, n, k, dtype=BF16):
    """Random, with the outliers that BERT has in a few features of all tokens."""
    keys = iter(jax.random.split(jax.random.key(m + n + k), 6))

    def draw(*shape, size=1.0):
        return (size * jax.random.normal(next(keys), shape)).astype(dtype)

    residual = draw(m, n).at[:, 1].mul(60).at[:, n // 2].add(30)
    w, bias = draw(k, n, size=k**-0.5), draw(n)
    return draw(m, k), w, bias, residual, draw(n), draw(n)


def expected(x, w, bias, residual, scale, shift):
    """By the definition, in fp32."""
    wide = [a.astype(jnp.float32) for a in (x, w, bias, residual, scale, shift)]
    x, w, bias, residual, scale, shift = wide
    h = jnp.matmul(x, w, precision="highest") + bias + residual
    h = h - h.mean(-1, keepdims=True)
    y = h * jax.lax.rsqrt(jnp.square(h).mean(-1, keepdims=True) + EPS)
    return y * scale + shift


def run(x, w, bias, residual, scale, shift, **options):
    norm = ResidualNorm(residual, scale, shift, EPS)
    return dense(x, [w], [bias], norm=norm, **options)[0]


def interpreted(config, arrays, layer=None, races=True):
    x, w, bias, residual, scale, shift = arrays
    with interpret_mosaic_gpu(detect_races=races, concurrent_blocks=True):
        y = dense_norm(
            x,
            w,
            bias,
            layer,
            residual=residual,
            scale=scale,
            shift=shift,
            eps=EPS,
            config=config,
            device=dataclasses.replace(H200, num_sms=12),
        )
        return np.asarray(y)


@pytest.mark.parametrize(
    ("m", "n", "k", "options"),
    [
        (136, 256, 192, {"tile_n": 128, "parts": 3}),  # rows past the end of a tile
        (24, 384, 128, {"tile_n": 192, "stages": 3, "parts": 2}),
        (128, 256, 64, {}),  # more rows than warps
    ],
)
def test_interpreted_kernel(m, n, k, options):
    arrays = operands(m, n, k)
    y = interpreted(dataclasses.replace(SMALL, **options), arrays)
    assert y.dtype == BF16 and y.shape == (m, n)
    assert relative_error(y, expected(*arrays)) < RELATIVE[BF16]


def test_interpreted_kernel_reads_a_layer_in_place():
    x, w, bias, *added = arrays = operands(8, 256, 128)
    spoil = lambda a: jnp.stack([jnp.full_like(a, jnp.nan), a])  # noqa: E731
    config = dataclasses.replace(SMALL, parts=2)
    y = interpreted(config, (x, spoil(w), spoil(bias), *added), jnp.int32(1))
    assert relative_error(y, expected(*arrays)) < RELATIVE[BF16]


def test_bits_of_a_row_do_not_depend_on_the_others():
    x, w, bias, residual, scale, shift = operands(16, 256, 128)
    config = dataclasses.replace(SMALL, parts=2)
    y = interpreted(config, (x, w, bias, residual, scale, shift), races=False)
    x, residual = (a.at[:11].set(jnp.nan) for a in (x, residual))
    again = interpreted(config, (x, w, bias, residual, scale, shift), races=False)
    assert num_different(again[11:], y[11:]) == 0
    assert np.isnan(np.float32(again[:11])).all()


@pytest.mark.parametrize("shifted", [True, False])
def test_portable_norm_and_its_gradients(shifted):
    *arrays, shift = operands(16, 64, 32)
    dy = jax.random.normal(jax.random.key(1), (16, 64))

    def loss(f, arrays):
        arrays = (*arrays, shift if shifted else jnp.zeros_like(shift))
        return jnp.vdot(f(*arrays).astype(jnp.float32), dy)

    def ours(*arrays):
        return run(*arrays[:-1], arrays[-1] if shifted else None)

    (y, found), (wanted, want) = (
        jax.value_and_grad(functools.partial(loss, f))(tuple(arrays))
        for f in (ours, expected)
    )
    np.testing.assert_allclose(y, wanted, rtol=2e-2, atol=1e-1)
    for g, w in zip(found, want, strict=True):
        assert relative_error(g, w) < 2 * RELATIVE[BF16]


def test_gradients_of_the_kernel_are_those_of_xla():
    arrays = operands(8, 256, 64)

    def loss(arrays, implementation):
        y = run(*arrays, implementation=implementation)
        return jnp.sum(jnp.square(y.astype(jnp.float32)))

    want = jax.grad(loss)(arrays, "xla")
    one_part = dataclasses.replace(H200, num_sms=4)  # blocks
    with use_device(one_part), interpret_mosaic_gpu(concurrent_blocks=True):
        found = jax.tree.map(np.asarray, jax.grad(loss)(arrays, "mosaic_gpu"))
    for g, w in zip(found, want, strict=True):
        assert relative_error(g, w) < 2 * RELATIVE[BF16]


@pytest.mark.parametrize(
    ("m", "n", "k", "kernels"),
    [
        (64, 768, 3072, 1),  # other matmuls of so few rows are XLA's
        (4096, 1024, 1024, 1),
        (9984, 768, 3072, 2),  # not all tiles run at once
        (256, 320, 768, 2),  # no whole lines of a warp
    ],
)
def test_few_rows_are_one_kernel(m, n, k, kernels):
    x, w, bias, *added = jax.eval_shape(lambda: operands(m, n, k))
    w, bias = (jax.ShapeDtypeStruct((2, *a.shape), a.dtype) for a in (w, bias))
    layer = jax.ShapeDtypeStruct((), jnp.int32)

    def in_place(layer, *arrays):
        return run(*arrays, layer=layer, implementation="mosaic_gpu")

    with use_device(H200):
        lower_for_cuda(in_place, layer, x, w, bias, *added, kernels=kernels)


def test_configs_that_cannot_run_at_once():
    arrays = operands(136, 256, 192)
    with pytest.raises(Unsupported, match="24 blocks of"):
        interpreted(dataclasses.replace(SMALL, parts=3), arrays)
    with pytest.raises(Unsupported, match="parts that divide the 3 stages"):
        interpreted(dataclasses.replace(SMALL, parts=2), arrays)
    with pytest.raises(Unsupported, match=r"multiples of 8 and 128"):
        interpreted(SMALL, operands(8, 192, 64))


def test_no_rows():
    x, w, bias, residual, scale, shift = operands(8, 256, 64)
    with use_device(H200):
        y = run(x[:0], w, bias, residual[:0], scale, shift)
    assert y.shape == (0, 256)


def test_a_layer_in_place_says_that_it_has_no_gradient():
    x, w, bias, *added = operands(8, 256, 64)
    stacks = w[None], bias[None]

    def loss(x):
        y = run(x, *stacks, *added, layer=jnp.int32(0), implementation="mosaic_gpu")
        return jnp.sum(y.astype(jnp.float32))

    with use_device(H200), pytest.raises(NotImplementedError, match="has no gradient"):
        jax.eval_shape(jax.grad(loss), x)


def test_mistakes():
    x, w, bias, residual, scale, shift = operands(8, 64, 64)
    norm = ResidualNorm(residual, scale, shift, EPS)
    with pytest.raises(ValueError, match="norm with 2 weights"):
        dense(x, [w, w], [bias, bias], norm=norm)
    with pytest.raises(ValueError, match="activation 'relu'"):
        dense(x, [w], [bias], activation="relu", norm=norm)
    with pytest.raises(ValueError, match="residual, scale and bias of the norm"):
        run(x, w, bias, residual[:4], scale, shift)
    with pytest.raises(ValueError, match="expected one type"):
        run(x, w, bias, residual.astype(jnp.float32), scale, shift)
    with pytest.raises(ValueError, match="scale has type int32"):
        run(x, w, bias, residual, scale.astype(jnp.int32), shift)
    with pytest.raises(ValueError, match="bias has type int32"):
        run(x, w, bias, residual, scale, shift.astype(jnp.int32))
    with pytest.raises(ValueError, match="eps -1"):
        dense(x, [w], [bias], norm=norm._replace(eps=-1.0))
