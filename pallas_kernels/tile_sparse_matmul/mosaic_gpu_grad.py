"""Hopper kernel of the gradient of the values: ``dvalues[t] = x[:, rows[t]]^T dy[t]``.

A product sampled at the kept rows. An output block is `block_rows` kept rows by one
tile of features; its sums run over the tokens, 64 at a time. Of feature-major x a step
needs 128 bytes of each row, which the producer gathers as in the forward kernel; the
rows of a block stay the same, so their indices are read once. The tile of dy is a plain
copy, shared by the blocks of a cluster. Roles and ring are those of the forward kernel.

Axes: M tokens, K input features, C packed output features, T tiles, P row capacity of a
tile, G columns of a tile.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch import Unsupported
from pallas_kernels.matmul.config import CONSUMERS, MatmulConfig
from pallas_kernels.matmul.config import Problem as MatmulProblem
from pallas_kernels.matmul.mosaic_gpu import Tiles, store_tile
from pallas_kernels.mosaic import DeviceSpec
from pallas_kernels.mosaic.aliases import Ref, Scalar
from pallas_kernels.mosaic.pipeline import drain, hand_over, launch, next_slot
from pallas_kernels.tile_sparse_matmul.config import GradConfig, Problem
from pallas_kernels.tile_sparse_matmul.format import STEP, TileSparse
from pallas_kernels.tile_sparse_matmul.gather import gather_rows, load_rows
from pallas_kernels.tile_sparse_matmul.mosaic_gpu import check_problem
from pallas_kernels.tile_sparse_matmul.ring import (
    GatherRing,
    check_tiles,
    multiply_steps,
    run_warpgroups,
    two_producers,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Cut:
    """A problem cut by a config; the tokens are padded to whole steps."""

    problem: Problem
    config: GradConfig

    @property
    def row_clusters(self) -> int:
        """Clusters of blocks that cover the rows of a tile."""
        return pl.cdiv(self.problem.room, self.config.block_rows * self.config.cluster)

    @property
    def rows(self) -> int:
        """Rows of a tile that blocks cover, past its room too."""
        return self.row_clusters * self.config.block_rows * self.config.cluster

    @functools.cached_property
    def tiles(self) -> Tiles:
        p, c = self.problem, self.config
        return Tiles(
            problem=MatmulProblem(
                m=self.rows,
                n=p.tile,
                k=p.m,
                dtype=p.dtype,
                out_dtype=p.dtype,
                rhs_transposed=p.y_major,
            ),
            config=MatmulConfig(
                tile_m=c.block_rows,
                tile_n=p.tile,
                tile_k=STEP,
                stages=c.stages,
                split="m" if c.block_rows >= 64 * CONSUMERS else "n",
                cluster="m" if c.cluster > 1 else "none",
                store_slots=1,
            ),
        )


def _for_each_block(cut: _Cut) -> Callable[..., Any]:
    """Loop over this block's share: ``body(tile, first row, carry) -> carry``."""
    config = cut.config

    def for_each(body: Callable[..., Any], carry: Any) -> Any:
        worker, workers = lax.axis_index("worker"), lax.axis_size("worker")
        rank = lax.axis_index("cluster") if config.cluster > 1 else 0
        total = cut.row_clusters * cut.problem.tiles
        mine = lax.div(total - 1 - worker + workers, jnp.int32(workers))

        def block(i: jax.Array, carry: Any) -> Any:
            index = i * workers + worker
            tile = lax.div(index, jnp.int32(cut.row_clusters))
            cluster = lax.rem(index, jnp.int32(cut.row_clusters))
            row = (cluster * config.cluster + rank) * config.block_rows
            return body(tile, row, carry)

        return lax.fori_loop(0, mine, block, carry)

    return for_each


