"""Signals that stop a run after its current step."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.experimental import multihost_utils


@contextlib.contextmanager
def stop_on_signal() -> Iterator[Callable[[int], bool]]:
    """Yield a function that says after each step whether to stop.

    In a single process the first SIGTERM or SIGINT requests the stop and the second
    acts as usual. With several processes a SIGTERM to one is enough: the preemption
    service of `jax.distributed` makes all of them stop after the same step, so each
    must ask after each step. Outside of the main thread Python allows no handlers, and
    the answer is always no.
    """
    if jax.process_count() > 1:
        yield multihost_utils.reached_preemption_sync_point
        return
    event = threading.Event()
    previous: dict[int, Any] = {}

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    def handle(number: int, frame: Any) -> None:
        event.set()
        restore()

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            previous[number] = signal.signal(number, handle)
    try:
        yield lambda step: event.is_set()
    finally:
        restore()
