"""The public op: an encoder layer from one attention to the next.

Axis letters: L layers of a stack, B any leading axes, M tokens, A features of the
output of attention, D model, F hidden, C features of queries, of keys or of values.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import Unsupported, check_floating, dispatch, no_derivative
from pallas_kernels.encode_layer import mosaic_gpu
from pallas_kernels.encode_layer.config import Problem
from pallas_kernels.matmul import ResidualNorm, dense
from pallas_kernels.matmul.activations import KERNEL_ACTIVATIONS, check_activation
from pallas_kernels.mosaic import DeviceSpec, check_hopper
from pallas_kernels.partition import check_local


class EncodeLayerWeights(NamedTuple):
    """Weights and biases of all layers, and the norms of one; in one type."""

    out: Float[Array, "L A D"]
    """Projection of the attention's output."""
    out_bias: Float[Array, "L D"]
    out_scale: Float[Array, "D"]
    """Scale of the norm behind it, of any floating type."""
    out_shift: Float[Array, "D"] | None
    """What the norm adds, of any floating type; None adds nothing."""
    up: Float[Array, "L D F"]
    """First projection of the feed-forward network."""
    up_bias: Float[Array, "L F"]
    down: Float[Array, "L F D"]
    down_bias: Float[Array, "L D"]
    down_scale: Float[Array, "D"]
    down_shift: Float[Array, "D"] | None


def encode_layer(
    attended: Float[Array, "*B M A"],
    residual: Float[Array, "*B M D"],
    weights: EncodeLayerWeights,
    heads: Sequence[tuple[Float[Array, "L D _C"], Float[Array, "L _C"]]] = (),
    *,
    layer: Int[Array, ""],
    following: Int[Array, ""] | None = None,
    activation: str | None,
    eps: float,
    implementation: str | Sequence[str] | None = None,
) -> tuple[Float[Array, "*B M D"], tuple[Float[Array, "*B M _C"], ...]]:
    """Computes an encoder layer from one attention to the next.

    ``x = norm(attended @ out + residual)``;
    ``y = norm(activation(x @ up) @ down + x)``;
    queries, keys and values of the next layer are projections of y. All have biases.

    On Hopper GPUs few tokens take one launch, "mosaic_gpu", whose blocks wait for each
    other and read the weights of a matmul while they compute the one before. "dense" is
    four launches of `pallas_kernels.matmul.dense`. By default one launch computes up to
    512 tokens of D 768 in bfloat16, which was timed on an H200, and four all else. Not
    differentiable.

    Args:
        attended: ``[*B,M,A]``, the output of attention; leading axes are merged with M.
        residual: ``[*B,M,D]``, the input of that attention.
        weights: of which the kernel reads a layer in place.
        heads: weights and biases of queries, keys and values of the next layer; empty
            after the last one.
        layer: int32, which layer of the `weights`.
        following: int32, which layer of the `heads`; None without.
        activation: a name in `ACTIVATIONS`, or None.
        eps: added to the variances of both norms.
        implementation: "mosaic_gpu" (Hopper; bfloat16 or float16, a multiple of 8
            tokens up to 1,024, D a multiple of 128 from 256 to 1,024, other features
            multiples of 64; one device), "dense", a sequence of these, or None for the
            first that serves the arguments, "mosaic_gpu" as above.

    Returns:
        ``(y, heads)``: ``[*B,M,D]``, and ``[*B,M,C]`` for each of the `heads`.

    Raises:
        ValueError: shapes or types disagree, the activation is unknown, or eps is
            negative or not finite.
        Unsupported: the implementation named cannot serve the arguments here.
        ExceptionGroup: none of several implementations can.
        NotImplementedError: the call is differentiated.
    """
    check_activation(activation)
    check_floating(attended=attended.dtype)
    operands: dict[str, Any] = {
        name: array for name, array in weights._asdict().items() if array is not None
    }
    operands |= {"attended": attended, "residual": residual}
    for name, (weight, bias) in zip(_HEADS, heads, strict=False):
        operands |= {name: weight, f"{name}_bias": bias}
    if len(heads) != (0 if following is None else len(_HEADS)):
        raise ValueError(
            f"{len(heads)} heads and following {following}, expected none and None, or"
            f" {_HEADS} and their layer"
        )
    _check(operands, layer, following, eps)
    call = _Call(activation, eps, DeviceSpec.current())
    message = "encode_layer has no derivatives: it is for inference"
    return dispatch(
        "encode_layer",
        {"mosaic_gpu": _mosaic_gpu, "dense": _dense},
        implementation,
        no_derivative(operands, message),
        layer,
        following,
        call,
        declines={"mosaic_gpu": lambda: _problem(operands).declines},
    )


