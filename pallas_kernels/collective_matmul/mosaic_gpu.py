"""Hopper matrix products that communicate while they multiply.

In each block of the persistent matmul (`pallas_kernels.matmul.mosaic_gpu`) warps that
the producer has to spare, the communicators, move data between the GPUs while the
others multiply. Nothing is restarted for a step of a ring and nobody waits for a whole
shard: all output tiles lie in one flat order, and what a tile needs from a peer is
signaled row block by row block, or tile by tile. Data goes straight to its destination
over NVLink (TMA stores to `plgpu.remote_ref`), never through multicast.

All-gather matmul. The communicators push this device's rows to all peers at once, a
piece of a row block at a time, and count it in ``arrived[source, row block]`` there; or
they pull the rows of the peers and count them here.
The tiles come in the order of arrival: own rows first, then row block 0 of every peer,
row block 1 of every peer, ...; the producer waits for the row block of a tile before it
streams it. The gathered rows stay in an output: the backward pass wants them.

Matmul reduce-scatter. Tiles for the next device come first, then those for the one
after it, ..., own ones last, so that no two devices send to one. The consumers store
partial sums locally, as any matmul does, and go on; a communicator picks the tile up
and pushes it to its owner. For own tiles the producer streams the partial sums of the
peers through the same ring, after the operands, and the consumers add them to their
fp32 sums in a fixed order: the result is deterministic, and a tile is rounded once for
each peer and once at the end.

Matmul all-reduce is the same, and finished own tiles are pushed to all; few rows take
one exchange of whole sums instead (`one_shot_all_reduce`).

A device leaves the kernel when all that peers send to it has been used, so no peer
writes into memory that XLA has reused. Communicators wait for their own device only
(but at the very end of an all-reduce), so the devices always make progress.

Axis letters: B leading axes, M rows of all devices, m rows of one, K contraction,
N columns; D devices. A *row block* is `tile_m` rows of one device; the *distance* of a
device is how many places after this one it comes.

References:
    Flux (arXiv 2406.06858), sections 3 and 4: tiles of communication, their order, and
    signals for each. There the copy engine of the driver moves data for the all-gather
    and extra warps pull and add partial sums; here both are pushed, and the sums are
    finished in registers.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
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
from pallas_kernels.collective_matmul.xla import sum_of_products
from pallas_kernels.dispatch import Unsupported
from pallas_kernels.matmul.config import CONSUMERS, Problem
from pallas_kernels.matmul.mosaic_gpu import (
    Tiles,
    check_problem,
    load_tile,
    multiply_tile,
    next_slot,
    run_roles,
    snake_tiles,
    store_tile,
    tile_at,
)
from pallas_kernels.mosaic import DeviceSpec, check_hopper, check_smem


__all__ = ["all_gather_matmul", "matmul_all_reduce", "matmul_reduce_scatter"]

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
    def senders(self) -> int:
        """Blocks whose communicators have work to do."""
        return min(self.config.senders, self.num_blocks)

    def for_each_piece(
        self,
        count: int,
        body: Callable[[Any, Any], None],
        finish: Callable[[], None] = lambda: None,
    ) -> Callable[[Any], None]:
        """The work of communicators: ``body(piece, warp)`` for each one's pieces.

        The pieces are dealt out over the first `senders` blocks, and over the warps of
        a block last, so that neighboring pieces are under way at the same time. Each of
        these communicators calls `finish` at the end.
        """
        config = self.config
        block = lax.axis_index("worker")
        if config.cluster != "none":
            block = block * 2 + lax.axis_index("cluster")

        def communicate(warp: Any) -> None:
            first = warp * self.senders + block
            step = config.communicators * self.senders
            mine = lax.div(count - 1 - first + step, jnp.int32(step))

            @pl.when(block < self.senders)
            def _work():
                lax.fori_loop(0, mine, lambda i, _: body(first + i * step, warp), None)
                finish()

        return communicate


def _num_blocks(config: CollectiveConfig, device: DeviceSpec) -> int:
    """One block to a multiprocessor, in whole clusters.

    All blocks must be resident at once, since blocks of different devices wait for each
    other; so there are never more of them than multiprocessors.
    """
    size = math.prod(config.cluster_tiles)
    return device.num_sms // size * size


def _launch(
    body: Callable[..., None],
    *operands: jax.Array,
    out_type: Sequence[jax.ShapeDtypeStruct],
    tiles: Tiles,
    chunks: Chunks,
    config: CollectiveConfig,
    device: DeviceSpec,
    name: str,
) -> Sequence[jax.Array]:
    """Runs a body on one block, or half a cluster, per multiprocessor."""
    parts = (config.communicators, config.buffers)
    need = tiles.smem_bytes + chunks.smem_bytes(*parts)
    check_smem(need, device, f"collective_matmul with {config}")
    size = math.prod(config.cluster_tiles)
    cluster = {"cluster": (size,), "cluster_names": ("cluster",)} if size > 1 else {}
    return plgpu.kernel(
        body,
        out_type=list(out_type),
        scratch_types=tiles.scratch_types() | chunks.scratch_types(*parts),
        grid=(_num_blocks(config, device) // size,),
        grid_names=("worker",),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        kernel_name=name,
        **cluster,
    )(*operands)


def _pad_rows(x: jax.Array) -> jax.Array:
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % TILE_ROWS), (0, 0)))


def _cut(
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
        cut = Tiles(problem=problem, config=config)
        if (lines := config.block[1] // cut.store_columns) % config.store_slots:
            # The first of a tile would overwrite the last of the one before.
            raise Unsupported(
                f"collective_matmul: store_slots {config.store_slots}, expected a"
                f" divisor of the {lines} chunks of 128 bytes that a consumer stores"
            )
        tiles.append(cut)
    return tiles, device


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
    x = _pad_rows(x)
    tiles, device = _cut(
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
        num_blocks=_num_blocks(config, device),
        config=config,
    )
    own_blocks = layout.blocks_of_device
    widths = [t.counts[1] for t in tiles]
    # Column tiles of all weights, one weight after the other.
    starts = [sum(widths[:i]) for i in range(len(ws))]
    cn = config.cluster_tiles[1]
    # The number of devices is even, so row blocks always pair up.
    counts = (devices * own_blocks, pl.cdiv(sum(widths), cn) * cn)
    chunks = Chunks.of((config.piece_rows, 256), depth, x.dtype, config.buffer_bytes)
    strip = chunks.chunk[1]
    chunks = dataclasses.replace(chunks, piece=(config.piece_rows, strip))
    strips = pl.cdiv(depth, strip)
    pieces = strips * (config.tile_m // config.piece_rows)  # of a row block

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
        others = peers(axis_name, devices)

        def piece_of(block, within):
            """Leading index and first row and column of a piece of a row block."""
            b, number = layout.split(block)
            down = lax.div(within, jnp.int32(strips)) * config.piece_rows
            across = lax.rem(within, jnp.int32(strips)) * strip
            return b, (number * config.tile_m + down, across)

        def move(source, b, corner, places, warp):
            row, column = corner

            def send(buffer, chunk):
                window = chunks.window(row, column, chunk)
                for place, slab in places:
                    plgpu.copy_smem_to_gmem(buffer, place.at[(slab, *window)])

            relay(
                chunks,
                scratch,
                warp,
                config.buffers,
                lambda chunk: source.at[(b, *chunks.window(row, column, chunk))],
                send,
                len(places),
            )

        def push_piece(piece, warp):
            block = lax.div(piece, jnp.int32(pieces))
            b, corner = piece_of(block, lax.rem(piece, jnp.int32(pieces)))
            me = layout.device(0)
            copies = [gathered, *(plgpu.remote_ref(gathered, p) for _, p in others)]
            move(x_ref, b, corner, [(c, layout.slab(b, me)) for c in copies], warp)
            for _, peer in others:
                arrival = arrived.at[me * own_blocks + block]
                pl.semaphore_signal(arrival, device_id=peer)

        def pull_piece(piece, warp):
            # The row blocks of the peers as the tiles come, own ones at the end.
            row, last = lax.div(piece, jnp.int32(pieces)), (devices - 1) * own_blocks
            own = row >= last
            block = jnp.where(own, row - last, lax.div(row, jnp.int32(devices - 1)))
            distance = jnp.where(own, 0, 1 + lax.rem(row, jnp.int32(devices - 1)))
            b, corner = piece_of(block, lax.rem(piece, jnp.int32(pieces)))
            for r, peer in [(0, None), *others]:

                @pl.when(distance == r)
                def _from(r=r, peer=peer):
                    rows_ref = x_ref if peer is None else plgpu.remote_ref(x_ref, peer)
                    source = layout.device(r)
                    slab = layout.slab(b, source)
                    move(rows_ref, b, corner, [(gathered, slab)], warp)
                    arrival = arrived.at[source * own_blocks + block]
                    plgpu.semaphore_signal(arrival, memory_scope="gpu")

        def wait_until_pulled():
            # The rows here must stay until all peers have them.
            for _, peer in others:
                pl.semaphore_signal(left, device_id=peer)
            all_of_them = (devices - 1) * layout.senders * config.communicators
            pl.semaphore_wait(left, all_of_them, decrement=False)

        if config.transfer == "push":
            communicate = layout.for_each_piece(own_blocks * pieces, push_piece)
        else:
            communicate = layout.for_each_piece(
                devices * own_blocks * pieces, pull_piece, wait_until_pulled
            )

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
                scope = "sys" if config.transfer == "push" else "gpu"
                wait_for_signal(arrival, pieces, scope)
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

        size = math.prod(config.cluster_tiles)
        late = min(pl.cdiv(layout.senders, size), layout.num_blocks // size - 1)
        run_roles(
            tiles[0],
            scratch,
            snake_tiles(config, counts, late=late, rounds=config.spare_rounds),
            load,
            consume,
            communicate=communicate,
            communicators=config.communicators,
        )

    shape = (batch * devices, layout.rows)
    outputs = [
        jax.ShapeDtypeStruct((*shape, t.problem.n), t.problem.out_dtype) for t in tiles
    ]
    results = _launch(
        body,
        x,
        *ws,
        out_type=[*outputs, jax.ShapeDtypeStruct((*shape, depth), x.dtype)],
        tiles=tiles[0],
        chunks=chunks,
        config=config,
        device=device,
        name="all_gather_matmul",
    )
    *outs, gathered = (
        y[:, :rows].reshape(batch, devices * rows, y.shape[-1]) for y in results
    )
    return tuple(outs), gathered


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

    Each device reduces its share of the rows and pushes it to the others (two shots);
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
        _, device = _cut(
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
    rows = total_rows // devices
    slabs = [_pad_rows(x.reshape(batch * devices, rows, x.shape[-1])) for x in xs]
    tiles, device = _cut(
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
        num_blocks=_num_blocks(config, device),
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
    chunks = Chunks.of(
        (config.tile_m, config.tile_n), columns, dtype, config.buffer_bytes
    )
    width = tiles[0].store_columns

    def place(m: Any) -> tuple[Any, Any, Any]:
        """Distance of the owner, leading index and row block of a row of tiles."""
        distance = 1 + lax.div(m, jnp.int32(own_blocks))
        return distance, *layout.split(lax.rem(m, jnp.int32(own_blocks)))

    def body(*refs, **scratch):
        x_refs, w_refs = refs[: len(xs)], refs[len(xs) : 2 * len(xs)]
        out, partial, received = refs[2 * len(xs) :]
        # By tile: consumers that have stored it here; peers whose sums have come in.
        stored = pl.get_global(plgpu.SemaphoreType.REGULAR((math.prod(counts),)))
        arrived = pl.get_global(plgpu.SemaphoreType.REGULAR((own_blocks * counts[1],)))
        finished = pl.get_global(plgpu.SemaphoreType.REGULAR)

        def own_tile(m, n):
            """Number of a tile among those of its owner."""
            return lax.rem(m, jnp.int32(own_blocks)) * counts[1] + n

        def own_rows(b):
            """The slab of `out` with the rows of this device."""
            return layout.slab(b, layout.device(0)) if share else b

        def send_tile(piece, warp):
            size = math.prod(config.cluster_tiles)
            index, rank = (
                lax.div(piece, jnp.int32(size)),
                lax.rem(piece, jnp.int32(size)),
            )
            m, n = tile_at(config, counts, index, rank)
            distance, b, number = place(m)
            corner = number * config.tile_m, n * config.tile_n

            def move(source, targets):
                wait_for_signal(stored.at[m * counts[1] + n], CONSUMERS, "gpu")

                def send(buffer, chunk):
                    window = chunks.window(*corner, chunk)
                    for target, slab in targets:
                        plgpu.copy_smem_to_gmem(buffer, target.at[(slab, *window)])

                ref, slab = source
                relay(
                    chunks,
                    scratch,
                    warp,
                    config.buffers,
                    lambda chunk: ref.at[(slab, *chunks.window(*corner, chunk))],
                    send,
                    len(targets),
                )

            others = peers(axis_name, devices)
            for r, owner in others:

                @pl.when(distance == r)
                def _to_owner(r=r, owner=owner):
                    there = plgpu.remote_ref(received, owner)
                    slab = layout.slab(b, layout.device(r))
                    move((partial, slab), [(there, (r - 1) * batch + b)])
                    pl.semaphore_signal(arrived.at[own_tile(m, n)], device_id=owner)

            if share:

                @pl.when(distance == devices)
                def _to_all():
                    slab = own_rows(b)
                    theirs = [plgpu.remote_ref(out, peer) for _, peer in others]
                    move((out, slab), [(there, slab) for there in theirs])
                    for _, peer in others:
                        pl.semaphore_signal(finished, device_id=peer)

        send_tiles = layout.for_each_piece(math.prod(counts), send_tile)

        def communicate(warp):
            send_tiles(warp)
            if share:
                expected = (devices - 1) * own_blocks * counts[1]
                pl.semaphore_wait(finished, expected, decrement=False)

        def load(m, n, slot):
            distance, b, number = place(m)
            slab = layout.slab(b, layout.device(distance))
            for x_ref, w_ref, cut in zip(x_refs, w_refs, tiles, strict=True):
                slot = load_tile(cut, x_ref.at[slab], w_ref, scratch, number, n, slot)

            def add_received(slot):
                wait_for_signal(arrived.at[own_tile(m, n)], devices - 1)
                for column in range(0, config.tile_n, width):
                    for r in range(1, devices):
                        load_received((r - 1) * batch + b, column, slot)
                        slot = next_slot(slot, config.stages)
                return slot

            def load_received(slab, column, slot):
                # Two copies, since the barrier of a stage expects two.
                half = config.tile_m // 2
                plgpu.barrier_wait(scratch["empty"].at[slot])
                for top in (0, half):
                    window = (
                        pl.ds(number * config.tile_m + top, half),
                        pl.ds(n * config.tile_n + column, width),
                    )
                    plgpu.copy_gmem_to_smem(
                        received.at[(slab, *window)],
                        scratch["x_smem"].at[slot, pl.ds(top, half), pl.ds(0, width)],
                        scratch["full"].at[slot],
                    )

            return lax.cond(distance == devices, add_received, lambda slot: slot, slot)

        def signal_stored(tile):
            @pl.when(tile >= 0)
            def _():
                plgpu.wait_smem_to_gmem(0, wait_read_only=False)
                plgpu.semaphore_signal(stored.at[tile], memory_scope="gpu")

        def consume(m, n, carry, consumer):
            slot, last = carry
            distance, b, number = place(m)
            sums, slot = multiply_tile(
                tiles[0],
                scratch,
                consumer,
                slot,
                k_tiles=sum(cut.k_tiles for cut in tiles),
                # By then the copies of the last tile have arrived.
                meanwhile=functools.partial(signal_stored, last),
            )

            def store(rows_ref, finish=None):
                view = functools.partial(
                    tiles[0].out_view, rows_ref, number, n, consumer
                )
                store_tile(tiles[0], sums, scratch, consumer, view, finish)

            def to_peer(slot):
                store(partial.at[layout.slab(b, layout.device(distance))])
                return slot

            def to_own(slot):
                height = config.block[0]

                def finish(_, values):
                    nonlocal slot
                    for _ in range(1, devices):
                        plgpu.barrier_wait(scratch["full"].at[slot])
                        rows_of = pl.ds(consumer * height, height)
                        part = scratch["x_smem"][slot, rows_of, pl.ds(0, width)]
                        values += part.astype(jnp.float32)
                        # The reads come before the next copy into the stage.
                        plgpu.commit_smem()
                        plgpu.barrier_arrive(scratch["empty"].at[slot])
                        slot = next_slot(slot, config.stages)
                    return values

                store(out.at[own_rows(b)], finish)
                return slot

            slot = lax.cond(distance == devices, to_own, to_peer, slot)
            return slot, m * counts[1] + n

        run_roles(
            tiles[0],
            scratch,
            snake_tiles(config, counts),
            load,
            consume,
            communicate=communicate,
            communicators=config.communicators,
            finish=lambda carry: signal_stored(carry[1]),
            consumer_carry=jnp.int32(-1),
        )

    shapes = [
        batch * (devices if share else 1),  # the result
        batch * devices,  # partial sums of this device
        batch * (devices - 1),  # partial sums received, by distance from the sender
    ]
    out, *_ = _launch(
        body,
        *slabs,
        *ws,
        out_type=[
            jax.ShapeDtypeStruct((slabs_of, layout.rows, columns), dtype)
            for slabs_of in shapes
        ],
        tiles=tiles[0],
        chunks=chunks,
        config=config,
        device=device,
        name="matmul_all_reduce" if share else "matmul_reduce_scatter",
    )
    return out[:, :rows].reshape(batch, -1, columns)
