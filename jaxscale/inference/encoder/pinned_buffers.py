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
    """Buffers that are written again once their program is done.

    An array of numpy is copied at each call: to memory that is allocated for it, by
    another thread, and the program waits for that.

    Example:
        >>> device = jax.devices()[0]
        >>> where = SingleDeviceSharding(device, memory_kind="pinned_host")
        >>> buffers = PinnedBuffers(where)
        >>> buffer = buffers.take((1, 3))
        >>> buffer.view[0] = 4, 5, 6
        >>> print(jax.jit(lambda x: x, out_shardings=where)(buffer.array))
        [[4 5 6]]
        >>> buffers.give_back(buffer)
        >>> buffers.take((1, 3)).view
        array([[0, 0, 0]], dtype=int32)
    """

    def __init__(self, where: SingleDeviceSharding) -> None:
        """Allocate nothing yet.

        Args:
            where: Pinned memory of a device.
        """
        self.where = where
        self._free = collections.defaultdict[Any, list[PinnedBuffer]](list)

    def take(self, shape: tuple[int, ...], dtype: type = np.int32) -> PinnedBuffer:
        """A buffer that nothing else uses, with zeros; NaN if it is of fp32.

        Of a result, which is fp32, a part may have been read while others were still
        copied. Such a copy must have ended: it would pass for that of the next program.
        """
        try:
            buffer = self._free[shape, np.dtype(dtype)].pop()  # one thread gets it
        except IndexError:
            buffer = self._allocate(shape, dtype)
        array: Any = buffer.array
        if not array.is_ready() and np.isnan(buffer.view).any():
            array.block_until_ready()
        buffer.view.fill(np.nan if buffer.view.dtype == np.float32 else 0)
        return buffer

    def give_back(self, buffer: PinnedBuffer) -> None:
        """Say that the program that reads or writes a buffer is done."""
        self._free[buffer.view.shape, buffer.view.dtype].append(buffer)

    def _allocate(self, shape: tuple[int, ...], dtype: type) -> PinnedBuffer:
        return PinnedBuffer.of(jax.device_put(np.zeros(shape, dtype), self.where))
