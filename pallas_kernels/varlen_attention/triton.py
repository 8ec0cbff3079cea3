"""Variable-length attention in Triton, for NVIDIA GPUs from Ampere on: the launches.

`triton_kernels` has the kernels and says how they walk; the choice of blocks is made
here. On Hopper the Mosaic GPU kernels come first.

Axes: R rows of the batch, B sequences, T packed queries, S packed keys, N query heads,
K key/value heads, H head dim of queries and keys, Hv head dim of values.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.dispatch import Unsupported, no_config
from pallas_kernels.mosaic import DeviceSpec, as_varying, varying
from pallas_kernels.partition import check_local
from pallas_kernels.triton_call import check_triton, triton_call
from pallas_kernels.varlen_attention.batching import LARGEST_INT, batched
from pallas_kernels.varlen_attention.inputs import (
    Inputs,
    Passes,
    Scores,
    check_arrays,
)


_WIDEST = 256  # head dim whose blocks the smallest of the GPUs hold


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
    """The blocks of a kernel and its launch."""

    block_q: int
    """Queries of a tile, or of a step where a tile is keys."""
    block_k: int
    """Keys of a step, or of a tile."""
    num_warps: int
    """Warps of a program."""
    num_stages: int
    """Steps in flight, and one more, where the kernel pipelines its loads."""
    late: bool = False
    """Whether weights of the forward pass meet their values a step later.

    On an H200 that was 10 to 13% faster with heads of 256, and slower with others.
    """


def launch_of(kernel: str, head_dim: int, length: int, device: DeviceSpec) -> Launch:
    """The blocks of a kernel of `triton_kernels`.

    Args:
        kernel: its name.
        head_dim: the larger of H and Hv.
        length: of a sequence on average, of queries or keys, whichever are longer.
        device: its generation and shared memory.

    Example:
        >>> from pallas_kernels.mosaic import H200
        >>> launch_of("forward", 128, 4096, H200)
        Launch(block_q=128, block_k=64, num_warps=8, num_stages=3, late=False)
    """
    size = next(n for n in (64, 128, 256) if head_dim <= n)
    memory = "large" if device.smem_bytes > 200_000 else "middle"
    if device.smem_bytes < 150_000:
        memory = "small"
    generation = device.compute_capability[0]
    tiles = _LAUNCHES[kernel, memory][size]
    if generation == 10:  # sums are in the memory of tensor cores
        tiles = _B200.get((kernel, size), tiles)
    if size == 64 and length <= _SHORT:
        tiles = _SHORT_LAUNCHES.get((kernel, generation), tiles)
    block_q, block_k, num_warps, num_stages = tiles
    return Launch(
        block_q=block_q,
        block_k=block_k,
        num_warps=num_warps,
        num_stages=num_stages,
        late=kernel == "forward" and size == 256 and generation == 9,
    )


_SHORT = 512
"""Average length up to which heads of 64 have tiles of their own."""

# By kernel and shared memory of a block: 227 KiB (Hopper and the B200), 163 (the A100),
# 99 (the others). Queries, keys, warps, stages, by head dim: on Hopper what was fastest
# of some on an H200, elsewhere the largest tiles whose registers hold them.
_LAUNCHES = {
    ("forward", "large"): {
        64: (64, 64, 4, 3),
        128: (128, 64, 8, 3),
        256: (128, 64, 8, 2),
    },
    ("forward", "middle"): {
        64: (128, 64, 8, 3),
        128: (128, 64, 8, 3),
        256: (64, 32, 8, 2),
    },
    ("forward", "small"): {
        64: (128, 64, 8, 3),
        128: (128, 64, 8, 3),
        256: (64, 32, 8, 2),
    },
    ("gradient_of_queries", "large"): {
        64: (128, 64, 4, 3),
        128: (128, 64, 8, 3),
        256: (128, 32, 8, 3),
    },
    ("gradient_of_queries", "middle"): {
        64: (64, 64, 4, 3),
        128: (128, 64, 8, 3),
        256: (64, 64, 8, 2),
    },
    ("gradient_of_queries", "small"): {
        64: (64, 64, 4, 3),
        128: (64, 64, 8, 2),
        256: (32, 32, 4, 2),
    },
    ("gradient_of_keys", "large"): {
        64: (128, 64, 4, 2),
        128: (64, 64, 4, 2),
        256: (64, 64, 8, 2),
    },
    ("gradient_of_keys", "middle"): {
        64: (32, 128, 8, 2),
        128: (64, 64, 8, 2),
        256: (16, 64, 8, 2),
    },
    ("gradient_of_keys", "small"): {
        64: (64, 32, 4, 2),
        128: (64, 64, 8, 2),
        256: (16, 64, 8, 2),
    },
}
_B200 = {
    ("gradient_of_queries", 256): (64, 64, 8, 2),
    ("gradient_of_keys", 64): (64, 128, 8, 1),
    ("gradient_of_keys", 128): (64, 128, 8, 1),
    ("gradient_of_keys", 256): (64, 64, 8, 1),
}
# Heads of 64 in short sequences, by kernel and generation, where larger tiles hold too
# much padding.
_SHORT_LAUNCHES = {
    ("forward", 8): (64, 64, 4, 3),
    ("forward", 12): (64, 64, 4, 3),
    ("gradient_of_queries", 9): (64, 64, 4, 3),
    ("gradient_of_queries", 10): (64, 64, 4, 3),
    ("gradient_of_keys", 8): (32, 64, 4, 2),
    ("gradient_of_keys", 12): (32, 64, 4, 2),
}


def varlen_attention_triton(
    x: Inputs, scores: Scores, *, device: DeviceSpec | None, config: object
) -> Passes:
    """The passes by the Triton kernels, if they can serve the inputs."""
    device = check_triton(device, "varlen_attention")
    no_config("varlen_attention", config, "Triton")
    check_local("varlen_attention", x.q, x.k, x.v)
    check_arrays(x, _WIDEST, "the Triton kernel")
    if scores.relative is not None:
        raise Unsupported(
            "varlen_attention: the Triton kernel has no relative bias; use"
            " implementation='xla'"
        )
    for name, a in (("q", x.q), ("k", x.k), ("v", x.v)):
        if (size := math.prod(a.shape[1:])) > LARGEST_INT:
            raise Unsupported(
                f"varlen_attention: {name} has {size} elements in a row, the kernel "
                f"counts to {LARGEST_INT}; split it or use implementation='xla'"
            )
    return _Kernels(scores, device)


@dataclasses.dataclass(frozen=True)
class _Kernels:
    """The passes by the Triton kernels."""

    scores: Scores
    device: DeviceSpec

    def forward(self, x: Inputs, with_rest: bool) -> tuple[Array, Array, Array | None]:
        """``(out, lse, rest)``."""
        x = x.numbers_by_row()
        axes = varying(*jax.tree.leaves(x))
        results = batched(functools.partial(self._forward, with_rest))(x)
        out, lse, *rest = (as_varying(a, axes) for a in results)
        return out, lse, rest[0] if with_rest else None

    def _forward(self, with_rest: bool, x: Inputs) -> tuple[Array, ...]:
        x = x.with_known()
        launch = self._launch("forward", x)
        out = jax.ShapeDtypeStruct((*x.q.shape[:3], x.v.shape[3]), x.q.dtype)
        lse = jax.ShapeDtypeStruct(x.q.shape[:3], jnp.float32)
        # A kernel has all its outputs; without a rest its pointer is not used.
        results = self._call(
            "forward",
            (x.q, x.k, x.v, *_packing(x), _pointer(x.sinks), _pointer(x.slopes)),
            (out, lse, out if with_rest else jax.ShapeDtypeStruct((1,), out.dtype)),
            (_tiles(x.q, x, launch.block_q), x.q.shape[2], x.q.shape[0]),
            launch,
            x,
            has_sinks=x.sinks is not None,
            with_rest=with_rest,
            late=launch.late,
        )
        return results if with_rest else results[:2]

    def backward(self, x: Inputs, dout: Array, lse: Array, delta: Array) -> Inputs:
        """The gradients."""
        by_row = x._replace(sinks=None).numbers_by_row()
        axes = varying(*jax.tree.leaves((by_row, dout)))
        grads = batched(self._backward)(by_row, dout, lse, delta)
        dq, dk, dv, *more = (as_varying(a, axes) for a in grads)
        grads = x._replace(q=dq, k=dk, v=dv)
        if x.slopes is not None:
            slopes = jnp.sum(more[0], axis=0)  # [R, N] to [N]
            grads = grads._replace(slopes=slopes.astype(x.slopes.dtype))
        return grads

    def _backward(
        self, x: Inputs, dout: Array, lse: Array, delta: Array
    ) -> tuple[Array, ...]:
        x = x.with_known()
        rows, _, heads, _ = x.q.shape
        packing, slopes = _packing(x), _pointer(x.slopes)
        launch = self._launch("gradient_of_queries", x)
        tiles = _tiles(x.q, x, launch.block_q)
        numbers = jax.ShapeDtypeStruct((rows, heads, x.q.shape[1]), jnp.float32)
        of_tiles = (rows, tiles, heads) if x.slopes is not None else (1,)
        dq, lse, delta, dslopes = self._call(
            "gradient_of_queries",
            (x.q, x.k, x.v, dout, lse, delta, *packing, slopes),
            (_like(x.q), *[numbers] * 2, jax.ShapeDtypeStruct(of_tiles, jnp.float32)),
            (tiles, heads, rows),
            launch,
            x,
        )
        launch = self._launch("gradient_of_keys", x)
        dk, dv = self._call(
            "gradient_of_keys",
            (x.q, x.k, x.v, dout, lse, delta, *packing, slopes),
            (_like(x.k), _like(x.v)),
            (_tiles(x.k, x, launch.block_k), x.k.shape[2], rows),
            launch,
            x,
        )
        if x.slopes is None:
            return dq, dk, dv
        return dq, dk, dv, jnp.sum(dslopes, axis=1)  # [R, N]

    def _launch(self, kernel: str, x: Inputs) -> Launch:
        head_dim = max(x.q.shape[3], x.v.shape[3])
        rows = max(x.q.shape[1], x.k.shape[1])
        length = math.ceil(rows / (x.cu_q.shape[1] - 1))
        return launch_of(kernel, head_dim, length, self.device)

    def _call(
        self,
        kernel: str,
        arrays: tuple[Any, ...],
        outputs: tuple[jax.ShapeDtypeStruct, ...],
        grid: tuple[int, ...],
        launch: Launch,
        x: Inputs,
        **constants: Any,
    ) -> tuple[Array, ...]:
        return triton_call(
            f"varlen_attention.{kernel}",
            arrays,
            outputs,
            grid=grid,
            num_warps=launch.num_warps,
            num_stages=launch.num_stages,
            constants=kernel_constants(x, self.scores, launch) | constants,
        )


def kernel_constants(x: Inputs, scores: Scores, launch: Launch) -> dict[str, Any]:
    """The constants that all kernels have."""
    left, right = (-1 if side is None else side for side in scores.window)
    return {
        "queries": x.q.shape[1],
        "keys": x.k.shape[1],
        "heads": x.q.shape[2],
        "kv_heads": x.k.shape[2],
        "head_dim": x.q.shape[3],
        "value_dim": x.v.shape[3],
        "bounds": x.cu_q.shape[1],
        "halvings": (x.cu_q.shape[1] - 1).bit_length(),
        "block_q": launch.block_q,
        "block_k": launch.block_k,
        "block_h": _block(x.q.shape[3]),
        "block_v": _block(x.v.shape[3]),
        "scale": scores.scale,
        "softcap": scores.softcap or 0.0,
        "left": left,
        "right": right,
        "has_slopes": x.slopes is not None,
    }


def _block(head_dim: int) -> int:
    """Columns of a tile: a power of two that tensor cores take."""
    return max(16, 1 << (head_dim - 1).bit_length())


def _packing(x: Inputs) -> tuple[Array, Array]:
    return jnp.asarray(x.cu_q), jnp.asarray(x.packing_of_keys)


def _tiles(a: Array, x: Inputs, block: int) -> int:
    """Tiles of the rows of an array, as many as any packing needs.

    Rows past the last sequence are cut into tiles too.
    """
    return a.shape[1] // block + x.cu_q.shape[1]


def _pointer(a: Array | None) -> Array:
    """An array of fp32, which is not read where it is not given."""
    return jnp.zeros((1,), jnp.float32) if a is None else a


def _like(a: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(a.shape, a.dtype)
