"""Linear, norms, MLP and block against their formulas in numpy."""

# Wrong types are passed on purpose, and optional parts are there.

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

from jaxscale.nn import (
    MLP,
    AttentionConfig,
    Block,
    BlockConfig,
    ColumnParallelLinear,
    LayerNorm,
    Linear,
    RMSNorm,
    attention_state,
    layer_norm,
    make_norm,
    rms_norm,
)
from jaxscale.nn.blocks import norm_of_sum
from jaxscale.nn.linear import RowParallelLinear, project_together
from jaxscale.sharding import MeshConfig, fsdp_tp, make_mesh
from pallas_kernels.matmul import gelu
from pallas_kernels.mosaic import H200, use_device
from tests.lowering import lower_for_cuda


RNG = np.random.default_rng(0)
WHOLE = attention_state((1, 5))


def normal(*shape):
    return RNG.normal(size=shape).astype(np.float32)


def test_norms_follow_their_formulas():
    x, scale, bias = normal(2, 3, 16) * 5 + 2, normal(16), normal(16)
    rms = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-3) * scale
    actual = rms_norm(*map(jnp.asarray, (x, scale)), 1e-3)
    np.testing.assert_allclose(actual, rms, rtol=1e-5, atol=1e-6)
    centered = x - x.mean(-1, keepdims=True)
    layer = centered / np.sqrt(x.var(-1, keepdims=True) + 1e-3) * scale + bias
    actual = layer_norm(*map(jnp.asarray, (x, scale, bias)), 1e-3)
    np.testing.assert_allclose(actual, layer, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
def test_statistics_of_norms_are_in_fp32(kind):
    x = jnp.asarray(normal(1, 4, 512) + 30, jnp.bfloat16)
    norm = make_norm(kind, 512, 1e-5, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    exact = make_norm(kind, 512, 1e-5, rngs=nnx.Rngs(0))
    out = norm(x)
    assert out.dtype == jnp.bfloat16
    expected = exact(x.astype(jnp.float32))
    # One rounding of the result; sums in bf16 would be off by a tenth.
    np.testing.assert_allclose(out.astype(jnp.float32), expected, rtol=2**-8)


def row_parallel(rules, use_bias=True, dtype=jnp.bfloat16):
    layer = RowParallelLinear(
        32,
        64,
        kernel_axes=("mlp", "embed"),
        out_axes=("batch", "tokens", "act_embed"),
        use_bias=use_bias,
        rules=rules,
        dtype=dtype,
        rngs=nnx.Rngs(1),
    )
    if use_bias:
        layer.bias[...] = jnp.asarray(normal(64))
    return layer


def test_norm_whose_factor_is_one_plus_its_parameter():
    x = jnp.asarray(normal(2, 3, 64))
    norm = make_norm("rmsnorm_1p", 64, 1e-5, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    plain = make_norm("rmsnorm", 64, 1e-5, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(norm(x), plain(x))
    # So small that bf16 would round the sum to one.
    norm.scale[...] = jnp.full(64, 2**-10, jnp.bfloat16)
    np.testing.assert_allclose(norm(x), (1 + 2**-10) * plain(x), rtol=1e-6)


@pytest.mark.parametrize("use_bias", [True, False])
@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
def test_norms_of_sums(kind, use_bias):
    rules = fsdp_tp()
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    h, residual = (jnp.asarray(normal(4, 8, d), jnp.bfloat16) for d in (32, 64))
    norm = make_norm(kind, 64, 1e-5, dtype=jnp.bfloat16, rules=rules, rngs=nnx.Rngs(0))
    layer = row_parallel(rules, use_bias)
    wide = h.astype(jnp.float32) @ layer.weight.astype(jnp.float32)
    if use_bias:
        wide += layer.bias[...]
    expected = norm(residual.astype(jnp.float32) + wide).astype(jnp.float32)
    found = [norm_of_sum(norm, layer, h, residual)]
    with jax.set_mesh(mesh):
        found.append(norm_of_sum(norm, layer, h, residual))
    for out in found:
        assert out.dtype == jnp.bfloat16
        np.testing.assert_allclose(
            out.astype(jnp.float32), expected, rtol=2**-5, atol=2**-5
        )


def test_post_norms_are_kernels_on_the_tokens_of_each_device():
    rules = fsdp_tp()
    norm = make_norm(
        "layernorm", 64, 1e-5, dtype=jnp.bfloat16, rules=rules, rngs=nnx.Rngs(0)
    )
    layer = row_parallel(rules)
    h, x = (jax.ShapeDtypeStruct((4, 2048, d), jnp.bfloat16) for d in (32, 64))
    few = (jax.ShapeDtypeStruct((1, 768, d), jnp.bfloat16) for d in (32, 64))

    def run(h, residual):
        return norm_of_sum(norm, layer, h, residual)

    with use_device(H200):
        with pytest.raises(AssertionError, match="found 0"):
            lower_for_cuda(run, *few)  # XLA adds up the matmul in the norm
        lower_for_cuda(run, h, x, kernels=1)
        with jax.set_mesh(make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))):
            lower_for_cuda(run, h, x, kernels=1)
        one = jax.make_mesh(
            (1, 1, 1, 1),
            ("data", "fsdp", "pipe", "tensor"),
            axis_types=(AxisType.Explicit,) * 4,
        )
        lower_for_cuda(run, h, x, mesh=one, kernels=1)


@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
def test_norms_of_sums_beyond_fp16(kind):
    """On a mesh too, where no kernel adds the residual."""
    h = jnp.asarray(15_000 * normal(4, 8, 32), jnp.float16)
    residual = jnp.full((4, 8, 64), 65_000, jnp.float16)
    norm = make_norm(kind, 64, 1e-5, dtype=jnp.float16, rngs=nnx.Rngs(0))
    layer = row_parallel(fsdp_tp(), dtype=jnp.float16)
    assert bool(jnp.isinf(residual + layer(h)).any())
    wide = residual.astype(jnp.float32) + layer(h).astype(jnp.float32)
    with jax.set_mesh(make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))):
        out = norm_of_sum(norm, layer, h, residual)
    assert bool(jnp.isfinite(out).all())
    np.testing.assert_allclose(out, norm(wide), rtol=2**-8, atol=2**-8)


