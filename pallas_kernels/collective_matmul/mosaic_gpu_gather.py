"""Hopper all-gather matmul: rows of peers come in while others are multiplied.

One spare warp of each block reads rows of the peers over NVLink, a piece of a row block
at a time, writes them to the gathered array and counts them in ``arrived``. Output
tiles come in the order of arrival: own rows first, then row block 0 of every peer, row
block 1 of every peer, ...; the producer waits for the row block of a tile before it
streams it. Where the gathered rows are wanted, as the backward pass does, own ones are
copied to them last.

With ``gather_order="k"`` row blocks come in *steps*: the first columns of all rows of
the peers, then the next ones, and the producer waits for a step of its row block before
it streams that part of K. With few tiles to a block there is no other work to hide a
whole row block behind, and so all tiles advance with the links.

Axis letters: B leading axes, m rows of one device, K contraction, N columns; D devices.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.collective_matmul.communicator import (
    Chunks,
    divide,
    relay,
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
from pallas_kernels.collective_matmul.workspace import (
    ARRIVED,
    MOVER,
    PRODUCER,
    Counters,
    Form,
    GatherWorkspace,
    Semaphores,
)
from pallas_kernels.matmul.mosaic_gpu import (
    Columns,
    multiply_tile,
    run_tiles,
    snake_tiles,
    store_tile,
)
from pallas_kernels.mosaic import DeviceSpec
from pallas_kernels.mosaic.aliases import Ref, Scalar
from pallas_kernels.scaled_matmul.mosaic_gpu import Scales, promote_tile


def all_gather_matmul(
    x: Any,
    ws: Sequence[Any],
    call: Call,
    config: CollectiveConfig,
    device: DeviceSpec,
    workspace: GatherWorkspace | None = None,
) -> Any:
    """Computes ``all_gather(x) @ w`` for one or several weights.

    Args:
        x: [B,m,K] rows of this device; bfloat16 or float16, or a `ScaledArray` of 8
            bits with the scales of all rows.
        ws: weights [K,N] each, or [N,K] if they are stored so.
        call: the mesh axis, the matmuls' type (that of x, or float32), how
            weights are stored, whether the gathered rows are wanted.
        config: how to cut it.
        device: the Hopper GPU that the kernel is built for.
        workspace: of the previous call; without one XLA puts a barrier before the
            kernel.

    Returns:
        The products, [B,D*m,N] each, and the gathered x, [B,D*m,K], or None; with a
        workspace that of the next call as well.

    Raises:
        Unsupported: types, alignment or shared memory do not fit.
    """
    batch, rows, depth = x.shape
    columns = [w.shape[0 if call.rhs_transposed else 1] for w in ws]
    scaled = x, ws
    x, ws = pad(values_of(x)), [pad(values_of(w)) for w in ws]
    tiles = cut_tiles([x] * len(ws), ws, call, config)
    layout = RowLayout.of(call, config, device, batch=batch, rows=x.shape[1])
    scales, factors = scales_of(*scaled, tiles, layout.blocks)
    # Row blocks hold a whole number of chunks, the last and lower one of a device too.
    common = math.gcd(config.tile_m, layout.rows)
    chunks = Chunks.of(common, x.shape[2], x.dtype, config.buffer_bytes)
    plan = Plan(
        layout=layout,
        columns=Columns(tiles=tiles),
        chunks=chunks,
        scales=scales,
        keep=call.return_gathered,
        form="barrier" if workspace is None else workspace.form,
    )
    if workspace is not None:
        check_workspace(workspace, plan)
    outputs = [(cut.problem.n, cut.problem.out_dtype) for cut in tiles]
    if plan.form != "push":
        outputs.append((x.shape[2], x.dtype))
    handed_on = jax.tree.map(jax.new_ref, workspace)
    results = plgpu.kernel(
        lambda *refs, **scratch: Roles.of(plan, refs, scratch).run(),
        out_type=[
            jax.ShapeDtypeStruct((batch * call.size, layout.rows, width), dtype)
            for width, dtype in outputs
        ],
        kernel_name="all_gather_matmul",
        compiler_params=None
        if workspace is None
        else plgpu.CompilerParams(skip_device_barrier=True),
        **grid(layout, tiles[0], chunks, device, scales=scales),
    )(x, *ws, *factors, *jax.tree.leaves(handed_on))
    outs = tuple(
        y[:, :rows, :width].reshape(batch, -1, width)  # [B,D*m,N or K]
        for y, width in zip(results, (*columns, depth), strict=False)
    )
    gathered = outs[-1] if call.return_gathered else None
    found = outs[: len(columns)], gathered
    if workspace is None:
        return found
    return *found, jax.tree.map(jax.freeze, handed_on)


def check_workspace(workspace: GatherWorkspace, plan: "Plan") -> None:
    """Checks that a call fits the workspace that it is given.

    Raises:
        ValueError: it does not.
    """
    layout = plan.layout
    found = workspace.counters.shape[1]
    if found < (need := ARRIVED + plan.arrivals):
        raise ValueError(
            f"workspace has {found} counters, expected {need} for {layout.batch} x"
            f" {layout.rows} rows of a device with {layout.config};"
            " make it for as many, or give a config with tile_m of 128 or more"
        )
    # Only blocks that run turn to the next set: the same ones must in all calls.
    if (blocks := workspace.turns.shape[1]) != layout.num_blocks:
        raise ValueError(
            f"workspace is for {blocks} blocks, expected {layout.num_blocks} with"
            f" {layout.config}; make it for this GPU"
        )
    if workspace.rows is None:
        return
    (_, slabs, rows, depth), chunks = workspace.rows.shape, plan.chunks
    wanted = layout.batch * layout.devices, chunks.shape[1] * chunks.across
    fits = (slabs, depth) == wanted and rows >= layout.rows
    if workspace.rows.dtype != chunks.dtype or not fits:
        raise ValueError(
            f"workspace has rows of type {workspace.rows.dtype} and shape"
            f" {workspace.rows.shape}, expected {chunks.dtype} and"
            f" [2, {wanted[0]}, at least {layout.rows}, {wanted[1]}]; make it for x"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """A gather and its matmuls as they are cut.

    A row block is moved in *pieces* of some chunks, each announced when it is there:
    all of it at once, or a part of K of all row blocks before the next one.
    """

    layout: RowLayout
    """Rows and devices."""
    columns: Columns
    """The tiles of each weight, one weight after the other."""
    chunks: Chunks
    """Chunks in which rows are read from a peer."""
    scales: Scales | None
    """How scales are read, of operands of 8 bits."""
    keep: bool
    """The gathered rows are an output: own ones are among them."""
    form: Form
    """Who moves rows, and what says that they are there."""

    @property
    def config(self) -> CollectiveConfig:
        """Tiling of the matmuls."""
        return self.layout.config

    @property
    def devices(self) -> int:
        """D."""
        return self.layout.devices

    @property
    def counts(self) -> tuple[int, int]:
        """Output tiles along rows and columns, in whole clusters."""
        # The number of devices is even, so row blocks always pair up.
        return self.devices * self.layout.blocks_of_device, self.columns.count

    @property
    def for_each_tile(self) -> Callable[..., Any]:
        """The tiles of a block, for `run_tiles`."""
        return snake_tiles(self.layout.order, self.counts)

    def place(self, m: Scalar) -> tuple[Scalar, Scalar, Scalar, Scalar]:
        """Device, leading index and row block of a row of tiles; is it our own."""
        own_blocks = self.layout.blocks_of_device
        own, others = m < own_blocks, jnp.int32(self.devices - 1)
        block = jnp.where(own, m, lax.div(m - own_blocks, others))
        distance = jnp.where(own, 0, 1 + lax.rem(m - own_blocks, others))
        return self.layout.device(distance), *self.layout.split(block), own

    @property
    def arrivals(self) -> int:
        """What is counted: steps of the row blocks of all devices."""
        return self.devices * self.layout.blocks_of_device * self.steps

    @property
    def steps(self) -> int:
        """Parts of K that arrive one after the other: chunks of a row, or 1."""
        return self.chunks.across if self.config.gather_order == "k" else 1

    @property
    def _chunks_of_blocks(self) -> tuple[int, int]:
        """Chunks of a row block in one step, and of the last one of a device."""
        tile = self.config.tile_m
        last = self.layout.rows - (self.layout.blocks - 1) * tile
        steps = self.steps
        return self.chunks.count(tile) // steps, self.chunks.count(last) // steps

    @property
    def piece_chunks(self) -> int:
        """Chunks of a piece."""
        return math.gcd(self.config.piece_chunks, *self._chunks_of_blocks)

    @property
    def pieces(self) -> tuple[int, int]:
        """Pieces of a row block in one step, and of the last one of a device."""
        full, last = self._chunks_of_blocks
        return full // self.piece_chunks, last // self.piece_chunks

    @property
    def pieces_of_rows(self) -> int:
        """Pieces of a device's rows within one leading index, in one step."""
        full, last = self.pieces
        return (self.layout.blocks - 1) * full + last

    def stages_of_step(self, step: Scalar) -> tuple[Scalar, Scalar] | None:
        """The first stage that a step completes, and the one after the last.

        A step need not end where a stage does: those that lie in two come with the
        second one. None is all of them.
        """
        if self.steps == 1:
            return None
        columns, depth = self.chunks.shape[1], self.config.tile_k
        first, end = (lax.div(s * columns, jnp.int32(depth)) for s in (step, step + 1))
        stages = self.columns.tiles[0].k_tiles
        return first, jnp.where(step == self.steps - 1, stages, end)

    def chunk(
        self, piece: Callable[[Scalar], Scalar], index: Scalar
    ) -> tuple[Any, ...]:
        """Locate a chunk: device, row block, step, leading index, rows and columns.

        The row blocks of peers come in the order of their tiles, own ones last. Where
        this device writes own ones to the peers, each gets them in its order.

        Args:
            piece: from the number of a turn to that of the piece moved in it.
            index: int32, number of the chunk among those that this block moves.
        """
        layout, (pieces, last_pieces) = self.layout, self.pieces
        of_peers = (self.devices - 1) * layout.batch * self.pieces_of_rows * self.steps
        turn, chunk = divide(index, self.piece_chunks)
        own = piece(turn) >= of_peers
        sources = jnp.where(own, 1, self.devices - 1)
        number = piece(turn) - jnp.where(own, of_peers, 0)
        step = 0
        if self.steps > 1:
            in_step = sources * layout.batch * self.pieces_of_rows
            step, number = divide(number, in_step)
        b, number = divide(number, sources * self.pieces_of_rows)
        full = (layout.blocks - 1) * pieces * sources
        last = number >= full
        row, part = divide(
            number - jnp.where(last, full, 0), jnp.where(last, last_pieces, pieces)
        )
        block = jnp.where(last, layout.blocks - 1, lax.div(row, sources))
        which = jnp.where(last, row, lax.rem(row, sources))
        distance = jnp.where(own, 0, 1 + which)
        if self.form == "push":
            distance = self.devices - distance
        device = layout.device(distance)
        chunk = (block * pieces + part) * self.piece_chunks + chunk
        if self.steps > 1:
            chunk = chunk * self.steps + step
        block = b * layout.blocks + block
        return device, block, step, b, self.chunks.window(chunk)

    def arrival(self, device: Scalar, block: Scalar, step: Scalar) -> Scalar:
        """The number of the semaphore of a step of one of a device's row blocks."""
        arrival = device * self.layout.blocks_of_device + block
        return arrival if self.steps == 1 else arrival * self.steps + step


