"""Embedding look-ups with deterministic gradients.

The gradient of a look-up sums, for each row of the table, the cotangents of all
positions that read it. As a scatter-add, a GPU sums them in arbitrary order: two runs
of one program differ in the last bits, and after some steps in all. Here equal indices
are sorted together first, and each row is written once.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.typing import DTypeLike
from jaxtyping import Array, Inexact, Int, Shaped

from jaxscale.sharding.operations import (
    constrain,
    gather_storage_axes,
    layout_of,
    partly_manual,
    steer,
)
from jaxscale.sharding.rules import AxisRules
from jaxscale.sharding.shards import Shards
from pallas_kernels.partition import current_mesh


_CHUNK = 128
"""Values that one matmul adds up."""


def gather(
    table: Shaped[Array, "rows *rest"],
    indices: Int[Array, "..."],
    table_axes: Sequence[str | None],
    out_axes: Sequence[str | None],
    rules: AxisRules,
    dtype: DTypeLike | None = None,
) -> Shaped[Array, "..."]:
    """``table[indices]`` along the first dimension, sharded as `out_axes` say.

    If the rows of the table are sharded (a vocabulary over `tensor`), each device looks
    up the rows that it has and the results are summed; the table itself is not moved.
    Nor is it if its columns are sharded over axes of the batch and a device has fewer
    indices than the table has rows: each device looks up all indices in its columns,
    followed by an all-to-all of the results. Otherwise the table is all-gathered.

    Args:
        table: Parameter, for example a table of embeddings.
        indices: Rows to take. Those outside the table, negative ones too, give NaN
            (integers: the minimum).
        table_axes: Logical axes of `table`.
        out_axes: Logical axes of the result: those of `indices`, then those of a table
            row.
        rules: Mesh axes of each logical axis.
        dtype: Type of the result, and of its cotangent; None is that of the table.

    Raises:
        ValueError: as `constrain`.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxscale.sharding import fsdp_tp
        >>> table = jnp.asarray([[1.0, 2.0], [3.0, 4.0]])
        >>> axes = ("vocab", "embed"), ("tokens", "act_embed")
        >>> gather(table, jnp.asarray([1, 1, 0]), *axes, fsdp_tp())[:, 0]
        Array([3., 3., 1.], dtype=float32)
    """
    if partly_manual(current_mesh((table, indices))):
        # Indices are whole where rows are split: a token may be in any row.
        rows = rules.mesh_axes(table_axes[:1])
        at = [
            None if axis is None or rules.mesh_axes([axis]) & rows else axis
            for axis in out_axes[: indices.ndim]
        ]
        shards = Shards.of((table, indices), (table_axes, at), rules)
        tracked = any(jax.typeof(x).manual_axis_type.varying for x in (table, indices))
        if shards.splits(table_axes[0]) and not tracked:
            return _look_up(shards, table, indices, out_axes, dtype)
        # The partitioner of jaxlib 0.11.2 aborts on split rows there.
        table_axes = (None, *table_axes[1:])
        table = constrain(table, table_axes, rules)
    # The sum over the devices that hold rows has no place to go while the result is
    # split over the same devices: the compiler would gather the whole table instead.
    rows = rules.mesh_axes(table_axes[:1]) - rules.mesh_axes(["batch"])
    found_axes, found_rules = out_axes, rules.without(rows, out_axes)
    columns = rules.mesh_axes(table_axes[1:])
    is_stored = columns & rules.mesh_axes(["batch"])
    if is_stored and _is_smaller(indices, out_axes, table, rules):
        # Each device looks up all tokens in the columns that it stores; the results are
        # exchanged (all-to-all), and neither the table nor its gradient is.
        found_axes = (*out_axes[: indices.ndim], *table_axes[1:])
        found_rules = found_rules.without(columns, out_axes[: indices.ndim])
        whole = functools.partial(
            constrain, axes=found_axes[: indices.ndim], rules=found_rules
        )
        # Outside of `jax.jit` they may be on one device, where a constraint fails.
        indices = jax.jit(whole, inline=True)(indices)
        table = constrain(table, table_axes, rules)
    else:
        table = gather_storage_axes(table, table_axes, rules)
    shape = indices.shape + table.shape[1:]
    explicit, auto = layout_of(shape, found_axes, found_rules, table)
    out = _take(table, indices, explicit, table_axes, found_axes, found_rules, dtype)
    return constrain(steer(out, auto), out_axes, rules)


def row_sums(
    values: Inexact[Array, "n *rest"],
    indices: Int[Array, "n"],
    rows: int,
    dtype: DTypeLike | None = None,
) -> Inexact[Array, "rows *rest"]:
    """Sum of the values that belong to each row of a table (segment sum).

    This is ``zeros.at[indices].add(values)``, but bitwise reproducible, on a GPU too.
    Values are sorted by row and cut into chunks. In a chunk, a matmul with a matrix of
    zeros and ones adds those of equal rows; sums that continue in the next chunk are
    carried over; the last value of each row then has the total, which is written.

    Args:
        values: Values to add, in fp32 if narrower. A non-finite value spoils the rows
            of its chunk.
        indices: Row of each value; those outside of the table are left out.
        rows: Rows of the table.
        dtype: Type of the sums; None is that of the values.

    Example:
        >>> row_sums(jnp.asarray([1.0, 2.0, 4.0]), jnp.asarray([2, 0, 2]), 3)
        Array([2., 0., 5.], dtype=float32)
    """
    dtype, n = dtype or values.dtype, len(indices)
    if not n:
        return jnp.zeros((rows, *values.shape[1:]), dtype)
    size = min(_CHUNK, n)
    missing = -n % size
    at = jnp.pad(indices.astype(jnp.int32), (0, missing), constant_values=rows)
    flat = jnp.pad(values.reshape(n, -1), ((0, missing), (0, 0)))  # [n, F]
    order = jnp.argsort(at)  # stable
    chunks = at[order].reshape(-1, size)  # [K, C]
    each = flat[order].reshape(*chunks.shape, -1)  # [K, C, F]
    equal = chunks[:, :, None] == chunks[:, None, :]
    narrow = jnp.finfo(each.dtype).bits < 32
    sums = jnp.einsum(
        "kij,kjf->kif",
        equal.astype(each.dtype),
        each,
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32 if narrow else each.dtype,
    )
    first, last = chunks[:, 0], chunks[:, -1]
    goes_on = jnp.concatenate([jnp.zeros(1, bool), last[:-1] == first[1:]])
    begins = (first != last) | ~goes_on  # what its last row has before is no part of it

    def add(left: tuple[Array, Array], right: tuple[Array, Array]) -> Any:
        total = jnp.where(right[0][:, None], right[1], left[1] + right[1])
        return left[0] | right[0], total

    _, ends = jax.lax.associative_scan(add, (begins, sums[:, -1]))
    before = jnp.where(goes_on[:, None], jnp.roll(ends, 1, axis=0), 0)  # [K, F]
    carried = jnp.where((chunks == first[:, None])[..., None], before[:, None], 0)
    sums, at = (sums + carried).reshape(flat.shape), chunks.reshape(-1)
    is_last = jnp.concatenate([at[1:] != at[:-1], jnp.ones(1, bool)])
    # Places outside of the table, each another one, are dropped.
    outside = rows + jnp.arange(len(at), dtype=jnp.int32)
    at = jnp.where(is_last & (at >= 0) & (at < rows), at, outside)
    table = jnp.zeros((rows, sums.shape[1]), dtype)
    table = table.at[at].set(sums.astype(dtype), mode="drop", unique_indices=True)
    return table.reshape(rows, *values.shape[1:])


def _take(
    table: Array,
    indices: Array,
    explicit: NamedSharding | None,
    table_axes: Sequence[str | None],
    out_axes: Sequence[str | None],
    rules: AxisRules,
    dtype: DTypeLike | None,
) -> Array:
    """``table[indices]`` sharded as `out_axes` say; NaN for indices outside.

    Args:
        table: Split as `rules` say, or whole where they split it over the batch.
        indices: Whole or split, as the result.
        explicit: Sharding of the result over Explicit axes, if there are any.
        table_axes: Logical axes of `table`; its gradient is split over all of them.
        out_axes: Logical axes of the result.
        rules: Mesh axes of each logical axis.
        dtype: Type of the result; None is that of the table.
    """
    kind = jax.typeof(table)

    def look_up(table: Array, indices: Array) -> Array:
        found = table.at[indices].get(
            mode="fill", wrap_negative_indices=False, out_sharding=explicit
        )
        return found.astype(dtype or table.dtype)

    # A rule of our own says nothing of what varies over Manual axes that are tracked.
    tracked = any(jax.typeof(x).manual_axis_type.varying for x in (table, indices))
    if tracked or not jnp.issubdtype(table.dtype, jnp.inexact):
        return look_up(table, indices)

    def forward(table: Array, indices: Array) -> tuple[Array, Array]:
        return look_up(table, indices), indices

    def backward(indices: Array, dy: Array) -> tuple[Array, None]:
        sums = _gradient(dy, indices, kind, table_axes, out_axes, rules)
        if explicit is not None:  # there the type of a gradient names its sharding
            sums = jax.sharding.reshard(sums, kind.sharding)
        return sums, None

    take = jax.custom_vjp(look_up)
    take.defvjp(forward, backward)
    return take(table, indices)


def _is_smaller(
    indices: Array, axes: Sequence[str | None], table: Array, rules: AxisRules
) -> bool:
    """Whether a device has fewer indices than the table has rows."""
    sizes = current_mesh((indices, table)).shape
    names = rules.mesh_axes(axes[: indices.ndim])
    ways = math.prod(sizes.get(name, 1) for name in names)
    return indices.size < ways * table.shape[0]


def _look_up(
    shards: Shards,
    table: Array,
    indices: Array,
    out_axes: Sequence[str | None],
    dtype: DTypeLike | None,
) -> Array:
    """`gather` inside a Manual region: each device looks up its own rows."""
    names = shards.names(shards.in_axes[0][0])
    total = table.shape[0]

    def local(table: Array, indices: Array) -> tuple[Array]:
        rows = table.shape[0]
        at = indices - jax.lax.axis_index(names) * rows
        here = (at >= 0) & (at < rows)
        at, whole = jnp.where(here, at, 0), (None,) * (at.ndim + table.ndim)
        axes = whole[: table.ndim], whole[1:]
        found = _take(table, at, None, *axes, shards.rules, dtype)
        found = jnp.where(here[..., None], found, jnp.zeros((), found.dtype))
        found = jax.lax.psum(found, names)
        inside = (indices >= 0) & (indices < total)
        real = jnp.issubdtype(table.dtype, jnp.inexact)
        nothing = jnp.nan if real else jnp.iinfo(table.dtype).min
        return (jnp.where(inside[..., None], found, nothing),)

    axes = (*shards.in_axes[1], *[None] * (table.ndim - 1))
    look_up = shards.over(local, [axes], parameters=(0,))
    (out,) = look_up(*shards.place((table, indices)))
    return constrain(out, out_axes, shards.rules)


def _gradient(
    dy: Array,
    indices: Array,
    table: Any,
    table_axes: Sequence[str | None],
    out_axes: Sequence[str | None],
    rules: AxisRules,
) -> Array:
    """The gradient of a table, sharded as the parameter where possible.

    Each device sums its own rows of the table, its own columns, or the rows of its own
    indices, which are then reduced over the devices.
    """
    at_axes = out_axes[: indices.ndim]
    shards = Shards.of((indices,), (at_axes,), rules)
    summed, claimed = _split(shards, at_axes), rules.mesh_axes(at_axes)

    # A mesh axis that splits indices cannot split rows or columns of `dy` as well: sums
    # over it are scattered onto the columns, or made whole.
    def is_free(axis: str | None) -> bool:
        return axis is None or not claimed & rules.mesh_axes([axis])

    def kept(size: int, axis: str | None) -> str | None:
        names = _split(shards, [axis])
        ways = math.prod(shards.mesh.shape[name] for name in names)
        return axis if not size % ways and (is_free(axis) or names <= summed) else None

    axes = [kept(*pair) for pair in zip(table.shape, table_axes, strict=True)]
    axes[0] = axes[0] if is_free(axes[0]) else None
    columns = [axis if is_free(axis) else None for axis in axes[1:]]
    arguments = (indices, dy)
    shards = Shards.of(arguments, (at_axes, (*at_axes, *columns)), rules)
    rows, summed = shards.names(axes[0]), _split(shards, at_axes)

    def local(indices: Array, dy: Array) -> tuple[Array]:
        count = table.shape[0]
        if rows:
            count //= math.prod(map(jax.lax.axis_size, rows))
            indices = indices - jax.lax.axis_index(rows) * count
        # [*indices, *rest] -> [n, *rest]
        values = dy.reshape(-1, *dy.shape[indices.ndim :])
        sums = row_sums(values, indices.reshape(-1), count, table.dtype)
        left = set(summed)
        for dimension, axis in enumerate(axes[1:], 1):
            names = _split(shards, [axis])
            if names & left:
                order = tuple(name for name in shards.names(axis) if name in names)
                sums = jax.lax.psum_scatter(
                    sums, order, scatter_dimension=dimension, tiled=True
                )
                left -= names
        return (jax.lax.psum(sums, tuple(sorted(left))) if left else sums,)

    (sums,) = shards.over(local, [axes])(*shards.place(arguments))
    return sums


def _split(shards: Shards, axes: Sequence[str | None]) -> set[str]:
    """The mesh axes of more than one device that split these logical axes."""
    sizes = shards.mesh.shape
    return {name for axis in axes for name in shards.names(axis) if sizes[name] > 1}
