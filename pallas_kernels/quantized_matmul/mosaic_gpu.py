"""Hopper kernel of the matmul with a quantized weight.

The tensor cores take one operand from registers, the left one. So the weight stands on
the left, ``w x^T``: it reaches shared memory as it is stored, a byte a number, each
warpgroup widens its 64 output features in registers and multiplies them by the tokens
that lie in shared memory. No wide copy of the weight exists anywhere, for a token as
for a prompt.

One more warpgroup streams tiles of both operands into a ring of stages. The grid is
persistent: while a tile is stored, the ring already fills for the next one. A few
tokens are bound by memory: what counts is how many bytes are on their way, that four
warpgroups share the conversions, and in which pieces rows are read. So the warpgroups
of few tokens share 64 features, each has input features of its own, and the first adds
their sums. Where output tiles do not fill the multiprocessors, several blocks compute
parts of the sums; XLA adds them, in fp32 and in their order.

The sums of a tile are ``[features, tokens]``; they are turned on their way to shared
memory, so that the output is token-major.

Axis letters: M tokens, K input features, N output features.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_kernels.dispatch import Unsupported
from pallas_kernels.mosaic import DeviceSpec, check_smem, smem_bytes, smem_transforms
from pallas_kernels.mosaic.aliases import Ref, Scalar
from pallas_kernels.mosaic.pipeline import (
    drain,
    hand_over,
    launch,
    next_slot,
    run_roles,
)
from pallas_kernels.quantized_matmul.config import (
    REGISTERS,
    ROWS,
    Problem,
    QuantizedMatmulConfig,
)
from pallas_kernels.quantized_matmul.widen import (
    in_order_of_pairs,
    load_words,
    widen_words,
)


_TILE_ROWS, _LINE = 8, 64
"""Rows and columns of a tile of the layouts in shared memory."""


def check_problem(problem: Problem) -> None:
    """Checks that the kernel can serve a problem.

    Raises:
        Unsupported: it cannot; the message says what to do.
    """
    p = problem
    reasons = {
        f"x of type {p.dtype.name}, the kernel takes bfloat16": p.dtype == jnp.bfloat16,
        f"out_dtype {p.out_dtype.name}, the kernel writes bfloat16 or float32": (
            p.out_dtype in (jnp.bfloat16, jnp.float32)
        ),
        f"an empty product of m={p.m} n={p.n} k={p.k}": 0 not in (p.m, p.n, p.k),
        f"k={p.k}, the kernel needs a multiple of {_LINE}": p.k % _LINE == 0,
        f"n={p.n}, the kernel needs a multiple of {_TILE_ROWS}": p.n % _TILE_ROWS == 0,
    }
    for reason, fits in reasons.items():
        if not fits:
            raise Unsupported(f"quantized_matmul: {reason}; use implementation='xla'")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Cut:
    """A problem cut by a config."""

    problem: Problem
    """With M a multiple of 8, or less than 8."""
    config: QuantizedMatmulConfig
    device: DeviceSpec

    @property
    def tile_k(self) -> int:
        return min(self.config.tile_k, self.problem.k)

    @property
    def stage_k(self) -> int:
        """Input features of one stage of the ring."""
        return self.tile_k * self.config.depth

    @property
    def steps(self) -> int:
        return pl.cdiv(self.problem.k, self.stage_k)

    @property
    def splits(self) -> int:
        return min(self.config.splits, self.steps)

    @property
    def tiles(self) -> tuple[int, int]:
        """Output tiles along n and m."""
        p, c = self.problem, self.config
        return pl.cdiv(p.n, c.tile_n), pl.cdiv(p.m, c.tile_tokens)

    @property
    def items(self) -> int:
        """Parts of output tiles, each computed by one block."""
        return self.tiles[0] * self.tiles[1] * self.splits

    @property
    def workers(self) -> int:
        return min(self.device.num_sms, self.items)

    @property
    def scales(self) -> bool:
        """Whether the kernel multiplies by the scales: it has the whole sums, and
        whole groups of features, whose scales it can read.
        """
        return self.splits == 1 and self.problem.n % ROWS == 0

    @property
    def out_dtype(self) -> Any:
        return self.problem.out_dtype if self.scales else jnp.dtype(jnp.float32)

    @property
    def out_shape(self) -> tuple[int, int, int]:
        """[splits,M,N], whole tiles of the layout along N."""
        return self.splits, self.problem.m, pl.cdiv(self.problem.n, ROWS) * ROWS

    @property
    def store_tokens(self) -> int:
        """Tokens that are stored at a time."""
        return min(self.config.tile_tokens, 128 // self.out_dtype.itemsize)

    @property
    def shared_sums(self) -> tuple[int, int, int]:
        """Sums of the warpgroups that hand them to the first of their group."""
        c = self.config
        return c.warpgroups - c.groups, ROWS, c.tile_tokens

    @property
    def stages(self) -> int:
        """Stages of the ring."""
        stores = smem_bytes(
            (self.config.groups, self.store_tokens, ROWS), self.out_dtype
        ) + smem_bytes(self.shared_sums, jnp.float32)
        most = (self.device.smem_bytes - stores - 2048) // self.problem.stage_bytes(
            self.config
        )
        wanted = self.config.stages or max(2, most)
        check_smem(
            stores + 2048 + wanted * self.problem.stage_bytes(self.config),
            self.device,
            f"quantized_matmul with {self.config}",
        )
        return wanted

    def scratch_types(self) -> dict[str, Any]:
        """Scratch of one block: the ring, its barriers and the store buffers."""
        p, c, stages = self.problem, self.config, self.stages
        # The widest line of the layout that divides the rows of the weight.
        line = 128 if p.k % 128 == 0 and self.tile_k % 128 == 0 else 64
        shared = {}
        if c.depth > 1:
            shared = {
                "sums_smem": plgpu.SMEM(self.shared_sums, jnp.float32),
                "sums_full": plgpu.Barrier(
                    num_arrivals=c.depth - 1, num_barriers=c.groups
                ),
                "sums_read": plgpu.Barrier(num_barriers=c.groups),
            }
        return {
            # Of each part of a stage's input features all rows, then of the next.
            "w_smem": plgpu.SMEM(
                (stages, c.depth * c.tile_n, self.tile_k),
                p.weight_dtype,
                transforms=smem_transforms(line, p.weight_dtype),
            ),
            "x_smem": plgpu.SMEM(
                (stages, c.depth * c.tile_tokens, self.tile_k),
                p.dtype,
                transforms=smem_transforms(_LINE, p.dtype),
            ),
            "out_smem": plgpu.SMEM((c.groups, self.store_tokens, ROWS), self.out_dtype),
            "full": plgpu.Barrier(num_arrivals=2 * c.depth, num_barriers=stages),
            "empty": plgpu.Barrier(num_arrivals=c.warpgroups, num_barriers=stages),
            **shared,
        }


@dataclasses.dataclass(frozen=True)
class _Item:
    """A part of the sums of an output tile: which tile, which part, which steps."""

    n: Scalar
    m: Scalar
    split: Scalar
    first: Scalar
    last: Scalar
    """Not included."""


def _for_each_item(cut: _Cut, body: Any, carry: Any) -> Any:
    """Loops over the items of this block: ``body(item, carry) -> carry``.

    Those of one tile of the weight follow one another, and share it in the L2 cache.
    """
    worker, workers = lax.axis_index("worker"), jnp.int32(cut.workers)
    splits, columns = jnp.int32(cut.splits), jnp.int32(cut.tiles[1])

    def item(i: jax.Array, carry: Any) -> Any:
        index = i * workers + worker
        tile, split = lax.div(index, splits), lax.rem(index, splits)
        first, last = (lax.div(part * cut.steps, splits) for part in (split, split + 1))
        n, m = lax.div(tile, columns), lax.rem(tile, columns)
        return body(_Item(n, m, split, first, last), carry)

    mine = lax.div(cut.items - 1 - worker + workers, workers)
    return lax.fori_loop(0, mine, item, carry)


def _part(cut: _Cut, stage: Ref, part: Scalar) -> Ref:
    """The rows of a stage that belong to a part of its input features."""
    if cut.config.depth == 1:
        return stage
    rows = stage.shape[0] // cut.config.depth
    return stage.at[pl.ds(part * rows, rows)]


def _load(cut: _Cut, x: Ref, w: Ref, scratch: Mapping[str, Ref]) -> None:
    """Producer: streams the operands of all items into the ring."""
    config, stages = cut.config, cut.stages
    full, empty = scratch["full"], scratch["empty"]

    def load(item: _Item, slot: Scalar) -> Scalar:
        features = pl.ds(item.n * config.tile_n, config.tile_n)
        tokens = pl.ds(item.m * config.tile_tokens, config.tile_tokens)

        def step(k: jax.Array, slot: jax.Array) -> jax.Array:
            first = k * cut.stage_k
            plgpu.barrier_wait(empty.at[slot])
            # Pieces of a row of the weight one after the other: memory likes that.
            for source, rows, target in (
                (w, features, scratch["w_smem"]),
                (x, tokens, scratch["x_smem"]),
            ):
                for part in range(config.depth):
                    begin = first + part * cut.tile_k if part else first
                    plgpu.copy_gmem_to_smem(
                        source.at[rows, pl.ds(begin, cut.tile_k)],
                        _part(cut, target.at[slot], part),
                        full.at[slot],
                    )
            return next_slot(slot, stages)

        return lax.fori_loop(item.first, item.last, step, slot)

    drain(scratch, _for_each_item(cut, load, jnp.int32(0)), stages)


def _multiply(
    cut: _Cut, item: _Item, scratch: Mapping[str, Ref], number: Scalar, slot: Scalar
) -> tuple[jax.Array, Scalar]:
    """Consumer: the sums of its features, fp32 [64, tokens], and the next stage.

    Where several share features, these are the sums of its part of the inputs.
    """
    features = pl.ds(number * ROWS, ROWS)
    groups = cut.config.groups
    part = lax.div(number, jnp.int32(groups)) if cut.config.depth > 1 else 0

    def scoped(acc: Ref) -> tuple[jax.Array, Scalar]:
        def step(_: jax.Array, slot: jax.Array) -> jax.Array:
            plgpu.barrier_wait(scratch["full"].at[slot])
            weight = widen_words(load_words(scratch["w_smem"].at[slot, features]))
            tokens = _part(cut, scratch["x_smem"].at[slot], part)
            plgpu.wgmma(acc, weight, tokens.transpose((1, 0)))  # [k, tokens]
            # The other warpgroups widen or multiply meanwhile.
            plgpu.wgmma_wait(0)
            plgpu.commit_smem()  # the copy engine may write what registers have read
            plgpu.barrier_arrive(scratch["empty"].at[slot])
            return next_slot(slot, cut.stages)

        slot_after = lax.fori_loop(item.first, item.last, step, slot)
        return acc[...], slot_after

    shape = ROWS, cut.config.tile_tokens
    return pl.run_scoped(scoped, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))


def _add(
    cut: _Cut, sums: jax.Array, scratch: Mapping[str, Ref], number: Scalar
) -> jax.Array:
    """Consumer: the first of a group adds the sums of the others, in their order."""
    config, shared = cut.config, scratch["sums_smem"]
    group = lax.rem(number, jnp.int32(config.groups))
    full, read = (scratch[name].at[group] for name in ("sums_full", "sums_read"))

    def take(sums: jax.Array) -> jax.Array:
        plgpu.barrier_wait(full)
        for part in range(config.depth - 1):
            other = shared.at[part * config.groups + group]
            sums += plgpu.load(other, layout=plgpu.Layout.WGMMA, optimized=False)
        plgpu.barrier_arrive(read)
        return sums

    def give(sums: jax.Array) -> jax.Array:
        shared[number - config.groups] = sums
        plgpu.commit_smem()
        plgpu.barrier_arrive(full)
        plgpu.barrier_wait(read)  # which the next sums would overwrite
        return sums

    return lax.cond(number < config.groups, take, give, sums)


def _store(
    cut: _Cut,
    item: _Item,
    scale: Ref,
    out: Ref,
    scratch: Mapping[str, Ref],
    sums: jax.Array,
    number: Scalar,
) -> None:
    """Consumer: stores its sums, some tokens at a time."""
    config, (rows, columns) = cut.config, cut.out_shape[1:]
    feature = item.n * config.tile_n + number * ROWS
    if cut.scales:
        factors = plgpu.load(
            # Those of features past the end are not stored.
            scale.at[pl.ds(jnp.minimum(feature, columns - ROWS), ROWS)],
            layout=plgpu.Layout.WGMMA.reduce(1),
            optimized=False,
        )
        sums = sums * lax.broadcast_in_dim(factors, sums.shape, (0,))
    width = cut.store_tokens
    buffer = scratch["out_smem"].at[number]
    for chunk in range(config.tile_tokens // width):
        values = sums[:, chunk * width : (chunk + 1) * width].astype(cut.out_dtype)
        token = item.m * config.tile_tokens + chunk * width

        @pl.when((feature < columns) & (token < rows))
        def _(values: jax.Array = values, token: Scalar = token) -> None:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            buffer.transpose((1, 0))[...] = plgpu.layout_cast(
                values, plgpu.Layout.WGMMA_TRANSPOSED
            )
            plgpu.commit_smem()
            view = out.at[item.split, pl.ds(token, width), pl.ds(feature, ROWS)]
            plgpu.copy_smem_to_gmem(buffer, view)


def _call(cut: _Cut, x: jax.Array, w: jax.Array, scale: jax.Array) -> jax.Array:
    """The kernel: [splits,M,N]."""
    warpgroups = cut.config.warpgroups

    def body(x: Ref, w: Ref, scale: Ref, out: Ref, **scratch: Ref) -> None:
        def producer() -> None:
            _load(cut, x, w, scratch)

        def consumer(number: Scalar) -> None:
            hand_over(scratch, cut.stages)

            def item(item: _Item, slot: Scalar) -> Scalar:
                sums, slot = _multiply(cut, item, scratch, number, slot)
                store = functools.partial(_store, cut, item, scale, out, scratch)
                if cut.config.depth == 1:
                    store(sums, number)
                else:
                    sums = _add(cut, sums, scratch, number)
                    pl.when(number < cut.config.groups)(lambda: store(sums, number))
                return slot

            _for_each_item(cut, item, jnp.int32(0))
            plgpu.wait_smem_to_gmem(0)

        registers = REGISTERS[warpgroups]
        run_roles(producer, consumer, consumers=warpgroups, registers=registers)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(cut.out_shape, cut.out_dtype),
        scratch_types=cut.scratch_types(),
        kernel_name="quantized_matmul",
        **launch(cut.items, cut.device, "quantized_matmul", warpgroups=warpgroups + 1),
    )(x, w, scale)


# The layers of a model are traced and lowered once.
@functools.partial(jax.jit, static_argnames=("config", "device", "out_dtype"))
def quantized_matmul(
    x: jax.Array,
    w: jax.Array,
    scale: jax.Array,
    *,
    config: QuantizedMatmulConfig,
    device: DeviceSpec,
    out_dtype: DTypeLike,
) -> jax.Array:
    """Computes ``(x @ w.T) * scale`` on a Hopper GPU with fp32 sums.

    Args:
        x: [M,K] bfloat16; any number of tokens; more than 8 are padded to a multiple.
        w: [N,K], int8 or float8_e4m3fn.
        scale: [N], fp32.
        config: how to cut it.
        device: the Hopper GPU that the kernel is built for.
        out_dtype: bfloat16 or float32.

    Returns:
        [M,N] of `out_dtype`.

    Raises:
        Unsupported: types, sizes or shared memory do not fit.
    """
    tokens = x.shape[0]
    check_problem(Problem.of(x, w, out_dtype))
    if tokens > _TILE_ROWS:  # the copy engine fills one tile of rows that do not exist
        x = jnp.pad(x, ((0, -tokens % _TILE_ROWS), (0, 0)))
    x = in_order_of_pairs(x)  # by XLA, which computes most x, as it stores them
    cut = _Cut(problem=Problem.of(x, w, out_dtype), config=config, device=device)
    parts = _call(cut, x, w, scale)[:, :tokens, : len(scale)]
    if cut.scales:
        return parts[0]
    return (jnp.sum(parts, axis=0) * scale).astype(out_dtype)
