"""The tile-sparse matmul of one device: its gradients, and which implementations run.

Axis letters: M tokens, K input features, N output features, C packed output features
(N without the pruned ones), T tiles, P row capacity of a tile, G columns of a tile.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer
from jax.experimental.layout import Layout, with_layout_constraint

from pallas_kernels import tuned_configs
from pallas_kernels.dispatch import Unsupported, dispatch, no_config
from pallas_kernels.matmul import matmul
from pallas_kernels.mosaic import DeviceSpec, check_hopper, keep_mark
from pallas_kernels.partition import check_local
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
from pallas_kernels.tile_sparse_matmul.format import TileSparse
from pallas_kernels.tile_sparse_matmul.format_24 import TileSparse24
from pallas_kernels.tile_sparse_matmul.transposed import has_tiles, transposed


OP = "tile_sparse_matmul"

OUT_NAME = "tile_sparse_matmul_out"
"""The name of the pre-activations, for policies of `jax.checkpoint`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """The static part of a call."""

    shape: tuple[int, int]
    granularity: int
    equal_counts: bool
    steps: int | None
    activation: str | None
    feature_major: tuple[bool, bool]
    implementation: str | tuple[str, ...] | None
    config: TileSparseConfig | None

    def weight(self, values: Any, pattern: Any) -> Any:
        """The weight of these values and this pattern; 2:4 of values and metadata."""
        static = (self.shape, self.granularity, self.equal_counts, self.steps)
        if not isinstance(values, tuple):
            return TileSparse.tree_unflatten(static, (values, *pattern))
        kept = TileSparse.tree_unflatten(static, (None, *pattern))
        return TileSparse24(values=values[0], metadata=values[1], pattern=kept)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def product(
    x: jax.Array, values: Any, bias: Any, pattern: Any, call: Call
) -> jax.Array:
    """The matmul with bias and activation.

    Args:
        x: [M,K], or [K,M].
        values: [T,P,G], or values and metadata of a `TileSparse24`.
        bias: [N], or None.
        pattern: the other arrays of the weight.
        call: the static part.

    Returns:
        [M,N], or [N,M].
    """
    w = call.weight(values, pattern)
    if pattern[2] is None:
        return _run(x, w, bias, call.activation, call)
    y_major = call.feature_major[1]
    y = _run(x, w.packed(), None, None, call)
    kept = w
    if isinstance(w, TileSparse24):
        kept = w.pattern
        if not y_major and len(y) > FEW_TOKENS and may_run_a_kernel(x, w, call):
            # Its kernel gives the transpose, of which XLA would gather single values.
            y = row_major(y)
    y = kept.place_columns(y, axis=0 if y_major else 1)
    return epilogue.apply(
        y, bias, call.activation, feature_major=y_major, dtype=x.dtype
    )


def row_major(x: jax.Array) -> jax.Array:
    """[M,features], fixed in this layout.

    The kernel takes the transpose. XLA would transpose everything before it as well, up
    to the residual stream, and sum over strided features there: slow for few tokens.
    """
    if len(x) == 1 or not isinstance(x, Tracer):
        return x  # only one layout
    return with_layout_constraint(x, Layout((0, 1)))


def _forward(
    x: jax.Array, values: Any, bias: Any, pattern: Any, call: Call
) -> tuple[jax.Array, Any]:
    if isinstance(values, tuple):
        raise NotImplementedError(
            f"{OP}: a TileSparse24 is for inference and has no gradient; train with"
            " w.decompress(), a TileSparse, and compress it afterwards"
        )
    linear = dataclasses.replace(call, activation=None)
    z: Any = product(x, values, bias, pattern, linear)
    # A checkpoint policy may save it by name.
    z = checkpoint_name(z, OUT_NAME)
    if call.activation is None:
        return z, (x, values, bias, pattern, None)
    y = epilogue.activate_in_fp32(z, call.activation, x.dtype)
    return y, (x, values, bias, pattern, z)


def _backward(call: Call, saved: Any, dy: jax.Array) -> tuple[Any, ...]:
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


