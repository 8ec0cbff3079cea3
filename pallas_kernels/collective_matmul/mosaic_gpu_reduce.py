"""Hopper matmul reduce-scatter and all-reduce: sums travel while others are computed.

Reduce-scatter. Tiles for the next device come first, then those for the one after it,
..., own ones last, so that no two devices read from one. The consumers store partial
sums locally, as any matmul does, and go on. Of the two spare warps that each block
uses one announces stored tiles to their owners, and one reads over NVLink what peers
have announced to this device.

Own tiles are the usual products and then the sums of the peers, times the identity:
these pass through the same ring as two more stages for each peer, and the tensor cores
add them to the fp32 sums in a fixed order. The result is deterministic, and a tile is
rounded once for each peer and once at the end. An infinite partial sum makes NaN of
its column of the tile, not only of its row, since zero times it is NaN.

All-reduce is the same; finished own tiles are announced to all, who read them. Few rows
take one exchange of whole sums instead (`one_shot_all_reduce`).

Axis letters: B leading axes, M rows of all devices, K contraction, N columns; D
devices.
"""

import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_kernels.collective_matmul.all_reduce import one_shot_all_reduce
from pallas_kernels.collective_matmul.communicator import (
    Chunks,
    peers,
    relay,
    wait_for_signal,
)
from pallas_kernels.collective_matmul.config import CollectiveConfig
from pallas_kernels.collective_matmul.layout import (
    Layout,
    cut_tiles,
    launch,
    num_blocks,
    pad_rows,
)
from pallas_kernels.collective_matmul.xla import sum_of_products
from pallas_kernels.dispatch import Unsupported
from pallas_kernels.matmul.config import CONSUMERS
from pallas_kernels.matmul.mosaic_gpu import (
    load_tile,
    multiply_tile,
    next_slot,
    run_roles,
    snake_tiles,
    store_tile,
    tile_at,
)
from pallas_kernels.mosaic import DeviceSpec, smem_transforms


__all__ = ["matmul_all_reduce", "matmul_reduce_scatter"]


def matmul_reduce_scatter(
    xs: tuple[jax.Array, ...],
    ws: tuple[jax.Array, ...],
    *,
    axis_name: str,
    config: CollectiveConfig,
    device: DeviceSpec | None,
    out_dtype: DTypeLike,
    rhs_transposed: bool = False,
) -> jax.Array:
    """Computes ``reduce_scatter(sum_i x_i @ w_i)``, equal bit for bit between runs.

    Args:
        xs: [B,M,K_i] each; bfloat16 or float16.
        ws: weights [K_i,N], or [N,K_i] with `rhs_transposed`.
        axis_name: mesh axis of the sum.
        config: how to cut it.
        device: the GPU that the kernel is built for.
        out_dtype: the type of x: partial sums travel in it.
        rhs_transposed: weights are stored with N as rows.

    Returns:
        [B,M/D,N], the rows of this device.

    Raises:
        Unsupported: the device, types, alignment or shared memory do not fit.
    """
    return _reduce(
        xs,
        ws,
        axis_name=axis_name,
        config=config,
        device=device,
        out_dtype=out_dtype,
        rhs_transposed=rhs_transposed,
        share=False,
    )


def matmul_all_reduce(
    xs: tuple[jax.Array, ...],
    ws: tuple[jax.Array, ...],
    *,
    axis_name: str,
    config: CollectiveConfig,
    device: DeviceSpec | None,
    out_dtype: DTypeLike,
    rhs_transposed: bool = False,
) -> jax.Array:
    """Computes ``all_reduce(sum_i x_i @ w_i)``, equal bit for bit between runs.

    Each device reduces its share of the rows, which the others then read (two shots);
    of few rows each device reduces all, after a product through XLA (one shot).

    Args:
        xs: [B,M,K_i] each; bfloat16 or float16.
        ws: weights [K_i,N], or [N,K_i] with `rhs_transposed`.
        axis_name: mesh axis of the sum.
        config: how to cut it.
        device: the GPU that the kernel is built for.
        out_dtype: the type of x: partial sums travel in it.
        rhs_transposed: weights are stored with N as rows.

    Returns:
        [B,M,N].

    Raises:
        Unsupported: the device, types, alignment or shared memory do not fit.
    """
    if config.one_shot:
        _, device = cut_tiles(
            xs,
            ws,
            config=config,
            device=device,
            out_dtype=out_dtype,
            rhs_transposed=rhs_transposed,
        )
        sums = sum_of_products(xs, ws, out_dtype, rhs_transposed)
        return one_shot_all_reduce(sums, axis_name=axis_name, device=device)
    return _reduce(
        xs,
        ws,
        axis_name=axis_name,
        config=config,
        device=device,
        out_dtype=out_dtype,
        rhs_transposed=rhs_transposed,
        share=True,
    )


