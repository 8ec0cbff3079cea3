"""Packed batches: rows of tokens in which sequences lie end to end, without padding.

Shape legend: B batch, T tokens of a row, S sequences in a row.
"""

import dataclasses
import typing

import jax
from jaxtyping import Array, Bool, Int32


# The leaves of a pytree are not always arrays (shardings, None, abstract shapes), so
# the run-time shape checks of the tests must leave the constructor alone.
@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """Rows of packed tokens with their targets, as training reads them.

    Example:
        >>> import jax.numpy as jnp
        >>> batch = PackedBatch(
        ...     tokens=jnp.array([[5, 6, 7, 8, 9, 0]]),
        ...     targets=jnp.array([[6, 7, 0, 9, 0, 0]]),
        ...     loss_mask=jnp.array([[True, True, False, True, False, False]]),
        ...     cu_seqlens=jnp.array([[0, 3, 5, 5]]),
        ... )
        >>> int(batch.loss_mask.sum())
        3
    """

    tokens: Int32[Array, "B T"]
    """Token ids; zeros past the last sequence of a row."""
    targets: Int32[Array, "B T"]
    """The token to predict at each place."""
    loss_mask: Bool[Array, "B T"]
    """Where there is a target; False at the end of a document and on padding."""
    cu_seqlens: Int32[Array, "B S+1"]
    """Where each sequence of a row begins; the last value, the end of the last
    sequence, is repeated when a row holds fewer than S."""
