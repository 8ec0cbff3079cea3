"""The public op: a decoder layer from one attention to the next.

Axis letters: M requests, R requests rounded up to a multiple of 8, D model, F hidden,
N query heads, K key/value heads, H head dim, C all features of queries, keys and
values.
"""

import dataclasses
import math
import typing
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.collective_matmul.all_reduce import AllReduceWorkspace
from pallas_kernels.collective_matmul.config import Call
from pallas_kernels.collective_matmul.ops import check_mesh
from pallas_kernels.decode_layer import mosaic_gpu, xla
from pallas_kernels.decode_layer.config import (
    COLUMNS,
    GROUP,
    WARPGROUPS,
    Cached,
    DecodeLayerConfig,
    Kept,
    Problem,
    padded_rows,
    part_names,
)
from pallas_kernels.decode_layer.shares import SHARED_TILE, SharedTileSparse
from pallas_kernels.dispatch import Unsupported, dispatch, no_config, no_derivative
from pallas_kernels.mosaic import DeviceSpec, check_hopper
from pallas_kernels.paged_attention.config import default_split
from pallas_kernels.paged_attention.problem import Cut
from pallas_kernels.partition import check_local
from pallas_kernels.quantized_matmul.api import WEIGHT_DTYPES
from pallas_kernels.tile_sparse_matmul import TileSparse
from pallas_kernels.tuned_configs import check_config


# Transformations rebuild these classes around shapes, so that their fields cannot be
# checked as arrays.
@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerWeights:
    """Weights of a layer after its attention; all but the norm in one type.

    A projection may be `TileSparse`, or several weights of which some are dense, that
    blocks `share`; all are shared, or none. Weights of int8 or float8_e4m3fn are
    turned, [features,inputs], as those of `pallas_kernels.quantized_matmul`, and all
    have scales of their features, in fp32.
    """

    out: Shaped[Array, "NH D"] | SharedTileSparse
    """Projection of the attention's output."""
    mlp_norm: Shaped[Array, "D"]
    """Scale of the RMS norm before the feed-forward network."""
    gate_up: Shaped[Array, "D F2"] | SharedTileSparse
    """Gate projection, and behind it up projection."""
    down: Shaped[Array, "F D"] | SharedTileSparse
    out_scale: Float[Array, "D"] | None = None
    gate_up_scale: Float[Array, "F2"] | None = None
    down_scale: Float[Array, "D"] | None = None


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class NextProjection:
    """Queries, keys and values of the layer that follows, as `LayerWeights`."""

    norm: Shaped[Array, "D"]
    """Scale of the RMS norm before the attention."""
    qkv: Shaped[Array, "D C"] | SharedTileSparse
    """Projections of queries, keys and values, one behind the other."""
    qkv_scale: Float[Array, "C"] | None = None
    bias: Shaped[Array, "C"] | None = None
    cos: Float[Array, "pairs R"]
    """Cosines of the rotary embedding, see `rotation`."""
    sin: Float[Array, "pairs R"]
    out: Shaped[Array, "NH D"] | SharedTileSparse | None = None
    """Projection of the attention's output there, which is read ahead; or None."""
    heads: int = dataclasses.field(metadata={"static": True})
    """N."""
    kv_heads: int = dataclasses.field(metadata={"static": True})
    """K."""


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedCache:
    """Keys and values of the requests, as `pallas_kernels.paged_attention` has them."""

    pages: Float[Array, "L P 2 K G H"]
    """In bfloat16."""
    layer: Int[Array, ""]
    """Which layer it is."""
    table: Int[Array, "M W"]
    """The pages of each request."""
    lengths: Int[Array, "M"]
    """Tokens of each request before the newest."""
    num_new: Int[Array, "M"]
    """1, or 0 of rows without a request."""
    places: Int[Array, "R"]
    """See `places_of_new_tokens`."""
    scale: float = dataclasses.field(metadata={"static": True})
    """Factor of ``q . k``."""
    window: int | None = dataclasses.field(default=None, metadata={"static": True})
    """Tokens that a query attends to, itself included."""
    softcap: float | None = dataclasses.field(default=None, metadata={"static": True})
    """Bound on the magnitude of scores."""


