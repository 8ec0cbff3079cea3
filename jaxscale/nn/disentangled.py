"""Disentangled attention: content and relative positions attend to each other.

Legend: B batch, T tokens of a (packed) row, N heads, H head dim, D model, P rows of the
table of relative positions.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, cast

from flax import nnx
from jaxtyping import Array, Float

from jaxscale.nn.attention import AttentionConfig
from jaxscale.nn.linear import Linear
from jaxscale.nn.packing import cu_seqlens_of_rows
from jaxscale.nn.self_attention import (
    KV_AXES,
    Q_AXES,
    Attention,
    AttentionState,
    Packed,
    Whole,
)
from jaxscale.nn.tile_sparse_linear import TileSparseLinear
from jaxscale.sharding.operations import constrain, contract, reshape
from jaxscale.sharding.shards import per_shard
from pallas_kernels.dispatch import Unsupported
from pallas_kernels.varlen_attention import (
    RelativeBias,
    RelativeBuckets,
    position_terms,
    varlen_attention,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RelativePositions:
    """Dependence of the scores of an attention layer on relative positions.

    Example:
        >>> positions = RelativePositions(span=256, max_distance=512)  # DeBERTa-v3
        >>> positions.num_entries, positions.num_terms
        (512, 2)
    """

    span: int
    """Half the rows of the table of relative positions."""
    max_distance: int | None = None
    """End of the logarithmic buckets; None gives each distance a row."""
    content_to_position: bool = True
    """Queries attend to the positions of keys (c2p)."""
    position_to_content: bool = True
    """The positions of queries attend to keys (p2c)."""
    share_projections: bool = True
    """Positions use the query and key projections of the content."""

    def __post_init__(self) -> None:
        self.buckets  # noqa: B018  checks span and max_distance
        if not self.num_terms:
            raise ValueError(
                "content_to_position False and position_to_content False leave nothing "
                "of relative positions; set one of them"
            )

    @property
    def buckets(self) -> RelativeBuckets:
        """Return the mapping from distances to rows of the table."""
        return RelativeBuckets(span=self.span, max_distance=self.max_distance)

    @property
    def num_entries(self) -> int:
        """P, the rows of the table."""
        return self.buckets.num_entries

    @property
    def num_terms(self) -> int:
        """Number of relative terms: 1 or 2."""
        return self.content_to_position + self.position_to_content


@dataclasses.dataclass(frozen=True, kw_only=True)
class DisentangledConfig(AttentionConfig):
    """Shape and variant of a disentangled attention layer.

    Example:
        >>> DisentangledConfig(
        ...     num_heads=2, num_kv_heads=2, head_dim=8, causal=False,
        ...     relative=RelativePositions(span=4),
        ... ).scale * 24**0.5
        1.0
    """

    relative: RelativePositions
    """The terms that relative positions add to the scores."""

    def __post_init__(self) -> None:
        super().__post_init__()
        expected = {
            "num_kv_heads": self.num_heads,
            "rope": None,
            "window": None,
            "softcap": None,
            "causal": False,
        }
        for name, value in expected.items():
            if getattr(self, name) != value:
                raise ValueError(
                    f"{name} {getattr(self, name)} of disentangled attention must be "
                    f"{value}"
                )

    @property
    def scale(self) -> float:
        """Factor of each of the two or three terms of a score."""
        return 1 / math.sqrt(self.head_dim * (1 + self.relative.num_terms))


class DisentangledAttention(Attention):
    """Self-attention of DeBERTa.

    With ``d`` the row of the table of relative positions for the distance of query i
    and key j, and ``pos_k``, ``pos_q`` the projected table::

        s[i, j] = scale * (q[i] . k[j] + q[i] . pos_k[d] + k[j] . pos_q[d])

    The last two terms are computed for all P rows, [T, N, P], and indexed by distance
    inside the attention, so nothing of size [T, T] is stored.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> config = DisentangledConfig(
        ...     num_heads=4, num_kv_heads=4, head_dim=8, use_bias=True, causal=False,
        ...     relative=RelativePositions(span=4, max_distance=16),
        ... )
        >>> layer = DisentangledAttention(32, config, rngs=nnx.Rngs(0))
        >>> table = jnp.ones((8, 32))
        >>> from jaxscale.nn import attention_state
        >>> state = attention_state((1, 5), relative=table)
        >>> heads = [jnp.ones((1, 5, 4, 8))] * 3
        >>> layer.attend(heads, state)[0].shape
        (1, 5, 4, 8)

    References:
        DeBERTa, arXiv 2006.03654, section 3.1; DeBERTa-v3, arXiv 2111.09543.
    """

    def __init__(
        self, d_model: int, config: DisentangledConfig, **options: Any
    ) -> None:
        """Make the projections.

        Args:
            d_model: Features of the residual stream.
            config: Shape and variant of the layer.
            **options: Those of `Attention`: types, rules, `rngs`, which is required.
        """
        super().__init__(d_model, config, **options)
        relative = config.relative
        self.relative = relative
        self.scale = config.scale

        def project(use_bias: bool) -> Linear:
            same = ("dtype", "param_dtype", "rules", "rngs")
            return Linear(
                d_model,
                config.num_heads * config.head_dim,
                kernel_axes=("embed", "heads"),
                out_axes=(None, None, "act_heads"),
                use_bias=use_bias,
                **{name: options[name] for name in same if name in options},
            )

        own = not relative.share_projections
        self.position_key = (
            project(config.use_bias and config.use_key_bias)
            if own and relative.content_to_position
            else None
        )
        self.position_query = (
            project(config.use_bias) if own and relative.position_to_content else None
        )
        self.projected: tuple[nnx.Param, ...] | None = None
        """The projected table, once it is kept, times the scale."""

    def keep_projected(self, tables: Sequence[Float[Array, "P N H"]]) -> None:
        """Attend to positions projected before, for inference.

        Args:
            tables: From `project_positions`, times the scale.
        """
        self.projected = nnx.data(tuple(nnx.Param(table) for table in tables))
        self.position_key = self.position_query = None

    def attend[State: AttentionState](
        self, heads: Sequence[Float[Array, "B T N H"]], state: State
    ) -> tuple[Float[Array, "B T N H"], State]:
        """The attended values of queries, keys and values from `split_heads`.

        Args:
            heads: Queries, keys and values.
            state: The state of padded or packed sequences, with the table of relative
                positions. Its positions are not read: distances are counted along the
                sequence.

        Raises:
            ValueError: there is no table, or the state is of another form.
            Unsupported: the implementation that was asked for cannot add the terms.
        """
        if self.projected is not None:
            tables = [table[...] for table in self.projected]
        elif state.relative is not None:
            tables = self.project_positions(state.relative)
        else:
            raise ValueError(
                "relative None: disentangled attention needs the table of relative "
                "positions, [P, D]"
            )
        if not isinstance(state, Whole | Packed):
            raise ValueError("causal False: only causal attention can be continued")
        if isinstance(state, Packed):
            cu_seqlens = state.cu_seqlens
        else:
            cu_seqlens = cu_seqlens_of_rows(*heads[0].shape[:2])
        table_axes = [(None, "act_heads", None)] * len(tables)
        (out,) = per_shard(
            self._attend_rows,
            [Q_AXES, KV_AXES, KV_AXES, ("batch", None), *table_axes],
            [Q_AXES],
            self._head_rules,
        )(*heads, cu_seqlens, *tables)
        return out, state

    def project_positions(
        self, table: Float[Array, "P D"]
    ) -> list[Float[Array, "P N H"]]:
        """Keys, then queries of the relative positions, those that there are."""
        tables = []
        if self.relative.content_to_position:
            tables.append(self._project_table(self.position_key or self.key, table))
        if self.relative.position_to_content:
            own = self.position_query or self.query
            tables.append(self._project_table(own, table))
        return tables

    def _project_table(
        self, projection: Linear | TileSparseLinear, table: Float[Array, "P D"]
    ) -> Float[Array, "P N H"]:
        """Keys or queries of the relative positions."""
        axes, heads = (None, "act_heads"), (None, "act_heads", None)
        shape = (table.shape[0], self.config.num_heads, self.config.head_dim)  # P, N, H
        if isinstance(projection, TileSparseLinear):
            out = projection(constrain(table, (None, None), self.rules)[None])[0]
            return reshape(out, shape, heads, self.rules)  # [P, N, H]
        out = contract(
            "pd,dh->ph",
            constrain(table.astype(projection.dtype), (None, None), self.rules),
            projection.merged.astype(projection.dtype),
            projection.kernel_axes,
            axes,
            self.rules,
        )
        if projection.bias is not None:
            bias = projection.bias[...].astype(projection.dtype)
            out = out + constrain(bias, axes[-1:], self.rules)
        return reshape(out, shape, heads, self.rules)  # [P, N, H]

    def _attend_rows(
        self, q: Array, k: Array, v: Array, cu_seqlens: Array, *tables: Array
    ) -> tuple[Array]:
        """Attention on one device's sequences and heads."""
        relative = self.relative
        scale = self.scale
        if self.implementation == "cudnn":
            raise Unsupported(
                "cudnn attention cannot add relative positions; use implementation=None"
            )
        to_keys = tables[0] if relative.content_to_position else None
        to_queries = tables[-1] if relative.position_to_content else None

        left = scale if self.projected is None else 1.0

        def terms(x: Array, table: Array | None) -> Array | None:
            return None if table is None else position_terms(x, table, left)

        bias = RelativeBias(
            query_terms=terms(q, to_keys),
            key_terms=terms(k, to_queries),
            buckets=relative.buckets,
        )
        out = varlen_attention(
            q,
            k,
            v,
            cu_seqlens,
            scale=scale,
            relative_bias=bias,
            implementation=self.implementation,
        )
        return (cast(Array, out),)  # a tuple only with return_lse
