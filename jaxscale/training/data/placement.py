"""Batches on the devices, made ahead of time by a thread of Grain."""

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Shaped


MAX_PREFETCH = 1000
"""Most batches made ahead of time."""


class RowPlacement:
    """Where the rows of a batch go, and which of them this process makes.

    Args:
        sharding: Sharding of the rows; None: the default device of this process.
        batch_size: Rows of a batch.

    Raises:
        ValueError: the rows cannot be spread evenly.
    """

    def __init__(self, sharding: NamedSharding | None, batch_size: int) -> None:
        """Find the rows that the devices of this process hold."""
        self._sharding = sharding
        self._batch_size = batch_size
        # A setting of the thread that asks, not of the one that prefetches.
        self._device = jax.config.jax_default_device
        self.local_rows: Sequence[int] = range(batch_size)
        """Numbers of these rows, in order."""
        if sharding is not None:
            _check_divisible(sharding, batch_size)
            places = sharding.addressable_devices_indices_map((batch_size, 1))
            held = [range(batch_size)[place[0]] for place in places.values() if place]
            self.local_rows = sorted(set().union(*held))

    def to_devices(self, local: Shaped[np.ndarray, "rows *_"]) -> jax.Array:
        """The array [B, ...] of all processes, each of which gives its rows."""
        if self._sharding is None:
            with jax.default_device(self._device):
                return jnp.asarray(local)
        shape = (self._batch_size, *local.shape[1:])

        def shard(index: Any) -> np.ndarray:
            low, high, _ = index[0].indices(shape[0])
            start = int(np.searchsorted(self.local_rows, low))
            return local[(slice(start, start + high - low), *index[1:])]

        return jax.make_array_from_callback(shape, self._sharding, shard)


def prefetched(source: Any, count: int) -> Any:
    """An iterator of Grain over `source`, which has a length and items.

    Items are made on one thread, `count` of them before they are asked for; 0: none,
    and no thread. Packing and the transfer to the devices are then done while the
    devices compute an earlier step.
    """
    grain = _require_grain()
    options = grain.ReadOptions(num_threads=min(count, 1), prefetch_buffer_size=count)
    return iter(grain.MapDataset.source(source).to_iter_dataset(options))


def saved_place(state: Mapping[str, Any], name: str) -> int:
    """A number of a saved position.

    Raises:
        ValueError: it is none.
    """
    value = state.get(name)
    if type(value) is not int or value < 0:
        raise ValueError(
            f"the saved position has {name} {value!r:.80}, expected a number from 0 "
            "on; resume from another checkpoint"
        )
    return value


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


def _require_grain() -> ModuleType:
    """The Grain library, or an error that says how to install it."""
    try:
        import grain
    except ImportError as error:
        raise ImportError(
            "batches need Grain: pip install 'jaxscale[train]'"
        ) from error
    return grain
