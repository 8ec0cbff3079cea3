"""The kernel that only communicates copies what it should; all baselines lower."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.rivals import collective_baselines as baselines
from pallas_kernels.dispatch import Unsupported
from pallas_kernels.mosaic import H200, use_device
from tests.interpreter import cpu_mesh, interpret_mosaic_gpu
from tests.lowering import lower_for_cuda


P = jax.sharding.PartitionSpec
SPLIT = P("tensor")
BF16 = jnp.bfloat16


def on_mesh(function, mesh, in_specs=SPLIT):
    return jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=P("tensor"), check_vma=False
    )


def interpreted(push, x, blocks):
    mesh = cpu_mesh(tensor=4)
    function = functools.partial(push, size=4, blocks=blocks, device=H200)
    with interpret_mosaic_gpu(detect_races=blocks == 1, concurrent_blocks=blocks > 1):
        return np.asarray(jax.jit(on_mesh(function, mesh))(x))


@pytest.mark.parametrize(("rows", "blocks"), [(128, 1), (192, 2), (4, 1)])
def test_push_gathers_rows(rows, blocks):
    x = jax.random.normal(jax.random.key(0), (4 * rows, 256), BF16)
    y = interpreted(baselines.push_all_gather, x, blocks)
    want = np.concatenate([np.asarray(x)] * 4)
    np.testing.assert_array_equal(y, want)


@pytest.mark.parametrize(("rows", "blocks"), [(64, 1), (128, 2), (4, 1)])
def test_push_sends_rows_to_their_owner(rows, blocks):
    x = jax.random.normal(jax.random.key(0), (4 * 4 * rows, 128), BF16)
    y = interpreted(baselines.push_reduce_scatter, x, blocks)
    y = y.reshape(4, 3, rows, 128)
    sent = np.asarray(x).reshape(4, 4, rows, 128)  # source, owner
    for owner in range(4):
        for r in range(3):
            np.testing.assert_array_equal(y[owner, r], sent[(owner - r - 1) % 4, owner])


def test_push_of_an_all_reduce_is_both():
    x = jax.random.normal(jax.random.key(0), (4 * 4 * 8, 128), BF16)
    y = interpreted(baselines.push_all_reduce, x, 1).reshape(4, 4, 8, 128)
    sent = np.asarray(x).reshape(4, 4, 8, 128)  # source, owner
    want = np.stack([sent[(owner - 1) % 4, owner] for owner in range(4)])
    for device in range(4):
        np.testing.assert_array_equal(y[device], want)


@pytest.mark.parametrize("m", [16, 512, 8192])
@pytest.mark.parametrize("size", [2, 4])
def test_push_lowers(m, size):
    x = jax.ShapeDtypeStruct((m, 8192), BF16)
    for push in (baselines.push_all_gather, baselines.push_reduce_scatter):
        function = functools.partial(push, size=size, blocks=16, device=H200)
        split = P("tensor") if push is baselines.push_all_gather else P()
        lowered = on_mesh(function, None, split)
        lower_for_cuda(lowered, x, mesh={"tensor": size}, kernels=1)


@pytest.fixture
def four_gpus(monkeypatch):
    """What jax's sample asks of the machine."""
    from jax.experimental.pallas.ops.gpu import collective_matmul_mgpu as sample

    class Four(types.ModuleType):
        def __getattr__(self, name):
            return getattr(jax, name)

        device_count = local_device_count = staticmethod(lambda: 4)
        devices = staticmethod(lambda: [types.SimpleNamespace(core_count=132)])

    monkeypatch.setattr(sample, "jax", Four("jax"))
    with use_device(H200):
        yield


@pytest.mark.parametrize("config", baselines.SAMPLE_CONFIGS)
def test_sample_of_jax_lowers(config, four_gpus):
    function = functools.partial(baselines.jax_sample, **config)
    x = jax.ShapeDtypeStruct((2048, 8192), BF16)
    w = jax.ShapeDtypeStruct((8192, 10240), BF16)
    columns = P(None, "tensor")
    lowered = jax.shard_map(
        function, in_specs=(SPLIT, columns), out_specs=columns, check_vma=False
    )
    lower_for_cuda(lowered, x, w, mesh={"tensor": 4}, kernels=1)


def test_sample_of_jax_refuses_few_rows(four_gpus):
    function = functools.partial(baselines.jax_sample, **baselines.SAMPLE_CONFIGS[0])
    x = jax.ShapeDtypeStruct((64, 8192), BF16)
    w = jax.ShapeDtypeStruct((8192, 10240), BF16)
    lowered = on_mesh(function, None, (SPLIT, P(None, "tensor")))
    with pytest.raises(Unsupported, match="jax's sample: m=16 must be divisible"):
        lower_for_cuda(lowered, x, w, mesh={"tensor": 4})
