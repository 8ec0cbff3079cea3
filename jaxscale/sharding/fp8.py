"""Matmuls of linear layers in fp8, forward and backward, on the shards of a device.

The three matmuls of a layer, ``y = x w``, ``dx = g w^T`` and ``dw = x^T g``, have 8-bit
operands and accumulate in fp32: activations and weights in E4M3 (3 bits of mantissa),
gradients in E5M2 (2 bits, but a wider range). An operand is ``data * scale``. The scale
comes from the current maximum magnitude of the operand (current scaling), so there is
no state between steps: delayed scaling saves one pass over an operand, at the price of
a state to store, share between devices and restore, and of values that overflow in the
step in which they grow.

A scale cannot vary along the axis that a matmul contracts. With a scale per row ("fp8")
each matmul therefore takes its operands in another form:

========  ==========================  ==========================
matmul    left, scales along          right, scales along
========  ==========================  ==========================
``y``     x in E4M3, tokens           w in E4M3, output features
``dx``    g in E5M2, tokens           w in E4M3, input features
``dw``    x in E4M3, input features   g in E5M2, output features
========  ==========================  ==========================

With one scale per tensor ("fp8_tensorwise") the forms differ only by a transposition.
With blocks ("fp8_blockwise") a scale serves 128 numbers of a row of x and g, along the
axis that is contracted, and 128 rows and columns of w. Its matmuls scale the sums of
each block before they add them up.

Operands whose matmuls a fused kernel adds up share one scale per row. What is rounded
where, and sent in which type, is in ``docs/fp8.md``. Each call rounds its weights,
unless it is given a `RoundedWeight`: with gradient accumulation, weights are rounded
once a step.

Scales are powers of two, so a value keeps its mantissa when it is rescaled. Therefore
activations are saved for the backward pass in fp8, operands are rounded once although
they are scaled twice (`pallas_kernels.fp8_operands`), and sharded operands get the
values that a single device would compute: with blocks only if each device has whole
ones, that is multiples of 128 of the tokens and features that are split.

Legend: B batch, T tokens, K contracted features, N features of the result, M tokens of
all sequences.

References:
    FP8 formats for deep learning, arXiv 2209.05433. DeepSeek-V3, arXiv 2412.19437,
    section 3.3, which has the blocks, with scales of any size, and also saves
    activations in fp8.
"""

import functools
import itertools
import operator
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxscale.checks import check_choice
from pallas_kernels.collective_matmul import (
    scaled_all_gather_matmul,
    scaled_matmul_reduce_scatter,
)
from pallas_kernels.fp8_operands import (
    BLOCK,
    QuantizedRows,
    inverse_scale,
    power_of_two_scale,
    quantize_and_transpose,
    quantize_gated,
    quantize_gated_gradients,
    quantize_rms_norm,
    quantize_rows,
    quantize_squares,
    transpose,
    transpose_blocks,
    transpose_rows,
)
from pallas_kernels.scaled_matmul import scaled_matmul


OUT_NAME = "fp8_matmul_out"
"""The name of matmul results, for policies of `jax.checkpoint`."""


type Fp8 = Literal["fp8", "fp8_blockwise", "fp8_tensorwise"] | None
"""fp8 matmuls with a scale per row of their operands, per block, or one per tensor."""

type Norm = tuple[Array, float] | None
"""The factors [K] of an RMS norm, fp32, and what is added to the mean square."""

type Stored = tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]
"""For each weight the mesh axes over which its rows, and its columns, are stored in
parts. One of both is whole."""

_NAMES = ("fp8", "fp8_blockwise", "fp8_tensorwise", None)

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2


class Scaled(NamedTuple):
    """An operand of a matmul, ``data * scale``; its last axis is contracted."""

    data: Array
    """[..., K], E4M3 or E5M2."""
    scale: Array
    """[...] per row, [..., K / 128] per block or () per tensor; fp32 powers of two. A
    weight has [N / 128, K / 128]."""
    largest: Array | None = None
    """[K], fp32, with a scale per row: the largest magnitude of each column, from which
    a matmul that contracts the rows takes its scales."""