def test_post_norm_block():
    heads = AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=4)
    config = BlockConfig(
        d_model=8, d_ff=16, attention=heads, norm="layernorm", post_norm=True
    )
    post = Block(config, rngs=nnx.Rngs(0))
    x = jnp.asarray(normal(1, 5, 8))
    middle = post.attention_norm(x + post.attention(x, WHOLE)[0])
    expected = post.mlp_norm(middle + post.mlp(middle))
    np.testing.assert_allclose(post(x, WHOLE)[0], expected, rtol=1e-4, atol=1e-5)


def test_an_unknown_norm_is_refused(no_shape_hook):
    with pytest.raises(ValueError, match="norm 'batch' is unknown; use one of"):
        make_norm("batch", 8, 1e-5, rngs=nnx.Rngs(0))


def linear(use_bias, **types):
    return Linear(
        5,
        7,
        kernel_axes=("embed", "mlp"),
        out_axes=("batch", None, "act_mlp"),
        use_bias=use_bias,
        rngs=nnx.Rngs(0),
        **types,
    )


def test_linear():
    layer, x, bias = linear(True), normal(2, 3, 5), normal(7)
    layer.bias[...] = jnp.asarray(bias)
    expected = x @ np.asarray(layer.kernel[...]) + bias
    np.testing.assert_allclose(layer(jnp.asarray(x)), expected, rtol=1e-5, atol=1e-6)
    assert linear(False).bias is None


def test_projections_with_and_without_bias():
    axes = {"kernel_axes": ("embed", "mlp"), "out_axes": ("batch", None, "act_mlp")}
    layers = [
        ColumnParallelLinear(4, 8, use_bias=use_bias, rngs=nnx.Rngs(i), **axes)
        for i, use_bias in enumerate((True, False))
    ]
    layers[0].bias[...] = jnp.arange(8.0)
    x = jax.random.normal(jax.random.key(2), (2, 3, 4))
    for order in (layers, layers[::-1]):
        outs = project_together(order, x, ["relu", "relu"])
        for layer, out in zip(order, outs, strict=True):
            y = np.asarray(x) @ np.asarray(layer.kernel[...])
            y += 0 if layer.bias is None else np.arange(8.0)
            np.testing.assert_allclose(out, np.maximum(y, 0), atol=1e-6)


def test_linear_computes_in_its_type_and_keeps_that_of_its_parameters():
    layer = linear(True, dtype=jnp.bfloat16)
    assert layer.kernel[...].dtype == jnp.float32
    out = layer(jnp.ones((1, 1, 5)))
    assert out.dtype == jnp.bfloat16
    grads = jax.grad(lambda m: m(jnp.ones((1, 1, 5))).sum().astype(jnp.float32))(layer)
    assert grads.kernel[...].dtype == jnp.float32
    np.testing.assert_array_equal(grads.kernel[...], 1.0)


def erf_gelu(x):
    return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def tanh_gelu(x):
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    return x * 0.5 * (1 + np.tanh(inner))


