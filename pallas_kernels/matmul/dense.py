"""The public linear layers: matmuls, bias and activation of one input.

Axis letters: L layers, B any leading axes, M rows, K contraction, N columns.
"""

import dataclasses
import functools
import math
import operator
import string
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels import tuned_configs
from pallas_kernels.dispatch import check_floating, dispatch, no_derivative
from pallas_kernels.layer_norm import mosaic_gpu as layer_norm_kernel
from pallas_kernels.layer_norm import xla as layer_norm_xla
from pallas_kernels.matmul import mosaic_gpu, mosaic_gpu_dense, mosaic_gpu_norm
from pallas_kernels.matmul.activations import activate, check_activation
from pallas_kernels.matmul.api import run as run_matmul
from pallas_kernels.matmul.config import DenseProblem, Problem, heuristic
from pallas_kernels.mosaic import (
    DeviceSpec,
    check_hopper,
    keep_mark,
    vary_alike,
)
from pallas_kernels.partition import by_shards, check_local


OUT_NAME = "dense_out"
"""The name of the pre-activations, for policies of `jax.checkpoint`."""


class ResidualNorm(NamedTuple):
    """The layer normalization of a sum behind `dense`: ``y + residual``, in fp32."""

    residual: Float[Array, "*B M N"]
    """What is added, of the type of the input."""
    scale: Float[Array, "N"]
    """Factor of each feature, of any floating type."""
    bias: Float[Array, "N"] | None
    """Added to the normalized features, of any floating type; None adds nothing."""
    eps: float
    """Added to the variance; zero or positive."""


def reads_stacks(dtype: DTypeLike) -> bool:
    """Whether `dense` reads its layer in place here, on Hopper and in 16 bits.

    Otherwise XLA copies the layer out of the stack.
    """
    device = DeviceSpec.current()
    hopper = device is not None and device.compute_capability[0] == 9
    return hopper and jnp.dtype(dtype).itemsize == 2


def dense(
    x: Float[Array, "*B M K"],
    ws: Sequence[Float[Array, "*_L K _N"]],
    biases: Sequence[Float[Array, "*_L _N"]],
    *,
    layer: Int[Array, ""] | None = None,
    activation: str | None = None,
    norm: ResidualNorm | None = None,
    implementation: str | Sequence[str] | None = None,
) -> tuple[Float[Array, "*B M _N"], ...]:
    """Linear layers of the same input, with fused bias and activation or norm.

    ``y_i = activation(x @ w_i + bias_i)``

    ``y = layer_norm(x @ w + bias + residual)`` with a `norm`

    On Hopper GPUs one kernel computes all of them, unless they are so small that it
    would leave more than three quarters of the GPU idle: it reads x once, and computes
    the activation of one tile while the tensor cores multiply the next. Elsewhere XLA
    runs one matmul per weight, and fuses what follows. Differentiable; the gradient of
    an activation starts from its input, which is then stored as well.

    With a `norm` there is one layer, and of few rows one kernel: blocks split the
    contraction, and share the rows of its sums. Of more rows than run at once,
    5,632 of 768 features on an H200, it is a matmul and a norm. The gradients are
    XLA's.

    With a `layer`, weights and biases are those of all layers of a model, as one array
    each. The kernel reads its layer in place; it has no gradient then.

    Args:
        x: ``[*B,M,K]`` activations; leading axes are merged with M.
        ws: weights of the same type, [K,N] each, or [L,K,N].
        biases: [N] each, or [L,N].
        layer: int32, which of the L layers; None where there is no axis L.
        activation: "gelu" (exact), "gelu_tanh", "relu", "silu", or None.
        norm: a residual and the layer normalization of the sum, for one layer without
            activation; None is neither.
        implementation: "mosaic_gpu" (Hopper; bfloat16 or float16, K and N multiples of
            64, M of 8), "xla", a sequence of these, or None for the best.

    Returns:
        One ``[*B,M,N]`` of the type of x for each weight.

    Raises:
        ValueError: shapes or types disagree, the activation is unknown, or a norm does
            not follow one layer alone.
        Unsupported: the implementation named cannot serve the arguments here.
        ExceptionGroup: none of several implementations can.

    Example:
        >>> x, w = jnp.ones((2, 3)), jnp.ones((3, 2))
        >>> (y,) = dense(x, [w], [jnp.array([-4.0, 0.0])], activation="relu")
        >>> y
        Array([[0., 3.],
               [0., 3.]], dtype=float32)
    """
    device = DeviceSpec.current()
    _check(x, ws, biases, layer, activation)
    if norm is not None:
        _check_norm(x, ws, activation, norm)
    eps = None if norm is None else norm.eps
    implementations = {
        "mosaic_gpu": functools.partial(_mosaic_gpu, device=device, eps=eps),
        "xla": functools.partial(_xla, wide=device is None, eps=eps),
    }

    def run(x: Array, layer: Array | None, *others: Array | None) -> tuple[Array, ...]:
        pairs, added = others[: 2 * len(ws)], others[2 * len(ws) :]
        parts = pairs[: len(ws)], pairs[len(ws) :]
        problem = DenseProblem(
            m=math.prod(x.shape[:-1]), n=tuple(w.shape[-1] for w in ws)
        )
        declines = functools.partial(tuned_configs.declines, "dense", problem, device)
        return dispatch(
            "dense",
            implementations,
            implementation,
            x,
            *parts,
            layer,
            activation,
            added,
            # Sums of few rows are split in front of a norm.
            declines={} if norm is not None else {"mosaic_gpu": declines},
        )

    *rows, columns = string.ascii_lowercase[: x.ndim]
    if norm is not None:
        columns = "N"  # whole
    leading = "".join(rows)
    stack = "" if layer is None else "L"
    pairs = [*[stack + "K" + columns] * len(ws), *[stack + columns] * len(ws)]
    dims = [leading + "K", "", *pairs]
    args = [x, layer, *ws, *biases]
    if norm is not None:
        dims += [leading + columns, columns, columns]
        args += [norm.residual, norm.scale, norm.bias]
    out = (leading + columns,) * len(ws)
    return by_shards(run, args, dims, out)(*args)


