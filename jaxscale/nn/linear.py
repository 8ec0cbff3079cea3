"""Linear projections: the only place where a block's dense weight meets an activation.

Axes: B batch, T tokens.
"""

import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn.initializers import Initializer
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxscale.keywords import explain_keywords
from jaxscale.nn.embeddings import NORMAL_INIT
from jaxscale.nn.norms import RMSNorm
from jaxscale.nn.stacked import stacks_of
from jaxscale.sharding.fp8 import Fp8, Norm, RoundedWeight, Weight, check_fp8
from jaxscale.sharding.operations import constrain, contract
from jaxscale.sharding.parameters import logical_axes, partitioned
from jaxscale.sharding.rounded_weights import rounded_weight
from jaxscale.sharding.rules import REPLICATED, AxisRules, check_axes
from jaxscale.sharding.shards import Shards, per_shard
from jaxscale.sharding.tensor_parallel import (
    TensorParallel,
    check_tensor_parallel,
    column_parallel,
    row_parallel,
)
from pallas_kernels.matmul import ResidualNorm, dense
from pallas_kernels.matmul.activations import activate


_ACTIVATION_AXES: dict[str | None, str] = {
    name: f"act_{name}" for name in ("embed", "heads", "kv_heads", "mlp", "vocab")
}
"""Logical axis of activations for that of the parameter that makes them."""


class Linear(nnx.Module):
    """``y = activation(x @ kernel + bias)``.

    On one device the sizes are enough: axes only say how arrays are split over a mesh.

    Example:
        >>> Linear(4, 8, rngs=nnx.Rngs(0))(jnp.ones((2, 4))).shape
        (2, 8)
        >>> up = Linear(
        ...     4, 8, kernel_axes=("embed", "mlp"), out_axes=("batch", None, "act_mlp"),
        ...     rngs=nnx.Rngs(0),
        ... )
        >>> up(jnp.ones((2, 3, 4))).shape
        (2, 3, 8)
    """

    quantization: Fp8 = None
    low_rank: Any = None
    """A `LowRank` or `LowRankStack` of `jaxscale.nn.lora`, whose output is added."""
    rounded: Any = None
    """The kernel in fp8, from `round_kernels`; None rounds it at each call."""

    @explain_keywords
    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        kernel_axes: tuple[str | None, str | None] = (None, None),
        out_axes: tuple[str | None, ...] | None = None,
        use_bias: bool = False,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        quantization: Fp8 = None,
        kernel_init: Initializer = NORMAL_INIT,
        rules: AxisRules = REPLICATED,
        rngs: nnx.Rngs,
    ) -> None:
        """Initialize the parameters.

        Args:
            in_features: Features of the input.
            out_features: Features of the output.
            kernel_axes: Logical axes of the kernel; None is one that no rule splits.
            out_axes: Logical axes of the result, (batch, tokens, features). None
                names the batch, and the features after those of the kernel.
            use_bias: Add a bias, zero at first.
            dtype: Type of the computation and the result.
            param_dtype: Type of the parameters.
            quantization: Multiply in fp8 (E4M3, gradients in E5M2) in forward and
                backward pass, with a scale for each row of an operand (``"fp8"``),
                for blocks of 128 numbers (``"fp8_blockwise"``) or one for the operand
                (``"fp8_tensorwise"``); None multiplies in `dtype`. With blocks,
                ``tensor_parallel="fused"`` is ``"xla"``: none of their kernels
                communicates. Parameters stay as they are: see `jaxscale.sharding.fp8`.
            kernel_init: Initializer of the kernel.
            rules: Mesh axes of each logical axis.
            rngs: Source of the keys.

        Raises:
            ValueError: `quantization` is unknown, or an axis is none of
                `jaxscale.sharding.AxisRules`.
        """
        check_fp8(quantization)
        if out_axes is None:
            out_axes = ("batch", None, _ACTIVATION_AXES.get(kernel_axes[1]))
        check_axes(*out_axes)
        self.kernel_axes = kernel_axes
        self.out_axes = out_axes
        self.dtype = dtype
        self.quantization = quantization
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
        self, x: Float[Array, "B *T in"], activation: str | None = None
    ) -> Float[Array, "B *T out"]:
        """The projection of each token, in `dtype`.

        Args:
            x: Activations: rows of features, with any number of dimensions between. Of
                those the rules split none, unless there is one, the tokens. With
                `quantization` there is one.
            activation: Activation of the result, a name in
                `pallas_kernels.matmul.ACTIVATIONS`.

        Raises:
            ValueError: `x` is a vector, or has other features than the kernel.
        """
        self.check_input(x, ndim=None if self.quantization is None else 3)
        x = x.astype(self.dtype)
        axes, out_axes, rules = self.kernel_axes, self.out_axes, self.rules
        if x.ndim != len(out_axes):
            out_axes = (out_axes[0], *[None] * (x.ndim - 2), out_axes[-1])
        if self.quantization is None:
            rows = "abcdefgh"[: x.ndim - 1]
            terms = f"{rows}i,io->{rows}o"
            out = contract(terms, x, self.weight, axes, out_axes, rules)
        else:
            out = row_parallel(
                [x],
                [self.factor],
                kernel_axes=[axes],
                out_axes=out_axes,
                rules=rules,
                quantization=self.quantization,
            )
        return activate(self.add_bias(self.adapt(out, x, out_axes)), activation)

    def adapt(
        self, out: Array, x: Array, out_axes: tuple[str | None, ...] | None = None
    ) -> Array:
        """`out`, the projection of `x`, plus that of the adapter if there is one."""
        if self.low_rank is None:
            return out
        return out + self.low_rank(x, self, out_axes or self.out_axes)

    @property
    def merged(self) -> Float[Array, "*L in out"]:
        """The kernel plus what an adapter adds to it, in the type of the kernel."""
        kernel = self.kernel[...]
        if self.low_rank is None:
            return kernel
        return (kernel.astype(jnp.float32) + self.low_rank.delta()).astype(kernel.dtype)

    @property
    def factor(self) -> Weight:
        """The kernel as `column_parallel` and `row_parallel` take it.

        Matmuls in fp8 round it themselves, in the pass that reads it, unless
        `round_kernels` has.
        """
        if self.quantization is None:
            return self.weight
        kernel = self.kernel[...]
        if self.rounded is None:
            return kernel
        return RoundedWeight(kernel, *self.rounded)

    def check_input(self, x: Array, ndim: int | None = None) -> None:
        """Raise where `x` is no input of this layer.

        Args:
            x: Activations.
            ndim: Dimensions that it must have; None is two or more.
        """
        features = self.kernel.shape[0]
        wanted = (
            "[batch, ..., features]" if ndim is None else "[batch, tokens, features]"
        )
        if x.ndim < 2 or (ndim is not None and x.ndim != ndim):
            raise ValueError(
                f"x of shape {x.shape} has {x.ndim} dimensions, expected {wanted}; add "
                "the missing ones, as in x[None]"
            )
        if x.shape[-1] != features:
            raise ValueError(
                f"x of shape {x.shape} has {x.shape[-1]} features, but the layer was "
                f"made for in_features={features}; pass {wanted}, or make the layer "
                f"with in_features={x.shape[-1]}"
            )

    @property
    def weight(self) -> Float[Array, "in out"]:
        """The kernel in the type of the computation."""
        return self.kernel[...].astype(self.dtype)

    def add_bias(self, out: Float[Array, "B *T out"]) -> Float[Array, "B *T out"]:
        """`out` plus the bias if there is one."""
        if self.bias is None:
            return out
        # The bias is stored split like the kernel; it is added split like the result.
        bias = self.bias[...].astype(self.dtype)
        return out + constrain(bias, self.out_axes[-1:], self.rules)