class RoundedWeight(NamedTuple):
    """A weight that was rounded before, by `round_weights`."""

    weight: Array
    """[K, N], in any floating-point type: what its gradient is of. It is not read."""
    rows: Scaled
    """[K, N], E4M3. Of what is stored in parts, a device has some rows of the data, and
    all scales."""
    turned: Scaled
    """[N, K], in the same way."""


type Weight = Array | RoundedWeight


def parameter_of(w: Weight) -> Array:
    """The parameter itself."""
    return w.weight if isinstance(w, RoundedWeight) else w


def axes_of(
    w: Weight,
    axes: tuple[str | None, str | None],
    stored: tuple[tuple[str, ...], tuple[str, ...]],
) -> Any:
    """The logical axes of what a weight consists of.

    Args:
        w: The weight.
        axes: The logical axes of its rows and columns.
        stored: Over which mesh axes each of them is stored in parts.
    """
    if not isinstance(w, RoundedWeight):
        return axes
    along = next((a for a, names in zip(axes, stored, strict=True) if names), None)
    data: Any = (along, None)
    scale: Any = (None,) * w.rows.scale.ndim
    weight: Any = axes
    return RoundedWeight(weight, Scaled(data, scale), Scaled(data, scale))


def check_fp8(quantization: str | None) -> None:
    """Raise unless `quantization` names fp8 matmuls, or is None.

    Example:
        >>> check_fp8("int8")
        Traceback (most recent call last):
        ...
        ValueError: quantization 'int8' is for inference:
        jaxscale.models.quantize(model, 'int8') stores weights so; layers that are
        trained take 'fp8', 'fp8_blockwise', 'fp8_tensorwise' or None
    """
    if quantization == "int8":
        raise ValueError(
            "quantization 'int8' is for inference: jaxscale.models.quantize(model, "
            "'int8') stores weights so; layers that are trained take 'fp8', "
            "'fp8_blockwise', 'fp8_tensorwise' or None"
        )
    check_choice("quantization", quantization, _NAMES)


def quantize_operand(
    x: Float[Array, "*rows K"],
    dtype: DTypeLike,
    quantization: Fp8,
    names: tuple[str, ...] = (),
    *,
    through: DTypeLike | None = None,
) -> Scaled:
    """Quantize `x` to fp8 by the smallest power-of-two scale without overflow.

    All-zero rows get the scale 1. A NaN or infinite value makes the scale NaN, so that
    it stays visible in all results. For inference,
    `pallas_kernels.scaled_matmul.quantize_fp8` has other scales. Rows are rounded by a
    kernel where there is one.

    Args:
        x: The operand.
        dtype: ``float8_e4m3fn`` or ``float8_e5m2``.
        quantization: A scale per row, per block of one, or one per tensor.
        names: Mesh axes of a `jax.shard_map` whose devices share one scale.
        through: Type to which `x` is rounded first; None is that of `x`.

    Example:
        >>> data, scale, _ = quantize_operand(jnp.array([[3.0, -896.0]]), E4M3, "fp8")
        >>> print(data.astype(jnp.float32), scale)
        [[   1.5 -448. ]] [2.]
    """
    if quantization != "fp8_tensorwise":
        blocks = quantization == "fp8_blockwise"
        rows = quantize_rows(_matrix(x), dtype, through=through, blocks=blocks)
        return _shaped(rows, x)
    wide = (x if through is None else x.astype(through)).astype(jnp.float32)
    scale = _scale_of_all(wide, dtype, names)
    return Scaled((wide * inverse_scale(scale)).astype(dtype), scale)