def _check(
    x: Array,
    ws: Sequence[Array],
    biases: Sequence[Array],
    layer: Array | None,
    activation: str | None,
) -> None:
    check_activation(activation)
    check_floating(x=x.dtype)
    if not ws or len(ws) != len(biases):
        raise ValueError(
            f"{len(ws)} weights and {len(biases)} biases, expected a bias for each of"
            " at least one weight"
        )
    for w, bias in zip(ws, biases, strict=True):
        stack = () if layer is None else w.shape[:1]
        wanted = (*stack, x.shape[-1], *bias.shape[-1:])
        if w.shape != wanted or bias.shape != (*stack, *w.shape[-1:]):
            sizes = "[K, N] and [N]" if layer is None else "[L, K, N] and [L, N]"
            raise ValueError(
                f"x, a weight and its bias have shapes {x.shape}, {w.shape} and"
                f" {bias.shape}, expected [*B, M, K], {sizes}"
            )
        if not x.dtype == w.dtype == bias.dtype:
            raise ValueError(
                f"x, a weight and its bias have types {x.dtype}, {w.dtype} and"
                f" {bias.dtype}, expected one type; cast them"
            )
    if layer is not None and (layer.shape, layer.dtype) != ((), jnp.int32):
        raise ValueError(
            f"layer has shape {layer.shape} and type {layer.dtype}, expected one int32"
        )


def _check_norm(
    x: Array, ws: Sequence[Array], activation: str | None, norm: ResidualNorm
) -> None:
    if len(ws) != 1 or activation is not None:
        raise ValueError(
            f"norm with {len(ws)} weights and activation {activation!r}, expected one"
            " weight and None"
        )
    features = ws[0].shape[-1:]
    found = [None if a is None else a.shape for a in norm[:3]]
    if found[:2] != [(*x.shape[:-1], *features), features] or found[2] not in (
        None,
        features,
    ):
        raise ValueError(
            f"residual, scale and bias of the norm have shapes {found}, expected"
            f" {(*x.shape[:-1], *features)}, {features} and {features} or None"
        )
    check_floating(scale=norm.scale.dtype)
    if norm.bias is not None:
        check_floating(bias=norm.bias.dtype)
    if norm.residual.dtype != x.dtype:
        raise ValueError(
            f"x and residual have types {x.dtype} and {norm.residual.dtype}, expected"
            " one type; cast them"
        )
    if not (math.isfinite(norm.eps) and norm.eps >= 0):
        raise ValueError(f"eps {norm.eps}, expected zero or a positive finite number")


