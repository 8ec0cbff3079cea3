"""The pipeline of a persistent kernel: its grid, its roles, the ring between them.

A producer, the last warpgroup of a block, streams operands into the stages of a ring in
shared memory; the consumers before it multiply what lies there. A stage has two
barriers, ``full[slot]`` and ``empty[slot]`` of the kernel's scratch memory. The ring
begins and ends in the same way everywhere: consumers `hand_over` all its stages, and
the producer takes all of them back, `drain`, before the block ends.

The attention kernels have several rings, of queries, keys and values, and hand over and
drain each by itself.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallas_kernels.mosaic.aliases import Ref, Scalar
from pallas_kernels.mosaic.device import DeviceSpec, resident_clusters


def launch(
    work: int, device: DeviceSpec, what: str, *, warpgroups: int, cluster: int = 1
) -> dict[str, Any]:
    """Options of `plgpu.kernel` for a persistent grid.

    Args:
        work: how many blocks, or clusters of blocks, have something to do.
        device: the GPU, on which as many workers run as fit at a time.
        what: the kernel, for messages.
        warpgroups: warpgroups of a block.
        cluster: blocks of a cluster; the axis is left out where it is one.

    Raises:
        Unsupported: not one cluster fits.
    """
    workers = min(resident_clusters(cluster, device, what), work)
    axes = {"cluster": (cluster,), "cluster_names": ("cluster",)} if cluster > 1 else {}
    return axes | {
        "grid": (workers,),
        "grid_names": ("worker",),
        "num_threads": warpgroups,
        "thread_name": "warpgroup",
    }


def run_roles(
    produce: Callable[[], None],
    consume: Callable[[Scalar], None],
    *,
    consumers: int,
    registers: tuple[int, int],
) -> None:
    """The body of a kernel: consumers, which get their number, and then a producer.

    The registers are those of a thread of the producer, and of a consumer.
    """
    warpgroup = lax.axis_index("warpgroup")

    def producer() -> None:
        plgpu.set_max_registers(registers[0], action="decrease")
        produce()

    def consumer() -> None:
        plgpu.set_max_registers(registers[1], action="increase")
        consume(warpgroup)

    # One branch or the other. As two that follow each other, ptxas may take it that a
    # warp comes to the second one divided by the waits of the first; the stage of the
    # ring then lies in registers that the tensor cores cannot read.
    lax.cond(warpgroup < consumers, consumer, producer)


def next_slot(slot: Scalar, stages: int) -> jax.Array:
    """The stage of the ring after `slot`."""
    return jnp.where(slot == stages - 1, 0, slot + 1)


def previous_slot(slot: Scalar, by: int, stages: int) -> jax.Array:
    """The stage of the ring `by` stages before `slot`."""
    return jnp.where(slot >= by, slot - by, slot - by + stages)


def hand_over(scratch: Mapping[str, Ref], stages: int) -> None:
    """Consumer: gives all stages to the producer, at the start."""

    def give(slot: jax.Array, _: None) -> None:
        plgpu.barrier_arrive(scratch["empty"].at[slot])

    lax.fori_loop(0, stages, give, None)


def drain(scratch: Mapping[str, Ref], slot: Scalar, stages: int) -> None:
    """Producer: waits until all stages have come back, at the end.

    A barrier remembers only one phase, and the peer of a cluster still writes here
    until then. `slot` is the stage after the last that was filled.
    """

    def wait(_: jax.Array, slot: jax.Array) -> jax.Array:
        plgpu.barrier_wait(scratch["empty"].at[slot])
        return next_slot(slot, stages)

    lax.fori_loop(0, stages, wait, slot)


@plgpu.inline_mgpu()
def proxy_fence(_: Any) -> None:
    """Orders what the copy engine does next after the memory accesses before.

    A wait on a semaphore is an ordinary access; the copy engine is another way to
    memory (a *proxy* in PTX), and nothing else orders the two.
    """
    llvm.inline_asm(
        ir.Type.parse("!llvm.void"), [], "fence.proxy.async;", "", has_side_effects=True
    )
