"""The rows of the decode batch: their state on the device, and their owners.

A running request has a slot, a row of an int32 array on the device. Only the first
`bucket` rows are decoded, one of few batch sizes, because each is a separate program.
When a smaller one is enough, later rows move into the holes before them (Flover's
reordering, of rows instead of caches) and the bucket shrinks.
"""

import enum
import heapq
import struct
from collections import abc
from collections.abc import Callable, Iterable

from jaxscale.inference.engine.scheduling.scheduler_config import bucket_of
from jaxscale.inference.engine.scheduling.sequence import Sequence, SequenceStatus


NUM_STOPS = 8
"""Stop tokens per row on the device; the scheduler checks any others."""


_LARGEST = (2 - 2**-23) * 2.0**127  # of fp32


class Column(enum.IntEnum):
    """The columns of a row, int32; from `TABLE` on it is the page table."""

    FLAGS = 0
    """Bits of `RowFlag`."""
    TOKEN = 1
    """The newest token, whose key and value are not in the cache yet."""
    LENGTH = 2
    """Tokens in the cache, so the position of `TOKEN`."""
    LIMIT = 3
    """The row ends when LENGTH + 1, the tokens including the newest, reaches it."""
    SEED = 4
    """Two columns, low and high half: sampling depends only on them and the
    position."""
    TEMPERATURE = 6
    """Bits of an fp32; 0 is greedy. The next six are also fp32, unless they are
    integers."""
    TOP_K = 7
    """An integer; 0 for all tokens."""
    TOP_P = 8
    MIN_P = 9
    REPETITION = 10
    PRESENCE = 11
    FREQUENCY = 12
    MIN_LENGTH = 13
    """Tokens of prompt and completion before which no stop token may be sampled."""
    ADAPTER = 14
    """Integer index of the adapter among those of the model, from 1; 0 for none."""
    STOPS = 16
    """`NUM_STOPS` columns; -1 where there are fewer."""
    TABLE = 32
    """Pages in the order of their tokens. Later columns are undefined: a row must not
    write at LIMIT - 1 or after it."""


class RowFlag(enum.IntEnum):
    """The bits of `Column.FLAGS`."""

    LIVE = 1
    """The row is live. The device clears the bit when the row ends."""


class OutFlag(enum.IntEnum):
    """Flags of a sampled token, set by the device."""

    ENDED = 1
    """The row has ended with this token."""
    STOPPED = 2
    """... because it is a stop token."""
    NOT_FINITE = 4
    """The logits were not finite; the token is invalid."""
    DRAFTED = 8
    """There was a draft token at this position; a token follows if it was accepted."""


def float_bits(value: float) -> int:
    """The bits of the nearest finite fp32, as an int32.

    Example:
        >>> float_bits(1.0)
        1065353216
        >>> float_bits(1e300) == float_bits(_LARGEST)
        True
    """
    value = max(-_LARGEST, min(value, _LARGEST))
    return struct.unpack("<i", struct.pack("<f", value))[0]


type Change = tuple[int, int, int]
"""Row, column, value."""


def stop_row(row: int) -> Change:
    """The change that stops a row."""
    return (row, Column.FLAGS, 0)


def whole_row(c: Sequence) -> list[Change]:
    """The changes that make a row one of `c`, up to its page table.

    It is live at once if its next input token is known; otherwise the device sets token
    and flags at the end of the prefill.
    """
    assert c.slot is not None
    params, token = c.request.params, c.forced
    cells = {
        Column.FLAGS: 0 if token is None else RowFlag.LIVE,
        Column.TOKEN: token or 0,
        Column.LENGTH: c.kv,
        Column.LIMIT: c.limit,
        Column.TEMPERATURE: float_bits(params.temperature),
        Column.TOP_K: params.top_k or 0,
        Column.TOP_P: float_bits(params.top_p),
        Column.MIN_P: float_bits(params.min_p),
        Column.REPETITION: float_bits(params.repetition_penalty),
        Column.PRESENCE: float_bits(params.presence_penalty),
        Column.FREQUENCY: float_bits(params.frequency_penalty),
        Column.MIN_LENGTH: len(c.request.prompt) + params.min_tokens,
        Column.ADAPTER: c.adapter,
    }
    low_high = struct.unpack("<2i", struct.pack("<Q", c.seed))
    ends = ([*sorted(c.stops), *[-1] * NUM_STOPS])[:NUM_STOPS]
    several = {Column.SEED: low_high, Column.STOPS: ends}
    for first, values in several.items():
        cells |= {first + i: value for i, value in enumerate(values)}
    return [(c.slot, int(column), int(value)) for column, value in cells.items()]


def forced(c: Sequence) -> list[Change]:
    """The changes that let a row continue with a known token.

    It is live whatever was sampled before, even a stop token.
    """
    if (token := c.forced) is None:
        return []
    assert c.slot is not None
    return [
        (c.slot, int(Column.FLAGS), int(RowFlag.LIVE)),
        (c.slot, int(Column.TOKEN), token),
    ]


