"""The shapes of a call of the Hopper kernel of paged attention, and how it is cut.

Axis letters: B rows, R new tokens, K key/value heads, H head dim, P pages, G tokens of
a page, W pages of a row.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_kernels.mosaic.copies import CHUNK
from pallas_kernels.paged_attention.config import BLOCK
from pallas_kernels.paged_attention.inputs import Scores


ROWS = 64
"""Queries of a key/value head, of its group and of all new tokens, at most."""

WARPS = 4
"""Of a warpgroup; each adds splits of queries of its own."""


@dataclasses.dataclass(frozen=True)
class Cut:
    """How rows are cut into splits."""

    split: int
    """Tokens of a split; the last of a row may have up to half as many more or less."""
    queries: int
    """New tokens of a row, at most."""
    capacity: int
    """Tokens of a row, at most."""
    window: int | None
    """Tokens that a query attends to."""

    @property
    def most_splits(self) -> int:
        """Splits of a row, at most."""
        return max(1, (self.capacity + self.split // 2 - 1) // self.split)

    def splits(self, length: Any, num_new: Any, ops: Any = jnp) -> tuple[Any, Any, Any]:
        """The first split of a row, their number, and the tokens after the step.

        A row has one at least, so that its zeros are written too. Its tokens are
        rounded to whole splits: a split of a few tokens would cost as much as any.
        """
        divide = lax.div if ops is jnp else ops.floor_divide
        zero, split = ops.int32(0), ops.int32(self.split)
        length = ops.maximum(length, zero)
        num_new = ops.clip(num_new, zero, ops.int32(self.queries))
        total = ops.minimum(length + num_new, ops.int32(self.capacity))
        total = ops.where(num_new > 0, total, zero)
        past = divide(total + ops.int32(self.split // 2 - 1), split)
        past, first = ops.maximum(past, ops.int32(1)), zero
        if self.window is not None:
            seen = ops.maximum(length - ops.int32(self.window - 1), zero)
            first = ops.minimum(divide(seen, split), past - ops.int32(1))
        return first, past - first, total


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """The shapes of a call, and how it is cut."""

    rows: int
    """B."""
    queries: int
    """R."""
    group: int
    """Query heads of a key/value head."""
    kv_heads: int
    """K."""
    head_dim: int
    """H."""
    page: int
    """G."""
    width: int
    """W."""
    num_pages: int
    """P."""
    dtype: jnp.dtype
    """Of queries and outputs."""
    page_dtype: jnp.dtype
    """Of pages: the same, or fp8, which is widened for the matmuls."""
    split: int
    teams: int
    slots: int

    @property
    def narrow(self) -> bool:
        """Whether pages are fp8, with scales."""
        return self.page_dtype != self.dtype

    @property
    def product_dtype(self) -> jnp.dtype:
        """Of operands of matmuls. An instruction makes two numbers of fp16 from two in
        fp8; bfloat16 takes four more.
        """
        return jnp.dtype(jnp.float16) if self.narrow else self.dtype

    @property
    def tile_rows(self) -> int:
        """Queries of a key/value head."""
        return self.group * self.queries

    @property
    def padded_rows(self) -> int:
        """The same, for `WARPS` that add splits."""
        return -(-self.tile_rows // WARPS) * WARPS

    @property
    def query_rows(self) -> int:
        """The same, for matmuls."""
        return -(-self.tile_rows // 8) * 8

    @property
    def chunks(self) -> int:
        """Chunks of 64 columns."""
        return self.head_dim // CHUNK

    @property
    def pieces(self) -> int:
        """Copies that fill a slot."""
        return BLOCK // min(self.page, BLOCK)

    @property
    def split_pages(self) -> int:
        """Pages that a split touches, at most: the last of a row may be longer."""
        return 2 if self.page > self.split else -(-3 * self.split // (2 * self.page))

    def cut(self, scores: Scores) -> Cut:
        """How rows are cut into splits."""
        capacity = self.width * self.page
        return Cut(self.split, self.queries, capacity, scores.window)
