"""Scores that depend on how far a key lies from its query: disentangled attention.

A relative-position bias reads, for query ``i`` and key ``j``, one entry of a row that
belongs to the query and one of a row that belongs to the key. Which entry is a function
of ``i - j`` alone, so in a tile of scores the entries lie on diagonals: a tile of R
queries and C keys has ``R + C - 1`` distances, consecutive ones, and because the entry
never falls with the distance it needs one short contiguous range of each row (at most
191 entries for 64 x 128, fewer where the buckets widen). A kernel therefore

1. finds the first entry of the tile from its smallest distance in
   `RelativeBuckets.table`, which is small enough for shared memory,
2. copies that range of the tile's query and key terms, one box of at most
   ``[R, R + C - 1]`` and one of ``[C, R + C - 1]``, beside q and k, and
3. adds ``query_terms[r, e] + key_terms[c, e]`` with ``e`` the entry of the distance of
   r and c, minus the first, to each score that it holds in a register.

`tile_bias` and `tile_gradient` say the same in plain JAX: widen a row from entries to
distances, then shift row r by r (`skew`). Nothing of size [T, S] exists.

Axes: T packed queries, S packed keys, N query heads, P entries of a row of terms, R and
C queries and keys of a tile, W = R + C - 1 distances of a tile.
"""

import dataclasses
import functools
import typing

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


@dataclasses.dataclass(frozen=True, kw_only=True)
class RelativeBuckets:
    """The map from distances to ``2 span`` entries, as DeBERTa-v2 and v3 define it.

    For distance ``d = i - j`` of query i and key j::

        entry(d)  = clip(bucket(d) + span, 0, 2 span - 1)
        bucket(d) = d                                                 without buckets
        bucket(d) = d                                                 if |d| <= mid
        bucket(d) = sign(d) (mid + ceil((mid - 1) log(|d| / mid)
                                        / log((max_distance - 1) / mid)))  otherwise

    with ``mid = span // 2``: near distances have entries of their own, far ones share
    them on a logarithmic scale up to `max_distance`, and all beyond take the last.

    Example:
        >>> buckets = RelativeBuckets(span=4, max_distance=16)
        >>> buckets.entry(np.array([-99, -3, -2, 0, 1, 2, 3, 15, 16, 99]))
        array([0, 1, 2, 4, 5, 6, 7, 7, 7, 7], dtype=int32)

    References:
        DeBERTa (arXiv 2006.03654), section 3.1; log buckets as in DeBERTa-v2's code and
        in transformers, in fp32 as there, so that no distance changes its entry.
    """

    span: int
    """Half the number of entries: transformers' ``position_buckets``, or
    ``max_relative_positions`` without buckets."""
    max_distance: int | None = None
    """End of the logarithmic scale: transformers' ``max_relative_positions``. None: no
    buckets."""

    def __post_init__(self) -> None:
        if not isinstance(self.span, int) or self.span < 1:
            raise ValueError(f"span must be an integer of at least 1, got {self.span}")
        if self.max_distance is None:
            return
        if self.span < 4:
            raise ValueError(
                f"span must be at least 4 with logarithmic buckets, got {self.span}; "
                "max_distance=None gives each distance an entry"
            )
        if self.max_distance < self.span // 2 + 2:
            raise ValueError(
                f"max_distance must be at least span // 2 + 2 = {self.span // 2 + 2}, "
                f"got {self.max_distance}; max_distance=None gives each distance an "
                "entry"
            )

    @property
    def num_entries(self) -> int:
        """P, the entries of a row of terms."""
        return 2 * self.span

    def table(self) -> Int[np.ndarray, " distances"]:
        """Entries of the distances ``-(n // 2), ..., n // 2``, n the table's size.

        Distances beyond either end take the entry of that end.
        """
        return _table(self)

    def entry(self, distance: Int[Array | np.ndarray, "*shape"]) -> typing.Any:
        """The entry of each distance ``i - j``, int32, between 0 and ``P - 1``.

        Args:
            distance: any shape; numpy in, numpy out.
        """
        table = self.table()
        limit = len(table) // 2
        if isinstance(distance, np.ndarray):
            return table[np.clip(distance, -limit, limit) + limit]
        return jnp.asarray(table)[jnp.clip(distance, -limit, limit) + limit]