def _scale_of_all(wide: Array, dtype: DTypeLike, names: tuple[str, ...]) -> Array:
    """One scale for an fp32 operand sharded over `names`."""
    # By bits, which order as magnitudes do: a maximum of floats may skip NaN.
    bits = jax.lax.bitcast_convert_type(jnp.abs(wide), jnp.int32)
    largest = jax.lax.bitcast_convert_type(jnp.max(bits, initial=0), jnp.float32)
    return power_of_two_scale(_largest_of(largest, names), dtype)


def _largest_of(x: Array, names: tuple[str, ...]) -> Array:
    """The largest magnitudes over all devices; NaN counts as the largest."""
    if not names:
        return x
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    bits = jax.lax.pmax(bits, names)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _transposed(x: Scaled) -> Scaled:
    """A matrix for a matmul that contracts its rows: [M, K] as [K, M]."""
    if x.scale.ndim == 2:
        return Scaled(*transpose_blocks(x.data, x.scale))
    if x.largest is None:
        return Scaled(transpose(x.data), x.scale)
    return Scaled(*transpose_rows(x.data, x.scale, x.largest))


def _two_layouts(x: Array, dtype: DTypeLike, form: "_Form") -> tuple[Scaled, Scaled]:
    """[B, T, N] in fp8, and transposed for a matmul that contracts its rows."""
    if form.quantization != "fp8_tensorwise":
        rows = quantize_operand(x, dtype, form.quantization)
        return rows, _transposed(_rows(rows))
    scale = _scale_of_all(x.astype(jnp.float32), dtype, ())
    matrix = x.reshape(-1, x.shape[-1])
    data, turned = quantize_and_transpose(matrix, scale, dtype)
    return Scaled(data.reshape(x.shape), scale), Scaled(turned, scale)


def _product(a: Scaled, b: Scaled, dtype: DTypeLike) -> Array:
    """``a @ b.T``, [M, K] and [N, K], accumulated in fp32."""
    left, right = a.data, b.data
    if a.scale.ndim == 2:
        # The kernel takes whole blocks; without it XLA multiplies in fp32. Those that
        # round take whole ones too, so here XLA rounds, and pads in the same pass.
        missing = (0, 0), (0, -left.shape[1] % BLOCK)
        left, right = (jnp.pad(x, missing) for x in (left, right))
    return scaled_matmul(left, right, a.scale, b.scale, out_dtype=dtype)


def _rows(x: Scaled) -> Scaled:
    """[B, T, K] as the matrix [M, K]."""
    scale = x.scale
    if scale.ndim:
        scale = scale.reshape(-1, *scale.shape[x.data.ndim - 1 :])
    return x._replace(data=x.data.reshape(-1, x.data.shape[-1]), scale=scale)


def _gathered(x: Scaled, names: tuple[str, ...]) -> Scaled:
    """All-gather the tokens of [B, T, K], in one byte per value."""
    if not names:
        return x

    def whole(part: Array) -> Array:
        return jax.lax.all_gather(part, names, axis=1, tiled=True)

    # A scale per tensor is the same on all devices.
    scale = whole(x.scale) if x.scale.ndim else x.scale
    return Scaled(whole(x.data), scale, _largest_everywhere(x, names))


def _largest_everywhere(x: Scaled, names: tuple[str, ...]) -> Array | None:
    """The largest magnitude of each column over the tokens of all devices."""
    return None if x.largest is None else _largest_of(x.largest, names)


def _scattered(x: Array, names: tuple[str, ...]) -> Array:
    """Reduce-scatter [B, T, N]: each device keeps its tokens of the sum."""
    if not names:
        return x
    return jax.lax.psum_scatter(x, names, scatter_dimension=1, tiled=True)


def _kept(x: Scaled) -> Scaled:
    """An operand as saved for the backward pass, named for `jax.checkpoint`."""
    # What `jax.checkpoint` saves passes `jax.lax.reduce_precision`, which takes E4M3
    # for a type with infinities, and would make them of all that is above 240.
    bits = jax.lax.bitcast_convert_type(x.data, jnp.uint8)
    kept = x._replace(data=bits)
    return jax.tree.map(lambda part: checkpoint_name(part, "fp8_operand"), kept)