def round_kernels[Model: nnx.Module](model: Model) -> Model:
    """`model` whose fp8 layers multiply by kernels that are rounded once, here.

    Gradients are still those of the parameters. It takes 2 bytes for each number.
    Layers that `jaxscale.sharding.rounded_weights` does not cover round at each call.
    """
    result: Any = jax.tree.map(lambda p: p, model)
    for _, layer in nnx.iter_modules(result):
        if not isinstance(layer, Linear) or layer.quantization is None:
            continue
        kernel: Any = layer.kernel
        if (stacked := kernel.ndim == 3) or kernel.ndim == 2:
            w, axes = kernel[...], logical_axes(kernel)
            found = rounded_weight(
                w if stacked else w[None],
                axes if stacked else (None, *axes),
                rules=layer.rules,
                dtype=layer.dtype,
                quantization=layer.quantization,
            )
            if not stacked:
                found = jax.tree.map(lambda x: x[0], found)
            layer.rounded = None if found is None else nnx.data(found)
    return result


class _TensorParallelLinear(Linear):
    """`Linear` with communication between the devices that share its kernel."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        tensor_parallel: TensorParallel = None,
        **options: Any,
    ) -> None:
        """Initialize the parameters.

        Args:
            in_features: Features of the input.
            out_features: Features of the output.
            tensor_parallel: Communication, see `jaxscale.sharding.column_parallel` and
                `jaxscale.sharding.row_parallel`.
            **options: The other arguments of `Linear`.
        """
        check_tensor_parallel(tensor_parallel)
        super().__init__(in_features, out_features, **options)
        self.tensor_parallel: TensorParallel = tensor_parallel


class ColumnParallelLinear(_TensorParallelLinear):
    """A `Linear` whose output features are split over the tensor axis.

    The tokens of its input may be split over the same axis (sequence parallelism); they
    are all-gathered in the forward pass, and gradients of the input are
    reduce-scattered in the backward pass. Parameters are those of `Linear`, by name,
    shape and split.

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

    def __call__(
        self, x: Float[Array, "B T in"], activation: str | None = None
    ) -> Float[Array, "B T out"]:
        """The projection of each token, not split over the tokens, in `dtype`.

        Args:
            x: Inputs, tokens along the second axis.
            activation: Name of a function applied to the sum; None is the identity.
        """
        return project_together([self], x, [activation])[0]


