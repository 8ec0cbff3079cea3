"""The paged KV cache: keys and values of many sequences, in pages (blocks).

A page holds the keys and values of some consecutive tokens of a sequence, for all
layers; the caller's page tables say which pages are a sequence's, and in which order. A
*row* is the slot of one token: ``page * G + offset``.

Pages in fp8 (E4M3) have `scales`, by which their contents are multiplied.

Legend: B sequences, R new tokens of a sequence, T tokens of a packed row, N query
heads, K key/value heads, H head dim, L layers, P pages, G tokens of a page, W pages of
a sequence.
"""

import dataclasses
import typing
from typing import Self

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxscale.nn.attention import AttentionConfig
from jaxscale.nn.self_attention import AttentionState
from jaxscale.nn.state import register_state
from jaxscale.sharding.decode_all_reduce import ReduceWorkspace
from jaxscale.sharding.operations import constrain
from jaxscale.sharding.rules import REPLICATED, AxisRules
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention.inputs import as_stored
from pallas_kernels.varlen_attention import paged_varlen_attention


PAGES_AXES = (None, None, None, "act_kv_heads", None, None)
"""Logical axes of a page pool, [L, P, 2, K, G, H]."""

SCALES_AXES = PAGES_AXES[:4]
"""Logical axes of the scales of fp8 pages, [L, P, 2, K]."""


def empty_pages(
    *,
    num_layers: int,
    num_pages: int,
    page_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: DTypeLike = jnp.float32,
    rules: AxisRules = REPLICATED,
) -> Float[Array, "L P 2 K G H"]:
    """A page pool of zeros, keys before values.

    Args:
        num_layers: Layers with keys and values of their own, L.
        num_pages: Pages of each layer, P.
        page_size: Tokens per page, G.
        num_kv_heads: Key/value heads, K.
        head_dim: Features of a head, H.
        dtype: Type of keys and values.
        rules: Sharding rules; heads are split as ``kv_heads`` of activations.

    Example:
        >>> pages = empty_pages(
        ...     num_layers=2, num_pages=8, page_size=4, num_kv_heads=2, head_dim=16
        ... )
        >>> pages.shape
        (2, 8, 2, 2, 4, 16)
    """
    shape = (num_layers, num_pages, 2, num_kv_heads, page_size, head_dim)
    return constrain(jnp.zeros(shape, dtype), PAGES_AXES, rules)


def append_rows(
    pages: Float[Array, "L P 2 K G H"],
    layer: Int[Array, ""] | int,
    rows: Int[Array, "T"],
    kv: Float[Array, "T 2 K H"],
    scales: Float[Array, "L P 2 K"] | None = None,
) -> Float[Array, "L P 2 K G H"]:
    """`pages` with the keys and values of one layer written at `rows`.

    Rows past the pool are dropped. Values out of the range of fp8 saturate.

    Args:
        pages: The pool.
        layer: Number of the layer.
        rows: Slot of each token in the pool of a layer: page times page size, plus the
            offset within the page.
        kv: Keys and values of the tokens.
        scales: Scales of 8-bit pages.

    Example:
        >>> pages = empty_pages(
        ...     num_layers=1, num_pages=2, page_size=4, num_kv_heads=1, head_dim=2
        ... )
        >>> pages = append_rows(pages, 0, jnp.array([5]), jnp.ones((1, 2, 1, 2)))
        >>> print(pages[0, 1, 0, 0, :2])  # keys
        [[0. 0.]
         [1. 1.]]
    """
    page, offset = jnp.divmod(rows, pages.shape[4])
    if scales is not None:
        scales = scales.at[layer, page].get(mode="fill", fill_value=1.0)
    new = as_stored(kv, pages.dtype, scales)
    return pages.at[layer, page, :, :, offset].set(new, mode="drop")