def _read(kept: Scaled) -> Scaled:
    """The operand that `_kept` was given."""
    return kept._replace(data=jax.lax.bitcast_convert_type(kept.data, E4M3))


class _Form(NamedTuple):
    """The static properties of a matmul."""

    quantization: Fp8
    names: tuple[str, ...]
    """Mesh axes over which the tokens are all-gathered or reduce-scattered."""
    fused: bool = False
    """Use a fused matmul + collective kernel where there is one."""
    eps: float = 0.0
    """Of the RMS norm before the matmul, if there is one."""
    activation: str = ""
    """Of the gate of a feed-forward network."""
    stored: Stored = ()
    """Of each weight, if some are in parts."""

    def part(self, start: int, stop: int | None = None) -> "_Form":
        """The form of some of the weights."""
        return self._replace(stored=self.stored[start:stop])


def round_weights(
    ws: Float[Array, "L K N"],
    dtype: DTypeLike,
    quantization: Fp8,
    *,
    rows: tuple[str, ...] = (),
    columns: tuple[str, ...] = (),
) -> tuple[Scaled, Scaled]:
    """The weights of layers in fp8, in both layouts, as matmuls would round them.

    Args:
        ws: Parameters of this device.
        dtype: Type of the computation, to which they are rounded first.
        quantization: A scale per row, per block, or one per tensor.
        rows: Mesh axes over which their rows are stored in parts, or...
        columns: ...their columns, with a scale per row. They divide both dimensions.

    Returns:
        The stacks of `RoundedWeight.rows` and of `RoundedWeight.turned`.
    """

    def round_one(w: Array) -> tuple[Scaled, Scaled]:
        if quantization == "fp8_blockwise":
            return _squares(w, dtype)
        x = quantize_operand(w, E4M3, quantization, through=dtype)
        if columns:
            turned = _turned_part(x, columns)
            return _transposed(turned), turned
        if rows:
            x = x._replace(largest=_largest_everywhere(x, rows))
        return x, _transposed(x)

    straight, turned = jax.lax.map(round_one, ws)
    # Parts of columns [L, K, N / d] become parts of rows [L, K / d, N].
    if columns:
        straight = straight._replace(data=_exchanged(straight.data, columns))
    if rows:
        scale = jax.lax.all_gather(straight.scale, rows, axis=1, tiled=True)
        straight = straight._replace(scale=scale)
        turned = turned._replace(data=_exchanged(turned.data, rows))
    if columns:
        scale = jax.lax.all_gather(turned.scale, columns, axis=1, tiled=True)
        turned = turned._replace(scale=scale)
    return straight._replace(largest=None), turned._replace(largest=None)


def _squares(w: Array, dtype: DTypeLike) -> tuple[Scaled, Scaled]:
    """A weight [K, N] rounded by blocks, and its transpose."""
    data, turned, scale = quantize_squares(w, E4M3, through=dtype)
    return Scaled(data, scale), Scaled(turned, scale.T)


def _exchanged(x: Array, names: tuple[str, ...]) -> Array:
    return jax.lax.all_to_all(x, names, split_axis=1, concat_axis=2, tiled=True)


def _turned_part(x: Scaled, names: tuple[str, ...]) -> Scaled:
    """The transpose of columns, with the largest number of each row of all devices."""
    # Zeros here, whose scale is one, may be part of a row of small numbers.
    some = (x.data.astype(jnp.float32) != 0).any(-1)
    scale = _largest_of(jnp.where(some, x.scale, 0), names)
    most = scale * float(jnp.finfo(E4M3).max)
    return _transposed(x)._replace(largest=most)


