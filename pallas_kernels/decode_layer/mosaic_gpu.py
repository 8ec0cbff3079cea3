"""Hopper kernel of a decoder layer from one attention to the next, in one launch.

Decoding a few tokens is bound by how fast weights are read, and by what interrupts it:
each launch of a kernel ends with memory idle and begins so. Here one persistent kernel
reads the weights of four matmuls in a row. A warpgroup streams them into a ring in
shared memory and never waits for a result: weights do not depend on activations, so the
ring is full of the next stage's weights when its activations are there.

A stage (`config.Stage`, a line of the table `config.Schedule.stages`) is a matmul and
what follows it::

    stage     matmul           epilogue                        reads
    out       attended W       + residual, squares' input      attended
    gate_up   normed_0 W       factor, SwiGLU                  normed_0
    down      hidden W         + residual                      hidden
    qkv       normed_1 W       factor, bias, rotary embedding  normed_1

With attention over pages in the launch it comes first, see `attend`, and the last stage
puts keys and values into the pages of the next layer.

Weights ``[K,N]`` are the left operand, ``W^T x^T``: 64 output features fill the rows of
an instruction, and its columns are the requests, 8 to 64 of them, so that few requests
waste nothing. Sums are ``[features, requests]``.

Weights of 8 bits are widened in registers. What a stage makes for the next then has its
features in the order in which threads read weights four at a time; the attention's
output has not, and is multiplied by weights read two at a time.

Tile-sparse weights are shared otherwise, see `shares`, and what they multiply is
gathered, see `gathered`; the epilogues are the same.

Blocks share the tiles of a stage evenly (`config.Stage` says how). Who has a column of
tiles alone finishes it from registers. Sums of other columns go through global memory
in fp32; whoever finishes them adds them in a fixed order, so that the bits of a row
depend on neither time nor the other rows.

Where devices have a part of the layer each, those of `out` and `down` are sums over
devices, too: `peers` adds them, before what follows the matmul.

An RMS norm is ``x * scale * factor`` with one factor a row: the epilogue before it
stores ``x * scale``, the factor is computed while the next matmul runs, and multiplies
its sums.

Roles of warpgroups: two multiply, one copies weights, one copies activations and
computes factors. Blocks wait for each other, on counters in global memory: for the
parts of a unit, for all that a stage makes, for the factors of a norm. Every block must
run from the start, so there are at most as many as multiprocessors, and no role waits
for a later stage of another.

Axis letters: M requests, D model, F hidden, N query heads, K key/value heads, H head
dim.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.collective_matmul.all_reduce import AllReduceWorkspace
from pallas_kernels.decode_layer import attend, gathered
from pallas_kernels.decode_layer.config import (
    COLUMNS,
    GROUP,
    TILE_GROUPS,
    UNIT,
    WARPGROUPS,
    Cached,
    DecodeLayerConfig,
    Piece,
    Problem,
    Schedule,
    Stage,
    part_names,
    quotient,
    remainder,
)
from pallas_kernels.decode_layer.peers import Peers
from pallas_kernels.decode_layer.turned import store_turned
from pallas_kernels.mosaic import DeviceSpec, check_smem, smem_transforms
from pallas_kernels.mosaic.aliases import Ref, Scalar
from pallas_kernels.mosaic.copies import prefetch_row, read_once
from pallas_kernels.mosaic.counters import (
    await_counter,
    raise_counter,
    zeros_like_no_others,
)
from pallas_kernels.mosaic.pipeline import (
    drain,
    hand_over,
    next_slot,
    previous_slot,
    proxy_fence,
)
from pallas_kernels.quantized_matmul.widen import (
    load_pairs,
    load_words,
    widen_pairs,
    widen_words,
)


_WGMMA = plgpu.Layout.WGMMA
_OF_ROWS = _WGMMA.reduce(0)
"""Layout of a number for each request: a column of the sums."""
_OF_FEATURES = _WGMMA.reduce(1)

_LOADS = 8
"""Parts of sums that a warpgroup reads at a time."""

_REGISTERS = 72, 184
"""Of a copying and of a multiplying thread where weights are widened or attention is
computed."""

_FETCHED = 18 * 2**20
"""Bytes that are brought into the L2 while attention is computed."""

_LAST_TILES = 4
"""Tiles before whose sums a warpgroup loads what these are multiplied by."""

type _Epilogue = Callable[[list[jax.Array]], None]


@dataclasses.dataclass(frozen=True)
class _Place:
    """Some groups of 64 features, and some rows of them."""

    groups: tuple[Scalar, ...]
    row: Scalar
    """The first one."""
    rows: int

    @property
    def span(self) -> Any:
        """Its rows."""
        return pl.ds(self.row, self.rows)

    @property
    def shape(self) -> tuple[int, int]:
        """That of the sums of a group."""
        return GROUP, self.rows


class _Block:
    """What a block does: the three roles, and the epilogues."""

    def __init__(
        self,
        schedule: Schedule,
        eps: float,
        refs: Mapping[str, Ref],
        scratch: Any,
        axis_name: str | None = None,
    ) -> None:
        self.schedule, self.eps, self.axis_name = schedule, eps, axis_name
        self.refs, self.scratch = refs, scratch
        self.problem, self.stages = schedule.problem, schedule.stages
        self.worker = lax.axis_index("worker")
        # Of tile-sparse weights: memory answers before a role asks.
        self.stretches = {
            stage.weight: gathered.Stretch(refs, stage, self.worker)
            for stage in self.stages
            if stage.kept
        }
        # One for each shared unit of each stage, each stage, and each norm.
        units, stages = schedule.first_units, len(self.stages)
        self.of_units = units[:-1]
        self.ready = [self.counter(units[-1] + i) for i in range(stages)]
        self.normed = [self.counter(units[-1] + stages + norm) for norm in range(2)]
        self.attend = None
        if (cached := self.problem.cached) is not None:
            first = schedule.of_splits
            self.attend = attend.Attend(
                cached,
                self.problem.m,
                schedule.workers,
                self.worker,
                refs,
                scratch,
                refs["counters"].at[pl.ds(first + 1, schedule.counters - first - 1)],
                self.counter(first),
            )

    def counter(self, number: Scalar) -> Ref:
        """One of the counters by which blocks wait for each other."""
        return self.refs["counters"].at[pl.ds(number, 1)]

    # --- Pieces -----------------------------------------------------------------------

    def for_each_piece(
        self, stage: Stage, body: Callable[[Piece, Any], Any], carry: Any
    ) -> Any:
        """Loops over this block's pieces of a stage.

        ``body(piece, carry)`` returns the carry.
        """
        if stage.kept:
            return self.stretches[stage.weight].for_each_piece(body, carry)

        def one(index: Scalar, carry: Any) -> Any:
            return body(stage.piece(self.worker, index), carry)

        return lax.fori_loop(0, stage.pieces(self.worker), one, carry)

    def stream(
        self,
        stage: Stage,
        name: str,
        copy: Callable[[Piece, Scalar, Scalar], None],
        carry: tuple[Scalar, Scalar],
        requested: int | None = None,
    ) -> tuple[Scalar, Scalar]:
        """Fills a ring with the tiles of a stage.

        Args:
            stage: the stage.
            name: which ring.
            copy: ``copy(piece, k, slot)`` starts the copies of a tile.
            carry: the slot to begin with, and how many tiles there were before.
            requested: how many tiles may be on their way; None is the whole ring.

        Returns:
            The slot after the last tile, and how many there were.
        """
        ring = _ring(self.scratch, name)

        def load(piece: Piece, carry: Any) -> Any:
            def tile(index: Scalar, carry: Any) -> Any:
                copy_tile = functools.partial(copy, piece, piece.k(index))
                return _fill(ring, requested, copy_tile, carry)

            return lax.fori_loop(0, piece.count, tile, carry)

        return self.for_each_piece(stage, load, carry)

    # --- Roles ------------------------------------------------------------------------

    def copy_weights(self) -> None:
        """The tiles of all stages, one after the other, as the ring has room."""
        tile_k, ring = self.schedule.tile_k, _ring(self.scratch, "weights")
        carry, requested = (jnp.int32(0), jnp.int32(0)), self.schedule.config.requested
        if self.attend is not None:
            fill = functools.partial(_fill, ring, requested)
            carry = self.attend.copy_keys(WARPGROUPS, fill, ring["full"], carry)
        for stage in self.stages:
            weight = self.refs[stage.weight]
            for name in part_names(stage.weight, stage.kept):
                read_once(self.refs[name])  # pyright: ignore[reportCallIssue]

            def copy(
                piece: Any,
                k: Scalar,
                slot: Scalar,
                weight: Ref = weight,
                stage: Stage = stage,
            ) -> None:
                if stage.kept:
                    target = ring["smem"].at[slot], ring["full"].at[slot]
                    self.stretches[stage.weight].copy(piece, k, *target)
                    return
                rows = pl.ds(k * tile_k, tile_k)
                for number in range(WARPGROUPS):
                    unit = piece.column * WARPGROUPS + number
                    for j, group in enumerate(stage.groups(unit)):
                        tile: Any = rows, pl.ds(group * GROUP, GROUP)
                        if self.problem.narrow:
                            tile = tile[::-1]
                        plgpu.copy_gmem_to_smem(
                            weight.at[tile],
                            ring["smem"].at[slot, number * UNIT + j],
                            ring["full"].at[slot],
                        )

            carry = self.stream(stage, "weights", copy, carry, requested)
        slots = self.schedule.weight_slots
        if requested is not None and requested < slots:
            # Waiters must see each phase of a barrier.
            slot, number = carry
            for before in range(requested, 0, -1):
                last = previous_slot(slot, before, slots)

                @pl.when(number >= before)
                def _(last: Scalar = last) -> None:
                    plgpu.barrier_wait(ring["full"].at[last])

        if (ahead := self.refs.get("next_out")) is not None:
            # Memory is idle from here on, until the attention of the next layer ends.
            self.fetch_ahead(ahead)
        drain(ring, carry[0], self.schedule.weight_slots)

    def fetch_ahead(self, array: Ref) -> None:
        """Brings an array into the L2: each block some of its rows."""
        rows, _ = array.shape
        workers = self.schedule.workers

        def row(index: Scalar, _: None) -> None:
            source = array.at[index * workers + self.worker]
            prefetch_row(source)  # pyright: ignore[reportCallIssue]

        lax.fori_loop(0, _dealt(rows, self.worker, workers), row, None)

    def fetch_begin(self, stage: Stage) -> None:
        """Brings the tiles of a weight that are read first into the L2.

        While attention waits for memory, the ring of weights is full.
        """
        weight, tile_k = self.refs[stage.weight], self.schedule.tile_k
        tile = stage.n * tile_k * weight.dtype.itemsize
        tiles = min(stage.depth, _FETCHED // tile)
        lines = stage.n if self.problem.narrow else tiles * tile_k
        workers = self.schedule.workers
        if not tiles:
            return

        def line(index: Scalar, _: None) -> None:
            source = weight.at[index * workers + self.worker]
            if self.problem.narrow:
                source = source.at[pl.ds(0, tiles * tile_k)]
            prefetch_row(source)  # pyright: ignore[reportCallIssue]

        lax.fori_loop(0, _dealt(lines, self.worker, workers), line, None)

    def copy_activations(self) -> None:
        """The inputs of stages, when those before are done; factors of norms."""
        tile_k, ring = self.schedule.tile_k, _ring(self.scratch, "activations")
        # Rows past the last one are zeros. An offset that is known would be an error
        # where there are fewer rows than the copy has.
        rows = pl.ds(self.worker * 0, self.problem.rows)
        carry = jnp.int32(0), jnp.int32(0)
        if self.attend is not None:
            carry = self.attend.copy_queries(WARPGROUPS + 1, ring, carry)
            self.fetch_begin(self.stages[1])
            await_counter(self.attend.ready, self.attend.finished)
            proxy_fence()  # pyright: ignore[reportCallIssue]
        for i, stage in enumerate(self.stages):
            source = self.refs[stage.source]

            def copy(_: Piece, k: Scalar, slot: Scalar, source: Ref = source) -> None:
                features: Any = (pl.ds(k * tile_k, tile_k),)
                if len(source.shape) == 3:  # of heads
                    each = source.shape[-1] // tile_k
                    features = (
                        quotient(k, each),
                        pl.ds(remainder(k, each) * tile_k, tile_k),
                    )
                plgpu.copy_gmem_to_smem(
                    source.at[rows, *features],
                    ring["smem"].at[slot],
                    ring["full"].at[slot],
                )

            gather = gathered.Gather(self, stage) if stage.kept else None
            if i:
                self.wait(self.ready[i - 1], self.stages[i - 1].finished)
                proxy_fence()  # pyright: ignore[reportCallIssue]
            if stage.norm is not None:
                # Not later: who finishes a column needs them to go on, and copies wait
                # for it.
                self.factors(stage.norm)
            if gather is not None:
                carry = gather.stream(source, ring, carry[0]), carry[1]
                if i + 1 < len(self.stages):
                    # Memory is slow to answer beside the stream of weights.
                    self.fetch_ahead(self.refs[f"{self.stages[i + 1].weight}_rows"])
            else:
                carry = self.stream(stage, "activations", copy, carry)
        drain(ring, carry[0], self.schedule.activation_slots)

    def compute(self, number: Scalar) -> None:
        """Multiplies and finishes.

        Args:
            number: which warpgroup of those that do.
        """
        for name in ("weights", "activations"):
            ring = _ring(self.scratch, name)
            hand_over(ring, ring["smem"].shape[0])
        slots, first_row = (jnp.int32(0), jnp.int32(0)), self.worker * 0
        if self.attend is not None:
            weights, activations = (
                _ring(self.scratch, name) for name in ("weights", "activations")
            )
            slots = self.attend.compute(number, weights, activations, slots)
        for i, stage in enumerate(self.stages):

            def piece(
                piece: Piece, slots: Any, i: int = i, stage: Stage = stage
            ) -> Any:
                unit = piece.column * WARPGROUPS + number
                place = _Place(stage.groups(unit), first_row, stage.rows)
                # Before the sums, for those who finish them from registers.
                load = None
                if stage.norm is not None and (stage.direct or stage.whole):
                    load = functools.partial(self.load_factors, stage.norm, place)
                sums, factors, slots = self.multiply(stage, piece, number, slots, load)
                if stage.kept:
                    part = functools.partial(self.part_of_pair, piece, number)
                    self.store_sums(part, sums)
                    return slots
                store = functools.partial(self.store_part, i, stage, unit, piece, sums)
                finish = functools.partial(
                    self.finish_unit, i, stage, unit, place, sums, factors
                )
                if stage.items and not stage.whole:
                    store()
                elif not stage.parts:
                    finish()
                else:
                    alone = stage.is_alone(piece)
                    pl.when(alone)(finish)
                    pl.when(jnp.logical_not(alone))(store)
                return slots

            slots = self.for_each_piece(stage, piece, slots)
            if stage.kept:
                self.signal(self.counter(self.of_units[i]))
            self.finish_items(i, stage, number)

    # --- Matmuls ----------------------------------------------------------------------

    def multiply(
        self,
        stage: Stage,
        piece: Piece,
        number: Scalar,
        slots: tuple[Scalar, Scalar],
        load: Callable[[], jax.Array] | None,
    ) -> tuple[list[jax.Array], jax.Array | None, tuple[Scalar, Scalar]]:
        """The sums of a piece for the groups of this warpgroup, [64,M] each.

        Args:
            stage: the stage.
            piece: the piece.
            number: which warpgroup.
            slots: where in the rings of weights and activations it begins.
            load: what is called before the last tiles, while they are on their way.

        Returns:
            ``(sums, what load returns, slots)``.
        """
        weights, activations = (
            _ring(self.scratch, name) for name in ("weights", "activations")
        )

        def scoped(*accs: Ref) -> Any:
            def tile(_: Scalar, slots: tuple[Scalar, Scalar]) -> Any:
                w, x = slots
                plgpu.barrier_wait(activations["full"].at[x])
                plgpu.barrier_wait(weights["full"].at[w])
                tiles = [weights["smem"].at[w, number * UNIT + j] for j in range(UNIT)]
                tokens = activations["smem"].at[(x, number) if stage.kept else x]
                self.multiply_tile(stage, accs, tiles, tokens)
                plgpu.wgmma_wait(0)
                if self.problem.narrow:
                    # The copy engine may write what registers have read.
                    plgpu.commit_smem()
                plgpu.barrier_arrive(activations["empty"].at[x])
                plgpu.barrier_arrive(weights["empty"].at[w])
                return (
                    next_slot(w, weights["smem"].shape[0]),
                    next_slot(x, activations["smem"].shape[0]),
                )

            begin, loaded = 0, None
            if load is not None:
                begin = jnp.maximum(piece.count - _LAST_TILES, 0)
                slots_then = lax.fori_loop(0, begin, tile, slots)
                loaded = load()
            else:
                slots_then = slots
            after = lax.fori_loop(begin, piece.count, tile, slots_then)
            return [acc[...] for acc in accs], loaded, after

        accumulator = plgpu.WGMMAAccumulatorRef((GROUP, self.problem.rows), jnp.float32)
        return pl.run_scoped(scoped, *[accumulator] * UNIT)

    def multiply_tile(
        self,
        stage: Stage,
        accs: Sequence[Ref],
        weights: Sequence[Ref],
        activations: Ref,
    ) -> None:
        """Starts to add the products of the groups' tiles and the activations.

        Tensor cores read bfloat16 as it lies there, [tile_k,64]; 8 bits, [64,tile_k],
        are widened on their way through registers.
        """
        if not self.problem.narrow:
            for acc, weight in zip(accs, weights, strict=True):
                plgpu.wgmma(
                    acc, weight.transpose((1, 0)), activations.transpose((1, 0))
                )
            return
        load, widen = load_pairs, widen_pairs
        if self.in_pairs(stage.source):
            load, widen = load_words, widen_words
        tokens = activations.transpose((1, 0))
        # All at once: none is asked for when the first is multiplied.
        loaded = [load(weight) for weight in weights]
        for acc, values in zip(accs, loaded, strict=True):
            plgpu.wgmma(acc, widen(values), tokens)

    def part(self, stage: Stage, unit: Scalar, part: Scalar) -> Ref:
        """Where a part of the sums of a shared unit lies, [2,M/8,64,8].

        What a warp stores or loads at a time, 8 requests of 8 features, is contiguous.
        """
        return self.refs["parts"].at[unit * stage.parts + part]

    def store_part(
        self, i: int, stage: Stage, unit: Scalar, piece: Piece, sums: list[jax.Array]
    ) -> None:
        """Leaves sums to who finishes the unit."""
        unit = unit - (stage.units - stage.shared_units)
        part = functools.partial(self.part, stage, unit, piece.part)
        self.store_sums(part, sums)
        self.signal(self.counter(self.of_units[i] + unit))

    def part_of_pair(self, piece: Piece, number: Scalar) -> Ref:
        """Where a warpgroup leaves its sums of a tile of a tile-sparse weight."""
        return self.refs["parts"].at[piece.part * WARPGROUPS + number]

    def store_sums(self, part: Callable[[], Ref], sums: list[jax.Array]) -> None:
        """Stores the sums of a unit, where `part` says."""
        for j, values in enumerate(sums):
            there = part().at[j]
            for n in range(self.problem.rows // 8):
                there.at[n][...] = values[:, 8 * n : 8 * (n + 1)]

    def load_parts(self, stage: Stage, unit: Scalar, j: Any, row: Scalar) -> Any:
        """The sum of the parts of a group of a shared unit, which are there."""
        eights = range(stage.item_rows // 8)
        first_eight = quotient(row, 8)
        totals: list[Any] = [None for _ in eights]
        for first in range(0, stage.parts, _LOADS):
            parts = [
                [
                    plgpu.load(
                        self.part(stage, unit, jnp.int32(part)).at[j, first_eight + n],
                        layout=_WGMMA,
                        optimized=False,
                    )
                    for n in eights
                ]
                for part in range(first, min(first + _LOADS, stage.parts))
            ]
            for part in parts:
                totals = [
                    b if a is None else a + b for a, b in zip(totals, part, strict=True)
                ]
        return jnp.concatenate(totals, axis=1)

    # --- Finishing --------------------------------------------------------------------

    def finish_unit(
        self,
        i: int,
        stage: Stage,
        unit: Scalar,
        place: _Place,
        sums: list[jax.Array],
        factors: jax.Array | None,
    ) -> None:
        """Finishes a unit from registers."""
        epilogue = self.prepare(stage, place, factors)
        epilogue(sums)
        self.signal(self.ready[i])

    def finish_items(self, i: int, stage: Stage, number: Scalar) -> None:
        """Finishes what this warpgroup has of the units whose sums are in memory."""
        if not stage.items:
            return
        worker = number * self.schedule.workers + self.worker
        workers = WARPGROUPS * self.schedule.workers

        def item(index: Scalar, _: None) -> None:
            unit, j, row = stage.item(index * workers + worker)
            groups: Any = stage.groups(unit + stage.units - stage.shared_units)
            if not stage.pairs:
                groups = (groups[0] + j,)
            place = _Place(groups, row, stage.item_rows)
            # What it reads besides the parts comes while it waits for them.
            epilogue = self.prepare(stage, place)
            if stage.kept:  # whose features may lie in any of its tiles
                stretch = self.stretches[stage.weight]
                places = [stretch.find_sums(group) for group in groups]
                self.wait(self.counter(self.of_units[i]), workers)
                sums = [stretch.load_sums(place, row) for place in places]
            else:
                self.wait(self.counter(self.of_units[i] + unit), stage.parts)
                sums = [
                    self.load_parts(stage, unit, j + n, row) for n in range(len(groups))
                ]
            epilogue(sums)
            self.signal(self.ready[i])

        lax.fori_loop(0, _dealt(stage.items, worker, workers), item, None)

    def prepare(
        self, stage: Stage, place: _Place, factors: jax.Array | None = None
    ) -> _Epilogue:
        """Loads what is needed besides the sums; returns what is left to do.

        Args:
            stage: the stage.
            place: what is finished.
            factors: those of the norm, if they have been loaded.
        """
        epilogue = getattr(self, stage.epilogue)(stage, place)
        if self.problem.narrow:
            epilogue = self.scaled(stage, place, epilogue)
        if stage.over_devices is not None:
            epilogue = self.added(stage.over_devices, place, epilogue)
        if stage.norm is None:
            return epilogue
        if factors is None:
            factors = self.load_factors(stage.norm, place)
        columns = lax.broadcast_in_dim(factors, place.shape, (1,))
        return lambda sums: epilogue([values * columns for values in sums])

    def added(self, number: int, place: _Place, epilogue: _Epilogue) -> _Epilogue:
        """An epilogue of parts that it adds over devices."""
        peers = Peers(
            cells=self.refs["cells"],
            turn=self.refs["turns"][0],
            axis_name=self.axis_name or "",
            rows=self.problem.rows,
        )
        return lambda parts: epilogue(peers.add(number, place.groups, place.row, parts))

    def scaled(self, stage: Stage, place: _Place, epilogue: _Epilogue) -> _Epilogue:
        """An epilogue of sums that it multiplies by the scales of the weight."""
        scales = [
            self.of_features(
                f"{stage.weight}_scale", pl.ds(group * GROUP, GROUP), place.shape
            )
            for group in place.groups
        ]
        return lambda sums: epilogue(
            [values * scale for values, scale in zip(sums, scales, strict=True)]
        )

    def load_factors(self, norm: int, place: _Place) -> jax.Array:
        """Factors of the rows of a place, [rows], when they are there."""
        self.wait(self.normed[norm], self.problem.rows // 8)
        return plgpu.load(
            self.refs["factors"].at[norm, place.span],
            layout=_OF_ROWS,
            optimized=False,
        )

    # --- Epilogues --------------------------------------------------------------------

    # Each loads what does not depend on the sums, and returns what is left to do.

    def add(self, stage: Stage, place: _Place) -> _Epilogue:
        """Adds the residual; stores the sum, and scaled what the norm multiplies."""
        before, after, scale, target = (
            ("residual", "between", "mlp_norm", "normed_0")
            if stage.weight == "out"
            else ("between", "new_residual", "norm", "normed_1")
        )
        spans = [pl.ds(group * GROUP, GROUP) for group in place.groups]

        def load(span: Any) -> jax.Array:
            return plgpu.load(
                self.refs[before].at[span, place.span], layout=_WGMMA, optimized=False
            )

        # What another warpgroup has stored is surely there when the sums are.
        early = before == "residual" or self.stages[0].items == stage.items
        residuals = [load(span) for span in spans if early]
        scales = [
            self.of_features(scale, span, place.shape)
            for span in spans
            if target in self.refs
        ]

        def finish(sums: list[jax.Array]) -> None:
            for j, (group, values) in enumerate(zip(place.groups, sums, strict=True)):
                total = (residuals[j] if early else load(spans[j])) + values
                self.refs[after].at[spans[j], place.span][...] = total
                if scales:
                    self.store(place, target, group, total * scales[j])

        return finish

    def swiglu(self, stage: Stage, place: _Place) -> _Epilogue:
        """The hidden features from gate and up projection."""
        del stage

        def finish(sums: list[jax.Array]) -> None:
            gate, up = sums
            hidden = gate / (1 + jnp.exp(-gate)) * up
            self.store(place, "hidden", place.groups[0], hidden)

        return finish

    def rotate(self, stage: Stage, place: _Place) -> _Epilogue:
        """Adds the bias, and rotates queries and keys, in pairs of a head's halves."""
        p, groups, shape = self.problem, place.groups, place.shape
        biases = [
            self.of_features("bias", pl.ds(group * GROUP, GROUP), shape)
            for group in groups
            if p.bias
        ]
        per_head = p.head_dim // GROUP
        in_half = remainder(groups[0], stage.half)
        cos, sin = (
            plgpu.load(
                self.refs[name].at[pl.ds(in_half * GROUP, GROUP), place.span],
                layout=_WGMMA,
                optimized=False,
            )
            for name in ("cos", "sin")
        )
        turned = groups[0] < (p.heads + p.kv_heads) * per_head
        turned = lax.broadcast_in_dim(turned, shape, ())
        cos = jnp.where(turned, cos, 1.0)
        sin = jnp.where(turned, sin, 0.0)
        queries = p.heads * per_head
        append = None
        if p.cached is not None:
            append = self.append(p.cached, place, queries)

        def finish(sums: list[jax.Array]) -> None:
            if p.bias:
                sums = [a + b for a, b in zip(sums, biases, strict=True)]
            first, second = sums
            pair = first * cos - second * sin, second * cos + first * sin

            def store(name: str, begin: int) -> None:
                for group, values in zip(groups, pair, strict=True):
                    at = self.group_of_query(group) if p.cached else group - begin
                    self.store(place, name, at, values)

            is_query = groups[0] < queries
            pl.when(is_query)(functools.partial(store, "q", 0))
            keys = functools.partial(store, "kv", queries)
            if append is not None:
                keys = functools.partial(append, pair)
            pl.when(jnp.logical_not(is_query))(keys)

        return finish

    def append(
        self, cached: Cached, place: _Place, queries: int
    ) -> Callable[[Sequence[jax.Array]], None]:
        """Loads where new tokens belong; returns what stores keys or values there.

        Args:
            cached: the attention of the next layer.
            place: what is stored, the groups of a head.
            queries: the groups of queries, which precede keys and values.
        """
        places = plgpu.load(
            self.refs["places"].at[place.span], layout=_OF_ROWS, optimized=False
        )
        per_head, layer = cached.head_dim // GROUP, self.refs["layer"][0] + 1
        head = quotient(place.groups[0] - queries, per_head)
        line = layer * (cached.num_pages * 2 * cached.kv_heads) + head

        def store(pair: Sequence[jax.Array]) -> None:
            for group, values in zip(place.groups, pair, strict=True):
                attend.store_in_pages(
                    self.refs["pages"],
                    places,
                    line * cached.page,
                    remainder(group, per_head) * GROUP,
                    values.astype(jnp.bfloat16),
                )

        return store

    def group_of_query(self, group: Scalar) -> Scalar:
        """Where a group of queries lies if each key/value head has `COLUMNS`."""
        p = self.problem
        size = p.heads // p.kv_heads * p.head_dim // GROUP
        head = quotient(group, size)
        return group + head * (COLUMNS * p.head_dim // GROUP - size)

    def factors(self, norm: int) -> None:
        """Factors of an RMS norm, of 8 requests a block."""
        source = self.refs["between" if norm == 0 else "new_residual"]
        d, workers = self.problem.d_model, self.schedule.workers
        # The last blocks: in many stages they have less to do.
        worker = workers - 1 - self.worker
        unroll = next(n for n in (16, 8, 4, 2) if d % (n * GROUP) == 0)

        def eight_rows(index: Scalar, _: None) -> None:
            rows = pl.ds((index * workers + worker) * 8, 8)

            def step(i: Scalar, squares: jax.Array) -> jax.Array:
                for j in range(unroll):
                    features = pl.ds((i * unroll + j) * GROUP, GROUP)
                    values = plgpu.load(
                        source.at[features, rows], layout=_WGMMA, optimized=False
                    )
                    squares = squares + values * values
                return squares

            zeros = plgpu.layout_cast(jnp.zeros((GROUP, 8), jnp.float32), _WGMMA)
            squares = lax.fori_loop(0, d // (unroll * GROUP), step, zeros)
            mean = jnp.sum(squares, axis=0) * (1 / d)
            self.refs["factors"].at[norm, rows][...] = lax.rsqrt(mean + self.eps)
            self.signal(self.normed[norm])

        eights = _dealt(self.problem.rows // 8, worker, workers)
        lax.fori_loop(0, eights, eight_rows, None)

    # --- Memory -----------------------------------------------------------------------

    def of_features(self, name: str, features: Any, shape: tuple[int, ...]) -> Any:
        """A number of each feature, in fp32, for all requests."""
        vector = plgpu.load(
            self.refs[name].at[features], layout=_OF_FEATURES, optimized=False
        )
        return lax.broadcast_in_dim(vector.astype(jnp.float32), shape, (0,))

    def store(self, place: _Place, name: str, group: Scalar, values: jax.Array) -> None:
        """Stores [64,rows] as bfloat16 of [rows,features], or as it is."""
        target, rows = self.refs[name], place.span
        if self.problem.kept and name not in ("q", "kv"):
            target = target.at[pl.ds(group * GROUP, GROUP), rows]
            target[...] = values.astype(jnp.bfloat16)
            return
        if (m := target.shape[0]) < place.rows:
            rows = pl.ds(0, m)
        target = target.at[rows, pl.ds(group * GROUP, GROUP)]
        values = values.astype(jnp.bfloat16)
        store_turned(target, values, in_pairs=self.in_pairs(name))

    def in_pairs(self, name: str) -> bool:
        """Whether activations have the order in which 8 bits are widened fastest.

        What this kernel makes for itself has; the attention's output comes as it is.
        """
        return self.problem.narrow and name in ("normed_0", "hidden", "normed_1")

    def signal(self, counter: Ref) -> None:
        """Says that what this warpgroup has written is there."""
        raise_counter(counter)  # pyright: ignore[reportCallIssue]

    def wait(self, counter: Ref, value: int) -> None:
        await_counter(counter, value)


def _dealt(items: Scalar, number: Scalar, to: int) -> Scalar:
    """How many items one has of those that are dealt in turn."""
    return quotient(items - 1 - number + to, to)


def _fill(
    ring: Mapping[str, Ref],
    requested: int | None,
    copy: Callable[[Scalar], None],
    carry: tuple[Scalar, Scalar],
) -> tuple[Scalar, Scalar]:
    """Copies a tile into the next slot of a ring, see `_Block.stream`."""
    slot, number = carry
    slots = ring["smem"].shape[0]
    plgpu.barrier_wait(ring["empty"].at[slot])
    if requested is not None and requested < slots:
        before = previous_slot(slot, requested, slots)

        @pl.when(number >= requested)
        def _() -> None:
            plgpu.barrier_wait(ring["full"].at[before])

    copy(slot)
    return next_slot(slot, slots), number + 1


def _ring(scratch: Mapping[str, Ref], name: str) -> dict[str, Ref]:
    """Buffers and barriers of a ring."""
    parts = {"smem": name, "full": f"{name}_full", "empty": f"{name}_empty"}
    return {part: scratch[key] for part, key in parts.items()}


def _scratch_types(schedule: Schedule) -> dict[str, Any]:
    rows, tile_k = schedule.problem.rows, schedule.tile_k
    narrow, weight_dtype = schedule.problem.narrow, schedule.problem.weight_dtype
    transforms = smem_transforms(GROUP, jnp.bfloat16)
    line = tile_k if narrow else GROUP
    weights, activations = schedule.weight_slots, schedule.activation_slots
    tiles: Any = plgpu.SMEM(
        (weights, TILE_GROUPS, *((GROUP, tile_k) if narrow else (tile_k, GROUP))),
        weight_dtype,
        transforms=smem_transforms(line, weight_dtype),
    )
    if schedule.problem.cached:
        tiles = plgpu.RefUnion(tiles, attend.keys_type(weights))
    return {
        "weights": tiles,
        "activations": plgpu.SMEM(
            (activations, *([2] if schedule.problem.kept else []), rows, tile_k),
            jnp.bfloat16,
            transforms=transforms,
        ),
        "weights_full": plgpu.Barrier(num_arrivals=TILE_GROUPS, num_barriers=weights),
        "weights_empty": plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=weights),
        "activations_full": plgpu.Barrier(num_barriers=activations),
        "activations_empty": plgpu.Barrier(
            num_arrivals=WARPGROUPS, num_barriers=activations
        ),
        **(attend.scratch_types() if schedule.problem.cached else {}),
    }


def _outputs(schedule: Schedule) -> dict[str, jax.ShapeDtypeStruct]:
    """The results, and what stages hand to each other."""
    p = schedule.problem
    fp32, bf16 = jnp.float32, jnp.bfloat16
    turn = -1 if p.kept else 1  # what is gathered is feature-major
    found = {
        "new_residual": ((p.d_model, p.rows), fp32),
        "between": ((p.d_model, p.rows), fp32),
        "normed_0": ((p.rows, p.d_model)[::turn], bf16),
        "hidden": ((p.rows, p.d_ff)[::turn], bf16),
        "factors": ((2, p.rows), fp32),
        "parts": ((max(1, schedule.most_parts), UNIT, p.rows // 8, GROUP, 8), fp32),
    }
    if p.projects:
        heads = p.heads if p.cached is None else COLUMNS * p.kv_heads
        found |= {
            "normed_1": ((p.rows, p.d_model)[::turn], bf16),
            "q": ((p.m, heads * p.head_dim), bf16),
        }
        if p.cached is None:
            found["kv"] = (p.m, 2 * p.kv_heads * p.head_dim), bf16
    if p.cached is not None:
        found |= attend.outputs(p.cached, p.m)
    return {name: jax.ShapeDtypeStruct(*of) for name, of in found.items()}


@functools.partial(
    jax.jit, static_argnames=("problem", "config", "device", "eps", "axis_name")
)  # the layers of a model are traced and lowered once
def decode_layer(
    operands: Mapping[str, jax.Array],
    *,
    problem: Problem,
    config: DecodeLayerConfig,
    device: DeviceSpec,
    eps: float,
    workspace: AllReduceWorkspace | None = None,
    axis_name: str | None = None,
    pages: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None, AllReduceWorkspace | None]:
    """Computes a layer from one attention to the next on a Hopper GPU.

    Args:
        operands: arrays by name: `attended` [M,N H], `residual` [D,rows], the weights
            `out`, `gate_up`, `down` and the scale `mlp_norm`; where `problem` projects,
            also `norm`, `qkv`, `cos`, `sin` and, if there are any, `bias` and
            `next_out`, which is read ahead. Weights of 8 bits are [features,inputs],
            and have scales of features in fp32: `out_scale` for `out`, and so on. The
            parts of a tile-sparse weight are `out`, `out_1` and so on, the input
            features that they keep `out_rows`, and its plan `out_plan`. With
            attention in the launch, in place of `attended`, `queries` [M K,8,H],
            `table` [M W], `layer` [1], `lengths` and `num_new` [M] and `places` [rows];
            see `api.PagedCache`.
        problem: sizes.
        config: how to cut it.
        device: the Hopper GPU that the kernel is built for.
        eps: added to the mean squares of both norms.
        workspace: cells of this device for sums over devices, where there are several;
            all are empty, and they hold `d_model` times the padded rows.
        axis_name: the mesh axis of these devices.
        pages: [L P 2 K,G,H], with attention in the launch.

    Returns:
        ``(residual, queries, keys and values, workspace)``: [M,N H] and [M,2 K H] or
        None; the workspace is that of the next call. With attention in the launch
        queries are [M,8 K H], and the third are the pages.

    Raises:
        Unsupported: sizes or shared memory do not fit.
    """
    schedule = Schedule(problem=problem, config=config, device=device)
    check_smem(
        schedule.fixed_bytes + schedule.weight_slots * schedule.slot_bytes,
        device,
        f"decode_layer with {config}",
    )
    outputs = _outputs(schedule)
    own = operands["mlp_norm"][0]
    shared = operands["cos"][0, 0] if problem.projects else own
    written = {"counters": zeros_like_no_others(schedule.counters, shared, own)}
    if workspace is not None:
        written |= workspace._asdict()
    if pages is not None:
        written["pages"] = pages
    written = {name: jax.new_ref(array) for name, array in written.items()}

    def body(*refs: Ref, **scratch: Ref) -> None:
        named = dict(zip([*operands, *written, *outputs], refs, strict=True))
        if problem.cached is not None:
            scratch["weights"], scratch["keys"] = scratch["weights"]  # pyright: ignore[reportGeneralTypeIssues]
        block = _Block(schedule, eps, named, scratch, axis_name)
        warpgroup = lax.axis_index("warpgroup")

        def copies() -> None:
            if problem.narrow or problem.cached:
                plgpu.set_max_registers(_REGISTERS[0], action="decrease")
            lax.cond(
                warpgroup == WARPGROUPS, block.copy_weights, block.copy_activations
            )

        def compute() -> None:
            if problem.narrow or problem.cached:
                plgpu.set_max_registers(_REGISTERS[1], action="increase")
            block.compute(warpgroup)

        lax.cond(warpgroup < WARPGROUPS, compute, copies)

    results = plgpu.kernel(
        body,
        out_type=list(outputs.values()),
        scratch_types=_scratch_types(schedule),
        grid=(schedule.workers,),
        grid_names=("worker",),
        num_threads=WARPGROUPS + 2,
        thread_name="warpgroup",
        kernel_name="decode_layer",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            reduction_scratch_bytes=1024,
            skip_device_barrier=workspace is not None,
        ),
    )(*operands.values(), *written.values())
    found = dict(zip(outputs, results, strict=True))
    after = None
    if workspace is not None:
        after = AllReduceWorkspace(*(jax.freeze(written[n]) for n in workspace._fields))
    if pages is not None:
        return found["new_residual"], found.get("q"), jax.freeze(written["pages"]), None
    return found["new_residual"], found.get("q"), found.get("kv"), after
