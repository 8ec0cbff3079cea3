"""Products in fp8 against numpy on rounded operands, and what they keep and send."""

import dataclasses
import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from jaxscale.models.stack import REMAT_POLICIES
from jaxscale.nn import MLP, ColumnParallelLinear, Linear, RowParallelLinear
from jaxscale.sharding import (
    REPLICATED,
    MeshConfig,
    column_parallel,
    fp8,
    fsdp,
    fsdp_tp,
    make_mesh,
    row_parallel,
)
from jaxscale.sharding.fp8 import E4M3, E5M2, quantize_operand
from jaxscale.sharding.tensor_parallel import feed_forward
from pallas_kernels import tuned_configs
from pallas_kernels.collective_matmul import CollectiveConfig
from pallas_kernels.mosaic import H200, use_device
from tests.interpreter import interpret_mosaic_gpu
from tests.lowering import lower_for_cuda
from tests.pallas_kernels.fp8_operands import stand_ins  # noqa: F401
from tests.tiers import exhaustive
from tests.tolerances import RELATIVE, relative_error


B, T, K, N = 4, 8, 32, 24
TOLERANCE = RELATIVE[jnp.dtype("float32")]
BOTH = pytest.mark.parametrize("quantization", ["fp8", "fp8_tensorwise"])
ALL = pytest.mark.parametrize(
    "quantization", ["fp8", "fp8_blockwise", "fp8_tensorwise"]
)
TYPES = {"x": ml_dtypes.float8_e4m3fn, "g": ml_dtypes.float8_e5m2}


def normal(*shape, seed=0):
    """Numbers of many sizes, without those that differ by more than fp8 can hold."""
    random = np.random.default_rng(seed)
    sizes = 2.0 ** random.integers(-6, 3, shape)
    return (random.normal(size=shape) * sizes).astype(np.float32)


def rounded(x, kind, axis):
    """The numbers that fp8 makes of `x` with a scale for what `axis` reduces."""
    dtype = TYPES[kind]
    largest = np.abs(x).max(axis=axis, keepdims=True)
    scale = 2.0 ** np.ceil(np.log2(largest / float(ml_dtypes.finfo(dtype).max)))
    return (x / scale).astype(dtype).astype(np.float64) * scale


def rounded_by_blocks(x, kind, rows, columns):
    """The same with a scale for blocks of a matrix."""
    found = np.zeros(x.shape)
    for i in range(0, x.shape[0], rows):
        for j in range(0, x.shape[1], columns):
            part = slice(i, i + rows), slice(j, j + columns)
            found[part] = rounded(x[part], kind, None)
    return found


def column(x, w, quantization: Any = "fp8", rules=REPLICATED, **options):
    axes = {"kernel_axes": [("embed", "mlp")], "rules": rules}
    axes["out_axes"] = [("batch", None, "act_mlp")]
    x, w = map(jnp.asarray, (x, w))
    return column_parallel(x, [w], quantization=quantization, **axes, **options)[0]


def row(x, w, quantization: Any = "fp8", rules=REPLICATED, **options):
    axes = {"kernel_axes": [("mlp", "embed")], "rules": rules}
    axes["out_axes"] = ("batch", "tokens", "act_embed")
    x, w = map(jnp.asarray, (x, w))
    return row_parallel([x], [w], quantization=quantization, **axes, **options)


@pytest.mark.parametrize("product", [column, row])
@BOTH
def test_products_are_those_of_rounded_operands(quantization, product):
    x, w, g = normal(B, T, K), normal(K, N, seed=1), normal(B, T, N, seed=2)
    f = partial(product, quantization=quantization)
    y, back = jax.jit(lambda x, w: jax.vjp(f, x, w))(x, w)
    dx, dw = back(jnp.asarray(g))
    x, g = x.reshape(-1, K), g.reshape(-1, N)
    by_row = quantization == "fp8"
    along = (lambda axis: axis) if by_row else (lambda axis: None)
    x, g = rounded(x, "x", along(1)), rounded(g, "g", along(1))
    exact = {
        "y": x @ rounded(w, "x", along(0)),
        "dx": g @ rounded(w, "x", along(1)).T,
        # Scales along the tokens would be inside of the sum: they are others here.
        "dw": rounded(x, "x", along(0)).T @ rounded(g, "g", along(0)),
    }
    for name, found in (("y", y), ("dx", dx), ("dw", dw)):
        found = found.reshape(exact[name].shape)
        assert relative_error(found, exact[name]) < TOLERANCE, name


