"""Layer normalization in Triton, for NVIDIA GPUs from Ampere on: the launch.

Axes: T rows, D columns.
"""

from typing import Any

import jax
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
    """See `pallas_kernels.layer_norm.xla.layer_norm`; x is [T,D]."""
    sizes = constants(x, eps)
    given = {"bias": bias, "residual": residual, "x_bias": x_bias}
    (y,) = triton_call(
        "layer_norm.normalize",
        (x, scale, *(scale if a is None else a for a in given.values())),
        [jax.ShapeDtypeStruct(x.shape, dtype)],
        grid=(-(-x.shape[0] // sizes["block_t"]),),
        num_warps=warps_of(x.shape[1]),
        num_stages=2,
        constants=sizes | {f"has_{n}": a is not None for n, a in given.items()},
    )
    return y


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


def warps_of(width: int) -> int:
    """Warps of a program that holds rows of `width` columns."""
    return 4 if width <= _AREA else 16
