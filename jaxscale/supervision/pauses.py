"""How much of the time a process is paused although it wants to run.

A rank that is stopped, throttled or swapped out shows nowhere else: its own clocks stop
with it, the others wait in a collective, and all end their steps together. A thread
that sleeps briefly notices by how much it wakes late, whatever the process does.
"""

import collections
import statistics
import threading
import time
from collections.abc import Callable


_SLEEP_SECONDS = 0.01
_BLOCK_SECONDS, _BLOCKS, _FEWEST = 2.0, 6, 3
# Less is normal waiting for the GIL and for a core.
_LEAST, _MOST = 0.1, 0.99


class Pauses:
    """Measures this process from its first use on.

    Time is divided into blocks of 2 seconds, and the median of the last six counts: a
    single pause, by a full disk or garbage collection, is in one of them.

    Example:
        >>> pauses, at = Pauses(), 0.0
        >>> for _ in range(1000):  # 10 ms of sleep take 20
        ...     pauses.woke(at, at + 0.02)
        ...     at += 0.02
        >>> round(pauses.factor(), 2)
        2.0
    """

    def __init__(self) -> None:
        """Start without a thread."""
        self._slept = self._late = 0.0
        self._blocks: collections.deque[float] = collections.deque(maxlen=_BLOCKS)
        self._thread: threading.Thread | None = None

    def start(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Start the thread, once."""

        def follow() -> None:
            before = clock()
            while True:
                time.sleep(_SLEEP_SECONDS)
                before, began = clock(), before
                self.woke(began, before)

        if self._thread is None:
            self._thread = threading.Thread(
                target=follow, name="jaxscale-pauses", daemon=True
            )
            self._thread.start()

    def woke(self, began: float, now: float) -> None:
        """A sleep from `began` has ended at `now`, in seconds."""
        self._slept += now - began
        self._late += max(now - began - _SLEEP_SECONDS, 0.0)
        if self._slept >= _BLOCK_SECONDS:
            self._blocks.append(self._late / self._slept)
            self._slept = self._late = 0.0

    def factor(self) -> float:
        """Slowdown of this process by pauses, as a factor; 0 while unknown."""
        blocks = list(self._blocks)
        if len(blocks) < _FEWEST:
            return 0.0
        share = min(statistics.median(blocks), _MOST)
        return 1 / (1 - share) if share >= _LEAST else 1.0
