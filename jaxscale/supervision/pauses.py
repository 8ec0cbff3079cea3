"""How much of the time a process is not run, though it wants to.

A rank that is stopped, throttled or swapped out is seen nowhere else: its own clocks
stop with it, the others wait in a collective, and all end their steps together. A
thread that sleeps for a moment notices by how much it comes late, whatever the process
does meanwhile.
"""

import collections
import statistics
import threading
import time
from collections.abc import Callable


_SLEEP_SECONDS = 0.01
_BLOCK_SECONDS, _BLOCKS, _FEWEST = 2.0, 6, 3
# Less is what a thread waits for the lock of the interpreter and for a core.
_LEAST, _MOST = 0.1, 0.99


class Pauses:
    """Follows this process from its first use on.

    The time is divided into blocks of 2 seconds, and the median of the last six counts:
    a single halt, of a full disk or a collection of garbage, is in one of them.

    Example:
        >>> pauses, at = Pauses(), 0.0
        >>> for _ in range(1000):  # 10 ms of sleep take 20
        ...     pauses.woke(at, at + 0.02)
        ...     at += 0.02
        >>> round(pauses.factor(), 2)
        2.0
    """

    def __init__(self) -> None:
        """Begin without a thread."""
        self._slept = self._late = 0.0
        self._blocks: collections.deque[float] = collections.deque(maxlen=_BLOCKS)
        self._thread: threading.Thread | None = None

    def start(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Follow this process on a thread, once."""

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
        """A sleep has ended that began at `began`; both in seconds."""
        self._slept += now - began
        self._late += max(now - began - _SLEEP_SECONDS, 0.0)
        if self._slept >= _BLOCK_SECONDS:
            self._blocks.append(self._late / self._slept)
            self._slept = self._late = 0.0

    def factor(self) -> float:
        """How many times as long as it needs this process takes; 0 while unknown."""
        blocks = list(self._blocks)
        if len(blocks) < _FEWEST:
            return 0.0
        share = min(statistics.median(blocks), _MOST)
        return 1 / (1 - share) if share >= _LEAST else 1.0
