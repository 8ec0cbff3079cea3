"""A decoder layer in one launch on several devices: interpreted, lowered, refused."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.collective_matmul import make_all_reduce_workspace
from pallas_kernels.decode_layer import mosaic_gpu, tensor_parallel_decode_layer
from pallas_kernels.decode_layer.config import DecodeLayerConfig, Kept
from pallas_kernels.decode_layer.peers import Peers
from pallas_kernels.dispatch import Unsupported
from pallas_kernels.mosaic import H200, use_device
from tests.interpreter import cpu_mesh, interpret_mosaic_gpu
from tests.lowering import lower_for_cuda
from tests.pallas_kernels.collective_matmul import test_low_latency
from tests.pallas_kernels.decode_layer.test_decode_layer import (
    BF16,
    EPS,
    FP8,
    INT8,
    LAST,
    TINY,
    arguments,
    check,
    operands,
)


del test_low_latency  # it has registered what stands for sending and receiving

P = jax.sharding.PartitionSpec


def local_problem(problem, devices):
    """The sizes of a device's part of a layer."""
    names = "d_ff", "features", "heads", "kv_heads"
    sizes = {name: getattr(problem, name) // devices for name in names}
    return dataclasses.replace(problem, devices=devices, **sizes)


def split(problem, given, devices):
    """The operands of all devices, stacked."""
    p, heads = problem, problem.head_dim
    parts = {
        "attended": (p.features,),
        "out": (p.features,),
        "next_out": (p.features,),
        "gate_up": (p.d_ff, p.d_ff),
        "down": (p.d_ff,),
        "qkv": (p.heads * heads, p.kv_heads * heads, p.kv_heads * heads),
    }
    axes = {"attended": 1, "out": 0, "next_out": 0, "gate_up": 1, "down": 0, "qkv": 1}
    if p.narrow:
        axes |= {name: 1 - axis for name, axis in axes.items() if name != "attended"}
    for name, of in (
        ("gate_up_scale", "gate_up"),
        ("qkv_scale", "qkv"),
        ("bias", "qkv"),
    ):
        parts[name], axes[name] = parts[of], 0

    def of(device, name, array):
        if name not in parts:
            return array
        pieces = jnp.split(array, np.cumsum(parts[name])[:-1], axes[name])
        own = [jnp.split(piece, devices, axes[name])[device] for piece in pieces]
        return jnp.concatenate(own, axes[name])

    return {
        name: jnp.stack([of(device, name, array) for device in range(devices)])
        for name, array in given.items()
    }


def layer_of(problem, given, workspace, device, **config):
    """A device's part of a call."""
    return mosaic_gpu.decode_layer(
        given,
        problem=problem,
        config=DecodeLayerConfig(**config),
        device=device,
        eps=EPS,
        workspace=workspace,
        axis_name="tensor",
    )


def begin(problem, device):
    return make_all_reduce_workspace(
        problem.d_model * problem.rows, BF16, axis_name="tensor", device=device
    )


def calls(*stacked, problem, device, **config):
    """The results of calls that follow each other, and the last workspace."""
    workspace, found = begin(problem, device), []
    for given in stacked:
        given = jax.tree.map(lambda a: a[0], given)
        *made, workspace = layer_of(problem, given, workspace, device, **config)
        found.append([None if a is None else a[None] for a in made])
    return found, workspace


def over_devices(fn, devices):
    return jax.jit(
        jax.shard_map(
            fn,
            mesh=cpu_mesh(tensor=devices),
            in_specs=P("tensor"),
            out_specs=P("tensor"),
            check_vma=False,
        )
    )


def whole(problem, made, devices):
    """What the devices of a call made, as one has it; their residuals are equal."""
    residual, q, kv = made
    residuals = np.asarray(residual)
    for other in residuals[1:]:
        np.testing.assert_array_equal(other, residuals[0])
    if not problem.projects:
        return residuals[0], None, None, None
    kv = np.asarray(kv).reshape(devices, problem.m, 2, -1)
    kv = np.concatenate(kv, axis=-1).reshape(problem.m, -1)
    return residuals[0], jnp.concatenate(list(q), axis=1), jnp.asarray(kv), None


WIDE = {"d_ff": 512, "features": 512, "heads": 4, "kv_heads": 2}
FEW = {"weight_slots": 2, "activation_slots": 2}


@pytest.mark.parametrize(
    ("changes", "devices", "num_sms", "config"),
    [
        # Parts of sums in memory; a device with sums from registers.
        ({"m": 16, "bias": True}, 2, 2, FEW),
        (INT8, 2, 1, FEW),
        ({"d_ff": 1024, "features": 1024, "heads": 8, "kv_heads": 4} | FP8, 4, 1, FEW),
        (LAST, 2, 2, FEW),
    ],
)
def test_interpreted_layers_equal_the_reference(changes, devices, num_sms, config):
    problem = dataclasses.replace(TINY, **WIDE | changes)
    inputs = [operands(problem, seed) for seed in range(2)]
    device = dataclasses.replace(H200, num_sms=num_sms)
    run = over_devices(
        functools.partial(
            calls, problem=local_problem(problem, devices), device=device, **config
        ),
        devices,
    )
    with interpret_mosaic_gpu(detect_races=True, concurrent_blocks=num_sms > 1):
        found, workspace = run(*(split(problem, given, devices) for given in inputs))
        for given, made in zip(inputs, found, strict=True):
            check(problem, given, whole(problem, made, devices))
        assert not np.asarray(workspace.cells).any()  # all that was sent was read


def sums_in_one_kernel(parts):
    """The sums over devices of [calls,2,64,16] by one kernel.

    The interpreter lets devices begin and end a kernel together, which hardware without
    a barrier does not: here they drift apart.
    """
    calls, rows = parts.shape[0], parts.shape[-1]

    def body(parts, cells, out):
        def call(i, _):
            adder = Peers(cells=cells, turn=i * 0, axis_name="tensor", rows=rows)
            for number in range(2):
                part = parts.at[i, number]
                part = plgpu.load(part, layout=plgpu.Layout.WGMMA, optimized=False)
                (total,) = adder.add(number, (jnp.int32(0),), jnp.int32(0), [part])
                out.at[i, number][...] = total

        lax.fori_loop(0, calls, call, None)

    cells = jax.new_ref(jnp.zeros((2, lax.axis_size("tensor"), 2, 512), jnp.int32))
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(parts.shape, parts.dtype),
        grid=(1,),
        grid_names=("block",),
    )(parts, cells)


