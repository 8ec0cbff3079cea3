"""Hopper matmul reduce-scatter and all-reduce: sums are sent while others are computed.

Reduce-scatter. Tiles for the next device come first, then those for the one after it,
..., own ones last, so that no two devices read from one. The consumers store partial
sums locally, as any matmul does, and go on. Of the two spare warps that each block
uses one announces stored tiles to their owners, and one reads over NVLink what peers
have announced to this device (`pull`); or the one announces them to the other, which
writes them to their owners (`push`): a way less over the links, and these carry more.
Partial sums lie one tile after another, so that a tile is a line of memory (`Chunks`
says why that matters).

Own tiles are the usual matmuls and then the sums of the peers, times the identity:
these pass through the same ring as two more stages for each peer, and the tensor cores
add them to the fp32 sums in a fixed order. The result is deterministic, and a tile is
rounded once for each peer and once at the end. An infinite partial sum makes NaN of
its column of the tile, not only of its row, since zero times it is NaN.

All-reduce is the same; finished own tiles are announced to all, who read them. Few rows
take one exchange of whole sums instead (`one_shot_all_reduce`).

Axis letters: B leading axes, M rows of all devices, K contraction, N columns; D
devices.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
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
    divide,
    peers,
    relay,
    wait_for_signal,
)
from pallas_kernels.collective_matmul.config import Call, CollectiveConfig
from pallas_kernels.collective_matmul.layout import (
    RowLayout,
    cut_tiles,
    grid,
    pad,
    scales_of,
    values_of,
)
from pallas_kernels.collective_matmul.xla import sum_of_products
from pallas_kernels.dispatch import Unsupported
from pallas_kernels.matmul.config import CONSUMERS
from pallas_kernels.matmul.mosaic_gpu import (
    Tiles,
    load_tile,
    multiply_tile,
    run_tiles,
    snake_tiles,
    store_tile,
    tile_at,
)
from pallas_kernels.mosaic import DeviceSpec, smem_transforms
from pallas_kernels.mosaic.aliases import Ref, Scalar
from pallas_kernels.mosaic.pipeline import next_slot
from pallas_kernels.scaled_matmul.mosaic_gpu import Scales, promote_tile


def matmul_reduce_scatter(
    xs: Sequence[Any],
    ws: Sequence[Any],
    call: Call,
    config: CollectiveConfig,
    device: DeviceSpec,
) -> jax.Array:
    """Computes ``reduce_scatter(sum_i x_i @ w_i)``, bitwise equal between runs.

    Args:
        xs: [B,M,K_i] each; bfloat16 or float16; or one `ScaledArray` of 8 bits.
        ws: weights [K_i,N], or [N,K_i] if they are stored so.
        call: the mesh axis, the type of the sum (that of x, or one of 16 bits: partial
            sums travel in it), how weights are stored.
        config: how to cut it.
        device: the Hopper GPU that the kernel is built for.

    Returns:
        [B,M/D,N], the rows of this device.

    Raises:
        Unsupported: types, alignment or shared memory do not fit.
    """
    return _reduce(xs, ws, call, config, device, share=False)


def matmul_all_reduce(
    xs: Sequence[jax.Array],
    ws: Sequence[jax.Array],
    call: Call,
    config: CollectiveConfig,
    device: DeviceSpec,
) -> jax.Array:
    """Computes ``all_reduce(sum_i x_i @ w_i)``, bitwise equal between runs.

    Each device reduces its share of the rows, which the others then read (two shots);
    of few rows each device reduces all, after a matmul through XLA (one shot).

    Args:
        xs: [B,M,K_i] each; bfloat16 or float16.
        ws: weights [K_i,N], or [N,K_i] if they are stored so.
        call: as of `matmul_reduce_scatter`.
        config: how to cut it.
        device: the Hopper GPU that the kernel is built for.

    Returns:
        [B,M,N].

    Raises:
        Unsupported: types, alignment or shared memory do not fit.
    """
    if config.one_shot:
        cut_tiles([pad(x) for x in xs], [pad(w) for w in ws], call, config)
        sums = sum_of_products(tuple(xs), tuple(ws), call)
        return one_shot_all_reduce(sums, axis_name=call.axis_name, device=device)
    # Each device reduces a whole number of rows.
    rows = xs[0].shape[1]
    more = (0, 0), (0, -rows % call.size), (0, 0)
    padded = [jnp.pad(x, more) for x in xs]
    return _reduce(padded, ws, call, config, device, share=True)[:, :rows]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """A reduction as it is cut."""

    layout: RowLayout
    """Rows and devices."""
    tiles: Sequence[Tiles]
    """The tiles of each matmul; their sums share one output tile."""
    chunks: Chunks
    """Chunks in which a tile is read from a peer."""
    scales: Scales | None
    """How scales are read, of operands of 8 bits."""
    share: bool
    """True: all devices get the sums of all rows."""

    @property
    def config(self) -> CollectiveConfig:
        """Tiling of the matmuls."""
        return self.layout.config

    @property
    def devices(self) -> int:
        """D."""
        return self.layout.devices

    @property
    def pushes(self) -> bool:
        """Whether devices write partial sums to their owners, or these read them."""
        return self.config.transfer == "push" and not self.share

    @property
    def counts(self) -> tuple[int, int]:
        """Output tiles along rows and columns, in whole clusters."""
        cn = self.config.cluster_tiles[1]
        columns = pl.cdiv(self.tiles[0].counts[1], cn) * cn
        return self.devices * self.layout.blocks_of_device, columns

    @property
    def own_tiles(self) -> int:
        """Output tiles of one device."""
        return self.layout.blocks_of_device * self.counts[1]

    @property
    def steps(self) -> int:
        """Stages of the ring that the sums of one peer take in an own tile."""
        return self.config.tile_m // self.depth

    @property
    def depth(self) -> int:
        """Rows of sums in such a stage: as many bytes as operands of a matmul have."""
        p = self.tiles[0].problem
        return self.config.tile_k * p.dtype.itemsize // p.out_dtype.itemsize

    @property
    def for_each_tile(self) -> Callable[..., Any]:
        """The tiles of a block, for `run_tiles`."""
        return snake_tiles(self.layout.order, self.counts)

    def place(self, m: Scalar) -> tuple[Scalar, Scalar, Scalar]:
        """Distance of the owner, leading index and row block of a row of tiles."""
        own_blocks = jnp.int32(self.layout.blocks_of_device)
        distance = 1 + lax.div(m, own_blocks)
        return distance, *self.layout.split(lax.rem(m, own_blocks))

    def own_tile(self, m: Scalar, n: Scalar) -> Scalar:
        """Number of a tile among those of its owner."""
        return self.number(lax.rem(m, jnp.int32(self.layout.blocks_of_device)), n)

    def number(self, m: Scalar, n: Scalar) -> Scalar:
        """Number of a tile."""
        return m * self.counts[1] + n

    def scratch_types(self) -> dict[str, Any]:
        """Scratch of one block beside the ring and the chunks."""
        # The consumers tell the announcer of each tile; it is at most two behind.
        found: dict[str, Any] = {
            "stored": plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=2),
            "free": plgpu.Barrier(num_barriers=2),
        }
        first, c = self.tiles[0], self.config
        p, dtype = first.problem, first.problem.out_dtype

        def beside(name: str, rows: int, columns: int) -> Any:
            """The ring of an operand, which is one of rows of sums as well."""
            transforms = smem_transforms(columns, dtype)
            shape = (c.stages, rows, columns)
            sums = plgpu.SMEM(shape, dtype, transforms=transforms)
            return plgpu.RefUnion(first.scratch_types()[name], sums)

        # Sums of peers lie in the ring as rows, however the weight is stored.
        if p.rhs_transposed:
            found["w_smem"] = beside("w_smem", self.depth, c.tile_n)
        if p.dtype != dtype:
            found["x_smem"] = beside("x_smem", c.tile_m, self.depth)
        return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class Roles:
    """Roles of the warps of a block."""

    plan: Plan
    """Plan of the work."""
    xs: Sequence[Ref]
    """Left operands, [B*D,m,K_i]."""
    ws: Sequence[Ref]
    """Right operands."""
    factors: Sequence[Ref]
    """Scales of rows and columns, of operands of 8 bits: `scales_of`."""
    identity: Ref
    """[tile_m,tile_m]."""
    out: Ref
    """Sums: [B,m,N], or [B*D,m,N] where all devices get all of them."""
    partial: Ref
    """Sums of this device for the others, one tile of [tile_m,tile_n] after another:
    partial sums, then, where all share them, the sums."""
    received: Ref
    """Partial sums of the others for this one, in the same order: a tile has the same
    number for the device that holds it as for the one that wants it."""
    scratch: Mapping[str, Ref]
    """Shared memory and barriers."""
    picked_smem: Ref
    """The part of the ring for x, [stages,tile_m,depth] in the type of the sums."""
    sums_smem: Ref
    """The part of the ring for w, [stages,depth,tile_n] however w is stored."""
    ready: Ref
    """Semaphores by distance and tile: it is stored there for this device, or here for
    that one. First the partial sums; then, where all share them, the sums."""
    arrived: Ref
    """Semaphores by tile: peers whose partial sums are here."""
    left: Ref
    """Semaphore: blocks of peers that read no more."""

    @classmethod
    def of(cls, plan: Plan, refs: Sequence[Ref], scratch: dict[str, Ref]) -> "Roles":
        """Sort what the kernel gets into the roles' fields."""
        products = len(plan.tiles)
        *factors, identity, out, partial, received = refs[2 * products :]
        picked_smem, sums_smem = scratch["x_smem"], scratch["w_smem"]
        if plan.tiles[0].problem.rhs_transposed:
            scratch["w_smem"], sums_smem = sums_smem
        if plan.scales is not None:
            scratch["x_smem"], picked_smem = picked_smem
        semaphores = (1 + plan.share) * (plan.devices - 1) * plan.own_tiles
        return cls(
            plan=plan,
            xs=refs[:products],
            ws=refs[products : 2 * products],
            factors=factors,
            identity=identity,
            out=out,
            partial=partial,
            received=received,
            scratch=scratch,
            picked_smem=picked_smem,
            sums_smem=sums_smem,
            ready=pl.get_global(plgpu.SemaphoreType.REGULAR((semaphores,))),
            arrived=pl.get_global(plgpu.SemaphoreType.REGULAR((plan.own_tiles,))),
            left=pl.get_global(plgpu.SemaphoreType.REGULAR),
        )

    def run(self) -> None:
        """Each warp takes its role."""
        run_tiles(
            self.plan.tiles[0],
            self.scratch,
            self.plan.for_each_tile,
            self.load,
            self.consume,
            spare_warps=[
                self.push if self.plan.pushes else self.pull,
                self.announce,
            ],
            finish=lambda carry: self.hand_on(carry[1]),
            consumer_carry=jnp.int32(0),
        )

    @property
    def peers(self) -> list[tuple[int, Scalar]]:
        """Distance and address of each peer."""
        return peers(self.plan.layout.axis_name, self.plan.devices)

    def slab(self, batch: Scalar, distance: Scalar) -> Scalar:
        """Index the rows of the device at a distance in [B*D,m,...]."""
        return self.plan.layout.slab(batch, self.plan.layout.device(distance))

    # --- Spare warps ------------------------------------------------------------------

    def _for_each_turn(self, move: Callable[[Scalar, Scalar], None]) -> None:
        """Calls `move` with the tiles that this block moves, in their order."""
        plan, size = self.plan, math.prod(self.plan.config.cluster_tiles)
        mine, piece_of = plan.layout.pieces_of_block(math.prod(plan.counts))

        def turn(i: jax.Array, _: None) -> None:
            cluster, rank = divide(piece_of(i), size)
            move(*tile_at(plan.layout.order, plan.counts, cluster, rank))

        lax.fori_loop(0, mine, turn, None)

    def pull(self) -> None:
        """Reads what peers have for this device, as they announce it."""
        plan = self.plan

        def pull_tile(m: Scalar, n: Scalar) -> None:
            own = plan.place(m)[0] == plan.devices
            # A tile for another device stands for that which this one gets from the
            # device that is as far away on the other side; an own one for those of all.
            turns = jnp.where(own, (plan.devices - 1) * plan.share, 1)
            lax.fori_loop(0, turns, lambda turn, _: self._pull(m, n, turn), None)

        self._for_each_turn(pull_tile)
        plan.layout.leave(self.left)

    def _pull(self, m: Scalar, n: Scalar, turn: Scalar) -> None:
        plan, layout = self.plan, self.plan.layout
        distance, b, row_block = plan.place(m)
        own = distance == plan.devices
        # What I hold at distance r from another device, it holds for me.
        r = jnp.where(own, turn + 1, distance)
        device = layout.device(plan.devices - r)
        start = plan.number(m, n) * plan.chunks.count(plan.config.tile_m)

        def source(chunk: Scalar) -> Ref:
            there: Any = {layout.axis_name: device}
            partial = plgpu.remote_ref(self.partial, there)
            return partial.at[plan.chunks.window(start + chunk)]

        def target(chunk: Scalar, store: Callable[[Ref], None]) -> None:
            @pl.when(distance < plan.devices)
            def _partial() -> None:
                store(self.received.at[plan.chunks.window(start + chunk)])

            if plan.share:

                @pl.when(own)
                def _sum() -> None:
                    height, width = plan.chunks.shape
                    row = row_block * plan.config.tile_m + chunk * height
                    place = pl.ds(row, height), pl.ds(n * width, width)
                    store(self.out.at[(layout.slab(b, device), *place)])

        index = plan.number(m, n) + jnp.where(own, turn * plan.own_tiles, 0)
        wait_for_signal(self.ready.at[index], 1)
        # Rows of a partial tile past the end are zeros; sums there have no place.
        height, tile = plan.chunks.shape[0], plan.config.tile_m
        rows = jnp.where(own, layout.rows - row_block * tile, tile)
        count = lax.div(jnp.minimum(rows, tile), jnp.int32(height))
        relay(plan.chunks, self.scratch, plan.config.buffers, count, source, target)

        @pl.when(distance < plan.devices)
        def _arrived() -> None:
            arrival = self.arrived.at[plan.own_tile(m, n)]
            plgpu.semaphore_signal(arrival, memory_scope="gpu")

    def push(self) -> None:
        """Writes partial sums of this device to their owners, once they are stored.

        No peer reads here, and an own tile waits for all that is written here, so
        nothing is left to wait for at the end.
        """
        plan, layout, config = self.plan, self.plan.layout, self.plan.config
        count = plan.chunks.count(config.tile_m)

        def push_tile(m: Scalar, n: Scalar) -> None:
            distance, index = plan.place(m)[0], plan.number(m, n)

            @pl.when(distance < plan.devices)
            def _partial() -> None:
                owner: Any = {layout.axis_name: layout.device(distance)}
                received = plgpu.remote_ref(self.received, owner)

                def window(chunk: Scalar) -> tuple[Any, Any]:
                    return plan.chunks.window(index * count + chunk)

                wait_for_signal(self.ready.at[index], 1, "gpu")
                relay(
                    plan.chunks,
                    self.scratch,
                    config.buffers,
                    jnp.int32(count),
                    source=lambda chunk: self.partial.at[window(chunk)],
                    target=lambda chunk, store: store(received.at[window(chunk)]),
                )
                arrival = self.arrived.at[plan.own_tile(m, n)]
                pl.semaphore_signal(arrival, device_id=owner)

        self._for_each_turn(push_tile)

    def announce(self) -> None:
        """Tells who moves a tile of this device that it is there.

        A signal to a peer takes a microsecond that the consumers do not have.
        """
        plan = self.plan

        def announce_tile(m: Scalar, n: Scalar, i: Scalar) -> Scalar:
            (distance, _, _), index = plan.place(m), plan.number(m, n)
            half = lax.rem(i, jnp.int32(2))

            @pl.when(i >= 2)
            def _free() -> None:
                plgpu.barrier_arrive(self.scratch["free"].at[half])

            plgpu.barrier_wait(self.scratch["stored"].at[half])

            @pl.when(distance < plan.devices)
            def _partial() -> None:
                layout, ready = plan.layout, self.ready.at[index]
                if plan.pushes:
                    plgpu.semaphore_signal(ready, memory_scope="gpu")
                    return
                owner: Any = {layout.axis_name: layout.device(distance)}
                pl.semaphore_signal(ready, device_id=owner)

            if plan.share:

                @pl.when(distance == plan.devices)
                def _sum() -> None:
                    for r, peer in self.peers:
                        there = self.ready.at[index + (r - 1) * plan.own_tiles]
                        pl.semaphore_signal(there, device_id=peer)

            return i + 1

        plan.for_each_tile(announce_tile, jnp.int32(0))

    # --- Producer ---------------------------------------------------------------------

    def load(self, m: Scalar, n: Scalar, slot: Scalar) -> Scalar:
        """Streams the operands of a tile, and of an own one the sums of the peers."""
        plan = self.plan
        distance, b, row_block = plan.place(m)
        slab = self.slab(b, distance)
        for x, w, cut in zip(self.xs, self.ws, plan.tiles, strict=True):
            slot = load_tile(cut, x.at[slab], w, self.scratch, row_block, n, slot)

        def load_sums(slot: Scalar) -> Scalar:
            arrival = self.arrived.at[plan.own_tile(m, n)]
            scope = "sys" if plan.pushes else "gpu"
            wait_for_signal(arrival, plan.devices - 1, scope)
            tile = plan.own_tile(m, n)
            for r, step in itertools.product(range(1, plan.devices), range(plan.steps)):
                self._load_sums(tile + (r - 1) * plan.own_tiles, step, slot)
                slot = next_slot(slot, plan.config.stages)
            return slot

        own = distance == plan.devices
        return lax.cond(own, load_sums, lambda slot: slot, slot)

    def _load_sums(self, tile: Scalar, step: int, slot: Scalar) -> None:
        """One stage of a tile of one peer, and the columns that pick its rows."""
        config = self.plan.config
        depth, full = self.plan.depth, self.scratch["full"].at[slot]
        rows = pl.ds(tile * config.tile_m + step * depth, depth)
        picked = self.identity.at[:, pl.ds(step * depth, depth)]
        sums = self.received.at[rows, pl.ds(0, config.tile_n)]
        plgpu.barrier_wait(self.scratch["empty"].at[slot])
        plgpu.copy_gmem_to_smem(picked, self.picked_smem.at[slot], full)
        plgpu.copy_gmem_to_smem(sums, self.sums_smem.at[slot], full)

    # --- Consumers --------------------------------------------------------------------

    def consume(self, m: Scalar, n: Scalar, carry: Any, consumer: Scalar) -> Any:
        """Sums a tile and stores it: an own one as a result, others as partial sums."""
        plan, (slot, done) = self.plan, carry
        distance, b, row_block = plan.place(m)
        own = distance == plan.devices
        multiply: Any = multiply_tile
        if plan.scales is not None:
            block = self.slab(b, distance) * plan.layout.blocks + row_block
            rows, columns = self.factors
            scale = plan.scales.load(rows, columns, self.scratch, block, n, consumer)
            multiply = functools.partial(promote_tile, scale=scale, in_place=True)
        sums, slot = multiply(
            plan.tiles[0],
            self.scratch,
            consumer,
            slot,
            k_tiles=sum(cut.k_tiles for cut in plan.tiles),
            # By then the copies of the last tile have arrived.
            meanwhile=functools.partial(self.hand_on, done),
            then=(jnp.where(own, (plan.devices - 1) * plan.steps, 0), self.add),
        )

        def store(rows: Ref, m: Scalar, n: Scalar) -> None:
            cut = plan.tiles[0]
            view = functools.partial(cut.out_view, rows, m, n, consumer)
            store_tile(cut, sums, self.scratch, consumer, view)

        @pl.when(own)
        def _own() -> None:
            store(self.out.at[self.slab(b, 0) if plan.share else b], row_block, n)

        @pl.when((distance < plan.devices) | plan.share)
        def _for_peers() -> None:
            store(self.partial, plan.number(m, n), 0)

        return slot, done + 1

    def add(
        self, scratch: Mapping[str, Ref], slot: Scalar, consumer: Scalar
    ) -> tuple[Ref, Ref]:
        """Rows of the identity, and the sums of a peer that they pick."""
        height = self.plan.config.block[0]
        rows = self.picked_smem.at[slot, pl.ds(consumer * height, height)]
        return rows, self.sums_smem.at[slot]

    def hand_on(self, done: Scalar) -> None:
        """Lets the last of the tiles done so far be announced."""

        @pl.when(done > 0)
        def _any() -> None:
            plgpu.wait_smem_to_gmem(0, wait_read_only=False)
            half = lax.rem(done - 1, jnp.int32(2))

            @pl.when(done > 2)
            def _until_free() -> None:
                plgpu.barrier_wait(self.scratch["free"].at[half])

            plgpu.barrier_arrive(self.scratch["stored"].at[half])


