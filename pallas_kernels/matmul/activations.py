"""Activations after matmuls by name, for XLA and for Pallas kernels."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def gelu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """``x * Phi(x)`` with the distribution function of the normal distribution.

    `jax.nn.gelu` asks for the complementary error function, which is accurate however
    small the result. For types of 16 bits the error function in fp32 suffices: it is
    off by less than 1e-6, and the far tail is below that.

    Example:
        >>> print(gelu(jnp.array([-1.0, 0.0, 2.0], jnp.bfloat16)))
        [-0.158203 0 1.95312]
    """
    if x.dtype.itemsize > 2:
        return jax.nn.gelu(x, approximate=False)
    return gelu_by_erf(x.astype(jnp.float32)).astype(x.dtype)


def gelu_by_erf(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """`gelu` of fp32 to the accuracy of 16 bits."""
    return 0.5 * x * (1 + jax.lax.erf(x * math.sqrt(0.5)))


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": gelu,
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
}
"""Activations by name, for XLA; all keep zero."""


def check_activation(activation: str | None) -> None:
    """Raises ValueError if no activation has this name."""
    if activation is not None and activation not in ACTIVATIONS:
        raise ValueError(
            f"activation {activation!r}, expected None or one of {list(ACTIVATIONS)}"
        )


def activate(x: Float[Array, "..."], activation: str | None) -> Float[Array, "..."]:
    """An activation of x, by its name in `ACTIVATIONS`; None leaves x as it is.

    Raises:
        ValueError: there is no such activation.

    Example:
        >>> activate(jnp.array([-1.0, 2.0]), "relu")
        Array([0., 2.], dtype=float32)
    """
    check_activation(activation)
    return x if activation is None else ACTIVATIONS[activation](x)


def _gate(x: Array, limit: float, factors: tuple[float, ...]) -> Array:
    """``x * (1/2 + z q(z^2))`` of fp32, z being x cut to +-limit, q a polynomial.

    It needs only multiplications and additions, which are cheaper in a kernel than
    exponentials and divisions. Below the limit x itself is clipped too, where the gate
    is practically closed.
    """
    x = jnp.maximum(x, -limit)
    z = jnp.minimum(x, limit)
    square = z * z
    q = jnp.full_like(z, factors[-1])
    for factor in factors[-2::-1]:
        q = q * square + factor
    return x * (z * q + 0.5)


# Minimax fits of the gate: |z q(z^2) + 1/2 - Phi(z)| < 1.7e-6, 0.7e-6 for that of tanh.
_ERF = (
    0.39893389,
    -0.0664535207,
    0.00992560168,
    -0.00115837614,
    0.000105626413,
    -7.37790109e-06,
    3.77025491e-07,
    -1.309768e-08,
    2.73233458e-10,
    -2.56199352e-12,
)
_TANH = (
    0.398939094,
    -0.0668075857,
    0.0101904138,
    -0.00124125694,
    0.000120570877,
    -9.10018581e-06,
    5.06637208e-07,
    -1.92653576e-08,
    4.41372825e-10,
    -4.55787801e-12,
)

KERNEL_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": functools.partial(_gate, limit=4.25, factors=_ERF),
    "gelu_tanh": functools.partial(_gate, limit=4.0, factors=_TANH),
    "relu": lambda x: jnp.maximum(x, 0.0),
    "silu": jax.nn.silu,
}
"""The same of fp32 in the bodies of Pallas kernels, to the accuracy of 16 bits."""
