"""Gradient rules of the collective matrix products, which are each other's.

The gradient of a gather is a reduction over the same devices, and the other way round,
so that a backward pass communicates through the same implementations.

Axis letters: B merged leading axes, m rows of a device, M rows of all, K contraction,
N columns, D devices of the axis.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.collective_matmul.implementations import Call, run
from pallas_kernels.matmul import implementations as local
from pallas_kernels.mosaic import as_varying, varying


__all__ = ["all_gather_matmul", "matmul_all_reduce", "matmul_reduce_scatter"]

type Arrays = tuple[jax.Array, ...]


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def all_gather_matmul(x: jax.Array, ws: Arrays, call: Call) -> Arrays:
    """Products [B,D*m,N_i] of each weight, then the gathered x if asked for."""
    ys, gathered = run("all_gather_matmul", x, ws, call)
    return (*ys, gathered) if call.return_gathered else ys


def _all_gather_forward(
    x: jax.Array, ws: Arrays, call: Call
) -> tuple[Arrays, tuple[Any, ...]]:
    ys, gathered = run("all_gather_matmul", x, ws, call)
    ys = checkpoint_name(ys, "all_gather_matmul_out")
    gathered = checkpoint_name(gathered, "all_gather_matmul_gathered")
    return ((*ys, gathered) if call.return_gathered else ys), (gathered, ws)


def _all_gather_backward(
    call: Call, saved: tuple[Any, ...], cotangents: Arrays
) -> tuple[jax.Array, Arrays]:
    gathered, ws = saved
    dys = tuple(dy.astype(gathered.dtype) for dy in cotangents[: len(ws)])
    transposed = call.transposed(gathered.dtype, return_gathered=False)
    dx = run("matmul_reduce_scatter", dys, ws, transposed)
    if call.return_gathered:
        dx += lax.psum_scatter(
            cotangents[-1], call.axis_name, scatter_dimension=1, tiled=True
        )
    pairs = zip(dys, ws, strict=True)
    return dx, tuple(_weight_gradient(gathered, dy, w, call) for dy, w in pairs)


all_gather_matmul.defvjp(_all_gather_forward, _all_gather_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def matmul_reduce_scatter(xs: Arrays, ws: Arrays, call: Call) -> jax.Array:
    """Rows [B,M/D,N] of the sum over pairs and devices."""
    return run("matmul_reduce_scatter", xs, ws, call)


def _reduce_scatter_forward(
    xs: Arrays, ws: Arrays, call: Call
) -> tuple[jax.Array, tuple[Arrays, Arrays]]:
    y = matmul_reduce_scatter(xs, ws, call)
    return checkpoint_name(y, "matmul_reduce_scatter_out"), (xs, ws)


def _reduce_scatter_backward(
    call: Call, saved: tuple[Arrays, Arrays], dy: jax.Array
) -> tuple[Arrays, Arrays]:
    xs, ws = saved
    dtype = xs[0].dtype
    transposed = call.transposed(dtype)
    dxs, gathered = run("all_gather_matmul", dy.astype(dtype), ws, transposed)
    pairs = zip(xs, ws, strict=True)
    return dxs, tuple(_weight_gradient(x, gathered, w, call) for x, w in pairs)


matmul_reduce_scatter.defvjp(_reduce_scatter_forward, _reduce_scatter_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def matmul_all_reduce(xs: Arrays, ws: Arrays, call: Call) -> jax.Array:
    """The sum over pairs and devices, [B,M,N] on each device."""
    return run("matmul_all_reduce", xs, ws, call)


def _all_reduce_forward(
    xs: Arrays, ws: Arrays, call: Call
) -> tuple[jax.Array, tuple[Arrays, Arrays]]:
    y = matmul_all_reduce(xs, ws, call)
    return checkpoint_name(y, "matmul_all_reduce_out"), (xs, ws)


def _all_reduce_backward(
    call: Call, saved: tuple[Arrays, Arrays], dy: jax.Array
) -> tuple[Arrays, Arrays]:
    xs, ws = saved
    dy = dy.astype(xs[0].dtype)
    # With tracked types the cotangent of what is equal everywhere is equal everywhere.
    # Without, every device holds the part of it that its own use of y gave.
    if not call.tracked:
        dy = lax.psum(dy, call.axis_name)
    dy = as_varying(dy, varying(*xs, *ws))
    rows = dy.reshape(math.prod(dy.shape[:-1]), dy.shape[-1])
    dxs = tuple(
        local.run(
            rows,
            w,
            _local(call),
            device=call.device,
            out_dtype=x.dtype,
            rhs_transposed=not call.rhs_transposed,
        ).reshape(x.shape)
        for x, w in zip(xs, ws, strict=True)
    )
    pairs = zip(xs, ws, strict=True)
    return dxs, tuple(_weight_gradient(x, dy, w, call) for x, w in pairs)


matmul_all_reduce.defvjp(_all_reduce_forward, _all_reduce_backward)


def _weight_gradient(
    x: jax.Array, dy: jax.Array, w: jax.Array, call: Call
) -> jax.Array:
    """``x^T dy``, or its transpose if the weight is stored so; sums are fp32."""
    left, right = (dy, x) if call.rhs_transposed else (x, dy)
    return local.run(
        left.reshape(math.prod(left.shape[:-1]), left.shape[-1]),
        right.reshape(math.prod(right.shape[:-1]), right.shape[-1]),
        _local(call),
        device=call.device,
        out_dtype=w.dtype,
        lhs_transposed=True,
    )


def _local(call: Call) -> str | None:
    """What multiplies without communication: XLA if the caller asked for XLA alone."""
    names: Sequence[str] = (
        (call.implementation,)
        if isinstance(call.implementation, str)
        else call.implementation or ()
    )
    return "xla" if names and all(n.startswith("xla") for n in names) else None
