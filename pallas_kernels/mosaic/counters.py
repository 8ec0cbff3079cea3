"""Counters in global memory by which the blocks of a kernel wait for each other.

Semaphores of Pallas are the same, in memory that XLA clears for each launch: in a
program with a loop it copies zeros, one launch for each of a kernel's. A counter is an
element of an operand, an int32 array of zeros that a kernel may write.
"""

from typing import Any, Literal

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, scf
from jaxtyping import Array, Int, Num

from pallas_kernels.mosaic.aliases import Ref, Scalar


def zeros_like_no_others(
    size: int, shared: Num[Array, ""], own: Num[Array, "..."]
) -> Int[Array, "_"]:
    """Zeros for a launch that writes them, int32.

    Had all launches of a program the same, as constants are, XLA would copy them for
    each. What it does not see to be zero it makes for all of them in one launch, since
    they read the same `shared`.

    Args:
        size: how many, at least.
        shared: any number that is an operand of all launches.
        own: any number that differs from launch to launch. Of a vector as many zeros as
            it has numbers: where XLA cuts vectors out of a stack, that launch makes the
            zeros, too.

    Example:
        >>> zeros_like_no_others(3, jnp.int32(7), jnp.float32(0.5)).tolist()
        [0, 0, 0]
    """
    total = shared.astype(jnp.float32) + own.astype(jnp.float32)
    zeros = (total > jnp.inf).astype(jnp.int32)
    if zeros.size < size:
        zeros = jnp.broadcast_to(zeros.reshape(-1)[0], (size,))
    return zeros


@plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
def raise_counter(_: Any, counter: Any) -> None:
    """Adds one to a counter: all that the warpgroup has written is there.

    Args:
        counter: int32 [1] of global memory.
    """
    mgpu.utils.warpgroup_barrier()
    semaphore = mgpu.utils.SemaphoreRef(mgpu.utils.memref_ptr(counter))
    semaphore.signal(1, memory_scope="gpu")


def await_counter(counter: Ref, value: Scalar) -> None:
    """Waits until a counter is at least a number; what it says is there may be read.

    Args:
        counter: int32 [1] of global memory.
        value: the number.
    """
    if not isinstance(value, int):
        splat = plgpu.Layout.WG_SPLAT(())

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), splat))
        def await_at_least_some(_: Any, counter: Any, value: Any) -> None:
            semaphore = mgpu.utils.SemaphoreRef(mgpu.utils.memref_ptr(counter))
            semaphore.wait(value.registers.item(), decrement=False, memory_scope="gpu")

        wait_for: Any = await_at_least_some  # the decorator supplies the context
        wait_for(counter, jnp.int32(value))
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def await_at_least(_: Any, counter: Any) -> None:
        semaphore = mgpu.utils.SemaphoreRef(mgpu.utils.memref_ptr(counter))
        semaphore.wait(value, decrement=False, memory_scope="gpu")

    wait: Any = await_at_least  # the decorator supplies the context
    wait(counter)


# --- Of single warps ------------------------------------------------------------------


def raise_from_warp(counter: Ref, memory_scope: Literal["sys", "gpu"] = "sys") -> None:
    """Adds one to a counter: all that this warp has written or copied is there.

    Args:
        counter: int32 [1] of global memory, of this device or a peer.
        memory_scope: "gpu" where only this device waits, which is cheaper.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def raise_by_lane(_: Any, counter: Any) -> None:
        mgpu.utils.warp_barrier()
        lane = mgpu.utils.single_thread_predicate(mgpu.utils.ThreadSubset.WARP)
        semaphore = mgpu.utils.SemaphoreRef(mgpu.utils.memref_ptr(counter))
        semaphore.signal(1, predicate=lane, memory_scope=memory_scope)

    signal: Any = raise_by_lane  # the decorator supplies the context
    signal(counter)


def await_from_warp(counter: Ref, value: Scalar) -> None:
    """Waits until a counter is at least a number; what it says is there may be read.

    Args:
        counter: int32 [1] of global memory, on which any device may count.
        value: int32.
    """
    splat = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), splat))
    def await_by_warp(_: Any, counter: Any, value: Any) -> None:
        semaphore = mgpu.utils.SemaphoreRef(mgpu.utils.memref_ptr(counter))
        semaphore.wait(
            value.registers.item(),
            decrement=False,
            scope=mgpu.utils.ThreadSubset.WARP,
        )

    wait: Any = await_by_warp  # the decorator supplies the context
    wait(counter, jnp.int32(value))


def clear_from_warp(counters: Ref) -> None:
    """Writes zeros; a counter that this warp raises afterwards says so.

    Args:
        counters: int32 [count] of global memory.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def clear_by_lanes(_: Any, counters: Any) -> None:
        i32, index = ir.IntegerType.get_signless(32), ir.IndexType.get()
        (count,) = ir.MemRefType(counters.type).shape
        lane = arith.remui(mgpu.utils.thread_idx(), mgpu.utils.c(32, i32))
        end, step = (mgpu.utils.c(number, index) for number in (count, 32))
        loop = scf.ForOp(arith.index_cast(index, lane), end, step)
        with ir.InsertionPoint(loop.body):
            zero = mgpu.utils.c(0, i32)
            memref.store(zero, counters, [loop.induction_variable])
            scf.yield_([])
        mgpu.utils.warp_barrier()

    clear: Any = clear_by_lanes  # the decorator supplies the context
    clear(counters)


def toggle(number: Ref, *, readers: Literal["warp", "warpgroup"]) -> None:
    """Makes 1 of 0 and 0 of 1, once all threads that call this are here.

    Args:
        number: int32 [1] of global memory.
        readers: whose threads call this.
    """
    scope = mgpu.utils.ThreadSubset[readers.upper()]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def toggle_number(_: Any, number: Any) -> None:
        if readers == "warp":
            mgpu.utils.warp_barrier()
        else:
            mgpu.utils.warpgroup_barrier()
        i32 = ir.IntegerType.get_signless(32)
        zero = mgpu.utils.c(0, ir.IndexType.get())
        with mgpu.utils.single_thread(scope=scope):
            one = mgpu.utils.c(1, i32)
            memref.store(arith.xori(memref.load(number, [zero]), one), number, [zero])

    write: Any = toggle_number  # the decorator supplies the context
    write(number)
