"""Memory of the host that programs read where it is."""

import collections
import ctypes
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding


class PinnedBuffer(NamedTuple):
    """Pinned memory under two names."""

    array: jax.Array
    """What a program takes. Its values change, so nothing else may read it."""
    view: np.ndarray
    """What the host writes, while no program reads."""

    @classmethod
    def of(cls, array: jax.Array) -> "PinnedBuffer":
        """The memory of an array, once it is there."""
        address = array.block_until_ready().unsafe_buffer_pointer()
        memory: Any = (ctypes.c_byte * array.nbytes).from_address(address)
        memory.owner = array  # a view keeps what it shows
        return cls(array, np.frombuffer(memory, array.dtype).reshape(array.shape))


class PinnedBuffers:
    """Memory for batches and results, that of results used again.

    An array of numpy is copied at each call: to memory that is allocated for it, by
    another thread, and the program waits for that.

    Example:
        >>> device = jax.devices()[0]
        >>> where = SingleDeviceSharding(device, memory_kind="pinned_host")
        >>> buffers = PinnedBuffers(where)
        >>> buffer = buffers.make((1, 3), np.int32)
        >>> buffer.view[0] = 4, 5, 6
        >>> print(jax.jit(lambda x: x, out_shardings=where)(buffer.array))
        [[4 5 6]]
        >>> buffers.give_back(buffers.take((1, 3)))
        >>> buffers.take((1, 3)).view
        array([[nan, nan, nan]], dtype=float32)
    """

    def __init__(self, where: SingleDeviceSharding) -> None:
        """Allocate nothing yet.

        Args:
            where: Pinned memory of a device.
        """
        self.where = where
        self._free = collections.defaultdict[Any, list[PinnedBuffer]](list)

    def make(self, shape: tuple[int, ...], dtype: type) -> PinnedBuffer:
        """New memory with zeros."""
        return PinnedBuffer.of(jax.device_put(np.zeros(shape, dtype), self.where))

    def take(self, shape: tuple[int, ...]) -> PinnedBuffer:
        """Memory for a result that nothing else uses, fp32, with NaN.

        A part of its last result may have been read while others were still copied.
        Such a copy must have ended: it would pass for that of the next program.
        """
        try:
            buffer = self._free[shape].pop()  # one thread gets it
        except IndexError:
            buffer = self.make(shape, np.float32)
        array: Any = buffer.array
        if not array.is_ready() and np.isnan(buffer.view).any():
            array.block_until_ready()
        buffer.view.fill(np.nan)
        return buffer

    def give_back(self, buffer: PinnedBuffer) -> None:
        """Say that the program that writes a result is done, and the result read."""
        self._free[buffer.view.shape].append(buffer)
