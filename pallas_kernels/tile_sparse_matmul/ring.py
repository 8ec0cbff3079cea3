"""The ring of shared-memory stages between a producer that gathers and its consumers.

Invariant: at the head of a step the producer has handed over all gathers but the `lag`
youngest, and a consumer has given back all stages but the last one it multiplied. A
producer that waits for stage ``s - stages`` therefore needs ``stages >= lag + 2``.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch import Unsupported
from pallas_kernels.matmul.config import CONSUMERS
from pallas_kernels.matmul.mosaic_gpu import Tiles
from pallas_kernels.mosaic import DeviceSpec, check_smem
from pallas_kernels.mosaic.aliases import Ref, Scalar
from pallas_kernels.mosaic.pipeline import drain, next_slot, previous_slot
from pallas_kernels.tile_sparse_matmul.gather import commit_gather, wait_gathers


# All warpgroups together have 512 registers for each of 128 threads. The one that
# gathers computes addresses, the one that loads only starts copies.
_REGISTERS = {
    ("load",): {"consume": 232, "load": 40},
    ("gather",): {"consume": 224, "gather": 56},
    ("load", "gather"): {"consume": 208, "load": 40, "gather": 56},
}

_FOUR_WARPGROUPS = 64 * 128
"""Largest block of a consumer beside two producers: ptxas compiles a kernel of 512
threads with 128 registers a thread, whatever a warpgroup asks for later."""


def two_producers(tiles: Tiles) -> bool:
    """True where plain copies and gathers can have a warpgroup each."""
    return math.prod(tiles.config.block) <= _FOUR_WARPGROUPS


def run_warpgroups(
    consume: Callable[[Scalar], None], producers: Mapping[str, Callable[[], None]]
) -> None:
    """The body of a kernel: consumers, and one or two producers after them.

    Args:
        consume: gets the number of the consumer.
        producers: "load" starts plain copies, "gather" gathers rows. Alone, either does
            what else is to be done. Together, the wait for indices does not hold up the
            plain copies.
    """
    warpgroup = lax.axis_index("warpgroup")
    registers = _REGISTERS[tuple(producers)]

    @pl.when(warpgroup < CONSUMERS)
    def _consume() -> None:
        plgpu.set_max_registers(registers["consume"], action="increase")
        consume(warpgroup)

    for i, (role, produce) in enumerate(producers.items()):

        @pl.when(warpgroup == CONSUMERS + i)
        def _produce(role: str = role, produce: Callable[[], None] = produce) -> None:
            plgpu.set_max_registers(registers[role], action="decrease")
            produce()


def check_tiles(tiles: Tiles, device: DeviceSpec, config: Any) -> None:
    """Refuses what does not fit into a multiprocessor.

    Raises:
        Unsupported: shared memory or store buffers do not fit.
    """
    slots, columns = tiles.config.store_slots, tiles.store_columns
    chunks = tiles.config.block[1] // columns
    if tiles.config.block[1] % columns or chunks % slots:
        raise Unsupported(
            f"tile_sparse_matmul: store_slots {slots}, expected a divisor of the"
            f" {chunks} chunks of 128 bytes that a consumer stores"
        )
    check_smem(tiles.smem_bytes, device, f"tile_sparse_matmul with {config}")


class GatherRing:
    """The side of a producer that gathers: it hands a stage over `lag` steps later.

    Its state is the next stage and the number of gathers in flight.
    """

    def __init__(self, scratch: Mapping[str, Ref], stages: int, lag: int) -> None:
        self.scratch, self.stages, self.lag = scratch, stages, lag

    def acquire(self, slot: Scalar) -> None:
        """Waits until the consumers have given the stage back."""
        plgpu.barrier_wait(self.scratch["empty"].at[slot])

    def commit(self, slot: Scalar, flying: Scalar) -> tuple[Scalar, Scalar]:
        """Ends the gather of a stage and hands over the one `lag` steps ago."""
        commit_gather()
        slot = next_slot(slot, self.stages)
        pl.when(flying == self.lag)(functools.partial(self._show, slot, self.lag))
        return slot, jnp.minimum(flying + 1, self.lag)

    def _show(self, slot: Scalar, in_flight: int) -> None:
        wait_gathers(in_flight)
        plgpu.commit_smem()
        done = previous_slot(slot, in_flight + 1, self.stages)
        plgpu.barrier_arrive(self.scratch["full"].at[done])

    def finish(self, slot: Scalar, flying: Scalar) -> None:
        """Hands over what is in flight and drains the ring."""
        for in_flight in reversed(range(self.lag)):
            show = functools.partial(self._show, slot, in_flight)
            pl.when(flying > in_flight)(show)
        drain(self.scratch, slot, self.stages)


def multiply_steps(
    tiles: Tiles,
    scratch: Mapping[str, Ref],
    consumer: Scalar,
    first: Scalar,
    last: Scalar,
    slot: Scalar,
) -> tuple[jax.Array, Scalar]:
    """Consumer: accumulates the matmuls of the steps ``first .. last - 1``; maybe none.

    Args:
        tiles: the cut.
        scratch: what `Tiles.scratch_types` allocated.
        consumer: int32, which of the consumers this warpgroup is.
        first: int32.
        last: int32.
        slot: int32, the next stage of the ring.

    Returns:
        The sums, fp32 of the size of a consumer's block, and the next stage.
    """
    stages = tiles.config.stages
    full, empty = scratch["full"], scratch["empty"]

    def scoped(acc: Ref) -> Any:
        def step(k: jax.Array, slot: jax.Array) -> jax.Array:
            plgpu.barrier_wait(full.at[slot])
            plgpu.wgmma(acc, *tiles.operands(scratch, slot, consumer))
            # One matmul stays in flight, the one before it has left its stage.
            plgpu.wgmma_wait(1)
            before = previous_slot(slot, 1, stages)
            pl.when(k > first)(lambda: plgpu.barrier_arrive(empty.at[before]))
            return next_slot(slot, stages)

        after = lax.fori_loop(first, last, step, slot)
        sums = acc[...]
        before = previous_slot(after, 1, stages)
        pl.when(last > first)(lambda: plgpu.barrier_arrive(empty.at[before]))
        return sums, after

    return pl.run_scoped(
        scoped, plgpu.WGMMAAccumulatorRef(tiles.config.block, jnp.float32)
    )
