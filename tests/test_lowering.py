"""The lowering helper accepts good kernels and refuses bad ones."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tests.lowering import MulticastRefused, cuda_mesh, lower_for_cuda


P = jax.sharding.PartitionSpec
TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
SHARD = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)


def call(body, *, scratch=None, out=SHARD):
    return plgpu.kernel(
        body,
        out_type=out,
        scratch_types=scratch
        or [
            plgpu.SMEM((64, 64), jnp.bfloat16, transforms=TILED),
            plgpu.Barrier(),
            plgpu.SemaphoreType.REGULAR,
        ],
    )


def store_to(target):
    """A kernel that copies its input to ``target(output)`` through shared memory."""

    def body(x_ref, y_ref, smem, barrier, semaphore):
        plgpu.copy_gmem_to_smem(x_ref, smem, barrier)
        plgpu.barrier_wait(barrier)
        plgpu.copy_smem_to_gmem(smem, target(y_ref))
        plgpu.wait_smem_to_gmem(0)

    return call(body)


def peer(axis, size):
    return {axis: lax.rem(lax.axis_index(axis) + 1, jnp.int32(size))}


def sharded(fn, axes, mesh=None):
    return jax.shard_map(
        fn, mesh=mesh, in_specs=P(axes), out_specs=P(axes), check_vma=False
    )


def test_local_kernel_lowers():
    assert "mosaic_gpu_v2" in lower_for_cuda(store_to(lambda y: y), SHARD, kernels=1)


def test_context_mesh_gives_devices_that_do_not_exist():
    x = jax.ShapeDtypeStruct((64 * 32, 64), jnp.bfloat16)
    fn = sharded(store_to(lambda y: plgpu.remote_ref(y, peer("tp", 16))), ("dp", "tp"))
    text = lower_for_cuda(fn, x, mesh={"dp": 2, "tp": 16}, kernels=1)
    assert "xla_replica_ids" in text


def test_function_with_its_own_mesh():
    mesh = jax.make_mesh(
        (4,), ("tp",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:4]
    )
    fn = sharded(store_to(lambda y: plgpu.remote_ref(y, peer("tp", 4))), "tp", mesh)
    text = lower_for_cuda(fn, jax.ShapeDtypeStruct((256, 64), jnp.bfloat16), kernels=1)
    assert "xla_replica_ids" in text


def test_abstract_device_tells_its_size():
    seen = []

    def fn(x):
        seen.append(jax.sharding.get_abstract_mesh().abstract_device.num_cores)
        return store_to(lambda y: y)(x)

    lower_for_cuda(fn, SHARD, mesh={}, num_sms=114)
    assert seen == [114]
    assert cuda_mesh({"a": 2, "b": 3}).shape == {"a": 2, "b": 3}


@pytest.mark.parametrize("axes", [{"tp": 4}, {"dp": 2, "tp": 2}], ids=["1d", "2d"])
def test_multicast_store_is_refused(axes):
    """Positive control: this kernel is only lowered, never run."""
    names = tuple(axes)
    fn = sharded(store_to(lambda y: plgpu.multicast_ref(y, names)), names)
    with pytest.raises(MulticastRefused, match="NVLink multicast"):
        lower_for_cuda(fn, jax.ShapeDtypeStruct((256, 64), jnp.bfloat16), mesh=axes)


def test_multicast_signal_is_refused():
    def body(x_ref, y_ref, smem, barrier, semaphore):
        plgpu.semaphore_signal_multicast(semaphore, collective_axes="tp")
        pl.semaphore_wait(semaphore, 4)
        y_ref[...] = x_ref[...]

    fn = sharded(call(body), "tp")
    x = jax.ShapeDtypeStruct((256, 64), jnp.bfloat16)
    with pytest.raises(MulticastRefused):
        lower_for_cuda(fn, x, mesh={"tp": 4})


def test_peer_known_only_on_the_device_fails():
    def body(x_ref, y_ref, smem, barrier, semaphore):
        plgpu.copy_gmem_to_smem(x_ref, smem, barrier)
        plgpu.barrier_wait(barrier)

        @pl.loop(1, 4)
        def _(i):
            to = lax.rem(lax.axis_index("tp") + i, jnp.int32(4))
            plgpu.copy_smem_to_gmem(smem, plgpu.remote_ref(y_ref, to))

        plgpu.wait_smem_to_gmem(0)

    x = jax.ShapeDtypeStruct((256, 64), jnp.bfloat16)
    with pytest.raises(Exception, match="recompute the async_copy peer id"):
        lower_for_cuda(sharded(call(body), "tp"), x, mesh={"tp": 4})


def test_too_much_shared_memory_fails():
    def body(x_ref, y_ref, smem):
        y_ref[...] = x_ref[...]

    kernel = call(body, scratch=[plgpu.SMEM((1024, 128), jnp.bfloat16)])
    with pytest.raises(ValueError, match="exceeds available shared memory"):
        lower_for_cuda(kernel, SHARD)


def test_fallback_is_noticed():
    with pytest.raises(AssertionError, match="found 0"):
        lower_for_cuda(lambda x: x + 1, SHARD)
    with pytest.raises(AssertionError, match=r"expected 2 .* found 1"):
        lower_for_cuda(store_to(lambda y: y), SHARD, kernels=2)


def test_static_arguments_and_pytrees():
    def fn(tree, *, scale):
        return store_to(lambda y: y)(tree["x"]) * jnp.bfloat16(scale)

    text = lower_for_cuda(functools.partial(fn, scale=2.0), {"x": SHARD})
    assert "mosaic_gpu" in text and "2.000000e+00" in text
