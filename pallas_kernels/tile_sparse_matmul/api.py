"""The public tile-sparse matmul.

Axis letters: B any leading axes of tokens, M tokens, K input features, N output
features, C packed output features (N without the pruned ones), T tiles, P row capacity
of a tile, G columns of a tile.
"""

import dataclasses
import functools
import math
import string
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float

from pallas_kernels import tuned_configs
from pallas_kernels.dispatch import as_hashable, check_floating, dispatch, no_config
from pallas_kernels.matmul import matmul
from pallas_kernels.matmul.activations import check_activation
from pallas_kernels.mosaic import DeviceSpec, check_hopper, keep_mark, vary_alike
from pallas_kernels.partition import by_shards, check_local
from pallas_kernels.tile_sparse_matmul import (
    epilogue,
    mosaic_gpu,
    mosaic_gpu_grad,
    triton,
    xla,
)
from pallas_kernels.tile_sparse_matmul.config import (
    FEW_TOKENS,
    GradConfig,
    Problem,
    TileSparseConfig,
    heuristic,
)
from pallas_kernels.tile_sparse_matmul.format import STEP, TileSparse
from pallas_kernels.tile_sparse_matmul.transposed import has_tiles, transposed


OUT_NAME = "tile_sparse_matmul_out"
"""The name of the pre-activations, for policies of `jax.checkpoint`."""


def tile_sparse_matmul(
    x: Float[Array, "..."],
    w: TileSparse,
    *,
    bias: Float[Array, " N"] | None = None,
    activation: str | None = None,
    feature_major: bool | tuple[bool, bool] = False,
    implementation: str | Sequence[str] | None = None,
    config: TileSparseConfig | None = None,
) -> Float[Array, "..."]:
    """Multiplies activations by a tile-wise sparse weight, with fp32 accumulation.

    ``y[..., n] = activation(sum_k x[..., k] dense(w)[k, n] + bias[n])``

    The kernels gather rows of feature-major activations, where a kept row is
    contiguous. `feature_major` activations are [K,*B] and [N,*B]: consecutive layers
    stay in that layout and need no transposes; element-wise operations between them
    work in either. Token-major input of a weight of granularity 1 or 8 is transposed
    first; token-major output, and either input with granularity 64, cost nothing.

    Differentiable in x, ``w.values`` and bias. The gradient of the values is computed
    for the kept rows only, by a kernel of the same family on Hopper; that of x is a
    dense matmul with the unpacked weight, because the transpose of a tile-wise weight
    has no tiles. With granularity 64 it has, and if half or more is pruned a sparse
    matmul gives the gradient on Hopper. Gradients of values past the counts are zero,
    so a pruned weight never comes back.

    With ``implementation=None`` a kernel runs on NVIDIA GPUs, Mosaic GPU's on Hopper,
    Triton's elsewhere, unless so little is pruned that unpacking the weight for a dense
    matmul is expected to be faster. Only the packed weight is stored: a layer that is
    known to stay nearly full is better kept dense. Bias and activation are fused into
    the kernel if no columns are pruned, and otherwise into one kernel of XLA. The
    compiler does not partition the kernels: on several devices they run inside
    `jax.shard_map`, with `TileSparse.shards`, and where the types of Explicit mesh axes
    say that tokens are split.

    Args:
        x: ``[*B,K]`` activations, or ``[K,*B]``.
        w: weight [K,N] of the same type.
        bias: [N], added before the activation.
        activation: "relu", "silu", "gelu" (exact), "gelu_tanh", or None.
        feature_major: whether features are the leading axis, of x and y or of each.
        implementation: "mosaic_gpu" (Hopper; bfloat16 or float16, tiles of 64, 128 or
            256), "triton" (Ampere, Ada and Hopper; the same types and tiles; needs the
            extra ``triton``), "xla", a sequence of these, or None for the best.
        config: tiling of the Hopper kernel; None looks it up in
            `pallas_kernels.tuned_configs`. With one the kernel is tried first; other
            implementations refuse one given here.

    Returns:
        ``[*B,N]`` of the type of x, or ``[N,*B]``.

    Raises:
        ValueError: shapes or types disagree, a type is not floating or has fewer than
            16 bits, the activation is unknown, or the config is another op's.
        Unsupported: the implementation named cannot serve the arguments here.
        ExceptionGroup: none of several implementations can.

    Example:
        >>> import jax.numpy as jnp
        >>> mask = jnp.array([[True, False], [True, False], [False, True]])
        >>> w = TileSparse.from_dense(jnp.ones((3, 2)), mask, tile=1)
        >>> tile_sparse_matmul(jnp.array([[1.0, 2.0, 3.0]]), w)
        Array([[3., 3.]], dtype=float32)

    References:
        Guo et al., SC 2020 (arXiv 2008.13006): see `TileSparse`.
    """
    x = jnp.asarray(x)
    bias = None if bias is None else jnp.asarray(bias)
    x_major, y_major = _layouts(feature_major)
    _check(x, w, bias, activation, x_major)
    tuned_configs.check_config(_OP, config, TileSparseConfig)
    call = _Call(
        shape=w.shape,
        granularity=w.granularity,
        equal_counts=w.equal_counts,
        steps=w.steps,
        activation=activation,
        feature_major=(x_major, y_major),
        implementation=as_hashable(implementation),
        config=config,
    )
    weights, structure = jax.tree.flatten((w, bias))

    def run(x: jax.Array, *weights: jax.Array) -> jax.Array:
        w, bias = structure.unflatten(weights)
        return _tile_sparse_matmul(x, w, bias, call)

    rows = string.ascii_lowercase[: x.ndim - 1]
    x_dims, y_dims = (
        "K" + rows if major else rows + "K" for major in call.feature_major
    )
    dims = [x_dims, *("W" * a.ndim for a in weights)]
    args = [x, *weights]
    return by_shards(run, args, dims, y_dims)(*args)