def _weights(
    ws: Sequence[Weight], dtype: DTypeLike, form: _Form, *, turned: bool
) -> list[Scaled]:
    """[K, N] each, or transposed, rounded to `dtype` and then to fp8, and gathered."""
    found = []
    for w, (rows, columns) in zip(ws, form.stored or _WHOLE * len(ws), strict=True):
        if isinstance(w, RoundedWeight):
            x = w.turned if turned else w.rows
            if names := rows or columns:
                whole = jax.lax.all_gather(x.data, names, axis=0, tiled=True)
                x = x._replace(data=whole)
            found.append(x)
            continue
        if form.quantization == "fp8_blockwise":
            found.append(_squares(w, dtype)[turned])
            continue
        x = quantize_operand(w, E4M3, form.quantization, through=dtype)
        if columns:  # scales of rows are not known before those of others
            x = _turned_part(x, columns)
        if names := rows or columns:
            data, scale = (
                jax.lax.all_gather(part, names, axis=0, tiled=True)
                for part in (x.data, x.scale)
            )
            largest = x.largest if columns else _largest_everywhere(x, names)
            x = Scaled(data, scale, largest)
        found.append(x if turned == bool(columns) else _transposed(x))
    return found


_WHOLE: Stored = (((), ()),)


def _unread(ws: tuple[Weight, ...]) -> tuple[Weight, ...]:
    """What the backward pass needs of weights."""
    return tuple(
        w._replace(weight=jnp.zeros((), w.weight.dtype))
        if isinstance(w, RoundedWeight)
        else w
        for w in ws
    )


def _gradients_of_weights(
    ws: Sequence[Weight],
    columns: Sequence[Scaled],
    gs: Sequence[Scaled],
    dtype: DTypeLike,
    form: _Form,
) -> tuple[Any, ...]:
    """``columns @ g`` for each weight, rounded to `dtype`: the parts stored here."""
    found: list[Any] = []
    none: Any = None
    stored = form.stored or _WHOLE * len(ws)
    for w, x, g, (rows, features) in zip(ws, columns, gs, stored, strict=True):
        dw = _product(x, g, dtype)
        if names := rows or features:
            along = 0 if rows else 1
            dw = jax.lax.psum_scatter(dw, names, scatter_dimension=along, tiled=True)
        if isinstance(w, RoundedWeight):
            found.append(RoundedWeight(dw.astype(w.weight.dtype), none, none))
        else:
            found.append(dw.astype(w.dtype))
    return tuple(found)


def _operands(xs: Sequence[Array], dtype: DTypeLike, form: _Form) -> list[Scaled]:
    """[B, T, K] of each x in fp8.

    A kernel that adds up their matmuls needs one scale per row for all of them.
    """
    if len(xs) == 1 or not form.fused:
        return [quantize_operand(x, dtype, form.quantization) for x in xs]
    joined = quantize_operand(_joined(xs), dtype, form.quantization)
    ends = list(itertools.accumulate(x.shape[-1] for x in xs[:-1]))
    parts = jnp.split(joined.data, ends, axis=-1)
    if joined.largest is None:
        return [joined._replace(data=part) for part in parts]
    largest = jnp.split(joined.largest, ends)
    return [
        Scaled(part, joined.scale, most)
        for part, most in zip(parts, largest, strict=True)
    ]


def _joined(xs: Sequence[Array]) -> Array:
    return xs[0] if len(xs) == 1 else jnp.concatenate(xs, axis=-1)


def _gather_and_multiply(
    x: Scaled, ws: Sequence[Scaled], dtype: DTypeLike, form: _Form
) -> tuple[list[Array], Scaled]:
    """[B, T, N] for each weight [N, K], and the all-gathered x."""
    if form.fused:
        ys, *whole = scaled_all_gather_matmul(
            x.data,
            [w.data for w in ws],
            x.scale,
            [w.scale for w in ws],
            axis_name=form.names[0],
            return_gathered=True,
            out_dtype=dtype,
        )
        data, scale = whole
        return list(ys), Scaled(data, scale, _largest_everywhere(x, form.names))
    whole = _gathered(x, form.names)
    rows, tokens = _rows(whole), whole.data.shape[:2]
    ys = [_product(rows, w, dtype) for w in ws]  # [B T, N] each
    return [y.reshape(*tokens, y.shape[1]) for y in ys], whole