@dataclasses.dataclass(frozen=True, kw_only=True)
class Roles:
    """Roles of the warps of a block."""

    plan: Plan
    """Plan of the work."""
    x: Ref
    """Rows of this device, [B,m,K]."""
    ws: Sequence[Ref]
    """Weights."""
    factors: Sequence[Ref]
    """Scales of rows and columns, of operands of 8 bits: `scales_of`."""
    outs: Sequence[Ref]
    """Matmuls, [B*D,m,N] each."""
    gathered: Ref
    """Rows of all devices, [B*D,m,K]; where peers write them two sets of these."""
    scratch: Mapping[str, Ref]
    """Shared memory and barriers."""
    signals: Semaphores | Counters
    """By device, row block and step: pieces that are here."""

    @classmethod
    def of(cls, plan: Plan, refs: Sequence[Ref], scratch: dict[str, Ref]) -> "Roles":
        """Sort what the kernel gets into the roles' fields."""
        weights, scales = len(plan.columns.tiles), 0 if plan.scales is None else 2
        rest = iter(refs)

        def following(count: int) -> list[Ref]:
            return list(itertools.islice(rest, count))

        (x,), ws, factors = following(1), following(weights), following(scales)
        pushed = following(plan.form == "push")
        counters = following(0 if plan.form == "barrier" else 2)
        outs = following(weights)
        (gathered,) = pushed or following(1)
        return cls(
            plan=plan,
            x=x,
            ws=ws,
            factors=factors,
            outs=outs,
            gathered=gathered,
            scratch=scratch,
            signals=Counters(plan.layout, plan.form == "push", *counters)
            if counters
            else Semaphores.of(plan.layout, plan.arrivals),
        )

    def run(self) -> None:
        """Each warp takes its role."""
        run_tiles(
            self.plan.columns.tiles[0],
            self.scratch,
            self.plan.for_each_tile,
            self.load,
            self.consume,
            spare_warps=[self.move],
            finish=lambda _: self.signals.finish(),
        )

    def slab(self, turn: Scalar, batch: Scalar, device: Scalar) -> tuple[Any, ...]:
        """Index the gathered rows of a leading index and a device."""
        slab = self.plan.layout.slab(batch, device)
        return (turn, slab) if self.plan.form == "push" else (slab,)

    # --- Spare warp -------------------------------------------------------------------

    def move(self) -> None:
        """Copies rows of the peers here, then own ones if kept; or own ones there."""
        plan, layout, signals = self.plan, self.plan.layout, self.signals
        push = plan.form == "push"
        sources = plan.devices - 1 + plan.keep
        total = sources * layout.batch * plan.pieces_of_rows * plan.steps
        mine, piece = layout.pieces_of_block(total)
        chunk_at = functools.partial(plan.chunk, piece)
        turn = signals.turn(MOVER)

        def on(ref: Ref, device: Scalar) -> Any:
            there: Any = {layout.axis_name: device}
            return plgpu.remote_ref(ref, there)

        def sender(device: Scalar) -> Scalar:
            return lax.axis_index(layout.axis_name) if push else device

        def source(index: Scalar) -> Ref:
            device, _, _, b, window = chunk_at(index)
            return (self.x if push else on(self.x, device)).at[(b, *window)]

        def target(index: Scalar, store: Callable[[Ref], None]) -> None:
            device, _, _, b, window = chunk_at(index)
            gathered = on(self.gathered, device) if push else self.gathered
            store(gathered.at[(*self.slab(turn, b, sender(device)), *window)])

        def stored(index: Scalar) -> None:
            last = plan.piece_chunks - 1

            @pl.when(lax.rem(index, jnp.int32(plan.piece_chunks)) == last)
            def _announce() -> None:
                device, block, step, _, _ = chunk_at(index)
                plgpu.wait_smem_to_gmem(0, wait_read_only=False)
                arrival = plan.arrival(sender(device), block, step)
                signals.arrive(turn, arrival, device if push else None)

        signals.begin(turn)
        relay(
            plan.chunks,
            self.scratch,
            plan.config.buffers,
            mine * plan.piece_chunks,
            source,
            target,
            stored,
        )
        signals.leave(turn)

    # --- Producer ---------------------------------------------------------------------

    def load(self, m: Scalar, n: Scalar, slot: Scalar) -> Scalar:
        """Streams the operands of a tile, as its rows or parts of them are here."""
        plan, layout = self.plan, self.plan.layout
        source, b, row_block, own = plan.place(m)

        def stream(rows: Ref, slot: Scalar, depth: Any = None) -> Scalar:
            load_tile = plan.columns.load_tile
            return load_tile(rows, self.ws, self.scratch, row_block, n, slot, depth)

        def local(slot: Scalar) -> Scalar:
            return stream(self.x.at[b], slot)

        def remote(slot: Scalar) -> Scalar:
            def advance(step: Scalar, slot: Scalar) -> Scalar:
                block = b * layout.blocks + row_block
                arrival = plan.arrival(source, block, step)
                pieces, last_pieces = plan.pieces
                last = row_block == layout.blocks - 1
                self.signals.wait(turn, arrival, jnp.where(last, last_pieces, pieces))
                rows = self.gathered.at[self.slab(turn, b, source)]
                return stream(rows, slot, plan.stages_of_step(step))

            turn = self.signals.turn(PRODUCER)
            if plan.steps == 1:
                return advance(0, slot)
            return lax.fori_loop(0, plan.steps, advance, slot)

        return lax.cond(own, local, remote, slot)

    # --- Consumers --------------------------------------------------------------------

    def consume(self, m: Scalar, n: Scalar, slot: Scalar, consumer: Scalar) -> Scalar:
        """Multiplies a tile and stores it."""
        plan, columns = self.plan, self.plan.columns
        source, b, row_block, _ = plan.place(m)
        cut = columns.tiles[0]
        if plan.scales is None:
            sums, slot = multiply_tile(cut, self.scratch, consumer, slot)
        else:
            block = plan.layout.slab(b, source) * plan.layout.blocks + row_block
            by_row, by_column = self.factors
            scale = plan.scales.load(
                by_row, by_column, self.scratch, block, n, consumer
            )
            sums, slot = promote_tile(cut, self.scratch, consumer, slot, scale=scale)

        def store(i: int, start: int) -> None:
            cut, rows = columns.tiles[i], self.outs[i].at[plan.layout.slab(b, source)]
            view = functools.partial(cut.out_view, rows, row_block, n - start, consumer)
            store_tile(cut, sums, self.scratch, consumer, view)

        columns.for_weight(n, store)
        return slot