def _check(config: CollectiveConfig, dtype: jnp.dtype, out_dtype: DTypeLike) -> None:
    out_dtype = jnp.dtype(out_dtype)
    if dtype.itemsize == 1 and out_dtype.itemsize != 2:
        raise Unsupported(
            f"collective_matmul: out_dtype {out_dtype.name}, the kernel reduces in"
            " bfloat16 or float16 what 8-bit operands give; use implementation='xla'"
        )
    if dtype.itemsize > 1 and out_dtype != dtype:
        raise Unsupported(
            f"collective_matmul: out_dtype {out_dtype.name}, the kernel"
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


def _reduce(
    xs: Sequence[Any],
    ws: Sequence[Any],
    call: Call,
    config: CollectiveConfig,
    device: DeviceSpec,
    *,
    share: bool,
) -> jax.Array:
    batch, total_rows, _ = xs[0].shape
    devices, dtype = call.size, xs[0].dtype
    rows = total_rows // devices
    _check(config, dtype, call.out_dtype)
    slabs = [
        pad(values_of(x).reshape(batch * devices, rows, x.shape[-1]))  # [B*D,m,K]
        for x in xs
    ]
    columns = ws[0].shape[0 if call.rhs_transposed else 1]
    scaled = xs[0], ws
    ws = [pad(values_of(w)) for w in ws]
    tiles = cut_tiles(slabs, ws, call, config)
    layout = RowLayout.of(call, config, device, batch=batch, rows=slabs[0].shape[1])
    if config.cluster == "m" and layout.blocks_of_device % 2:
        raise Unsupported(
            f"collective_matmul: cluster='m' and {layout.blocks_of_device} row blocks"
            " of a device; a pair would belong to two devices; use cluster='n' or"
            " 'none'"
        )
    if share and config.tile_n > 256:
        raise Unsupported(
            f"collective_matmul: tile_n={config.tile_n}, the kernel hands on sums in"
            " boxes of at most 256 columns; use tile_n=256"
        )
    # Chunks of a tile, and of its rows within the result, are a whole number.
    common = math.gcd(config.tile_m, layout.rows)
    dtype = tiles[0].problem.out_dtype
    chunks = Chunks.of(common, config.tile_n, dtype, config.buffer_bytes)
    scales, factors = scales_of(*scaled, tiles, layout.blocks)
    plan = Plan(layout=layout, tiles=tiles, chunks=chunks, scales=scales, share=share)
    rows_of_tiles = plan.own_tiles * config.tile_m
    slabs_of_result = batch * (devices if share else 1)
    out, *_ = plgpu.kernel(
        lambda *refs, **scratch: Roles.of(plan, refs, scratch).run(),
        out_type=[
            jax.ShapeDtypeStruct(shape, dtype)
            for shape in (
                (slabs_of_result, layout.rows, tiles[0].problem.n),
                ((devices - 1 + share) * rows_of_tiles, config.tile_n),  # partial
                ((devices - 1) * rows_of_tiles, config.tile_n),  # received
            )
        ],
        kernel_name="matmul_all_reduce" if share else "matmul_reduce_scatter",
        **grid(layout, tiles[0], chunks, device, plan.scratch_types(), scales),
    )(*slabs, *ws, *factors, jnp.asarray(np.eye(config.tile_m), dtype))
    sums = out[:, :rows, :columns]
    return sums.reshape(batch, -1, columns)  # [B,M/D,N], or [B,M,N] if shared
