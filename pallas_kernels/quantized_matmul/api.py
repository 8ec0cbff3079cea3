"""The public matmul with a quantized weight.

Axis letters: B any leading axes, M tokens, K input features, N output features.
"""

import dataclasses
import math
import string
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Num

from pallas_kernels import tuned_configs
from pallas_kernels.dispatch import (
    as_hashable,
    check_floating,
    dispatch,
    no_config,
    no_derivative,
)
from pallas_kernels.mosaic import (
    DeviceSpec,
    keep_mark,
    vary_alike,
)
from pallas_kernels.partition import by_shards, check_local
from pallas_kernels.quantized_matmul import mosaic_gpu, triton, xla
from pallas_kernels.quantized_matmul.config import (
    Problem,
    QuantizedMatmulConfig,
    heuristic,
)


WEIGHT_DTYPES = ("int8", "float8_e4m3fn")
"""Types of a quantized weight."""


def quantized_matmul(
    x: Float[Array, "*B M K"],
    w: Num[Array, "N _K"],
    scale: Float[Array, " _N"],
    *,
    out_dtype: DTypeLike | None = None,
    implementation: str | Sequence[str] | None = None,
    config: QuantizedMatmulConfig | None = None,
) -> Float[Array, "*B M N"]:
    """Multiplies activations by an 8-bit weight, with fp32 accumulation.

    ``y[..., m, n] = scale[n] sum_k x[..., m, k] w[n, k]``

    On Hopper GPUs a kernel reads the weight in one byte per value and converts it in
    registers, for any number of tokens: XLA may write a whole copy of it in the type of
    x. The sums are fp32 and are scaled before they are rounded. Not differentiable.

    Args:
        x: ``[*B,M,K]`` activations; leading axes are merged with M.
        w: [N,K] int8 or float8_e4m3fn, without NaN: an output feature is a row.
        scale: [N] fp32, the scale of each output feature.
        out_dtype: type of y; that of x by default.
        implementation: "mosaic_gpu" (Hopper; bfloat16 x, K a multiple of 64, N of 8),
            "triton" (Ampere and later; bfloat16 or float16 x, fp8 from compute
            capability 8.9 on; needs the extra ``triton``), "xla", a sequence of these,
            or None for the first that can.
        config: tiling of the kernel; None looks it up in
            `pallas_kernels.tuned_configs`. XLA refuses one given here.

    Returns:
        ``[*B,M,N]`` of `out_dtype`.

    Raises:
        ValueError: shapes or types disagree, or the config is another op's.
        Unsupported: the implementation named cannot serve the arguments here.
        ExceptionGroup: none of several implementations can.
        NotImplementedError: the call is differentiated.

    Example:
        >>> x, w = jnp.array([[1.0, 2.0]]), jnp.array([[3, 0], [1, -1]], jnp.int8)
        >>> quantized_matmul(x, w, jnp.array([0.5, 10.0]))
        Array([[  1.5, -10. ]], dtype=float32)
    """
    _check(x, w, scale)
    out_dtype = jnp.dtype(x.dtype if out_dtype is None else out_dtype)
    check_floating(x=x.dtype, out_dtype=out_dtype)
    tuned_configs.check_config("quantized_matmul", config, QuantizedMatmulConfig)
    call = _Call(
        out_dtype=out_dtype,
        implementation=as_hashable(implementation),
        config=config,
        device=DeviceSpec.current(),
    )

    def local(x: Array, w: Array, scale: Array) -> Array:
        rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])  # [M,K]
        y: Any = _run(rows, w, scale, call)
        return y.reshape(*x.shape[:-1], y.shape[-1])  # [..,N]

    *rows, columns = string.ascii_lowercase[: x.ndim]
    leading = "".join(rows)
    dims = [leading + "K", columns + "K", columns]
    return by_shards(local, [x, w, scale], dims, leading + columns)(x, w, scale)


def _check(x: Array, w: Array, scale: Array) -> None:
    if w.dtype.name not in WEIGHT_DTYPES or scale.dtype != jnp.float32:
        raise ValueError(
            f"w and scale have types {w.dtype} and {scale.dtype}, expected one of"
            f" {WEIGHT_DTYPES} and float32"
        )
    if x.ndim < 2 or w.ndim != 2 or (x.shape[-1], *scale.shape) != w.shape[::-1]:
        raise ValueError(
            f"x, w and scale have shapes {x.shape}, {w.shape} and {scale.shape},"
            " expected [*B, M, K], [N, K] and [N]"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Call:
    out_dtype: Any
    implementation: str | tuple[str, ...] | None
    config: QuantizedMatmulConfig | None
    device: DeviceSpec | None


_NO_DERIVATIVE = (
    "quantized_matmul has no derivatives: quantized weights are for inference;"
    " differentiate the model before it is quantized"
)


def _run(x: Array, w: Array, scale: Array, call: _Call) -> Array:
    operands = vary_alike(no_derivative((x, w, scale), _NO_DERIVATIVE))
    implementations = {"mosaic_gpu": _mosaic_gpu, "triton": _triton, "xla": _xla}
    y = dispatch(
        "quantized_matmul", implementations, call.implementation, *operands, call
    )
    return keep_mark(y, *operands)


def _xla(x: Array, w: Array, scale: Array, call: _Call) -> Array:
    no_config("quantized_matmul", call.config)
    return xla.quantized_matmul(x, w, scale, out_dtype=call.out_dtype)


def _triton(x: Array, w: Array, scale: Array, call: _Call) -> Array:
    no_config("quantized_matmul", call.config, "Triton")
    check_local("quantized_matmul", x, w, scale)
    return triton.quantized_matmul(
        x, w, scale, device=call.device, out_dtype=call.out_dtype
    )


def _mosaic_gpu(x: Array, w: Array, scale: Array, call: _Call) -> Array:
    device, config = tuned_configs.hopper_config(
        "quantized_matmul",
        Problem.of(x, w, call.out_dtype),
        call.device,
        QuantizedMatmulConfig,
        arrays=(x, w, scale),
        check=mosaic_gpu.check_problem,
        config=call.config,
        heuristic=heuristic,
    )
    return mosaic_gpu.quantized_matmul(
        x, w, scale, config=config, device=device, out_dtype=call.out_dtype
    )
