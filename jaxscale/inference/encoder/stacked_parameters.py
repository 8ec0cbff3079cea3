"""Parameters of a model in fewer arrays: each costs the host in every call.

Legend: L layers, N vectors, D features.
"""

import collections
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from jaxscale.models.encoder import EncoderModel
from jaxscale.nn.blocks import Block
from jaxscale.nn.disentangled import DisentangledAttention
from jaxscale.nn.linear import ColumnParallelLinear, RowParallelLinear
from jaxscale.nn.stacked import LayerOfStack
from pallas_kernels.matmul.dense import reads_stacks


_FEWEST = 8
"""Reading fewer vectors out of their stack takes longer than passing them."""


def unstacked_in_place(model: EncoderModel) -> EncoderModel:
    """`EncoderModel.unstacked`, but for what kernels read in stacks of all layers.

    These are the kernels and biases of the projections of queries, keys, values and
    hidden features, and of those whose sum with a residual is normalized. Where the
    layers of `model` are a stack, the arrays are its own. Otherwise they are copies,
    one kind of parameter after the other. Relative positions are projected once, here.
    Without that kernel, in 32 bits and on other devices, all keep their own arrays: XLA
    would copy each layer out of its stack.
    """
    result: Any = model.unstacked()
    if not isinstance(result.blocks, nnx.List) or not reads_stacks(model.dtype):
        return result
    result = jax.tree.map(lambda p: p, result)  # its variables are to change
    if result.relative is not None:
        _project_positions(result)
    layers = [dict(nnx.iter_modules(block)) for block in result.blocks]
    blocks = model.blocks
    whole = dict(nnx.iter_modules(blocks)) if isinstance(blocks, Block) else {}
    norms_follow = not model.config.pre_norm
    for path in layers[0]:
        kind = [block.get(path) for block in layers]
        if not all(_reads_in_place(layer, norms_follow) for layer in kind):
            continue
        for name in ("kernel", "bias"):
            given = whole.get(path)
            variables = [getattr(layer, name) for layer in kind]
            if len({v.shape for v in variables}) > 1:
                continue
            stack = (
                _stack([v.get_raw_value() for v in variables], variables[0].dtype)
                if given is None
                else getattr(given, name).get_raw_value()
            )
            for i, variable in enumerate(variables):
                variable.set_raw_value(LayerOfStack(stack, np.int32(i)))
    return result


def _project_positions(model: EncoderModel) -> None:
    """Replace the table of relative positions by its projections in each layer."""

    def project(model: EncoderModel) -> list[list[Array]]:
        table: Any = model.relative_table()
        return [
            [layer.scale * x for x in layer.project_positions(table)]
            for layer in _disentangled(model)
        ]

    first = jax.tree.leaves(model)[0]
    if isinstance(first, jax.ShapeDtypeStruct):
        tables = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=first.sharding),
            jax.eval_shape(project, model),
        )
    else:
        tables = jax.jit(project)(model)
    for layer, projected in zip(_disentangled(model), tables, strict=True):
        layer.keep_projected(projected)
    model.relative = model.relative_norm = None


def _disentangled(model: EncoderModel) -> list[DisentangledAttention]:
    layers = [layer for _, layer in nnx.iter_modules(model)]
    return [layer for layer in layers if isinstance(layer, DisentangledAttention)]


def _reads_in_place(layer: Any, norms_follow: bool) -> bool:
    """Whether `project_together` or `norm_of_sum` of `jaxscale.nn` do."""
    rows = norms_follow and type(layer) is RowParallelLinear
    return (
        (rows or type(layer) is ColumnParallelLinear)
        and layer.bias is not None
        and layer.quantization is None
        and layer.low_rank is None
        and layer.tensor_parallel is None
        and layer.kernel.dtype == layer.bias.dtype == layer.dtype
    )


class StackedParameters:
    """Biases and norms of equal size as one array, and each stack of layers once.

    A stack of vectors [N, D] is in fp32, which holds 16-bit values exactly, and is
    rounded back when it is read. XLA converts dozens of vectors in one kernel, but
    copies slices of the same type one by one. Vectors in fp32 are not stacked.

    Example:
        >>> vectors = [jnp.full(4, i, jnp.bfloat16) for i in range(9)]
        >>> stacked = StackedParameters([*vectors, jnp.ones((2, 4))])
        >>> [array.shape for array in stacked.arrays]
        [(9, 4), (2, 4)]
        >>> print(stacked.leaves(stacked.arrays)[7])
        [7 7 7 7]
    """

    def __init__(self, leaves: Sequence[Any]) -> None:
        """Stack what can be; of shapes the shapes are stacked.

        Args:
            leaves: Parameters on one device, some of them `LayerOfStack`.
        """
        alike = collections.defaultdict[Any, list[int]](list)
        stacks: dict[int, Any] = {}
        parts: dict[int, tuple[int, Any]] = {}
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, LayerOfStack):
                stacks[id(leaf.stack)] = leaf.stack
                parts[place] = id(leaf.stack), leaf.layer
            elif leaf.ndim == 1 and leaf.dtype in (jnp.bfloat16, jnp.float16):
                alike[leaf.shape, leaf.dtype].append(place)
        self._vectors = [places for places in alike.values() if len(places) >= _FEWEST]
        self._types = [leaves[places[0]].dtype for places in self._vectors]
        within = {place for places in self._vectors for place in places} | {*parts}
        self._others = [place for place in range(len(leaves)) if place not in within]
        self.arrays = (
            *(
                _stack([leaves[i] for i in places], jnp.float32)
                for places in self._vectors
            ),
            *stacks.values(),
            *(leaves[i] for i in self._others),
        )
        """The stacks of vectors, those of layers, then the other parameters."""
        first = len(self._vectors)
        index = {key: first + i for i, key in enumerate(stacks)}
        self._parts = {
            place: (index[key], layer) for place, (key, layer) in parts.items()
        }

    def leaves(self, arrays: Sequence[Array]) -> list[Any]:
        """The parameters in their order, of arrays like `arrays`."""
        found: dict[int, Any] = {}
        for places, dtype, stack in zip(
            self._vectors, self._types, arrays, strict=False
        ):
            found |= {i: stack[row].astype(dtype) for row, i in enumerate(places)}
        for place, (index, layer) in self._parts.items():
            found[place] = LayerOfStack(arrays[index], layer)
        others = arrays[len(arrays) - len(self._others) :]
        found |= dict(zip(self._others, others, strict=True))
        return [found[place] for place in range(len(found))]


def _stack(parts: Sequence[Any], dtype: Any) -> Any:
    """[N, ...] of N arrays, or its shape."""
    first = parts[0]
    if isinstance(first, jax.ShapeDtypeStruct):
        shape = len(parts), *first.shape
        return jax.ShapeDtypeStruct(shape, dtype, sharding=first.sharding)
    return _stack_arrays(parts, dtype)


@jax.jit(static_argnums=1)
def _stack_arrays(parts: Sequence[Array], dtype: Any) -> Array:
    return jnp.stack(parts).astype(dtype)
