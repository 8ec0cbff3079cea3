"""Hopper kernel of layer normalization: a row lies across the lanes of one warp.

Nothing but memory limits it, so it should ask for much and wait for little. Each warp
reads its rows straight into registers, 16 bytes a lane at a time, sums them by shuffles
inside the warp, and writes them; no warp waits for another one.

Axis letters: T rows, D columns.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_kernels.dispatch import Unsupported
from pallas_kernels.layer_norm.config import LayerNormConfig
from pallas_kernels.mosaic import DeviceSpec, check_hopper
from pallas_kernels.mosaic.aliases import Ref


MOST_COLUMNS = 5120
"""Most columns of a row: 160 numbers a lane, of which nine spill. The kernel takes 0.95
to 1.00 of XLA's time then (H200), and with 6,144 more."""

WARPS = 4
"""Warps of a block, and rows that it has at least."""

LANES = 32


def heuristic(t: int, d: int, device: DeviceSpec) -> LayerNormConfig:
    """Choose the tiling of [t, d].

    A multiprocessor has the registers of about 7,000 / d blocks of 4 rows, or of 4,000
    / d of 8: more rows where with 4 a second wave of blocks would begin, and with 8
    none does.
    """
    few, many = (4 * (7000 // d), 8 * (4000 // d))
    return LayerNormConfig(rows=8 if few < t / device.num_sms <= many else 4)


def layer_norm(
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array | None,
    residual: jax.Array | None,
    x_bias: jax.Array | None,
    *,
    eps: float,
    dtype: DTypeLike,
    config: LayerNormConfig | None,
    device: DeviceSpec | None,
) -> jax.Array:
    """Normalizes the rows of ``x + x_bias + residual`` on a Hopper GPU.

    Args:
        x: [T,D]; bfloat16, float16 or float32. D a multiple of 64 (of 128 for best use
            of the memory), at most `MOST_COLUMNS`; T at least 4.
        scale: [D], of any of these types.
        bias: [D], or None.
        residual: [T,D] of the type of x, or None.
        x_bias: [D], or None.
        eps: added to the variance.
        dtype: type of the output, one of these.
        config: how to cut it; None takes the heuristic's choice.
        device: the GPU that the kernel is built for.

    Returns:
        [T,D] of `dtype`.

    Raises:
        Unsupported: the device, types or shape do not fit.
    """
    device = check_hopper(device, "layer_norm")
    t, d = x.shape
    inputs = [a for a in (x, residual, x_bias, scale, bias) if a is not None]
    _check(t, d, [*(a.dtype for a in inputs), jnp.dtype(dtype)])
    config = config or heuristic(t, d, device)
    rows = min(config.rows, t // WARPS * WARPS)
    num_rows = 1 + (residual is not None)
    width, layout = row_layout(d, x.dtype)
    shape = (rows, d // width, width)

    def body(*refs: Ref) -> None:
        row_refs, out_ref = refs[:num_rows], refs[-1]
        vectors = [
            plgpu.load(ref, layout=layout.reduce(0), optimized=False)
            for ref in refs[num_rows:-1]
        ]
        addends = vectors[: x_bias is not None]
        affine = vectors[len(addends) :]
        # The last rows are a whole group too; what two blocks write is the same.
        span = pl.ds(jnp.minimum(lax.axis_index("block") * rows, t - rows), rows)
        values = [
            plgpu.load(ref.at[span], layout=layout, optimized=False) for ref in row_refs
        ]
        y = normalize([*values, *addends], affine, eps, layout)
        out_ref[span] = y.astype(dtype)

    y = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((t, *shape[1:]), dtype),
        grid=(pl.cdiv(t, rows),),
        grid_names=("block",),
        kernel_name="layer_norm",
        # No array is both read and written.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )(*(a.reshape(*a.shape[:-1], *shape[1:]) for a in inputs))  # [T,D/width,width]
    return y.reshape(t, d)  # [T,D]


def normalize(
    values: Sequence[jax.Array],
    affine: Sequence[jax.Array],
    eps: float,
    layout: Any,
) -> jax.Array:
    """The sum of `values`, normalized, in fp32; scaled and shifted by `affine`.

    Of `values` the first are rows, others vectors that are added to each row.
    """
    shape = values[0].shape

    def wide(a: jax.Array, *axes: int) -> jax.Array:
        a = lax.broadcast_in_dim(a.astype(jnp.float32), shape, axes)
        return plgpu.layout_cast(a, layout)

    def mean(a: jax.Array) -> jax.Array:
        # Registers of a lane first, then the lanes.
        return jnp.sum(jnp.sum(a, 1), 1) * (1 / (shape[1] * shape[2]))

    h = values[0].astype(jnp.float32)
    for value in values[1:]:
        rows = value.shape == shape
        h = h + (value.astype(jnp.float32) if rows else wide(value, 1, 2))
    h = h - wide(mean(h), 0)
    scale, *bias = (wide(vector, 1, 2) for vector in affine)
    y = h * wide(lax.rsqrt(mean(h * h) + eps), 0) * scale
    return y + bias[0] if bias else y


def row_layout(d: int, dtype: jnp.dtype) -> tuple[int, Any]:
    """Columns that a warp reads at a time, up to 16 bytes a lane; the layout of rows.

    Of [rows, columns / width, width]: rows are dealt to the warps in turn.
    """
    piece = 16 // dtype.itemsize
    # Of rows that are read at once jax cannot infer the layout of the sums.
    while d % (LANES * piece) or d == LANES * piece:
        piece //= 2
    width = LANES * piece
    tiling = plgpu.Tiling(((WARPS, 1, width), (piece,)))
    layout = plgpu.Layout.TILED(tiling, warp_dims=(-4,), lane_dims=(-2,), vector_dim=-1)
    return width, layout


def _check(t: int, d: int, dtypes: Sequence[jnp.dtype]) -> None:
    known = ("bfloat16", "float16", "float32")
    if any(dtype.name not in known for dtype in dtypes):
        raise Unsupported(
            f"layer_norm: types {[dtype.name for dtype in dtypes]}, the kernel takes"
            f" {known}; use implementation='xla'"
        )
    if d % 64 or not 0 < d <= MOST_COLUMNS:
        raise Unsupported(
            f"layer_norm: rows of {d}, the kernel takes multiples of 64 up to"
            f" {MOST_COLUMNS}; use implementation='xla'"
        )
    if t < WARPS:
        raise Unsupported(
            f"layer_norm: {t} rows, the kernel needs at least {WARPS}; use"
            " implementation='xla'"
        )
