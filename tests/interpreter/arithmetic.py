"""The arithmetic of kernels in numpy.

Kernels at the size of a test compute little. To compile each of them for the CPU takes
a hundred times longer than to run their equations one by one.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def _quotient(x, y):
    if np.issubdtype(x.dtype, np.integer):
        return np.where(y == 0, -1, np.trunc(np.true_divide(x, np.where(y == 0, 1, y))))
    return np.divide(x, y)


def _broadcast(x, *, shape, broadcast_dimensions, **_):
    lifted = [1] * len(shape)
    for size, axis in zip(np.shape(x), broadcast_dimensions, strict=True):
        lifted[axis] = size
    return np.broadcast_to(np.reshape(x, lifted), shape)


def _convert(x, *, new_dtype, **_):
    x = np.asarray(x)
    if np.dtype(new_dtype).kind in "iu" and x.dtype.kind not in "iub":
        # XLA saturates, and turns NaN to zero; the conversion of C is undefined there.
        limits = np.iinfo(new_dtype)
        wide = np.nan_to_num(x.astype(np.float64), posinf=np.inf, neginf=-np.inf)
        return np.clip(np.trunc(wide), limits.min, limits.max).astype(new_dtype)
    return x.astype(new_dtype)


def _select(which, *cases):
    which = np.asarray(which)
    if which.dtype == np.bool_:
        return np.where(which, cases[1], cases[0])
    return np.choose(which, cases)


def _slice(x, *, start_indices, limit_indices, strides, **_):
    strides = strides or (1,) * len(start_indices)
    return x[tuple(map(slice, start_indices, limit_indices, strides))]


def _iota(*, dtype, shape, dimension, **_):
    lifted = [1] * len(shape)
    lifted[dimension] = shape[dimension]
    line = np.arange(shape[dimension], dtype=dtype).reshape(lifted)
    return np.broadcast_to(line, shape)


def _exact(function: Callable) -> Callable:
    """In float32 for the narrow types, for which numpy has no such function."""

    def rule(x, **_):
        return function(np.asarray(x, np.float32) if x.dtype.itemsize < 4 else x)

    return rule


def _plain(function: Callable) -> Callable:
    return lambda *args, **_: function(*args)


def _reduction(function: np.ufunc) -> Callable:
    return lambda x, *, axes, **_: function.reduce(x, axis=tuple(axes))


def _sum(x, *, axes, **_):
    x = np.asarray(x)
    wide = np.float32 if x.dtype.itemsize < 4 and x.dtype.kind not in "iub" else x.dtype
    return np.add.reduce(x, axis=tuple(axes), dtype=wide)


def _integer_power(x, *, y, **_):
    return np.power(np.asarray(x, np.float32), y) if x.dtype.itemsize < 4 else x**y


RULES: dict[Any, Callable] = {
    **{
        primitive: _plain(function)
        for primitive, function in {
            lax.add_p: np.add,
            lax.sub_p: np.subtract,
            lax.mul_p: np.multiply,
            lax.div_p: _quotient,
            lax.rem_p: np.fmod,
            lax.max_p: np.maximum,
            lax.min_p: np.minimum,
            lax.neg_p: np.negative,
            lax.abs_p: np.abs,
            lax.sign_p: np.sign,
            lax.floor_p: np.floor,
            lax.ceil_p: np.ceil,
            lax.square_p: np.square,
            lax.and_p: np.bitwise_and,
            lax.or_p: np.bitwise_or,
            lax.xor_p: np.bitwise_xor,
            lax.not_p: np.invert,
            lax.shift_left_p: np.left_shift,
            lax.shift_right_arithmetic_p: np.right_shift,
            lax.eq_p: np.equal,
            lax.ne_p: np.not_equal,
            lax.lt_p: np.less,
            lax.le_p: np.less_equal,
            lax.gt_p: np.greater,
            lax.ge_p: np.greater_equal,
            lax.is_finite_p: np.isfinite,
            lax.pow_p: np.power,
            lax.clamp_p: lambda low, x, high: np.minimum(np.maximum(x, low), high),
            lax.select_n_p: _select,
            lax.copy_p: np.asarray,
        }.items()
    },
    **{
        primitive: _exact(function)
        for primitive, function in {
            lax.exp_p: np.exp,
            lax.exp2_p: np.exp2,
            lax.log_p: np.log,
            lax.log1p_p: np.log1p,
            lax.expm1_p: np.expm1,
            lax.sqrt_p: np.sqrt,
            lax.rsqrt_p: lambda x: 1 / np.sqrt(x),
            lax.tanh_p: np.tanh,
            lax.logistic_p: lambda x: 1 / (1 + np.exp(-x)),
            lax.sin_p: np.sin,
            lax.cos_p: np.cos,
        }.items()
    },
    lax.integer_pow_p: _integer_power,
    lax.convert_element_type_p: _convert,
    lax.bitcast_convert_type_p: lambda x, *, new_dtype: np.asarray(x).view(new_dtype),
    lax.broadcast_in_dim_p: _broadcast,
    lax.reshape_p: lambda x, *, new_sizes, **_: np.reshape(x, new_sizes),
    lax.squeeze_p: lambda x, *, dimensions, **_: np.squeeze(x, tuple(dimensions)),
    lax.transpose_p: lambda x, *, permutation, **_: np.transpose(x, permutation),
    lax.concatenate_p: lambda *xs, dimension, **_: np.concatenate(xs, dimension),
    lax.slice_p: _slice,
    lax.iota_p: _iota,
    lax.reduce_sum_p: _sum,
    lax.reduce_max_p: _reduction(np.maximum),
    lax.reduce_min_p: _reduction(np.minimum),
    lax.reduce_and_p: _reduction(np.bitwise_and),
    lax.reduce_or_p: _reduction(np.bitwise_or),
}


def evaluate(eqn, values: list) -> list:
    """The outputs of an equation without effects, as numpy values of its types."""
    rule = RULES.get(eqn.primitive)
    if rule is None:  # rare enough for XLA
        with jax.ensure_compile_time_eval():
            out = eqn.primitive.bind(
                *map(jnp.asarray, values), **eqn.primitive.get_bind_params(eqn.params)
            )
    else:
        out = rule(*values, **eqn.params)
    outs = out if eqn.primitive.multiple_results else [out]
    return [
        of_type(value, var.aval) for value, var in zip(outs, eqn.outvars, strict=True)
    ]


def of_type(value, aval):
    """``value`` as numpy's, of the type that jax says it has."""
    value = np.asarray(value, aval.dtype)
    if value.shape != aval.shape:
        raise ValueError(f"got the shape {value.shape}, expected {aval}")
    return value[()]  # scalars are faster than arrays without axes