def _reduce(
    xs: tuple[jax.Array, ...],
    ws: tuple[jax.Array, ...],
    *,
    axis_name: str,
    config: CollectiveConfig,
    device: DeviceSpec | None,
    out_dtype: DTypeLike,
    rhs_transposed: bool,
    share: bool,
) -> jax.Array:
    batch, total_rows, _ = xs[0].shape
    devices = lax.axis_size(axis_name)
    dtype = xs[0].dtype
    if jnp.dtype(out_dtype) != dtype:
        raise Unsupported(
            f"collective_matmul: out_dtype {jnp.dtype(out_dtype).name}, the kernel"
            f" reduces in the type of x, {dtype.name}; use implementation='xla'"
        )
    if config.split != "m":
        raise Unsupported(
            f"collective_matmul: split={config.split!r}, the kernel adds partial sums"
            " by rows; use split='m'"
        )
    if config.tile_m % config.tile_k:
        raise Unsupported(
            f"collective_matmul: tile_k={config.tile_k}, the kernel adds partial sums"
            f" in whole stages; use a divisor of tile_m={config.tile_m}"
        )
    rows = total_rows // devices
    slabs = [pad_rows(x.reshape(batch * devices, rows, x.shape[-1])) for x in xs]
    tiles, device = cut_tiles(
        slabs,
        ws,
        config=config,
        device=device,
        out_dtype=dtype,
        rhs_transposed=rhs_transposed,
    )
    layout = Layout(
        axis_name=axis_name,
        devices=devices,
        batch=batch,
        rows=slabs[0].shape[1],
        num_blocks=num_blocks(config, device),
        config=config,
    )
    own_blocks = layout.blocks_of_device
    if config.cluster == "m" and own_blocks % 2:
        raise Unsupported(
            f"collective_matmul: cluster='m' and {own_blocks} row blocks of a device;"
            " a pair would belong to two devices; use cluster='n' or 'none'"
        )
    columns, cn = tiles[0].problem.n, config.cluster_tiles[1]
    counts = (devices * own_blocks, pl.cdiv(tiles[0].counts[1], cn) * cn)
    own_tiles = own_blocks * counts[1]
    chunks = Chunks.of(
        (config.tile_m, config.tile_n), columns, dtype, config.buffer_bytes
    )
    steps = config.tile_m // config.tile_k  # of the ring, for the sums of a peer
    # The consumers tell the announcer of each tile; it is at most two tiles behind.
    scratch_types: dict[str, Any] = {
        "stored": plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=2),
        "free": plgpu.Barrier(num_barriers=2),
    }
    if rhs_transposed:
        # Sums of peers lie in the ring as rows, however the weight is stored.
        rows_of_w = (config.stages, config.tile_k, config.tile_n)
        transforms = smem_transforms(config.tile_n, dtype)
        scratch_types["w_smem"] = plgpu.RefUnion(
            tiles[0].scratch_types()["w_smem"],
            plgpu.SMEM(rows_of_w, dtype, transforms=transforms),
        )

    def place(m: Any) -> tuple[Any, Any, Any]:
        """Distance of the owner, leading index and row block of a row of tiles."""
        distance = 1 + lax.div(m, jnp.int32(own_blocks))
        return distance, *layout.split(lax.rem(m, jnp.int32(own_blocks)))

    def body(*refs, **scratch):
        x_refs, w_refs = refs[: len(xs)], refs[len(xs) : 2 * len(xs)]
        identity, out, partial, received = refs[2 * len(xs) :]
        sums_smem = scratch["w_smem"]
        if rhs_transposed:
            scratch["w_smem"], sums_smem = sums_smem
        # By distance and tile: whether it is stored there for this device, first the
        # partial sums (then, where all share them, the sums).
        ready = pl.get_global(
            plgpu.SemaphoreType.REGULAR(((1 + share) * (devices - 1) * own_tiles,))
        )
        # By tile: peers whose sums have come in.
        arrived = pl.get_global(plgpu.SemaphoreType.REGULAR((own_tiles,)))
        left = pl.get_global(plgpu.SemaphoreType.REGULAR)
        others = peers(axis_name, devices)

        def own_tile(m, n):
            """Number of a tile among those of its owner."""
            return lax.rem(m, jnp.int32(own_blocks)) * counts[1] + n

        def own_rows(b):
            """The slab of `out` with the rows of this device."""
            return layout.slab(b, layout.device(0)) if share else b

        def pull():
            mine, piece_of = layout.pieces_of_block(math.prod(counts))

            def pull_tile(i, _):
                size = jnp.int32(math.prod(config.cluster_tiles))
                piece = piece_of(i)
                m, n = tile_at(
                    layout.order, counts, lax.div(piece, size), lax.rem(piece, size)
                )
                distance, b, number = place(m)
                own, index = distance == devices, m * counts[1] + n

                def window(chunk):
                    corner = number * config.tile_m, n * config.tile_n
                    return chunks.window(*corner, chunk)

                def from_peer(turn, _):
                    # What I hold at distance r from another device, it holds for me.
                    r = jnp.where(own, turn + 1, distance)
                    theirs = layout.slab(b, layout.device(devices - r))

                    def source(chunk, load):
                        mine = layout.slab(b, layout.device(0))
                        for apart, peer in others:

                            @pl.when(distance == devices - apart)
                            def _partial(peer=peer):
                                there = plgpu.remote_ref(partial, peer)
                                load(there.at[(mine, *window(chunk))])

                            if share:

                                @pl.when(own & (turn == devices - apart - 1))
                                def _sum(peer=peer):
                                    there = plgpu.remote_ref(out, peer)
                                    load(there.at[(theirs, *window(chunk))])

                    def target(chunk, store):
                        @pl.when(distance < devices)
                        def _partial():
                            slab = (r - 1) * batch + b
                            store(received.at[(slab, *window(chunk))])

                        if share:

                            @pl.when(own)
                            def _sum():
                                store(out.at[(theirs, *window(chunk))])

                    signal = index + jnp.where(own, turn * own_tiles, 0)
                    wait_for_signal(ready.at[signal], 1)
                    count = jnp.int32(math.prod(chunks.counts))
                    relay(chunks, scratch, config.buffers, count, source, target)

                    @pl.when(distance < devices)
                    def _arrived():
                        arrival = arrived.at[own_tile(m, n)]
                        plgpu.semaphore_signal(arrival, memory_scope="gpu")

                turns = jnp.where(own, (devices - 1) * share, 1)
                lax.fori_loop(0, turns, from_peer, None)

            lax.fori_loop(0, mine, pull_tile, None)
            layout.leave(left)

        def load(m, n, slot):
            distance, b, number = place(m)
            slab = layout.slab(b, layout.device(distance))
            for x_ref, w_ref, cut in zip(x_refs, w_refs, tiles, strict=True):
                slot = load_tile(cut, x_ref.at[slab], w_ref, scratch, number, n, slot)

            def add_received(slot):
                wait_for_signal(arrived.at[own_tile(m, n)], devices - 1, "gpu")
                for r, step in itertools.product(range(1, devices), range(steps)):
                    load_received((r - 1) * batch + b, step, slot)
                    slot = next_slot(slot, config.stages)
                return slot

            def load_received(slab, step, slot):
                depth, full = config.tile_k, scratch["full"].at[slot]
                row = number * config.tile_m + step * depth
                columns = pl.ds(n * config.tile_n, config.tile_n)
                picked = identity.at[:, pl.ds(step * depth, depth)]
                sums = received.at[slab, pl.ds(row, depth), columns]
                plgpu.barrier_wait(scratch["empty"].at[slot])
                plgpu.copy_gmem_to_smem(picked, scratch["x_smem"].at[slot], full)
                plgpu.copy_gmem_to_smem(sums, sums_smem.at[slot], full)

            return lax.cond(distance == devices, add_received, lambda slot: slot, slot)

        tiles_of_block = snake_tiles(layout.order, counts)

        def announce():
            """Tells who needs a tile of this device that it is there.

            A signal to a peer takes a microsecond that the consumers do not have.
            """

            def announce_tile(m, n, i):
                distance, _, _ = place(m)
                index = m * counts[1] + n
                half = lax.rem(i, jnp.int32(2))

                @pl.when(i >= 2)
                def _free():
                    plgpu.barrier_arrive(scratch["free"].at[half])

                plgpu.barrier_wait(scratch["stored"].at[half])

                @pl.when(distance < devices)
                def _partial():
                    owner: Any = {axis_name: layout.device(distance)}
                    pl.semaphore_signal(ready.at[index], device_id=owner)

                if share:

                    @pl.when(distance == devices)
                    def _sum():
                        for r, peer in others:
                            there = ready.at[index + (r - 1) * own_tiles]
                            pl.semaphore_signal(there, device_id=peer)

                return i + 1

            tiles_of_block(announce_tile, jnp.int32(0))

        def hand_on(done):
            """Consumer: lets the last of the tiles done so far be announced."""

            @pl.when(done > 0)
            def _():
                plgpu.wait_smem_to_gmem(0, wait_read_only=False)
                half = lax.rem(done - 1, jnp.int32(2))

                @pl.when(done > 2)
                def _until_free():
                    plgpu.barrier_wait(scratch["free"].at[half])

                plgpu.barrier_arrive(scratch["stored"].at[half])

        def add(scratch, slot, consumer):
            """Rows of the identity, and the sums of a peer that they pick."""
            height = config.block[0]
            rows = scratch["x_smem"].at[slot, pl.ds(consumer * height, height)]
            return rows, sums_smem.at[slot]

        def consume(m, n, carry, consumer):
            slot, done = carry
            distance, b, number = place(m)
            sums, slot = multiply_tile(
                tiles[0],
                scratch,
                consumer,
                slot,
                k_tiles=sum(cut.k_tiles for cut in tiles),
                # By then the copies of the last tile have arrived.
                meanwhile=functools.partial(hand_on, done),
                then=(jnp.where(distance == devices, (devices - 1) * steps, 0), add),
            )

            def store(rows_ref):
                view = functools.partial(
                    tiles[0].out_view, rows_ref, number, n, consumer
                )
                store_tile(tiles[0], sums, scratch, consumer, view)

            @pl.when(distance == devices)
            def _own():
                store(out.at[own_rows(b)])

            @pl.when(distance < devices)
            def _of_peer():
                store(partial.at[layout.slab(b, layout.device(distance))])

            return slot, done + 1

        run_roles(
            tiles[0],
            scratch,
            tiles_of_block,
            load,
            consume,
            spare_warps=[pull, announce],
            finish=lambda carry: hand_on(carry[1]),
            consumer_carry=jnp.int32(0),
        )

    shapes = [
        batch * (devices if share else 1),  # the result
        batch * devices,  # partial sums of this device
        batch * (devices - 1),  # partial sums of the peers, by distance from them
    ]
    out, *_ = launch(
        body,
        *slabs,
        *ws,
        jnp.asarray(np.eye(config.tile_m), dtype),
        out_type=[
            jax.ShapeDtypeStruct((slabs_of, layout.rows, columns), dtype)
            for slabs_of in shapes
        ],
        tiles=tiles[0],
        chunks=chunks,
        config=config,
        device=device,
        blocks=layout.num_blocks,
        name="matmul_all_reduce" if share else "matmul_reduce_scatter",
        scratch_types=scratch_types,
    )
    return out[:, :rows].reshape(batch, -1, columns)
