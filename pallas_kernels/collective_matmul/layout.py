"""Layout of the rows of several devices, their tiling, scales, and the launch.

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

from pallas_kernels.collective_matmul.communicator import Chunks, peers
from pallas_kernels.collective_matmul.config import Call, CollectiveConfig
from pallas_kernels.matmul.config import CONSUMERS, Problem
from pallas_kernels.matmul.mosaic_gpu import (
    TILE_COLUMNS,
    TILE_ROWS,
    Tiles,
    check_columns,
    check_problem,
)
from pallas_kernels.mosaic import DeviceSpec, check_smem, resident_clusters
from pallas_kernels.mosaic.aliases import Ref, Scalar
from pallas_kernels.mosaic.pipeline import launch
from pallas_kernels.scaled_matmul import mosaic_gpu as scaled


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowLayout:
    """The rows and the devices of one problem, as seen from this device."""

    axis_name: str
    devices: int
    batch: int
    rows: int
    """Rows of one device within one leading index."""
    num_blocks: int
    """Blocks of the grid: one to a multiprocessor, in whole clusters.

    All blocks must be resident at once, since they wait for each other; so there are
    never more of them than multiprocessors.
    """
    config: CollectiveConfig

    @classmethod
    def of(
        cls,
        call: Call,
        config: CollectiveConfig,
        device: DeviceSpec,
        *,
        batch: int,
        rows: int,
    ) -> "RowLayout":
        """The layout of a call on a GPU; rows are those of one device."""
        size = math.prod(config.cluster_tiles)
        return cls(
            axis_name=call.axis_name,
            devices=call.size,
            batch=batch,
            rows=rows,
            num_blocks=resident_clusters(
                size, device, f"collective_matmul with {config}"
            )
            * size,
            config=config,
        )

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

    def device(self, distance: Scalar) -> jax.Array:
        """The device at a distance."""
        me = lax.axis_index(self.axis_name)
        return lax.rem(me + distance, jnp.int32(self.devices))

    def split(self, block: Scalar) -> tuple[Scalar, Scalar]:
        """Leading index, and number within it, of one of a device's row blocks."""
        blocks = jnp.int32(self.blocks)
        return lax.div(block, blocks), lax.rem(block, blocks)

    def slab(self, batch: Scalar, device: Scalar) -> Scalar:
        """Index the rows of a device in a [B*D,m,...] view of [B,D*m,...]."""
        return batch * self.devices + device

    @property
    def block(self) -> Scalar:
        """Number of this block."""
        block = lax.axis_index("worker")
        if self.config.cluster == "none":
            return block
        return block * 2 + lax.axis_index("cluster")

    def pieces_of_block(self, count: int) -> tuple[Scalar, Callable[[Scalar], Scalar]]:
        """Return how many of the pieces a block moves, and the number of its i-th one.

        They are dealt out one by one, so that neighbors are under way together.
        """
        step = jnp.int32(self.num_blocks)
        mine = lax.div(count - 1 - self.block + step, step)
        return mine, lambda i: self.block + i * step

    def leave(self, left: Ref) -> None:
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


def grid(
    layout: RowLayout,
    tiles: Tiles,
    chunks: Chunks,
    device: DeviceSpec,
    scratch_types: Mapping[str, Any] = types.MappingProxyType({}),
    scales: scaled.Scales | None = None,
) -> dict[str, Any]:
    """Options of `plgpu.kernel`: blocks, one to a multiprocessor, and their scratch.

    Args:
        layout: blocks, and how the problem is cut.
        tiles: the tiles of any of the matmuls, which share one ring.
        chunks: how rows are read from a peer.
        device: the GPU that the kernel is built for.
        scratch_types: scratch of one block beside the ring and the chunks.
        scales: how scales are read, of operands of 8 bits.

    Raises:
        Unsupported: a block needs more shared memory than the GPU has.
    """
    config = layout.config
    need = tiles.smem_bytes + chunks.smem_bytes(config.buffers)
    need += scales.smem_bytes if scales else 0
    check_smem(need, device, f"collective_matmul with {config}")
    size = math.prod(config.cluster_tiles)
    return {
        "scratch_types": {
            **tiles.scratch_types(),
            **chunks.scratch_types(config.buffers),
            **(scales.scratch_types() if scales else {}),
            **scratch_types,
        },
        **launch(
            layout.num_blocks // size,
            device,
            f"collective_matmul with {config}",
            warpgroups=CONSUMERS + 1,
            cluster=size,
        ),
    }


