"""Ops on meshes: right everywhere, and by a kernel where arrays are local."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.dispatch import Unsupported
from pallas_kernels.layer_norm import layer_norm
from pallas_kernels.matmul import dense, matmul
from pallas_kernels.mosaic import H200, use_device
from pallas_kernels.tile_sparse_matmul import TileSparse, tile_sparse_matmul
from pallas_kernels.varlen_attention import varlen_attention
from tests.lowering import CUSTOM_CALL
from tests.tiers import exhaustive


AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
ROWS, COLUMNS = P("data"), P(None, "tensor")


@functools.cache
def sparse_weight(dtype):
    """A weight that keeps the first of four groups of 64 rows."""
    rows = np.repeat(np.arange(8) % 4 == 0, 64)
    mask = np.broadcast_to(rows[:, None], (512, 1024))
    with jax.ensure_compile_time_eval():
        return TileSparse.from_dense(
            jnp.ones(mask.shape, dtype), jnp.asarray(mask), tile=128, granularity=64
        )


OPS = {
    "matmul": lambda x, w, b, name=None: matmul(x, w, implementation=name),
    "dense": lambda x, w, b, name=None: dense(
        x, [w, w], [b, b], activation="relu", implementation=name
    ),
    "layer_norm": lambda x, w, b, name=None: layer_norm(
        x, jnp.ones(x.shape[-1]), residual=x, eps=1e-5, implementation=name
    ),
    "tile_sparse_matmul": lambda x, w, b, name=None: tile_sparse_matmul(
        x, sparse_weight(x.dtype), implementation=name
    ),
}


def attention(x, w, b, name=None):
    """Packed self-attention of 8 heads over the middle axis of x."""
    q = jnp.swapaxes(x[..., :128], 0, 1)  # [T, N, H]
    bounds = np.array([0, x.shape[1] // 3, x.shape[1]])
    return varlen_attention(q, q, q, bounds, causal=True, implementation=name)


OPS["varlen_attention"] = attention


def operands(dtype, rows=1024):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (8, rows, 512), (512, 1024), (1024,)
    return [jax.random.normal(k, s, dtype) for k, s in zip(keys, shapes, strict=True)]


def placed(arrays, mesh, x_spec, w_spec):
    specs = x_spec, w_spec, P(*w_spec[1:])
    return [
        jax.device_put(a, NamedSharding(mesh, spec))
        for a, spec in zip(arrays, specs, strict=True)
    ]


def with_gradients(op):
    def run(*args):
        y, pullback = jax.vjp(op, *args)
        return y, pullback(jax.tree.map(jnp.cos, y))

    return run


def count_kernels(fn, args):
    with use_device(H200):
        traced = jax.jit(fn).trace(*args)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    return text.count(f"@{CUSTOM_CALL}")


@pytest.fixture(scope="module")
def shapes():
    return jax.eval_shape(lambda: operands(jnp.bfloat16))


@functools.cache
def kernels_without_mesh(op):
    return count_kernels(
        with_gradients(op), jax.eval_shape(lambda: operands(jnp.bfloat16))
    )


def shaped(shapes, mesh, x_spec, w_spec):
    """Operands that hold nothing."""
    specs = x_spec, w_spec, P(*w_spec[1:])
    return [
        jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, spec))
        for a, spec in zip(shapes, specs, strict=True)
    ]


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
@pytest.mark.parametrize("kind", [EXPLICIT, *exhaustive(AUTO)])
def test_on_a_mesh_of_one_device_kernels_run_as_without_one(op, kind, shapes):
    mesh = jax.make_mesh((1, 1), ("data", "tensor"), axis_types=(kind, kind))
    args = shaped(shapes, mesh, ROWS, COLUMNS)
    without = kernels_without_mesh(op)
    with jax.set_mesh(mesh):
        assert count_kernels(with_gradients(op), args) == without > 0


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
@pytest.mark.parametrize("in_context", [True, False])
def test_on_an_auto_mesh_of_several_devices_the_compiler_gets_no_kernel(
    op, in_context, shapes
):
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AUTO, AUTO))
    args = shaped(shapes, mesh, ROWS, COLUMNS)
    empty = jax.sharding.AbstractMesh((), ())
    with jax.set_mesh(mesh) if in_context else jax.sharding.use_abstract_mesh(empty):
        assert count_kernels(with_gradients(op), args) == 0
        with use_device(H200), pytest.raises(Unsupported, match="does not partition"):
            jax.eval_shape(functools.partial(op, name="mosaic_gpu"), *args)


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_on_an_explicit_mesh_each_device_runs_a_kernel_on_its_rows(op, shapes):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(EXPLICIT,))
    args = shaped(shapes, mesh, ROWS, P(None, None))
    without = kernels_without_mesh(op)
    assert count_kernels(with_gradients(op), args) == without > 0
    with use_device(H200):
        y = jax.eval_shape(op, *args)
    assert "data" in jax.tree.leaves(y)[0].sharding.spec


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
@pytest.mark.parametrize(
    ("x_spec", "w_spec"),
    [
        (P("data"), P(None, "tensor")),
        (P(None, "data"), P(None, None)),
        (P(("data", "tensor")), P(None, None)),
        (P("tensor"), P(None, "tensor")),  # one axis twice in the result
        (P("data", None, "tensor"), P("data")),  # contracted dimensions are split
    ],
)
def test_values_and_gradients_on_explicit_meshes(op, x_spec, w_spec):
    """The sums of gradients over devices are there, once."""
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(EXPLICIT, EXPLICIT))
    arrays = operands(jnp.float32, rows=8)
    want = jax.jit(with_gradients(op))(*arrays)
    got = jax.jit(with_gradients(op))(*placed(arrays, mesh, x_spec, w_spec))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * np.abs(b).max())


def test_features_that_are_split_are_left_to_xla(shapes):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(EXPLICIT,))
    args = shaped(shapes, mesh, P(None, None, "data"), P(None, None))
    norm = OPS["layer_norm"]
    assert count_kernels(norm, args) == 0
    with use_device(H200), pytest.raises(Unsupported, match="does not partition"):
        jax.eval_shape(functools.partial(norm, name="mosaic_gpu"), *args)


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_inside_manual_regions_nothing_changes(kind, shapes):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(kind,))
    for check_vma in (True, False):
        local = jax.shard_map(
            with_gradients(OPS["layer_norm"]),
            mesh=mesh,
            in_specs=(ROWS, P(), P()),
            out_specs=(ROWS, (ROWS, P(), P())) if check_vma else ROWS,
            check_vma=check_vma,
        )
        args = shaped(shapes, mesh, ROWS, P(None, None))
        assert count_kernels(local, args) == 1


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_regions_that_are_manual_over_some_axes(kind, shapes):
    """The kernel runs there on an Explicit mesh, whose types say how arrays lie."""
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(kind, kind))
    for check_vma in (True, False):
        local = jax.shard_map(
            lambda x, w, b: OPS["layer_norm"](x, w, b),
            mesh=mesh,
            in_specs=(ROWS, P(), P()),
            out_specs=ROWS,
            axis_names={"data"},
            check_vma=check_vma,
        )
        args = shaped(shapes, mesh, ROWS, P(None, None))
        expected = int(kind == EXPLICIT and not check_vma)
        with jax.set_mesh(mesh):
            assert count_kernels(local, args) == expected


def test_vmap_over_a_split_axis_is_left_to_xla(shapes):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(EXPLICIT,))
    args = shaped(shapes, mesh, ROWS, P(None, None))
    each = jax.vmap(OPS["layer_norm"], (0, None, None))
    with jax.set_mesh(mesh):
        assert count_kernels(each, args) == 0
