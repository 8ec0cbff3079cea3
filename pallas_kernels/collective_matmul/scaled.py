"""Collective fp8 matmuls with scales: the public functions.

Rows are communicated in fp8, half the bytes of 16-bit types. Both functions are called
inside `jax.shard_map`, on the arrays of one device.

Axis letters: B any leading axes, m rows of a device, M rows of all devices, K
contraction, N columns, D devices of the axis.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.collective_matmul import (
    mosaic_gpu_gather,
    mosaic_gpu_reduce,
    xla,
)
from pallas_kernels.collective_matmul.config import Call, CollectiveConfig
from pallas_kernels.collective_matmul.layout import ScaledArray
from pallas_kernels.collective_matmul.ops import Op, run
from pallas_kernels.dispatch import as_hashable, check_floating, no_derivative
from pallas_kernels.mosaic import DeviceSpec, vary_alike
from pallas_kernels.scaled_matmul import scaled_matmul
from pallas_kernels.scaled_matmul.api import check_operands


def scaled_all_gather_matmul(
    a: Float[Array, "*B m K"],
    b: Float[Array, "N _K"] | Sequence[Float[Array, "_ _"]],
    a_scale: Float[Array, "..."],
    b_scale: Float[Array, "..."] | Sequence[Float[Array, "..."]],
    *,
    axis_name: str,
    return_gathered: bool = False,
    out_dtype: DTypeLike = jnp.bfloat16,
    implementation: str | Sequence[str] | None = None,
    config: CollectiveConfig | None = None,
) -> Any:
    """All-gathers the fp8 rows of all devices and multiplies them by this device's
    weight.

    It is `all_gather_matmul` for the operands of `scaled_matmul`: rows ``d m`` to
    ``(d+1) m`` of the result are those of device d. The rows are sent in fp8; scales
    per row are gathered first. Several weights share one all-gather.

    With ``implementation=None`` the kernel runs if the table of tuned problems says
    that it is faster than XLA or within 2%, and on four H100s from 2,048 rows of all
    devices on. Not differentiable.

    Args:
        a: ``[*B,m,K]`` float8_e4m3fn or float8_e5m2, the rows of this device.
        b: [N,K] of either type, the columns of this device; or a sequence of such
            weights, whose N may differ.
        a_scale: fp32 scales of a: ``[*B,m]``, or [] for the rows of all devices, equal
            on all of them.
        b_scale: fp32 scales of b: [N] or []; or a sequence, one for each weight.
        axis_name: mesh axis to gather over.
        return_gathered: also return the rows of all devices, which are a by-product,
            and their scales.
        out_dtype: type of y.
        implementation: "mosaic_gpu" (one Hopper kernel), "xla" (a collective, then the
            matmul), a sequence of these, or None for the best.
        config: tiling of the kernel, with ``tile_k=128``; None looks it up.

    Returns:
        ``[*B,D*m,N]``; of a sequence of weights, a tuple. With `return_gathered` the
        triple of that, the gathered a, ``[*B,D*m,K]``, and its scales, ``[*B,D*m]`` or
        a_scale if that is [].

    Raises:
        ValueError: shapes or types disagree, or `axis_name` is no axis of an enclosing
            `jax.shard_map`.
        Unsupported: the implementation named cannot serve the arguments here.
        ExceptionGroup: none of several implementations can.
        NotImplementedError: the call is differentiated.

    Example:
        >>> import functools, jax
        >>> from jax.sharding import AxisType, PartitionSpec as P
        >>> from pallas_kernels.scaled_matmul import quantize_fp8
        >>> mesh = jax.make_mesh((4,), ("tensor",), axis_types=(AxisType.Auto,))
        >>> a, a_scale = quantize_fp8(jax.random.normal(jax.random.key(0), (8, 16)))
        >>> b, b_scale = quantize_fp8(jax.random.normal(jax.random.key(1), (12, 16)))
        >>> f = jax.shard_map(
        ...     functools.partial(scaled_all_gather_matmul, axis_name="tensor"),
        ...     mesh=mesh, in_specs=(P("tensor"), P("tensor"), P(), P()),
        ...     out_specs=P(None, "tensor"))
        >>> y = jax.jit(f)(a, b, a_scale, b_scale)
        >>> want = (a.astype("float32") * a_scale) @ (b.astype("float32") * b_scale).T
        >>> bool(jax.numpy.allclose(y.astype("float32"), want, atol=0.1))
        True
    """
    several = isinstance(b, Sequence)
    bs: Any = b if several else (b,)
    b_scales: Any = b_scale if several else (b_scale,)
    if len(bs) != len(b_scales) or not bs:
        raise ValueError(
            f"b holds {len(bs)} weights and b_scale {len(b_scales)} scales, expected a"
            " scale for each weight"
        )
    for weight, scale in zip(bs, b_scales, strict=True):
        check_operands(a, weight, a_scale, scale)
    call = _call(
        axis_name,
        out_dtype,
        implementation,
        config,
        return_gathered=return_gathered,
    )
    arrays = _alike((a, a_scale, tuple(bs), tuple(b_scales)), call)
    outs = _all_gather(*arrays, call=call)
    outs = [y.reshape(*a.shape[:-2], *y.shape[1:]) for y in outs]  # [..,D*m,N]
    ys, kept = outs[: len(bs)], outs[len(bs) :]
    y = tuple(ys) if several else ys[0]
    if not return_gathered:
        return y
    gathered, scale = kept
    return y, gathered, scale[..., 0] if a_scale.ndim else a_scale


def scaled_matmul_reduce_scatter(
    a: Float[Array, "*B M K"],
    b: Float[Array, "N _K"],
    a_scale: Float[Array, "..."],
    b_scale: Float[Array, "..."],
    *,
    axis_name: str,
    out_dtype: DTypeLike = jnp.bfloat16,
    implementation: str | Sequence[str] | None = None,
    config: CollectiveConfig | None = None,
) -> Float[Array, "*B m N"]:
    """Multiplies fp8 operands and reduce-scatters: leaves each device its rows.

    It is `matmul_reduce_scatter` for the operands of `scaled_matmul`. Each device
    scales its partial sums before they are sent, in `out_dtype`: scales may differ
    between devices.

    With ``implementation=None`` the kernel runs if the table of tuned problems says
    that it is faster than XLA or within 2%, and on four H100s from 2,048 rows of all
    devices on. Not differentiable.

    Args:
        a: ``[*B,M,K]`` float8_e4m3fn or float8_e5m2, the features of this device.
        b: [N,K] of either type, the features of this device.
        a_scale: fp32 scales of a: ``[*B,M]`` or [].
        b_scale: fp32 scales of b: [N] or [].
        axis_name: mesh axis to sum over, of D devices; D divides M.
        out_dtype: type of y and of the partial sums sent; the kernel takes bfloat16,
            float16.
        implementation: as in `scaled_all_gather_matmul`.
        config: as in `scaled_all_gather_matmul`.

    Returns:
        ``[*B,M/D,N]``.

    Raises:
        ValueError: as `scaled_all_gather_matmul`, or D does not divide M.
        Unsupported: the implementation named cannot serve the arguments here.
        ExceptionGroup: none of several implementations can.
        NotImplementedError: the call is differentiated.

    Example:
        >>> import functools, jax
        >>> from jax.sharding import AxisType, PartitionSpec as P
        >>> from pallas_kernels.scaled_matmul import quantize_fp8
        >>> mesh = jax.make_mesh((4,), ("tensor",), axis_types=(AxisType.Auto,))
        >>> a, a_scale = quantize_fp8(jax.random.normal(jax.random.key(0), (8, 16)))
        >>> b, b_scale = quantize_fp8(jax.random.normal(jax.random.key(1), (12, 16)))
        >>> f = jax.shard_map(
        ...     functools.partial(scaled_matmul_reduce_scatter, axis_name="tensor"),
        ...     mesh=mesh, in_specs=(P(None, "tensor"), P(None, "tensor"), P(), P()),
        ...     out_specs=P("tensor"))
        >>> y = jax.jit(f)(a, b, a_scale, b_scale)
        >>> want = (a.astype("float32") * a_scale) @ (b.astype("float32") * b_scale).T
        >>> bool(jax.numpy.allclose(y.astype("float32"), want, atol=0.1))
        True
    """
    check_operands(a, b, a_scale, b_scale)
    call = _call(axis_name, out_dtype, implementation, config)
    if a.shape[-2] % call.size:
        raise ValueError(
            f"a has shape {a.shape}, expected rows M={a.shape[-2]} in multiples of the"
            f" {call.size} devices of axis {axis_name!r}; pad the rows"
        )
    y = _reduce_scatter(*_alike((a, b, a_scale, b_scale), call), call=call)
    return y.reshape(*a.shape[:-2], *y.shape[1:])  # [..,M/D,N]


def _call(
    axis_name: str,
    out_dtype: DTypeLike,
    implementation: str | Sequence[str] | None,
    config: CollectiveConfig | None,
    *,
    return_gathered: bool = False,
) -> Call:
    check_floating(out_dtype=out_dtype)
    return Call.over(
        axis_name,
        rhs_transposed=True,
        out_dtype=jnp.dtype(out_dtype),
        implementation=as_hashable(implementation),
        config=config,
        device=DeviceSpec.current(),
        return_gathered=return_gathered,
    )


def _alike(arrays: Any, call: Call) -> Any:
    """All arrays, marked as varying over the axis and where any of them does.

    Differentiation by them raises.
    """
    arrays = no_derivative(arrays, _NO_DERIVATIVE)
    if not call.tracked:
        return arrays
    _, arrays = vary_alike((lax.axis_index(call.axis_name), arrays))
    return arrays


def _by_row(scale: jax.Array, rows: Sequence[int]) -> jax.Array:
    return jnp.broadcast_to(scale, tuple(rows))


_NO_DERIVATIVE = (
    "collective products of 8-bit operands have no derivatives: rounding to 8 bits"
    " has none; give the layer that rounds its operands a gradient rule of its own"
)


def _all_gather(
    a: jax.Array, a_scale: jax.Array, bs: Any, b_scales: Any, call: Call
) -> tuple[jax.Array, ...]:
    *batch, rows, depth = a.shape
    batch = math.prod(batch)
    if a_scale.ndim and a_scale.size:  # XLA waits forever in an empty collective
        own = a_scale.reshape(batch, 1, rows)
        scale = lax.all_gather(own, call.axis_name, axis=1, tiled=True)  # [B,D,m]
    else:
        own = _by_row(a_scale, a.shape[:-1]).reshape(batch, 1, rows)
        scale = jnp.broadcast_to(own, (batch, call.size, rows))
    x = ScaledArray(a.reshape(batch, rows, depth), scale)
    ws = tuple(
        ScaledArray(b, _by_row(scale, b.shape[:1]))
        for b, scale in zip(bs, b_scales, strict=True)
    )
    ys, gathered = run(SCALED_ALL_GATHER, x, ws, call)
    if not call.return_gathered:
        return ys
    return *ys, gathered, scale.reshape(batch, call.size * rows, 1)  # [B,M,1]


def _reduce_scatter(
    a: jax.Array, b: jax.Array, a_scale: jax.Array, b_scale: jax.Array, call: Call
) -> jax.Array:
    *batch, rows, depth = a.shape
    batch = math.prod(batch)
    scale = _by_row(a_scale, a.shape[:-1])
    x = ScaledArray(
        a.reshape(batch, rows, depth),
        scale.reshape(batch, call.size, rows // call.size),  # [B,D,m]
    )
    w = ScaledArray(b, _by_row(b_scale, b.shape[:1]))
    return run(SCALED_REDUCE_SCATTER, (x,), (w,), call)


# --- Implementations ------------------------------------------------------------------


def _product(x: jax.Array, scale: jax.Array, w: ScaledArray, call: Call) -> jax.Array:
    """[B,M,K] and the scales [B,D,m] of its rows times a weight: [B,M,N]."""
    y = scaled_matmul(
        x,
        w.values,
        scale.reshape(x.shape[:-1]),
        w.scale,
        out_dtype=call.out_dtype,
        implementation="xla" if call.implementation == "xla" else None,
    )
    return y


def _xla_all_gather(
    x: ScaledArray, ws: Any, call: Call
) -> tuple[tuple[jax.Array, ...], jax.Array | None]:
    gathered = xla.all_gather(x.values, call.axis_name)
    ys = tuple(_product(gathered, x.scale, w, call) for w in ws)
    return ys, gathered if call.return_gathered else None


def _xla_reduce_scatter(xs: Any, ws: Any, call: Call) -> jax.Array:
    (x,), (w,) = xs, ws
    return xla.reduce_scatter(_product(x.values, x.scale, w, call), call.axis_name)


SCALED_ALL_GATHER = Op(
    name="scaled_all_gather_matmul",
    kind="all_gather",
    kernel=mosaic_gpu_gather.all_gather_matmul,
    xla=_xla_all_gather,
)
SCALED_REDUCE_SCATTER = Op(
    name="scaled_matmul_reduce_scatter",
    kind="reduce_scatter",
    kernel=mosaic_gpu_reduce.matmul_reduce_scatter,
    xla=_xla_reduce_scatter,
)
