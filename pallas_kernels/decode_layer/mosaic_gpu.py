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

Weights ``[K,N]`` are the left operand, ``W^T x^T``: 64 output features fill the rows of
an instruction, and its columns are the requests, 8 to 64 of them, so that few requests
waste nothing. Sums are ``[features, requests]``.

Blocks share the tiles of a stage evenly. Sums of an output tile that several blocks
share go through global memory in fp32; whoever has the tile's unit adds them in a fixed
order, so that the bits of a row depend on neither time nor the other rows.

An RMS norm is ``x * scale * factor`` with one factor a row: the epilogue before it
stores ``x * scale``, the factor is computed while the next matmul runs, and multiplies
its sums.

Roles of warpgroups: two multiply, one copies weights, one copies activations and
computes factors. Blocks wait for each other, on semaphores in global memory: for the
parts of a group of features, for all units of a stage (`ready`), for the factors of a
norm. Every block must run from the start, so there are at most as many as
multiprocessors, and no role waits for a later stage of another.

Axis letters: M requests, D model, F hidden, N query heads, K key/value heads, H head
dim.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.decode_layer.config import (
    GROUP,
    WARPGROUPS,
    DecodeLayerConfig,
    Problem,
    Schedule,
    Stage,
    quotient,
    remainder,
)
from pallas_kernels.mosaic import DeviceSpec, check_smem, smem_transforms
from pallas_kernels.mosaic.aliases import Ref, Scalar
from pallas_kernels.mosaic.pipeline import drain, hand_over, next_slot, proxy_fence


_WGMMA = plgpu.Layout.WGMMA
_OF_ROWS = _WGMMA.reduce(0)
"""Layout of a number for each request: a column of the sums."""
_OF_FEATURES = _WGMMA.reduce(1)

_LOADS = 8
"""Parts of sums that a warpgroup reads at a time."""


@dataclasses.dataclass(frozen=True)
class _Piece:
    """The part of a share that lies in one column of tiles."""

    column: Scalar
    """Which output tile."""
    part: Scalar
    """Which part of its sums."""
    first: Scalar
    last: Scalar
    """Positions in the column, the last not included."""


