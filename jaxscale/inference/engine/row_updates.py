"""What the device has to be told of its rows in a tick."""

from collections.abc import Sequence

from jaxscale.inference.engine.batch_rows import (
    Change,
    Slots,
    forced,
    stop_row,
    table,
    whole_row,
)
from jaxscale.inference.engine.scheduler_output import Continuation, State


class RowUpdates:
    """Collects the changes of rows until they are sent."""

    def __init__(self, slots: Slots[Continuation]) -> None:
        """Nothing has changed.

        Args:
            slots: The owners of the rows.
        """
        self._slots = slots
        self._grown: list[Continuation] = []
        self.replaying: list[Continuation] = []
        """Those that were preempted and draw what is known in the present tick."""

    def grow(self, c: Continuation) -> None:
        """Note that the table of `c` on the device lacks pages, if it has a row."""
        self._grown.append(c)

    def take(self, placed: Sequence[Continuation], tick: int) -> list[Change]:
        """The changes since the last call, no cell twice.

        Args:
            placed: Those that go live in this tick.
            tick: Its number.
        """
        changes = []
        for row in self._slots.take_stopped():
            owner = self._slots.rows[row]
            if owner is None or owner.state is not State.DECODE:
                changes.append(stop_row(row))
        for c in placed:
            changes += whole_row(c)
            c.told = 0
        for c in self.replaying:
            if c.state is State.DECODE and c.placed < tick:
                changes += forced(c)
        for c in [*placed, *self._grown]:
            if c.state is State.DECODE:
                changes += table(c)
                c.told = len(c.pages)
        self._grown = []
        again = dict.fromkeys((*self.replaying, *placed))
        self.replaying = [c for c in again if c.state is State.DECODE and c.replays]
        return changes
