"""The arrays of a call of paged attention, and what is static.

Axes: B sequences, R new tokens each, N query heads, K key/value heads, H head dim, L
layers, P pages, G tokens of a page, W pages of a row's table.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jaxtyping import Array, Float, Int


FP8 = jnp.dtype(jnp.float8_e4m3fn)
"""The type of pages that have scales."""


class Inputs(NamedTuple):
    """The arrays of a call, checked."""

    q: Float[Array, "B R N H"]
    kv: Float[Array, "B R 2 K H"]
    pages: Float[Array, "L P 2 K G H"]
    layer: Int[Array, ""]
    table: Int[Array, "B W"]
    lengths: Int[Array, " B"]
    """Tokens in the cache before the step."""
    num_new: Int[Array, " B"]
    """Real ones among the R new tokens."""
    kv_scales: Float[Array, "L P 2 K"] | None
    """Scales of fp8 pages."""

    @property
    def capacity(self) -> int:
        """Tokens that the table of a row has room for."""
        return self.table.shape[1] * self.pages.shape[4]

    def positions(self) -> Int[Array, "B R"]:
        """The position of each new token."""
        steps = jnp.arange(self.q.shape[1], dtype=jnp.int32)
        return self.lengths[:, None] + steps

    def totals(self) -> Int[Array, " B"]:
        """Tokens of each row after the step; none where nothing is new."""
        total = jnp.minimum(self.lengths + self.num_new, self.capacity)
        return jnp.where(self.num_new > 0, total, 0)


def one_batch(x: Inputs) -> Inputs:
    """The arrays, over which `jax.vmap` does not map: kernels have one batch of rows.

    Raises:
        NotImplementedError: it does.
    """
    return Inputs(*_one_batch(*x))


@custom_vmap
def _one_batch(*arrays: Any) -> Any:
    return arrays


@_one_batch.def_vmap
def _refuse_batch(*_: Any) -> Any:
    raise NotImplementedError(
        "paged_attention has a batch of rows and its kernels no other axis; put all"
        " rows into one call, or use implementation='xla'"
    )


def as_stored(
    kv: Float[Array, "*T 2 K H"],
    dtype: jnp.dtype,
    scales: Float[Array, "*T 2 K"] | None,
) -> Float[Array, "*T 2 K H"]:
    """Keys and values as pages of `dtype` hold them.

    Those of fp8 are divided by their `scales` and clipped to the largest finite number.
    """
    if scales is not None:
        limit = float(jnp.finfo(dtype).max)
        kv = jnp.clip(kv.astype(jnp.float32) / scales[..., None], -limit, limit)
    return kv.astype(dtype)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Scores:
    """The score function, which maps ``q . k`` to a score, and the mask."""

    scale: float
    """Factor of the product."""
    softcap: float | None = None
    """Bound on the magnitude."""
    window: int | None = None
    """The last tokens that a query attends to, itself included."""
