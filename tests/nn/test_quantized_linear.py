"""Layers with weights of 8 bits: rounding, and the products of what was rounded."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxscale.models.quantization import replace_linear
from jaxscale.models.serving import compiled, serving_rules
from jaxscale.nn import (
    MLP,
    ColumnParallelLinear,
    JoinedLinear,
    QuantizedLinear,
    RMSNorm,
    RowParallelLinear,
)
from jaxscale.nn.linear import project_and_sum, project_together
from jaxscale.nn.quantized_linear import FP8_ACTIVATION_ROWS, quantize_kernel
from jaxscale.sharding import REPLICATED, fsdp_tp, make_mesh
from tests.tolerances import RELATIVE, relative_error


LARGEST = {"int8": 127, "fp8": 448, "fp8_dynamic": 448}
WEIGHTS = list(LARGEST)


UNKNOWN: Any = "int4"


def random(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def dequantized(layer):
    """The kernel that a layer stands for, [in, out]."""
    return (layer.kernel[...].astype("f4") * layer.scale[...][:, None]).T


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_numbers_are_the_nearest(weights, dtype):
    kernel = (random(64, 9) * jnp.logspace(-20, 20, 9)).astype(dtype)
    numbers, scale = quantize_kernel(kernel, weights)
    assert scale.dtype == jnp.float32
    exact = np.asarray(kernel, np.float64).T  # [out, in]
    found = np.asarray(numbers, np.float64) * np.asarray(scale, np.float64)[:, None]
    largest = np.abs(exact).max(1)
    np.testing.assert_allclose(np.abs(found).max(1), largest, rtol=1e-6)
    step = largest[:, None] / 127
    if weights != "int8":  # three bits behind the first; from 2^-6 on evenly spaced
        step = np.maximum(np.abs(exact) / 8, largest[:, None] / 448 * 2**-9)
    assert (np.abs(found - exact) <= 0.5001 * step).all()


@pytest.mark.parametrize("weights", WEIGHTS)
def test_features_of_zeros_and_of_next_to_nothing(weights):
    kernel = jnp.array([[0.0, 1e-42, 3.0], [0.0, -1e-43, -1.5]])
    numbers, scale = quantize_kernel(kernel, weights)
    assert (numbers[:2] == 0).all() and jnp.isfinite(scale).all()
    np.testing.assert_array_equal(abs(numbers[2, 0].astype("f4")), LARGEST[weights])


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf])
def test_what_is_not_finite_is_seen_in_the_scale(bad):
    _, scale = quantize_kernel(random(4, 3).at[2, 1].set(bad), "fp8")
    assert jnp.isfinite(scale).tolist() == [True, False, True]


OPTIONS = {"kernel_axes": ("embed", "mlp"), "out_axes": ("batch", None, "act_mlp")}
BACK = {
    "kernel_axes": ("mlp", "embed"),
    "out_axes": ("batch", "tokens", "act_embed"),
}


def dense(kind, *sizes, rules=REPLICATED, **options):
    layer = kind(
        *sizes, use_bias=True, rules=rules, rngs=nnx.Rngs(0), **OPTIONS | options
    )
    layer.kernel[...] = random(*sizes)
    layer.bias[...] = random(sizes[1], seed=1)
    return layer


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_output_is_that_of_the_rounded_kernel(weights, dtype):
    """Eleven output features: they are stored in whole groups."""
    whole: Any = dense(ColumnParallelLinear, 24, 11, dtype=dtype)
    layer = QuantizedLinear.of(whole, weights)
    x = random(2, 3, 24, seed=2)
    y = layer(x, "gelu")
    want = jax.nn.gelu(x @ dequantized(layer)[:, :11] + whole.bias[...], False)
    assert y.dtype == dtype and layer.kernel.dtype.itemsize == 1
    assert relative_error(y, want) < RELATIVE[jnp.dtype(dtype)]


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_tensor_parallel(weights, devices):
    """A part of the output features, then of the input features."""
    mesh = make_mesh({"tensor": devices}, jax.devices()[:devices])
    rules = serving_rules(fsdp_tp())

    def pair(rules):
        up = dense(ColumnParallelLinear, 16, 32, rules=rules)
        down = dense(RowParallelLinear, 32, 8, rules=rules, **BACK)
        return [QuantizedLinear.of(layer, weights) for layer in (up, down)]

    @jax.jit
    def run(layers, x):
        return layers[1](layers[0](x, "relu"))

    x = random(2, 32, 16, seed=3)
    whole = pair(REPLICATED)
    split = compiled(lambda _: nnx.List(pair(rules)), nnx.List([]), mesh, rules)
    shapes = [part.kernel.addressable_shards[0].data.shape for part in split]
    assert shapes == [(32 // devices, 16), (8, 32 // devices)]
    with jax.set_mesh(mesh):
        y = run(list(split), x)
    # A device rounds its features of a token by a scale of their own.
    bound = 0.05 if weights == "fp8_dynamic" else 1e-5
    assert relative_error(y, run(whole, x)) < bound


def rounded(x):
    """Activations in E4M3 by a scale of each token, the least power of two."""
    x = x.astype(jnp.float32)
    part, exponent = jnp.frexp(jnp.abs(x).max(-1, keepdims=True) / 448)
    scale = jnp.ldexp(1.0, exponent - (part == 0.5).astype(exponent.dtype))
    return (x / scale).astype(jnp.float8_e4m3fn).astype("f4") * scale


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_activations_of_many_tokens_are_rounded_too(dtype):
    rows = FP8_ACTIVATION_ROWS
    whole: Any = dense(ColumnParallelLinear, 48, 24, dtype=dtype)
    dynamic, plain = (QuantizedLinear.of(whole, w) for w in ("fp8_dynamic", "fp8"))
    x = random(2, rows // 2, 48, seed=6) * jnp.logspace(-8, 8, rows // 2)[:, None]
    y = dynamic(x.astype(dtype))
    want = rounded(x.astype(dtype)) @ dequantized(dynamic) + whole.bias[...]
    wrong = jnp.linalg.norm(y.astype(jnp.float32) - want, axis=-1)
    error = wrong / jnp.linalg.norm(want, axis=-1)
    assert error.max() < RELATIVE[jnp.dtype(dtype)]
    assert relative_error(y, plain(x)) > 10 * RELATIVE[jnp.dtype(jnp.float32)]
    # One token fewer, and they are as they were.
    np.testing.assert_array_equal(dynamic(x[:1, :-1]), plain(x[:1, :-1]))


def test_a_token_does_not_see_the_others():
    layer = QuantizedLinear.of(dense(ColumnParallelLinear, 32, 16), "fp8_dynamic")
    x = random(FP8_ACTIVATION_ROWS, 1, 32, seed=7)
    others = jnp.concatenate([x[:5], 1e4 * x[5:]]).at[9].set(jnp.nan)
    run = jax.jit(lambda x: layer(x)[:5])
    np.testing.assert_array_equal(run(x), run(others))


def test_tokens_of_zeros_and_what_is_not_finite():
    layer: Any = QuantizedLinear.of(dense(ColumnParallelLinear, 32, 16), "fp8_dynamic")
    x = random(FP8_ACTIVATION_ROWS, 1, 32, seed=8).at[3].set(0).at[4, 0, 7].set(jnp.nan)
    y = layer(x)[:, 0]
    np.testing.assert_array_equal(y[3], layer.bias[...])
    assert jnp.isnan(y[4]).all() and jnp.isfinite(jnp.delete(y, 4, axis=0)).all()


@pytest.mark.parametrize("plus_one", [False, True])
def test_a_norm_is_rounded_as_it_is_computed(plus_one):
    types: Any = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
    norm: Any = RMSNorm(48, plus_one=plus_one, rngs=nnx.Rngs(0), **types)
    norm.scale[...] += random(48, seed=9).astype(jnp.bfloat16)
    whole: Any = dense(ColumnParallelLinear, 48, 24, dtype=jnp.bfloat16)
    layer: Any = QuantizedLinear.of(whole, "fp8_dynamic")
    x = 3 * random(2, FP8_ACTIVATION_ROWS // 2, 48, seed=6).astype(jnp.bfloat16)
    found = layer.after_norm(x, norm, "gelu")
    assert found is not None
    # Not as `layer(norm(x))` in one program, where XLA may leave bits of the norm.
    assert relative_error(found, layer(norm(x), "gelu")) < 1e-2
    np.testing.assert_array_equal(
        found, project_together([layer], x, ["gelu"], norm=norm)[0]
    )
    assert layer.after_norm(x[:, 1:], norm) is None  # few tokens
    assert layer.after_norm(x.astype(jnp.float32), norm) is None
    assert QuantizedLinear.of(whole, "fp8").after_norm(x, norm) is None
    split = dense(ColumnParallelLinear, 48, 24, rules=fsdp_tp(), dtype=jnp.bfloat16)
    assert QuantizedLinear.of(split, "fp8_dynamic").after_norm(x, norm) is None
    layer.low_rank = lambda x, layer, axes: 0 * x[..., :24]
    assert layer.after_norm(x, norm) is None


def test_a_gate_is_rounded_as_it_is_computed():
    options: Any = {"rngs": nnx.Rngs(0), "dtype": jnp.bfloat16}
    mlp = MLP(32, 64, **options)
    mlp.join_inputs(1)
    x = random(2, FP8_ACTIVATION_ROWS // 2, 32, seed=6).astype(jnp.bfloat16)
    before = mlp(x)
    replace_linear(mlp, lambda layer, _: QuantizedLinear.of(layer, "fp8_dynamic"))
    (both,) = project_together(mlp.inputs, x)
    found: Any = mlp.down
    found = found.after_gate(both, "silu")
    exact = mlp.join([both.astype(jnp.float32)])  # rounded once
    assert relative_error(found, mlp.down(exact.astype(jnp.bfloat16))) < 1e-2
    np.testing.assert_array_equal(mlp(x), found)
    assert relative_error(found, before) < 0.1


@pytest.mark.parametrize("shards", [1, 2])
def test_layers_side_by_side(shards):
    layers = [dense(ColumnParallelLinear, 8, size) for size in (12, 6)]
    joined = JoinedLinear(layers, shards=shards)
    quantized, x = QuantizedLinear.of(joined, "int8"), random(1, 3, 8, seed=4)
    parts = quantized.split(quantized(x))
    for part, layer in zip(parts, layers, strict=True):
        alone = QuantizedLinear.of(layer, "int8")
        assert relative_error(part, alone(x)) < 1e-5


def test_layers_of_both_kinds_share_an_input():
    layers: Any = [dense(ColumnParallelLinear, 8, size) for size in (6, 4)]
    layers[1] = QuantizedLinear.of(layers[1], "int8")
    x = random(1, 3, 8, seed=5)
    found = project_together(layers, x, [None, "relu"])
    assert relative_error(found[0], layers[0](x)) < 1e-6
    assert relative_error(found[1], layers[1](x, "relu")) < 1e-6
    downs: Any = [dense(RowParallelLinear, 8, 5), dense(RowParallelLinear, 8, 5)]
    downs[0] = QuantizedLinear.of(downs[0], "fp8")
    both = project_and_sum(downs, [x, x])
    assert relative_error(both, downs[0](x) + downs[1](x)) < 1e-6


def test_there_are_no_derivatives():
    layer = QuantizedLinear.of(dense(ColumnParallelLinear, 8, 8), "fp8")
    with pytest.raises(NotImplementedError, match="weights are for inference"):
        jax.grad(lambda x: layer(x).sum())(random(1, 2, 8))
    assert [p.shape for p in jax.tree.leaves(nnx.state(layer, nnx.Param))] == [(8,)]


def test_an_unknown_type_is_refused(no_shape_hook):
    with pytest.raises(ValueError, match="weights 'int4' is unknown; use one of"):
        quantize_kernel(random(2, 2), UNKNOWN)
