"""Merge column-parallel layers with the same input into one matmul (fused QKV).

Legend: B batch, T tokens, D features of the input, S shards.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Shaped

from jaxscale.nn.linear import ColumnParallelLinear
from jaxscale.sharding.operations import reshape
from jaxscale.sharding.rules import AxisRules


class Parts:
    """How to split the output of merged layers; each shard has parts of all."""

    out_axes: tuple[str | None, ...]
    rules: AxisRules
    shards: int
    parts: tuple[tuple[int, tuple[str | None, ...]], ...]
    """Output features of each layer, and the logical axes of its output."""

    def split(
        self, out: Float[Array, "B T _all"]
    ) -> tuple[Float[Array, "B T _part"], ...]:
        """Split the output of this layer into those of the layers that it joins."""
        b, t, features = out.shape
        shape = (b, t, self.shards, features // self.shards)
        # The last name is that of the columns, of which a device has whole shards.
        whole = reshape(out, shape, (*self.out_axes, None), self.rules)  # [B, T, S, _]
        parts, start = [], 0
        for size, axes in self.parts:
            part = whole[..., start : (start := start + size // self.shards)]
            parts.append(reshape(part, (b, t, size), axes, self.rules))  # [B, T, part]
        return tuple(parts)


class JoinedLinear(Parts, ColumnParallelLinear):
    """Several `ColumnParallelLinear` with concatenated kernels, for inference.

    A decode step mostly reads weights, and one large matmul reads them faster than
    several small ones. XLA merges the small ones too, but concatenates their kernels in
    every step. Each of S shards of the columns holds its part of every layer, so that
    tensor-parallel devices split the kernel as they split the layers.

    Example:
        >>> options = {"kernel_axes": ("embed", "heads"), "rngs": nnx.Rngs(0)}
        >>> options["out_axes"] = ("batch", None, "act_heads")
        >>> q, k = (ColumnParallelLinear(4, size, **options) for size in (8, 2))
        >>> joined = JoinedLinear([q, k], shards=2)
        >>> x = jnp.ones((1, 3, 4))
        >>> [part.shape for part in joined.split(joined(x))]
        [(1, 3, 8), (1, 3, 2)]
    """

    def __init__(self, layers: Sequence[ColumnParallelLinear], *, shards: int) -> None:
        """Take over the parameters of layers that `can_join`.

        Args:
            layers: The layers, all with the same input.
            shards: S, number of devices that the columns are split over.
        """
        first = layers[0]
        self.kernel_axes, self.dtype = first.kernel_axes, first.dtype
        self.out_axes, self.rules = first.out_axes, first.rules
        self.tensor_parallel = first.tensor_parallel
        self.shards = shards
        self.parts = tuple((la.kernel.shape[1], la.out_axes) for la in layers)

        def joined(arrays: Sequence[Array], axes: tuple[str | None, ...]) -> nnx.Param:
            together = side_by_side(arrays, shards)
            return nnx.Param(together, out_sharding=axes, eager_sharding=False)

        self.kernel = joined([la.kernel[...] for la in layers], self.kernel_axes)
        biases = [la.bias[...] for la in layers if la.bias is not None]
        self.bias = joined(biases, self.kernel_axes[1:]) if biases else None


def side_by_side(
    arrays: Sequence[Shaped[Array, "*rows _part"]], shards: int
) -> Shaped[Array, "*rows _all"]:
    """Columns of several layers, of which each of `shards` parts has its share of all.

    Example:
        >>> print(side_by_side([jnp.array([1, 2, 3, 4]), jnp.array([5, 6])], 2))
        [1 2 5 3 4 6]
    """
    rows = arrays[0].shape[:-1]
    apart = [a.reshape(*rows, shards, -1) for a in arrays]  # [.., S, part]
    return jnp.concatenate(apart, axis=-1).reshape(*rows, -1)


def can_join(layers: Sequence[Any], shards: int) -> bool:
    """True if `layers` are several dense layers, split over the same devices."""
    if len(layers) < 2 or not all(type(la) is ColumnParallelLinear for la in layers):
        return False
    specs = {la.rules.spec(*la.kernel_axes) for la in layers}
    biased = {la.bias is not None for la in layers}
    divided = all(la.kernel.shape[1] % shards == 0 for la in layers)
    return len(specs) == len(biased) == 1 and divided


def join_inputs(layer: Any, names: Sequence[str], shards: int) -> None:
    """Set ``layer.joined`` to a `JoinedLinear` that replaces the layers `names`.

    Layers that cannot be merged, such as sparse ones, stay as they are.
    """
    layers = [getattr(layer, name) for name in names]
    if can_join(layers, shards):
        layer.joined = nnx.data(JoinedLinear(layers, shards=shards))
        for name in names:
            setattr(layer, name, None)
