"""Hopper matrix products that communicate while they multiply.

In each block of the persistent matmul (`pallas_kernels.matmul.mosaic_gpu`) warps that
the producer has to spare read from the other GPUs while the rest multiplies. Nothing is
restarted for a step of a ring and nobody waits for a whole shard: all output tiles lie
in one flat order, and what a tile needs from a peer is signaled row block by row block
(`mosaic_gpu_gather`), or tile by tile (`mosaic_gpu_reduce`). Data comes over NVLink by
TMA loads from `plgpu.remote_ref`, never through multicast.

Why reads. When the links are full, what a multiprocessor writes to a peer seems to wait
in front of what it asks of its own memory; reads disturbed the product far less in
trials, and least when every block reads a little.

A device leaves the kernel when all peers have read what they need of it, so nothing is
read from memory that XLA has reused. Before a kernel starts, a barrier of XLA's makes
sure that the operands are there on all devices.

References:
    Flux (arXiv 2406.06858), sections 3 and 4: tiles of communication, their order, and
    signals for each. There the copy engine of the driver moves data for the all-gather;
    here a JAX program has no host that could start it, and warps of the kernel do.
"""

from pallas_kernels.collective_matmul.mosaic_gpu_gather import all_gather_matmul
from pallas_kernels.collective_matmul.mosaic_gpu_reduce import (
    matmul_all_reduce,
    matmul_reduce_scatter,
)


__all__ = ["all_gather_matmul", "matmul_all_reduce", "matmul_reduce_scatter"]