@pytest.mark.parametrize("product", [column, row])
def test_products_are_those_of_operands_rounded_by_blocks(product):
    """Two blocks of tokens and of features, of which the second is a part."""
    inner, outer = 200, 136
    x, w = normal(2, 96, inner), normal(inner, outer, seed=1)
    g = normal(2, 96, outer, seed=2)
    f = partial(product, quantization="fp8_blockwise")
    y, back = jax.jit(lambda x, w: jax.vjp(f, x, w))(x, w)
    dx, dw = back(jnp.asarray(g))
    x, g = x.reshape(-1, inner), g.reshape(-1, outer)
    w = rounded_by_blocks(w, "x", 128, 128)
    x, g = (rounded_by_blocks(*a, 1, 128) for a in ((x, "x"), (g, "g")))
    exact = {"y": x @ w, "dx": g @ w.T}
    x, g = (rounded_by_blocks(*a, 128, 1) for a in ((x, "x"), (g, "g")))
    exact["dw"] = x.T @ g
    for name, found in (("y", y), ("dx", dx), ("dw", dw)):
        found = found.reshape(exact[name].shape)
        assert relative_error(found, exact[name]) < TOLERANCE, name


def test_parts_of_blocks_are_filled_for_the_kernel():
    """Without it XLA multiplies in fp32, which takes many times as long."""
    x = jax.ShapeDtypeStruct((1, 192, 320), jnp.bfloat16)  # 192 tokens and 320 features
    w = jax.ShapeDtypeStruct((320, 448), jnp.float32)

    def run(x, w):
        y, back = jax.vjp(partial(column, quantization="fp8_blockwise"), x, w)
        return y, back(y)

    with use_device(H200):
        text = lower_for_cuda(run, x, w, kernels=3)
    assert "dot_general" not in text


@pytest.mark.parametrize("product", [column, row])
@ALL
def test_batches_without_tokens(quantization, product):
    x, w = np.zeros((B, 0, K), np.float32), normal(K, N)
    y, back = jax.vjp(partial(product, quantization=quantization), x, w)
    assert y.shape == (B, 0, N)
    dx, dw = back(y)
    assert dx.shape == x.shape
    np.testing.assert_array_equal(dw, np.zeros_like(w))


def test_a_second_scale_changes_no_number():
    x = normal(64, K)
    once = rounded(x, "x", 1)
    for second, axis in ((rounded(once, "x", 0), 0), (rounded(x, "x", None), None)):
        # Of what does not fall below the normal numbers of the other scale.
        held = np.abs(once) > np.abs(x).max(axis=axis, keepdims=True) * 2.0**-14
        assert held.mean() > 0.9
        np.testing.assert_array_equal(second[held], once[held])


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_scales_are_the_smallest_powers_of_two_that_cut_off_nothing(dtype):
    most = float(jnp.finfo(dtype).max)
    x = jnp.array([[most], [most * 1.0000002], [most / 2], [3e38], [1e-37], [0.0]])
    data, scale, _ = quantize_operand(x, dtype, "fp8")
    assert scale.tolist()[:3] == [1, 2, 0.5]
    assert scale[-1] == 1 and data[-1] == 0
    exponents = np.log2(np.asarray(scale, np.float64))
    np.testing.assert_array_equal(exponents, np.round(exponents))
    back = data.astype(jnp.float32) * scale[:, None]
    np.testing.assert_allclose(back, x, rtol=2**-3)


