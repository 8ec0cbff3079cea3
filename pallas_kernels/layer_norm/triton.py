"""Layer normalization in Triton, for NVIDIA GPUs from Ampere on: the launch.

Axes: T rows, D columns.
"""

import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.dispatch import Unsupported
from pallas_kernels.mosaic import DeviceSpec
from pallas_kernels.triton_call import check_triton, triton_call


_WIDEST = 16_384  # columns of a row, which a program holds in registers
_AREA = 4096  # elements of a program, where rows are short


def check(x: jax.Array, device: DeviceSpec | None) -> None:
    """Whether the kernel takes ``[*B,D]`` activations.

    Raises:
        Unsupported: it does not, or jax-triton is missing.
    """
    check_triton(device, "layer_norm")
    if not 0 < x.shape[-1] <= _WIDEST or 0 in x.shape:
        raise Unsupported(
            f"layer_norm: x of shape {x.shape}, the Triton kernel takes 1 to {_WIDEST}"
            " columns and no empty arrays; use implementation='xla'"
        )
    if x.dtype.itemsize > 4:
        raise Unsupported(
            f"layer_norm: type {x.dtype}, the Triton kernel takes at most 32 bits; use"
            " implementation='xla'"
        )


def layer_norm(
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array | None,
    residual: jax.Array | None,
    x_bias: jax.Array | None,
    *,
    eps: float,
    dtype: DTypeLike,
) -> jax.Array:
    """Normalizes ``x + x_bias + residual``; the sum and the statistics are fp32.

    Args:
        x: [T,D].
        scale: [D].
        bias: [D], or None.
        residual: [T,D], or None.
        x_bias: [D], or None.
        eps: added to the variance.
        dtype: type of the output.

    Returns:
        [T,D] of `dtype`.
    """
    # jax-triton has no batching rule.
    run = jax.custom_batching.sequential_vmap(
        functools.partial(_call, eps=eps, dtype=jnp.dtype(dtype))
    )
    return run(x, scale, bias, residual, x_bias)


def constants(x: Any, eps: float) -> dict[str, Any]:
    """The constants of the kernel that depend on shapes."""
    block_d = max(16, 1 << (x.shape[1] - 1).bit_length())
    return {
        "rows": x.shape[0],
        "width": x.shape[1],
        "eps": eps,
        "block_t": max(1, _AREA // block_d),
        "block_d": block_d,
    }


def _call(
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array | None,
    residual: jax.Array | None,
    x_bias: jax.Array | None,
    *,
    eps: float,
    dtype: jnp.dtype,
) -> jax.Array:
    # Here, because Triton may not be installed.
    kernels = importlib.import_module("pallas_kernels.layer_norm.triton_kernels")
    sizes = constants(x, eps)
    given = {"bias": bias, "residual": residual, "x_bias": x_bias}
    (y,) = triton_call(
        kernels.normalize,
        (x, scale, *(scale if a is None else a for a in given.values())),
        [jax.ShapeDtypeStruct(x.shape, dtype)],
        name="layer_norm_triton",
        grid=(-(-x.shape[0] // sizes["block_t"]),),
        num_warps=warps_of(x.shape[1]),
        num_stages=2,
        constants=sizes | {f"has_{n}": a is not None for n, a in given.items()},
    )
    return y


def warps_of(width: int) -> int:
    """Warps of a program that holds rows of `width` columns."""
    return 4 if width <= _AREA else 16
