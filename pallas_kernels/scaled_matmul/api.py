"""The public matmul of scaled fp8 operands.

Axis letters: B any leading axes, M rows, K contraction, N columns.
"""

import dataclasses
import functools
import math
import string
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

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
from pallas_kernels.partition import by_shards
from pallas_kernels.scaled_matmul import mosaic_gpu, xla
from pallas_kernels.scaled_matmul.config import (
    DEPTH,
    ScaledMatmulConfig,
    ScaledProblem,
    heuristic,
)
from pallas_kernels.scaled_matmul.quantize import check_fp8


def scaled_matmul(
    a: Float[Array, "*B M K"],
    b: Float[Array, "N _K"],
    a_scale: Float[Array, "..."],
    b_scale: Float[Array, "..."],
    *,
    out_dtype: DTypeLike = jnp.bfloat16,
    implementation: str | Sequence[str] | None = None,
    config: ScaledMatmulConfig | None = None,
) -> Float[Array, "*B M N"]:
    """Multiplies scaled fp8 operands, with fp32 accumulation.

    ``y[..., m, n] = a_scale[m] b_scale[n] sum_k a[..., m, k] b[n, k]``

    Both operands are stored with K last: Hopper's tensor cores transpose 16-bit
    operands only. The two types may differ, as E4M3 activations and E5M2 gradients do.
    Not differentiable.

    Hopper's tensor cores accumulate 8-bit products in about 14 bits. The kernel
    therefore promotes their sums to fp32 registers every 128 products; XLA asks
    cuBLASLt for the same. With ``implementation=None`` the kernel runs on Hopper GPUs
    if it is expected to be at least as fast as XLA, as `pallas_kernels.matmul.matmul`
    does: by the table of tuned problems, else if M is a multiple of 8 and whole output
    tiles keep 83% of the GPU busy. XLA runs elsewhere. The compiler does not partition
    the kernel: on several devices it runs inside `jax.shard_map`, and where the types
    of Explicit mesh axes say that rows or columns are split.

    Args:
        a: ``[*B,M,K]`` float8_e4m3fn or float8_e5m2; leading axes are merged with M.
        b: [N,K] of either type; each row gives a column of the result.
        a_scale: fp32 scales of a: ``[*B,M]``, [] for one of all, or ``[*B,M,K/128]``,
            rounded up, for each block of 128 numbers of a row.
        b_scale: fp32 scales of b: [N], or [] for one of all. With scales of blocks of
            a, [N,K/128], or [N/128,K/128] for blocks of 128 rows, too.
        out_dtype: type of y.
        implementation: "mosaic_gpu" (Hopper; K a multiple of 128, N of 64), "xla", a
            sequence of these, or None for the best.
        config: tiling of the kernel; None looks it up in
            `pallas_kernels.tuned_configs`. With one, or inside `override` of that
            module, the kernel is tried first. XLA refuses one given here.

    Returns:
        ``[*B,M,N]`` of `out_dtype`.

    Raises:
        ValueError: shapes or types disagree, or the config is another op's.
        Unsupported: the implementation named cannot serve the arguments here.
        ExceptionGroup: none of several implementations can.
        NotImplementedError: the call is differentiated.

    Example:
        >>> from pallas_kernels.scaled_matmul import quantize_fp8
        >>> a, a_scale = quantize_fp8(jnp.array([[1.0, 7.0], [0.1, 0.7]]), axis=-1)
        >>> b, b_scale = quantize_fp8(jnp.array([[1.0, -1.0]]))
        >>> print(scaled_matmul(a, b, a_scale, b_scale))
        [[-6]
         [-0.601562]]

    References:
        DeepSeek-V3 Technical Report (arXiv 2412.19437), section 3.3: scales of 1 x 128
        and of 128 x 128 numbers, and sums that are promoted in the same intervals.
    """
    check_operands(a, b, a_scale, b_scale)
    check_floating(out_dtype=out_dtype)
    tuned_configs.check_config("scaled_matmul", config, ScaledMatmulConfig)
    square = b_scale.ndim == 2 and b_scale.shape[0] != b.shape[0]
    if square:
        b_scale = jnp.repeat(b_scale, DEPTH, axis=0)[: b.shape[0]]
    call = _Call(
        out_dtype=jnp.dtype(out_dtype),
        implementation=as_hashable(implementation),
        config=config,
        device=DeviceSpec.current(),
    )
    num_columns = len(b)

    def local(a: Array, b: Array, a_scale: Array, b_scale: Array) -> Array:
        rows = a.reshape(math.prod(a.shape[:-1]), a.shape[-1])  # [M,K]
        if a_scale.ndim:
            a_scale = a_scale.reshape(len(rows), *a_scale.shape[a.ndim - 1 :])
        # Where devices split columns, squares may lie across the parts of two of them.
        whole = len(b) == num_columns or len(b) % DEPTH == 0
        here = dataclasses.replace(call, square=square and whole)
        y: Any = _run(rows, b, a_scale, b_scale, here)
        return y.reshape(*a.shape[:-1], y.shape[-1])  # [..,N]

    *rows, columns = string.ascii_lowercase[: a.ndim]
    leading = "".join(rows)
    dims = [
        leading + "K",
        columns + "K",
        *(
            (axes + "S")[: scale.ndim] if scale.ndim else ""
            for axes, scale in ((leading, a_scale), (columns, b_scale))
        ),
    ]
    arrays = [a, b, a_scale, b_scale]
    return by_shards(local, arrays, dims, leading + columns)(*arrays)