@ALL
def test_gradients_of_several_layers_are_summed_in_fp32(quantization):
    """What each of them adds is stored in 16 bits, as results of all layers are."""
    short = [normal(B, T, K), normal(B, T, N, seed=4)]
    short += [normal(K, N, seed=seed) for seed in (1, 2, 3)]
    # Without bits that a computation in bf16 would lose before it rounds to fp8.
    x, g, *ws = (jnp.asarray(each, jnp.bfloat16) for each in short)
    axes = {"kernel_axes": [("embed", "mlp")] * 3, "rules": REPLICATED}
    axes["out_axes"] = [("batch", None, "act_mlp")] * 3

    def gradient(dtype):
        product = partial(column_parallel, quantization=quantization, **axes)
        _, back = jax.vjp(lambda x: product(x, ws), x.astype(dtype))
        return back((g.astype(dtype),) * 3)[0]

    assert relative_error(gradient(jnp.bfloat16), gradient(jnp.float32)) < 2**-7


@ALL
def test_small_numbers_are_as_exact_as_large_ones(quantization):
    x, w = normal(B, T, K), normal(K, N, seed=1)
    product = partial(column, quantization=quantization)
    f = jax.jit(jax.value_and_grad(lambda x, w: product(x, w).sum(), (0, 1)))
    value, (dx, dw) = f(x, w)
    small = 2.0**-60
    tiny, (tiny_dx, tiny_dw) = f(x * small, w)
    assert tiny == value * small and value != 0
    np.testing.assert_array_equal(tiny_dx, dx)
    np.testing.assert_array_equal(tiny_dw, dw * small)
    zeros = f(x * 0, w)
    assert zeros[0] == 0 and not np.any(zeros[1][1])
    np.testing.assert_array_equal(zeros[1][0], dx)


def test_a_large_number_costs_other_rows_nothing_with_scales_of_rows():
    x, w = normal(B, T, K), normal(K, N, seed=1)
    x[0, 0, 0] = 2.0**40
    by_row, by_tensor = (column(x, w, q) for q in ("fp8", "fp8_tensorwise"))
    alone = column(x[1:], w)
    np.testing.assert_array_equal(by_row[1:], alone)
    assert not np.any(by_tensor[1:])  # all that is smaller is gone


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("product", [column, row])
@ALL
def test_what_is_not_finite_stays_visible(quantization, product, bad):
    f = partial(product, quantization=quantization)
    x, w, g = normal(B, T, K), normal(K, N, seed=1), normal(B, T, N, seed=2)
    x[1, 2, 3] = bad
    y, back = jax.vjp(f, *map(jnp.asarray, (x, w)))
    dx, dw = back(jnp.asarray(g))
    assert np.isnan(y[1, 2]).all() and np.isnan(dw[3]).all()
    if quantization != "fp8_tensorwise":
        assert np.isnan(y).sum() == N  # other tokens go on
    assert np.isfinite(dx).all()
    g[0, 1, 2] = bad
    y, back = jax.vjp(f, jnp.asarray(normal(B, T, K)), jnp.asarray(w))
    dx, dw = back(jnp.asarray(g))
    assert np.isfinite(y).all()
    assert np.isnan(dx[0, 1]).all() and np.isnan(dw[:, 2]).all()
    w[4, 5] = bad
    assert np.isnan(f(normal(B, T, K), w)[..., 5]).all()


NORM = 1 + normal(K, seed=7) / 4


def swiglu(x, norm, gate, up, down, rules=REPLICATED, **options):
    """A normalized feed-forward network whose activations are rounded at once."""
    out = feed_forward(
        x,
        [gate, up, down],
        kernel_axes=[("embed", "mlp"), ("embed", "mlp"), ("mlp", "embed")],
        out_axes=("batch", "tokens", "act_embed"),
        activation="silu",
        rules=rules,
        norm=(norm, 0.5),
        **options,
    )
    assert out is not None
    return out


def of_swiglu(seed=0):
    kernels = [normal(*size, seed=seed + i) for i, size in enumerate([(K, 48)] * 2)]
    arrays = normal(B, T, K, seed=seed), NORM, *kernels, normal(48, K, seed=seed + 3)
    return tuple(map(jnp.asarray, arrays))