def table(c: Sequence) -> list[Change]:
    """The changes that add new pages to a page table on the device."""
    assert c.slot is not None
    return [(c.slot, Column.TABLE + i, c.pages[i]) for i in range(c.told, len(c.pages))]


class BatchRows[T]:
    """The owners of rows, the decode batch size, and rows to stop.

    Example:
        >>> slots = BatchRows[str]([2, 4])
        >>> slots.resize(3), slots.bucket
        (None, 4)
        >>> [slots.take(name) for name in "abc"]
        [0, 1, 2]
        >>> slots.free(0), slots.free(1)
        (None, None)
        >>> slots.resize(1), slots.resize(1), slots.bucket, slots.rows
        (None, [2, 1, 2, 3], 2, ['c', None, None, None])
    """

    def __init__(
        self,
        batches: abc.Sequence[int],
        moved: Callable[[T, int], None] | None = None,
    ) -> None:
        """Start with all rows free.

        Args:
            batches: Batch sizes, ascending; the last is S, rows on the device.
            moved: Called with an owner and its new row.
        """
        count = batches[-1]
        self.rows: list[T | None] = [None] * count
        self.bucket = batches[0]
        self._batches = batches
        self.num_used = 0
        self._moved = moved
        self._free = list(range(count))  # a heap
        self._stopped: set[int] = set()
        self._smaller = 0

    def take(self, owner: T) -> int:
        """Assign the lowest free row to the owner."""
        row = heapq.heappop(self._free)
        self.rows[row] = owner
        self.num_used += 1
        return row

    def free(self, row: int) -> None:
        """Free the row of an owner; the device must be told to stop it."""
        self.rows[row] = None
        self.num_used -= 1
        self._stopped.add(row)
        heapq.heappush(self._free, row)

    def take_stopped(self) -> list[int]:
        """Rows freed since the last call; the device may still decode them.

        Some have a new owner, and must be stopped unless the owner sets them anew.
        """
        rows = sorted(self._stopped)
        self._stopped.clear()
        return rows

    def resize(self, used: int) -> list[int] | None:
        """Choose the bucket for `used` rows, including those yet to be assigned.

        It grows at once, and shrinks when less was enough twice in succession.

        Returns:
            [S], the source row of each row; None if nothing moves.
        """
        wanted = bucket_of(used, self._batches)
        if wanted >= self.bucket:
            self.bucket, self._smaller = wanted, 0
            return None
        self._smaller += 1
        if self._smaller < 2:
            return None
        self.bucket, self._smaller = wanted, 0
        return self._compact()

    def _compact(self) -> list[int] | None:
        stay = list(range(len(self.rows)))
        source = stay.copy()
        for old in reversed(range(self.bucket, len(self.rows))):
            owner = self.rows[old]
            if owner is None:
                continue
            new = heapq.heappop(self._free)
            self.rows[new], self.rows[old] = owner, None
            source[new] = old
            # A row to be stopped is stopped in its new place; the copy in the old
            # place, which would go on by itself, is stopped too.
            (self._stopped.add if old in self._stopped else self._stopped.discard)(new)
            self._stopped.add(old)
            heapq.heappush(self._free, old)
            if self._moved is not None:
                self._moved(owner, new)
        return None if source == stay else source

    def owners(self) -> Iterable[T]:
        """The owners of rows, in row order."""
        return [owner for owner in self.rows[: self.bucket] if owner is not None]


class RowUpdates:
    """Collects changes of rows until they are sent."""

    def __init__(self, slots: BatchRows[Sequence]) -> None:
        self._slots = slots
        self._grown: list[Sequence] = []
        self.replaying: list[Sequence] = []
        """Preempted sequences that replay known tokens in the current step."""

    def grow(self, c: Sequence) -> None:
        """Record that the device's page table of `c` lacks pages, if it has a row."""
        self._grown.append(c)

    def take(self, placed: abc.Sequence[Sequence], tick: int) -> list[Change]:
        """The changes since the last call, no cell twice."""
        changes = []
        for row in self._slots.take_stopped():
            owner = self._slots.rows[row]
            if owner is None or owner.state is not SequenceStatus.DECODE:
                changes.append(stop_row(row))
        for c in placed:
            changes += whole_row(c)
            c.told = 0
        for c in self.replaying:
            if c.state is SequenceStatus.DECODE and c.placed < tick:
                changes += forced(c)
        for c in [*placed, *self._grown]:
            if c.state is SequenceStatus.DECODE:
                changes += table(c)
                c.told = len(c.pages)
        self._grown = []
        again = dict.fromkeys((*self.replaying, *placed))
        self.replaying = [
            c for c in again if c.state is SequenceStatus.DECODE and c.replays
        ]
        return changes
