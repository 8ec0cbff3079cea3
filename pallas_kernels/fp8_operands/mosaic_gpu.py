"""Hopper kernels that round operands to 8 bits and transpose them.

Memory is all that limits them. Two walks share it out, `_round` by rows and
`_over_tiles` by tiles; each public function gives one of them what is done with what a
warpgroup holds. They take what the functions of the same names in `api` take, those by
rows also `device`, the GPU that a kernel is built for; all raise `Unsupported` where
types or shapes do not fit.

Each warpgroup reads rows straight into registers, 16 bytes a lane at a time, and writes
them. With one scale a row it holds whole rows: it needs the largest number of a row
before it can round the first. What it has seen of each column it keeps until its last
row.

Of a tile a lane holds 16 rows of 4 columns, of which each four rows are one
transposition of 4 x 4 bytes, and writes 16 bytes of each column.

Axis letters: M rows, K columns.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

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
from pallas_kernels.fp8_operands.scales import (
    BLOCK,
    inverse_bits,
    inverse_scale,
    scale_bits,
)
from pallas_kernels.matmul.activations import KERNEL_ACTIVATIONS
from pallas_kernels.mosaic import DeviceSpec, largest_divisor, smem_transforms
from pallas_kernels.mosaic.aliases import Ref, Scalar


MOST_COLUMNS = 16_384
"""Most columns of a row: 128 numbers a lane, and as many maxima of columns."""

TILE = 128
"""Rows and columns of a tile that is transposed."""

_PART = TILE // 2
"""Columns that are in registers at a time: 64 numbers a lane."""

_PARTS = range(0, TILE, _PART)
"""First columns of the parts of a tile."""

_LANES = 128
"""Lanes of a warpgroup."""

_WIDEST_OF_THREE = 4096
"""Columns up to which registers let three blocks of a multiprocessor run at a time; of
wider rows two."""

_AT_A_TIME = 2048
"""Numbers of a row that are computed at a time where not all must be, 16 a lane."""

_WIDE = ("bfloat16", "float16", "float32")

type Rounded = tuple[jax.Array, jax.Array, jax.Array | None]
"""[M,K] in 8 bits; scales [M]; the largest magnitude of each column [K], or None. By
blocks scales [M,K/128] and None."""


# --- Rows -----------------------------------------------------------------------------


def quantize_rows(
    x: jax.Array,
    *,
    dtype: DTypeLike,
    through: jnp.dtype,
    blocks: bool,
    columns: bool,
    device: DeviceSpec,
) -> Rounded:
    """Rounds rows by their own scales, or by those of each `BLOCK` numbers of them.

    K is a multiple of 128, with `blocks` of 512, and at most `MOST_COLUMNS`.
    """
    name, itself = "quantize_rows", lambda x: [x]
    options: Any = {"columns": columns}
    return _round(name, itself, [x], dtype, through, blocks, device, **options)[0]


def quantize_rms_norm(
    x: jax.Array,
    weight: jax.Array,
    *,
    dtype: DTypeLike,
    through: jnp.dtype,
    eps: float,
    blocks: bool,
    columns: bool,
    device: DeviceSpec,
) -> Rounded:
    """`quantize_rows` of normalized rows; K is at most half of `MOST_COLUMNS`."""
    name = "quantize_rms_norm"
    if x.shape[1] > MOST_COLUMNS // 2:
        raise Unsupported(
            f"{name}: rows of {x.shape[1]}, the kernel takes at most"
            f" {MOST_COLUMNS // 2}; use implementation='xla'"
        )

    def normalized(x: jax.Array, weight: jax.Array) -> list[jax.Array]:
        x = x.astype(jnp.float32)
        mean = jnp.sum(jnp.sum(x * x, int(blocks))) / x.size
        factors = weight.astype(jnp.float32)
        return [x * lax.broadcast(lax.rsqrt(mean + eps), x.shape) * factors]

    options: Any = {"vectors": [weight], "columns": columns}
    return _round(name, normalized, [x], dtype, through, blocks, device, **options)[0]


def quantize_gated(
    *sides: jax.Array,
    dtype: DTypeLike,
    through: jnp.dtype,
    activation: str,
    blocks: bool,
    columns: bool,
    device: DeviceSpec,
) -> Rounded:
    """`quantize_rows` of ``activation(gate) * up``, both [M,K] of one 16-bit type, or
    one array with both side by side.
    """
    name, activate = "quantize_gated", KERNEL_ACTIVATIONS[activation]

    def gated(gate: jax.Array, up: jax.Array) -> list[jax.Array]:
        return [activate(gate.astype(jnp.float32)) * up.astype(jnp.float32)]

    joined = 2 // len(sides)
    options: Any = {"joined": joined, "columns": columns}
    return _round(name, gated, sides, dtype, through, blocks, device, **options)[0]


def quantize_gated_gradients(
    gate: jax.Array,
    up: jax.Array,
    g: jax.Array,
    *,
    dtype: DTypeLike,
    through: jnp.dtype,
    activation: str,
    blocks: bool,
    device: DeviceSpec,
) -> Sequence[Rounded]:
    """Gradients of ``activation(gate) * up``, with one scale for a row of both.

    All are [M,K] of one 16-bit type. Blocks of each gradient have scales of their own.
    """
    name = "quantize_gated_gradients"
    if activation != "silu":
        raise Unsupported(
            f"{name}: activation {activation!r}, the kernel takes 'silu'; use"
            " implementation='xla'"
        )

    def gradients(z: jax.Array, u: jax.Array, d: jax.Array) -> list[jax.Array]:
        z, u, d = (x.astype(jnp.float32) for x in (z, u, d))
        sigmoid = jax.nn.sigmoid(z)
        slope = sigmoid * (1 + z * (1 - sigmoid))
        return [x.astype(through) for x in (d * u * slope, d * z * sigmoid)]

    operands = [gate, up, g]
    if not blocks:
        return _round_pairs(name, gradients, operands, dtype, through, device)
    return _round(name, gradients, operands, dtype, through, blocks, device, results=2)


def _round(
    name: str,
    value: Callable[..., Sequence[jax.Array]],
    operands: Sequence[jax.Array],
    dtype: DTypeLike,
    through: jnp.dtype,
    blocks: bool,
    device: DeviceSpec,
    vectors: Sequence[jax.Array] = (),
    results: int = 1,
    joined: int = 1,
    columns: bool = True,
) -> Sequence[Rounded]:
    """Rounds what a function makes of each row.

    Args:
        name: of the kernel.
        value: of a row of each operand, and of `vectors`, in registers.
        operands: [M,K] each, of one type.
        dtype: of the results.
        through: to which the values are rounded first.
        blocks: whether each `BLOCK` numbers have a scale of their own.
        device: the GPU that the kernel is built for.
        vectors: [K] each.
        results: how many rows `value` makes.
        joined: how many operands each array holds side by side, [M,`joined` K].
        columns: whether the largest of each column is found; never by blocks.

    Raises:
        Unsupported: types or shape do not fit.
    """
    k, kind = operands[0].shape[1] // joined, operands[0].dtype
    _check_rows(len(operands[0]), k, kind, through)
    if blocks:  # nothing but a vector needs a whole row
        shape, layout = _layout_of_blocks(name, k, kind, whole=bool(vectors))
    else:
        shape, layout = _layout_of_rows(k, kind)
    m = operands[0].size // math.prod(shape) // joined
    num = len(operands) * joined
    held = num + len(vectors) + (results if blocks else num - 1)
    rows = min(m, max(1, MOST_COLUMNS // (math.prod(shape) * held)))
    while not blocks and rows > 1 and pl.cdiv(m, rows // 2) <= device.num_sms:
        rows //= 2  # few rows are shared by all multiprocessors
    at_a_time = 3 if blocks or k * num <= _WIDEST_OF_THREE else 2
    turns = pl.cdiv(pl.cdiv(m, rows), at_a_time * device.num_sms)
    count = pl.cdiv(pl.cdiv(m, rows), turns)
    outputs = results, results, results if columns and not blocks else 0
    # Rows of the operands in an array, of which each row holds one of all.
    sides: list[Any] = [lambda row: row]
    if joined > 1:
        sides = [lambda row, side=side: row * joined + side for side in range(joined)]

    def body(*refs: Ref) -> None:
        row_refs, vector_refs, data_refs, scale_refs, largest_refs = _split(
            refs, len(operands), len(vectors), *outputs
        )
        block = lax.axis_index("block")

        def read(ref: Ref) -> jax.Array:
            return plgpu.load(ref, layout=layout, optimized=False)

        def round_row(start: Scalar, j: int, held: Any, largest: Any) -> Any:
            row = start + j
            x = value(*held)[0].astype(through)
            size = jnp.abs(x)
            most = _bits(jnp.max(size, 0).astype(jnp.float32))  # [width]
            scale = scale_bits(jnp.max(most), dtype)
            inverse = lax.broadcast(inverse_bits(scale), shape)
            wide = x.astype(jnp.float32) * _number(inverse)
            data_refs[0][row] = wide.astype(dtype)
            scale_refs[0][row] = scale
            return [jnp.maximum(each, size) for each in largest]

        def round_blocks(start: Scalar, j: int, held: Any, largest: Any) -> Any:
            for x, data, scales in zip(
                value(*held), data_refs, scale_refs, strict=True
            ):
                x = x.astype(through)
                most = jnp.max(jnp.abs(x), 1)  # of each block
                scale = scale_bits(_bits(most.astype(jnp.float32)), dtype)
                inverse = _number(inverse_bits(scale))
                inverse = lax.broadcast_in_dim(inverse, shape, (0,))
                wide = x.astype(jnp.float32) * plgpu.layout_cast(inverse, layout)
                data[start + j] = wide.astype(dtype)
                scales[start + j] = scale
            return largest

        def turn(i: Scalar, largest: Any) -> Any:
            # The last rows are a whole group too; what two blocks write is the same.
            start = jnp.minimum((i * count + block) * rows, m - rows)
            loaded = [
                [read(ref.at[at(start + row)]) for ref in row_refs for at in sides]
                for row in range(rows)
            ]
            given = [read(ref) for ref in vector_refs]
            for j, each in enumerate(loaded):
                round_one = round_blocks if blocks else round_row
                largest = round_one(start, j, [*each, *given], largest)
            return largest

        nothing = [
            plgpu.layout_cast(jnp.zeros(shape, through), layout) for _ in largest_refs
        ]
        largest = lax.fori_loop(0, turns, turn, nothing)
        for ref, x in zip(largest_refs, largest, strict=True):
            ref[block] = x

    found = _launch(
        body,
        name,
        count,
        [x.reshape(-1, *shape) for x in operands] + [x.reshape(shape) for x in vectors],
        [jax.ShapeDtypeStruct((m, *shape), dtype)] * results
        + [jax.ShapeDtypeStruct((m, *shape[: int(blocks)]), jnp.int32)] * results
        + [jax.ShapeDtypeStruct((count, *shape), through)] * outputs[-1],
    )
    data, scales, largest = _split(found, *outputs)
    data, scales = [x.reshape(-1, k) for x in data], [*map(_number, scales)]
    if blocks:
        scales = [x.reshape(-1, k // BLOCK) for x in scales]
    if not largest:
        return [(*each, None) for each in zip(data, scales, strict=True)]
    return [*zip(data, scales, map(_over_blocks, largest), strict=True)]


def _round_pairs(
    name: str,
    value: Callable[..., Sequence[jax.Array]],
    operands: Sequence[jax.Array],
    dtype: DTypeLike,
    through: jnp.dtype,
    device: DeviceSpec,
) -> Sequence[Rounded]:
    """`_round` of two rows with one scale.

    They are more than the registers hold beside the largest of each column: each lane
    writes what it computes to shared memory, and reads it again when the scale is
    known. Arguments are those of `_round`.
    """
    m, k = operands[0].shape
    _check_rows(m, k, operands[0].dtype, through)
    shape, layout = _layout_of_rows(k, through)
    lines, width = shape
    turns = pl.cdiv(m, 2 * device.num_sms)
    count = pl.cdiv(m, turns)
    parts = _parts(lines, width)
    outputs = 2, 1, 2

    def body(*refs: Ref, held: Ref) -> None:
        row_refs, data_refs, (scale_ref,), largest_refs = _split(
            refs, len(operands), *outputs
        )
        block = lax.axis_index("block")

        def read(ref: Ref) -> jax.Array:
            return plgpu.load(ref, layout=layout, optimized=False)

        def turn(i: Scalar, largest: Any) -> Any:
            row = jnp.minimum(i * count + block, m - 1)
            seen: list[Any] = []
            most: dict[int, Any] = {}  # of parts of each size
            for part, before in zip(parts, largest, strict=True):
                found = value(*(read(ref.at[row, part]) for ref in row_refs))
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
                for j, data in enumerate(data_refs):
                    wide = read(held.at[j, part]).astype(jnp.float32) * _number(inverse)
                    data[row, part] = wide.astype(dtype)
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

    found = _launch(
        body,
        name,
        count,
        [x.reshape(m, *shape) for x in operands],
        [jax.ShapeDtypeStruct((m, *shape), dtype)] * 2
        + [jax.ShapeDtypeStruct((m,), jnp.int32)]
        + [jax.ShapeDtypeStruct((count, *shape), through)] * 2,
        held=plgpu.SMEM((2, *shape), through),
    )
    data, (scale,), largest = _split(found, *outputs)
    return [
        (x.reshape(m, k), _number(scale), _over_blocks(most))
        for x, most in zip(data, largest, strict=True)
    ]


def _launch(
    body: Callable[..., None],
    name: str,
    count: int,
    operands: Sequence[jax.Array],
    outputs: Sequence[jax.ShapeDtypeStruct],
    **scratch: Any,
) -> Sequence[jax.Array]:
    """Runs a kernel by rows in `count` blocks."""
    return plgpu.kernel(
        body,
        out_type=outputs,
        scratch_types=scratch,
        grid=(count,),
        grid_names=("block",),
        kernel_name=name,
        # No array is both read and written.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )(*operands)


def _split(found: Iterable[Any], *sizes: int) -> list[list[Any]]:
    """The first of some, the next of them and so on."""
    rest = iter(found)
    return [list(itertools.islice(rest, size)) for size in sizes]


def _over_blocks(largest: jax.Array) -> jax.Array:
    """[K], fp32: the largest of what each block has seen."""
    # By bits, which order as magnitudes do: a maximum of numbers may skip NaN.
    return _number(jnp.max(_bits(largest.astype(jnp.float32)), axis=0)).reshape(-1)


def _bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.int32)


def _number(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits, jnp.float32)


def _piece(k: int, dtype: jnp.dtype) -> int:
    """Numbers that a lane reads at a time, up to 16 bytes."""
    return math.gcd(16 // dtype.itemsize, k // _LANES)


def _layout_of_rows(k: int, dtype: jnp.dtype) -> tuple[tuple[int, int], Any]:
    """A row in lines, of what a warpgroup reads at a time, and how it holds them."""
    piece = _piece(k, dtype)
    if k == _LANES * piece:  # of one line jax cannot infer the layout of the maximum
        piece //= 2
    width = _LANES * piece
    tiling = plgpu.Tiling(((1, width), (width // 4,), (piece,)))
    layout = plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)
    return (k // width, width), layout


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


def _layout_of_blocks(
    name: str, k: int, dtype: jnp.dtype, *, whole: bool
) -> tuple[tuple[int, int], Any]:
    """A whole row, or a part of one, in blocks, and how a warpgroup holds them."""
    piece = _piece(k, dtype)
    if piece < 4:
        raise Unsupported(
            f"{name}: rows of {k}, the kernel takes multiples of {4 * BLOCK}, in blocks"
            f" of {BLOCK}; use implementation='xla'"
        )
    # A warp has `piece / 4` blocks of each line, of which a lane has `piece` numbers.
    lines = k // (piece * BLOCK)
    if not whole:
        lines = largest_divisor(lines, _AT_A_TIME // (piece * BLOCK))
    return (lines * piece, BLOCK), _BLOCKS[piece]


def _parts(lines: int, width: int) -> list[Any]:
    """The lines of a row that are computed at a time: about `_AT_A_TIME` numbers."""
    size = max(2, _AT_A_TIME // width)
    # No line is alone: see `_layout_of_rows`.
    ends = [0, *range(size, lines - 1, size), lines]
    return [pl.ds(start, end - start) for start, end in itertools.pairwise(ends)]


def _check_rows(m: int, k: int, dtype: jnp.dtype, through: jnp.dtype) -> None:
    if dtype.name not in _WIDE or through.name not in _WIDE[:2]:
        raise Unsupported(
            f"fp8_operands: x of type {dtype.name} rounded to {through.name}, the"
            f" kernel takes {_WIDE} rounded to {_WIDE[:2]}; use implementation='xla'"
        )
    if k % _LANES or not _LANES < k <= MOST_COLUMNS or m == 0:
        raise Unsupported(
            f"fp8_operands: {m} rows of {k}, the kernel takes rows of multiples of"
            f" {_LANES} from {2 * _LANES} to {MOST_COLUMNS}; use implementation='xla'"
        )


# --- Tiles ----------------------------------------------------------------------------


def transpose_rows(
    data: jax.Array, scale: jax.Array, largest: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Rounds ``data * scale`` again, by scales of its columns, and transposes it."""
    dtype = data.dtype
    most = float(jnp.finfo(dtype).max)

    def body(tile: _Tile, scale_ref: Ref, largest_ref: Ref, column_scale_ref: Ref):
        rows = _each(scale_ref, tile.row, TILE, axis=1)
        tile.wait()
        for start in _PARTS:
            wide = tile.read(start).astype(jnp.float32) * _repeated(rows, 1)
            columns = _each(largest_ref, tile.column + start, _PART, axis=0)
            columns = scale_bits(columns, dtype)
            wide *= _repeated(_number(inverse_bits(columns)), 0)
            wide = jnp.minimum(jnp.maximum(wide, -most), most)
            tile.write(start, wide.astype(dtype))

            @pl.when(tile.row == 0)
            def _(columns=columns, start=start):
                column_scale_ref[pl.ds(tile.column + start, _PART)] = columns

    column_scale = jax.ShapeDtypeStruct(data.shape[1:], jnp.int32)
    operands = data, scale, _bits(largest)
    turned, bits = _over_tiles(body, operands, dtype, column_scale)
    return turned, _number(bits)


