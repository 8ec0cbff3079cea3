"""The definition of the collective matmuls, in fp32, without communication.

The operands of all devices are in one list, in the order of the mesh axis, and so are
the results.

Axis letters: B any leading axes, m rows of a device, M rows of all, K contraction, N
columns.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.matmul import reference


def all_gather_matmul(
    xs: Sequence[Float[Array, "*B m K"]], ws: Sequence[Float[Array, "K N"]]
) -> list[Float[Array, "*B M N"]]:
    """``y_d = concatenate(x_0, ..., x_{D-1}) w_d`` on device d."""
    gathered = jnp.concatenate(list(xs), axis=-2)
    return [reference.matmul(gathered, w) for w in ws]


def matmul_reduce_scatter(
    xs: Sequence[Float[Array, "*B M K"]], ws: Sequence[Float[Array, "K N"]]
) -> list[Float[Array, "*B m N"]]:
    """``y_d`` = rows d M/D to (d+1) M/D of ``sum_e x_e w_e``."""
    return jnp.split(matmul_all_reduce(xs, ws)[0], len(xs), axis=-2)


def matmul_all_reduce(
    xs: Sequence[Float[Array, "*B M K"]], ws: Sequence[Float[Array, "K N"]]
) -> list[Float[Array, "*B M N"]]:
    """``y_d = sum_e x_e w_e``, equal on every device."""
    total = sum(reference.matmul(x, w) for x, w in zip(xs, ws, strict=True))
    return [jnp.asarray(total)] * len(xs)