def test_a_feed_forward_network_is_that_of_rounded_operands():
    given, g = of_swiglu(), normal(B, T, K, seed=5)
    y, back = jax.jit(lambda *args: jax.vjp(swiglu, *args))(*given)
    dx, dnorm, dgate, dup, ddown = back(jnp.asarray(g))
    x, norm, *ws = (np.asarray(a, np.float64) for a in given)
    x, g = x.reshape(-1, K), g.reshape(-1, K)
    factor = 1 / np.sqrt((x**2).mean(1, keepdims=True) + 0.5)
    h = x * factor * norm
    forward, backward = ([rounded(w, "x", axis) for w in ws] for axis in (0, 1))
    z, u = (rounded(h, "x", 1) @ w for w in forward[:2])
    sigmoid = 1 / (1 + np.exp(-z))
    a = z * sigmoid * u
    da = rounded(g, "g", 1) @ backward[2].T
    dz, du = da * u * sigmoid * (1 + z * (1 - sigmoid)), da * z * sigmoid
    dz8, du8 = np.split(rounded(np.concatenate([dz, du], 1), "g", 1), 2, axis=1)
    dh = dz8 @ backward[0].T + du8 @ backward[1].T
    scaled = dh * norm
    exact = {
        "y": (y, rounded(a, "x", 1) @ forward[2]),
        "dx": (
            dx,
            factor * (scaled - x * factor**2 * (scaled * x).mean(1, keepdims=True)),
        ),
        "dnorm": (dnorm, (dh * x * factor).sum(0)),
        "dgate": (dgate, rounded(h, "x", 0).T @ rounded(dz, "g", 0)),
        "dup": (dup, rounded(h, "x", 0).T @ rounded(du, "g", 0)),
        "ddown": (ddown, rounded(a, "x", 0).T @ rounded(g, "g", 0)),
    }
    for name, (found, wanted) in exact.items():
        # Sums in another order may round a number to its neighbor.
        assert relative_error(found.reshape(wanted.shape), wanted) < 0.02, name


@pytest.mark.parametrize(
    ("sizes", "kind", "rules", "tensor_parallel"),
    [
        ({"fsdp": 2, "tensor": 2}, "auto", fsdp_tp(), "fused"),
        ({"fsdp": 2, "tensor": 2}, "explicit", fsdp_tp(), "xla"),
        *exhaustive(({"data": 2, "fsdp": 2}, "auto", fsdp(), None)),
    ],
)
def test_devices_share_a_feed_forward_network(sizes, kind, rules, tensor_parallel):
    g = jnp.asarray(normal(B, T, K, seed=5))

    def run(*args, **options):
        f = partial(swiglu, tensor_parallel=tensor_parallel, **options)
        y, back = jax.vjp(f, *args)
        return y, back(g)

    expected = jax.jit(run)(*of_swiglu())
    count = int(np.prod(list(sizes.values())))
    config = MeshConfig(**sizes, axis_type=kind)
    with jax.set_mesh(make_mesh(config, jax.devices()[:count])):
        found = jax.jit(partial(run, rules=rules))(*of_swiglu())
    for actual, exact in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert relative_error(actual, exact) < 0.02


def test_tokens_that_are_not_split_take_two_regions():
    """Devices that share features and sum whole tokens."""
    rules = dataclasses.replace(fsdp_tp(), tokens=None)
    config = MeshConfig(tensor=2)
    layer = MLP(K, 48, rules=rules, quantization="fp8", rngs=nnx.Rngs(0))
    x = jnp.asarray(normal(B, T, K))
    alone = MLP(K, 48, quantization="fp8", rngs=nnx.Rngs(0))(x)
    with jax.set_mesh(make_mesh(config, jax.devices()[:2])):
        found = jax.jit(lambda layer, x: layer(x))(layer, x)
    assert relative_error(found, alone) < TOLERANCE