type _Added = tuple[Array | None, ...]
"""Residual, scale and bias of a norm; nothing without one."""


def _xla(
    x: Array,
    ws: tuple[Array, ...],
    biases: tuple[Array, ...],
    layer: Array | None,
    activation: str | None,
    added: _Added = (),
    *,
    wide: bool,
    eps: float | None = None,
) -> tuple[Array, ...]:
    if layer is not None:
        at = functools.partial(
            jax.lax.dynamic_index_in_dim, index=layer, keepdims=False
        )
        ws, biases = tuple(map(at, ws)), tuple(map(at, biases))
    # XLA would merge the matmuls, and then copy each part out of the result to add its
    # bias. It does not where the inputs look different.
    inputs = [x] if len(ws) == 1 else jax.lax.optimization_barrier([x] * len(ws))
    layers = zip(inputs, ws, biases, strict=True)
    # On a CPU sums may stay in the type asked for, as in `pallas_kernels.matmul.xla`.
    sums = jnp.float32 if wide and x.dtype.itemsize < 4 else None
    product = functools.partial(jnp.matmul, preferred_element_type=sums)
    if eps is not None:
        y, (residual, scale, shift) = product(x, ws[0]).astype(x.dtype), added
        return (_norm_by_xla(y, scale, shift, residual, biases[0], eps),)
    return tuple(
        activate(product(x, w).astype(x.dtype) + bias, activation)
        for x, w, bias in layers
    )


def _norm_by_xla(
    y: Array,
    scale: Any,
    shift: Array | None,
    residual: Array | None,
    bias: Array,
    eps: float,
) -> Array:
    return layer_norm_xla.layer_norm(
        y, scale, shift, residual, bias, eps=eps, dtype=y.dtype
    )


def _mosaic_gpu(
    x: Array,
    ws: tuple[Array, ...],
    biases: tuple[Array, ...],
    layer: Array | None,
    activation: str | None,
    added: _Added = (),
    *,
    device: DeviceSpec | None,
    eps: float | None = None,
) -> tuple[Array, ...]:
    rows = math.prod(x.shape[:-1])
    device = check_hopper(device, "dense")
    check_local("dense", x, *ws, *biases, *added)
    call = _Call(activation=activation, device=device, eps=eps)
    flat = x.reshape(rows, x.shape[-1])  # [M,K]
    if added:
        assert added[0] is not None
        added = added[0].reshape(rows, ws[0].shape[-1]), *added[1:]
    flat, ws, biases, layer, added = vary_alike((flat, ws, biases, layer, added))
    if layer is not None:
        message = "dense has no gradient with a layer; give it the weights of the layer"
        flat, ws, biases, added = no_derivative((flat, ws, biases, added), message)
    ys: Any
    if eps is not None and layer is None:
        ys = (_jitted_norm((flat, ws[0], biases[0], *added), call),)
    elif eps is not None:
        ys = (_jitted_norm_layer((flat, ws[0], biases[0], *added), layer, call),)
    elif layer is None:
        ys = _jitted(flat, ws, biases, call)
    else:
        ys = _jitted_layer(flat, ws, biases, layer, call)
    return tuple(y.reshape(*x.shape[:-1], y.shape[1]) for y in ys)  # [..,N] each


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Call:
    activation: str | None
    device: DeviceSpec
    eps: float | None = None
    """Of a norm, if there is one."""


def _kernel(
    x: Array,
    ws: tuple[Array, ...],
    biases: tuple[Array, ...],
    layer: Array | None,
    call: _Call,
) -> tuple[Array, ...]:
    widths = [w.shape[-1] for w in ws]
    ys = mosaic_gpu_dense.dense(
        x,
        ws,
        biases,
        layer,
        activation=call.activation,
        config=mosaic_gpu_dense.dense_config(x.shape[0], widths, call.device),
        device=call.device,
    )
    return keep_mark(ys, x, *ws, *biases)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _dense(
    x: Array, ws: tuple[Array, ...], biases: tuple[Array, ...], call: _Call
) -> tuple[Array, ...]:
    return _kernel(x, ws, biases, None, call)


