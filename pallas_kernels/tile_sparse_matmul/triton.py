"""The tile-sparse matmul in Triton, for NVIDIA GPUs from Ampere on: the launches.

Triton turns the gather of rows of feature-major x into 16-byte cp.async into shared
memory, double-buffered by its pipeliner, and the matmuls into mma or wgmma. It shares
no weights between multiprocessors and its schedule is one block a program, so on Hopper
the Mosaic GPU kernel comes first.

Axes: M tokens, K input features, N packed output features, T tiles, P row capacity of a
tile, G columns of a tile.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Unsupported
from pallas_kernels.mosaic import DeviceSpec
from pallas_kernels.tile_sparse_matmul.config import TILES
from pallas_kernels.tile_sparse_matmul.format import STEP, TileSparse
from pallas_kernels.triton_call import check_triton, triton_call


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
    """The tiling and launch of one matmul by Triton."""

    block_tokens: int
    """Tokens of a program; its features are those of a tile."""
    num_warps: int
    """Warps of a program."""
    num_stages: int
    """Depth of the pipeline; for gathers Triton buffers about half as many steps."""


def launch_of(tokens: int, tile: int, device: DeviceSpec) -> Launch:
    """Choose the launch of a matmul on a GPU.

    Args:
        tokens: M.
        tile: G.
        device: its generation.

    Returns:
        On Hopper what was fastest on an H200, elsewhere blocks as large as registers
        and shared memory hold.

    Example:
        >>> from pallas_kernels.mosaic import H200
        >>> launch_of(4096, 128, H200).block_tokens
        128
        >>> launch_of(32, 128, H200).block_tokens
        32
    """
    hopper = device.compute_capability[0] == 9
    block = 16
    while block < min(tokens, 128, 16_384 // tile):
        block *= 2
    area = block * tile
    # 5 stages buffer three steps, 7 four. All but the A100 and Hopper have 99 KB.
    if hopper:
        stages = 5 if area > 8_192 else 7
    else:
        stages = 7 if device.compute_capability == (8, 0) else 5
    return Launch(
        block_tokens=block,
        num_warps=8 if area == 16_384 and not hopper else 4,
        num_stages=stages,
    )


def tile_sparse_matmul(
    x: jax.Array,
    w: TileSparse,
    bias: jax.Array | None = None,
    activation: str | None = None,
    *,
    feature_major: tuple[bool, bool],
    device: DeviceSpec | None,
    launch: Launch | None = None,
) -> jax.Array:
    """Computes the packed matmul with fp32 sums.

    Args:
        x: [M,K] activations, or [K,M]; bfloat16 or float16.
        w: weight; its `columns` are left to the caller.
        bias: [N] or None.
        activation: a name in `ACTIVATIONS`, or None.
        feature_major: how the input and the output are stored.
        device: the GPU at hand.
        launch: how to cut it; None asks `launch_of`.

    Returns:
        [M,N] of the type of x, or [N,M].

    Raises:
        Unsupported: the device, types or tile do not fit, or jax-triton is missing.
    """
    device = _check(x, w, device)
    x_major, y_major = feature_major
    x = x if x_major else x.T  # [K,M]: a kept row must be one run of memory
    tokens = x.shape[1]
    x = jnp.pad(x, ((0, 0), (0, -tokens % 8)))  # rows start at multiples of 16 bytes
    if launch is None:
        launch = launch_of(tokens, w.tile, device)
    features, padded = w.packed_columns, x.shape[1]
    (y,) = triton_call(
        "tile_sparse_matmul.multiply",
        # Without a bias it is some pointer.
        (x, w.values, w.rows, w.counts, w.counts if bias is None else bias),
        [
            jax.ShapeDtypeStruct(
                (features, padded) if y_major else (padded, features), x.dtype
            )
        ],
        grid=(-(-padded // launch.block_tokens), w.tiles),
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        constants={
            "tokens": padded,
            "features": features,
            "room": w.room,
            "tile": w.tile,
            "block_tokens": launch.block_tokens,
            "step": STEP,
            "has_bias": bias is not None,
            "activation": activation or "none",
            "y_major": y_major,
        },
    )
    if y.shape[1 if y_major else 0] == tokens:
        return y
    return y[:, :tokens] if y_major else y[:tokens]


def grad_values(
    x: jax.Array,
    dy: jax.Array,
    w: TileSparse,
    *,
    feature_major: tuple[bool, bool],
    device: DeviceSpec | None,
) -> jax.Array:
    """The gradient of the values, with fp32 sums.

    Args:
        x: [M,K] activations, or [K,M]; bfloat16 or float16.
        dy: [M,N] gradient of the packed output, or [N,M], of the type of x.
        w: weight.
        feature_major: how x and dy are stored.
        device: the GPU at hand.

    Returns:
        [T,P,G] of the type of the values, zero past the counts.

    Raises:
        Unsupported: the device, types or tile do not fit, or jax-triton is missing.
    """
    device = _check(x, w, device)
    x_major, y_major = feature_major
    x = x if x_major else x.T  # [K,M]: a kept row must be one run of memory
    tokens = x.shape[1]
    aligned = ((0, 0), (0, -tokens % 8))  # rows start at multiples of 16 bytes
    x = jnp.pad(x, aligned)
    dy = jnp.pad(dy, aligned) if y_major else dy
    launch = grad_launch_of(w.tile, device)
    features = dy.shape[0 if y_major else 1]
    (grad,) = triton_call(
        "tile_sparse_matmul.gradient_of_values",
        (x, dy, w.rows, w.counts),
        [jax.ShapeDtypeStruct(w.values.shape, w.values.dtype)],
        grid=(-(-w.room // launch.block_tokens), w.tiles),
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        constants=grad_constants(x, w.values, tokens, features, y_major, launch),
    )
    return grad


def grad_launch_of(tile: int, device: DeviceSpec) -> Launch:
    """Choose the launch of the gradient; its block is of rows, not of tokens."""
    return Launch(
        block_tokens=64 if tile == 256 else 128,
        num_warps=8 if tile >= 128 else 4,
        num_stages=3 if device.smem_bytes > 150_000 else 2,
    )


def grad_constants(
    x: Any, values: Any, tokens: int, features: int, y_major: bool, launch: Launch
) -> dict[str, Any]:
    """The constants of the kernel of the gradient."""
    _, room, tile = values.shape
    return {
        "tokens": tokens,
        "stride": x.shape[1],
        "features": features,
        "room": room,
        "tile": tile,
        "block_rows": launch.block_tokens,
        "step": STEP,
        "y_major": y_major,
    }


def _check(x: jax.Array, w: TileSparse, device: DeviceSpec | None) -> DeviceSpec:
    """Returns the device if the kernel serves the operands there."""
    device = check_triton(device, "tile_sparse_matmul")
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        raise Unsupported(
            f"tile_sparse_matmul: operands of type {x.dtype}, the Triton kernel takes"
            " bfloat16 or float16; cast them or use implementation='xla'"
        )
    if w.tile not in TILES or 0 in (*x.shape, *w.shape):
        raise Unsupported(
            f"tile_sparse_matmul: tile {w.tile} and x of shape {x.shape}, the Triton"
            f" kernel takes tiles of {TILES} and no empty operands; use"
            " implementation='xla'"
        )
    return device
