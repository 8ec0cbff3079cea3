"""All-reduce in one shot, for sums so small that latency is all there is.

Every device pushes its array to all peers at once and adds up what has come in, in the
order of the devices, so that the sums are equal bit for bit on all of them and between
runs. That is one exchange, where a ring has 2 (D - 1) and a reduce-scatter followed by
an all-gather has two, for D / 2 times the bytes of the latter.

Axis letters: L elements of the array; D devices. A *chunk* is what a block moves and
adds at a time.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.collective_matmul.communicator import peers, wait_for_signal
from pallas_kernels.mosaic import DeviceSpec
from pallas_kernels.mosaic.aliases import Ref, Scalar


__all__ = ["one_shot_all_reduce"]

CHUNK = (32, 64)
"""Rows and columns of a chunk, once the array is seen as rows of 64 elements."""


def one_shot_all_reduce(
    y: jax.Array, *, axis_name: str, device: DeviceSpec
) -> jax.Array:
    """Adds up an array over a mesh axis, in fp32 and in the order of the devices.

    Args:
        y: any shape; bfloat16 or float16.
        axis_name: mesh axis of the sum.
        device: the GPU that the kernel is built for.

    Returns:
        The sum, rounded once; shape and type of y.
    """
    devices = lax.axis_size(axis_name)
    # Whole rows are moved as one line of bytes: past the last of a device it would end
    # in the first rows of the next one.
    flat = jnp.pad(y.reshape(-1), (0, -y.size % math.prod(CHUNK)))
    flat = flat.reshape(-1, CHUNK[1])  # [L/64,64]
    chunks = flat.shape[0] // CHUNK[0]
    blocks = min(chunks, device.num_sms)

    def body(
        y_ref: Ref, out_ref: Ref, received: Ref, buffer: Ref, loaded: Ref, added: Ref
    ) -> None:
        arrived = pl.get_global(plgpu.SemaphoreType.REGULAR((chunks,)))
        me = lax.axis_index(axis_name)
        block = lax.axis_index("block")
        mine = lax.div(chunks - 1 - block + blocks, jnp.int32(blocks))

        def chunk_of(i: Scalar) -> tuple[Scalar, Scalar]:
            chunk = i * blocks + block
            return chunk, pl.ds(chunk * CHUNK[0], CHUNK[0])

        def push(i: jax.Array, _: None) -> None:
            chunk, rows = chunk_of(i)
            plgpu.copy_gmem_to_smem(y_ref.at[rows], buffer.at[0], loaded)
            plgpu.barrier_wait(loaded)
            others = [peer for _, peer in peers(axis_name, devices)]
            for peer in others:
                there = plgpu.remote_ref(received, peer)
                plgpu.copy_smem_to_gmem(buffer.at[0], there.at[me, rows])
            plgpu.copy_smem_to_gmem(buffer.at[0], received.at[me, rows])
            plgpu.wait_smem_to_gmem(0, wait_read_only=False)
            for peer in others:
                pl.semaphore_signal(arrived.at[chunk], device_id=peer)

        lax.fori_loop(0, mine, push, None)

        def add(i: jax.Array, _: None) -> None:
            chunk, rows = chunk_of(i)
            wait_for_signal(arrived.at[chunk], devices - 1)
            for source in range(devices):
                plgpu.copy_gmem_to_smem(
                    received.at[source, rows], buffer.at[source], added
                )
            plgpu.barrier_wait(added)
            total = buffer[0].astype(jnp.float32)
            for source in range(1, devices):
                total += buffer[source].astype(jnp.float32)
            buffer[0] = total.astype(y.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(buffer.at[0], out_ref.at[rows])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        lax.fori_loop(0, mine, add, None)
        plgpu.wait_smem_to_gmem(0)

    out, _ = plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct(flat.shape, y.dtype),
            jax.ShapeDtypeStruct((devices, *flat.shape), y.dtype),
        ],
        scratch_types=[
            plgpu.SMEM((devices, *CHUNK), y.dtype),
            plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=devices),
        ],
        grid=(blocks,),
        grid_names=("block",),
        kernel_name="one_shot_all_reduce",
    )(flat)
    return out.reshape(-1)[: y.size].reshape(y.shape)  # [L/64,64] to [L] to [B,M,N]
