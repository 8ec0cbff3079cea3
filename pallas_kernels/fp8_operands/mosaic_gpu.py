"""Hopper kernels that round operands to 8 bits and transpose them.

Memory is all that limits them. `quantize_rows` has whole rows in registers: it needs
the largest number of a row before it can round the first. Each warpgroup reads rows
straight into registers, 16 bytes a lane at a time, and writes them; what it has seen of
each column it keeps until its last row.

The others go by tiles. A lane holds 16 rows of 4 columns, of which each
four rows are one transposition of 4 x 4 bytes, and writes 16 bytes of each column.

Axis letters: M rows, K columns.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector

from pallas_kernels.dispatch import Unsupported
from pallas_kernels.fp8_operands.scales import BLOCK, inverse_bits, scale_bits
from pallas_kernels.matmul.activations import KERNEL_ACTIVATIONS
from pallas_kernels.mosaic import DeviceSpec, smem_transforms
from pallas_kernels.mosaic.aliases import Ref


MOST_COLUMNS = 16_384
"""Most columns of a row: 128 numbers a lane, and as many maxima of columns."""

TILE = 128
"""Rows and columns of a tile that is transposed."""

_PART = TILE // 2
"""Columns that are in registers at a time: 64 numbers a lane."""

_LANES = 128
"""Lanes of a warpgroup."""

_WIDEST_OF_THREE = 4096
"""Columns up to which registers let three blocks of a multiprocessor run at a time; of
wider rows two."""

_AT_A_TIME = 2048
"""Numbers of a row that are computed at a time where not all must be, 16 a lane."""

_WIDE = ("bfloat16", "float16", "float32")


# --- Rows -----------------------------------------------------------------------------


def quantize_rows(
    x: jax.Array,
    dtype: DTypeLike,
    *,
    through: jnp.dtype,
    device: DeviceSpec,
    blocks: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Rounds rows by their own scales on a Hopper GPU.

    Args:
        x: [M,K]; K a multiple of 128, at most `MOST_COLUMNS`.
        dtype: float8_e4m3fn or float8_e5m2.
        through: bfloat16 or float16, to which x is rounded first.
        device: the GPU that the kernel is built for.
        blocks: a scale for each `BLOCK` numbers of a row.

    Returns:
        [M,K] of `dtype`; scales [M]; the largest magnitude of each column [K]. With
        `blocks`, scales [M,K/128] and None.

    Raises:
        Unsupported: types or shape do not fit.
    """
    _check_rows(x, through)
    return _round("quantize_rows", lambda x: x, [x], dtype, through, device, blocks)