def check_operands(a: Array, b: Array, a_scale: Array, b_scale: Array) -> None:
    """Checks a pair of operands and their scales, see `scaled_matmul`.

    Raises:
        ValueError: shapes or types disagree.
    """
    check_fp8(a=a.dtype, b=b.dtype)
    if a.ndim < 2 or b.ndim != 2 or a.shape[-1] != b.shape[1]:
        raise ValueError(
            f"a and b have shapes {a.shape} and {b.shape}, expected [*B, M, K] and"
            " [N, K]: both end with the dimension that is summed"
        )
    blocks = -(-a.shape[-1] // DEPTH)
    if a_scale.ndim == a.ndim or b_scale.ndim == 2:
        shapes = {
            "a": {(*a.shape[:-1], blocks)},
            "b": {(b.shape[0], blocks), (-(-b.shape[0] // DEPTH), blocks)},
        }
        for name, scale in (("a", a_scale), ("b", b_scale)):
            if scale.dtype != jnp.float32 or scale.shape not in shapes[name]:
                raise ValueError(
                    f"{name}_scale has type {scale.dtype} and shape {scale.shape},"
                    f" expected float32 and one of {sorted(shapes[name])}: blocks of"
                    f" {DEPTH}, as the other operand has"
                )
        return
    for name, scale, x in (("a", a_scale, a), ("b", b_scale, b)):
        if scale.dtype != jnp.float32 or scale.shape not in ((), x.shape[:-1]):
            raise ValueError(
                f"{name}_scale has type {scale.dtype} and shape {scale.shape}, expected"
                f" float32 and () or {x.shape[:-1]}, the rows of {name}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Call:
    out_dtype: Any
    implementation: str | tuple[str, ...] | None
    config: ScaledMatmulConfig | None
    device: DeviceSpec | None
    square: bool = False
    """Scales of b are the same for each 128 rows."""


_NO_DERIVATIVE = (
    "scaled_matmul has no derivatives: rounding to 8 bits has none; give the layer"
    " that rounds its operands a gradient rule of its own"
)


def _run(a: Array, b: Array, a_scale: Array, b_scale: Array, call: _Call) -> Array:
    operands = vary_alike(no_derivative((a, b, a_scale, b_scale), _NO_DERIVATIVE))
    problem = ScaledProblem.of(a, b, call.out_dtype, rhs_transposed=True)
    declines = functools.partial(
        tuned_configs.declines, "scaled_matmul", problem, call.device, call.config
    )
    y = dispatch(
        "scaled_matmul",
        {"mosaic_gpu": _mosaic_gpu, "xla": _xla},
        call.implementation,
        *operands,
        call,
        # With scales of blocks XLA multiplies in fp32.
        declines={} if a_scale.ndim == 2 else {"mosaic_gpu": declines},
    )
    return keep_mark(y, *operands)


def _xla(a: Array, b: Array, a_scale: Array, b_scale: Array, call: _Call) -> Array:
    no_config("scaled_matmul", call.config)
    return xla.scaled_matmul(a, b, a_scale, b_scale, out_dtype=call.out_dtype)


def _mosaic_gpu(
    a: Array, b: Array, a_scale: Array, b_scale: Array, call: _Call
) -> Array:
    problem = ScaledProblem.of(a, b, call.out_dtype, rhs_transposed=True)
    device, config = tuned_configs.hopper_config(
        "scaled_matmul",
        dataclasses.replace(problem, blocks=a_scale.ndim == 2),
        call.device,
        ScaledMatmulConfig,
        arrays=(a, b, a_scale, b_scale),
        check=mosaic_gpu.check_problem,
        config=call.config,
        heuristic=heuristic,
    )
    return mosaic_gpu.scaled_matmul(
        a,
        b,
        a_scale,
        b_scale,
        config=config,
        device=device,
        out_dtype=call.out_dtype,
        square=call.square,
    )
