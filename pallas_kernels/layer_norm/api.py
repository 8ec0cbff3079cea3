"""The public layer normalization.

Axis letters: B any leading axes, T rows, D columns.
"""

import dataclasses
import functools
import math
import string
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels import tuned_configs
from pallas_kernels.dispatch import check_floating, dispatch, no_config
from pallas_kernels.layer_norm import mosaic_gpu, triton, xla
from pallas_kernels.layer_norm.config import LayerNormConfig
from pallas_kernels.mosaic import (
    DeviceSpec,
    check_hopper,
    keep_mark,
    vary_alike,
)
from pallas_kernels.partition import by_shards, check_local


def layer_norm(
    x: Float[Array, "*B D"],
    scale: Float[Array, " _D"],
    bias: Float[Array, " _D"] | None = None,
    *,
    residual: Float[Array, "..."] | None = None,
    x_bias: Float[Array, " _D"] | None = None,
    eps: float,
    dtype: DTypeLike | None = None,
    implementation: str | Sequence[str] | None = None,
    config: LayerNormConfig | None = None,
) -> Float[Array, "*B D"]:
    """Layer normalization of a sum, over the last axis.

    ``h = x + x_bias + residual``

    ``y = (h - mean(h)) / sqrt(var(h) + eps) * scale + bias``

    Everything is computed in fp32; the variance is that of the centered values,
    accurate also for a large mean. On Hopper GPUs a kernel reads x and the residual
    once and writes y once. Differentiable; the gradients are XLA's and start from x and
    the residual.

    Args:
        x: ``[*B,D]`` activations.
        scale: [D], of any floating type.
        bias: [D], of any floating type; None adds nothing.
        residual: ``[*B,D]`` of the type of x; None adds nothing.
        x_bias: [D], of any floating type; None adds nothing. The bias of the matmul
            that made x, which would cost as much as the norm if it were added
            separately.
        eps: added to the variance; zero or positive.
        dtype: type of y; None is that of x.
        implementation: "mosaic_gpu" (Hopper; D a multiple of 64, at most 5120, at least
            4 rows), "triton" (Ampere and later; D at most 16,384; needs the extra
            ``triton``), "xla", a sequence of these, or None for the best.
        config: tiling of the kernel; None uses a heuristic. XLA refuses one.

    Returns:
        ``[*B,D]`` of `dtype`.

    Raises:
        ValueError: shapes disagree, or the types of x and the residual; a type is not
            floating or has fewer than 16 bits; eps is negative or not finite; or the
            config is another op's.
        Unsupported: the implementation named cannot serve the arguments here.
        ExceptionGroup: none of several implementations can.

    Example:
        >>> x, scale = jnp.array([[1.0, 0.0]]), jnp.ones(2)
        >>> layer_norm(x, scale, residual=jnp.array([[0.0, 3.0]]), eps=0.0)
        Array([[-1.,  1.]], dtype=float32)

    References:
        Layer Normalization, arXiv 1607.06450.
    """
    arrays = (x, scale, bias, residual, x_bias)
    _check(arrays)
    dtype = jnp.dtype(x.dtype if dtype is None else dtype)
    check_floating(dtype=dtype)
    if not (math.isfinite(eps) and eps >= 0):
        raise ValueError(f"eps {eps}, expected zero or a positive finite number")
    tuned_configs.check_config("layer_norm", config, LayerNormConfig)
    call = _Call(
        eps=eps,
        dtype=dtype,
        config=config,
        device=DeviceSpec.current(),
    )
    implementations = {"mosaic_gpu": _mosaic_gpu, "triton": _triton, "xla": _xla}

    def run(*arrays: Array | None) -> Array:
        return dispatch("layer_norm", implementations, implementation, arrays, call)

    rows = string.ascii_lowercase[: x.ndim - 1] + "D"
    dims = [rows, "D", "D", rows, "D"]
    return by_shards(run, arrays, dims, rows, gather=False)(*arrays)


type _Arrays = tuple[Array, Array, Array | None, Array | None, Array | None]
"""x, scale, bias, residual and x_bias."""

_NAMES = ("x", "scale", "bias", "residual", "x_bias")


def _check(arrays: _Arrays) -> None:
    x, _, _, residual, _ = arrays
    shapes = [None if a is None else a.shape for a in arrays]
    wanted = [x.shape, x.shape[-1:], x.shape[-1:], x.shape, x.shape[-1:]]
    fits = all(
        found in (None, want) for found, want in zip(shapes, wanted, strict=True)
    )
    if x.ndim == 0 or not fits:
        raise ValueError(
            f"x, scale, bias, residual and x_bias have shapes {shapes}, expected"
            " [*B, D], [D], [D], [*B, D] and [D], the last three or None"
        )
    if residual is not None and residual.dtype != x.dtype:
        raise ValueError(
            f"x and residual have types {x.dtype} and {residual.dtype}, expected one"
            " type; cast them"
        )
    given = zip(_NAMES, arrays, strict=True)
    check_floating(**{name: a.dtype for name, a in given if a is not None})


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Call:
    eps: float
    dtype: jnp.dtype
    config: LayerNormConfig | None
    device: DeviceSpec | None
    triton: bool = False


def _xla(arrays: _Arrays, call: _Call) -> Array:
    no_config("layer_norm", call.config)
    return _portable(arrays, call)


def _portable(arrays: _Arrays, call: _Call) -> Array:
    return xla.layer_norm(*arrays, eps=call.eps, dtype=call.dtype)


def _mosaic_gpu(arrays: _Arrays, call: _Call) -> Array:
    check_hopper(call.device, "layer_norm")
    return _by_kernel(arrays, call)


def _triton(arrays: _Arrays, call: _Call) -> Array:
    no_config("layer_norm", call.config, "Triton")
    triton.check(arrays[0], call.device)
    return _by_kernel(arrays, dataclasses.replace(call, triton=True))


def _by_kernel(arrays: _Arrays, call: _Call) -> Array:
    check_local("layer_norm", *arrays)
    x, scale, bias, residual, x_bias = arrays
    shape = (math.prod(x.shape[:-1]), x.shape[-1])  # [T,D]
    flat = None if residual is None else residual.reshape(shape)
    arrays = vary_alike((x.reshape(shape), scale, bias, flat, x_bias))
    y: Any = _jitted(arrays, call)
    return y.reshape(x.shape)  # [..,D]


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _layer_norm(arrays: _Arrays, call: _Call) -> Array:
    if call.triton:
        y = triton.layer_norm(*arrays, eps=call.eps, dtype=call.dtype)
    else:
        y = mosaic_gpu.layer_norm(
            *arrays,
            eps=call.eps,
            dtype=call.dtype,
            config=call.config,
            device=call.device,
        )
    return keep_mark(y, arrays[0])


def _forward(arrays: _Arrays, call: _Call) -> tuple[Any, _Arrays]:
    return _layer_norm(arrays, call), arrays


def _backward(call: _Call, arrays: _Arrays, dy: Array) -> tuple[_Arrays]:
    gradients = jax.vjp(functools.partial(_portable, call=call), arrays)[1](dy)
    return (gradients[0],)


_layer_norm.defvjp(_forward, _backward)
# The layers of a model are traced and lowered once.
_jitted = jax.jit(_layer_norm, static_argnums=1)
