"""The matmul with a quantized weight in Triton, from Ampere on: the launch.

Axes: M tokens, K input features, N output features.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.dispatch import Unsupported
from pallas_kernels.mosaic import DeviceSpec
from pallas_kernels.triton_call import check_triton, triton_call


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
    """The tile of a program and its launch."""

    block_m: int
    """Tokens."""
    block_n: int
    """Output features."""
    block_k: int
    """Input features of a step."""
    num_warps: int
    """Warps of a program."""
    num_stages: int
    """Steps in flight, and one more."""
    weight_first: bool
    """Whether the weight is the first operand; the kernel says why."""


def launch_of(tokens: int, features: int, device: DeviceSpec) -> Launch:
    """Choose the tile: few tokens read the weight with all multiprocessors.

    Args:
        tokens: M.
        features: N.
        device: its shared memory and number of multiprocessors.

    Example:
        >>> from pallas_kernels.mosaic import H200
        >>> launch_of(1, 4096, H200).block_n, launch_of(4096, 14336, H200).num_warps
        (32, 4)
    """
    major, _ = device.compute_capability
    weight_first = major not in (9, 10)
    if tokens > 64:
        large = device.smem_bytes > 150_000
        return Launch(
            block_m=128,
            block_n=128,
            block_k=64,
            num_warps=8 if weight_first else 4,
            num_stages=4 if large and weight_first else 3,
            weight_first=weight_first,
        )
    block_m = max(16, 1 << (tokens - 1).bit_length())
    block_n = 2 * block_m
    while block_n > 32 and features // block_n < device.num_sms:
        block_n //= 2
    return Launch(
        block_m=block_m,
        block_n=block_n,
        block_k=256 if block_m == 16 else 128,
        num_warps=2 if block_m == 16 else 4,
        num_stages=3 if block_m == 64 else 4,
        weight_first=weight_first,
    )


def quantized_matmul(
    x: jax.Array,
    w: jax.Array,
    scale: jax.Array,
    *,
    device: DeviceSpec | None,
    out_dtype: DTypeLike,
) -> jax.Array:
    """Computes ``(x @ w.T) * scale`` with fp32 sums.

    Args:
        x: [M,K], bfloat16 or float16.
        w: [N,K], int8 or float8_e4m3fn.
        scale: [N], fp32.
        device: the GPU at hand.
        out_dtype: type of the output.

    Returns:
        [M,N] of `out_dtype`.

    Raises:
        Unsupported: the device or types do not fit, or jax-triton is missing.
    """
    device = check_triton(device, "quantized_matmul")
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        raise Unsupported(
            f"quantized_matmul: x of type {x.dtype}, the Triton kernel takes bfloat16"
            " or float16; cast it or use implementation='xla'"
        )
    if w.dtype != jnp.int8 and device.compute_capability < (8, 9):
        raise Unsupported(
            f"quantized_matmul: a weight of type {w.dtype} on {device.name}, the Triton"
            " kernel reads fp8 from compute capability 8.9 on; use int8 or"
            " implementation='xla'"
        )
    if 0 in (*x.shape, *w.shape):
        raise Unsupported(
            f"quantized_matmul: empty operands {x.shape} and {w.shape}; use"
            " implementation='xla'"
        )
    tokens, features = x.shape[0], w.shape[0]
    launch = launch_of(tokens, features, device)
    (y,) = triton_call(
        "quantized_matmul.multiply",
        (x, w, scale),
        [jax.ShapeDtypeStruct((tokens, features), out_dtype)],
        grid=(-(-features // launch.block_n), -(-tokens // launch.block_m)),
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        constants=constants(x, w, launch),
    )
    return y


def constants(x: Any, w: Any, launch: Launch) -> dict[str, Any]:
    """The constants of the kernel."""
    return {
        "tokens": x.shape[0],
        "depth": x.shape[1],
        "features": w.shape[0],
        "block_m": launch.block_m,
        "block_n": launch.block_n,
        "block_k": launch.block_k,
        "weight_first": launch.weight_first,
    }
