"""Weights of fp8 matmuls that are rounded once for several passes over a model."""

import math
from typing import Any

import jax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxscale.sharding.fp8 import Fp8, Scaled, round_weights
from jaxscale.sharding.rules import AxisRules
from jaxscale.sharding.shards import Shards


def rounded_weight(
    w: Float[Array, "L K N"],
    axes: tuple[str | None, ...],
    *,
    rules: AxisRules,
    dtype: DTypeLike,
    quantization: Fp8,
) -> tuple[Scaled, Scaled] | None:
    """A stack of weights in fp8, [L, K, N] and [L, N, K], for `fp8.RoundedWeight`.

    Of weights that are stored in parts (FSDP), each device has some rows of both.

    Args:
        w: The parameters.
        axes: Their logical axes.
        rules: Mesh axes of each logical axis.
        dtype: Type of the computation, to which they are rounded first.
        quantization: A scale per row, per block, or one per tensor.

    Returns:
        Both layouts; None where matmuls round weights in another way: split by tensor
        parallelism, stored in parts of rows and of columns, or, without a scale per
        row, stored in parts at all.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxscale.sharding.rules import REPLICATED
        >>> w, axes = jnp.ones((1, 2, 4)), ("layers", "embed", "mlp")
        >>> rows, turned = rounded_weight(
        ...     w, axes, rules=REPLICATED, dtype=jnp.float32, quantization="fp8"
        ... )
        >>> rows.data.shape, turned.data.shape, turned.scale.shape
        ((1, 2, 4), (1, 4, 2), (1, 4))
    """
    shards = Shards.of([w], [axes], rules)
    sizes = shards.mesh.shape
    layers, rows, columns, tokens = (
        tuple(n for n in shards.names(axis) if sizes[n] > 1)
        for axis in (*axes, "tokens")
    )
    stored = rows or columns
    splitting = {*layers, *stored, *tokens} - shards.storing
    count = math.prod(sizes[name] for name in stored)
    if (
        (rows and columns)
        or splitting
        or (stored and quantization != "fp8")
        or any(size % count for size in w.shape[1:])
    ):
        return None
    dims = {"fp8_tensorwise": 1, "fp8": 2, "fp8_blockwise": 3}
    scale: Any = (None,) * dims[quantization or "fp8"]
    along: Any = (None, axes[1] if rows else axes[2] if columns else None, None)
    part = Scaled(along, scale)

    def local(w: Array) -> tuple[Scaled, Scaled]:
        return round_weights(w, dtype, quantization, rows=rows, columns=columns)

    (placed,) = shards.place([w])
    return shards.over(local, [part, part])(jax.lax.stop_gradient(placed))