# As a pytree it also carries axes, shardings, shapes or None in the place of arrays, so
# its fields are not checked at run time.
@typing.no_type_check
@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("query_terms", "key_terms"),
    meta_fields=("buckets",),
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class RelativeBias:
    """The bias of a score in `varlen_attention`, by the distance of query and key.

    The logit of query i and key j, ``d = i - j`` apart, gains::

        query_terms[i, n, entry(d)] + key_terms[j, n, entry(d)]

    In disentangled attention the former is content to position, ``scale * q . pos_k``,
    the latter position to content, ``scale * k . pos_q``, both for all P positions:
    matmuls of [T, H] and [H, P], never [T, S]. As a pytree it has its two arrays as
    leaves, so it can be differentiated and mapped over like q and k.

    Example:
        >>> buckets = RelativeBuckets(span=2)
        >>> terms = jnp.zeros((3, 1, 4)).at[:, :, 1].set(1e9)  # one step to the right
        >>> bias = RelativeBias(query_terms=terms, buckets=buckets)
        >>> from pallas_kernels.varlen_attention import varlen_attention
        >>> q, v = jnp.ones((3, 1, 8)), jnp.arange(3.0)[:, None, None]
        >>> out = varlen_attention(q, q, v, np.array([0, 3]), relative_bias=bias)
        >>> out[:2, 0, 0]
        Array([1., 2.], dtype=float32)
    """

    query_terms: Float[Array, "*R T N P"] | None = None
    """[T, N, P] or [R, T, N, P], rows of the queries; any floating type."""
    key_terms: Float[Array, "*R S N P"] | None = None
    """[S, N, P] or [R, S, N, P], rows of the keys, by query head also where
    those share key heads."""
    buckets: RelativeBuckets
    """Entry of a row for each distance."""


def check_relative_bias(
    bias: RelativeBias,
    num_queries: tuple[int, ...],
    num_keys: tuple[int, ...],
    num_heads: int,
) -> RelativeBias:
    """Check the terms against the numbers of tokens and heads; return them as arrays.

    Args:
        bias: what to check.
        num_queries: (T,), or (R, T) of a batch.
        num_keys: (S,), or (R, S).
        num_heads: N.

    Raises:
        TypeError: `bias` is no RelativeBias, its buckets are no RelativeBuckets, or its
            terms are not floating.
        ValueError: their shapes do not fit, or there are none.
    """
    if not isinstance(bias, RelativeBias):
        raise TypeError(f"relative_bias must be a RelativeBias, got {type(bias)}")
    if not isinstance(bias.buckets, RelativeBuckets):
        raise TypeError(
            "relative_bias.buckets must be RelativeBuckets, got "
            f"{type(bias.buckets).__name__}; they say which entry a distance takes"
        )
    terms = {}
    for name, rows in (("query_terms", num_queries), ("key_terms", num_keys)):
        x = getattr(bias, name)
        if x is None:
            continue
        x = terms[name] = jnp.asarray(x)
        expected = (*rows, num_heads, bias.buckets.num_entries)
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"relative_bias.{name} must be floating, got {x.dtype}")
        if x.shape != expected:
            raise ValueError(
                f"relative_bias.{name} must have shape {expected} (rows, query heads, "
                f"2 * span), got {x.shape}; they have the leading axis of q, if any"
            )
    if not terms:
        raise ValueError(
            "relative_bias has neither query_terms nor key_terms; pass None for no bias"
        )
    return dataclasses.replace(bias, **terms)


def position_terms(
    x: Float[Array, "*tokens N H"], positions: Float[Array, "P N H"], scale: float
) -> Float[Array, "*tokens N P"]:
    """Terms of disentangled attention: ``scale * x[n] . positions[p, n]``.

    Sums are fp32, and scaled before they are rounded to the type of x, as scores are.

    Args:
        x: Queries or keys, any leading axes.
        positions: Keys or queries of the P positions.
        scale: Of the scores.
    """
    return _terms(x, positions, scale)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _terms(x: Array, positions: Array, scale: float) -> Array:
    letters = "...nh,pnh->...np"
    if scale == 1:  # a matmul rounds its fp32 sums itself
        return jnp.einsum(letters, x, positions)
    return (scale * _product(letters, x, positions)).astype(x.dtype)


def _terms_forward(
    x: Array, positions: Array, scale: float
) -> tuple[Array, tuple[Array, Array]]:
    return _terms(x, positions, scale), (x, positions)


def _terms_backward(
    scale: float, saved: tuple[Array, Array], gradient: Array
) -> tuple[Array, Array]:
    # JAX's own transpose would scale in fp32, store that, and multiply in fp32.
    x, positions = saved
    dx = scale * _product("...np,pnh->...nh", gradient, positions)
    dpositions = scale * _product("...np,...nh->pnh", gradient, x)
    return dx.astype(x.dtype), dpositions.astype(positions.dtype)


_terms.defvjp(_terms_forward, _terms_backward)


def _product(letters: str, a: Array, b: Array) -> Array:
    """A matmul of operands of one type, with sums in fp32."""
    return jnp.einsum(letters, a, b, preferred_element_type=jnp.float32)


