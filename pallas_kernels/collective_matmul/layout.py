"""How the rows of several devices lie, how kernels cut them, and how they start.

Axis letters: B leading axes, M rows of all devices, m rows of one, K contraction,
N columns; D devices. A *row block* is `tile_m` rows of one device; the *distance* of a
device is how many places after this one it comes.
"""

import dataclasses
import math
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_kernels.collective_matmul.communicator import Chunks, peers
from pallas_kernels.collective_matmul.config import CollectiveConfig
from pallas_kernels.dispatch import Unsupported
from pallas_kernels.matmul.config import CONSUMERS, Problem
from pallas_kernels.matmul.mosaic_gpu import Tiles, check_problem
from pallas_kernels.mosaic import DeviceSpec, check_hopper, check_smem


__all__ = ["Layout", "cut_tiles", "launch", "num_blocks", "pad_rows"]

TILE_ROWS = 8
"""The copy engine moves whole groups of so many rows of operands."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """The rows and the devices of one problem, as seen from this device."""

    axis_name: str
    devices: int
    batch: int
    rows: int
    """Rows of one device within one leading index."""
    num_blocks: int
    """Blocks of the grid."""
    config: CollectiveConfig

    @property
    def order(self) -> CollectiveConfig:
        """The config, with groups of rows that do not span devices.

        Else the tiles of a group would wait for rows that come late, or hold up those
        that another device waits for.
        """
        rows = max(1, self.blocks_of_device // self.config.cluster_tiles[0])
        group = min(self.config.group, rows)
        while rows % group:
            group -= 1
        return dataclasses.replace(self.config, group=group)

    @property
    def blocks(self) -> int:
        """Row blocks of one device within one leading index."""
        return pl.cdiv(self.rows, self.config.tile_m)

    @property
    def blocks_of_device(self) -> int:
        """Row blocks of one device."""
        return self.batch * self.blocks

    def device(self, distance: Any) -> jax.Array:
        """The device at a distance."""
        me = lax.axis_index(self.axis_name)
        return lax.rem(me + distance, jnp.int32(self.devices))

    def split(self, block: Any) -> tuple[Any, Any]:
        """Leading index, and number within it, of one of a device's row blocks."""
        blocks = jnp.int32(self.blocks)
        return lax.div(block, blocks), lax.rem(block, blocks)

    def slab(self, batch: Any, device: Any) -> Any:
        """Where the rows of a device lie in a [B*D,m,...] view of [B,D*m,...]."""
        return batch * self.devices + device

    @property
    def block(self) -> Any:
        """Number of this block."""
        block = lax.axis_index("worker")
        if self.config.cluster == "none":
            return block
        return block * 2 + lax.axis_index("cluster")

    def pieces_of_block(self, count: int) -> tuple[Any, Callable[[Any], Any]]:
        """How many of the pieces a block moves, and the number of its i-th one.

        They are dealt out one by one, so that neighbors are under way together.
        """
        step = jnp.int32(self.num_blocks)
        mine = lax.div(count - 1 - self.block + step, step)
        return mine, lambda i: self.block + i * step

    def leave(self, left: Any) -> None:
        """Says that this block reads no more; one waits until no peer reads here.

        The others end, and make room for a kernel of NCCL that a peer may wait for
        before it can end its own.
        """
        for _, peer in peers(self.axis_name, self.devices):
            pl.semaphore_signal(left, device_id=peer)

        @pl.when(self.block == 0)
        def _wait() -> None:
            everyone = (self.devices - 1) * self.num_blocks
            pl.semaphore_wait(left, everyone, decrement=False)


def num_blocks(config: CollectiveConfig, device: DeviceSpec) -> int:
    """One block to a multiprocessor, in whole clusters.

    All blocks must be resident at once, since they wait for each other; so there are
    never more of them than multiprocessors.
    """
    size = math.prod(config.cluster_tiles)
    return device.num_sms // size * size


def launch(
    body: Callable[..., None],
    *operands: jax.Array,
    out_type: Sequence[jax.ShapeDtypeStruct],
    tiles: Tiles,
    chunks: Chunks,
    config: CollectiveConfig,
    device: DeviceSpec,
    blocks: int,
    name: str,
    scratch_types: Mapping[str, Any] = types.MappingProxyType({}),
) -> Sequence[jax.Array]:
    """Runs a body on so many blocks, one or half a cluster to a multiprocessor."""
    need = tiles.smem_bytes + chunks.smem_bytes(config.buffers)
    check_smem(need, device, f"collective_matmul with {config}")
    size = math.prod(config.cluster_tiles)
    cluster = {"cluster": (size,), "cluster_names": ("cluster",)} if size > 1 else {}
    return plgpu.kernel(
        body,
        out_type=list(out_type),
        scratch_types={
            **tiles.scratch_types(),
            **chunks.scratch_types(config.buffers),
            **scratch_types,
        },
        grid=(blocks // size,),
        grid_names=("worker",),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        kernel_name=name,
        **cluster,
    )(*operands)


def pad_rows(x: jax.Array) -> jax.Array:
    """[B,m,K] with zeros after the last rows, to whole groups of `TILE_ROWS`."""
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % TILE_ROWS), (0, 0)))


def cut_tiles(
    slabs: Sequence[jax.Array],
    ws: Sequence[jax.Array],
    *,
    config: CollectiveConfig,
    device: DeviceSpec | None,
    out_dtype: DTypeLike,
    rhs_transposed: bool,
) -> tuple[list[Tiles], DeviceSpec]:
    """The tiles of each pair of [..,m,K] rows and a weight, if the kernel can."""
    device = check_hopper(device, "collective_matmul")
    tiles = []
    for slab, w in zip(slabs, ws, strict=True):
        problem = Problem.of(slab[0], w, out_dtype, rhs_transposed=rhs_transposed)
        check_problem(problem, device)
        if problem.n <= 64 < config.tile_n * config.cluster_tiles[1]:
            # jax 0.11.2 drops the column index of an array that is one line wide, and
            # the part of a tile past its end lands on its beginning.
            raise Unsupported(
                f"collective_matmul: {problem.n} columns with tile_n={config.tile_n}"
                f" and cluster={config.cluster!r}; use tile_n=64, not cluster='n'"
            )
        tiles.append(Tiles(problem=problem, config=config))
    return tiles, device