def _multiply_and_scatter(
    xs: Sequence[Scaled], ws: Sequence[Scaled], dtype: DTypeLike, form: _Form
) -> Array:
    """Reduce-scatter of ``x @ w.T``, [B, T, K] and [N, K]: [B, T, N].

    A kernel takes a single weight for all x.
    """
    if form.fused:
        (w,) = ws
        return scaled_matmul_reduce_scatter(
            _joined([x.data for x in xs]),
            w.data,
            xs[0].scale,
            w.scale,
            axis_name=form.names[0],
            out_dtype=dtype,
        )
    outs = [_product(_rows(x), w, dtype) for x, w in zip(xs, ws, strict=True)]
    if len(outs) > 1:
        # Parts in fp32 would double the traffic; operands of 8 bits lose far more.
        outs = [out.astype(jnp.float32) for out in outs]
    out = functools.reduce(operator.add, outs).astype(dtype)  # [B T, N]
    tokens = xs[0].data.shape[:2]
    return _scattered(out.reshape(*tokens, out.shape[1]), form.names)


def _input(x: Array, norm: Array | None, form: _Form) -> Scaled:
    """[B, T, K] in fp8, normalized if there is a norm."""
    if norm is None:
        return quantize_operand(x, E4M3, form.quantization, form.names)
    blocks = form.quantization == "fp8_blockwise"
    rows = quantize_rms_norm(_matrix(x), norm, E4M3, eps=form.eps, blocks=blocks)
    return _shaped(rows, x)


def _normalized(x: Array, norm: Array, eps: float) -> Array:
    wide = x.astype(jnp.float32)
    mean = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    return wide * jax.lax.rsqrt(mean + eps) * norm


def _matrix(x: Array) -> Array:
    return x.reshape(-1, x.shape[-1])


def _shaped(rows: QuantizedRows, like: Array) -> Scaled:
    """Rows of a matrix as [B, T, K]."""
    data, scale, largest = rows
    scale = scale.reshape(*like.shape[:-1], *scale.shape[1:])
    return Scaled(data.reshape(like.shape), scale, largest)


def _gradients(gs: Sequence[Array], form: _Form) -> tuple[list[Scaled], list[Scaled]]:
    """Gradients of results in both layouts; of a kernel's sum with one scale a row."""
    if len(gs) > 1 and form.fused:
        parts = _operands(gs, E5M2, form)
        return parts, [_transposed(_rows(g)) for g in parts]
    parts, turned = zip(*(_two_layouts(g, E5M2, form) for g in gs), strict=True)
    return [*parts], [*turned]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _column(
    form: _Form, x: Array, norm: Array | None, ws: tuple[Weight, ...]
) -> tuple[Array, ...]:
    """``norm(x) @ w`` for each w and the gathered tokens."""
    return _column_forward(form, x, norm, ws)[0]


def _column_forward(
    form: _Form, x: Array, norm: Array | None, ws: tuple[Weight, ...]
) -> tuple[Any, Any]:
    kept = _kept(_input(x, norm, form))
    weights = _weights(ws, x.dtype, form, turned=True)
    outs, _ = _gather_and_multiply(_read(kept), weights, x.dtype, form)
    outs = tuple(checkpoint_name(out, OUT_NAME) for out in outs)
    like = jnp.zeros((), x.dtype)
    return outs, (kept, None if norm is None else x, norm, _unread(ws), like)


def _column_backward(form: _Form, kept: Any, gs: tuple[Array, ...]) -> Any:
    return _column_gradients(form, kept, *_gradients(gs, form))


