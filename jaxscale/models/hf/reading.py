"""Parameters from files to devices, in the layout of the files.

Bytes go from the file into memory of the host by several threads, and from there to the
devices: the host neither transposes nor converts them, which devices do a hundred times
as fast. A server reads its weights while another thread traces programs, and waits up
to 5 ms for Python's lock after each call that gave it away: so few calls are made, each
for many bytes.
"""

import collections
import contextlib
import dataclasses
import functools
import math
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding

from jaxscale.models.hf.files import Checkpoint
from jaxscale.models.hf.names import TensorMap


type Place = NamedSharding | SingleDeviceSharding
"""Where an array is to be."""
type Bounds = tuple[tuple[int, int], ...]
"""Start and end of a slice in each dimension."""

_READERS = 8  # threads
_PIECE = 64 << 20  # bytes that one of them reads at a time
_GROUP = 512 << 20  # bytes that go to the devices together, but at least a shard
_AHEAD = 1 << 30  # bytes in memory of the host, but at least a group
_ALIGNED = 64


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Wanted:
    """A parameter, or the part of it that one block has; all as the file lays it out.

    The file has the dimensions of a kernel in reverse where `TensorMap.transpose` says
    so, but those of a stack of layers first.
    """

    entry: TensorMap
    layer: int | None
    """The block; None for a whole parameter, whose first dimension may be layers."""
    shape: tuple[int, ...]
    limits: tuple[int, ...]
    """The part of `shape` that is in the file; the rest is zeros."""
    columns: np.ndarray
    """Where the features are in a tensor that several parameters share."""
    dtype: np.dtype
    place: Place

    @property
    def is_stack(self) -> bool:
        """The first dimension is layers."""
        return self.entry.stacked and self.layer is None

    @functools.cached_property
    def shards(self) -> list["_Shard"]:
        """What the devices of this process need; copies are read once."""
        found: dict[Bounds, list[Any]] = {}
        where = self.place.addressable_devices_indices_map(self.shape)
        for device, index in where.items():
            # The index is None only for devices of other processes.
            parts = zip(index or (), self.shape, strict=True)
            bounds = tuple(part.indices(size)[:2] for part, size in parts)
            found.setdefault(bounds, []).append(device)
        return [_Shard(self, *each) for each in found.items()]


