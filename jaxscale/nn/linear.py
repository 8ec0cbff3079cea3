"""Linear projections: the only place where a block's weight meets an activation.

Legend: B batch, T tokens; of a sparse weight S shards, J tiles, P room for rows in a
tile, G columns of a tile, C packed columns.
"""

import functools
import operator
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn.initializers import Initializer
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxscale.nn.embeddings import NORMAL_INIT
from jaxscale.sharding.operations import (
    Shards,
    constrain,
    contract,
    per_shard,
    reshape,
)
from jaxscale.sharding.parameters import partitioned
from jaxscale.sharding.rules import REPLICATED, AxisRules
from jaxscale.sharding.tensor_parallel import (
    TensorParallel,
    check_tensor_parallel,
    column_parallel,
    row_parallel,
)
from pallas_kernels.matmul import dense
from pallas_kernels.matmul.activations import activate
from pallas_kernels.tile_sparse_matmul import (
    SingleWeights,
    TileSparse,
    tile_sparse_matmul,
)


class Linear(nnx.Module):
    """``y = activation(x @ kernel + bias)``.

    Example:
        >>> up = Linear(
        ...     4, 8, kernel_axes=("embed", "mlp"), out_axes=("batch", None, "act_mlp"),
        ...     rngs=nnx.Rngs(0),
        ... )
        >>> up(jnp.ones((2, 3, 4))).shape
        (2, 3, 8)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        kernel_axes: tuple[str | None, str | None],
        out_axes: tuple[str | None, ...],
        use_bias: bool = False,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        kernel_init: Initializer = NORMAL_INIT,
        rules: AxisRules = REPLICATED,
        rngs: nnx.Rngs,
    ) -> None:
        """Make the parameters.

        Args:
            in_features: Features of the input.
            out_features: Features of the output.
            kernel_axes: Logical axes of the kernel.
            out_axes: Logical axes of the result, (batch, tokens, features).
            use_bias: Add a bias, zero at first.
            dtype: Type of the computation and the result.
            param_dtype: Type of the parameters.
            kernel_init: Initializer of the kernel.
            rules: The table of the recipe.
            rngs: Source of the keys.
        """
        self.kernel_axes = kernel_axes
        self.out_axes = out_axes
        self.dtype = dtype
        self.rules = rules
        self.kernel = nnx.Param(
            partitioned(kernel_init, *kernel_axes)(
                rngs.params(), (in_features, out_features), param_dtype
            )
        )
        zeros = partitioned(jax.nn.initializers.zeros, kernel_axes[1])
        bias = zeros(rngs.params(), (out_features,), param_dtype) if use_bias else None
        self.bias = None if bias is None else nnx.Param(bias)

    def __call__(
        self, x: Float[Array, "B T in"], activation: str | None = None
    ) -> Float[Array, "B T out"]:
        """The projection of each token, in `dtype`.

        Args:
            x: Activations.
            activation: Activation of the result, a name in
                `pallas_kernels.matmul.ACTIVATIONS`.
        """
        out = contract(
            "bti,io->bto",
            x.astype(self.dtype),
            self.weight,
            self.kernel_axes,
            self.out_axes,
            self.rules,
        )
        return activate(self.add_bias(out), activation)

    @property
    def weight(self) -> Float[Array, "in out"]:
        """The kernel in the type of the computation."""
        return self.kernel[...].astype(self.dtype)

    def add_bias(self, out: Float[Array, "B T out"]) -> Float[Array, "B T out"]:
        """`out` plus the bias if there is one."""
        if self.bias is None:
            return out
        # The bias is stored split like the kernel; it is added split like the result.
        bias = self.bias[...].astype(self.dtype)
        return out + constrain(bias, self.out_axes[-1:], self.rules)


class ColumnParallelLinear(Linear):
    """A `Linear` whose output features are split over the tensor axis.

    The tokens of its input may be split over the same axis (sequence parallelism); they
    are gathered on the way in, and gradients of the input are scattered on the way
    back. Parameters are those of `Linear`, by name, shape and split.

    Example:
        >>> from jaxscale.sharding import create, fsdp_tp, make_mesh
        >>> mesh, rules = make_mesh({"data": -1, "tensor": 4}), fsdp_tp()
        >>> up = create(lambda: ColumnParallelLinear(
        ...     4, 8, kernel_axes=("embed", "mlp"), out_axes=("batch", None, "act_mlp"),
        ...     rules=rules, tensor_parallel="fused", rngs=nnx.Rngs(0),
        ... ), mesh, rules)
        >>> with jax.set_mesh(mesh):
        ...     hidden = up(jnp.ones((2, 8, 4)))
        >>> hidden.shape, hidden.sharding.spec
        ((2, 8, 8), P(('data', 'fsdp'), None, 'tensor'))

    References:
        Megatron-LM, arXiv 1909.08053. Sequence parallelism, arXiv 2205.05198.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        tensor_parallel: TensorParallel = None,
        **options: Any,
    ) -> None:
        """Make the parameters.

        Args:
            in_features: Features of the input.
            out_features: Features of the output.
            tensor_parallel: Communication: see `jaxscale.sharding.column_parallel`.
            **options: The other arguments of `Linear`.
        """
        check_tensor_parallel(tensor_parallel)
        super().__init__(in_features, out_features, **options)
        self.tensor_parallel: TensorParallel = tensor_parallel

    def __call__(
        self, x: Float[Array, "B T in"], activation: str | None = None
    ) -> Float[Array, "B T out"]:
        """The projection of each token, whole along the tokens, in `dtype`."""
        return self.together([self], x, [activation])[0]

    @staticmethod
    def together(
        layers: Sequence[Any],
        x: Float[Array, "B T in"],
        activations: Sequence[str | None] | None = None,
    ) -> tuple[Float[Array, "B T _out"], ...]:
        """The projections of `x` by several layers that share one gather.

        Layers of another kind, as pruning puts in their place, run one by one.

        Args:
            layers: The layers, all with the same input.
            x: Activations.
            activations: Activation of each projection: a name in
                `pallas_kernels.matmul.ACTIVATIONS`, or None.
        """
        first = layers[0]
        if activations is None:
            activations = [None] * len(layers)
        if not all(isinstance(layer, ColumnParallelLinear) for layer in layers):
            x = constrain(x, ("batch", None, "act_embed"), first.rules)
            return tuple(
                layer(x, activation)
                for layer, activation in zip(layers, activations, strict=True)
            )
        x = x.astype(first.dtype)
        groups, inputs = [layers], [x]
        has_bias = all(layer.bias is not None for layer in layers)
        if first.tensor_parallel is None and has_bias:
            in_axes = [("batch", None, None), *(layer.kernel_axes for layer in layers)]
            weights = [layer.weight for layer in layers]
            shards = Shards.of([x, *weights], in_axes, first.rules)
            contracted = {layer.kernel_axes[0] for layer in layers}
            if shards is None or not any(map(shards.splits, contracted)):
                return ColumnParallelLinear._dense(layers, x, activations)
            # XLA would make one product of them, and then copy each part out of it to
            # add its bias. It does not where the inputs look different.
            x = constrain(x, ("batch", None, "act_embed"), first.rules)
            groups = [[layer] for layer in layers]
            inputs = jax.lax.optimization_barrier([x] * len(layers))
        outs = [
            out
            for group, x in zip(groups, inputs, strict=True)
            for out in column_parallel(
                x,
                [layer.weight for layer in group],
                kernel_axes=[layer.kernel_axes for layer in group],
                out_axes=[layer.out_axes for layer in group],
                rules=first.rules,
                tensor_parallel=first.tensor_parallel,
            )
        ]
        return tuple(
            activate(layer.add_bias(out), activation)
            for layer, out, activation in zip(layers, outs, activations, strict=True)
        )

    @staticmethod
    def _dense(
        layers: Sequence[Any], x: Array, activations: Sequence[str | None]
    ) -> tuple[Array, ...]:
        """`together` of layers with a bias, each device at its rows and features."""
        first = layers[0]
        weights = [layer.weight for layer in layers]
        biases = [layer.bias[...].astype(first.dtype) for layer in layers]
        same = activations[0] if len({*activations}) == 1 else None

        def local(x: Array, *layers: Array) -> tuple[Array, ...]:
            count = len(layers) // 2
            return dense(x, layers[:count], layers[count:], activation=same)

        features = [layer.kernel_axes[1] for layer in layers]
        outs = per_shard(
            local,
            [
                ("batch", None, None),
                *((None, axis) for axis in features),
                *((axis,) for axis in features),
            ],
            [("batch", None, axis) for axis in features],
            first.rules,
        )(x, *weights, *biases)
        if same is None:
            outs = map(activate, outs, activations)
        return tuple(
            constrain(out, layer.out_axes, first.rules)
            for out, layer in zip(outs, layers, strict=True)
        )