def transpose_blocks(data: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rounds ``data * scale`` again, by scales of blocks of columns, and transposes it.

    M and K are multiples of `TILE`.
    """
    (m, k), dtype = data.shape, data.dtype

    def body(tile: _Tile, scale_ref: Ref, column_scale_ref: Ref) -> None:
        rows = _each(scale_ref.at[lax.axis_index("k")], tile.row, TILE, axis=1)
        tile.wait()
        for start in _PARTS:
            wide = tile.read(start).astype(jnp.float32) * _repeated(rows, 1)
            columns = scale_bits(_bits(jnp.max(jnp.abs(wide), 0)), dtype)
            wide *= _repeated(_number(inverse_bits(columns)), 0)
            tile.write(start, wide.astype(dtype))
            there = pl.ds(tile.column + start, _PART)
            column_scale_ref[lax.axis_index("m"), there] = columns

    column_scale = jax.ShapeDtypeStruct((m // TILE, k), jnp.int32)
    operands = data, scale.T
    turned, bits = _over_tiles(body, operands, dtype, column_scale)
    return turned, _number(bits).T


def quantize_squares(
    x: jax.Array, *, dtype: DTypeLike, through: jnp.dtype
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rounds tiles by their own scales, and writes them in both layouts."""

    def body(tile: _Tile, scale_ref: Ref) -> None:
        tile.wait()

        def part(start: int) -> jax.Array:
            return tile.read(start).astype(through)

        sizes = (jnp.abs(part(start)).astype(jnp.float32) for start in _PARTS)
        most = _bits(jnp.max(functools.reduce(jnp.maximum, sizes), 0))
        scale = scale_bits(jnp.max(most), dtype)
        scale_ref[lax.axis_index("m"), lax.axis_index("k")] = scale
        inverse = _number(lax.broadcast(inverse_bits(scale), (TILE, _PART)))
        for start in _PARTS:
            data = (part(start).astype(jnp.float32) * inverse).astype(dtype)
            tile.write(start, data)

    scale = jax.ShapeDtypeStruct(tuple(n // TILE for n in x.shape), jnp.int32)
    turned, rows, bits = _over_tiles(body, (x,), dtype, scale, both=True)
    return rows, turned, _number(bits)


def transpose(data: jax.Array, order: Sequence[int] = range(16)) -> jax.Array:
    """Transposes a matrix of bytes.

    Args:
        data: [M,K], both multiples of `TILE`; float8_e4m3fn or float8_e5m2.
        order: which row of each 16 rows comes first, second and so on.

    Returns:
        [K,M] of the type of `data`.
    """

    def body(tile: _Tile) -> None:
        tile.wait()
        for start in _PARTS:
            tile.write(start, tile.read(start), order)

    (turned,) = _over_tiles(body, (data,), data.dtype)
    return turned


def quantize_and_transpose(
    x: jax.Array, scale: jax.Array, *, dtype: DTypeLike, through: jnp.dtype
) -> tuple[jax.Array, jax.Array]:
    """Rounds ``x / scale`` and writes it in both layouts."""

    def body(tile: _Tile, inverse_ref: Ref) -> None:
        tile.wait()
        for start in _PARTS:
            wide = tile.read(start).astype(through).astype(jnp.float32)
            tile.write(start, (wide * inverse_ref[0]).astype(dtype))

    operands = x, inverse_scale(scale).reshape(1)
    turned, rows = _over_tiles(body, operands, dtype, both=True)
    return rows, turned


class _Tile(NamedTuple):
    """The tile of a block of threads, which reads it and writes it by parts."""

    row: Scalar
    """Its first of the matrix."""
    column: Scalar
    x: Ref
    full: Ref
    """A barrier: `x` is there."""
    out: Ref
    """The tile transposed."""
    rows: Ref | None = None
    """The tile as it is, where that is written too."""

    def wait(self) -> None:
        """Until the tile can be read."""
        plgpu.barrier_wait(self.full)

    def read(self, start: int) -> jax.Array:
        """A part [TILE, _PART]."""
        part = self.x.at[:, pl.ds(start, _PART)]
        return plgpu.load(part, layout=_ROWS, optimized=False)

    def write(
        self, start: int, data: jax.Array, order: Sequence[int] = range(16)
    ) -> None:
        """Writes a part of 8-bit numbers; `order` is that of `transpose`."""
        if self.rows is not None:
            self.rows[:, pl.ds(start, _PART)] = data
        self.out[pl.ds(start, _PART)] = _transpose(data, order)


def _over_tiles(
    body: Callable[..., None],
    operands: Sequence[jax.Array],
    dtype: DTypeLike,
    *more: jax.ShapeDtypeStruct,
    both: bool = False,
) -> Sequence[jax.Array]:
    """Runs a kernel for each tile of the first operand.

    Args:
        body: takes a `_Tile`, and references to the other operands and to `more`.
        operands: the first is [M,K].
        dtype: 8 bits.
        more: what else the kernel writes.
        both: whether tiles are written as they are, too.

    Returns:
        [K,M] of `dtype`, with `both` [M,K] of it, and `more`.

    Raises:
        Unsupported: type or shape of the first operand does not fit.
    """
    x, (m, k) = operands[0], operands[0].shape
    if x.dtype != dtype and x.dtype.name not in _WIDE:
        raise Unsupported(
            f"fp8_operands: an operand of type {x.dtype.name}, the kernel takes"
            f" {_WIDE}; use implementation='xla'"
        )
    if x.size == 0 or m % TILE or k % TILE:
        raise Unsupported(
            f"fp8_operands: an operand of shape {x.shape}, the kernel takes multiples"
            f" of {TILE}; use implementation='xla'"
        )

    def whole(x_ref: Ref, *refs: Ref, **scratch: Ref) -> None:
        given, (out_ref,), rows_refs, found = _split(
            refs, len(operands) - 1, 1, both, len(more)
        )
        row, column = (lax.axis_index(name) * TILE for name in ("m", "k"))
        here = pl.ds(row, TILE), pl.ds(column, TILE)
        tile = _Tile(row, column, **scratch)
        plgpu.copy_gmem_to_smem(x_ref.at[here], tile.x, tile.full)
        body(tile, *given, *found)
        plgpu.commit_smem()
        for ref in rows_refs:
            plgpu.copy_smem_to_gmem(scratch["rows"], ref.at[here])
        plgpu.copy_smem_to_gmem(tile.out, out_ref.at[here[::-1]])
        plgpu.wait_smem_to_gmem(0)

    shape = TILE, TILE
    as_it_is = [jax.ShapeDtypeStruct((m, k), dtype)] * both
    return plgpu.kernel(
        whole,
        out_type=(jax.ShapeDtypeStruct((k, m), dtype), *as_it_is, *more),
        scratch_types={
            "x": plgpu.SMEM(shape, x.dtype),
            "out": plgpu.SMEM(shape, dtype, transforms=smem_transforms(TILE, dtype)),
            "full": plgpu.Barrier(),
            **({"rows": plgpu.SMEM(shape, dtype)} if both else {}),
        },
        grid=(m // TILE, k // TILE),
        grid_names=("m", "k"),
        kernel_name=body.__qualname__.partition(".")[0],
    )(*operands)


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
