"""Context parallelism: sequences whose tokens are split over devices.

Inside a region that is Manual over the mesh axes of the rule `context`, each of c
devices has two of the 2 c pieces of a row: device r has pieces r and 2 c - 1 - r. A
causal query attends to what precedes it, so with one piece from the front and one from
the back all devices have the same work. In each layer a device all-gathers the keys and
values of the row; everything else is local to its tokens.

Legend: B batch, T tokens of a (packed) row, N query heads, K key/value heads, H head
dim.

References:
    Llama 3, arXiv 2407.21783, section 3.3.2, gathers keys and values in the same way.
"""

import dataclasses
import typing

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

from jaxscale.nn.attention import AttentionConfig
from jaxscale.nn.packing import (
    PackedBatch,
    check_cu_seqlens_of_rows,
    cu_seqlens_of_rows,
)
from jaxscale.nn.self_attention import Packed, token_positions
from jaxscale.nn.state import register_state
from jaxscale.sharding.manual import manual_names
from jaxscale.sharding.rules import REPLICATED, AxisRules
from pallas_kernels.varlen_attention import varlen_attention
from pallas_kernels.varlen_attention.api import LSE_NAME, OUT_NAME


packed_attention_saveable = jax.checkpoint_policies.save_only_these_names(
    OUT_NAME, LSE_NAME
)
"""Checkpoint policy that saves the residuals of packed attention."""


