"""Operands in 8 bits through XLA; runs anywhere.

Functions take what those of the same names in `api` take, and raise nothing.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.fp8_operands.scales import (
    BLOCK,
    inverse_scale,
    power_of_two_scale,
)
from pallas_kernels.matmul.activations import activate


type Rounded = tuple[jax.Array, jax.Array, jax.Array | None]
"""[M,K] in 8 bits; scales [M]; the largest magnitude of each column [K], or None. By
blocks scales [M,K/128] and None."""


def quantize_rows(
    x: jax.Array, *, dtype: DTypeLike, through: DTypeLike, blocks: bool, columns: bool
) -> Rounded:
    """Rounds rows by their own scales, or by those of each `BLOCK` numbers of them."""
    data, scale, largest = _round([_rounded_to(x, through)], dtype, blocks)[0]
    return data, scale, largest if columns else None


def quantize_rms_norm(
    x: jax.Array,
    weight: jax.Array,
    *,
    dtype: DTypeLike,
    through: DTypeLike,
    eps: float,
    **options: bool,
) -> Rounded:
    """`quantize_rows` of normalized rows."""
    wide = x.astype(jnp.float32)
    mean = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    normalized = wide * lax.rsqrt(mean + eps) * weight.astype(jnp.float32)
    return quantize_rows(normalized, dtype=dtype, through=through, **options)


def quantize_gated(
    *sides: jax.Array,
    dtype: DTypeLike,
    through: DTypeLike,
    activation: str,
    **options: bool,
) -> Rounded:
    """`quantize_rows` of ``activation(gate) * up``; of one array, of its halves."""
    gate, up = jnp.split(sides[0], 2, axis=1) if len(sides) == 1 else sides
    z, u = (x.astype(jnp.float32) for x in (gate, up))
    hidden = activate(z, activation) * u
    return quantize_rows(hidden, dtype=dtype, through=through, **options)


def quantize_gated_gradients(
    gate: jax.Array,
    up: jax.Array,
    g: jax.Array,
    *,
    dtype: DTypeLike,
    through: DTypeLike,
    activation: str,
    blocks: bool,
) -> Sequence[Rounded]:
    """Gradients of ``activation(gate) * up``, with one scale for a row of both."""
    z, u, d = (x.astype(jnp.float32) for x in (gate, up, g))
    a, back = jax.vjp(functools.partial(activate, activation=activation), z)
    both = [_rounded_to(x, through) for x in (*back(d * u), d * a)]
    return _round(both, dtype, blocks)


def quantize_squares(
    x: jax.Array, *, dtype: DTypeLike, through: DTypeLike
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rounds blocks of `BLOCK` rows and columns by their own scales; both layouts."""
    wide, (m, k) = _rounded_to(x, through), x.shape
    largest = _largest(_in_blocks(_largest(_in_blocks(wide, 0), 1), 1), 2)
    scale = power_of_two_scale(largest, dtype)
    inverse = jnp.repeat(inverse_scale(scale), BLOCK, axis=0)[:m]
    data = (wide * jnp.repeat(inverse, BLOCK, axis=1)[:, :k]).astype(dtype)
    return data, data.T, scale


def quantize_and_transpose(
    x: jax.Array, scale: jax.Array, *, dtype: DTypeLike, through: DTypeLike
) -> tuple[jax.Array, jax.Array]:
    """Rounds by one scale, in both layouts."""
    data = (_rounded_to(x, through) * inverse_scale(scale)).astype(dtype)
    return data, data.T


def transpose_rows(
    data: jax.Array, scale: jax.Array, largest: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Rounds ``data * scale`` again, by scales of its columns, and transposes it."""
    column_scale = power_of_two_scale(largest, data.dtype)
    wide = data.astype(jnp.float32) * scale[:, None] * inverse_scale(column_scale)
    most = float(jnp.finfo(data.dtype).max)
    wide = jnp.clip(wide, -most, most)  # see `reference`
    return wide.astype(data.dtype).T, column_scale


def transpose_blocks(data: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`transpose_rows` by blocks, with scales of what was rounded."""
    wide = jnp.repeat(scale, BLOCK, axis=1)[:, : data.shape[1]]
    wide = data.astype(jnp.float32) * wide
    return _round_blocks(wide.T, data.dtype)


def _rounded_to(x: jax.Array, through: DTypeLike) -> jax.Array:
    """X in fp32 with no more bits than `through` has.

    Two casts would not do: XLA takes them for one to fp32 and leaves the bits.
    """
    if x.dtype == through:
        return x.astype(jnp.float32)
    kind = jnp.finfo(through)
    return lax.reduce_precision(x.astype(jnp.float32), kind.nexp, kind.nmant)


def _round(
    matrices: Sequence[jax.Array], dtype: DTypeLike, blocks: bool
) -> Sequence[Rounded]:
    """Rounds rows by a scale for a row of all matrices, or blocks by their own."""
    if blocks:
        return [(*_round_blocks(x, dtype), None) for x in matrices]
    rows = (_largest(x, 1) for x in matrices)
    scale = power_of_two_scale(functools.reduce(jnp.maximum, rows), dtype)
    data = [(x * inverse_scale(scale)[:, None]).astype(dtype) for x in matrices]
    return [
        (each, scale, _largest(x, 0)) for each, x in zip(data, matrices, strict=True)
    ]


def _round_blocks(wide: jax.Array, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
    """Rounds each block of a row by its own scale: [M,K] and [M,K/128]."""
    k = wide.shape[1]
    scale = power_of_two_scale(_largest(_in_blocks(wide, 1), 2), dtype)
    inverse = jnp.repeat(inverse_scale(scale), BLOCK, axis=1)[:, :k]
    return (wide * inverse).astype(dtype), scale


def _in_blocks(x: jax.Array, axis: int) -> jax.Array:
    """[M,K] with an axis, filled with zeros, in blocks: [M,K/128,128]."""
    widths = [(0, -size % BLOCK if axis == i else 0) for i, size in enumerate(x.shape)]
    x = jnp.pad(x, widths)
    count = x.shape[axis] // BLOCK
    return x.reshape(*x.shape[:axis], count, BLOCK, *x.shape[axis + 1 :])


def _largest(wide: jax.Array, axis: int) -> jax.Array:
    # By bits, which order as magnitudes do: a maximum of numbers may skip NaN.
    bits = lax.bitcast_convert_type(jnp.abs(wide), jnp.int32)
    return lax.bitcast_convert_type(jnp.max(bits, axis, initial=0), jnp.float32)