def _tile_sparse_matmul(
    x: jax.Array,
    w: TileSparse,
    bias: jax.Array | None,
    call: "_Call",
) -> jax.Array:
    """The matmul of one device's activations."""
    x_major, y_major = call.feature_major
    batch = x.shape[1:] if x_major else x.shape[:-1]
    tokens = math.prod(batch)
    # [K, M] or [M, K], and back to [N, ..] or [.., N] at the end.
    flat = x.reshape((w.shape[0], tokens) if x_major else (tokens, w.shape[0]))
    kernel = _may_run_a_kernel(flat, w, call)
    few = kernel and tokens <= FEW_TOKENS
    if few and not x_major:
        flat = _row_major(flat)
    if not x_major and w.granularity < STEP and kernel:
        # Here, so that the gradient of the values gets it transposed too.
        flat, call = flat.T, dataclasses.replace(call, feature_major=(True, y_major))
    pattern = (w.rows, w.counts, w.columns, w.places, w.order)
    flat, values, bias, pattern = vary_alike((flat, w.values, bias, pattern))
    y: Any = _product(flat, values, bias, pattern, call)
    if few and not y_major:
        y = _row_major(y)
    return y.reshape((w.shape[1], *batch) if y_major else (*batch, w.shape[1]))


def _row_major(x: jax.Array) -> jax.Array:
    """[M,features], fixed in this layout.

    The kernel takes the transpose. XLA would transpose everything before it as well, up
    to the residual stream, and sum over strided features there: slow for few tokens.
    """
    if len(x) == 1 or not isinstance(x, Tracer):
        return x  # only one layout
    return with_layout_constraint(x, Layout((0, 1)))


def _layouts(feature_major: Any) -> tuple[bool, bool]:
    """Return whether features are the leading axis of x and of y."""
    if isinstance(feature_major, bool | np.bool_):
        return bool(feature_major), bool(feature_major)
    if not isinstance(feature_major, Sequence) or len(feature_major) != 2:
        raise ValueError(
            f"feature_major {feature_major!r}, expected a bool, or two: of x and of y"
        )
    x_major, y_major = feature_major
    return bool(x_major), bool(y_major)


def _check(
    x: jax.Array, w: TileSparse, bias: Any, activation: str | None, x_major: bool
) -> None:
    """Checks the arguments."""
    if not isinstance(w, TileSparse):
        raise TypeError(
            f"w is a {type(w).__name__}, expected a TileSparse; pack a dense weight"
            " with TileSparse.from_dense"
        )
    inputs, outputs = w.shape
    if w.values.ndim != 3:
        raise ValueError(
            f"w has values of shape {w.values.shape}, expected [T, P, G]; scan or vmap"
            " over stacked weights"
        )
    if w.values.shape[:-1] != w.rows.shape or w.tiles * w.tile < w.packed_columns:
        raise ValueError(
            f"w has values of shape {w.values.shape} for rows of shape {w.rows.shape}"
            f" and {w.packed_columns} columns; see with_values"
        )
    if x.ndim < 1 or x.shape[0 if x_major else -1] != inputs:
        raise ValueError(
            f"x has shape {x.shape} ({'feature' if x_major else 'token'}-major),"
            f" expected {inputs} features as w of shape {w.shape} has; see"
            " feature_major"
        )
    if x.dtype != w.dtype:
        raise ValueError(f"w has type {w.dtype}, expected that of x, {x.dtype}")
    check_floating(x=x.dtype)
    if bias is not None:
        check_floating(bias=bias.dtype)
    if bias is not None and bias.shape != (outputs,):
        raise ValueError(f"bias has shape {bias.shape}, expected ({outputs},)")
    check_activation(activation)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Call:
    """The static part of a call."""

    shape: tuple[int, int]
    granularity: int
    equal_counts: bool
    steps: int | None
    activation: str | None
    feature_major: tuple[bool, bool]
    implementation: str | tuple[str, ...] | None
    config: TileSparseConfig | None

    def weight(self, values: Any, pattern: Any) -> TileSparse:
        static = (self.shape, self.granularity, self.equal_counts, self.steps)
        return TileSparse.tree_unflatten(static, (values, *pattern))


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _product(
    x: jax.Array, values: jax.Array, bias: Any, pattern: Any, call: _Call
) -> jax.Array:
    w = call.weight(values, pattern)
    if w.columns is None:
        return _run(x, w, bias, call.activation, call)
    y_major = call.feature_major[1]
    y = _run(x, w.packed(), None, None, call)
    y = w.place_columns(y, axis=0 if y_major else 1)
    return epilogue.apply(
        y, bias, call.activation, feature_major=y_major, dtype=x.dtype
    )


