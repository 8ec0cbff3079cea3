"""The public linear layers: matmuls, bias and activation of one input.

Axis letters: L layers, B any leading axes, M rows, K contraction, N columns.
"""

import dataclasses
import functools
import math
import operator
import string
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels import tuned_configs
from pallas_kernels.dispatch import check_floating, dispatch
from pallas_kernels.matmul import mosaic_gpu_dense
from pallas_kernels.matmul.activations import activate, check_activation
from pallas_kernels.matmul.api import run as run_matmul
from pallas_kernels.matmul.config import DenseProblem
from pallas_kernels.mosaic import (
    DeviceSpec,
    check_hopper,
    keep_mark,
    vary_alike,
)
from pallas_kernels.partition import by_shards, check_local


OUT_NAME = "dense_out"
"""The name of the pre-activations, for policies of `jax.checkpoint`."""


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
    implementation: str | Sequence[str] | None = None,
) -> tuple[Float[Array, "*B M _N"], ...]:
    """Linear layers of the same input, with fused bias and activation.

    ``y_i = activation(x @ w_i + bias_i)``

    On Hopper GPUs one kernel computes all of them, unless they are so small that it
    would leave more than three quarters of the GPU idle: it reads x once, and computes
    the activation of one tile while the tensor cores multiply the next. Elsewhere XLA
    runs one matmul per weight, and fuses what follows. Differentiable; the gradient of
    an activation starts from its input, which is then stored as well.

    With a `layer`, weights and biases are those of all layers of a model, as one array
    each. The kernel reads its layer in place; it has no gradient then.

    Args:
        x: ``[*B,M,K]`` activations; leading axes are merged with M.
        ws: weights of the same type, [K,N] each, or [L,K,N].
        biases: [N] each, or [L,N].
        layer: int32, which of the L layers; None where there is no axis L.
        activation: "gelu" (exact), "gelu_tanh", "relu", "silu", or None.
        implementation: "mosaic_gpu" (Hopper; bfloat16 or float16, K and N multiples of
            64, M of 8), "xla", a sequence of these, or None for the best.

    Returns:
        One ``[*B,M,N]`` of the type of x for each weight.

    Raises:
        ValueError: shapes or types disagree, or the activation is unknown.
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
    implementations = {
        "mosaic_gpu": functools.partial(_mosaic_gpu, device=device),
        "xla": functools.partial(_xla, wide=device is None),
    }

    def run(x: Array, layer: Array | None, *pairs: Array) -> tuple[Array, ...]:
        ws, biases = pairs[: len(pairs) // 2], pairs[len(pairs) // 2 :]
        problem = DenseProblem(
            m=math.prod(x.shape[:-1]), n=tuple(w.shape[-1] for w in ws)
        )
        declines = functools.partial(tuned_configs.declines, "dense", problem, device)
        return dispatch(
            "dense",
            implementations,
            implementation,
            x,
            ws,
            biases,
            layer,
            activation,
            declines={"mosaic_gpu": declines},
        )

    *rows, columns = string.ascii_lowercase[: x.ndim]
    leading = "".join(rows)
    stack = "" if layer is None else "L"
    pairs = [*[stack + "K" + columns] * len(ws), *[stack + columns] * len(ws)]
    dims = [leading + "K", "", *pairs]
    out = (leading + columns,) * len(ws)
    args = [x, layer, *ws, *biases]
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


def _xla(
    x: Array,
    ws: tuple[Array, ...],
    biases: tuple[Array, ...],
    layer: Array | None,
    activation: str | None,
    *,
    wide: bool,
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
    return tuple(
        activate(product(x, w).astype(x.dtype) + bias, activation)
        for x, w, bias in layers
    )


def _mosaic_gpu(
    x: Array,
    ws: tuple[Array, ...],
    biases: tuple[Array, ...],
    layer: Array | None,
    activation: str | None,
    *,
    device: DeviceSpec | None,
) -> tuple[Array, ...]:
    rows = math.prod(x.shape[:-1])
    device = check_hopper(device, "dense")
    check_local("dense", x, *ws, *biases)
    call = _Call(activation=activation, device=device)
    flat = x.reshape(rows, x.shape[-1])  # [M,K]
    flat, ws, biases, layer = vary_alike((flat, ws, biases, layer))
    ys: Any
    if layer is None:
        ys = _jitted(flat, ws, biases, call)
    else:
        ys = _jitted_layer(flat, ws, biases, layer, call)
    return tuple(y.reshape(*x.shape[:-1], y.shape[1]) for y in ys)  # [..,N] each


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Call:
    activation: str | None
    device: DeviceSpec


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
