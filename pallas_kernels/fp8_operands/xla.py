"""Operands in 8 bits through XLA; runs anywhere."""

import functools

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


def _rounded_to(x: jax.Array, through: DTypeLike) -> jax.Array:
    """X in fp32 with no more bits than `through` has.

    Two casts would not do: XLA takes them for one to fp32 and leaves the bits.
    """
    if x.dtype == through:
        return x.astype(jnp.float32)
    kind = jnp.finfo(through)
    return lax.reduce_precision(x.astype(jnp.float32), kind.nexp, kind.nmant)


def quantize_rows(
    x: jax.Array, dtype: DTypeLike, *, through: DTypeLike, blocks: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Rounds rows by their own scales.

    Args:
        x: [M,K].
        dtype: type of the numbers.
        through: type to which x is rounded first.
        blocks: a scale for each `BLOCK` numbers of a row.

    Returns:
        [M,K] of `dtype`, scales [M], largest magnitudes of columns [K]; with `blocks`,
        scales [M,K/128] and None.
    """
    wide = _rounded_to(x, through)
    if blocks:
        return *_round_blocks(wide, dtype), None
    row, column = (_largest(wide, axis) for axis in (1, 0))
    scale = power_of_two_scale(row, dtype)
    return (wide * inverse_scale(scale)[:, None]).astype(dtype), scale, column


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


def quantize_squares(
    x: jax.Array, dtype: DTypeLike, *, through: DTypeLike
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rounds blocks of `BLOCK` rows and columns by their own scales.

    Args:
        x: [M,K].
        dtype: type of the numbers.
        through: type to which x is rounded first.

    Returns:
        [M,K] and [K,M] of `dtype`, scales [M/128,K/128].
    """
    wide, (m, k) = _rounded_to(x, through), x.shape
    largest = _largest(_in_blocks(_largest(_in_blocks(wide, 0), 1), 1), 2)
    scale = power_of_two_scale(largest, dtype)
    inverse = jnp.repeat(inverse_scale(scale), BLOCK, axis=0)[:m]
    data = (wide * jnp.repeat(inverse, BLOCK, axis=1)[:, :k]).astype(dtype)
    return data, data.T, scale


def _largest(wide: jax.Array, axis: int) -> jax.Array:
    # By bits, which order as magnitudes do: a maximum of numbers may skip NaN.
    bits = lax.bitcast_convert_type(jnp.abs(wide), jnp.int32)
    return lax.bitcast_convert_type(jnp.max(bits, axis, initial=0), jnp.float32)


def quantize_rms_norm(
    x: jax.Array,
    weight: jax.Array,
    *,
    dtype: DTypeLike,
    eps: float,
    blocks: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """`quantize_rows` of normalized rows.

    Args:
        x: [M,K].
        weight: [K].
        dtype: type of the numbers.
        eps: added to the mean square.
        blocks: as of `quantize_rows`.
    """
    wide = x.astype(jnp.float32)
    mean = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    normalized = wide * lax.rsqrt(mean + eps) * weight
    return quantize_rows(normalized, dtype, through=x.dtype, blocks=blocks)


def quantize_gated(
    gate: jax.Array,
    up: jax.Array,
    *,
    dtype: DTypeLike,
    activation: str,
    blocks: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """`quantize_rows` of ``activation(gate) * up``.

    Args:
        gate: [M,K].
        up: [M,K].
        dtype: type of the numbers.
        activation: a name in `pallas_kernels.matmul.ACTIVATIONS`.
        blocks: as of `quantize_rows`.
    """
    z, u = (x.astype(jnp.float32) for x in (gate, up))
    hidden = activate(z, activation) * u
    return quantize_rows(hidden, dtype, through=gate.dtype, blocks=blocks)


def quantize_gated_gradients(
    gate: jax.Array,
    up: jax.Array,
    g: jax.Array,
    *,
    dtype: DTypeLike,
    activation: str,
    blocks: bool = False,
) -> tuple[jax.Array, ...]:
    """Gradients of ``activation(gate) * up``, with one scale for a row of both.

    Args:
        gate: [M,K].
        up: [M,K].
        g: [M,K].
        dtype: type of the numbers.
        activation: a name in `pallas_kernels.matmul.ACTIVATIONS`.
        blocks: scales of blocks of each, and no largest magnitudes.
    """
    z, u, d = (x.astype(jnp.float32) for x in (gate, up, g))
    a, back = jax.vjp(functools.partial(activate, activation=activation), z)
    both = [_rounded_to(x, gate.dtype) for x in (*back(d * u), d * a)]
    if blocks:
        (first, *scales), (second, *more) = (_round_blocks(x, dtype) for x in both)
        return first, second, *scales, *more
    rows = (_largest(x, 1) for x in both)
    scale = power_of_two_scale(jnp.maximum(*rows), dtype)
    data = ((x * inverse_scale(scale)[:, None]).astype(dtype) for x in both)
    return *data, scale, *(_largest(x, 0) for x in both)


def transpose_blocks(data: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rounds ``data * scale`` again, by scales of blocks of columns, and transposes it.

    Args:
        data: [M,K].
        scale: [M,K/128].

    Returns:
        [K,M] of the type of `data`; scales [K,M/128].
    """
    wide = jnp.repeat(scale, BLOCK, axis=1)[:, : data.shape[1]]
    return _round_blocks((data.astype(jnp.float32) * wide).T, data.dtype)


def transpose_rows(
    data: jax.Array, scale: jax.Array, largest: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Rounds ``data * scale`` again, by scales of its columns, and transposes it.

    Args:
        data: [M,K].
        scale: [M].
        largest: [K].

    Returns:
        [K,M] of the type of `data`; scales [K].
    """
    column_scale = power_of_two_scale(largest, data.dtype)
    wide = data.astype(jnp.float32) * scale[:, None] * inverse_scale(column_scale)
    most = float(jnp.finfo(data.dtype).max)
    wide = jnp.clip(wide, -most, most)  # see `reference`
    return wide.astype(data.dtype).T, column_scale


def quantize_and_transpose(
    x: jax.Array, scale: jax.Array, dtype: DTypeLike, *, through: DTypeLike
) -> tuple[jax.Array, jax.Array]:
    """Rounds by one scale.

    Args:
        x: [M,K].
        scale: [].
        dtype: type of the numbers.
        through: type to which x is rounded first.

    Returns:
        [M,K] and [K,M] of `dtype`.
    """
    data = (_rounded_to(x, through) * inverse_scale(scale)).astype(dtype)
    return data, data.T