def _column_gradients(
    form: _Form, kept: Any, parts: list[Scaled], turned: list[Scaled]
) -> Any:
    """Gradients by those of the results, in both layouts."""
    kept, x, norm, ws, like = kept
    columns = _transposed(_rows(_gathered(_read(kept), form.names)))  # [K, M]
    dws = _gradients_of_weights(ws, [columns] * len(ws), turned, like.dtype, form)
    if len(ws) > 1 and form.fused:
        ws, form = [_joined(ws)], form.part(0, 1)
    ws8 = _weights(ws, like.dtype, form, turned=False)
    dx = _multiply_and_scatter(parts, ws8, like.dtype, form)
    if norm is None:
        return dx, None, dws
    _, back = jax.vjp(functools.partial(_normalized, eps=form.eps), x, norm)
    return *back(dx.astype(jnp.float32)), dws


_column.defvjp(_column_forward, _column_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _row(form: _Form, xs: tuple[Array, ...], ws: tuple[Weight, ...]) -> Array:
    """Reduce-scatter of the sum of ``x @ w`` over all pairs."""
    return _row_forward(form, xs, ws)[0]


def _row_forward(
    form: _Form, xs: tuple[Array, ...], ws: tuple[Weight, ...]
) -> tuple[Any, Any]:
    return _row_of(form, _operands(xs, E4M3, form), ws, xs[0].dtype)


def _row_of(
    form: _Form, xs: Sequence[Scaled], ws: tuple[Weight, ...], dtype: DTypeLike
) -> tuple[Any, Any]:
    kept = [_kept(x) for x in xs]
    joined, one = ws, form
    if form.fused:
        joined, one = [jnp.concatenate([*map(parameter_of, ws)])], form.part(0, 1)
    ws8 = _weights(joined, dtype, one, turned=True)
    out = _multiply_and_scatter([_read(x) for x in kept], ws8, dtype, form)
    kept = kept, _unread(ws), jnp.zeros((), dtype)
    return checkpoint_name(out, OUT_NAME), kept


def _row_backward(form: _Form, kept: Any, g: Array) -> Any:
    xs, ws, like = kept
    part = quantize_operand(g, E5M2, form.quantization, form.names)
    weights = _weights(ws, like.dtype, form, turned=False)
    dxs, whole = _gather_and_multiply(part, weights, like.dtype, form)
    columns = _transposed(_rows(whole))
    turned = [_transposed(_rows(_read(x))) for x in xs]
    gs = [columns] * len(ws)
    return tuple(dxs), _gradients_of_weights(ws, turned, gs, like.dtype, form)


_row.defvjp(_row_forward, _row_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _feed_forward(
    form: _Form, x: Array, norm: Array | None, ws: tuple[Weight, ...]
) -> Array:
    """A gated feed-forward network: its activations exist in fp8 and before the gate.

    The gradients of gate and up projection exist in fp8 alone.
    """
    return _feed_forward_forward(form, x, norm, ws)[0]


def _feed_forward_forward(
    form: _Form, x: Array, norm: Array | None, ws: tuple[Weight, ...]
) -> tuple[Any, Any]:
    (gate, up), column = _column_forward(form.part(0, 2), x, norm, ws[:2])
    hidden = quantize_gated(_matrix(gate), _matrix(up), E4M3, **_gate(form))
    out, row = _row_of(form.part(2), [_shaped(hidden, gate)], ws[2:], x.dtype)
    return out, (gate, up, column, row)


def _gate(form: _Form) -> dict[str, Any]:
    """Options of what rounds a gate."""
    blocks = form.quantization == "fp8_blockwise"
    return {"activation": form.activation, "blocks": blocks}


def _feed_forward_backward(form: _Form, kept: Any, g: Array) -> Any:
    gate, up, column, row = kept
    (hidden,), down = _row_backward(form.part(2), row, g)
    both = quantize_gated_gradients(
        _matrix(gate), _matrix(up), _matrix(hidden), E5M2, **_gate(form)
    )
    parts = [_shaped(rows, gate) for rows in both]
    turned = [_transposed(_rows(part)) for part in parts]
    dx, norm, ws = _column_gradients(form.part(0, 2), column, parts, turned)
    return dx, norm, (*ws, *down)


_feed_forward.defvjp(_feed_forward_forward, _feed_forward_backward)


def fp8_all_gather_matmul(
    x: Float[Array, "B T K"],
    kernels: Sequence[Weight],
    *,
    axis_names: tuple[str, ...],
    quantization: Fp8,
    fused: bool = False,
    norm: Norm = None,
    stored: Stored = (),
) -> tuple[Float[Array, "B all_T _N"], ...]:
    """``norm(x) @ kernel`` for each kernel and the tokens of all devices.

    Tokens are quantized once, and all-gathered in fp8. Gradients of the kernels are
    rounded to the type of x, as those of other layers are.

    Args:
        x: Activations of this device.
        kernels: Parameters [K, N], in any floating-point type; with `fused` and axes no
            `RoundedWeight`.
        axis_names: Mesh axes to gather the tokens over; none if they are whole.
        quantization: A scale per row, per block, or one per tensor.
        fused: Take kernels that communicate, over one axis, where they were tuned and
            are not slower than XLA. There are none for blocks.
        norm: An RMS norm of x, with a scale per row or block, or None.
        stored: Over what each kernel is stored in parts, which are gathered in fp8, and
            to which gradients are reduce-scattered. Scales are per row, and with
            `fused` the same for all, none along the features of the result.
    """
    scale, eps = norm or (None, 0.0)
    fused = _fuses(fused, axis_names, quantization)
    form = _Form(quantization, axis_names, fused, eps, stored=stored)
    return _column(form, x, scale, tuple(kernels))


def fp8_matmul_reduce_scatter(
    xs: Sequence[Float[Array, "B T _K"]],
    kernels: Sequence[Weight],
    *,
    axis_names: tuple[str, ...],
    quantization: Fp8,
    fused: bool = False,
    stored: Stored = (),
) -> Float[Array, "B own_T N"]:
    """``sum_i xs[i] @ kernels[i]``, reduce-scattered over the tokens.

    The arguments are those of `fp8_all_gather_matmul`; without axes the result is this
    device's own sum. Gradients of the result are all-gathered in fp8.
    """
    fused = _fuses(fused, axis_names, quantization)
    form = _Form(quantization, axis_names, fused, stored=stored)
    return _row(form, tuple(xs), tuple(kernels))


def fp8_feed_forward(
    x: Float[Array, "B T K"],
    kernels: Sequence[Weight],
    *,
    axis_names: tuple[str, ...],
    quantization: Fp8 = "fp8",
    activation: str,
    fused: bool = False,
    norm: Norm = None,
    stored: Stored = (),
) -> Float[Array, "B T K"]:
    """``(activation(norm(x) @ gate) * (norm(x) @ up)) @ down``, not with one scale.

    That is `fp8_all_gather_matmul` and `fp8_matmul_reduce_scatter`, but activations and
    gradients between them are rounded in the pass that computes them. With a scale per
    row the gradients of both projections have one scale for each token.

    Args:
        x: Activations of this device.
        kernels: Gate, up ``[K, F]`` and down ``[F, K]``.
        axis_names: Mesh axes that split the tokens of x and the result.
        quantization: A scale per row, or per block.
        activation: A name in `pallas_kernels.matmul.ACTIVATIONS`.
        fused: As of `fp8_all_gather_matmul`.
        norm: An RMS norm of x, or None.
        stored: As of `fp8_all_gather_matmul`.
    """
    scale, eps = norm or (None, 0.0)
    fused = _fuses(fused, axis_names, quantization)
    form = _Form(quantization, axis_names, fused, eps, activation, stored)
    return _feed_forward(form, x, scale, tuple(kernels))


def _fuses(fused: bool, axis_names: tuple[str, ...], quantization: Fp8) -> bool:
    """Whether matmuls take kernels that communicate."""
    return fused and len(axis_names) == 1 and quantization != "fp8_blockwise"
