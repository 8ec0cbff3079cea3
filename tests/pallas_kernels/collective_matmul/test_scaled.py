"""Collective products of 8-bit operands: XLA's form, and the kernels interpreted."""

import dataclasses
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding

from pallas_kernels.collective_matmul import (
    CollectiveConfig,
    scaled_all_gather_matmul,
    scaled_matmul_reduce_scatter,
)
from pallas_kernels.dispatch import Unsupported
from pallas_kernels.mosaic import H200, use_device
from pallas_kernels.scaled_matmul import quantize_fp8
from tests.compiled import compile_for_h200
from tests.interpreter import cpu_mesh, interpret_mosaic_gpu
from tests.lowering import lower_for_cuda
from tests.tiers import exhaustive
from tests.tolerances import RELATIVE, relative_error


E4M3, E5M2 = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2)
BF16 = jnp.dtype(jnp.bfloat16)
SMALL = CollectiveConfig(tile_m=128, tile_n=64, tile_k=128, stages=2)
P = jax.sharding.PartitionSpec
H100 = dataclasses.replace(H200, name="nvidia_h100_80gb_hbm3")
GATHER, REDUCE = scaled_all_gather_matmul, scaled_matmul_reduce_scatter
GATHERED = (P("tensor"),) * 4, P(None, "tensor")
REDUCED = (P(None, "tensor"), P(None, "tensor"), P(), P()), P("tensor")


def drawn(seed, shape, dtype, axis):
    """Rows of very different size, rounded; and what they stand for."""
    keys = jax.random.split(jax.random.key(seed))
    size = jnp.exp(jax.random.normal(keys[0], (*shape[:-1], 1)))
    q, scale = quantize_fp8(size * jax.random.normal(keys[1], shape), dtype, axis=axis)
    wide = np.asarray(q, np.float32) * np.asarray(scale)[..., None]
    return q, scale, wide


def gather(mesh, batch, rows, columns, depth, types, axis, **options):
    """Rows and columns of all devices, on their devices; and the product."""
    a, a_scale, wide_a = drawn(1, (*batch, rows, depth), types[0], axis)
    bs, b_scales, wides = zip(
        *(drawn(2 + i, (n, depth), types[1], axis) for i, n in enumerate(columns)),
        strict=True,
    )
    leading = (None,) * len(batch)
    by_row = axis is not None

    def local(a, bs, a_scale, b_scales):
        return GATHER(a, bs, a_scale, b_scales, axis_name="tensor", **options)

    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(
            P(*leading, "tensor"),
            P("tensor"),
            P(*leading, "tensor") if by_row else P(),
            P("tensor") if by_row else P(),
        ),
        out_specs=P(*leading, None, "tensor"),
        check_vma=options.get("implementation") != "mosaic_gpu",
    )
    ys = mapped(a, bs, a_scale, b_scales)
    return ys, [wide_a @ wide.T for wide in wides]


def reduce(mesh, batch, rows, columns, depth, types, axis, **options):
    """Operands split along K, with scales of each device's own; and the product."""
    devices = mesh.shape["tensor"]
    a, a_scale, wide_a = drawn(1, (devices, *batch, rows, depth), types[0], axis)
    b, b_scale, wide_b = drawn(2, (devices, columns, depth), types[1], axis)
    if axis is None:  # each device has another scale
        factors = 1.0 + np.arange(devices, dtype=np.float32)
        a_scale, b_scale = a_scale * factors, b_scale * factors
        wide_a = wide_a * factors.reshape(-1, *[1] * (wide_a.ndim - 1))
        wide_b = wide_b * factors.reshape(-1, 1, 1)

    def local(*arrays):
        own = (x[0] for x in arrays)
        return REDUCE(*own, axis_name="tensor", **options)

    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=P("tensor"),
        out_specs=P(*(None,) * len(batch), "tensor"),
        check_vma=options.get("implementation") != "mosaic_gpu",
    )
    y = mapped(a, b, a_scale, b_scale)
    pairs = zip(wide_a, wide_b, strict=True)
    return (y,), [sum(left @ right.T for left, right in pairs)]


