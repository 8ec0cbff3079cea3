"""The public linear layers behind a layer norm, for few rows.

Axis letters: B any leading axes, M rows, K contraction, N columns.
"""

import functools
import math
from collections.abc import Sequence

import jax
from jaxtyping import Array, Float

from pallas_kernels.dispatch import dispatch, no_derivative
from pallas_kernels.layer_norm import layer_norm
from pallas_kernels.matmul import mosaic_gpu_norm_dense
from pallas_kernels.matmul.dense import check, dense
from pallas_kernels.mosaic import DeviceSpec, check_hopper
from pallas_kernels.partition import check_local


def norm_dense(
    x: Float[Array, "*B M K"],
    scale: Float[Array, " _K"],
    shift: Float[Array, " _K"],
    ws: Sequence[Float[Array, "K _N"]],
    biases: Sequence[Float[Array, " _N"]],
    *,
    eps: float,
    activation: str | None = None,
    implementation: str | Sequence[str] | None = None,
) -> tuple[Float[Array, "*B M K"], tuple[Float[Array, "*B M _N"], ...]]:
    """Linear layers of normalized rows, in one kernel where there are few rows.

    ``y = layer_norm(x) * scale + shift``

    ``z_i = activation(y @ w_i + bias_i)``

    For inference: it has no derivatives.

    Args:
        x: ``[*B,M,K]`` activations; leading axes are merged with M.
        scale: [K].
        shift: [K].
        ws: weights of the type of x, [K,N] each.
        biases: [N] each.
        eps: added to the variance.
        activation: as for `dense`.
        implementation: "mosaic_gpu" (Hopper; bfloat16 or float16, K and N multiples of
            64, K at most 768, M of 8; few rows), "apart" (`layer_norm` and `dense`, the
            best of each), a sequence of these, or None for the best.

    Returns:
        y, then one ``[*B,M,N]`` for each weight; all of the type of x.

    Raises:
        ValueError: shapes or types disagree, or the activation is unknown.
        Unsupported: the implementation named cannot serve the arguments here.
        ExceptionGroup: none of several implementations can.

    Example:
        >>> import jax.numpy as jnp
        >>> x, one = jnp.array([[0.0, 2.0]]), jnp.ones(2)
        >>> y, (z,) = norm_dense(x, one, 0 * one, [jnp.eye(2)], [one], eps=0.0)
        >>> print(y, z)
        [[-1.  1.]] [[0. 2.]]
    """
    check(x, ws, biases, activation)
    if {scale.shape, shift.shape} != {x.shape[-1:]}:
        raise ValueError(
            f"scale and shift have shapes {scale.shape} and {shift.shape}, expected"
            f" {x.shape[-1:]}, those of the columns of x"
        )
    arrays = x, scale.astype(x.dtype), shift.astype(x.dtype), tuple(ws), tuple(biases)
    message = "norm_dense has no derivatives: it is for inference"
    return dispatch(
        "norm_dense",
        {
            "mosaic_gpu": functools.partial(_mosaic_gpu, device=DeviceSpec.current()),
            "apart": _apart,
        },
        implementation,
        *no_derivative(arrays, message),
        eps=eps,
        activation=activation,
    )


type _Layers = tuple[Array, tuple[Array, ...]]


def _apart(
    x: Array,
    scale: Array,
    shift: Array,
    ws: tuple[Array, ...],
    biases: tuple[Array, ...],
    *,
    eps: float,
    activation: str | None,
) -> _Layers:
    y = layer_norm(x, scale, shift, eps=eps)
    # It is read twice. Without a barrier XLA may compute it twice.
    y = jax.lax.optimization_barrier(y)
    return y, dense(y, ws, biases, activation=activation)


def _mosaic_gpu(
    x: Array,
    scale: Array,
    shift: Array,
    ws: tuple[Array, ...],
    biases: tuple[Array, ...],
    *,
    eps: float,
    activation: str | None,
    device: DeviceSpec | None,
) -> _Layers:
    device = check_hopper(device, "norm_dense")
    check_local("norm_dense", x, scale, shift, *ws, *biases)
    flat = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])  # [M,K]
    mosaic_gpu_norm_dense.check(flat, ws, device)
    found = _jitted(
        flat, scale, shift, ws, biases, eps=eps, activation=activation, device=device
    )
    y, *zs = (z.reshape(*x.shape[:-1], z.shape[1]) for z in found)
    return y, tuple(zs)


# The layers of a model are traced and lowered once.
_jitted = jax.jit(
    mosaic_gpu_norm_dense.norm_dense,
    static_argnames=("eps", "activation", "device"),
)
