"""Operands in 8 bits through XLA; runs anywhere."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.fp8_operands.scales import inverse_scale, power_of_two_scale


def _rounded_to(x: jax.Array, through: DTypeLike) -> jax.Array:
    """X in fp32 with no more bits than `through` has.

    Two casts would not do: XLA takes them for one to fp32 and leaves the bits.
    """
    if x.dtype == through:
        return x.astype(jnp.float32)
    kind = jnp.finfo(through)
    return lax.reduce_precision(x.astype(jnp.float32), kind.nexp, kind.nmant)


def quantize_rows(
    x: jax.Array, dtype: DTypeLike, *, through: DTypeLike
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rounds rows by their own scales.

    Args:
        x: [M,K].
        dtype: type of the numbers.
        through: type to which x is rounded first.

    Returns:
        [M,K] of `dtype`, scales [M], largest magnitudes of columns [K].
    """
    wide = _rounded_to(x, through)
    # By bits, which order as magnitudes do: a maximum of numbers may skip NaN.
    bits = lax.bitcast_convert_type(jnp.abs(wide), jnp.int32)
    row, column = (
        lax.bitcast_convert_type(jnp.max(bits, axis, initial=0), jnp.float32)
        for axis in (1, 0)
    )
    scale = power_of_two_scale(row, dtype)
    return (wide * inverse_scale(scale)[:, None]).astype(dtype), scale, column


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
