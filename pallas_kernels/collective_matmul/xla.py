"""Collective matmuls through XLA, in two forms.

The plain form is a collective and a matmul, one after the other: what the compiler
makes of ordinary code, and the baseline of the kernels. The ring cuts both into one
step for each device, in which a transfer to the next device is independent of the
matmul, so that the compiler may run them at the same time.

The ring runs in one direction: where GPUs share a switch, one neighbor takes all that
a GPU can send. Its steps are unrolled.

Axis letters: B merged leading axes, m rows of a device, M rows of all, K contraction,
N columns, D devices of the axis.
"""

import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.collective_matmul.config import Call
from pallas_kernels.dispatch import Unsupported
from pallas_kernels.matmul import xla
from pallas_kernels.mosaic import as_varying, varying


type Arrays = tuple[jax.Array, ...]

_ROWS = 1  # the axis of [B,m,K] that is gathered and scattered


def all_gather_matmul(
    x: jax.Array, ws: Arrays, call: Call
) -> tuple[Arrays, jax.Array | None]:
    """Gathers rows, then multiplies them.

    Args:
        x: [B,m,K] rows of this device.
        ws: weights [K,N_i], or [N_i,K] if they are stored so.
        call: the mesh axis, the matmuls' type, how weights are stored, whether
            the gathered rows are wanted.

    Returns:
        Matmuls [B,D*m,N_i], and the gathered rows [B,D*m,K], or None.
    """
    gathered = all_gather(x, call.axis_name)
    dot = _dot(call.out_dtype, call.rhs_transposed)
    ys = tuple(dot(gathered, w) for w in ws)
    return ys, gathered if call.return_gathered else None


def matmul_reduce_scatter(xs: Arrays, ws: Arrays, call: Call) -> jax.Array:
    """Multiplies, then sums over devices and scatters rows.

    The sum of a device is rounded to the type of the result before it is sent.

    Args:
        xs: operands [B,M,K_i] of this device.
        ws: their weights [K_i,N], or [N,K_i] if they are stored so.
        call: the mesh axis, the type of the result, how weights are stored.

    Returns:
        [B,M/D,N], the rows of this device.
    """
    return reduce_scatter(sum_of_products(xs, ws, call), call.axis_name)


def matmul_all_reduce(xs: Arrays, ws: Arrays, call: Call) -> jax.Array:
    """Multiply and sum as `matmul_reduce_scatter`; each device gets all rows."""
    return all_reduce(sum_of_products(xs, ws, call), call.axis_name)


def ring_all_gather_matmul(
    x: jax.Array, ws: Arrays, call: Call
) -> tuple[Arrays, jax.Array | None]:
    """Compute `all_gather_matmul`, multiplying a shard while the next arrives."""
    if x.size == 0:
        return all_gather_matmul(x, ws, call)
    size, me = call.size, lax.axis_index(call.axis_name)
    to_previous = [(i, (i - 1) % size) for i in range(size)]
    dot = _dot(call.out_dtype, call.rhs_transposed)
    shards = [x]  # of devices me, me + 1, ...
    for _ in range(size - 1):
        shards.append(lax.ppermute(shards[-1], call.axis_name, to_previous))
    ys = tuple(_in_order([dot(shard, w) for shard in shards], me) for w in ws)
    return ys, _in_order(shards, me) if call.return_gathered else None


def ring_matmul_reduce_scatter(xs: Arrays, ws: Arrays, call: Call) -> jax.Array:
    """Compute `matmul_reduce_scatter`; sends sums while the next are computed.

    The sum of the rows of device d starts on device d + 1 and visits every other one
    on its way to d. It is sent in the type of the result, as many bytes as in the plain
    form, and every device adds its matmuls in fp32 and rounds: D roundings in a fixed
    order.
    """
    size, me = call.size, lax.axis_index(call.axis_name)
    rows = xs[0].shape[_ROWS] // size
    to_next = [(i, (i + 1) % size) for i in range(size)]
    wide = _type_of_sums(call.out_dtype)

    def products(step: int) -> jax.Array:
        start = (me - 1 - step) % size * rows
        parts = tuple(lax.dynamic_slice_in_dim(x, start, rows, _ROWS) for x in xs)
        return sum_of_products(parts, ws, call, wide)

    total = products(0).astype(call.out_dtype)
    if total.size == 0:
        return total
    for step in range(1, size):
        arrived = lax.ppermute(total, call.axis_name, to_next)
        total = (products(step) + arrived.astype(wide)).astype(call.out_dtype)
    return total


