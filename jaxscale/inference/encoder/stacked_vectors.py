"""Parameters of a model in fewer arrays: each costs the host in every call.

Legend: N vectors, D features.
"""

import collections
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array


_FEWEST = 8
"""Reading fewer vectors out of their stack takes longer than passing them."""


class StackedVectors:
    """Biases and norms of equal size as one array; all other parameters as they are.

    A stack [N, D] is in fp32, which holds 16-bit values exactly, and is rounded back
    when it is read. XLA converts dozens of vectors in one kernel, but copies slices of
    the same type one by one. Vectors in fp32 are not stacked.

    Example:
        >>> vectors = [jnp.full(4, i, jnp.bfloat16) for i in range(9)]
        >>> stacked = StackedVectors([*vectors, jnp.ones((2, 4))])
        >>> [array.shape for array in stacked.arrays]
        [(9, 4), (2, 4)]
        >>> print(stacked.leaves(stacked.arrays)[7])
        [7 7 7 7]
    """

    def __init__(self, leaves: Sequence[Any]) -> None:
        """Stack what can be; of shapes the shapes are stacked.

        Args:
            leaves: Parameters on one device.
        """
        alike = collections.defaultdict[Any, list[int]](list)
        for place, leaf in enumerate(leaves):
            if leaf.ndim == 1 and leaf.dtype in (jnp.bfloat16, jnp.float16):
                alike[leaf.shape, leaf.dtype].append(place)
        self._stacked = [places for places in alike.values() if len(places) >= _FEWEST]
        self._types = [leaves[places[0]].dtype for places in self._stacked]
        within = {place for places in self._stacked for place in places}
        self._others = [place for place in range(len(leaves)) if place not in within]
        self.arrays = (
            *(_stack([leaves[i] for i in places]) for places in self._stacked),
            *(leaves[i] for i in self._others),
        )
        """The stacks, then the other parameters."""

    def leaves(self, arrays: Sequence[Array]) -> list[Array]:
        """The parameters in their order, of arrays like `arrays`."""
        found: dict[int, Array] = {}
        for places, dtype, stack in zip(
            self._stacked, self._types, arrays, strict=False
        ):
            found |= {i: stack[row].astype(dtype) for row, i in enumerate(places)}
        others = arrays[len(self._stacked) :]
        found |= dict(zip(self._others, others, strict=True))
        return [found[place] for place in range(len(found))]


def _stack(vectors: Sequence[Any]) -> Any:
    """[N, D] fp32 of N vectors, or its shape."""
    first = vectors[0]
    if isinstance(first, jax.ShapeDtypeStruct):
        shape = len(vectors), *first.shape
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=first.sharding)
    return _stack_arrays(vectors)


@jax.jit
def _stack_arrays(vectors: Sequence[Array]) -> Array:
    return jnp.stack(vectors).astype(jnp.float32)
