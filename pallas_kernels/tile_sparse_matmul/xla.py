"""The tile-sparse matmul through XLA: portable.

Two forms. Where the activations that all tiles gather are fewer than the elements of
the dense weight (decoding), they are gathered and multiplied tile by tile. Elsewhere
the weight is unpacked and multiplied as a dense one: that costs one pass over the dense
weight and saves nothing of its arithmetic, but it is what XLA does well.

Axes: K input features, C packed columns, T tiles, P row capacity of a tile, G columns
of a tile, M tokens. With `feature_major` activations are [features,M], else
[M,features].
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.tile_sparse_matmul.format import TileSparse


def gathers(w: TileSparse, tokens: int) -> bool:
    """Return whether gathering activations moves less than unpacking the weight."""
    return tokens * w.tiles * w.room <= w.shape[0] * w.packed_columns


def tile_sparse_matmul(
    x: jax.Array,
    w: TileSparse,
    *,
    feature_major: tuple[bool, bool],
) -> jax.Array:
    """Computes the packed matmul; sums are fp32 for 16-bit operands.

    Args:
        x: [M,K] activations, or [K,M].
        w: weight; its `columns` are left to the caller.
        feature_major: how the input and the output are stored.

    Returns:
        [M,C] of the type of x, or [C,M].
    """
    x_major, y_major = feature_major
    tokens = x.shape[1 if x_major else 0]
    if not gathers(w, tokens):
        dense = w.packed().to_dense()  # [K, C]
        return dense_matmul(x, dense, feature_major=feature_major, out_dtype=x.dtype)
    kept = jnp.take(x, w.rows, axis=0 if x_major else 1)  # [T, P, M] or [M, T, P]
    letters = "tpm" if x_major else "mtp"
    out = "tgm" if y_major else "mtg"
    y = _einsum(f"{letters},tpg->{out}", kept, w.values).astype(x.dtype)
    if y_major:
        return y.reshape(w.tiles * w.tile, tokens)[: w.packed_columns]  # [C, M]
    return y.reshape(tokens, w.tiles * w.tile)[:, : w.packed_columns]  # [M, C]


def dense_matmul(
    x: jax.Array,
    dense: jax.Array,
    *,
    feature_major: tuple[bool, bool],
    out_dtype: DTypeLike,
) -> jax.Array:
    """The matmul by a dense weight [K,C], of `out_dtype`; otherwise as above."""
    x_major, y_major = feature_major
    if y_major:
        return _dot(dense, x, 0, 0 if x_major else 1, out_dtype)
    return _dot(x, dense, 0 if x_major else 1, 0, out_dtype)


def _dot(a: jax.Array, b: jax.Array, i: int, j: int, out_dtype: DTypeLike) -> jax.Array:
    # XLA may sum in the type asked for: another type is rounded from fp32 sums, and on
    # a CPU, where it does, that type as well.
    def run(a: jax.Array, b: jax.Array, *, sums: DTypeLike) -> jax.Array:
        y = lax.dot_general(a, b, (((i,), (j,)), ((), ())), preferred_element_type=sums)
        return y.astype(out_dtype)

    wide = functools.partial(run, sums=jnp.float32)
    as_asked = functools.partial(run, sums=out_dtype)
    if jnp.dtype(out_dtype) != a.dtype:
        return wide(a, b)
    if a.dtype.itemsize > 2:
        return as_asked(a, b)
    return lax.platform_dependent(a, b, cpu=wide, default=as_asked)


def _einsum(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Matmuls of tiles with fp32 sums."""

    def run(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.einsum(subscripts, a, b, preferred_element_type=jnp.float32)

    def widened(a: jax.Array, b: jax.Array) -> jax.Array:
        return run(a.astype(jnp.float32), b.astype(jnp.float32))

    # XLA's batched matmuls on a CPU do not sum bfloat16 in fp32.
    return lax.platform_dependent(a, b, cpu=widened, default=run)


def grad_values(
    x: jax.Array, dy: jax.Array, w: TileSparse, *, feature_major: tuple[bool, bool]
) -> jax.Array:
    """The gradient of the values: ``sum_m x[m, rows[t, p]] dy[m, column(t, g)]``.

    Args:
        x: [M,K] activations, or [K,M].
        dy: [M,C] gradient of the packed output, or [C,M].
        w: weight.
        feature_major: how x and dy are stored.

    Returns:
        [T,P,G] of the type of the values, zero past the counts.
    """
    x_major, y_major = feature_major
    tokens = x.shape[1 if x_major else 0]
    extra = w.tiles * w.tile - w.packed_columns
    tiles = (w.tiles, w.tile)
    if gathers(w, tokens):
        pad = ((0, extra), (0, 0)) if y_major else ((0, 0), (0, extra))
        dy = jnp.pad(dy, pad)
        # [T, G, M] or [M, T, G]
        dy = dy.reshape((*tiles, tokens) if y_major else (tokens, *tiles))
        # [T, P, M] or [M, T, P]
        kept = jnp.take(x, w.rows, axis=0 if x_major else 1)
        letters = "tpm" if x_major else "mtp", "tgm" if y_major else "mtg"
        grad = _einsum(f"{letters[0]},{letters[1]}->tpg", kept, dy)
    else:
        i, j = int(x_major), int(y_major)
        grad = lax.dot_general(
            x, dy, (((i,), (j,)), ((), ())), preferred_element_type=jnp.float32
        )  # [K, C]
        grad = jnp.pad(grad, ((0, 0), (0, extra))).reshape(-1, *tiles)  # [K, T, G]
        grad = jnp.swapaxes(grad, 0, 1)  # [T, K, G]
        grad = jnp.take_along_axis(grad, w.rows[:, :, None], axis=1)  # [T, P, G]
    kept_rows = jnp.arange(w.room) < w.counts[:, None]  # [T, P]
    return jnp.where(kept_rows[:, :, None], grad, 0).astype(w.dtype)
