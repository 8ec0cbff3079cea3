"""Operands in 8 bits through XLA; runs anywhere."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.fp8_operands.scales import inverse_scale, power_of_two_scale
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
    row, column = (_largest(wide, axis) for axis in (1, 0))
    scale = power_of_two_scale(row, dtype)
    return (wide * inverse_scale(scale)[:, None]).astype(dtype), scale, column


def _largest(wide: jax.Array, axis: int) -> jax.Array:
    # By bits, which order as magnitudes do: a maximum of numbers may skip NaN.
    bits = lax.bitcast_convert_type(jnp.abs(wide), jnp.int32)
    return lax.bitcast_convert_type(jnp.max(bits, axis, initial=0), jnp.float32)


def quantize_rms_norm(
    x: jax.Array, weight: jax.Array, *, dtype: DTypeLike, eps: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`quantize_rows` of normalized rows.

    Args:
        x: [M,K].
        weight: [K].
        dtype: type of the numbers.
        eps: added to the mean square.
    """
    wide = x.astype(jnp.float32)
    mean = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    normalized = wide * lax.rsqrt(mean + eps) * weight
    return quantize_rows(normalized, dtype, through=x.dtype)


def quantize_gated(
    gate: jax.Array, up: jax.Array, *, dtype: DTypeLike, activation: str
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`quantize_rows` of ``activation(gate) * up``.

    Args:
        gate: [M,K].
        up: [M,K].
        dtype: type of the numbers.
        activation: a name in `pallas_kernels.matmul.ACTIVATIONS`.
    """
    z, u = (x.astype(jnp.float32) for x in (gate, up))
    return quantize_rows(activate(z, activation) * u, dtype, through=gate.dtype)


def quantize_gated_gradients(
    gate: jax.Array, up: jax.Array, g: jax.Array, *, dtype: DTypeLike, activation: str
) -> tuple[jax.Array, ...]:
    """Gradients of ``activation(gate) * up``, with one scale for a row of both.

    Args:
        gate: [M,K].
        up: [M,K].
        g: [M,K].
        dtype: type of the numbers.
        activation: a name in `pallas_kernels.matmul.ACTIVATIONS`.
    """
    z, u, d = (x.astype(jnp.float32) for x in (gate, up, g))
    a, back = jax.vjp(functools.partial(activate, activation=activation), z)
    both = [_rounded_to(x, gate.dtype) for x in (*back(d * u), d * a)]
    rows = (_largest(x, 1) for x in both)
    scale = power_of_two_scale(jnp.maximum(*rows), dtype)
    data = ((x * inverse_scale(scale)[:, None]).astype(dtype) for x in both)
    return *data, scale, *(_largest(x, 0) for x in both)


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
