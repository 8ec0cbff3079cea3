"""A linear layer with a tile-wise sparse weight.

Axes: B batch, T tokens, S shards of the weight, J tiles, P row capacity of a tile, G
    columns of a tile, C packed columns.
"""

from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxscale.sharding.operations import constrain, reshape
from jaxscale.sharding.rules import REPLICATED, AxisRules, check_axes
from jaxscale.sharding.shards import per_shard
from pallas_kernels.matmul.activations import activate
from pallas_kernels.tile_sparse_matmul import (
    TileSparse,
    TileSparse24,
    pin_zeros,
    tile_sparse_matmul,
)
from pallas_kernels.tile_sparse_matmul.format import can_lie_side_by_side


class SparsePattern(nnx.Variable):
    """The sparsity pattern of a `TileSparseLinear`, which is not trained."""


class TileSparseLinear(nnx.Module):
    """`jaxscale.nn.Linear` with a weight whose tiles of columns each keep their own
    rows.

    `jaxscale.pruning.sparsify` makes it from a pruned `Linear`. The weight has S shards
    of equal shape, split over tensor-parallel devices: if the rules split the output
    features, each shard has the tiles of its own columns; if they split the input
    features, it has all tiles with its own rows, and the partial results are summed. On
    fewer devices one computes several shards. Bias and activation are fused into the
    kernel, unless they follow such a sum.

    Example:
        >>> mask = jnp.ones((4, 8), bool).at[::2, :4].set(False)
        >>> sparse = TileSparse.from_dense(jnp.ones((4, 8)), mask, tile=4)
        >>> layer = TileSparseLinear(
        ...     TileSparse.stack([sparse]), split=None, kernel_axes=("embed", "mlp"),
        ...     out_axes=("batch", None, "act_mlp"),
        ... )
        >>> layer(jnp.ones((1, 1, 4)))[0, 0]
        Array([2., 2., 2., 2., 4., 4., 4., 4.], dtype=float32)
    """

    def __init__(
        self,
        weight: TileSparse | TileSparse24,
        *,
        split: Literal["rows", "columns"] | None,
        kernel_axes: tuple[str | None, str | None],
        out_axes: tuple[str | None, ...],
        zeros_stay: bool = False,
        bias: nnx.Param | None = None,
        dtype: DTypeLike = jnp.float32,
        rules: AxisRules = REPLICATED,
        implementation: str | None = None,
    ) -> None:
        """Take over a weight.

        Args:
            weight: Stacked shards, [S, ...]; [L, S, ...] for a stack of layers. A
                `TileSparse24` is for inference.
            split: Dimension of the shards: input features (rows) or output features.
            kernel_axes: Logical axes of the dense kernel.
            out_axes: Logical axes of the result, (batch, tokens, features).
            zeros_stay: Zeros among the values are pruned weights, in rows that a tile
                keeps for other weights; training leaves them zero.
            bias: Bias of the dense layer.
            dtype: Type of the computation and the result.
            rules: Mesh axes of each logical axis.
            implementation: Implementation of `tile_sparse_matmul`; None picks one.
        """
        check_axes(*kernel_axes, *out_axes)
        self.split = split
        self.kernel_axes = kernel_axes
        self.out_axes = out_axes
        self.dtype = dtype
        self.rules = rules
        self.implementation = implementation
        kept = weight.abstract if isinstance(weight, TileSparse24) else weight
        self.shape, self.granularity = kept.shape, kept.granularity
        self.zeros_stay = zeros_stay
        self.equal_counts, self.steps = kept.equal_counts, kept.steps
        self.bias = bias
        # The shards split one axis of the kernel, a single shard none. Along the other,
        # FSDP stores a part of the rows of each tile.
        rows = split == "rows" or (split is None and kernel_axes[1] == "embed")
        self._shard_axis, storage = kernel_axes if rows else kernel_axes[::-1]

        def variable(kind: type[nnx.Variable], array: Array, *axes: str | None) -> Any:
            layers = ("layers",) * (array.ndim - 1 - len(axes))
            names = (*layers, self._shard_axis, *axes)
            return kind(array, out_sharding=names, eager_sharding=False)

        self.values = variable(nnx.Param, weight.values, None, storage, None)
        self.rows = variable(SparsePattern, kept.rows, None, None)
        self.counts = variable(SparsePattern, kept.counts, None)
        self.metadata = (
            variable(SparsePattern, weight.metadata, *(None,) * 4)
            if isinstance(weight, TileSparse24)
            else None
        )

        def optional(array: Array | None) -> Any:
            return None if array is None else variable(SparsePattern, array, None)

        self.columns = optional(kept.columns)
        self.places = optional(kept.places)
        self.order = optional(kept.order)

    @property
    def weight(self) -> Any:
        """The stacked shards, `TileSparse` or `TileSparse24`, in `dtype`."""
        values = self.values[...]
        if self.zeros_stay and self.metadata is None:
            values = pin_zeros(values)
        values = values.astype(self.dtype)
        optional = self.columns, self.places, self.order
        leaves = (
            None if self.metadata is not None else values,
            self.rows[...],
            self.counts[...],
            *(None if leaf is None else leaf[...] for leaf in optional),
        )
        static = (self.shape, self.granularity, self.equal_counts, self.steps)
        kept = TileSparse.tree_unflatten(static, leaves)
        if self.metadata is None:
            return kept
        metadata = self.metadata[...]
        return TileSparse24(values=values, metadata=metadata, pattern=kept)

    @property
    def _shards_of_bias(self) -> Float[Array, "S C"] | None:
        """The bias of each shard's columns."""
        if self.bias is None:
            return None
        shape = len(self.values[...]), self.shape[1]  # [S C] to [S, C]
        return reshape(self.bias[...], shape, (self._shard_axis, None), self.rules)

    def __call__(
        self,
        x: Float[Array, "..."],
        activation: str | None = None,
        *,
        feature_major: tuple[bool, bool] = (False, False),
    ) -> Float[Array, "..."]:
        """The projection of each token, in `dtype`.

        Args:
            x: [B,T,in]; [in,B,T] with ``feature_major[0]``.
            activation: Activation of the result, a name in
                `pallas_kernels.matmul.ACTIVATIONS`.
            feature_major: True: features are the leading axis, of `x` and of the
                result. The kernels need them there: between two sparse layers this
                saves transposes.

        Returns:
            [B,T,out]; [out,B,T] with ``feature_major[1]``.
        """
        by_rows, axis = self.split == "rows", self._shard_axis
        x_along, y_along = (0 if major else -1 for major in feature_major)
        # Partial results of some rows are summed before bias and activation.
        bias, follow = (None, None) if by_rows else (self._shards_of_bias, activation)
        leaves, structure = jax.tree.flatten((self.weight, bias))

        def product(x: Array, *leaves: Array) -> tuple[Array]:
            shards = len(leaves[0])
            parts = [
                jax.tree.unflatten(structure, [leaf[s] for leaf in leaves])
                for s in range(shards)
            ]
            xs = jnp.split(x, shards, axis=x_along) if by_rows else [x] * shards
            ys = [
                tile_sparse_matmul(
                    x,
                    w,
                    bias=bias,
                    activation=follow,
                    feature_major=feature_major,
                    implementation=self.implementation,
                )
                for x, (w, bias) in zip(xs, parts, strict=True)
            ]
            if by_rows:
                return (sum(ys[1:], ys[0])[None],)
            return (ys[0] if shards == 1 else jnp.concatenate(ys, y_along),)

        def axes(features: str | None, major: bool, *others: Any) -> tuple[Any, ...]:
            return (features, *others) if major else (*others, features)

        x_axes = axes(axis if by_rows else None, feature_major[0], "batch", None)
        split = axis if self.split == "columns" else None
        y_axes = axes(split, feature_major[1], "batch", None)
        (out,) = per_shard(
            product,
            [x_axes, *((axis, *(None,) * (leaf.ndim - 1)) for leaf in leaves)],
            [(axis, *y_axes) if by_rows else y_axes],
            self.rules,
        )(x.astype(self.dtype), *leaves)
        if by_rows:
            out = out.sum(0)  # over the devices
        *others, features = self.out_axes
        out = constrain(out, axes(features, feature_major[1], *others), self.rules)
        if by_rows and self.bias is not None:
            bias = constrain(
                self.bias[...].astype(self.dtype), self.out_axes[-1:], self.rules
            )
            # [N, 1, 1] beside [N, B, T], or [N] beside [B, T, N].
            out = out + (bias[:, None, None] if feature_major[1] else bias)
        return activate(out, activation) if by_rows else out


