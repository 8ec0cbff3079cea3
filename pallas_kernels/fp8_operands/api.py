"""Operands of fp8 matmuls, with the scales that training uses.

Scales are powers of two: see `power_of_two_scale`. Axis letters: M rows, K columns.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.dispatch import as_hashable, check_floating, dispatch
from pallas_kernels.fp8_operands import mosaic_gpu, xla
from pallas_kernels.fp8_operands.scales import BLOCK, inverse_scale
from pallas_kernels.matmul.activations import check_activation
from pallas_kernels.mosaic import (
    DeviceSpec,
    as_varying,
    check_hopper,
    vary_alike,
    varying,
)
from pallas_kernels.partition import check_local
from pallas_kernels.scaled_matmul.quantize import check_fp8


class QuantizedRows(NamedTuple):
    """A matrix in 8 bits, ``data * scale[:, None]``."""

    data: Array
    """[M,K], float8_e4m3fn or float8_e5m2."""
    scale: Array
    """[M], fp32 powers of two; by blocks [M,K/128], rounded up: one for each 128
    numbers of a row."""
    largest: Any
    """[K], fp32: the largest magnitude of each column before it was rounded, from which
    `power_of_two_scale` makes the scales of the transposed matrix. By blocks None."""


def quantize_rows(
    x: Float[Array, "M K"],
    dtype: DTypeLike,
    *,
    through: DTypeLike | None = None,
    blocks: bool = False,
    implementation: str | Sequence[str] | None = None,
) -> QuantizedRows:
    """Quantizes each row to fp8 by a scale of its own, and finds the column maxima.

    ``data[m, k] = x[m, k] / scale[m]``

    On Hopper GPUs a kernel reads x once and writes it once. Not differentiable.

    Args:
        x: [M,K] activations, gradients or weights, of any floating type.
        dtype: float8_e4m3fn or float8_e5m2.
        through: type to which x is rounded first: that of the computation, for weights
            in fp32. None is the type of x.
        blocks: scale each 128 numbers of a row by themselves (1 x 128).
        implementation: "mosaic_gpu" (Hopper; K a multiple of 128 from 256 to 16,384,
            with `blocks` of 512; bfloat16 or float16, or fp32 through one of these),
            "xla", a sequence of these, or None for the best.

    Returns:
        The quantized values, the scale of each row, and the largest magnitude of each
        column; with `blocks` the scales of blocks and None.

    Raises:
        ValueError: x is no matrix or has no floating type, or `dtype` is none of the
            two.
        Unsupported: the implementation named cannot serve the arguments here.
        ExceptionGroup: none of several implementations can.
        NotImplementedError: the call is differentiated.

    Example:
        >>> q = quantize_rows(jnp.array([[3.0, -896.0], [1.0, 0.0]]), "float8_e4m3fn")
        >>> print(q.data.astype(jnp.float32), q.scale, q.largest)
        [[   1.5 -448. ]
         [ 256.     0. ]] [2.         0.00390625] [  3. 896.]

    References:
        FP8 Formats for Deep Learning, arXiv 2209.05433.
    """
    _check_matrix(x)
    check_floating(x=x.dtype)
    check_fp8(dtype=dtype)
    through = x.dtype if through is None else through
    call = _Call.of(implementation, dtype, through, blocks=blocks)
    return QuantizedRows(*_quantize_rows((x,), call))


def quantize_rms_norm(
    x: Float[Array, "M K"],
    weight: Float[Array, " K"],
    dtype: DTypeLike,
    *,
    eps: float,
    blocks: bool = False,
    implementation: str | Sequence[str] | None = None,
) -> QuantizedRows:
    """`quantize_rows` of ``x / sqrt(mean(x^2) + eps) * weight``.

    Statistics are in fp32, and the normalized rows are rounded to the type of x first.
    On Hopper GPUs a kernel reads x once. Not differentiable.

    Args:
        x: [M,K] activations.
        weight: [K], the scale of the norm, fp32.
        dtype: float8_e4m3fn or float8_e5m2.
        eps: added to the mean square.
        blocks: as of `quantize_rows`.
        implementation: as of `quantize_rows`; the kernel takes K up to 8,192.

    Raises:
        ValueError: shapes or types disagree.
        Unsupported: the implementation named cannot serve the arguments here.
        ExceptionGroup: none of several implementations can.
        NotImplementedError: the call is differentiated.

    Example:
        >>> q = quantize_rms_norm(
        ...     jnp.array([[1.0, 7.0]]), jnp.ones(2), "float8_e4m3fn", eps=0.0
        ... )
        >>> print(q.data.astype(jnp.float32) * q.scale[:, None])
        [[0.203125 1.375   ]]
    """
    _check_matrix(x)
    check_floating(x=x.dtype)
    check_fp8(dtype=dtype)
    if weight.shape != x.shape[1:] or weight.dtype != jnp.float32:
        raise ValueError(
            f"weight has type {weight.dtype} and shape {weight.shape}, expected float32"
            f" and {x.shape[1:]}, a factor for each column of x"
        )
    call = _Call.of(implementation, dtype, eps=eps, blocks=blocks)
    return QuantizedRows(*_quantize_rms_norm((x, weight), call))


def quantize_gated(
    gate: Float[Array, "M K"],
    up: Float[Array, "M K"],
    dtype: DTypeLike,
    *,
    activation: str,
    blocks: bool = False,
    implementation: str | Sequence[str] | None = None,
) -> QuantizedRows:
    """`quantize_rows` of ``activation(gate) * up``, rounded to the type of both first.

    On Hopper GPUs a kernel reads both once. Not differentiable.

    Args:
        gate: [M,K].
        up: [M,K], of the same type.
        dtype: float8_e4m3fn or float8_e5m2.
        activation: a name in `pallas_kernels.matmul.ACTIVATIONS`.
        blocks: as of `quantize_rows`.
        implementation: as of `quantize_rows`.

    Raises:
        ValueError: shapes or types disagree, or there is no such activation.
        Unsupported: the implementation named cannot serve the arguments here.
        ExceptionGroup: none of several implementations can.
        NotImplementedError: the call is differentiated.

    Example:
        >>> gate, up = jnp.array([[-1.0, 2.0]]), jnp.array([[5.0, 3.0]])
        >>> q = quantize_gated(gate, up, "float8_e4m3fn", activation="relu")
        >>> print(q.data.astype(jnp.float32) * q.scale[:, None])
        [[0. 6.]]
    """
    _check_alike(gate, up)
    check_fp8(dtype=dtype)
    check_activation(activation)
    more = {"activation": activation, "blocks": blocks}
    call = _Call.of(implementation, dtype, **more)
    return QuantizedRows(*_quantize_gated((gate, up), call))


def quantize_gated_gradients(
    gate: Float[Array, "M K"],
    up: Float[Array, "M K"],
    g: Float[Array, "M K"],
    dtype: DTypeLike,
    *,
    activation: str,
    blocks: bool = False,
    implementation: str | Sequence[str] | None = None,
) -> tuple[QuantizedRows, QuantizedRows]:
    """The gradients of ``activation(gate) * up`` in 8 bits, by rows.

    Both have the same scale for a row, so a matmul may add up both; not with `blocks`.
    They are rounded to the type of `gate` first. On Hopper GPUs a kernel reads each
    array once.

    Args:
        gate: [M,K].
        up: [M,K], of the same type.
        g: [M,K], of the same type: the gradient of the product.
        dtype: float8_e4m3fn or float8_e5m2.
        activation: a name in `pallas_kernels.matmul.ACTIVATIONS`.
        blocks: as of `quantize_rows`.
        implementation: as of `quantize_rows`; the kernel takes ``"silu"``.

    Returns:
        The gradients of `gate` and of `up`.

    Raises:
        ValueError: shapes or types disagree, or there is no such activation.
        Unsupported: the implementation named cannot serve the arguments here.
        ExceptionGroup: none of several implementations can.
        NotImplementedError: the call is differentiated.

    Example:
        >>> gate, up, g = jnp.array([[-1.0, 2.0]]), jnp.array([[5.0, 3.0]]), jnp.ones(2)
        >>> found = quantize_gated_gradients(
        ...     gate, up, g[None], "float8_e5m2", activation="relu"
        ... )
        >>> print(*(q.data.astype(jnp.float32) * q.scale[:, None] for q in found))
        [[0. 3.]] [[0. 2.]]
    """
    _check_alike(gate, up, g)
    check_fp8(dtype=dtype)
    check_activation(activation)
    more = {"activation": activation, "blocks": blocks}
    call = _Call.of(implementation, dtype, **more)
    first, second, scale, *largest = _quantize_gated_gradients((gate, up, g), call)
    if blocks:
        return QuantizedRows(first, scale, None), QuantizedRows(
            second, largest[0], None
        )
    return (
        QuantizedRows(first, scale, largest[0]),
        QuantizedRows(second, scale, largest[1]),
    )


def transpose_rows(
    data: Float[Array, "M _K"],
    scale: Float[Array, " M"],
    largest: Float[Array, " _K"],
    *,
    implementation: str | Sequence[str] | None = None,
) -> tuple[Float[Array, "_K M"], Float[Array, " _K"]]:
    """Transposes the result of `quantize_rows`, for a matmul that contracts its rows.

    ``y[k, m] = data[m, k] scale[m] / column_scale[k]``

    A value keeps its mantissa, unless it becomes subnormal. A value that was subnormal
    before may have been rounded above `largest`: it saturates. On Hopper GPUs a kernel
    reads once and writes once. Not differentiable.

    Args:
        data: [M,K] float8_e4m3fn or float8_e5m2.
        scale: [M] fp32 powers of two, the scales of `data`.
        largest: [K] fp32, at least the largest magnitude of each column.
        implementation: "mosaic_gpu" (Hopper; M and K multiples of 128), "xla", a
            sequence of these, or None for the best.

    Returns:
        [K,M] of the type of `data`, and fp32 [K], its scales.

    Raises:
        ValueError: types or shapes disagree.
        Unsupported: the implementation named cannot serve the arguments here.
        ExceptionGroup: none of several implementations can.
        NotImplementedError: the call is differentiated.

    Example:
        >>> q = quantize_rows(jnp.array([[3.0, -896.0], [1.0, 0.0]]), "float8_e4m3fn")
        >>> print(*transpose_rows(*q))
        [[384 128]
         [-448 0]] [0.0078125 2.       ]
    """
    _check_matrix(data)
    check_fp8(data=data.dtype)
    shapes = [scale.shape, largest.shape]
    kinds = {scale.dtype, largest.dtype}
    if shapes != [data.shape[:1], data.shape[1:]] or kinds != {jnp.dtype(jnp.float32)}:
        raise ValueError(
            f"scale and largest have shapes {shapes} and types"
            f" {sorted(map(str, kinds))}, expected float32 for the rows and the columns"
            f" of data of shape {data.shape}"
        )
    return _transpose_rows((data, scale, largest), _Call.of(implementation))


def transpose_blocks(
    data: Float[Array, "M K"],
    scale: Float[Array, "M _"],
    *,
    implementation: str | Sequence[str] | None = None,
) -> tuple[Float[Array, "K M"], Float[Array, "K _"]]:
    """`transpose_rows` of what `quantize_rows` made by blocks.

    The scales of its blocks are those that the rounded values need.

    Args:
        data: [M,K] float8_e4m3fn or float8_e5m2.
        scale: [M,K/128] fp32 powers of two, rounded up.
        implementation: as of `transpose_rows`.

    Returns:
        [K,M] of the type of `data`, and fp32 [K,M/128], its scales.

    Raises:
        ValueError: types or shapes disagree.
        Unsupported: the implementation named cannot serve the arguments here.
        ExceptionGroup: none of several implementations can.
        NotImplementedError: the call is differentiated.

    Example:
        >>> q = quantize_rows(jnp.array([[3.0, -896.0]]), "float8_e4m3fn", blocks=True)
        >>> print(*transpose_blocks(q.data, q.scale))
        [[384]
         [-448]] [[0.0078125]
         [2.       ]]
    """
    _check_matrix(data)
    check_fp8(data=data.dtype)
    expected = data.shape[0], -(-data.shape[1] // BLOCK)
    if scale.shape != expected or scale.dtype != jnp.float32:
        raise ValueError(
            f"scale has type {scale.dtype} and shape {scale.shape}, expected float32"
            f" and {expected}, one for {BLOCK} numbers of a row of data"
        )
    return _transpose_blocks((data, scale), _Call.of(implementation))


def quantize_squares(
    x: Float[Array, "M K"],
    dtype: DTypeLike,
    *,
    through: DTypeLike | None = None,
    implementation: str | Sequence[str] | None = None,
) -> tuple[Float[Array, "M K"], Float[Array, "K M"], Float[Array, "_M _K"]]:
    """Quantizes a matrix to fp8 by a scale for 128 rows and columns, in both layouts.

    ``data[m, k] = transposed[k, m] = x[m, k] / scale[m // 128, k // 128]``

    The transpose has the transposed scales. On Hopper GPUs a kernel reads x once. Not
    differentiable.

    Args:
        x: [M,K] of any floating type.
        dtype: float8_e4m3fn or float8_e5m2.
        through: type to which x is rounded first; None is that of x.
        implementation: as of `transpose_rows`.

    Returns:
        The matrix and its transpose, of `dtype`, and fp32 [M/128,K/128], rounded up.

    Raises:
        ValueError: x is no matrix or has no floating type, or `dtype` is none of the
            two.
        Unsupported: the implementation named cannot serve the arguments here.
        ExceptionGroup: none of several implementations can.
        NotImplementedError: the call is differentiated.

    Example:
        >>> x = jnp.array([[3.0, -896.0]])
        >>> print(*quantize_squares(x, "float8_e4m3fn"))
        [[1.5 -448]] [[1.5]
         [-448]] [[2.]]

    References:
        DeepSeek-V3 Technical Report, arXiv 2412.19437, section 3.3.1.
    """
    _check_matrix(x)
    check_floating(x=x.dtype)
    check_fp8(dtype=dtype)
    through = x.dtype if through is None else through
    return _quantize_squares((x,), _Call.of(implementation, dtype, through))


def transpose(
    data: Float[Array, "M K"],
    *,
    implementation: str | Sequence[str] | None = None,
) -> Float[Array, "K M"]:
    """The transpose of an 8-bit matrix with one scale.

    On Hopper GPUs a kernel reads once and writes once. Not differentiable.

    Args:
        data: [M,K] float8_e4m3fn or float8_e5m2.
        implementation: as of `transpose_rows`.

    Returns:
        [K,M] of the type of `data`.

    Raises:
        ValueError: `data` is no matrix of 8 bits.
        Unsupported: the implementation named cannot serve the arguments here.
        ExceptionGroup: none of several implementations can.
        NotImplementedError: the call is differentiated.
    """
    _check_matrix(data)
    check_fp8(data=data.dtype)
    return _transpose((data,), _Call.of(implementation))


def quantize_and_transpose(
    x: Float[Array, "M K"],
    scale: Float[Array, ""],
    dtype: DTypeLike,
    *,
    through: DTypeLike | None = None,
    implementation: str | Sequence[str] | None = None,
) -> tuple[Float[Array, "M K"], Float[Array, "K M"]]:
    """Quantizes a matrix to fp8 by one scale, in both layouts.

    ``data[m, k] = transposed[k, m] = x[m, k] / scale``

    On Hopper GPUs a kernel reads x once. Not differentiable.

    Args:
        x: [M,K] of any floating type.
        scale: [] fp32, a power of two.
        dtype: float8_e4m3fn or float8_e5m2.
        through: type to which x is rounded first; None is that of x.
        implementation: as of `transpose_rows`.

    Returns:
        The matrix and its transpose, of `dtype`.

    Raises:
        ValueError: x is no matrix or has no floating type, scale is not one fp32
            number, or `dtype` is none of the two.
        Unsupported: the implementation named cannot serve the arguments here.
        ExceptionGroup: none of several implementations can.
        NotImplementedError: the call is differentiated.

    Example:
        >>> x = jnp.array([[3.0, -896.0]])
        >>> print(*quantize_and_transpose(x, jnp.float32(2), "float8_e4m3fn"))
        [[1.5 -448]] [[1.5]
         [-448]]
    """
    _check_matrix(x)
    check_floating(x=x.dtype)
    check_fp8(dtype=dtype)
    if scale.shape or scale.dtype != jnp.float32:
        raise ValueError(
            f"scale has type {scale.dtype} and shape {scale.shape}, expected one"
            " float32; quantize_rows takes scales of rows"
        )
    through = x.dtype if through is None else through
    call = _Call.of(implementation, dtype, through)
    return _quantize_and_transpose((x, scale), call)


def _check_matrix(x: Array) -> None:
    if x.ndim != 2:
        raise ValueError(
            f"an operand of shape {x.shape}, expected a matrix [M, K]; merge its"
            " leading axes"
        )


def _check_alike(*operands: Array) -> None:
    for x in operands:
        _check_matrix(x)
        check_floating(x=x.dtype)
    if len({(x.shape, x.dtype) for x in operands}) > 1:
        kinds = ", ".join(f"{x.dtype.name} {x.shape}" for x in operands)
        raise ValueError(f"operands are {kinds}, expected the same type and shape")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Call:
    dtype: Any
    through: Any
    implementation: str | tuple[str, ...] | None
    device: DeviceSpec | None
    eps: float = 0.0
    activation: str = ""
    blocks: bool = False

    @classmethod
    def of(
        cls,
        implementation: str | Sequence[str] | None,
        dtype: DTypeLike | None = None,
        through: DTypeLike | None = None,
        **more: Any,
    ) -> "_Call":
        return cls(
            dtype=None if dtype is None else jnp.dtype(dtype),
            through=None if through is None else jnp.dtype(through),
            implementation=as_hashable(implementation),
            device=DeviceSpec.current(),
            **more,
        )


type _Arrays = tuple[Array, ...]


def _op(name: str, kernel: Callable[..., Any], portable: Callable[..., Any]) -> Any:
    """A function of arrays and a call, without derivatives."""
    # The layers of a model are traced and lowered once.
    jitted = jax.jit(kernel, static_argnums=1)

    def mosaic_gpu(arrays: _Arrays, call: _Call) -> Any:
        check_hopper(call.device, name)
        check_local(name, *arrays)
        return jitted(vary_alike(arrays), call)

    @functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
    def run(arrays: _Arrays, call: _Call) -> Any:
        implementations = {"mosaic_gpu": mosaic_gpu, "xla": portable}
        found = dispatch(name, implementations, call.implementation, arrays, call)
        axes = varying(*arrays)
        return jax.tree.map(lambda a: as_varying(a, axes), found)  # kernels lose it

    @run.defjvp
    def _(call: _Call, *_: Any) -> Any:
        raise NotImplementedError(
            f"{name} has no derivatives: rounding to 8 bits has none; give the layer"
            " that rounds its operands a gradient rule of its own"
        )

    return run


_quantize_rows = _op(
    "quantize_rows",
    lambda arrays, call: mosaic_gpu.quantize_rows(
        arrays[0],
        call.dtype,
        through=call.through,
        device=call.device,
        blocks=call.blocks,
    ),
    lambda arrays, call: xla.quantize_rows(
        arrays[0], call.dtype, through=call.through, blocks=call.blocks
    ),
)
_quantize_rms_norm = _op(
    "quantize_rms_norm",
    lambda arrays, call: mosaic_gpu.quantize_rms_norm(
        *arrays,
        dtype=call.dtype,
        eps=call.eps,
        device=call.device,
        blocks=call.blocks,
    ),
    lambda arrays, call: xla.quantize_rms_norm(
        *arrays, dtype=call.dtype, eps=call.eps, blocks=call.blocks
    ),
)
_quantize_gated = _op(
    "quantize_gated",
    lambda arrays, call: mosaic_gpu.quantize_gated(
        *arrays,
        dtype=call.dtype,
        activation=call.activation,
        device=call.device,
        blocks=call.blocks,
    ),
    lambda arrays, call: xla.quantize_gated(
        *arrays, dtype=call.dtype, activation=call.activation, blocks=call.blocks
    ),
)
_quantize_gated_gradients = _op(
    "quantize_gated_gradients",
    lambda arrays, call: mosaic_gpu.quantize_gated_gradients(
        *arrays,
        dtype=call.dtype,
        activation=call.activation,
        device=call.device,
        blocks=call.blocks,
    ),
    lambda arrays, call: xla.quantize_gated_gradients(
        *arrays, dtype=call.dtype, activation=call.activation, blocks=call.blocks
    ),
)
_transpose_rows = _op(
    "transpose_rows",
    lambda arrays, _: mosaic_gpu.transpose_rows(*arrays),
    lambda arrays, _: xla.transpose_rows(*arrays),
)
_transpose_blocks = _op(
    "transpose_blocks",
    lambda arrays, _: mosaic_gpu.transpose_blocks(*arrays),
    lambda arrays, _: xla.transpose_blocks(*arrays),
)
_quantize_squares = _op(
    "quantize_squares",
    lambda arrays, call: mosaic_gpu.quantize_squares(
        arrays[0], call.dtype, through=call.through
    ),
    lambda arrays, call: xla.quantize_squares(
        arrays[0], call.dtype, through=call.through
    ),
)
_transpose = _op(
    "transpose",
    lambda arrays, _: mosaic_gpu.transpose(*arrays),
    lambda arrays, _: arrays[0].T,
)
_quantize_and_transpose = _op(
    "quantize_and_transpose",
    lambda arrays, call: mosaic_gpu.quantize_and_transpose(
        arrays[0], inverse_scale(arrays[1]), call.dtype, through=call.through
    ),
    lambda arrays, call: xla.quantize_and_transpose(
        arrays[0], arrays[1], call.dtype, through=call.through
    ),
)