def network(params, x, *, rules, tensor_parallel, quantization):
    options = {"rules": rules, "tensor_parallel": tensor_parallel}
    options["quantization"] = quantization
    up, gate = column_parallel(
        x,
        [params["up"], params["gate"]],
        kernel_axes=[("embed", "mlp"), ("embed", "heads")],
        out_axes=[("batch", None, "act_mlp"), ("batch", None, "act_heads")],
        **options,
    )
    return row_parallel(
        [jnp.tanh(up), jnp.sin(gate)],
        [params["down"], params["out"]],
        kernel_axes=[("mlp", "embed"), ("heads", "embed")],
        out_axes=("batch", "tokens", "act_embed"),
        **options,
    )


PARAMS = {
    "up": normal(K, 48, seed=1),
    "gate": normal(K, 16, seed=2),
    "down": normal(48, K, seed=3),
    "out": normal(16, K, seed=4),
}


def value_and_grads(params, x, **options):
    def loss(params, x):
        y = network(params, x, **options)
        return (y * jnp.cos(jnp.arange(y.size).reshape(y.shape))).sum()

    return jax.jit(jax.value_and_grad(loss, (0, 1)))(params, x)


@pytest.mark.parametrize(
    ("sizes", "kind", "rules", "tensor_parallel", "quantization"),
    [
        ({"fsdp": 2, "tensor": 2}, "auto", fsdp_tp(), "fused", "fp8"),
        ({"fsdp": 2, "tensor": 2}, "explicit", fsdp_tp(), "xla", "fp8_tensorwise"),
        ({"data": 2, "fsdp": 2}, "auto", fsdp(), None, "fp8_blockwise"),
        *exhaustive(
            ({"data": 2, "tensor": 4}, "auto", fsdp_tp(), None, "fp8"),
            ({"data": 2, "fsdp": 2}, "auto", fsdp(), None, "fp8_tensorwise"),
        ),
        # Of two kernels rows are stored in parts, of two columns.
        ({"data": 2, "fsdp": 2}, "auto", fsdp(), None, "fp8"),
        # Tokens stay whole, so sums go to every device.
        (
            {"data": 2, "tensor": 2},
            "auto",
            dataclasses.replace(fsdp_tp(), tokens=None),
            None,
            "fp8",
        ),
        # Heads are not split: only one of two summed products is a sum over devices.
        (
            {"tensor": 4},
            "auto",
            dataclasses.replace(fsdp_tp(), heads=None, act_heads=None),
            None,
            "fp8",
        ),
    ],
)
def test_devices_get_what_one_device_gets(
    sizes, kind, rules, tensor_parallel, quantization
):
    options = {"tensor_parallel": tensor_parallel, "quantization": quantization}
    expected = value_and_grads(PARAMS, normal(B, T, K), rules=REPLICATED, **options)
    count = int(np.prod(list(sizes.values())))
    config = MeshConfig(**sizes, axis_type=kind)
    with jax.set_mesh(make_mesh(config, jax.devices()[:count])):
        found = value_and_grads(PARAMS, normal(B, T, K), rules=rules, **options)
    for actual, exact in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert relative_error(actual, exact) < TOLERANCE


def test_tokens_and_gradients_are_gathered_in_fp8():
    options = {"rules": fsdp_tp(), "tensor_parallel": "xla", "quantization": "fp8"}
    with jax.set_mesh(make_mesh(MeshConfig(tensor=4), jax.devices()[:4])):
        f = jax.jit(jax.grad(lambda p, x: network(p, x, **options).sum()))
        text = f.lower(PARAMS, normal(B, T, K)).as_text()
    gathers = re.findall(r"all_gather.*-> tensor<([\w]+)>", text)
    assert {shape.split("x")[-1] for shape in gathers if shape.count("x") == 3} == {
        "f8E4M3FN",
        "f8E5M2",
    }


