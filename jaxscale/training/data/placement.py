"""Which rows of a batch a process makes, and how they become one global array."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Shaped


class RowPlacement:
    """The placement of a batch, and the rows that this process makes.

    Args:
        sharding: Sharding of the batch dimension; None: this process's default device.
        batch_size: Rows of a batch.

    Raises:
        ValueError: the rows cannot be spread evenly.
    """

    def __init__(self, sharding: NamedSharding | None, batch_size: int) -> None:
        """Find the rows that the devices of this process hold."""
        self._sharding = sharding
        self._batch_size = batch_size
        # A setting of the calling thread, not of the prefetching one.
        self._device = jax.config.jax_default_device
        self.local_rows: Sequence[int] = range(batch_size)
        """The numbers of this process's rows, in order."""
        if sharding is not None:
            _check_divisible(sharding, batch_size)
            places = sharding.addressable_devices_indices_map((batch_size, 1))
            held = [range(batch_size)[place[0]] for place in places.values() if place]
            self.local_rows = sorted(set().union(*held))

    def to_devices(self, local: Shaped[np.ndarray, "rows *_"]) -> jax.Array:
        """The global array [B, ...], from the rows of each process."""
        if self._sharding is None:
            with jax.default_device(self._device):
                return jnp.asarray(local)
        shape = (self._batch_size, *local.shape[1:])

        def shard(index: Any) -> np.ndarray:
            low, high, _ = index[0].indices(shape[0])
            start = int(np.searchsorted(self.local_rows, low))
            return local[(slice(start, start + high - low), *index[1:])]

        return jax.make_array_from_callback(shape, self._sharding, shard)


def _check_divisible(sharding: NamedSharding, batch_size: int) -> None:
    axes = sharding.spec[0] if len(sharding.spec) else None
    if any(axis is not None for axis in sharding.spec[1:]):
        raise ValueError(
            f"sharding {sharding.spec} splits more than the rows of a batch; give it "
            "the axes of the rows alone"
        )
    names = (axes,) if isinstance(axes, str) else axes or ()
    sizes = {name: sharding.mesh.shape[name] for name in names}
    shards = int(np.prod(list(sizes.values()), initial=1))
    if batch_size % shards:
        written = " x ".join(f"{name}={size}" for name, size in sizes.items())
        raise ValueError(
            f"batch_size {batch_size} is not divisible by the {shards} shards of the "
            f"rows ({written}); make it a multiple of {shards}"
        )
