"""`SingleWeights`: the few weights that a mask keeps outside of tiles.

Each output feature has the same capacity for them: their values and which input
features they belong to. The product reads, for each single weight, one row of
feature-major activations; XLA fuses some of them into one pass over the output. No
matrix unit takes part, so a single weight costs what dozens in a tile do::

    weight            values            rows
    a . .             a b c             0 2 1
    . . c             d 0 0             3 4 4      (4 = K: no weight)
    . b .
    d . .

Axes: K input features, N output features, J capacity of an output feature for single
weights, M tokens.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int


__all__ = ["SingleWeights", "single_weights_matmul"]

_TOGETHER = 8
"""Weights of an output feature that one pass over the output adds."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class SingleWeights:
    """Single weights of a matrix [K,N]; a pytree.

    ``weight[rows[j, n], n] = values[j, n]`` where ``rows[j, n] < K``.

    Example:
        >>> import jax.numpy as jnp
        >>> dense = jnp.array([[1.0, 2.0], [3.0, 4.0]])
        >>> mask = jnp.array([[True, False], [True, True]])
        >>> singles = SingleWeights.from_dense(dense, mask)
        >>> singles.to_dense()
        Array([[1., 0.],
               [3., 4.]], dtype=float32)
    """

    values: Float[Array, "*layers J N"]
    """Values of each output feature; zero where there is none."""
    rows: Int[Array, "*layers J N"]
    """Input feature of each; K where there is none."""
    inputs: int = dataclasses.field(metadata={"static": True})
    """K."""

    @classmethod
    def from_dense(
        cls,
        weight: Float[Array, "K N"] | Float[np.ndarray, "K N"],
        mask: Bool[Array, "K N"] | Bool[np.ndarray, "K N"],
        room: int = 0,
    ) -> "SingleWeights":
        """Packs the weights where a mask is true; runs on the host.

        Args:
            weight: [K,N].
            mask: [K,N].
            room: the least J, for stacking.

        Raises:
            ValueError: the shapes differ.
        """
        weight, mask = np.asarray(weight), np.asarray(mask)
        if weight.shape != mask.shape or weight.ndim != 2:
            raise ValueError(
                f"mask has shape {mask.shape}, expected {weight.shape} as the weight"
            )
        inputs, outputs = weight.shape
        counts = mask.sum(0)
        room = max(int(counts.max(initial=0)), room)
        columns, rows = np.nonzero(mask.T)  # by output feature
        place = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        values = np.zeros((room, outputs), weight.dtype)
        at = np.full((room, outputs), inputs, np.int32)
        values[place, columns] = weight[rows, columns]
        at[place, columns] = rows
        return cls(jnp.asarray(values), jnp.asarray(at), inputs)

    @property
    def room(self) -> int:
        """J, the capacity of each output feature for single weights."""
        return self.values.shape[-2]

    def to_dense(self) -> Float[Array, "K N"]:
        """The weight with zeros elsewhere."""
        outputs = self.values.shape[-1]
        dense = jnp.zeros((self.inputs, outputs), self.values.dtype)
        columns = jnp.broadcast_to(jnp.arange(outputs), self.rows.shape)  # [J, N]
        return dense.at[self.rows, columns].set(self.values, mode="drop")


def single_weights_matmul(
    x: Float[Array, "K M"], singles: SingleWeights
) -> Float[Array, "N M"]:
    """The product of feature-major activations by single weights, with fp32 sums.

    ``y[n, m] = sum_j values[j, n] x[rows[j, n], m]``

    Args:
        x: [K,M].
        singles: of a weight [K,N].

    Returns:
        [N,M], float32.
    """
    values, rows = singles.values, singles.rows
    outputs = values.shape[-1]

    def product(value: Array, row: Array) -> Array:
        found = x.at[row].get(mode="fill", fill_value=0).astype(jnp.float32)
        return value[:, None].astype(jnp.float32) * found  # [N, M]

    # Made again in the backward pass: the rows of all weights are far larger than x.
    @jax.checkpoint
    def add(sums: Array | None, some: tuple[Array, Array]) -> tuple[Array, None]:
        for value, row in zip(*some, strict=True):
            one = product(value, row)
            sums = one if sums is None else sums + one
        assert sums is not None  # there is one weight at least
        return sums, None

    if not singles.room:
        return jnp.zeros((outputs, x.shape[1]), jnp.float32)
    first = singles.room % _TOGETHER or _TOGETHER
    sums, _ = add(None, (values[:first], rows[:first]))
    if singles.room == first:
        return sums
    # [J / together, together, N] each
    others = [a[first:].reshape(-1, _TOGETHER, outputs) for a in (values, rows)]
    return lax.scan(add, sums, tuple(others))[0]