class _Shard(NamedTuple):
    """A slice of a parameter, and the devices that get it."""

    wanted: Wanted
    bounds: Bounds
    devices: list[Any]

    @property
    def shape(self) -> list[int]:
        return [stop - start for start, stop in self.bounds]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.wanted.dtype.itemsize

    def reads(
        self, checkpoint: Checkpoint, target: np.ndarray
    ) -> Iterator[functools.partial[None]]:
        """What fills `target` with the slice, piece by piece."""
        wanted, stack = self.wanted, self.wanted.is_stack
        entry, layers = wanted.entry, range(*self.bounds[0]) if stack else (None,)
        limits = zip(self.bounds[stack:], wanted.limits[stack:], strict=True)
        inside = [(min(a, end), min(b, end)) for (a, b), end in limits]
        sizes = [b - a for a, b in inside]
        target = target if stack else target[None]
        if list(target.shape[1:]) != sizes:
            target.fill(0)
        target = target[:, *map(slice, sizes)]
        if not target.size:
            return
        axis = 0 if entry.transpose else len(sizes) - 1
        columns = wanted.columns[slice(*inside[axis])]
        low, high = int(columns[0]), int(columns[-1]) + 1
        index = [slice(*each) for each in inside]
        index[axis] = slice(low, high)
        rows = max(_PIECE * sizes[0] // target[0].nbytes, 1)
        for layer, whole in zip(layers, target, strict=True):
            name = entry.tensor(wanted.layer if layer is None else layer)
            if len(columns) < high - low:  # those of other parameters lie between
                part = checkpoint.view(name)[tuple(index)]
                yield functools.partial(_take, part, columns - low, axis, whole)
                continue
            for start in range(0, sizes[0], rows):
                piece = whole[start : start + rows]
                begin = index[0].start + start
                where = slice(begin, begin + len(piece)), *index[1:]
                yield functools.partial(checkpoint.read, name, where, piece)


def _take(part: np.ndarray, columns: np.ndarray, axis: int, target: np.ndarray) -> None:
    target[...] = np.take(part, columns, axis)


def read_arrays(
    checkpoint: Checkpoint, wanted: Sequence[Wanted]
) -> Generator[jax.Array]:
    """Each of `wanted`, on its devices, in order; those after it are read meanwhile.

    At most `_AHEAD` bytes are in memory of the host, and beside the arrays that were
    taken `_GROUP` on the devices, none of another block.
    """
    shards = [shard for each in wanted for shard in each.shards]
    with contextlib.closing(_sent(checkpoint, _groups(shards))) as sent:
        for each in wanted:
            # No name holds what is yielded: it is gone once the caller lets go of it.
            yield jax.make_array_from_single_device_arrays(
                each.shape,
                each.place,
                [array for _ in each.shards for array in next(sent)],
                dtype=each.dtype,
            )


def _groups(shards: Sequence[_Shard]) -> list[list[_Shard]]:
    """The shards that go to their devices together, in their order."""
    groups: list[list[_Shard]] = []
    for shard in shards:
        last = groups[-1] if groups else []
        fits = sum(each.nbytes for each in last) + shard.nbytes <= _GROUP
        if last and fits and shard.wanted.layer == last[0].wanted.layer:
            last.append(shard)
        else:
            groups.append([shard])
    return groups


def _sent(
    checkpoint: Checkpoint, groups: Sequence[list[_Shard]]
) -> Generator[list[jax.Array]]:
    """The copies of each shard of all groups, one for each of its devices."""
    memory, following = _Memory(groups), collections.deque(groups)
    reading = collections.deque[tuple[Any, ...]]()
    pool = ThreadPoolExecutor(_READERS, thread_name_prefix="read")

    def begin() -> None:
        """Read as much as there is memory for."""
        while following and (parts := memory.take(following[0])) is not None:
            group = following.popleft()
            reading.append((group, parts, _read(checkpoint, group, parts, pool)))

    try:
        begin()
        while reading:
            group, parts, futures = reading.popleft()
            wait(futures)
            for future in futures:
                future.result()
            arrays = _put(group, parts)
            del parts
            memory.give_back()
            begin()
            while arrays:
                yield arrays.popleft()
    finally:
        pool.shutdown(cancel_futures=True)


class _Memory:
    """Memory of the host, `_AHEAD` bytes or the largest group, as a ring.

    It is used over and over: to read into new pages takes twice as long.
    """

    def __init__(self, groups: Sequence[list[_Shard]]) -> None:
        self._end = max([_AHEAD, *map(_ring_bytes, groups)])
        devices = [shard.devices[0] for group in groups for shard in group]
        self._bytes: np.ndarray | None = None
        # An array of a CPU may be the memory that it was made of.
        if devices and devices[0].platform != "cpu":
            self._bytes = np.empty(self._end, np.uint8)
        self._taken = collections.deque[tuple[int, int]]()

    def take(self, group: Sequence[_Shard]) -> list[np.ndarray] | None:
        """An array for each shard of a group; None until earlier ones are done."""
        size, start = _ring_bytes(group), 0
        if self._taken:
            first, (last, start) = self._taken[0][0], self._taken[-1]
            if last >= first and start + size > self._end:
                start = 0
            if start + size > (first if start <= first else self._end):
                return None
        self._taken.append((start, start + size))
        parts = []
        for shard in group:
            dtype, count = shard.wanted.dtype, shard.nbytes
            if self._bytes is None:
                part = np.empty(shard.shape, dtype)
            else:
                part = self._bytes[start : start + count].view(dtype)
            parts.append(part.reshape(shard.shape))
            start += _aligned(count)
        return parts

    def give_back(self) -> None:
        """The memory of the group that was taken first."""
        self._taken.popleft()


def _ring_bytes(group: Sequence[_Shard]) -> int:
    return sum(_aligned(shard.nbytes) for shard in group) or _ALIGNED


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def _read(
    checkpoint: Checkpoint,
    group: Sequence[_Shard],
    parts: Sequence[np.ndarray],
    pool: ThreadPoolExecutor,
) -> list[Future[None]]:
    """Begin to read a group; small tensors together."""
    futures, some, size = [], [], 0
    for shard, part in zip(group, parts, strict=True):
        for read in shard.reads(checkpoint, part):
            some.append(read)
            size += read.args[-1].nbytes
            if size >= _PIECE:
                futures.append(pool.submit(_call, some))
                some, size = [], 0
    return [*futures, pool.submit(_call, some)]


def _call(reads: Sequence[functools.partial[None]]) -> None:
    for read in reads:
        read()


def _put(
    group: Sequence[_Shard], parts: Sequence[np.ndarray]
) -> collections.deque[list[jax.Array]]:
    """The arrays of a group, for each shard those of its devices, once they are there.

    All in one call, after which nothing uses the memory of the host.
    """
    pairs = zip(group, parts, strict=True)
    copies = [(part, device) for shard, part in pairs for device in shard.devices]
    values, devices = map(list, zip(*copies, strict=True))
    found = iter(jax.block_until_ready(jax.device_put(values, devices)))
    return collections.deque([next(found) for _ in each.devices] for each in group)
