"""A parameter of one layer, inside an array of that parameter of all layers.

Legend: L layers.
"""

import dataclasses
import typing
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Int, Shaped


# Transformations rebuild the class around shapes, so that no field can be checked.
@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerOfStack:
    """What a parameter of inference may hold in place of its array.

    Kernels that take stacks read the layer in place. For all else the array is cut out
    of the stack when the parameter is read. A program with stacks has fewer arguments,
    each of which costs the host in every call.

    Example:
        >>> import jax.numpy as jnp
        >>> part = LayerOfStack(jnp.array([[1, 2], [3, 4]]), jnp.int32(1))
        >>> part.shape, nnx.Param(part)[...].tolist()
        ((2,), [3, 4])
    """

    stack: Shaped[Array, "L *shape"]
    """The parameter of all layers."""
    layer: Int[Array, ""] | np.int32
    """Which one this is."""

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the parameter."""
        return self.stack.shape[1:]

    @property
    def ndim(self) -> int:
        """Dimensions of the parameter."""
        return self.stack.ndim - 1

    @property
    def dtype(self) -> DTypeLike:
        """Type of the parameter."""
        return self.stack.dtype

    def __getitem__(self, index: Any) -> Shaped[Array, "..."]:
        """The array, or a part of it."""
        part = jax.lax.dynamic_index_in_dim(self.stack, self.layer, keepdims=False)
        return part[index]


def stacks_of(
    parameters: Sequence[nnx.Variable | None], dtype: DTypeLike
) -> list[LayerOfStack] | None:
    """What `parameters` hold, if all are parts of stacks of this type."""
    values = [None if p is None else p.get_raw_value() for p in parameters]
    parts = [v for v in values if isinstance(v, LayerOfStack) and v.dtype == dtype]
    return parts if len(parts) == len(parameters) else None
