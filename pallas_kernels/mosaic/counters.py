"""Counters in global memory by which the blocks of a kernel wait for each other.

Semaphores of Pallas are the same, in memory that XLA clears for each launch: in a
program with a loop it copies zeros, one launch for each of a kernel's. A counter is an
element of an operand, an int32 array of zeros that a kernel may write.
"""

from typing import Any

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int, Num

from pallas_kernels.mosaic.aliases import Ref


def zeros_like_no_others(
    size: int, shared: Num[Array, ""], own: Num[Array, ""]
) -> Int[Array, "size"]:
    """Zeros for a launch that writes them, int32.

    Had all launches of a program the same, as constants are, XLA would copy them for
    each. What it does not see to be zero it makes for all of them in one launch, since
    they read the same `shared`.

    Args:
        size: how many.
        shared: any number that is an operand of all launches.
        own: any number that differs from launch to launch.

    Example:
        >>> zeros_like_no_others(3, jnp.int32(7), jnp.float32(0.5)).tolist()
        [0, 0, 0]
    """
    total = shared.astype(jnp.float32) + own.astype(jnp.float32)
    return jnp.broadcast_to((total > jnp.inf).astype(jnp.int32), (size,))


@plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
def raise_counter(_: Any, counter: Any) -> None:
    """Adds one to a counter: all that the warpgroup has written is there.

    Args:
        counter: int32 [1] of global memory.
    """
    mgpu.utils.warpgroup_barrier()
    semaphore = mgpu.utils.SemaphoreRef(mgpu.utils.memref_ptr(counter))
    semaphore.signal(1, memory_scope="gpu")


def await_counter(counter: Ref, value: int) -> None:
    """Waits until a counter is at least a number; what it says is there may be read.

    Args:
        counter: int32 [1] of global memory.
        value: the number.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def await_at_least(_: Any, counter: Any) -> None:
        semaphore = mgpu.utils.SemaphoreRef(mgpu.utils.memref_ptr(counter))
        semaphore.wait(value, decrement=False, memory_scope="gpu")

    wait: Any = await_at_least  # the decorator supplies the context
    wait(counter)