def clear_tails(
    pages: Float[Array, "L P 2 K G H"],
    table: Int[Array, "B W"],
    ends: Int[Array, "B"],
) -> Float[Array, "L P 2 K G H"]:
    """`pages` without values past the end of each sequence in its last page.

    A page that a sequence gets may hold what another left there, even NaN, which
    attention multiplies by zero.

    Args:
        pages: The pool.
        table: The page table of each sequence.
        ends: Tokens of each sequence, those of this step included.
    """
    size = pages.shape[4]
    last = jnp.maximum(ends - 1, 0)
    page = jnp.take_along_axis(table, last[:, None] // size, axis=1)  # [B, 1]
    offset = jnp.arange(size, dtype=jnp.int32)
    unused = (offset > last[:, None] % size) & (ends > 0)[:, None]  # [B, G]
    page = jnp.where(unused, page, pages.shape[1])
    return pages.at[:, page, 1, :, offset].set(0, mode="drop")


@typing.no_type_check
@dataclasses.dataclass(frozen=True, kw_only=True)
class _Pages(AttentionState):
    """Base class of the states with pages."""

    pages: Float[Array, "L P 2 K G H"] = dataclasses.field(
        metadata={"axes": PAGES_AXES, "carried": True}
    )
    """The page pool."""
    scales: Float[Array, "L P 2 K"] | None = dataclasses.field(
        default=None, metadata={"axes": SCALES_AXES}
    )
    """Scales of fp8 pages."""
    layer: Int[Array, ""] | int = dataclasses.field(default=0, metadata={"axes": ()})
    """Index of the current layer in the pool."""

    @typing.override
    def at(self, layer: Array | int, variant: AttentionConfig | None) -> Self:
        layer = jnp.asarray(layer, jnp.int32)
        return dataclasses.replace(self, variant=variant, layer=layer)

    @typing.override
    def sequence_lengths(self) -> Array:
        # Keys stay as they were rotated, so the frequencies must never change: those
        # of short sequences, beyond which `DecoderConfig.max_cache_len` ends them.
        return jnp.ones_like(self.positions)

    def _check(self, config: AttentionConfig) -> None:
        if not config.causal:
            raise ValueError("causal False: only causal attention can be continued")


@typing.no_type_check
@register_state
@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedRows(_Pages):
    """Decode: new tokens of several sequences, one row each, after those in their
    pages.

    Positions continue after the tokens in the pages. The new tokens are appended, and
    then attend to themselves and what precedes them. The model may also take each of
    them as a row of its own, [B R, 1], with `positions` of this shape.
    """

    table: Int[Array, "B W"] = dataclasses.field(metadata={"axes": (None, None)})
    """The page table: the pages of each sequence, in the order of their tokens."""
    lengths: Int[Array, "B"] = dataclasses.field(metadata={"axes": (None,)})
    """Tokens of each sequence that are in its pages already."""
    num_new: Int[Array, "B"] = dataclasses.field(metadata={"axes": (None,)})
    """New tokens of each sequence, R at most; the rest is padding."""

    @classmethod
    def of(
        cls,
        pages: Float[Array, "L P 2 K G H"],
        table: Int[Array, "B W"],
        lengths: Int[Array, "B"],
        num_new: Int[Array, "B"],
        num_tokens: int = 1,
        scales: Float[Array, "L P 2 K"] | None = None,
        workspace: ReduceWorkspace | None = None,
    ) -> Self:
        """The state for `num_tokens` new tokens per sequence, R."""
        positions = lengths[:, None] + jnp.arange(num_tokens, dtype=lengths.dtype)
        return cls(
            positions=positions,
            pages=pages,
            scales=scales,
            layer=jnp.zeros((), jnp.int32),
            table=table,
            lengths=lengths,
            num_new=num_new,
            workspace=workspace,
        )

    @typing.override
    def attend(
        self,
        q: Array,
        k: Array,
        v: Array,
        config: AttentionConfig,
        implementation: str | None = None,
    ) -> tuple[Array, Self]:
        del implementation  # names attention without pages
        return self.attend_stacked(q, jnp.stack([k, v], axis=2), config)

    def attend_stacked(
        self,
        q: Float[Array, "B T N H"],
        kv: Float[Array, "B T 2 K H"],
        config: AttentionConfig,
    ) -> tuple[Float[Array, "B T N H"], Self]:
        """`attend` with keys and values in one array."""
        self._check(config)
        rows = len(self.lengths)
        out, pages = paged_attention(
            q.reshape(rows, -1, *q.shape[2:]),
            kv.reshape(rows, -1, *kv.shape[2:]),  # [B, R, 2, K, H]
            self.pages,
            self.layer,
            self.table,
            self.lengths,
            num_new=self.num_new,
            kv_scales=self.scales,
            window=config.window,
            scale=config.logits_scale,
            softcap=config.softcap,
        )
        return out.reshape(q.shape), dataclasses.replace(self, pages=pages)


@typing.no_type_check
@register_state
@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedChunks(_Pages):
    """Prefill: chunks of several prompts, packed into one row, [1, T].

    Each chunk attends to itself and to the tokens of its sequence that are in pages
    already, all read from the pages: chunking a prompt does not change the result. See
    `clear_tails` for what the last page of a chunk must not hold.
    """

    rows: Int[Array, "T"] = dataclasses.field(metadata={"axes": (None,)})
    """Rows to write the keys and values of each token to; past the pool for padding."""
    cu_q: Int[Array, "bounds"] = dataclasses.field(metadata={"axes": (None,)})
    """Boundaries of the chunks in T."""
    prompt_table: Int[Array, "B W"] = dataclasses.field(metadata={"axes": (None, None)})
    """The page table of the sequences of the chunks."""
    ends: Int[Array, "B"] = dataclasses.field(metadata={"axes": (None,)})
    """Tokens of each of these sequences up to the last of its chunk."""
    max_keys: int | None = dataclasses.field(default=None, metadata={"static": True})
    """Most of them together, see `paged_varlen_attention`."""

    @typing.override
    def attend(
        self,
        q: Array,
        k: Array,
        v: Array,
        config: AttentionConfig,
        implementation: str | None = None,
    ) -> tuple[Array, Self]:
        self._check(config)
        new = jnp.stack([k[0], v[0]], axis=1)  # [T, 2, K, H]
        pages = append_rows(self.pages, self.layer, self.rows, new, self.scales)
        out = paged_varlen_attention(
            q[0],
            pages,
            self.layer,
            self.prompt_table,
            self.cu_q,
            self.ends,
            kv_scales=self.scales,
            window=config.window,
            scale=config.logits_scale,
            softcap=config.softcap,
            max_keys=self.max_keys,
            # Other names are of attention without pages.
            implementation="xla" if implementation == "xla" else None,
        )
        return out[None], dataclasses.replace(self, pages=pages)


@typing.no_type_check
@register_state
@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedMixed(PagedChunks):
    """A mixed batch: chunks of prompts, then one new token of each of several sequences
    that decode, packed into one row, [1, T + B].

    The layers outside attention take all tokens together, so their weights are read
    once. Within a layer, the keys and values of the chunks are written first.
    """

    table: Int[Array, "B W"] = dataclasses.field(metadata={"axes": (None, None)})
    """As in `PagedRows`."""
    lengths: Int[Array, "B"] = dataclasses.field(metadata={"axes": (None,)})
    """As in `PagedRows`."""
    num_new: Int[Array, "B"] = dataclasses.field(metadata={"axes": (None,)})
    """1 for sequences that decode, 0 for padding."""

    @typing.override
    def attend(
        self,
        q: Array,
        k: Array,
        v: Array,
        config: AttentionConfig,
        implementation: str | None = None,
    ) -> tuple[Array, Self]:
        split = len(self.rows)
        of_chunks, state = super().attend(
            q[:, :split], k[:, :split], v[:, :split], config, implementation
        )
        rows = PagedRows(
            positions=self.lengths[:, None],
            pages=state.pages,
            scales=self.scales,
            layer=self.layer,
            table=self.table,
            lengths=self.lengths,
            num_new=self.num_new,
        )
        q, k, v = (x[0, split:, None] for x in (q, k, v))  # [B, 1, heads, H]
        of_rows, rows = rows.attend(q, k, v, config, implementation)
        out = jnp.concatenate([of_chunks, of_rows[None, :, 0]], axis=1)
        return out, dataclasses.replace(self, pages=rows.pages)