def own_tokens(
    x: Shaped[Array, "B T ..."], names: tuple[str, ...]
) -> Shaped[Array, "B part ..."]:
    """This device's pieces of each row, [B, T / c, ...].

    Raises:
        ValueError: rows are not divisible into pieces.
    """
    count = 2 * jax.lax.axis_size(names)
    batch, length, *rest = x.shape
    if length % count:
        fitting = [
            n for n in (length // count * count, -(-length // count) * count) if n
        ]
        raise ValueError(
            f"rows of {length} tokens are not divisible by {count}: each device of the "
            f"mesh axes {names} has two pieces of a row; use rows of "
            f"{' or '.join(map(str, fitting))} tokens, or fewer devices"
        )
    pieces = x.reshape(batch, count, length // count, *rest)
    rank = jax.lax.axis_index(names)
    own = jnp.take(pieces, jnp.stack([rank, count - 1 - rank]), axis=1)
    return own.reshape(batch, 2 * length // count, *rest)


def all_tokens(
    x: Shaped[Array, "B part ..."], names: tuple[str, ...]
) -> Shaped[Array, "B T ..."]:
    """The inverse of `own_tokens`: each device gets the whole rows.

    Gradients are reduce-scattered: each device keeps the sum for its tokens.
    """
    batch, part, *rest = x.shape
    pieces = x.reshape(batch, 2, part // 2, *rest)
    pieces = jax.lax.all_gather(pieces, names, axis=1, tiled=True)  # [B, 2 c, ...]
    tails = jax.lax.rev(pieces[:, 1::2], (1,))
    pieces = jnp.concatenate([pieces[:, ::2], tails], axis=1)
    return pieces.reshape(batch, -1, *rest)


def own_part[Batch](batch: Batch, rules: AxisRules) -> Batch:
    """`batch` with this device's tokens of each row, if `rules` split rows here.

    Targets are aligned with their tokens, so no device needs those of another. The
    boundaries of sequences remain those of whole rows.

    Raises:
        ValueError: rows are not divisible into pieces, or `batch` is no `PackedBatch`.
    """
    if not (names := manual_names(rules.context)):
        return batch
    if not isinstance(batch, PackedBatch):
        raise ValueError(
            f"batch is a {type(batch).__name__}, and the mesh axes {names} share the "
            "tokens of a PackedBatch alone; set the mesh axis context to 1"
        )
    tokens, targets, mask = (
        own_tokens(jnp.asarray(x), names)
        for x in (batch.tokens, batch.targets, batch.loss_mask)
    )
    return dataclasses.replace(batch, tokens=tokens, targets=targets, loss_mask=mask)


@typing.no_type_check
@register_state
@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedPart(Packed):
    """A device's pieces of packed rows, with the sequence boundaries of whole rows."""

    names: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    """The Manual mesh axes that split a row."""

    @typing.override
    def attend(
        self,
        q: Array,
        k: Array,
        v: Array,
        config: AttentionConfig,
        implementation: str | None = None,
    ) -> tuple[Array, typing.Self]:
        if not config.causal:
            raise ValueError(
                f"causal False: the mesh axes {self.names} share rows of causal "
                "attention alone; set the mesh axis context to 1"
            )
        options = {**config.options, "implementation": implementation}
        rank, count = jax.lax.axis_index(self.names), jax.lax.axis_size(self.names)

        def pieces(q: Array, k: Array, v: Array) -> Array:
            k, v = (all_tokens(x, self.names) for x in (k, v))
            out, size = [], q.shape[1] // 2
            for i, piece in enumerate((rank, 2 * count - 1 - rank)):
                own = q[:, i * size : (i + 1) * size]
                bounds = _bounds(self.cu_seqlens, piece * size, size)
                out.append(varlen_attention(own, k, v, *bounds, **options))
            return jnp.concatenate(out, axis=1)

        # The backward pass gathers again: saved by the forward pass, keys and values of
        # whole rows would take as many times the memory as devices share a row. Where
        # the layer is computed again, what that gathers serves for both.
        attend = jax.checkpoint(
            pieces, policy=packed_attention_saveable, prevent_cse=False
        )
        return attend(q, k, v), self

    @typing.override
    def sequence_lengths(self) -> Array:
        positions = all_tokens(self.positions, self.names)
        whole = Packed(positions=positions, cu_seqlens=self.cu_seqlens)
        return own_tokens(whole.sequence_lengths(), self.names)

    @typing.override
    def in_sequence_with(
        self, marked: Bool[Array, "B T"], rules: AxisRules = REPLICATED
    ) -> Bool[Array, "B T"]:
        marked = super().in_sequence_with(all_tokens(marked, self.names), rules)
        return own_tokens(marked, self.names)


def state_of_part(
    shape: tuple[int, ...],
    *,
    cu_seqlens: Int[Array, "B seqs_plus_1"] | None = None,
    positions: Int[Array, "B T"] | None = None,
    rules: AxisRules,
) -> PackedPart:
    """`attention_state` of rows that are split over devices.

    Args:
        shape: (B, tokens of a row that this device has).
        cu_seqlens: Boundaries of packed sequences of whole rows.
        positions: Position of each token of this device in its sequence; counted if
            None.
        rules: The table of the recipe, whose `context` is Manual.
    """
    names = manual_names(rules.context)
    rows = shape[0], shape[1] * jax.lax.axis_size(names)
    if cu_seqlens is None:
        cu_seqlens = cu_seqlens_of_rows(*rows)
    check_cu_seqlens_of_rows(cu_seqlens, rows)
    if positions is None:
        positions = own_tokens(token_positions(rows, cu_seqlens, rules), names)
    return PackedPart(positions=positions, cu_seqlens=cu_seqlens, names=names)


def _bounds(
    cu_seqlens: Int[Array, "B bounds"], low: Int[Array, ""], size: int
) -> tuple[Int[Array, "B bounds_plus_1"], Int[Array, "B bounds_plus_1"]]:
    """The boundaries of a piece of each row, and of the keys that it attends to.

    The piece has the tokens from `low` on. The last query of each sequence attends to
    its last key, so keys end where the piece does. Keys before the piece's first
    sequence form one more sequence, without queries.
    """
    high = low + size
    starts, ends = cu_seqlens[:, :-1], cu_seqlens[:, 1:]
    inside = (ends > low) & (starts < high)
    first = jnp.where(inside, starts, high).min(axis=1, keepdims=True)  # [B, 1]
    first = jnp.where(inside.any(axis=1, keepdims=True), first, 0)
    last = jnp.maximum(jnp.minimum(high, cu_seqlens[:, -1:]), first)
    queries = jnp.clip(cu_seqlens, low, high) - low
    keys = jnp.clip(cu_seqlens, first, last)
    return jnp.pad(queries, [(0, 0), (1, 0)]), jnp.pad(keys, [(0, 0), (1, 0)])
