"""Conversion of vocabulary tables that were saved with another padding."""

import dataclasses

import jax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from jaxscale.models.vocabulary import with_rows
from jaxscale.sharding.rules import as_tuple


@dataclasses.dataclass(frozen=True, kw_only=True)
class VocabularyMove:
    """The conversion of a table from one mesh's padding to another's."""

    saved: jax.ShapeDtypeStruct
    """The array as read."""
    wanted: jax.ShapeDtypeStruct
    """The array as wanted."""
    dimension: int
    """The dimension over the vocabulary."""

    @classmethod
    def between(
        cls,
        saved: tuple[int, ...],
        wanted: jax.ShapeDtypeStruct,
        dimension: int,
        vocab_size: int | None,
    ) -> "VocabularyMove | None":
        """The conversion, or None if the shapes differ in more than padding.

        Args:
            saved: Shape in the checkpoint.
            wanted: The array as wanted.
            dimension: The dimension over the vocabulary.
            vocab_size: Tokens of the vocabulary, behind which there are zeros, if
                known.
        """
        others = list(saved)
        others[dimension : dimension + 1] = wanted.shape[dimension : dimension + 1]
        fewest = min(saved[dimension], wanted.shape[dimension])
        is_padding = vocab_size is not None and fewest >= vocab_size
        if tuple(others) != tuple(wanted.shape) or not is_padding:
            return None
        place = _place(wanted.sharding, dimension, saved[dimension])
        return cls(
            saved=jax.ShapeDtypeStruct(saved, wanted.dtype, sharding=place),
            wanted=wanted,
            dimension=dimension,
        )

    def __call__(self, x: Array) -> Array:
        """Convert the array."""

        def moved(x: Array) -> Array:
            x = jax.device_put(x, jax.memory.Space.Device)
            return with_rows(x, self.dimension, self.wanted.shape[self.dimension])

        return jax.jit(moved, out_shardings=self.wanted.sharding)(x)


def _place(sharding: object, dimension: int, size: int) -> object:
    """Sharding to read a table, given the wanted one: split if its rows divide."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    entries = list(sharding.spec)
    names = as_tuple(entries[dimension]) if len(entries) > dimension else ()
    ways = 1
    for name in names:
        ways *= sharding.mesh.shape[name]
    if size % ways:
        entries[dimension] = None
    return NamedSharding(
        sharding.mesh, PartitionSpec(*entries), memory_kind=sharding.memory_kind
    )
