"""Warps that copy between GPUs while the rest of their block multiplies.

What such a warp copies is cut into *pieces*, each announced by a signal to whoever
waits for it, and pieces into *chunks*, lines of memory that pass through a buffer in
shared memory: the copy engine brings one in, from a peer as a rule, and takes it out
again.

In each block of the persistent matmul (`pallas_kernels.matmul.mosaic_gpu`) warps that
the producer has to spare copy between GPUs while the rest multiplies. Nothing is
restarted for a step of a ring and nobody waits for a whole shard: all output tiles lie
in one flat order, and what a tile needs from a peer is signaled row block by row block
(`mosaic_gpu_gather`), or tile by tile (`mosaic_gpu_reduce`). Data comes over NVLink by
TMA copies from or to `plgpu.remote_ref`, never through multicast.

Why reads. When the links are full, what a multiprocessor writes to a peer seems to wait
in front of what it asks of its own memory; reads disturbed the matmul far less in
trials, and least when every block reads a little. A gather that writes was slower for
five layers with 1,024 to 16,384 rows each (four H100s, trials). Reductions that the
links bound write (`CollectiveConfig.transfer`): links carry more so, and nothing is
asked for first.

A device leaves the kernel when all peers have read what they need of it, so nothing is
read from memory that XLA has reused. Before a kernel starts, a barrier of XLA's makes
sure that the operands are there on all devices.

Axis letters: D devices.

References:
    Flux (arXiv 2406.06858), sections 3 and 4: tiles of communication, their order, and
    signals for each. There the copy engine of the driver moves data for the all-gather;
    here a JAX program has no host that could start it, and warps of the kernel do.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic import largest_divisor, smem_bytes
from pallas_kernels.mosaic.aliases import Ref, Scalar
from pallas_kernels.mosaic.pipeline import proxy_fence


def wait_for_signal(
    semaphore: Ref, value: Scalar, memory_scope: Literal["sys", "gpu"] = "sys"
) -> None:
    """Waits until a semaphore has reached a value; copies may follow at once.

    Args:
        semaphore: a reference to one semaphore, which keeps its value.
        value: int32, the least value to wait for.
        memory_scope: "gpu" where only this device signals, which is cheaper.
    """
    plgpu.semaphore_wait(semaphore, value, decrement=False, memory_scope=memory_scope)
    proxy_fence()  # pyright: ignore[reportCallIssue]  (the context is passed for us)


def divide(number: Scalar, by: Scalar) -> tuple[jax.Array, jax.Array]:
    """Quotient and remainder, of int32."""
    return lax.div(number, jnp.int32(by)), lax.rem(number, jnp.int32(by))


def peers(axis_name: str, devices: int) -> list[tuple[int, Scalar]]:
    """Distance and address of each peer along a mesh axis, the next device first.

    A list, since the host must know the address of a tiled copy to a peer, and so
    loops over peers must be unrolled.
    """
    me = lax.axis_index(axis_name)
    return [
        (distance, {axis_name: lax.rem(me + distance, jnp.int32(devices))})
        for distance in range(1, devices)
    ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chunks:
    """Tiling of the rows of an array into chunks, each contiguous in memory.

    Only for such a line does a kernel look up where a peer keeps its array. For boxes
    of an array the host writes descriptors with that address, and in a CUDA graph it
    does so once: XLA records a graph anew when arrays of its own GPU have moved, not
    when those of a peer have.
    """

    shape: tuple[int, int]
    """Rows and columns of a chunk: whole rows, or a part of one."""
    across: int
    """Chunks in a row of the array."""
    dtype: jnp.dtype
    """Type of the elements."""

    @classmethod
    def of(
        cls, rows: int, columns: int, dtype: jnp.dtype, buffer_bytes: int
    ) -> "Chunks":
        """The largest chunks that fit a buffer.

        Args:
            rows: how many rows are to be whole chunks.
            columns: columns of the array, in multiples of 16 bytes.
            dtype: type of the elements.
            buffer_bytes: size of a buffer.
        """
        most = buffer_bytes // dtype.itemsize
        unit = 16 // dtype.itemsize  # 16 bytes at least
        width = unit * largest_divisor(columns // unit, most // unit)
        height = 1
        while rows % (2 * height) == 0 and 2 * height * columns <= most:
            height *= 2
        return cls(shape=(height, width), across=columns // width, dtype=dtype)

    def count(self, rows: int) -> int:
        """Chunks in so many rows."""
        return rows // self.shape[0] * self.across

    def window(self, index: Scalar) -> tuple[Any, Any]:
        """Rows and columns of a chunk."""
        height, width = self.shape
        if self.across == 1:
            return pl.ds(index * height, height), pl.ds(0, width)
        row, column = divide(index, self.across)
        return pl.ds(row, 1), pl.ds(column * width, width)

    def scratch_types(self, buffers: int) -> dict[str, Any]:
        """Scratch of one block."""
        return {
            "chunk": plgpu.SMEM((buffers, *self.shape), self.dtype),
            "chunk_full": plgpu.Barrier(num_barriers=buffers),
        }

    def smem_bytes(self, buffers: int) -> int:
        """Shared memory of one block."""
        return smem_bytes((buffers, *self.shape), self.dtype)


def relay(
    chunks: Chunks,
    scratch: Mapping[str, Ref],
    buffers: int,
    total: Scalar,
    source: Callable[[Scalar], Ref],
    target: Callable[[Scalar, Callable[[Ref], None]], None],
    stored: Callable[[Scalar], None] = lambda chunk: None,
) -> None:
    """Copies chunks, from peers or to them; returns when all of them are there.

    All buffers but one are coming in while that one is being written: what comes from a
    peer takes microseconds, what goes to the memory of this device does not.

    Args:
        chunks: how pieces are cut.
        scratch: what `Chunks.scratch_types` allocated.
        buffers: how many buffers, at least 2.
        total: int32, how many chunks.
        source: from the number of a chunk to where it lies.
        target: ``(chunk, store)``, calls ``store`` with where it goes.
        stored: called with the number of each chunk once its copy has begun.
    """
    ahead = buffers - 1

    def slot(chunk: Scalar) -> jax.Array:
        return lax.rem(chunk, jnp.int32(buffers))

    def load(chunk: Scalar) -> None:
        where = slot(chunk)
        plgpu.copy_gmem_to_smem(
            source(chunk),
            scratch["chunk"].at[where],
            scratch["chunk_full"].at[where],
            oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,  # or it were no line
        )

    lax.fori_loop(0, jnp.minimum(ahead, total), lambda chunk, _: load(chunk), None)

    def step(chunk: jax.Array, _: None) -> None:
        where = slot(chunk)
        plgpu.barrier_wait(scratch["chunk_full"].at[where])
        target(
            chunk,
            functools.partial(plgpu.copy_smem_to_gmem, scratch["chunk"].at[where]),
        )

        @pl.when(chunk + ahead < total)
        def _prefetch() -> None:
            # The chunk that used this buffer before has left it.
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            load(chunk + ahead)

        stored(chunk)

    lax.fori_loop(0, total, step, None)
    plgpu.wait_smem_to_gmem(0, wait_read_only=False)