def pad(x: jax.Array) -> jax.Array:
    """[..,rows,columns], filled with zeros to whole tiles of the copy engine."""
    rows, columns = x.shape[-2:]
    more = (0, -rows % TILE_ROWS), (0, -columns % (128 // x.dtype.itemsize))
    return jnp.pad(x, (*((0, 0),) * (x.ndim - 2), *more))


def cut_tiles(
    slabs: Sequence[jax.Array],
    ws: Sequence[jax.Array],
    call: Call,
    config: CollectiveConfig,
) -> list[Tiles]:
    """The tiles of each pair of [..,m,K] rows and a weight, if the kernel can.

    Both are padded. What a tile reads past the end of a weight's rows is zero.
    """
    tiles = []
    for slab, w in zip(slabs, ws, strict=True):
        problem = Problem.of(
            slab[0], w, call.out_dtype, rhs_transposed=call.rhs_transposed
        )
        columns = pl.cdiv(problem.n, TILE_COLUMNS) * TILE_COLUMNS
        problem = dataclasses.replace(problem, n=columns)
        if problem.dtype.itemsize == 1:
            scaled.check_problem(problem, "collective_matmul")
            scaled.check_config(config, "collective_matmul")
        else:
            check_problem(problem)
        check_columns(problem, config, "collective_matmul")
        tiles.append(Tiles(problem=problem, config=config))
    return tiles


# --- Operands of 8 bits with the scales of their rows ---------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ScaledArray:
    """An operand of 8 bits and the scales of its rows, with the shape of the former."""

    values: Any
    """[..,rows,K]."""
    scale: Any
    """fp32; of x [B,D,m] for the rows of all devices, of a weight [N]."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the values."""
        return self.values.shape

    @property
    def dtype(self) -> Any:
        """The type of the values."""
        return self.values.dtype


def values_of(x: Any) -> jax.Array:
    """The numbers of an operand, which may have scales."""
    return x.values if isinstance(x, ScaledArray) else x


def scales_of(
    x: Any, ws: Sequence[Any], tiles: Sequence[Tiles], blocks: int
) -> tuple[scaled.Scales | None, tuple[jax.Array, ...]]:
    """How a kernel reads scales, and the scales as it takes them.

    Args:
        x: the left operand; its scales are those of the rows of all devices.
        ws: the weights.
        tiles: the tiles of each matmul.
        blocks: row blocks of one device within one leading index.

    Returns:
        The reader and two arrays: a scale for each row of a row block, row blocks in
        the order of a [B*D,m] view, and one for each column of a column tile, one
        weight after the other. None and nothing for operands without scales.
    """
    if not isinstance(x, ScaledArray):
        return None, ()
    config = tiles[0].config

    def padded(scale: jax.Array, size: int) -> jax.Array:
        widths = [(0, 0)] * (scale.ndim - 1) + [(0, size - scale.shape[-1])]
        return jnp.pad(scale, widths).reshape(-1)

    columns = [
        padded(w.scale, cut.counts[1] * config.tile_n)
        for w, cut in zip(ws, tiles, strict=True)
    ]
    scales = scaled.Scales(tiles=tiles[0], by_row=True, by_column=True)
    return scales, (padded(x.scale, blocks * config.tile_m), jnp.concatenate(columns))
