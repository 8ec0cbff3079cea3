"""The race detector, with one access compared with all before it at once.

The stock detector takes one pair after another, which is most of the time of a kernel.
"""

import collections
import dataclasses
from typing import Any

import numpy as np
from jax._src.pallas.mosaic.interpret.race_detection_state import _ranges_overlap
from jax._src.pallas.mosaic_gpu.interpret import race_detection_state as stock

from tests.interpreter.devices import summary


class Accesses(list):
    """Accesses to a buffer: thread, clock, span and line; clocks also side by side."""

    def __init__(self):
        super().__init__()
        self._clocks = np.empty((0, 0), np.int32)  # (entries of a clock, room)

    def append(self, access: tuple) -> None:
        clock, count = access[1].clock, len(self)
        if count == self._clocks.shape[1]:
            more = np.empty((len(clock), 2 * count + 16), np.int32)
            if count:
                more[:, :count] = self._clocks
            self._clocks = more
        self._clocks[:, count] = clock
        super().append(access)

    def first_conflict(self, clock: Any, span: tuple) -> list[tuple]:
        """One that `clock` neither follows nor precedes, where the spans overlap."""
        if not self:
            return []
        apart = self._clocks[:, : len(self)] - clock.clock[:, None]
        ordered = (apart.min(axis=0) < 0) != (apart.max(axis=0) > 0)
        unordered = (self[i] for i in np.flatnonzero(~ordered))
        return [a for a in unordered if _ranges_overlap(span, a[2])][:1]


@dataclasses.dataclass
class RaceDetection(stock.GPURaceDetectionState):
    """The accesses to all buffers."""

    reads: dict = dataclasses.field(
        default_factory=lambda: collections.defaultdict(Accesses)
    )
    writes: dict = dataclasses.field(
        default_factory=lambda: collections.defaultdict(Accesses)
    )

    def check_read(self, thread, clock, buffer_key, rnge, source_info=None):
        access = (thread, clock, rnge.range, summary(source_info))
        self._check(buffer_key, access, "read", ["write"])
        self._check_ref_union(thread, clock, buffer_key, False, source_info)

    def check_write(self, thread, clock, buffer_key, rnge, source_info=None):
        access = (thread, clock, rnge.range, summary(source_info))
        self._check(buffer_key, access, "write", ["write", "read"])
        self._check_ref_union(thread, clock, buffer_key, True, source_info)

    def _check(self, key, access: tuple, kind: str, others: list[str]) -> None:
        """Add an access, and print what it races with, one of each of the others."""
        accesses = {"read": self.reads, "write": self.writes}
        _, clock, span, _ = access
        with self.lock:
            found = [
                (other, conflict)
                for other in others
                for conflict in accesses[other][key].first_conflict(clock, span)
            ]
            accesses[kind][key].append(access)
            self.races_found |= bool(found)
        for each in found:
            print("RACE DETECTED")
            for what, (thread, clock, span, line) in ((kind, access), each):
                print(f"  {what} of {key}[{span}] from {thread}, {line}")
                print(f"  clock: {clock.clock}")