def join_sparse(layers: Sequence[TileSparseLinear]) -> TileSparseLinear:
    """Layers of one input, which `can_join_sparse`, as one, for inference.

    One kernel reads the tiles of all: its multiprocessors are busy for longer, and few
    tokens wait for one launch. The outputs lie side by side.
    """
    first = layers[0]
    return TileSparseLinear(
        TileSparse.side_by_side([layer.weight for layer in layers]),
        split=None,
        kernel_axes=first.kernel_axes,
        out_axes=first.out_axes,
        zeros_stay=any(layer.zeros_stay for layer in layers),
        dtype=first.dtype,
        rules=first.rules,
        implementation=first.implementation,
    )


def can_join_sparse(layers: Sequence[Any]) -> bool:
    """True if `layers` are several sparse ones that one matmul can compute."""
    if len(layers) < 2 or not all(type(la) is TileSparseLinear for la in layers):
        return False
    kinds = {(la.split, la.bias is None, la.implementation) for la in layers}
    if any(la.metadata is not None for la in layers):
        return False
    if len(kinds) > 1 or layers[0].split is not None or layers[0].bias is not None:
        return False
    if any(len(la.values.get_value().shape) != 4 for la in layers):  # stacked
        return False
    # Shapes alone: layers may be abstract, and nothing is cast to be asked about.
    weights = jax.eval_shape(lambda layers: [la.weight for la in layers], list(layers))
    return can_lie_side_by_side(weights)