class RowParallelLinear(_TensorParallelLinear):
    """A `Linear` whose input features are split over the tensor axis.

    The partial outputs of the devices are summed; each device keeps its own tokens
    where the rules split them (sequence parallelism). The bias is added once, after the
    sum. Parameters are those of `Linear`, by name, shape and split.

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

    def __call__(
        self, x: Float[Array, "B T in"], activation: str | None = None
    ) -> Float[Array, "B T out"]:
        """The projection of each token, in `dtype`.

        Args:
            x: Inputs, tokens along the second axis.
            activation: Name of a function applied to the sum; None is the identity.
        """
        return activate(project_and_sum([self], [x]), activation)

    def apart(
        self, x: Float[Array, "B T in"]
    ) -> tuple[Float[Array, "B T out"], Float[Array, "out"] | None]:
        """The projection without the bias, and the bias."""
        bias = None if self.bias is None else self.bias[...].astype(self.dtype)
        return self.adapt(_sum_of_products([self], [x]), x), bias

    def in_place(
        self,
        x: Float[Array, "B T in"],
        residual: Float[Array, "B T out"],
        scale: Float[Array, "out"],
        bias: Float[Array, "out"] | None,
        eps: float,
    ) -> Float[Array, "B T out"] | None:
        """The projection, a residual and a norm; None if no stack has the parameters.

        Those are of a model for inference on one device.
        """
        if self.low_rank is not None:
            return None
        if (parts := stacks_of([self.kernel, self.bias], self.dtype)) is None:
            return None
        self.check_input(x, ndim=3)
        kernel, own_bias = parts
        layer = jnp.asarray(kernel.layer)
        x, norm = x.astype(self.dtype), ResidualNorm(residual, scale, bias, eps)
        return dense(x, [kernel.stack], [own_bias.stack], layer=layer, norm=norm)[0]


def project_together(
    layers: Sequence[Any],
    x: Float[Array, "B T in"],
    activations: Sequence[str | None] | None = None,
    norm: Any = None,
) -> tuple[Float[Array, "B T _out"], ...]:
    """The projections of `x` by several layers, after one shared all-gather.

    Layers of another kind, such as pruned ones, run one by one.

    Args:
        layers: The layers, all with the same input.
        x: Activations.
        activations: Activation of each projection: a name in
            `pallas_kernels.matmul.ACTIVATIONS`, or None.
        norm: A norm of `x` before the projections, or None.
    """
    first = layers[0]
    if activations is None:
        activations = [None] * len(layers)
    if takes_norm(layers, norm):
        out = first.after_norm(x, norm, activations[0])
        if out is not None:
            return (out,)
    x, rms = norm_in_fp8(norm, layers, x)
    if not all(isinstance(layer, ColumnParallelLinear) for layer in layers):
        x = constrain(x, ("batch", None, "act_embed"), first.rules)
        return tuple(
            layer(x, activation)
            for layer, activation in zip(layers, activations, strict=True)
        )
    first.check_input(x, ndim=3)
    x = x.astype(first.dtype)
    groups, inputs = [layers], [x]
    has_bias = all(layer.bias is not None for layer in layers)
    in_fp8 = first.quantization is not None
    adapted = any(layer.low_rank is not None for layer in layers)
    if first.tensor_parallel is None and has_bias and not (in_fp8 or adapted):
        if (outs := _project_in_place(layers, x, activations)) is not None:
            return outs
        in_axes = [("batch", None, None), *(layer.kernel_axes for layer in layers)]
        weights = [layer.weight for layer in layers]
        shards = Shards.of([x, *weights], in_axes, first.rules)
        contracted = {layer.kernel_axes[0] for layer in layers}
        if not any(map(shards.splits, contracted)):
            return _project_dense(layers, x, activations)
        # XLA would merge them into one matmul, and then copy each part out of it to add
        # its bias. It does not where the inputs look different.
        x = constrain(x, ("batch", None, "act_embed"), first.rules)
        groups = [[layer] for layer in layers]
        inputs = jax.lax.optimization_barrier([x] * len(layers))
    outs = [
        out
        for group, x in zip(groups, inputs, strict=True)
        for out in column_parallel(
            x,
            [layer.factor for layer in group],
            kernel_axes=[layer.kernel_axes for layer in group],
            out_axes=[layer.out_axes for layer in group],
            rules=first.rules,
            tensor_parallel=first.tensor_parallel,
            quantization=first.quantization,
            norm=rms,
        )
    ]
    return tuple(
        activate(layer.add_bias(layer.adapt(out, x)), activation)
        for layer, out, activation in zip(layers, outs, activations, strict=True)
    )


def _project_in_place(
    layers: Sequence[Any], x: Array, activations: Sequence[str | None]
) -> tuple[Array, ...] | None:
    """`_project_dense` of layers whose parameters are in stacks; None if they are not.

    Those are of a model on one device.
    """
    kernels, biases = (
        stacks_of([getattr(layer, name) for layer in layers], layers[0].dtype)
        for name in ("kernel", "bias")
    )
    if kernels is None or biases is None:
        return None
    same = activations[0] if len({*activations}) == 1 else None
    outs = dense(
        x,
        [part.stack for part in kernels],
        [part.stack for part in biases],
        layer=jnp.asarray(kernels[0].layer),
        activation=same,
    )
    return outs if same else tuple(map(activate, outs, activations))


def _project_dense(
    layers: Sequence[Any], x: Array, activations: Sequence[str | None]
) -> tuple[Array, ...]:
    """`project_together` of layers with biases, each device at its rows and columns."""
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
            *(layer.kernel_axes for layer in layers),
            *((axis,) for axis in features),
        ],
        [("batch", None, axis) for axis in features],
        first.rules,
        parameters=range(1, 1 + len(layers)),
    )(x, *weights, *biases)
    if same is None:
        outs = map(activate, outs, activations)
    return tuple(
        constrain(out, layer.out_axes, first.rules)
        for out, layer in zip(outs, layers, strict=True)
    )


def norm_in_fp8(norm: Any, layers: Sequence[Any], x: Array) -> tuple[Array, Norm]:
    """`x` and a norm that layers round as they compute it, or ``norm(x)`` and None."""
    if isinstance(norm, RMSNorm) and rounds_rows(layers, norm.dtype, x.dtype):
        return x, (norm.factors, norm.eps)
    return x if norm is None else norm(x), None


def takes_norm(layers: Sequence[Any], norm: Any) -> bool:
    """Whether the only layer may round a norm as it is computed: `after_norm`."""
    return (
        len(layers) == 1
        and isinstance(norm, RMSNorm)
        and hasattr(layers[0], "after_norm")
    )


def rounds_rows(layers: Sequence[Any], *dtypes: DTypeLike) -> bool:
    """Whether layers read their input in fp8 alone, and `dtypes` are theirs."""
    return all(
        isinstance(layer, _TensorParallelLinear)
        and layer.quantization in ("fp8", "fp8_blockwise")
        and layer.low_rank is None
        and {jnp.dtype(layer.dtype)} == {jnp.dtype(dtype) for dtype in dtypes}
        for layer in layers
    )


def project_and_sum(
    layers: Sequence[Any], xs: Sequence[Float[Array, "B T _in"]]
) -> Float[Array, "B T out"]:
    """The sum of projections, each of its own input, in one reduction.

    Layers of another kind, such as pruned ones, run one by one.
    """
    if not all(isinstance(layer, RowParallelLinear) for layer in layers):
        outs = [layer(x) for layer, x in zip(layers, xs, strict=True)]
        return functools.reduce(operator.add, outs)
    out = _sum_of_products(layers, xs)
    for layer, x in zip(layers, xs, strict=True):
        out = layer.add_bias(layer.adapt(out, x))
    return out


def _sum_of_products(layers: Sequence[Any], xs: Sequence[Array]) -> Array:
    first = layers[0]
    for layer, x in zip(layers, xs, strict=True):
        layer.check_input(x, ndim=3)
    return row_parallel(
        [x.astype(first.dtype) for x in xs],
        [layer.factor for layer in layers],
        kernel_axes=[layer.kernel_axes for layer in layers],
        out_axes=first.out_axes,
        rules=first.rules,
        tensor_parallel=first.tensor_parallel,
        quantization=first.quantization,
    )