def assert_close(ys, wants):
    for y, want in zip(ys, wants, strict=True):
        y = np.asarray(y)
        assert y.dtype == BF16 and y.shape == want.shape
        assert relative_error(y, want) < RELATIVE[BF16]
        # Each row by itself: their sizes differ.
        error = np.abs(y.astype(np.float32) - want).max(axis=-1)
        assert np.all(error < 2e-2 * np.abs(want).max(axis=-1))


@pytest.mark.parametrize("types", [(E5M2, E4M3), *exhaustive(((E4M3, E4M3),))])
@pytest.mark.parametrize("axis", [-1, *exhaustive(None)])
def test_xla_equals_the_reference(types, axis):
    mesh = jax.make_mesh((4,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
    assert_close(*gather(mesh, (2,), 8, (12, 20), 24, types, axis))
    assert_close(*reduce(mesh, (2,), 8, 20, 24, types, axis))


@pytest.mark.parametrize(
    ("op", "shape", "types", "axis", "config"),
    [
        # Rows that are padded, past the end of a tile; weights that share a gather.
        (gather, ((), 2 * 131, (128, 256), 256), (E4M3, E5M2), -1, SMALL),
        (
            *(gather, ((2,), 144, (256,), 384), (E4M3, E4M3), None),
            dataclasses.replace(SMALL, gather_order="k", tile_n=128, store_slots=2),
        ),
        *exhaustive(
            (reduce, ((), 2 * 131, 128, 256), (E4M3, E4M3), -1, SMALL),
            (
                *(reduce, ((2,), 144, 256, 128), (E5M2, E4M3), None),
                dataclasses.replace(SMALL, tile_n=192),
            ),
        ),
        (  # Two promotions a stage, of products and of the sums of peers.
            *(reduce, ((), 144, 320, 256), (E4M3, E4M3), -1),
            dataclasses.replace(SMALL, tile_n=256),
        ),
    ],
)
def test_interpreted_kernels_equal_the_reference(op, shape, types, axis, config):
    mesh = cpu_mesh(data=1, tensor=2)
    with (
        use_device(dataclasses.replace(H200, num_sms=1)),
        # A ring of two views is none to the detector: it knows no stages.
        interpret_mosaic_gpu(detect_races=op is gather),
    ):
        ys, wants = op(
            *(mesh, *shape, types, axis), implementation="mosaic_gpu", config=config
        )
        ys = [np.asarray(y) for y in ys]
    assert_close(ys, wants)


@pytest.mark.parametrize(
    ("op", "spec", "out_spec"),
    [
        (GATHER, *GATHERED),
        (REDUCE, *REDUCED),
    ],
)
def test_kernels_lower_by_name_and_where_they_were_faster(op, spec, out_spec):
    def run(implementation, device=H200, rows=8192, devices=4):
        shapes = [
            jax.ShapeDtypeStruct((rows, 8192), E4M3),
            jax.ShapeDtypeStruct((8192, 8192), E5M2),
            jax.ShapeDtypeStruct((rows,), jnp.float32),
            jax.ShapeDtypeStruct((8192,), jnp.float32),
        ]
        f = functools.partial(op, axis_name="tensor", implementation=implementation)
        mapped = jax.shard_map(f, in_specs=spec, out_specs=out_spec, check_vma=False)
        with use_device(device):
            return lower_for_cuda(mapped, *shapes, mesh={"tensor": devices}, kernels=1)

    def collectives(text):
        names = ("all_gather", "reduce_scatter")
        return [text.count(f"stablehlo.{name}") for name in names]

    # Scales alone are gathered outside of the kernel; else the kernel is the product's.
    ours, of_xla = ([1, 0], [2, 0]) if op is GATHER else ([0, 0], [0, 1])
    assert collectives(run("mosaic_gpu")) == ours
    assert collectives(run(None)) == of_xla
    assert collectives(run(None, H100, rows=2048)) == ours
    assert collectives(run(None, H100, rows=1024)) == of_xla
    assert collectives(run(None, H100, devices=2)) == of_xla


def test_errors_say_what_to_do():
    a, a_scale, _ = drawn(0, (4, 16), E4M3, None)
    b, b_scale, _ = drawn(1, (8, 16), E4M3, -1)
    mesh = jax.make_mesh((4,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))

    def on_devices(op, *arrays, **options):
        run = functools.partial(op, axis_name="tensor", **options)
        return jax.shard_map(run, mesh=mesh, in_specs=P(), out_specs=P("tensor"))(
            *arrays
        )

    with pytest.raises(ValueError, match="'tensor' is no axis"):
        GATHER(a, b, a_scale, b_scale, axis_name="tensor")
    with pytest.raises(ValueError, match="b has type float32"):
        on_devices(REDUCE, a, b.astype(jnp.float32), a_scale, b_scale)
    with pytest.raises(ValueError, match=r"b_scale has .* expected .* \(8,\)"):
        on_devices(GATHER, a, b, a_scale, b_scale[:3])
    with pytest.raises(ValueError, match="2 weights and b_scale 1 scales"):
        on_devices(GATHER, a, [b, b], a_scale, [b_scale])
    with pytest.raises(ValueError, match="rows M=3 in multiples of the 4 devices"):
        on_devices(REDUCE, a[:3], b, a_scale, b_scale)
    with pytest.raises(NotImplementedError, match="gradient rule of its own"):
        jax.grad(lambda s: on_devices(REDUCE, a, b, s, b_scale).sum())(a_scale)
    with use_device(H200):
        with pytest.raises(Unsupported, match="tile_k=128"):
            on_devices(
                *(GATHER, a, b, a_scale, b_scale),
                implementation="mosaic_gpu",
                config=CollectiveConfig(tile_k=64),
            )
        with pytest.raises(Unsupported, match="reduces in bfloat16"):
            on_devices(
                *(REDUCE, a, b, a_scale, b_scale),
                implementation="mosaic_gpu",
                out_dtype=jnp.float32,
            )


def on_gpus(devices, kind, m, n, k, columns=None):
    """A program for `compile_for_h200`, with tiles of some columns."""
    config = columns and CollectiveConfig(tile_k=128, tile_n=columns)
    op = {"gather": GATHER, "reduce": REDUCE}[kind]
    in_specs, out_specs = {"gather": GATHERED, "reduce": REDUCED}[kind]
    mesh = Mesh(np.array(devices), ("tensor",))
    run = functools.partial(
        op, axis_name="tensor", implementation="mosaic_gpu", config=config
    )
    fn = jax.shard_map(
        run, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )
    types = ((m, k), E4M3), ((n, k), E5M2), ((m,), jnp.float32), ((n,), jnp.float32)
    arguments = [
        jax.ShapeDtypeStruct(*kind, sharding=NamedSharding(mesh, spec))
        for kind, spec in zip(types, in_specs, strict=True)
    ]
    return jax.jit(fn), tuple(arguments)


@pytest.mark.skipif(sys.platform != "linux", reason="the plugin is for Linux")
@pytest.mark.parametrize(
    ("devices", "kind", "sizes"),
    [
        (4, "gather", (2048, 57344, 8192, 256)),
        (4, "reduce", (8192, 8192, 28672, 256)),
        (2, "reduce", (2048, 8192, 8192)),
        *exhaustive(
            (4, "gather", (8192, 57344, 8192)),
            (4, "gather", (16384, 10240, 8192, 256)),
            (2, "gather", (1024, 49152, 12288, 256)),
            (2, "gather", (2048, 10240, 8192)),
            (4, "reduce", (8192, 8192, 28672)),
        ),
    ],
)
def test_compiled_kernels_spill_nothing(devices, kind, sizes):
    found = compile_for_h200(on_gpus, kind, *sizes, count=devices)
    assert [(k.spilled, k.registers <= 255) for k in found.kernels] == [(0, True)]
    m, _, k, *_ = sizes
    # Rows travel in the kernel, scales alone outside of it; no operand is copied.
    assert all(size <= m for size in found.sizes("all-gather"))
    assert found.count("reduce-scatter") == 0
    copied = found.written(m * k // devices)
    assert [w for w in copied if "mosaic_gpu" not in w.operation] == []
