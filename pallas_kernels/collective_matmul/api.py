"""Matmuls fused with their collectives: the public functions.

All are called inside `jax.shard_map`, on the arrays of one device.

Axis letters: B any leading axes, m rows of a device, M rows of all devices, K
contraction, N columns, D devices of the axis.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.collective_matmul import ops
from pallas_kernels.collective_matmul.config import Call, CollectiveConfig
from pallas_kernels.dispatch import as_hashable
from pallas_kernels.mosaic import DeviceSpec, as_varying, varying


def all_gather_matmul(
    x: Float[Array, "*B m K"],
    w: Float[Array, "P Q"] | Sequence[Float[Array, "_ _"]],
    *,
    axis_name: str,
    rhs_transposed: bool = False,
    return_gathered: bool = False,
    out_dtype: DTypeLike | None = None,
    implementation: str | Sequence[str] | None = None,
    config: CollectiveConfig | None = None,
) -> Any:
    """All-gathers the rows of all devices and multiplies them by this device's weight.

    ``y = all_gather(x) w``, where rows ``d m`` to ``(d+1) m`` of ``all_gather(x)`` are
    the rows of device d, within each leading index: activations [batch, sequence / D,
    features] come back as [batch, sequence, features]. It is the column-parallel matmul
    that begins a tensor-parallel block.

    Several weights share one all-gather: queries, keys and values; gate and up;
    attention and MLP of a parallel block.

    With ``implementation=None`` the kernel runs on Hopper GPUs of one process over an
    axis of 2, 4 or 8 devices if it is expected to be at least as fast as XLA: if it was
    faster or within 2% when the problem was tuned, and for untuned problems from 256
    rows per device, or 1,024 if features are no multiples of 64 and must be padded. It
    also needs the mesh to hold devices 0, 1, 2, ... in this order, and all its axes to
    be manual. XLA runs elsewhere; the logger "pallas_kernels" says why.

    Differentiable. ``dx`` is one `matmul_reduce_scatter` over all weights, and ``dw``
    reads the gathered x, a residual D times as large as x. Inside `jax.checkpoint` it
    goes by the name ``all_gather_matmul_gathered`` and y by ``all_gather_matmul_out``:
    ``jax.checkpoint_policies.save_only_these_names("all_gather_matmul_out")`` saves the
    results and gathers x again (a kernel then multiplies again too, XLA does not).
    Gradients of outputs are rounded to the type of the operands first.

    Args:
        x: ``[*B,m,K]``, the rows of this device.
        w: [K,N], the columns of this device; [N,K] with `rhs_transposed`; or a
            sequence of such weights, whose N may differ.
        axis_name: mesh axis to gather over.
        rhs_transposed: weights are stored as [N,K].
        return_gathered: also return ``all_gather(x)``, which is a by-product.
        out_dtype: type of y; that of x by default.
        implementation: "mosaic_gpu" (one Hopper kernel, bfloat16 or float16; features
            that are no multiples of 64 are padded, which copies), "xla" (a collective,
            then the matmul), "xla_ring" (D steps, in each of which a transfer can
            overlap a matmul), a sequence of these, or None for the best.
        config: tiling of the kernel (gradients look theirs up); None looks it up in
            `pallas_kernels.tuned_configs`, op "collective_matmul". With one, or inside
            `override` of that module, the kernel is tried first. The XLA
            implementations refuse one.

    Returns:
        y ``[*B,D*m,N]``; of a sequence of weights, a tuple. With `return_gathered`
        the pair of that and the gathered x, ``[*B,D*m,K]``. All vary over `axis_name`.

    Raises:
        ValueError: shapes or types of operands disagree, or `axis_name` is no axis of
            an enclosing `jax.shard_map`.
        Unsupported: the implementation named cannot serve the arguments here.
        ExceptionGroup: none of several implementations can.

    Example:
        >>> import functools, jax
        >>> from jax.sharding import AxisType, PartitionSpec as P
        >>> mesh = jax.make_mesh((4,), ("tensor",), axis_types=(AxisType.Auto,))
        >>> x = jax.random.normal(jax.random.key(0), (8, 16))  # rows are split
        >>> w = jax.random.normal(jax.random.key(1), (16, 12))  # columns are split
        >>> f = jax.shard_map(
        ...     functools.partial(all_gather_matmul, axis_name="tensor"), mesh=mesh,
        ...     in_specs=(P("tensor"), P(None, "tensor")), out_specs=P(None, "tensor"))
        >>> bool(jax.numpy.allclose(jax.jit(f)(x, w), x @ w, atol=1e-5))
        True

    References:
        Flux (arXiv 2406.06858), section 3: all-gather and matmul in one kernel. It has
        no gradients and one weight per call. The all-gather along the sequence is that
        of arXiv 2205.05198, section 4.2.2.
    """
    xs, ws = _operands("x", x), _operands("w", w)
    if len(xs) != 1:
        raise ValueError(
            f"x is a sequence of {len(xs)} arrays, expected one array; several weights"
            " share one gathered x, so concatenate what is to be gathered"
        )
    for w_name in ws:
        _check_features(*next(iter(xs.items())), w_name, ws[w_name], rhs_transposed)
    call = _call(
        xs | ws,
        axis_name=axis_name,
        rhs_transposed=rhs_transposed,
        return_gathered=return_gathered,
        out_dtype=out_dtype,
        implementation=implementation,
        config=config,
    )
    (rows,), weights = _alike(xs, ws, call)
    outputs: Any = ops.all_gather_matmul(_merged(rows), weights, call)
    ys = [y.reshape(*rows.shape[:-2], *y.shape[1:]) for y in outputs]  # [..,D*M,N]
    gathered = ys.pop() if return_gathered else None
    y = tuple(ys) if isinstance(w, Sequence) else ys[0]
    return (y, gathered) if return_gathered else y


def matmul_reduce_scatter(
    x: Float[Array, "*B M K"] | Sequence[Float[Array, "... _ _"]],
    w: Float[Array, "P Q"] | Sequence[Float[Array, "_ _"]],
    *,
    axis_name: str,
    rhs_transposed: bool = False,
    deterministic: bool = True,
    out_dtype: DTypeLike | None = None,
    implementation: str | Sequence[str] | None = None,
    config: CollectiveConfig | None = None,
) -> Float[Array, "*B m N"]:
    """Multiplies and reduce-scatters: sums over devices and leaves each device its
    rows.

    ``y = reduce_scatter(sum_i x_i w_i)``: device d keeps rows ``d M/D`` to ``(d+1)
    M/D`` within each leading index. It is the row-parallel matmul that ends a
    tensor-parallel block.

    Several pairs share one reduction: attention and MLP of a parallel block.

    Differentiable. The gradients of all x are one `all_gather_matmul`, whose gathered
    ``dy`` also serves the gradients of the weights. Gradients of outputs are rounded to
    the type of the operands first. To `jax.checkpoint` y is
    ``matmul_reduce_scatter_out``.

    Args:
        x: ``[*B,M,K]``, the features of this device; or a sequence, whose K may differ.
        w: [K,N], the rows of this device; [N,K] with `rhs_transposed`; or a sequence,
            one for each x.
        axis_name: mesh axis to sum over, of D devices; D divides M.
        rhs_transposed: weights are stored as [N,K].
        deterministic: y is bitwise equal between runs. False allows an implementation a
            faster sum whose order varies; none uses it yet.
        out_dtype: type of y; that of x by default. Partial sums are sent in it.
        implementation: as in `all_gather_matmul`.
        config: as in `all_gather_matmul`.

    Returns:
        ``[*B,M/D,N]``, which varies over `axis_name`.

    Raises:
        ValueError: as `all_gather_matmul`, or D does not divide M.
        Unsupported: the implementation named cannot serve the arguments here.
        ExceptionGroup: none of several implementations can.

    Example:
        >>> import functools, jax
        >>> from jax.sharding import AxisType, PartitionSpec as P
        >>> mesh = jax.make_mesh((4,), ("tensor",), axis_types=(AxisType.Auto,))
        >>> x = jax.random.normal(jax.random.key(0), (8, 16))  # features are split
        >>> w = jax.random.normal(jax.random.key(1), (16, 12))  # rows are split
        >>> f = jax.shard_map(
        ...     functools.partial(matmul_reduce_scatter, axis_name="tensor"),
        ...     mesh=mesh, in_specs=(P(None, "tensor"), P("tensor")),
        ...     out_specs=P("tensor"))
        >>> bool(jax.numpy.allclose(jax.jit(f)(x, w), x @ w, atol=1e-5))
        True

    References:
        Flux (arXiv 2406.06858), section 3. Its fused reduction is not deterministic;
        here that is only ever by permission.
    """
    xs, ws, call = _reduction(
        x,
        w,
        axis_name=axis_name,
        rhs_transposed=rhs_transposed,
        deterministic=deterministic,
        out_dtype=out_dtype,
        implementation=implementation,
        config=config,
    )
    if xs[0].shape[-2] % call.size:
        raise ValueError(
            f"x has shape {xs[0].shape}, expected rows M={xs[0].shape[-2]} in multiples"
            f" of the {call.size} devices of axis {axis_name!r}; pad the rows"
        )
    merged = tuple(_merged(x) for x in xs)
    y: Any = ops.matmul_reduce_scatter(merged, ws, call)
    return y.reshape(*xs[0].shape[:-2], *y.shape[1:])  # [..,M/D,N]


def matmul_all_reduce(
    x: Float[Array, "*B M K"] | Sequence[Float[Array, "... _ _"]],
    w: Float[Array, "P Q"] | Sequence[Float[Array, "_ _"]],
    *,
    axis_name: str,
    rhs_transposed: bool = False,
    deterministic: bool = True,
    out_dtype: DTypeLike | None = None,
    implementation: str | Sequence[str] | None = None,
    config: CollectiveConfig | None = None,
) -> Float[Array, "*B M N"]:
    """Multiplies and all-reduces: sums over devices and leaves the sum on each.

    ``y = all_reduce(sum_i x_i w_i)``: the row-parallel matmul of a tensor-parallel
    block whose tokens are not split, as in decode.

    Differentiable: ``dx_i = dy w_i^T`` and ``dw_i = x_i^T dy``, without communication
    where types track what is equal on all devices (`check_vma` of `jax.shard_map`, the
    default). Without it ``dy`` is summed over devices first, as `jax.lax.psum` does.
    To `jax.checkpoint` y is ``matmul_all_reduce_out``.

    Args:
        x: ``[*B,M,K]``, the features of this device; or a sequence, whose K may differ.
        w: [K,N], the rows of this device; [N,K] with `rhs_transposed`; or a sequence,
            one for each x.
        axis_name: mesh axis to sum over.
        rhs_transposed: weights are stored as [N,K].
        deterministic: as in `matmul_reduce_scatter`.
        out_dtype: type of y; that of x by default. Partial sums are sent in it.
        implementation: as in `all_gather_matmul`; "xla_ring" needs M in multiples of D.
        config: as in `all_gather_matmul`.

    Returns:
        ``[*B,M,N]``, equal on all devices of the axis and so marked.

    Raises:
        ValueError: as `all_gather_matmul`.
        Unsupported: the implementation named cannot serve the arguments here.
        ExceptionGroup: none of several implementations can.

    Example:
        >>> import functools, jax
        >>> from jax.sharding import AxisType, PartitionSpec as P
        >>> mesh = jax.make_mesh((4,), ("tensor",), axis_types=(AxisType.Auto,))
        >>> x = jax.random.normal(jax.random.key(0), (3, 16))  # features are split
        >>> w = jax.random.normal(jax.random.key(1), (16, 12))  # rows are split
        >>> f = jax.shard_map(
        ...     functools.partial(matmul_all_reduce, axis_name="tensor"), mesh=mesh,
        ...     in_specs=(P(None, "tensor"), P("tensor")), out_specs=P())
        >>> bool(jax.numpy.allclose(jax.jit(f)(x, w), x @ w, atol=1e-5))
        True

    References:
        Flux (arXiv 2406.06858) has no all-reduce.
    """
    xs, ws, call = _reduction(
        x,
        w,
        axis_name=axis_name,
        rhs_transposed=rhs_transposed,
        deterministic=deterministic,
        out_dtype=out_dtype,
        implementation=implementation,
        config=config,
    )
    merged = tuple(_merged(x) for x in xs)
    y: Any = ops.matmul_all_reduce(merged, ws, call)
    return y.reshape(*xs[0].shape[:-1], y.shape[-1])  # [..,M,N]


def _reduction(
    x: Any, w: Any, **options: Any
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...], Call]:
    """Checks the operands of a reduction."""
    xs, ws = _operands("x", x), _operands("w", w)
    if len(xs) != len(ws):
        raise ValueError(
            f"x holds {len(xs)} arrays and w {len(ws)}, expected one weight for each x"
        )
    transposed = options["rhs_transposed"]
    for (x_name, x_i), (w_name, w_i) in zip(xs.items(), ws.items(), strict=True):
        _check_features(x_name, x_i, w_name, w_i, transposed)
    rows = {name: x_i.shape[:-1] for name, x_i in xs.items()}
    columns = {name: w_i.shape[0 if transposed else 1] for name, w_i in ws.items()}
    for what, sizes in (("rows", rows), ("output features", columns)):
        if len(set(sizes.values())) > 1:
            raise ValueError(
                f"{', '.join(sizes)} have {what} {list(sizes.values())}, expected equal"
                " ones: their products are added"
            )
    call = _call(xs | ws, **options)
    return *_alike(xs, ws, call), call


def _operands(name: str, given: Any) -> dict[str, jax.Array]:
    """An array, or each of a sequence, by its name in messages."""
    if not isinstance(given, Sequence):
        arrays = {name: jnp.asarray(given)}
    elif given:
        arrays = {f"{name}[{i}]": jnp.asarray(a) for i, a in enumerate(given)}
    else:
        raise ValueError(f"{name} is empty, expected an array or some arrays")
    for label, array in arrays.items():
        if array.ndim != 2 and (name == "w" or array.ndim < 2):
            raise ValueError(
                f"{label} has shape {array.shape}, expected"
                f" {'a matrix' if name == 'w' else '[*B, rows, features]'}"
            )
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(
                f"{label} has type {array.dtype}, expected a floating type"
            )
    return arrays


def _check_features(
    x_name: str, x: jax.Array, w_name: str, w: jax.Array, rhs_transposed: bool
) -> None:
    if w.shape[1 if rhs_transposed else 0] != x.shape[-1]:
        raise ValueError(
            f"{w_name} has shape {w.shape} (rhs_transposed={rhs_transposed}), expected"
            f" {x.shape[-1]} input features as {x_name} of shape {x.shape} has"
        )


def _call(
    operands: Mapping[str, jax.Array],
    *,
    axis_name: str,
    out_dtype: DTypeLike | None,
    implementation: str | Sequence[str] | None,
    **options: Any,
) -> Call:
    first = next(iter(operands))
    dtype = operands[first].dtype
    for name, array in operands.items():
        if array.dtype != dtype:
            raise ValueError(
                f"{name} has type {array.dtype}, expected that of {first}, {dtype};"
                " cast one of them"
            )
    out_dtype = jnp.dtype(dtype if out_dtype is None else out_dtype)
    if not jnp.issubdtype(out_dtype, jnp.floating):
        raise ValueError(f"out_dtype {out_dtype}, expected a floating type")
    if not isinstance(axis_name, str):
        raise ValueError(f"axis_name {axis_name!r}, expected the name of one mesh axis")
    return Call.over(
        axis_name,
        out_dtype=out_dtype,
        implementation=as_hashable(implementation),
        device=DeviceSpec.current(),
        **options,
    )


def _alike(
    xs: Mapping[str, jax.Array], ws: Mapping[str, jax.Array], call: Call
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """The operands, all marked as varying over the axis and where any of them does."""
    axes = varying(*xs.values(), *ws.values())
    if call.tracked:
        axes |= {call.axis_name}
    x, w = (tuple(as_varying(a, axes) for a in d.values()) for d in (xs, ws))
    return x, w


def _merged(x: jax.Array) -> jax.Array:
    """Leading axes as one."""
    return x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:])  # [B,M,K]
