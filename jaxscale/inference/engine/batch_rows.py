"""The rows of the decoded batch: what a row holds on the device, and who has which.

A request that is being decoded has a slot, a row of an int32 array on the device. Only
the first `bucket` rows are decoded, a power of two, because each size of batch is a
program of its own. When at most half of them are in use, the rows behind move into the
holes before them (Flover's reordering, of rows instead of caches) and the bucket
shrinks.
"""

import enum
import heapq
import struct
from collections import abc
from collections.abc import Callable, Iterable

from jaxscale.inference.engine.sequence import Sequence, SequenceStatus


SMALLEST_BUCKET = 2
"""XLA turns the product of one row with the table of tokens into fp32 copies of it."""

NUM_STOPS = 8
"""Stop tokens that a row has room for; the scheduler knows of any others."""


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
    """The row ends when LENGTH + 1, the tokens with the newest, reaches it."""
    SEED = 4
    """Two columns, low and high half: draws depend on them and the position alone."""
    TEMPERATURE = 6
    """Bits of an fp32; 0 is greedy. So are the next six where they are no integers."""
    TOP_K = 7
    """An integer; 0 for all tokens."""
    TOP_P = 8
    MIN_P = 9
    REPETITION = 10
    PRESENCE = 11
    FREQUENCY = 12
    MIN_LENGTH = 13
    """Tokens of prompt and completion before which no stop token may be drawn."""
    ADAPTER = 14
    """An integer, the place of the adapter among those of the model from 1 on; 0 for
    none."""
    STOPS = 16
    """`NUM_STOPS` columns; -1 where there are fewer."""
    TABLE = 32
    """Pages in the order of their tokens. Columns behind those that were set mean
    nothing: a row must not write at LIMIT - 1 or behind it."""


class RowFlag(enum.IntEnum):
    """The bits of `Column.FLAGS`."""

    LIVE = 1
    """The row is decoded. The device clears it where the row ends."""


class OutFlag(enum.IntEnum):
    """Flags of a drawn token, set by the device."""

    ENDED = 1
    """The row has ended with this token."""
    STOPPED = 2
    """... because it is a stop token."""
    NOT_FINITE = 4
    """The logits were not finite; the token means nothing."""
    DRAFTED = 8
    """A draft stood in this place; a token follows it if it was right."""


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

    It is live at once where the token that it goes on with is known; otherwise the
    device sets token and flags at the end of the prefill.
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
    """The changes that let a row go on with a token that is known.

    It is live whatever was drawn before: that could have been one that stops.
    """
    if (token := c.forced) is None:
        return []
    assert c.slot is not None
    return [
        (c.slot, int(Column.FLAGS), int(RowFlag.LIVE)),
        (c.slot, int(Column.TOKEN), token),
    ]


def table(c: Sequence) -> list[Change]:
    """The changes that add pages which the device does not know yet to a table."""
    assert c.slot is not None
    return [(c.slot, Column.TABLE + i, c.pages[i]) for i in range(c.told, len(c.pages))]


class BatchRows[T]:
    """The owners of rows, the number of decoded rows, and those that must be stopped.

    Example:
        >>> slots = BatchRows[str](4)
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
        self, count: int, moved: Callable[[T, int], None] | None = None
    ) -> None:
        """All rows free.

        Args:
            count: S, rows on the device.
            moved: Called with an owner and its new row.
        """
        self.rows: list[T | None] = [None] * count
        self.bucket = SMALLEST_BUCKET
        self.num_used = 0
        self._moved = moved
        self._free = list(range(count))  # a heap
        self._stopped: set[int] = set()
        self._half_empty = 0

    def take(self, owner: T) -> int:
        """The lowest free row, now the owner's."""
        row = heapq.heappop(self._free)
        self.rows[row] = owner
        self.num_used += 1
        return row

    def free(self, row: int) -> None:
        """Take a row from its owner; the device must be told to stop it."""
        self.rows[row] = None
        self.num_used -= 1
        self._stopped.add(row)
        heapq.heappush(self._free, row)

    def take_stopped(self) -> list[int]:
        """Rows that were left since the last call; the device may still decode them.

        Some have a new owner, and need stopping unless the owner sets them anew.
        """
        rows = sorted(self._stopped)
        self._stopped.clear()
        return rows

    def resize(self, used: int) -> list[int] | None:
        """Choose the bucket for `used` rows, those yet to be taken among them.

        It grows at once, and shrinks when half of it was free twice in a row.

        Returns:
            [S], the row that each row is taken from; None where nothing moves.
        """
        wanted = max(SMALLEST_BUCKET, 1 << (used - 1).bit_length() if used else 0)
        if wanted >= self.bucket:
            self.bucket, self._half_empty = wanted, 0
            return None
        self._half_empty += 1
        if self._half_empty < 2:
            return None
        self.bucket, self._half_empty = wanted, 0
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
            # The row is stopped in its new place if it was to be in the old one, where
            # a copy stays that would go on by itself.
            (self._stopped.add if old in self._stopped else self._stopped.discard)(new)
            self._stopped.add(old)
            heapq.heappush(self._free, old)
            if self._moved is not None:
                self._moved(owner, new)
        return None if source == stay else source

    def owners(self) -> Iterable[T]:
        """Everyone who has a row, by rows."""
        return (owner for owner in self.rows[: self.bucket] if owner is not None)


class RowUpdates:
    """Collects the changes of rows until they are sent."""

    def __init__(self, slots: BatchRows[Sequence]) -> None:
        """Nothing has changed.

        Args:
            slots: The owners of the rows.
        """
        self._slots = slots
        self._grown: list[Sequence] = []
        self.replaying: list[Sequence] = []
        """Those that were preempted and draw what is known in the present tick."""

    def grow(self, c: Sequence) -> None:
        """Note that the table of `c` on the device lacks pages, if it has a row."""
        self._grown.append(c)

    def take(self, placed: abc.Sequence[Sequence], tick: int) -> list[Change]:
        """The changes since the last call, no cell twice.

        Args:
            placed: Those that go live in this tick.
            tick: Its number.
        """
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