def _steps(cut: _Cut, counts: Ref, tile: Scalar, row: Scalar) -> Scalar:
    """Steps of a block: none where the tile keeps no row of the whole cluster."""
    span = cut.config.block_rows * cut.config.cluster
    first = lax.div(row, jnp.int32(span)) * span
    return jnp.where(first < counts[tile], cut.problem.m // STEP, 0)


def _load(
    cut: _Cut, refs: Mapping[str, Ref], scratch: Mapping[str, Ref], for_each: Any
) -> None:
    """Copies the tiles of dy."""
    config, problem = cut.config, cut.problem
    axes = ("cluster",) if config.cluster > 1 else None

    def load_block(tile: Scalar, row: Scalar, slot: Scalar) -> Scalar:
        features = pl.ds(pl.multiple_of(tile * problem.tile, 64), problem.tile)

        def step(k: jax.Array, slot: jax.Array) -> jax.Array:
            tokens = pl.ds(pl.multiple_of(k * STEP, STEP), STEP)
            place = (features, tokens) if problem.y_major else (tokens, features)
            plgpu.barrier_wait(scratch["empty"].at[slot])
            plgpu.copy_gmem_to_smem(
                refs["dy"].at[place],
                scratch["w_smem"].at[slot],
                scratch["full"].at[slot],
                collective_axes=axes,
            )
            return next_slot(slot, config.stages)

        return lax.fori_loop(0, _steps(cut, refs["counts"], tile, row), step, slot)

    drain(scratch, for_each(load_block, jnp.int32(0)), config.stages)


def _gather(
    cut: _Cut, refs: Mapping[str, Ref], scratch: Mapping[str, Ref], for_each: Any
) -> None:
    """Gathers rows of x."""
    config = cut.config
    ring = GatherRing(scratch, config.stages, config.lag)

    def gather_block(tile: Scalar, row: Scalar, state: Any) -> Any:
        rows = pl.ds(pl.multiple_of(row, 64), config.block_rows)
        indices = load_rows(refs["rows"].at[tile, rows], config.block_rows)

        def step(k: jax.Array, carry: Any) -> Any:
            slot, flying = carry
            ring.acquire(slot)
            gather_rows(
                refs["x"],
                indices,
                k * STEP,
                scratch["x_smem"].at[slot],
                count=config.block_rows,
                width=STEP,
                masked=False,
            )
            return ring.commit(slot, flying)

        return lax.fori_loop(0, _steps(cut, refs["counts"], tile, row), step, state)

    ring.finish(*for_each(gather_block, (jnp.int32(0), jnp.int32(0))))


def _consume(
    cut: _Cut,
    refs: Mapping[str, Ref],
    scratch: Mapping[str, Ref],
    for_each: Any,
    consumer: Scalar,
) -> None:
    """A consumer: its half of the rows; those that are not kept become zero."""
    hand_over(scratch, cut.config.stages)
    height, width = cut.tiles.config.block

    def block(tile: Scalar, row: Scalar, slot: Scalar) -> Scalar:
        steps = _steps(cut, refs["counts"], tile, row)
        sums, slot = multiply_steps(cut.tiles, scratch, consumer, 0, steps, slot)
        by_rows = cut.tiles.config.split == "m"
        start = row + consumer * height if by_rows else row
        left = 0 if by_rows else consumer * width
        number = plgpu.broadcasted_iota(
            jnp.int32, sums.shape, 0, layout=plgpu.Layout.WGMMA
        )
        sums = jnp.where(number + start < refs["counts"][tile], sums, 0.0)

        def view(chunk: int) -> Ref:
            columns = cut.tiles.store_columns
            columns = pl.ds(left + chunk * columns, columns)
            return refs["out"].at[tile, pl.ds(start, height), columns]

        store_tile(cut.tiles, sums, scratch, consumer, view)
        return slot

    for_each(block, jnp.int32(0))
    plgpu.wait_smem_to_gmem(0)


def grad_values(
    x: jax.Array,
    dy: jax.Array,
    w: TileSparse,
    *,
    feature_major: tuple[bool, bool],
    config: GradConfig,
    device: DeviceSpec,
) -> jax.Array:
    """The gradient of the values on a Hopper GPU, with fp32 sums.

    Args:
        x: [M,K] activations, or [K,M].
        dy: [M,C] gradient of the packed output, or [C,M]; of the type of x.
        w: weight.
        feature_major: how x and dy are stored.
        config: how to cut it.
        device: the GPU that the kernel is built for.

    Returns:
        [T,P,G] of the type of x, zero past the counts.

    Raises:
        Unsupported: types, tile or shared memory do not fit.
    """
    x_major, y_major = feature_major
    check_problem(Problem.of(x, w, feature_major))
    x = x if x_major else x.T  # [K,M]: a kept row must be one run of memory
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % STEP)))
    tokens = ((0, x.shape[1] - dy.shape[1 if y_major else 0]),)
    # Stored columns of dy fill whole tiles of the layout, stored rows groups of 8.
    features = ((0, -w.packed_columns % (8 if y_major else STEP)),)
    dy = jnp.pad(dy, features + tokens if y_major else tokens + features)
    cut = _Cut(problem=Problem.of(x, w, (True, y_major)), config=config)
    check_tiles(cut.tiles, device, config)
    if not two_producers(cut.tiles):
        raise Unsupported(
            f"tile_sparse_matmul: blocks of {config.block_rows} rows, {w.tile} columns"
            " leave no registers for the producers; use smaller block_rows"
        )
    rows = jnp.pad(w.rows, ((0, 0), (0, cut.rows - w.room)), mode="edge")
    inputs = {"x": x, "dy": dy, "rows": rows, "counts": w.counts}
    names = [*inputs, "out"]

    def body(*args: Ref, **scratch: Ref) -> None:
        refs = dict(zip(names, args, strict=True))
        for_each = _for_each_block(cut)
        run_warpgroups(
            lambda consumer: _consume(cut, refs, scratch, for_each, consumer),
            {
                "load": lambda: _load(cut, refs, scratch, for_each),
                "gather": lambda: _gather(cut, refs, scratch, for_each),
            },
        )

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(w.values.shape, cut.problem.dtype),
        scratch_types=cut.tiles.scratch_types(),
        kernel_name="tile_sparse_grad_values",
        **launch(
            cut.row_clusters * w.tiles,
            device,
            "tile_sparse_matmul",
            warpgroups=CONSUMERS + 2,
            cluster=config.cluster,
        ),
    )(*inputs.values())