class RowParallelLinear(Linear):
    """A `Linear` whose input features are split over the tensor axis.

    The products of the devices are summed; each keeps the tokens that are its own where
    the rules split them (sequence parallelism). The bias is added once, after the sum.
    Parameters are those of `Linear`, by name, shape and split.

    Example:
        >>> from jaxscale.sharding import create, fsdp_tp, make_mesh
        >>> mesh, rules = make_mesh({"data": -1, "tensor": 4}), fsdp_tp()
        >>> down = create(lambda: RowParallelLinear(
        ...     8, 4, kernel_axes=("mlp", "embed"),
        ...     out_axes=("batch", "tokens", "act_embed"),
        ...     rules=rules, tensor_parallel="fused", rngs=nnx.Rngs(0),
        ... ), mesh, rules)
        >>> with jax.set_mesh(mesh):
        ...     out = down(jnp.ones((2, 8, 8)))
        >>> out.shape, out.sharding.spec
        ((2, 8, 4), P(('data', 'fsdp'), 'tensor', None))

    References:
        Megatron-LM, arXiv 1909.08053. Sequence parallelism, arXiv 2205.05198.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        tensor_parallel: TensorParallel = None,
        **options: Any,
    ) -> None:
        """Make the parameters.

        Args:
            in_features: Features of the input.
            out_features: Features of the output.
            tensor_parallel: Communication: see `jaxscale.sharding.row_parallel`.
            **options: The other arguments of `Linear`.
        """
        check_tensor_parallel(tensor_parallel)
        super().__init__(in_features, out_features, **options)
        self.tensor_parallel: TensorParallel = tensor_parallel

    def __call__(
        self, x: Float[Array, "B T in"], activation: str | None = None
    ) -> Float[Array, "B T out"]:
        """The projection of each token, in `dtype`."""
        return activate(self.summed([self], [x]), activation)

    @staticmethod
    def summed(
        layers: Sequence[Any], xs: Sequence[Float[Array, "B T _in"]]
    ) -> Float[Array, "B T out"]:
        """The sum of projections, each of its own input, in one communication.

        Layers of another kind, as pruning puts in their place, run one by one.
        """
        if not all(isinstance(layer, RowParallelLinear) for layer in layers):
            outs = [layer(x) for layer, x in zip(layers, xs, strict=True)]
            return functools.reduce(operator.add, outs)
        out = RowParallelLinear._products(layers, xs)
        for layer in layers:
            out = layer.add_bias(out)
        return out

    def apart(
        self, x: Float[Array, "B T in"]
    ) -> tuple[Float[Array, "B T out"], Float[Array, "out"] | None]:
        """The projection without the bias, and the bias."""
        bias = None if self.bias is None else self.bias[...].astype(self.dtype)
        return self._products([self], [x]), bias

    @staticmethod
    def _products(layers: Sequence[Any], xs: Sequence[Array]) -> Array:
        first = layers[0]
        return row_parallel(
            [x.astype(first.dtype) for x in xs],
            [layer.weight for layer in layers],
            kernel_axes=[layer.kernel_axes for layer in layers],
            out_axes=first.out_axes,
            rules=first.rules,
            tensor_parallel=first.tensor_parallel,
        )


class SparsePattern(nnx.Variable):
    """The weights that a `TileSparseLinear` has; training leaves the pattern alone."""


class TileSparseLinear(nnx.Module):
    """`Linear` with a weight of which each tile keeps its own rows.

    `jaxscale.pruning.sparsify` makes it from a pruned `Linear`; weights that are kept
    outside of tiles, if any, stand beside them. The weight comes in S shards of equal
    shape, a tensor-parallel device holding its part of them: each shard
    has tiles of its own columns where the rules split the output features, and all
    tiles with its own rows where they split the input features, whose products are then
    summed. On fewer devices one computes several shards. Bias and activation are part
    of the kernel, but follow the sum where there is one.

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
        weight: TileSparse,
        *,
        split: Literal["rows", "columns"] | None,
        kernel_axes: tuple[str | None, str | None],
        out_axes: tuple[str | None, ...],
        singles: SingleWeights | None = None,
        bias: nnx.Param | None = None,
        dtype: DTypeLike = jnp.float32,
        rules: AxisRules = REPLICATED,
        implementation: str | None = None,
    ) -> None:
        """Take over a weight.

        Args:
            weight: Stacked shards, [S, ...]; [L, S, ...] for a stack of layers.
            split: Dimension of the shards: input features (rows) or output features.
            kernel_axes: Logical axes of the dense kernel.
            out_axes: Logical axes of the result, (batch, tokens, features).
            singles: Weights outside of tiles, in shards like those of `weight`.
            bias: Bias of the dense layer.
            dtype: Type of the computation and the result.
            rules: The table of the recipe.
            implementation: Passed to `tile_sparse_matmul`.
        """
        self.split = split
        self.kernel_axes = kernel_axes
        self.out_axes = out_axes
        self.dtype = dtype
        self.rules = rules
        self.implementation = implementation
        self.shape, self.granularity = weight.shape, weight.granularity
        self.equal_counts = weight.equal_counts
        self.bias = bias
        # The shards divide one axis of the kernel, one shard none. By the other, FSDP
        # stores a part of the rows of each tile.
        rows = split == "rows" or (split is None and kernel_axes[1] == "embed")
        self._shard_axis, storage = kernel_axes if rows else kernel_axes[::-1]

        def variable(kind: type[nnx.Variable], array: Array, *axes: str | None) -> Any:
            layers = ("layers",) * (array.ndim - 1 - len(axes))
            names = (*layers, self._shard_axis, *axes)
            return kind(array, out_sharding=names, eager_sharding=False)

        self.values = variable(nnx.Param, weight.values, None, storage, None)
        self.rows = variable(SparsePattern, weight.rows, None, None)
        self.counts = variable(SparsePattern, weight.counts, None)
        columns, order = weight.columns, weight.order
        self.columns = (
            None if columns is None else variable(SparsePattern, columns, None)
        )
        self.order = None if order is None else variable(SparsePattern, order, None)
        single_values = single_rows = None
        if singles is not None and singles.room:
            single_values = variable(nnx.Param, singles.values, None, None)
            single_rows = variable(SparsePattern, singles.rows, None, None)
        self.single_values, self.single_rows = single_values, single_rows

    @property
    def weight(self) -> TileSparse:
        """The stacked shards, in the type of the computation."""
        leaves = (
            self.values[...].astype(self.dtype),
            self.rows[...],
            self.counts[...],
            None if self.columns is None else self.columns[...],
            None if self.order is None else self.order[...],
        )
        static = (self.shape, self.granularity, self.equal_counts)
        return TileSparse.tree_unflatten(static, leaves)

    @property
    def singles(self) -> SingleWeights | None:
        """The shards of what is kept outside of tiles, in the computation's type."""
        values, rows = self.single_values, self.single_rows
        if values is None or rows is None:
            return None
        return SingleWeights(values[...].astype(self.dtype), rows[...], self.shape[0])

    @property
    def _shards_of_bias(self) -> Float[Array, "S C"] | None:
        """The bias beside the columns of each shard."""
        if self.bias is None:
            return None
        shape = len(self.values[...]), self.shape[1]
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
                result. The kernels want them there: between two sparse layers this
                saves transposes.

        Returns:
            [B,T,out]; [out,B,T] with ``feature_major[1]``.
        """
        by_rows, axis = self.split == "rows", self._shard_axis
        x_along, y_along = (0 if major else -1 for major in feature_major)
        # Products of some of the rows are summed before bias and activation.
        bias, follow = (None, None) if by_rows else (self._shards_of_bias, activation)
        leaves, structure = jax.tree.flatten((self.weight, self.singles, bias))

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
                    singles=singles,
                    bias=bias,
                    activation=follow,
                    feature_major=feature_major,
                    implementation=self.implementation,
                )
                for x, (w, singles, bias) in zip(xs, parts, strict=True)
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
            out = out + (bias[:, None, None] if feature_major[1] else bias)
        return activate(out, activation) if by_rows else out
