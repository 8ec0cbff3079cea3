"""Hopper all-gather matmul: rows of peers come in while others are multiplied.

One spare warp of each block reads rows of the peers over NVLink, a piece of a row block
at a time, writes them to the gathered array and counts them in ``arrived``. Output
tiles come in the order of arrival: own rows first, then row block 0 of every peer, row
block 1 of every peer, ...; the producer waits for the row block of a tile before it
streams it. The gathered rows stay in an output: the backward pass wants them.

Axis letters: B leading axes, m rows of one device, K contraction, N columns; D devices.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_kernels.collective_matmul.communicator import (
    Chunks,
    divide,
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
from pallas_kernels.matmul.mosaic_gpu import (
    load_tile,
    multiply_tile,
    run_roles,
    snake_tiles,
    store_tile,
)
from pallas_kernels.mosaic import DeviceSpec


__all__ = ["all_gather_matmul"]


def all_gather_matmul(
    x: jax.Array,
    ws: tuple[jax.Array, ...],
    *,
    axis_name: str,
    config: CollectiveConfig,
    device: DeviceSpec | None,
    out_dtype: DTypeLike,
    rhs_transposed: bool = False,
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """Computes ``all_gather(x) @ w`` for one or several weights.

    Args:
        x: [B,m,K] rows of this device; bfloat16 or float16.
        ws: weights [K,N] each, or [N,K] with `rhs_transposed`.
        axis_name: mesh axis of the gather.
        config: how to cut it.
        device: the GPU that the kernel is built for.
        out_dtype: type of the products: that of x, or float32.
        rhs_transposed: weights are stored with N as rows.

    Returns:
        The products, [B,D*m,N] each, and the gathered x, [B,D*m,K].

    Raises:
        Unsupported: the device, types, alignment or shared memory do not fit.
    """
    batch, rows, depth = x.shape
    devices = lax.axis_size(axis_name)
    x = pad_rows(x)
    tiles, device = cut_tiles(
        [x] * len(ws),
        ws,
        config=config,
        device=device,
        out_dtype=out_dtype,
        rhs_transposed=rhs_transposed,
    )
    layout = Layout(
        axis_name=axis_name,
        devices=devices,
        batch=batch,
        rows=x.shape[1],
        num_blocks=num_blocks(config, device),
        config=config,
    )
    own_blocks = layout.blocks_of_device
    widths = [t.counts[1] for t in tiles]
    # Column tiles of all weights, one weight after the other.
    starts = [sum(widths[:i]) for i in range(len(ws))]
    cn = config.cluster_tiles[1]
    # The number of devices is even, so row blocks always pair up.
    counts = (devices * own_blocks, pl.cdiv(sum(widths), cn) * cn)
    # Row blocks hold a whole number of chunks, the last and lower one of a device too.
    common = math.gcd(config.tile_m, x.shape[1])
    chunks = Chunks.of(common, depth, x.dtype, config.buffer_bytes)
    heights = config.tile_m, x.shape[1] - (layout.blocks - 1) * config.tile_m
    sizes = [chunks.count(height) for height in heights]
    per_piece = math.gcd(config.piece_chunks, *sizes)
    # Pieces of a row block, of the last one, of a device within one leading index.
    pieces, last_pieces = (size // per_piece for size in sizes)
    of_device = (layout.blocks - 1) * pieces + last_pieces

    def place(m: Any) -> tuple[Any, Any, Any, Any]:
        """Device, leading index and row block of a row of tiles; is it our own."""
        own, others = m < own_blocks, jnp.int32(devices - 1)
        block = jnp.where(own, m, lax.div(m - own_blocks, others))
        distance = jnp.where(own, 0, 1 + lax.rem(m - own_blocks, others))
        return layout.device(distance), *layout.split(block), own

    def body(x_ref, *refs, **scratch):
        w_refs, out_refs, gathered = refs[: len(ws)], refs[len(ws) : -1], refs[-1]
        arrived = pl.get_global(plgpu.SemaphoreType.REGULAR((devices * own_blocks,)))
        left = pl.get_global(plgpu.SemaphoreType.REGULAR)

        def pull():
            of_peers = (devices - 1) * batch * of_device
            mine, piece_of = layout.pieces_of_block(devices * batch * of_device)

            def chunk_at(index):
                """Source, row block, leading index, rows and columns.

                The row blocks of peers come in the order of their tiles, own ones last.
                """
                turn, chunk = divide(index, per_piece)
                own = piece_of(turn) >= of_peers
                sources = jnp.where(own, 1, devices - 1)
                number = piece_of(turn) - jnp.where(own, of_peers, 0)
                b, number = divide(number, sources * of_device)
                full = (layout.blocks - 1) * pieces * sources
                last = number >= full
                row, piece = divide(
                    number - jnp.where(last, full, 0),
                    jnp.where(last, last_pieces, pieces),
                )
                block = jnp.where(last, layout.blocks - 1, lax.div(row, sources))
                which = jnp.where(last, row, lax.rem(row, sources))
                device = layout.device(jnp.where(own, 0, 1 + which))
                chunk = (block * pieces + piece) * per_piece + chunk
                return device, b * layout.blocks + block, b, chunks.window(chunk)

            def source(index):
                device, _, b, window = chunk_at(index)
                there: Any = {axis_name: device}
                return plgpu.remote_ref(x_ref, there).at[(b, *window)]

            def target(index, store):
                device, _, b, window = chunk_at(index)
                store(gathered.at[(layout.slab(b, device), *window)])

            def stored(index):
                @pl.when(lax.rem(index, jnp.int32(per_piece)) == per_piece - 1)
                def _announce():
                    device, block, _, _ = chunk_at(index)
                    plgpu.wait_smem_to_gmem(0, wait_read_only=False)
                    arrival = arrived.at[device * own_blocks + block]
                    plgpu.semaphore_signal(arrival, memory_scope="gpu")

            relay(
                chunks,
                scratch,
                config.buffers,
                mine * per_piece,
                source,
                target,
                stored,
            )
            layout.leave(left)

        def load(m, n, slot):
            source, b, number, own = place(m)

            def stream(rows_ref, slot):
                """From the rows and the weight that column tile n belongs to."""

                def choose(i, slot):
                    def run(slot):
                        return load_tile(
                            tiles[i],
                            rows_ref,
                            w_refs[i],
                            scratch,
                            number,
                            n - starts[i],
                            slot,
                        )

                    if i == 0:
                        return run(slot)
                    earlier = functools.partial(choose, i - 1)
                    return lax.cond(n >= starts[i], run, earlier, slot)

                return choose(len(ws) - 1, slot)

            def remote(slot):
                block = b * layout.blocks + number
                arrival = arrived.at[source * own_blocks + block]
                last = number == layout.blocks - 1
                wait_for_signal(arrival, jnp.where(last, last_pieces, pieces), "gpu")
                return stream(gathered.at[layout.slab(b, source)], slot)

            local = functools.partial(stream, x_ref.at[b])
            return lax.cond(own, local, remote, slot)

        def consume(m, n, slot, consumer):
            source, b, number, _ = place(m)
            sums, slot = multiply_tile(tiles[0], scratch, consumer, slot)
            for i, out in enumerate(out_refs):
                end = starts[i + 1] if i + 1 < len(ws) else counts[1]

                @pl.when((n >= starts[i]) & (n < end))
                def _store(i=i, out=out):
                    rows_ref = out.at[layout.slab(b, source)]
                    view = functools.partial(
                        tiles[i].out_view, rows_ref, number, n - starts[i], consumer
                    )
                    store_tile(tiles[i], sums, scratch, consumer, view)

            return slot

        run_roles(
            tiles[0],
            scratch,
            snake_tiles(layout.order, counts),
            load,
            consume,
            spare_warps=[pull],
        )

    shape = (batch * devices, layout.rows)
    outputs = [
        jax.ShapeDtypeStruct((*shape, t.problem.n), t.problem.out_dtype) for t in tiles
    ]
    results = launch(
        body,
        x,
        *ws,
        out_type=[*outputs, jax.ShapeDtypeStruct((*shape, depth), x.dtype)],
        tiles=tiles[0],
        chunks=chunks,
        config=config,
        device=device,
        blocks=layout.num_blocks,
        name="all_gather_matmul",
    )
    *outs, gathered = (
        y[:, :rows].reshape(batch, devices * rows, y.shape[-1]) for y in results
    )
    return tuple(outs), gathered