def test_weights_stored_in_parts_are_gathered_in_fp8():
    options = {"rules": fsdp(), "tensor_parallel": None, "quantization": "fp8"}
    with jax.set_mesh(make_mesh(MeshConfig(fsdp=4), jax.devices()[:4])):
        loss = lambda p, x: network(p, x, **options).sum()  # noqa: E731
        f = jax.jit(jax.value_and_grad(loss, (0, 1)))
        text = f.lower(PARAMS, normal(B, T, K)).as_text()
    gathers = re.findall(r"all_gather.*-> tensor<([\w]+)>", text)
    matrices = [shape.split("x")[-1] for shape in gathers if shape.count("x") == 2]
    # Four weights, in the forward pass and in the backward pass.
    assert matrices == ["f8E4M3FN"] * 8
    assert text.count("reduce_scatter") == 4


@pytest.mark.parametrize("rules", [fsdp(), dataclasses.replace(fsdp(), mlp="data")])
def test_rows_that_are_zero_where_one_device_stores_them(rules):
    """What is small elsewhere keeps its scale; stored both ways, too."""
    zeros = np.r_[np.zeros(K // 2), np.full(K // 2, 1e-3)]
    params = PARAMS | {name: PARAMS[name] * zeros for name in ("down", "out")}
    options = {"tensor_parallel": None, "quantization": "fp8"}
    expected = value_and_grads(params, normal(B, T, K), rules=REPLICATED, **options)
    config = MeshConfig(data=2, fsdp=2)
    with jax.set_mesh(make_mesh(config, jax.devices()[:4])):
        found = value_and_grads(params, normal(B, T, K), rules=rules, **options)
    for actual, exact in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert relative_error(actual, exact) < TOLERANCE


def kept_types(policy=None):
    """Types of what the backward pass gets, of the shape of the activations."""
    f = column if policy is None else jax.checkpoint(column, policy=policy)
    x, w = jnp.asarray(normal(B, T, K)), jnp.asarray(normal(K, N, seed=1))
    back = jax.eval_shape(lambda x: jax.vjp(lambda x: f(x * 2, w), x)[1], x)
    return {leaf.dtype.name for leaf in jax.tree.leaves(back) if leaf.shape == x.shape}


def test_activations_are_kept_in_fp8():
    assert kept_types() == {"uint8"}  # bits of E4M3
    # Recomputed from the argument, unless a policy names the operand.
    assert kept_types(REMAT_POLICIES["dots_no_batch"]) == {"float32"}
    names = jax.checkpoint_policies.save_only_these_names("fp8_operand")
    assert "uint8" in kept_types(names)


def test_what_checkpoints_keep_is_what_they_were_given():
    x, w = normal(B, T, K), normal(K, N, seed=1)
    names = jax.checkpoint_policies.save_only_these_names("fp8_operand")
    plain, saved = (
        jax.jit(jax.grad(lambda x, w, f=f: jnp.sin(f(x, w)).sum(), 1))(x, w)
        for f in (column, jax.checkpoint(column, policy=names))
    )
    np.testing.assert_array_equal(saved, plain)
    assert np.isfinite(plain).all()


def test_gradients_of_fp32_parameters_are_rounded_as_those_of_other_layers():
    layer = ColumnParallelLinear(
        K,
        N,
        kernel_axes=("embed", "mlp"),
        out_axes=("batch", None, "act_mlp"),
        dtype=jnp.bfloat16,
        quantization="fp8",
        rngs=nnx.Rngs(0),
    )
    x = jnp.asarray(normal(B, T, K), jnp.bfloat16)
    grads = jax.grad(lambda m: m(x).astype(jnp.float32).sum())(layer)
    dw = np.asarray(grads.kernel[...])
    assert dw.dtype == np.float32
    wide = np.asarray(x).astype(np.float64).reshape(-1, K)
    exact = rounded(rounded(wide, "x", 1), "x", 0).sum(0)[:, None]
    np.testing.assert_array_equal(dw, dw.astype(ml_dtypes.bfloat16))
    assert relative_error(dw, np.broadcast_to(exact, dw.shape)) < 2**-8
    y = layer(x)
    assert y.dtype == jnp.bfloat16


@pytest.mark.parametrize("kind", [Linear, ColumnParallelLinear, RowParallelLinear])
def test_names_of_quantization(kind, no_shape_hook):
    make = partial(
        kind,
        4,
        8,
        kernel_axes=("embed", "mlp"),
        out_axes=("batch", None, "act_mlp"),
        rngs=nnx.Rngs(0),
    )
    with pytest.raises(ValueError, match=r"'int8' is for inference: .* take 'fp8'"):
        make(quantization="int8")
    with pytest.raises(ValueError, match=r"'e4m3' is unknown; use one of \('fp8', "):
        make(quantization="e4m3")
    x = jnp.asarray(normal(1, 3, 4))
    layer = make(quantization="fp8")
    exact = rounded(np.asarray(x), "x", -1) @ rounded(np.asarray(layer.weight), "x", 0)
    assert relative_error(layer(x), exact) < TOLERANCE


@pytest.mark.parametrize(
    ("product", "quantization"),
    [
        (column, "fp8"),
        (row, "fp8_tensorwise"),
        (row, "fp8_blockwise"),
        *exhaustive((row, "fp8"), (column, "fp8_tensorwise")),
    ],
)
def test_kernels_that_round_give_what_xla_gives(quantization, product, monkeypatch):
    """Forward and backward, in every bit where sums are in the same order."""
    size = 512 if quantization == "fp8_blockwise" else 256  # the least of its kernels
    x, w = normal(1, 128, size), normal(size, size, seed=1)
    g = normal(1, 128, size, seed=2)
    x, g = (jnp.asarray(a, jnp.bfloat16) for a in (x, g))
    multiply = partial(fp8.scaled_matmul, implementation="xla")
    monkeypatch.setattr(fp8, "scaled_matmul", multiply)

    def results():
        def run(x, w, g):
            y, back = jax.vjp(partial(product, quantization=quantization), x, w)
            return y, back(g)

        return jax.tree.map(np.asarray, jax.jit(run)(x, w, g))

    expected = results()
    with (
        use_device(dataclasses.replace(H200, num_sms=2)),
        interpret_mosaic_gpu() as ran,
    ):
        found = results()
    kernels = {"fp8": 7, "fp8_blockwise": 6, "fp8_tensorwise": 3}
    assert ran.kernels == kernels[quantization]
    for actual, exact in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_array_equal(actual, exact)


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["fp8", *exhaustive("fp8_tensorwise")])
def test_kernels_that_communicate_give_what_xla_gives(quantization, monkeypatch):
    """Forward and backward, of layers that share a gather and of some in one sum."""
    # Devices meet at interpreted kernels, in no order with sums over devices of XLA.
    for name in ("quantize_rows", "transpose_rows", "transpose"):
        local = partial(getattr(fp8, name), implementation="xla")
        monkeypatch.setattr(fp8, name, local)
    rules, config = (
        fsdp_tp(),
        CollectiveConfig(tile_m=128, tile_n=64, tile_k=128, stages=2),
    )
    sizes = {
        "up": (256, 256),
        "gate": (256, 256),
        "down": (256, 256),
        "out": (256, 256),
    }
    params = {
        name: normal(*size, seed=seed) / 16
        for seed, (name, size) in enumerate(sizes.items())
    }
    x, g = (jnp.asarray(normal(1, 256, 256, seed=s), jnp.bfloat16) for s in (5, 6))

    def results(tensor_parallel):
        def run(params, x, g):
            options = {"rules": rules, "quantization": quantization}
            options["tensor_parallel"] = tensor_parallel
            y, back = jax.vjp(partial(network, **options), params, x)
            return y, back(g)

        return jax.tree.map(np.asarray, jax.jit(run)(params, x, g))

    with jax.set_mesh(make_mesh({"tensor": 2}, jax.devices()[:2])):
        expected = results("xla")
        with (
            use_device(dataclasses.replace(H200, num_sms=1)),
            interpret_mosaic_gpu() as ran,
            tuned_configs.override("collective_matmul", config),
        ):
            found = results("fused")
        assert ran.kernels >= 4
    for actual, exact in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert relative_error(actual, exact) < RELATIVE[jnp.dtype(jnp.bfloat16)]