def places_of_new_tokens(
    pages: Shaped[Array, "L P 2 K G H"],
    table: Int[Array, "M W"],
    lengths: Int[Array, "M"],
    num_new: Int[Array, "M"],
) -> Int[Array, "R"]:
    """Where the newest token of each request belongs, in rows of a layer's pages.

    Negative of those that belong nowhere.

    Args:
        pages: of which the shape counts.
        table: as in `PagedCache`.
        lengths: as there.
        num_new: as there.
    """
    _, num_pages, _, kv_heads, size, _ = pages.shape
    index = jnp.minimum(lengths // size, table.shape[1] - 1)
    page = jnp.take_along_axis(table, index[:, None], axis=1)[:, 0]
    belongs = (num_new > 0) & (lengths < table.shape[1] * size)
    belongs &= (page >= 0) & (page < num_pages)
    place = page * (2 * kv_heads * size) + lengths % size
    place = jnp.where(belongs, place, -1)
    more = padded_rows(len(place)) - len(place)
    return jnp.pad(place, (0, more), constant_values=-1)


def padded_queries(q: Float[Array, "M N H"], kv_heads: int) -> Float[Array, "M K 8 H"]:
    """Queries as `attending_decode_layer` takes them, 8 of each key/value head.

    Args:
        q: queries, rotated.
        kv_heads: K.

    Example:
        >>> padded_queries(jnp.ones((2, 8, 128)), 2).shape
        (2, 2, 8, 128)
    """
    m, heads, head_dim = q.shape
    q = q.reshape(m, kv_heads, heads // kv_heads, head_dim)
    return jnp.pad(q, ((0, 0), (0, 0), (0, COLUMNS - q.shape[2]), (0, 0)))


def as_residual(x: Float[Array, "M D"]) -> Float[Array, "D R"]:
    """The residual stream as the op takes it: fp32, feature-major, whole columns.

    Example:
        >>> as_residual(jnp.ones((3, 128))).shape
        (128, 8)
    """
    rows = padded_rows(x.shape[0]) - x.shape[0]
    return jnp.pad(x.astype(jnp.float32), ((0, rows), (0, 0))).T


def from_residual(residual: Float[Array, "D R"], m: int) -> Float[Array, "M D"]:
    """The rows of a residual stream, in fp32.

    Args:
        residual: the stream, feature-major.
        m: how many rows there are.
    """
    return residual.T[:m]


def rotation(
    angles: Float[Array, "M pairs"], factor: float = 1.0
) -> tuple[Float[Array, "pairs R"], Float[Array, "pairs R"]]:
    """Cosines and sines of a rotary embedding, as `NextProjection` holds them.

    Args:
        angles: position times inverse frequency, in radians; pair `i` of a head is its
            features ``(i, i + pairs)``.
        factor: factor of the rotated features.
    """
    cos, sin = factor * jnp.cos(angles), factor * jnp.sin(angles)
    return as_residual(cos), as_residual(sin)


def decode_layer(
    attended: Float[Array, "M NH"],
    residual: Float[Array, "D R"],
    layer: LayerWeights,
    projection: NextProjection | None = None,
    *,
    eps: float,
    implementation: str | Sequence[str] | None = None,
    config: DecodeLayerConfig | None = None,
) -> tuple[
    Float[Array, "D R"],
    tuple[Float[Array, "M N H"], Float[Array, "M 2 K H"]] | None,
]:
    """Computes a decoder layer of few requests, from one attention to the next.

    ``x = residual + attended @ out``;
    ``x = x + (silu(g) * u) @ down`` with ``g, u = norm(x) @ gate_up``;
    queries, keys and values of the next layer are ``norm(x) @ qkv + bias``, queries and
    keys rotated by position.

    On Hopper GPUs it is one launch, which reads weights without a pause; in XLA about
    ten. Not differentiable.

    Args:
        attended: [M,N H], the output of attention.
        residual: [D,R] fp32, made by `as_residual`: the residual stream before the
            attention.
        layer: weights of the layer.
        projection: what the next layer's attention needs; None after the last layer.
        eps: added to the mean squares of both norms.
        implementation: "mosaic_gpu" (Hopper; bfloat16, weights of that or of 8 bits, or
            tile-sparse ones of bfloat16 with tiles of 128 columns that are shared out
            for this GPU, see `share`; up to 64 requests; head dim, hidden features and
            those of attention multiples of 128, model features and columns of q, k and
            v of 256; one device), "xla", a sequence of these, or None for the first
            that can.
        config: how the kernel cuts a layer; None is the default. XLA takes none.

    Returns:
        ``(residual, (queries, keys and values))``: [D,R] fp32, [M,N,H] and [M,2,K,H] of
        the type of `attended`; in place of the pair None without a `projection`.

    Raises:
        ValueError: shapes or types disagree, or the config is another op's.
        Unsupported: the implementation named cannot serve the arguments here.
        ExceptionGroup: none of several implementations can.
        NotImplementedError: the call is differentiated.
    """
    given = attended, residual, layer, projection
    return _run(given, None, _Call(eps, config), implementation)[:2]


def attending_decode_layer(
    queries: Float[Array, "M K 8 H"],
    residual: Float[Array, "D R"],
    layer: LayerWeights,
    projection: NextProjection | None,
    cache: PagedCache,
    *,
    eps: float,
    config: DecodeLayerConfig | None = None,
) -> tuple[
    Float[Array, "D R"],
    Float[Array, "M K 8 H"] | None,
    Float[Array, "L P 2 K G H"],
]:
    """`decode_layer` with the attention before it in the same launch.

    The newest token of each request is in the pages already. Keys and values that the
    next layer attends to are put there, not returned.

    Args:
        queries: [M,K,8,H], the queries of this layer, from `padded_queries` or the call
            before.
        residual: as there.
        layer: as there.
        projection: as there.
        cache: where keys and values are.
        eps: as there.
        config: as there.

    Returns:
        ``(residual, queries, pages)``: [D,R] fp32; the next layer's queries, or None;
        the pages, with the newest token of the next layer.

    Raises:
        ValueError: as there.
        Unsupported: the kernel cannot serve the arguments here; see `decode_layer` and
            `declines`.
        NotImplementedError: the call is differentiated.
    """
    check_config("decode_layer", config, DecodeLayerConfig)
    features = layer.out.shape[1 if layer.out.dtype.itemsize == 1 else 0]
    # Of what is not there the sizes count.
    attended = jnp.zeros((len(queries), features), queries.dtype)
    given = attended, residual, layer, projection
    problem = _problem(*given, devices=1)
    message = "attending_decode_layer has no derivatives: it is for inference"
    residual, q, pages = dispatch(
        "decode_layer",
        {"mosaic_gpu": _attending},
        "mosaic_gpu",
        no_derivative(_operands(*given), message),
        queries,
        cache,
        problem,
        _Call(eps, config),
    )
    return residual, None if q is None else q.reshape(queries.shape), pages


def _attending(
    operands: dict[str, Any],
    queries: Array,
    cache: PagedCache,
    problem: Problem,
    call: "_Call",
) -> tuple[Array, Array | None, Array]:
    device = _check_kernel(operands, problem, None, None)
    if call.config is not None and call.config.tile_k is not None:
        raise Unsupported(
            f"decode_layer: tile_k={call.config.tile_k} with attention in the launch,"
            " expected None: keys lie where weights do"
        )
    problem = _with_attention(problem, queries.shape, cache, device)
    del operands["attended"]
    operands |= {
        "queries": queries.reshape(-1, *queries.shape[-2:]),
        "table": cache.table.reshape(-1),
        "layer": cache.layer.reshape(1),
        "lengths": cache.lengths,
        "num_new": cache.num_new,
        "places": cache.places,
    }
    residual, q, lines, _ = mosaic_gpu.decode_layer(
        operands,
        problem=problem,
        config=call.config or DecodeLayerConfig(),
        device=device,
        eps=call.eps,
        pages=cache.pages.reshape(-1, *cache.pages.shape[-2:]),
    )
    assert lines is not None
    return residual, q, lines.reshape(cache.pages.shape)


def _with_attention(
    problem: Problem,
    queries: tuple[int, ...],
    cache: PagedCache,
    device: DeviceSpec,
) -> Problem:
    """A problem whose attention is in the launch.

    Raises:
        ValueError: shapes disagree.
        Unsupported: the kernel cannot serve them.
    """
    m, kv_heads, columns, head_dim = queries
    _, num_pages, _, of_pages, page, features = cache.pages.shape
    heads = problem.features // head_dim
    if (of_pages, features, columns) != (kv_heads, head_dim, COLUMNS):
        raise ValueError(
            f"queries {queries} and pages {cache.pages.shape}: expected"
            f" [M,K,{COLUMNS},H] and [L,P,2,K,G,H]"
        )
    width = cache.table.shape[1]
    split = min(default_split(m, kv_heads, page, device.num_sms) // 2, MOST_SPLIT)
    reasons = {
        f"pages of {cache.pages.dtype.name} with {page} tokens, in-launch attention"
        f" takes bfloat16 and multiples of {GROUP}": (
            cache.pages.dtype == jnp.bfloat16 and page % GROUP == 0
        ),
        f"{heads} heads of {head_dim} in {kv_heads} groups, in-launch attention takes"
        f" heads of {WARPGROUPS * GROUP} and up to {COLUMNS} in a group": (
            head_dim == WARPGROUPS * GROUP
            and heads % kv_heads == 0
            and heads // kv_heads <= COLUMNS
        ),
        "tile-sparse weights, in-launch attention takes dense ones": not problem.kept,
        f"{math.prod(cache.pages.shape[:5])} rows of pages, in-launch attention counts"
        " to 2**31": math.prod(cache.pages.shape[:5]) < 2**31,
    }
    for reason, fits in reasons.items():
        if not fits:
            raise Unsupported(f"decode_layer: {reason}; use decode_layer")
    cached = Cached(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page=page,
        width=width,
        num_pages=num_pages,
        cut=Cut(split, 1, width * page, cache.window),
        scale=cache.scale,
        softcap=cache.softcap,
    )
    return dataclasses.replace(problem, cached=cached)


def tensor_parallel_decode_layer(
    attended: Float[Array, "M NH"],
    residual: Float[Array, "D R"],
    layer: LayerWeights,
    projection: NextProjection | None,
    workspace: AllReduceWorkspace | None,
    *,
    axis_name: str,
    eps: float,
    implementation: str | Sequence[str] | None = None,
    config: DecodeLayerConfig | None = None,
) -> tuple[
    Float[Array, "D R"],
    tuple[Float[Array, "M N H"], Float[Array, "M 2 K H"]] | None,
    AllReduceWorkspace | None,
]:
    """`decode_layer` of which each device of a mesh axis has some heads and features.

    Weights `out` and `down` are split by their input features, `gate_up` and `qkv` by
    their output features, so that each device has gate and up projection of the same
    features, and whole groups of heads. The residual stream and the scales of norms are
    whole on each. It is called inside `jax.shard_map` (with ``check_vma=False``) on the
    arrays of one device, with all mesh axes manual.

    The kernel adds up over devices within its launch, without a barrier: parts of sums
    go to the peers in bfloat16, and are added in fp32 in the order of the devices, so
    that the residual has the same bits on all of them. The mesh has the devices of one
    process in the order of `jax.devices()`.

    Args:
        attended: as in `decode_layer`, the heads of this device.
        residual: as there.
        layer: as there, what this device has.
        projection: as there, with the heads of this device.
        workspace: from `pallas_kernels.collective_matmul.make_all_reduce_workspace` for
            D R numbers, or the call before; None where XLA computes.
        axis_name: the mesh axis.
        eps: as in `decode_layer`.
        implementation: as there; "mosaic_gpu" is for 2, 4 or 8 devices.
        config: as there.

    Returns:
        ``(residual, (queries, keys and values), workspace)``: as there, the heads of
        this device; and the workspace of the next call.

    Raises:
        ValueError: as there, or there is no such axis.
        Unsupported: as there, also if the workspace is too small, or the axis has
            another number of devices.
        ExceptionGroup: as there.
        NotImplementedError: as there.
    """
    call = _Call(eps, config, axis_name)
    given = attended, residual, layer, projection
    return _run(given, workspace, call, implementation)


def declines(
    attended: Shaped[Array, "M NH"],
    residual: Float[Array, "D R"],
    layer: LayerWeights,
    projection: NextProjection | None = None,
    workspace: AllReduceWorkspace | None = None,
    axis_name: str | None = None,
    cache: PagedCache | None = None,
) -> str | None:
    """Why the kernel cannot serve a call of `decode_layer` here; None if it can.

    Args:
        attended: as there; of all arrays only shapes and types count.
        residual: as there.
        layer: as there.
        projection: as there.
        workspace: of `tensor_parallel_decode_layer`, where it is this that is called.
        axis_name: as there.
        cache: of `attending_decode_layer`, where it is this that is called.
    """
    given = attended, residual, layer, projection
    problem = _problem(*given, devices=_devices(axis_name))
    try:
        device = _check_kernel(_operands(*given), problem, workspace, axis_name)
        if cache is not None:
            kv_heads, _, head_dim = cache.pages.shape[3:]
            shape = len(attended), kv_heads, COLUMNS, head_dim
            _with_attention(problem, shape, cache, device)
    except Unsupported as reason:
        return str(reason)
    return None


def _devices(axis_name: str | None) -> int:
    """How many devices have a part of the layer."""
    if axis_name is None:
        return 1
    return Call.over(axis_name, out_dtype=jnp.dtype(jnp.bfloat16)).size


def _run(
    given: tuple[Array, Array, LayerWeights, NextProjection | None],
    workspace: AllReduceWorkspace | None,
    call: "_Call",
    implementation: str | Sequence[str] | None,
) -> Any:
    check_config("decode_layer", call.config, DecodeLayerConfig)
    problem = _problem(*given, devices=_devices(call.axis_name))
    message = "decode_layer has no derivatives: it is for inference"
    residual, q, kv, workspace = dispatch(
        "decode_layer",
        {"mosaic_gpu": _mosaic_gpu, "xla": _xla},
        implementation,
        no_derivative(_operands(*given), message),
        workspace,
        problem,
        call,
    )
    if not problem.projects:
        return residual, None, workspace
    p = problem
    q = q.reshape(p.m, p.heads, p.head_dim)
    return residual, (q, kv.reshape(p.m, 2, p.kv_heads, p.head_dim)), workspace


def _operands(
    attended: Array, residual: Array, *parts: LayerWeights | NextProjection | None
) -> dict[str, Any]:
    """The arrays of a call by name, and weights that consist of several."""
    operands: dict[str, Any] = {"attended": attended, "residual": residual}
    for part in parts:
        for field in () if part is None else dataclasses.fields(part):
            value = getattr(part, field.name)
            if not isinstance(value, int | None):
                is_next = isinstance(part, NextProjection) and field.name == "out"
                operands["next_out" if is_next else field.name] = value
    return operands


def _arrays(operands: dict[str, Any]) -> dict[str, Array]:
    """The arrays that the kernel takes.

    Layers that differ in what else a tile-sparse weight knows are traced once.
    """
    found = {}
    for name, value in operands.items():
        if not isinstance(value, SharedTileSparse):
            found[name] = value
            continue
        parts: Any = value.parts
        values = [w.values if isinstance(w, TileSparse) else w for w in parts]
        if name == "next_out":  # as rows of 8 KiB
            found[name] = values[0].reshape(-1, 32 * SHARED_TILE)
            continue
        found |= zip(part_names(name, values), values, strict=True)
        rows = parts[0].rows if value.rows is None else value.rows
        found[f"{name}_rows"] = rows.reshape(-1, math.gcd(rows.size, 1024))  # 4 KiB
        found[f"{name}_plan"] = value.plan
    return found


def _kept(weights: list[Any]) -> tuple[tuple[Kept, ...], ...]:
    """Sizes of tile-sparse weights; () of dense ones.

    Raises:
        ValueError: some are arrays, or a weight is stacked or has other tiles.
    """
    sparse = [w for w in weights if isinstance(w, SharedTileSparse)]
    if sparse and len(sparse) < len(weights):
        names = sorted({type(w).__name__ for w in weights})
        raise ValueError(f"weights of {names}: all are shared, or none is; see share")
    return tuple(w.kept for w in sparse)


MOST_SPLIT = 1024
"""Tokens of a split of attention within the launch, at most."""

_WEIGHTS = ("bfloat16", *WEIGHT_DTYPES)
"""Types of weights of the kernel."""


@dataclasses.dataclass(frozen=True)
class _Call:
    eps: float
    config: DecodeLayerConfig | None
    axis_name: str | None = None
    """The mesh axis over which the layer is split, if it is."""


def _problem(
    attended: Array,
    residual: Array,
    layer: LayerWeights,
    projection: NextProjection | None,
    devices: int,
) -> Problem:
    """The sizes of a call.

    Raises:
        ValueError: shapes or types disagree.
    """
    m, features = attended.shape
    products = [layer.out, layer.gate_up, layer.down]
    products += [] if projection is None else [projection.qkv]
    kept = _kept(products)
    narrow = layer.out.dtype.itemsize == 1
    turn = -1 if narrow else 1
    (_, d), (f, _) = layer.out.shape[::turn], layer.down.shape[::turn]
    want: dict[str, tuple[Any, Any]] = {
        "residual": (residual, (d, padded_rows(m))),
        "out": (layer.out, (features, d)[::turn]),
        "mlp_norm": (layer.mlp_norm, (d,)),
        "gate_up": (layer.gate_up, (d, 2 * f)[::turn]),
        "down": (layer.down, (f, d)[::turn]),
    }
    heads = kv_heads = head_dim = 0
    if (p := projection) is not None:
        heads, kv_heads = p.heads, p.kv_heads
        head_dim = features // heads
        columns = (heads + 2 * kv_heads) * head_dim
        table = head_dim // 2, padded_rows(m)
        want |= {
            "norm": (p.norm, (d,)),
            "qkv": (p.qkv, (d, columns)[::turn]),
            "cos": (p.cos, table),
            "sin": (p.sin, table),
        }
        if p.out is not None:
            want["next_out"] = p.out, (features, d)[::turn]
        if p.bias is not None:
            want["bias"] = p.bias, (columns,)
    weights = {"out": d, "gate_up": 2 * f, "down": d} | (
        {} if projection is None else {"qkv": columns}
    )
    for name, size in weights.items():
        part: Any = projection if name == "qkv" else layer
        scale = getattr(part, f"{name}_scale")
        if (scale is None) is narrow or (narrow and scale.dtype != jnp.float32):
            raise ValueError(
                f"{name}_scale is {scale if scale is None else scale.dtype} for weights"
                f" of {layer.out.dtype}; weights of 8 bits have scales in float32, one"
                " for each feature, and others have none"
            )
        if narrow:
            want[f"{name}_scale"] = scale, (size,)
    for name, (array, shape) in want.items():
        if array.shape != shape:
            raise ValueError(
                f"{name} has shape {array.shape}, expected {shape} for attended of"
                f" shape {attended.shape}, out of {layer.out.shape} and down of"
                f" {layer.down.shape}"
            )
    if residual.dtype != jnp.float32:
        raise ValueError(
            f"residual has type {residual.dtype}, expected float32; use as_residual"
        )
    return Problem(
        m=m,
        d_model=d,
        d_ff=f,
        features=features,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        bias=projection is not None and projection.bias is not None,
        weights=layer.out.dtype.name,
        devices=devices,
        kept=kept,
    )


def _check_kernel(
    operands: dict[str, Any],
    problem: Problem,
    workspace: AllReduceWorkspace | None,
    axis_name: str | None,
) -> DeviceSpec:
    """The device, if the kernel can serve a call on it.

    Raises:
        Unsupported: it cannot.
    """
    device = check_hopper(DeviceSpec.current(), "decode_layer")
    check_local("decode_layer", *jax.tree.leaves(operands))
    kinds = {
        operands[name].dtype.name
        for name in ("out", "gate_up", "down", "qkv", "next_out")
        if name in operands
    }
    activations = operands["attended"].dtype.name
    if activations != "bfloat16" or kinds not in [{name} for name in _WEIGHTS]:
        raise Unsupported(
            f"decode_layer: weights of {sorted(kinds)} and activations of"
            f" {activations}, the kernel takes bfloat16 and all weights of one of"
            f" {_WEIGHTS}; use implementation='xla'"
        )
    problem.check()
    for name, w in operands.items():
        if not isinstance(w, SharedTileSparse):
            continue
        if w.workers != device.num_sms:
            raise Unsupported(
                f"decode_layer: {name} is shared by {w.workers} blocks and"
                f" {device.name} has {device.num_sms} multiprocessors; call share for"
                " it"
            )
    if axis_name is not None:
        over = Call.over(axis_name, out_dtype=jnp.dtype(jnp.bfloat16), device=device)
        check_mesh("decode_layer", over)
        _check_workspace(workspace, problem)
    return device


def _check_workspace(workspace: AllReduceWorkspace | None, problem: Problem) -> None:
    """Checks that parts of sums have room.

    Raises:
        Unsupported: they have not.
    """
    needed, given = problem.d_model * problem.rows, None
    if workspace is not None:
        _, devices, chunks, line = workspace.cells.shape
        if devices == problem.devices and chunks * line >= needed:
            return
        given = f"one for {chunks * line} of {devices}"
    raise Unsupported(
        f"decode_layer: the kernel needs a workspace for {needed} numbers of"
        f" {problem.devices} devices, got {given}; make it by"
        " make_all_reduce_workspace, or use implementation='xla'"
    )


def _mosaic_gpu(
    operands: dict[str, Any],
    workspace: AllReduceWorkspace | None,
    problem: Problem,
    call: _Call,
) -> Any:
    device = _check_kernel(operands, problem, workspace, call.axis_name)
    tile_k = None if call.config is None else call.config.tile_k
    if problem.kept and tile_k not in (None, GROUP):
        raise Unsupported(
            f"decode_layer: tile_k={tile_k} with tile-sparse weights, expected None or"
            f" {GROUP}"
        )
    if call.axis_name is not None:
        # XLA fuses a slice with the kernel that reads it, and the fusion loses the
        # aliasing of the workspace.
        operands = lax.optimization_barrier(operands)
    return mosaic_gpu.decode_layer(
        _arrays(operands),
        problem=problem,
        config=call.config or DecodeLayerConfig(),
        device=device,
        eps=call.eps,
        workspace=workspace,
        axis_name=call.axis_name,
    )


def _xla(
    operands: dict[str, Any],
    workspace: AllReduceWorkspace | None,
    problem: Problem,
    call: _Call,
) -> Any:
    no_config("decode_layer", call.config)
    residual, q, kv = xla.decode_layer(
        operands,
        heads=problem.heads,
        kv_heads=problem.kv_heads,
        head_dim=problem.head_dim,
        eps=call.eps,
        axis_name=call.axis_name,
    )
    return residual, q, kv, workspace