def test_two_sets_of_cells_are_enough_where_devices_drift_apart():
    devices = 4  # the sums of two cannot drift so far
    parts = jax.random.normal(jax.random.key(0), (devices, 8, 2, 64, 16))
    run = over_devices(lambda x: sums_in_one_kernel(x[0])[None], devices)
    rounded = np.asarray(parts.astype(BF16).astype(jnp.float32))
    want = functools.reduce(np.add, rounded)
    with interpret_mosaic_gpu(detect_races=True):
        for found in np.asarray(run(parts)):
            np.testing.assert_array_equal(found, want)


@pytest.mark.parametrize(("devices", "changes"), [(2, {"m": 32}), (4, {"m": 1} | INT8)])
def test_lowered_for_cuda(devices, changes):
    """No launch but the first has a barrier, and none has semaphores to clear."""
    sizes = {"d_model": 1024, "d_ff": 2048, "features": 1024, "heads": 8, "kv_heads": 4}
    problem = dataclasses.replace(TINY, **sizes | changes)
    shapes = jax.eval_shape(lambda: split(problem, operands(problem), devices))
    run = functools.partial(calls, problem=local_problem(problem, devices), device=H200)
    mapped = jax.shard_map(
        run, in_specs=P("tensor"), out_specs=P("tensor"), check_vma=False
    )
    text = lower_for_cuda(mapped, shapes, shapes, mesh={"tensor": devices})
    assert text.count("skip_device_barrier = false") == 1
    assert "skip_device_barrier = true" in text


def test_what_the_kernel_refuses():
    problem = dataclasses.replace(TINY, **WIDE)
    given = split(problem, operands(problem), 2)
    kernel = {"axis_name": "tensor", "eps": EPS, "implementation": "mosaic_gpu"}

    def run(given, workspace_of, mesh, **more):
        def local(given):
            given = jax.tree.map(lambda a: a[0], given)
            arrays = arguments(local_problem(problem, 2), given)
            cells = workspace_of and begin(workspace_of, H200)
            tensor_parallel_decode_layer(*arrays, cells, **kernel)

        specs = {"in_specs": P("tensor"), "out_specs": None, "check_vma": False}
        with use_device(H200), jax.set_mesh(mesh):
            jax.eval_shape(jax.shard_map(local, **specs, **more), given)

    run(given, problem, cpu_mesh(tensor=2))
    with pytest.raises(Unsupported, match="for 2048 numbers of 2 devices, got None"):
        run(given, None, cpu_mesh(tensor=2))
    small = dataclasses.replace(problem, d_model=64)
    with pytest.raises(Unsupported, match="got one for 512 of 2"):
        run(given, small, cpu_mesh(tensor=2))
    mesh = cpu_mesh(data=2, tensor=2)
    with pytest.raises(Unsupported, match="does not partition the kernel"):
        run(given, problem, mesh, axis_names={"tensor"})
    three = jax.tree.map(lambda a: jnp.concatenate([a, a[:1]]), given)
    with pytest.raises(Unsupported, match="has 3 devices, expected one of"):
        run(three, problem, cpu_mesh(tensor=3))
    with use_device(H200), pytest.raises(ValueError, match="no axis of an enclosing"):
        tensor_parallel_decode_layer(
            *arguments(problem, operands(problem)), None, **kernel
        )
    sparse = dataclasses.replace(problem, kept=((Kept(tiles=2, room=64),),) * 4)
    sparse.check()
    with pytest.raises(Unsupported, match="tile-sparse weights over 2 devices"):
        dataclasses.replace(sparse, devices=2).check()


def test_xla_adds_over_devices():
    problem = dataclasses.replace(TINY, **WIDE | {"m": 16, "bias": True} | INT8)
    given = operands(problem)
    local = local_problem(problem, 2)

    def run(given):
        arrays = arguments(local, jax.tree.map(lambda a: a[0], given))
        options = {"axis_name": "tensor", "eps": EPS, "implementation": "xla"}
        residual, heads, _ = tensor_parallel_decode_layer(*arrays, None, **options)
        return jax.tree.map(lambda a: a[None], (residual, *heads))

    residual, q, kv = over_devices(run, 2)(split(problem, given, 2))
    q = q.reshape(2, problem.m, -1)
    check(problem, given, whole(problem, (residual, q, kv), 2))