_HEADS = ("query", "key", "value")


@dataclasses.dataclass(frozen=True)
class _Call:
    activation: str | None
    eps: float
    device: DeviceSpec | None


def _check(
    operands: dict[str, Array], layer: Array, following: Array | None, eps: float
) -> None:
    if not (math.isfinite(eps) and eps >= 0):
        raise ValueError(f"eps {eps}, expected zero or a positive finite number")
    for name, number in (("layer", layer), ("following", following)):
        if number is not None and (number.shape, number.dtype) != ((), jnp.int32):
            raise ValueError(
                f"{name} has shape {number.shape} and type {number.dtype}, expected one"
                " int32"
            )
    attended, out, up = (operands[name] for name in ("attended", "out", "up"))
    lead, (a, d), f = attended.shape[:-1], out.shape[-2:], up.shape[-1]
    layers = out.shape[:1]
    want = {
        "attended": (*lead, a),
        "residual": (*lead, d),
        "out": (*layers, a, d),
        "out_bias": (*layers, d),
        "up": (*layers, d, f),
        "up_bias": (*layers, f),
        "down": (*layers, f, d),
        "down_bias": (*layers, d),
    }
    for name in _HEADS:
        if name in operands:
            stack, _, columns = operands[name].shape
            want[name] = stack, d, columns
            want[f"{name}_bias"] = stack, columns
    norms = {n: (d,) for n in operands if n.endswith(("_scale", "_shift"))}
    for name, shape in (want | norms).items():
        array = operands[name]
        if array.shape != shape:
            raise ValueError(
                f"{name} has shape {array.shape}, expected {shape} for attended of"
                f" shape {attended.shape}, out of {out.shape} and up of {up.shape}"
            )
        if name in norms:
            check_floating(**{name: array.dtype})
        elif array.dtype != attended.dtype:
            raise ValueError(
                f"{name} has type {array.dtype} and attended {attended.dtype}, expected"
                " one type; cast them"
            )


def _problem(operands: dict[str, Array]) -> Problem:
    attended = operands["attended"]
    return Problem(
        m=math.prod(attended.shape[:-1]),
        attended=attended.shape[-1],
        d_model=operands["out"].shape[-1],
        d_ff=operands["up"].shape[-1],
        heads=tuple(operands[n].shape[-1] for n in _HEADS if n in operands),
        dtype=jnp.dtype(attended.dtype),
    )


def _mosaic_gpu(
    operands: dict[str, Array], layer: Array, following: Array | None, call: _Call
) -> Any:
    device = check_hopper(call.device, "encode_layer")
    check_local("encode_layer", *operands.values())
    problem = _problem(operands)
    problem.check()
    if call.activation is not None and call.activation not in KERNEL_ACTIVATIONS:
        raise Unsupported(f"encode_layer: no kernel of activation {call.activation!r}")
    flat = {n: operands[n].reshape(problem.m, -1) for n in ("attended", "residual")}
    y, heads = _jitted(operands | flat, layer, following, problem, call, device)
    shape = operands["attended"].shape[:-1]
    return y.reshape(*shape, -1), tuple(h.reshape(*shape, -1) for h in heads)


# The layers of a model are traced and lowered once.
@functools.partial(jax.jit, static_argnums=(3, 4, 5))
def _jitted(
    operands: dict[str, Array],
    layer: Array,
    following: Array | None,
    problem: Problem,
    call: _Call,
    device: DeviceSpec,
) -> Any:
    return mosaic_gpu.encode_layer(
        operands,
        layer,
        following,
        problem=problem,
        activation=call.activation,
        eps=call.eps,
        device=device,
    )


def _dense(
    operands: dict[str, Array], layer: Array, following: Array | None, call: _Call
) -> Any:
    """A launch for each matmul, where their kernels can serve them."""

    def one(x: Array, *names: str, behind: Array | None = None) -> tuple[Array, ...]:
        norm = None
        if behind is not None:
            scale = operands[f"{names[0]}_scale"]
            shift = operands.get(f"{names[0]}_shift")
            norm = ResidualNorm(behind, scale, shift, call.eps)
        return dense(
            x,
            [operands[name] for name in names],
            [operands[f"{name}_bias"] for name in names],
            layer=following if names == _HEADS else layer,
            activation=call.activation if names == ("up",) else None,
            norm=norm,
        )

    # Without the barriers XLA would compute the norms twice, where they are its own.
    barrier = jax.lax.optimization_barrier
    x = barrier(one(operands["attended"], "out", behind=operands["residual"])[0])
    (hidden,) = one(x, "up")
    y = barrier(one(hidden, "down", behind=x)[0])
    return y, one(y, *_HEADS) if "query" in operands else ()
