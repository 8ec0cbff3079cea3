"""Scales of 8-bit numbers that are powers of two."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float


BLOCK = 128
"""Numbers of a row, or rows and columns of a weight, that share a scale."""

_MANTISSA = 23
"""Bits of the mantissa of fp32."""

_ONE = 127 << _MANTISSA
_INFINITY = 255 << _MANTISSA
_NAN = _INFINITY | 1 << (_MANTISSA - 1)

_MOST = {"float8_e4m3fn": 8, "float8_e5m2": 15}
"""Exponents of the largest numbers, whose mantissa is 1.75: 448 and 57,344."""


def power_of_two_scale(
    largest: Float[Array, "*B"], dtype: DTypeLike
) -> Float[Array, "*B"]:
    """The smallest power of two by which numbers fit into 8 bits without being cut off.

    It is a normal number, one where all numbers are zero, and NaN where one is NaN or
    infinite, so that what is not finite stays visible in all that it would enter.

    Args:
        largest: the largest magnitude of the numbers, fp32.
        dtype: ``float8_e4m3fn`` or ``float8_e5m2``.

    Returns:
        fp32, of the shape of `largest`.

    Example:
        >>> print(power_of_two_scale(jnp.array([448.0, 449.0, 0.0]), "float8_e4m3fn"))
        [1. 2. 1.]
    """
    bits = jax.lax.bitcast_convert_type(largest, jnp.int32)
    return jax.lax.bitcast_convert_type(scale_bits(bits, dtype), jnp.float32)


def inverse_scale(scale: Float[Array, "*B"]) -> Float[Array, "*B"]:
    """One over each scale, exactly: XLA lets GPUs divide with an error.

    Args:
        scale: fp32, powers of two from 2^-126 to 2^126, or NaN.

    Returns:
        fp32, of the shape of `scale`.

    Example:
        >>> print(inverse_scale(jnp.array([4.0, 0.5])))
        [0.25 2.  ]
    """
    bits = jax.lax.bitcast_convert_type(scale, jnp.int32)
    return jax.lax.bitcast_convert_type(inverse_bits(bits), jnp.float32)


def scale_bits(largest: Array, dtype: DTypeLike) -> Array:
    """`power_of_two_scale` of bits and as bits: no division, which GPUs may round.

    Args:
        largest: int32, bits of an fp32 number that is zero, positive or NaN.
        dtype: ``float8_e4m3fn`` or ``float8_e5m2``.

    Returns:
        int32, bits of the scale.
    """
    # A mantissa above 1.75 carries into the exponent.
    carried = (largest + (1 << (_MANTISSA - 2)) - 1) & _INFINITY
    scale = carried - (_MOST[jnp.dtype(dtype).name] << _MANTISSA)
    scale = jnp.maximum(scale, 1 << _MANTISSA)
    scale = jnp.where(largest == 0, _ONE, scale)
    return jnp.where(largest >= _INFINITY, _NAN, scale)


def inverse_bits(scale: Array) -> Array:
    """Bits of one over a scale, which is exact.

    Args:
        scale: int32, bits of a power of two from 2^-126 to 2^126, or of NaN.

    Returns:
        int32, bits of its inverse, or of NaN.
    """
    return jnp.where(scale >= _INFINITY, _NAN, 2 * _ONE - scale)
