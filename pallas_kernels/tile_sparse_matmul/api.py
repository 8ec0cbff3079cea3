"""The public tile-sparse matmul.

Axis letters: B any leading axes of tokens, M tokens, K input features, N output
features, C packed output features (N without the pruned ones), T tiles, P row capacity
of a tile, G columns of a tile.
"""

import dataclasses
import math
import string
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pallas_kernels import tuned_configs
from pallas_kernels.dispatch import as_hashable, check_floating
from pallas_kernels.matmul.activations import check_activation
from pallas_kernels.mosaic import vary_alike
from pallas_kernels.partition import by_shards
from pallas_kernels.tile_sparse_matmul.config import FEW_TOKENS, TileSparseConfig
from pallas_kernels.tile_sparse_matmul.format import STEP, TileSparse
from pallas_kernels.tile_sparse_matmul.format_24 import TileSparse24
from pallas_kernels.tile_sparse_matmul.passes import (
    OP,
    Call,
    may_run_a_kernel,
    product,
    row_major,
)


def tile_sparse_matmul(
    x: Float[Array, "..."],
    w: TileSparse | TileSparse24,
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

    A `TileSparse24` is for inference and has no gradient. Its kernel, for sparse tensor
    cores, takes feature-major input: token-major input is transposed first.

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
            256), "triton" (Ampere and later; the same types and tiles; needs the extra
            ``triton``), "xla", a sequence of these, or None for the best.
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
    kept = w.abstract if isinstance(w, TileSparse24) else w
    _check(x, kept, bias, activation, x_major)
    tuned_configs.check_config(OP, config, TileSparseConfig)
    call = Call(
        shape=kept.shape,
        granularity=kept.granularity,
        equal_counts=kept.equal_counts,
        steps=kept.steps,
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
    w: TileSparse | TileSparse24,
    bias: jax.Array | None,
    call: Call,
) -> jax.Array:
    """The matmul of one device's activations."""
    x_major, y_major = call.feature_major
    batch = x.shape[1:] if x_major else x.shape[:-1]
    tokens = math.prod(batch)
    # [K, M] or [M, K], and back to [N, ..] or [.., N] at the end.
    flat = x.reshape((w.shape[0], tokens) if x_major else (tokens, w.shape[0]))
    kernel = may_run_a_kernel(flat, w, call)
    few = kernel and tokens <= FEW_TOKENS
    if few and not x_major:
        flat = row_major(flat)
    if not x_major and call.granularity < STEP and kernel:
        # Here, so that the gradient of the values gets it transposed too.
        flat, call = flat.T, dataclasses.replace(call, feature_major=(True, y_major))
    if isinstance(w, TileSparse24):
        values, kept = (w.values, w.metadata), w.pattern
    else:
        values, kept = w.values, w
    pattern = (kept.rows, kept.counts, kept.columns, kept.places, kept.order)
    flat, values, bias, pattern = vary_alike((flat, values, bias, pattern))
    y: Any = product(flat, values, bias, pattern, call)
    if few and not y_major:
        y = row_major(y)
    return y.reshape((w.shape[1], *batch) if y_major else (*batch, w.shape[1]))


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
