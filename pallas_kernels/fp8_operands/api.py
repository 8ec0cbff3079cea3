"""Operands of fp8 matmuls, with the scales that training uses.

Scales are powers of two: see `power_of_two_scale`. Axis letters: M rows, K columns.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.dispatch import check_floating, dispatch, no_derivative
from pallas_kernels.fp8_operands import mosaic_gpu, xla
from pallas_kernels.fp8_operands.scales import BLOCK
from pallas_kernels.matmul.activations import check_activation
from pallas_kernels.mosaic import DeviceSpec, check_hopper, keep_mark, vary_alike
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
    `power_of_two_scale` makes the scales of the transposed matrix. None by blocks, or
    without `columns`."""


def quantize_rows(
    x: Float[Array, "M K"],
    dtype: DTypeLike,
    *,
    through: DTypeLike | None = None,
    blocks: bool = False,
    columns: bool = True,
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
        columns: find the largest magnitude of each column; for nothing by `blocks`.
        implementation: "mosaic_gpu" (Hopper; K a multiple of 128 from 256 to 16,384,
            with `blocks` of 512; bfloat16 or float16, or fp32 through one of these),
            "xla", a sequence of these, or None for the best.

    Returns:
        The quantized values, the scale of each row, and the largest magnitude of each
        column or None; with `blocks` the scales of blocks and None.

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
    options = _types(dtype, x, through=through)
    options |= {"blocks": blocks, "columns": columns}
    return QuantizedRows(*_quantize_rows(implementation, x, **options))


def quantize_rms_norm(
    x: Float[Array, "M K"],
    weight: Float[Array, " K"],
    dtype: DTypeLike,
    *,
    eps: float,
    blocks: bool = False,
    columns: bool = True,
    implementation: str | Sequence[str] | None = None,
) -> QuantizedRows:
    """`quantize_rows` of ``x / sqrt(mean(x^2) + eps) * weight``.

    Statistics are in fp32, and the normalized rows are rounded to the type of x first.
    On Hopper GPUs a kernel reads x once. Not differentiable.

    Args:
        x: [M,K] activations.
        weight: [K], the scale of the norm, fp32 or of the type of x.
        dtype: float8_e4m3fn or float8_e5m2.
        eps: added to the mean square.
        blocks: as of `quantize_rows`.
        columns: as of `quantize_rows`.
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
    options = _types(dtype, x) | {"eps": eps, "blocks": blocks, "columns": columns}
    if weight.shape != x.shape[1:] or weight.dtype not in (jnp.float32, x.dtype):
        raise ValueError(
            f"weight has type {weight.dtype} and shape {weight.shape}, expected float32"
            f" or {x.dtype} and {x.shape[1:]}, a factor for each column of x"
        )
    return QuantizedRows(*_quantize_rms_norm(implementation, x, weight, **options))


def quantize_gated(
    gate: Float[Array, "M _"],
    up: Float[Array, "M K"] | None,
    dtype: DTypeLike,
    *,
    activation: str,
    blocks: bool = False,
    columns: bool = True,
    implementation: str | Sequence[str] | None = None,
) -> QuantizedRows:
    """`quantize_rows` of ``activation(gate) * up``, rounded to the type of both first.

    On Hopper GPUs a kernel reads both once. Not differentiable.

    Args:
        gate: [M,K].
        up: [M,K], of the same type; None: `gate` is [M,2K], both side by side.
        dtype: float8_e4m3fn or float8_e5m2.
        activation: a name in `pallas_kernels.matmul.ACTIVATIONS`.
        blocks: as of `quantize_rows`.
        columns: as of `quantize_rows`.
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
    check_activation(activation)
    sides = (gate,) if up is None else (gate, up)
    options = {"activation": activation, "blocks": blocks, **_types(dtype, *sides)}
    options["columns"] = columns
    if up is None and gate.shape[1] % 2:
        raise ValueError(
            f"gate has shape {gate.shape}, expected an even number of columns: those of"
            " gate and up side by side"
        )
    return QuantizedRows(*_quantize_gated(implementation, *sides, **options))


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
    check_activation(activation)
    options = {"activation": activation, "blocks": blocks, **_types(dtype, gate, up, g)}
    both = _quantize_gated_gradients(implementation, gate, up, g, **options)
    return QuantizedRows(*both[0]), QuantizedRows(*both[1])


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
    _check_data(data)
    shapes = [scale.shape, largest.shape]
    kinds = {scale.dtype, largest.dtype}
    if shapes != [data.shape[:1], data.shape[1:]] or kinds != {jnp.dtype(jnp.float32)}:
        raise ValueError(
            f"scale and largest have shapes {shapes} and types"
            f" {sorted(map(str, kinds))}, expected float32 for the rows and the columns"
            f" of data of shape {data.shape}"
        )
    return _transpose_rows(implementation, data, scale, largest)


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
    _check_data(data)
    expected = data.shape[0], -(-data.shape[1] // BLOCK)
    if scale.shape != expected or scale.dtype != jnp.float32:
        raise ValueError(
            f"scale has type {scale.dtype} and shape {scale.shape}, expected float32"
            f" and {expected}, one for {BLOCK} numbers of a row of data"
        )
    return _transpose_blocks(implementation, data, scale)


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
    return _quantize_squares(implementation, x, **_types(dtype, x, through=through))


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
    _check_data(data)
    return _transpose(implementation, data)


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
    options = _types(dtype, x, through=through)
    if scale.shape or scale.dtype != jnp.float32:
        raise ValueError(
            f"scale has type {scale.dtype} and shape {scale.shape}, expected one"
            " float32; quantize_rows takes scales of rows"
        )
    return _quantize_and_transpose(implementation, x, scale, **options)


def _types(
    dtype: DTypeLike, *operands: Array, through: DTypeLike | None = None
) -> dict[str, Any]:
    """Options that tell the types; refuses operands that are not alike."""
    for x in operands:
        _check_matrix(x)
        check_floating(x=x.dtype)
    if len({(x.shape, x.dtype) for x in operands}) > 1:
        kinds = ", ".join(f"{x.dtype.name} {x.shape}" for x in operands)
        raise ValueError(f"operands are {kinds}, expected the same type and shape")
    check_fp8(dtype=dtype)
    through = operands[0].dtype if through is None else through
    return {"dtype": jnp.dtype(dtype), "through": jnp.dtype(through)}


def _check_data(data: Array) -> None:
    _check_matrix(data)
    check_fp8(data=data.dtype)


def _check_matrix(x: Array) -> None:
    if x.ndim != 2:
        raise ValueError(
            f"an operand of shape {x.shape}, expected a matrix [M, K]; merge its"
            " leading axes"
        )


def _op(
    kernel: Callable[..., Any], portable: Callable[..., Any], *, rows: bool = False
) -> Callable[..., Any]:
    """A function of an implementation, arrays and options, without derivatives.

    A kernel of rows starts as many blocks as the GPU runs at a time.
    """
    name = kernel.__name__
    # The layers of a model are traced and lowered once.
    jitted = jax.jit(
        lambda arrays, options: kernel(*arrays, **dict(options)), static_argnums=1
    )

    def run(
        implementation: str | Sequence[str] | None, *arrays: Array, **options: Any
    ) -> Any:
        arrays = no_derivative(
            arrays,
            f"{name} has no derivatives: rounding to 8 bits has none; give the layer"
            " that rounds its operands a gradient rule of its own",
        )

        def mosaic_gpu() -> Any:
            device = check_hopper(DeviceSpec.current(), name)
            check_local(name, *arrays)
            more = {"device": device} if rows else {}
            return jitted(vary_alike(arrays), tuple((options | more).items()))

        def xla() -> Any:
            return portable(*arrays, **options)

        implementations = {"mosaic_gpu": mosaic_gpu, "xla": xla}
        return keep_mark(dispatch(name, implementations, implementation), *arrays)

    return run


_quantize_rows = _op(mosaic_gpu.quantize_rows, xla.quantize_rows, rows=True)
_quantize_rms_norm = _op(mosaic_gpu.quantize_rms_norm, xla.quantize_rms_norm, rows=True)
_quantize_gated = _op(mosaic_gpu.quantize_gated, xla.quantize_gated, rows=True)
_quantize_gated_gradients = _op(
    mosaic_gpu.quantize_gated_gradients, xla.quantize_gated_gradients, rows=True
)
_transpose_rows = _op(mosaic_gpu.transpose_rows, xla.transpose_rows)
_transpose_blocks = _op(mosaic_gpu.transpose_blocks, xla.transpose_blocks)
_quantize_squares = _op(mosaic_gpu.quantize_squares, xla.quantize_squares)
_transpose = _op(mosaic_gpu.transpose, jnp.transpose)
_quantize_and_transpose = _op(
    mosaic_gpu.quantize_and_transpose, xla.quantize_and_transpose
)
