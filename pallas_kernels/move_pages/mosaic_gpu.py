"""Hopper implementation of a move of pages.

The kernel copies: a block has a ring of tiles in shared memory, which the copy engine
fills from some pages and empties into others. Tiles of all moves and layers are dealt
out to the blocks in turns; loads run ahead of stores by as many tiles as the ring has.

Axes: L layers, P pages, M moves, R rows of a page, C columns.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int, Shaped

from pallas_kernels.dispatch import Unsupported
from pallas_kernels.mosaic import (
    DeviceSpec,
    as_varying,
    check_hopper,
    check_smem,
    largest_divisor,
    smem_bytes,
    unmarked,
    varying,
)
from pallas_kernels.mosaic.aliases import Ref, Scalar
from pallas_kernels.partition import check_local


__all__ = ["move_pages"]

_TILE_BYTES = 32 * 1024
"""Bytes of a tile, at most."""

_TILES = 6
"""Tiles of a ring: 25 MB are on their way on an H200, far more than memory needs."""

_BOX = 256
"""Rows and columns that one copy takes, at most."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Problem:
    """The shapes of a call."""

    layers: int
    pages: int
    rows: int
    """R, of a page."""
    columns: int
    """C."""
    tile: int
    """Rows of a tile."""
    dtype: jnp.dtype

    @property
    def tiles(self) -> int:
        """Tiles of a page."""
        return self.rows // self.tile


def move_pages(
    pages: Shaped[Array, "L P *page"],
    source: Int[Array, " M"],
    target: Int[Array, " M"],
    count: Int[Array, ""],
    *,
    device: DeviceSpec | None,
) -> Shaped[Array, "L P *page"]:
    """See `pallas_kernels.move_pages.move_pages`; the first `count` moves are made.

    Raises:
        Unsupported: the device, type or shape do not fit.
    """
    device = check_hopper(device, "move_pages")
    check_local("move_pages", pages, source, target)
    problem = _make_problem(pages, len(source), device)
    axes = varying(pages)
    return as_varying(_jitted(problem, device, pages, source, target, count), axes)


def _make_problem(pages: Array, moves: int, device: DeviceSpec) -> _Problem:
    """The pages as rows of their last dimension, which tiles are made of."""
    columns, itemsize = pages.shape[-1], pages.dtype.itemsize
    rows = math.prod(pages.shape[2:-1])
    line = columns * itemsize
    tile = largest_divisor(rows, min(_BOX, _TILE_BYTES // line))
    items = moves * pages.shape[0] * (rows // tile)
    reasons = {
        f"a last dimension of {columns} numbers of {itemsize} bytes, the kernel takes"
        f" multiples of 16 bytes and {_BOX} numbers at most": (
            line % 16 == 0 and columns <= _BOX
        ),
        f"type {pages.dtype.name}, the kernel takes numbers of 1, 2 or 4 bytes": (
            itemsize in (1, 2, 4) and jnp.issubdtype(pages.dtype, jnp.floating)
        ),
        f"{items} tiles, the kernel counts to 2**31": items < 2**31 - device.num_sms,
    }
    for reason, fits in reasons.items():
        if not fits:
            raise Unsupported(f"move_pages: {reason}; use implementation='xla'")
    check_smem(
        _TILES * smem_bytes((tile, columns), pages.dtype) + 1024, device, "move_pages"
    )
    return _Problem(
        layers=pages.shape[0],
        pages=pages.shape[1],
        rows=rows,
        columns=columns,
        tile=tile,
        dtype=pages.dtype,
    )


@custom_vmap
def _one_call(*arrays: Array) -> tuple[Array, ...]:
    """The arrays, over which `jax.vmap` does not map."""
    return arrays


@_one_call.def_vmap
def _refuse_batch(*_: Any) -> Any:
    raise NotImplementedError(
        "move_pages moves pages of one pool; put all moves into one call, or use"
        " implementation='xla'"
    )


@functools.partial(jax.jit, static_argnums=(0, 1))
def _jitted(problem: _Problem, device: DeviceSpec, *arrays: Array) -> Array:
    return unmarked(functools.partial(_run, problem, device))(*_one_call(*arrays))


def _run(
    problem: _Problem,
    device: DeviceSpec,
    pages: Array,
    source: Array,
    target: Array,
    count: Array,
) -> Array:
    p = problem
    ref = jax.new_ref(pages.reshape(-1, p.rows, p.columns))
    plgpu.kernel(
        functools.partial(_body, p),
        out_type=(),
        scratch_types={
            "ring": plgpu.SMEM((_TILES, p.tile, p.columns), p.dtype),
            "full": plgpu.Barrier(num_barriers=_TILES),
        },
        grid=(device.num_sms,),
        grid_names=("worker",),
        kernel_name="move_pages",
    )(source, target, count.reshape(1), ref)
    return jax.freeze(ref).reshape(pages.shape)


def _body(
    problem: _Problem,
    source: Ref,
    target: Ref,
    count: Ref,
    pages: Ref,
    *,
    ring: Ref,
    full: Ref,
) -> None:
    """The kernel of one block."""
    p = problem
    worker, workers = lax.axis_index("worker"), lax.axis_size("worker")
    total = count[0] * (p.layers * p.tiles)
    mine = lax.div(total - worker + (workers - 1), jnp.int32(workers))

    def place(ids: Ref, step: Scalar) -> Ref:
        """Where the tile of a step comes from or goes to."""
        item = worker + step * workers
        move = lax.div(item, jnp.int32(p.layers * p.tiles))
        rest = lax.rem(item, jnp.int32(p.layers * p.tiles))
        layer, tile = (op(rest, jnp.int32(p.tiles)) for op in (lax.div, lax.rem))
        start = pl.multiple_of(tile * p.tile, p.tile)
        return pages.at[layer * p.pages + ids[move], pl.ds(start, p.tile)]

    def load(step: Scalar) -> None:
        slot = lax.rem(step, jnp.int32(_TILES))
        plgpu.copy_gmem_to_smem(place(source, step), ring.at[slot], full.at[slot])

    for first in range(_TILES):
        pl.when(first < mine)(functools.partial(load, jnp.int32(first)))

    def move(step: Scalar, _: None) -> None:
        slot = lax.rem(step, jnp.int32(_TILES))
        plgpu.barrier_wait(full.at[slot])
        plgpu.copy_smem_to_gmem(ring.at[slot], place(target, step))
        # All stores but this one have left the ring: the tile before has its slot back.
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        following = step + (_TILES - 1)
        pl.when((step > 0) & (following < mine))(functools.partial(load, following))

    lax.fori_loop(0, mine, move, None)
    plgpu.wait_smem_to_gmem(0)
