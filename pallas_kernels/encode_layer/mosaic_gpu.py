"""Hopper kernel of an encoder layer from one attention to the next, in one launch.

For few tokens a launch takes longer to begin and to end than to compute: each begins
with an empty ring, and waits for weights. Here one persistent kernel has the four
matmuls of a layer, with what follows them::

    stage   matmul          epilogue                      reads
    out     attended W      + bias + residual, norm       attended
    up      between W       + bias, activation            between
    down    hidden W        + bias + between, norm        hidden
    query   y W, of three   + bias                        y

A block takes tiles of each stage in turn. Its producer asks for the weights of the next
stage while the last one is still being computed, and for its activations as soon as
those rows are there: blocks say so on counters in global memory, one for each stage and
tile of rows.

Before a norm the contraction is split, as in `pallas_kernels.matmul.mosaic_gpu_norm`:
fp32 sums go through global memory, and warps add whole rows of their parts in a fixed
order, so that the bits of a row depend on neither time nor other rows. The same warp
has the same rows of both norms, of which the first is the residual of the second.

Every block must run from the start, and no role waits for a later stage of another.

Axis letters: M tokens, K contraction, N columns, L layers.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.encode_layer.config import CHUNK, Problem, Schedule, Stage
from pallas_kernels.layer_norm.mosaic_gpu import WARPS, normalize, row_layout
from pallas_kernels.matmul.activations import KERNEL_ACTIVATIONS
from pallas_kernels.matmul.config import CONSUMERS
from pallas_kernels.matmul.mosaic_gpu import REGISTERS, multiply_tile
from pallas_kernels.mosaic import DeviceSpec, check_smem
from pallas_kernels.mosaic.aliases import Ref, Scalar
from pallas_kernels.mosaic.counters import (
    await_counter,
    raise_counter,
    zeros_like_no_others,
)
from pallas_kernels.mosaic.pipeline import (
    drain,
    hand_over,
    launch,
    next_slot,
    proxy_fence,
    run_roles,
)


class _Block:
    """What a block does: the two roles."""

    def __init__(
        self,
        schedule: Schedule,
        activation: str | None,
        eps: float,
        refs: Mapping[str, Ref],
        scratch: Mapping[str, Ref],
    ) -> None:
        self.schedule, self.eps = schedule, eps
        self.act = KERNEL_ACTIVATIONS[activation] if activation else lambda y: y
        self.refs, self.scratch = refs, scratch
        self.stages, self.dtype = schedule.stages, schedule.problem.dtype
        self.slots = schedule.ring.config.stages
        self.worker = lax.axis_index("worker")
        self.workers = lax.axis_size("worker")

    def counter(self, i: int, row: Scalar, *, sums: bool = False) -> Ref:
        """What is there of a tile of rows of stage `i`, or of its sums."""
        first = (2 * i + sums) * self.schedule.row_tiles
        return self.refs["counters"].at[pl.ds(first + row, 1)]

    def for_each_tile(
        self, stage: Stage, body: Callable[..., Scalar], slot: Scalar
    ) -> Scalar:
        """Loops over this block's tiles: ``body(first, m, n, part, slot) -> slot``."""
        across, count = stage.columns.count, stage.count

        def tile(i: Scalar, slot: Scalar) -> Scalar:
            number = i * self.workers + self.worker
            m, rest = lax.div(number, stage.across), lax.rem(number, stage.across)
            return body(i == 0, m, lax.rem(rest, across), lax.div(rest, across), slot)

        return lax.fori_loop(0, _dealt(count, self.worker, self.workers), tile, slot)

    # --- Roles ------------------------------------------------------------------------

    def produce(self) -> None:
        """Copies biases, and the operands of all stages."""
        for stage in self.stages:
            for name, start, tiles in self.biases(stage):
                lines = pl.ds(start, tiles.problem.n // CHUNK)
                plgpu.copy_gmem_to_smem(
                    self.refs[f"{name}_bias"],
                    self.scratch["bias_smem"].at[lines],
                    self.scratch["bias_full"],
                )
        slot = jnp.int32(0)
        for i, stage in enumerate(self.stages):
            slot = self.for_each_tile(
                stage, lambda *tile, i=i, stage=stage: self.load(i, stage, *tile), slot
            )
        drain(self.scratch, slot, self.slots)

    def biases(self, stage: Stage) -> list[tuple[str, int, Any]]:
        """Name, first line and tiles of each bias that is in shared memory."""
        if stage.residual is not None:
            return []
        per_tile = stage.config.tile_n // CHUNK
        starts = [stage.first_line + per_tile * n for n in stage.columns.starts[:-1]]
        return list(zip(stage.weights, starts, stage.columns.tiles, strict=True))

    def load(
        self,
        i: int,
        stage: Stage,
        first: Scalar,
        m: Scalar,
        n: Scalar,
        part: Scalar,
        slot: Scalar,
    ) -> Scalar:
        """Producer: streams the operands of a tile into the ring.

        Of the first tile of a stage the weights come before the activations are there.
        """
        steps, begin = stage.steps, slot

        def weights(step: Scalar, slot: Scalar) -> None:
            plgpu.barrier_wait(self.scratch["empty"].at[slot])

            def copy(weight: int, start: int) -> None:
                tiles = stage.columns.tiles[weight]
                source = self.refs[stage.weights[weight]]
                plgpu.copy_gmem_to_smem(
                    tiles.w_view(source, part * steps + step, n - start),
                    self.scratch["w_smem"].at[slot],
                    self.scratch["full"].at[slot],
                )

            stage.columns.for_weight(n, copy)

        def activations(step: Scalar, slot: Scalar) -> None:
            plgpu.copy_gmem_to_smem(
                self.x_view(stage, m, part * steps + step),
                self.scratch["x_smem"].at[slot],
                self.scratch["full"].at[slot],
            )

        def ahead(step: Scalar, slot: Scalar) -> Scalar:
            weights(step, slot)
            return next_slot(slot, self.slots)

        def behind(step: Scalar, slot: Scalar) -> Scalar:
            activations(step, slot)
            return next_slot(slot, self.slots)

        def both(step: Scalar, slot: Scalar) -> Scalar:
            weights(step, slot)
            activations(step, slot)
            return next_slot(slot, self.slots)

        early = 0
        if i:
            early = jnp.where(first, min(steps, self.slots), 0)
            lax.fori_loop(0, early, ahead, begin)
            await_counter(self.counter(i - 1, m), self.stages[i - 1].signals)
            proxy_fence()  # pyright: ignore[reportCallIssue]
            slot = lax.fori_loop(0, early, behind, begin)
        return lax.fori_loop(early, steps, both, slot)

    def consume(self, number: Scalar) -> None:
        """Consumer: multiplies and finishes the tiles of all stages."""
        hand_over(self.scratch, self.slots)
        slot = jnp.int32(0)
        for i, stage in enumerate(self.stages):
            if i == 1:
                plgpu.barrier_wait(self.scratch["bias_full"])

            def tile(
                first: Scalar,
                m: Scalar,
                n: Scalar,
                part: Scalar,
                slot: Scalar,
                i: int = i,
                stage: Stage = stage,
            ) -> Scalar:
                del first
                sums, slot = multiply_tile(
                    stage.tiles, self.scratch, number, slot, k_tiles=stage.steps
                )
                if stage.residual is None:
                    self.store(i, stage, number, m, n, sums)
                else:
                    self.store_sums(i, stage, number, m, n, part, sums)
                return slot

            slot = self.for_each_tile(stage, tile, slot)
            if stage.residual is not None:
                self.normalize_rows(i, stage, number)

    # --- Epilogues --------------------------------------------------------------------

    def store(
        self,
        i: int,
        stage: Stage,
        number: Scalar,
        m: Scalar,
        n: Scalar,
        sums: jax.Array,
    ) -> None:
        """Adds the bias, activates and stores a consumer's part of a tile."""
        slots, chunks = stage.config.store_slots, stage.config.tile_n // CHUNK
        act = self.act if len(stage.weights) == 1 else lambda y: y
        for chunk in range(chunks):
            part = sums[:, chunk * CHUNK : (chunk + 1) * CHUNK]
            bias = plgpu.load(
                self.scratch["bias_smem"].at[stage.first_line + n * chunks + chunk],
                layout=plgpu.Layout.WGMMA.reduce(0),
                optimized=False,
            )
            wide = lax.broadcast_in_dim(bias.astype(jnp.float32), part.shape, (1,))
            # Rounded in between, as in `dense`.
            y = act((part + wide).astype(self.dtype).astype(jnp.float32))
            buffer = self.scratch["out_smem"].at[number, chunk % slots]
            plgpu.wait_smem_to_gmem(min(chunk, slots - 1), wait_read_only=True)
            buffer[...] = y.astype(self.dtype)
            plgpu.commit_smem()

            def copy(
                weight: int, start: int, chunk: int = chunk, buffer: Ref = buffer
            ) -> None:
                out, tiles = self.refs[stage.targets[weight]], stage.columns.tiles
                view = tiles[weight].out_view(out, m, n - start, number, chunk)
                plgpu.copy_smem_to_gmem(buffer, view)

            stage.columns.for_weight(n, copy)
        plgpu.wait_smem_to_gmem(0, wait_read_only=False)
        raise_counter(self.counter(i, m))  # pyright: ignore[reportCallIssue]

    def store_sums(
        self,
        i: int,
        stage: Stage,
        number: Scalar,
        m: Scalar,
        n: Scalar,
        part: Scalar,
        sums: jax.Array,
    ) -> None:
        """Leaves sums to who normalizes their rows."""
        rows, columns = stage.config.block
        first = m * stage.config.tile_m + number * rows
        there = self.refs["parts"].at[part, pl.ds(first, rows)]
        width = there.shape[-1]
        for chunk in range(columns // CHUNK):
            at = n * columns + chunk * CHUNK
            line, at = lax.div(at, width), lax.rem(at, width)
            there.at[:, line, pl.ds(at, CHUNK)][...] = sums[
                :, chunk * CHUNK : (chunk + 1) * CHUNK
            ]
        raise_counter(self.counter(i, m, sums=True))  # pyright: ignore[reportCallIssue]

    def normalize_rows(self, i: int, stage: Stage, number: Scalar) -> None:
        """Normalizes this warpgroup's share of the rows, four at a time."""
        (name,), (target,) = stage.weights, stage.targets
        assert stage.residual is not None
        residual = self.refs[stage.residual]
        groups = self.schedule.row_tiles * stage.signals
        # The last blocks first: they have fewer tiles.
        share = number * self.workers + (self.workers - 1 - self.worker)
        others, m = CONSUMERS * self.workers, self.schedule.problem.m
        d_model = self.schedule.problem.d_model
        _, layout = row_layout(d_model, jnp.dtype(jnp.float32))
        names = f"{name}_bias", f"{name}_scale", f"{name}_shift"
        dealt = _dealt(groups, share, others)

        def finish() -> None:
            added, *affine = (
                plgpu.load(self.refs[n], layout=layout.reduce(0), optimized=False)
                for n in names
                if n in self.refs
            )

            def four_rows(index: Scalar, _: None) -> None:
                group = share + index * others
                row, tile = group * WARPS, lax.div(group, stage.signals)
                span = pl.ds(row, WARPS)

                def rows(ref: Ref) -> jax.Array:
                    return plgpu.load(ref.at[span], layout=layout, optimized=False)

                @pl.when(row < m)
                def _() -> None:
                    before = rows(residual)
                    await_counter(
                        self.counter(i, tile, sums=True), CONSUMERS * stage.across
                    )
                    total = rows(self.refs["parts"].at[0])
                    for part in range(1, stage.parts):
                        total = total + rows(self.refs["parts"].at[part])
                    y = normalize([total, before, added], affine, self.eps, layout)
                    self.refs[target][span] = y.astype(self.dtype)
                    proxy_fence()  # pyright: ignore[reportCallIssue]

                raise_counter(self.counter(i, tile))  # pyright: ignore[reportCallIssue]

            lax.fori_loop(0, dealt, four_rows, None)

        pl.when(dealt > 0)(finish)

    # --- Memory -----------------------------------------------------------------------

    def x_view(self, stage: Stage, m: Scalar, k: Scalar) -> Ref:
        """Tile (m, k) of the input of a stage, which may be in lines."""
        source, config = self.refs[stage.source], stage.config
        if len(source.shape) == 2:
            return stage.tiles.x_view(source, m, k)
        rows, width = pl.ds(m * config.tile_m, config.tile_m), source.shape[-1]
        at = k * config.tile_k
        column = pl.ds(lax.rem(at, width), config.tile_k)
        return source.at[rows, lax.div(at, width), column]


def _dealt(items: Scalar, number: Scalar, to: Scalar) -> Scalar:
    """How many items one has of those that are dealt in turn."""
    return lax.div(items - 1 - number + to, jnp.int32(to))


def encode_layer(
    operands: Mapping[str, jax.Array],
    layer: jax.Array,
    following: jax.Array | None,
    *,
    problem: Problem,
    activation: str | None,
    eps: float,
    device: DeviceSpec,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Computes a layer from one attention to the next on a Hopper GPU.

    Args:
        operands: arrays by name: `attended` and `residual`, [M,K] and [M,N]; the stacks
            `out`, `up`, `down` and, where `problem` has heads, `query`, `key` and
            `value`, [L,K,N]; of each stack NAME also NAME_bias [L,N]; the norms behind
            `out` and `down`, NAME_scale and, if there is one, NAME_shift, [N].
        layer: int32, which layer of the stacks.
        following: int32, which of those of queries, keys and values; None without.
        problem: sizes.
        activation: a name in `ACTIVATIONS`, or None.
        eps: added to the variances.
        device: the Hopper GPU that the kernel is built for.

    Returns:
        ``(y, heads)``: [M,N], and queries, keys and values, [M,N] each, if there are.

    Raises:
        Unsupported: sizes or shared memory do not fit.
    """
    problem.check()
    schedule = Schedule(problem=problem, device=device)
    check_smem(schedule.smem_bytes, device, f"encode_layer of {problem}")
    p, dtype = problem, problem.dtype
    width, _ = row_layout(p.d_model, jnp.dtype(jnp.float32))
    lines = (p.d_model // width, width)
    in_lines = {"residual"} | {
        f"{name}_{vector}"
        for name in ("out", "down")
        for vector in ("bias", "scale", "shift")
    }

    def as_read(name: str, a: jax.Array) -> jax.Array:
        if name in in_lines:
            return a.reshape(*a.shape[:-1], *lines)
        return a.reshape(*a.shape[:-1], -1, CHUNK) if name.endswith("_bias") else a

    given = {name: as_read(name, a) for name, a in operands.items()}
    rows = schedule.row_tiles * schedule.ring.config.tile_m
    outputs = {
        "y": jax.ShapeDtypeStruct((p.m, *lines), dtype),
        "between": jax.ShapeDtypeStruct((p.m, *lines), dtype),
        "hidden": jax.ShapeDtypeStruct((p.m, p.d_ff), dtype),
        "parts": jax.ShapeDtypeStruct((schedule.parts, rows, *lines), jnp.float32),
    } | {
        name: jax.ShapeDtypeStruct((p.m, n), dtype)
        for name, n in zip("qkv", p.heads, strict=False)
    }
    own = operands["out_scale"]
    counters = zeros_like_no_others(schedule.counters, own[0], own)
    numbers = [layer] if following is None else [layer, following]
    names = [*given, "layer", "following"][: len(given) + len(numbers)]
    names += ["counters", *outputs]
    of_next = ("query", "key", "value")

    def body(*refs: Ref, **scratch: Ref) -> None:
        named = dict(zip(names, refs, strict=True))
        for name in ("out", "up", "down", *(of_next if p.heads else ())):
            number = named["following" if name in of_next else "layer"][0]
            for stack in (name, f"{name}_bias"):
                named[stack] = named[stack].at[number]
        block = _Block(schedule, activation, eps, named, scratch)
        run_roles(
            block.produce, block.consume, consumers=CONSUMERS, registers=REGISTERS
        )

    results = plgpu.kernel(
        body,
        out_type=list(outputs.values()),
        scratch_types=schedule.scratch_types(),
        kernel_name="encode_layer",
        **launch(
            device.num_sms, device, "encode_layer", warpgroups=CONSUMERS + 1, cluster=1
        ),
    )(*given.values(), *(n.reshape(1) for n in numbers), jax.new_ref(counters))
    found = dict(zip(outputs, results, strict=True))
    heads = tuple(found[name] for name in "qkv" if name in found)
    return found["y"].reshape(p.m, p.d_model), heads
