"""How often threads of this process take turns in Python."""

import contextlib
import sys
import threading
from collections.abc import Iterator


_SECONDS = 0.0005
# Python's default of 5 ms is half a step of the engine.

_lock = threading.Lock()
_users = 0
_before = 0.0


@contextlib.contextmanager
def short_switch_interval() -> Iterator[None]:
    """Threads take turns more often in the block.

    Blocks may overlap, on any threads: the end of the last one restores what the first
    one found.

    Example:
        >>> before = sys.getswitchinterval()
        >>> with short_switch_interval():
        ...     sys.getswitchinterval() < before
        True
        >>> sys.getswitchinterval() == before
        True
    """
    global _users, _before
    with _lock:
        if not _users:
            _before = sys.getswitchinterval()
            sys.setswitchinterval(min(_SECONDS, _before))
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users:
                sys.setswitchinterval(_before)
