"""Hopper kernel of the means of packed sequences.

A block has 128 columns of a sequence. Its lanes read 16 bytes each, of so many tokens
at a time that latency is paid once or twice for a short text.

Axis letters: B rows, T tokens of a row, S sequences of a row, D features.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch import Unsupported
from pallas_kernels.mosaic import DeviceSpec
from pallas_kernels.mosaic.aliases import Ref


COLUMNS = 128
"""Of a block: 32 for each warp, 8 for each lane."""

_LANES = 8
"""Lanes that read the same columns, of other tokens."""

_MOST_TOKENS = 128
"""Read at a time."""

_TILING = plgpu.Tiling(((_LANES, COLUMNS), (_LANES, COLUMNS // 4), (8,)))
_LAYOUT = plgpu.Layout.TILED(
    _TILING, warp_dims=(-4,), lane_dims=(-3, -2), vector_dim=-1
)


def check(x: jax.ShapeDtypeStruct | jax.Array, sequences: int) -> None:
    """Checks that the kernel can serve these sizes.

    Raises:
        Unsupported: it cannot.
    """
    rows, num_tokens, features = x.shape
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        raise Unsupported(
            f"segment_mean: x of type {x.dtype.name}, the kernel takes bfloat16 or"
            " float16; use implementation='xla'"
        )
    if not rows or not sequences:
        raise Unsupported(
            f"segment_mean: {rows} rows of {sequences} sequences, the kernel takes at"
            " least one of each; use implementation='xla'"
        )
    if features % COLUMNS or not features or num_tokens < _LANES:
        raise Unsupported(
            f"segment_mean: {num_tokens} tokens of {features} features, the kernel"
            f" takes at least {_LANES} of a multiple of {COLUMNS}; use"
            " implementation='xla'"
        )


def segment_mean(
    x: jax.Array, cu_seqlens: jax.Array, *, device: DeviceSpec
) -> jax.Array:
    """Means of packed sequences on a Hopper GPU.

    Args:
        x: [B,T,D], of which `check` approves.
        cu_seqlens: [B,S+1] int32.
        device: the GPU that the kernel is built for.

    Returns:
        [B,S,D] fp32.
    """
    del device  # all cut alike
    b, t, d = x.shape
    sequences = cu_seqlens.shape[1] - 1
    rows = min(_MOST_TOKENS, t // _LANES * _LANES)

    def body(x_ref: Ref, cu_ref: Ref, out_ref: Ref) -> None:
        row, sequence = lax.axis_index("row"), lax.axis_index("sequence")
        columns = pl.ds(lax.axis_index("column") * COLUMNS, COLUMNS)
        first = cu_ref[row * (sequences + 1) + sequence]
        end = cu_ref[row * (sequences + 1) + sequence + 1]

        def tokens(i: jax.Array, total: jax.Array) -> jax.Array:
            start = first + i * rows
            # The last tokens of a row are a whole tile, too.
            at = jnp.minimum(start, t - rows)
            part = plgpu.load(
                x_ref.at[pl.ds(row * t + at, rows), columns],
                layout=_LAYOUT,
                optimized=False,
            )
            token = at + plgpu.broadcasted_iota(
                jnp.int32, (rows, COLUMNS), 0, layout=_LAYOUT
            )
            within = (token >= start) & (token < end)
            # Selected, not multiplied: NaN stays in its sequence.
            part = jnp.where(within, part.astype(jnp.float32), 0.0)
            return total + jnp.sum(part, 0)

        zeros = plgpu.layout_cast(jnp.zeros(COLUMNS, jnp.float32), _LAYOUT.reduce(0))
        total = lax.fori_loop(0, pl.cdiv(end - first, rows), tokens, zeros)
        count = jnp.maximum(end - first, 1).astype(jnp.float32)
        out_ref[row * sequences + sequence, columns] = total / count

    means = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((b * sequences, d), jnp.float32),
        grid=(d // COLUMNS, sequences, b),
        grid_names=("column", "sequence", "row"),
        kernel_name="segment_mean",
        # No array is both read and written.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )(x.reshape(b * t, d), cu_seqlens.reshape(-1))
    return means.reshape(b, sequences, d)