def _forward(
    x: jax.Array, values: jax.Array, bias: Any, pattern: Any, call: _Call
) -> tuple[jax.Array, Any]:
    linear = dataclasses.replace(call, activation=None)
    z: Any = _product(x, values, bias, pattern, linear)
    # A checkpoint policy may save it by name.
    z = checkpoint_name(z, OUT_NAME)
    if call.activation is None:
        return z, (x, values, bias, pattern, None)
    y = epilogue.activate_in_fp32(z, call.activation, x.dtype)
    return y, (x, values, bias, pattern, z)


def _backward(call: _Call, saved: Any, dy: jax.Array) -> tuple[Any, ...]:
    x, values, bias, pattern, z = saved
    w = call.weight(values, pattern)
    y_major = call.feature_major[1]
    if z is not None:
        activate = functools.partial(
            epilogue.activate_in_fp32, activation=call.activation, dtype=x.dtype
        )
        (dy,) = jax.vjp(activate, z.astype(jnp.float32))[1](dy)
    dbias = None
    if bias is not None:
        sums = jnp.sum(dy, axis=1 if y_major else 0, dtype=jnp.float32)
        dbias = sums.astype(bias.dtype)
    dy = dy.astype(x.dtype)
    if w.columns is not None:
        along = 0 if y_major else 1
        dy = jnp.take(dy, w.columns, axis=along, mode="fill", fill_value=0)
    dvalues = _run_grad(x, dy, w, call)
    return _grad_inputs(dy, w, call), dvalues, dbias, None


def _grad_inputs(dy: jax.Array, w: TileSparse, call: _Call) -> jax.Array:
    """The gradient of x: sparse if the transpose has tiles, otherwise dense."""
    return dispatch(
        f"{_OP} (gradient of x)",
        {
            "mosaic_gpu": functools.partial(_sparse_grad_inputs, _mosaic_gpu),
            "triton": functools.partial(_sparse_grad_inputs, _triton),
            "dense": _dense_grad_inputs,
        },
        None,
        dy,
        w,
        call,
        declines={
            name: functools.partial(_declines_transposed, name, dy, w, call)
            for name in _KERNELS
        },
    )


def _declines_transposed(
    name: str, dy: jax.Array, w: TileSparse, call: _Call
) -> str | None:
    """Say why a dense matmul should give the gradient of x, or None."""
    if not has_tiles(w):
        return (
            f"the transpose of a weight of granularity {w.granularity} with tiles of"
            f" {w.tile} has no tiles"
        )
    if 2 * w.room > w.shape[0]:
        # Its tiles have 64 columns and share less.
        return "more than half of the rows are kept, so a dense product is faster"
    names = _names(call)
    if name not in names:
        return f"implementation {names} was asked for"
    y_major = call.feature_major[1]
    forth = dataclasses.replace(call, feature_major=(y_major, y_major))
    return _declines(dy, w, forth) if call.implementation is None else None


def _sparse_grad_inputs(
    kernel: Callable[..., jax.Array], dy: jax.Array, w: TileSparse, call: _Call
) -> jax.Array:
    x_major, y_major = call.feature_major
    back = dataclasses.replace(call, feature_major=(y_major, x_major), config=None)
    dx = kernel(dy, transposed(w), None, None, back)
    return keep_mark(dx, dy)


