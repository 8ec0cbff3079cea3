"""An encoder layer from one attention to the next, in one launch and in four."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dispatch import Unsupported, recorded
from pallas_kernels.encode_layer import EncodeLayerWeights, encode_layer
from pallas_kernels.mosaic import H200, use_device
from tests.interpreter import interpret_mosaic_gpu
from tests.tolerances import RELATIVE, num_different, relative_error


BF16 = jnp.dtype(jnp.bfloat16)
EPS = 1e-12
LAYERS = 1, 0
"""Of two layers: the one that is computed, and the one whose heads are."""


def operands(m, d=256, f=128, heads=(64, 64, 64), shifted=True, attended=64, lead=()):
    """Random; what no layer of these is, is NaN."""
    keys = iter(jax.random.split(jax.random.key(m + d + f), 24))

    def draw(*shape, size=1.0):
        return (size * jax.random.normal(next(keys), shape)).astype(BF16)

    def stack(array, number):
        parts = [jnp.full_like(array, jnp.nan)] * 2
        parts[number] = array
        return jnp.stack(parts)

    def linear(k, n, number=LAYERS[0]):
        w = draw(k, n, size=k**-0.5)
        return stack(w, number), stack(draw(n, size=0.3), number)

    def norm():
        return 1 + draw(d, size=0.2), draw(d, size=0.2) if shifted else None

    weights = EncodeLayerWeights(
        *linear(attended, d), *norm(), *linear(d, f), *linear(f, d), *norm()
    )
    x = draw(*lead, m, attended)
    residual = draw(*lead, m, d).at[..., 1].mul(20)
    return x, residual, weights, [linear(d, n, LAYERS[1]) for n in heads]


def expected(attended, residual, weights, heads):
    """By the definition, in fp32."""
    wide = [None if a is None else a.astype(jnp.float32) for a in weights]
    w = EncodeLayerWeights(*wide)

    def linear(x, weight, bias, layer=LAYERS[0]):
        weight, bias = (a[layer].astype(jnp.float32) for a in (weight, bias))
        return jnp.matmul(x, weight, precision="highest") + bias

    def norm(h, scale, shift):
        h = h - h.mean(-1, keepdims=True)
        y = h * jax.lax.rsqrt(jnp.square(h).mean(-1, keepdims=True) + EPS) * scale
        return y if shift is None else y + shift

    x, before = attended.astype(jnp.float32), residual.astype(jnp.float32)
    x = norm(linear(x, w.out, w.out_bias) + before, w.out_scale, w.out_shift)
    h = jax.nn.gelu(linear(x, w.up, w.up_bias), approximate=False)
    y = norm(linear(h, w.down, w.down_bias) + x, w.down_scale, w.down_shift)
    return y, tuple(linear(y, *head, LAYERS[1]) for head in heads)


def run(arrays, implementation, **changes):
    layer, following = map(jnp.int32, LAYERS)
    options = {"layer": layer, "following": following if arrays[-1] else None}
    options |= {"activation": "gelu", "eps": EPS, "implementation": implementation}
    return encode_layer(*arrays, **options | changes)


def interpreted(arrays, num_sms=5, races=True):
    device = dataclasses.replace(H200, num_sms=num_sms)
    with (
        use_device(device),
        interpret_mosaic_gpu(detect_races=races, concurrent_blocks=True),
    ):
        return jax.tree.map(np.asarray, run(arrays, "mosaic_gpu"))


def check(found, arrays):
    want = expected(*arrays)
    assert jax.tree.structure(found) == jax.tree.structure(want)
    for y, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        assert y.dtype == BF16 and y.shape == wanted.shape
        assert relative_error(y, wanted) < 3 * RELATIVE[BF16]


@pytest.mark.parametrize(
    ("m", "options", "num_sms"),
    [
        (136, {}, 5),  # rows past the end of a tile, several tiles a block
        (16, {"f": 192, "heads": (), "shifted": False}, 7),
        (8, {"d": 384, "heads": (128, 64, 64), "lead": (2,)}, 2),
    ],
)
def test_interpreted_kernel(m, options, num_sms):
    arrays = operands(m, **options)
    check(interpreted(arrays, num_sms), arrays)


def test_a_launch_for_each_matmul():
    arrays = operands(8, lead=(2,))
    check(run(arrays, "dense"), arrays)
    check(run(arrays, None), arrays)  # no GPU


@pytest.mark.parametrize(
    ("m", "d", "dtype", "expected"),
    [
        (128, 768, jnp.bfloat16, "mosaic_gpu"),
        (128, 768, jnp.float16, "dense"),
        (128, 1024, jnp.bfloat16, "dense"),
        (512, 768, jnp.bfloat16, "mosaic_gpu"),
        (592, 768, jnp.bfloat16, "dense"),  # faster so
    ],
)
def test_one_launch_is_the_default_where_it_was_timed(m, d, dtype, expected):
    def cast(x):
        return jax.ShapeDtypeStruct(x.shape, dtype)

    shapes = jax.tree.map(cast, jax.eval_shape(lambda: operands(m, d)))
    with use_device(H200):
        for implementation, wanted in ((None, expected), ("mosaic_gpu", "mosaic_gpu")):
            f = functools.partial(run, implementation=implementation)
            with recorded() as choices:
                jax.eval_shape(lambda *arrays, f=f: f(arrays), *shapes)
            assert choices[-1] == ("encode_layer", wanted)


def test_bits_of_a_row_do_not_depend_on_the_others():
    attended, residual, *rest = operands(16)
    found = interpreted((attended, residual, *rest), 3, races=False)
    attended, residual = (a.at[:11].set(jnp.nan) for a in (attended, residual))
    again = interpreted((attended, residual, *rest), 3, races=False)
    for y, z in zip(jax.tree.leaves(found), jax.tree.leaves(again), strict=True):
        assert num_different(z[11:], y[11:]) == 0
        assert np.isnan(np.float32(z[:11])).all()


def test_mistakes():
    attended, residual, weights, heads = arrays = operands(8)
    with pytest.raises(ValueError, match="up_bias has shape"):
        run((attended, residual, weights._replace(up_bias=weights.out_bias), []), None)
    with pytest.raises(ValueError, match="residual has type float32"):
        run((attended, residual.astype(jnp.float32), weights, heads), None)
    with pytest.raises(ValueError, match="3 heads and following None"):
        run(arrays, None, following=None)
    for eps in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="eps"):
            run(arrays, None, eps=eps)
    scale = weights.out_scale.astype(jnp.int32)
    with pytest.raises(ValueError, match="out_scale has type int32"):
        run((attended, residual, weights._replace(out_scale=scale), heads), None)
    with pytest.raises(ValueError, match="layer has shape"):
        run(arrays, None, layer=jnp.int16(1))
    with pytest.raises(NotImplementedError, match="no derivatives"):
        jax.grad(lambda x: run((x, *arrays[1:]), None)[0].sum().astype(float))(attended)


@pytest.mark.parametrize(
    ("m", "options", "reason"),
    [
        (1032, {}, "1032 tokens, the kernel takes multiples of 8 up to 1024"),
        (12, {}, "12 tokens"),
        (8, {"d": 128}, "128 features, the kernel takes multiples of 128 from 256"),
        (8, {"f": 96}, "96"),
    ],
)
def test_what_the_kernel_cannot_serve(m, options, reason):
    arrays = operands(m, **options)
    with use_device(H200), pytest.raises(Unsupported, match=reason):
        run(arrays, "mosaic_gpu")
