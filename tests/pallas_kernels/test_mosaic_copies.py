"""Copies to shared memory."""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import nvvm

from pallas_kernels.mosaic.copies import read_once


def test_copies_of_what_is_read_once_have_a_hint(monkeypatch):
    """And those of other arrays have none."""
    hints, copy = [], nvvm.cp_async_bulk_tensor_shared_cluster_global

    def counted(*args, **options):
        hints.append(options.get("l2_cache_hint") is not None)
        return copy(*args, **options)

    monkeypatch.setattr(nvvm, copy.__name__, counted)

    def body(once, often, out, smem, barrier):
        read_once(once)  # pyright: ignore[reportCallIssue]
        for source in (once, often):
            plgpu.copy_gmem_to_smem(source, smem, barrier)
            plgpu.barrier_wait(barrier)
        plgpu.copy_smem_to_gmem(smem, out)
        plgpu.wait_smem_to_gmem(0)

    array = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    kernel = plgpu.kernel(
        body,
        out_type=array,
        scratch_types=[plgpu.SMEM((64, 64), jnp.float32), plgpu.Barrier()],
    )
    jax.jit(kernel).trace(array, array).lower(lowering_platforms=("cuda",))
    # The copy is emitted without a hint, and once more with one in its place.
    assert hints == [False, True, False]