@pytest.mark.parametrize("activation", ["swiglu", "gelu", "gelu_tanh"])
def test_mlp(activation):
    mlp = MLP(8, 16, activation=activation, rngs=nnx.Rngs(1))
    for layer in (mlp.up, mlp.gate, mlp.down):
        if layer is not None:
            layer.kernel[...] = 50 * layer.kernel[...]
    x = normal(1, 4, 8)
    up = x @ np.asarray(mlp.up.kernel[...])
    if activation == "swiglu":
        gate = x @ np.asarray(mlp.gate.kernel[...])
        hidden = gate / (1 + np.exp(-gate)) * up
    else:
        assert mlp.gate is None
        hidden = (erf_gelu if activation == "gelu" else tanh_gelu)(up)
    expected = hidden @ np.asarray(mlp.down.kernel[...])
    np.testing.assert_allclose(mlp(jnp.asarray(x)), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_gelu_is_as_exact_as_its_type(dtype):
    """Values and slopes, from far to the left to far to the right."""
    x = jnp.linspace(-12, 12, 4001).astype(dtype)
    exact = np.asarray(x, np.float64)
    want = erf_gelu(exact)
    eps = float(jnp.finfo(dtype).eps)
    found = np.asarray(gelu(x), np.float64)
    assert np.all(np.abs(found - want) <= eps * np.abs(want) + 1e-6)
    # The derivative is Phi(x) + x phi(x).
    density = np.exp(-(exact**2) / 2) / math.sqrt(2 * math.pi)
    cumulative = 0.5 * (1 + np.vectorize(math.erf)(exact / math.sqrt(2)))
    slopes = jax.vmap(jax.grad(gelu))(x)
    assert slopes.dtype == dtype
    np.testing.assert_allclose(
        np.asarray(slopes, np.float64), cumulative + exact * density, atol=2 * eps
    )


def test_an_unknown_activation_is_refused(no_shape_hook):
    with pytest.raises(ValueError, match="activation 'tanh' is unknown; use one of"):
        MLP(8, 16, activation="tanh", rngs=nnx.Rngs(0))


def block_config(parallel):
    return BlockConfig(
        d_model=8,
        d_ff=16,
        attention=AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=4),
        parallel=parallel,
        num_layers=8,
    )


def block(parallel):
    return Block(block_config(parallel), rngs=nnx.Rngs(0))


def test_serial_and_parallel_blocks():
    x = jnp.asarray(normal(1, 5, 8))
    serial, parallel = block(False), block(True)
    after = x + serial.attention(serial.attention_norm(x), WHOLE)[0]
    expected = after + serial.mlp(serial.mlp_norm(after))
    np.testing.assert_allclose(serial(x, WHOLE)[0], expected, rtol=1e-6)
    h = parallel.attention_norm(x)
    assert parallel.mlp_norm is None
    expected = x + parallel.attention(h, WHOLE)[0] + parallel.mlp(h)
    np.testing.assert_allclose(parallel(x, WHOLE)[0], expected, rtol=1e-6)


def test_residual_projections_start_smaller_with_depth():
    attention, mlp = block(False).attention, block(False).mlp
    for layer, std in (
        (attention.query, 0.02),
        (mlp.up, 0.02),
        (attention.out, 0.02 / 4),
        (mlp.down, 0.02 / 4),
    ):
        # 64 or 128 draws: the standard deviation is known within 9% (one sigma).
        assert abs(float(layer.kernel[...].std()) / std - 1) < 0.35


@pytest.mark.parametrize("layer", [RMSNorm, LayerNorm])
def test_modules_serve_linen(layer):
    linen = nnx.bridge.to_linen(layer, 16, eps=1e-3)
    x = jnp.asarray(normal(1, 2, 16))
    variables = linen.init(jax.random.key(0), x)
    expected = layer(16, eps=1e-3, rngs=nnx.Rngs(0))(x)
    np.testing.assert_allclose(linen.apply(variables, x), expected, rtol=1e-6)


def test_a_block_trains_inside_linen():
    ours = block(False)
    linen = nnx.bridge.to_linen(Block, block_config(False))
    x = jnp.asarray(normal(1, 5, 8))
    variables = linen.init(jax.random.key(0), x, WHOLE)

    def loss(params):
        out, _ = linen.apply({**variables, "params": params}, x, WHOLE)
        return (out**2).sum()

    def path(keys):
        names = jax.tree_util.keystr(keys, simple=True, separator=".")
        return names.removesuffix(".value")

    def by_path(tree):
        return {path(k): v for k, v in jax.tree_util.tree_leaves_with_path(tree)}

    # The parameters of our block, in the tree of Linen.
    values = by_path(ours)
    assert set(by_path(variables["params"])) == set(values)
    params = jax.tree_util.tree_map_with_path(
        lambda keys, _: values[path(keys)], variables["params"]
    )
    value, grads = jax.jit(jax.value_and_grad(loss))(params)
    expected, our_grads = jax.jit(
        jax.value_and_grad(lambda m: (m(x, WHOLE)[0] ** 2).sum())
    )(ours)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    for name, grad in by_path(our_grads).items():
        np.testing.assert_allclose(
            by_path(grads)[name], grad, rtol=1e-5, atol=1e-6, err_msg=name
        )
