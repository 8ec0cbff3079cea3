"""Operands of every device, runs over a mesh, and what the reference makes of them.

The operands of the devices of an axis stand in the first axis of one array. Those of
device d are scaled by 1 + d: a shard of a wrong device shows.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.collective_matmul import (
    all_gather_matmul,
    matmul_all_reduce,
    matmul_reduce_scatter,
    reference,
)
from tests.tolerances import RELATIVE


P = jax.sharding.PartitionSpec
OPS = {
    "all_gather_matmul": all_gather_matmul,
    "matmul_reduce_scatter": matmul_reduce_scatter,
    "matmul_all_reduce": matmul_all_reduce,
}


def make_mesh(*sizes, names=("tensor", "data", "pipe")):
    auto = (jax.sharding.AxisType.Auto,) * len(sizes)
    count = int(np.prod(sizes))
    return jax.make_mesh(
        sizes, names[: len(sizes)], axis_types=auto, devices=jax.devices()[:count]
    )


# Made by numpy: eager operations of jax compile for each shape, which takes longer.
def normal(shape, dtype, seed):
    values = np.random.default_rng(seed).normal(size=shape)
    return jnp.asarray(values.astype(np.float32).astype(jnp.dtype(dtype)))


def by_device(size, shape, dtype, seed):
    values = np.random.default_rng(seed).normal(size=(size, *shape))
    values *= np.arange(1, size + 1).reshape(size, *[1] * len(shape))
    return jnp.asarray(values.astype(np.float32).astype(jnp.dtype(dtype)))


def check(got, want, dtype):
    """Compares each array with its own largest value as the scale."""
    for g, r in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        g, r = (np.asarray(a).astype(np.float32) for a in (g, r))
        scale = np.max(np.abs(r))
        limit = RELATIVE[jnp.dtype(dtype)] * scale
        np.testing.assert_allclose(g, r, rtol=0, atol=limit, strict=True)


def on_devices(mesh, f, axis="tensor", check_vma=True):
    """``f`` of local operands, as a function of operands stacked by device."""

    def local(*operands):
        own = jax.tree.map(lambda a: a[0], operands)
        return jax.tree.map(lambda a: a[None], f(*own))

    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=P(axis), out_specs=P(axis), check_vma=check_vma
    )
    return jax.jit(mapped)


@functools.partial(jax.jit, static_argnums=0)
def with_gradients(f, operands, cotangents):
    """Outputs of ``f``, and gradients by its operands."""
    outputs, pullback = jax.vjp(f, *operands)
    types = jax.tree.map(lambda c, y: c.astype(y.dtype), cotangents, outputs)
    return outputs, pullback(types)


@functools.partial(jax.jit, static_argnums=0)
def expected(name, x, w):
    """What the reference makes of stacked operands: fp32, stacked by device."""
    outputs = getattr(reference, name)(list(x), list(w))
    return jnp.stack(outputs)


def expected_with_gradients(name, x, w, dy):
    f = functools.partial(expected, name)
    return with_gradients(f, (x.astype(jnp.float32), w.astype(jnp.float32)), dy)