def quantize_rms_norm(
    x: jax.Array,
    weight: jax.Array,
    *,
    dtype: DTypeLike,
    eps: float,
    device: DeviceSpec,
    blocks: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """`quantize_rows` of normalized rows.

    Args:
        x: [M,K], bfloat16 or float16; K at most half of `MOST_COLUMNS`.
        weight: [K], fp32.
        dtype: float8_e4m3fn or float8_e5m2.
        eps: added to the mean square.
        device: the GPU that the kernel is built for.
        blocks: as of `quantize_rows`.

    Raises:
        Unsupported: types or shape do not fit.
    """
    _check_rows(x, x.dtype)
    if x.shape[1] > MOST_COLUMNS // 2:
        raise Unsupported(
            f"quantize_rms_norm: rows of {x.shape[1]}, the kernel takes at most"
            f" {MOST_COLUMNS // 2}; use implementation='xla'"
        )

    def normalized(x: jax.Array, weight: jax.Array) -> jax.Array:
        x = x.astype(jnp.float32)
        mean = jnp.sum(jnp.sum(x * x, int(blocks))) / x.size
        return x * lax.broadcast(lax.rsqrt(mean + eps), x.shape) * weight

    return _round(
        "quantize_rms_norm", normalized, [x], dtype, x.dtype, device, blocks, [weight]
    )


def quantize_gated(
    gate: jax.Array,
    up: jax.Array,
    *,
    dtype: DTypeLike,
    activation: str,
    device: DeviceSpec,
    blocks: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """`quantize_rows` of ``activation(gate) * up``.

    Args:
        gate: [M,K], bfloat16 or float16.
        up: [M,K], of the same type.
        dtype: float8_e4m3fn or float8_e5m2.
        activation: a name in `pallas_kernels.matmul.ACTIVATIONS`.
        device: the GPU that the kernel is built for.
        blocks: as of `quantize_rows`.

    Raises:
        Unsupported: types or shape do not fit.
    """
    _check_rows(gate, gate.dtype)
    activate = KERNEL_ACTIVATIONS[activation]

    def gated(gate: jax.Array, up: jax.Array) -> jax.Array:
        return activate(gate.astype(jnp.float32)) * up.astype(jnp.float32)

    operands, through = [gate, up], gate.dtype
    return _round("quantize_gated", gated, operands, dtype, through, device, blocks)


def quantize_gated_gradients(
    gate: jax.Array,
    up: jax.Array,
    g: jax.Array,
    *,
    dtype: DTypeLike,
    activation: str,
    device: DeviceSpec,
    blocks: bool = False,
) -> tuple[jax.Array, ...]:
    """Gradients of ``activation(gate) * up``, with one scale for a row of both.

    A row of both gradients is more than the registers hold beside the largest of each
    column: each lane writes what it computes to shared memory, and reads it again when
    the scale is known.

    Args:
        gate: [M,K], bfloat16 or float16.
        up: [M,K], of the same type.
        g: [M,K], of the same type; the gradient of the product.
        dtype: float8_e4m3fn or float8_e5m2.
        activation: a name in `pallas_kernels.matmul.ACTIVATIONS`.
        device: the GPU that the kernel is built for.
        blocks: scales of blocks of each.

    Returns:
        [M,K] of `dtype` twice; scales [M]; the largest magnitudes of columns [K] twice.
        With `blocks`, scales [M,K/128] twice instead.

    Raises:
        Unsupported: types or shape do not fit.
    """
    _check_rows(gate, gate.dtype)
    if activation != "silu":
        raise Unsupported(
            f"quantize_gated_gradients: activation {activation!r}, the kernel takes"
            " 'silu'; use implementation='xla'"
        )
    (m, k), through = gate.shape, gate.dtype

    def gradients(z: jax.Array, u: jax.Array, d: jax.Array) -> list[jax.Array]:
        z, u, d = (x.astype(jnp.float32) for x in (z, u, d))
        sigmoid = jax.nn.sigmoid(z)
        slope = sigmoid * (1 + z * (1 - sigmoid))
        return [x.astype(through) for x in (d * u * slope, d * z * sigmoid)]

    if blocks:
        name, operands = "quantize_gated_gradients", [gate, up, g]
        return _round_blocks(
            name, gradients, operands, dtype, through, device, results=2
        )
    width, layout = _row_layout(k, through)
    lines = k // width
    turns = pl.cdiv(m, 2 * device.num_sms)
    count = pl.cdiv(m, turns)
    parts = _parts(lines, width)

    def body(*refs: Ref, held: Ref) -> None:
        *in_refs, scale_ref, data_refs, largest_refs = (
            *refs[:3],
            refs[5],
            refs[3:5],
            refs[6:],
        )
        block = lax.axis_index("block")

        def turn(i: Any, largest: Any) -> Any:
            row = jnp.minimum(i * count + block, m - 1)
            seen: list[Any] = []
            most: dict[int, Any] = {}  # of parts of each size
            for part, before in zip(parts, largest, strict=True):
                z, u, d = (
                    plgpu.load(ref.at[row, part], layout=layout, optimized=False)
                    for ref in in_refs
                )
                found = gradients(z, u, d)
                for j, x in enumerate(found):
                    held[j, part] = x
                sizes = [jnp.abs(x) for x in found]
                seen.append([*map(jnp.maximum, before, sizes)])
                both = jnp.maximum(*sizes)
                other = most.get(part.size)
                most[part.size] = both if other is None else jnp.maximum(other, both)
            row_of = [jnp.max(x, 0) for x in most.values()]  # [width] each
            bits = _bits(functools.reduce(jnp.maximum, row_of).astype(jnp.float32))
            scale = scale_bits(jnp.max(bits), dtype)
            for part in parts:
                inverse = lax.broadcast(inverse_bits(scale), (part.size, width))
                for j, data_ref in enumerate(data_refs):
                    x = plgpu.load(held.at[j, part], layout=layout, optimized=False)
                    wide = x.astype(jnp.float32) * _number(inverse)
                    data_ref[row, part] = wide.astype(dtype)
            scale_ref[row] = scale
            return seen

        nothing = [
            [plgpu.layout_cast(jnp.zeros((part.size, width), through), layout)] * 2
            for part in parts
        ]
        largest = lax.fori_loop(0, turns, turn, nothing)
        for part, each in zip(parts, largest, strict=True):
            for ref, x in zip(largest_refs, each, strict=True):
                ref[block, part] = x

    data = jax.ShapeDtypeStruct((m, lines, width), dtype)
    largest = jax.ShapeDtypeStruct((count, lines, width), through)
    *both, scale, first, second = plgpu.kernel(
        body,
        out_type=(
            data,
            data,
            jax.ShapeDtypeStruct((m,), jnp.int32),
            largest,
            largest,
        ),
        scratch_types={"held": plgpu.SMEM((2, lines, width), through)},
        grid=(count,),
        grid_names=("block",),
        kernel_name="quantize_gated_gradients",
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )(*(x.reshape(m, lines, width) for x in (gate, up, g)))
    data = [x.reshape(m, k) for x in both]
    return *data, _number(scale), _over_blocks(first), _over_blocks(second)


def _round(
    name: str,
    value: Callable[..., jax.Array],
    operands: Sequence[jax.Array],
    dtype: DTypeLike,
    through: jnp.dtype,
    device: DeviceSpec,
    blocks: bool,
    vectors: Sequence[jax.Array] = (),
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """`_round_rows`, or `_round_blocks`."""
    if not blocks:
        return _round_rows(name, value, operands, dtype, through, device, vectors)
    data, scale = _round_blocks(
        name, lambda *rows: [value(*rows)], operands, dtype, through, device, vectors
    )
    return data, scale, None


def _round_rows(
    name: str,
    value: Callable[..., jax.Array],
    operands: Sequence[jax.Array],
    dtype: DTypeLike,
    through: jnp.dtype,
    device: DeviceSpec,
    vectors: Sequence[jax.Array] = (),
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rounds what a function makes of each row; see `quantize_rows`.

    Args:
        name: of the kernel.
        value: of a row of each operand, and of `vectors`, in registers.
        operands: [M,K] each, of one type.
        dtype: of the result.
        through: to which the values are rounded first.
        device: the GPU that the kernel is built for.
        vectors: [K] each.
    """
    m, k = operands[0].shape
    width, layout = _row_layout(k, operands[0].dtype)
    held = k * (2 * len(operands) - 1 + len(vectors))  # in registers
    rows = min(m, max(1, MOST_COLUMNS // held))
    while rows > 1 and pl.cdiv(m, rows // 2) <= device.num_sms:
        rows //= 2  # few rows are shared by all multiprocessors
    few = k * len(operands) <= _WIDEST_OF_THREE
    at_a_time = (3 if few else 2) * device.num_sms
    turns = pl.cdiv(pl.cdiv(m, rows), at_a_time)
    blocks = pl.cdiv(pl.cdiv(m, rows), turns)
    shape = (k // width, width)

    def body(*refs: Ref) -> None:
        *in_refs, data_ref, scale_ref, largest_ref = refs
        row_refs, vector_refs = in_refs[: len(operands)], in_refs[len(operands) :]
        block = lax.axis_index("block")

        def read(ref: Ref) -> jax.Array:
            return plgpu.load(ref, layout=layout, optimized=False)

        def turn(i: Any, largest: Any) -> Any:
            # The last rows are a whole group too; what two blocks write is the same.
            start = jnp.minimum((i * blocks + block) * rows, m - rows)
            loaded = [
                [read(ref.at[start + row]) for ref in row_refs] for row in range(rows)
            ]
            given = [read(ref) for ref in vector_refs]
            for j, each in enumerate(loaded):
                row = start + j
                x = value(*each, *given).astype(through)
                size = jnp.abs(x)
                most = _bits(jnp.max(size, 0).astype(jnp.float32))  # [width]
                scale = scale_bits(jnp.max(most), dtype)
                inverse = lax.broadcast(inverse_bits(scale), shape)
                wide = x.astype(jnp.float32) * _number(inverse)
                data_ref[row] = wide.astype(dtype)
                scale_ref[row] = scale
                largest = jnp.maximum(largest, size)
            return largest

        nothing = plgpu.layout_cast(jnp.zeros(shape, through), layout)
        largest_ref[block] = lax.fori_loop(0, turns, turn, nothing)

    data, scale, largest = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((m, *shape), dtype),
            jax.ShapeDtypeStruct((m,), jnp.int32),
            jax.ShapeDtypeStruct((blocks, *shape), through),
        ),
        grid=(blocks,),
        grid_names=("block",),
        kernel_name=name,
        # No array is both read and written.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )(
        *(x.reshape(m, *shape) for x in operands),
        *(x.reshape(shape) for x in vectors),
    )
    return data.reshape(m, k), _number(scale), _over_blocks(largest)


_BLOCKS = {
    8: plgpu.Layout.TILED(
        plgpu.Tiling(((8, BLOCK), (2, BLOCK), (8,))),
        warp_dims=(-5,),
        lane_dims=(-3, -2),
        vector_dim=-1,
    ),
    4: plgpu.Layout.TILED(
        plgpu.Tiling(((4, BLOCK), (4,))),
        warp_dims=(-3,),
        lane_dims=(-2,),
        vector_dim=-1,
    ),
}
"""Of blocks, by the numbers that a lane reads at a time."""


def _round_blocks(
    name: str,
    value: Callable[..., Sequence[jax.Array]],
    operands: Sequence[jax.Array],
    dtype: DTypeLike,
    through: jnp.dtype,
    device: DeviceSpec,
    vectors: Sequence[jax.Array] = (),
    results: int = 1,
) -> tuple[jax.Array, ...]:
    """Rounds what a function makes of each row, `BLOCK` numbers by a scale of theirs.

    Args:
        name: of the kernel.
        value: of a row of each operand, and of `vectors`, in registers.
        operands: [M,K] each, of one type.
        dtype: of the results.
        through: to which the values are rounded first.
        device: the GPU that the kernel is built for.
        vectors: [K] each.
        results: how many rows `value` makes.

    Returns:
        [M,K] of `dtype` for each result; [M,K/128], their scales.

    Raises:
        Unsupported: types or shape do not fit.
    """
    for x in operands:
        _check_rows(x, through)
    m, k = operands[0].shape
    piece = math.gcd(16 // operands[0].dtype.itemsize, k // _LANES)
    if piece < 4:
        raise Unsupported(
            f"{name}: rows of {k}, the kernel takes multiples of {4 * BLOCK}, in blocks"
            f" of {BLOCK}; use implementation='xla'"
        )
    # A warp has `piece / 4` blocks of each line, of which a lane has `piece` numbers.
    layout = _BLOCKS[piece]
    lines = k // (piece * BLOCK)
    if not vectors:  # nothing needs a whole row
        most = max(1, _AT_A_TIME // (piece * BLOCK))
        lines = max(n for n in range(1, most + 1) if lines % n == 0)
    shape = (lines * piece, BLOCK)
    m = m * k // math.prod(shape)
    held = math.prod(shape) * (len(operands) + len(vectors) + results)  # in registers
    rows = min(m, max(1, MOST_COLUMNS // held))
    turns = pl.cdiv(pl.cdiv(m, rows), 3 * device.num_sms)
    blocks = pl.cdiv(pl.cdiv(m, rows), turns)

    def body(*refs: Ref) -> None:
        in_refs, out_refs = refs[: -2 * results], refs[-2 * results :]
        row_refs, vector_refs = in_refs[: len(operands)], in_refs[len(operands) :]
        block = lax.axis_index("block")

        def read(ref: Ref) -> jax.Array:
            return plgpu.load(ref, layout=layout, optimized=False)

        def turn(i: Any, _: None) -> None:
            # The last rows are a whole group too; what two blocks write is the same.
            start = jnp.minimum((i * blocks + block) * rows, m - rows)
            loaded = [
                [read(ref.at[start + row]) for ref in row_refs] for row in range(rows)
            ]
            given = [read(ref) for ref in vector_refs]
            for j, each in enumerate(loaded):
                for number, x in enumerate(value(*each, *given)):
                    x = x.astype(through)
                    most = jnp.max(jnp.abs(x), 1)  # of each block
                    scale = scale_bits(_bits(most.astype(jnp.float32)), dtype)
                    inverse = _number(inverse_bits(scale))
                    inverse = lax.broadcast_in_dim(inverse, shape, (0,))
                    wide = x.astype(jnp.float32) * plgpu.layout_cast(inverse, layout)
                    out_refs[number][start + j] = wide.astype(dtype)
                    out_refs[results + number][start + j] = scale

        lax.fori_loop(0, turns, turn, None)

    found = plgpu.kernel(
        body,
        out_type=(
            *[jax.ShapeDtypeStruct((m, *shape), dtype)] * results,
            *[jax.ShapeDtypeStruct((m, shape[0]), jnp.int32)] * results,
        ),
        grid=(blocks,),
        grid_names=("block",),
        kernel_name=name,
        # No array is both read and written.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )(
        *(x.reshape(m, *shape) for x in operands),
        *(x.reshape(shape) for x in vectors),
    )
    data = (x.reshape(-1, k) for x in found[:results])
    return *data, *(_number(x).reshape(-1, k // BLOCK) for x in found[results:])


def _over_blocks(largest: jax.Array) -> jax.Array:
    """[K], fp32: the largest of what each block has seen."""
    # By bits, which order as magnitudes do: a maximum of numbers may skip NaN.
    return _number(jnp.max(_bits(largest.astype(jnp.float32)), axis=0)).reshape(-1)


def _bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.int32)


def _number(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits, jnp.float32)


def _row_layout(k: int, dtype: jnp.dtype) -> tuple[int, Any]:
    """Columns that a warpgroup reads at a time, up to 16 bytes a lane; their layout."""
    piece = math.gcd(16 // dtype.itemsize, k // _LANES)
    if k == _LANES * piece:  # of one line jax cannot infer the layout of the maximum
        piece //= 2
    width = _LANES * piece
    tiling = plgpu.Tiling(((1, width), (width // 4,), (piece,)))
    layout = plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)
    return width, layout


def _parts(lines: int, width: int) -> list[Any]:
    """The lines of a row that are computed at a time: about `_AT_A_TIME` numbers."""
    size = max(2, _AT_A_TIME // width)
    ends = [*range(size, lines - 1, size), lines]  # no line is alone: see `_row_layout`
    return [
        pl.ds(start, end - start) for start, end in zip([0, *ends], ends, strict=False)
    ]


def _check_rows(x: jax.Array, through: jnp.dtype) -> None:
    (m, k), dtype = x.shape, x.dtype
    if dtype.name not in _WIDE or through.name not in _WIDE[:2]:
        raise Unsupported(
            f"quantize_rows: x of type {dtype.name} rounded to {through.name}, the"
            f" kernel takes {_WIDE} rounded to {_WIDE[:2]}; use implementation='xla'"
        )
    if k % _LANES or not _LANES < k <= MOST_COLUMNS or m == 0:
        raise Unsupported(
            f"quantize_rows: {m} rows of {k}, the kernel takes rows of multiples of"
            f" {_LANES} from {2 * _LANES} to {MOST_COLUMNS}; use implementation='xla'"
        )


# --- Tiles ----------------------------------------------------------------------------


def transpose_rows(
    data: jax.Array, scale: jax.Array, largest: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Rounds ``data * scale`` again, by scales of its columns, and transposes it.

    Args:
        data: [M,K], both multiples of `TILE`; float8_e4m3fn or float8_e5m2.
        scale: [M], fp32.
        largest: [K], fp32: the largest magnitude of each column.

    Returns:
        [K,M] of the type of `data`; scales [K].

    Raises:
        Unsupported: types or shape do not fit.
    """
    dtype = data.dtype
    _check_tiles(data, dtype)
    most = float(jnp.finfo(dtype).max)

    def body(x_ref: Ref, scale_ref: Ref, largest_ref: Ref, *outs: Ref, **scratch: Ref):
        out_ref, column_scale_ref = outs
        row, column = _start_tile(x_ref, scratch)
        rows = _each(scale_ref, row, TILE, axis=1)
        plgpu.barrier_wait(scratch["full"])
        for start in range(0, TILE, _PART):
            wide = _part(scratch["x"], start).astype(jnp.float32) * _repeated(rows, 1)
            columns = _each(largest_ref, column + start, _PART, axis=0)
            columns = scale_bits(columns, dtype)
            wide *= _repeated(_number(inverse_bits(columns)), 0)
            wide = jnp.minimum(jnp.maximum(wide, -most), most)
            scratch["out"][pl.ds(start, _PART)] = _transpose(wide.astype(dtype))

            @pl.when(row == 0)
            def _(columns=columns, start=start):
                column_scale_ref[pl.ds(column + start, _PART)] = columns

        plgpu.commit_smem()
        _store_tile(scratch["out"], out_ref, column, row)
        plgpu.wait_smem_to_gmem(0)

    turned, bits = _over_tiles(
        body,
        (data, scale, _bits(largest)),
        dtype,
        [jax.ShapeDtypeStruct(data.shape[1:], jnp.int32)],
    )
    return turned, _number(bits)


def transpose_blocks(data: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rounds ``data * scale`` again, by scales of blocks of columns, and transposes it.

    Args:
        data: [M,K], both multiples of `TILE`; float8_e4m3fn or float8_e5m2.
        scale: [M,K/128], fp32.

    Returns:
        [K,M] of the type of `data`; scales [K,M/128].

    Raises:
        Unsupported: types or shape do not fit.
    """
    dtype = data.dtype
    _check_tiles(data, dtype)

    def body(x_ref: Ref, scale_ref: Ref, *outs: Ref, **scratch: Ref) -> None:
        out_ref, column_scale_ref = outs
        row, column = _start_tile(x_ref, scratch)
        of_rows = scale_ref.at[lax.axis_index("k")]
        rows = _each(of_rows, row, TILE, axis=1)
        plgpu.barrier_wait(scratch["full"])
        for start in range(0, TILE, _PART):
            wide = _part(scratch["x"], start).astype(jnp.float32) * _repeated(rows, 1)
            columns = scale_bits(_bits(jnp.max(jnp.abs(wide), 0)), dtype)
            wide *= _repeated(_number(inverse_bits(columns)), 0)
            scratch["out"][pl.ds(start, _PART)] = _transpose(wide.astype(dtype))
            there = pl.ds(column + start, _PART)
            column_scale_ref[lax.axis_index("m"), there] = columns
        plgpu.commit_smem()
        _store_tile(scratch["out"], out_ref, column, row)
        plgpu.wait_smem_to_gmem(0)

    m, k = data.shape
    turned, bits = _over_tiles(
        body,
        (data, scale.T),
        dtype,
        [jax.ShapeDtypeStruct((m // TILE, k), jnp.int32)],
    )
    return turned, _number(bits).T


def quantize_squares(
    x: jax.Array, dtype: DTypeLike, *, through: jnp.dtype
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rounds tiles by their own scales, and writes them in both layouts.

    Args:
        x: [M,K], both multiples of `TILE`; bfloat16, float16 or float32.
        dtype: float8_e4m3fn or float8_e5m2.
        through: type to which x is rounded first.

    Returns:
        [M,K] and [K,M] of `dtype`; scales [M/128,K/128].

    Raises:
        Unsupported: types or shape do not fit.
    """
    _check_tiles(x, *map(jnp.dtype, _WIDE))

    def body(x_ref: Ref, *outs: Ref, **scratch: Ref) -> None:
        turned_ref, rows_ref, scale_ref = outs
        row, column = _start_tile(x_ref, scratch)
        plgpu.barrier_wait(scratch["full"])

        def part(start: int) -> jax.Array:
            return _part(scratch["x"], start).astype(through)

        parts = range(0, TILE, _PART)
        sizes = (jnp.abs(part(start)).astype(jnp.float32) for start in parts)
        most = _bits(jnp.max(functools.reduce(jnp.maximum, sizes), 0))
        scale = scale_bits(jnp.max(most), dtype)
        scale_ref[lax.axis_index("m"), lax.axis_index("k")] = scale
        inverse = _number(lax.broadcast(inverse_bits(scale), (TILE, _PART)))
        for start in parts:
            data = (part(start).astype(jnp.float32) * inverse).astype(dtype)
            scratch["rows"][:, pl.ds(start, _PART)] = data
            scratch["out"][pl.ds(start, _PART)] = _transpose(data)
        plgpu.commit_smem()
        _store_tile(scratch["rows"], rows_ref, row, column)
        _store_tile(scratch["out"], turned_ref, column, row)
        plgpu.wait_smem_to_gmem(0)

    turned, rows, bits = _over_tiles(
        body,
        (x,),
        dtype,
        [
            jax.ShapeDtypeStruct(x.shape, dtype),
            jax.ShapeDtypeStruct(tuple(n // TILE for n in x.shape), jnp.int32),
        ],
        rows=plgpu.SMEM((TILE, TILE), dtype),
    )
    return rows, turned, _number(bits)


def transpose(data: jax.Array, order: Sequence[int] = range(16)) -> jax.Array:
    """Transposes a matrix of bytes.

    Args:
        data: [M,K], both multiples of `TILE`; float8_e4m3fn or float8_e5m2.
        order: which row of each 16 rows comes first, second and so on.

    Returns:
        [K,M] of the type of `data`.

    Raises:
        Unsupported: types or shape do not fit.
    """
    _check_tiles(data, data.dtype)

    def body(x_ref: Ref, out_ref: Ref, **scratch: Ref) -> None:
        row, column = _start_tile(x_ref, scratch)
        plgpu.barrier_wait(scratch["full"])
        for start in range(0, TILE, _PART):
            part = _part(scratch["x"], start)
            scratch["out"][pl.ds(start, _PART)] = _transpose(part, order)
        plgpu.commit_smem()
        _store_tile(scratch["out"], out_ref, column, row)
        plgpu.wait_smem_to_gmem(0)

    (turned,) = _over_tiles(body, (data,), data.dtype)
    return turned


def quantize_and_transpose(
    x: jax.Array, inverse: jax.Array, dtype: DTypeLike, *, through: jnp.dtype
) -> tuple[jax.Array, jax.Array]:
    """Rounds ``x * inverse`` and writes it in both layouts.

    Args:
        x: [M,K], both multiples of `TILE`; bfloat16, float16 or float32.
        inverse: [], fp32.
        dtype: float8_e4m3fn or float8_e5m2.
        through: type to which x is rounded first.

    Returns:
        [M,K] and [K,M] of `dtype`.

    Raises:
        Unsupported: types or shape do not fit.
    """
    _check_tiles(x, *map(jnp.dtype, _WIDE))

    def body(x_ref: Ref, inverse_ref: Ref, *outs: Ref, **scratch: Ref) -> None:
        turned_ref, rows_ref = outs
        row, column = _start_tile(x_ref, scratch)
        plgpu.barrier_wait(scratch["full"])
        for start in range(0, TILE, _PART):
            wide = _part(scratch["x"], start).astype(through).astype(jnp.float32)
            data = (wide * inverse_ref[0]).astype(dtype)
            scratch["rows"][:, pl.ds(start, _PART)] = data
            scratch["out"][pl.ds(start, _PART)] = _transpose(data)
        plgpu.commit_smem()
        _store_tile(scratch["rows"], rows_ref, row, column)
        _store_tile(scratch["out"], turned_ref, column, row)
        plgpu.wait_smem_to_gmem(0)

    rows = jax.ShapeDtypeStruct(x.shape, dtype)
    turned, rows = _over_tiles(
        body,
        (x, inverse.reshape(1)),
        dtype,
        [rows],
        rows=plgpu.SMEM((TILE, TILE), dtype),
    )
    return rows, turned


def _over_tiles(
    body: Callable[..., None],
    operands: Sequence[jax.Array],
    dtype: DTypeLike,
    more: Sequence[jax.ShapeDtypeStruct] = (),
    **scratch: Any,
) -> Sequence[jax.Array]:
    """Runs a kernel for each tile of the first operand, whose transpose comes first."""
    m, k = operands[0].shape
    tile = (TILE, TILE)
    return plgpu.kernel(
        body,
        out_type=(jax.ShapeDtypeStruct((k, m), dtype), *more),
        scratch_types={
            "x": plgpu.SMEM(tile, operands[0].dtype),
            "out": plgpu.SMEM(tile, dtype, transforms=smem_transforms(TILE, dtype)),
            "full": plgpu.Barrier(),
            **scratch,
        },
        grid=(m // TILE, k // TILE),
        grid_names=("m", "k"),
        kernel_name=body.__qualname__.partition(".")[0],
    )(*operands)


def _start_tile(x_ref: Ref, scratch: Mapping[str, Ref]) -> tuple[Any, Any]:
    """Starts to load the tile of this block; returns its first row and column."""
    row, column = (lax.axis_index(name) * TILE for name in ("m", "k"))
    tile = x_ref.at[pl.ds(row, TILE), pl.ds(column, TILE)]
    plgpu.copy_gmem_to_smem(tile, scratch["x"], scratch["full"])
    return row, column


def _store_tile(smem: Ref, ref: Ref, row: Any, column: Any) -> None:
    there = ref.at[pl.ds(row, TILE), pl.ds(column, TILE)]
    plgpu.copy_smem_to_gmem(smem, there)


def _part(tile: Ref, start: int) -> jax.Array:
    return plgpu.load(tile.at[:, pl.ds(start, _PART)], layout=_ROWS, optimized=False)


_ROWS = plgpu.Layout.TILED(
    plgpu.Tiling(((TILE, _PART), (64, 32), (16, 4))),
    warp_dims=(-6, -5),
    lane_dims=(-3, -4),
    vector_dim=-1,
)
"""Of a part of a tile: a lane has 16 rows of 4 columns."""

_COLUMNS = plgpu.Layout.TILED(
    plgpu.Tiling(((_PART, TILE), (32, 64), (4, 16))),
    warp_dims=(-5, -6),
    lane_dims=(-4, -3),
    vector_dim=-1,
)
"""Of the transposed part: the same lane has 4 rows of 16 columns."""


def _each(ref: Ref, start: Any, size: int, *, axis: int) -> jax.Array:
    """What a part of a tile has one of for each row or column, not along `axis`."""
    part = ref.at[pl.ds(start, size)]
    return plgpu.load(part, layout=_ROWS.reduce(axis), optimized=False)


def _repeated(x: jax.Array, axis: int) -> jax.Array:
    """The same along `axis` of a part of a tile."""
    whole = lax.broadcast_in_dim(x, (TILE, _PART), (1 - axis,))
    return plgpu.layout_cast(whole, _ROWS)


def _transpose(data: jax.Array, order: Sequence[int] = range(16)) -> jax.Array:
    """The transposed part of a tile; each lane keeps its numbers.

    Args:
        data: 8-bit [TILE, _PART].
        order: of each 16 rows, which a lane has.

    Returns:
        [_PART, TILE].
    """

    @plgpu.inline_mgpu(
        arg_types=(_ROWS,),
        return_type=plgpu.ShapeDtypeStruct(data.shape[::-1], data.dtype, _COLUMNS),
    )
    def transpose_bytes(ctx: Any, data: mgpu.FragmentedArray) -> Any:
        del ctx
        return _transpose_registers(data, order)

    transpose: Any = transpose_bytes  # the decorator supplies the context
    return transpose(data)


def _transpose_registers(data: mgpu.FragmentedArray, order: Sequence[int]) -> Any:
    """Emits the transpositions of one lane: 16 words of 4 columns, 4 of 16 bytes."""
    i32, layout = ir.IntegerType.get_signless(32), _COLUMNS.to_mgpu()
    words = [mgpu.utils.bitcast(register, i32) for register in data.registers.flat]
    words = [words[i] for i in order]
    columns: list[list[ir.Value]] = [[] for _ in range(4)]
    for i in range(0, len(words), 4):
        # Two rows are interleaved, and then two pairs of rows.
        low, high = (
            [_permute(words[i + j], words[i + j + 1], digits) for j in (0, 2)]
            for digits in (0x5140, 0x7362)
        )
        for j, (pairs, digits) in enumerate(
            ((low, 0x5410), (low, 0x7632), (high, 0x5410), (high, 0x7632))
        ):
            columns[j].append(_permute(pairs[0], pairs[1], digits))
    shape = (data.shape[1], data.shape[0])
    registers = np.empty(layout.registers_shape(shape), object)
    kind = ir.VectorType.get((4 * len(columns[0]),), data.mlir_dtype)
    for at, column in zip(np.ndindex(registers.shape), columns, strict=True):
        four = ir.VectorType.get((len(column),), i32)
        registers[at] = vector.bitcast(kind, vector.from_elements(four, column))
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)


def _permute(low: ir.Value, high: ir.Value, order: int) -> ir.Value:
    """Four of the eight bytes of two words, the first by the lowest digit."""
    i32 = ir.IntegerType.get_signless(32)
    return llvm.inline_asm(i32, [low, high], f"prmt.b32 $0, $1, $2, {order};", "=r,r,r")


def _check_tiles(x: jax.Array, *known: jnp.dtype) -> None:
    if x.dtype not in known:
        raise Unsupported(
            f"transpose_rows: an operand of type {x.dtype.name}, the kernel takes"
            f" {[one.name for one in known]}; use implementation='xla'"
        )
    if x.size == 0 or any(size % TILE for size in x.shape):
        raise Unsupported(
            f"transpose_rows: an operand of shape {x.shape}, the kernel takes multiples"
            f" of {TILE}; use implementation='xla'"
        )