def _grad_inputs(dy: jax.Array, w: TileSparse, call: Call) -> jax.Array:
    """The gradient of x: sparse if the transpose has tiles, otherwise dense."""
    return dispatch(
        f"{OP} (gradient of x)",
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
    name: str, dy: jax.Array, w: TileSparse, call: Call
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
    kernel: Callable[..., jax.Array], dy: jax.Array, w: TileSparse, call: Call
) -> jax.Array:
    x_major, y_major = call.feature_major
    back = dataclasses.replace(call, feature_major=(y_major, x_major), config=None)
    dx = kernel(dy, transposed(w), None, None, back)
    return keep_mark(dx, dy)


def _dense_grad_inputs(dy: jax.Array, w: TileSparse, call: Call) -> jax.Array:
    x_major, y_major = call.feature_major
    dense = w.packed().to_dense()  # [K, C]
    named = "xla" if call.implementation == "xla" else None
    if x_major:
        other = dy if y_major else dy.T  # [C, M]
        return matmul(dense, other, implementation=named)  # [K, M]
    other = dy.T if y_major else dy  # [M, C]
    return matmul(other, dense, rhs_transposed=True, implementation=named)


product.defvjp(_forward, _backward)


_KERNELS = ("mosaic_gpu", "triton")


def _names(call: Call) -> tuple[str, ...]:
    """The implementations that the caller allows."""
    named = call.implementation
    if named is None:
        return (*_KERNELS, "xla")
    return (named,) if isinstance(named, str) else named


def _declines(x: jax.Array, w: TileSparse | TileSparse24, call: Call) -> str | None:
    """Say why XLA is expected to be faster than the kernels, or None."""
    problem = Problem.of(x, w, call.feature_major)
    return tuned_configs.declines(OP, problem, DeviceSpec.current(), call.config)


def may_run_a_kernel(x: jax.Array, w: TileSparse | TileSparse24, call: Call) -> bool:
    """True if the input should be stored in the layout of the kernels."""
    if call.implementation is not None:
        return _names(call)[:1] != ("xla",)
    if DeviceSpec.current() is None or 0 in x.shape:
        return False
    return _declines(x, w, call) is None


def _run(
    x: jax.Array,
    w: TileSparse | TileSparse24,
    bias: Any,
    activation: str | None,
    call: Call,
) -> jax.Array:
    """The packed matmul and its epilogue, by the first implementation that can."""
    y = dispatch(
        OP,
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


def _run_grad(x: jax.Array, dy: jax.Array, w: TileSparse, call: Call) -> jax.Array:
    """The gradient of the values, by the first implementation that supports it."""
    grad = dispatch(
        f"{OP} (gradient of the values)",
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
    x: jax.Array,
    w: TileSparse | TileSparse24,
    bias: Any,
    activation: str | None,
    call: Call,
) -> jax.Array:
    no_config(OP, call.config)
    if isinstance(w, TileSparse24):
        w = w.decompress()
    y = xla.tile_sparse_matmul(x, w, feature_major=call.feature_major)
    return epilogue.apply(
        y, bias, activation, feature_major=call.feature_major[1], dtype=x.dtype
    )


def _triton(
    x: jax.Array,
    w: TileSparse | TileSparse24,
    bias: Any,
    activation: str | None,
    call: Call,
) -> jax.Array:
    if isinstance(w, TileSparse24):
        raise Unsupported(
            f"{OP}: a TileSparse24, which only the Hopper kernel multiplies; use"
            " implementation='xla', or w.decompress()"
        )
    no_config(OP, call.config, "Triton")
    check_local(OP, x, w.values)
    return triton.tile_sparse_matmul(
        x,
        w,
        bias,
        activation,
        feature_major=call.feature_major,
        device=DeviceSpec.current(),
    )


def _mosaic_gpu(
    x: jax.Array,
    w: TileSparse | TileSparse24,
    bias: Any,
    activation: str | None,
    call: Call,
) -> jax.Array:
    device, config = tuned_configs.hopper_config(
        OP,
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
    check_local(OP, x, w.values)
    return triton.grad_values(
        x, dy, w, feature_major=feature_major, device=DeviceSpec.current()
    )


def _grad_mosaic_gpu(
    x: jax.Array, dy: jax.Array, w: TileSparse, *, feature_major: tuple[bool, bool]
) -> jax.Array:
    problem = Problem.of(x, w, feature_major)
    device = check_hopper(DeviceSpec.current(), OP)
    check_local(OP, x, w.values)
    return mosaic_gpu_grad.grad_values(
        x,
        dy,
        w,
        feature_major=feature_major,
        config=GradConfig.of(problem),
        device=device,
    )
