"""Gathers without a barrier: interpreted, call after call, and lowered."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.collective_matmul import CollectiveConfig
from pallas_kernels.collective_matmul.low_latency_gather import (
    low_latency_all_gather_matmul,
)
from pallas_kernels.collective_matmul.workspace import make_gather_workspace
from pallas_kernels.mosaic import H200
from tests.interpreter import cpu_mesh, interpret_mosaic_gpu
from tests.lowering import lower_for_cuda
from tests.tolerances import RELATIVE, relative_error


BF16 = jnp.dtype(jnp.bfloat16)
P = jax.sharding.PartitionSpec
SMALL = dataclasses.replace(H200, num_sms=2)
ROWS = CollectiveConfig(tile_m=128, tile_n=64, stages=2)
IN_ORDER_OF_K = dataclasses.replace(
    ROWS, gather_order="k", buffer_bytes=1024, piece_chunks=8
)


def drawn(seed, *shape):
    values = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    return jnp.asarray(values.astype(BF16))


def wide(x):
    return np.asarray(x, np.float32)


def over_devices(mesh, f, check_vma=False):
    return jax.jit(
        jax.shard_map(
            f,
            mesh=mesh,
            in_specs=(P("tensor"), P(None, "tensor")),
            out_specs=(P(None, "tensor"), P("tensor")),
            check_vma=check_vma,
        )
    )


@pytest.mark.parametrize("config", [ROWS, IN_ORDER_OF_K], ids=["rows", "k"])
@pytest.mark.parametrize("push", [False, True], ids=["pull", "push"])
@pytest.mark.parametrize("devices", [2, 4])
def test_calls_of_several_sizes_with_one_workspace(devices, push, config):
    rows, depth = 136, 1024 if config is IN_ORDER_OF_K else 128
    sizes = (rows, 64, 8, rows)

    def run(x, w):
        workspace = make_gather_workspace(
            rows, depth, BF16, axis_name="tensor", device=SMALL, push=push
        )
        ys = []
        for i, size in enumerate(sizes):
            y, workspace = low_latency_all_gather_matmul(
                (i + 1) * x[:size],
                w,
                workspace,
                axis_name="tensor",
                device=SMALL,
                config=config,
            )
            ys.append(y)
        return ys, (workspace.counters[None], workspace.turns[None])

    x, w = drawn(0, devices * rows, depth), drawn(1, depth, devices * 64)
    with interpret_mosaic_gpu(concurrent_blocks=True, timeout=60) as found:
        ys, (_, turns) = over_devices(cpu_mesh(tensor=devices), run)(x, w)
        for i, (y, size) in enumerate(zip(ys, sizes, strict=True)):
            parts = wide(x).reshape(devices, rows, depth)[:, :size]
            want = (i + 1) * parts.reshape(-1, depth) @ wide(w)
            assert relative_error(y, want) < RELATIVE[BF16], i
        assert found.kernels == 1 + len(sizes)
    turns = np.asarray(turns)
    assert (turns == len(sizes) % 2).all()


@pytest.mark.parametrize("push", [False, True], ids=["pull", "push"])
@pytest.mark.parametrize("devices", [2, 4])
def test_lowered_for_cuda(devices, push):
    """No kernel but the first has a barrier, and none has semaphores to clear."""
    rows, depth = 512, 4096

    def run(x, w):
        workspace = make_gather_workspace(
            rows, depth, BF16, axis_name="tensor", device=H200, push=push
        )
        ys = []
        for _ in range(3):
            y, workspace = low_latency_all_gather_matmul(
                x, w, workspace, axis_name="tensor", device=H200
            )
            ys.append(y)
        return ys

    mapped = jax.shard_map(
        run,
        in_specs=(P("tensor"), P(None, "tensor")),
        out_specs=P(None, "tensor"),
        check_vma=False,
    )
    x = jax.ShapeDtypeStruct((devices * rows, depth), BF16)
    w = jax.ShapeDtypeStruct((depth, devices * 1536), BF16)
    text = lower_for_cuda(mapped, x, w, mesh={"tensor": devices}, kernels=4)
    assert text.count("skip_device_barrier = true") == 3
    assert text.count("skip_device_barrier = false") == 1