@dataclasses.dataclass(frozen=True)
class _Unit:
    """Some groups of 64 features, and some rows of them."""

    groups: tuple[Scalar, ...]
    row: Scalar
    """The first one."""
    rows: int
    number: Scalar
    """Which warpgroup of the block has it."""

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
        self, schedule: Schedule, eps: float, refs: Mapping[str, Ref], scratch: Any
    ) -> None:
        self.schedule, self.eps = schedule, eps
        self.refs, self.scratch = refs, scratch
        self.problem, self.stages = schedule.problem, schedule.stages
        self.worker = lax.axis_index("worker")
        # A semaphore for each group of each stage, each wave of it, and each norm.
        sizes = [stage.groups + stage.waves for stage in self.stages]
        bounds = list(itertools.accumulate(sizes, initial=0))
        self.semaphores = pl.get_global(plgpu.SemaphoreType.REGULAR((bounds[-1] + 2,)))
        self.of_group = bounds[:-1]
        self.of_wave = [
            first + stage.groups
            for first, stage in zip(bounds, self.stages, strict=False)
        ]
        self.normed = [self.semaphores.at[bounds[-1] + i] for i in range(2)]

    # --- Shares -----------------------------------------------------------------------

    def for_each_piece(
        self,
        stage: Stage,
        wave: Scalar,
        body: Callable[[_Piece, Any], Any],
        carry: Any,
    ) -> Any:
        """Loops over the pieces of this block's share of a wave; none past the last.

        ``body(piece, carry)`` returns the carry.
        """
        first, last = (stage.first_tile(self.worker + i) for i in range(2))

        def piece(index: Scalar, carry: Any) -> Any:
            start = index * stage.depth
            found = _Piece(
                stage.column_of(wave * stage.span + index),
                self.worker - stage.share_of(start),
                jnp.maximum(first - start, 0),
                jnp.minimum(last - start, stage.depth),
            )
            return body(found, carry)

        begin = quotient(first, stage.depth)
        end = quotient(last - 1, stage.depth) + 1
        there = (self.worker < stage.shares) & (wave < stage.waves)
        return lax.fori_loop(begin, jnp.where(there, end, begin), piece, carry)

    def stream(
        self,
        stage: Stage,
        name: str,
        copy: Callable[..., Any],
        carry: Any,
        after_first: Callable[[Any], None] | None = None,
    ) -> Any:
        """Fills a ring with the tiles of a stage.

        Args:
            stage: the stage.
            name: which ring.
            copy: ``copy(piece, k, slot, more) -> more`` starts the copies of a tile.
            carry: the slot to begin with, and what `copy` passes on.
            after_first: ``after_first(more)`` runs after the first wave.

        Returns:
            The carry after the last tile.
        """
        ring = _ring(self.scratch, name)

        def load(piece: _Piece, carry: Any) -> Any:
            def tile(position: Scalar, carry: Any) -> Any:
                slot, more = carry
                plgpu.barrier_wait(ring["empty"].at[slot])
                more = copy(piece, stage.k_of(position), slot, more)
                return next_slot(slot, ring["smem"].shape[0]), more

            return lax.fori_loop(piece.first, piece.last, tile, carry)

        def wave(number: Scalar, carry: Any) -> Any:
            carry = self.for_each_piece(stage, number, load, carry)
            if after_first is not None:
                pl.when(number == 0)(functools.partial(after_first, carry[1]))
            return carry

        return lax.fori_loop(0, stage.waves, wave, carry)

    # --- Roles ------------------------------------------------------------------------

    def copy_weights(self) -> None:
        """The tiles of all stages, one after the other, as the ring has room."""
        tile_k, ring = self.schedule.config.tile_k, _ring(self.scratch, "weights")
        carry = jnp.int32(0), ()
        for stage in self.stages:
            weight = self.refs[stage.weight]

            def copy(
                piece: _Piece, k: Scalar, slot: Scalar, _: Any, weight: Ref = weight
            ) -> Any:
                rows = pl.ds(k * tile_k, tile_k)
                for group in range(self.schedule.tile_groups):
                    feature = (piece.column * self.schedule.tile_groups + group) * GROUP
                    plgpu.copy_gmem_to_smem(
                        weight.at[rows, pl.ds(feature, GROUP)],
                        ring["smem"].at[slot, group],
                        ring["full"].at[slot],
                    )
                return ()

            carry = self.stream(stage, "weights", copy, carry)
        drain(ring, carry[0], self.schedule.weight_slots)

    def copy_activations(self) -> None:
        """The inputs of stages, as waves of the one before end; factors of norms."""
        tile_k, ring = self.schedule.config.tile_k, _ring(self.scratch, "activations")
        # Rows past the last one are zeros. An offset that is known would be an error
        # where there are fewer rows than the copy has.
        rows = pl.ds(self.worker * 0, self.problem.rows)
        slot = jnp.int32(0)
        for i, stage in enumerate(self.stages):
            source = self.refs[stage.source]

            def copy(
                _: _Piece,
                k: Scalar,
                slot: Scalar,
                ended: Scalar,
                source: Ref = source,
                i: int = i,
            ) -> Scalar:
                if i:
                    ended = self.wait_for_feature(i - 1, (k + 1) * tile_k - 1, ended)
                plgpu.copy_gmem_to_smem(
                    source.at[rows, pl.ds(k * tile_k, tile_k)],
                    ring["smem"].at[slot],
                    ring["full"].at[slot],
                )
                return ended

            def factors(ended: Scalar, norm: Any = stage.norm, i: int = i) -> None:
                last = self.stages[i - 1].features * GROUP - 1
                self.wait_for_feature(i - 1, jnp.int32(last), ended)
                self.factors(norm)

            # Not after all waves: the units of the first, which multiply by the
            # factors, would wait for copies that wait for these units.
            after_first = None if stage.norm is None else factors
            carry = slot, jnp.int32(0)
            slot, _ = self.stream(stage, "activations", copy, carry, after_first)
        drain(ring, slot, self.schedule.activation_slots)

    def wait_for_feature(self, i: int, feature: Scalar, ended: Scalar) -> Scalar:
        """Waits for the wave of an output feature of a stage, and those before.

        Args:
            i: number of the stage.
            feature: the feature.
            ended: how many waves have been waited for.

        Returns:
            How many have been waited for now.
        """
        stage = self.stages[i]
        wanted = jnp.maximum(stage.wave_of(feature) + 1, ended)

        def wait(wave: Scalar, _: None) -> None:
            self.wait(self.semaphores.at[self.of_wave[i] + wave], stage.wave_units)
            proxy_fence()  # pyright: ignore[reportCallIssue]

        lax.fori_loop(ended, wanted, wait, None)
        return wanted

    def compute(self, number: Scalar) -> None:
        """Multiplies, and finishes units: of a wave after the matmuls of the next.

        Args:
            number: which warpgroup of those that do.
        """
        for name in ("weights", "activations"):
            ring = _ring(self.scratch, name)
            hand_over(ring, ring["smem"].shape[0])
        slots = jnp.int32(0), jnp.int32(0)
        for i, stage in enumerate(self.stages):

            def wave(w: Scalar, slots: Any, i: int = i, stage: Stage = stage) -> Any:
                slots = self.multiply(i, stage, w, number, slots)
                self.finish(i, stage, w - 1, number)
                return slots

            slots = lax.fori_loop(0, stage.waves + 1, wave, slots)

    # --- Matmuls ----------------------------------------------------------------------

    def multiply(
        self,
        i: int,
        stage: Stage,
        wave: Scalar,
        number: Scalar,
        slots: tuple[Scalar, Scalar],
    ) -> tuple[Scalar, Scalar]:
        """The sums of all pieces of a wave, for the groups of this warpgroup."""
        weights, activations = (
            _ring(self.scratch, name) for name in ("weights", "activations")
        )
        count = self.schedule.tile_groups // WARPGROUPS

        def piece(piece: _Piece, slots: tuple[Scalar, Scalar]) -> tuple[Scalar, Scalar]:
            def scoped(*accs: Ref) -> Any:
                def tile(_: Scalar, slots: tuple[Scalar, Scalar]) -> Any:
                    w, x = slots
                    plgpu.barrier_wait(activations["full"].at[x])
                    plgpu.barrier_wait(weights["full"].at[w])
                    for j, acc in enumerate(accs):
                        plgpu.wgmma(
                            acc,
                            weights["smem"].at[w, number * count + j].transpose((1, 0)),
                            activations["smem"].at[x].transpose((1, 0)),
                        )
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(activations["empty"].at[x])
                    plgpu.barrier_arrive(weights["empty"].at[w])
                    return (
                        next_slot(w, weights["smem"].shape[0]),
                        next_slot(x, activations["smem"].shape[0]),
                    )

                after = lax.fori_loop(piece.first, piece.last, tile, slots)
                return [acc[...] for acc in accs], after

            accumulator = plgpu.WGMMAAccumulatorRef(
                (GROUP, self.problem.rows), jnp.float32
            )
            sums, slots = pl.run_scoped(scoped, *[accumulator] * count)
            for j, values in enumerate(sums):
                group = piece.column * self.schedule.tile_groups + number * count + j
                self.parts(i, stage, group, piece.part)[...] = values
                self.signal(self.semaphores.at[self.of_group[i] + group])
            return slots

        return self.for_each_piece(stage, wave, piece, slots)

    def parts(self, i: int, stage: Stage, group: Scalar, part: Scalar) -> Ref:
        """Where a part of the sums of a group lies, [64,M]."""
        first = self.schedule.first_parts[i]
        return self.refs["parts"].at[first + group * stage.most_parts + part]

    def sums(self, i: int, stage: Stage, group: Scalar, unit: _Unit) -> jax.Array:
        """The sums of a group of features, [64,rows], when all its parts are there."""
        count = stage.parts(quotient(group, stage.tile_groups))
        self.wait(self.semaphores.at[self.of_group[i] + group], count)
        total = None
        for first in range(0, stage.most_parts, _LOADS):
            parts = [
                plgpu.load(
                    self.parts(i, stage, group, part).at[:, unit.span],
                    layout=_WGMMA,
                    optimized=False,
                )
                for part in range(first, min(first + _LOADS, stage.most_parts))
            ]
            for number, part in enumerate(parts, first):
                if total is None:
                    total = part
                    continue
                there = lax.broadcast_in_dim(number < count, part.shape, ())
                # What no share has written may be NaN.
                total = total + jnp.where(there, part, 0.0)
        assert total is not None
        return total

    # --- Epilogues --------------------------------------------------------------------

    def finish(self, i: int, stage: Stage, wave: Scalar, number: Scalar) -> None:
        """The units of a wave that this warpgroup has; none of wave -1."""
        worker = number * self.schedule.workers + self.worker
        workers = WARPGROUPS * self.schedule.workers

        def unit(index: Scalar, _: None) -> None:
            groups, row = stage.unit(index * workers + worker)
            unit = _Unit(groups, row, stage.unit_rows, number)
            found = [self.sums(i, stage, group, unit) for group in groups]
            if stage.norm is not None:
                self.wait(self.normed[stage.norm], self.problem.rows // 8)
                factors = plgpu.load(
                    self.refs["factors"].at[stage.norm, unit.span],
                    layout=_OF_ROWS,
                    optimized=False,
                )
                factors = lax.broadcast_in_dim(factors, unit.shape, (1,))
                found = [sums * factors for sums in found]
            getattr(self, stage.epilogue)(stage, unit, found)
            self.signal(self.semaphores.at[self.of_wave[i] + wave])

        begin, end = (
            _dealt(jnp.maximum(wave + j, 0) * stage.wave_units, worker, workers)
            for j in range(2)
        )
        lax.fori_loop(begin, end, unit, None)

    def add(self, stage: Stage, unit: _Unit, sums: list[jax.Array]) -> None:
        """Adds the residual; stores the sum, and scaled what the norm multiplies."""
        features = pl.ds(unit.groups[0] * GROUP, GROUP)
        before, after, scale, target = (
            ("residual", "between", "mlp_norm", "normed_0")
            if stage.weight == "out"
            else ("between", "new_residual", "norm", "normed_1")
        )
        residual = plgpu.load(
            self.refs[before].at[features, unit.span], layout=_WGMMA, optimized=False
        )
        total = residual + sums[0]
        self.refs[after].at[features, unit.span][...] = total
        if target in self.refs:
            factors = self.of_features(scale, features, total.shape)
            self.store(unit, target, unit.groups[0], total * factors)

    def swiglu(self, stage: Stage, unit: _Unit, sums: list[jax.Array]) -> None:
        """The hidden features from gate and up projection."""
        gate, up = sums
        hidden = gate / (1 + jnp.exp(-gate)) * up
        self.store(unit, "hidden", unit.groups[0], hidden)

    def rotate(self, stage: Stage, unit: _Unit, sums: list[jax.Array]) -> None:
        """Adds the bias, and rotates queries and keys, in pairs of a head's halves."""
        p, groups, shape = self.problem, unit.groups, unit.shape
        first, second = sums
        if p.bias:
            first, second = (
                values + self.of_features("bias", pl.ds(g * GROUP, GROUP), shape)
                for g, values in zip(groups, sums, strict=True)
            )
        per_head = p.head_dim // GROUP
        in_half = remainder(groups[0], stage.half)
        cos, sin = (
            plgpu.load(
                self.refs[name].at[pl.ds(in_half * GROUP, GROUP), unit.span],
                layout=_WGMMA,
                optimized=False,
            )
            for name in ("cos", "sin")
        )
        turned = groups[0] < (p.heads + p.kv_heads) * per_head
        turned = lax.broadcast_in_dim(turned, shape, ())
        cos = jnp.where(turned, cos, 1.0)
        sin = jnp.where(turned, sin, 0.0)
        pair = first * cos - second * sin, second * cos + first * sin
        queries = p.heads * per_head

        def store(name: str, begin: int) -> None:
            for group, values in zip(groups, pair, strict=True):
                self.store(unit, name, group - begin, values)

        is_query = groups[0] < queries
        pl.when(is_query)(functools.partial(store, "q", 0))
        pl.when(jnp.logical_not(is_query))(functools.partial(store, "kv", queries))

    def factors(self, norm: int) -> None:
        """Factors of an RMS norm, of 8 requests a block."""
        source = self.refs["between" if norm == 0 else "new_residual"]
        d, workers = self.problem.d_model, self.schedule.workers
        unroll = next(n for n in (16, 8, 4, 2) if d % (n * GROUP) == 0)

        def eight_rows(index: Scalar, _: None) -> None:
            rows = pl.ds((index * workers + self.worker) * 8, 8)

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

        eights = _dealt(self.problem.rows // 8, self.worker, workers)
        lax.fori_loop(0, eights, eight_rows, None)

    # --- Memory -----------------------------------------------------------------------

    def of_features(self, name: str, features: Any, shape: tuple[int, ...]) -> Any:
        """A number of each feature, in fp32, for all requests."""
        vector = plgpu.load(
            self.refs[name].at[features], layout=_OF_FEATURES, optimized=False
        )
        return lax.broadcast_in_dim(vector.astype(jnp.float32), shape, (0,))

    def store(self, unit: _Unit, name: str, group: Scalar, values: jax.Array) -> None:
        """Stores [64,rows] as bfloat16 of [rows,features]: turned in shared memory."""
        buffer = self.scratch["turned"].at[unit.number, pl.ds(0, unit.rows)]
        buffer.transpose((1, 0))[...] = plgpu.layout_cast(
            values.astype(jnp.bfloat16), plgpu.Layout.WGMMA_TRANSPOSED
        )
        plgpu.commit_smem()
        target = self.refs[name].at[unit.span, pl.ds(group * GROUP, GROUP)]
        plgpu.copy_smem_to_gmem(buffer, target)
        plgpu.wait_smem_to_gmem(0, wait_read_only=False)

    def signal(self, semaphore: Ref) -> None:
        """Says that what this warpgroup has written is there (after a barrier)."""
        plgpu.semaphore_signal(semaphore, 1, memory_scope="gpu")

    def wait(self, semaphore: Ref, value: Scalar) -> None:
        plgpu.semaphore_wait(semaphore, value, decrement=False, memory_scope="gpu")


def _dealt(items: Scalar, number: Scalar, to: int) -> Scalar:
    """How many items one has of those that are dealt in turn."""
    return quotient(items - 1 - number + to, to)


def _ring(scratch: Mapping[str, Ref], name: str) -> dict[str, Ref]:
    """Buffers and barriers of a ring."""
    parts = {"smem": name, "full": f"{name}_full", "empty": f"{name}_empty"}
    return {part: scratch[key] for part, key in parts.items()}


def _scratch_types(schedule: Schedule) -> dict[str, Any]:
    rows, tile_k = schedule.problem.rows, schedule.config.tile_k
    transforms = smem_transforms(GROUP, jnp.bfloat16)
    weights, activations = schedule.weight_slots, schedule.activation_slots
    return {
        "weights": plgpu.SMEM(
            (weights, schedule.tile_groups, tile_k, GROUP),
            jnp.bfloat16,
            transforms=transforms,
        ),
        "activations": plgpu.SMEM(
            (activations, rows, tile_k), jnp.bfloat16, transforms=transforms
        ),
        "turned": plgpu.SMEM((WARPGROUPS, rows, GROUP), jnp.bfloat16),
        "weights_full": plgpu.Barrier(
            num_arrivals=schedule.tile_groups, num_barriers=weights
        ),
        "weights_empty": plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=weights),
        "activations_full": plgpu.Barrier(num_barriers=activations),
        "activations_empty": plgpu.Barrier(
            num_arrivals=WARPGROUPS, num_barriers=activations
        ),
    }


def _outputs(schedule: Schedule) -> dict[str, jax.ShapeDtypeStruct]:
    """The results, and what stages hand to each other."""
    p = schedule.problem
    fp32, bf16 = jnp.float32, jnp.bfloat16
    found = {
        "new_residual": ((p.d_model, p.rows), fp32),
        "between": ((p.d_model, p.rows), fp32),
        "normed_0": ((p.rows, p.d_model), bf16),
        "hidden": ((p.rows, p.d_ff), bf16),
        "factors": ((2, p.rows), fp32),
        "parts": ((schedule.first_parts[-1], GROUP, p.rows), fp32),
    }
    if p.projects:
        found |= {
            "normed_1": ((p.rows, p.d_model), bf16),
            "q": ((p.m, p.heads * p.head_dim), bf16),
            "kv": ((p.m, 2 * p.kv_heads * p.head_dim), bf16),
        }
    return {name: jax.ShapeDtypeStruct(*of) for name, of in found.items()}


@functools.partial(
    jax.jit, static_argnames=("problem", "config", "device", "eps")
)  # the layers of a model are traced and lowered once
def decode_layer(
    operands: Mapping[str, jax.Array],
    *,
    problem: Problem,
    config: DecodeLayerConfig,
    device: DeviceSpec,
    eps: float,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """Computes a layer from one attention to the next on a Hopper GPU.

    Args:
        operands: arrays by name: `attended` [M,N H], `residual` [D,rows], the weights
            `out`, `gate_up`, `down` and the scale `mlp_norm`; where `problem` projects,
            also `norm`, `qkv`, `cos`, `sin` and, if there is one, `bias`.
        problem: sizes.
        config: how to cut it.
        device: the Hopper GPU that the kernel is built for.
        eps: added to the mean squares of both norms.

    Returns:
        ``(residual, queries, keys and values)``, the last two [M,N H] and [M,2 K H], or
        None.

    Raises:
        Unsupported: sizes or shared memory do not fit.
    """
    schedule = Schedule(problem=problem, config=config, device=device)
    check_smem(
        schedule.fixed_bytes + schedule.weight_slots * schedule.slot_bytes,
        device,
        f"decode_layer with {config}",
    )
    names, outputs = list(operands), _outputs(schedule)

    def body(*refs: Ref, **scratch: Ref) -> None:
        named = dict(zip([*names, *outputs], refs, strict=True))
        block = _Block(schedule, eps, named, scratch)
        warpgroup = lax.axis_index("warpgroup")

        def copies() -> None:
            lax.cond(
                warpgroup == WARPGROUPS, block.copy_weights, block.copy_activations
            )

        lax.cond(warpgroup < WARPGROUPS, lambda: block.compute(warpgroup), copies)

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
            approx_math=True, reduction_scratch_bytes=1024
        ),
    )(*operands.values())
    found = dict(zip(outputs, results, strict=True))
    return found["new_residual"], found.get("q"), found.get("kv")
