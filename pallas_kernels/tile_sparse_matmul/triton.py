"""The tile-sparse matmul in Triton, through jax-triton: Ampere, Ada and Hopper.

Triton turns the gather of rows of feature-major x into 16-byte cp.async into shared
memory, double-buffered by its pipeliner, and the matmuls into mma or wgmma. It shares
no weights between multiprocessors and its schedule is one block a program, so on Hopper
the Mosaic GPU kernel comes first.

Axes: M tokens, K input features, N packed output features, T tiles, P row capacity of a
tile, G columns of a tile.
"""

# ruff: noqa: ANN001, ANN202

import dataclasses
import functools
import importlib
from typing import Any, no_type_check

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Unsupported
from pallas_kernels.mosaic import DeviceSpec
from pallas_kernels.tile_sparse_matmul.config import TILES
from pallas_kernels.tile_sparse_matmul.format import STEP, TileSparse
from pallas_kernels.triton_call import check_generation, check_triton, triton_call


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
    """The tiling and launch of one matmul by Triton."""

    block_tokens: int
    """Tokens of a program; its features are those of a tile."""
    num_warps: int
    """Warps of a program."""
    num_stages: int
    """Depth of the pipeline; for gathers Triton buffers about half as many steps."""


def launch_of(tokens: int, tile: int, tiles: int, device: DeviceSpec) -> Launch:
    """Choose the launch of a matmul on a GPU.

    Args:
        tokens: M.
        tile: G.
        tiles: T.
        device: compute capability and number of multiprocessors.

    Returns:
        Blocks as large as registers and shared memory hold, but small enough that all
        multiprocessors have one.

    Example:
        >>> from pallas_kernels.mosaic import H200
        >>> launch_of(4096, 128, 32, H200).block_tokens
        256
        >>> launch_of(512, 128, 32, H200).block_tokens
        128
    """
    hopper = device.compute_capability[0] == 9
    most = min(32_768 // tile, 256) if hopper else min(16_384 // tile, 128)
    block = 16
    while block < min(tokens, most) and (
        block < 128 or -(-tokens // (2 * block)) * tiles >= device.num_sms
    ):
        block *= 2
    area = block * tile
    # 5 stages buffer three steps, 7 four. All but the A100 and Hopper have 99 KB.
    if hopper:
        stages = 5 if area > 16_384 else 7 if area > 8_192 else 9
    else:
        stages = 7 if device.compute_capability == (8, 0) else 5
    return Launch(
        block_tokens=block,
        num_warps=8 if area > 16_384 or (area == 16_384 and not hopper) else 4,
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
        launch = launch_of(tokens, w.tile, w.tiles, device)
    # jax-triton has no batching rule.
    run = jax.custom_batching.sequential_vmap(
        functools.partial(
            _call,
            features=w.packed_columns,
            activation=activation,
            y_major=y_major,
            launch=launch,
        )
    )
    y = run(x, w.values, w.rows, w.counts, bias)
    if y.shape[1 if y_major else 0] == tokens:
        return y
    return y[:, :tokens] if y_major else y[:tokens]


def _check(x: jax.Array, w: TileSparse, device: DeviceSpec | None) -> DeviceSpec:
    """Returns the device if the kernel serves the operands there."""
    device = check_generation(device, "tile_sparse_matmul")
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
    return check_triton(device, "tile_sparse_matmul")


def _call(
    x: jax.Array,
    values: jax.Array,
    rows: jax.Array,
    counts: jax.Array,
    bias: jax.Array | None,
    *,
    features: int,
    activation: str | None,
    y_major: bool,
    launch: Launch,
) -> jax.Array:
    (tiles, room, tile), tokens = values.shape, x.shape[1]
    shape = (features, tokens) if y_major else (tokens, features)
    (y,) = triton_call(
        tile_sparse_kernel(),
        (x, values, rows, counts, counts if bias is None else bias),  # some pointer
        [jax.ShapeDtypeStruct(shape, x.dtype)],
        name="tile_sparse_matmul_triton",
        grid=(-(-tokens // launch.block_tokens), tiles),
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        constants={
            "tokens": tokens,
            "features": features,
            "room": room,
            "tile": tile,
            "block_tokens": launch.block_tokens,
            "step": STEP,
            "has_bias": bias is not None,
            "activation": activation or "none",
            "y_major": y_major,
        },
    )
    return y


@functools.cache
def tile_sparse_kernel() -> Any:
    """The Triton function; made here because Triton may not be installed."""
    # Names as Triton's compiler must find them beside the source of the kernel.
    triton: Any = importlib.import_module("triton")
    tl: Any = importlib.import_module("triton.language")

    @triton.jit
    @no_type_check
    def kernel(
        x,
        values,
        rows,
        counts,
        bias,
        out,
        tokens: tl.constexpr,
        features: tl.constexpr,
        room: tl.constexpr,
        tile: tl.constexpr,
        block_tokens: tl.constexpr,
        step: tl.constexpr,
        has_bias: tl.constexpr,
        activation: tl.constexpr,
        y_major: tl.constexpr,
    ):
        """One tile of features by `block_tokens` tokens of ``values^T x[rows]``.

        x is [K,M]; out is [N,M], or [M,N] unless `y_major`.
        """
        # Programs that run together share a tile of the weight.
        block, number = tl.program_id(0), tl.program_id(1)
        token = block * block_tokens + tl.arange(0, block_tokens)
        token = tl.max_contiguous(tl.multiple_of(token, block_tokens), block_tokens)
        column = tl.arange(0, tile)
        count = tl.load(counts + number)
        sums = tl.zeros((tile, block_tokens), tl.float32)
        for first in range(0, count, step):
            place = number * room + first + tl.arange(0, step)
            row = tl.load(rows + place)
            source = x + row.to(tl.int64)[:, None] * tokens + token[None, :]
            if tokens % block_tokens == 0:
                part = tl.load(source)
            else:
                part = tl.load(source, mask=token[None, :] < tokens, other=0.0)
            weight = tl.load(
                values + place.to(tl.int64)[:, None] * tile + column[None, :]
            )
            sums = tl.dot(tl.trans(weight), part, sums)
        feature = number * tile + column
        inside = (feature[:, None] < features) & (token[None, :] < tokens)
        if has_bias:
            shift = tl.load(bias + feature, mask=feature < features, other=0.0)
            sums += shift.to(tl.float32)[:, None]
        if activation == "relu":
            sums = tl.maximum(sums, 0.0)
        elif activation == "silu":
            sums = sums * tl.sigmoid(sums)
        elif activation == "gelu":
            sums = 0.5 * sums * (1.0 + tl.erf(sums * 0.7071067811865476))
        elif activation == "gelu_tanh":
            # (1 + tanh(u)) / 2 = sigmoid(2 u)
            cubic = sums + 0.044715 * sums * sums * sums
            sums = sums * tl.sigmoid(1.5957691216057308 * cubic)
        if y_major:
            target = out + feature.to(tl.int64)[:, None] * tokens + token[None, :]
        else:
            target = out + token.to(tl.int64)[None, :] * features + feature[:, None]
        tl.store(target, sums.to(out.dtype.element_ty), mask=inside)

    return kernel