def tile_bias(
    buckets: RelativeBuckets,
    query_terms: Float[Array, "*heads R P"] | None,
    key_terms: Float[Array, "*heads C P"] | None,
    first: Int[Array, ""],
    shape: tuple[int, int],
) -> Float[Array, "*heads R C"]:
    """The bias of a tile of scores, in fp32.

    Args:
        buckets: which entry a distance takes.
        query_terms: rows of the queries of the tile.
        key_terms: rows of the keys of the tile.
        first: distance of the first query and the first key of the tile.
        shape: (R, C).
    """
    queries, keys = shape
    entries = _tile_entries(buckets, first, shape)
    bias = None
    if query_terms is not None:
        # Query r at distances first + r, ..., first + r - (C - 1): columns r to
        # r + C - 1 of all, the last key first.
        wide = jnp.take(query_terms, entries, axis=-1).astype(jnp.float32)
        bias = _skew(wide, keys)[..., ::-1]
    if key_terms is not None:
        # Key c at distances first - c, ..., first - c + R - 1.
        wide = jnp.take(key_terms[..., ::-1, :], entries, axis=-1).astype(jnp.float32)
        term = _skew(wide, queries)[..., ::-1, :].swapaxes(-1, -2)
        bias = term if bias is None else bias + term
    assert bias is not None  # checked by `check_relative_bias`
    return bias


def tile_gradient(
    buckets: RelativeBuckets,
    gradient: Float[Array, "*heads R C"],
    first: Int[Array, ""],
    present: tuple[bool, bool],
) -> tuple[Float[Array, "*heads R P"] | None, Float[Array, "*heads C P"] | None]:
    """The transpose of `tile_bias`: gradients of the two terms, in fp32.

    Args:
        buckets: which entry a distance takes.
        gradient: of the logits of the tile.
        first: as for `tile_bias`.
        present: whether there are query terms, and key terms.
    """
    shape = gradient.shape[-2], gradient.shape[-1]
    entries = _tile_entries(buckets, first, shape)
    # Entries never fall with the distance, so each is an interval of distances, and its
    # sum a difference of prefix sums. A scattered sum would vary on a GPU, and a
    # matmul with a matrix of zeros and ones costs four times as much.
    bounds = jnp.arange(buckets.num_entries + 1, dtype=jnp.int32)
    starts = jnp.sum(entries[None] < bounds[:, None], axis=1, dtype=jnp.int32)

    def narrow(wide: Array) -> Array:
        sums = jnp.cumsum(wide.astype(jnp.float32), axis=-1)
        sums = jnp.pad(sums, [(0, 0)] * (sums.ndim - 1) + [(1, 0)])
        return jnp.diff(jnp.take(sums, starts, axis=-1), axis=-1)

    by_query, by_key = present
    dquery = dkey = None
    if by_query:
        dquery = narrow(_unskew(gradient[..., ::-1]))
    if by_key:
        by_rows = gradient.swapaxes(-1, -2)[..., ::-1, :]
        dkey = narrow(_unskew(by_rows))[..., ::-1, :]
    return dquery, dkey


def _tile_entries(
    buckets: RelativeBuckets, first: Int[Array, ""], shape: tuple[int, int]
) -> Int[Array, " W"]:
    """Entries of all distances of a tile, the smallest distance first."""
    queries, keys = shape
    steps = jnp.arange(queries + keys - 1, dtype=jnp.int32) - (keys - 1)
    return buckets.entry(first + steps)


def _skew(x: Float[Array, "*lead R W"], columns: int) -> Float[Array, "*lead R C"]:
    """``out[r, c] = x[r, r + c]`` for ``c < C = W - R + 1``, by reshapes alone.

    Rows that are read one longer than they are shift by one from row to row.
    """
    *lead, rows, width = x.shape
    flat = x.reshape(*lead, rows * width)
    flat = jnp.pad(flat, [(0, 0)] * len(lead) + [(0, rows)])
    return flat.reshape(*lead, rows, width + 1)[..., :columns]


def _unskew(x: Float[Array, "*lead R C"]) -> Float[Array, "*lead R W"]:
    """The transpose of `_skew`."""
    *lead, rows, columns = x.shape
    width = rows + columns - 1
    x = jnp.pad(x, [(0, 0)] * (len(lead) + 1) + [(0, width + 1 - columns)])
    flat = x.reshape(*lead, rows * (width + 1))[..., : rows * width]
    return flat.reshape(*lead, rows, width)


@functools.cache
def _table(buckets: RelativeBuckets) -> Int[np.ndarray, " distances"]:
    span, far = buckets.span, buckets.max_distance
    limit = span
    if far is not None:
        # From the distance whose bucket reaches the span on, nothing changes.
        mid = span // 2
        steps = (span - mid) / (mid - 1)
        limit = int(mid * ((far - 1) / mid) ** steps) + 2
    distance = np.arange(limit + 1)
    bucket = distance
    if far is not None:
        one = np.float32(1)
        ratio = np.log(np.maximum(distance / mid, one).astype(np.float32))
        ratio = ratio / np.log(np.float32((far - 1) / mid)) * np.float32(mid - 1)
        bucket = np.where(distance <= mid, distance, np.ceil(ratio) + mid)
    signed = np.concatenate([-bucket[:0:-1], bucket])
    table = np.clip(signed + span, 0, 2 * span - 1).astype(np.int32)
    table.setflags(write=False)
    return table