def _dense_grad_inputs(dy: jax.Array, w: TileSparse, call: _Call) -> jax.Array:
    x_major, y_major = call.feature_major
    dense = w.packed().to_dense()  # [K, C]
    named = "xla" if call.implementation == "xla" else None
    if x_major:
        other = dy if y_major else dy.T  # [C, M]
        return matmul(dense, other, implementation=named)  # [K, M]
    other = dy.T if y_major else dy  # [M, C]
    return matmul(other, dense, rhs_transposed=True, implementation=named)


_product.defvjp(_forward, _backward)


_KERNELS = ("mosaic_gpu", "triton")


def _names(call: _Call) -> tuple[str, ...]:
    """The implementations that the caller allows."""
    named = call.implementation
    if named is None:
        return (*_KERNELS, "xla")
    return (named,) if isinstance(named, str) else named


def _declines(x: jax.Array, w: TileSparse, call: _Call) -> str | None:
    """Say why XLA is expected to be faster than the kernels, or None."""
    problem = Problem.of(x, w, call.feature_major)
    return tuned_configs.declines(_OP, problem, DeviceSpec.current(), call.config)


def _may_run_a_kernel(x: jax.Array, w: TileSparse, call: _Call) -> bool:
    """True if the input should be stored in the layout of the kernels."""
    if call.implementation is not None:
        return _names(call)[:1] != ("xla",)
    if DeviceSpec.current() is None or 0 in x.shape:
        return False
    return _declines(x, w, call) is None


_OP = "tile_sparse_matmul"


def _run(
    x: jax.Array, w: TileSparse, bias: Any, activation: str | None, call: _Call
) -> jax.Array:
    """The packed matmul and its epilogue, by the first implementation that can."""
    y = dispatch(
        _OP,
        {"mosaic_gpu": _mosaic_gpu, "triton": _triton, "xla": _xla},
        call.implementation,
        x,
        w,
        bias,
        activation,
        call,
        declines=dict.fromkeys(_KERNELS, functools.partial(_declines, x, w, call)),
    )
    return keep_mark(y, x)


def _run_grad(x: jax.Array, dy: jax.Array, w: TileSparse, call: _Call) -> jax.Array:
    """The gradient of the values, by the first implementation that supports it."""
    grad = dispatch(
        f"{_OP} (gradient of the values)",
        {
            "mosaic_gpu": _grad_mosaic_gpu,
            "triton": _grad_triton,
            "xla": xla.grad_values,
        },
        call.implementation,
        x,
        dy,
        w,
        declines=dict.fromkeys(_KERNELS, functools.partial(_declines, x, w, call)),
        feature_major=call.feature_major,
    )
    return keep_mark(grad, x)


def _xla(
    x: jax.Array, w: TileSparse, bias: Any, activation: str | None, call: _Call
) -> jax.Array:
    no_config(_OP, call.config)
    y = xla.tile_sparse_matmul(x, w, feature_major=call.feature_major)
    return epilogue.apply(
        y, bias, activation, feature_major=call.feature_major[1], dtype=x.dtype
    )


def _triton(
    x: jax.Array, w: TileSparse, bias: Any, activation: str | None, call: _Call
) -> jax.Array:
    no_config(_OP, call.config, "Triton")
    check_local(_OP, x, w.values)
    return triton.tile_sparse_matmul(
        x,
        w,
        bias,
        activation,
        feature_major=call.feature_major,
        device=DeviceSpec.current(),
    )


def _mosaic_gpu(
    x: jax.Array, w: TileSparse, bias: Any, activation: str | None, call: _Call
) -> jax.Array:
    device, config = tuned_configs.hopper_config(
        _OP,
        Problem.of(x, w, call.feature_major),
        DeviceSpec.current(),
        TileSparseConfig,
        arrays=(x, w.values),
        check=mosaic_gpu.check_problem,
        config=call.config,
        heuristic=heuristic,
    )
    return mosaic_gpu.tile_sparse_matmul(
        x,
        w,
        bias,
        activation,
        feature_major=call.feature_major,
        config=config,
        device=device,
    )


def _grad_triton(
    x: jax.Array, dy: jax.Array, w: TileSparse, *, feature_major: tuple[bool, bool]
) -> jax.Array:
    check_local(_OP, x, w.values)
    return triton.grad_values(
        x, dy, w, feature_major=feature_major, device=DeviceSpec.current()
    )


def _grad_mosaic_gpu(
    x: jax.Array, dy: jax.Array, w: TileSparse, *, feature_major: tuple[bool, bool]
) -> jax.Array:
    problem = Problem.of(x, w, feature_major)
    device = check_hopper(DeviceSpec.current(), _OP)
    check_local(_OP, x, w.values)
    return mosaic_gpu_grad.grad_values(
        x,
        dy,
        w,
        feature_major=feature_major,
        config=GradConfig.of(problem),
        device=device,
    )
