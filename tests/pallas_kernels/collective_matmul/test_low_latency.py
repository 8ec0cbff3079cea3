"""The all-reduce without a barrier: interpreted, call after call, and lowered."""

import contextlib
import functools
import random
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.collective_matmul import all_reduce
from pallas_kernels.collective_matmul.all_reduce import (
    LINE,
    low_latency_all_reduce,
    make_all_reduce_workspace,
)
from pallas_kernels.mosaic import H200, DeviceSpec, unmarked
from tests.interpreter import (
    NotYet,
    cpu_mesh,
    interpret_mosaic_gpu,
    register_inline,
)
from tests.lowering import lower_for_cuda


BF16, FP16 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)
P = jax.sharding.PartitionSpec
SMALL = DeviceSpec(
    name="small", num_sms=2, smem_bytes=H200.smem_bytes, compute_capability=(9, 0)
)


def _send_cells(there, values):
    if there[1::2].any():
        raise AssertionError("cells are written before they were read")
    time.sleep(random.random() / 1000)  # devices drift apart
    there[0::2], there[1::2] = values.reshape(-1).view(np.int32), 1


def _receive_cells(here, closure):
    if not here[1::2].all():
        raise NotYet
    time.sleep(random.random() / 1000)
    values = here[0::2].copy().view(closure["dtype"]).reshape(closure["shape"])
    here[:] = 0
    return values


def _write_turn(turn, following):
    turn[:] = following


register_inline("send_cells", _send_cells, writes=(0,), flags=(0,))
register_inline("receive_cells", _receive_cells, writes=(0,), flags=(0,))
register_inline("write_turn", _write_turn, writes=(0,))


def drawn(shape, dtype, seed=0):
    values = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    return jnp.asarray(values.astype(dtype))


def total(y, dtype):
    """The sums of [D,...], added up in the order of the devices and rounded once."""
    wide = np.asarray(y).astype(np.float32)
    return functools.reduce(np.add, wide).astype(dtype)


def over_devices(f, devices, check_vma=False):
    """``f`` of the arrays of one device, for arrays stacked by device."""

    def local(*ys):
        return jax.tree.map(lambda y: y[None], f(*(y[0] for y in ys)))

    mesh = cpu_mesh(tensor=devices)
    spec = P("tensor")
    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma
    )
    return jax.jit(mapped)


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize(("devices", "dtype"), [(2, BF16), (4, FP16)])
def test_calls_of_several_sizes_with_one_workspace(devices, dtype, check_vma):
    shapes = [(3, 700), (1, 5), (2, 1024), (1, 512)]  # 5, 1, 4 and 1 chunks

    def run(*ys):
        workspace = make_all_reduce_workspace(
            3000, dtype, axis_name="tensor", device=SMALL
        )
        sums = []
        for y in ys:
            y, workspace = low_latency_all_reduce(y, workspace, axis_name="tensor")
            sums.append(y)
        return sums, workspace

    ys = [drawn((devices, *s), dtype, seed) for seed, s in enumerate(shapes)]
    with interpret_mosaic_gpu(detect_races=True) as found:
        sums, workspace = over_devices(run, devices, check_vma)(*ys)
        for y, copies in zip(ys, sums, strict=True):
            for copy in np.asarray(copies):
                np.testing.assert_array_equal(copy, total(y, dtype))
        assert found.kernels == 1 + len(shapes)
    assert not np.asarray(workspace.cells).any()  # all that was sent was read
    assert (np.asarray(workspace.turns) == (1 + len(shapes)) % 2).all()


def calls_in_one_kernel(ys, sets):
    """The sums of [calls,chunks,512] by one kernel, in which devices drift apart.

    The interpreter lets devices begin and end a kernel together, which hardware without
    a barrier does not.
    """
    calls, chunks, _ = ys.shape
    blocks = 2

    def body(y, cells, out):
        def call(i, _):
            all_reduce.exchange(
                y.at[i],
                out.at[i],
                cells,
                lax.rem(i, jnp.int32(sets)),
                axis_name="tensor",
                blocks=blocks,
            )

        lax.fori_loop(0, calls, call, None)

    def kernel(ys):
        cells = jax.new_ref(
            jnp.zeros((2, lax.axis_size("tensor"), chunks, LINE), jnp.int32)
        )
        return plgpu.kernel(
            body,
            out_type=jax.ShapeDtypeStruct(ys.shape, ys.dtype),
            grid=(blocks,),
            grid_names=("block",),
        )(ys, cells)

    return unmarked(kernel)(ys)


@pytest.mark.parametrize("sets", [2, 1])
def test_two_sets_of_cells_are_enough_where_devices_drift_apart(sets):
    """And one is not: a device writes what a slower one has not read."""
    ys = drawn((2, 12, 3, LINE), BF16)
    run = over_devices(functools.partial(calls_in_one_kernel, sets=sets), 2)
    enough = contextlib.nullcontext() if sets == 2 else pytest.raises(AssertionError)
    with (
        enough,
        interpret_mosaic_gpu(detect_races=True, concurrent_blocks=True),
    ):
        for copy in np.asarray(run(ys)):
            np.testing.assert_array_equal(copy, total(ys, BF16))


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ((3, 512), BF16, "1536 elements, expected at most the 1024"),
        ((1, 8), jnp.float32, "type float32, expected bfloat16 or float16"),
    ],
)
def test_arrays_that_do_not_fit_the_workspace(shape, dtype, message):
    def run(y):
        workspace = make_all_reduce_workspace(
            600, BF16, axis_name="tensor", device=SMALL
        )
        return low_latency_all_reduce(y, workspace, axis_name="tensor")

    with pytest.raises(ValueError, match=message):
        jax.eval_shape(over_devices(run, 2), jnp.zeros((2, *shape), dtype))


@pytest.mark.parametrize("rows", [1, 64])
@pytest.mark.parametrize("devices", [2, 4, 8])
def test_lowered_for_cuda(devices, rows):
    """No kernel but the first has a barrier, and none has semaphores to clear."""

    def run(y):
        workspace = make_all_reduce_workspace(
            y.size, BF16, axis_name="tensor", device=H200
        )
        for _ in range(3):
            y, workspace = low_latency_all_reduce(y, workspace, axis_name="tensor")
        return y

    y = jax.ShapeDtypeStruct((rows * devices, 8192), BF16)
    mapped = jax.shard_map(
        run, in_specs=P("tensor"), out_specs=P("tensor"), check_vma=False
    )
    text = lower_for_cuda(mapped, y, mesh={"tensor": devices}, kernels=4)
    assert text.count("skip_device_barrier = true") == 3
    assert text.count("skip_device_barrier = false") == 1
