"""Sparse linear layers with bias and activation against masked dense ones in fp32."""

import contextlib
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxscale import sharding
from jaxscale.nn import MLP, TileSparseLinear
from jaxscale.pruning.layers import linears, replace_linears
from pallas_kernels.matmul.activations import activate
from pallas_kernels.mosaic import H200, use_device
from pallas_kernels.tile_sparse_matmul import TileSparse, cover
from tests.interpreter import interpret_mosaic_gpu
from tests.lowering import lower_for_cuda
from tests.pallas_kernels.tile_sparse_matmul import stand_ins  # noqa: F401
from tests.pallas_kernels.tile_sparse_matmul.cases import random_weight
from tests.tolerances import RELATIVE, relative_error


BF16 = jnp.dtype(jnp.bfloat16)
RULES = sharding.preset("fsdp_tp")
AXES = {  # of the kernel and of the result
    "up": (("embed", "mlp"), ("batch", None, "act_mlp")),
    "down": (("mlp", "embed"), ("batch", "tokens", "act_embed")),
}


def normal(seed, *shape, dtype=jnp.float32):
    values = np.random.default_rng(seed).normal(size=shape)
    return jax.device_put(values.astype(dtype))


def make(axes, shards, extra=0.0):
    """A layer of 32 inputs and 48 outputs, its dense weight and what it keeps."""
    w, dense, mask = random_weight(32, 48, 8, [9, 0, 32, 5, 17, 1])
    if extra:
        rng = np.random.default_rng(0)
        mask = mask | (rng.random(mask.shape) < extra)
        dense = np.where(mask, rng.normal(size=mask.shape), 0).astype(np.float32)
        w = TileSparse.from_dense(dense, cover(mask, 8), tile=8)
    split: Any = None if shards == 1 else ("rows" if axes == "down" else "columns")
    layer = TileSparseLinear(
        w.shards(shards, split) if split else TileSparse.stack([w]),
        split=split,
        kernel_axes=AXES[axes][0],
        out_axes=AXES[axes][1],
        zeros_stay=extra > 0,
        bias=nnx.Param(
            normal(7, 48), out_sharding=AXES[axes][0][1:], eager_sharding=False
        ),
        rules=RULES,
    )
    return layer, jnp.asarray(dense), mask


def dense_kernel(layer):
    """The weight, or its gradient, put together from shards."""
    parts = np.asarray(jax.jit(jax.vmap(TileSparse.to_dense))(layer.weight))
    return np.concatenate(parts, 0 if layer.split == "rows" else 1)


@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize("extra", [0.0, 0.1], ids=["tiles", "singles"])
@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize("activation", [None, "silu"])
def test_values_and_gradients(activation, axes, shards, extra, devices):
    """Whole and sharded, also with rows of single weights and feature-major."""
    layer, dense, kept = make(axes, shards, extra)
    major = (axes == "down", axes == "up")
    x, dy = normal(1, 4, 6, 32), normal(2, 4, 6, 48)
    mesh = contextlib.nullcontext()
    if devices > 1:
        fsdp = devices // shards
        config = sharding.MeshConfig(fsdp=fsdp, tensor=shards)
        mesh = sharding.make_mesh(config, jax.devices()[:devices])
        layer = sharding.place(layer, mesh, RULES)
        mesh = jax.set_mesh(mesh)
    graph, params, rest = nnx.split(layer, nnx.Param, ...)

    def ours(x, params):
        x = jnp.moveaxis(x, -1, 0) if major[0] else x
        y = nnx.merge(graph, params, rest)(x, activation, feature_major=major)
        return jnp.moveaxis(y, 0, -1) if major[1] else y

    def plain(x, dense, bias):
        y = jnp.matmul(x, jnp.where(kept, dense, 0), precision="highest") + bias
        return activate(y, activation)

    def both(f, *args):
        y, pullback = jax.vjp(f, *args)
        return y, pullback(dy)

    with mesh:
        y, (dx, grads) = jax.jit(lambda *args: both(ours, *args))(x, params)
    want, wide = jax.jit(lambda *args: both(plain, *args))(x, dense, normal(7, 48))
    on_host = jax.tree.map(lambda a: jax.device_put(np.asarray(a)), (grads, rest))
    found: Any = nnx.merge(graph, *on_host)
    for got, wanted in zip(
        (y, dx, dense_kernel(found), found.bias[...]), (want, *wide), strict=True
    ):
        assert relative_error(got, wanted) < 1e-5


def test_unknown_activations_are_refused(no_shape_hook):
    for axes in AXES:
        with pytest.raises(ValueError, match="activation 'swish', expected None or"):
            make(axes, 2)[0](normal(1, 1, 5, 32), "swish")


def sparse_mlp(activation, implementation, d=128, f=256):
    """A sparse feed-forward network in bfloat16, and the dense one in fp32."""
    dense = MLP(d, f, activation=activation, use_bias=True, rngs=nnx.Rngs(0))
    weights = {}
    layers: dict[str, Any] = linears(dense)
    for i, (name, layer) in enumerate(sorted(layers.items())):
        k, n = layer.kernel.shape
        weights[name], kernel, _ = random_weight(
            k, n, 64, [(37 * t + 64) % k for t in range(n // 64)], dtype=BF16, seed=i
        )
        scale = 0.125  # a power of two: exact
        values = weights[name].values * jnp.asarray(scale, BF16)
        weights[name] = weights[name].with_values(values)
        layer.kernel[...] = jnp.asarray(kernel) * scale
        layer.bias[...] = normal(i, n, dtype=BF16).astype(jnp.float32)

    def convert(name, layer):
        return TileSparseLinear(
            TileSparse.stack([weights[name]]),
            split=None,
            kernel_axes=layer.kernel_axes,
            out_axes=layer.out_axes,
            bias=nnx.Param(layer.bias[...].astype(BF16)),
            dtype=BF16,
            implementation=implementation,
        )

    names = {n: lambda layer, n=n: convert(n, layer) for n in weights}
    return replace_linears(dense, names), dense


@pytest.mark.parametrize("activation", ["swiglu", "geglu", "gelu", "gelu_tanh", "relu"])
@pytest.mark.parametrize("implementation", ["mosaic_gpu", "xla"])
def test_feed_forward_networks(activation, implementation):
    sparse, dense = sparse_mlp(activation, implementation)
    x = normal(1, 1, 64, 128, dtype=BF16)
    with use_device(dataclasses.replace(H200, num_sms=2)), interpret_mosaic_gpu():
        y = np.asarray(sparse(x))
    assert relative_error(y, dense(x.astype(jnp.float32))) < RELATIVE[BF16]


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_each_layer_is_one_kernel(activation):
    """No bias is added outside, and no activation computed but that of a gate."""
    sparse, _ = sparse_mlp(activation, "mosaic_gpu")
    x = jax.ShapeDtypeStruct((4, 512, 128), BF16)
    gated = activation == "swiglu"
    with use_device(H200):
        text = lower_for_cuda(lambda m, x: m(x), sparse, x, kernels=3 if gated else 2)
    outside = ["convert", "pad"]
    if not gated:
        outside += ["add", "multiply", "erf", "exponential", "tanh"]
    for operation in outside:
        assert f"stablehlo.{operation} " not in text
        assert f"chlo.{operation} " not in text