def ring_matmul_all_reduce(xs: Arrays, ws: Arrays, call: Call) -> jax.Array:
    """Compute `matmul_all_reduce` by `ring_matmul_reduce_scatter` and a gather.

    The gather is one collective: no matmul is left that could hide its steps.
    """
    size, rows = call.size, xs[0].shape[_ROWS]
    if rows % size:
        raise Unsupported(
            f"matmul_all_reduce: the ring needs rows in multiples of the {size} devices"
            f" of {call.axis_name!r}, got {rows}; pad them or use implementation='xla'"
        )
    mine = ring_matmul_reduce_scatter(xs, ws, call)
    if mine.size == 0:
        return matmul_all_reduce(xs, ws, call)
    return lax.all_gather(mine, call.axis_name, axis=_ROWS, tiled=True, to="invarying")


# XLA waits forever in a collective of an empty array, and its partitioner fails on code
# that reads empty arrays alone. So none is sent, and zeros read nothing.


def zeros(shape: Sequence[int], dtype: DTypeLike, axes: frozenset[str]) -> jax.Array:
    """Zeros that vary over mesh axes."""
    return as_varying(jnp.zeros(shape, dtype), axes)


def all_gather(x: jax.Array, axis_name: str) -> jax.Array:
    """[B,m,K] of each device to [B,D*m,K]."""
    if x.size == 0:
        batch, rows, depth = x.shape
        shape = batch, rows * lax.axis_size(axis_name), depth
        return zeros(shape, x.dtype, varying(x))
    return _over_rows(
        lambda x, rows: lax.all_gather(x, axis_name, axis=rows, tiled=True), x
    )


def reduce_scatter(y: jax.Array, axis_name: str) -> jax.Array:
    """[B,M,N] to rows [B,M/D,N] of the sum over devices."""
    if y.size == 0:
        batch, rows, columns = y.shape
        shape = batch, rows // lax.axis_size(axis_name), columns
        return zeros(shape, y.dtype, varying(y))
    return _over_rows(
        lambda y, rows: lax.psum_scatter(
            y, axis_name, scatter_dimension=rows, tiled=True
        ),
        y,
    )


def all_reduce(y: jax.Array, axis_name: str) -> jax.Array:
    """The sum of [B,M,N] over devices."""
    if y.size == 0:
        return zeros(y.shape, y.dtype, varying(y) - {axis_name})
    return _over_rows(lambda y, rows: lax.psum(y, axis_name), y)


def _over_rows(
    collective: Callable[[jax.Array, int], jax.Array], x: jax.Array
) -> jax.Array:
    """A collective of ``(x, axis of the rows)``, without a leading axis of size one.

    With it XLA may choose other layouts around the collective, and copy.
    """
    return collective(x[0], 0)[None] if x.shape[0] == 1 else collective(x, _ROWS)


def _dot(
    out_dtype: DTypeLike, rhs_transposed: bool
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    product = functools.partial(
        xla.matmul, out_dtype=out_dtype, rhs_transposed=rhs_transposed
    )

    def dot(x: jax.Array, w: jax.Array) -> jax.Array:
        if x.size == 0:
            columns = w.shape[0 if rhs_transposed else 1]
            return zeros((*x.shape[:-1], columns), out_dtype, varying(x, w))
        y = product(x.reshape(math.prod(x.shape[:-1]), x.shape[-1]), w)  # [B*M,N]
        return y.reshape(*x.shape[:-1], y.shape[-1])  # [B,M,N]

    return dot


def _type_of_sums(out_dtype: DTypeLike) -> jnp.dtype:
    wide = jnp.dtype(jnp.float32)
    return max(jnp.dtype(out_dtype), wide, key=lambda dtype: dtype.itemsize)


def sum_of_products(
    xs: Arrays, ws: Arrays, call: Call, out_dtype: DTypeLike | None = None
) -> jax.Array:
    """``sum_i x_i w_i`` on this device; several matmuls are added in fp32.

    Args:
        xs: [B,M,K_i].
        ws: [K_i,N], or [N,K_i] if they are stored so.
        call: how they are stored, and the type of the sum.
        out_dtype: another type of the sum.
    """
    out_dtype = call.out_dtype if out_dtype is None else out_dtype
    wide = _type_of_sums(out_dtype)
    dot = _dot(out_dtype if len(xs) == 1 else wide, call.rhs_transposed)
    first, *rest = (dot(x, w) for x, w in zip(xs, ws, strict=True))
    return sum(rest, start=first).astype(out_dtype)


def _in_order(parts: Sequence[jax.Array], me: jax.Array) -> jax.Array:
    """Joins the rows of devices me, me + 1, ... in the order of the devices."""
    size, (batch, rows, columns) = len(parts), parts[0].shape
    joined = jnp.zeros((batch, size * rows, columns), parts[0].dtype)
    for step, part in enumerate(parts):
        start = (me + step) % size * rows
        joined = lax.dynamic_update_slice_in_dim(joined, part, start, _ROWS)
    return joined