def _forward(
    x: Array, ws: tuple[Array, ...], biases: tuple[Array, ...], call: _Call
) -> tuple[tuple[Array, ...], Any]:
    ys: Any = _dense(x, ws, biases, dataclasses.replace(call, activation=None))
    ys = tuple(checkpoint_name(y, OUT_NAME) for y in ys)
    kept = None if call.activation is None else ys
    return tuple(activate(y, call.activation) for y in ys), (x, ws, kept)


def _backward(call: _Call, saved: Any, dys: tuple[Array, ...]) -> tuple[Any, ...]:
    x, ws, kept = saved
    if kept is not None:
        follow = functools.partial(activate, activation=call.activation)
        dys = tuple(
            jax.vjp(follow, y)[1](dy)[0] for y, dy in zip(kept, dys, strict=True)
        )
    product = functools.partial(run_matmul, implementation=None, device=call.device)
    # One of several parts is rounded once, with the sum.
    dtype = x.dtype if len(ws) == 1 else jnp.float32
    parts = (
        product(dy, w, out_dtype=dtype, rhs_transposed=True)
        for dy, w in zip(dys, ws, strict=True)
    )
    dx = functools.reduce(operator.add, parts).astype(x.dtype)
    dws = tuple(
        product(x, dy, out_dtype=w.dtype, lhs_transposed=True)
        for dy, w in zip(dys, ws, strict=True)
    )
    dbiases = tuple(jnp.sum(dy, 0, dtype=jnp.float32).astype(dy.dtype) for dy in dys)
    return dx, dws, dbiases


_dense.defvjp(_forward, _backward)
# The layers of a model are traced and lowered once.
_jitted = jax.jit(_dense, static_argnums=3)
_jitted_layer = jax.jit(_kernel, static_argnums=4)


type _Normed = tuple[Array, Array, Array, Array, Array, Array | None]
"""x, weight, bias, residual, scale and bias of the norm."""


def _norm_kernel(arrays: _Normed, layer: Array | None, call: _Call) -> Array:
    x, w, bias, residual, scale, shift = arrays
    assert call.eps is not None
    shape = jax.ShapeDtypeStruct(w.shape[-2:], w.dtype)
    problem = Problem.of(x, shape, x.dtype)
    config = mosaic_gpu_norm.norm_config(problem.m, problem.n, problem.k, call.device)
    if config is not None:
        y = mosaic_gpu_norm.dense_norm(
            x,
            w,
            bias,
            layer,
            residual=residual,
            scale=scale,
            shift=shift,
            eps=call.eps,
            config=config,
            device=call.device,
        )
        return keep_mark(y, *(a for a in arrays if a is not None))
    y = mosaic_gpu.matmul(
        x,
        w,
        layer,
        config=heuristic(problem, call.device),
        device=call.device,
        out_dtype=x.dtype,
    )
    if layer is not None:
        # XLA makes all of them in one kernel, for they change their type.
        bias = jax.lax.dynamic_index_in_dim(bias, layer, keepdims=False)
        bias = bias.astype(jnp.float32)
    y = layer_norm_kernel.layer_norm(
        y,
        scale,
        shift,
        residual,
        bias,
        eps=call.eps,
        dtype=x.dtype,
        config=None,
        device=call.device,
    )
    return keep_mark(y, *(a for a in arrays if a is not None))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _dense_norm(arrays: _Normed, call: _Call) -> Array:
    return _norm_kernel(arrays, None, call)


def _norm_forward(arrays: _Normed, call: _Call) -> tuple[Any, _Normed]:
    return _dense_norm(arrays, call), arrays


def _norm_backward(call: _Call, arrays: _Normed, dy: Array) -> tuple[_Normed]:
    def portable(arrays: _Normed) -> Array:
        x, w, bias, *added = arrays
        kept = {"wide": False, "eps": call.eps}
        return _xla(x, (w,), (bias,), None, None, tuple(added), **kept)[0]

    gradients = jax.vjp(portable, arrays)[1](dy)
    return (gradients[0],)


_dense_norm.defvjp(_norm_forward, _norm_backward)
_jitted_norm = jax.jit(_dense_norm, static_argnums=1)
_jitted_norm_layer = jax.jit(_norm_kernel, static_argnums=2)
